"""``select_topk`` where scores change between its sweeps, as a caller's mistake may let them.

What is selected then is nobody's claim; but no address depends on what was counted before: nothing
is written outside a row's results, no position is one that the row does not have, all ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from snapmla.testing.workloads import select_topk as workload
from softgpu import Options, using
from tests.support.needs import needs_kernels
from tests.support.rows import kernel

pytestmark = needs_kernels
KEPT, ONE, PAIR = (64, 8, 2), (64, 0, 1), (64, 0, 2)  # threads, keys of a thread, CTAs a row
GAP = 8  # words between rows of results
DRAW = np.random.default_rng(3)
# the number of loads so far -> scores of one
STYLES: dict[str, Callable[[int, tuple[int, ...]], Any]] = {
    "noise": lambda _, size: DRAW.normal(size=size),
    "rising": lambda loads, size: np.full(size, loads),
    "falling": lambda loads, size: np.full(size, -loads),
    "few_then_all": lambda loads, size: np.where(DRAW.random(size) < loads * 2e-3, np.nan, -1.0),
    "all_then_none": lambda loads, size: np.full(size, 1.0 if loads < 90 else -np.inf),
    "ties": lambda loads, size: np.full(size, (loads // 7) % 2),
}


class Changing:
    """Gives other scores in every load of a tensor (``softgpu.options.Observer``)."""

    def __init__(self, logits: torch.Tensor, style: str) -> None:
        self.begin = logits.data_ptr()
        self.end = self.begin + logits.numel() * logits.element_size()
        self.style, self.loads = STYLES[style], 0

    def launched(self, machine: Any) -> None:
        plain = machine.memory.load

        def load(addr: Any, m: Any, dtype: Any, n: int) -> Any:
            got = plain(addr, m, dtype, n)
            lanes = (addr >= self.begin) & (addr < self.end)
            if lanes.any():
                self.loads += 1
                got = np.array(got)
                made = np.asarray(self.style(self.loads, got.shape), np.float32).view(np.uint32)
                got[lanes] = made.astype(got.dtype)[lanes]
            return got

        machine.memory.load = load

    def started(self, warp: Any) -> None:
        """Warps stay as they are."""


def check(shape: tuple[int, int, int], style: str, columns: int, k: int) -> None:
    """Raises unless a launch, whose every load of scores gives others, writes what it may."""
    lengths = torch.tensor([columns - 5]).int()
    logits = torch.zeros(1, columns)
    table = torch.arange(columns // 64 + 1).int().view(1, -1)
    given = workload.laid_out(logits, lengths, k, table)
    memory = torch.full((3, k + GAP), -7).int()
    given["out"] = memory[1:2, :k]
    changing = Changing(logits, style)
    call = kernel("sm_90a", op="select_topk", threads=shape[0], keys=shape[1], cluster=shape[2])
    # bounds are checked all the same; that two positions take one place then is a race of no claim
    with using(Options(hazards="off", observer=changing, max_instructions=500_000)):
        call(*given.values())
    assert changing.loads > columns // 128
    row = given["out"].clone()
    assert (row >= -1).all() and (row < lengths).all()
    given["out"].fill_(-7)
    assert (memory == -7).all()
    assert given["counts"].tolist() == [k]


def cases() -> Iterator[Any]:
    """Everyday: scores of each load anew; more and more of them high."""
    for shape in (ONE, KEPT, PAIR):
        for style in STYLES:
            everyday = shape == PAIR and style in ("noise", "few_then_all")
            marks = () if everyday else (pytest.mark.whole_matrix,)
            yield pytest.param(shape, style, marks=marks)


@pytest.mark.parametrize(("shape", "style"), list(cases()))
def test_nothing_is_out_of_bounds(shape: tuple[int, int, int], style: str) -> None:
    """Rows that registers do not hold, but for the one that keeps all; more than lists hold."""
    check(shape, style, {PAIR: 1500, KEPT: 1021}.get(shape, 2300), 100)


@pytest.mark.whole_matrix
def test_more_than_counts_hold() -> None:
    """All of thousands of columns are above the threshold: sums of them leave their 12 bits."""
    check(PAIR, "rising", 16800, 2048)
    check(ONE, "rising", 8400, 2048)

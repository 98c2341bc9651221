"""``select_topk`` of variants that keep no keys: rows that one CTA keeps after all, whatever the
cluster, and rows that every sweep reads again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsl_kernels.formats.topk_share import share
from snapmla.testing import topk_reference
from snapmla.testing.workloads import select_topk as workload
from softgpu import Options, using
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import device_of, kernel

pytestmark = needs_kernels
ONE, PAIR, FOUR, EIGHT = ((64, 0, cluster) for cluster in (1, 2, 4, 8))  # threads, keys, CTAs a row
WHOLE = [pytest.param(x, marks=pytest.mark.whole_matrix) for x in (ONE, FOUR, EIGHT, (128, 0, 1))]
DISTRIBUTIONS = list(topk_reference.DISTRIBUTIONS)
KEPT = 16  # keys of a thread where one CTA keeps a row


def right(
    target: str,
    shape: tuple[int, int, int],
    logits: Tensor,
    lengths: list[int],
    k: int,
    table: Tensor | None = None,
    starts: Tensor | None = None,
    options: Options | None = None,
) -> None:
    """Raises unless one launch, with the hazard check on, is what a stable sort gives; ``table``:
    one row, of all rows of scores."""
    threads, keys, cluster = shape
    call = kernel(target, op="select_topk", threads=threads, keys=keys, cluster=cluster)
    counts, next_n = torch.tensor(lengths).int(), 1 if table is None else len(lengths)
    want = topk_reference.select_topk_reference(
        logits, counts, k, block_table=table, row_starts=starts, next_n=next_n
    )
    device = device_of(target)
    pages, begins = (None if x is None else x.to(device) for x in (table, starts))
    made = workload.laid_out(logits.to(device), counts.to(device), k, pages, begins, next_n)
    with using(options or Options(hazards="raise")):
        call(*made.values())
    for mine, each in zip((made["out"], made["counts"]), want, strict=True):
        assert torch.equal(mine.cpu(), each)


def apart(rows: Tensor, step: int, begin: int) -> Tensor:
    """The same rows, ``step`` elements apart, the first ``begin`` elements behind 16 bytes, with
    infinities around them."""
    memory = torch.full((begin + len(rows) * step + 4,), torch.inf)
    view = memory.as_strided(rows.shape, (step, 1), begin)
    view.copy_(rows)
    return view


def rows_of(shape: tuple[int, int, int], everyday: bool = False) -> tuple[Tensor, list[int]]:
    """(scores, lengths): about what one CTA keeps, and longer; ties that overflow the lists."""
    kept = shape[0] * KEPT
    longest = min(kept + 1100 * shape[2], share(*shape) * shape[2] - 3)
    cases = [("normal", longest), ("close", kept - 3), ("zeros", longest - 1), ("special", 60)]
    if not everyday:
        cases += [
            ("special", longest), ("lowest", kept + 1), ("normal", kept + 1), ("zeros", kept),
            ("signed_zeros", kept - 1), ("special", kept // 3), ("close", kept + 300),
        ]  # fmt: skip
    rows = [topk_reference.scores(name, 1, longest, i)[0] for i, (name, _) in enumerate(cases)]
    return torch.stack(rows), [length for _, length in cases]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [PAIR, *WHOLE])
def test_rows_of_all_lengths(target: str, shape: tuple[int, int, int]) -> None:
    """In one launch, to slots; rows begin anywhere between 16 bytes."""
    found, lengths = rows_of(shape, everyday=shape == PAIR)
    columns = found.shape[1]
    table = torch.randperm(columns // 64 + 1).int().view(1, -1)
    right(target, shape, apart(found, columns + 2, 3), lengths, 100, table)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("shape", [ONE, PAIR, EIGHT])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_distribution(shape: tuple[int, int, int], name: str) -> None:
    """Kept by one CTA and streamed, begun anywhere; k from 1 to 2048, -1 behind short rows."""
    kept = shape[0] * KEPT
    columns = 2 * kept + 77
    lengths = [columns - 4, kept + 1, kept, kept - 3, 70, 0]
    starts = torch.tensor([0, 3, 1, 3, columns - 70, 5]).int()
    for k in (1, 64, 2048):
        found = topk_reference.scores(name, len(lengths), columns, k)
        found = topk_reference.padded(found, torch.tensor(lengths), starts)
        right("sm_90a", shape, found, lengths, k, starts=starts)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("seed", range(8))
def test_schedules(seed: int) -> None:
    """The same bits whenever warps run."""
    options = Options(asynchronous=("late", "early")[seed % 2], hazards="raise", seed=seed)
    for shape in (ONE, PAIR):
        right("sm_90a", shape, *rows_of(shape), 60, options=options)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", ["normal", "zeros", "rising"])
def test_what_hosts_take(name: str) -> None:
    """A CTA of the matrix: rows that it keeps, rows that it streams, as many as it holds."""
    shape, lengths = (1024, 0, 1), [16384, 16385, 40000, 5000] if name == "normal" else [33000]
    found = topk_reference.scores(name, len(lengths), 40001, 2)
    right("sm_90a", shape, apart(found, 40001, 0), lengths, 2048)
    if name == "normal":
        longest = share(*shape) - 3
        found = topk_reference.scores(name, 1, longest, 2)
        right("sm_90a", shape, apart(found, longest, 3), [longest], 2048)

"""``records_to_plan`` against its rule in Python, entry for entry, whatever the records hold."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from dsl_kernels.formats.dims import ITEM_WORDS
from dsl_kernels.formats.sched_meta import META_WORDS, MOST_PARTS
from snapmla.testing.reference_plan import records_reference
from softgpu import Options, using
from tests.support.needs import TARGETS, needs_kernels
from tests.support.records import drawn, flash_mla_records
from tests.support.rows import device_of, kernel

pytestmark = needs_kernels
UNTOUCHED = -7


def check(
    target: str,
    records: Sequence[Sequence[int]],
    lengths: Sequence[int],
    max_tokens: int,
    rows: int = 1,
    heads: int = 1,
    room: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Runs the kernel; every entry that it must write is the rule's, and no other is written.

    ``room``: entries behind each table.  Returns what was written: the next launch may begin
    before this one ends, so none of its memory may lie there (the hazard check knows addresses).
    """
    device, b, parts = device_of(target), len(lengths), len(records)

    def table(*shape: int) -> torch.Tensor:
        return torch.full(shape, UNTOUCHED, dtype=torch.int32, device=device)

    want = records_reference(records, lengths, max_tokens, 64, rows, heads)
    assert len(want.work_items) <= heads * (b + parts - 1)
    assert want.split_begin[-1] <= heads * 2 * (parts - 1)
    wide = table(parts, META_WORDS + room)  # rows of a larger table
    wide[:, :META_WORDS] = torch.tensor(records, dtype=torch.int32)
    own = torch.tensor(lengths, dtype=torch.int32, device=device)
    items = table(heads * (b + parts - 1) + room, ITEM_WORDS)
    begin, split, planned = table(heads * parts + 1), table(heads * b + 1), table(heads * b)
    places = table(b + 1)
    kernel(target, op="records_to_plan")(
        wide[:, :META_WORDS], own, places, items, begin, split, planned, max_tokens, 64,
        rows, heads,
    )  # fmt: skip
    assert [tuple(x) for x in items[: len(want.work_items)].tolist()] == want.work_items
    assert (items[len(want.work_items) :] == UNTOUCHED).all()
    assert begin.tolist() == want.part_begin
    assert split.tolist() == want.split_begin
    assert planned.tolist() == [n for n in lengths for _ in range(heads)]
    return places, items, begin, split, planned


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("heads", "cases"),
    [
        (1, 30),
        (3, 10),
        pytest.param(1, 200, marks=pytest.mark.whole_matrix),
        pytest.param(3, 200, marks=pytest.mark.whole_matrix),
    ],
)
def test_any_records(target: str, heads: int, cases: int) -> None:
    """Random words, small numbers, FlashMLA's own records, fresh, stale and cut off."""
    g, written = random.Random(heads), ()
    with using(Options(hazards="raise")):
        for case in range(cases):
            records, lengths = drawn(g, case)
            rows = g.choice([1, 16, 130])
            written = check(target, records, lengths, 2048, rows, heads, case % 3)
            assert written


@pytest.mark.parametrize("target", TARGETS)
def test_by_hand(target: str) -> None:
    """vLLM's one part, whose end is in the wrong unit; cuts at one place; an empty line."""
    one = [[0, 0, 6, 9999, 0, 0, 0, 0]]
    check(target, one, [100] * 7, 4096)
    check(target, one, [0, 0], 64)
    same = [[0, 0] + [0] * 6, *([[1, 2] + [0] * 6] * 3), [1, 3] + [9] * 6]
    check(target, same, [64, 640, 0], 4096, 4)
    check(target, [[9, 9] + [0] * 6] * 4, [5000, 1], 4096, 4, 2)


@pytest.mark.parametrize("target", TARGETS)
def test_more_than_threads(target: str) -> None:
    """More requests, and as many parts, as are passed through in several rounds."""
    g = random.Random(5)
    lengths = [g.choice([0, 1, 64, g.randint(0, 4000)]) for _ in range(1030)]
    check(target, flash_mla_records(lengths, 132), lengths, 2048, 16)
    many = [[g.randint(0, 1030), g.randint(0, 60)] + [0] * 6 for _ in range(MOST_PARTS)]
    check(target, sorted(many), lengths, 4096)

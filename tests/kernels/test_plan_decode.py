"""``plan_decode`` against its mirror in Python, entry for entry."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsl_kernels.dims import TOKEN_TILE
from snapmla.plan import MAX_COST
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import ONE_ROW, Queries, plan_reference
from tests.support.lengths import many_lengths
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import device_of, kernel

pytestmark = needs_kernels
UNTOUCHED = -7


def check_plan(
    target: str,
    lengths: list[int],
    parts: int,
    overhead: int,
    cap: int = 2**20,
    split: int = 0,
    queries: Queries = ONE_ROW,
) -> None:
    """Runs the kernel; every entry that it must write is the mirror's, and no other is written."""
    device = device_of(target)
    if not queries.unit_rows:
        queries = dataclasses.replace(queries, unit_rows=queries.rows)
    want = plan_reference(lengths, parts, TOKEN_TILE, overhead, cap, split, queries)
    pieces = -(-len(want.work_items) // max(queries.capacity(len(lengths)), 1)) if split else 0
    tables = PlanTables.empty(len(lengths), parts, queries, pieces, UNTOUCHED, device)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    tables.fill(
        kernel(target, op="plan_decode"), seqlens, queries, (cap, TOKEN_TILE, overhead, split)
    )
    assert tables.differs(want, lengths) == []
    assert (tables.work_items[len(want.work_items) :] == UNTOUCHED).all()
    assert (tables.units[len(want.units) :] == UNTOUCHED).all()
    for name in ("part_begin", "split_begin", "unit_begin", "row_limits"):
        assert len(getattr(tables, name)) == len(getattr(want, name)), name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("lengths", "parts", "overhead"),
    [
        ([131072], 132, 5),
        ([1000, 0, 64, 65, 5000], 4, 5),
        ([0], 3, 5),
        ([0, 0, 0], 2, 0),
        ([64] * 7, 132, 5),
        ([-3, 2**31 - 1, 1], 33, 5),
        ([4097, 0, 1, 63, 64, 65] * 4, 66, 40),
        ([100] * 9, 1, 3),
    ],
)
def test_plan_kernel(target: str, lengths: list[int], parts: int, overhead: int) -> None:
    check_plan(target, lengths, parts, overhead)
    check_plan(target, lengths, parts, overhead, split=16)


QUERIES = {
    "in step": Queries(16, 9, 144, causal=True),
    "balanced": Queries(16, 9, 16, causal=True),
    "tokens longer than the sequence": Queries(3, 200, 16, causal=True),
    "not causal": Queries(20, 4, 64),
    "ragged": Queries(16, 9, 64, True, [0, 1, 1, 2, 8, 9]),
    "nobody asks": Queries(16, 9, 64, True, [0] * 6),
    "overlapping": Queries(16, 9, 16, True, [5, 9, 0, 7, -3, 2**31 - 1]),
    "limits": Queries(3, 2, 2, True, None, [*range(-2, 2), 60, 70, 5000, 2**31 - 1, 64, 3]),
    "ragged limits": Queries(5, 9, 16, False, [1, 4, 4, 5, 8, 9], [70, 0, 64, 65, 1, 9, -1, 3, 5]),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", QUERIES)
def test_plan_kernel_of_units(target: str, name: str) -> None:
    lengths = [70, 0, 4097, 64, 100]
    for parts, overhead, split in ((4, 5, 0), (33, 0, 0), (3, 1, 7)):
        check_plan(target, lengths, parts, overhead, 4096, split, QUERIES[name])


@pytest.mark.parametrize("target", TARGETS)
def test_plan_kernel_random(target: str) -> None:
    g = torch.Generator().manual_seed(3)
    for _ in range(400 if target == "cuda" else 12):
        b = int(torch.randint(1, 24, (), generator=g))
        lengths = (torch.rand(b, generator=g) ** 4 * 20000).int().tolist()
        parts, overhead = (int(torch.randint(lo, 40, (), generator=g)) for lo in (1, 0))
        split = int(torch.randint(0, 3, (), generator=g)) * 7
        check_plan(target, lengths, parts, overhead, split=split)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_plan_kernel_many_sequences(target: str) -> None:
    """More sequences, or more units, than one chunk of shared memory holds."""
    g = torch.Generator().manual_seed(4)
    lengths = (torch.rand(1030, generator=g) ** 6 * 9000).int().tolist()
    for parts, overhead, split in ((132, 5, 0), (132, 12, 0), (7, 3, 20)):
        check_plan(target, lengths, parts, overhead, split=split)
    counts = torch.randint(0, 40, (101,), generator=g)
    counts[0] = 0
    begins = counts.cumsum(0).tolist()
    rows = torch.randint(-5, 9000, (begins[-1] + 7,), generator=g).tolist()
    for limits, split in ((None, 0), (rows, 20)):
        queries = Queries(5, begins[-1] + 7, 16, True, begins, limits)
        check_plan(target, lengths[:100], 40, 5, split=split, queries=queries)


@settings(max_examples=60, deadline=None)
@given(
    lengths=many_lengths,
    parts=st.sampled_from([1, 2, 7, 66, 132, 300]),
    overhead=st.sampled_from([0, 1, 4, 17]),
    max_tokens=st.sampled_from([100, 8192, 131072]),
    split=st.sampled_from([0, 0, 1, 16, 4096]),
)
@example(lengths=[64, 64, 0], parts=2, overhead=0, max_tokens=8192, split=1)  # begins at the end
def test_kernel_equals_reference(
    lengths: list[int], parts: int, overhead: int, max_tokens: int, split: int
) -> None:
    if split == 1 and max_tokens > 8192:
        split = 5  # tens of thousands of items say nothing new
    check_plan("sm_90a", lengths, parts, overhead, cap=max_tokens, split=split)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), parts=st.sampled_from([1, 3, 66]), split=st.sampled_from([0, 0, 2]))
def test_kernel_equals_reference_for_any_queries(
    data: st.DataObject, parts: int, split: int
) -> None:
    lengths = data.draw(st.lists(st.integers(-3, 700), min_size=1, max_size=9))
    ragged, heads = data.draw(st.booleans()), data.draw(st.sampled_from([1, 3, 16]))
    s_q = data.draw(st.integers(1, 40))
    tokens = s_q if ragged else s_q * len(lengths)
    size = len(lengths) + 1
    begins = st.lists(st.integers(-2, s_q + 2), min_size=size, max_size=size)
    limits = st.lists(st.integers(-5, 800), min_size=tokens, max_size=tokens)
    anyhow = data.draw(st.booleans())
    queries = Queries(
        heads, s_q, data.draw(st.sampled_from([16, 64, 2048])), data.draw(st.booleans()),
        data.draw(begins.map(lambda x: x if anyhow else sorted(x))) if ragged else None,
        data.draw(limits) if data.draw(st.booleans()) else None,
    )  # fmt: skip
    check_plan("sm_90a", lengths, parts, data.draw(st.sampled_from([0, 3])), 640, split, queries)


def test_the_largest_batch_that_may_be_planned() -> None:
    """Every length at its most, in one part and in several: still entry for entry the mirror's."""
    batch, tokens = 500, 64 * (MAX_COST // 500 - 6)
    lengths = [2**31 - 1] * batch
    for parts in (1, 3):
        check_plan("sm_90a", lengths, parts, 6, cap=tokens)

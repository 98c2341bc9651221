"""``plan_decode`` against its mirror in Python, entry for entry."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsl_kernels.formats.dims import TOKEN_TILE
from snapmla.dense.plan_decode import MAX_COST
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import BALANCE, ONE_ROW, Cuts, Queries, plan_reference
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
    cuts: Cuts = BALANCE,
) -> None:
    """Runs the kernel; every entry that it must write is the mirror's, and no other is written."""
    device = device_of(target)
    if not queries.unit_rows:
        queries = dataclasses.replace(queries, unit_rows=queries.rows)
    want = plan_reference(lengths, parts, TOKEN_TILE, overhead, cap, split, queries, cuts)
    pieces = -(-len(want.work_items) // max(queries.capacity(len(lengths)), 1)) if split else 0
    tables = PlanTables.empty(
        len(lengths), parts, queries, pieces, UNTOUCHED, device, cuts.max_stretches
    )
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    numbers = (cap, TOKEN_TILE, overhead, split)
    tables.fill(kernel(target, op="plan_decode"), seqlens, queries, numbers, cuts)
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


FP8_16_ROWS = Cuts(tile_ns=870, read_ns=9)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("lengths", "parts", "cuts", "pieces"),
    [
        # six units of three tiles: two tiles sooner cost more than a merge
        ([192] * 6, 132, Cuts(tile_ns=870, read_ns=9), 18),
        ([128] * 6, 132, FP8_16_ROWS, 6),
        ([128] * 6, 132, BALANCE, 12),
        # 64 parts saturate the memory: 128 read no faster
        ([1024] * 64, 132, Cuts(tile_ns=1190, read_ns=17), 64),
        ([16384] * 64, 132, Cuts(tile_ns=1190, read_ns=17), 192),
        # of 200 units two a part, none cut; nobody has more than 512 weighed
        ([128] * 200, 132, FP8_16_ROWS, 200),
        ([128] * 513, 132, FP8_16_ROWS, None),
        ([0, 0, 70, 0], 4, FP8_16_ROWS, 4),
    ],
)
def test_units_stay_whole_where_cuts_do_not_pay(
    target: str, lengths: list[int], parts: int, cuts: Cuts, pieces: int | None
) -> None:
    queries = Queries(16, 1, 16)
    plan = plan_reference(lengths, parts, TOKEN_TILE, 6, queries=queries, cuts=cuts)
    if pieces is not None:
        assert len(plan.work_items) == pieces
    else:
        assert plan == plan_reference(lengths, parts, TOKEN_TILE, 6, queries=queries)
    check_plan(target, lengths, parts, 6, queries=queries, cuts=cuts)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("parts", [1, 3, 66])
def test_no_item_is_much_longer_than_the_longest(target: str, parts: int) -> None:
    cuts = Cuts(longest_item=20, max_stretches=4)
    lengths = [64 * n for n in (9, 0, 200, 31, 1, 77)]
    plan = plan_reference(lengths, parts, TOKEN_TILE, 6, cuts=cuts)
    longest = max(item[2] - item[1] for item in plan.work_items)
    total = 318 + 6 * 6
    assert longest <= (20 + 7 if total <= 80 * parts else -(-total // (4 * parts)) + 7)
    assert plan.part_begin == sorted(plan.part_begin) and len(plan.part_begin) == parts + 1
    check_plan(target, lengths, parts, 6, cuts=cuts)


@settings(max_examples=80, deadline=None)
@given(
    lengths=many_lengths,
    parts=st.sampled_from([1, 2, 7, 66, 132, 300]),
    overhead=st.sampled_from([0, 1, 6]),
    cuts=st.builds(
        Cuts, st.sampled_from([0, 1, 7, 256]), st.sampled_from([1, 2, 3, 4]),
        st.sampled_from([0, 1, 870, 2**20]), st.sampled_from([0, 9, 2**16]),
    ),
)  # fmt: skip
def test_kernel_equals_reference_with_cuts(
    lengths: list[int], parts: int, overhead: int, cuts: Cuts
) -> None:
    check_plan("sm_90a", lengths, parts, overhead, cap=131072, cuts=cuts)
    check_plan("sm_90a", lengths, parts, overhead, cap=131072, split=1000, cuts=cuts)


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

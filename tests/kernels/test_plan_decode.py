"""``plan_decode`` against its mirror in Python, entry for entry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsl_kernels.dims import TOKEN_TILE
from snapmla.plan import MAX_COST
from snapmla.testing.reference_plan import plan_reference
from tests.support.lengths import many_lengths
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import device_of, kernel

pytestmark = needs_kernels


def check_plan(
    target: str,
    lengths: list[int],
    parts: int,
    overhead: int,
    cap: int = 2**20,
    split: int = 0,
) -> None:
    """Runs the kernel; every entry that it must write is the mirror's, and no other is written."""
    device = device_of(target)
    expected = plan_reference(lengths, parts, TOKEN_TILE, overhead, cap, split)
    b = len(lengths)
    capacity = max(parts + b, len(expected.work_items) + 1)
    items = torch.full((capacity, 4), -7, dtype=torch.int32, device=device)
    part_begin = torch.full((parts + 1,), -7, dtype=torch.int32, device=device)
    split_begin = torch.full((b + 1,), -7, dtype=torch.int32, device=device)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    planned = torch.full((b,), -7, dtype=torch.int32, device=device)
    kernel(target, op="plan_decode")(
        seqlens, items, part_begin, split_begin, planned, cap, TOKEN_TILE, overhead, split
    )
    assert torch.equal(planned, seqlens)
    assert part_begin.tolist() == expected.part_begin
    assert split_begin.tolist() == expected.split_begin
    n = len(expected.work_items)
    assert [tuple(i) for i in items[:n].tolist()] == expected.work_items
    assert (items[n:] == -7).all()


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
    """More sequences than one chunk of shared memory holds."""
    g = torch.Generator().manual_seed(4)
    lengths = (torch.rand(1030, generator=g) ** 6 * 9000).int().tolist()
    for parts, overhead, split in ((132, 5, 0), (132, 12, 0), (7, 3, 20)):
        check_plan(target, lengths, parts, overhead, split=split)


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


def test_the_largest_batch_that_may_be_planned() -> None:
    """Every length at its most, in one part and in several: still entry for entry the mirror's."""
    batch, tokens = 500, 64 * (MAX_COST // 500 - 6)
    lengths = [2**31 - 1] * batch
    for parts in (1, 3):
        check_plan("sm_90a", lengths, parts, 6, cap=tokens)

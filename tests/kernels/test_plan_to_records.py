"""``plan_to_records`` against its rule in Python, and there and back again."""

from __future__ import annotations

import pytest
import torch

from dsl_kernels.formats.sched_meta import META_WORDS
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import plan_reference, records_of, records_reference
from softgpu import Options, using
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import device_of, kernel

pytestmark = needs_kernels
CASES = [
    ([131072], 132, 5),
    ([1000, 0, 64, 65, 5000], 4, 5),
    ([0, 0, 0], 2, 0),
    ([64] * 7, 33, 5),
    ([-3, 100000, 1], 33, 5),
    ([1] * 700, 132, 5),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("lengths", "parts", "overhead"), CASES)
def test_records_of_plans(target: str, lengths: list[int], parts: int, overhead: int) -> None:
    device = device_of(target)
    plan = plan_reference(lengths, parts, 64, overhead)
    records = torch.full((parts + 1, META_WORDS + 1), 7, dtype=torch.int32, device=device)
    splits = torch.full((len(lengths) + 2,), 7, dtype=torch.int32, device=device)
    tables = PlanTables.of(plan)
    with using(Options(hazards="raise")):
        kernel(target, op="plan_to_records")(
            tables.work_items.to(device), tables.part_begin.to(device),
            tables.split_begin.to(device), records[:-1, :-1], splits[:-1],
        )  # fmt: skip
    want, want_splits = records_of(plan)
    assert [tuple(row) for row in records[:-1, :-1].tolist()] == want
    assert splits[:-1].tolist() == want_splits
    assert (records[-1] == 7).all() and (records[:, -1] == 7).all() and splits[-1] == 7


@pytest.mark.parametrize(("lengths", "parts", "overhead"), CASES)
def test_there_and_back(lengths: list[int], parts: int, overhead: int) -> None:
    """A plan's records, read for the lengths that it was made for, give that plan: all of an item
    but what its rows see, which records do not say."""
    plan = plan_reference(lengths, parts, 64, overhead)
    again = records_reference(records_of(plan)[0], lengths, 2**31 - 1)
    assert again.work_items == [(*item[:7], 0) for item in plan.work_items]
    assert again.part_begin == plan.part_begin and again.split_begin == plan.split_begin

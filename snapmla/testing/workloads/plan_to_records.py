"""``plan_to_records``: FlashMLA's scheduling records of a work list."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from dsl_kernels.formats.sched_meta import META_WORDS
from dsl_kernels.spec import VariantSpec
from snapmla.testing.reference_plan import PlanReference, plan_reference, records_of
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import Call, Result, Sizes, Workload, tables, wrong_entries
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.records_to_plan import schedules
from snapmla.testing.workloads.samples import PAGE, Random


def _given(plan: PlanReference) -> dict[str, Any]:
    """Arguments, all on the CPU; results full of -7."""
    names = ("work_items", "part_begin", "split_begin")
    shapes: dict[str, tuple[int, ...]] = {
        "records": (len(plan.part_begin) - 1, META_WORDS), "num_splits": (len(plan.split_begin),)
    }  # fmt: skip
    made = {name: torch.full(shape, -7, dtype=torch.int32) for name, shape in shapes.items()}
    return {**tables(**{name: getattr(plan, name) for name in names}), **made}


def _without_sight(plan: PlanReference) -> PlanReference:
    """The plan without what an item's rows see (word 7), which the record of an H200 is older
    than and which the kernel does not read."""
    return dataclasses.replace(plan, work_items=[(*x[:7], 0) for x in plan.work_items])


def small(spec: VariantSpec) -> Iterator[Call]:
    """Parts that share requests, that have several, and that have none."""
    for lengths, parts in (((3000, 0, 64, 1, 900), 5), ((64,) * 3, 7), ((1,) * 600, 3)):
        plan = plan_reference(lengths, parts, 64, 3)
        records, num_splits = records_of(plan)
        want = tables(records=records, num_splits=num_splits)
        note = f"{len(lengths)} sequences in {parts} parts"
        yield Call(_given(plan), {name: name for name in want}, want, note=note)


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Entry for entry."""
    bad = [call.note for call in calls if wrong_entries(call)]
    return Result(not bad, "; ".join(bad) or "records and num_splits, entry for entry")


def recorded(case: Case, run: Runner) -> Recorded:
    """Runs over plans by ``plan_reference``; a row is one problem."""
    found, seen = [], []
    for i, (_, lengths, parts) in enumerate(schedules(case)):
        plan = plan_reference(lengths.tolist(), parts, 64, (4, 0, 1)[i % 3], 65536)
        plan = _without_sight(plan)
        given = {name: x.to(run.device) for name, x in _given(plan).items()}
        run.call(case.variant, **given)
        own = ("work_items", "part_begin", "split_begin")
        seen += [np.array(getattr(plan, name), np.int32) for name in own]
        found.append([given["records"], given["num_splits"]])
    return exact.of_problems(seen, found, "tables")


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Sequences that are dealt to all parts evenly."""
    source = Random(device, seed)
    work, _ = source.split_work(sizes, PAGE)
    made: dict[str, tuple[int, ...]] = {
        "records": (sizes.parts, META_WORDS), "num_splits": (sizes.batch + 1,)
    }  # fmt: skip
    return work | {name: source.full(*x, dtype=torch.int32) for name, x in made.items()}


WORKLOAD = Workload(small, judge, recorded, sized)

"""``plan_to_records``: FlashMLA's scheduling records of a work list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsl_kernels.formats.sched_meta import META_WORDS
from dsl_kernels.spec import VariantSpec
from snapmla.testing.reference_plan import PlanReference, plan_reference, records_of
from snapmla.testing.workloads.call import Call, Result, Sizes, tables, wrong_entries
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Problem, hashed, named, workload
from snapmla.testing.workloads.records_to_plan import schedules
from snapmla.testing.workloads.samples import PAGE, split_evenly

LISTS, RESULTS = ("work_items", "part_begin", "split_begin"), ("records", "num_splits")


def truth(_spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Records and pieces of the work list."""
    items, parts, splits = (given[name].tolist() for name in LISTS)
    records, num_splits = records_of(PlanReference(items, parts, splits, 0, [], [], []))
    return tables(records=records, num_splits=num_splits)


@dataclass(frozen=True)
class Lists(Problem):
    """Tables of a plan, as ``PlanReference`` has them."""

    work_items: Sequence[Sequence[int]]
    part_begin: Sequence[int]
    split_begin: Sequence[int]


def arguments(_spec: VariantSpec, problem: Lists, draw: Draw) -> dict[str, Any]:
    """Arguments by name; results full of -7."""
    given = {name: draw.i32(getattr(problem, name)) for name in LISTS}
    draw.identify_by(*given.values())
    parts, ends = len(problem.part_begin) - 1, len(problem.split_begin)
    return {**given, **draw.blank(records=(parts, META_WORDS), num_splits=(ends,))}


def small(_spec: VariantSpec) -> Iterator[Lists]:
    """Parts that share requests, that have several, and that have none."""
    for lengths, parts in (((3000, 0, 64, 1, 900), 5), ((64,) * 3, 7), ((1,) * 600, 3)):
        plan = plan_reference(lengths, parts, 64, 3)
        note = f"{len(lengths)} sequences in {parts} parts"
        yield Lists(plan.work_items, plan.part_begin, plan.split_begin, note=note)


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Entry for entry."""
    bad = [call.note for call in calls if wrong_entries(call)]
    return Result(not bad, "; ".join(bad) or "records and num_splits, entry for entry")


def recorded(draw: Exact) -> Iterator[Lists]:
    """Plans without what an item's rows see (word 7), which the record of an H200 is older than
    and which the kernel does not read."""
    for i, (_, lengths, parts) in enumerate(schedules(draw)):
        plan = plan_reference(lengths.tolist(), parts, 64, (4, 0, 1)[i % 3], 65536)
        items = [(*item[:7], 0) for item in plan.work_items]
        yield Lists(items, plan.part_begin, plan.split_begin)


def sized(_spec: VariantSpec, sizes: Sizes) -> Lists:
    """Sequences that are dealt to all parts evenly."""
    rows, tiles = sizes.heads * sizes.s_q, -(-sizes.tokens // PAGE)
    *lists, _ = split_evenly(sizes.batch, rows, tiles, sizes.parts)
    return Lists(*lists)


WORKLOAD = workload(
    judge, truth, arguments, small=small, recorded=recorded, sized=sized, results=named(*RESULTS),
    rows=hashed("tables", *RESULTS),
)  # fmt: skip

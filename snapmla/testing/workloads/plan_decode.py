"""``plan_decode``: the work list of a step, from its lengths.

A call as large as in service asks the library for its plan, with the numbers of a device and its
tables: it is no problem that a draw lays out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from torch import Tensor

import snapmla
from dsl_kernels.formats.dims import ITEM_WORDS
from dsl_kernels.spec import VariantSpec
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import BALANCE, Cuts, Queries, plan_reference
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import Call, Result, Sizes, tables, wrong_entries
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.exact import Array, Exact
from snapmla.testing.workloads.problem import Problem, named, workload
from snapmla.testing.workloads.samples import PAGE, Random

TABLES = tuple(field.name for field in fields(PlanTables))
CUTS = tuple(field.name for field in fields(Cuts))
OWN = ("num_heads", "s_q", "unit_rows")
MOST = 65536  # tokens of a sized call's sequence, where the lengths are drawn


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tables as far as they are written."""
    lengths = given["cache_seqlens"].tolist()
    begins, limits = (given[name].tolist() or None for name in ("cu_seqlens_q", "row_seqlens"))
    own = {name: given[name] for name in OWN}
    queries = Queries(**own, causal=bool(given["causal"]), begins=begins, row_seqlens=limits)
    names = ("token_tile", "fixed_overhead", "max_tokens", "split_tiles")
    cuts = Cuts(*(given[name] for name in CUTS))
    parts = len(given["part_begin"]) - 1
    numbers = {name: given[name] for name in names}
    want = plan_reference(lengths, parts, **numbers, queries=queries, cuts=cuts)
    lists = {name: getattr(want, name) for name in TABLES if name != "planned_seqlens"}
    found = tables(**lists, planned_seqlens=lengths)
    return {name: found[name] for name in TABLES}


@dataclass(frozen=True)
class Step(Problem):
    """A plan's batch, and its rule.

    Attributes:
        queries: of ``lengths``.
        most: tokens of a row of the block table.
        items: of the work list; 0: room for any plan.
    """

    queries: Queries
    lengths: Sequence[int] | Array = (3000, 0, 64, 1, 900)
    parts: int = 5
    token_tile: int = 64
    fixed_overhead: int = 3
    split_tiles: int = 0
    cuts: Cuts = BALANCE
    most: int = 2048
    items: int = 0


def arguments(_spec: VariantSpec, problem: Step, draw: Draw) -> dict[str, Any]:
    """Arguments by name; tables that are written are 0."""
    queries, split, tile = problem.queries, problem.split_tiles, problem.token_tile
    lengths, pieces = draw.i32(problem.lengths), 0
    draw.identify_by(lengths)
    if split:
        pieces = -(-problem.most // tile // split)
    made = vars(PlanTables.empty(len(lengths), problem.parts, queries, pieces, device=draw.device))
    if problem.items:
        made["work_items"] = draw.i32([[0] * ITEM_WORDS] * problem.items)
    return {
        "cache_seqlens": lengths, "cu_seqlens_q": draw.i32(queries.begins or ()),
        "row_seqlens": draw.i32(queries.row_seqlens or ()), **made,
        "max_tokens": problem.most, "token_tile": tile, "fixed_overhead": problem.fixed_overhead,
        "split_tiles": split, **asdict(problem.cuts),
        **{name: getattr(queries, name) for name in OWN}, "causal": int(queries.causal),
    }  # fmt: skip


def small(_spec: VariantSpec) -> Iterator[Step]:
    """Even and ragged queries, limits of their own, balanced and fixed splits; a capacity that more
    fills find than there are warps, weighed against one without cuts; such a one of more sequences
    and units than the CTA has threads."""
    yield Step(Queries(16, 1, 16))
    yield Step(Queries(5, 70, 16, causal=True), token_tile=128, split_tiles=4)
    yield Step(Queries(5, 12, 16, causal=True, begins=[0, 3, 3, 4, 11, 11]))
    row_seqlens = [(7 * t * t) % 2500 - 3 for t in range(12)]
    queries = Queries(5, 12, 16, begins=[1, 5, 5, 9, 9, 12], row_seqlens=row_seqlens)
    yield Step(queries, split_tiles=4)
    late = (448, 1152, 896, 1472, 1792, 512, 1216)
    cuts = Cuts(tile_ns=870, read_ns=9)
    yield Step(Queries(1, 1, 16), late, 6, fixed_overhead=20, cuts=cuts)
    many = Queries(1, 600, 1, begins=list(range(601)))
    yield Step(many, [(i % 7) * 40 for i in range(600)], 13, fixed_overhead=30)


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Entry for entry."""
    bad, counts = [], []
    for call in calls:
        bad += wrong_entries(call)
        parts = len(call.arguments["part_begin"]) - 1
        counts.append(f"{len(call.want['work_items'])} in {parts}")
    summary = f"{', '.join(counts)} parts, entry for entry"
    return Result(not bad, f"{summary} but for {', '.join(bad)}" if bad else summary)


def recorded(draw: Exact) -> Iterator[Step]:
    """Lengths of any size and outside of the table's, balanced and fixed splits."""
    bits, most = draw.bits(), 65536
    for i in range(12):
        b, parts = (1, 2, 5, 33, 64, 7)[i % 6], (1, 4, 66, 132, 3, 17)[i // 2 % 6]
        lengths = bits.below((2, 200, 5000, 70000)[i % 4], (b,)).astype(np.int32)
        lengths[bits.below(7, (b,)) == 0] = 0
        lengths[0] = (-5, 2**31 - 1, lengths[0], 64)[i // 3 % 4]
        yield Step(
            Queries(1, 1, 1), lengths, parts, PAGE, (4, 0, 1)[i % 3],
            (0, 0, 3)[i % 3], Cuts(tile_ns=870 * (i % 2), read_ns=9), most,
            b + (b * most // PAGE // 3 if i % 3 == 2 else parts),
        )  # fmt: skip


def _rows(_spec: VariantSpec, given: Mapping[str, Any]) -> exact.Rows:
    """The words that are recorded: an item's rows follow from its first."""
    names = ("part_begin", "split_begin", "planned_seqlens")
    return exact.hashes_of([[given["work_items"][:, :4], *(given[x] for x in names)]], "plan")


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Arguments that ``DecodePlan.update_`` passes, and that plan.

    Lengths are ``sizes.tokens`` each, or random if it is 0.
    """
    source, most = Random(device, seed), sizes.tokens or MOST
    lengths = source.i32([most] * sizes.batch)
    if not sizes.tokens:
        lengths = (source.below(most, sizes.batch) + 1).int()
    plan = snapmla.plan_decode(
        lengths, sizes.heads, sizes.s_q, page_size=PAGE, max_pages=-(-most // PAGE)
    )
    numbers = ("token_tile", "fixed_overhead", "split_tiles", *CUTS, "unit_rows")
    return {
        "cache_seqlens": lengths, **source.alone("cu_seqlens_q", "row_seqlens"),
        **{name: getattr(plan, name) for name in (*TABLES, *numbers)},
        "max_tokens": -(-most // PAGE) * PAGE, "num_heads": sizes.heads, "s_q": sizes.s_q,
        "causal": int(plan.causal), "plan": plan,
    }  # fmt: skip


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``DecodePlan.update_``."""
    return lambda: given["plan"].update_(given["cache_seqlens"])


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads the lengths; what is written depends on them."""
    return 4.0 * sizes.batch


WORKLOAD = workload(
    judge, truth, arguments, small=small, recorded=recorded, sized=None, results=named(*TABLES),
    rows=_rows, public=public, moved=moved, bench={"plan_decode": {"": {}}},
)._replace(sized=sized)  # fmt: skip

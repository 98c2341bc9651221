"""``plan_decode``: the work list of a step, from its lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

import snapmla
from dsl_kernels.dims import ITEM_WORDS
from dsl_kernels.spec import VariantSpec
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import BALANCE, Cuts, Queries, plan_reference
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import Call, Result, Sizes, Workload, tables, wrong_entries
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import PAGE, Source

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


def small(spec: VariantSpec) -> Iterator[Call]:
    """Even and ragged queries, limits of their own, balanced and fixed splits."""
    lengths, parts, capacity = (3000, 0, 64, 1, 900), 5, 2048
    row_seqlens = [(7 * t * t) % 2500 - 3 for t in range(12)]
    for queries, token_tile, split_tiles in (
        (Queries(16, 1, 16), 64, 0),
        (Queries(5, 70, 16, causal=True), 128, 4),
        (Queries(5, 12, 16, causal=True, begins=[0, 3, 3, 4, 11, 11]), 64, 0),
        (Queries(5, 12, 16, begins=[1, 5, 5, 9, 9, 12], row_seqlens=row_seqlens), 64, 4),
    ):
        pieces = -(-capacity // token_tile // split_tiles) if split_tiles else 0
        made = PlanTables.empty(len(lengths), parts, queries, pieces)
        given = {
            **tables(
                cache_seqlens=lengths, cu_seqlens_q=queries.begins or (),
                row_seqlens=queries.row_seqlens or (),
            ),
            **vars(made), "max_tokens": capacity, "token_tile": token_tile, "fixed_overhead": 3,
            "split_tiles": split_tiles, **asdict(BALANCE),
            **{name: getattr(queries, name) for name in OWN}, "causal": int(queries.causal),
        }  # fmt: skip
        yield Call(given, {name: name for name in TABLES}, truth(spec, given))


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Entry for entry."""
    bad, counts, parts = [], [], 0
    for call in calls:
        bad += wrong_entries(call)
        counts.append(str(len(call.want["work_items"])))
        parts = len(call.arguments["part_begin"]) - 1
    summary = f"{', '.join(counts)} items in {parts} parts, entry for entry"
    return Result(not bad, f"{summary} but for {', '.join(bad)}" if bad else summary)


def recorded(case: Case, run: Runner) -> Recorded:
    """Several problems in one case; a row is one problem."""
    bits, found, seen = case.bits(), [], []
    for i in range(12):
        b = (1, 2, 5, 33, 64, 7)[i % 6]
        parts = (1, 4, 66, 132, 3, 17)[i // 2 % 6]
        split_tiles = (0, 0, 3)[i % 3]
        lengths = bits.below((2, 200, 5000, 70000)[i % 4], (b,)).astype(np.int32)
        lengths[bits.below(7, (b,)) == 0] = 0
        lengths[0] = (-5, 2**31 - 1, lengths[0], 64)[i // 3 % 4]
        pieces = b + (b * 65536 // 64 // split_tiles if split_tiles else parts)
        shapes = {
            "work_items": (pieces, ITEM_WORDS), "part_begin": (parts + 1,),
            "split_begin": (b + 1,), "planned_seqlens": (b,),
        }  # fmt: skip
        made = {name: run.full(shape, 0, torch.int32) for name, shape in shapes.items()}
        run.call(
            case.variant, cache_seqlens=run.there(lengths), **made, max_tokens=65536,
            token_tile=64, fixed_overhead=(4, 0, 1)[i % 3], split_tiles=split_tiles,
            longest_item=0, max_stretches=1, tile_ns=870 * (i % 2), read_ns=9, num_heads=1, s_q=1,
            unit_rows=1, causal=0,
            **run.alone("cu_seqlens_q", "row_seqlens", "units", "unit_begin", "row_limits"),
        )  # fmt: skip
        seen.append(lengths)
        # the words that are recorded: rows follow from the first
        found.append([made["work_items"][:, :4], *list(made.values())[1:]])
    return exact.of_problems(seen, found, "plan")


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """What ``DecodePlan.update_`` passes, and that plan; no ``sizes.tokens``: random lengths."""
    source, most = Source(device, seed), sizes.tokens or MOST
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


WORKLOAD = Workload(
    small, judge, recorded, sized, truth, public, moved, bench={"plan_decode": {"": {}}}
)

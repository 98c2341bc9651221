"""``records_to_plan``: a work list from FlashMLA's scheduling records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.formats.dims import ITEM_WORDS
from dsl_kernels.formats.sched_meta import META_WORDS
from dsl_kernels.spec import VariantSpec
from snapmla.testing.reference_plan import plan_reference, records_of, records_reference
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import Call, Result, Sizes, Workload, tables, wrong_entries
from snapmla.testing.workloads.exact import Array, Bits, Case, Recorded, Runner
from snapmla.testing.workloads.samples import PAGE, Random

CHECKED = ("work_items", "part_begin", "split_begin")


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The work list."""
    records, lengths = given["records"].tolist(), given["cache_seqlens"].tolist()
    numbers = (given[n] for n in ("max_tokens", "token_tile", "rows", "num_kv_heads"))
    want = records_reference(records, lengths, *numbers)
    return tables(**{name: getattr(want, name) for name in CHECKED})


def _shapes(batch: int, parts: int, heads: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tables that the kernel writes; the work list has room for any plan."""
    return {
        "work_items": ((batch + parts - 1) * heads, ITEM_WORDS), "part_begin": (parts * heads + 1,),
        "split_begin": (batch * heads + 1,), "planned_seqlens": (batch * heads,),
    }  # fmt: skip


def small(spec: VariantSpec) -> Iterator[Call]:
    """Records that are FlashMLA's own, out of order, out of range; more requests and parts than
    threads, which then take turns; one KV head and three."""
    few, capacity, rows = (3000, 0, 64, 1, 900), 2048, 16
    many = tuple(7 * i % 200 for i in range(600))
    stale = [(0, 0, 1, 2, 0, 0, 0, 0), (3, 0) * 4, (0, 40) * 4, (2**31 - 1, -5) * 4]
    problems: dict[str, tuple[tuple[int, ...], Sequence[Sequence[int]], tuple[int, ...]]] = {
        "fresh": (few, records_of(plan_reference(few, 5, 64, 3, capacity))[0], (1, 3)),
        "one part": (few, [(0, 0, 4, 9999, 0, 0, 0, 0)], (1, 3)),
        "stale": (few, stale, (1, 3)),
        "many": (many, [(i + i // 90, i % 3, 0, 0, 0, 0, 0, 0) for i in range(580)], (1,)),
    }
    for name, (lengths, records, kv_heads) in problems.items():
        for heads in kv_heads:
            want = records_reference(records, lengths, capacity, 64, rows, heads)
            shapes = _shapes(len(lengths), len(records), heads)
            shapes |= {n: tuple(np.shape(getattr(want, n))) for n in CHECKED}
            given = {
                **tables(records=records, cache_seqlens=lengths),
                "tile_begin": torch.empty(len(lengths) + 1, dtype=torch.int32),
                **{n: torch.full(shape, -7, dtype=torch.int32) for n, shape in shapes.items()},
                "max_tokens": capacity, "token_tile": 64, "rows": rows, "num_kv_heads": heads,
            }  # fmt: skip
            results = {name: name for name in CHECKED}
            yield Call(given, results, truth(spec, given), note=f"{name}, {heads} heads")


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Entry for entry."""
    bad, problems = [], []
    for call in calls:
        problems.append(call.note.partition(",")[0])
        if wrong_entries(call):
            bad.append(call.note)
    summary = f"{', '.join(dict.fromkeys(problems))}: entry for entry"
    return Result(not bad, f"{summary} but for {'; '.join(bad)}" if bad else summary)


def schedules(case: Case) -> Iterator[tuple[Bits, Array, int]]:
    """(stream, lengths, parts) of a recorded case's problems."""
    for i in range(12):
        bits = case.bits(f".{i}")
        b = (1, 2, 5, 33, 64, 700)[i % 6]
        lengths = bits.below((2, 200, 5000, 70000)[i % 4], (b,)).astype(np.int32)
        lengths[bits.below(7, (b,)) == 0] = 0
        yield bits, lengths, (1, 4, 66, 132, 3, 17)[i // 2 % 6]


def recorded(case: Case, run: Runner) -> Recorded:
    """Records that FlashMLA would make, the same of other lengths, and any words; a row is one
    problem."""
    found, seen = [], []
    for i, (bits, lengths, parts) in enumerate(schedules(case)):
        b, heads, capacity = len(lengths), (1, 3)[i % 2], 65536
        records = bits.below(1 << 32, (parts, META_WORDS)).astype(np.uint32).view(np.int32)
        if i % 3 == 1:
            records[:, 0] = bits.below(b + 3, (parts,)) - 1
            records[:, 1] = bits.below(1100, (parts,)) - 3
        elif i % 3 == 2:
            planned = lengths if i % 2 else lengths[::-1]
            plan = plan_reference(planned.tolist(), parts, 64, 5, capacity)
            records = np.array(records_of(plan)[0], np.int32)
        if i % 4 == 3:
            lengths[0], lengths[-1] = 2**31 - 1, -5
        shapes = _shapes(b, parts, heads)
        made = {name: run.full(shape, -7, torch.int32) for name, shape in shapes.items()}
        run.call(
            case.variant, records=run.there(records), cache_seqlens=run.there(lengths), **made,
            tile_begin=torch.empty(b + 1, dtype=torch.int32, device=run.device),
            max_tokens=capacity, token_tile=64, rows=(16, 77)[i % 2], num_kv_heads=heads,
        )  # fmt: skip
        seen += [records, lengths]
        found.append(list(made.values()))
    return exact.of_problems(seen, found, "tables")


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Same number of parts, which begin with some sequence's first tile."""
    source, b, parts = Random(device, seed), sizes.batch, sizes.parts
    shapes = _shapes(b, parts, 1)
    return {
        "records": source.i32([[p * b // parts, *[0] * (META_WORDS - 1)] for p in range(parts)]),
        "cache_seqlens": source.i32([sizes.tokens] * b), "tile_begin": source.i32([0] * (b + 1)),
        **{name: source.full(*shape, dtype=torch.int32) for name, shape in shapes.items()},
        "max_tokens": -(-sizes.tokens // PAGE) * PAGE, "token_tile": PAGE,
        "rows": sizes.heads * sizes.s_q, "num_kv_heads": 1,
    }  # fmt: skip


WORKLOAD = Workload(small, judge, recorded, sized, truth)

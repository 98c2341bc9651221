"""``records_to_plan``: a work list from FlashMLA's scheduling records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dsl_kernels.formats.dims import ITEM_WORDS
from dsl_kernels.formats.sched_meta import META_WORDS
from dsl_kernels.spec import VariantSpec
from snapmla.testing.reference_plan import plan_reference, records_of, records_reference
from snapmla.testing.workloads.call import Call, Result, Sizes, tables, wrong_entries
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.exact import Array, Bits, Exact
from snapmla.testing.workloads.problem import Problem, hashed, named, workload
from snapmla.testing.workloads.samples import PAGE

CHECKED = ("work_items", "part_begin", "split_begin")


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The work list."""
    records, lengths = given["records"].tolist(), given["cache_seqlens"].tolist()
    numbers = (given[n] for n in ("max_tokens", "token_tile", "rows", "num_kv_heads"))
    want = records_reference(records, lengths, *numbers)
    return tables(**{name: getattr(want, name) for name in CHECKED})


@dataclass(frozen=True, kw_only=True)
class Records(Problem):
    """Records of parts, and the requests that they are read for.

    Attributes:
        records: (parts, 8).
        lengths: cached tokens of each request.
        most: tokens of a row of the block table.
        rows: query rows of a request that read one KV head.
        heads: KV heads.
        items: of the work list; 0: room for any.
    """

    records: Sequence[Sequence[int]] | Array
    lengths: Sequence[int] | Array
    most: int
    rows: int
    heads: int
    items: int = 0


def arguments(_spec: VariantSpec, problem: Records, draw: Draw) -> dict[str, Any]:
    """Arguments by name; results full of -7."""
    records, lengths = draw.i32(problem.records), draw.i32(problem.lengths)
    draw.identify_by(records, lengths)
    parts, batch, heads = len(records), len(lengths), problem.heads
    items = problem.items or (batch + parts - 1) * heads
    return {
        "records": records, "cache_seqlens": lengths,
        **draw.blank(
            tile_begin=(batch + 1,), work_items=(items, ITEM_WORDS),
            part_begin=(parts * heads + 1,), split_begin=(batch * heads + 1,),
            planned_seqlens=(batch * heads,),
        ),
        "max_tokens": problem.most, "token_tile": PAGE, "rows": problem.rows, "num_kv_heads": heads,
    }  # fmt: skip


def small(_spec: VariantSpec) -> Iterator[Records]:
    """Records that are FlashMLA's own, out of order, out of range; more requests and parts than
    threads, which then take turns; one KV head and three."""
    few, most, rows = (3000, 0, 64, 1, 900), 2048, 16
    many = tuple(7 * i % 200 for i in range(600))
    stale = [(0, 0, 1, 2, 0, 0, 0, 0), (3, 0) * 4, (0, 40) * 4, (2**31 - 1, -5) * 4]
    problems: dict[str, tuple[tuple[int, ...], Sequence[Sequence[int]], tuple[int, ...]]] = {
        "fresh": (few, records_of(plan_reference(few, 5, 64, 3, most))[0], (1, 3)),
        "one part": (few, [(0, 0, 4, 9999, 0, 0, 0, 0)], (1, 3)),
        "stale": (few, stale, (1, 3)),
        "many": (many, [(i + i // 90, i % 3, 0, 0, 0, 0, 0, 0) for i in range(580)], (1,)),
    }
    for name, (lengths, records, kv_heads) in problems.items():
        for heads in kv_heads:
            want = records_reference(records, lengths, most, PAGE, rows, heads)
            yield Records(
                records=records, lengths=lengths, most=most, rows=rows, heads=heads,
                items=len(want.work_items), note=f"{name}, {heads} heads",
            )  # fmt: skip


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Entry for entry."""
    bad, problems = [], []
    for call in calls:
        problems.append(call.note.partition(",")[0])
        if wrong_entries(call):
            bad.append(call.note)
    summary = f"{', '.join(dict.fromkeys(problems))}: entry for entry"
    return Result(not bad, f"{summary} but for {'; '.join(bad)}" if bad else summary)


def schedules(draw: Exact) -> Iterator[tuple[Bits, Array, int]]:
    """(stream, lengths, parts) of a recorded case's problems."""
    for i in range(12):
        bits = draw.bits(f".{i}")
        b = (1, 2, 5, 33, 64, 700)[i % 6]
        lengths = bits.below((2, 200, 5000, 70000)[i % 4], (b,)).astype(np.int32)
        lengths[bits.below(7, (b,)) == 0] = 0
        yield bits, lengths, (1, 4, 66, 132, 3, 17)[i // 2 % 6]


def recorded(draw: Exact) -> Iterator[Records]:
    """Records that FlashMLA would make, the same of other lengths, and any words."""
    for i, (bits, lengths, parts) in enumerate(schedules(draw)):
        most = 65536
        records = bits.below(1 << 32, (parts, META_WORDS)).astype(np.uint32).view(np.int32)
        if i % 3 == 1:
            records[:, 0] = bits.below(len(lengths) + 3, (parts,)) - 1
            records[:, 1] = bits.below(1100, (parts,)) - 3
        elif i % 3 == 2:
            planned = lengths if i % 2 else lengths[::-1]
            plan = plan_reference(planned.tolist(), parts, 64, 5, most)
            records = np.array(records_of(plan)[0], np.int32)
        if i % 4 == 3:
            lengths[0], lengths[-1] = 2**31 - 1, -5
        yield Records(
            records=records, lengths=lengths, most=most, rows=(16, 77)[i % 2], heads=(1, 3)[i % 2]
        )  # fmt: skip


def sized(_spec: VariantSpec, sizes: Sizes) -> Records:
    """Same number of parts, which begin with some sequence's first tile."""
    b, parts = sizes.batch, sizes.parts
    return Records(
        records=[[p * b // parts, *[0] * (META_WORDS - 1)] for p in range(parts)],
        lengths=[sizes.tokens] * b, most=-(-sizes.tokens // PAGE) * PAGE,
        rows=sizes.heads * sizes.s_q, heads=1,
    )  # fmt: skip


WORKLOAD = workload(
    judge, truth, arguments, small=small, recorded=recorded, sized=sized, results=named(*CHECKED),
    rows=hashed("tables", *CHECKED, "planned_seqlens"),
)  # fmt: skip

"""``merge``: split sequences' partial rows, of a plan's slots, into results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK
from dsl_kernels.spec import VariantSpec
from snapmla.testing import metrics, partials
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, Call, Result, Sizes
from snapmla.testing.workloads.draw import Draw, Plant
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Problem, named, workload
from snapmla.testing.workloads.samples import PAGE, split_evenly


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """float32 out and lse, of sequences without slots as they are; a unit is a sequence."""
    rows, split = partials.decode(given["o_accum"]).double(), given["split_begin"].tolist()
    out, lse = given["out"].float().clone(), given["lse"].clone()
    _, s_q, heads, _ = out.shape
    for i, (first, end) in enumerate(itertools.pairwise(split)):
        if first == end:
            continue
        part_lse = given["lse_accum"][first:end, : s_q * heads].double()
        top = part_lse.amax(0)
        weight = torch.exp2(part_lse - torch.where(torch.isneginf(top), 0.0, top))
        total = weight.sum(0)
        o = (weight[..., None] * rows[first:end, : s_q * heads]).sum(0)
        o = torch.where(total[:, None] == 0, 0.0, o / total[:, None])
        out[i] = o.view(s_q, heads, -1).float()
        scaled = (top + torch.log2(total)) * given["lse_factor"]
        lse[i] = scaled.view(s_q, heads).T.float()
    return {"out": out, "lse": lse}


@dataclass(frozen=True, kw_only=True)
class Slots(Problem):
    """Sequences whose slots lie side by side.

    Attributes:
        begin: each sequence's first slot, and the end.
        s_q, heads: query tokens of a sequence, and their heads.
        room: slots that there is memory for.
        rows: of a slot, padding among them.
        plant: (draw, rows (room, rows, 512), LSE (room, rows)).
    """

    begin: Sequence[int]
    s_q: int
    heads: int
    room: int
    rows: int
    plant: Plant


def arguments(spec: VariantSpec, problem: Slots, draw: Draw) -> dict[str, Any]:
    """Arguments by name."""
    o = draw.rows(problem.room, problem.rows, KV_LORA_RANK)
    lse = draw.lses(problem.room, problem.rows)
    problem.plant(draw, o, lse)
    begin = draw.i32(problem.begin)
    draw.identify_by(o, lse, begin)
    shape = len(begin) - 1, problem.s_q, problem.heads
    return {
        "o_accum": draw.there(partials.encode(o)), "lse_accum": draw.there(lse),
        "split_begin": begin, **draw.alone("units"),  # a unit is a sequence
        **draw.results(*shape, DTYPES[spec.out_dtype]), **draw.lse_units(),
    }  # fmt: skip


def _unseen(_draw: Draw, o: Tensor, lse: Tensor) -> None:
    """Plants a row that no split saw, or not all."""
    lse[3:12, 4], o[3:12, 4] = -math.inf, 0.0


def _awkward(draw: Exact, o: Tensor, lse: Tensor) -> None:
    """Plants rows that no split saw, NaN, infinities and equal weights."""
    hit = draw.below(12, lse.numel()).view_as(lse) == 0
    lse[hit], o[hit] = -math.inf, 0.0
    lse[:, 1], o[:, 1] = -math.inf, 0.0
    lse[2, 3], lse[4, 4], lse[9, 5] = math.nan, math.inf, -math.inf
    o[5, 6, 7], o[6, 2, 3] = math.nan, math.inf
    lse[:, 0] = 3.25  # equal weights


def _level(_draw: Draw, _o: Tensor, lse: Tensor) -> None:
    """Plants one LSE."""
    lse.zero_()


# few slots and none; so many that warps share a strip of a unit, in CTAs of a strip each or of two
SMALL = (
    Slots(begin=(0, 3, 3, 12, 40), s_q=2, heads=5, room=41, rows=16, plant=_unseen),
    Slots(begin=(0, 17, 92), s_q=1, heads=2, room=93, rows=16, plant=_unseen),
)
_BEGIN = (0, 0, 1, 3, 8, 41, 44)  # 0 to 33 slots a sequence
RECORDED = (
    Slots(begin=_BEGIN, s_q=2, heads=7, room=44, rows=16, plant=_awkward),
    Slots(begin=_BEGIN, s_q=1, heads=23, room=44, rows=32, plant=_awkward),
)


def sized(_spec: VariantSpec, sizes: Sizes) -> Slots:
    """Sequences that are dealt to all parts evenly."""
    rows = sizes.heads * sizes.s_q
    *_, begin, room = split_evenly(sizes.batch, rows, -(-sizes.tokens // PAGE), sizes.parts)
    return Slots(begin=begin, s_q=sizes.s_q, heads=sizes.heads, room=room, rows=rows, plant=_level)


def judge(spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """The rounding of results beside the truth's, of the call where it is largest."""
    pairs = [call.pairs for call in calls]
    error = max(metrics.relative_l2(*each["out"]) for each in pairs)
    lse_error = max(metrics.lse_error(*each["lse"]) for each in pairs)
    allowed = 3e-3 if spec.out_dtype == "bf16" else 1e-5
    return Result(
        error <= allowed and lse_error <= 1e-4,
        f"relative L2 {error:.1e} (allowed {allowed:.0e}), LSE {lse_error:.1e} (allowed 1e-4)",
    )


WORKLOAD = workload(
    judge, truth, arguments, small=lambda _: SMALL, recorded=lambda draw: [RECORDED[draw.odd]],
    sized=sized, results=named("out", "lse"),
    rows=lambda _, given: exact.rows_of(given["out"], given["lse"]),
)  # fmt: skip

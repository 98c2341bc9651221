"""``mha_merge``: partial rows of dense prefill into rows, by the lists of ``mha_items``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.mha_list import SplitRoom
from dsl_kernels.spec import VariantSpec
from snapmla.testing import metrics
from snapmla.testing.comparison import MIMIC_FACTOR
from snapmla.testing.mha_job import offsets
from snapmla.testing.mha_split_job import merged, split_work
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, Call, Result, Sizes
from snapmla.testing.workloads.draw import Draw, Plant, nothing
from snapmla.testing.workloads.problem import Problem, named, workload

OWN = 7.0  # of rows that nothing is merged into


@dataclass(frozen=True)
class Pieces(Problem):
    """Partial rows of prompts.

    Attributes:
        lq, lk: query tokens and keys of each sequence.
        heads, ctas: of query tokens, of the launch.
        gap: channels before each row of results, whose LSE lie by token then.
        plant: (draw, partial rows (rows, heads, d_v), their LSE (rows, heads)).
    """

    lq: Sequence[int]
    lk: Sequence[int]
    heads: int
    ctas: int = 3
    gap: int = 8
    plant: Plant = nothing


def arguments(spec: VariantSpec, problem: Pieces, draw: Draw) -> dict[str, Any]:
    """Arguments by name; problems of one draw have the same partial rows."""
    lq, lk, h, t = problem.lq, problem.lk, problem.heads, sum(problem.lq)
    room = SplitRoom.of(t, len(lq), sum(lk))

    def drawn() -> tuple[Tensor, Tensor]:
        rows, lse = draw.rows(room.rows, h, spec.d_v), draw.rows(room.rows, h)
        problem.plant(draw, rows, lse)
        draw.identify_by(rows, lse)
        return draw.there(rows), draw.there(lse)

    rows, row_lse = draw.once("rows", drawn)
    out = draw.full(t, h, spec.d_v + problem.gap, value=OWN, dtype=DTYPES[spec.dtype])
    lse = draw.full(t, h, value=OWN).mT if problem.gap else draw.full(h, t, value=OWN)
    return {
        "cu_seqlens_q": draw.there(offsets(lq)), "work": draw.there(split_work(lq, lk, True, room)),
        "partial_out": rows, "partial_lse": row_lse, "out": out[..., problem.gap :], "lse": lse,
        "ctas": problem.ctas,
    }  # fmt: skip


def _unseen(_draw: Draw, rows: Tensor, lse: Tensor) -> None:
    """Plants rows of the first sequence that see no key in one piece, or in none, under NaN."""
    lse *= 8
    lse[1, 0] = lse[[2, 5], 2] = -math.inf
    rows[1, 0] = rows[[2, 5], 2] = math.nan


def _empty(draw: Draw, _rows: Tensor, lse: Tensor) -> None:
    """Plants pieces of no key."""
    lse[draw.below(8, lse.numel()).view_as(lse) == 0] = -math.inf


_SPLIT = (3, 9, 0, 130), (2048, 40, 5000, 4100)  # two pieces, none, no queries, two row tiles
SMALL = [Pieces(*_SPLIT, 3, plant=_unseen), Pieces((9,), (40,), 3)]  # the latter not split at all


def sized(_spec: VariantSpec, sizes: Sizes) -> Pieces:
    """Sequences of ``sizes.s_q`` new tokens and ``sizes.tokens`` keys."""
    lq, lk = [sizes.s_q] * sizes.batch, [sizes.tokens] * sizes.batch
    return Pieces(lq, lk, sizes.heads, sizes.parts, gap=0)


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Compares with fp64, rounded to the results' dtype; what is not split keeps its bits."""
    error, lse_error, allowed, moved = 0.0, 0.0, 0.0, 0
    for call in calls:
        given, prompts = call.arguments, call.job
        out, lse, *partial = (given[x] for x in ("out", "lse", "partial_out", "partial_lse"))
        before = torch.full_like(out, OWN), torch.full_like(lse, OWN)
        want, want_lse = merged(prompts.lq, prompts.lk, *before, partial)
        moved += int((want.eq(OWN) & out.double().ne(OWN)).sum())
        moved += int((torch.isinf(want_lse) != torch.isinf(lse)).sum())
        error = metrics.largest(error, metrics.relative_l2(out, want))
        allowed = max(allowed, metrics.relative_l2(want.to(out.dtype), want))
        lse_error = metrics.largest(lse_error, metrics.lse_error(lse, want_lse))
    allowed = MIMIC_FACTOR * allowed + 5e-7
    return Result(
        error <= allowed and lse_error <= 4e-6 and not moved,
        f"relative L2 {error:.1e} (allowed {allowed:.1e}), LSE {lse_error:.1e} (allowed 4e-6), "
        f"{moved} values of rows that are not split, or empty, are wrong",
    )


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads the partial rows of all sequences and writes theirs."""
    room = SplitRoom.of(sizes.batch * sizes.s_q, sizes.batch, sizes.batch * sizes.tokens)
    written = sizes.batch * sizes.s_q * sizes.heads * (2.0 * spec.d_v + 4)
    return room.rows * sizes.heads * 4.0 * (spec.d_v + 1) + written


WORKLOAD = workload(
    judge, None, arguments, small=lambda _: SMALL,
    recorded=lambda _: [Pieces(*_SPLIT, 4, plant=_empty)], sized=sized,
    results=named("out", "lse"), rows=lambda _, given: exact.rows_of(given["out"], given["lse"]),
    moved=moved,
)  # fmt: skip

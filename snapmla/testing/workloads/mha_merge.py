"""``mha_merge``: partial rows of dense prefill into rows, by the lists of ``mha_items``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from snapmla.testing.workloads.call import DTYPES, Call, Result, Sizes, Workload
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import Random

LQ, LK = (3, 9, 0, 130), (2048, 40, 5000, 4100)  # two pieces, none, no queries, two row tiles
OWN = 7.0  # of rows that nothing is merged into


def _given(spec: VariantSpec, lq: Sequence[int], lk: Sequence[int], heads: int) -> dict[str, Any]:
    """Arguments but for the partial rows."""
    room = SplitRoom.of(sum(lq), len(lq), sum(lk))
    return {
        "cu_seqlens_q": offsets(lq), "work": split_work(lq, lk, True, room),
        "partial_out": torch.full((room.rows, heads, spec.d_v), math.nan),
        "partial_lse": torch.full((room.rows, heads), math.nan),
        "out": torch.full((sum(lq), heads, spec.d_v + 8), OWN).to(DTYPES[spec.dtype])[..., 8:],
        "lse": torch.full((sum(lq), heads), OWN).mT, "ctas": 3,
    }  # fmt: skip


def truth(_spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """fp64 out and lse; what is not split stays."""
    partial = given["partial_out"], given["partial_lse"]
    out, lse = merged(LQ, LK, given["out"], given["lse"], partial)
    return {"out": out, "lse": lse}


def small(spec: VariantSpec) -> Iterator[Call]:
    """Rows that see no key in one piece, or in none, under NaN; then no split at all."""
    given = _given(spec, LQ, LK, 3)
    rows = given["partial_lse"].shape[0]
    given["partial_out"][:rows] = torch.randn(rows, 3, spec.d_v)
    given["partial_lse"][:rows] = torch.randn(rows, 3) * 8
    given["partial_lse"][1, 0] = given["partial_lse"][[2, 5], 2] = -math.inf  # rows of the first
    given["partial_out"][1, 0] = given["partial_out"][[2, 5], 2] = math.nan
    yield Call(given, {"out": "out", "lse": "lse"}, truth(spec, given))
    none = _given(spec, (9,), (40,), 3) | {"partial_out": given["partial_out"]}
    none["partial_lse"] = given["partial_lse"]
    unchanged = {name: none[name].double().clone() for name in ("out", "lse")}
    yield Call(none, {"out": "out", "lse": "lse"}, unchanged)


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Compares with the truth, rounded to the results' dtype; what is not split keeps its bits."""
    error, lse_error, allowed, moved = 0.0, 0.0, 0.0, 0
    for call in calls:
        out, want = call.pairs["out"]
        lse, want_lse = call.pairs["lse"]
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


def recorded(case: Case, run: Runner) -> Recorded:
    """Pieces of which some are empty."""
    spec, bits = case.spec, case.bits()
    given = _given(spec, LQ, LK, 4)
    rows = given["partial_lse"].shape[0]
    o, lse = exact.bell(bits, (rows, 4, spec.d_v), 2), exact.bell(bits, (rows, 4), 2)
    lse[bits.below(8, lse.shape) == 0] = -math.inf
    given |= {"partial_out": run.there(o), "partial_lse": run.there(lse)}
    given = {n: x.to(run.device) if isinstance(x, Tensor) else x for n, x in given.items()}
    run.call(case.variant, **given)
    return exact.results([o, lse], given["out"].contiguous()[None], given["lse"][None])


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Sequences of ``sizes.s_q`` new tokens and ``sizes.tokens`` keys."""
    source, h = Random(device, seed), sizes.heads
    lq, lk = [sizes.s_q] * sizes.batch, [sizes.tokens] * sizes.batch
    room = SplitRoom.of(sum(lq), len(lq), sum(lk))
    return {
        "cu_seqlens_q": offsets(lq).to(device), "work": split_work(lq, lk, True, room).to(device),
        "partial_out": source.normal(room.rows, h, spec.d_v, dtype=torch.float32),
        "partial_lse": source.normal(room.rows, h, dtype=torch.float32),
        "out": source.full(sum(lq), h, spec.d_v, dtype=DTYPES[spec.dtype]),
        "lse": source.full(h, sum(lq)), "ctas": sizes.parts,
    }  # fmt: skip


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads the partial rows of all sequences and writes theirs."""
    room = SplitRoom.of(sizes.batch * sizes.s_q, sizes.batch, sizes.batch * sizes.tokens)
    written = sizes.batch * sizes.s_q * sizes.heads * (2.0 * spec.d_v + 4)
    return room.rows * sizes.heads * 4.0 * (spec.d_v + 1) + written


WORKLOAD = Workload(small, judge, recorded, sized, truth, moved=moved)

"""``merge_states``: results over disjoint tokens into one; in pairs, from lists, from a stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import snapmla
from dsl_kernels.dims import KV_LORA_RANK
from dsl_kernels.spec import VariantSpec
from snapmla.merge import MAX_LIST
from snapmla.testing import metrics, reference
from snapmla.testing.comparison import MIMIC_FACTOR
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, LN2, Call, Result, Sizes, Workload
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import Source


def _parts(spec: VariantSpec, outs: Tensor, lses: Tensor) -> dict[str, Any]:
    """Arguments for stacked parts (n, b, s_q, h, d_v), (n, b, h, s_q), as the mode has them."""
    if spec.mode == "stack":
        return {"o": outs, "lses": lses}
    count, n = 2 if spec.mode == "pair" else MAX_LIST, len(outs)
    given: dict[str, Any] = {f"o_{i}": outs[min(i, n - 1)] for i in range(count)}
    given |= {f"lse_{i}": lses[min(i, n - 1)] for i in range(count)}
    return given if count == 2 else {**given, "parts": n}


def _stacked(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """What ``_parts`` was given."""
    if "o" in given:
        return given["o"], given["lses"]
    n = given.get("parts", 2)
    outs, lses = ([given[f"{name}_{i}"] for i in range(n)] for name in ("o", "lse"))
    return torch.stack(outs), torch.stack(lses)


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """fp64 out and lse."""
    base = "e" if given["lse_factor"] == LN2 else "2"
    out, lse = reference.merge_states_reference(*_stacked(given), lse_base=base)
    return {"out": out, "lse": lse}


def small(spec: VariantSpec) -> Iterator[Call]:
    """Over a part where the dtype allows it, and over its LSE; then a merge of what that left."""
    n, b, s_q, heads = {"pair": 2, "list": 5, "stack": 11}[spec.mode], 2, 3, 5
    rows = torch.randn(n, b, s_q, heads, spec.d_v + 8).to(DTYPES[spec.in_dtype])
    outs, lses = rows[..., : spec.d_v], 4.0 * torch.randn(n, b, s_q, heads).mT
    lses[0, 0, 1], lses[1, 0, 2], lses[:, 1, 3] = -math.inf, math.inf, math.inf
    outs[0, 0, :, 1], outs[1, 0, :, 2], outs[:, 1, :, 3] = math.nan, math.nan, math.nan
    for in_place in (True, False):
        out = torch.full((b, s_q, heads, spec.d_v), 7.0).to(DTYPES[spec.out_dtype])
        lse = torch.full((b, heads, s_q), 7.0)
        if in_place:
            out, lse = outs[1] if out.dtype == outs.dtype else out, lses[1]
        given = {**_parts(spec, outs, lses), "out": out, "lse": lse, "lse_factor": LN2}
        yield Call(given, {"out": "out", "lse": "lse"}, truth(spec, given))


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Compares with the truth, rounded to the results' dtype; NaN where that is, and nowhere else:
    an LSE that was written over makes values count that were of an empty part."""
    error, lse_error, allowed = 0.0, 0.0, 0.0
    for call in calls:
        out, want = call.pairs["out"]
        none = torch.isnan(want)
        if torch.equal(none, torch.isnan(out)):
            out, want = (x.masked_fill(none, 0.0) for x in (out, want))
        rounded = metrics.relative_l2(want.to(out.dtype), want)
        error = metrics.largest(error, metrics.relative_l2(out, want))
        allowed = max(allowed, rounded)
        lse_error = metrics.largest(lse_error, metrics.lse_error(*call.pairs["lse"]))
    allowed = MIMIC_FACTOR * allowed + 5e-7
    return Result(
        error <= allowed and lse_error <= 2e-6,
        f"relative L2 {error:.1e} (allowed {allowed:.1e}), LSE {lse_error:.1e} (allowed 2e-6)",
    )


def recorded(case: Case, run: Runner) -> Recorded:
    """Parts of which some are empty, of either sign, over values that are NaN or infinite."""
    spec, odd = case.spec, case.index % 2
    n = {"pair": 2, "list": (3, 8)[odd], "stack": (5, 19)[odd]}[spec.mode]
    b, s_q, heads = ((3, 2, 5), (1, 7, 3))[odd]
    if spec.d_v != KV_LORA_RANK:
        heads = 4  # the record has rows of 512 values: of these, several
    bits = case.bits()
    o = exact.bell(bits, (n, b, s_q, heads, spec.d_v), 2)
    lse = exact.bell(bits, (n, b, heads, s_q), bits.below(9, (n, b, heads, s_q)) - 2)
    hit = bits.below(8, lse.shape)
    lse[hit == 0], lse[hit == 1] = -np.inf, np.inf
    lse[hit == 2] = np.float32(3.25)  # equal weights
    o.swapaxes(2, 3)[hit == 0], o.swapaxes(2, 3)[hit == 1] = np.nan, np.inf
    lse[:, 0, 0, 0], lse[0, 0, 1, 0], lse[:, 0, 2, 1] = np.inf, -np.inf, -np.inf
    lse[1, 0, 1, 1] = np.nan
    parts = exact.as_tensor(o, DTYPES[spec.in_dtype], run.device), run.there(lse)
    out = run.full((b, s_q, heads, spec.d_v), 3.0, DTYPES[spec.out_dtype])
    lse_out = run.full((b, heads, s_q), 3.0)
    factor, _ = exact.LSE[odd]
    run.call(case.variant, **_parts(spec, *parts), out=out, lse=lse_out, lse_factor=factor)
    return exact.results([o, lse], out, lse_out)


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Two parts, or ``sizes.parts`` up to as many as a list may have."""
    source, n = Source(device, seed), 2 if spec.mode == "pair" else min(sizes.parts, MAX_LIST)
    rows = (sizes.batch, sizes.s_q, sizes.heads, spec.d_v)
    outs = source.normal(n, *rows, dtype=DTYPES[spec.in_dtype])
    lses = source.normal(n, sizes.batch, sizes.heads, sizes.s_q, dtype=torch.float32)
    results = source.results(sizes, spec.out_dtype, spec.d_v)
    return {**_parts(spec, outs, lses), **results, "lse_factor": LN2}


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.merge_states``, of stacked tensors or of lists."""
    if spec.mode == "stack":
        parts: tuple[Any, Any] = given["o"], given["lses"]
    else:
        n = given.get("parts", 2)
        parts = [given[f"o_{i}"] for i in range(n)], [given[f"lse_{i}"] for i in range(n)]
    return lambda: snapmla.merge_states(*parts, out=given["out"], lse=given["lse"])


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads the parts' rows and LSE, writes one's."""
    rows = sizes.batch * sizes.s_q * sizes.heads
    element = DTYPES[spec.in_dtype].itemsize
    return float(sizes.parts + 1) * rows * (spec.d_v * element + 4)


_MODES = ("pair", "list", "stack")
WORKLOAD = Workload(
    small, judge, recorded, sized, truth, public, moved,
    bench={
        "merge_states": {
            **{mode: {"mode": mode} for mode in _MODES},
            **{f"{m}_f32": {"mode": m, "in_dtype": "f32", "out_dtype": "f32"} for m in _MODES},
        }
    },
)  # fmt: skip

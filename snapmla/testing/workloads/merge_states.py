"""``merge_states``: results over disjoint tokens into one; in pairs, from lists, from a stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import snapmla
from dsl_kernels.formats.dims import KV_LORA_RANK
from dsl_kernels.spec import VariantSpec
from snapmla.dense.merge import MAX_LIST
from snapmla.testing import metrics, reference
from snapmla.testing.comparison import MIMIC_FACTOR
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, LN2, Call, Result, Sizes
from snapmla.testing.workloads.draw import Draw, Plant, nothing
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Problem, named, workload


def _parts(spec: VariantSpec, outs: Tensor, lses: Tensor) -> dict[str, Any]:
    """Arguments for stacked parts (n, b, s_q, h, d_v), (n, b, h, s_q), as the mode has them."""
    if spec.mode == "stack":
        return {"o": outs, "lses": lses}
    count, n = 2 if spec.mode == "pair" else MAX_LIST, len(outs)
    given: dict[str, Any] = {f"o_{i}": outs[min(i, n - 1)] for i in range(count)}
    given |= {f"lse_{i}": lses[min(i, n - 1)] for i in range(count)}
    return given if count == 2 else {**given, "parts": n}


def _stacked(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(outs, LSE), stacked, of a call: the inputs that ``_parts`` took apart."""
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


@dataclass(frozen=True, kw_only=True)
class Parts(Problem):
    """Parts of the same rows.

    Attributes:
        parts, batch, s_q, heads: extents.
        plant: (draw, outs (parts, batch, s_q, heads, d_v), LSE (parts, batch, heads, s_q)).
        apart: rows have gaps, and LSE of a token's heads lie side by side.
        in_place: results lie over a part where the dtype allows it, and over its LSE.
    """

    parts: int
    batch: int
    s_q: int
    heads: int
    plant: Plant = nothing
    apart: bool = False
    in_place: bool = False


def arguments(spec: VariantSpec, problem: Parts, draw: Draw) -> dict[str, Any]:
    """Arguments by name; problems of one draw merge the same parts."""
    outs, lses = draw.once("parts", lambda: _drawn(spec, problem, draw))
    shape = problem.batch, problem.s_q, problem.heads
    results = draw.results(*shape, DTYPES[spec.out_dtype], spec.d_v)
    if problem.in_place:
        results["lse"] = lses[1]
        if spec.in_dtype == spec.out_dtype:
            results["out"] = outs[1]
    return {
        **_parts(spec, outs, lses), **results, "lse_factor": draw.lse_units()["lse_factor"]
    }  # fmt: skip


def _drawn(spec: VariantSpec, problem: Parts, draw: Draw) -> tuple[Tensor, Tensor]:
    """Outputs and LSE of all parts."""
    n, b, s_q, heads = problem.parts, problem.batch, problem.s_q, problem.heads
    rows = draw.rows(n, b, s_q, heads, spec.d_v + 8 * problem.apart)
    lses = draw.lses(n, b, s_q, heads).mT if problem.apart else draw.lses(n, b, heads, s_q)
    problem.plant(draw, rows[..., : spec.d_v], lses)
    draw.identify_by(rows, lses)
    outs = draw.there(rows, DTYPES[spec.in_dtype])[..., : spec.d_v]
    return outs, draw.there(lses)


def _empty(_draw: Draw, outs: Tensor, lses: Tensor) -> None:
    """Plants rows without tokens, of either sign of LSE, over NaN."""
    lses[0, 0, 1], lses[1, 0, 2], lses[:, 1, 3] = -math.inf, math.inf, math.inf
    outs[0, 0, :, 1], outs[1, 0, :, 2], outs[:, 1, :, 3] = math.nan, math.nan, math.nan


def _awkward(draw: Exact, outs: Tensor, lses: Tensor) -> None:
    """Plants rows without tokens over NaN or infinity, equal weights, and an LSE that is NaN."""
    hit, by_head = draw.below(8, lses.numel()).view_as(lses), outs.transpose(2, 3)
    lses[hit == 0], lses[hit == 1], lses[hit == 2] = -math.inf, math.inf, 3.25
    by_head[hit == 0], by_head[hit == 1] = math.nan, math.inf
    lses[:, 0, 0, 0], lses[0, 0, 1, 0], lses[:, 0, 2, 1] = math.inf, -math.inf, -math.inf
    lses[1, 0, 1, 1] = math.nan


def small(spec: VariantSpec) -> Iterator[Parts]:
    """A merge in place, then one of what that left."""
    n = {"pair": 2, "list": 5, "stack": 11}[spec.mode]
    for in_place in (True, False):
        yield Parts(parts=n, batch=2, s_q=3, heads=5, plant=_empty, apart=True, in_place=in_place)


def recorded(draw: Exact) -> Iterator[Parts]:
    """Parts of which some are empty, of either sign, over values that are NaN or infinite."""
    spec = draw.case.spec
    n = {"pair": 2, "list": (3, 8)[draw.odd], "stack": (5, 19)[draw.odd]}[spec.mode]
    b, s_q, heads = ((3, 2, 5), (1, 7, 3))[draw.odd]
    if spec.d_v != KV_LORA_RANK:
        heads = 4  # the record has rows of 512 values: of these, several
    yield Parts(parts=n, batch=b, s_q=s_q, heads=heads, plant=_awkward)


def sized(spec: VariantSpec, sizes: Sizes) -> Parts:
    """Two parts, or ``sizes.parts`` up to as many as a list may have."""
    n = 2 if spec.mode == "pair" else min(sizes.parts, MAX_LIST)
    return Parts(parts=n, batch=sizes.batch, s_q=sizes.s_q, heads=sizes.heads)


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
WORKLOAD = workload(
    judge, truth, arguments, small=small, recorded=recorded, sized=sized,
    results=named("out", "lse"), rows=lambda _, given: exact.rows_of(given["out"], given["lse"]),
    public=public, moved=moved,
    bench={
        "merge_states": {
            **{mode: {"mode": mode} for mode in _MODES},
            **{f"{m}_f32": {"mode": m, "in_dtype": "f32", "out_dtype": "f32"} for m in _MODES},
        }
    },
)  # fmt: skip

"""``merge``: split sequences' partial rows, of a plan's slots, into results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.dims import KV_LORA_RANK
from dsl_kernels.spec import VariantSpec
from snapmla.testing import metrics, partials
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, NATURAL, Call, Result, Sizes, Workload
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import PAGE, Source


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


def small(spec: VariantSpec) -> Iterator[Call]:
    """Few slots and none; so many that warps share a strip of a unit, in CTAs of a strip each or of
    two."""
    for s_q, heads, split_begin in ((2, 5, (0, 3, 3, 12, 40)), (1, 2, (0, 17, 92))):
        b, slots = len(split_begin) - 1, split_begin[-1] + 1
        rows, lse_accum = torch.randn(slots, 16, KV_LORA_RANK), 4.0 * torch.randn(slots, 16)
        lse_accum[3:12, 4] = -math.inf  # a row that no split saw, or not all
        rows[3:12, 4] = 0.0
        given = {
            "o_accum": partials.encode(rows), "lse_accum": lse_accum,
            "split_begin": torch.tensor(split_begin).int(),
            "units": torch.zeros((0, 2), dtype=torch.int32),  # a unit is a sequence
            "out": torch.full((b, s_q, heads, KV_LORA_RANK), 7.0).to(DTYPES[spec.out_dtype]),
            "lse": torch.full((b, heads, s_q), 7.0), **NATURAL,
        }  # fmt: skip
        yield Call(given, {"out": "out", "lse": "lse"}, truth(spec, given))


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


def recorded(case: Case, run: Runner) -> Recorded:
    """0 to 33 slots a sequence; rows that no split saw, NaN, infinities, equal weights."""
    b, s_q, heads, rows_pad = ((6, 2, 7, 16), (6, 1, 23, 32))[case.index % 2]
    counts = np.array([0, 1, 2, 5, 33, 3])
    begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    slots, bits = int(begin[-1]), case.bits()
    o = exact.bell(bits, (slots, rows_pad, KV_LORA_RANK), 2)
    lse = exact.bell(bits, (slots, rows_pad), bits.below(9, (slots, rows_pad)) - 2)
    hit = bits.below(12, lse.shape)
    lse[hit == 0], o[hit == 0] = -np.inf, 0
    lse[:, 1], o[:, 1] = -np.inf, 0
    lse[2, 3], lse[4, 4], lse[9, 5] = np.nan, np.inf, -np.inf
    o[5, 6, 7], o[6, 2, 3] = np.nan, np.inf
    lse[:, 0] = np.float32(3.25)  # equal weights
    out = run.full((b, s_q, heads, KV_LORA_RANK), 3.0, DTYPES[case.spec.out_dtype])
    lse_out = run.full((b, heads, s_q), 3.0)
    factor, empty = exact.LSE[case.index % 2]
    run.call(
        case.variant, o_accum=partials.encode(torch.from_numpy(o)).to(run.device),
        lse_accum=run.there(lse), split_begin=run.there(begin), **run.alone("units"), out=out,
        lse=lse_out, lse_factor=factor, empty_lse=empty,
    )  # fmt: skip
    return exact.results([o, lse, begin], out, lse_out)


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Partial results of sequences that are dealt to all parts evenly."""
    source = Source(device, seed)
    work, slots = source.split_work(sizes, PAGE)
    given = source.partial_rows(slots, sizes.heads * sizes.s_q, "bf16")
    given |= {"split_begin": work["split_begin"], **source.alone("units")}
    return {**given, **source.results(sizes, spec.out_dtype), **NATURAL}


WORKLOAD = Workload(small, judge, recorded, sized, truth)

"""``decode``: over an FP8 cache.

What a decode reads and computes, for other formats' caches too: ``profiles.roofline``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.arguments import ordered
from dsl_kernels.formats.dims import KV_LORA_RANK, PARTIAL_ROW, QK_ROPE_HEAD_DIM
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing.comparison import DecodeErrors, decode_errors, mimic_of
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import Queries, plan_reference
from snapmla.testing.workloads import exact, samples
from snapmla.testing.workloads.call import (
    DTYPES,
    NATURAL,
    Call,
    Job,
    Sizes,
    Workload,
    decoded,
    planned,
)
from snapmla.testing.workloads.exact import Array, Bits, Case, Recorded, Runner
from snapmla.testing.workloads.samples import LENGTHS, PARTS, SHAPES, Random

if TYPE_CHECKING:
    import softgpu

HEAD_SCALE = 576**-0.5


class DecodeJob:
    """One decode at the level of the ABI: ragged lengths, splits, poison wherever no token is.

    Args:
        spec: the decode variant; its row tile picks heads and s_q.
        lengths: tokens per sequence.  parts: CTAs (or clusters) that share them.
        heads, s_q: None takes ``SHAPES``.  layout: of the cache.
        planner: the plan_decode kernel; None plans with ``reference_plan``.
    """

    def __init__(
        self,
        spec: VariantSpec,
        lengths: Sequence[int] = LENGTHS,
        parts: int = PARTS,
        *,
        heads: int | None = None,
        s_q: int | None = None,
        layout: str = "split",
        planner: variants.Kernel | None = None,
    ) -> None:
        self.spec, self.lengths, self.parts = spec, tuple(lengths), parts
        self.planner = planner
        usual = SHAPES[spec.row_tile]
        self.heads, self.s_q = heads or usual[0], s_q or usual[1]
        self.cache, self.table, self.seqlens = samples.filled_cache(
            self.lengths, spec.page_size, layout
        )
        self.q = samples.sample_query(len(self.lengths), self.s_q, self.heads)
        capacity = self.table.shape[1] * spec.page_size
        unit_rows = -(-self.heads * self.s_q // spec.row_tile) * spec.row_tile
        self.queries = Queries(self.heads, self.s_q, unit_rows, causal=True)
        self.plan = plan_reference(
            self.lengths, parts, spec.token_tile, 1, capacity, queries=self.queries
        )

    def arguments(self) -> dict[str, Any]:
        """Arguments of one call by name; results and workspace are new and full of NaN."""
        b, q, cache = len(self.lengths), self.q, self.cache
        unit_rows = self.queries.unit_rows
        out = torch.full((b, self.s_q, self.heads, KV_LORA_RANK), math.nan)
        out = out.to(DTYPES[self.spec.out_dtype])
        lse = torch.full((b, self.heads, self.s_q), math.nan)
        o_accum = torch.full((2 * self.parts, unit_rows, PARTIAL_ROW), math.nan).half()
        lse_accum = torch.full((2 * self.parts, unit_rows), math.nan)
        return {
            "q_nope": q.nope_u8, "q_rope": q.rope, "q_scale": q.row_scale,
            "content": cache.content_u8, "rope": cache.rope, "scale": cache.scale,
            "block_table": self.table, "cache_seqlens": self.seqlens,
            "out": out, "lse": lse, "o_accum": o_accum, "lse_accum": lse_accum,
            **self._planned().arguments(),
            "softmax_scale": HEAD_SCALE, "causal": 1, **NATURAL,
            "may_split": int(self.plan.split_begin[-1] > 0), "witness": 0,
        }  # fmt: skip

    def run(self, kernel: softgpu.LoadedKernel) -> tuple[Tensor, Tensor]:
        """(out, lse) of one call, on the software GPU."""
        given = self.arguments()
        kernel(*ordered(kernel.names.arguments, given))
        return given["out"], given["lse"]

    def _planned(self) -> PlanTables:
        """The plan's tables, by the kernel or the reference."""
        if self.planner is None:
            return PlanTables.of(self.plan)
        tables = PlanTables.empty(len(self.lengths), self.parts, self.queries)
        capacity = self.table.shape[1] * self.spec.page_size
        tables.fill(
            self.planner, self.seqlens, self.queries, (capacity, self.spec.token_tile, 1, 0)
        )
        return tables

    def errors(self, result: tuple[Tensor, Tensor]) -> DecodeErrors:
        """Errors of ``run``'s (out, lse) against the reference."""
        out, lse = result
        exact = os.environ.get("SOFTGPU_ACCUMULATE") == "exact"
        return decode_errors(
            out, lse, self.q, self.cache, self.table, self.seqlens, HEAD_SCALE,
            config=mimic_of(self.spec, exact=exact),
        )  # fmt: skip


def small(spec: VariantSpec) -> Iterator[Call]:
    """Ragged lengths, splits."""
    job = DecodeJob(spec)
    yield Call(job.arguments(), {}, job=job)


def job_of(spec: VariantSpec, lengths: Sequence[int], planner: variants.Kernel) -> Job:
    """A ``DecodeJob`` behind the planning kernel."""
    job = DecodeJob(spec, lengths, planner=planner)
    return Job(cast(Any, job.run), job.errors, job.plan.tiles)


# ---------------------------------------------------------------------------- on record


def _pool_tokens(case: Case, bits: Bits, tokens: int, style: str) -> tuple[Array, Array, Array]:
    """(content codes, rope, scale) of a pool's tokens, the latter two float32."""
    content = exact.e4m3(bits, (tokens, KV_LORA_RANK), bits.below(2, (tokens, 1)))
    if case.index // 4 % 2:  # latents with a mean: sums that grow
        content &= np.where(bits.below(3, content.shape) > 0, 0x7F, 0xFF).astype(np.uint8)
    rope = exact.bell(bits, (tokens, QK_ROPE_HEAD_DIM), 3 if style == "outlier" else 0)
    mantissa = np.float32(1) + bits.unit((tokens,)).astype(np.float32)
    scale = np.ldexp(mantissa, (bits.below(5, (tokens,)) - 4).astype(np.int32))
    return content, rope, scale.astype(np.float32)


def _problem(case: Case) -> dict[str, Array]:
    """Arrays of a step, in the order of its digest; RoPE as bits of bf16.

    Content logits of deviation 1 to 3; unused bytes NaN, page ids behind the end absurd.
    """
    spec, bits = case.spec, case.bits()
    style, p = exact.STYLES[case.index % 4], spec.page_size
    heads, s_q = exact.SHAPES[spec.row_tile][case.index // 2 % 2]
    lengths = exact.lengths_of(case)
    table, pages = exact.block_table(bits, lengths, p)
    shape = (len(lengths), s_q, heads)
    q8 = exact.e4m3(bits, (*shape, KV_LORA_RANK), 0)
    q_rope = exact.bell(bits, (*shape, QK_ROPE_HEAD_DIM), 0)
    mantissa = np.float32(1) + bits.unit(shape).astype(np.float32)
    q_scale = np.ldexp(mantissa, -1 if style == "sharp" else -3).astype(np.float32)
    content, rope, scale = _pool_tokens(case, bits, pages * p, style)
    slot = exact.slots_of(table, p)
    if style == "awkward":
        zero, nan, huge = slot[-2, 5], slot[-1, 2], slot[-2, 40]
        content[zero], rope[zero], scale[zero] = 0, 0, 2.0**-80
        rope[huge] *= np.float32(8)
        content[nan], scale[nan], rope[nan] = 0x7F, np.nan, np.nan
    unused = np.ones(pages * p, bool)
    for i, length in enumerate(lengths):
        unused[slot[i, :length]] = False
    content[unused], rope[unused], scale[unused] = 0xFF, np.nan, np.nan
    return {
        "q_nope": q8, "q_rope": exact.cut_bf16(q_rope), "q_scale": q_scale.view(np.uint32),
        "content": content, "rope": exact.cut_bf16(rope), "scale": scale.view(np.uint32),
        "block_table": table, "cache_seqlens": lengths,
    }  # fmt: skip


def recorded(case: Case, run: Runner) -> Recorded:
    """decode without its merge, whose kernel then runs by itself: both results are recorded."""
    spec, given = case.spec, _problem(case)
    b, s_q, heads, _ = given["q_nope"].shape
    rows_pad = -(-s_q * heads // spec.row_tile) * spec.row_tile
    pages = len(given["scale"]) // spec.page_size
    cache = exact.pool(pages, spec.page_size, exact.LAYOUTS[case.index % 3], run.device)
    exact.fill(cache, given["content"], given["rope"], given["scale"])
    lists, slots = exact.work_list(case, given["cache_seqlens"], s_q * heads)
    work = {name: run.there(x) for name, x in lists.items()}
    o_accum = run.full((slots, rows_pad, PARTIAL_ROW), 5.0, torch.float16)
    lse_accum = run.full((slots, rows_pad), 5.0)
    out = run.full((b, s_q, heads, KV_LORA_RANK), 5.0, DTYPES[spec.out_dtype])
    lse = run.full((b, heads, s_q), 5.0)
    factor, empty = exact.LSE[case.index // 2 % 2]
    merged = {
        "o_accum": o_accum, "lse_accum": lse_accum, "split_begin": work["split_begin"],
        **run.alone("units"), "out": out, "lse": lse, "lse_factor": factor, "empty_lse": empty,
    }  # fmt: skip
    run.call(
        case.variant, q_nope=run.there(given["q_nope"]),
        q_rope=exact.from_bits(given["q_rope"], "bf16").to(run.device),
        q_scale=run.there(given["q_scale"].view(np.float32)), **cache,
        block_table=run.there(given["block_table"]),
        cache_seqlens=run.there(given["cache_seqlens"]), work_items=work["work_items"],
        part_begin=work["part_begin"], **run.alone("row_limits", "cu_seqlens_q"), **merged,
        softmax_scale=exact.SOFTMAX_SCALE, causal=int(case.index % 3 != 2), may_split=0, witness=0,
    )  # fmt: skip
    before = exact.bits_of(out).reshape(-1, KV_LORA_RANK)
    merge = VariantSpec(op="merge", arch=spec.arch, out_dtype=spec.out_dtype)
    run.call(merge.name, **merged)
    results = exact.results(list(given.values()), out, lse)
    rows = {
        "o_accum": exact.bits_of(o_accum).reshape(-1, PARTIAL_ROW),
        "lse_accum": exact.bits_of(lse_accum).reshape(-1, 1),
        "unmerged": before,
        **results.rows,
    }
    raw = {"lse": rows["lse"][:, 0], "lse_accum": rows["lse_accum"][:, 0]}
    return Recorded(results.inputs, rows, raw)


# ---------------------------------------------------------------------------- as in service


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Random bytes, the work dealt evenly; splits are not merged: the decode kernel alone."""
    source = Random(device, seed)
    paged, pages = source.paged(sizes, spec.page_size)
    rows = (sizes.batch, sizes.s_q, sizes.heads)
    return {
        "q_nope": source.e4m3(*rows, KV_LORA_RANK),
        "q_rope": source.normal(*rows, QK_ROPE_HEAD_DIM), "q_scale": source.full(*rows, value=0.01),
        **source.planes(pages, spec.page_size, "fp8"), **paged,
        **source.decode(spec, sizes, "bf16", spec.out_dtype),
    }  # fmt: skip


WORKLOAD = Workload(small, decoded, recorded, sized, job=job_of, tiles=planned)

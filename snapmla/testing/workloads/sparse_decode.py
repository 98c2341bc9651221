"""``sparse_decode``: query tokens over tokens of an FP8 cache that each of them names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dsl_kernels.formats.dims import KV_LORA_RANK, PARTIAL_ROW, QK_ROPE_HEAD_DIM
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import Queries, plan_reference
from snapmla.testing.sparse_job import HEAD_SCALE, SparseJob, SparseShape
from snapmla.testing.workloads import exact, sparse_records
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
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import PAGE, Random

HEADS = {16: (16, 7), 32: (32, 20), 64: (128, 50)}  # row tile: even shares of it, and not
PAGES_OF = (1, 53, 64)  # tokens of a page of recorded cases
# Behind the others, of SM100: more lists of none in a row than the ring has stages.  One of its two
# gather warps copies nothing of Q's stages, and could begin on them while the other is late at the
# last tile before, whose stage comes round again: one schedule in four notices.
BEHIND = 6 * (0,)


def shapes(spec: VariantSpec) -> tuple[SparseShape, ...]:
    """Small calls: splits, several query tokens and sinks; one token alone; ragged queries."""
    even, odd = HEADS[spec.row_tile]
    return (
        SparseShape(odd, 200, (200, 70), 53, s_q=2, layout="packed", sink=True, parts=3),
        SparseShape(even, 17, (17, 5), 1, layout="paged", parts=1),
        SparseShape(
            odd, 130, (130, 0, 99), 2, s_q=5, begins=(0, 2, 2, 4), layout="row640",
            own_lengths=(130, 64, 3, 200, 77), style="equal",
        ),
    )  # fmt: skip


def small(spec: VariantSpec) -> Iterator[Call]:
    """``shapes``; of a cache of rows those of ``sparse_records``."""
    if spec.pipeline in sparse_records.PIPELINES:
        yield from sparse_records.small(spec)
        return
    for shape in shapes(spec):
        job = SparseJob(spec, shape)
        yield Call(job.arguments(), {}, job=job, note=str(shape))


def job_of(spec: VariantSpec, lengths: Sequence[int], planner: variants.Kernel) -> Job:
    """A ``SparseJob`` behind the planning kernel: swinging logits, splits, sinks."""
    if spec.pipeline in sparse_records.PIPELINES:
        return sparse_records.job_of(spec, lengths, planner)
    ordered, parts = tuple(lengths), 3
    if spec.row_tile == 64 or (spec.pipeline, spec.row_tile) == ("f16", 32):
        ordered, parts = sparse_records.in_order(lengths), 2
    if spec.arch == "sm_100a":
        ordered = (*ordered, *BEHIND)
    shape = SparseShape(
        HEADS[spec.row_tile][1], max(lengths), ordered, 53, layout="packed", sink=True,
        style="swings", parts=parts,
    )  # fmt: skip
    job = SparseJob(spec, shape, planner=planner)
    return Job(job.run, job.errors, job.plan.tiles)


def recorded(case: Case, run: Runner) -> Recorded:
    """With its merge, in one call; lists of tokens anywhere in the pool, one in eight of none."""
    if case.spec.pipeline in sparse_records.PIPELINES:
        return sparse_records.recorded(case, run)
    spec, bits = case.spec, case.bits()
    heads = HEADS[spec.row_tile][case.index % 2]
    lengths, p = exact.lengths_of(case), PAGES_OF[case.index % 3]
    topk, b = int(lengths.max()), len(lengths)
    pages = -(-2 * topk // p)
    content = exact.e4m3(bits, (pages * p, KV_LORA_RANK), bits.below(2, (pages * p, 1)))
    rope = exact.cut_bf16(exact.bell(bits, (pages * p, QK_ROPE_HEAD_DIM), 0))
    scale = exact.scales(bits, (pages * p,), bits.below(5, (pages * p,)) - 4)
    indices = bits.below(pages * p, (b, topk)).astype(np.int32)
    indices[bits.below(8, (b, topk)) == 0] = (-1, 2**31 - 1)[case.index % 2]
    q8 = exact.e4m3(bits, (b, 1, heads, KV_LORA_RANK), 0)
    q_rope = exact.cut_bf16(exact.bell(bits, (b, 1, heads, QK_ROPE_HEAD_DIM), 0))
    q_scale = exact.scales(bits, (b, 1, heads), -3)
    cache = exact.pool(pages, p, "split", run.device)
    exact.fill(cache, content, rope, scale.view(np.uint32))
    lists, slots = exact.work_list(case, lengths, heads)
    factor, empty = exact.LSE[case.index // 2 % 2]
    out = run.full((b, 1, heads, KV_LORA_RANK), 5.0, DTYPES[spec.out_dtype])
    lse = run.full((b, heads, 1), 5.0)
    sink = run.full((heads if case.index % 2 else 0,), 1.0)
    run.call(
        case.variant, q_nope=run.there(q8), q_rope=exact.from_bits(q_rope, "bf16").to(run.device),
        q_scale=run.there(q_scale), **cache, indices=run.there(indices)[:, None],
        topk_length=run.there(lengths), attn_sink=sink,
        **{name: run.there(x) for name, x in lists.items()},
        **run.alone("units", "row_limits", "cu_seqlens_q"),
        out=out, lse=lse, o_accum=run.full((slots, heads, PARTIAL_ROW), 5.0, torch.float16),
        lse_accum=run.full((slots, heads), 5.0), softmax_scale=exact.SOFTMAX_SCALE,
        lse_factor=factor, empty_lse=empty, may_split=1, witness=0,
    )  # fmt: skip
    return exact.results([q8, q_rope, q_scale, content, rope, scale, indices, lengths], out, lse)


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Each query token names ``sizes.tokens`` of a pool that is eight times as large, at random."""
    if spec.pipeline in sparse_records.PIPELINES:
        return sparse_records.sized(spec, sizes, device, seed)
    source, topk, tokens = Random(device, seed), sizes.tokens, sizes.batch * sizes.s_q
    pages = -(-8 * topk * sizes.batch // PAGE)
    queries = Queries(sizes.heads, sizes.s_q, sizes.heads)
    plan = plan_reference(
        [topk] * sizes.batch, sizes.parts, spec.token_tile, spec.family.item_overhead, topk,
        queries=queries,
    )  # fmt: skip
    slots = max(plan.split_begin[-1], 1)
    rows = (sizes.batch, sizes.s_q, sizes.heads)
    tables = {name: x.to(device) for name, x in PlanTables.of(plan).arguments().items()}
    return {
        "q_nope": source.e4m3(*rows, KV_LORA_RANK),
        "q_rope": source.normal(*rows, QK_ROPE_HEAD_DIM), "q_scale": source.full(*rows, value=0.01),
        **source.planes(pages, PAGE, "fp8"),
        "indices": source.below(pages * PAGE, tokens * topk).int().view(
            sizes.batch, sizes.s_q, topk
        ),
        "topk_length": source.i32([topk] * sizes.batch), "attn_sink": source.full(0), **tables,
        **source.results(sizes.batch, sizes.s_q, sizes.heads, exact.TORCH[spec.out_dtype]),
        "o_accum": source.full(slots, sizes.heads, PARTIAL_ROW, dtype=torch.float16),
        "lse_accum": source.full(slots, sizes.heads, value=-math.inf),
        "softmax_scale": HEAD_SCALE, **NATURAL, "may_split": int(plan.split_begin[-1] > 0),
        "witness": 0,
    }  # fmt: skip


WORKLOAD = Workload(small, decoded, recorded, sized, job=job_of, tiles=planned)

"""``sparse_decode`` over caches of bytes: what of its workload is the cache's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, PARTIAL_ROW, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.ds_mla import GROUPS, ROPE_AT, ROW_BYTES, SCALES_AT
from dsl_kernels.formats.format import Format
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla.cache import byte_cache
from snapmla.runtime import variants
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.record_job import RecordJob, RecordShape, poisoned_rows
from snapmla.testing.reference_plan import Queries, plan_reference
from snapmla.testing.sparse_job import HEAD_SCALE
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, NATURAL, Call, Job, Sizes
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import PAGE, Random

PIPELINES = ("mix16", "mix8")  # whose cache is bytes
HEADS = {16: (16, 7), 32: (32, 20), 64: (128, 50)}  # row tile: even shares of it, and not
PAGES_OF = (1, 53, 64)  # tokens of a page of recorded cases
# Of SM90's lengths of a job where Q has one stage.  With two parts the first then has one tile, a
# list of none, and five tiles of the longest: the KV ring is full of an item whose predecessor's Q
# nobody has had to read.
ORDER = (3, 1, 2, 0, 4)


def in_order(lengths: Sequence[int]) -> tuple[int, ...]:
    """A job's lengths in ``ORDER``; as they are if they are not as many: SM100's ten begin with
    empty lists, of which ``ORDER`` would choose five."""
    return tuple(lengths[i] for i in ORDER) if len(lengths) == len(ORDER) else tuple(lengths)


def several_of_none(lengths: Sequence[int]) -> tuple[int, ...]:
    """Three of none for each: of several, one behind another, P.V's warps could convert a Q before
    softmax has heard of the last one."""
    return tuple(n for length in lengths for n in ((length,) if length else (0, 0, 0)))


def shapes(spec: VariantSpec) -> tuple[RecordShape, ...]:
    """Small calls: splits, several query tokens and sinks; one tile or less; ragged queries; scales
    of every kind."""
    even, odd = HEADS[spec.row_tile]
    return (
        RecordShape(odd, 200, (200, 70), 53, s_q=2, layout="packed", sink=True, parts=3),
        RecordShape(
            even, 17, (17, 5), 1, layout="padded", parts=1, powers=True,
            two_tensors=True,
        ),
        RecordShape(
            odd, 130, (130, 0, 99), 2, s_q=5, begins=(0, 2, 2, 4), layout="padded",
            own_lengths=(130, 64, 3, 200, 77), style="equal",
        ),
        RecordShape(odd, 131, (66, 5, 131), 3, parts=1, style="scales"),
    )  # fmt: skip


def small(spec: VariantSpec) -> Iterator[Call]:
    """``shapes``."""
    for shape in shapes(spec):
        job = RecordJob(spec, shape)
        yield Call(job.arguments(), {}, job=job, note=str(shape))


def job_of(spec: VariantSpec, lengths: Sequence[int], planner: variants.Kernel) -> Job:
    """A ``RecordJob`` behind the planning kernel: swinging logits, splits, sinks."""
    ordered, parts = tuple(lengths), 3
    if spec.row_tile >= 32:
        ordered, parts = in_order(lengths), 2
    ordered = several_of_none(ordered)
    shape = RecordShape(
        HEADS[spec.row_tile][1], max(lengths), ordered, 53, layout="packed", sink=True,
        style="swings", parts=parts,
    )  # fmt: skip
    job = RecordJob(spec, shape, planner=planner)
    return Job(job.run, job.errors, job.plan.tiles)


def recorded(case: Case, run: Runner) -> Recorded:
    """With its merge, in one call; lists of tokens anywhere in the pool, one in eight of none."""
    spec, bits = case.spec, case.bits()
    heads = HEADS[spec.row_tile][case.index % 2]
    lengths, p = exact.lengths_of(case), PAGES_OF[case.index % 3]
    topk, b = int(lengths.max()), len(lengths)
    pages = -(-2 * topk // p)
    n = pages * p
    rows = np.empty((n, ROW_BYTES), np.uint8)
    rows[:, :SCALES_AT] = exact.e4m3(bits, (n, KV_LORA_RANK), bits.below(2, (n, 1)))
    scales = exact.scales(bits, (n, GROUPS), bits.below(5, (n, GROUPS)) - 4)
    rows[:, SCALES_AT:ROPE_AT] = scales.view(np.uint8)
    rows[:, ROPE_AT:] = exact.cut_bf16(exact.bell(bits, (n, QK_ROPE_HEAD_DIM), 0)).view(np.uint8)
    indices = bits.below(n, (b, topk)).astype(np.int32)
    indices[bits.below(8, (b, topk)) == 0] = (-1, 2**31 - 1)[case.index % 2]
    q = exact.cut_bf16(exact.bell(bits, (b, 1, heads, HEAD_DIM_QK), 0))
    cache = poisoned_rows(pages, p, ("split", "padded", "packed")[case.index % 3])
    cache = cache.to(run.device)
    cache.copy_(run.there(rows).view(cache.shape))
    lists, slots = exact.work_list(case, lengths, heads)
    factor, empty = exact.LSE[case.index // 2 % 2]
    out = run.full((b, 1, heads, KV_LORA_RANK), 5.0, DTYPES[spec.out_dtype])
    lse = run.full((b, heads, 1), 5.0)
    sink = run.full((heads if case.index % 2 else 0,), 1.0)
    query = exact.from_bits(q, "bf16").to(run.device)
    run.call(
        case.variant, q=query, q_rope=query, cache=cache,
        indices=run.there(indices)[:, None], topk_length=run.there(lengths), attn_sink=sink,
        **{name: run.there(x) for name, x in lists.items()},
        **run.alone("units", "row_limits", "cu_seqlens_q"),
        out=out, lse=lse, o_accum=run.full((slots, heads, PARTIAL_ROW), 5.0, DTYPES["f16"]),
        lse_accum=run.full((slots, heads), 5.0), softmax_scale=exact.SOFTMAX_SCALE,
        lse_factor=factor, empty_lse=empty, may_split=1, witness=0, q_stride=HEAD_DIM_QK,
        q_rope_stride=HEAD_DIM_QK,
    )  # fmt: skip
    return exact.results([q, rows, indices, lengths], out, lse)


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Each query token names ``sizes.tokens`` of a pool that is eight times as large, at random."""
    source, topk, tokens = Random(device, seed), sizes.tokens, sizes.batch * sizes.s_q
    pages = -(-8 * topk * sizes.batch // PAGE)
    queries = Queries(sizes.heads, sizes.s_q, sizes.heads)
    plan = plan_reference(
        [topk] * sizes.batch, sizes.parts, spec.token_tile, spec.family.item_overhead, topk,
        queries=queries,
    )  # fmt: skip
    slots = max(plan.split_begin[-1], 1)
    tables = {name: x.to(device) for name, x in PlanTables.of(plan).arguments().items()}
    record, second = FORMATS[spec.cache_dtype], {}
    cache = records(source, pages, record)
    indices = source.below(pages * PAGE, tokens * topk).int().view(sizes.batch, sizes.s_q, topk)
    if record.two_lists:  # of which there is none
        second = {
            "extra_cache": cache, "extra_indices": indices[..., :0], "extra_length": source.i32([])
        }  # fmt: skip
    query = source.normal(sizes.batch, sizes.s_q, sizes.heads, record.channels)
    return {
        "q": query, "q_rope": query, "cache": cache, "indices": indices, **second,
        "topk_length": source.i32([topk] * sizes.batch), "attn_sink": source.full(0), **tables,
        **source.results(sizes.batch, sizes.s_q, sizes.heads, DTYPES[spec.out_dtype]),
        "o_accum": source.full(slots, sizes.heads, PARTIAL_ROW, dtype=DTYPES["f16"]),
        "lse_accum": source.full(slots, sizes.heads, value=-math.inf),
        "softmax_scale": HEAD_SCALE, **NATURAL, "may_split": int(plan.split_begin[-1] > 0),
        "witness": 0, "q_stride": record.channels, "q_rope_stride": record.channels,
    }  # fmt: skip


def records(source: Random, pages: int, record: Format) -> Any:
    """(pages, 64, bytes of a token) u8: e4m3 content, scales of about 0.01, normal RoPE."""
    cache = source.full(pages, PAGE, record.token_bytes, dtype=torch.uint8)
    content, rope, scale = byte_cache.fields_of(record, cache[:, :, None])
    content.view(torch.uint8).copy_(source.e4m3(*content.shape))
    rope.copy_(source.normal(*rope.shape))
    if record.powers:
        scale.view(torch.uint8).fill_(120)  # 2^-7
    else:
        scale.fill_(0.01)
    return cache

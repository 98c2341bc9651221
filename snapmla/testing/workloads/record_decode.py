"""``record_decode``: over pages of a cache of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, PARTIAL_ROW, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.ds_mla import GROUPS, ROPE_AT, ROW_BYTES, SCALES_AT
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing.paged_record_job import PagedRecordJob, PagedShape
from snapmla.testing.record_job import poisoned_rows
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, Call, Job, Sizes, Workload, decoded, planned
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import PAGE, Random
from snapmla.testing.workloads.sparse_records import in_order, records, several_of_none

SHAPES = {16: (7, 2), 32: (16, 2), 64: (20, 3)}  # row tile: (heads, s_q)
PAGES_OF = (1, 53, 64)  # tokens of a page of recorded cases


def shapes(spec: VariantSpec) -> tuple[PagedShape, ...]:
    """Small calls: splits and several query tokens; pages of one token; ragged queries that see
    what they are told; scales of every kind, and a page that is not there."""
    tile, (heads, s_q) = spec.row_tile, SHAPES[spec.row_tile]
    return (
        PagedShape(heads, 4 * 53, (200, 0, 65), 53, s_q, layout="packed", parts=3, row_tile=tile),
        PagedShape(heads, 17, (17, 5), 1, layout="padded", parts=1, powers=True, row_tile=tile),
        PagedShape(
            heads, 3 * 64, (130, 3, 99), 64, 5, begins=(0, 2, 2, 4), layout="padded",
            own_lengths=(130, 64, 99, 20, 77), style="equal", row_tile=tile,
        ),
        PagedShape(
            heads, 135, (66, 131), 3, 2, parts=1, style="scales", row_tile=tile, holes=((1, 20),),
        ),
    )  # fmt: skip


def small(spec: VariantSpec) -> Iterator[Call]:
    """``shapes``."""
    for shape in shapes(spec):
        job = PagedRecordJob(spec, shape)
        yield Call(job.arguments(), {}, job=job, note=str(shape))


def job_of(spec: VariantSpec, lengths: Sequence[int], planner: variants.Kernel) -> Job:
    """A ``PagedRecordJob`` behind the planning kernel: swinging logits, splits, and last tokens
    that are not finite, which one query token sees: of the longest even and odd length, as a lane
    of the announcer has an even and an odd token."""
    ordered, parts = tuple(lengths), 3
    if spec.row_tile >= 32:
        ordered, parts = in_order(lengths), 2
    heads, s_q = SHAPES[spec.row_tile]
    ordered = several_of_none(ordered)
    longest = (max((n for n in ordered if n % 2 == odd), default=0) for odd in range(2))
    width = -(-max(lengths) // 53) + 1
    shape = PagedShape(
        heads, width * 53, ordered, 53, s_q, layout="packed", style="swings", parts=parts,
        row_tile=spec.row_tile, nan_last=tuple(ordered.index(n) for n in longest if n),
    )  # fmt: skip
    job = PagedRecordJob(spec, shape, planner=planner)
    return Job(job.run, job.errors, job.plan.tiles)


def recorded(case: Case, run: Runner) -> Recorded:
    """With its merge, in one call; pages anywhere in the pool."""
    spec, bits = case.spec, case.bits()
    heads, s_q = exact.SHAPES[spec.row_tile][case.index // 2 % 2]
    lengths, p = exact.lengths_of(case), PAGES_OF[case.index % 3]
    table, pages = exact.block_table(bits, lengths, p)
    n, rows_pad = pages * p, -(-s_q * heads // spec.row_tile) * spec.row_tile
    rows = np.empty((n, ROW_BYTES), np.uint8)
    rows[:, :SCALES_AT] = exact.e4m3(bits, (n, KV_LORA_RANK), bits.below(2, (n, 1)))
    scales = exact.scales(bits, (n, GROUPS), bits.below(5, (n, GROUPS)) - 4)
    rows[:, SCALES_AT:ROPE_AT] = scales.view(np.uint8)
    rows[:, ROPE_AT:] = exact.cut_bf16(exact.bell(bits, (n, QK_ROPE_HEAD_DIM), 0)).view(np.uint8)
    q = exact.cut_bf16(exact.bell(bits, (len(lengths), s_q, heads, HEAD_DIM_QK), 0))
    cache = poisoned_rows(pages, p, ("split", "padded", "packed")[case.index % 3])
    cache = cache.to(run.device)
    cache.copy_(run.there(rows).view(cache.shape))
    lists, slots = exact.work_list(case, lengths, s_q * heads)
    factor, empty = exact.LSE[case.index // 2 % 2]
    out = run.full((len(lengths), s_q, heads, KV_LORA_RANK), 5.0, DTYPES[spec.out_dtype])
    lse = run.full((len(lengths), heads, s_q), 5.0)
    run.call(
        case.variant, q=exact.from_bits(q, "bf16").to(run.device), cache=cache,
        block_table=run.there(table), cache_seqlens=run.there(lengths),
        **{name: run.there(x) for name, x in lists.items()},
        **run.alone("units", "row_limits", "cu_seqlens_q"),
        out=out, lse=lse, o_accum=run.full((slots, rows_pad, PARTIAL_ROW), 5.0, DTYPES["f16"]),
        lse_accum=run.full((slots, rows_pad), 5.0), softmax_scale=exact.SOFTMAX_SCALE,
        causal=int(case.index % 4 != 1), lse_factor=factor, empty_lse=empty, may_split=1, witness=0,
    )  # fmt: skip
    return exact.results([q, rows, lengths, table], out, lse)


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Random rows, the work dealt evenly; splits are not merged: the decode kernel alone."""
    source, record = Random(device, seed), FORMATS[spec.cache_dtype]
    paged, pages = source.paged(sizes, PAGE)
    return {
        "q": source.normal(sizes.batch, sizes.s_q, sizes.heads, record.channels),
        "cache": records(source, pages, record), **paged,
        **source.decode(spec, sizes, spec.cache_dtype, spec.out_dtype),
    }  # fmt: skip


WORKLOAD = Workload(small, decoded, recorded, sized, job=job_of, tiles=planned)

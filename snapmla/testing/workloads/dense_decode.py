"""``dense_decode``: over a cache of 16 bits; its references are ``snapmla.testing.dense_job``'s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK
from dsl_kernels.spec import VariantSpec
from snapmla.dense import new_workspace
from snapmla.runtime import variants
from snapmla.testing.dense_job import DenseJob
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, Call, Job, Sizes, Workload, decoded, planned
from snapmla.testing.workloads.exact import LONG, STYLES, Array, Bits, Case, Recorded, Runner
from snapmla.testing.workloads.samples import Random


def small(spec: VariantSpec) -> Iterator[Call]:
    """Ragged lengths, splits."""
    job = DenseJob(spec)
    yield Call(job.arguments(), {}, job=job)


def job_of(spec: VariantSpec, lengths: Sequence[int], planner: variants.Kernel) -> Job:
    """A ``DenseJob`` behind the planning kernel.  Rows of its longest sequence are peaked: SM100
    multiplies O by gamma, in tensor memory, only where an m_ref moves."""
    peaked = spec.arch == "sm_100a"
    amplitude = [300.0 if peaked and n == max(lengths) else 10.0 for n in lengths]
    job = DenseJob(spec, lengths, planner=planner, amplitude=amplitude)
    return Job(job.run, job.errors, job.plan.tiles)


def _rows(case: Case, bits: Bits, slot: Array, shape: tuple[int, int]) -> Array:
    """(tokens, KV heads, 576) float32: NaN where no sequence has a token.

    Args:
        slot: (tokens of all sequences,), one behind the other.
        shape: tokens of the pool, KV heads.
    """
    style, n = STYLES[case.index % 4], len(slot)
    rows = exact.bell(bits, (n, shape[1], HEAD_DIM_QK), bits.below(2, (n, 1, 1)) - 1)
    if case.index // 4 % 2:  # latents with a mean: sums that grow
        rows = np.where(bits.below(3, rows.shape) > 0, np.abs(rows), rows)
    if style == "outlier":  # logits far apart: maxima move
        rows *= np.where(bits.below(24, (n, 1, 1)) == 0, np.float32(16), np.float32(1))
    elif style == "awkward":  # of the last sequence; some query tokens do not see its last token
        rows[-9], rows[-1, :, 3] = 0, np.nan
        rows[-40, :, 9], rows[-20] = 2.0**-24, rows[-20] * np.float32(2.0**-14)
        rows[-70, :, 550] = np.inf  # of the sequence before, in RoPE alone
    out = np.full((*shape, HEAD_DIM_QK), np.nan, np.float32)
    out[slot] = rows
    return out


def recorded(case: Case, run: Runner) -> Recorded:
    """With its merge, in one call; a short case may have two KV heads, each a sequence."""
    spec, bits, dtype = case.spec, case.bits(), DTYPES[case.spec.dtype]
    heads, s_q = exact.SHAPES[spec.row_tile][case.index // 2 % 2]
    p, rows_pad = spec.page_size, -(-s_q * heads // spec.row_tile) * spec.row_tile
    lengths, kv_heads = exact.lengths_of(case), 1
    if case.index < LONG and case.index % 3 == 2:
        lengths, kv_heads = lengths[-2:], 2
    table, pages = exact.block_table(bits, lengths, p)
    places = exact.slots_of(table, p)
    slot = np.concatenate([places[i, :n] for i, n in enumerate(lengths)])
    rows = _rows(case, bits, slot, (pages * p, kv_heads))
    own, table = np.repeat(lengths, kv_heads), np.repeat(table, kv_heads, 0)
    amplitude = 1 if STYLES[case.index % 4] == "sharp" else -1
    drawn = exact.bell(bits, (len(own), s_q, heads, HEAD_DIM_QK), amplitude)
    q, codes = (exact.as_tensor(x, dtype, "cpu") for x in (drawn, rows))
    check = exact.digest([exact.bits_of(q), exact.bits_of(codes), own, table])
    cache = exact.rows_pool(pages, p, kv_heads, spec.dtype, run.device, case.index % 3)
    cache.copy_(codes.view(cache.shape))
    lists, slots = exact.work_list(case, own, s_q * heads)
    work = {name: run.there(x) for name, x in lists.items()}
    partial = _workspace(work["part_begin"], slots, rows_pad, spec.dtype)
    out = run.full((*q.shape[:3], KV_LORA_RANK), 5.0, dtype)
    lse = run.full((len(own), heads, s_q), 5.0)
    factor, empty = exact.LSE[case.index // 2 % 2]
    run.call(
        case.variant, q=q.to(run.device), cache=cache, block_table=run.there(table),
        cache_seqlens=run.there(own), **work,
        **run.alone("units", "row_limits", "cu_seqlens_q"), out=out, lse=lse,
        **partial, softmax_scale=exact.SOFTMAX_SCALE, causal=int(case.index % 4 != 1),
        lse_factor=factor, empty_lse=empty, may_split=1, witness=0,
    )  # fmt: skip
    words = [exact.bits_of(x).reshape(slots * rows_pad, -1) for x in partial.values()]
    found = exact.results([], out, lse).rows
    partial_rows = np.concatenate([x.view(np.uint8) for x in words], 1)
    return Recorded(check, {"partial": partial_rows, **found}, {"lse": found["lse"][:32, 0]})


def _workspace(like: Tensor, slots: int, rows: int, dtype: str) -> dict[str, Tensor]:
    """Partial results, 5 until they are written."""
    made = new_workspace(like, slots, rows, dtype)
    return dict(zip(("o_accum", "lse_accum"), (x.fill_(5.0) for x in made), strict=True))


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Random rows, the work dealt evenly; splits are not merged: the decode kernel alone."""
    source = Random(device, seed)
    paged, pages = source.paged(sizes, spec.page_size)
    shape = (sizes.batch, sizes.s_q, sizes.heads, HEAD_DIM_QK)
    return {
        "q": source.normal(*shape, dtype=DTYPES[spec.dtype]),
        "cache": source.planes(pages, spec.page_size, spec.dtype)["kv"], **paged,
        **source.decode(spec, sizes, spec.dtype, spec.dtype),
    }  # fmt: skip


WORKLOAD = Workload(small, decoded, recorded, sized, job=job_of, tiles=planned)

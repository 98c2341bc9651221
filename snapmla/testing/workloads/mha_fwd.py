"""``mha_fwd``: dense prefill; its references are ``snapmla.testing.mha_job``'s."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from dsl_kernels.formats.mha_list import ROWS, WIDTHS, SplitRoom, most_tiles
from dsl_kernels.spec import VariantSpec
from snapmla.testing.mha_job import MhaJob, offsets, work_of
from snapmla.testing.mha_split_job import SplitJob, merged, split_work
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, Call, Result, Sizes, Workload, decoded
from snapmla.testing.workloads.exact import Array, Case, Recorded, Runner
from snapmla.testing.workloads.samples import Random


def small(spec: VariantSpec) -> Iterator[Call]:
    """A neighbour of NaN or 1e30 behind each ragged end, rows without keys, more queries than keys;
    of causal row tiles one ends with a tile of keys that is the sequence's as a whole, and the one
    before it is masked, too, for some rows without moving their frame;
    then every key for every row, four tiles, and logits that move frames; at the end of the lists
    short sequences, and such without keys, of which nothing but a note tells; at last a batch in
    which no sequence has keys; behind them values that are no numbers, of keys that some rows do
    not see; on SM100 also work tiles of two and three tiles of keys, none and one of which is whole
    for all rows, beside a CTA that has none.  Of split keys one sequence each has two pieces."""
    if spec.keys == "split":
        yield from _small_split(spec)
        return
    for causal, spread, bad in ((True, 1.0, math.nan), (False, 8.0, 1e30)):
        lq, lk = [140, 0, 40, 9], [_just_whole(spec), 33, 20, 30]
        if not causal:
            lq, lk = [20, 0, 3, 2, 2, 2], [420, 40, 0, 0, 0, 0]
        job = MhaJob.draw(spec, lq, lk, 2, 1, causal=causal, spread=spread, behind=bad)
        for rows in (*job.ks, job.v):
            rows[lk[0] : lk[0] + lk[1]] = bad
        yield Call(job.arguments(), {}, job=job)
    job = MhaJob.draw(spec, (3, 2, 2, 2), (0, 0, 0, 0), 2, 1)
    yield Call(job.arguments(), {}, job=job)
    job = wild_values(MhaJob.draw(spec, (20, 9, 8, 4), (spec.key_tile + 20, 9, 5, 4), 1, 1, ctas=1))
    yield Call(job.arguments(), {}, job=job)
    if spec.arch == "sm_100a":
        lk = [spec.key_tile + 20, 2 * spec.key_tile + 20, 4]
        job = wild_values(MhaJob.draw(spec, (40, 40, 0), lk, 1, 1, ctas=3))
        yield Call(job.arguments(), {}, job=job)


Job = TypeVar("Job", bound=MhaJob)


def wild_values(job: Job) -> Job:
    """A job whose V holds a NaN or an infinity of a late key of each sequence, in a channel or in
    all: each work tile is taken again, one behind the other."""
    v, begin = job.v.clone(), 0
    for i, s_k in enumerate(job.lk):
        key = begin + max(s_k - 2, 0)
        if i % 2:
            v[key] = math.nan
        else:
            v[key, 0, 5 + i], v[key - 1, 0, 64 + i] = math.inf, -math.inf
        begin += s_k
    return replace(job, v=v)


def _just_whole(spec: VariantSpec) -> int:
    """Keys of 140 query tokens of which the first row tile sees whole tiles of keys."""
    return -(-254 // spec.key_tile) * spec.key_tile + 10


def _small_split(spec: VariantSpec) -> Iterator[Call]:
    """Two CTAs; one, which has three tiles of V to clear and so notes in a slot that was freed."""
    for causal, spread, bad in ((True, 1.0, math.nan), (False, 8.0, 1e30)):
        lq, lk, ctas = [3, 0, 140], [1950, 33, _just_whole(spec)], 2
        if not causal:
            lq, lk, ctas = [5, 20, 3, 2, 2, 2], [40, 2050, 30, 0, 0, 0], 1
        job = SplitJob.draw(spec, lq, lk, 1, 1, causal=causal, spread=spread, behind=bad, ctas=ctas)
        yield Call(job.arguments(), {}, job=job)
    job = wild_values(SplitJob.draw(spec, [20, 9], [1960, 9], 1, 1, ctas=1))
    yield Call(job.arguments(), {}, job=job)


def judge(spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """The errors that their job finds."""
    if spec.keys != "split":
        return decoded(spec, calls)
    found = [call.job.split_errors(call.arguments) for call in calls]
    return Result(all(errors.right for errors in found), "; ".join(map(str, found)))


def _rows(case: Case, bits: exact.Bits, tokens: int, heads: int, width: int) -> Array:
    """(tokens + 5, heads, width) float32: NaN behind the last token; some rows 16 times as large,
    so that frames move."""
    rows = exact.bell(bits, (tokens, heads, width), bits.below(2, (tokens, 1, 1)) - 1)
    if case.index % 3 == 1:
        rows *= np.where(bits.below(24, (tokens, 1, 1)) == 0, np.float32(16), np.float32(1))
    out = np.full((tokens + 5, heads, width), np.nan, np.float32)
    out[:tokens] = rows
    return out


def recorded(case: Case, run: Runner) -> Recorded:
    """Ragged prompts with prefixes, rows without keys, both masks; two KV heads."""
    spec, bits, dtype = case.spec, case.bits(), DTYPES[case.spec.dtype]
    lq = [int(x) for x in bits.below(200, (3,))]
    lk = [max(0, n + int(x) - 60) for n, x in zip(lq, bits.below(400, (3,)))]
    split = spec.keys == "split"
    if split:
        lq[0], lk[0] = lq[0] % 128 + 1, lk[0] + 2200
    t_q, t_k, heads, kv_heads, causal = sum(lq), sum(lk), 4, 2, case.index % 2 == 0
    made = [_rows(case, bits, t_q, heads, spec.d_qk)]
    made += [_rows(case, bits, t_k, h, w) for h, w in zip((kv_heads, 1), WIDTHS[spec.d_qk])]
    made.append(_rows(case, bits, t_k, kv_heads, spec.d_v))
    q, *ks, v = (exact.as_tensor(x, dtype, run.device) for x in made)
    out = run.full((t_q + 5, heads, spec.d_v), 5.0, dtype)
    lse = run.full((heads, t_q + 5), 5.0)
    partial: dict[str, Tensor] = {}
    work = work_of(lq, lk, causal, t_q + 5)
    if split:
        room = SplitRoom.of(t_q + 5, len(lq), t_k + 5)
        work = split_work(lq, lk, causal, room)
        partial["partial_out"] = run.full((room.rows, heads, spec.d_v), 5.0)
        partial["partial_lse"] = run.full((room.rows, heads), 5.0)
    run.call(
        case.variant, q=q, **dict(zip(("k_nope", "k_rope"), ks)), v=v,
        cu_seqlens_q=offsets(lq).to(run.device), cu_seqlens_k=offsets(lk).to(run.device),
        work=work.to(run.device), out=out, lse=lse, **partial,
        softmax_scale=exact.SOFTMAX_SCALE, causal=int(causal), ctas=3,
    )  # fmt: skip
    if split:
        whole = merged(lq, lk, out.cpu(), lse.cpu(), [x.cpu() for x in partial.values()])
        out, lse = (x.float().to(run.device) for x in whole)
    return exact.results(made, out[None], lse[None])


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Prompts of ``sizes.s_q`` new tokens behind a prefix, ``sizes.tokens`` keys in all."""
    source, dtype = Random(device, seed), DTYPES[spec.dtype]
    lq, lk = [sizes.s_q] * sizes.batch, [sizes.tokens] * sizes.batch
    t_q, t_k, h = sum(lq), sum(lk), sizes.heads
    widths = zip(("k_nope", "k_rope"), (h, 1), WIDTHS[spec.d_qk])
    keys = {name: source.normal(t_k, n, width, dtype=dtype) for name, n, width in widths}
    tables: dict[str, Tensor] = {
        "cu_seqlens_q": offsets(lq), "cu_seqlens_k": offsets(lk), "work": work_of(lq, lk, True)
    }  # fmt: skip
    partial: dict[str, Tensor] = {}
    entries = most_tiles(t_q, sizes.batch)
    if spec.keys == "split":
        room = SplitRoom.of(t_q, sizes.batch, t_k)
        tables["work"], entries = split_work(lq, lk, True, room), room.entries
        partial["partial_out"] = source.full(room.rows, h, spec.d_v)
        partial["partial_lse"] = source.full(room.rows, h)
    return {
        "q": source.normal(t_q, h, spec.d_qk, dtype=dtype), **keys,
        "v": source.normal(t_k, h, spec.d_v, dtype=dtype),
        **{name: table.to(device) for name, table in tables.items()},
        "out": source.full(t_q, h, spec.d_v, dtype=dtype),
        "lse": source.full(h, t_q), **partial,
        "softmax_scale": spec.d_qk**-0.5, "causal": 1,
        "ctas": min(sizes.parts, max(1, entries) * h),
    }  # fmt: skip


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Bytes that a launch cannot avoid: q, k, v and the results once."""
    t_q, t_k = sizes.batch * sizes.s_q, sizes.batch * sizes.tokens
    nope, *rope = WIDTHS[spec.d_qk]
    rows = t_q * (spec.d_qk + spec.d_v) + t_k * (nope + spec.d_v)
    return sizes.heads * (2.0 * rows + 4.0 * t_q) + 2.0 * t_k * sum(rope) + 8.0 * -(-t_q // ROWS)


def tiles(_spec: VariantSpec, call: Call) -> int:
    """Tiles of keys of all row tiles."""
    return int(call.job.tiles)


WORKLOAD = Workload(small, judge, recorded, sized, moved=moved, tiles=tiles)

"""``mha_fwd``: dense prefill; its references are ``snapmla.testing.mha_job``'s."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from dsl_kernels.formats.mha_list import ROWS, WIDTHS
from dsl_kernels.spec import VariantSpec
from snapmla.testing.mha_job import MhaJob
from snapmla.testing.mha_split_job import SplitJob, merged
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, Call, Result, Sizes, decoded
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Made, Problem, unnamed, workload
from snapmla.testing.workloads.samples import Random


@dataclass(frozen=True)
class Prompts(Problem):
    """Prompts of ragged lengths; ``job``: (spec, draw) -> their numbers."""

    job: Callable[[VariantSpec, Any], MhaJob]


def arguments(spec: VariantSpec, problem: Prompts, draw: Draw) -> Made:
    """Arguments by name, as the job lays them out."""
    job = problem.job(spec, draw)
    return Made(job.arguments(), job)


def kind_of(spec: VariantSpec) -> type[MhaJob]:
    """The job of a variant's calls."""
    return SplitJob if spec.keys == "split" else MhaJob


def _few(
    lq: Sequence[int], lk: Sequence[int], heads: int = 1, wild: bool = False, bad: int = 0,
    **how: Any,
) -> Prompts:  # fmt: skip
    """A problem of a small call.

    Args:
        heads: of queries. bad: keys of the second sequence are ``behind``, too, from that one on.
        wild: as ``wild_values`` has them.
    """

    def job(spec: VariantSpec, _draw: Draw) -> MhaJob:
        made = kind_of(spec).draw(spec, lq, lk, heads, 1, **how)
        if bad:
            for rows in (*made.ks, made.v):
                rows[bad : bad + lk[1]] = how["behind"]
        return wild_values(made) if wild else made

    return Prompts(job)


def small(spec: VariantSpec) -> Iterator[Prompts]:
    """A neighbour of NaN or 1e30 behind each ragged end, rows without keys, more queries than keys;
    of causal row tiles one ends with a tile of keys that is the sequence's as a whole, and the one
    before it is masked, too, for some rows without moving their m_ref;
    then every key for every row, four tiles, and logits that move maxima; at the end of the lists
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
        yield _few(lq, lk, 2, bad=lk[0], causal=causal, spread=spread, behind=bad)
    yield _few((3, 2, 2, 2), (0, 0, 0, 0), 2)
    yield _few((20, 9, 8, 4), (spec.key_tile + 20, 9, 5, 4), wild=True, ctas=1)
    if spec.arch == "sm_100a":
        lk = [spec.key_tile + 20, 2 * spec.key_tile + 20, 4]
        yield _few((40, 40, 0), lk, wild=True, ctas=3)


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


def _small_split(spec: VariantSpec) -> Iterator[Prompts]:
    """Two CTAs; one, which has three tiles of V to clear and so notes in a slot that was freed."""
    yield _few([3, 0, 140], [1950, 33, _just_whole(spec)])
    how: dict[str, Any] = {"causal": False, "spread": 8.0, "behind": 1e30, "ctas": 1}
    yield _few([5, 20, 3, 2, 2, 2], [40, 2050, 30, 0, 0, 0], **how)
    yield _few([20, 9], [1960, 9], wild=True, ctas=1)


def judge(spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """The errors that their job finds."""
    if spec.keys != "split":
        return decoded(spec, calls)
    found = [call.job.split_errors(call.arguments) for call in calls]
    return Result(all(errors.right for errors in found), "; ".join(map(str, found)))


def _ragged(spec: VariantSpec, draw: Exact) -> MhaJob:
    """Numbers of a recorded case: ragged prompts with prefixes, rows without keys, both masks; two
    KV heads; NaN behind the last token; some rows 16 times as large, so that maxima move."""
    bits, made = draw.bits(), []
    lq = [int(x) for x in bits.below(200, (3,))]
    lk = [max(0, n + int(x) - 60) for n, x in zip(lq, bits.below(400, (3,)))]
    if spec.keys == "split":
        lq[0], lk[0] = lq[0] % 128 + 1, lk[0] + 2200
    widths = [(lq, 4, spec.d_qk), *((lk, h, w) for h, w in zip((2, 1), WIDTHS[spec.d_qk]))]
    for lengths, heads, width in (*widths, (lk, 2, spec.d_v)):
        n = sum(lengths)
        rows = exact.bell(bits, (n, heads, width), bits.below(2, (n, 1, 1)) - 1)
        if draw.case.index % 3 == 1:
            rows *= np.where(bits.below(24, (n, 1, 1)) == 0, np.float32(16), np.float32(1))
        behind = np.full((5, heads, width), np.nan, np.float32)
        made.append(torch.from_numpy(np.concatenate([rows, behind])))
    draw.identify_by(*made)
    q, *ks, v = (draw.there(x, DTYPES[spec.dtype]) for x in made)
    scale, causal = exact.SOFTMAX_SCALE, not draw.odd
    return kind_of(spec)(q, tuple(ks), v, tuple(lq), tuple(lk), causal, scale, 3, fill=5.0)


def _whole(spec: VariantSpec, given: Mapping[str, Any]) -> exact.Rows:
    """Rows and their LSE, of split keys behind the merge."""
    out, lse = given["out"], given["lse"]
    if spec.keys == "split":
        lq, lk = (given[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
        partial = [given[name].cpu() for name in ("partial_out", "partial_lse")]
        out, lse = (x.float() for x in merged(lq, lk, out.cpu(), lse.cpu(), partial))
    return exact.rows_of(out, lse)


def sized(_spec: VariantSpec, sizes: Sizes) -> Prompts:
    """Prompts of ``sizes.s_q`` new tokens behind a prefix, ``sizes.tokens`` keys in all."""
    return Prompts(lambda spec, draw: long_job(spec, draw, sizes))


def long_job(spec: VariantSpec, draw: Random, sizes: Sizes) -> MhaJob:
    """Normal numbers of a call as large as in service."""
    lq, lk = (sizes.s_q,) * sizes.batch, (sizes.tokens,) * sizes.batch
    dtype, t_k, h = DTYPES[spec.dtype], sum(lk), sizes.heads
    ks = tuple(draw.normal(t_k, n, w, dtype=dtype) for n, w in zip((h, 1), WIDTHS[spec.d_qk]))
    q = draw.normal(sum(lq), h, spec.d_qk, dtype=dtype)
    v = draw.normal(t_k, h, spec.d_v, dtype=dtype)
    return kind_of(spec)(q, ks, v, lq, lk, True, spec.d_qk**-0.5, sizes.parts)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Bytes that a launch cannot avoid: q, k, v and the results once."""
    t_q, t_k = sizes.batch * sizes.s_q, sizes.batch * sizes.tokens
    nope, *rope = WIDTHS[spec.d_qk]
    rows = t_q * (spec.d_qk + spec.d_v) + t_k * (nope + spec.d_v)
    return sizes.heads * (2.0 * rows + 4.0 * t_q) + 2.0 * t_k * sum(rope) + 8.0 * -(-t_q // ROWS)


def tiles(_spec: VariantSpec, call: Call) -> int:
    """Tiles of keys of all row tiles."""
    return int(call.job.tiles)


WORKLOAD = workload(
    judge, None, arguments, small=small, recorded=lambda _: [Prompts(_ragged)], sized=sized,
    results=unnamed, rows=_whole, moved=moved, tiles=tiles,
)  # fmt: skip

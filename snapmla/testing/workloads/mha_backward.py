"""Calls of the backward of dense prefill, one op at a time; references are ``mha_grad_job``'s.

An op is given what the ones before it leave: ``stats`` comes from the host here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.formats.mha_grads import DELTAS, PAD, READY, rope_groups, stats_blocks
from dsl_kernels.formats.mha_list import TAKEN, WIDTHS, most_tiles
from dsl_kernels.spec import VariantSpec
from snapmla.testing.mha_grad_job import GradJob
from snapmla.testing.mha_job import MhaJob, offsets, work_of
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, Call, Result, Sizes, Workload
from snapmla.testing.workloads.exact import Array, Case, Recorded, Runner
from snapmla.testing.workloads.samples import Random

LQ, LK = (140, 0, 40, 9), (130, 33, 20, 0)  # more rows than keys, no rows, no keys
Of = Callable[[GradJob, Tensor], dict[str, Any]]


def forward_spec(spec: VariantSpec) -> VariantSpec:
    """Spec of the forward (``mha_fwd``) for which ``spec``, an op of the backward, is made."""
    return VariantSpec(op="mha_fwd", d_qk=spec.d_qk, dtype=spec.dtype, arch="sm_90a")


def jobs(spec: VariantSpec) -> Iterator[GradJob]:
    """Two CTAs and many tiles: NaN behind each end, rows and sequences without keys, causal with
    two query heads a KV head; then 1e30 behind, two KV heads whose RoPE channels are one's."""
    fwd = forward_spec(spec)
    yield GradJob.of(MhaJob.draw(fwd, LQ, LK, 2, 1), lse_too=True)
    forward = MhaJob.draw(fwd, (64, 57), (100, 157), 2, 2, causal=False, spread=4.0, behind=3e4)
    yield GradJob.of(forward, behind=3e4, together=2)


def calls(of: Of, spec: VariantSpec) -> Iterator[Call]:
    """Yields a call for each of ``jobs``; ``of(job, stats)`` makes its arguments."""
    for job in jobs(spec):
        yield Call(of(job, job.want_stats().float()), {}, job=job)


def judged(grads: Callable[[Call], dict[str, Tensor]], given: Iterable[Call]) -> Result:
    """The errors that jobs find in some gradients."""
    found = [call.job.errors(grads(call)) for call in given]
    return Result(all(errors.right for errors in found), "; ".join(map(str, found)))


def tiles(_spec: VariantSpec, call: Call) -> int:
    """Tiles of keys of all row tiles."""
    return int(call.job.forward.tiles)


def recorded(of: Of, results: tuple[str, ...], case: Case, run: Runner) -> Recorded:
    """Ragged prompts with prefixes and rows without keys; statistics of no softmax."""
    bits, dtype, spec = case.bits(), DTYPES[case.spec.dtype], case.spec
    lq = [int(x) for x in bits.below(200, (3,))]
    lk = [max(0, n + int(x) - 60) for n, x in zip(lq, bits.below(400, (3,)))]
    made: list[Array] = []

    def rows(tokens: int, heads: int, width: int) -> Tensor:
        made.append(exact.bell(bits, (tokens, heads, width), bits.below(2, (tokens, 1, 1)) - 1))
        return exact.as_tensor(made[-1], dtype, run.device)

    q, dout = rows(sum(lq), 4, spec.d_qk), rows(sum(lq), 4, 128)
    ks = tuple(rows(sum(lk), h, w) for h, w in zip((2, 1), WIDTHS[spec.d_qk]))
    forward = MhaJob(q, ks, rows(sum(lk), 2, 128), tuple(lq), tuple(lk), case.index % 2 == 0,
                     exact.SOFTMAX_SCALE, 3)  # fmt: skip
    lse = exact.bell(bits, (4, sum(lq)), 1) + np.float32(4)
    made.append(lse)
    logs = torch.from_numpy(lse).to(run.device)
    job = GradJob(forward, torch.zeros_like(dout), logs, dout)
    given = of(job, job.want_stats().float().nan_to_num(0.0, posinf=math.inf))
    run.call(case.variant, **given)
    return exact.of_problems(made, [[given[name].nan_to_num(7.0) for name in results]], "grads")


def sized(of: Of, spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Prompts of ``sizes.s_q`` new tokens behind a prefix, ``sizes.tokens`` keys in all."""
    source, dtype = Random(device, seed), DTYPES[spec.dtype]
    lq, lk = (sizes.s_q,) * sizes.batch, (sizes.tokens,) * sizes.batch
    t_q, t_k, h = sum(lq), sum(lk), sizes.heads
    ks = tuple(source.normal(t_k, n, w, dtype=dtype) for n, w in zip((h, 1), WIDTHS[spec.d_qk]))
    q, v = source.normal(t_q, h, spec.d_qk, dtype=dtype), source.normal(t_k, h, 128, dtype=dtype)
    forward = MhaJob(q, ks, v, lq, lk, True, spec.d_qk**-0.5, sizes.parts)
    out = source.normal(t_q, h, 128, dtype=dtype)
    job = GradJob(forward, out, source.full(h, t_q), out, together=min(4, h))
    return of(job, source.full(h, stats_blocks(t_q, sizes.batch), PAD, 2))


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Bytes that a launch of mha_dq or mha_dkv cannot avoid: its inputs and gradients once."""
    t_q, t_k = sizes.batch * sizes.s_q, sizes.batch * sizes.tokens
    nope, *rope = WIDTHS[spec.d_qk]
    read = t_q * (spec.d_qk + 128) + t_k * (nope + 128)
    written = t_q * spec.d_qk if spec.op == "mha_dq" else t_k * (nope + 128)
    parts = 4.0 * 64 * rope_groups(sizes.heads, min(4, sizes.heads)) * t_k if rope else 0.0
    return sizes.heads * (2.0 * (read + written) + 8.0 * t_q) + (
        parts if spec.op == "mha_dkv" else 0.0
    )


def small_job(spec: VariantSpec) -> GradJob:
    """One row tile, one head."""
    return GradJob.of(MhaJob.draw(forward_spec(spec), (9,), (9,), 1, 1, ctas=1))


def called(of: Of, job: GradJob, **changed: Any) -> Call:
    """A call of a job, some of whose arguments are changed."""
    return Call({**of(job, job.want_stats().float()), **changed}, {}, job=job)


def untaken(call: Call, deltas: int = 0) -> Tensor:
    """A call's list before it was run; ``deltas``: what mha_delta has counted."""
    work: Tensor = call.arguments["work"].clone()
    work[TAKEN], work[DELTAS] = 0, deltas
    return work


def queries_behind(of: Of, spec: VariantSpec) -> Iterator[Call]:
    """A call of mha_dq behind itself."""
    call = called(of, small_job(spec))
    yield call
    yield with_changes(call, work=untaken(call))


def keys_behind(of: Of, spec: VariantSpec) -> Iterator[Call]:
    """A call of mha_dkv whose V the grid before wrote, and one that is told that it need not wait
    for what it reads, behind itself."""
    job = small_job(spec)
    first = called(of, job)
    yield first
    v = first.arguments["dv"]
    yield called(of, GradJob.of(replace(job.forward, v=v)))
    told = called(of, job)
    told = with_changes(told, work=untaken(told, READY), behind_dq=1)
    yield told
    yield with_changes(told, work=untaken(told, READY))


def with_changes(call: Call, **changed: Any) -> Call:
    """The call with some other arguments."""
    return call._replace(arguments={**call.arguments, **changed})


def workload(  # type: ignore[no-untyped-def]
    of: Of, grads: Callable[[Call], dict[str, Tensor]], results: tuple[str, ...],
    behind: Callable[[Of, VariantSpec], Iterator[Call]],
):  # fmt: skip
    """Workload of mha_dq or mha_dkv: ``of`` makes arguments, ``grads`` gives gradients by name."""
    return Workload(
        lambda spec: calls(of, spec), lambda _spec, given: judged(grads, given),
        lambda case, run: recorded(of, results, case, run),
        lambda spec, sizes, device, seed: sized(of, spec, sizes, device, seed),
        moved=moved, tiles=tiles, behind=lambda spec: behind(of, spec),
    )  # fmt: skip


def delta_jobs(spec: VariantSpec) -> Iterator[GradJob]:
    """Rows of no keys, an LSE's gradient and none, a dO that is not finite."""
    fwd = VariantSpec(op="mha_fwd", d_qk=128, dtype=spec.dtype, arch="sm_90a")
    yield GradJob.of(MhaJob.draw(fwd, LQ, LK, 2, 1), lse_too=True)
    job = GradJob.of(MhaJob.draw(fwd, (193, 5), (193, 5), 3, 1))
    dout = job.dout.clone()
    dout[7, 1, 100], dout[194, 2, 3] = math.nan, -math.inf
    yield replace(job, dout=dout)


def delta_tables(spec: VariantSpec, sizes: Sizes, device: str) -> dict[str, Any]:
    """Tables of a large call of mha_delta."""
    lq, lk = (sizes.s_q,) * sizes.batch, (sizes.tokens,) * sizes.batch
    return {
        "cu_seqlens_q": offsets(lq).to(device), "work": work_of(lq, lk, True).to(device),
        "key_work": work_of(lk, lq, False).to(device),
        "tiles": most_tiles(sum(lq), len(lq)),
    }  # fmt: skip

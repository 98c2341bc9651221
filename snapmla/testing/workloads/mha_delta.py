"""``mha_delta``: LSE and sum(O dO) of each query row, for the backward of dense prefill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dsl_kernels.formats.mha_grads import PAD, stats_blocks
from dsl_kernels.spec import VariantSpec
from snapmla.testing.mha_grad_job import GradJob
from snapmla.testing.mha_job import MhaJob
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, Call, Result, Sizes, Workload
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.mha_backward import delta_jobs, delta_tables
from snapmla.testing.workloads.samples import Random

ALLOWED = 1e-5  # of 128 products in fp32, to the sum of their magnitudes


def small(spec: VariantSpec) -> Iterator[Call]:
    """Like ``delta_jobs``."""
    for job in delta_jobs(spec):
        yield Call(job.of_delta(), {"stats": "stats"}, job=job)


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Judges beside fp64: NaN and infinities where they belong, what no sequence has untouched."""
    off, wrong = 0.0, 0
    for call in calls:
        job: GradJob = call.job
        want, got = job.want_stats(), call.arguments["stats"].double()
        flat = want.flatten(1, 2)
        wild = ~job.dout.isfinite().all(-1).T
        for i, begin in enumerate(job.stats_rows()):
            first = sum(job.forward.lq[:i])
            rows = slice(begin, begin + job.forward.lq[i])
            own = wild[:, first : first + job.forward.lq[i]]
            flat[:, rows, 0] = flat[:, rows, 0].masked_fill(own, torch.nan)
            flat[:, rows, 1] = flat[:, rows, 1].masked_fill(own, torch.nan)
        want = flat.view_as(want)
        there = want.isfinite()
        # of a row whose dO is not finite the second word may be anything
        first, own = got[..., 0], want[..., 0]
        wrong += int(((first != own) & ~own.isfinite() & ~(first.isnan() & own.isnan())).sum())
        off = max(off, float(((got - want).abs() / want.abs().clamp_min(1.0))[there].max()))
        wrong += int((~got[there].isfinite()).sum())
    return Result(off <= ALLOWED and not wrong, f"off by {off:.1e} (allowed {ALLOWED:.0e}), "
                  f"{wrong} words that are not finite are wrong")  # fmt: skip


def recorded(case: Case, run: Runner) -> Recorded:
    """Normal rows of three sequences."""
    job = next(delta_jobs(case.spec))
    bits, dtype, shape = case.bits(), DTYPES[case.spec.dtype], job.out.shape
    made = [exact.bell(bits, tuple(shape), 0) for _ in range(2)]
    logs = exact.bell(bits, tuple(job.lse.shape), 2)
    given = job.of_delta()
    given["out"], given["dout"] = (exact.as_tensor(x, dtype, "cpu") for x in made)
    given["lse"], given["dlse"] = torch.from_numpy(logs), torch.from_numpy(logs[:0])
    given = {n: x.to(run.device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    run.call(case.variant, **given)
    return exact.of_problems([*made, logs], [[given["stats"].nan_to_num(7.0)]], "stats")


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Prompts of ``sizes.s_q`` tokens."""
    source, t, h = Random(device, seed), sizes.batch * sizes.s_q, sizes.heads
    rows = {name: source.normal(t, h, 128, dtype=DTYPES[spec.dtype]) for name in ("out", "dout")}
    return {
        **rows, "lse": source.full(h, t), "dlse": source.full(0, t),
        **delta_tables(spec, sizes, device),
        "stats": source.full(h, stats_blocks(t, sizes.batch), PAD, 2),
    }  # fmt: skip


def moved(_spec: VariantSpec, sizes: Sizes) -> float:
    """Reads O, dO and LSE, writes 8 bytes a row and head."""
    return sizes.batch * sizes.s_q * sizes.heads * (4.0 * 128 + 4 + 8)


def behind(spec: VariantSpec) -> Iterator[Call]:
    """Five rows of a head, behind themselves."""
    fwd = VariantSpec(op="mha_fwd", d_qk=128, dtype=spec.dtype, arch="sm_90a")
    job = GradJob.of(MhaJob.draw(fwd, (5,), (5,), 1, 1))
    call = Call(job.of_delta(), {"stats": "stats"}, job=job)
    yield call
    yield call


WORKLOAD = Workload(small, judge, recorded, sized, moved=moved, behind=behind)

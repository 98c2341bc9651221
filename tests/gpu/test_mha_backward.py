"""Backward of dense prefill on a real GPU: ragged batches against fp64, the same bits always.

Variants may come from elsewhere, no compiler is needed; those that are not there are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants as runtime
from snapmla.testing.mha_grad_job import GradJob, variants
from snapmla.testing.mha_job import MhaJob
from snapmla.testing.workloads.mha_backward import forward_spec

pytestmark = pytest.mark.gpu
DEVICE, RUNS = "cuda", 5
LQ, LK = (0, 1, 127, 128, 129, 300), (5, 1, 300, 128, 64, 300)


def spec_of(d_qk: int, dtype: str) -> VariantSpec:
    """A variant of mha_dq, if all kernels are there or can be built here."""
    spec = VariantSpec(op="mha_dq", d_qk=d_qk, dtype=dtype)
    for needed in variants(spec).values():
        if runtime.jit_refusal() and runtime.find(needed) is None:
            pytest.skip(f"{needed.name} is not built, and nothing compiles here")
    return spec


def gradients(spec: VariantSpec, job: GradJob) -> dict[str, Tensor]:
    """By name."""

    def call(op: str, given: Mapping[str, Any]) -> None:
        of = variants(spec)[op]
        kernel = runtime.kernel(of, DEVICE)  # builds it
        kernel(*(given[name] for name in runtime.argument_names(of)))

    return job.run(call).each


def drawn(spec: VariantSpec, lengths: Any, heads: tuple[int, int], **options: Any) -> MhaJob:
    torch.manual_seed(1)
    return MhaJob.draw(forward_spec(spec), *lengths, *heads, device=DEVICE, ctas=132, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1)])
@pytest.mark.parametrize("spread", [1.0, 3.0, 30.0])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("d_qk", [192, 128])
def test_ragged(d_qk: int, dtype: str, spread: float, heads: tuple[int, int], causal: bool) -> None:
    """NaN behind the last sequence, rows and sequences without keys, an LSE's gradient."""
    spec = spec_of(d_qk, dtype)
    forward = drawn(spec, (LQ, LK), heads, causal=causal, spread=spread)
    job = GradJob.of(forward, lse_too=True, together=2)
    errors = job.errors(gradients(spec, job))
    assert errors.right, str(errors)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("d_qk", [192, 128])
def test_bits(d_qk: int, causal: bool) -> None:
    """Five runs, and fewer CTAs."""
    spec = spec_of(d_qk, "bf16")
    job = GradJob.of(drawn(spec, ((700, 512), (700, 900)), (8, 4), causal=causal), together=2)
    found = [gradients(spec, job) for _ in range(RUNS)]
    found.append(gradients(spec, replace(job, forward=replace(job.forward, ctas=17))))
    for each in found[1:]:
        for name, x in each.items():
            assert torch.equal(x.nan_to_num(7.0), found[0][name].nan_to_num(7.0)), name

"""Dense prefill split over keys, on a real GPU: fp64, the same bits in any batch, graphs.

Variants may come from elsewhere, no compiler is needed; those that are not there are skipped.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.formats.mha_list import pieces_of
from dsl_kernels.spec import VariantSpec
from snapmla.mha import mha_prefill, workspace_size
from snapmla.runtime import variants
from snapmla.testing.mha_job import MhaJob, mha_errors, offsets

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def spec_of(d_qk: int, dtype: str = "bf16") -> VariantSpec:
    """The variant, if all that a call needs is there or can be built here."""
    spec = VariantSpec(op="mha_fwd", d_qk=d_qk, dtype=dtype, keys="split")
    merge = VariantSpec(op="mha_merge", dtype=dtype, d_v=spec.d_v)
    helpers = VariantSpec(op="mha_items", keys="split"), merge
    for needed in (spec, *helpers, spec.replace(keys="whole"), VariantSpec(op="mha_items")):
        if variants.jit_refusal() and variants.find(needed) is None:
            pytest.skip(f"{needed.name} is not built, and nothing compiles here")
    return spec


def attend(job: MhaJob, split: bool = True) -> tuple[Tensor, Tensor]:
    """The library's call; rows of no sequence NaN before it."""
    t, h, _ = job.q.shape
    out = torch.full((t, h, job.v.shape[-1]), math.nan, device=DEVICE).to(job.q.dtype)
    lse = torch.full((h, t), math.nan, device=DEVICE)
    where = (offsets(job.lq).to(DEVICE), offsets(job.lk).to(DEVICE))
    mha_prefill(
        job.q, job.ks[0], job.v, *where, max(job.lq), max(job.lk), softmax_scale=job.scale,
        causal=job.causal, split_keys=split, k_rope=job.ks[1] if len(job.ks) == 2 else None,
        out=out, lse=lse,
    )  # fmt: skip
    return out, lse


def assert_right(job: MhaJob, out: Tensor, lse: Tensor) -> None:
    """The first and the last head beside fp64."""
    group = job.q.shape[1] // job.v.shape[1]
    for head in (0, job.q.shape[1] - 1):
        own, kv = slice(head, head + 1), slice(head // group, head // group + 1)
        errors = mha_errors(
            out[:, own], lse[own], job.q[:, own], job.k[:, kv], job.v[:, kv], offsets(job.lq),
            offsets(job.lk), job.scale, job.causal,
        )  # fmt: skip
        assert errors.right, str(errors)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("d_qk", [192, 128, 256])
def test_right_and_the_same_bits(d_qk: int, dtype: str, causal: bool) -> None:
    """Split sequences of 1 to 4 row tiles beside others; NaN behind ends; 5 runs alike; alone."""
    spec = spec_of(d_qk, dtype)
    torch.manual_seed(d_qk)
    lq, lk = (128, 700, 1, 300, 0, 512), (9000, 900, 33000, 17000, 4000, 8065)
    assert [pieces_of(*pair) for pair in zip(lq, lk)] == [8, 1, 8, 2, 4, 2]
    job = MhaJob.draw(spec, lq, lk, 8, 2, causal=causal, spread=3.0, behind=math.nan, device=DEVICE)
    found = attend(job)
    assert_right(job, *found)
    for _ in range(4):
        again = attend(job)
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(again, found))
    whole = attend(job, split=False)
    assert torch.equal(whole[0][128:828], found[0][128:828]), "what is not split"
    begin, keys = 829, 9900 + 33000
    alone = replace(
        job, q=job.q[begin : begin + 300], v=job.v[keys : keys + 17000],
        ks=tuple(k[keys : keys + 17000] for k in job.ks), lq=(300,), lk=(17000,),
    )  # fmt: skip
    own, own_lse = attend(alone)
    assert torch.equal(own, found[0][begin : begin + 300])
    assert torch.equal(own_lse, found[1][:, begin : begin + 300])


@pytest.mark.parametrize("d_qk", [192, 256])
def test_graph_with_lengths_that_change(d_qk: int) -> None:
    """One graph for steps that split other sequences, or none; with all memory given nothing is
    allocated."""
    spec = spec_of(d_qk)
    torch.manual_seed(9)
    t_q, t_k = 400, 12000
    job = MhaJob.draw(spec, (t_q, 0), (t_k, 0), 4, 4, behind=math.nan, device=DEVICE)
    cu_q, cu_k = offsets(job.lq).to(DEVICE), offsets(job.lk).to(DEVICE)
    out = torch.zeros(len(job.q), 4, spec.d_v, device=DEVICE).bfloat16()
    lse = torch.zeros(4, len(job.q), device=DEVICE)
    words = workspace_size(len(job.q), 2, 4, len(job.v), spec.d_v)
    work = torch.empty(words, dtype=torch.int32, device=DEVICE)

    def call() -> None:
        mha_prefill(
            job.q, job.ks[0], job.v, cu_q, cu_k, t_q, t_k, k_rope=job.ks[1], split_keys=True,
            out=out, lse=lse, workspace=work,
        )  # fmt: skip

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    steps: list[tuple[Any, Any]] = [
        ((100, 300), (2100, 9900)), ((400, 0), (12000, 0)), ((3, 397), (12000, 0)),
        ((200, 200), (1000, 1900)),
    ]  # fmt: skip
    for lq, lk in steps:
        cu_q.copy_(offsets(lq))
        cu_k.copy_(offsets(lk))
        graph.replay()
        assert_right(replace(job, lq=lq, lk=lk), out, lse)

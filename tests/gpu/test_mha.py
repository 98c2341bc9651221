"""Dense prefill on a real GPU: FlashMLA's shapes and gates, maxima that move, the same bits always.

Variants may come from elsewhere, no compiler is needed; those that are not there are skipped.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.compat.flash_mla import mha
from snapmla.mha import mha_prefill, workspace_size
from snapmla.runtime import variants
from snapmla.testing.mha_job import MhaErrors, MhaJob, mha_errors, offsets

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
RUNS = 5


def spec_of(d_qk: int, dtype: str = "bf16") -> VariantSpec:
    """The variant, if there is one or it can be built here."""
    spec = VariantSpec(op="mha_fwd", d_qk=d_qk, dtype=dtype)
    for needed in (spec, VariantSpec(op="mha_items")):
        if variants.jit_refusal() and variants.find(needed) is None:
            pytest.skip(f"{needed.name} is not built, and nothing compiles here")
    return spec


def draw(spec: VariantSpec, *arguments: Any, **options: Any) -> MhaJob:
    """A job whose tensors are drawn where the kernel runs."""
    return MhaJob.draw(spec, *arguments, device=DEVICE, **options)


def attend(job: MhaJob) -> tuple[Tensor, Tensor]:
    """The library's call; rows of no sequence NaN before it."""
    t, h, _ = job.q.shape
    out = torch.full((t, h, job.v.shape[-1]), math.nan, device=DEVICE).to(job.q.dtype)
    lse = torch.full((h, t), math.nan, device=DEVICE)
    rope = job.ks[1] if len(job.ks) == 2 else None
    where = (offsets(job.lq).to(DEVICE), offsets(job.lk).to(DEVICE))
    longest = (max(job.lq, default=0), max(job.lk, default=0))
    mha_prefill(
        job.q, job.ks[0], job.v, *where, *longest, softmax_scale=job.scale, causal=job.causal,
        k_rope=rope, out=out, lse=lse,
    )  # fmt: skip
    return out, lse


def errors_of(job: MhaJob, out: Tensor, lse: Tensor, head: int) -> MhaErrors:
    """One head beside fp64, which is large."""
    own, kv = slice(head, head + 1), head // (job.q.shape[1] // job.v.shape[1])
    return mha_errors(
        out[:, own], lse[own], job.q[:, own], job.k[:, kv : kv + 1], job.v[:, kv : kv + 1],
        offsets(job.lq), offsets(job.lk), job.scale, job.causal,
    )  # fmt: skip


def lengths_of(mean: int, ragged: bool, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two sequences as FlashMLA's tests draw them: normal around the mean, no more queries."""
    if not ragged:
        return (mean, mean), (mean, mean)
    drawn = torch.Generator().manual_seed(seed)
    pairs = torch.randn(2, 2, generator=drawn) * (mean / 2) + mean
    sizes = pairs.clamp_min(1).int()
    lk = tuple(int(x) for x in sizes.amax(1))
    return tuple(min(int(q), k) for q, k in zip(sizes[:, 0], lk)), lk


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("heads", [(128, 128), (32, 4)])
@pytest.mark.parametrize("mean", [4096, 8192])
@pytest.mark.parametrize("d_qk", [192, 128, 256])
def test_flashmla_grid(
    d_qk: int, mean: int, heads: tuple[int, int], ragged: bool, causal: bool
) -> None:
    """Its inputs and gates, forward; the first and the last heads beside fp64; 5 runs alike."""
    spec = spec_of(d_qk)
    torch.manual_seed(mean + d_qk)
    lq, lk = lengths_of(mean, ragged, mean)
    job = draw(spec, lq, lk, *heads, causal=causal, spread=0.1)
    job = replace(job, ks=tuple(k * 0.1 for k in job.ks), scale=(d_qk + 100) ** -0.5)
    out, lse = attend(job)
    for head in (0, heads[0] - 1):
        errors = errors_of(job, out, lse, head)
        assert errors.right, str(errors)
    for _ in range(RUNS - 1):
        again, again_lse = attend(job)
        assert torch.equal(again.nan_to_num(7.0), out.nan_to_num(7.0))
        assert torch.equal(again_lse.nan_to_num(7.0), lse.nan_to_num(7.0))


STYLES: dict[str, dict[str, Any]] = {
    "spread-3": {"spread": 3.0}, "spread-30": {"spread": 30.0}, "full": {"causal": False},
    "zeros": {"lq": (0, 300, 5, 0), "lk": (40, 0, 700, 9)},
    "more-queries": {"lq": (900, 129), "lk": (300, 1)},
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("behind", [math.nan, 1e30])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("d_qk", [192, 128, 256])
def test_right(d_qk: int, dtype: str, behind: float, style: str) -> None:
    """Frames that move, lengths 0, more queries than keys; bad rows behind the last sequence."""
    if dtype == "f16" and behind == 1e30:
        behind = 6e4
    options = {"lq": (300, 1, 517), "lk": (1000, 129, 517), **STYLES[style]}
    lq, lk = options.pop("lq"), options.pop("lk")
    torch.manual_seed(4)
    spec = spec_of(d_qk, dtype)
    job = draw(spec, lq, lk, 8, 2, behind=behind, **options)
    errors = job.errors(attend(job))
    assert errors.right, str(errors)


@pytest.mark.parametrize("d_qk", [192, 128, 256])
def test_bits_do_not_depend_on_the_batch(d_qk: int) -> None:
    """A sequence alone and between neighbours of NaN, whose work is longer than its own."""
    spec = spec_of(d_qk)
    torch.manual_seed(6)
    job = draw(spec, (2000, 700, 3000), (2000, 900, 3100), 16, 16, spread=3.0)
    for rows in (*job.ks, job.v):
        rows[:2000], rows[2900:] = math.nan, math.nan
    out, lse = attend(job)
    alone = replace(
        job, q=job.q[2000:2700], v=job.v[2000:2900], ks=tuple(k[2000:2900] for k in job.ks),
        lq=(700,), lk=(900,),
    )  # fmt: skip
    own, own_lse = attend(alone)
    assert own.isfinite().all()
    assert torch.equal(out[2000:2700], own) and torch.equal(lse[:, 2000:2700], own_lse)


@pytest.mark.parametrize("d_qk", [192, 256])
def test_rope_apart_is_k_whole(d_qk: int) -> None:
    """Views of a packed projection and one RoPE head, against concatenated K by FlashMLA's name."""
    spec, nope = spec_of(d_qk), d_qk - 64
    torch.manual_seed(8)
    lq, lk, h = (300, 200), (1500, 260), 16
    kv = torch.randn(sum(lk), h, nope + spec.d_v, device=DEVICE).bfloat16()
    rope = torch.randn(sum(lk), 1, 64, device=DEVICE).bfloat16()
    q = torch.randn(sum(lq), h, d_qk, device=DEVICE).bfloat16()
    where = (offsets(lq).to(DEVICE), offsets(lk).to(DEVICE), max(lq), max(lk))
    out, lse = mha_prefill(q, kv[..., :nope], kv[..., nope:], *where, k_rope=rope)
    k = torch.cat([kv[..., :nope], rope.expand(-1, h, -1)], -1)
    got = mha.flash_attn_varlen_func(q, k, kv[..., nope:], *where, causal=True)
    assert torch.equal(got[0], out) and torch.equal(got[1], lse.T)


@pytest.mark.parametrize("d_qk", [192, 256])
def test_graph_with_lengths_that_change(d_qk: int) -> None:
    """One graph, replayed behind other cu_seqlens: nothing on the host knew the lengths; with all
    memory given nothing is allocated."""
    spec = spec_of(d_qk)
    torch.manual_seed(9)
    job = draw(spec, (600, 424), (600, 1000), 8, 8, behind=math.nan)
    t, h, _ = job.q.shape
    cu_q, cu_k = offsets(job.lq).to(DEVICE), offsets(job.lk).to(DEVICE)
    out = torch.zeros(t, h, spec.d_v, device=DEVICE).bfloat16()
    lse = torch.zeros(h, t, device=DEVICE)
    work = torch.empty(workspace_size(t, 2), dtype=torch.int32, device=DEVICE)

    def call() -> None:
        mha_prefill(
            job.q, job.ks[0], job.v, cu_q, cu_k, t, 1600, k_rope=job.ks[1], out=out, lse=lse,
            workspace=work,
        )  # fmt: skip

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lq, lk in (((100, 900), (1300, 300)), ((0, 1024), (0, 1600)), ((600, 424), (600, 1000))):
        cu_q.copy_(offsets(lq))
        cu_k.copy_(offsets(lk))
        graph.replay()
        errors = replace(job, lq=lq, lk=lk).errors(
            (out.masked_fill(beyond(t, sum(lq))[:, None, None], math.nan),
             lse.masked_fill(beyond(t, sum(lq)), math.nan))
        )  # fmt: skip
        assert errors.right, str(errors)


def beyond(total: int, end: int) -> Tensor:
    """Rows of no sequence."""
    return torch.arange(total, device=DEVICE) >= end

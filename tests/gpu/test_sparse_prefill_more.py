"""Sparse prefill's other forms on a real GPU: LSE of what the indexer chose, straight from the FP8
cache, split lists of few query tokens over a BF16 cache.

Variants may come from elsewhere, no compiler is needed; those that are not there are skipped.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import snapmla
from dsl_kernels.spec import VariantSpec
from snapmla.compat.flash_mla.sparse_prefill import flash_mla_sparse_fwd
from snapmla.runtime import variants
from snapmla.sparse.prefill import sparse_prefill
from snapmla.sparse.prefill_fp8 import plan_sparse_prefill
from snapmla.sparse.rows_kernel import row_tile_of, split_row_tile_of
from snapmla.testing import metrics
from snapmla.testing.prefill_job import PrefillJob

pytestmark = pytest.mark.gpu
DEVICE, SCALE, INF = "cuda", 576**-0.5, math.inf


def there(heads: int, d_qk: int = 576, **values: str) -> VariantSpec:
    """The variant, if there is one or it can be built here."""
    tile = (split_row_tile_of if values.get("lists") == "split" else row_tile_of)(heads)
    spec = VariantSpec(op="sparse_prefill", row_tile=tile, d_qk=d_qk, **values)
    if variants.jit_refusal() and variants.find(spec) is None:
        pytest.skip(f"{spec.name} is not built, and nothing compiles here")
    return spec


# ---------------------------------------------------------------- what the indexer chose


@pytest.mark.parametrize("chosen", [512, 1024, 2048])
@pytest.mark.parametrize(
    ("heads", "d_qk"), [(64, 576), (64, 512), (128, 512), (128, 576), (16, 576)]
)
def test_lse_of_what_the_indexer_chose(heads: int, d_qk: int, chosen: int) -> None:
    """FlashMLA's shapes of nv_dev and those that it refuses; bits of the others as without."""
    spec = there(heads, d_qk, figures="indexer")
    torch.manual_seed(chosen)
    lengths = torch.randint(0, chosen + 400, (150,)).tolist()
    job = PrefillJob.draw(
        spec, 150, heads, 5000, chosen + 320, lengths=lengths, sink=True, spread=3.0, device=DEVICE
    )  # fmt: skip
    for _ in range(3):
        found = flash_mla_sparse_fwd(
            job.q, job.kv, job.indices, job.scale, attn_sink=job.sink, topk_length=job.lengths,
            indexer_topk=chosen,
        )  # fmt: skip
        errors = replace(job, indexer_topk=chosen).errors(found, range(0, 150, 7))
        assert errors.right, str(errors)
    there(heads, d_qk)
    without = sparse_prefill(
        job.q, job.kv, job.indices, job.scale, attn_sink=job.sink, topk_length=job.lengths
    )
    assert all(torch.equal(a, b) for a, b in zip(found, without, strict=False))


# ---------------------------------------------------------------- the FP8 cache


def cache_of(tokens: int) -> tuple[snapmla.PagedKVCache, Tensor]:
    """A filled cache of 64-token pages, and its tokens in fp32 as it stores them."""
    cache = snapmla.PagedKVCache.allocate(-(-tokens // 64), 64, device=DEVICE)
    slots = torch.arange(tokens, device=DEVICE, dtype=torch.int32)
    latent = torch.randn(tokens, 576, device=DEVICE).bfloat16()
    snapmla.append_kv(cache, latent[:, :512], latent[:, 512:], slots)
    assert cache.scale is not None
    content, rope = cache.content.flatten(0, 1).float(), cache.rope.flatten(0, 1).float()
    return cache, torch.cat((content, rope), -1) * cache.scale.flatten()[:, None]


@pytest.mark.parametrize("s_q", [1, 62, 4096, 70000])
@pytest.mark.parametrize("heads", [1, 16, 20, 64, 128])
def test_from_the_fp8_cache(heads: int, s_q: int) -> None:
    """Beside fp64, and decode's bits on the same rows by a plan that splits nothing."""
    torch.manual_seed(s_q + heads)
    topk = 2048 if s_q <= 4096 else 128
    cache, rows = cache_of(8192)
    q = torch.randn(s_q, heads, 576, device=DEVICE).bfloat16()
    query = snapmla.quantize_q(q[..., :512], q[..., 512:])
    indices = torch.randint(-100, 8300, (s_q, 1, topk), device=DEVICE, dtype=torch.int32)
    lengths = torch.randint(0, topk + 5, (s_q,), device=DEVICE, dtype=torch.int32)
    plan = plan_sparse_prefill(heads, topk=topk, topk_length=lengths)
    out, most, lse = sparse_prefill(query, cache, indices, SCALE, topk_length=lengths, plan=plan)
    assert most is None
    for i in sorted({0, s_q // 2, s_q - 1}):
        named = indices[i, 0, : int(lengths[i])].long()
        kv = rows[named[(named >= 0) & (named < len(rows))]].double()
        if not len(kv):
            assert not out[i].any() and (lse[i] == INF).all()
            continue
        own = torch.cat((query.nope[i].double(), query.rope[i].double()), -1)
        logits = own * query.row_scale[i].double()[:, None] @ kv.T * SCALE
        want = logits.softmax(-1) @ kv[:, :512]
        # e4m3 P over latents without a mean costs up to 2.7e-2 in exact arithmetic; bits below
        assert metrics.relative_l2(out[i], want) < 3e-2
        assert float((lse[i] - logits.logsumexp(-1)).abs().max()) < 2e-3
    some = slice(max(s_q - 40, 0), s_q)
    part = snapmla.QuantizedQuery(
        *(x[some].unsqueeze(1) for x in (query.nope, query.rope, query.scale))
    )
    decoded = snapmla.decode(
        part, cache, indices=indices[some], topk_length=lengths[some], softmax_scale=SCALE,
        empty_lse="+inf",
        plan=snapmla.plan_sparse_decode(
            heads, 1, topk=topk, topk_length=lengths[some], fixed_split_tokens=2048, num_parts=7
        ),
    )  # fmt: skip
    assert torch.equal(decoded[0][:, 0], out[some]) and torch.equal(decoded[1][..., 0], lse[some])


# ---------------------------------------------------------------- few query tokens over BF16 rows


@pytest.mark.parametrize("width", [None, 2048, 512])
@pytest.mark.parametrize("topk", [100, 2048])
@pytest.mark.parametrize("heads", [8, 16, 20, 64, 128])
@pytest.mark.parametrize(("b", "s_q"), [(2, 1), (3, 2), (128, 1)])
def test_decode_over_rows(b: int, s_q: int, heads: int, topk: int, width: int | None) -> None:
    there(heads, lists="split")
    there(heads)
    torch.manual_seed(b + heads + topk)
    cache = snapmla.PagedKVCache.allocate(300, 64, device=DEVICE, dtype=torch.bfloat16)
    assert cache.kv is not None
    cache.kv.normal_()
    q = torch.randn(b, s_q, heads, 576, device=DEVICE).bfloat16()
    indices = torch.randint(-300, 300 * 64 + 9, (b, s_q, topk), device=DEVICE, dtype=torch.int32)
    lengths = torch.randint(0, topk + 3, (b,), device=DEVICE, dtype=torch.int32)
    sink = torch.randn(heads, device=DEVICE)
    plan = snapmla.plan_sparse_decode(
        heads, s_q, topk=topk, batch=b, device=DEVICE, cache_dtype="bf16", fixed_split_tokens=width
    )
    found = [
        snapmla.decode(
            q, cache, indices=indices, softmax_scale=SCALE, topk_length=lengths, attn_sink=sink,
            plan=plan,
        )
        for _ in range(3)
    ]  # fmt: skip
    out, lse = found[0]
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))
    rows = cache.kv.reshape(-1, 576).double()
    for i, j in ((0, 0), (b - 1, s_q - 1), (b // 2, 0)):
        named = indices[i, j, : int(lengths[i])].long()
        kv = rows[named[(named >= 0) & (named < len(rows))]]
        if not len(kv):
            assert not out[i, j].any() and (lse[i, :, j] == -INF).all()
            continue
        logits = q[i, j].double() @ kv.T * SCALE
        of_rows = logits.logsumexp(-1)
        want = logits.softmax(-1) @ kv[:, :512]
        want = want / (1 + torch.exp(sink.double() - of_rows))[:, None]
        assert metrics.relative_l2(out[i, j], want) < 4e-3
        assert float((lse[i, :, j] - of_rows).abs().max()) < 1e-4


@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize(("heads", "width"), [(16, 512), (20, 64), (128, 2048)])
def test_decode_over_rows_in_a_graph(heads: int, width: int, s_q: int) -> None:
    """Nothing is allocated; a replay reads other lists, lengths and rows, and has a call's bits."""
    there(heads, lists="split")
    there(heads)
    torch.manual_seed(heads)
    cache = snapmla.PagedKVCache.allocate(40, 64, device=DEVICE, dtype=torch.bfloat16)
    assert cache.kv is not None
    cache.kv.normal_()
    q = torch.randn(3, s_q, heads, 576, device=DEVICE).bfloat16()
    indices = torch.randint(0, 40 * 64, (3, s_q, 2048), device=DEVICE, dtype=torch.int32)
    lengths = torch.tensor([2048, 0, 700], device=DEVICE, dtype=torch.int32)
    plan = snapmla.plan_sparse_decode(
        heads, s_q, topk=2048, batch=3, device=DEVICE, cache_dtype="bf16", fixed_split_tokens=width
    )
    out = torch.empty(3, s_q, heads, 512, device=DEVICE).bfloat16()
    lse = torch.empty(3, heads, s_q, device=DEVICE)

    def call() -> None:
        snapmla.decode(
            q, cache, indices=indices, topk_length=lengths, softmax_scale=SCALE, plan=plan,
            out=out, lse=lse,
        )  # fmt: skip

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for length in (900, 0):
        lengths.fill_(length)
        indices.random_(0, 40 * 64)
        cache.kv.normal_()
        out.fill_(INF)
        graph.replay()
        replayed = out.clone(), lse.clone()
        call()
        assert torch.equal(replayed[0], out) and torch.equal(replayed[1], lse)
        assert bool(torch.isinf(lse).all()) == (length == 0) and bool(out.isfinite().all())

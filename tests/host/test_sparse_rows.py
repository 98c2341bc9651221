"""``decode(..., indices=)`` over a BF16 cache: beside fp64, fronts, plans, errors."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import snapmla
from snapmla.compat import flash_mla
from snapmla.sparse.rows_plan import SparseRowsPlan, pieces_of
from snapmla.testing import metrics
from softgpu import Options, using
from tests.support.needs import needs_kernels

pytestmark = needs_kernels
B, S_Q, H, TOPK, PAGES, P = 2, 2, 3, 200, 5, 16
SCALE = 576**-0.5
I32 = torch.int32


def plan_of(s_q: int = S_Q, batch: int = B, **options: Any) -> SparseRowsPlan:
    return snapmla.plan_sparse_decode(
        H, s_q, topk=TOPK, batch=batch, device="cpu", cache_dtype="bf16", **options
    )


def call(s_q: int = S_Q) -> dict[str, Any]:
    """Lists with entries of no token; NaN in tokens that nobody names."""
    torch.manual_seed(s_q)
    cache = snapmla.PagedKVCache.allocate(PAGES, P, device="cpu", dtype=torch.bfloat16)
    assert cache.kv is not None
    cache.kv.copy_(torch.randn(cache.kv.shape))
    indices = torch.randint(0, PAGES * P - 1, (B, s_q, TOPK), dtype=I32)
    indices[torch.rand(indices.shape) < 0.2] = -1
    indices[0, 0, 64:128] = 2**31 - 1
    cache.kv[-1, -1] = math.nan
    return {
        "q": torch.randn(B, s_q, H, 576).bfloat16() * 3, "cache": cache, "indices": indices,
        "softmax_scale": SCALE, "topk_length": torch.tensor([TOPK, 70], dtype=I32),
        "attn_sink": torch.tensor([0.5, -math.inf, math.inf]),
    }  # fmt: skip


def truth(given: dict[str, Any], empty: float) -> tuple[Tensor, Tensor]:
    """(out, natural LSE) in fp64."""
    q, rows = given["q"].double(), given["cache"].kv.reshape(-1, 576).double()
    b, s_q, heads, _ = q.shape
    out, lse = torch.zeros(b, s_q, heads, 512).double(), torch.full((b, heads, s_q), empty).double()
    for i, j in ((i, j) for i in range(b) for j in range(s_q)):
        named = given["indices"][i, j, : int(given["topk_length"][i])].long()
        kv = rows[named[(named >= 0) & (named < len(rows))]]
        if len(kv):
            logits = q[i, j] @ kv.T * SCALE
            lse[i, :, j] = logits.logsumexp(-1)
            kept = 1 / (1 + torch.exp(given["attn_sink"].double() - lse[i, :, j]))
            out[i, j] = logits.softmax(-1) @ kv[:, :512] * kept[:, None]
    return out, lse


@pytest.mark.whole_matrix
@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize("width", [None, 256, 128, 64])
def test_beside_fp64(s_q: int, width: int | None) -> None:
    """A sequence that sees nothing; pieces that are empty, or behind the length."""
    given = call(s_q)
    given["indices"][1, s_q - 1] = -1
    plan = plan_of(s_q, fixed_split_tokens=width)
    assert plan.pieces == (-(-TOPK // width) if width else plan.pieces)
    with using(Options(hazards="raise")):
        out, lse = snapmla.decode(**given, plan=plan)
    want, of_rows = truth(given, -math.inf)
    assert metrics.relative_l2(out, want) < 4e-3
    seen = of_rows.isfinite()
    assert torch.equal(lse[~seen].double(), of_rows[~seen])
    assert float((lse[seen] - of_rows[seen]).abs().max()) < 1e-4
    assert not out[1, s_q - 1].any() and not out[:, :, 2].any() and out[0, 0, :2].any()
    into, base2 = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    made = snapmla.decode(**given, plan=plan, lse_base="2", empty_lse="+inf", out=into, lse=base2)
    assert made[0] is into and made[1] is base2 and torch.equal(into, out)
    assert torch.allclose(base2[seen], lse[seen] / math.log(2), atol=1e-5)
    assert torch.isposinf(base2[~seen]).all()
    _, upper = snapmla.decode(**given, plan=plan, empty_lse="+inf")
    assert torch.equal(upper[seen], lse[seen]) and torch.isposinf(upper[~seen]).all()
    assert len(plan.memo.kinds) == 3  # each of which was checked once


def test_one_short_list() -> None:
    """Which nothing splits."""
    given = {**call(1), "topk_length": torch.tensor([30], dtype=I32)}
    for name in ("q", "indices"):
        given[name] = given[name][:1, ..., :40] if name == "indices" else given[name][:1]
    out, lse = snapmla.decode(**given)
    want, of_rows = truth(given, -math.inf)
    assert metrics.relative_l2(out, want) < 4e-3 and float((lse - of_rows).abs().max()) < 1e-4


@pytest.mark.parametrize(
    "width", [None, pytest.param(64, marks=pytest.mark.whole_matrix)], ids=["whole", "pieces"]
)
def test_logits_beyond_what_fp32_tells_apart(width: int | None) -> None:
    """A row with a logit of 2^31 in log2 units or more is NaN, LSE too, also where another piece of
    its list is right; the others are right, and a larger scale is refused."""
    cache = snapmla.PagedKVCache.allocate(7, P, device="cpu", dtype=torch.bfloat16)
    assert cache.kv is not None
    cache.kv.zero_()
    rows = cache.kv.view(-1, 576)
    rows[:100, 575], rows[70, 575] = 1.0, 80.0
    rows[:, 0] = 3.0
    q = torch.zeros(1, 1, H, 576).bfloat16()
    q[..., 575] = torch.tensor([1.0, 256.0, 512.0])
    indices = torch.arange(100, dtype=I32).view(1, 1, 100)
    plan = snapmla.plan_sparse_decode(
        H, 1, topk=100, batch=1, device="cpu", cache_dtype="bf16", fixed_split_tokens=width
    )
    given = {"q": q, "cache": cache, "indices": indices, "plan": plan}
    out, lse = snapmla.decode(**given, softmax_scale=2.0**16)
    assert out[0, 0, :2, 0].tolist() == [3.0, 3.0] and out[0, 0, 2].isnan().all()
    assert torch.allclose(lse[0, :2, 0], torch.tensor([80.0, 80.0 * 256]) * 2**16, rtol=1e-6)
    assert lse[0, 2].isnan().all()
    with pytest.raises(ValueError, match="softmax_scale: expected .* at most 65536, got 131072"):
        snapmla.decode(**given, softmax_scale=2.0**17)


@pytest.mark.whole_matrix
def test_bits_depend_on_the_width_alone() -> None:
    """A sequence alone, and among others; a query in a cache that grew; strided lists."""
    given = call()
    options = {"fixed_split_tokens": 64}
    out, lse = snapmla.decode(**given, plan=plan_of(**options))
    wide = torch.zeros(B, S_Q, TOPK + 5, dtype=I32)
    wide[..., :TOPK] = given["indices"]
    given["indices"] = wide[..., :TOPK]
    for name in ("q", "indices", "topk_length"):
        given[name] = given[name][1:]
    alone = snapmla.decode(**given, plan=plan_of(batch=1, **options))
    assert torch.equal(alone[0], out[1:]) and torch.equal(alone[1], lse[1:])


@pytest.mark.whole_matrix
@pytest.mark.parametrize("width", [256, 64])
def test_other_fronts_have_its_bits(width: int) -> None:
    """Without a plan, by FlashMLA's name, as an operator, by a plan that was copied."""
    given = call()
    plan = plan_of(fixed_split_tokens=width)
    want = snapmla.decode(**given, plan=plan, empty_lse="+inf")
    again = snapmla.decode(**given, plan=copy.deepcopy(plan), empty_lse="+inf")
    assert all(map(torch.equal, again, want))
    cache = given["cache"]

    def traced(q: Tensor, indices: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return snapmla.decode(
            q, cache, indices=indices, topk_length=lengths, attn_sink=given["attn_sink"],
            softmax_scale=SCALE, plan=plan, empty_lse="+inf",
        )  # fmt: skip

    tensors = given["q"], given["indices"], given["topk_length"]
    graph = make_fx(traced, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    assert any("sparse_decode_bf16" in str(node.target) for node in graph.graph.nodes)
    assert all(map(torch.equal, graph(*tensors), want))
    if width == 64:
        return
    options = {
        "softmax_scale": SCALE, "indices": given["indices"], "attn_sink": given["attn_sink"],
        "topk_length": given["topk_length"],
    }  # fmt: skip
    free = snapmla.decode(**given, empty_lse="+inf")
    for metadata in (flash_mla.get_mla_metadata()[0], torch.zeros(1, 8, dtype=I32)):
        made = flash_mla.flash_mla_with_kvcache(
            given["q"], cache.kv, None, None, 512, metadata, **options
        )
        assert all(map(torch.equal, made, free))


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((2, 16, 2048), (16, 32, 64)), ((2, 128, 2048), (64, 32, 64)),
        ((8, 128, 2048), (64, 8, 256)), ((128, 16, 2048), (16, 1, 2048)),
        ((40, 64, 2048), (64, 3, 704)), ((1, 8, 17), (16, 1, 64)), ((0, 8, 100), (16, 2, 64)),
        ((2, 16, 8192), (16, 32, 256)), ((8, 32, 2048), (16, 8, 256)),
        ((60, 20, 2048), (32, 1, 2048)), ((100, 20, 2048), (32, 1, 2048)),
    ],
)  # fmt: skip
def test_pieces(shape: tuple[int, int, int], want: tuple[int, int, int]) -> None:
    """On 132 SMs: pieces cover the list, and fill no more than the device."""
    tile, pieces, width = pieces_of(*shape, 132)
    assert (tile, pieces, width) == want and (pieces - 1) * width < shape[2] <= pieces * width
    assert pieces == 1 or pieces * shape[0] * -(-shape[1] // tile) <= 132


def test_plans() -> None:
    """Of shapes alone, whatever else is told; memory of a plan goes with its numbers."""
    lengths = torch.tensor([3, 4], dtype=I32)
    plan = snapmla.plan_sparse_decode(
        H, 1, topk=TOPK, topk_length=lengths, cache_dtype=torch.bfloat16, check_stale=True
    )
    assert isinstance(plan, SparseRowsPlan) and plan.batch == 2 and plan.rows_shape == (2, 1, H)
    plan.update_(lengths)
    with pytest.raises(ValueError, match=r"topk_length: expected shape \(2,\)"):
        plan.update_(lengths[:1])
    parts = plan_of(1, batch=2, num_parts=5)
    assert (parts.pieces, parts.width) == (2, 128)
    assert parts.workspace_bytes == 4 * H * (512 + 1) * 4
    with pytest.raises(ValueError, match=r"plan.o_accum: expected shape \(2, 3, 512\)"):
        dataclasses.replace(parts, batch=1, split_begin=parts.split_begin[:2])
    assert plan_of(batch=0).tokens == 0


WRONG_PLANS = [
    ({"cu_seqlens_q": torch.zeros(3, dtype=I32)}, ValueError, "sequences of one token there"),
    ({"total_q": 3}, ValueError, "total_q: expected None with a BF16 cache, got 3"),
    ({"pipeline": "etap"}, ValueError, "pipeline: expected None with a BF16 cache"),
    ({"fixed_overhead": 3}, ValueError, "fixed_overhead: expected None with a BF16 cache"),
    ({"accuracy": "high"}, ValueError, "accuracy: expected 'standard' with a BF16 cache"),
    ({"fixed_split_tokens": 65}, ValueError, "fixed_split_tokens: expected a multiple of 64"),
    ({"num_parts": 0}, ValueError, "num_parts: expected 1 or more"),
    ({"row_tile": 8}, ValueError, "row_tile: expected"),
    ({"topk": 0}, ValueError, "topk: expected"),
    ({"s_q": None}, TypeError, "s_q: expected an int"),
    ({"batch": None}, TypeError, "batch: expected an int"),
    ({"batch": 1 << 14, "topk": 1 << 20, "fixed_split_tokens": 64}, ValueError, "at most 8388608"),
]


@pytest.mark.parametrize(("changed", "error", "words"), WRONG_PLANS)
def test_wrong_plan(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"s_q": 1, "topk": TOPK, "batch": B, "device": "cpu"} | changed
    with pytest.raises(error, match=words):
        snapmla.plan_sparse_decode(H, **given, cache_dtype="bf16")


def _fp8(_: Any) -> Any:
    return snapmla.PagedKVCache.allocate(2, 16, device="cpu")


WRONG = [
    ("q", lambda c: c["q"].float(), TypeError, "q: expected dtype bfloat16"),
    ("q", lambda c: c["q"][:, 0], ValueError, "sequences of one: q.unsqueeze"),
    ("q", lambda c: snapmla.quantize_q(c["q"][..., :512], c["q"][..., 512:]), TypeError,
     "q: expected a bfloat16 tensor, got a snapmla.QuantizedQuery"),
    ("cache", lambda c: snapmla.PagedKVCache.allocate(2, 16, device="cpu", dtype=torch.float16),
     ValueError, "cache: expected an FP8 cache, .* or bfloat16 rows, got one of f"),
    ("cache", lambda c: snapmla.PagedKVCache.allocate(
        2, 16, device="cpu", dtype=torch.bfloat16, num_kv_heads=3), ValueError,
     "cache: expected one KV head with indices, got 3"),
    ("indices", lambda c: c["indices"][:1], ValueError, r"indices: expected shape \(2, 2, topk\)"),
    ("topk_length", lambda c: c["topk_length"][:1], ValueError, r"shape \(2,\)"),
    ("attn_sink", lambda c: c["attn_sink"][:2], ValueError, r"attn_sink: expected shape \(3,\)"),
    ("plan", lambda c: plan_of(1), ValueError,
     r"plan: expected one made for \(b, s_q, num_heads\) = \(2, 2, 3\), got \(2, 1, 3\)"),
    ("plan", lambda c: snapmla.plan_sparse_decode(H, S_Q, topk=TOPK, batch=B, device="cpu"),
     TypeError, "plan: expected a snapmla.SparseRowsPlan or None, got SparsePlan"),
    ("pipeline", lambda c: "etap", ValueError, "pipeline: expected None with a BF16 cache"),
    ("out_dtype", lambda c: torch.float32, TypeError, "out_dtype: expected bfloat16"),
    ("out", lambda c: torch.zeros(B, S_Q, H, 512), TypeError, "out: expected dtype bfloat16"),
    ("out", lambda c: c["q"].view(-1)[: B * S_Q * H * 512].view(B, S_Q, H, 512), ValueError,
     "out: expected memory"),
    ("lse_base", lambda c: "10", ValueError, "lse_base: expected"),
    ("softmax_scale", lambda c: -1.0, ValueError, "softmax_scale: expected"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "words"), WRONG)
def test_wrong_argument(name: str, value: Any, error: type[Exception], words: str) -> None:
    given = call()
    with pytest.raises(error, match=words):
        snapmla.decode(**{**given, name: value(given)})


def test_a_plan_of_rows_beside_another_cache() -> None:
    """Which its kernel would not read."""
    given = call()
    given["q"] = snapmla.quantize_q(given["q"][..., :512], given["q"][..., 512:])
    with pytest.raises(ValueError, match="plan: expected one made with cache_dtype='fp8', got one"):
        snapmla.decode(**{**given, "cache": _fp8(given)}, plan=plan_of())


def test_a_plan_whose_lists_are_narrower() -> None:
    given = call()
    given["indices"] = given["indices"][..., :-1].contiguous()
    with pytest.raises(ValueError, match=r"indices: expected shape \(2, 2, 200\)"):
        snapmla.decode(**given, plan=plan_of())


def test_pages_that_lie_apart() -> None:
    given = call()
    memory = torch.zeros(PAGES, P + 1, 1, 576).bfloat16()
    given["cache"] = snapmla.PagedKVCache.from_tensors(memory[:, :P])
    with pytest.raises(ValueError, match="cache: expected pages that follow one another"):
        snapmla.decode(**given)
    with pytest.raises(ValueError, match="k_cache: expected pages that follow one another"):
        flash_mla.flash_mla_with_kvcache(
            given["q"], memory[:, :P], None, None, 512, flash_mla.get_mla_metadata()[0],
            indices=given["indices"],
        )  # fmt: skip


def test_flash_mla_wants_rows_of_the_kind_that_it_is_told() -> None:
    given = call()
    q, indices = given["q"], given["indices"]
    rows, bytes_ = given["cache"].kv, torch.zeros(PAGES, P, 1, 656, dtype=torch.uint8)
    for cache, fp8, words in ((rows, True, "is_fp8_kvcache=False"), (bytes_, False, "=True")):
        with pytest.raises(ValueError, match=f"k_cache: expected shape .*{words}"):
            flash_mla.flash_mla_with_kvcache(
                q, cache, None, None, 512, flash_mla.get_mla_metadata()[0], indices=indices,
                is_fp8_kvcache=fp8,
            )  # fmt: skip


def test_nothing_to_do() -> None:
    given = call()
    for name in ("q", "indices", "topk_length"):
        given[name] = given[name][:0]
    out, lse = snapmla.decode(**given, plan=plan_of(batch=0))
    assert out.shape == (0, S_Q, H, 512) and lse.shape == (0, H, S_Q)

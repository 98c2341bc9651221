# ruff: noqa: E501 (a table: one row reads better on one line)
"""Every public call with right arguments, and what each says of a wrong one.

``RIGHT`` makes the arguments of a call, ``CALLS`` is what is called; ``WRONG`` has a row for each
mistake.  tests/host/test_checks.py tries them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch

import snapmla
from snapmla import PagedKVCache, PlanCache, QuantizedQuery
from snapmla.compat import flash_mla, flash_mla_fp8
from snapmla.dense import DecodePlan
from tests.support import wrong_ds_mla

# argument; its value, or a function of the right one; error; how its words begin; what advice it gives
Row = tuple[str, Any, type[Exception], str, str]
B, S_Q, H, PAGES, P, WIDTH = 2, 2, 16, 4, 64, 3
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64
SLOTS = PAGES * P


def fp8(*shape: int, byte: int = 0) -> torch.Tensor:
    return torch.full(shape, byte, dtype=torch.uint8).view(torch.float8_e4m3fn)


def ones(*shape: int) -> torch.Tensor:
    return fp8(*shape, byte=0x38)


def query(b: int = B, s_q: int = S_Q, h: int = H, scale_dims: int = 3) -> QuantizedQuery:
    return QuantizedQuery(
        fp8(b, s_q, h, 512),
        torch.zeros((b, s_q, h, 64), dtype=BF16),
        torch.ones((b, s_q, h)[:scale_dims]),
    )


def plan(**changes: Any) -> DecodePlan:
    b, rows = changes.get("batch", B), 16 * -(-changes.get("num_heads", H) * S_Q // 16)
    fields: dict[str, Any] = {
        "work_items": torch.zeros((4 + b, 8), dtype=I32),
        "part_begin": torch.zeros(5, dtype=I32),
        "split_begin": torch.zeros(b + 1, dtype=I32),
        "planned_seqlens": torch.zeros(b, dtype=I32),
        "units": torch.zeros((0, 2), dtype=I32),
        "unit_begin": torch.zeros(0, dtype=I32),
        "row_limits": torch.zeros(0, dtype=I32),
        "o_accum": torch.zeros(8, rows, 528, dtype=F16),
        "lse_accum": torch.zeros(8, rows),
        "batch": B, "num_heads": H, "s_q": S_Q, "total_q": b * S_Q, "page_size": P,
        "max_pages": WIDTH, "num_parts": 4, "pipeline": "etap", "row_tile": 16, "unit_rows": rows,
        "token_tile": 64, "fixed_overhead": 4,
    }  # fmt: skip
    return DecodePlan(**{**fields, **changes})


def results() -> dict[str, Any]:
    return {"out": torch.zeros(B, S_Q, H, 512, dtype=BF16), "lse": torch.zeros(B, H, S_Q)}


def decode_arguments() -> dict[str, Any]:
    return {
        "q": query(),
        "cache": PagedKVCache.from_tensors(**{**cache_arguments(), "content": ones(PAGES, P, 512)}),
        "block_table": torch.zeros((B, WIDTH), dtype=I32),
        "cache_seqlens": torch.full((B,), 3, dtype=I32),
        "softmax_scale": 0.1,
        "plan": plan(),
        **results(),
    }


def rows_plan(**changes: Any) -> DecodePlan:
    """A plan for a cache of 16 bits."""
    fields = {"pipeline": "split", "page_size": 16, "cache_dtype": "f16", **changes}
    if fields["cache_dtype"] == "f16":  # 32 bits a channel
        fields.setdefault("o_accum", torch.zeros(8, 32, 512))
    return plan(**fields)


def rows_cache(heads: int = 1, dtype: torch.dtype = F16) -> PagedKVCache:
    """Pages of 16 tokens, whose kernel is quick on the software GPU."""
    return PagedKVCache.from_tensors(torch.ones(PAGES, 16, heads, 576, dtype=dtype))


def decode_rows_arguments() -> dict[str, Any]:
    return {
        **decode_arguments(),
        "q": torch.ones(B, S_Q, H, 576, dtype=F16),
        "cache": rows_cache(),
        "plan": rows_plan(),
        "out": torch.zeros(B, S_Q, H, 512, dtype=F16),
    }


def append_arguments() -> dict[str, Any]:
    return {
        "cache": PagedKVCache.allocate(PAGES, P, device="cpu"),
        "c_kv": torch.zeros((5, 512), dtype=BF16),
        "k_rope": torch.zeros((5, 64), dtype=BF16),
        "slot_mapping": torch.zeros(5, dtype=I32),
    }


def latent_cache(heads: int = 1, dtype: torch.dtype = BF16) -> PagedKVCache:
    """A cache of 16 bits."""
    rows = torch.zeros((PAGES, P, heads, 576), dtype=dtype)
    return PagedKVCache.from_tensors(rows)


def append_rows_arguments() -> dict[str, Any]:
    return {
        **append_arguments(),
        "cache": latent_cache(3),
        "c_kv": torch.zeros((5, 3, 512), dtype=BF16),
        "k_rope": torch.zeros((5, 3, 64), dtype=BF16),
    }


def fetch_rows_arguments() -> dict[str, Any]:
    return {**fetch_arguments(), "cache": latent_cache(3), "out": torch.zeros(B, 9, 3, 576)}


def quantize_arguments() -> dict[str, Any]:
    return {
        "q_nope": torch.zeros((B, S_Q, H, 512), dtype=BF16),
        "q_rope": torch.zeros((B, S_Q, H, 64), dtype=BF16),
    }


def rope_append_arguments() -> dict[str, Any]:
    return {
        **append_arguments(),
        "positions": torch.zeros(5, dtype=I64),
        "cos_sin_cache": torch.zeros(10, 64),
        "is_neox": False,
        "norm_weight": torch.ones(512, dtype=BF16),
        "norm_eps": 1e-6,
    }


def rope_quantize_arguments() -> dict[str, Any]:
    return {
        **quantize_arguments(),
        "positions": torch.zeros((B, S_Q), dtype=I64),
        "cos_sin_cache": torch.zeros(10, 64, dtype=BF16),
        "is_neox": True,
    }


def fetch_arguments() -> dict[str, Any]:
    return {
        "cache": PagedKVCache.allocate(PAGES, P, device="cpu"),
        "where": torch.zeros((B, WIDTH), dtype=I32),
        "cache_seqlens": torch.ones(B, dtype=I32),
    }


def chunk_arguments() -> dict[str, Any]:
    return {
        "cache": PagedKVCache.allocate(PAGES, P, device="cpu"),
        "where": torch.zeros((B, WIDTH), dtype=I32),
        "cu_seqlens": torch.arange(B + 1, dtype=I32),
        "seq_starts": torch.zeros(B, dtype=I32),
        "out": torch.zeros((5, 576), dtype=BF16),
    }


def cache_arguments() -> dict[str, Any]:
    return {
        "content": torch.zeros((PAGES, P, 512), dtype=torch.uint8),
        "rope": torch.zeros((PAGES, P, 64), dtype=BF16),
        "scale": torch.ones((PAGES, P)),
    }


def plan_arguments() -> dict[str, Any]:
    lengths = torch.ones(B, dtype=I32)
    return {
        "cache_seqlens": lengths, "num_heads": H, "s_q": 1, "page_size": 64, "max_pages": 3,
    }  # fmt: skip


def sparse_plan() -> snapmla.SparsePlan:
    """The same tables as a sparse plan's."""
    return snapmla.SparsePlan(**{f.name: getattr(plan(), f.name) for f in fields(DecodePlan)})


def plan_cache() -> PlanCache:
    return PlanCache(H, page_size=P, device="cpu")


def query_arguments() -> dict[str, Any]:
    rope = torch.zeros((B, S_Q, H, 64), dtype=BF16)
    return {"nope": fp8(B, S_Q, H, 512), "rope": rope, "scale": torch.ones((B, S_Q, H))}


def workspace_arguments() -> dict[str, Any]:
    return {"o_accum": torch.zeros(8, 32, 528, dtype=F16), "lse_accum": torch.zeros(8, 32)}


def flash_mla_arguments() -> dict[str, Any]:
    """SnapMLA's decode; a pair with room for 9 sequences."""
    return {
        "q_nope": fp8(B, S_Q, H, 512),
        "q_rope": torch.zeros((B, S_Q, H, 64), dtype=BF16),
        "k_cache_lora": ones(PAGES, P, 1, 512),
        "k_cache_rope": torch.zeros((PAGES, P, 1, 64), dtype=BF16),
        "q_scale": torch.ones((B, S_Q, H, 1)),
        "k_scale": torch.ones((PAGES, P, 1, 1)),
        "block_table": torch.zeros((B, WIDTH), dtype=I32),
        "cache_seqlens": torch.full((B,), 3, dtype=I32),
        "head_dim_v": 512,
        "tile_scheduler_metadata": torch.zeros((4, 20), dtype=I32),
        "num_splits": torch.zeros(B + 1, dtype=I32),
        **results(),
    }


def flash_mla_dense_arguments() -> dict[str, Any]:
    """FlashMLA's decode, with records of two parts."""
    heads, page = 8, 16
    return {
        "q": torch.ones((B, S_Q, heads, 576), dtype=F16),
        "k_cache": torch.ones((PAGES, page, 1, 576), dtype=F16),
        "block_table": torch.zeros((B, WIDTH), dtype=I32),
        "cache_seqlens": torch.full((B,), 3, dtype=I32),
        "head_dim_v": 512,
        "tile_scheduler_metadata": torch.zeros((2, 8), dtype=I32),
        "num_splits": torch.zeros(B + 1, dtype=I32),
        "softmax_scale": 0.1,
        "causal": True,
        "out": torch.zeros((B, S_Q, heads, 512), dtype=F16),
        "lse": torch.zeros((B, heads, S_Q)),
    }


def pool_arguments() -> dict[str, Any]:
    return {
        "key": torch.ones((5, 1, 576), dtype=BF16),
        "k_lora_cache": torch.zeros((SLOTS, 1, 512), dtype=torch.uint8),
        "k_lora_scale_cache": torch.zeros((SLOTS, 1, 1)),
        "k_rope_cache": torch.zeros((SLOTS, 1, 64), dtype=BF16),
        "indices": torch.arange(5, dtype=I32),
        "head_dim_v": 512,
    }


def pool_fetch_arguments() -> dict[str, Any]:
    return {
        "k_lora": fp8(SLOTS, 1, 512),
        "k_rope": torch.zeros((SLOTS, 1, 64), dtype=BF16),
        "k_scale": torch.zeros((SLOTS, 1, 1)),
        "indices": torch.zeros(5, dtype=I32),
    }


def merge_arguments() -> dict[str, Any]:
    out, lse = torch.zeros((B, S_Q, H, 512), dtype=BF16), torch.zeros(B, H, S_Q)
    return {
        "out_a": out, "lse_a": lse, "out_b": out.clone(), "lse_b": lse.clone(),
        "out": out.clone(), "lse": lse.clone(),
    }  # fmt: skip


def merge_list_arguments() -> dict[str, Any]:
    outs = [torch.zeros((B, S_Q, H, 512), dtype=BF16) for _ in range(3)]
    return {"outs": outs, "lses": [torch.zeros(B, H, S_Q) for _ in range(3)]}


def second(value: Any) -> Callable[[list[Any]], list[Any]]:
    """A list with another second element."""
    return lambda values: [values[0], value, *values[2:]]


def freed() -> PagedKVCache:
    """A cache whose owner gave its memory back."""
    cache = PagedKVCache.allocate(PAGES, P, device="cpu")
    cache.content.untyped_storage().resize_(0)
    return cache


def gaps(t: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between sequences."""
    return torch.cat([t, t], 1)[:, : t.shape[1]]


def every_other(t: torch.Tensor) -> torch.Tensor:
    """The same values, each twice in memory."""
    return t.repeat_interleave(2)[::2]


META = {"device": "meta"}
with warnings.catch_warnings(action="ignore"):  # of a prototype
    NESTED = torch.nested.nested_tensor([torch.zeros(n, H, 576) for n in (1, 2)])
DEVICES: list[Row] = [
    ("device", value, error, f"device: expected 'cpu' or a CUDA device.*got {got}",
     "device='cpu' runs the software GPU")
    for value, error, got in (
        ("gpu", ValueError, "'gpu'"), ("cuda:99", ValueError, "'cuda:99'"), ("", ValueError, "''"),
        (2.5, TypeError, "2.5"), ([0], TypeError, r"\[0\]"),
    )
]  # fmt: skip
WRONG: dict[str, list[Row]] = {
    "decode": [
        ("cache", wrong_ds_mla.cache(), TypeError, "q: expected a bfloat16 tensor, got a snapmla.QuantizedQuery",
         "takes queries as they are"),
        ("topk_length", torch.zeros(B, dtype=I32), ValueError, "topk_length: expected None without indices, got a value",
         "dense decode has neither"),
        ("attn_sink", torch.zeros(H), ValueError, "attn_sink: expected None without indices", "dense decode has neither"),
        ("cu_seqlens_q", torch.zeros(B + 1, dtype=I32), ValueError,
         "cu_seqlens_q: expected None: the plan is for s_q = 2", "a plan for ragged queries"),
        ("row_seqlens", torch.zeros(B, S_Q, dtype=I32), ValueError,
         "row_seqlens: expected None: the plan has no row_seqlens", "a plan that was made with row_seqlens"),
        ("q", torch.zeros(B, S_Q, H, 576, dtype=F16), TypeError,
         "q: expected a snapmla.QuantizedQuery, got a float16 tensor .*quantize_q",
         "call snapmla.quantize_q(q_nope, q_rope)"),
        ("cache", torch.zeros(4, 64, 576), TypeError, "cache: .*PagedKVCache.*from_tensors",
         "PagedKVCache.from_tensors wraps existing"),
        ("cache", latent_cache(), TypeError,
         "q: expected a bfloat16 tensor, as the cache's rows, got a snapmla.QuantizedQuery",
         "a 16-bit cache takes queries as they are"),
        ("plan", rows_plan(), ValueError,
         "plan: expected one made with cache_dtype='fp8', got torch.float16", "one kind of cache"),
        ("block_table", torch.zeros((B, WIDTH), dtype=I64), TypeError,
         r"block_table: expected dtype int32, got int64 \(use \.to\(torch\.int32\) once",
         "use .to(torch.int32) once when you build"),
        ("block_table", torch.zeros((B + 1, WIDTH), dtype=I32), ValueError,
         r"block_table: expected shape \(2, width\), got \(3, 3\)",
         "one row of page ids for each sequence of"),
        ("block_table", torch.zeros(B, dtype=I32), ValueError, "block_table: expected shape",
         "one row of page ids for each sequence of"),
        ("block_table", torch.zeros((WIDTH, B), dtype=I32).T, ValueError,
         "block_table: expected innermost stride 1",
         "it is transposed or strided inside a row:"),
        ("block_table", torch.zeros((B, WIDTH), dtype=I32, **META), ValueError,
         "block_table: expected a tensor on cpu, got meta",
         "move it with .to('cpu') when you build it"),
        ("block_table", [[0, 1, 2]], TypeError, "block_table: expected a torch.Tensor, got list",
         "build it once with torch.as_tensor(...,"),
        ("block_table", torch.zeros((B, 2), dtype=I32), ValueError,
         r"block_table: expected a width of 3, the plan's max_pages, got 2 \(slice the table, or plan",
         "slice the table, or plan with max_pages ="),
        ("block_table", torch.zeros((B, 4), dtype=I32), ValueError,
         r"block_table: expected a width of 3, the plan's max_pages, got 4 \(slice the table, or plan",
         "slice the table, or plan with max_pages ="),
        ("block_table", torch.zeros((B, 0), dtype=I32), ValueError,
         "block_table: expected a width of 1 or more pages, got 0",
         "give even empty sequences one column"),
        ("cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: .*int32.*int64",
         "use .to(torch.int32) once when you build"),
        ("cache_seqlens", torch.ones((B, 1), dtype=I32), ValueError, "cache_seqlens: expected sh",
         "drop the dimension of 1, for example by"),
        ("cache_seqlens", torch.ones(2 * B, dtype=I32)[::2], ValueError,
         "cache_seqlens: expected a contiguous",
         "call .contiguous() once when you build it"),
        ("softmax_scale", None, TypeError, r"softmax_scale: .*192\*\*-0.5",
         "DeepSeek models want 192**-0.5 * mscale**2;"),
        ("softmax_scale", 0.0, ValueError, "softmax_scale: expected a positive finite number",
         "DeepSeek models want 192**-0.5 * mscale**2;"),
        ("softmax_scale", float("nan"), ValueError, "softmax_scale: .*got nan",
         "DeepSeek models want 192**-0.5 * mscale**2;"),
        ("softmax_scale", float("inf"), ValueError, "softmax_scale: .*got inf",
         "DeepSeek models want 192**-0.5 * mscale**2;"),
        ("softmax_scale", 1e39, ValueError, r"softmax_scale: expected .*1.44e\+17, got 1e\+39",
         "DeepSeek models want 192**-0.5 * mscale**2;"),
        ("softmax_scale", 1.01 * 2.0**57, ValueError, r"softmax_scale: expected .*1.44e\+17, got",
         "DeepSeek models want 192**-0.5 * mscale**2;"),
        ("softmax_scale", 10**400, ValueError, "softmax_scale: ",
         "DeepSeek models want 192**-0.5 * mscale**2;"),
        ("softmax_scale", torch.tensor(0.1), TypeError, "softmax_scale: .*got Tensor",
         "convert it with float(...)"),
        ("softmax_scale", np.float32(0.1), TypeError, "softmax_scale: .*got float32",
         "convert it with float(...)"),
        ("causal", None, TypeError, "causal: expected True or False, got NoneType",
         "query token s of s_q"),
        ("causal", torch.tensor(True), TypeError,
         "causal: expected True or False, got Tensor", "query token s of s_q"),
        ("lse_base", ["e"], ValueError, r"lse_base: expected one of 'e', '2', got \['e'\]",
         "e is the natural logarithm"),
        ("lse_base", "10", ValueError, "lse_base: expected one of 'e', '2', got '10'",
         "e is the natural logarithm"),
        ("empty_lse", "nan", ValueError, "empty_lse: expected one of '-inf', '\\+inf', got 'nan'",
         "-inf merges like an empty sum; FlashMLA"),
        ("empty_lse", "inf", ValueError, "empty_lse: .*got 'inf'", "did you mean '+inf'?"),
        ("out", torch.zeros(B, S_Q, H, 512, dtype=F16), TypeError,
         "out: expected dtype bfloat16 or float32, got float16",
         "allocate it with dtype=torch.bfloat16"),
        ("out", torch.zeros(B, S_Q, H, 576, dtype=BF16), ValueError, r"out: .*\(2, 2, 16, 512\)",
         "leave it out to have it allocated"),
        ("out", torch.zeros(B, S_Q, 512, H, dtype=BF16).mT, ValueError, "out: .*contiguous",
         "allocate it contiguous; a slice or"),
        ("out", torch.zeros(B * S_Q * H * 512 + 1, dtype=BF16)[1:].view(B, S_Q, H, 512), ValueError,
         "out: expected storage aligned to 16 bytes, got address",
         "start slices at multiples of 8 elements"),
        ("lse", torch.zeros(B, S_Q, H), ValueError, r"lse: expected shape \(2, 16, 2\)",
         "heads come before query tokens; leave it"),
        ("lse", torch.zeros(B, H, S_Q, dtype=BF16), TypeError, "lse: expected dtype float32",
         "allocate it with dtype=torch.float32"),
        ("out_dtype", F16, TypeError, "out_dtype: expected bfloat16 or float32",
         "convert out afterwards"),
        ("plan", torch.zeros(3), TypeError, "plan: expected a snapmla.DecodePlan or None",
         "make one for this step's shapes with"),
        ("plan", plan(num_heads=32), ValueError, "plan: .*num_heads.*got",
         "make one for this step's shapes with"),
        ("plan", plan(page_size=16), ValueError, "plan: .*page_size",
         "make one for this step's shapes with"),
        ("plan", plan(batch=3), ValueError, "plan: ",
         "make one for this step's shapes with"),
        ("plan", plan(work_items=torch.zeros((6, 8), dtype=I32, **META)), ValueError,
         "plan: expected a plan on cpu.*got meta",
         "make one for this step's shapes with"),
        ("out", torch.zeros(B, S_Q, H, 512, dtype=BF16, **META), ValueError,
         "out: expected a tensor on cpu, got meta", ".to('cpu')"),
        ("cache", PagedKVCache.allocate(PAGES, P, device="meta"), ValueError,
         "cache: expected tensors on cpu, where q is, got meta", "PagedKVCache.allocate"),
        ("cache", freed(), ValueError, "cache: expected memory, got a storage that was freed",
         "keep the storage, or make another cache"),
        ("out", torch._neg_view(torch.zeros(B, S_Q, H, 512, dtype=BF16)), ValueError,
         "out: expected values as memory holds them, got a view with the negative bit", ".resolve_neg()"),
        ("lse", torch._neg_view(torch.zeros(B, H, S_Q)), ValueError,
         "lse: expected values as memory holds them, got a view with the negative bit", ".resolve_neg()"),
        ("lse", torch.zeros(B, H, S_Q).to_sparse(), ValueError,
         "lse: expected a dense tensor, got layout sparse_coo", ".to_dense()"),
        ("block_table", torch.zeros((B, WIDTH), dtype=I32).to_sparse(), ValueError,
         "block_table: expected a dense tensor, got layout sparse_coo", ".to_dense()"),
        ("pipeline", "dual_wg", ValueError, "pipeline: expected 'etap', as planned",
         "leave it out to let the dispatcher choose"),
        ("q", 3, TypeError, "q: expected a snapmla.QuantizedQuery, got int", "call snapmla.quantize_q(q_nope, q_rope)"),
        ("cache", 3, TypeError, "cache: expected a snapmla.PagedKVCache, got int", "PagedKVCache.from_tensors wraps"),
        ("block_table", torch.zeros((B, 2 * WIDTH), dtype=I32)[:, ::2], ValueError, "block_table: .*stride", "it is transposed or strided inside a"),
        ("block_table", None, TypeError, "block_table: expected a torch.Tensor, got NoneType", "build it once with torch.as_tensor(...,"),
        ("cache_seqlens", torch.ones(B + 1, dtype=I32), ValueError, "cache_seqlens: ", "one length for each sequence of the"),
        ("cache_seqlens", None, TypeError, "cache_seqlens: expected a torch.Tensor", "build it once with torch.as_tensor(...,"),
        ("out", lambda t: torch.cat([t, t], -1)[..., :512], ValueError, "out: .*contiguous", "allocate it contiguous; a slice or"),
        ("out", gaps, ValueError, "out: .*contiguous", "allocate it contiguous; a slice or"),
        ("out", torch.zeros(B, H, S_Q, 512, dtype=BF16), ValueError, "out: expected shape", "leave it out to have it allocated"),
        ("out", torch.zeros(B + 1, S_Q, H, 512, dtype=BF16), ValueError, "out: expected shape", "leave it out to have it allocated"),
        ("out", [1], TypeError, "out: expected a torch.Tensor, got list", "build it once with torch.as_tensor(...,"),
        ("lse", lambda t: t.mT.contiguous().mT, ValueError, "lse: .*contiguous", "allocate it contiguous; a slice or"),
        ("lse", lambda t: t.double(), TypeError, "lse: .*float64", "allocate it with dtype=torch.float32"),
        ("out_dtype", F32, TypeError, "out: expected dtype float32, got bfloat16", "allocate it with dtype=torch.float32"),
    ],
    "decode_rows": [
        ("cache", wrong_ds_mla.cache(), TypeError, "q: expected dtype bfloat16, got float16",
         "convert it with .to(torch.bfloat16)"),
        ("q", query(), TypeError, "q: expected a float16 tensor, .*got a snapmla.QuantizedQuery",
         "a 16-bit cache takes queries as they are"),
        ("q", torch.ones(B, S_Q, H, 576, dtype=BF16), TypeError,
         "q: expected dtype float16, got bfloat16", "convert it with .to(torch.float16)"),
        ("q", torch.ones(B, S_Q, H, 512, dtype=F16), ValueError,
         r"q: expected shape \(b, s_q, num_heads, 576\)", "then 64 of RoPE"),
        ("q", torch.ones(B, 2 * S_Q, H, 576, dtype=F16)[:, ::2], ValueError,
         "q: expected a contiguous tensor", ".contiguous()"),
        ("q", torch.ones(B * S_Q * H * 576 + 1, dtype=F16)[1:].view(B, S_Q, H, 576), ValueError,
         "q: expected storage aligned to 16 bytes", "multiples of 8 elements"),
        ("q", torch.ones(B, S_Q, 129, 576, dtype=F16), ValueError,
         "num_heads: expected 1 to 128, got 129", "split more heads"),
        ("q", torch.ones(B + 2, S_Q, H, 576, dtype=F16), ValueError,
         r"block_table: expected shape \(4, width\)", "one row of page ids"),
        ("q", torch.ones(B, S_Q, H, 576, dtype=F16, **META), ValueError,
         "cache: expected tensors on meta, where q is, got cpu", "PagedKVCache.allocate"),
        ("q", None, TypeError, "q: expected a torch.Tensor, got NoneType", "build it once"),
        ("cache", decode_arguments()["cache"], TypeError,
         "q: expected a snapmla.QuantizedQuery, got a float16 tensor", "snapmla.quantize_q"),
        ("cache", rows_cache(dtype=BF16), TypeError, "q: expected dtype bfloat16, got float16",
         ".to(torch.bfloat16)"),
        ("cache", rows_cache(2), ValueError,
         "plan: expected one made with num_kv_heads=2, as the cache, got 1", "snapmla.plan_decode"),
        ("cache", rows_cache(3), ValueError,
         "q: expected a multiple of the cache's 3 KV heads, got 16 heads", "share KV head j"),
        ("cache", None, TypeError, "q: expected a snapmla.QuantizedQuery", "snapmla.quantize_q"),
        ("plan", plan(), ValueError,
         "plan: expected one made with cache_dtype=torch.float16, got 'fp8'", "one kind of cache"),
        ("plan", rows_plan(cache_dtype="bf16"), ValueError,
         "plan: expected one made with cache_dtype=torch.float16, got torch.bfloat16", "one kind"),
        ("plan", rows_plan(page_size=32), ValueError, r"plan: expected one made for .*\(2, 2, 16, 16\)",
         "snapmla.plan_decode"),
        ("pipeline", "etap", ValueError, "pipeline: expected 'split', as planned", "leave it out"),
        ("out", torch.zeros(B, S_Q, H, 512), TypeError, "out: expected dtype float16, got float32",
         "allocate it with dtype=torch.float16"),
        ("out", torch.zeros(B, S_Q, 2 * H, 512, dtype=F16)[:, :, ::2], ValueError,
         "out: expected a contiguous tensor", "allocate it contiguous"),
        ("out_dtype", F32, TypeError, "out_dtype: expected float16, got torch.float32", "afterwards"),
        ("lse", torch.zeros(B, H, 2 * S_Q)[..., ::2], ValueError, "lse: expected a contiguous",
         "allocate it contiguous"),
        ("block_table", torch.zeros((B, WIDTH), dtype=I64), TypeError, "block_table: .*int64",
         "use .to(torch.int32) once"),
        ("block_table", torch.zeros((B, 2), dtype=I32), ValueError,
         "block_table: expected a width of 3, the plan's max_pages", "slice the table"),
        ("cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: .*int64", "torch.int32"),
    ],
    "append_kv": [
        ("cache", freed(), ValueError, "cache: expected memory, got a storage that was freed",
         "keep the storage, or make another cache"),
        ("cache", None, TypeError, "cache: expected a snapmla.PagedKVCache, got NoneType",
         "PagedKVCache.from_tensors wraps existing"),
        ("c_kv", torch.zeros(5, 512, dtype=torch.float64), TypeError, "c_kv: .*float64",
         "convert it with .to(torch.bfloat16)"),
        ("c_kv", torch.zeros(5, 576, dtype=BF16), ValueError, r"c_kv: expected shape \(n, 512\)",
         "the latent alone: joint[:, :512], with"),
        ("c_kv", torch.zeros(512, 5, dtype=BF16).T, ValueError, "c_kv: expected innermost",
         "it is transposed or strided inside a row:"),
        ("c_kv", torch.zeros(5, 513, dtype=BF16)[:, :512], ValueError, "c_kv: .*16 bytes",
         "pad rows to a multiple of 8 elements"),
        ("k_rope", torch.zeros(5, 64), TypeError, "k_rope: expected dtype bfloat16, got float32",
         "convert it with .to(torch.bfloat16)"),
        ("k_rope", torch.zeros(4, 64, dtype=BF16), ValueError, "k_rope: ",
         "one row for each row of c_kv, in the same"),
        ("slot_mapping", torch.zeros(5), TypeError, "slot_mapping: .*int32 or int64",
         "use .to(torch.int32) once when you build"),
        ("slot_mapping", torch.zeros(4, dtype=I32), ValueError, "slot_mapping: ",
         "one slot for each row of c_kv; -1 skips a"),
        ("slot_mapping", torch.zeros(10, dtype=I32)[::2], ValueError, "slot_mapping: .*contig",
         "call .contiguous() once when you build it"),
        ("slot_mapping", torch.zeros(5, dtype=I32, **META), ValueError, "slot_mapping: .*meta",
         "move it with .to('cpu') when you build it"),
        ("slot_mapping", torch._efficientzerotensor((5,), dtype=I32), TypeError,
         "slot_mapping: expected a tensor with memory, got one of torch's zeros", "call .clone() once"),
    ],
    "append_rows": [
        ("c_kv", torch.zeros((5, 512), dtype=BF16), ValueError,
         r"c_kv: expected shape \(n, 3, 512\), got \(5, 512\)", "the latent alone"),
        ("c_kv", torch.zeros((3, 5, 512), dtype=BF16).transpose(0, 1), ValueError,
         "c_kv: expected rows evenly spaced over tokens and heads, got strides", "call .contiguous()"),
        ("c_kv", torch.zeros((5, 4, 512), dtype=BF16)[:, :3], ValueError,
         "c_kv: expected rows evenly spaced over tokens and heads, got strides", "call .contiguous()"),
        ("k_rope", torch.zeros((3, 5, 64), dtype=BF16).transpose(0, 1), ValueError,
         "k_rope: expected rows evenly spaced over tokens and heads, got strides", "call .contiguous()"),
        ("k_rope", torch.zeros((5, 1, 64), dtype=BF16), ValueError,
         r"k_rope: expected shape \(5, 3, 64\), got \(5, 1, 64\)", "one row for each row of c_kv"),
        ("slot_mapping", torch.zeros(15, dtype=I32), ValueError,
         r"slot_mapping: expected shape \(5,\), got \(15,\)", "one slot for each row of c_kv"),
        ("cache", latent_cache(), ValueError, r"c_kv: expected shape \(n, 512\), got \(5, 3, 512\)",
         "the latent alone"),
    ],
    "rope_append_kv": [
        ("cache", latent_cache(), ValueError, "cache: expected an FP8 cache, got one of bfloat16 rows",
         "rotate and normalise the tokens, then snapmla.append_kv"),
        ("cache", None, TypeError, "cache: expected a snapmla.PagedKVCache, got NoneType",
         "PagedKVCache.from_tensors wraps existing"),
        ("c_kv", torch.zeros(5, 576, dtype=BF16), ValueError, r"c_kv: expected shape \(n, 512\)",
         "the latent alone: joint[:, :512], with"),
        ("k_rope", torch.zeros(5, 64), TypeError, "k_rope: expected dtype bfloat16, got float32",
         "convert it with .to(torch.bfloat16)"),
        ("positions", torch.zeros(4, dtype=I64), ValueError, r"positions: expected shape \(5,\), got \(4,\)",
         "one row of cos_sin_cache for each token"),
        ("positions", torch.zeros(5), TypeError, "positions: expected dtype int32 or int64, got float32",
         "use .to(torch.int32) once when you build"),
        ("positions", torch.zeros(10, dtype=I64)[::2], ValueError, "positions: expected a contiguous",
         "call .contiguous() once when you build it"),
        ("positions", torch.zeros(5, dtype=I64, **META), ValueError, "positions: .*got meta",
         "move it with .to('cpu') when you build it"),
        ("cos_sin_cache", torch.zeros(10, 32), ValueError,
         r"cos_sin_cache: expected shape \(max_position, 64\), got \(10, 32\)",
         "torch.cat([cos, sin], -1) of the 32 angles"),
        ("cos_sin_cache", torch.zeros(10, 64, dtype=F16), TypeError,
         "cos_sin_cache: expected dtype float32 or bfloat16, got float16", "convert it with .to(torch.float32)"),
        ("cos_sin_cache", torch.zeros(0, 64), ValueError, "cos_sin_cache: expected 1 position or more, got 0",
         "torch.cat([cos, sin], -1) of the 32 angles"),
        ("cos_sin_cache", torch.zeros(64, 10).T, ValueError, "cos_sin_cache: expected innermost stride 1",
         "it is transposed or strided inside a row:"),
        ("cos_sin_cache", torch.zeros(10, 65)[:, :64], ValueError, "cos_sin_cache: .*multiples of 16 bytes",
         "pad rows to a multiple of 4 elements"),
        ("is_neox", "neox", TypeError, "is_neox: expected True or False, got str", "as DeepSeek's models do"),
        ("norm_weight", torch.ones(512), TypeError, "norm_weight: expected dtype bfloat16, got float32",
         "convert it with .to(torch.bfloat16)"),
        ("norm_weight", torch.ones(576, dtype=BF16), ValueError, r"norm_weight: expected shape \(512,\)",
         "kv_a_layernorm's weight in c_kv's dtype"),
        ("norm_weight", torch.ones(513, dtype=BF16)[1:], ValueError, "norm_weight: .*aligned to 16 bytes",
         "start slices at multiples of 8 elements"),
        ("norm_eps", 0.0, ValueError, "norm_eps: expected 1e-12 to 1, got 0.0", "rms_norm_eps of the model"),
        ("norm_eps", float("nan"), ValueError, "norm_eps: expected 1e-12 to 1, got nan", "rms_norm_eps of the model"),
        ("norm_eps", torch.tensor(1e-6), TypeError, "norm_eps: expected a Python float, got Tensor",
         "rms_norm_eps of the model"),
    ],
    "rope_quantize_q": [
        ("q_nope", torch.zeros(B, 1, 129, 512, dtype=BF16), ValueError,
         "num_heads: expected 1 to 128, got 129", "split more heads over several calls"),
        ("q_rope", torch.zeros(B, 1, H, 64), TypeError, "q_rope: .*bfloat16.*float32",
         "convert it with .to(torch.bfloat16)"),
        ("positions", torch.zeros((S_Q + 1, B), dtype=I64), ValueError,
         r"positions: expected shape \(2, 2\), got \(3, 2\)", "one row of cos_sin_cache for each token"),
        ("positions", torch.zeros(B, dtype=I64), ValueError, r"positions: expected shape \(4,\), got \(2,\)",
         "one row of cos_sin_cache for each token"),
        ("positions", None, TypeError, "positions: expected a torch.Tensor, got NoneType",
         "build it once with torch.as_tensor(..., dtype=torch.int32)"),
        ("cos_sin_cache", torch.zeros(10, 64, dtype=torch.float64), TypeError,
         "cos_sin_cache: expected dtype float32 or bfloat16, got float64", "convert it with .to(torch.float32)"),
        ("is_neox", None, TypeError, "is_neox: expected True or False, got NoneType", "as DeepSeek's models do"),
        ("granularity", "channel", ValueError, "granularity: .*'token_head'.*got 'channel'",
         "token_head is SnapMLA's, token is for one"),
        ("out", 3, TypeError, "out: expected a snapmla.QuantizedQuery, got int", "call snapmla.quantize_q(q_nope, q_rope)"),
        ("out", query(b=1), ValueError, "out.nope: expected shape", "keep one QuantizedQuery for each shape"),
    ],
    "quantize_q": [
        ("granularity", "channel", ValueError, "granularity: .*'token_head'.*got 'channel'",
         "token_head is SnapMLA's, token is for one"),
        ("q_nope", torch.zeros(H, 512, dtype=BF16), ValueError, "q_nope: expected shape",
         "queries absorbed into the latent space:"),
        ("q_nope", torch.zeros(B, H, 512, dtype=BF16), ValueError,  # ragged, beside what is not
         r"q_rope: expected shape \(2, 16, 64\)", "one row for each row of q_nope"),
        ("q_nope", torch.zeros(1, 1, 1, 512, dtype=BF16).expand(B, 2**28, 1, 512), ValueError,
         "s_q: expected at most 536870911 query tokens times heads, got 536870912",
         "split the tokens over several calls"),
        ("q_nope", torch.zeros(B, 1, 129, 512, dtype=BF16), ValueError,
         "num_heads: expected 1 to 128, got 129",
         "split more heads over several calls"),
        ("q_nope", torch.zeros(B, 0, H, 512, dtype=BF16), ValueError, "s_q: .*got 0",
         "query tokens of each sequence; without any no call is needed"),
        ("q_nope", torch.zeros(B, 1, 0, 512, dtype=BF16), ValueError,
         "num_heads: expected 1 to 128, got 0", "query heads of this rank; without any no call is needed"),
        ("q_nope", torch.zeros(B, S_Q, H, 512, dtype=BF16).to_sparse(), ValueError,
         "q_nope: expected a dense tensor, got layout sparse_coo", "call .to_dense() once"),
        ("q_nope", torch.zeros(B, 1, H, 512, dtype=torch.int8), TypeError, "q_nope: .*int8",
         "convert it with .to(torch.bfloat16)"),
        ("q_nope", lambda t: t.to("meta"), ValueError,
         "q_nope: expected a tensor on cpu, where q_rope is, got meta", ".to('cpu')"),
        ("q_rope", lambda t: t.to("meta"), ValueError,
         "q_rope: expected a tensor on cpu, where q_nope is, got meta", ".to('cpu')"),
        ("q_nope", NESTED, TypeError, "q_nope: expected a tensor of one shape, got a nested tensor",
         "ragged queries are (total_q, num_heads, ...)"),
        ("q_rope", torch.zeros(B, 1, H, 64), TypeError, "q_rope: .*bfloat16.*float32",
         "convert it with .to(torch.bfloat16)"),
        ("q_rope", torch.zeros(B, S_Q, H, 65, dtype=BF16)[..., 1:], ValueError, "q_rope: ",
         "pad rows to a multiple of 8 elements"),
        ("out", torch.zeros(3), TypeError, "out: expected a snapmla.QuantizedQuery",
         "call snapmla.quantize_q(q_nope, q_rope)"),
        ("out", query(b=3), ValueError, "out.nope: expected shape",
         "leave out= away, or keep one QuantizedQuery"),
        ("out", query(scale_dims=2), ValueError, "out.scale: expected shape",
         "leave out= away, or keep one QuantizedQuery"),
    ],
    "fetch_dequant": [
        ("where", torch.zeros((B, WIDTH), dtype=I64), TypeError, "block_table: .*int64",
         "use .to(torch.int32) once when you build"),
        ("where", NESTED, TypeError, "where: expected a tensor of one shape, got a nested", "pad it"),
        ("where", torch.zeros((1, B, WIDTH), dtype=I32), ValueError, "where: expected a bl",
         "a 2-D block table with cache_seqlens or cu_seqlens"),
        ("where", torch.zeros((65536, 1), dtype=I32), ValueError,
         "where: expected at most 65535 sequences, got 65536", "fetch them in several calls"),
        ("where", torch.zeros((B, 0), dtype=I32), ValueError,
         "block_table: expected a width of 1",
         "give even empty sequences one column"),
        ("out", torch.zeros(1, 9, 576).expand(B, 9, 576), ValueError,
         "out: expected strides of distinct rows, got strides", "allocate them"),
        ("out", torch.zeros(2, 1, 576).expand(B, 9, 576), ValueError,
         "out: expected strides of distinct rows, got strides", "allocate them"),
        ("cache_seqlens", None, ValueError, "cache_seqlens: .*beside a block table",
         "one length for each sequence of the batch,"),
        ("out", torch.zeros(B, 192, 512, dtype=BF16), ValueError, "out: .*576",
         "leave out= away to have both allocated"),
        ("out", 3, TypeError, "out: expected a .*576.* tensor or a pair",
         "leave out= away to have both allocated"),
        ("dtype", torch.float64, TypeError, "dtype: expected bfloat16",
         "convert the result afterwards"),
        ("seq_starts", torch.zeros(B, dtype=I32), ValueError,
         "seq_starts: expected None beside cache_seqlens, got a Tensor", "beside cu_seqlens"),
        ("total", 5, ValueError, "total: expected None beside cache_seqlens, got 5", "beside cu_seqlens"),
        ("where", torch.zeros(5, dtype=I64), ValueError,
         "cache_seqlens: expected None beside flat indices, got a Tensor", "one length for each"),
        ("where", torch.zeros(5, dtype=torch.int16), TypeError,
         "indices: expected dtype int32 or int64, got int16", "use .to(torch.int32) once when you build"),
    ],
    "fetch_rows": [
        ("out", torch.zeros(B, 9, 576), ValueError,
         r"out: expected shape \(2, tokens, 3, 576\), got \(2, 9, 576\)", "have both allocated"),
        ("out", (torch.zeros(B, 9, 3, 512), torch.zeros(B, 9, 64)), ValueError,
         r"out\[1\]: expected shape \(2, 9, 3, 64\), got \(2, 9, 64\)", "leave out= away"),
    ],
    "fetch_dequant_chunks": [
        ("where", torch.zeros(5, dtype=I32), ValueError,
         "cu_seqlens: expected None beside flat indices, got a Tensor", "where each sequence's rows begin"),
        ("where", torch.zeros((B, 0), dtype=I32), ValueError,
         "block_table: expected a width of 1", "give even empty sequences one column"),
        ("cu_seqlens", lambda t: t[1:], ValueError, r"cu_seqlens: expected shape \(3,\), got \(2,\)",
         "and the end of the last"),
        ("cu_seqlens", lambda t: t.long(), TypeError, "cu_seqlens: expected dtype int32, got int64",
         "use .to(torch.int32) once when you build"),
        ("cu_seqlens", lambda t: t.repeat_interleave(2)[::2], ValueError,
         "cu_seqlens: expected a contiguous tensor", "call .contiguous() once when you build"),
        ("cu_seqlens", [0, 1, 2], TypeError, "cu_seqlens: expected a torch.Tensor, got list", "torch.as_tensor"),
        ("cu_seqlens", None, ValueError, "seq_starts: expected None beside cache_seqlens, got a Tensor",
         "beside cu_seqlens"),
        ("seq_starts", lambda t: t[:1], ValueError, r"seq_starts: expected shape \(2,\), got \(1,\)",
         "the first cached token wanted"),
        ("seq_starts", lambda t: t.to("meta"), ValueError, "seq_starts: expected a tensor on cpu, got meta",
         "move it with .to('cpu')"),
        ("cache_seqlens", torch.ones(B, dtype=I32), ValueError,
         "cache_seqlens: expected None beside cu_seqlens, got a Tensor", "one length for each"),
        ("out", None, ValueError, "total: expected one of total and out beside cu_seqlens, got neither",
         "total for rows to allocate"),
        ("total", 5, ValueError, "total: expected one of total and out beside cu_seqlens, got both",
         "out to write into"),
        ("out", torch.zeros((B, 5, 576), dtype=BF16), ValueError,
         r"out: expected shape \(total, 576\), got \(2, 5, 576\)", "leave out= away to have both allocated"),
        ("out", (torch.zeros((5, 512), dtype=BF16), torch.zeros((4, 64), dtype=BF16)), ValueError,
         r"out\[1\]: expected shape \(5, 64\), got \(4, 64\)", "leave out= away"),
    ],
    "merge_state": [
        ("out_a", [0.0], TypeError, "out_a: expected a torch.Tensor, got list", "torch.as_tensor"),
        ("out_a", lambda t: t.half(), TypeError,
         "out_a: expected dtype bfloat16 or float32, got float16", "convert it with .to(torch.bfloat16)"),
        ("out_a", torch.zeros(H, 512), ValueError,
         r"out_a: expected shape \(b, s_q, h, 512\), got \(16, 512\)", "packed without the batch"),
        ("out_a", torch.zeros(B, S_Q, H, 576), ValueError,
         r"out_a: expected shape \(b, s_q, h, 512\)", "of prefill 256 or 128 channels"),
        ("out_a", lambda t: t.repeat_interleave(2, -1)[..., ::2], ValueError, "out_a: expected innermost stride 1",
         "it is transposed or strided inside a row"),
        ("out_a", torch.zeros(B, S_Q, H, 513, dtype=BF16)[..., :512], ValueError,
         "out_a: expected outer strides that are multiples of 16 bytes", "pad rows to a multiple of 8"),
        ("out_b", lambda t: t.float(), TypeError,
         "out_b: expected dtype bfloat16, got float32", "convert it with .to(torch.bfloat16)"),
        ("out_b", lambda t: t[..., :128], ValueError,
         r"out_b: expected shape \(2, 2, 16, 512\), got \(2, 2, 16, 128\)", "the same rows"),
        ("out_b", lambda t: t[:, :1], ValueError,
         r"out_b: expected shape \(2, 2, 16, 512\), got \(2, 1, 16, 512\)", "the same rows"),
        ("out_b", lambda t: t.to("meta"), ValueError, "out_b: expected a tensor on cpu, got meta",
         "move it with .to('cpu')"),
        ("lse_a", lambda t: t.bfloat16(), TypeError, "lse_a: expected dtype float32, got bfloat16",
         "convert it with .to(torch.float32)"),
        ("lse_a", lambda t: t.mT, ValueError,
         r"lse_a: expected shape \(2, 16, 2\), got \(2, 2, 16\)", "the last two dimensions are exchanged: .mT)"),
        ("lse_b", lambda t: t.unsqueeze(-1), ValueError, "lse_b: expected shape", "drop the dimension of 1"),
        ("lse_b", None, TypeError, "lse_b: expected a torch.Tensor, got NoneType", "torch.as_tensor"),
        ("lse_base", "10", ValueError, "lse_base: expected one of 'e', '2', got '10'",
         "e is the natural logarithm"),
        ("lse_base", 2, ValueError, "lse_base: expected one of 'e', '2', got 2",
         "e is the natural logarithm"),
        ("out", lambda t: t.half(), TypeError,
         "out: expected dtype bfloat16 or float32, got float16", "allocate it with dtype=torch.bfloat16"),
        ("out", lambda t: t.flatten(0, 1), ValueError, r"out: expected shape \(2, 2, 16, 512\)",
         "leave it out to have it allocated"),
        ("out", torch.zeros(1, S_Q, H, 512).expand(B, S_Q, H, 512), ValueError,
         "out: expected strides of distinct rows", "allocate them"),
        ("out", lambda t: t.repeat_interleave(2, -1)[..., ::2], ValueError, "out: expected innermost stride 1", "strided inside a row"),
        ("lse", torch.zeros(1, H, S_Q).expand(B, H, S_Q), ValueError,
         "lse: expected strides of distinct rows", "allocate them"),
        ("lse", lambda t: t.double(), TypeError, "lse: expected dtype float32, got float64",
         "allocate it with dtype=torch.float32"),
        ("lse", lambda t: t.mT, ValueError, r"lse: expected shape \(2, 16, 2\)",
         "leave it out to have it allocated"),
    ],
    "merge_states": [
        ("outs", 3, TypeError, "outs: expected a torch.Tensor, or a list of them, got int",
         "one that stacks them in its first dimension"),
        ("outs", [], ValueError, "outs: expected 1 part or more, got 0", "a list of n tensors"),
        ("outs", torch.zeros(3, B, S_Q, H, 512), TypeError,
         "lses: expected a torch.Tensor, as outs is, got list", "a tensor beside a tensor"),
        ("outs", second(None), TypeError, r"outs\[1\]: expected a torch.Tensor, got NoneType",
         "torch.as_tensor"),
        ("outs", second(torch.zeros(B, S_Q, H, 512)), TypeError,
         r"outs\[1\]: expected dtype bfloat16, got float32", "convert it with .to(torch.bfloat16)"),
        ("outs", second(torch.zeros(B, 1, H, 512, dtype=BF16)), ValueError,
         r"outs\[1\]: expected shape \(2, 2, 16, 512\), got \(2, 1, 16, 512\)", "a list of n tensors"),
        ("lses", torch.zeros(3, B, H, S_Q), TypeError, "lses: expected a list, as outs is, got Tensor",
         "a list beside a list"),
        ("lses", lambda t: t[:2], ValueError, "lses: expected 3 tensors, one for each of outs, got 2",
         "a list beside a list"),
        ("lses", second(torch.zeros(B, S_Q, H)), ValueError,
         r"lses\[1\]: expected shape \(2, 16, 2\), got \(2, 2, 16\)", "exchanged: .mT)"),
        ("lse_base", "10", ValueError, "lse_base: expected one of 'e', '2'", "natural"),
        ("out", torch.zeros(3, B, S_Q, H, 512), ValueError, r"out: expected shape \(2, 2, 16, 512\)",
         "leave it out to have it allocated"),
        ("lse", torch.zeros(B, S_Q, H), ValueError, r"lse: expected shape \(2, 16, 2\)",
         "leave it out to have it allocated"),
    ],
    "from_tensors": [
        ("content", torch.zeros(65536, dtype=torch.uint8).as_strided((PAGES, P, 512), (16, 512, 1)),
         ValueError, "content: expected strides of distinct tokens, got strides", "allocate them"),
        ("content", torch.zeros((0, P, 512), dtype=torch.uint8), ValueError,
         "content: expected 1 page or more, got 0",
         "allocate at least one page"),
        ("content", torch.zeros((PAGES, P, 512), dtype=BF16), TypeError,
         "content: expected dtype float8_e4m3fn, got bfloat16", "append_kv quantises bfloat16 latents"),
        ("content", torch.zeros((PAGES, 512, P), dtype=torch.uint8), ValueError,
         r"content: expected shape \(num_pages, page_size, 512\), got \(4, 512, 64\)",
         "the last two dimensions are exchanged: .mT.contiguous()"),
        ("content", torch.zeros((PAGES, 512, P), dtype=torch.uint8).mT, ValueError,
         "content: expected innermost stride 1", "it is transposed"),
        ("content", torch.zeros((PAGES, P, 1, 512), dtype=torch.uint8), ValueError,
         "content: expected shape", "drop the dimension of 1"),
        ("content", torch.zeros((PAGES, 48, 512), dtype=torch.uint8), ValueError,
         "page_size: expected one of 16, 32, 64, 128, got 48", "the nearest is 32"),
        ("content", torch.zeros((1, P, 512), dtype=torch.uint8).expand(PAGES, P, 512),
         ValueError, "content: expected strides of distinct tokens", "allocate them"),
        ("rope", torch.zeros((PAGES, P, 64), dtype=F16), TypeError,
         "rope: expected dtype bfloat16, got float16", "convert it with .to(torch.bfloat16)"),
        ("rope", torch.zeros((PAGES, P, 32), dtype=BF16), ValueError,
         r"rope: expected shape \(4, 64, 64\), got \(4, 64, 32\)", "docs/formats.md draws them"),
        ("rope", torch.zeros((PAGES, P, 64), dtype=BF16, **META), ValueError,
         "rope: expected a tensor on cpu, got meta", ".to('cpu')"),
        ("rope", torch.zeros((PAGES, P, 65), dtype=BF16)[..., :64], ValueError,
         "rope: expected outer strides that are multiples of 16 bytes", "multiple of 8 elements"),
        ("scale", torch.zeros((PAGES, P), dtype=F16), TypeError,
         "scale: expected dtype float32, got float16", ".to(torch.float32)"),
        ("scale", torch.zeros((PAGES, P, 1)), ValueError,
         r"scale: expected shape \(4, 64\), got \(4, 64, 1\)", "drop the dimension of 1"),
    ],
    "from_rows": [
        ("content", torch.zeros((PAGES, 48, 576), dtype=BF16), ValueError,
         "page_size: expected 16, 32 or a multiple of 64, got 48", "the nearest is 32"),
        ("content", torch.zeros((PAGES, P, 512), dtype=BF16), ValueError,
         r"content: expected shape \(num_pages, page_size, 576\)", "docs/formats.md draws them"),
        ("content", ones(PAGES, P, 512), ValueError, "rope: expected a tensor beside FP8 content, got None",
         "content, rope and scale make an FP8 cache"),
        ("content", ones(PAGES, P, 1, 656), ValueError,
         "format: expected the name of what has 656 bytes a token, got None", "format='fp8_ds_mla' has 656 bytes"),
        ("content", ones(PAGES, P, 584), ValueError,
         "format: expected the name of what has 584 bytes a token, got None", "format='fp8_v4' has 584 bytes"),
        ("content", torch.zeros((PAGES, P, 1, 528), dtype=torch.int8), ValueError,
         "format: expected the name of what has 528 bytes a token, got None",
         "format='fp8_v41_planar' or 'fp8_v41_rows' or 'fp8_nope' has 528"),
    ],
    "plan_decode": [
        ("cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: .*int64",
         "use .to(torch.int32) once when you build"),
        ("num_heads", 129, ValueError, "num_heads: expected 1 to 128, got 129",
         "split more heads over several calls"),
        ("num_heads", 16.0, TypeError, "num_heads: expected an int, got float",
         "convert it with int(...)"),
        ("s_q", 0, ValueError, "s_q: expected 1 to 536870911, got 0", "query tokens of each"),
        ("s_q", 2**24, ValueError, "s_q: expected at most 536870911 query tokens times heads",
         "split the tokens over several calls"),
        ("s_q", None, ValueError, "s_q: expected one of s_q and cu_seqlens_q, got neither",
         "cu_seqlens_q and total_q for ragged ones"),
        ("cu_seqlens_q", torch.zeros(B + 1, dtype=I32), ValueError,
         "s_q: expected one of s_q and cu_seqlens_q, got both", "s_q for one number"),
        ("total_q", 4, ValueError, "total_q: expected None beside s_q, got 4", "beside cu_seqlens_q"),
        ("row_seqlens", torch.zeros(B, dtype=I32), ValueError,
         r"row_seqlens: expected shape \(2, 1\), got \(2,\)", "for each query token how many"),
        ("row_seqlens", torch.zeros(B, 1, dtype=I64), TypeError, "row_seqlens: .*int64",
         ".to(torch.int32) once"),
        ("causal", None, TypeError, "causal: expected True or False, got NoneType", "query token s"),
        ("row_blocks", "in step", ValueError, "row_blocks: expected one of 'in_step', 'balanced'",
         "did you mean 'in_step'?"),
        ("page_size", 48, ValueError, "page_size: .*got 48 .*nearest is 32",
         "the nearest is 32"),
        ("max_pages", 0, ValueError, "max_pages: expected 1",
         "the width of the block table"),
        ("num_parts", 0, ValueError, "num_parts: ",
         "leave it out to fill the device"),
        ("pipeline", "magic", ValueError, "pipeline: expected one of 'etap', got",
         "leave it out to let the dispatcher choose"),
        ("row_tile", 8, ValueError, "row_tile: expected one of 16, 32, 64, 128, got 8",
         "leave it out to let the dispatcher choose"),
        ("accuracy", "hi", ValueError, "accuracy: expected one of 'standard', 'high', 'fast', got 'hi'",
         "did you mean 'high'"),
        ("fixed_overhead", -1, ValueError, "fixed_overhead: ",
         "leave it out for the measured default"),
        ("fixed_split_tokens", 100, ValueError,
         "fixed_split_tokens: expected a multiple of 64, got 100", "the nearest is 128"),
        ("check_stale", "no", TypeError,
         "check_stale: expected True or False, got str", "SNAPMLA_CHECK_PLAN"),
        ("cache_dtype", "bf16", ValueError, "cache_dtype: expected one of 'fp8', torch.bfloat16",
         "16 bits are given as torch's dtype"),
        ("num_kv_heads", 2, ValueError, "num_kv_heads: expected 1, got 2", "one KV head"),
    ],
    "plan_rows": [
        ("num_kv_heads", 3, ValueError, "num_kv_heads: expected a divisor of num_heads = 16, got 3",
         "share KV head j"),
        ("num_kv_heads", 0, ValueError, "num_kv_heads: expected 1 to 128, got 0", "share KV head j"),
        ("page_size", 100, ValueError, "page_size: expected 16, 32 or a multiple of 64, got 100",
         "the nearest is 128"),
        ("accuracy", "high", ValueError,
         "accuracy: expected 'standard' with a 16-bit cache, got high", "its P has 16 bits"),
        ("pipeline", "etap", ValueError, "pipeline: expected one of 'split'", "leave it out"),
        ("cache_dtype", F32, ValueError, "cache_dtype: .*got torch.float32", "'fp8' is float8_e4m3fn"),
    ],
    "allocate": [
        ("num_pages", 0, ValueError, "num_pages: expected 1 or more, got 0", "pages of the pool"),
        ("page_size", 48, ValueError, "page_size: .*got 48", "the nearest is 32"),
        ("page_size", "64", TypeError, "page_size: expected an int, got str", "int(...)"),
        ("layout", "row_640", ValueError, "layout: .*got 'row_640'", "did you mean 'row640'?"),
        ("layout", "interleaved", ValueError, "layout: expected one of 'split'", "split is the"),
        ("dtype", "bf16", ValueError, "dtype: expected one of 'fp8', torch.bfloat16, .*got 'bf16'", "as torch's dtype"),
        ("dtype", F32, ValueError, "dtype: .*got torch.float32", "'fp8' is float8_e4m3fn with a scale a token"),
        *DEVICES,
    ],
    "query": [
        ("nope", torch.zeros((B, S_Q, H, 512), dtype=F16), TypeError,
         "q.nope: expected dtype float8_e4m3fn, got float16", "snapmla.quantize_q"),
        ("nope", fp8(B, 0, H, 512), ValueError, "s_q: expected 1 to 536870911, got 0", "query tokens"),
        ("nope", fp8(H, 512), ValueError, "q.nope: expected shape", "snapmla.quantize_q"),
        ("nope", fp8(B, S_Q, 129, 512), ValueError, "num_heads: .*got 129", "split more heads"),
        ("nope", fp8(B, S_Q, 2 * H, 512)[:, :, ::2], ValueError,
         "q.nope: expected a contiguous tensor", ".contiguous()"),
        ("rope", torch.zeros((B, S_Q, H, 64)), TypeError, "q.rope: .*bfloat16, got float32", ".to("),
        ("scale", torch.ones((B, S_Q, H, 1)), ValueError, "q.scale: expected shape", "squeeze()"),
        ("scale", torch.ones((B, S_Q, H), **META), ValueError, "q.scale: .*got meta", ".to('cpu')"),
    ],
    "update_": [
        ("cache_seqlens", torch.ones(B + 1, dtype=I32), ValueError,
         r"cache_seqlens: expected shape \(2,\), got \(3,\)", "one length for each sequence"),
        ("cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: ", "torch.int32"),
        ("cu_seqlens_q", torch.ones(B + 1, dtype=I32), ValueError,
         "cu_seqlens_q: expected None: the plan is for s_q = 2, got a tensor", "makes one for ragged"),
        ("row_seqlens", torch.ones(B, S_Q, dtype=I32), ValueError,
         "row_seqlens: expected None: the plan is without, got a tensor", "makes one that takes it"),
    ],
    "SparsePlan.update_": [
        ("topk_length", None, TypeError, "topk_length: expected an int32 tensor .b,., got None", "how many entries"),
        ("topk_length", torch.ones(B + 1, dtype=I32), ValueError, r"topk_length: expected shape \(2,\), got \(3,\)", "how many entries"),
        ("topk_length", torch.ones(B, dtype=I64), TypeError, "topk_length: expected dtype int32", "torch.int32"),
        ("row_lengths", torch.ones(B, S_Q, dtype=I32), ValueError,
         "row_lengths: expected None: the plan is without, got a tensor", "makes one that takes it"),
    ],
    "with_workspace": [
        ("o_accum", torch.zeros(4, 16, 528, dtype=F16), ValueError,
         r"o_accum: expected shape \(8, 32, 528\), got \(4, 16, 528\)", "torch.empty_like(plan.o_accum)"),
        ("o_accum", torch.zeros(8, 32, 528), TypeError,
         "o_accum: expected dtype float16, got float32", "allocate it with dtype=torch.float16"),
        ("lse_accum", torch.zeros(8, 8), ValueError,
         r"lse_accum: expected shape \(8, 32\), got \(8, 8\)", "torch.empty_like(plan.lse_accum)"),
    ],
    "PlanCache": [
        ("num_heads", 0, ValueError, "num_heads: expected 1 to 128, got 0", "query heads of this rank"),
        ("page_size", 48, ValueError, "page_size: .*got 48 .*nearest is 32", "the nearest is 32"),
        ("capacity", 0, ValueError, "capacity: expected 1 or more, got 0", "plans that are not pinned"),
        ("causal", None, TypeError, "causal: expected True or False, got NoneType", "query token s"),
        ("num_parts", 0, ValueError, "num_parts: expected 1 to 65535", "leave it out to fill the device"),
        ("pipeline", "magic", ValueError, "pipeline: expected one of 'etap', got",
         "leave it out to let the dispatcher choose"),
        ("row_tile", 8, ValueError, "row_tile: expected one of 16, 32, 64, 128, got 8",
         "leave it out to let the dispatcher choose"),
        ("row_blocks", "in step", ValueError, "row_blocks: expected one of 'in_step', 'balanced'",
         "did you mean 'in_step'?"),
        ("accuracy", "hi", ValueError, "accuracy: expected one of 'standard', 'high', 'fast', got 'hi'",
         "did you mean 'high'"),
        ("fixed_overhead", -1, ValueError, "fixed_overhead: ", "leave it out for the measured default"),
        ("fixed_split_tokens", 100, ValueError,
         "fixed_split_tokens: expected a multiple of 64, got 100", "the nearest is 128"),
        ("check_stale", "no", TypeError,
         "check_stale: expected True or False, got str", "SNAPMLA_CHECK_PLAN"),
        ("cache_dtype", "bf16", ValueError, "cache_dtype: expected one of 'fp8', torch.bfloat16",
         "16 bits are given as torch's dtype"),
        ("num_kv_heads", 2, ValueError, "num_kv_heads: expected 1, got 2", "one KV head"),
        *DEVICES,
    ],
    "PlanCache.get": [
        ("cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: .*int64",
         "use .to(torch.int32) once when you build"),
        ("cache_seqlens", [1, 1], TypeError, "cache_seqlens: expected .*got list", "torch.as_tensor"),
        ("cache_seqlens", torch.ones(B, dtype=I32, **META), ValueError,
         "cache_seqlens: expected a tensor on cpu, got meta", "cpu"),
        ("s_q", 0, ValueError, "s_q: expected 1 to 536870911, got 0", "query tokens of each"),
        ("s_q", [1], TypeError, "s_q: expected an int, got list", "convert it with int(...)"),
        ("s_q", None, ValueError, "s_q: expected one of s_q and cu_seqlens_q, got neither",
         "cu_seqlens_q and total_q for ragged ones"),
        ("cu_seqlens_q", torch.zeros(B + 1, dtype=I32), ValueError,
         "s_q: expected one of s_q and cu_seqlens_q, got both", "s_q for one number"),
        ("total_q", 4, ValueError, "total_q: expected None beside s_q, got 4", "beside cu_seqlens_q"),
        ("row_seqlens", torch.zeros(B, dtype=I32), ValueError,
         r"row_seqlens: expected shape \(2, 1\), got \(2,\)", "for each query token how many"),
        ("max_pages", 0, ValueError, "max_pages: expected 1", "the width of the block table"),
        ("pin", None, TypeError, "pin: expected True or False, got NoneType", "a graph"),
    ],
    "PlanCache.release": [
        ("plan", 3, TypeError, "plan: expected a snapmla.DecodePlan or None, got int", "pin=True"),
        ("plan", plan(), ValueError, "plan: expected a plan that is pinned here, got another",
         "pin=True"),
    ],
    "explain": [
        ("card", 5, TypeError, "card: expected a name such as 'H200', got int", "leave it out"),
        ("num_heads", 0, ValueError, "num_heads: expected 1 to 128, got 0", "without any no call is needed"),
        ("seqlen", 0, ValueError, "seqlen: expected 1 or more, got 0", "tokens of a sequence"),
        ("out_dtype", F16, TypeError, "out_dtype: .*got torch.float16", "convert out afterwards"),
        ("card", "A100", ValueError, "card: expected one of 'H200', .*got 'A100'", "this machine"),
        ("cache_dtype", F32, ValueError, "cache_dtype: expected one of 'fp8'", "'fp8' is float8_e4m3fn"),
        ("num_kv_heads", 2, ValueError, "num_kv_heads: expected 1, got 2", "one KV head"),
        *DEVICES,
    ],
    "flash_mla_ckv_fp8_per_token": [
        ("q_nope", fp8(B, S_Q, 2 * H, 512)[:, :, ::2], ValueError,
         "q_nope: expected a contiguous tensor", ".contiguous()"),
        ("q_rope", torch.zeros((B, S_Q, H, 64), dtype=F16), TypeError,
         "q_rope: expected dtype bfloat16, got float16", ".to(torch.bfloat16)"),
        ("q_nope", fp8(B * S_Q * H * 512 + 1)[1:].view(B, S_Q, H, 512),
         ValueError, "q_nope: expected storage aligned to 16 bytes", "multiples of 16 elements"),
        ("k_scale", torch.ones((PAGES, P, 1, 1), **META), ValueError,
         "k_scale: expected a tensor on cpu, got meta", ".to('cpu')"),
        ("block_table", torch.zeros((B + 1, WIDTH), dtype=I32), ValueError,
         r"block_table: expected shape \(2, width\), got \(3, 3\)", "one row of page ids"),
        ("cache_seqlens", torch.ones(B, dtype=I64), TypeError,
         "cache_seqlens: expected dtype int32, got int64", "not on every call"),
        ("softmax_scale", -1.0, ValueError,
         "softmax_scale: expected a positive finite number", "192**-0.5"),
        ("softmax_scale", torch.tensor(0.1), TypeError,
         "softmax_scale: expected a Python float, got Tensor", "convert it with float(...)"),
        ("out", torch.zeros(B, S_Q, H, 512, dtype=F16), TypeError,
         "out: expected dtype bfloat16 or float32, got float16", "allocate it"),
        ("lse", torch.zeros(B, S_Q, H), ValueError,
         r"lse: expected shape \(2, 16, 2\)", "heads come before"),
        ("num_splits", torch.zeros(B + 1, dtype=I64), TypeError,
         "num_splits: expected dtype int32, got int64", "not on every call"),
        ("q_nope", torch.zeros((B, S_Q, H, 512), dtype=BF16), TypeError,
         "q_nope: expected dtype float8_e4m3fn, got bfloat16", "quantize"),
        ("q_scale", torch.ones((B, S_Q)), ValueError,
         r"q_scale: expected shape \(b, s_q, num_heads, 1\), got \(2, 2\)", "quantize_ckv_per_token_head"),
        ("k_cache_lora", fp8(PAGES, P, 512), ValueError,
         r"k_cache_lora: expected shape \(pages, page_size, 1, 512\)", "pool.view(-1, page_size, 1, 512)"),
        ("k_cache_lora", fp8(PAGES, 48, 1, 512), ValueError,
         "k_cache_lora, page_size: expected one of 16", "the nearest is 32"),
        ("k_cache_rope", torch.zeros((PAGES, P, 1, 64)), TypeError,
         "k_cache_rope: expected dtype bfloat16, got float32", ".to(torch.bfloat16)"),
        ("k_scale", torch.ones((PAGES, P, 1)), ValueError,
         "k_scale: expected shape", "pool.view(-1, page_size, 1, 1)"),
        ("block_table", torch.zeros((B, WIDTH), dtype=I64), TypeError,
         "block_table: expected dtype int32, got int64", "not on every call"),
        ("causal", None, TypeError,
         "causal: expected True or False, got NoneType", "query token s of s_q"),
        ("causal", torch.tensor(True), TypeError,
         "causal: expected True or False, got Tensor", "query token s of s_q"),
        ("causal", 2, TypeError,
         "causal: expected True or False, got 2", "query token s of s_q"),
        ("head_dim_v", 576, ValueError,
         "head_dim_v: expected 512, got 576", "kernels are built for kv_lora_rank 512"),
        ("tile_scheduler_metadata", None, TypeError,
         "tile_scheduler_metadata: expected an int32 tensor of get_mla_metadata, got NoneType", "make it with"),
        ("tile_scheduler_metadata", torch.zeros((4, 6), dtype=I32),
         ValueError, "tile_scheduler_metadata: expected room for 2 sequences", "max_batch="),
        ("num_splits", torch.zeros(33, dtype=I32), ValueError,
         r"num_splits: expected shape \(3,\), got \(33,\)", "slice [:b + 1]"),
        ("empty_lse", "0", ValueError, "empty_lse: expected one of", "merges"),
        ("q_nope", gaps, ValueError, "q_nope: .*contiguous", "call .contiguous() once when you build"),
        ("q_nope", lambda t: t.view(torch.int8), TypeError, "q_nope: expected dtype float8_e4m3fn, got int8", "make it with snapmla.quantize_q(q_nope,"),
        ("q_rope", gaps, ValueError, "q_rope: .*contiguous", "call .contiguous() once when you build"),
        ("q_scale", lambda t: t.mT, ValueError, r"q_scale: expected shape .*got \(2, 2, 1, 16\)", "drop the dimension of 1, for example by"),
        ("k_cache_lora", torch.zeros((PAGES, P, 1, 256), dtype=BF16), ValueError,
         r"k_cache_lora: expected shape \(pages, page_size, 1, 512\)", "pass pool.view(-1, page_size, 1, 512)"),
        ("k_cache_lora", lambda t: t[:0], ValueError, "k_cache_lora: expected 1 page or more, got 0", "allocate at least one page"),
        ("k_cache_lora", lambda t: t.view(2 * PAGES, -1, 1, 512), ValueError, "k_cache_rope: expected shape", "PagedKVCache.allocate shows shapes and"),
        ("k_cache_rope", lambda t: t.view(PAGES, 1, P, 64), ValueError, "k_cache_rope: expected shape", "pass pool.view(-1, page_size, 1, 64)"),
        ("k_scale", lambda t: t.view(PAGES, 1, P, 1), ValueError, "k_scale: expected shape", "pass pool.view(-1, page_size, 1, 1)"),
        ("k_scale", lambda t: t.view(PAGES, P), ValueError, "k_scale: expected shape", "pass pool.view(-1, page_size, 1, 1)"),
        ("block_table", lambda t: t[:1], ValueError, "block_table: expected shape", "one row of page ids for each sequence"),
        ("block_table", lambda t: t[:, :0], ValueError, "block_table: expected a width of 1", "give even empty sequences one column"),
        ("cache_seqlens", lambda t: t[:1], ValueError, "cache_seqlens: expected shape", "one length for each sequence of the"),
        ("cache_seqlens", every_other, ValueError, "cache_seqlens: .*contiguous", "call .contiguous() once when you build"),
        ("tile_scheduler_metadata", lambda t: t.mT, ValueError, "tile_scheduler_metadata: .*contiguous", "call .contiguous() once when you build"),
        ("tile_scheduler_metadata", lambda t: t.view(F32), TypeError, "tile_scheduler_metadata: .*int32", "use .to(torch.int32) once when you"),
        ("num_splits", lambda t: t.view(F32), TypeError, "num_splits: .*int32", "use .to(torch.int32) once when you"),
        ("num_splits", lambda t: t.repeat(2)[: B + 2], ValueError, r"num_splits: expected shape \(3,\)", "make it with get_mla_metadata; slice"),
        ("out", gaps, ValueError, "out: .*contiguous", "allocate it contiguous; a slice or"),
        ("out", lambda t: t.view(B * S_Q, 1, H, 512), ValueError, "out: expected shape", "leave it out to have it allocated"),
        ("lse", lambda t: t.mT.contiguous().mT, ValueError, "lse: .*contiguous", "allocate it contiguous; a slice or"),
    ],
    "get_mla_metadata": [
        ("cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: ", "int32"),
        ("num_heads_per_head_k", 0, ValueError,
         "num_heads_per_head_k: expected 1 to 536870911, got 0", "s_q * num_heads of one sequence"),
        ("num_heads_per_head_k", 2**28, ValueError,
         "num_heads_per_head_k: expected at most 536870911 query tokens times heads", "several calls"),
        ("num_heads_k", 2, ValueError, "num_heads_k: expected 1, got 2", "one latent"),
        ("out", torch.zeros((4, 20), dtype=I32), TypeError,
         "out: expected a pair of tensors, got Tensor", "leave it out to have it allocated"),
        ("out", (torch.zeros((4, 20), dtype=I32),), TypeError,
         "out: expected a pair of tensors, got 1 values", "leave it out to have it allocated"),
        ("max_batch", 1, ValueError,
         "cache_seqlens: expected at most max_batch = 1 sequences, got 2", "pass a larger max_batch"),
    ],
    "flash_mla_with_kvcache": [
        ("q", lambda t: t[0], ValueError, r"q: expected shape \(b, s_q, num_heads_q, 576\), got \(2, 8, 576\)",
         "ragged queries are for snapmla.decode"),
        ("q", lambda t: t[..., :512], ValueError, r"q: expected shape \(b, s_q, num_heads, 576\)", "512 channels absorbed"),
        ("q", lambda t: t.bfloat16(), TypeError, "q: expected dtype float16, got bfloat16", "convert it with"),
        ("q", 3, TypeError, "q: expected a torch.Tensor, got int", "build it once"),
        ("k_cache", lambda t: t.view(PAGES, 16, 576), ValueError,
         r"k_cache: expected shape \(num_pages, page_size, num_heads_k, 576\)", "pool.view(-1, page_size, 1, 576)"),
        ("k_cache", lambda t: t.view(torch.int16), TypeError, "k_cache: expected dtype bfloat16 or float16, got int16",
         "convert it with"),
        ("k_cache", lambda t: t.to(torch.float8_e4m3fn), TypeError,
         "k_cache: expected dtype bfloat16 or float16, got float8_e4m3fn", "snapmla.flash_mla_fp8"),
        ("k_cache", NESTED, TypeError, "k_cache: expected a tensor of one shape, got a nested tensor", "pad it"),
        ("q", NESTED, TypeError, "q: expected a tensor of one shape, got a nested tensor", "pack its rows"),
        ("k_cache", lambda t: t.view(PAGES * 2, 8, 1, 576), ValueError,
         "k_cache, page_size: expected 16, 32 or a multiple of 64, got 8", "the nearest is 16"),
        ("k_cache", lambda t: t[:0], ValueError, "k_cache: expected 1 page or more, got 0", "allocate at least one page"),
        ("k_cache", lambda t: t.repeat_interleave(2, -1)[..., ::2], ValueError, "k_cache: expected innermost stride 1", "transposed"),
        ("k_cache", lambda t: t.expand(-1, -1, 3, -1).contiguous(), ValueError,
         "q: expected a multiple of the cache's 3 KV heads, got 8 heads", "share KV head j"),
        ("block_table", lambda t: t[:1], ValueError, "block_table: expected shape", "one row of page ids"),
        ("block_table", lambda t: t[:, :0], ValueError, "block_table: expected a width of 1", "one column"),
        ("block_table", lambda t: t.long(), TypeError, "block_table: .*int64", "not on every call"),
        ("cache_seqlens", lambda t: t[:1], ValueError, "cache_seqlens: expected shape", "one length for each"),
        ("cache_seqlens", lambda t: t.long(), TypeError, "cache_seqlens: .*int64", "use .to(torch.int32) once"),
        ("cache_seqlens", every_other, ValueError, "cache_seqlens: .*contiguous", "call .contiguous() once"),
        ("head_dim_v", 576, ValueError, "head_dim_v: expected 512, got 576", "kernels are built for"),
        ("tile_scheduler_metadata", None, TypeError,
         "tile_scheduler_metadata: expected a FlashMLASchedMeta or a tensor, got NoneType", "get_mla_metadata makes either"),
        ("tile_scheduler_metadata", lambda t: t[:, :7], ValueError,
         r"tile_scheduler_metadata: expected shape \(num_sm_parts, 8\), got \(2, 7\)", "make it with get_mla_metadata"),
        ("tile_scheduler_metadata", lambda t: t[:0], ValueError,
         "tile_scheduler_metadata: expected 1 to 1024 parts, got 0", "make it with get_mla_metadata"),
        ("tile_scheduler_metadata", torch.zeros((1025, 8), dtype=I32), ValueError,
         "tile_scheduler_metadata: expected 1 to 1024 parts, got 1025", "make it with get_mla_metadata"),
        ("tile_scheduler_metadata", lambda t: t.long(), TypeError, "tile_scheduler_metadata: .*int64", "use .to(torch.int32)"),
        ("tile_scheduler_metadata", lambda t: t.mT.contiguous().mT, ValueError,
         "tile_scheduler_metadata: expected innermost stride 1", "transposed"),
        ("num_splits", lambda t: t.float(), TypeError, "num_splits: .*float32", "use .to(torch.int32) once"),
        ("num_splits", [0, 1, 2], TypeError, "num_splits: expected a torch.Tensor, got list", "build it once"),
        ("softmax_scale", 0.0, ValueError, "softmax_scale: .*got 0.0", "FlashMLA's default is"),
        ("causal", 2, TypeError, "causal: expected True or False, got 2", "query token s of s_q"),
        ("is_fp8_kvcache", True, ValueError,
         "is_fp8_kvcache: expected False: FlashMLA's dense FP8 cache is not built yet, got True", "a scale a token"),
        ("indices", torch.zeros((B, S_Q, 64), dtype=I32), ValueError, "causal: expected False beside indices",
         "the indices say what"),
        ("topk_length", torch.zeros(B, dtype=I32), ValueError, "topk_length: expected None without indices", "dense decode"),
        ("attn_sink", torch.zeros(8), ValueError, "attn_sink: expected None without indices", "dense decode"),
        ("extra_k_cache", torch.zeros(8), ValueError, "extra_k_cache: expected None without indices", "no second cache"),
        ("descale_q", torch.ones(1), ValueError, "descale_q: .*FP8 cache is not built yet", "a scale a token"),
        ("out", gaps, ValueError, "out: .*contiguous", "allocate it contiguous; a slice or"),
        ("out", lambda t: t.float(), TypeError, "out: expected dtype float16, got float32", "allocate it with"),
        ("out", lambda t: t[:1], ValueError, "out: expected shape", "have it allocated"),
        ("lse", lambda t: t.mT.contiguous().mT, ValueError, "lse: .*contiguous", "allocate it contiguous; a slice or"),
        ("lse", lambda t: t.half(), TypeError, "lse: .*float16", "allocate it with"),
    ],
    "flash_mla.get_mla_metadata": [
        ("topk", 0, ValueError, "topk: expected 1 or more, got 0", "width of indices"),
        ("topk", "64", TypeError, "topk: expected an int, got str", "convert it"),
    ],
    "flash_mla.get_mla_metadata_tensors": [
        ("cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: ", "int32"),
        ("num_q_tokens_per_head_k", 0, ValueError,
         "num_q_tokens_per_head_k: expected 1 to 536870911, got 0", "s_q * num_heads_q // num_heads_k"),
        ("num_q_tokens_per_head_k", None, TypeError, "num_q_tokens_per_head_k: expected an int, got NoneType",
         "s_q * num_heads_q // num_heads_k"),
        ("num_heads_k", None, TypeError, "num_heads_k: expected an int, got NoneType", "1 for MLA"),
        ("num_heads_k", 0, ValueError, "num_heads_k: expected 1 to 128, got 0", "1 for MLA"),
        ("topk", 0, ValueError, "topk: expected 1 or more, got 0", "width of indices"),
        ("is_fp8_kvcache", True, ValueError, "is_fp8_kvcache: expected False", "a scale a token"),
    ],
    "quantize_ckv_per_token_head": [
        ("q", torch.zeros((B, S_Q, H, 512), dtype=BF16), ValueError,
         r"q: expected shape \(b, s_q, num_heads, 576\)", "latent and RoPE channels in one row"),
        ("q", torch.zeros((B, S_Q, 129, 576), dtype=BF16), ValueError,
         "q, num_heads: expected 1 to 128, got 129", "split more heads"),
        ("kv_lora_rank", 256, ValueError, "kv_lora_rank: .*got 256", "512"),
    ],
    "quantize_and_cache_k": [
        ("key", torch.zeros((5, 1, 512), dtype=BF16), ValueError,
         r"key: expected shape \(n, 576\)", "(n, 1, 576)"),
        ("k_lora_cache", torch.zeros((100, 1, 512), dtype=torch.uint8), ValueError,
         "k_lora_cache: expected a multiple of 16 slots, got 100", "whole pages"),
        ("k_lora_cache", torch.zeros((4, 48, 1, 512), dtype=torch.uint8), ValueError,
         "k_rope_cache: expected a multiple of 48 slots, got 256", "whole pages"),
        ("k_rope_cache", torch.zeros((256, 64), dtype=BF16), ValueError,
         r"k_rope_cache: expected shape \(slots, 1, 64\)", "pool.view(-1, 1, 64)"),
        ("indices", torch.zeros(5), TypeError, "indices: .*int32 or int64", ".to("),
        ("indices", torch.zeros(4, dtype=I32), ValueError, "indices: .*got .4",
         "one slot for each row"),
        ("key", lambda t: t.double(), TypeError, "key: .*float64", "convert it with .to(torch.bfloat16)"),
        ("key", lambda t: t.repeat(1, 2, 1), ValueError, r"key: expected shape \(n, 576\)", "latent and RoPE in one row of 576: (n,"),
        ("key", lambda t: t.repeat_interleave(2, -1)[..., ::2], ValueError, "key: expected innermost stride 1", "it is transposed or strided inside a"),
        ("key", lambda t: torch.cat([t, t[..., :1]], -1)[..., :576], ValueError, "key: .*multiples of 16 bytes", "pad rows to a multiple of 8 elements"),
        ("key", lambda t: torch.cat([t, t[..., :8]], -1)[..., 1:577], ValueError, "key: .*aligned to 16 bytes", "start slices at multiples of 8 elements"),
        ("k_lora_cache", torch.zeros(SLOTS, 1, 256, dtype=BF16), ValueError,
         r"k_lora_cache: expected shape \(slots, 1, 512\)", "pool.view(-1, 1, 512); the order is"),
        ("k_lora_cache", lambda t: t.view(SLOTS, 2, 256), ValueError, "k_lora_cache: expected shape", "pool.view(-1, 1, 512); the order is"),
        ("k_lora_cache", lambda t: t[:-8], ValueError, "k_lora_cache: expected a multiple of 16 slots", "size the pool in whole pages"),
        ("k_lora_cache", lambda t: t[:0], ValueError, "k_lora_cache: expected a multiple of 16 slots", "size the pool in whole pages"),
        ("k_lora_cache", lambda t: t.view(torch.int8), TypeError, "k_lora_cache: expected dtype .*int8", "append_kv quantises bfloat16 latents"),
        ("k_lora_cache", lambda t: t[: SLOTS // 2], ValueError, "k_.*: expected shape", "PagedKVCache.allocate shows shapes and"),
        ("k_lora_scale_cache", lambda t: t.half(), TypeError, "k_lora_scale_cache: .*float16", "convert it with .to(torch.float32)"),
        ("k_lora_scale_cache", lambda t: t.view(-1, 2, 1), ValueError, "k_lora_scale_cache: expected shape", "pool.view(-1, 1, 1); the order is"),
        ("k_rope_cache", lambda t: t.half(), TypeError, "k_rope_cache: .*float16", "convert it with .to(torch.bfloat16)"),
        ("k_rope_cache", lambda t: t.view(1, -1, 64), ValueError, "k_rope_cache: expected shape", "pool.view(-1, 1, 64); the order is"),
        ("indices", lambda t: t.short(), TypeError, "indices: .*int16", "use .to(torch.int32) once when you"),
        ("indices", every_other, ValueError, "indices: .*contiguous", "call .contiguous() once when you build"),
    ],
    "dequantize_ckv_fused_indexed": [
        ("k_rope", torch.zeros((SLOTS, 1, 1)), ValueError,
         r"k_rope: expected shape \(slots, 1, 64\)", "the order is k_lora, k_rope, k_scale"),
        ("out", torch.zeros((5, 1, 576)), TypeError,
         "out: expected a pair of tensors, got Tensor", "leave it out to have it allocated"),
        ("indices", torch.zeros(5, dtype=torch.int16), TypeError,
         "indices: expected dtype int32 or int64, got int16", "not on every call"),
    ],
}  # fmt: skip
RIGHT: dict[str, Callable[[], dict[str, Any]]] = {
    "decode": decode_arguments,
    "decode_rows": decode_rows_arguments,
    "append_kv": append_arguments,
    "append_rows": append_rows_arguments,
    "rope_append_kv": rope_append_arguments,
    "rope_quantize_q": rope_quantize_arguments,
    "quantize_q": quantize_arguments,
    "fetch_dequant": fetch_arguments,
    "fetch_rows": fetch_rows_arguments,
    "fetch_dequant_chunks": chunk_arguments,
    "merge_state": merge_arguments,
    "merge_states": merge_list_arguments,
    "from_tensors": cache_arguments,
    "from_rows": lambda: {"content": torch.zeros((PAGES, P, 576), dtype=BF16)},
    "plan_decode": plan_arguments,
    "plan_rows": lambda: {**plan_arguments(), "cache_dtype": BF16, "num_kv_heads": 2},
    "allocate": lambda: {"num_pages": 2, "page_size": 64, "layout": "split", "device": "cpu"},
    "query": query_arguments,
    "update_": lambda: {"cache_seqlens": torch.ones(B, dtype=I32)},
    "SparsePlan.update_": lambda: {"topk_length": torch.ones(B, dtype=I32)},
    "with_workspace": workspace_arguments,
    "PlanCache": lambda: {"num_heads": H, "page_size": P, "device": "cpu"},
    "PlanCache.get": lambda: {"cache_seqlens": torch.ones(B, dtype=I32), "s_q": 1, "max_pages": 3},
    "PlanCache.release": lambda: {"plan": None},
    "explain": lambda: {"num_heads": H, "s_q": 1, "device": "cpu"},
    "flash_mla_ckv_fp8_per_token": flash_mla_arguments,
    "get_mla_metadata": lambda: {
        "cache_seqlens": torch.ones(B, dtype=I32), "num_heads_per_head_k": H, "num_heads_k": 1,
    },
    "flash_mla_with_kvcache": flash_mla_dense_arguments,
    "flash_mla.get_mla_metadata": lambda: {"topk": 64},
    "flash_mla.get_mla_metadata_tensors": lambda: {
        "cache_seqlens": torch.ones(B, dtype=I32), "num_q_tokens_per_head_k": H, "num_heads_k": 1,
    },
    "quantize_ckv_per_token_head": lambda: {
        "q": torch.zeros((B, S_Q, H, 576), dtype=BF16), "kv_lora_rank": 512,
    },
    "quantize_and_cache_k": pool_arguments,
    "dequantize_ckv_fused_indexed": pool_fetch_arguments,
}  # fmt: skip
NO_LAUNCH = {
    "from_tensors", "from_rows", "allocate", "query", "with_workspace", "PlanCache", "PlanCache.release", "explain",
    "flash_mla.get_mla_metadata",
}  # fmt: skip
METHODS: dict[str, Callable[..., Any]] = {
    "from_tensors": PagedKVCache.from_tensors,
    "from_rows": PagedKVCache.from_tensors,
    "allocate": PagedKVCache.allocate,
    "query": QuantizedQuery,
    "append_rows": snapmla.append_kv,
    "decode_rows": snapmla.decode,
    "flash_mla_with_kvcache": flash_mla.flash_mla_with_kvcache,
    "flash_mla.get_mla_metadata": flash_mla.get_mla_metadata,
    "flash_mla.get_mla_metadata_tensors": flash_mla.get_mla_metadata_tensors,
    "plan_rows": snapmla.plan_decode,
    "fetch_dequant_chunks": snapmla.fetch_dequant,
    "fetch_rows": snapmla.fetch_dequant,
    "update_": lambda **arguments: plan().update_(**arguments),
    "SparsePlan.update_": lambda **arguments: sparse_plan().update_(**arguments),
    "with_workspace": lambda **arguments: plan().with_workspace(**arguments),
    "PlanCache.get": lambda **arguments: plan_cache().get(**arguments),
    "PlanCache.release": lambda **arguments: plan_cache().release(**arguments),
}
# What these calls write, as far as it shows.  A repeated one leaves its checks to the exported
# function.
QUICK = {
    "decode": ("out", "lse"),
    "decode_rows": ("out", "lse"),
    "flash_mla_ckv_fp8_per_token": ("out", "lse"),
    "flash_mla_with_kvcache": ("out", "lse"),
    "quantize_and_cache_k": ("k_lora_cache", "k_lora_scale_cache", "k_rope_cache"),
    "append_kv": (),
    "append_rows": (),
    "quantize_q": (),
    "update_": (),
}
for _table, _more in (
    (WRONG, wrong_ds_mla.WRONG), (RIGHT, wrong_ds_mla.RIGHT), (METHODS, wrong_ds_mla.METHODS),
    (QUICK, wrong_ds_mla.QUICK),
):  # fmt: skip
    _table.update(_more)  # type: ignore[attr-defined]
NO_LAUNCH |= wrong_ds_mla.NO_LAUNCH


def call(function: str) -> Callable[..., Any]:
    """The callable that ``RIGHT[function]`` are the arguments of."""
    if function in METHODS:
        return METHODS[function]
    return getattr(flash_mla_fp8 if function in flash_mla_fp8.__all__ else snapmla, function)


def repeated(function: str) -> dict[str, Any]:
    """Arguments with which a call of ``QUICK`` went through; what it wrote is 0 again."""
    arguments = RIGHT[function]()
    lengths = arguments.get("cache_seqlens")
    if function == "decode":
        arguments["plan"] = snapmla.plan_decode(lengths, H, S_Q, page_size=P, max_pages=WIDTH)
    elif function == "decode_rows":
        arguments["plan"] = snapmla.plan_decode(
            lengths, H, S_Q, page_size=16, max_pages=WIDTH, cache_dtype=F16, row_tile=16
        )
    elif function == "flash_mla_ckv_fp8_per_token":
        pair = flash_mla_fp8.get_mla_metadata(lengths, S_Q * H, 1)
        arguments |= dict(zip(("tile_scheduler_metadata", "num_splits"), pair))
    call(function)(**arguments)
    for name in QUICK[function]:
        assert arguments[name].any(), name
        arguments[name].zero_()
    return arguments


def with_one_wrong(arguments: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The same arguments, but for this one: ``value``, or what it makes of the right one."""
    return {**arguments, name: value(arguments[name]) if callable(value) else value}

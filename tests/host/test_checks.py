# ruff: noqa: E501 (a table: one row reads better on one line)
"""Wrong input: every row must raise the right type and say the argument, expected, and got.

No row reaches a kernel: arguments are checked before anything is looked up or launched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import snapmla
from dsl_kernels.spec import VariantSpec
from snapmla import PagedKVCache, QuantizedQuery, checks, dispatch, flash_mla_fp8, runtime
from snapmla.errors import UnsupportedDeviceError, VariantError
from snapmla.plan import DecodePlan
from snapmla.reference_plan import plan_reference

B, S_Q, H, PAGES, P, WIDTH = 2, 1, 16, 4, 64, 3
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64


def query(b: int = B, s_q: int = S_Q, h: int = H, scale_dims: int = 3) -> QuantizedQuery:
    return QuantizedQuery(
        torch.zeros((b, s_q, h, 512), dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.zeros((b, s_q, h, 64), dtype=BF16),
        torch.ones((b, s_q, h)[:scale_dims]),
    )


def plan(**changes: Any) -> DecodePlan:
    b, rows = changes.get("batch", B), 16 * -(-changes.get("num_heads", H) * S_Q // 16)
    fields: dict[str, Any] = {
        "work_items": torch.zeros((4 + b, 4), dtype=I32),
        "part_begin": torch.zeros(5, dtype=I32),
        "split_begin": torch.zeros(b + 1, dtype=I32),
        "planned_seqlens": torch.zeros(b, dtype=I32),
        "o_accum": torch.zeros(8, rows, 512),
        "lse_accum": torch.zeros(8, rows),
        "batch": B, "num_heads": H, "s_q": S_Q, "page_size": P, "max_pages": WIDTH,
        "num_parts": 4, "pipeline": "etap", "row_tile": 16, "fixed_overhead": 4,
    }  # fmt: skip
    return DecodePlan(**{**fields, **changes})


def decode_arguments() -> dict[str, Any]:
    return {
        "q": query(),
        "cache": PagedKVCache.allocate(PAGES, P, device="cpu"),
        "block_table": BLOCK[: B * WIDTH].view(B, WIDTH),
        "cache_seqlens": torch.ones(B, dtype=I32),
        "softmax_scale": 0.1,
        "plan": plan(),
    }


def append_arguments() -> dict[str, Any]:
    return {
        "cache": PagedKVCache.allocate(PAGES, P, device="cpu"),
        "c_kv": torch.zeros((5, 512), dtype=BF16),
        "k_rope": torch.zeros((5, 64), dtype=BF16),
        "slot_mapping": torch.zeros(5, dtype=I32),
    }


def quantize_arguments() -> dict[str, Any]:
    return {
        "q_nope": torch.zeros((B, S_Q, H, 512), dtype=BF16),
        "q_rope": torch.zeros((B, S_Q, H, 64), dtype=BF16),
    }


def fetch_arguments() -> dict[str, Any]:
    return {
        "cache": PagedKVCache.allocate(PAGES, P, device="cpu"),
        "where": torch.zeros((B, WIDTH), dtype=I32),
        "cache_seqlens": torch.ones(B, dtype=I32),
    }


def cache_arguments() -> dict[str, Any]:
    return {
        "content": torch.zeros((PAGES, P, 512), dtype=torch.uint8),
        "rope": torch.zeros((PAGES, P, 64), dtype=BF16),
        "scale": torch.zeros((PAGES, P)),
    }


def plan_arguments() -> dict[str, Any]:
    lengths = torch.ones(B, dtype=I32)
    return {
        "cache_seqlens": lengths, "num_heads": H, "s_q": 1, "page_size": 64, "max_pages": 3,
    }  # fmt: skip


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def query_arguments() -> dict[str, Any]:
    rope = torch.zeros((B, S_Q, H, 64), dtype=BF16)
    return {"nope": fp8(B, S_Q, H, 512), "rope": rope, "scale": torch.ones((B, S_Q, H))}


def workspace_arguments() -> dict[str, Any]:
    return {"o_accum": torch.zeros(8, 16, 512), "lse_accum": torch.zeros(8, 16)}


def flash_mla_arguments() -> dict[str, Any]:
    """SnapMLA's decode; a pair with room for 9 sequences."""
    return {
        "q_nope": fp8(B, S_Q, H, 512),
        "q_rope": torch.zeros((B, S_Q, H, 64), dtype=BF16),
        "k_cache_lora": fp8(PAGES, P, 1, 512),
        "k_cache_rope": torch.zeros((PAGES, P, 1, 64), dtype=BF16),
        "q_scale": torch.ones((B, S_Q, H, 1)),
        "k_scale": torch.ones((PAGES, P, 1, 1)),
        "block_table": torch.zeros((B, WIDTH), dtype=I32),
        "cache_seqlens": torch.ones(B, dtype=I32),
        "head_dim_v": 512,
        "tile_scheduler_metadata": torch.zeros((4, 20), dtype=I32),
        "num_splits": torch.zeros(B + 1, dtype=I32),
    }


def pool_arguments() -> dict[str, Any]:
    return {
        "key": torch.zeros((5, 1, 576), dtype=BF16),
        "k_lora_cache": torch.zeros((256, 1, 512), dtype=torch.uint8),
        "k_lora_scale_cache": torch.zeros((256, 1, 1)),
        "k_rope_cache": torch.zeros((256, 1, 64), dtype=BF16),
        "indices": torch.zeros(5, dtype=I32),
        "head_dim_v": 512,
    }


def pool_fetch_arguments() -> dict[str, Any]:
    return {
        "k_lora": fp8(256, 1, 512),
        "k_rope": torch.zeros((256, 1, 64), dtype=BF16),
        "k_scale": torch.zeros((256, 1, 1)),
        "indices": torch.zeros(5, dtype=I32),
    }


def freed() -> PagedKVCache:
    """A cache whose owner gave its memory back."""
    cache = PagedKVCache.allocate(PAGES, P, device="cpu")
    cache.content.untyped_storage().resize_(0)
    return cache


META = {"device": "meta"}
BLOCK = torch.zeros(B * H * S_Q, dtype=I32)  # the block table's memory, and more
ROWS: list[tuple[str, str, Any, type, str, str]] = [
    # decode
    ("decode", "q", torch.zeros(B, S_Q, H, 576, dtype=F16), TypeError,
     "q: expected a snapmla.QuantizedQuery, got a float16 tensor .*quantize_q",
     "call snapmla.quantize_q(q_nope, q_rope)"),
    ("decode", "cache", torch.zeros(4, 64, 576), TypeError, "cache: .*PagedKVCache.*from_tensors",
     "PagedKVCache.from_tensors wraps existing"),
    ("decode", "block_table", torch.zeros((B, WIDTH), dtype=I64), TypeError,
     r"block_table: expected dtype int32, got int64 \(use \.to\(torch\.int32\) once",
     "use .to(torch.int32) once when you build"),
    ("decode", "block_table", torch.zeros((B + 1, WIDTH), dtype=I32), ValueError,
     r"block_table: expected shape \(2, width\), got \(3, 3\)",
     "one row of page ids for each sequence of"),
    ("decode", "block_table", torch.zeros(B, dtype=I32), ValueError, "block_table: expected shape",
     "one row of page ids for each sequence of"),
    ("decode", "block_table", torch.zeros((WIDTH, B), dtype=I32).T, ValueError,
     "block_table: expected innermost stride 1",
     "it is transposed or strided inside a row:"),
    ("decode", "block_table", torch.zeros((B, WIDTH), dtype=I32, **META), ValueError,
     "block_table: expected a tensor on cpu, got meta",
     "move it with .to('cpu') when you build it"),
    ("decode", "block_table", [[0, 1, 2]], TypeError, "block_table: expected a torch.Tensor, got list",
     "build it once with torch.as_tensor(...,"),
    ("decode", "block_table", torch.zeros((B, 2), dtype=I32), ValueError,
     r"block_table: expected a width of 3, the plan's max_pages, got 2 \(slice the table, or plan",
     "slice the table, or plan with max_pages ="),
    ("decode", "block_table", torch.zeros((B, 4), dtype=I32), ValueError,
     r"block_table: expected a width of 3, the plan's max_pages, got 4 \(slice the table, or plan",
     "slice the table, or plan with max_pages ="),
    ("decode", "block_table", torch.zeros((B, 0), dtype=I32), ValueError,
     "block_table: expected a width of 1 or more pages, got 0",
     "give even empty sequences one column"),
    ("decode", "cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: .*int32.*int64",
     "use .to(torch.int32) once when you build"),
    ("decode", "cache_seqlens", torch.ones((B, 1), dtype=I32), ValueError, "cache_seqlens: expected sh",
     "drop the dimension of 1, for example by"),
    ("decode", "cache_seqlens", torch.ones(2 * B, dtype=I32)[::2], ValueError,
     "cache_seqlens: expected a contiguous",
     "call .contiguous() once when you build it"),
    ("decode", "softmax_scale", None, TypeError, r"softmax_scale: .*192\*\*-0.5",
     "DeepSeek models want 192**-0.5 * mscale**2;"),
    ("decode", "softmax_scale", 0.0, ValueError, "softmax_scale: expected a positive finite number",
     "DeepSeek models want 192**-0.5 * mscale**2;"),
    ("decode", "softmax_scale", float("nan"), ValueError, "softmax_scale: .*got nan",
     "DeepSeek models want 192**-0.5 * mscale**2;"),
    ("decode", "softmax_scale", float("inf"), ValueError, "softmax_scale: .*got inf",
     "DeepSeek models want 192**-0.5 * mscale**2;"),
    ("decode", "softmax_scale", 1e39, ValueError, r"softmax_scale: expected .*1.44e\+17, got 1e\+39",
     "DeepSeek models want 192**-0.5 * mscale**2;"),
    ("decode", "softmax_scale", 1.01 * 2.0**57, ValueError, r"softmax_scale: expected .*1.44e\+17, got",
     "DeepSeek models want 192**-0.5 * mscale**2;"),
    ("decode", "softmax_scale", 10**400, ValueError, "softmax_scale: ",
     "DeepSeek models want 192**-0.5 * mscale**2;"),
    ("decode", "softmax_scale", torch.tensor(0.1), TypeError, "softmax_scale: .*got Tensor",
     "DeepSeek models want 192**-0.5 * mscale**2;"),
    ("decode", "causal", None, TypeError, "causal: expected True or False, got NoneType",
     "query token s of s_q"),
    ("decode", "causal", torch.tensor(True), TypeError,
     "causal: expected True or False, got Tensor", "query token s of s_q"),
    ("decode", "lse_base", ["e"], ValueError, r"lse_base: expected one of 'e', '2', got \['e'\]",
     "e is the natural logarithm"),
    ("decode", "lse_base", "10", ValueError, "lse_base: expected one of 'e', '2', got '10'",
     "e is the natural logarithm"),
    ("decode", "empty_lse", "nan", ValueError, "empty_lse: expected one of '-inf', '\\+inf', got 'nan'",
     "-inf merges like an empty sum; FlashMLA"),
    ("decode", "out", torch.zeros(B, S_Q, H, 512, dtype=F16), TypeError,
     "out: expected dtype bfloat16 or float32, got float16",
     "allocate it with dtype=torch.bfloat16"),
    ("decode", "out", torch.zeros(B, S_Q, H, 576, dtype=BF16), ValueError, r"out: .*\(2, 1, 16, 512\)",
     "leave it out to have it allocated"),
    ("decode", "out", torch.zeros(B, S_Q, 512, H, dtype=BF16).mT, ValueError, "out: .*contiguous",
     "allocate it contiguous; a slice or"),
    ("decode", "out", torch.zeros(B * H * 512 + 1, dtype=BF16)[1:].view(B, S_Q, H, 512), ValueError,
     "out: expected storage aligned to 16 bytes, got address",
     "start slices at multiples of 8 elements"),
    ("decode", "lse", torch.zeros(B, S_Q, H), ValueError, r"lse: expected shape \(2, 16, 1\)",
     "heads come before query tokens; leave it"),
    ("decode", "lse", torch.zeros(B, H, S_Q, dtype=BF16), TypeError, "lse: expected dtype float32",
     "allocate it with dtype=torch.float32"),
    ("decode", "out_dtype", F16, TypeError, "out_dtype: expected bfloat16 or float32",
     "convert out afterwards"),
    ("decode", "plan", torch.zeros(3), TypeError, "plan: expected a snapmla.DecodePlan or None",
     "make one for this step's shapes with"),
    ("decode", "plan", plan(num_heads=32), ValueError, "plan: .*num_heads.*got",
     "make one for this step's shapes with"),
    ("decode", "plan", plan(page_size=16), ValueError, "plan: .*page_size",
     "make one for this step's shapes with"),
    ("decode", "plan", plan(batch=3), ValueError, "plan: ",
     "make one for this step's shapes with"),
    ("decode", "plan", plan(work_items=torch.zeros((6, 4), dtype=I32, **META)), ValueError,
     "plan: expected a plan on cpu.*got meta",
     "make one for this step's shapes with"),
    ("decode", "out", torch.zeros(B, S_Q, H, 512, dtype=BF16, **META), ValueError,
     "out: expected a tensor on cpu, got meta", ".to('cpu')"),
    ("decode", "cache", PagedKVCache.allocate(PAGES, P, device="meta"), ValueError,
     "cache: expected tensors on cpu, where q is, got meta", "PagedKVCache.allocate"),
    ("decode", "cache", freed(), ValueError, "cache: expected memory, got a storage that was freed",
     "keep the storage, or make another cache"),
    ("decode", "out", torch._neg_view(torch.zeros(B, S_Q, H, 512, dtype=BF16)), ValueError,
     "out: expected values as memory holds them, got a view with the negative bit", ".resolve_neg()"),
    ("decode", "lse", torch._neg_view(torch.zeros(B, H, S_Q)), ValueError,
     "lse: expected values as memory holds them, got a view with the negative bit", ".resolve_neg()"),
    ("decode", "lse", torch.zeros(B, H, S_Q).to_sparse(), ValueError,
     "lse: expected a dense tensor, got layout sparse_coo", ".to_dense()"),
    ("decode", "block_table", torch.zeros((B, WIDTH), dtype=I32).to_sparse(), ValueError,
     "block_table: expected a dense tensor, got layout sparse_coo", ".to_dense()"),
    ("decode", "lse", BLOCK.view(F32)[:B * H * S_Q].view(B, H, S_Q), ValueError,
     "lse: expected memory apart from block_table, got tensors that overlap", "memory of its own"),
    ("decode", "pipeline", "dual_wg", ValueError, "pipeline: expected 'etap', as planned",
     "leave it out to let the dispatcher choose"),
    # append_kv
    ("append_kv", "cache", freed(), ValueError, "cache: expected memory, got a storage that was freed",
     "keep the storage, or make another cache"),
    ("append_kv", "cache", None, TypeError, "cache: expected a snapmla.PagedKVCache, got NoneType",
     "PagedKVCache.from_tensors wraps existing"),
    ("append_kv", "c_kv", torch.zeros(5, 512, dtype=torch.float64), TypeError, "c_kv: .*float64",
     "convert it with .to(torch.bfloat16)"),
    ("append_kv", "c_kv", torch.zeros(5, 576, dtype=BF16), ValueError, r"c_kv: expected shape \(n, 512\)",
     "the latent alone: joint[:, :512], with"),
    ("append_kv", "c_kv", torch.zeros(512, 5, dtype=BF16).T, ValueError, "c_kv: expected innermost",
     "it is transposed or strided inside a row:"),
    ("append_kv", "c_kv", torch.zeros(5, 513, dtype=BF16)[:, :512], ValueError, "c_kv: .*16 bytes",
     "pad rows to a multiple of 8 elements"),
    ("append_kv", "k_rope", torch.zeros(5, 64), TypeError, "k_rope: expected dtype bfloat16, got float32",
     "convert it with .to(torch.bfloat16)"),
    ("append_kv", "k_rope", torch.zeros(4, 64, dtype=BF16), ValueError, "k_rope: ",
     "one row for each row of c_kv, in the same"),
    ("append_kv", "slot_mapping", torch.zeros(5), TypeError, "slot_mapping: .*int32 or int64",
     "use .to(torch.int32) once when you build"),
    ("append_kv", "slot_mapping", torch.zeros(4, dtype=I32), ValueError, "slot_mapping: ",
     "one slot for each row of c_kv; -1 skips a"),
    ("append_kv", "slot_mapping", torch.zeros(10, dtype=I32)[::2], ValueError, "slot_mapping: .*contig",
     "call .contiguous() once when you build it"),
    ("append_kv", "slot_mapping", torch.zeros(5, dtype=I32, **META), ValueError, "slot_mapping: .*meta",
     "move it with .to('cpu') when you build it"),
    # quantize_q
    ("quantize_q", "granularity", "channel", ValueError, "granularity: .*'token_head'.*got 'channel'",
     "token_head is SnapMLA's, token is for one"),
    ("quantize_q", "q_nope", torch.zeros(B, H, 512, dtype=BF16), ValueError, "q_nope: expected shape",
     "queries absorbed into the latent space:"),
    ("quantize_q", "q_nope", torch.zeros(B, 1, 129, 512, dtype=BF16), ValueError,
     "num_heads: expected 1 to 128, got 129",
     "split more heads over several calls"),
    ("quantize_q", "q_nope", torch.zeros(B, 9, H, 512, dtype=BF16), ValueError,
     "s_q: expected 1 to 8, got 9",
     "give decode at most 8 query tokens a"),
    ("quantize_q", "q_nope", torch.zeros(B, 0, H, 512, dtype=BF16), ValueError, "s_q: .*got 0",
     "query tokens of each sequence; without any no call is needed"),
    ("quantize_q", "q_nope", torch.zeros(B, 1, 0, 512, dtype=BF16), ValueError,
     "num_heads: expected 1 to 128, got 0", "query heads of this rank; without any no call is needed"),
    ("quantize_q", "q_nope", torch.zeros(B, S_Q, H, 512, dtype=BF16).to_sparse(), ValueError,
     "q_nope: expected a dense tensor, got layout sparse_coo", "call .to_dense() once"),
    ("quantize_q", "q_nope", torch.zeros(B, 1, H, 512, dtype=torch.int8), TypeError, "q_nope: .*int8",
     "convert it with .to(torch.bfloat16)"),
    ("quantize_q", "q_rope", torch.zeros(B, 1, H, 64), TypeError, "q_rope: .*bfloat16.*float32",
     "convert it with .to(torch.bfloat16)"),
    ("quantize_q", "q_rope", torch.zeros(B, 1, H, 65, dtype=BF16)[..., 1:], ValueError, "q_rope: ",
     "pad rows to a multiple of 8 elements"),
    ("quantize_q", "out", torch.zeros(3), TypeError, "out: expected a snapmla.QuantizedQuery",
     "call snapmla.quantize_q(q_nope, q_rope)"),
    ("quantize_q", "out", query(b=3), ValueError, "out.nope: expected shape",
     "leave out= away, or keep one QuantizedQuery"),
    ("quantize_q", "out", query(scale_dims=2), ValueError, "out.scale: expected shape",
     "leave out= away, or keep one QuantizedQuery"),
    # fetch_dequant
    ("fetch_dequant", "where", torch.zeros((B, WIDTH), dtype=I64), TypeError, "block_table: .*int64",
     "use .to(torch.int32) once when you build"),
    ("fetch_dequant", "where", torch.zeros((1, B, WIDTH), dtype=I32), ValueError, "where: expected a bl",
     "a 2-D block table with cache_seqlens, or"),
    ("fetch_dequant", "where", torch.zeros((65536, 1), dtype=I32), ValueError,
     "where: expected at most 65535 sequences, got 65536", "fetch them in several calls"),
    ("fetch_dequant", "where", torch.zeros((B, 0), dtype=I32), ValueError,
     "block_table: expected a width of 1",
     "give even empty sequences one column"),
    ("fetch_dequant", "out", torch.zeros(1, 9, 576).expand(B, 9, 576), ValueError,
     "out: expected strides of distinct rows, got strides", "allocate them"),
    ("fetch_dequant", "out", torch.zeros(2, 1, 576).expand(B, 9, 576), ValueError,
     "out: expected strides of distinct rows, got strides", "allocate them"),
    ("fetch_dequant", "cache_seqlens", None, ValueError, "cache_seqlens: .*beside a block table",
     "one length for each sequence of the batch,"),
    ("fetch_dequant", "out", torch.zeros(B, 192, 512, dtype=BF16), ValueError, "out: .*576",
     "leave it out to have it allocated"),
    ("fetch_dequant", "out", 3, TypeError, "out: expected a .*576.* tensor or a pair",
     "leave it out to have it allocated"),
    ("fetch_dequant", "dtype", torch.float64, TypeError, "dtype: expected bfloat16",
     "convert the result afterwards"),
    # from_tensors
    ("from_tensors", "content", torch.zeros(65536, dtype=torch.uint8).as_strided((PAGES, P, 512), (16, 512, 1)),
     ValueError, "content: expected strides of distinct tokens, got strides", "allocate them"),
    ("from_tensors", "content", torch.zeros((0, P, 512), dtype=torch.uint8), ValueError,
     "content: expected 1 page or more, got 0",
     "allocate at least one page"),
    # plan_decode
    ("plan_decode", "cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: .*int64",
     "use .to(torch.int32) once when you build"),
    ("plan_decode", "num_heads", 129, ValueError, "num_heads: expected 1 to 128, got 129",
     "split more heads over several calls"),
    ("plan_decode", "num_heads", 16.0, TypeError, "num_heads: expected an int, got float",
     "convert it with int(...)"),
    ("plan_decode", "s_q", 9, ValueError, "s_q: expected 1 to 8, got 9",
     "give decode at most 8 query tokens a"),
    ("plan_decode", "page_size", 48, ValueError, "page_size: .*got 48 .*nearest is 32",
     "the nearest is 32"),
    ("plan_decode", "max_pages", 0, ValueError, "max_pages: expected 1",
     "the width of the block table"),
    ("plan_decode", "num_parts", 0, ValueError, "num_parts: ",
     "leave it out to fill the device"),
    ("plan_decode", "pipeline", "magic", ValueError, "pipeline: expected one of 'etap', 'dual_wg'",
     "leave it out to let the dispatcher choose"),
    ("plan_decode", "row_tile", 8, ValueError, "row_tile: expected one of 16, 32, 64, 128, got 8",
     "leave it out to let the dispatcher choose"),
    ("plan_decode", "fixed_overhead", -1, ValueError, "fixed_overhead: ",
     "leave it out for the measured default"),
    # from_tensors
    ("from_tensors", "content", torch.zeros((PAGES, P, 512), dtype=BF16), TypeError,
     "content: expected dtype float8_e4m3fn, got bfloat16", "append_kv quantises bfloat16 latents"),
    ("from_tensors", "content", torch.zeros((PAGES, 512, P), dtype=torch.uint8), ValueError,
     r"content: expected shape \(num_pages, page_size, 512\), got \(4, 512, 64\)",
     "the last two dimensions are exchanged: .mT.contiguous()"),
    ("from_tensors", "content", torch.zeros((PAGES, 512, P), dtype=torch.uint8).mT, ValueError,
     "content: expected innermost stride 1", "it is transposed"),
    ("from_tensors", "content", torch.zeros((PAGES, P, 1, 512), dtype=torch.uint8), ValueError,
     "content: expected shape", "drop the dimension of 1"),
    ("from_tensors", "content", torch.zeros((PAGES, 48, 512), dtype=torch.uint8), ValueError,
     "page_size: expected one of 16, 32, 64, 128, got 48", "the nearest is 32"),
    ("from_tensors", "content", torch.zeros((1, P, 512), dtype=torch.uint8).expand(PAGES, P, 512),
     ValueError, "content: expected strides of distinct tokens", "allocate them"),
    ("from_tensors", "rope", torch.zeros((PAGES, P, 64), dtype=F16), TypeError,
     "rope: expected dtype bfloat16, got float16", "convert it with .to(torch.bfloat16)"),
    ("from_tensors", "rope", torch.zeros((PAGES, P, 32), dtype=BF16), ValueError,
     r"rope: expected shape \(4, 64, 64\), got \(4, 64, 32\)", "docs/formats.md draws them"),
    ("from_tensors", "rope", torch.zeros((PAGES, P, 64), dtype=BF16, **META), ValueError,
     "rope: expected a tensor on cpu, got meta", ".to('cpu')"),
    ("from_tensors", "rope", torch.zeros((PAGES, P, 65), dtype=BF16)[..., :64], ValueError,
     "rope: expected outer strides that are multiples of 16 bytes", "multiple of 8 elements"),
    ("from_tensors", "scale", torch.zeros((PAGES, P), dtype=F16), TypeError,
     "scale: expected dtype float32, got float16", ".to(torch.float32)"),
    ("from_tensors", "scale", torch.zeros((PAGES, P, 1)), ValueError,
     r"scale: expected shape \(4, 64\), got \(4, 64, 1\)", "drop the dimension of 1"),
    # allocate
    ("allocate", "num_pages", 0, ValueError, "num_pages: expected 1 or more, got 0", "pages of the pool"),
    ("allocate", "page_size", 48, ValueError, "page_size: .*got 48", "the nearest is 32"),
    ("allocate", "page_size", "64", TypeError, "page_size: expected an int, got str", "int(...)"),
    ("allocate", "layout", "row_640", ValueError, "layout: .*got 'row_640'", "did you mean 'row640'?"),
    ("allocate", "layout", "interleaved", ValueError, "layout: expected one of 'split'", "split is the"),
    # QuantizedQuery
    ("query", "nope", torch.zeros((B, S_Q, H, 512), dtype=F16), TypeError,
     "q.nope: expected dtype float8_e4m3fn, got float16", "snapmla.quantize_q"),
    ("query", "nope", fp8(B, 9, H, 512), ValueError, "s_q: expected 1 to 8, got 9", "is prefill"),
    ("query", "nope", fp8(B, S_Q, 129, 512), ValueError, "num_heads: .*got 129", "split more heads"),
    ("query", "nope", fp8(B, S_Q, 2 * H, 512)[:, :, ::2], ValueError,
     "q.nope: expected a contiguous tensor", ".contiguous()"),
    ("query", "rope", torch.zeros((B, S_Q, H, 64)), TypeError, "q.rope: .*bfloat16, got float32", ".to("),
    ("query", "scale", torch.ones((B, S_Q, H, 1)), ValueError, "q.scale: expected shape", "squeeze()"),
    ("query", "scale", torch.ones((B, S_Q, H), **META), ValueError, "q.scale: .*got meta", ".to('cpu')"),
    # plans
    ("update_", "cache_seqlens", torch.ones(B + 1, dtype=I32), ValueError,
     r"cache_seqlens: expected shape \(2,\), got \(3,\)", "one length for each sequence"),
    ("update_", "cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: ", "torch.int32"),
    ("with_workspace", "o_accum", torch.zeros(4, 16, 512), ValueError,
     r"o_accum: expected shape \(8, 16, 512\), got \(4, 16, 512\)", "torch.empty_like(plan.o_accum)"),
    ("with_workspace", "o_accum", torch.zeros(8, 16, 512, dtype=BF16), TypeError,
     "o_accum: expected dtype float32, got bfloat16", "allocate it with dtype=torch.float32"),
    ("with_workspace", "lse_accum", torch.zeros(8, 8), ValueError,
     r"lse_accum: expected shape \(8, 16\), got \(8, 8\)", "torch.empty_like(plan.lse_accum)"),
    ("plan_decode", "fixed_split_tokens", 100, ValueError,
     "fixed_split_tokens: expected a multiple of 64, got 100", "the nearest is 128"),
    ("plan_decode", "check_stale", "no", TypeError,
     "check_stale: expected True or False, got str", "SNAPMLA_CHECK_PLAN"),
    # explain
    ("explain", "card", 5, TypeError, "card: expected a name such as 'H200', got int", "leave it out"),
    ("explain", "num_heads", 0, ValueError, "num_heads: expected 1 to 128, got 0", "without any no call is needed"),
    ("explain", "seqlen", 0, ValueError, "seqlen: expected 1 or more, got 0", "tokens of a sequence"),
    ("explain", "out_dtype", F16, TypeError, "out_dtype: .*got torch.float16", "convert out afterwards"),
    ("explain", "card", "A100", ValueError, "card: expected one of 'H200', .*got 'A100'", "this machine"),
    # SnapMLA's names
    ("flash_mla_ckv_fp8_per_token", "q_nope", fp8(B, S_Q, 2 * H, 512)[:, :, ::2], ValueError,
     "q_nope: expected a contiguous tensor", ".contiguous()"),
    ("flash_mla_ckv_fp8_per_token", "q_rope", torch.zeros((B, S_Q, H, 64), dtype=F16), TypeError,
     "q_rope: expected dtype bfloat16, got float16", ".to(torch.bfloat16)"),
    ("flash_mla_ckv_fp8_per_token", "q_nope", fp8(B * H * 512 + 1)[1:].view(B, S_Q, H, 512),
     ValueError, "q_nope: expected storage aligned to 16 bytes", "multiples of 16 elements"),
    ("flash_mla_ckv_fp8_per_token", "k_scale", torch.ones((PAGES, P, 1, 1), **META), ValueError,
     "k_scale: expected a tensor on cpu, got meta", ".to('cpu')"),
    ("flash_mla_ckv_fp8_per_token", "block_table", torch.zeros((B + 1, WIDTH), dtype=I32), ValueError,
     r"block_table: expected shape \(2, width\), got \(3, 3\)", "one row of page ids"),
    ("flash_mla_ckv_fp8_per_token", "cache_seqlens", torch.ones(B, dtype=I64), TypeError,
     "cache_seqlens: expected dtype int32, got int64", "not on every call"),
    ("flash_mla_ckv_fp8_per_token", "softmax_scale", -1.0, ValueError,
     "softmax_scale: expected a positive finite number", "192**-0.5"),
    ("flash_mla_ckv_fp8_per_token", "softmax_scale", torch.tensor(0.1), TypeError,
     "softmax_scale: expected a Python float, got Tensor", "192**-0.5"),
    ("flash_mla_ckv_fp8_per_token", "out", torch.zeros(B, S_Q, H, 512, dtype=F16), TypeError,
     "out: expected dtype bfloat16 or float32, got float16", "allocate it"),
    ("flash_mla_ckv_fp8_per_token", "lse", torch.zeros(B, S_Q, H), ValueError,
     r"lse: expected shape \(2, 16, 1\)", "heads come before"),
    ("flash_mla_ckv_fp8_per_token", "num_splits", torch.zeros(B + 1, dtype=I64), TypeError,
     "num_splits: expected dtype int32, got int64", "not on every call"),
    ("flash_mla_ckv_fp8_per_token", "q_nope", torch.zeros((B, S_Q, H, 512), dtype=BF16), TypeError,
     "q_nope: expected dtype float8_e4m3fn, got bfloat16", "quantize"),
    ("flash_mla_ckv_fp8_per_token", "q_scale", torch.ones((B, S_Q)), ValueError,
     r"q_scale: expected shape \(b, s_q, num_heads, 1\), got \(2, 1\)", "quantize_ckv_per_token_head"),
    ("flash_mla_ckv_fp8_per_token", "k_cache_lora", fp8(PAGES, P, 512), ValueError,
     r"k_cache_lora: expected shape \(pages, page_size, 1, 512\)", "pool.view(-1, page_size, 1, 512)"),
    ("flash_mla_ckv_fp8_per_token", "k_cache_lora", fp8(PAGES, 48, 1, 512), ValueError,
     "k_cache_lora, page_size: expected one of 16", "the nearest is 32"),
    ("flash_mla_ckv_fp8_per_token", "k_cache_rope", torch.zeros((PAGES, P, 1, 64)), TypeError,
     "k_cache_rope: expected dtype bfloat16, got float32", ".to(torch.bfloat16)"),
    ("flash_mla_ckv_fp8_per_token", "k_scale", torch.ones((PAGES, P, 1)), ValueError,
     "k_scale: expected shape", "pool.view(-1, page_size, 1, 1)"),
    ("flash_mla_ckv_fp8_per_token", "block_table", torch.zeros((B, WIDTH), dtype=I64), TypeError,
     "block_table: expected dtype int32, got int64", "not on every call"),
    ("flash_mla_ckv_fp8_per_token", "causal", None, TypeError,
     "causal: expected True or False, got NoneType", "query token s of s_q"),
    ("flash_mla_ckv_fp8_per_token", "causal", torch.tensor(True), TypeError,
     "causal: expected True or False, got Tensor", "query token s of s_q"),
    ("flash_mla_ckv_fp8_per_token", "causal", 2, TypeError,
     "causal: expected True or False, got 2", "query token s of s_q"),
    ("flash_mla_ckv_fp8_per_token", "head_dim_v", 576, ValueError,
     "head_dim_v: expected 512, got 576", "kernels are built for kv_lora_rank 512"),
    ("flash_mla_ckv_fp8_per_token", "tile_scheduler_metadata", None, TypeError,
     "tile_scheduler_metadata: expected an int32 tensor of get_mla_metadata, got NoneType", "make it with"),
    ("flash_mla_ckv_fp8_per_token", "tile_scheduler_metadata", torch.zeros((4, 6), dtype=I32),
     ValueError, "tile_scheduler_metadata: expected room for 2 sequences", "max_batch="),
    ("flash_mla_ckv_fp8_per_token", "num_splits", torch.zeros(33, dtype=I32), ValueError,
     r"num_splits: expected shape \(3,\), got \(33,\)", "slice [:b + 1]"),
    ("flash_mla_ckv_fp8_per_token", "empty_lse", "0", ValueError, "empty_lse: expected one of", "merges"),
    ("get_mla_metadata", "cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: ", "int32"),
    ("get_mla_metadata", "num_heads_per_head_k", 2048, ValueError,
     "num_heads_per_head_k: expected 1 to 1024, got 2048", "s_q * num_heads of one sequence"),
    ("get_mla_metadata", "num_heads_k", 2, ValueError, "num_heads_k: expected 1, got 2", "one latent"),
    ("get_mla_metadata", "out", torch.zeros((4, 20), dtype=I32), TypeError,
     "out: expected a pair of tensors, got Tensor", "leave it out to have it allocated"),
    ("get_mla_metadata", "out", (torch.zeros((4, 20), dtype=I32),), TypeError,
     "out: expected a pair of tensors, got 1 values", "leave it out to have it allocated"),
    ("get_mla_metadata", "max_batch", 1, ValueError,
     "cache_seqlens: expected at most max_batch = 1 sequences, got 2", "pass a larger max_batch"),
    ("quantize_ckv_per_token_head", "q", torch.zeros((B, S_Q, H, 512), dtype=BF16), ValueError,
     r"q: expected shape \(b, s_q, num_heads, 576\)", "latent and RoPE channels in one row"),
    ("quantize_ckv_per_token_head", "q", torch.zeros((B, S_Q, 129, 576), dtype=BF16), ValueError,
     "q, num_heads: expected 1 to 128, got 129", "split more heads"),
    ("quantize_ckv_per_token_head", "kv_lora_rank", 256, ValueError, "kv_lora_rank: .*got 256", "512"),
    ("quantize_and_cache_k", "key", torch.zeros((5, 1, 512), dtype=BF16), ValueError,
     "key: expected shape", r"(n, 1, 576)"),
    ("quantize_and_cache_k", "k_lora_cache", torch.zeros((100, 1, 512), dtype=torch.uint8), ValueError,
     "k_lora_cache: expected a multiple of 16 slots, got 100", "whole pages"),
    ("quantize_and_cache_k", "k_lora_cache", torch.zeros((4, 48, 1, 512), dtype=torch.uint8), ValueError,
     "k_rope_cache: expected a multiple of 48 slots, got 256", "whole pages"),
    ("quantize_and_cache_k", "k_rope_cache", torch.zeros((256, 64), dtype=BF16), ValueError,
     r"k_rope_cache: expected shape \(slots, 1, 64\)", "pool.view(-1, 1, 64)"),
    ("quantize_and_cache_k", "indices", torch.zeros(5), TypeError, "indices: .*int32 or int64", ".to("),
    ("quantize_and_cache_k", "indices", torch.zeros(4, dtype=I32), ValueError, "indices: .*got .4",
     "one slot for each row"),
    ("dequantize_ckv_fused_indexed", "k_rope", torch.zeros((256, 1, 1)), ValueError,
     r"k_rope: expected shape \(slots, 1, 64\)", "the order is k_lora, k_rope, k_scale"),
    ("dequantize_ckv_fused_indexed", "out", torch.zeros((5, 1, 576)), TypeError,
     "out: expected a pair of tensors, got Tensor", "leave it out to have it allocated"),
    ("dequantize_ckv_fused_indexed", "indices", torch.zeros(5, dtype=I64), TypeError,
     "indices: expected dtype int32, got int64", "not on every call"),
    # where tensors are made or asked about
    *(
        (function, "device", value, error, f"device: expected 'cpu' or a CUDA device.*got {got}",
         "device='cpu' runs the software GPU")
        for function in ("allocate", "explain")
        for value, error, got in (
            ("gpu", ValueError, "'gpu'"), ("cuda:99", ValueError, "'cuda:99'"),
            ("", ValueError, "''"), (2.5, TypeError, "2.5"), ([0], TypeError, r"\[0\]"),
        )
    ),
]  # fmt: skip
GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "decode": decode_arguments,
    "append_kv": append_arguments,
    "quantize_q": quantize_arguments,
    "fetch_dequant": fetch_arguments,
    "from_tensors": cache_arguments,
    "plan_decode": plan_arguments,
    "allocate": lambda: {"num_pages": 2, "page_size": 64, "layout": "split", "device": "cpu"},
    "query": query_arguments,
    "update_": lambda: {"cache_seqlens": torch.ones(B, dtype=I32)},
    "with_workspace": workspace_arguments,
    "explain": lambda: {"num_heads": H, "s_q": 1, "device": "cpu"},
    "flash_mla_ckv_fp8_per_token": flash_mla_arguments,
    "get_mla_metadata": lambda: {
        "cache_seqlens": torch.ones(B, dtype=I32), "num_heads_per_head_k": H, "num_heads_k": 1,
    },
    "quantize_ckv_per_token_head": lambda: {
        "q": torch.zeros((B, S_Q, H, 576), dtype=BF16), "kv_lora_rank": 512,
    },
    "quantize_and_cache_k": pool_arguments,
    "dequantize_ckv_fused_indexed": pool_fetch_arguments,
}  # fmt: skip
NO_LAUNCH = {"from_tensors", "allocate", "query", "with_workspace", "explain"}
METHODS: dict[str, Callable[..., Any]] = {
    "from_tensors": PagedKVCache.from_tensors,
    "allocate": PagedKVCache.allocate,
    "query": QuantizedQuery,
    "update_": lambda **arguments: plan().update_(**arguments),
    "with_workspace": lambda **arguments: plan().with_workspace(**arguments),
}


def call(function: str) -> Callable[..., Any]:
    if function in METHODS:
        return METHODS[function]
    return getattr(flash_mla_fp8 if function in flash_mla_fp8.__all__ else snapmla, function)


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(spec: VariantSpec, device_type: str) -> runtime.Kernel:
        raise AssertionError(f"wrong input reached {spec.name}")

    runtime.forget()
    monkeypatch.setattr(runtime, "kernel", reached)


@pytest.mark.parametrize(
    ("function", "name", "value", "error", "words", "advice"),
    ROWS,
    ids=[f"{row[0]}-{row[1]}-{i}" for i, row in enumerate(ROWS)],
)
def test_wrong_argument(
    function: str, name: str, value: Any, error: type, words: str, advice: str
) -> None:
    """Type, argument, expected, got, and in parentheses what to change."""
    arguments = {**GOOD[function](), name: value}
    with pytest.raises(error, match=f"(?s)^{words}") as caught:
        call(function)(**arguments)
    text = str(caught.value)
    assert re.fullmatch(r"(?s)[^:]+: expected .+, got .+ \(.+\)", text), text
    got = text.index(", got ")
    assert advice in text[got:], text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", [(), ("cuda",), (torch.device("cuda", 0),), (0,)], ids=str)
def test_first_call_without_a_gpu(device: tuple[Any, ...]) -> None:
    """The default device is a GPU: who has none learns of the software GPU."""
    with pytest.raises(
        ValueError, match=r"^device: expected 'cpu' or a CUDA .*, got .*\("
    ) as caught:
        PagedKVCache.allocate(8, 64, "split", *device)
    assert str(caught.value).endswith("device='cpu' runs the software GPU)")
    assert "\n" not in str(caught.value)


def test_a_full_gpu_is_no_wrong_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(torch.OutOfMemoryError):
        checks.device("device", "cpu")


@pytest.mark.parametrize("function", [f for f in GOOD if f not in ("allocate", "explain")])
def test_no_sign_is_lost(function: str) -> None:
    """Kernels read memory, where values of a view with the negative bit have the other sign."""
    good = GOOD[function]()
    for name, value in good.items():
        views = [torch._neg_view(value)] if isinstance(value, torch.Tensor) else []
        if isinstance(value, torch.Tensor) and value.dtype == F32:
            pairs = torch.view_as_complex(torch.stack([value, value], -1).contiguous())
            views.append(pairs.conj().imag)  # as it comes about
        for view in views:
            assert view.is_neg()
            with pytest.raises(ValueError, match="negative bit|innermost stride 1|contiguous"):
                call(function)(**{**good, name: view})


@pytest.mark.parametrize("function", GOOD)
def test_right_arguments_pass_the_checks(function: str) -> None:
    if function in NO_LAUNCH:
        call(function)(**GOOD[function]())
        return
    with pytest.raises(AssertionError, match="wrong input reached"):
        call(function)(**GOOD[function]())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"h": 129}, "q_nope, num_heads: expected 1 to 128, got 129"),
        ({"s_q": 9}, "q_nope, s_q: expected 1 to 8, got 9"),
        ({"page": 48}, "k_cache_lora, page_size: expected one of 16, 32, 64, 128, got 48"),
        ({"pages": 0}, "k_cache_lora: expected 1 page or more, got 0"),
        ({"width": 0}, "block_table: expected a width of 1 or more pages, got 0"),
    ],
)
def test_wrong_in_all_arguments_alike(changes: dict[str, int], words: str) -> None:
    """Sizes that go together and are wrong all the same; nothing but the range tells."""
    size = {"h": H, "s_q": 1, "page": P, "pages": PAGES, "width": WIDTH, **changes}
    rows, pool = (B, size["s_q"], size["h"]), (size["pages"], size["page"], 1)
    arguments = {
        **flash_mla_arguments(),
        "q_nope": fp8(*rows, 512),
        "q_rope": torch.zeros((*rows, 64), dtype=BF16),
        "q_scale": torch.ones((*rows, 1)),
        "k_cache_lora": fp8(*pool, 512),
        "k_cache_rope": torch.zeros((*pool, 64), dtype=BF16),
        "k_scale": torch.ones((*pool, 1)),
        "block_table": torch.zeros((B, size["width"]), dtype=I32),
    }
    with pytest.raises(ValueError, match=f"^{words}"):
        flash_mla_fp8.flash_mla_ckv_fp8_per_token(**arguments)


def test_one_row_may_have_any_stride() -> None:
    """A dimension of extent 1 is never stepped over, so its stride says nothing."""
    one = append_arguments()
    one["c_kv"] = torch.zeros(1024, dtype=BF16).as_strided((1, 512), (513, 1))
    one["k_rope"] = torch.zeros(128, dtype=BF16).as_strided((1, 64), (7, 1))
    one["slot_mapping"] = torch.zeros(1, dtype=I32)
    with pytest.raises(AssertionError, match="wrong input reached"):
        snapmla.append_kv(**one)
    q = torch.zeros(4 * 512, dtype=BF16).as_strided((1, 1, 4, 512), (3, 5, 512, 1))
    rope = torch.zeros((1, 1, 4, 64), dtype=BF16)
    with pytest.raises(AssertionError, match="wrong input reached"):
        snapmla.quantize_q(q, rope)


def test_one_page_needs_an_aligned_stride() -> None:
    """TMA descriptors hold the page stride of even a single page."""
    fields = cache_arguments()
    for name, view in fields.items():
        fields[name] = view[:1]
    fields["rope"] = torch.zeros(P * 64, dtype=BF16).as_strided((1, P, 64), (P * 64 + 1, 64, 1))
    with pytest.raises(ValueError, match="rope: expected outer strides"):
        PagedKVCache.from_tensors(**fields)


def test_table_is_long_enough() -> None:
    assert len(ROWS) >= 30


def test_softmax_scale_has_no_default() -> None:
    arguments = decode_arguments()
    del arguments["softmax_scale"]
    with pytest.raises(TypeError, match="softmax_scale"):
        snapmla.decode(**arguments)


def test_overhead_has_one_default_only() -> None:
    """The plan's constant; a second one in the reference could differ."""
    with pytest.raises(TypeError, match="fixed_overhead"):
        plan_reference([64], 2, 64)  # type: ignore[call-arg]


def test_query_must_be_contiguous() -> None:
    nope = torch.zeros((B, H, S_Q, 512), dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide = torch.zeros((B, S_Q, 2 * H, 512), dtype=torch.uint8).view(torch.float8_e4m3fn)
    rope, scale = torch.zeros((B, S_Q, H, 64), dtype=BF16), torch.ones(B, S_Q, H)
    with pytest.raises(ValueError, match=r"q\.nope: expected a contiguous"):
        QuantizedQuery(wide[:, :, ::2], rope, scale)
    with pytest.raises(ValueError, match=r"s_q: expected 1 to 8, got 16"):
        QuantizedQuery(nope, rope, scale)


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedDeviceError, match="device meta: kernels are built for cuda"):
        runtime.arch_of(torch.device("meta"))


def test_other_architectures_get_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(UnsupportedDeviceError) as caught:
        runtime.arch_of(torch.device("cuda", 7))
    assert str(caught.value) == (
        "NVIDIA A100-SXM4-80GB is sm_80: kernels are built for sm_90 (Hopper) and sm_100 "
        "(Blackwell); snapmla.reference runs anywhere"
    )


def test_planning_where_no_decode_kernel_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated or launched, and with a way out."""
    monkeypatch.setattr(runtime, "arch_of", lambda device: "sm_100a")
    dispatch.card_of.cache_clear()
    try:
        if any(dispatch._has_kernel(p, "sm_100a") for p in ("etap", "dual_wg")):
            pytest.skip("sm_100a has a decode kernel by now")
        with pytest.raises(VariantError, match=r"sm_100a: no decode kernel.* on sm_90a .*cpu"):
            snapmla.plan_decode(**plan_arguments())
    finally:
        dispatch.card_of.cache_clear()


def test_missing_variant_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, no_jit: None
) -> None:
    monkeypatch.setattr("snapmla.env.variant_dirs", lambda: [tmp_path])
    wanted = VariantSpec(op="decode", pipeline="etap", row_tile=32, page_size=32)
    with pytest.raises(VariantError, match="no variant of this op is there"):
        runtime.find_or_build(wanted, need_library=False)
    for row_tile in (16, 64):
        name = VariantSpec(op="decode", pipeline="etap", row_tile=row_tile, page_size=32).name
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name}))
    with pytest.raises(VariantError, match="SNAPMLA_NO_JIT.*nearest.*decode_etap_r16_p32_obf16"):
        runtime.find_or_build(wanted, need_library=False)


@pytest.mark.parametrize("forbidden", ["0", "1"])
def test_unwritten_kernel_is_one_sentence(monkeypatch: pytest.MonkeyPatch, forbidden: str) -> None:
    monkeypatch.setenv("SNAPMLA_NO_JIT", forbidden)
    monkeypatch.setattr(runtime, "compile_variant", lambda spec: pytest.fail("compiled"))
    spec = VariantSpec(op="decode", arch="sm_100a", pipeline="etap")
    with pytest.raises(VariantError) as caught:
        runtime.find_or_build(spec, need_library=False)
    assert str(caught.value) == (
        "variant decode_etap_r64_p64_obf16_sm100a: no sm_100a decode kernel of pipeline etap exists "
        "yet; the nearest one that can be built is decode_etap_r64_p64_obf16_sm90a"
    )


@pytest.mark.parametrize("function", ["append_kv", "quantize_q", "decode", "fetch_dequant"])
def test_inside_of_vmap(function: str) -> None:
    words = r"^snapmla: expected a call outside of torch\.func, got one inside of vmap \(sequences"
    good = GOOD[function]()

    def body(x: torch.Tensor) -> torch.Tensor:
        call(function)(**good)
        return x

    with pytest.raises(ValueError, match=words):
        torch.vmap(body)(torch.zeros(2))

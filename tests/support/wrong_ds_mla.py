# ruff: noqa: E501 (a table: one row reads better on one line)
"""Right and wrong arguments of calls over caches of format ``fp8_ds_mla``; see ``wrong_arguments``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import snapmla
from snapmla import PagedKVCache

Row = tuple[str, Any, type[Exception], str, str]
FORMAT = "fp8_ds_mla"
PAGES, P, B, WIDTH = 4, 64, 2, 3
BF16, I32, I64 = torch.bfloat16, torch.int32, torch.int64


def rows(pages: int = PAGES, page_size: int = P) -> torch.Tensor:
    return torch.zeros((pages, page_size, 1, 656), dtype=torch.uint8)


def cache(pages: int = PAGES, page_size: int = P) -> PagedKVCache:
    return PagedKVCache.from_tensors(rows(pages, page_size), format=FORMAT)


def other_cache(pages: int = PAGES, page_size: int = P, **options: Any) -> PagedKVCache:
    return PagedKVCache.allocate(pages, page_size, device="cpu", **options)


def append_arguments() -> dict[str, Any]:
    return {
        "cache": cache(),
        "c_kv": torch.zeros((5, 512), dtype=BF16),
        "k_rope": torch.zeros((5, 64), dtype=BF16),
        "slot_mapping": torch.zeros(5, dtype=I32),
    }


def rope_append_arguments() -> dict[str, Any]:
    return {
        **append_arguments(),
        "positions": torch.zeros(5, dtype=I64),
        "cos_sin_cache": torch.zeros(10, 64),
        "norm_weight": torch.ones(512, dtype=BF16),
    }


def fetch_arguments() -> dict[str, Any]:
    return {
        "cache": cache(),
        "where": torch.zeros((B, WIDTH), dtype=I32),
        "cache_seqlens": torch.ones(B, dtype=I32),
        "out": torch.zeros((B, 9, 576), dtype=BF16),
    }


def convert_arguments() -> dict[str, Any]:
    return {
        "source": cache(),
        "out": other_cache(),
        "pages": torch.tensor([1, 3]),
        "out_pages": torch.tensor([0, 2], dtype=I32),
    }


WRONG: dict[str, list[Row]] = {
    "append_ds_mla": [
        ("cache", None, TypeError, "cache: expected a snapmla.PagedKVCache, got NoneType", "wraps existing"),
        ("cache", rows(), TypeError, "cache: expected a snapmla.PagedKVCache, got Tensor", "wraps existing"),
        ("c_kv", torch.zeros((5, 1, 512), dtype=BF16), ValueError, r"c_kv: expected shape \(n, 512\)", "squeeze()"),
        ("c_kv", torch.zeros((5, 576), dtype=BF16), ValueError, r"c_kv: expected shape \(n, 512\)", "the latent alone"),
        ("c_kv", torch.zeros((5, 512), dtype=torch.float64), TypeError, "c_kv: expected dtype bfloat16 or", ".to("),
        ("c_kv", torch.zeros((5, 516), dtype=BF16)[:, :512], ValueError, "c_kv: .*multiples of 16 bytes", "pad rows"),
        ("k_rope", torch.zeros((5, 64)), TypeError, "k_rope: expected dtype bfloat16, got float32", ".to("),
        ("k_rope", torch.zeros((4, 64), dtype=BF16), ValueError, r"k_rope: expected shape \(5, 64\)", "one row for each"),
        ("slot_mapping", torch.zeros(5), TypeError, "slot_mapping: expected dtype int32 or int64", "once when you build"),
        ("slot_mapping", torch.zeros(4, dtype=I32), ValueError, r"slot_mapping: expected shape \(5,\)", "one slot"),
        ("slot_mapping", torch.zeros(10, dtype=I32)[::2], ValueError, "slot_mapping: expected a contiguous", ".contiguous()"),
    ],
    "rope_append_ds_mla": [
        ("positions", torch.zeros(4, dtype=I64), ValueError, r"positions: expected shape \(5,\)", "one row of cos_sin_cache"),
        ("cos_sin_cache", torch.zeros(10, 32), ValueError, r"cos_sin_cache: expected shape \(max_position, 64\)", "torch.cat"),
        ("norm_weight", torch.ones(512), TypeError, "norm_weight: expected dtype bfloat16", ".to("),
        ("norm_eps", 0.0, ValueError, "norm_eps: expected 1e-12 to 1, got 0", "rms_norm_eps"),
        ("is_neox", None, TypeError, "is_neox: expected True or False", "2 i and 2 i"),
    ],
    "fetch_ds_mla": [
        ("where", torch.zeros((B, WIDTH), dtype=I64), TypeError, "block_table: expected dtype int32", "once when you build"),
        ("cache_seqlens", None, ValueError, r"cache_seqlens: expected int32 \(b,\) beside a block table", "one length"),
        ("out", torch.zeros((B, 9, 1, 576), dtype=BF16), ValueError, r"out: expected shape \(2, tokens, 576\)", "have both allocated"),
        ("out", torch.zeros((B, 9, 576)).double(), TypeError, "out: expected dtype bfloat16 or", "allocate it with"),
    ],
    "from_bytes": [
        ("content", rows().float(), TypeError, "content: expected dtype uint8 or int8 or float8_e4m3fn, got float32", ".view(torch.float8_e4m3fn)"),
        ("content", rows()[..., :584], ValueError, r"content: expected shape \(num_pages, page_size, 1, 656\)", "docs/formats.md"),
        ("content", rows()[:, ::2], ValueError, "content: expected rows 656 bytes apart", "pages may lie apart"),
        ("content", rows(0), ValueError, "content: expected 1 page or more, got 0", "at least one page"),
        ("content", rows(4, 0), ValueError, "page_size: expected 1 or more, got 0", "tokens of a page"),
        ("content", torch.zeros(4 * 64 * 656 + 8, dtype=torch.uint8)[8:].view(4, 64, 656), ValueError, "content: expected storage aligned", "multiples of 16"),
        ("rope", torch.zeros((PAGES, P, 64), dtype=BF16), ValueError, "rope: expected None beside format='fp8_ds_mla', got Tensor", "are one tensor"),
        ("scale", torch.zeros((PAGES, P)), ValueError, "scale: expected None beside format='fp8_ds_mla', got Tensor", "are one tensor"),
        ("format", "fp8_ds_mal", ValueError, "format: expected one of None, 'fp8_ds_mla'.*, got 'fp8_ds_mal'", "did you mean 'fp8_ds_mla'?"),
        ("format", "fp8", ValueError, "format: expected one of None, 'fp8_ds_mla'.*, got 'fp8'", "by their dtype"),
        ("format", None, ValueError, "scale_fmt: expected None beside format 'fp8', got 'ue8m0'", "no powers of two"),
        ("scale_fmt", "ue8m1", ValueError, "scale_fmt: expected one of None, 'ue8m0', got 'ue8m1'", "did you mean"),
        ("scale_fmt", True, ValueError, "scale_fmt: expected one of None, 'ue8m0', got True", "None writes fp32"),
    ],
    "allocate_ds_mla": [
        ("page_size", 0, ValueError, "page_size: expected 1 or more, got 0", "tokens of a page"),
        ("layout", "paged", ValueError, "layout: expected None beside dtype='fp8_ds_mla', got 'paged'", "in one way only"),
        ("num_kv_heads", 2, ValueError, "num_kv_heads: expected 1, got 2", "one KV head"),
        ("dtype", "fp8_dsmla", ValueError, "dtype: expected one of 'fp8', .*got 'fp8_dsmla'", "did you mean 'fp8_ds_mla'?"),
        ("dtype", "fp8", ValueError, "scale_fmt: expected None beside format 'fp8', got 'ue8m0'", "no powers of two"),
    ],
    "convert_cache": [
        ("source", rows(), TypeError, "source: expected a snapmla.PagedKVCache, got Tensor", "wraps existing"),
        ("out", None, TypeError, "out: expected a snapmla.PagedKVCache, got NoneType", "wraps existing"),
        ("source", other_cache(dtype=BF16), ValueError, "source: expected an FP8 cache, got a 16-bit cache", "append_kv"),
        ("out", other_cache(dtype=BF16), ValueError, "out: expected a cache of another FP8 format, got 'bf16'", "dtype='fp8'"),
        ("out", cache(), ValueError, "out: expected a cache of another FP8 format, got 'fp8_ds_mla'", "dtype='fp8'"),
        ("source", other_cache(), ValueError, "out: expected a cache of another FP8 format, got 'fp8'", "dtype='fp8_ds_mla'"),
        ("out", other_cache(page_size=32), ValueError, "out: expected pages of 64 tokens, as source, got 32", "whole"),
        ("pages", torch.tensor([1, 4]), ValueError, "pages: expected 0 to 3, pages of the cache, got 4", "not slots"),
        ("pages", torch.tensor([-1, 0]), ValueError, "pages: expected 0 to 3, pages of the cache, got -1", "not slots"),
        ("pages", torch.tensor([1.0, 2.0]), TypeError, "pages: expected dtype int64 or int32, got float32", "once when you build"),
        ("pages", [0, 1], TypeError, "pages: expected a torch.Tensor, got list", "torch.as_tensor"),
        ("out_pages", torch.tensor([0]), ValueError, r"out_pages: expected shape \(2,\), got \(1,\)", "one for each page"),
        ("out_pages", torch.tensor([0, 9]), ValueError, "out_pages: expected 0 to 3, pages of the cache, got 9", "not slots"),
    ],
}  # fmt: skip
RIGHT: dict[str, Callable[[], dict[str, Any]]] = {
    "append_ds_mla": append_arguments,
    "rope_append_ds_mla": rope_append_arguments,
    "fetch_ds_mla": fetch_arguments,
    "from_bytes": lambda: {"content": rows(), "format": FORMAT, "scale_fmt": "ue8m0"},
    "allocate_ds_mla": lambda: {
        "num_pages": 2, "page_size": 16, "device": "cpu", "dtype": FORMAT, "scale_fmt": "ue8m0",
    },
    "convert_cache": convert_arguments,
}  # fmt: skip
METHODS: dict[str, Callable[..., Any]] = {
    "append_ds_mla": snapmla.append_kv,
    "rope_append_ds_mla": snapmla.rope_append_kv,
    "fetch_ds_mla": snapmla.fetch_dequant,
    "from_bytes": PagedKVCache.from_tensors,
    "allocate_ds_mla": PagedKVCache.allocate,
}
NO_LAUNCH = {"from_bytes", "allocate_ds_mla", "convert_cache"}
QUICK: dict[str, tuple[str, ...]] = {"append_ds_mla": (), "fetch_ds_mla": ()}

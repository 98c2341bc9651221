"""Checks of a dense ``flash_mla_with_kvcache``: all but its metadata and where its results lie."""

from __future__ import annotations

from typing import Any

import torch

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK
from snapmla import checks
from snapmla.cache.paged import PagedKVCache
from snapmla.compat.flash_mla.unbuilt import OWN_FP8

Tensor = torch.Tensor


def checked_cache(call: tuple[Any, ...]) -> PagedKVCache:
    """The cache as the primary API knows it; checks all but metadata and where results lie."""
    q, k_cache, table, lengths, _, out, lse, (scale, causal, *_), head_dim_v, num_splits, _ = call
    checks.integer("head_dim_v", head_dim_v, KV_LORA_RANK, KV_LORA_RANK)
    checks.flag("causal", causal)
    checks.softmax_scale(scale)
    if num_splits is not None:
        checks.tensor("num_splits", num_splits, (torch.int32,), ("b + 1",))
    if isinstance(q, torch.Tensor) and q.ndim == 3:
        hint = "ragged queries are for snapmla.decode"
        wanted = f"shape (b, s_q, num_heads_q, {HEAD_DIM_QK})"
        checks.value_error("q", wanted, tuple(q.shape), hint)
    _check_pool(k_cache)
    cache = PagedKVCache.from_tensors(k_cache)
    checks.query_of_rows(q, cache.dtype, cache.num_kv_heads)
    checks.block_table(table, q.shape[0], q.device)
    checks.lengths(lengths, q.shape[0], q.device)
    b, s_q, heads, _ = q.shape
    if out is not None:
        checks.output("out", out, (q.dtype,), (b, s_q, heads, KV_LORA_RANK), q.device)
    if lse is not None:
        checks.output("lse", lse, (torch.float32,), (b, heads, s_q), q.device, align=4)
    return cache


def _check_pool(k_cache: Tensor) -> None:
    """Checks kind, dtype and shape of the cache, by its name here."""
    checks.not_nested("k_cache", k_cache)
    if isinstance(k_cache, torch.Tensor) and k_cache.dtype is checks.FP8:
        got = checks.dtype_name(k_cache.dtype)
        checks.type_error("k_cache", "dtype bfloat16 or float16", got, OWN_FP8)
    if isinstance(k_cache, torch.Tensor) and (k_cache.ndim, k_cache.shape[-1]) != (4, HEAD_DIM_QK):
        hint = f"pass pool.view(-1, page_size, 1, {HEAD_DIM_QK})"
        wanted = f"shape (num_pages, page_size, num_heads_k, {HEAD_DIM_QK})"
        checks.value_error("k_cache", wanted, tuple(k_cache.shape), hint)
    shape = ("num_pages", "page_size", "num_heads_k", HEAD_DIM_QK)
    checks.tensor("k_cache", k_cache, checks.ROWS, shape)

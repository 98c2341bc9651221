"""``fetch_dequant``: tokens of the cache back in 16 or 32 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla import checks
from snapmla.cache import fetch, layouts
from snapmla.cache.paged import PagedKVCache
from snapmla.torch_ops.operator import Operator

_ARGUMENTS = "Tensor content, Tensor? rope, Tensor? scale, Tensor where, Tensor? cache_seqlens"
_CHUNKS = "Tensor? cu_seqlens=None, Tensor? seq_starts=None"


def _cache_of(content: Tensor, rope: Tensor | None, scale: Tensor | None) -> PagedKVCache:
    """The cache over what ``PagedKVCache.memory`` is."""
    if content.dtype in checks.ROWS:
        return PagedKVCache.from_tensors(content)
    return PagedKVCache.from_tensors(*layouts.views_of(content, rope, scale))


def _fetch_dequant(
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    where: Tensor,
    cache_seqlens: Tensor | None,
    dtype: torch.dtype,
    **chunks: Any,
) -> tuple[Tensor, Tensor]:
    cache = _cache_of(content, rope, scale)
    return fetch.fetch_now(cache, fetch.Tokens(where, cache_seqlens, **chunks), None, dtype)


def _fetch_dequant_out(
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    where: Tensor,
    cache_seqlens: Tensor | None,
    c_kv: Tensor,
    k_rope: Tensor,
    **chunks: Any,
) -> None:
    cache = _cache_of(content, rope, scale)
    tokens = fetch.Tokens(where, cache_seqlens, **chunks)
    fetch.fetch_now(cache, tokens, (c_kv, k_rope), c_kv.dtype)


def _fake_fetch_dequant(
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    where: Tensor,
    cache_seqlens: Tensor | None,
    dtype: torch.dtype,
    **chunks: Any,
) -> tuple[Tensor, Tensor]:
    tokens = fetch.Tokens(where, cache_seqlens, **chunks)
    if content.dtype in checks.ROWS:
        pages = layouts.with_heads(content)
        heads = pages.shape[2]
    else:
        pages, heads = layouts.views_of(content, rope, scale)[0], 1
    rows = fetch.rows(tokens, pages.shape[1], heads, given=False)
    return (
        content.new_empty((*rows, KV_LORA_RANK), dtype=dtype),
        content.new_empty((*rows, QK_ROPE_HEAD_DIM), dtype=dtype),
    )


OPERATORS = (
    Operator(
        f"fetch_dequant({_ARGUMENTS}, ScalarType dtype, *, {_CHUNKS}, "
        "SymInt? total=None) -> (Tensor, Tensor)",
        _fetch_dequant,
        _fake_fetch_dequant,
    ),
    Operator(
        f"fetch_dequant_out({_ARGUMENTS}, Tensor(a!) c_kv, Tensor(b!) k_rope, *, {_CHUNKS}) -> ()",
        _fetch_dequant_out,
    ),
)

"""Operators over caches whose format must be told: bytes, beside the format's name.

``kv`` is ``PagedKVCache.kv`` of such a format, or what ``from_tensors`` takes beside it;
``scale_fmt`` as there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.registered import FORMATS
from snapmla.cache import fetch, quant
from snapmla.cache import rope as rotary
from snapmla.cache.paged import PagedKVCache
from snapmla.torch_ops.operator import Operator

_TOKENS = "Tensor c_kv, Tensor k_rope, Tensor slot_mapping"
_TARGET = f"Tensor(a!) kv, str format, str? scale_fmt, {_TOKENS}"
_SOURCE = "Tensor kv, str format, Tensor where, Tensor? cache_seqlens"
_CHUNKS = "Tensor? cu_seqlens=None, Tensor? seq_starts=None"


def _cache(kv: Tensor, fmt: str, scale_fmt: str | None = None) -> PagedKVCache:
    return PagedKVCache.from_tensors(kv, format=fmt, scale_fmt=scale_fmt)


def _append(
    kv: Tensor, fmt: str, scale_fmt: str | None, c_kv: Tensor, k_rope: Tensor, slots: Tensor
) -> None:
    cache = _cache(kv, fmt, scale_fmt)
    quant.check_tokens(c_kv, k_rope, slots, kv.device, fmt=fmt)
    quant.launch_append(cache.arguments, c_kv, k_rope, slots, fmt, cache.append_options)


def _rope_append(
    kv: Tensor,
    fmt: str,
    scale_fmt: str | None,
    c_kv: Tensor,
    k_rope: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> None:
    cache, tokens = _cache(kv, fmt, scale_fmt), (c_kv, k_rope, slots)
    rotary.check_rotated(FORMATS[fmt], norm_weight)
    quant.check_tokens(*tokens, kv.device, fmt=fmt)
    rotary.check_angles(c_kv.dtype, c_kv.shape[:1], positions, cos_sin_cache, kv.device)
    rotary.check_weight(norm_weight, c_kv)
    rotary.launch_append(
        cache.arguments, *tokens, positions, cos_sin_cache, is_neox, norm_weight,
        rotary.check_eps(norm_eps), fmt, cache.append_options,
    )  # fmt: skip


def _fetch(
    kv: Tensor,
    fmt: str,
    where: Tensor,
    cache_seqlens: Tensor | None,
    dtype: torch.dtype,
    **chunks: Any,
) -> tuple[Tensor, Tensor]:
    tokens = fetch.Tokens(where, cache_seqlens, **chunks)
    return fetch.fetch_now(_cache(kv, fmt), tokens, None, dtype)


def _fetch_out(
    kv: Tensor,
    fmt: str,
    where: Tensor,
    cache_seqlens: Tensor | None,
    c_kv: Tensor,
    k_rope: Tensor,
    **chunks: Any,
) -> None:
    tokens = fetch.Tokens(where, cache_seqlens, **chunks)
    fetch.fetch_now(_cache(kv, fmt), tokens, (c_kv, k_rope), c_kv.dtype)


def _fake_fetch(
    kv: Tensor,
    fmt: str,
    where: Tensor,
    cache_seqlens: Tensor | None,
    dtype: torch.dtype,
    **chunks: Any,
) -> tuple[Tensor, Tensor]:
    tokens = fetch.Tokens(where, cache_seqlens, **chunks)
    rows, record = fetch.rows(tokens, kv.shape[1], 1, given=False), FORMATS[fmt]
    widths = record.content.count, record.rope_channels
    c_kv, k_rope = (kv.new_empty((*rows, width), dtype=dtype) for width in widths)
    return c_kv, k_rope


OPERATORS = (
    Operator(f"append_bytes({_TARGET}) -> ()", _append),
    Operator(
        f"rope_append_bytes({_TARGET}, Tensor positions, Tensor cos_sin_cache, bool is_neox, "
        "Tensor? norm_weight, float norm_eps) -> ()",
        _rope_append,
    ),
    Operator(
        f"fetch_bytes({_SOURCE}, ScalarType dtype, *, {_CHUNKS}, SymInt? total=None) "
        "-> (Tensor, Tensor)",
        _fetch,
        _fake_fetch,
    ),
    Operator(
        f"fetch_bytes_out({_SOURCE}, Tensor(a!) c_kv, Tensor(b!) k_rope, *, {_CHUNKS}) -> ()",
        _fetch_out,
    ),
)

"""``append_kv`` and ``rope_append_kv``; the cache as a pytree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache import layouts, quant
from snapmla.cache import rope as rotary
from snapmla.cache.paged import PagedKVCache
from snapmla.torch_ops import pytrees
from snapmla.torch_ops.operator import Operator


def _append_kv(
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    c_kv: Tensor,
    k_rope: Tensor,
    slots: Tensor,
) -> None:
    if content.dtype in checks.ROWS:
        checks.cache_rows(content)
        kv = layouts.with_heads(content)
        quant.check_tokens(c_kv, k_rope, slots, kv.device, kv.shape[2])
        quant.launch_append((kv,), c_kv, k_rope, slots, checks.format_of(kv))
        return
    views = layouts.views_of(content, rope, scale)
    checks.tensor("content", views[0], (torch.uint8,), ("num_pages", "page_size", KV_LORA_RANK))
    quant.check_tokens(c_kv, k_rope, slots, content.device)
    quant.launch_append(views, c_kv, k_rope, slots)


def _rope_append_kv(
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    c_kv: Tensor,
    k_rope: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> None:
    views = layouts.views_of(content, rope, scale)
    checks.tensor("content", views[0], (torch.uint8,), ("num_pages", "page_size", KV_LORA_RANK))
    quant.check_tokens(c_kv, k_rope, slots, content.device)
    rotary.check_angles(c_kv.dtype, c_kv.shape[:1], positions, cos_sin_cache, content.device)
    rotary.check_weight(norm_weight, c_kv)
    rotation = (is_neox, norm_weight, rotary.check_eps(norm_eps))
    rotary.launch_append(views, c_kv, k_rope, slots, positions, cos_sin_cache, *rotation)


OPERATORS = (
    Operator(
        "append_kv(Tensor(a!) content, Tensor(b!)? rope, Tensor(c!)? scale, Tensor c_kv, "
        "Tensor k_rope, Tensor slot_mapping) -> ()",
        _append_kv,
    ),
    Operator(
        "rope_append_kv(Tensor(a!) content, Tensor(b!)? rope, Tensor(c!)? scale, Tensor c_kv, "
        "Tensor k_rope, Tensor slot_mapping, Tensor positions, Tensor cos_sin_cache, bool is_neox, "
        "Tensor? norm_weight, float norm_eps) -> ()",
        _rope_append_kv,
    ),
)

_FP8_PARTS, _ROWS_PARTS = ("content", "rope", "scale"), ("kv",)
_TOLD = ("format", "scale_fmt")  # of a cache whose tensor does not tell them


def _parts(cache: PagedKVCache) -> tuple[str, ...]:
    return _FP8_PARTS if cache.__dict__.get("kv") is None else _ROWS_PARTS


def _told(cache: PagedKVCache) -> tuple[str, ...]:
    form = FORMATS.get(cache.__dict__.get("format", ""))
    return _TOLD if form is not None and form.named else ()


def _cache(leaves: list[Any], static: tuple[Any, ...]) -> PagedKVCache:
    told = dict(zip(_TOLD, static))
    if len(leaves) == len(_FP8_PARTS):
        return pytrees.put_together(PagedKVCache, dict(zip(_FP8_PARTS, leaves)))
    if isinstance(leaves[0], Tensor):
        return PagedKVCache.from_tensors(*leaves, **told)
    return pytrees.stand_in(PagedKVCache, dict(zip(_ROWS_PARTS, leaves)) | told)


pytrees.register(PagedKVCache, _parts, _cache, _told)

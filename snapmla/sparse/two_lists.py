"""A second list of a sparse decode, over a second cache: DeepSeek V4's sliding window beside its
compressed tokens.

A query token attends to the union.  To plans both lists are one: the second begins behind the whole
tiles of the first, as the kernel has it (``dsl_kernels/common/gather_v4.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsl_kernels.cache_records import v4
from dsl_kernels.dims import TOKEN_TILE
from snapmla import checks
from snapmla.cache import PagedKVCache, expect_cache

FORMAT = v4.RECORD.name  # whose kernels take two lists
Tensor = torch.Tensor


class Second(NamedTuple):
    """A second list.

    Attributes:
        cache: of format ``fp8_v4``, pages of any size.
        indices: int32 (b, s_q, topk), as the first list's.
        length: int32 (b,), how many entries of each row count; None: all.
    """

    cache: PagedKVCache
    indices: Tensor
    length: Tensor | None


def flat(indices: Tensor) -> Tensor | None:
    """(tokens, topk) as kernels take it; None of strides that no such view has."""
    try:
        return indices if indices.ndim == 2 else indices.view(-1, indices.shape[-1])
    except RuntimeError:
        return None


def check(
    cache: PagedKVCache, indices: Tensor, extra: Any, rows: tuple[int, ...], device: torch.device
) -> Second:
    """``extra``, checked; of no ragged queries (``rows``: (b, s_q, h))."""
    expect_cache(extra.cache)
    for name, one in (("cache", cache), ("extra_cache", extra.cache)):
        if one.format != FORMAT:
            wanted = f"format {FORMAT!r} beside a second list"
            checks.value_error(name, wanted, repr(one.format))
    if len(rows) == 2:
        checks.value_error("q", "shape (b, s_q, num_heads, 512) beside a second list", rows)
    if extra.cache.device != device:
        checks.value_error("extra_cache", f"a cache on {device}, where q is", extra.cache.device)
    checks.tensor("indices", indices, (torch.int32,), (*rows[:-1], "topk"), device)
    checks.tensor("extra_indices", extra.indices, (torch.int32,), (*rows[:-1], "topk"), device)
    if extra.indices.shape[-1] < 1:
        checks.value_error("extra_indices", "a width of 1 or more entries", 0)
    if extra.indices.shape[-1] > 1 and extra.indices.stride(-1) != 1:
        got = f"strides {extra.indices.stride()}"
        checks.value_error("extra_indices", "innermost stride 1", got)
    if flat(extra.indices) is None:
        wanted = "one stride from query token to query token"
        got = f"strides {extra.indices.stride()}"
        checks.value_error("extra_indices", wanted, got, "call .contiguous()")
    if extra.length is not None:
        checks.tensor("extra_length", extra.length, (torch.int32,), (rows[0],), device)
        checks.contiguous("extra_length", extra.length)
    return Second(*extra)


def as_one(indices: Tensor, extra: Second, batch: int) -> tuple[int, Tensor]:
    """(width, lengths int32 (b,)) of both lists as one, for a plan."""
    first, topk = whole_tiles(indices.shape[-1]), extra.indices.shape[-1]
    if extra.length is None:
        device = indices.device
        return first + topk, torch.full((batch,), first + topk, dtype=torch.int32, device=device)
    return first + topk, extra.length.clamp(0, topk) + first


def whole_tiles(topk: int) -> int:
    """Entries of the whole tiles of a list."""
    return -(-topk // TOKEN_TILE) * TOKEN_TILE


def arguments(
    cache: PagedKVCache, indices: Tensor, extra: Second | None, lengths: Tensor
) -> tuple[Any, ...]:
    """What the kernel takes of a second list; of none a row of no entries, over the first cache.

    Args:
        indices: of the first list, (tokens, topk).
        lengths: of the plan, no less than any row's entries.
    """
    if extra is None:
        return *cache.gather_arguments, indices[:, :0], lengths
    length = lengths if extra.length is None else extra.length
    return *extra.cache.gather_arguments, flat(extra.indices), length

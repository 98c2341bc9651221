"""A second list of a sparse decode, over a second cache: DeepSeek V4's and V4.1's sliding window
beside their compressed tokens.

A query token attends to the union.  To plans both lists are one: the second begins behind the whole
tiles of the first, as the kernel has it (``dsl_kernels/load/gather_v4.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.dims import TOKEN_TILE
from dsl_kernels.formats.registered import FORMATS, Names
from snapmla import checks
from snapmla.cache.paged import PagedKVCache, expect_cache
from snapmla.sparse.lists import check_indices

TAKEN = Names(lambda each: each.two_lists)  # formats
Tensor = torch.Tensor


class Second(NamedTuple):
    """A second list.

    Attributes:
        cache: of the first one's format, pages of any size.
        indices: int32 (b, s_q, topk), as the first list's.
        length: int32 (b,), how many entries of each row count; None: all.
    """

    cache: PagedKVCache
    indices: Tensor
    length: Tensor | None


def expect_format(name: str, cache: PagedKVCache) -> None:
    """Raises ValueError of a cache that no second list goes with."""
    if not FORMATS[cache.format].two_lists:
        known = " or ".join(map(repr, TAKEN))
        checks.value_error(name, f"format {known} beside a second list", repr(cache.format))


def check(
    cache: PagedKVCache, indices: Tensor, extra: Any, rows: tuple[int, ...], device: torch.device
) -> Second:
    """``extra``, checked; of no ragged queries (``rows``: (b, s_q, h))."""
    expect_cache(extra.cache)
    for name, one in (("cache", cache), ("extra_cache", extra.cache)):
        expect_format(name, one)
    if extra.cache.format != cache.format:
        wanted = f"format {cache.format!r}, as cache"
        checks.value_error("extra_cache", wanted, repr(extra.cache.format))
    if len(rows) == 2:
        checks.value_error("q", "shape (b, s_q, num_heads, 512) beside a second list", rows)
    if extra.cache.device != device:
        checks.value_error("extra_cache", f"a cache on {device}, where q is", extra.cache.device)
    check_indices(indices, rows, None, device)
    check_indices(extra.indices, rows, None, device, "extra_indices")
    if extra.length is not None:
        checks.tensor("extra_length", extra.length, (torch.int32,), (rows[0],), device)
        checks.contiguous("extra_length", extra.length)
    return Second(*extra)


def as_one(indices: Tensor, extra: Second) -> tuple[int, Tensor | None]:
    """(width, lengths int32 (b,)) of both lists as one, for a plan; None: all are full."""
    first, topk = whole_tiles(indices.shape[-1]), extra.indices.shape[-1]
    lengths = None if extra.length is None else extra.length.clamp(0, topk) + first
    return first + topk, lengths


def whole_tiles(topk: int) -> int:
    """Entries of the whole tiles of a list."""
    return -(-topk // TOKEN_TILE) * TOKEN_TILE


def arguments(
    cache: PagedKVCache, indices: Tensor, extra: Second | None, lengths: Tensor
) -> tuple[Any, ...]:
    """Kernel arguments of a second list; without one, a row of no entries over the first cache.

    Args:
        indices: of the first list, (b, s_q, topk).
        lengths: of the plan, no less than any row's entries.
    """
    if extra is None:
        return *cache.gather_arguments, indices[..., :0], lengths
    length = lengths if extra.length is None else extra.length
    return *extra.cache.gather_arguments, extra.indices, length

"""Results of ``fetch_dequant`` by plain indexing: the slot of each row, and what it stores."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from dsl_kernels.formats.registered import FORMATS
from snapmla.cache.paged import PagedKVCache
from snapmla.testing.byte_records import dequantize_tokens
from snapmla.testing.rounding import dequantize_rows

ZEROS, UNTOUCHED = -1, -2  # instead of a slot


def padded_slots(block_table: Tensor, cache_seqlens: Tensor, page_size: int, tokens: int) -> Tensor:
    """Slots (b, tokens) of the first tokens of each sequence; ``UNTOUCHED`` past its length.

    Page ids of tokens within the lengths must be in the pool.
    """
    t = torch.arange(tokens, device=block_table.device)
    inside = t < cache_seqlens[:, None]
    index = (t // page_size).expand(inside.shape)
    pages = torch.where(inside, block_table.long().gather(1, torch.where(inside, index, 0)), 0)
    return torch.where(inside, pages * page_size + t % page_size, UNTOUCHED)


def packed_slots(
    block_table: Tensor, cu_seqlens: Tensor, seq_starts: Tensor | None, cache: PagedKVCache,
    total: int,
) -> Tensor:  # fmt: skip
    """Slots (total,) of packed chunks: ``ZEROS`` for tokens outside the table and pages outside the
    pool, ``UNTOUCHED`` for rows of no sequence."""
    device, page_size = block_table.device, cache.page_size
    slots = torch.full((total,), UNTOUCHED, dtype=torch.int64, device=device)
    begins = cu_seqlens.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(begins)):
        first = 0 if seq_starts is None else int(seq_starts[i])
        t = first + torch.arange(end - begin, device=device)
        held = (t >= 0) & (t < block_table.shape[1] * page_size)
        t = torch.where(held, t, 0)
        page = block_table[i, t // page_size].long()
        held &= (page >= 0) & (page < cache.num_pages)
        slots[begin:end] = torch.where(held, page * page_size + t % page_size, ZEROS)
    return slots


def rows_at(
    cache: PagedKVCache, slots: Tensor, dtype: torch.dtype, untouched: float
) -> tuple[Tensor, Tensor]:
    """(c_kv, k_rope) of slots of any shape; rows that nobody writes hold ``untouched``.

    Of 16 bits there is a dimension of KV heads before the channels.
    """
    known = slots.clamp(min=0)
    at = known // cache.page_size, known % cache.page_size
    if FORMATS[cache.format].rows:
        results = cache.content[at].to(dtype), cache.rope[at].to(dtype)
    elif FORMATS[cache.format].named:
        fields = (cache.content_u8, cache.rope, _bytes(cache.scale))
        content, rope, scale = (field[at] for field in fields)
        assert cache.scale is not None
        parts = content.view(cache.content.dtype), rope, scale.view(cache.scale.dtype)
        results = dequantize_tokens(FORMATS[cache.format], parts, dtype)
    else:
        content = cache.content_u8[at].view(cache.content.dtype)
        scale = cache.named_tensors["scale"][at]
        results = dequantize_rows(content, cache.rope[at], scale, dtype)
    for rows in results:
        rows[slots == ZEROS] = 0.0
        rows[slots == UNTOUCHED] = untouched
    return results


def _bytes(scale: Tensor | None) -> Tensor:
    """Scales that can be indexed."""
    assert scale is not None
    return scale.view(torch.uint8) if scale.dtype.itemsize == 1 else scale

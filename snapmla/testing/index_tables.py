"""References, in torch, of what ``index_rows`` and ``fetch_index_k`` make of a step's tables."""

from __future__ import annotations

import torch
from torch import Tensor

from dsl_kernels.formats.index_cache import INDEX_DIM, PAGE
from snapmla.testing import index_reference as reference

NO_TOKEN, UNTOUCHED = -1, -2  # in the place of a slot: a row of zeros; one that is not written


def rows_tables(
    cache_seqlens: Tensor, cu_seqlens_q: Tensor | None, block_table: Tensor, most: int,
    rows: int, s_q: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(tokens that each of ``rows`` query tokens sees, its sequence's row of the block table).

    Args:
        most: tokens that a sequence can have.
        s_q: query tokens of each sequence, without ``cu_seqlens_q``.
    """
    starts = [i * s_q for i in range(len(cache_seqlens) + 1)]
    if cu_seqlens_q is not None:
        starts = [min(max(x, 0), rows) for x in cu_seqlens_q.tolist()]
    lengths = torch.zeros(rows, dtype=torch.int32)
    tables = block_table[:1].expand(rows, -1).clone()
    tables[starts[-1] :] = block_table[-1]
    for i, length in enumerate(cache_seqlens.tolist()):
        n = starts[i + 1] - starts[i]
        for j in range(n):
            seen = min(max(length, 0), most) - n + 1 + j
            lengths[starts[i] + j] = max(seen, 0)
            tables[starts[i] + j] = block_table[i]
    return lengths, tables


def packed_slots(
    block_table: Tensor, cu_seqlens: Tensor, seq_starts: Tensor | None, pages: int, rows: int
) -> Tensor:
    """The slot of each of ``rows`` packed rows, ``NO_TOKEN`` or ``UNTOUCHED``; int64."""
    slots = torch.full((rows,), UNTOUCHED)
    begins, width = cu_seqlens.tolist(), block_table.shape[1]
    for i in range(len(begins) - 1):
        first = 0 if seq_starts is None else int(seq_starts[i])
        for row in range(begins[i], begins[i + 1]):
            token = first + row - begins[i]
            slots[row] = NO_TOKEN
            if 0 <= token < width * PAGE:
                page = int(block_table[i, token // PAGE])
                if 0 <= page < pages:
                    slots[row] = page * PAGE + token % PAGE
    return slots


def keys_at(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(keys (n, 128) e4m3, scales (n,)) of pages (pages, bytes) at slots; zeros where there is no
    token."""
    keys, scales = reference.pages_of(cache.cpu())
    real = (slots >= 0) & (slots < PAGE * len(keys))
    at = torch.where(real, slots, 0).long()
    found = keys.view(-1, INDEX_DIM).view(torch.uint8)[at]
    found[~real] = 0
    factors = torch.where(real, scales.view(-1)[at], 0.0)
    return found.view(reference.E4M3), factors


def dequantised(keys: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys multiplied out, rounded once."""
    return (keys.float() * scales[:, None]).to(dtype)

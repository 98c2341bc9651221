"""Reference of ``select_topk`` by a stable sort, and scores that are hard to select from."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def select_topk_reference(
    logits: Tensor,
    lengths: Tensor,
    k: int,
    *,
    block_table: Tensor | None = None,
    page_size: int = 64,
    row_starts: Tensor | None = None,
    next_n: int = 1,
) -> tuple[Tensor, Tensor]:
    """(out, counts) of ``snapmla.dsa.select_topk`` for the same arguments, on the CPU.

    torch's stable descending sort has NaN first and takes -0 for +0.
    """
    rows, columns = logits.shape
    logits = logits.cpu()
    starts = [0] * rows if row_starts is None else row_starts.tolist()
    out = torch.full((rows, k), -1, dtype=torch.int32)
    counts = torch.zeros(rows, dtype=torch.int32)
    for row, (start, length) in enumerate(zip(starts, lengths.tolist(), strict=True)):
        start = min(max(start, 0), columns)
        scores = logits[row, start : min(start + max(length, 0), columns)]
        order = scores.sort(descending=True, stable=True).indices
        chosen = order[:k].sort().values
        counts[row] = len(chosen)
        if block_table is not None:
            chosen = slots_of(chosen, block_table[row // next_n].cpu(), page_size)
        out[row, : len(chosen)] = chosen.int()
    return out, counts


def slots_of(positions: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Cache slots of positions, -1 where the table, (width,), has no page."""
    index = positions // page_size
    pages = table[index.clamp(max=len(table) - 1)].long()
    found = (index < len(table)) & (pages >= 0)
    return torch.where(found, pages * page_size + positions % page_size, -1)


def _mostly_zero(normal: Tensor, uniform: Tensor) -> Tensor:
    """Sums of ReLUs: 98 % exact zeros."""
    return torch.where(uniform < 0.98, 0.0, normal.abs())


def _special(normal: Tensor, uniform: Tensor) -> Tensor:
    """NaN of both signs and infinities between numbers."""
    scores = normal.clone()
    for low, value in ((0.0, math.nan), (0.02, -math.nan), (0.04, math.inf), (0.1, -math.inf)):
        scores[(uniform >= low) & (uniform < low + 0.02)] = value
    return scores


# name -> (normal, uniform) -> scores, all of one shape
DISTRIBUTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "normal": lambda normal, _: normal,
    "zeros": _mostly_zero,
    "minus_zero": lambda normal, _: torch.full_like(normal, -0.0),
    "signed_zeros": lambda _, uniform: torch.where(uniform < 0.5, 0.0, -0.0),
    "two_values": lambda _, uniform: torch.where(uniform < 0.5, -1.0, 0.0),
    # they differ in the lowest ten bits alone, and there by more than a group of 32 bins
    "close": lambda _, uniform: torch.where(uniform < 0.5, 1 + 3 * 2.0**-23, 1 + 69 * 2.0**-23),
    "wide": lambda normal, uniform: normal * 10.0 ** (20 * uniform - 10),
    "special": _special,
    "nan": lambda normal, _: torch.full_like(normal, math.nan),
    "lowest": lambda normal, _: torch.full_like(normal, -math.inf),
    "rising": lambda normal, _: torch.arange(normal.numel()).view_as(normal) * 1.0,
}


def scores(name: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Scores of one of ``DISTRIBUTIONS``, on the CPU."""
    draw = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=draw)
    return DISTRIBUTIONS[name](normal, torch.rand(rows, columns, generator=draw))


def padded(found: Tensor, lengths: Tensor, starts: Tensor | None = None, gap: int = 0) -> Tensor:
    """Rows of scores in memory of rows longer by up to ``gap`` + 3 columns, NaN around them."""
    rows, columns = found.shape
    memory = torch.full((rows, -(-(columns + gap) // 4) * 4), math.nan)
    for row, length in enumerate(lengths.tolist()):
        begin = 0 if starts is None else min(max(int(starts[row]), 0), columns)
        length = min(max(length, 0), columns - begin)
        memory[row, begin : begin + length] = found[row, :length]
    return memory[:, :columns]

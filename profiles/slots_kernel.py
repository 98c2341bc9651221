"""Positions of a top-k list to cache slots, in one Triton kernel: what vLLM does between its top-k,
which gives positions, and FlashMLA's sparse decode, which wants slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128  # entries of a program


@triton.jit
def _convert(  # type: ignore[no-untyped-def]
    positions, table, out, table_stride, k, page: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    position = tl.load(positions + row * k + at, mask=at < k, other=-1)
    there = position >= 0
    first = tl.load(table + row * table_stride + position // page, mask=there, other=0)
    slot = tl.where(there, first * page + position % page, -1)
    tl.store(out + row * k + at, slot, mask=at < k)


def convert(
    positions: torch.Tensor, table: torch.Tensor, out: torch.Tensor, page: int = 64
) -> None:
    """Writes slots of ``positions`` (rows, k) of sequences with ``table`` (rows, pages) to ``out``,
    -1 where there is none; all int32, ``positions`` and ``out`` contiguous."""
    rows, k = positions.shape
    grid = (rows, triton.cdiv(k, BLOCK))
    _convert[grid](positions, table, out, table.stride(0), k, page, BLOCK)

"""The share of a CTA of merge: its unit of query rows, and its number among that unit's CTAs.

The CTAs are dealt to the units in proportion to their splits, at least one each (merge.py).  The
host knows the number of units and no length, so each CTA finds its unit in ``split_begin``, all
warps alike: two loads a lane while there are fewer than 2 * WARP units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from ..blocks import compat, quant


class Piece(NamedTuple):
    """A CTA's share: its unit, its number among the CTAs of that and how many those are, first
    split of the unit and number of splits; 0 if it has none, or if the table is damaged.  Every
    unit has a CTA of number 0 if the table ascends from 0 to no more splits than there are."""

    unit: Any
    mine: Any
    team: Any
    begin: Any
    n: Any


def unit_by_number(block: Any, count: Any) -> Any:
    """Unit and ``Piece.mine`` where the splits deal none: CTA i has unit i; there are more CTAs."""
    return Int32(cutlass.min(block, count - 1)), Int32(block // count)


@cute.jit
def piece_of(split_begin: cute.Tensor, most_splits: Int32, which: Any = None) -> Piece:
    """``Piece`` of this CTA, or of ``which`` = (its number, how many there are).  Splits from
    ``most_splits`` on do not exist, whatever ``split_begin`` says."""
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    if cutlass.const_expr(which is not None):
        block, grid = which
    count = split_begin.shape[0] - 1
    near, splits = Near.of(split_begin), cutlass.min(split_begin[count], most_splits)
    unit, mine = unit_by_number(block, count)
    team, begin, n = Int32(1), Int32(0), Int32(0)
    if splits > 0:
        ctas = grid - count
        unit = _unit_of(split_begin, near, block, ctas, splits)
        begin, end = _entry(near, unit), _entry(near, unit + 1)
        if unit + 1 >= 2 * quant.WARP:
            begin, end = split_begin[unit], split_begin[unit + 1]
        end = cutlass.min(end, splits)
        mine = block - unit - _share(begin, ctas, splits)
        team = 1 + _share(end, ctas, splits) - _share(begin, ctas, splits)
        if (begin >= 0) & (end > begin):
            n = end - begin
    return Piece(unit, mine, team, begin, n)


@cute.jit
def rows_of(units: cute.Tensor, out: cute.Tensor, unit: Int32, unit_rows: Int32) -> Any:
    """(first query row, rows) of a unit; rows that exist, whatever the table holds."""
    b, s_q, h, _ = out.shape
    everything = b * s_q * h
    first, end = unit * (s_q * h), (unit + 1) * (s_q * h)
    if units.shape[0] > 0:
        first, end = units[unit, 0], units[unit, 1]
    first, end = compat.at_most(first, everything), compat.at_most(end, everything)
    return first, cutlass.min(cutlass.max(end - first, 0), unit_rows)


@cute.jit
def _share(split: Int32, ctas: Int32, splits: Int32) -> Int32:
    """CTAs that belong to the splits before ``split``, rounded down."""
    return Int32(compat.unsigned(split) * compat.unsigned(ctas) // compat.unsigned(splits))


class Near(NamedTuple):
    """The first entries of ``split_begin``, two a lane: one trip to memory instead of three."""

    low: Any  # entry lane
    high: Any  # entry WARP + lane

    @classmethod
    def of(cls, split_begin: cute.Tensor) -> Near:
        """Loads them."""
        tidx, _, _ = cute.arch.thread_idx()
        last = split_begin.shape[0] - 1
        places = [tidx % quant.WARP + quant.WARP * x for x in range(2)]
        return cls(*(split_begin[cutlass.min(i, last)] for i in places))


def _entry(near: Near, i: Any) -> Any:
    """Entry ``i``, the same in all lanes; some other one if i is not below 2 * WARP."""
    low, high = (cute.arch.shuffle_sync(value, i % quant.WARP) for value in near)
    return Int32(cutlass.select_(i < quant.WARP, low, high))


@cute.jit
def _unit_of(
    split_begin: cute.Tensor, near: Near, block: Int32, ctas: Int32, splits: Int32
) -> Int32:
    """The unit of CTA ``block``: the last i with i + share(split_begin[i]) <= block.

    Every unit has one CTA, and one more for each share of the splits that ends in it.  No share is
    larger than ``ctas``: with ``left`` cut there, all products fit 32 bits.
    """
    tidx, _, _ = cute.arch.thread_idx()
    found = Int32(0)  # units after the first that begin at this CTA or before
    count = split_begin.shape[0] - 1
    for x in cutlass.range_constexpr(2):
        i = tidx % quant.WARP + quant.WARP * x
        if (i > 0) & (i < count) & _begins(i, near[x], block, ctas, splits):
            found += 1
    for i in cutlass.range(tidx % quant.WARP + 2 * quant.WARP, count, quant.WARP, unroll=4):
        if _begins(i, split_begin[i], block, ctas, splits):
            found += 1
    return cute.arch.warp_redux_sync(found, "add")


def _begins(unit: Any, split: Any, block: Any, ctas: Any, splits: Any) -> Any:
    """True if unit + share(split) <= block, computed without the division of ``_share``."""
    left = cutlass.min(block - unit, ctas)
    upto = compat.unsigned(split) * compat.unsigned(ctas)
    return (left >= 0) & (upto < compat.unsigned(left + 1) * compat.unsigned(splits))

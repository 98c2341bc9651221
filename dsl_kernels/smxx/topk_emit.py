"""The results of ``select_topk``: from bits of columns to positions or slots in order."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from .. import compat
from . import quant
from .prefix_sum import warp_scan
from .topk_keys import Row
from .topk_threshold import TOTAL, WARPS_AT, cluster_arrive, cluster_sync, cluster_wait, of_rank

# Counts of columns above the threshold and at it, as one number: up to 2048 of the one, and of the
# other up to 2^18 of a CTA, which tells others of no more than MOST_TIES: no k asks for as many.
ABOVE = 19
TIES = (1 << ABOVE) - 1
MOST_TIES = 4095


class Where(NamedTuple):
    """Where a row's results go."""

    block_table: cute.Tensor  # without rows: positions are wanted
    out: cute.Tensor
    row: Int32
    length: Int32
    by_page: compat.FastDivisor
    by_next_n: compat.FastDivisor  # rows that share a row of the block table


@cute.jit
def _slot(where: Where, sequence: Int32, position: Int32) -> Int32:
    """What is written for a position."""
    result = position
    if where.block_table.shape[0] > 0:
        index, offset = divmod(position, where.by_page)
        result = Int32(-1)
        if index < where.block_table.shape[1]:
            page = where.block_table[sequence, index]
            if page >= 0:
                result = page * where.by_page.divisor + offset
    return result


@cute.jit
def all_of(shape: cutlass.Constexpr, where: Where, length: Int32, first: Int32) -> None:
    """Writes all positions of a row that has no more than k; ``first``: this thread's."""
    k = Int32(where.out.shape[1])
    sequence, _ = divmod(where.row, where.by_next_n)
    for i in cutlass.range(first, k, shape.threads * shape.cluster, unroll=1):
        result = Int32(-1)
        if i < length:
            result = _slot(where, sequence, i)
        where.out[where.row, i] = result


def _pack(above: Any, ties: Any) -> Any:
    return (Int32(cute.arch.popc(above)) << ABOVE) + Int32(cute.arch.popc(ties))


@cute.jit
def _scan(shape: cutlass.Constexpr, sm: Any, mine: Int32) -> tuple[Int32, Int32]:
    """(sum over the threads before this one, and over all)."""
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    upto = warp_scan(mine, lane)
    if lane == quant.WARP - 1:
        sm.sums[WARPS_AT + warp] = upto
    cute.arch.sync_threads()
    of_warp = Int32(0)
    if lane < shape.warps:
        of_warp = sm.sums[WARPS_AT + lane]
    until = warp_scan(of_warp, lane)
    total = cute.arch.shuffle_sync(until, shape.warps - 1)
    before = cute.arch.shuffle_sync(until - of_warp, warp)
    return before + upto - mine, total


@cute.jit
def emit(shape: cutlass.Constexpr, sm: Any, where: Where, row: Row, left: Int32) -> None:
    """Writes what a CTA has selected, ``left`` of the ties that all CTAs have."""
    tidx, _, _ = cute.arch.thread_idx()
    lane = tidx % quant.WARP
    block, _, _ = cute.arch.block_idx()
    rank = block % shape.cluster
    ties_at = shape.words * shape.threads
    mine = Int32(0)
    for w in cutlass.range_constexpr(shape.words):
        at = tidx * shape.words + w
        mine += _pack(sm.bits[at], sm.bits[ties_at + at])
    before, total = _scan(shape, sm, mine)
    if tidx == 0:
        told = cutlass.min(total & TIES, MOST_TIES)
        sm.sums[TOTAL] = (total - (total & TIES)) | told
    cluster_sync(shape, sm)
    ranks = Int32(0)  # sums of the CTAs before this one
    if cutlass.const_expr(shape.cluster > 1):
        if lane < rank:
            ranks = of_rank(shape, sm.sums, TOTAL, lane)
        ranks = cute.arch.warp_redux_sync(ranks, "add")
        cluster_arrive(shape, sm)  # nothing is read from others any more
    before += ranks
    first = (ranks >> ABOVE) + cutlass.min(ranks & TIES, left)
    end = ((ranks + total) >> ABOVE) + cutlass.min((ranks + total) & TIES, left)
    # Scores that were written meanwhile may have been counted as others than were marked.
    k = Int32(where.out.shape[1])
    first = cutlass.min(cutlass.max(first, 0), k)
    end = cutlass.min(cutlass.max(end, first), k)
    for w in cutlass.range_constexpr(shape.words):
        at = tidx * shape.words + w
        here = (sm.bits[at], sm.bits[ties_at + at])
        _unpack(sm, here, (before, left, first, end), row.begin + at * 32)
        before += _pack(*here)
    cute.arch.sync_threads()
    sequence, _ = divmod(where.row, where.by_next_n)
    stop = end
    last = rank == shape.cluster - 1
    if cutlass.const_expr(shape.parts):
        last = last | sm.alone
    if last:  # nothing stays unwritten
        stop = k
    for i in cutlass.range(tidx, stop - first, shape.threads, unroll=1):
        position, result = Int32(-1), Int32(-1)
        if i < end - first:
            position = Int32(sm.list[i // 2, i % 2])
        if Uint32(position) < Uint32(where.length):
            result = _slot(where, sequence, position)
        where.out[where.row, first + i] = result
    if cutlass.const_expr(shape.cluster > 1):
        cluster_wait(shape, sm)  # others may still be reading from this one


@cute.jit
def _unpack(sm: Any, bits: Any, what: Any, begin: Int32) -> None:
    """Writes the positions of a word's selected columns to their places in the list.

    Args:
        bits: columns above the threshold, and at it.
        what: (sums before this word, ties that are wanted, the CTA's first place in ``out``, the
            place behind its last).
        begin: position of the word's first column.
    """
    word, ties = bits
    before, left, first, end = what
    room = left - (before & TIES)
    if (ties != 0) & (room > 0):
        extra = Int32(cute.arch.popc(ties)) - room
        while extra > 0:  # the last ones of the word are not wanted
            ties ^= Uint32(0x80000000) >> Uint32(cute.arch.clz(ties))
            extra -= 1
        word |= ties
    place = (before >> ABOVE) + cutlass.min(before & TIES, left) - first
    while word != 0:
        bit = Int32(cute.arch.clz(cute.arch.brev(word)))
        if Uint32(place) < Uint32(end - first):
            sm.list[place // 2, place % 2] = Uint32(begin + bit)
        word &= word - 1
        place += 1

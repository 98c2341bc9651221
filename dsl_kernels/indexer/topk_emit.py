"""The results of ``select_topk``: from bits of columns to positions or slots in order."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from ..blocks import compat, quant
from ..blocks.prefix_sum import warp_scan
from .topk_keys import MOST_POSITIONS, Row, words_shift
from .topk_threshold import TOTAL, WARPS_AT, cluster_sync, of_rank

# Counts of columns above the threshold and at it, as one number: up to 2048 of the one, and of the
# other up to 2^18 of a CTA, which tells others of no more than MOST_TIES: no k asks for as many.
ABOVE = 19
TIES = (1 << ABOVE) - 1
MOST_TIES = 4095


class Where(NamedTuple):
    """Destination of a row's results, and the block table that turns positions into slots."""

    block_table: cute.Tensor  # without rows: positions are wanted
    out: cute.Tensor
    row: Int32
    length: Int32
    by_page: compat.FastDivisor
    by_next_n: compat.FastDivisor  # rows that share a row of the block table


@cute.jit
def _slot(where: Where, sequence: Int32, position: Int32) -> Int32:
    """Result for a position: its slot in the cache, or -1 if the block table has no page for it.

    If there is no block table, it is the position itself.
    """
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
def emit(shape: cutlass.Constexpr, sm: Any, where: Where, row: Row, what: Any) -> None:
    """Writes what a CTA has selected; what = (how many are wanted of the ties that all CTAs have,
    length of the list)."""
    left, listed = what
    tidx, _, _ = cute.arch.thread_idx()
    lane = tidx % quant.WARP
    block, _, _ = cute.arch.block_idx()
    rank = block % shape.cluster
    begin, end = _words(shape, row)
    mine = Int32(0)
    for at in cutlass.range(begin, end, unroll=1):
        mine += _pack_word(shape, sm, at)
    before, total = _scan(shape, sm, mine)
    if tidx == 0:
        told = cutlass.min(total & TIES, MOST_TIES)
        sm.sums[TOTAL] = (total - (total & TIES)) | told
    cluster_sync(shape)
    ranks = Int32(0)  # sums of the CTAs before this one
    if cutlass.const_expr(shape.cluster > 1):
        if lane < rank:
            ranks = of_rank(shape, sm.sums, TOTAL, lane)
        ranks = cute.arch.warp_redux_sync(ranks, "add")
        cute.arch.cluster_arrive()  # nothing is read from others any more
    before += ranks
    # Scores that were written meanwhile may have been counted as others than were marked.
    k = Int32(where.out.shape[1])
    first = _clamp((ranks >> ABOVE) + cutlass.min(ranks & TIES, left), 0, k)
    end = ((ranks + total) >> ABOVE) + cutlass.min((ranks + total) & TIES, left)
    end = _clamp(end, first, k)
    if listed <= shape.listed:
        sm.hist[tidx] = Uint32(before)
        cute.arch.sync_threads()
        _from_list(shape, sm, where, row, what)
    else:
        _from_bits(shape, sm, where, row, (before, left, first, end))
    if rank == shape.cluster - 1:  # nothing stays unwritten
        for i in cutlass.range(end + tidx, k, shape.threads, unroll=1):
            where.out[where.row, i] = Int32(-1)
    if cutlass.const_expr(shape.cluster > 1):
        cute.arch.cluster_wait()  # others may still be reading from this one


def _clamp(value: Any, low: Any, high: Any) -> Any:
    return cutlass.min(cutlass.max(value, low), high)


@cute.jit
def _words(shape: cutlass.Constexpr, row: Row) -> tuple[Int32, Int32]:
    """This thread's words of a bitmap."""
    tidx, _, _ = cute.arch.thread_idx()
    shift = words_shift(shape, row)
    return tidx << shift, (tidx + 1) << shift


@cute.jit
def _pack_word(shape: cutlass.Constexpr, sm: Any, at: Int32) -> Int32:
    """Columns above the threshold and at it of a word."""
    return _pack(sm.bits[at], sm.bits[shape.words * shape.threads + at])


@cute.jit
def _from_list(shape: cutlass.Constexpr, sm: Any, where: Where, row: Row, what: Any) -> None:
    """Writes the selected entries of the list, each to its place; what: as of ``emit``.

    A thread's sum over the words before its own is in ``hist``.
    """
    left, listed = what
    tidx, _, _ = cute.arch.thread_idx()
    k = Int32(where.out.shape[1])
    shift = words_shift(shape, row)
    sequence, _ = divmod(where.row, where.by_next_n)
    for i in cutlass.range(tidx, listed, shape.threads, unroll=1):
        column = Int32(sm.list[i, 1])
        word, bit = column >> 5, Uint32(1) << (column & 31)
        above, ties = sm.bits[word], sm.bits[shape.words * shape.threads + word]
        if ((above | ties) & bit) != 0:
            owner = word >> shift
            before = Int32(sm.hist[owner])
            if cutlass.const_expr(shape.words > 1):
                for at in cutlass.range(owner << shift, word, unroll=1):
                    before += _pack_word(shape, sm, at)
            before += _pack(above & (bit - 1), ties & (bit - 1))
            tied = before & TIES
            place = (before >> ABOVE) + cutlass.min(tied, left)
            wanted = ((above & bit) != 0) | (tied < left)
            if wanted & (Uint32(place) < Uint32(k)):
                _write(where, sequence, place, row.begin + column)


@cute.jit
def _write(where: Where, sequence: Int32, place: Int32, position: Int32) -> None:
    result = Int32(-1)
    if Uint32(position) < Uint32(where.length):
        result = _slot(where, sequence, position)
    where.out[where.row, place] = result


@cute.jit
def _from_bits(shape: cutlass.Constexpr, sm: Any, where: Where, row: Row, what: Any) -> None:
    """Writes the positions of the bitmaps' columns where the list did not hold them: it takes them
    in order now; what = (sums before this thread's words, ties that are wanted, the CTA's first
    place in ``out``, the place behind its last)."""
    before, left, first, stop = what
    tidx, _, _ = cute.arch.thread_idx()
    begin, end = _words(shape, row)
    for at in cutlass.range(begin, end, unroll=1):
        here = (sm.bits[at], sm.bits[shape.words * shape.threads + at])
        _unpack(sm, here, (before, left, first), row.begin + at * 32)
        before += _pack(*here)
    cute.arch.sync_threads()
    sequence, _ = divmod(where.row, where.by_next_n)
    for i in cutlass.range(tidx, stop - first, shape.threads, unroll=1):
        _write(where, sequence, first + i, Int32(sm.list[i // 2, i % 2]))


@cute.jit
def _unpack(sm: Any, bits: Any, what: Any, begin: Int32) -> None:
    """Writes the positions of a word's selected columns to their places in the list.

    Args:
        bits: columns above the threshold, and at it.
        what: (sums before this word, ties that are wanted, the CTA's first place in ``out``).
        begin: position of the word's first column.
    """
    word, ties = bits
    before, left, first = what
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
        at = place & (MOST_POSITIONS - 1)
        sm.list[at // 2, at % 2] = Uint32(begin + bit)
        word &= word - 1
        place += 1

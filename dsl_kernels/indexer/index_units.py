"""Assignment of query tokens and tiles to the CTAs of ``index_logits``, found on the device.

A *unit* is up to U query tokens (rows) of one sequence, which see a page while it is in shared
memory; a tile is a page of 64 tokens.  Tiles of all units are numbered, unit by unit, and each CTA
takes an equal run of numbers.  Pieces of a unit write different columns, so a cut costs nothing but
the unit's queries once more, nothing is merged, and there is no plan: no table, no launch before
the kernel, nothing that could be stale.

Row j of a sequence's n query tokens sees its first L - n + 1 + j tokens.  With U a divisor of 64
the tiles of the first v units of a sequence are a difference of F(x) = sum of ceil(y / P) over
1 <= y <= x, P = 64 / U, which has a closed form: one look at a sequence counts its tiles, and a
binary search finds the unit in which a tile lies, also in a prompt of thousands of tokens.

One warp does this: each lane counts the tiles of a 32nd of the sequences, then all lanes look
through the 32nd in which the run begins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..blocks.prefix_sum import warp_scan
from ..formats.index_cache import PAGE

WARP = 32
AT_ONCE = 4  # sequences that a lane asks for


class Lengths(NamedTuple):
    """Tokens and query tokens of the sequences, and upper limits of both.

    Attributes:
        cache_seqlens: i32 (b,), with the call's own tokens.
        cu_seqlens_q: i32 (b + 1,), or (0,): every sequence has ``s_q`` query tokens.
        rows: query tokens of all sequences.
        most: tokens that a sequence can have, by the block table and the columns of the result.
    """

    cache_seqlens: cute.Tensor
    cu_seqlens_q: cute.Tensor
    s_q: Int32
    rows: Int32
    most: Int32


class Sequence(NamedTuple):
    """A sequence of the call.

    Attributes:
        first, n: its first row; its rows, no more than there are.
        length: its tokens.
        units: how many.
        zero: ceil((length - n) / U): what F's argument begins at.
        tiles: of all its units.
    """

    first: Any
    n: Any
    length: Any
    units: Any
    zero: Any
    tiles: Any


class Units:
    """Arithmetic of units of ``rows`` query tokens, a power of two up to 64."""

    def __init__(self, rows: int):
        self.rows, self.log = rows, rows.bit_length() - 1
        self.per_tile = PAGE // rows  # P
        self.log_per_tile = self.per_tile.bit_length() - 1

    def sums(self, x):
        """F(x), 0 below 1.  Of large x it wraps around, and differences are right still."""
        x = cutlass.max(x, Int32(0))
        whole, rest = x >> self.log_per_tile, x & (self.per_tile - 1)
        return (whole + 1) * (whole * (self.per_tile // 2) + rest)

    @cute.jit
    def words_of(self, lengths: Lengths, i):
        """(tokens, first row, row behind the last) of sequence ``i``, which must exist, as the
        tables hold them: not clamped."""
        first, behind = i * lengths.s_q, (i + 1) * lengths.s_q
        if lengths.cu_seqlens_q.shape[0] > 0:
            first, behind = lengths.cu_seqlens_q[i], lengths.cu_seqlens_q[i + 1]
        return lengths.cache_seqlens[i], first, behind

    def sequence(self, lengths: Lengths, i):
        """``Sequence`` number ``i``, which must exist."""
        return self.sequence_of(lengths, self.words_of(lengths, i))

    @cute.jit
    def sequence_of(self, lengths: Lengths, words):
        """``Sequence`` by its ``words_of``; whatever the tables hold it stays inside."""
        tokens, first, behind = words
        n = behind - first
        first = cutlass.min(cutlass.max(first, Int32(0)), lengths.rows)
        n = cutlass.min(cutlass.max(n, Int32(0)), lengths.rows - first)
        length = cutlass.min(cutlass.max(tokens, Int32(0)), lengths.most)
        units = (n + (self.rows - 1)) >> self.log
        zero = (length - n + (self.rows - 1)) >> self.log
        tiles = self.start(zero, units - 1) + _tiles(length)
        return Sequence(first, n, length, units, zero, tiles if units > 0 else Int32(0))

    def start(self, zero, unit):
        """Tiles of a sequence's units before ``unit``, which are whole."""
        return self.sums(zero + unit) - self.sums(zero)

    def tiles_of(self, seq: Sequence, unit):
        """Tiles of a unit: of as many tokens as its last row sees."""
        whole = (cutlass.max(seq.zero + unit + 1, Int32(0)) + self.per_tile - 1) >> (
            self.log_per_tile
        )
        last = unit == seq.units - 1
        return Int32(cutlass.select_(last, _tiles(seq.length), whole))

    @cute.jit
    def run(self, lengths: Lengths, part, parts, lane):
        """A CTA's run, by one warp: (its first tile, the one behind its last, the sequence in which
        the first lies, tiles before that sequence).  Without tiles the last two mean nothing.

        A lane counts the tiles of a 32nd of the sequences, side by side: what it loads of some it
        asks for at once, as nothing is on its way before this is done.
        """
        b = lengths.cache_seqlens.shape[0]
        some = (b + (WARP - 1)) // WARP
        mine = Int32(0)
        together = some // AT_ONCE * AT_ONCE
        for x in cutlass.range(0, together, AT_ONCE, unroll=1):
            begin = lane * some + x
            words = [self.words_of(lengths, cutlass.min(begin + y, b - 1)) for y in range(AT_ONCE)]
            for y in cutlass.range_constexpr(AT_ONCE):
                tiles = self.sequence_of(lengths, words[y]).tiles
                mine += Int32(cutlass.select_(begin + y < b, tiles, Int32(0)))
        for x in cutlass.range(together, some, unroll=1):
            if lane * some + x < b:
                mine += self.sequence(lengths, lane * some + x).tiles
        upto = warp_scan(mine, lane)
        total = cute.arch.shuffle_sync(upto, WARP - 1)
        at, end = share(total, part, parts), share(total, part + 1, parts)
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= at))
        before = cute.arch.shuffle_sync(upto - mine, cutlass.min(passed, WARP - 1))
        found = passed * some
        if some > 1:
            found, before = self._find(lengths, found, some, before, at, lane)
        return at, end, found, before

    @cute.jit
    def _find(self, lengths: Lengths, begin, some, before, tile, lane):
        """(sequence in which tile number ``tile`` lies, tiles before it): one of ``some`` from
        ``begin`` on, before which there are ``before`` tiles."""
        end = cutlass.min(begin + some, lengths.cache_seqlens.shape[0])
        found, seen = Int32(begin), before
        for base in cutlass.range(begin, end, WARP, unroll=1):
            own = Int32(0)
            if base + lane < end:
                own = self.sequence(lengths, base + lane).tiles
            upto = warp_scan(own, lane) + seen
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= tile))
            whole = cute.arch.shuffle_sync(upto, WARP - 1)
            starts = cute.arch.shuffle_sync(upto - own, cutlass.min(passed, WARP - 1))
            if (seen <= tile) & (tile < whole):
                found, before = base + passed, starts
            seen = whole
        return found, before

    @cute.jit
    def unit_at(self, seq: Sequence, tile):
        """The unit of a sequence in which its tile number ``tile`` lies."""
        low, high = Int32(0), seq.units - 1  # the last one whose start is not behind the tile
        while low < high:
            middle = (low + high + 1) >> 1
            if self.start(seq.zero, middle) <= tile:
                low = middle
            else:
                high = middle - 1
        return low


def share(total, part, parts):
    """First tile of CTA ``part``."""
    return Int32(Int64(total) * Int64(part) // Int64(parts))


def _tiles(tokens):
    return (tokens + (PAGE - 1)) >> (PAGE.bit_length() - 1)

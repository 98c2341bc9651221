"""The ring of KV tiles, gathered from DeepSeek V4's pages (v4.py): a loader (loader.py).

As gather_bytes.py's, but for what follows.

Two lists.  A query token has a row of ``indices``, over one cache, and one of ``extra_indices``,
over a second cache with pages of its own size; it attends to the union.  Tiles of the first list
come first, as many as a whole row of it has; entries from ``topk_length`` on name no token, so that
some tiles may have none.  A call without a second cache gives the first cache again, and a second
list of no entries.

Two planes.  A page has data, then scales.  A token has 448 channels of content: three lines and a
half of 128 bytes.  The half lines of a tile lie behind its lines, as rows of 64 bytes with a
swizzle of their own: chunk c of token t at c ^ (t / 2 % 4), so that eight tokens' chunks are in
eight places of the 32 banks.

Shared memory, a stage of ``kc``: 3 x (64 x 128) lines | 64 x 64 half lines.

Roles and timeline are gather_bytes.py's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ..blocks import compat
from ..formats.dims import QK_ROPE_HEAD_DIM as R
from ..formats.v4 import FORMAT, ROPE
from .gather import CHUNK, GROUP, HALF, LINE, Plane, TokenLists, copy
from .gather_bytes import GatherBytes
from .work_list import NOWHERE, TwoWork

LINES = FORMAT.content.count // LINE  # whole ones of a token
# Bit of a token's offset that says that its cache is the second one: pages have fewer tokens.
SECOND = 1 << 30


class TwoPools(NamedTuple):
    """Both caches as ``GatherTwo.source`` gives them to the kernel.

    Attributes:
        rows, extra_rows: u8 (pages, P, bytes of a token).
        count, extra_count: tokens of the pools.
        by_page, extra_by_page: divisors by P.
    """

    rows: Any
    count: Int32
    by_page: compat.FastDivisor
    extra_rows: Any
    extra_count: Int32
    extra_by_page: compat.FastDivisor


class Lists(NamedTuple):
    """A query token's lists.

    Attributes:
        work: whose tables they are rows of.
        b, s: which row.
        tiles: of the first list; those from there on are the second one's.
        count, extra_count: how many entries count.
    """

    work: TwoWork
    b: Any
    s: Any
    tiles: Any
    count: Any
    extra_count: Any


class TwoLists(TokenLists):
    """``TokenLists`` of two lists a query token."""

    def tiles_of(self, work):
        """Tiles of both lists."""
        return super().tiles_of(work) + cute.ceil_div(work.extra_indices.shape[2], self.tile)

    @cute.jit
    def row_of_table(self, work, call, i, batch):
        """``Lists`` of this work tile, twice."""
        rows = self.rows_at(work, call, i, batch, 0)
        token, _ = divmod(compat.at_most(rows.first, call.rows - 1), call.by_heads)
        b, s = self.place_of(work, token, batch)
        count, extra = self.seqlen_of(work, batch), Int32(0)
        if work.row_limits.shape[0] > 0:
            count = cutlass.min(work.row_limits[token], count)
        tiles = Int32(NOWHERE)
        if work.extra_indices.shape[2] > 0:
            tiles = Int32(cute.ceil_div(self.room(work), self.tile))
            extra = cutlass.max(work.extra_length[batch], 0)
            extra = compat.at_most(extra, work.extra_indices.shape[2])
        lists = Lists(work, b, s, tiles, count, extra)  # addresses of two rows would spill
        return lists, lists


class GatherTwo(GatherBytes):
    """``GatherBytes`` of two caches of one format."""

    # ---------------------------------------------------------------- lists

    def source(self, tensors, layouts):
        """``TwoPools`` of both caches."""
        found = []
        for rows in tensors:
            pages, page_size, _ = rows.shape
            found += [rows, pages * page_size, compat.fast_divisor(page_size)]
        return TwoPools(*found)

    @cute.jit
    def _entry(self, lists, tile, ahead):
        """This lane's entry for a tile; -1 where none counts."""
        second = tile >= lists.tiles
        place = tile * self.work.tile + ahead
        if second:
            place -= lists.tiles * self.work.tile
        entry = Int32(-1)
        if place < Int32(cutlass.select_(second, lists.extra_count, lists.count)):
            if second:
                entry = lists.work.extra_indices[lists.b, lists.s, place]
            else:
                entry = lists.work.block_table[lists.b, lists.s, place]
        return entry

    def _place(self, entry, tile, ahead, lists, tokens):
        """(page, offset) of the token that an entry names; page -1 if it names none."""
        second, own = tile >= lists.tiles, cutlass.max(entry, 0)
        page, offset = divmod(own, tokens.by_page)
        extra_page, extra_offset = divmod(own, tokens.extra_by_page)
        page = Int32(cutlass.select_(second, extra_page, page))
        offset = Int32(cutlass.select_(second, extra_offset + SECOND, offset))
        named = self._is_named(entry, tile, ahead, lists, tokens)
        return Int32(cutlass.select_(named, page, Int32(-1))), offset

    def _is_named(self, entry, tile, ahead, lists, tokens):
        """Return true if ``entry`` is a token of its pool, the second one for tiles of the second
        list.  Behind a list's end ``_entry`` gives -1, which is no token."""
        count = cutlass.select_(tile >= lists.tiles, tokens.extra_count, tokens.count)
        return compat.unsigned(entry) < compat.unsigned(Int32(count))

    # ---------------------------------------------------------------- rows

    def _planes(self, cache, lane):
        """(``TwoPools``, bytes from a line's first to this lane's)"""
        return cache.source, (lane % 8 if self.by_lines else lane) * CHUNK

    def _planes_of(self, pools, second, of_line):
        """``Plane`` of data and of scales of one cache: tokens lie apart as their planes say."""
        scale = self.format.scale
        data, scales = self.format.planes[0], self.format.planes[scale.plane]
        rows, extra = pools.rows, pools.extra_rows
        first = cutlass.select_(
            second, Int64(extra.iterator.toint()), Int64(rows.iterator.toint())
        )  # fmt: skip
        page = Uint32(cutlass.select_(second, Uint32(extra.stride[0]), Uint32(rows.stride[0])))
        p = Int32(cutlass.select_(second, Int32(extra.shape[1]), Int32(rows.shape[1])))
        return (
            Plane(Int64(first) + of_line, page, Uint32(data)),
            Plane(self._first_scale(Int64(first), p), page, Uint32(scales)),
        )

    def _first_scale(self, first, p):
        """Address of the scales of a cache's first token, whose page has ``p``."""
        plane = self.format.scale.plane
        if plane:
            first = first + Int64(p) * self.format.begins(plane)
        return first + self.format.scale.at if self.format.scale.at else first


class GatherV4(GatherTwo):
    """``GatherTwo`` of V4's pages."""

    def _targets(self, st, first, lane):
        """The base class' and, last, where the half line of the first of four rows goes."""
        line, chunk = lane // 8, lane % 4
        rows = LINES * self.work.tile * LINE + first * (GROUP * HALF) + line * HALF
        to_half = st.kc.data_ptr().toint() + rows + (chunk ^ (line // 2)) * CHUNK
        return [*super()._targets(st, first, lane), to_half]

    @cute.jit
    def _copy(self, to, planes, stage, page, offset, groups, lane):
        """A warp's rows of a tile: the lanes hold (page, offset) of theirs, all of one cache."""
        tile = const_expr(self.work.tile)
        pools, of_line = planes
        data, scales = self._planes_of(pools, offset >= SECOND, of_line)
        offset = offset & Int32(SECOND - 1)
        of_stage = stage * const_expr(tile * FORMAT.content.nbytes)
        at_c, at_r, at_half = to[0] + of_stage, to[1] + stage * (tile * R * 2), to[3] + of_stage
        for g in cutlass.range(0, groups, unroll=1):
            self._token_lines(
                data, (at_c, at_r, at_half), page, offset, GROUP * g + lane // 8, lane % 8 < 4
            )
            at_c += GROUP * LINE
            at_r += GROUP * LINE
            at_half += GROUP * HALF
        if lane < groups * GROUP:
            n = const_expr(self.scale_bytes)
            source, size = self._source(scales, page, offset, n)
            copy(to[2] + stage * (tile * n), source, size, n=n)

    @cute.jit
    def _token_lines(self, data, at, page, offset, first, has_half):
        """Eight rows, a line of four an instruction; ``has_half``: whether this lane copies some of
        half a line."""
        at_c, at_r, at_half = at
        for k in cutlass.range_constexpr(2):
            of = self._held(page, offset, first + 4 * k)
            source, size = self._source(data, *of, CHUNK)
            for block in cutlass.range_constexpr(LINES):
                to = const_expr(k * 4 * LINE + block * (self.work.tile * LINE))
                copy(at_c ^ (k * HALF), source, size, to=to, ahead=block * LINE)
            if has_half:
                to = const_expr(k * 4 * HALF)
                copy(at_half ^ (k * 2 * CHUNK), source, size, to=to, ahead=LINES * LINE)
            copy(at_r ^ (k * HALF), source, size, to=k * 4 * LINE, ahead=ROPE.at)

"""The ring of KV tiles, gathered from pages of a block table: loaders (loader.py) of dense decode
over caches of bytes.

As gather_bytes.py's, whose copies these are; but no list names tokens.  A place of a sequence is
token ``place % P`` of page ``block_table[sequence, place // P]``, for any P, and the lane that
loads the entry works that out.  A page that the pool does not have is no token, at none of its
places: nothing is read for it.

Why the tiles are gathered and not boxes of TMA (paged_tma.py).  A box lies in one page, so that it
has the page size in its shape: a kernel for each, where these caches have pages of any size.  And
what the announcer makes of a tile's scales is there as the gathering kernel has it, which reads
rows that nobody named as zeros: no V is cleared behind a sequence's end.  Rows of a page lie side
by side, so that the copies ask DRAM for the same bytes in the same order as boxes would.

``AnyPages`` is the work list that finds a place's token, for any loader of bytes.  Roles and shared
memory are gather_bytes.py's and gather_v4.py's.

Timeline of a tile in the announcer: wait until it has landed | proxy fence | ``on_full`` | the
entries of the next tile are asked for | full.  Across ``on_full`` there are no registers for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..blocks import compat
from ..formats.dims import KV_LORA_RANK as D
from .gather import CHUNK, HALF, LINE, Pool, copy
from .gather_bytes import GatherBytes
from .work_list import WorkList


class Pages(NamedTuple):
    """A sequence's pages.

    Attributes:
        row: of the block table.
        count: how many places there are.
        by_page: divisor by P.
    """

    row: Any
    count: Any
    by_page: compat.FastDivisor


class AnyPages(WorkList):
    """``WorkList`` of pages of any size, ``PagedWork.by_page``."""

    def __init__(self, tile: int):
        super().__init__(1, tile)

    def room(self, work):
        """Tokens that a row of the block table can name."""
        return work.block_table.shape[1] * work.by_page.divisor

    def row_of_table(self, work, call, i, batch):
        """``Pages`` of work tile ``i``, of sequence ``batch``, twice."""
        row = work.block_table[batch, None]
        pages = Pages(row, self.seqlen_of(work, batch), work.by_page)
        return pages, pages

    def pool(self, tensors):
        """``Pool`` of the one tensor, whose ``count`` is of pages: what an entry names."""
        (rows,) = tensors
        pages, page_size, _ = rows.shape
        return Pool(rows, pages, compat.fast_divisor(page_size))

    def entry(self, pages, tile, ahead):
        """The page of this lane's place of a tile, as it is in the table."""
        place, _ = divmod(tile * self.tile + ahead, pages.by_page)
        return pages.row[compat.at_most(place, pages.row.shape[0] - 1)]

    def place(self, entry, tile, ahead, pages, tokens):
        """(page, offset) of the token of a place, whose page ``entry`` is; page -1 if there is
        none."""
        _, offset = divmod(tile * self.tile + ahead, pages.by_page)
        named = self.is_named(entry, tile, ahead, pages, tokens)
        return Int32(cutlass.select_(named, entry, Int32(-1))), offset

    def is_named(self, entry, tile, ahead, pages, tokens):
        """Return true if ``entry`` is a page of the pool and the lane's place lies before the
        sequence's end."""
        named = compat.unsigned(entry) < compat.unsigned(tokens.count)
        return named & (tile * self.tile + ahead < pages.count)

    def walk(self, pages, tile, lane):
        """State of an announcer that begins at a tile: 0, and pages of the lane's two places."""
        return Float32(0.0), *self.two_entries(pages, tile, lane)

    @cute.jit
    def walked(self, state, pages, count, tile, lane, tokens, wait, on_full):
        """The state behind a tile, as of ``TokenLists``, but load the next tile's entries
        after ``on_full``: there are no registers to hold them during it."""
        top, low, high = state
        wait()
        which = Int32(0)  # one register: comparisons would be put off, with what they need
        if self.is_named(low, tile, 2 * lane, pages, tokens):
            which = which | 1
        if self.is_named(high, tile, 2 * lane + 1, pages, tokens):
            which = which | 2
        which = compat.opaque(which)
        top = on_full(((which & 1) != 0, (which & 2) != 0), top)
        return top, *self.two_entries(pages, tile + 1, lane)

    def two_entries(self, pages, tile, lane):
        """Pages of the lane's two places of a tile."""
        return self.entry(pages, tile, 2 * lane), self.entry(pages, tile, 2 * lane + 1)


class GatherPages(GatherBytes):
    """``GatherBytes`` of formats with RoPE, but with one address for a row's content and RoPE, so
    that there are fewer instructions; over lists the kernels have two."""

    def _lines(self, planes, at_c, at_r, page, offset, first):
        """Copy eight rows as the base class does."""
        rope_ahead = self.format.rope.at - self.format.content.at
        for k in range(2):
            of = self._held(page, offset, first + 4 * k)
            source, size = self._source(planes[0], *of, CHUNK)
            target, to = at_c ^ (k * HALF), k * 4 * LINE
            for block in range(D // LINE):
                ahead = block * LINE
                copy(target, source, size, to=to + block * (self.work.tile * LINE), ahead=ahead)
            copy(at_r ^ (k * HALF), source, size, to=to, ahead=rope_ahead)

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

Roles and shared memory are gather_bytes.py's.

Timeline of a tile in the announcer: wait until it has landed | proxy fence | ``on_full`` | the
entries of the next tile are asked for | full.  Across ``on_full`` there are no registers for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from ..blocks import compat
from ..blocks.barriers import Ring
from ..formats.dims import KV_LORA_RANK as D
from .gather import CHUNK, HALF, LINE, copy
from .gather_bytes import ByteRows, GatherBytes
from .loader import Feed
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


class FromPages:
    """Mixin that turns a loader of lists (gather_bytes.py, gather_v4.py) into one of pages; it
    comes before the loader among a class' bases."""

    stages: int
    q_stages: int
    work: Any
    landed: Ring

    def source(self, tensors, layouts):
        """``ByteRows`` of the one tensor, whose ``count`` is of pages: what an entry names."""
        (rows,) = tensors
        pages, page_size, _ = rows.shape
        return ByteRows(rows, pages, compat.fast_divisor(page_size))

    def _entry(self, pages, tile, ahead):
        """The page of this lane's place of a tile, as it is in the table."""
        place, _ = divmod(tile * self.work.tile + ahead, pages.by_page)
        return pages.row[compat.at_most(place, pages.row.shape[0] - 1)]

    def _place(self, entry, tile, ahead, pages, tokens):
        """(page, offset) of the token of a place, whose page ``entry`` is; page -1 if there is
        none."""
        _, offset = divmod(tile * self.work.tile + ahead, pages.by_page)
        named = self._is_named(entry, tile, ahead, pages, tokens)
        return Int32(cutlass.select_(named, entry, Int32(-1))), offset

    def _is_named(self, entry, tile, ahead, pages, tokens):
        """Return true if ``entry`` is a page of the pool and the lane's place lies before the
        sequence's end."""
        named = compat.unsigned(entry) < compat.unsigned(tokens.count)
        return named & (tile * self.work.tile + ahead < pages.count)

    @cute.jit
    def _announce(self, feed: Feed, on_full, tile_of_q, ahead):
        """Run the announcer like ``GatherBytes._announce``, but load the next tile's entries
        after ``on_full``: there are no registers to hold them during it."""
        lane, tokens = cute.arch.lane_idx(), feed.cache.source
        feed = feed._replace(mark=None)  # no function goes through the loops
        span = self.work.work_tiles_of(feed.work, feed.part)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        qst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.q_stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, _ = self.work.work_tile_at(feed.work, i)
            pages, _ = self.work.row_of_table(feed.work, feed.call, i, batch)
            low, high = self._entry(pages, first, 2 * lane), self._entry(pages, first, 2 * lane + 1)
            tile_of_q(i, batch, qst)
            qst.advance()
            top = Float32(0.0)
            for tile in cutlass.range(first, last, unroll=1):
                self.landed.wait_full(feed.st, kst.index, kst.phase)
                cute.arch.fence_proxy("async.shared", space="cta")
                which = Int32(0)  # one register: comparisons would be put off, with what they need
                if self._is_named(low, tile, 2 * lane, pages, tokens):
                    which = which | 1
                if self._is_named(high, tile, 2 * lane + 1, pages, tokens):
                    which = which | 2
                which = compat.opaque(which)
                top = on_full(kst.index, ((which & 1) != 0, (which & 2) != 0), top)
                low = self._entry(pages, tile + 1, 2 * lane)
                high = self._entry(pages, tile + 1, 2 * lane + 1)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(feed.k_pipe.producer_get_barrier(kst))
                kst.advance()
            if i + 1 < span[1]:
                ahead(i + 1)


class GatherPages(FromPages, GatherBytes):
    """``GatherBytes`` whose rows come from pages."""

    def _lines(self, planes, at_c, at_r, page, offset, first):
        """Copy eight rows as the base class does, but with one address for a row's content and its
        RoPE, if the format has RoPE."""
        if not self.rope:
            super()._lines(planes, at_c, at_r, page, offset, first)
            return
        rope_ahead = self.format.rope.at - self.format.content.at
        for k in range(2):
            of = self._held(page, offset, first + 4 * k)
            source, size = self._source(planes[0], *of, CHUNK)
            target, to = at_c ^ (k * HALF), k * 4 * LINE
            for block in range(D // LINE):
                ahead = block * LINE
                copy(target, source, size, to=to + block * (self.work.tile * LINE), ahead=ahead)
            copy(at_r ^ (k * HALF), source, size, to=to, ahead=rope_ahead)

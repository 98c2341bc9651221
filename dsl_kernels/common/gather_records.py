"""The ring of KV tiles, gathered as 656-byte rows (ds_mla.py): a loader (loader.py).

As gather.py's, whose copies these are, but a token's three fields lie in one row, it has four
scales, and a scale of 0 is a scale: that a place holds no token is known from the table alone.  So
the announcer reads the entries, too, and what it makes of a tile's scales is there when the tile's
full barrier flips.

Shared memory: as gather.py's; field ``ks`` has 16 bytes a token.

Timeline of a tile in the announcer: the entries of the next tile are asked for, two a lane | wait
until this one has landed | proxy fence | ``on_full`` | full
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from .. import compat
from ..ds_mla import GROUPS, ROPE_AT, SCALES_AT
from .gather import CHUNK, GatherRows, Plane
from .loader import Feed


class Records(NamedTuple):
    """Where rows of the cache are, as ``GatherRecords.source`` gives them to the kernel.

    Attributes:
        rows: u8 (pages, P, 656).
        count: tokens of the pool.
        by_page: divisor by P.
    """

    rows: Any
    count: Int32
    by_page: compat.FastDivisor


class GatherRecords(GatherRows):
    """``GatherRows`` of 656-byte rows.

    Its ``on_full`` is ``on_full(stage, named, top)``, by all lanes of the announcer: lane l has
    tokens 2 l and 2 l + 1, ``named`` says which of them are there, ``top`` is what the call for the
    item's tile before returned, 0 for the first.  Returned is the next ``top``.
    """

    scale_bytes = 4 * GROUPS

    def source(self, tensors, layouts):
        """``Records`` of the one tensor."""
        (rows,) = tensors
        pages, page_size, _ = rows.shape
        return Records(rows, pages * page_size, compat.fast_divisor(page_size))

    def _planes(self, cache, lane):
        """``Plane`` of content, RoPE, scales."""
        rows, of_line = cache.source.rows, lane % 8 * CHUNK
        starts = of_line if self.by_lines else lane * CHUNK, ROPE_AT + of_line, SCALES_AT
        return tuple(Plane.of(rows, 1, start) for start in starts)

    @cute.jit
    def _announce(self, feed: Feed, on_full):
        """Each tile when it has landed: ``on_full``, then to its readers behind a proxy fence."""
        lane, tokens = cute.arch.lane_idx(), feed.cache.source
        span = self.work.items_of(feed.work, feed.part)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, _ = self.work.item_at(feed.work, i)
            row, count = self.work.row_of_table(feed.work, feed.call, i, batch)
            low, high = self._entry(row, first, 2 * lane), self._entry(row, first, 2 * lane + 1)
            top = Float32(0.0)
            for tile in cutlass.range(first, last, unroll=1):
                named = (
                    self._is_named(low, tile, 2 * lane, count, tokens),
                    self._is_named(high, tile, 2 * lane + 1, count, tokens),
                )
                low = self._entry(row, tile + 1, 2 * lane)
                high = self._entry(row, tile + 1, 2 * lane + 1)
                self.landed.wait_full(feed.st, kst.index, kst.phase)
                cute.arch.fence_proxy("async.shared", space="cta")
                top = on_full(kst.index, named, top)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(feed.k_pipe.producer_get_barrier(kst))
                kst.advance()

    def _is_named(self, entry, tile, ahead, count, tokens):
        """Whether an entry names a token, as ``_place`` has it."""
        named = compat.unsigned(entry) < compat.unsigned(tokens.count)
        return named & (tile * self.work.tile + ahead < count)

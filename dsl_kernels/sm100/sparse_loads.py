"""The gathering loader (common/gather.py) of a KV ring that Q passes through, by two warps.

    warps 0, 3   copy 4 + 4 groups of 8 rows of each tile; warp 0 has Q's tiles copied, too
    announcer    the warp that issues Q.K (``announce``): it waits until a tile has landed and
                 announces it to its other readers

    landed   gather warps -> announcer              (cp.async arrivals, a thread each)
    k_pipe   announcer -> who reads the KV tile     (full: one arrival behind a proxy fence, of Q's
                                                    stage the TMA's with its bytes; empty: readers)

The gather warps arrive at ``landed`` of Q's stage, too, where they copy nothing: the two rings have
the same stages and must stay in phase.

Timeline of an item in a gather warp: the entries of its first tile are asked for | its first stage
is Q's: warp 0 waits until it is free and has Q copied, warp 3 waits; both arrive | its tiles, as in
common/gather.py.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, const_expr

from ..common.barriers import Ring
from ..common.gather import GROUP, GatherRows, TokenLists, arrive_landed
from ..common.loader import Feed, Readers

WARPS = 2  # that gather
Q_WARP = 0
GROUPS = {Q_WARP: (0, 4), 3: (4, 8)}  # first and last group of a tile, by warp


class GatherThroughRing(GatherRows):
    """``GatherRows`` whose KV ring has an item's Q tile in front of its KV tiles."""

    of_warps = GROUPS

    def __init__(self, work: TokenLists, *, stages: int, readers: Readers, by_lines: bool):
        super().__init__(work, stages=stages, q_stages=0, readers=readers, by_lines=by_lines)
        self.landed = Ring("landed", stages, {"gather": 32 * WARPS})

    @cute.jit
    def run(self, warp: cutlass.Constexpr, feed: Feed, tile_of_q, on_full):
        """The role of warp 0, with ``tile_of_q``, or of warp 3, without."""
        self._fill_ring(feed, self.of_warps[warp], tile_of_q)
        if const_expr(warp == Q_WARP):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def announce(self, st, k_pipe, kst):
        """By all lanes of the announcer: waits until KV tile ``kst`` has landed, and tells who
        reads it.  Its own MMAs may read the tile, too."""
        self.landed.wait_full(st, kst.index, kst.phase)
        cute.arch.fence_proxy("async.shared", space="cta")
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(k_pipe.producer_get_barrier(kst))

    @cute.jit
    def wait_q(self, st, k_pipe, kst):
        """By all lanes of the announcer, until the Q tile of an item is there."""
        self.landed.wait_full(st, kst.index, kst.phase)  # else the next tile's would not wait
        k_pipe.consumer_wait(kst)

    @cute.jit
    def _fill_ring(self, feed: Feed, groups: cutlass.Constexpr, tile_of_q: Any):
        """Rows ``groups`` (first, end) of 8 of each tile; an item's first stage is Q's."""
        st, _, k_pipe, cache, work, call, part, _ = feed
        lane, tokens = cute.arch.lane_idx(), cache.source
        first, end = Int32(groups[0]), Int32(groups[1])
        to, planes = self._targets(st, first, lane), self._planes(cache, lane)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        ahead = first * GROUP + lane
        span = self.work.items_of(work, part)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, begin, last, _ = self.work.item_at(work, i)
            row, count = self.work.row_of_table(work, call, i, batch)
            entry = self._entry(row, begin, ahead)
            if const_expr(tile_of_q is not None):
                tile_of_q(i, batch, kst)
            else:
                self._wait_free(st, k_pipe, kst, first)
            arrive_landed(self.landed.full_barrier(st, kst.index))
            kst.advance()
            for tile in cutlass.range(begin, last, unroll=1):
                page, offset = self._place(entry, tile, ahead, count, tokens)
                entry = self._entry(row, tile + 1, ahead)
                self._wait_free(st, k_pipe, kst, first)
                self._copy(to, planes, kst.index, page, offset, end - first, lane)
                arrive_landed(self.landed.full_barrier(st, kst.index))
                kst.advance()

"""The gathering loader (load/gather.py) of a KV ring that Q passes through, by two warps.

    warps 0, 3   copy 4 + 4 groups of 8 rows of each tile; warp 0 has Q's tiles copied, too
    announcer    the warp that issues Q.K (``wait_tile``): it waits until a tile has landed and
                 announces it to its other readers

    landed   gather warps -> announcer              (cp.async arrivals, a thread each)
    k_pipe   announcer -> who reads the KV tile     (full: one arrival behind a proxy fence, of Q's
                                                    stage the TMA's with its bytes; empty: readers)

The gather warps arrive at ``landed`` of Q's stage, too, where they copy nothing: the two rings have
the same stages and must stay in phase.

Timeline of a work tile in a gather warp: the entries of its first tile are asked for | its first
stage is Q's: warp 0 waits until it is free and has Q copied, warp 3 waits; both arrive | its tiles,
as in load/gather.py.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...blocks.barriers import Ring
from ...load.gather import GatherRows, TokenLists
from ...load.loader import Feed, Readers

WARPS = 2  # that gather
Q_WARP = 0
GROUPS = {Q_WARP: (0, 4), 3: (4, 8)}  # first and last group of a tile, by warp


class GatherThroughRing(GatherRows):
    """``GatherRows`` whose KV ring has a work tile's Q tile in front of its KV tiles."""

    of_warps = GROUPS

    def __init__(self, work: TokenLists, *, stages: int, readers: Readers, by_lines: bool):
        super().__init__(work, stages=stages, q_stages=0, readers=readers, by_lines=by_lines)
        self.landed = Ring("landed", stages, {"gather": 32 * WARPS})

    @cute.jit
    def run(self, warp: cutlass.Constexpr, feed: Feed, tile_of_q, on_full):
        """The role of warp 0, with ``tile_of_q``, or of warp 3, without."""
        first, end = self.of_warps[warp]
        self._fill(feed, (Int32(first), Int32(end)), tile_of_q)
        if const_expr(warp == Q_WARP):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def wait_tile(self, st, k_pipe, kst):
        """Wait until KV tile ``kst`` has landed, then announce it to its readers.  All lanes of the
        announcer call this; its own MMAs may read the tile from then on, too."""
        self.landed.wait_full(st, kst.index, kst.phase)
        cute.arch.fence_proxy("async.shared", space="cta")
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(k_pipe.producer_get_barrier(kst))

    @cute.jit
    def wait_q(self, st, k_pipe, kst):
        """Wait until the Q tile of a work tile is there; all lanes of the announcer call this."""
        self.landed.wait_full(st, kst.index, kst.phase)  # else the next tile's would not wait
        k_pipe.consumer_wait(kst)

    def last_warp(self, feed: Feed) -> None:
        """Warp 3's share of the tiles."""
        self.run(3, feed, None, None)

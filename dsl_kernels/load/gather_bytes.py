"""The ring of KV tiles, gathered as 656-byte rows (ds_mla.py): a loader (loader.py).

As gather.py's, whose copies these are, but a token's three fields lie in one row, it has four
scales, and a scale of 0 is a scale: that a place holds no token is known from the table alone.  So
the announcer reads the entries, too, and what it makes of a tile's scales is there when the tile's
full barrier flips.

It is the announcer that has Q's tiles copied, too: of a work tile before its tiles, as soon as the
work tile before has freed Q's stage; and before it goes on to the next work tile it asks for that
one's Q, to L2. When a stage of Q becomes free, a gather warp is at tiles of the next work tile,
with a stage to wait for.

With ``halves`` warp 0 copies the first half of a tile's rows.  Readers free it apart, as soon as
they have it in registers, so that the next rows are asked for while they are at the other half:

    first_half   who reads the KV tile -> warp 0   (warps; beside the stage's own empty barrier,
                                                   which frees the second half for the others)

Shared memory: as gather.py's, and the barriers of ``first_half``; field ``ks`` has 16 bytes a
token.

Timeline of a work tile in the announcer: Q is asked for | tiles | the next work tile's Q, to L2.
Of a tile: the entries of the next tile are asked for, two a lane | wait
until this one has landed | proxy fence | ``on_full`` | full
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64

from ..blocks import budget as bud
from ..blocks.barriers import Ring
from .gather import ANNOUNCER, CHUNK, Q_WARP, GatherRows, Plane, TokenLists
from .gather import GROUPS as THIRDS
from .loader import Feed, Readers

if TYPE_CHECKING:
    from ..formats.format import Format

HALVES = {0: (0, 4), Q_WARP: (4, 6), 3: (6, 8)}  # groups by warp, the first half one's


class GatherBytes(GatherRows):
    """``GatherRows`` of 656-byte rows.

    Its ``on_full`` is ``on_full(stage, named, top)``, by all lanes of the announcer: lane l has
    tokens 2 l and 2 l + 1, ``named`` says which of them are there, ``top`` is what the call for the
    work tile's tile before returned, 0 for the first.  Returned is the next ``top``.

    Attributes:
        format: which says where a token's fields are.
    """

    def __init__(
        self, work: TokenLists, *, format: Format, stages: int, q_stages: int, readers: Readers,
        by_lines: bool, halves: bool,
    ):  # fmt: skip
        super().__init__(work, stages=stages, q_stages=q_stages, readers=readers, by_lines=by_lines)
        self.format, self.scale_bytes = format, format.scale_bytes
        self.rope = format.rope is not None
        self.halves, self.of_warps = halves, HALVES if halves else THIRDS
        self.first_half = Ring("first_half", stages, readers)

    @property
    def fields(self) -> dict:
        """Storage of the barriers."""
        return {**super().fields, **(self.first_half.field if self.halves else {})}

    def barriers(self) -> tuple[bud.Barrier, ...]:
        """All of them in a budget."""
        return *super().barriers(), *(self.first_half.budget() if self.halves else ())

    def init(self, st) -> None:
        """Initialise the barriers of ``landed`` and, with ``halves``, of ``first_half``; one thread
        calls this, before ``pipe``."""
        super().init(st)
        if self.halves:
            self.first_half.init(st)

    def free_first_half(self, st, stage) -> None:
        """Free the first half of a stage's rows, if there are ``halves``; all lanes of a reading
        warp call this once they have read what they need of it."""
        cute.arch.sync_warp()
        if not self.halves:
            return
        tidx, _, _ = cute.arch.thread_idx()
        self.first_half.arrive_full_if(st, stage, tidx % 32 == 0)

    def _wait_free(self, st, k_pipe, kst, first):
        if not self.halves:
            super()._wait_free(st, k_pipe, kst, first)
            return
        halves = (
            self.first_half.full_barrier(st, kst.index),
            k_pipe.sync_object_empty.get_barrier(kst.index),
        )
        at = Int32(cutlass.select_(first == 0, *(bar.toint() for bar in halves)))
        barrier = cute.make_ptr(Int64, at, cute.AddressSpace.smem, assumed_align=8)
        cute.arch.mbarrier_wait(barrier, kst.phase)

    def source(self, tensors, layouts):
        """The cache as the work list's ``pool`` has it."""
        return self.work.pool(tensors)

    def _planes(self, cache, lane):
        """``Plane`` of content, RoPE, scales."""
        rows, format, of_line = cache.source.rows, self.format, lane % 8 * CHUNK
        own = of_line if self.by_lines else lane * CHUNK
        if format.content.at:
            own = format.content.at + own
        content = Plane.of(rows, 1, own)
        rope = Plane.of(rows, 1, format.rope.at + of_line) if self.rope else content
        return content, rope, Plane.of(rows, 1, format.scale.at)

    @cute.jit
    def run(self, warp, feed, tile_of_q, on_full):
        """The role of one of the four warps (``Loader.run``); ``tile_of_q.ahead(i)`` asks for work
        tile ``i``'s Q, to L2."""
        if warp == ANNOUNCER:
            self._announce(feed, on_full, tile_of_q, tile_of_q.ahead)
        else:
            ends = []
            for others in zip(*(self.of_warps[w] for w in (0, Q_WARP, 3)), strict=True):
                a, b, c = map(Int32, others)
                ends.append(cutlass.select_(warp == 0, a, cutlass.select_(warp == Q_WARP, b, c)))
            self._fill(feed, tuple(ends), None)
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _announce(self, feed: Feed, on_full, tile_of_q, ahead):
        """A work tile's Q, whose stage the work tile before frees; then each tile when it has
        landed: ``on_full``, then to its readers behind a proxy fence."""
        lane, tokens = cute.arch.lane_idx(), feed.cache.source
        feed = feed._replace(mark=None)  # no function goes through the loops
        span = self.work.work_tiles_of(feed.work, feed.part)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        qst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.q_stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, _ = self.work.work_tile_at(feed.work, i)
            row, count = self.work.row_of_table(feed.work, feed.call, i, batch)
            state = self.work.walk(row, first, lane)
            tile_of_q(i, batch, qst)
            qst.advance()
            for tile in cutlass.range(first, last, unroll=1):
                state = self.work.walked(
                    state, row, count, tile, lane, tokens, lambda: self._wait_landed(feed.st, kst),
                    lambda named, top: on_full(kst.index, named, top),
                )  # fmt: skip
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(feed.k_pipe.producer_get_barrier(kst))
                kst.advance()
            if i + 1 < span[1]:
                ahead(i + 1)

    def _wait_landed(self, st, kst) -> None:
        """Wait until a tile has landed; behind a proxy fence."""
        self.landed.wait_full(st, kst.index, kst.phase)
        cute.arch.fence_proxy("async.shared", space="cta")

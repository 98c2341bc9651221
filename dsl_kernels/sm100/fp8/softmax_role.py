"""The softmax warpgroup of SM100's decode: S out of tensor memory, P8 to shared memory.

A thread has a share of one row (block_softmax.py).  Where the tokens' scales and V come from, and
what frees them, is the kernel's: a ``Tiles``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from ...combine.online_softmax import NEVER, raise_m_ref
from ...entry.entries import row_facts
from ...load.work_list import WorkList
from .. import umma
from ..rings import part_of_cta
from . import block_softmax as softmax

if TYPE_CHECKING:
    from ...load.fp8_per_token import TokenScales
    from ..rings import Rings


class Tiles(Protocol):
    """Scales and V of the tiles, as the softmax warps meet them; ``state``: a consumer's.

    Attributes:
        stages: of them.
        with_q: whether a work tile's first stage is its Q tile, which has no softmax.
    """

    stages: int
    with_q: bool

    def wait(self, cta: Any, state: Any) -> None:
        """Wait until the scales of the tile are there."""

    def wait_values(self, cta: Any, p_state: Any) -> None:
        """Wait until V is there, so that the arrival at P also announces V; ``p_state``: P's, a
        producer's."""

    def hide(self, st: Any, stage: Any, p_stage: Any, valid: Any) -> None:
        """Clears V of tokens >= ``valid`` or with a NaN scale; ``stage``: of the scales."""

    def release(self, cta: Any, state: Any) -> None:
        """Release the tile for this warp, which has read the scales and will not touch V again; all
        its lanes call this."""


class Softmax:
    """The role.

    Attributes:
        form: of the MMA; its rows are a CTA's.
        rings: ``s``, ``p``, ``inv``.
        work: the work list; its ``tile`` is a block of the softmax.
        tiles: a ``Tiles``.
        sigmas: what the warps make of the scales.
        stages: of ``s`` and of ``p``.
        s: first column of S.
        same_rows: named barrier of warps that share rows, and the next.
        reads_twice: whether a thread reads S for the maximum and again for P.
    """

    reads_twice = False

    def __init__(
        self, form: umma.Form, rings: Rings, work: WorkList, tiles: Tiles, scales: TokenScales, *,
        stages: tuple[int, int], s: int, same_rows: int,
    ):  # fmt: skip
        self.form, self.rings, self.work, self.tiles = form, rings, work, tiles
        self.sigmas = softmax.WarpScales(scales, form, logs=self.reads_twice)
        (self.s_stages, self.p_stages), self.s, self.same_rows = stages, s, same_rows

    def fields(self) -> dict:
        """Storage of what only these warps use."""
        return {**softmax.exchange_fields(), **self.sigmas.fields}

    @cute.jit
    def run(self, cta: Any):
        """Run the role for all work tiles of the CTA; the whole warpgroup calls this."""
        tidx, _, _ = cute.arch.thread_idx()
        gmem, call = cta.gmem, cta.call
        span = self.work.work_tiles_of(gmem.work, part_of_cta())
        row = tidx % self.form.rows
        consumer = pipeline.PipelineUserType.Consumer
        kst = pipeline.make_pipeline_state(consumer, self.tiles.stages)
        sst = pipeline.make_pipeline_state(consumer, self.s_stages)
        pst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.p_stages)
        running = cute.make_rmem_tensor((2,), Float32)  # m_ref, row sum of this thread's tokens
        inv_phase = Int32(1)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, split = self.work.work_tile_at(gmem.work, i)
            rows = self.work.witnessed_rows_at(gmem.work, call, i, batch, self.form.rows)
            factor, limit = row_facts(self.work, gmem, call, batch, rows, row)
            ragged_from = self.work.ragged_from(gmem.work, call, batch, rows)
            seqlen = self.work.seqlen_of(gmem.work, batch)
            running[0], running[1] = Float32(NEVER), Float32(0.0)
            if cutlass.const_expr(self.tiles.with_q):
                # Nothing of the Q tile is wanted, but a stage that was skipped, in a work tile
                # without tiles, may be a phase behind, and the wait for its next tile would not
                # wait.
                self.tiles.wait(cta, kst)
                self.tiles.release(cta, kst)
                kst.advance()
            for tile in cutlass.range(first, last, unroll=1):
                self.tiles.wait(cta, kst)
                facts = (factor, limit, ragged_from, seqlen)
                self.block(cta, tile, kst, sst, pst, facts, running)
                kst.advance()
                sst.advance()
                pst.advance()
            softmax.finish_work_tile(
                self.form, self.rings.inv, self.same_rows, cta, split, rows, inv_phase, running
            )
            inv_phase = inv_phase ^ 1

    @cute.jit
    def block(self, cta: Any, tile, kst, sst, pst, facts, running):
        """One block: S -> P, beta, gamma, and this thread's share of the row sum."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, row = tidx % 32, tidx % self.form.rows
        wwarp = cute.arch.make_warp_uniform(tidx % softmax.WARPGROUP // 32)
        st, tmem = cta.st, cta.tmem
        factor, limit, ragged_from, _ = facts
        tokens = self.sigmas.tokens
        ragged = (tile + 1) * self.work.tile > ragged_from
        self.sigmas.make(st, kst.index, wwarp, lane)
        self.rings.s.wait_full(st, sst.index, sst.phase)
        umma.after_sync()
        s = umma.load(umma.lanes_of(tmem, wwarp) + self.s + sst.index * tokens, tokens)
        umma.wait_loads()
        umma.before_sync()
        cute.arch.sync_warp()  # the scales are there for all, and one lane may free S
        if lane == 0:
            self.rings.s.arrive_empty(st, sst.index)
        t = cute.make_rmem_tensor((tokens,), Float32)
        first_token = tile * self.work.tile + softmax.group_of(self.form, wwarp) * tokens
        softmax.logits(s, t, self.sigmas, st, wwarp, factor, first_token, limit, ragged)
        maxima = softmax.exchange(
            st.maxima, self.form, pst.index, row, wwarp, softmax.maximum(t), self.same_rows
        )
        m = softmax.of_row(maxima)
        part = softmax.weights(t, m, self.sigmas, st, wwarp)
        self.hand_over(cta, tile, kst, pst, facts, running, (m, part, t))

    @cute.jit
    def hand_over(self, cta: Any, tile, kst, pst, facts, running, found):
        """P, beta and gamma of a block to the roles behind, its share of the row sum to
        ``running``; ``found``: the row's maximum, the thread's sum, its P',
        None where P is stored."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, row = tidx % 32, tidx % self.form.rows
        wwarp = cute.arch.make_warp_uniform(tidx % softmax.WARPGROUP // 32)
        st = cta.st
        (m, part, t), (_, _, ragged_from, seqlen) = found, facts
        ragged = (tile + 1) * self.work.tile > ragged_from
        old = running[0]
        running[0], beta, gamma = raise_m_ref(m, old)
        running[1] = running[1] * gamma + part * beta
        self.tiles.wait_values(cta, pst)
        if ragged:
            # whatever lies past the end, or under a NaN scale, must not meet P = 0; S being there
            # means that Q.K has read the rows, and P being there will mean that they are cleared
            self.tiles.hide(st, kst.index, pst.index, seqlen - tile * self.work.tile)
        if cutlass.const_expr(t is not None):
            self.rings.p.wait_empty(st, pst.index, pst.phase)
            self.store_p(st, pst, t)
        if softmax.group_of(self.form, wwarp) == 0:  # every share knows them
            factors = cute.make_layout((self.form.rows, self.p_stages))
            st.beta.get_tensor(factors)[row, pst.index] = beta
            st.gamma.get_tensor(factors)[row, pst.index] = gamma
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.tiles.release(cta, kst)
        if lane == 0:
            self.rings.p.arrive_full(st, pst.index)

    @cute.jit
    def store_p(self, st, pst, t, first=0):
        """P8 of a thread's tokens from ``first`` on, into P's stage."""
        tidx, _, _ = cute.arch.thread_idx()
        wwarp = cute.arch.make_warp_uniform(tidx % softmax.WARPGROUP // 32)
        tile = st.p.data_ptr() + pst.index * (self.form.rows * self.work.tile)
        row = tidx % self.form.rows
        softmax.store_p(t, tile, self.form, row, wwarp, self.sigmas.tokens, first)


class SoftmaxInRuns(Softmax):
    """The role where a thread has more tokens than registers: it reads S twice, a run of 32 tokens
    at a time, for the maximum and for P.  Unrolled runs would overlap, and spill."""

    reads_twice = True

    @cute.jit
    def block(self, cta: Any, tile, kst, sst, pst, facts, running):
        """Process one block as the base class does, reading S twice, run by run."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, row = tidx % 32, tidx % self.form.rows
        wwarp = cute.arch.make_warp_uniform(tidx % softmax.WARPGROUP // 32)
        st = cta.st
        self.sigmas.make(st, kst.index, wwarp, lane)
        self.rings.s.wait_full(st, sst.index, sst.phase)
        umma.after_sync()
        cute.arch.sync_warp()  # the scales are there for all
        t = cute.make_rmem_tensor((softmax.RUN,), Float32)
        top = -Float32.inf
        for r in cutlass.range(self.sigmas.runs, unroll=1):
            self.logits(cta, tile, sst, facts, t, r, stored=True)
            top = cute.arch.fmax(top, softmax.maximum(t))
        maxima = softmax.exchange(st.maxima, self.form, pst.index, row, wwarp, top, self.same_rows)
        m, part = softmax.of_row(maxima), Float32(0.0)
        self.rings.p.wait_empty(st, pst.index, pst.phase)
        for r in cutlass.range(self.sigmas.runs, unroll=1):
            self.logits(cta, tile, sst, facts, t, r)
            part = part + softmax.weights(t, m, self.sigmas, st, wwarp, r)
            self.store_p(st, pst, t, r * softmax.RUN)
        umma.wait_loads()
        umma.before_sync()
        cute.arch.sync_warp()  # one lane frees S for all
        if lane == 0:
            self.rings.s.arrive_empty(st, sst.index)
        self.hand_over(cta, tile, kst, pst, facts, running, (m, part, None))

    @cute.jit
    def logits(self, cta: Any, tile, sst, facts, t, run, stored: cutlass.Constexpr = False):
        """Compute the logits of run ``run`` of a tile into ``t``; ``stored``: as in
        ``block_softmax.logits``."""
        tidx, _, _ = cute.arch.thread_idx()
        wwarp = cute.arch.make_warp_uniform(tidx % softmax.WARPGROUP // 32)
        factor, limit, ragged_from, _ = facts
        tokens = self.sigmas.tokens
        at = umma.lanes_of(cta.tmem, wwarp) + self.s + sst.index * tokens + run * softmax.RUN
        s = umma.load(at, softmax.RUN)
        first = tile * self.work.tile + softmax.group_of(self.form, wwarp) * tokens
        softmax.logits(
            s, t, self.sigmas, cta.st, wwarp, factor, first + run * softmax.RUN, limit,
            (tile + 1) * self.work.tile > ragged_from, run, stored,
        )  # fmt: skip

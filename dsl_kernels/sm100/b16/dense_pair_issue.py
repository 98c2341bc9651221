"""The issuing warps of SM100's 16-bit decode of 128 rows (dense_pair.py), of the pair's leader.

Q.K   36 steps of 16 channels into S: A in tensor memory for 16 of them, in shared memory for 20
P.V   8 steps of 16 tokens for each half of the channels, added to O in tensor memory
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from .. import umma
from .dense_pair_loads import HALF_SQUARES, K_STAGES, RUNS, SQUARE, TILE, TMEM_CHUNKS, V_BYTES
from .dense_pair_parts import P_STAGES, PairParts
from .dense_parts import (
    CHUNK_STEPS,
    CHUNKS,
    HALF,
    HALVES,
    S_STAGES,
    Cta,
    multiply_chunk,
    multiply_values,
    tmem_of,
    work_tiles_of,
)

CONSUMER, PRODUCER = pipeline.PipelineUserType.Consumer, pipeline.PipelineUserType.Producer


class PairIssuers:
    """Loops of the two warps: a warp waits, one lane issues for both CTAs."""

    def __init__(self, parts: PairParts):
        self.parts, self.form, self.loads = parts, parts.form, parts.loads
        self.rings, self.columns = parts.rings, parts.columns

    @cute.jit
    def issue_scores(self, cta: Cta):
        """Q into tensor memory, S of every tile."""
        st, gmem = cta.st, cta.gmem
        span, tmem = work_tiles_of(self.parts, cta), tmem_of(cta)
        squares = umma.k_major(umma.address_of(st.kc.data_ptr()))
        queries = umma.k_major(umma.address_of(st.qc.data_ptr()))
        kst = pipeline.make_pipeline_state(CONSUMER, K_STAGES)
        sst = pipeline.make_pipeline_state(PRODUCER, S_STAGES)
        q_phase = Int32(0)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.parts.work.work_tile_at(gmem.work, i)
            some = Int32(cutlass.select_(first < last, Int32(1), Int32(0)))
            for c in cutlass.range(0, some * TMEM_CHUNKS, unroll=1):
                self.loads.k.wait_full(st, kst.index, kst.phase)
                if umma.elected():
                    self.copy_q(tmem + c * (CHUNK_STEPS * umma.CELLS), squares, kst.index)
                    self.form.commit(self.loads.k.empty_barrier(st, kst.index))
                kst.advance()
            for tile in cutlass.range(first, last, unroll=1):
                self.rings.s.wait_empty(st, sst.index, sst.phase)
                umma.after_sync()
                s = tmem + self.columns.s + sst.index * self.form.share(TILE)
                for c in cutlass.range_constexpr(CHUNKS):
                    if cutlass.const_expr(c == TMEM_CHUNKS):  # noqa: SIM102 (at compile time)
                        if tile == first:
                            self.loads.q.wait_full(st, 0, q_phase)
                    self.loads.k.wait_full(st, kst.index, kst.phase)
                    if umma.elected():
                        self.issue_chunk(s, tmem, squares, queries, kst.index, c)
                        self.form.commit(self.loads.k.empty_barrier(st, kst.index))
                    kst.advance()
                if umma.elected():
                    self.form.commit(self.rings.s.full_barrier(st, sst.index))
                sst.advance()
            if first < last:  # noqa: SIM102 (all lanes of the warp elect)
                if umma.elected():  # shared memory is read until the last chain is done
                    self.form.commit(self.loads.q.empty_barrier(st, 0))
            q_phase = q_phase ^ some

    def copy_q(self, tmem, squares, index):
        """64 channels of Q into tensor memory, 16 bytes of each row at a time.

        Copies come behind the MMAs that read the Q tile before, which this warp issued; work tiles
        without tiles, which no MMA reads, have none.
        """
        square = umma.advance(squares, index * SQUARE)
        for x in range(umma.LINE // 16):
            self.form.copy_rows(tmem + self.columns.q + 4 * x, umma.advance(square, 16 * x))

    def issue_chunk(self, s, tmem, squares, queries, index, c: int):
        """64 channels of S = Q K^T."""
        in_tmem = c < TMEM_CHUNKS
        a = (
            tmem + self.columns.q + c * CHUNK_STEPS * umma.CELLS
            if in_tmem
            else umma.advance(queries, (c - TMEM_CHUNKS) * SQUARE)
        )
        k = umma.advance(squares, index * SQUARE)
        multiply_chunk(self.parts, s, a, k, begins=c == 0, a_in_tmem=in_tmem)

    @cute.jit
    def issue_products(self, cta: Cta):
        """O += P V of every tile: 64 tokens at a time, which are free behind it."""
        st, gmem = cta.st, cta.gmem
        span, tmem = work_tiles_of(self.parts, cta), tmem_of(cta)
        values = umma.mn_major(umma.address_of(st.v.data_ptr()), SQUARE)
        weights = umma.k_major(self.parts.p_address(st, 0))
        pst = pipeline.make_pipeline_state(CONSUMER, P_STAGES)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.parts.work.work_tile_at(gmem.work, i)
            for tile in cutlass.range(first, last, unroll=1):
                # O is relative to P's m_ref, and P and V of both CTAs are there: their correction
                # warps have waited for them
                self.rings.corrected.wait_full(st, pst.index, pst.phase)
                umma.after_sync()
                if umma.elected():
                    for run in cutlass.range_constexpr(RUNS):
                        adds = True if run else tile > first
                        self.issue_run(tmem, weights, values, run, adds)
                        self.form.commit(self.loads.v.empty_barrier(st, run))
                    self.form.commit(self.rings.p.empty_barrier(st, pst.index))
                pst.advance()

    def issue_run(self, tmem, weights, values, run: int, adds):
        """64 tokens of all channels; ``adds``: whether O has a value, which the work tile's first
        tile gives it."""
        p = umma.advance(weights, run * SQUARE)
        for half in range(HALVES):
            o = tmem + self.columns.o + half * self.form.share(HALF)
            v = umma.advance(values, run * V_BYTES + half * (HALF_SQUARES * SQUARE))
            multiply_values(self.parts, o, p, v, adds)

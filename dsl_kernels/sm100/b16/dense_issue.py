"""The issuing warps of SM100's 16-bit decode of 64 rows (dense_ws.py): a warp waits, a lane issues.

Q.K   36 steps of 16 channels into S: A in tensor memory for 24 of them, in shared memory for 12
P.V   4 steps of 16 tokens for each half of the channels, added to O in tensor memory
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline

from ...formats.dims import TOKEN_TILE as TILE
from .. import umma
from .dense_parts import (
    CHUNK_STEPS,
    CHUNKS,
    HALF,
    HALVES,
    RUN,
    S_STAGES,
    Cta,
    multiply_chunk,
    multiply_values,
    tmem_of,
    work_tiles_of,
)
from .dense_ws_parts import BLOCK, Q_IN_TMEM, Q_STAGES, STAGE_BYTES, STAGES, WsParts

TMEM_CHUNKS = Q_IN_TMEM // RUN
CONSUMER, PRODUCER = pipeline.PipelineUserType.Consumer, pipeline.PipelineUserType.Producer


class Issuers:
    """Loops of the two warps."""

    def __init__(self, parts: WsParts):
        self.parts, self.form, self.loads = parts, parts.form, parts.loads
        self.rings, self.columns = parts.rings, parts.columns

    # ---------------------------------------------------------------- Q.K

    @cute.jit
    def issue_scores(self, cta: Cta):
        """Q into tensor memory, S of every tile."""
        st, gmem, q_pipe = cta.st, cta.gmem, cta.tiles.q
        span, tmem = work_tiles_of(self.parts, cta), tmem_of(cta)
        queries = umma.k_major(umma.address_of(st.qc.data_ptr()))
        keys = umma.k_major(umma.address_of(st.kc.data_ptr()))
        qst = pipeline.make_pipeline_state(CONSUMER, Q_STAGES)
        kst = pipeline.make_pipeline_state(CONSUMER, STAGES)
        sst = pipeline.make_pipeline_state(PRODUCER, S_STAGES)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.parts.work.work_tile_at(gmem.work, i)
            q_pipe.consumer_wait(qst)
            # Copies come behind the MMAs that read the Q tile before, which this warp issued;
            # nothing would order them behind copies that no MMA has read.
            if first < last:  # noqa: SIM102 (all lanes of the warp elect)
                if umma.elected():
                    self.copy_q(tmem, queries)
            for _ in cutlass.range(first, last, unroll=1):
                self.rings.s.wait_empty(st, sst.index, sst.phase)
                umma.after_sync()
                s = tmem + self.columns.s + sst.index * self.form.share(TILE)
                k = umma.advance(keys, kst.index * STAGE_BYTES)
                self.issue_chain(cta, s, tmem + self.columns.q, queries, k, kst)
                if umma.elected():
                    self.form.commit(self.rings.s.full_barrier(st, sst.index))
                kst.advance()
                sst.advance()
            if umma.elected():  # of the Q tile, shared memory is read until the last chain is done
                self.form.commit(q_pipe.sync_object_empty.get_barrier(qst.index))
            qst.advance()

    @cute.jit
    def copy_q(self, tmem, queries):
        """The first channels of a Q tile into tensor memory: 16 bytes of each row at a time.

        A loop over the chunks: the descriptors of all copies would be made ahead, and spilled.
        """
        width = CHUNK_STEPS * umma.CELLS  # columns of a chunk
        for c in cutlass.range(0, TMEM_CHUNKS, unroll=1):
            chunk = umma.advance(queries, c * (self.form.rows * umma.LINE))
            for x in cutlass.range_constexpr(umma.LINE // 16):
                column = tmem + self.columns.q + c * width + 4 * x
                self.form.copy_rows(column, umma.advance(chunk, 16 * x))

    @cute.jit
    def issue_chain(self, cta: Cta, s, q, queries, keys, kst):
        """S = Q K^T of one tile, chunk by chunk as they land; ``q``: Q in tensor memory."""
        for c in cutlass.range_constexpr(CHUNKS):
            if cutlass.const_expr(c == 0):
                cta.tiles.k.consumer_wait(kst)
            else:
                self.loads.wait_chunk(cta.st, c, kst.index, kst.phase)
            if umma.elected():
                self.issue_chunk(s, q, queries, keys, c)

    def issue_chunk(self, s, q, queries, keys, c: int):
        """64 channels of a chain, whose first chunks of Q are in tensor memory."""
        in_tmem = c < TMEM_CHUNKS
        a = (
            q + c * CHUNK_STEPS * umma.CELLS
            if in_tmem
            else umma.advance(queries, c * (self.form.rows * umma.LINE))
        )
        k = umma.advance(keys, c * BLOCK)
        multiply_chunk(self.parts, s, a, k, begins=c == 0, a_in_tmem=in_tmem)

    # ---------------------------------------------------------------- P.V

    @cute.jit
    def issue_products(self, cta: Cta):
        """O += P V of every tile, half of the channels at a time."""
        st, gmem = cta.st, cta.gmem
        span, tmem = work_tiles_of(self.parts, cta), tmem_of(cta)
        values = umma.mn_major(umma.address_of(st.kc.data_ptr()), BLOCK)
        weights = umma.k_major(self.parts.p_address(st, 0))
        kst = pipeline.make_pipeline_state(CONSUMER, STAGES)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.parts.work.work_tile_at(gmem.work, i)
            for tile in cutlass.range(first, last, unroll=1):
                # O is relative to P's m_ref, and P is there: the correction warps have
                # waited for it
                self.rings.corrected.wait_full(st, kst.index, kst.phase)
                umma.after_sync()
                if umma.elected():
                    at = kst.index * STAGE_BYTES
                    p, v = umma.advance(weights, at), umma.advance(values, at)
                    self.issue_half(tmem, p, v, 0, tile > first)
                    self.form.commit(self.loads.freed.full_barrier(st, kst.index))
                    self.issue_half(tmem, p, v, 1, tile > first)
                    self.form.commit(self.parts.o.full_barrier(st, kst.index))
                    self.form.commit(cta.tiles.k.sync_object_empty.get_barrier(kst.index))
                kst.advance()

    def issue_half(self, tmem, p, v, half: int, adds):
        """256 channels; ``adds``: whether O has a value, which the work tile's first tile gives
        it."""
        o = tmem + self.columns.o + half * self.form.share(HALF)
        v = umma.advance(v, half * ((CHUNKS - 1) // HALVES) * BLOCK)
        multiply_values(self.parts, o, p, v, adds)

"""The issuing warps of SM100's 16-bit decode (dense_ws.py): a warp waits, one lane issues.

Q.K   36 steps of 16 channels into S: A in tensor memory for 24 of them, in shared memory for 12
P.V   4 steps of 16 tokens for each half of the channels, added to O in tensor memory
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline

from ..common.types import BF16
from ..dims import HEAD_DIM_QK
from ..dims import TOKEN_TILE as TILE
from . import umma
from .dense_parts import (
    BLOCK,
    CHUNKS,
    HALF,
    HALVES,
    Q_IN_TMEM,
    Q_STAGES,
    S_STAGES,
    STAGE_BYTES,
    STAGES,
    STEP,
    Cta,
    Parts,
    p_address,
)

SIXTEEN = BF16  # MMAs of either 16-bit type are of one kind: the descriptor says which it is
CHUNK_STEPS = HEAD_DIM_QK // STEP // CHUNKS
TMEM_CHUNKS = Q_IN_TMEM // STEP // CHUNK_STEPS
CONSUMER, PRODUCER = pipeline.PipelineUserType.Consumer, pipeline.PipelineUserType.Producer


class Issuers:
    """Loops of the two warps."""

    def __init__(self, parts: Parts):
        self.parts, self.form, self.loads = parts, parts.form, parts.loads
        self.rings, self.columns = parts.rings, parts.columns

    # ---------------------------------------------------------------- Q.K

    @cute.jit
    def issue_scores(self, cta: Cta):
        """Q into tensor memory, S of every tile."""
        st, q_pipe, _, gmem, _ = cta
        span, tmem = self.parts.items(cta), self.parts.tmem(cta)
        queries = umma.k_major(umma.address_of(st.qc.data_ptr()))
        keys = umma.k_major(umma.address_of(st.kc.data_ptr()))
        qst = pipeline.make_pipeline_state(CONSUMER, Q_STAGES)
        kst = pipeline.make_pipeline_state(CONSUMER, STAGES)
        sst = pipeline.make_pipeline_state(PRODUCER, S_STAGES)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.parts.work.item_at(gmem.work, i)
            q_pipe.consumer_wait(qst)
            # Copies come behind the MMAs that read the Q tile before, which this warp issued;
            # nothing would order them behind copies that no MMA has read.
            if first < last:  # noqa: SIM102 (all lanes of the warp elect)
                if umma.elected():
                    self.copy_q(tmem, queries)
            for _ in cutlass.range(first, last, unroll=1):
                self.rings.s.wait_empty(st, sst.index, sst.phase)
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
        st = cta.st
        for c in cutlass.range_constexpr(CHUNKS):
            if cutlass.const_expr(c == 0):
                cta.k_pipe.consumer_wait(kst)
            else:
                self.loads.wait_chunk(st, c, kst.index, kst.phase)
            umma.after_sync()
            if umma.elected():
                self.issue_chunk(s, q, queries, keys, c)

    def issue_chunk(self, s, q, queries, keys, c: int):
        """64 channels of a chain, of which the first chunk begins a new sum."""
        for x in range(c * CHUNK_STEPS, (c + 1) * CHUNK_STEPS):
            in_tmem = c < TMEM_CHUNKS
            a = (
                q + x * umma.CELLS
                if in_tmem
                else umma.advance(queries, umma.k_step(x, self.form.rows))
            )
            self.form.mma(
                SIXTEEN, s, a, umma.advance(keys, umma.k_step(x, TILE)),
                self.form.instruction(self.parts.dtype, TILE), x > 0, a_in_tmem=in_tmem,
            )  # fmt: skip

    # ---------------------------------------------------------------- P.V

    @cute.jit
    def issue_products(self, cta: Cta):
        """O += P V of every tile, half of the channels at a time."""
        st, _, k_pipe, gmem, _ = cta
        span, tmem = self.parts.items(cta), self.parts.tmem(cta)
        values = umma.mn_major(umma.address_of(st.kc.data_ptr()), BLOCK)
        weights = umma.k_major(p_address(st))
        kst = pipeline.make_pipeline_state(CONSUMER, STAGES)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.parts.work.item_at(gmem.work, i)
            for tile in cutlass.range(first, last, unroll=1):
                # O is in the frame of P, and P is there: the correction warps have waited for it
                self.rings.corrected.wait_full(st, kst.index, kst.phase)
                umma.after_sync()
                if umma.elected():
                    at = kst.index * STAGE_BYTES
                    p, v = umma.advance(weights, at), umma.advance(values, at)
                    self.issue_half(tmem, p, v, 0, tile > first)
                    self.form.commit(self.loads.freed.full_barrier(st, kst.index))
                    self.issue_half(tmem, p, v, 1, tile > first)
                    self.form.commit(self.rings.o.full_barrier(st, kst.index))
                    self.form.commit(k_pipe.sync_object_empty.get_barrier(kst.index))
                kst.advance()

    def issue_half(self, tmem, p, v, half: int, adds):
        """256 channels; ``adds``: whether O has a value, which the item's first tile gives it."""
        o = tmem + self.columns.o + half * self.form.share(HALF)
        for k in range(TILE // STEP):
            self.form.mma(
                SIXTEEN, o, umma.advance(p, k * umma.K_BYTES),
                umma.advance(v, half * (CHUNKS // HALVES) * BLOCK + k * STEP * umma.LINE),
                self.form.instruction(self.parts.dtype, HALF, b_transposed=True),
                True if k else adds,
            )  # fmt: skip

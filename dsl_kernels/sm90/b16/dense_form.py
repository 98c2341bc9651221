"""The two math roles of 16-bit decode, as loops over work tiles and tiles; a form says what a tile
is.

    rows on M    b16/dense_rows_on_m.py   64 rows a CTA: S = Q K^T, O = P V
    tokens on M  b16/dense_swap_ab.py    32 rows or fewer: S^T = K Q^T, O^T = V^T P^T

Hand-over of a block, in the tile's stage of the ring: P over the tile's RoPE columns, factor gamma
of its rows, and whether an m_ref moved.  Hand-over of a work tile: 1 / row sums, and where its
rows go (work_tile_notes.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from ...blocks.smem import array, staged, struct_of
from ...combine.online_softmax import NEVER
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.stamp import Stamp
from ..fragments import padded_size
from ..roles import INV_RING, SOFTMAX_WARPS, WARPGROUP, Barrier, Cta, Layouts
from ..work_tile_notes import note, note_fields, noted
from .dense_parts import Parts

if TYPE_CHECKING:
    from ..fragments import RowsOnM, TokensOnM

HALF = D // 2  # channels of a P.V warpgroup


class Form:
    """Loops of the softmax and of the P.V warpgroups.

    Attributes:
        registers: of producers, softmax and P.V, each thread.
        parts: what the form is composed of.
        fragment: which rows and tokens a thread of softmax holds.
        rows_cta: query rows of the CTA.
    """

    registers: tuple[int, int, int]
    inv_ring = INV_RING

    def __init__(self, parts: Parts, fragment: RowsOnM | TokensOnM):
        self.parts, self.fragment, self.rows_cta = parts, fragment, parts.rows

    # ---------------------------------------------------------------- what a form adds

    def layouts(self) -> Layouts:
        """Shared-memory layouts."""
        raise NotImplementedError

    def fields(self) -> dict:
        """Storage of its own."""
        return {}

    def score_operands(self, st, layouts) -> Any:
        """Make the operands of Q.K and of the hand-over of P, once for all work tiles."""
        raise NotImplementedError

    def take_q(self, st, operands) -> None:
        """Hook, called when a work tile's row tile of Q is there."""

    def block(self, cta, tile, operands, stages, blocks, rows_in, rows_out) -> None:
        """S -> P of one block, handed over; ``stages`` of Q and of the ring, and its phase."""
        raise NotImplementedError

    def finish_rows(self, cta, inv_phase, m_ref, l_run, split, rows) -> None:
        """Row sums of a work tile -> 1/l for the P.V warps, LSE to memory."""
        raise NotImplementedError

    def pv_operands(self, st, layouts, half) -> Any:
        """Descriptors of P.V's operands, made once."""
        raise NotImplementedError

    def accumulators(self) -> list[Any]:
        """O of a P.V warpgroup's half of the channels."""
        raise NotImplementedError

    def pv_block(self, st, acc_O, operands, stage) -> None:
        """O = gamma O + P V of one tile."""
        raise NotImplementedError

    def write_rows(self, st, results, acc_O, split, rows, half) -> None:
        """Normalised O -> rows, the row sums being there."""
        raise NotImplementedError

    # ---------------------------------------------------------------- shared memory, barriers

    def storage(self, layouts: Layouts):
        padded, stages = padded_size(self.rows_cta), self.parts.stages
        return struct_of(
            **self.parts.q_tiles.fields,
            **self.parts.loads.fields,
            **self.parts.p_ring.field,
            **INV_RING.field,
            flag=array(Int32, SOFTMAX_WARPS * stages, 16),  # did an m_ref of warp w's rows move?
            gamma=array(Float32, padded * stages, 16),
            inv=array(Float32, padded, 16),  # 1 / row sum
            **note_fields(),
            **self.fields(),
            **self.parts.tile_fields(layouts),
        )

    @cute.jit
    def init_barriers(self, st):
        self.parts.p_ring.init(st)
        INV_RING.init(st)

    def half_read(self, st, stage):
        """The first half of a P.V warpgroup's WGMMAs has been waited for."""
        if self.parts.loads.early.chunks:
            cute.arch.sync_warp()  # one lane tells for all
            self.parts.loads.free_early(st, stage, cute.arch.lane_idx() == 0)

    def p_tiles(self, st, layouts):
        """P (rows, 64 tokens, stage), over the tiles' RoPE columns."""
        pointer = cute.recast_ptr(self.parts.rope(st), layouts.p.inner, dtype=self.parts.dtype)
        return cute.make_tensor(pointer, layouts.p.outer)

    def v_tiles(self, st, make):
        """V (512, 64 tokens, stage) as the operand that ``make`` of hopper_helpers is for."""
        return staged(st.kc, self.parts.v_layout(make))

    def flags(self, st):
        """(softmax warp, stage)"""
        return st.flag.get_tensor(cute.make_layout((SOFTMAX_WARPS, self.parts.stages)))

    # ---------------------------------------------------------------- loops

    @cute.jit
    def softmax_loop(self, cta: Cta):
        """Work tiles and tiles of the softmax warpgroup."""
        tidx, _, _ = cute.arch.thread_idx()
        wwarp, gmem = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32), cta.gmem
        operands, n = self.score_operands(cta.st, cta.layouts), self.fragment.rows
        m_ref, l_run, factor = (cute.make_rmem_tensor((n,), Float32) for _ in range(3))
        limit = cute.make_rmem_tensor((n,), Int32)
        consumer = pipeline.PipelineUserType.Consumer
        qst = pipeline.make_pipeline_state(consumer, self.parts.q_stages)
        kst = pipeline.make_pipeline_state(consumer, self.parts.stages)
        blocks, work_tiles = Int32(0), Int32(0)  # behind us
        span = self.parts.work.work_tiles_of(gmem.work, cta.part)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, split = self.parts.work.work_tile_at(gmem.work, i)
            rows = self.parts.work.witnessed_rows_at(gmem.work, cta.call, i, batch, self.rows_cta)
            for x in cutlass.range_constexpr(n):
                row = self.fragment.row_at(wwarp, tidx % 32, x)
                factor[x], limit[x] = self.parts.row_facts(cta, batch, rows, row)
            ragged_from = cute.arch.make_warp_uniform(
                self.parts.work.ragged_from(gmem.work, cta.call, batch, rows)
            )
            note(cta.st, work_tiles, wwarp, split, rows)
            m_ref.fill(NEVER)
            l_run.fill(0.0)
            cta.q_pipe.consumer_wait(qst)
            self.take_q(cta.st, operands)
            rows_in = (factor, limit, ragged_from)
            for tile in cutlass.range(first, last, unroll=1):
                cta.k_pipe.consumer_wait(kst)
                self.parts.stamps.put(gmem.results, Stamp.FIRST_TILE, kst.count == 0)
                stages = (qst.index, kst.index, kst.phase)
                self.block(cta, tile, operands, stages, blocks, rows_in, (m_ref, l_run))
                cta.k_pipe.consumer_release(kst)
                kst.advance()
                blocks += 1
            cta.q_pipe.consumer_release(qst)
            qst.advance()
            self.parts.stamps.put(gmem.results, Stamp.SOFTMAX_END)
            self.finish_rows(cta, (work_tiles & 1) ^ 1, m_ref, l_run, split, rows)
            work_tiles += 1

    @cute.jit
    def pv_loop(self, cta: Cta, half):
        """Work tiles and tiles of a P.V warpgroup."""
        tidx, _, _ = cute.arch.thread_idx()
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        st, layouts, _, k_pipe, gmem, call, part = cta
        span = self.parts.work.work_tiles_of(gmem.work, part)
        operands, acc_O = self.pv_operands(st, layouts, half), self.accumulators()
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.parts.stages)
        work_tiles = Int32(0)  # behind us
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, _ = self.parts.work.work_tile_at(gmem.work, i)
            rows = self.parts.work.rows_at(gmem.work, call, i, batch, self.rows_cta)
            seqlen = self.parts.work.seqlen_of(gmem.work, batch)
            ragged_from = self.parts.work.ragged_from(gmem.work, call, batch, rows)
            for x in cutlass.range_constexpr(len(acc_O)):
                acc_O[x].fill(0.0)
            for tile in cutlass.range(first, last, unroll=1):
                # P being there means that all of K is, and that Q.K has read it
                self.parts.p_ring.wait_full(st, kst.index, kst.phase)
                if (tile + 1) * TILE > ragged_from:
                    at = tile * TILE
                    self.parts.values.clear(
                        st, kst.index, ragged_from - at, seqlen - at, 4 * half, 4,
                        Barrier.PV + half,
                    )  # fmt: skip
                self.pv_block(st, acc_O, operands, kst.index)
                cute.arch.sync_warp()  # one lane frees the stage for all: their reads come first
                k_pipe.consumer_release(kst)
                kst.advance()
            self.parts.stamps.put(gmem.results, Stamp.PRODUCTS_END, half == 0)
            INV_RING.wait_full(st, 0, work_tiles & 1)
            split, rows = noted(st, work_tiles, wwarp, self.rows_cta)
            self.write_rows(st, gmem.results, acc_O, split, rows, half)
            self.parts.stamps.put(gmem.results, Stamp.ROWS_WRITTEN + half)
            work_tiles += 1

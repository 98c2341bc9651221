"""The softmax warpgroup of ``etap``: what its two forms share, and what it hands to P.V.

    rows on M    fp8/rows_on_m.py   64 rows: S = Q K^T, the next block's Q.K under this softmax
    tokens on M  fp8/swap_ab.py    32 rows or fewer: S^T = K Q^T

Hand-over of a block, in one of ``P_STAGES`` buffers: P8 (each term of P, p_terms.py), factors beta
and gamma of its rows, and a byte a warp that says whether an m_ref moved.  Hand-over of a work
tile: 1 / row sums, and where its rows go (work_tile_notes.py; few rows have registers for that).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, const_expr

from ...blocks.barriers import Ring
from ...blocks.smem import array, staged
from ...combine.online_softmax import NEVER
from ...entry.entries import row_facts
from ...formats.stamp import Stamp
from ..fragments import padded_size
from ..roles import INV_RING, PV_WARPS, SOFTMAX_WARPS, WARPGROUP, Cta
from ..wgmma import u16_view
from ..work_tile_notes import note, note_fields, noted
from .fp8_parts import Parts

if TYPE_CHECKING:
    from ..fragments import RowsOnM, TokensOnM

P_STAGES = 2
P_RING = Ring("p", P_STAGES, {"softmax": SOFTMAX_WARPS}, {"P.V": PV_WARPS})


def hand_over_fields(rows: int) -> dict:
    """Storage of everything but P itself, which lies among the swizzled tiles."""
    padded = padded_size(rows)
    return dict(
        **P_RING.field,
        **INV_RING.field,
        flag=array(cutlass.Uint8, SOFTMAX_WARPS * P_STAGES, 16),  # did an m_ref of w's rows move?
        beta=array(cutlass.Float32, padded * P_STAGES, 128),
        gamma=array(cutlass.Float32, padded * P_STAGES, 128),
        inv=array(cutlass.Float32, padded, 128),  # 1 / row sum
        **note_fields(),
    )


class SoftmaxRole:
    """The loop over work tiles; a form adds the loop over tiles and the end of a work tile.

    Attributes:
        parts: what the pipeline is composed of.
        fragment: which rows and tokens a thread holds.
        rows_cta: query rows of the CTA.
        terms: of P.
    """

    def __init__(self, parts: Parts, fragment: RowsOnM | TokensOnM):
        self.parts, self.fragment, self.rows_cta = parts, fragment, parts.rows
        self.terms = parts.p_terms

    @staticmethod
    def fields(rows: int) -> dict:
        """Storage of a form's own."""
        return {}

    @cute.jit
    def loop(self, cta: Cta):
        """The role, from the first work tile to the last."""
        tidx, _, _ = cute.arch.thread_idx()
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        n_rows = const_expr(self.fragment.rows)
        row_of, gmem = self.thread_rows(), cta.gmem
        m_ref = cute.make_rmem_tensor((n_rows,), Float32)
        l_run = cute.make_rmem_tensor((n_rows,), Float32)
        factor = cute.make_rmem_tensor((n_rows,), Float32)
        limit = cute.make_rmem_tensor((n_rows,), Int32)
        tools = self.tools(cta.st, cta.layouts)

        consumer = pipeline.PipelineUserType.Consumer
        qst = pipeline.make_pipeline_state(consumer, self.parts.q_stages)
        kst = pipeline.make_pipeline_state(consumer, self.parts.stages)
        blocks, work_tiles = Int32(0), Int32(0)  # behind us
        span = self.parts.work.work_tiles_of(gmem.work, cta.part)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, split = self.parts.work.work_tile_at(gmem.work, i)
            rows = self.parts.work.witnessed_rows_at(gmem.work, cta.call, i, batch, self.rows_cta)
            for x in cutlass.range_constexpr(n_rows):
                factor[x], limit[x] = row_facts(
                    self.parts.work, gmem, cta.call, batch, rows, row_of[x]
                )
            if const_expr(not self.parts.swap_ab):
                note(cta.st, work_tiles, wwarp, split, rows)
            m_ref.fill(NEVER)
            l_run.fill(0.0)
            ragged_from = cute.arch.make_warp_uniform(
                self.parts.work.ragged_from(gmem.work, cta.call, batch, rows)
            )
            rows_in = (factor, limit, ragged_from)
            self.wait_q(cta, qst)
            kst, blocks = self.tiles(
                cta, tools, (first, last), (qst, kst, blocks), rows_in, (m_ref, l_run)
            )
            cta.q_pipe.consumer_release(qst)
            qst.advance()
            self.parts.stamps.put(gmem.results, Stamp.SOFTMAX_END)
            if const_expr(not self.parts.swap_ab):  # across the tiles they would take registers
                split, rows = noted(cta.st, work_tiles, wwarp, self.rows_cta)
            self.finish_rows(cta, (work_tiles & 1) ^ 1, m_ref, l_run, split, rows)
            work_tiles += 1

    def wait_q(self, cta, qst) -> None:
        """Wait until the work tile's row tile of Q is there."""
        cta.q_pipe.consumer_wait(qst)

    def tools(self, st, layouts) -> Any:
        """Make the accumulators, descriptors and addresses that the form needs, once for all
        work tiles."""
        raise NotImplementedError

    def tiles(self, cta, tools, span, states, rows_in, rows_out) -> None:
        """Tiles ``span`` of a work tile: ``states`` of Q, K and P advance, ``rows_out`` is
        updated."""
        raise NotImplementedError

    def finish_rows(self, cta, inv_phase, m_ref, l_run, split, rows) -> None:
        """Row sums of a work tile -> 1/l for the P.V warps, LSE to memory."""
        raise NotImplementedError

    def thread_rows(self):
        """Rows of the tile that this thread's S (or S^T) fragment holds."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, wwarp = tidx % 32, tidx % WARPGROUP // 32
        return [self.fragment.row_at(wwarp, lane, x) for x in range(self.fragment.rows)]

    def p_words(self, st, layouts):
        """16-bit view of P (rows, 32, stage)."""
        return u16_view(staged(st.p, layouts.p), layouts.p.inner)


def flags_of(st):
    """A byte for each softmax warp and buffer: did an m_ref of its rows move?"""
    return st.flag.get_tensor(cute.make_layout((SOFTMAX_WARPS, P_STAGES)))


def any_flag(st, buf):
    """The bytes of all warps, as one word."""
    words = cute.recast_ptr(st.flag.data_ptr().align(4), dtype=Int32)
    return cute.make_tensor(words, cute.make_layout(P_STAGES))[buf]

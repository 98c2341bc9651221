"""Maxima and sums of query rows when tokens lie on M (S^T = K Q^T): over lanes and over warps.

A row runs along M, over the lanes of a quad position and over the four warps of the softmax
warpgroup: shuffles, then shared memory and one barrier.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from ..blocks.barriers import warps_meet
from ..blocks.smem import array
from ..combine.epilogue import finish_row
from ..combine.online_softmax import NEVER
from .fragments import padded_size, row_position

WARPGROUP = 128
SOFTMAX_WARPS = 4
BARRIER = 1  # named barrier of the softmax warpgroup


class AcrossWarps:
    """Mixin of a form with tokens on M: maxima and sums of its rows.

    Attributes:
        rows_cta: query rows of the CTA.
        inv_ring: barriers of the rows' 1 / sums.
        log2_in: of ``finish_row``.
    """

    rows_cta: int
    inv_ring: Any
    log2_in: Any = None

    @staticmethod
    def exchange_fields(rows: int) -> dict:
        """Storage of the exchange between warps."""
        return dict(
            across=array(Float32, 2 * SOFTMAX_WARPS * rows, 128),  # maxima, sums of the warps
            m_refs=array(Float32, rows, 128),
        )

    @cute.jit
    def maxima(self, st, t, buf, wwarp, lane):
        """Row maxima over all 64 tokens, in every thread that holds the row.

        Over the 8 lanes that share a quad position by shuffles, over the four warps through shared
        memory (two buffers, so one barrier a block is enough).
        """
        rows, quad, n_rows = self.rows_cta, lane % 4, const_expr(self.rows_cta // 4)
        across = st.across.get_tensor(  # ((e, j, quad), warp, buffer)
            cute.make_layout((2, rows // 8, 4, 4, 2), stride=(1, 8, 2, rows, 4 * rows))
        )
        m = [None] * n_rows
        for x in cutlass.range_constexpr(n_rows):
            v = 4 * (x // 2) + x % 2
            m[x] = cute.arch.fmax(t[v], t[v + 2])
            for off in cutlass.range_constexpr(3):
                m[x] = cute.arch.fmax(m[x], cute.arch.shuffle_sync_bfly(m[x], 4 << off))
        if lane < 4:
            for j in cutlass.range_constexpr(n_rows // 2):
                pair = cute.make_rmem_tensor((2,), Float32)
                pair[0], pair[1] = m[2 * j], m[2 * j + 1]
                cute.autovec_copy(pair, across[None, j, quad, wwarp, buf])
        warps_meet(BARRIER, SOFTMAX_WARPS)
        for j in cutlass.range_constexpr(n_rows // 2):
            top = [Float32(NEVER), Float32(NEVER)]
            for w in cutlass.range_constexpr(4):
                pair = cute.make_rmem_tensor((2,), Float32)
                cute.autovec_copy(across[None, j, quad, w, buf], pair)
                for e in cutlass.range_constexpr(2):
                    top[e] = cute.arch.fmax(top[e], pair[e])
            m[2 * j], m[2 * j + 1] = top[0], top[1]
        return m

    @cute.jit
    def finish_rows(self, cta, inv_phase, m_ref, l_run, split, rows):
        """Row sums of a work tile -> 1/l for the P.V warps, LSE to memory: over the lanes by
        shuffles, over the warps as the maxima."""
        tidx, _, _ = cute.arch.thread_idx()
        st, ctid, lane = cta.st, tidx % WARPGROUP, tidx % 32
        wwarp = cute.arch.make_warp_uniform(ctid // 32)
        inv_s = st.inv.get_tensor(cute.make_layout(padded_size(self.rows_cta)))
        self.inv_ring.wait_empty(st, 0, inv_phase)
        sums = st.across.get_tensor(cute.make_layout((self.rows_cta, 8)))
        m_refs = st.m_refs.get_tensor(cute.make_layout(self.rows_cta))
        # both buffers of ``across`` may still be read by a slower warp
        warps_meet(BARRIER, SOFTMAX_WARPS)
        for x in cutlass.range_constexpr(self.rows_cta // 4):
            total = l_run[x]
            for off in cutlass.range_constexpr(3):
                total = total + cute.arch.shuffle_sync_bfly(total, 4 << off)
            if lane < 4:
                row = 8 * (x // 2) + 2 * lane + x % 2
                sums[row, wwarp] = total
                if wwarp == 0:
                    m_refs[row] = m_ref[x]
        warps_meet(BARRIER, SOFTMAX_WARPS)
        if ctid < self.rows_cta:
            total = (sums[ctid, 0] + sums[ctid, 1]) + (sums[ctid, 2] + sums[ctid, 3])
            inv_s[row_position(ctid, self.rows_cta)] = finish_row(
                cta.gmem.results, cta.call, split, rows, ctid, total, m_refs[ctid], self.log2_in
            )
        # the next work tile's first block writes ``across`` again
        warps_meet(BARRIER, SOFTMAX_WARPS)
        cute.arch.sync_warp()
        if lane == 0:
            self.inv_ring.arrive_full(st, 0)

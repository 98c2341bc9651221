"""Softmax of ``etap`` with 32 query rows or fewer: tokens lie on M, S^T = K Q^T.

A row's maximum runs along M, over the lanes of a quad position and over the four warps: shared
memory and one barrier a block.  A thread has two tokens only and makes their log2 and reciprocal
itself, so there is no scale warp.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warp, warpgroup

from ...blocks.smem import staged
from ...blocks.types import U16
from ...combine.online_softmax import P_LOG2_MAX, raise_m_ref
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.stamp import Stamp
from ...load.fp8_per_token import safe_reciprocal
from ..across_warps import AcrossWarps
from ..fragments import TokensOnM, mask, pad_layout, padded_size
from ..p_terms import quantised, stage_of
from ..roles import INV_RING, WARPGROUP
from .fp8_parts import Parts
from .softmax_role import P_RING, SoftmaxRole, flags_of


class SwapAbSoftmax(AcrossWarps, SoftmaxRole):
    """The form with tokens on M."""

    inv_ring = INV_RING
    fields = staticmethod(AcrossWarps.exchange_fields)

    def __init__(self, parts: Parts):
        super().__init__(parts, TokensOnM(parts.rows))

    def tools(self, st, layouts):
        """S^T accumulator, descriptors of Q.K's operands, 16-bit view of P."""
        tidx, _, _ = cute.arch.thread_idx()
        mma_c, mma_r = self.parts.score.mmas()
        q = (staged(st.qc, layouts.q[0]), staged(st.qr, layouts.q[1]))
        k = (staged(st.kc, layouts.k[0]), staged(st.kr, layouts.k[1]))
        thr_c, thr_r = (m.get_slice(tidx % WARPGROUP) for m in (mma_c, mma_r))
        frags = (
            mma_c.make_fragment_A(thr_c.partition_A(k[0])),
            mma_c.make_fragment_B(thr_c.partition_B(q[0])),
            mma_r.make_fragment_A(thr_r.partition_A(k[1])),
            mma_r.make_fragment_B(thr_r.partition_B(q[1])),
        )
        return self.parts.score.accumulators(), frags, self.p_words(st, layouts)

    @cute.jit
    def tiles(self, cta, tools, span, states, rows_in, rows_out):
        acc_S, frags, p16 = tools
        qst, kst, blocks = states
        for tile in cutlass.range(span[0], span[1], unroll=1):
            cta.k_pipe.consumer_wait(kst)
            self.parts.stamps.put(cta.gmem.results, Stamp.FIRST_TILE, kst.count == 0)
            self.parts.score.issue(acc_S, frags, qst.index, kst.index)
            self.block(cta, tile, acc_S, p16, kst, blocks, rows_in, rows_out)
            kst.advance()
            blocks += 1
        return kst, blocks

    @cute.jit
    def block(self, cta, tile, acc_S, p16, kst, blocks, rows_in, rows_out):
        """Softmax of one block: a thread holds 2 tokens x rows/4 rows."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        n_rows, row, token = self.fragment.rows, self.fragment.row, self.fragment.token
        buf = blocks & 1
        st, (factor, limit, ragged_from), (m_ref, l_run) = cta.st, rows_in, rows_out
        sig, lg, inv = self.scales_of(st, kst.index, wwarp, lane)
        warpgroup.wait_group(0)
        cute.arch.sync_warp()  # one lane frees the stage for all: their reads come first
        cta.k_pipe.consumer_release(kst)
        t = cute.make_rmem_tensor((2 * n_rows,), Float32)
        for v in cutlass.range_constexpr(2 * n_rows):
            i = token(v)
            t[v] = (acc_S[0][v] + acc_S[1][v]) * (factor[row(v)] * sig[i]) + lg[i]
        if (tile + 1) * TILE > ragged_from:
            mask(t, self.fragment, tile * TILE, limit, wwarp, lane)
        m = self.maxima(st, t, buf, wwarp, lane)
        beta = cute.make_rmem_tensor((n_rows,), Float32)
        gamma = cute.make_rmem_tensor((n_rows,), Float32)
        moved = False
        for x in cutlass.range_constexpr(n_rows):
            v = 4 * (x // 2) + x % 2
            base = P_LOG2_MAX - m[x]
            t[v] = cute.math.exp2(t[v] + base, fastmath=True)
            t[v + 2] = cute.math.exp2(t[v + 2] + base, fastmath=True)
            part = t[v] * inv[0] + t[v + 2] * inv[1]
            old = m_ref[x]
            m_ref[x], beta[x], gamma[x] = raise_m_ref(m[x], old)
            l_run[x] = l_run[x] * gamma[x] + part * beta[x]
            moved = moved or m_ref[x] > old
        P_RING.wait_empty(st, buf, (blocks >> 1 & 1) ^ 1)
        self.store_p(t, p16, buf, wwarp, lane)
        if (wwarp == 0) & (lane < 4):
            pad = pad_layout(self.rows_cta)
            at = buf * padded_size(self.rows_cta)
            for values, array_s in ((beta, st.beta), (gamma, st.gamma)):
                cute.autovec_copy(
                    values, cute.make_tensor(array_s.data_ptr() + at, pad)[None, lane % 4]
                )
        any_moved = cute.arch.vote_any_sync(moved)
        if lane == 0:
            flags_of(st)[wwarp, buf] = cutlass.Uint8(1) if any_moved else cutlass.Uint8(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            P_RING.arrive_full(st, buf)

    def scales_of(self, st, stage, wwarp, lane):
        """(sigma, log2 sigma, 1/sigma) of the thread's two tokens."""
        s_ks = self.parts.scales.of_stages(st)
        sigma = [s_ks[wwarp * 16 + lane // 4 + 8 * i, stage] for i in range(2)]
        logs = [cute.math.log2(s, fastmath=True) for s in sigma]
        return sigma, logs, [safe_reciprocal(s) for s in sigma]

    def store_p(self, t, p16, buf, wwarp, lane):
        """P8, each term, into shared memory as [row][token], tokens renamed as TOKENS_ON_M.

        A thread's pair (token g, token g + 8) is one 16-bit unit of row 2c + e: stmatrix.trans.
        """
        n_mat = self.rows_cta // 8
        view = cute.make_tensor(t.iterator, cute.make_layout((2, 2, n_mat), stride=(2, 1, 4)))
        ordered = cute.make_rmem_tensor((2, 2, n_mat), Float32)
        ordered.store(view.load())
        stsm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, n_mat), U16)
        row = lane % self.rows_cta  # matrix lane // 8, row lane % 8
        for term, p8 in enumerate(quantised(ordered, self.terms)):
            stage = stage_of(buf, term, self.terms)
            dst = cute.local_tile(p16[None, None, stage], (1, 8), (row, wwarp))
            # stmatrix takes 2 n_mat values a lane; the address is what matters
            line = cute.make_tensor(dst[0, None].iterator, cute.make_layout(2 * n_mat))
            cute.copy(stsm, cute.recast_tensor(p8, U16), line)

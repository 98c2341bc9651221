"""``split`` with 32 query rows or fewer a CTA: S^T = K Q^T with tokens on M, O^T = V^T P^T.

FlashMLA-ETAP's transposition: N is the number of query rows, so that few rows do not pay for 64.
K is operand A out of shared memory, K-major for Q.K and, its first 512 channels, MN-major for P.V,
which 16-bit types may be: nothing is transposed and V needs no registers.  P^T is stored as
[row][token] by stmatrix.trans.

Timeline of tile i
    KV producer   |TMA i+1 ...
    softmax       | wait K i by 64 channels, Q.K i | max over warps, exp2 | P i -> | wait K i+1
    P.V           | wait P i | rescale O if an m_ref moved | 4 x 4 WGMMAs 64 x rows x 16 | free K i

Registers: softmax 120, P.V 160 (O^T 32 or 64), producers 40.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ...blocks import compat
from ...blocks.smem import staged
from ...blocks.types import ROW_MAJOR, U32
from ...combine.epilogue import Held, Shared, write_rows
from ...formats.dims import HEAD_DIM_QK
from ...formats.dims import TOKEN_TILE as TILE
from ..across_warps import AcrossWarps
from ..block_softmax import store_words_of_p
from ..fragments import TokensOnM, mask, pad_layout, padded_size
from ..online_softmax import raise_m_ref
from ..roles import INV_RING, SOFTMAX_WARPS, WARPGROUP, Layouts
from ..wgmma import issue, tiled_mma
from .dense_form import HALF, Form
from .dense_parts import CHUNK_STEPS, CHUNKS, Parts, k_layout

D_BLOCKS = HALF // 64  # of 64 channels, a P.V warpgroup


class SwapAb(AcrossWarps, Form):
    """The form with rows on N."""

    registers = (40, 120, 160)

    def __init__(self, parts: Parts):
        super().__init__(parts, TokensOnM(parts.rows))

    def layouts(self) -> Layouts:
        make, shape = sm90.make_smem_layout_b, (TILE, self.rows_cta)
        q = make(ROW_MAJOR, (*shape, HEAD_DIM_QK), self.parts.dtype, self.parts.q_stages)
        p = make(ROW_MAJOR, (*shape, TILE), self.parts.dtype, 1)
        k = k_layout(sm90.make_smem_layout_a, self.parts)
        return Layouts((q,), (k,), self.parts.of_stages(p))

    def fields(self) -> dict:
        return self.exchange_fields(self.rows_cta)

    def score_mma(self):
        return tiled_mma(self.parts.dtype, self.rows_cta)

    def pv_mma(self):
        return tiled_mma(self.parts.dtype, self.rows_cta, a_mn=True)

    # ---------------------------------------------------------------- softmax warpgroup

    def score_operands(self, st, layouts):
        """(K in the ring, Q)."""
        tidx, _, _ = cute.arch.thread_idx()
        mma_s = self.score_mma()
        thr_s = mma_s.get_slice(tidx % WARPGROUP)
        return (
            mma_s.make_fragment_A(thr_s.partition_A(staged(st.kc, layouts.k[0]))),
            mma_s.make_fragment_B(thr_s.partition_B(staged(st.qc, layouts.q[0]))),
        )

    @cute.jit
    def block(self, cta, tile, operands, stages, blocks, rows_in, rows_out):
        """S^T -> P^T of one block: a thread holds 2 tokens x rows / 4 rows."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, n_rows, row = tidx % 32, self.fragment.rows, self.fragment.row
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        st, (factor, limit, ragged_from), (m_ref, l_run) = cta.st, rows_in, rows_out
        (sK, sQ), (q_stage, stage, phase), mma_s = operands, stages, self.score_mma()
        acc_S = cute.make_rmem_tensor(mma_s.partition_shape_C((TILE, self.rows_cta)), Float32)
        compat.wgmma_fence()
        for turn in cutlass.range_constexpr(CHUNKS):
            if cutlass.const_expr(turn > 0):
                self.parts.loads.wait_chunk(st, turn, stage, phase)
            first = self.parts.loads.order[turn] * CHUNK_STEPS
            issue(
                mma_s, acc_S, sK[None, None, None, stage], sQ[None, None, None, q_stage],
                accumulate=turn > 0, first=first, last=first + CHUNK_STEPS,
            )  # fmt: skip
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        t = cute.make_rmem_tensor((self.fragment.values,), Float32)
        for v in cutlass.range_constexpr(self.fragment.values):
            t[v] = acc_S[v] * factor[row(v)]
        if (tile + 1) * TILE > ragged_from:
            mask(t, self.fragment, tile * TILE, limit, wwarp, lane)
        # behind the barrier in it all warps have read the RoPE columns, where P goes
        m = self.maxima(st, t, blocks & 1, wwarp, lane)
        gamma = cute.make_rmem_tensor((n_rows,), Float32)
        moved = False
        for x in cutlass.range_constexpr(n_rows):
            v = 4 * (x // 2) + x % 2
            old = m_ref[x]
            m_ref[x], gamma[x] = raise_m_ref(m[x], old)
            t[v] = cute.math.exp2(t[v] - m_ref[x], fastmath=True)
            t[v + 2] = cute.math.exp2(t[v + 2] - m_ref[x], fastmath=True)
            l_run[x] = l_run[x] * gamma[x] + (t[v] + t[v + 2])
            moved = moved or m_ref[x] > old
        self.store_p(st, t, stage, wwarp, lane)
        if (wwarp == 0) & (lane < 4):  # all warps have the same m_refs
            at = stage * padded_size(self.rows_cta)
            gamma_s = cute.make_tensor(st.gamma.data_ptr() + at, pad_layout(self.rows_cta))
            for x in cutlass.range_constexpr(n_rows):
                gamma_s[x, lane] = gamma[x]
        flag = cutlass.select_(cute.arch.vote_any_sync(moved), Int32(1), Int32(0))
        at = 4 * (stage * SOFTMAX_WARPS + wwarp)
        compat.store_shared(st.flag.data_ptr().toint() + at, flag, "u32")
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.parts.p_ring.arrive_full_if(st, stage, lane == 0)

    def store_p(self, st, t, stage, wwarp, lane):
        """P^T into shared memory as [row][token]: matrix (j, i) of stmatrix.trans is the rows from
        8 j on, the warp's tokens from 8 i on."""
        p16 = cute.make_rmem_tensor((self.fragment.values,), self.parts.dtype)
        p16.store(t.load().to(self.parts.dtype))
        words = cute.recast_tensor(p16, U32)
        base = self.parts.rope(st).toint() + stage * (TILE * HEAD_DIM_QK * 2)
        row, chunk = lane // 16 * 8 + lane % 8, 2 * wwarp + lane // 8 % 2
        line = row * 128 + (chunk ^ (row % 8)) * 16
        for x in range(self.rows_cta // 16):
            four = [words[4 * x + i] for i in range(4)]
            store_words_of_p(four, base + (line + x * 2048), transposed=True)

    # ---------------------------------------------------------------- P.V warpgroups

    def pv_operands(self, st, layouts, half):
        """(V^T of each 64 of the half's channels, P^T)."""
        tidx, _, _ = cute.arch.thread_idx()
        mma_o = self.pv_mma()
        thr_o, s_v = mma_o.get_slice(tidx % WARPGROUP), self.v_tiles(st, sm90.make_smem_layout_a)
        parts = [
            cute.local_tile(s_v, (64, TILE), (D_BLOCKS * half + d, 0, None))
            for d in range(D_BLOCKS)
        ]
        return (
            [mma_o.make_fragment_A(thr_o.partition_A(v)) for v in parts],
            mma_o.make_fragment_B(thr_o.partition_B(self.p_tiles(st, layouts))),
        )

    def accumulators(self):
        shape = self.pv_mma().partition_shape_C((64, self.rows_cta))
        return [cute.make_rmem_tensor(shape, Float32) for _ in range(D_BLOCKS)]

    @cute.jit
    def pv_block(self, st, acc_O, operands, stage):
        """O^T = gamma O^T + V^T P^T of one tile."""
        tidx, _, _ = cute.arch.thread_idx()
        sV, sP = operands
        if cute.arch.make_warp_uniform(self.flags(st)[0, stage]) != 0:
            at = stage * padded_size(self.rows_cta)
            gamma_s = cute.make_tensor(st.gamma.data_ptr() + at, pad_layout(self.rows_cta))
            for v in cutlass.range_constexpr(self.rows_cta // 2):
                factor = gamma_s[2 * (v // 4) + v % 2, tidx % 4]
                for acc in acc_O:
                    acc[v] = acc[v] * factor
        compat.wgmma_fence()
        for d in cutlass.range_constexpr(D_BLOCKS):
            now = sV[d][None, None, None, stage]
            issue(self.pv_mma(), acc_O[d], now, sP[None, None, None, stage], accumulate=True)
            if cutlass.const_expr(2 * d + 2 == D_BLOCKS):
                warpgroup.commit_group()
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        self.half_read(st, stage)
        warpgroup.wait_group(0)

    @cute.jit
    def write_rows(self, st, results, acc_O, split, rows, half):
        """Normalised O^T fragment -> rows: a thread has channels g and g + 8 of a row, and after an
        exchange with its neighbour of the next g two adjacent ones."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv_s = cute.make_tensor(st.inv.data_ptr(), pad_layout(self.rows_cta))
        g = lane // 4
        odd = g % 2 == 1
        channel = half * HALF + wwarp * 16 + g + (g % 2) * 7
        # the warp's four groups of 16 channels share an exponent; four lanes of a row write it
        own_group = half * HALF + 64 * g + wwarp * 16
        shared = Shared((4, 8, 16), own_group, 1, lane < 16)
        held = []
        for x in cutlass.range_constexpr(self.fragment.rows):
            v = 4 * (x // 2) + x % 2
            inverse = inv_s[x, lane % 4]
            runs = {}
            for d in cutlass.range_constexpr(D_BLOCKS):
                low, high = acc_O[d][v] * inverse, acc_O[d][v + 2] * inverse
                got = cute.arch.shuffle_sync_bfly(cutlass.select_(odd, low, high), 4)
                pair = cute.make_rmem_tensor((2,), Float32)
                pair[0], pair[1] = cutlass.select_(odd, got, low), cutlass.select_(odd, high, got)
                runs[64 * d] = pair
            held.append(Held(8 * (x // 2) + x % 2, runs))
        write_rows(results, split, rows, (2 * (lane % 4), channel), held, shared)
        cute.arch.sync_warp()
        if lane == 0:
            INV_RING.arrive_empty(st, 0)

"""``split`` with 64 query rows a CTA: rows on M, S = Q K^T, O = P V.

Q is in shared memory, and two thirds of it in registers as well, 96 of each thread of the softmax
warpgroup: there they cost the shared-memory port nothing, which Q.K with both operands in shared
memory would keep busy longer than the tensor core.

Timeline of tile i
    KV producer   |TMA i+1 ...
    softmax       | wait K i by 64 channels, Q.K i | max, exp2, 16 bits of i | P i -> | wait K i+1
    P.V           | wait P i | rescale O if an m_ref moved | 4 WGMMAs 64 x 128 x 16, free half of K
                  i | 4 WGMMAs on the other half, free K i

Rows of a thread are the same in S and in O, so that warp w of a P.V warpgroup needs the factors
and the flag of softmax warp w alone.

Registers: softmax 160 (Q 96, S and P' 32), P.V 160 (O 128), producers 32: 512 of 512.  ptxas
leaves 24 below a warpgroup's first accumulator and takes no 128 of them with fewer than 154, so
that all of Q (144) does not fit; nor does m64n256, whose accumulators alone are what the launch
grants a thread (docs/lab-book.md).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from ...blocks import compat
from ...blocks.barriers import warps_meet
from ...blocks.smem import staged
from ...blocks.types import ROW_MAJOR, U16, U32
from ...combine.epilogue import Held, Shared, Woven, finish_row, write_rows
from ...formats.dims import HEAD_DIM_QK
from ...formats.dims import TOKEN_TILE as TILE
from ..block_softmax import ROWS_ON_M, maxima, store_words_of_p
from ..fragments import mask
from ..online_softmax import raise_m_ref
from ..roles import INV_RING, ROWS_OF_CTA, SOFTMAX_WARPS, WARPGROUP, Barrier, Layouts
from ..wgmma import issue, tiled_mma
from .dense_form import HALF, Form
from .dense_parts import CHUNK_STEPS, CHUNKS, Parts, k_layout

# N of its WGMMAs: ptxas takes no instruction of more registers than the launch grants a thread,
# 128, and m64n256 has as many accumulators alone
PV_N = 128
REGISTER_STEPS = 24  # of Q.K's 36 whose Q operand is in registers
LINE_BLOCK = TILE * 128  # bytes of 64 channels of a tile: 64 swizzled lines


class RowsOnM(Form):
    """The form with rows on M."""

    registers = (32, 160, 160)

    def __init__(self, parts: Parts):
        super().__init__(parts, ROWS_ON_M)

    def layouts(self) -> Layouts:
        k = k_layout(sm90.make_smem_layout_b, self.parts)
        make, shape = sm90.make_smem_layout_a, (ROWS_OF_CTA, TILE)
        q = make(ROW_MAJOR, (*shape, HEAD_DIM_QK), self.parts.dtype, self.parts.q_stages)
        p = make(ROW_MAJOR, (*shape, TILE), self.parts.dtype, 1)
        return Layouts((q,), (k,), self.parts.of_stages(p))

    def score_mmas(self):
        """Q from registers, from shared memory."""
        return tiled_mma(self.parts.dtype, TILE, a_in_registers=True), tiled_mma(
            self.parts.dtype, TILE
        )

    def pv_mma(self):
        return tiled_mma(self.parts.dtype, PV_N, b_mn=True)

    # ---------------------------------------------------------------- softmax warpgroup

    def lane_line(self, wwarp, lane):
        """Byte offset, inside a block of 64 lines of 128 bytes, of what this lane names to ldmatrix
        and stmatrix: row lane % 16 of its warp, 16-byte chunk lane // 16.  XOR 32 x: chunk 2 x +
        lane // 16."""
        row = wwarp * 16 + lane % 16
        return row * 128 + ((lane // 16) ^ (row % 8)) * 16

    @cute.jit
    def take_q(self, st, operands):
        """The Q tile -> A fragments of the first steps."""
        rQ, _, _, line = operands
        ldsm = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), U16)
        words = cute.recast_tensor(rQ, U32)
        base = st.qc.data_ptr().toint()
        for x in cutlass.range_constexpr(REGISTER_STEPS):
            at = base + ((line ^ (x % 4 * 32)) + x // 4 * LINE_BLOCK)
            source = cute.make_ptr(U16, at, cute.AddressSpace.smem, assumed_align=16)
            loaded = cute.make_rmem_tensor((8,), U16)
            cute.copy(ldsm, cute.make_tensor(source, cute.make_layout(8)), loaded)
            four = cute.recast_tensor(loaded, U32)
            for i in cutlass.range_constexpr(4):
                words[4 * x + i] = four[i]

    def score_operands(self, st, layouts):
        """(Q's first steps in registers, all of Q in shared memory, K in the ring, lane's line)."""
        tidx, _, _ = cute.arch.thread_idx()
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        mma_r, mma_s = self.score_mmas()
        thr_s = mma_s.get_slice(tidx % WARPGROUP)
        return (
            mma_r.make_fragment_A(mma_r.partition_shape_A((ROWS_OF_CTA, 16 * REGISTER_STEPS))),
            mma_s.make_fragment_A(thr_s.partition_A(staged(st.qc, layouts.q[0]))),
            mma_s.make_fragment_B(thr_s.partition_B(staged(st.kc, layouts.k[0]))),
            self.lane_line(wwarp, tidx % 32),
        )

    @cute.jit
    def block(self, cta, tile, operands, stages, blocks, rows_in, rows_out):
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        st, (factor, limit, ragged_from), (m_ref, l_run) = cta.st, rows_in, rows_out
        (rQ, sQ, sK, line), (mma_r, mma_s) = operands, self.score_mmas()
        q_stage, stage, phase = stages
        acc_S = cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS_OF_CTA, TILE)), Float32)
        sQ_now, sK_now = sQ[None, None, None, q_stage], sK[None, None, None, stage]
        compat.wgmma_fence()
        for turn in cutlass.range_constexpr(CHUNKS):
            if cutlass.const_expr(turn > 0):
                self.parts.loads.wait_chunk(st, turn, stage, phase)
            first = self.parts.loads.order[turn] * CHUNK_STEPS
            last = first + CHUNK_STEPS
            in_registers = last <= REGISTER_STEPS
            mma, of_q = (mma_r, rQ) if in_registers else (mma_s, sQ_now)
            issue(mma, acc_S, of_q, sK_now, accumulate=turn > 0, first=first, last=last)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        t = cute.make_rmem_tensor((ROWS_ON_M.values,), Float32)
        for v in cutlass.range_constexpr(ROWS_ON_M.values):
            t[v] = acc_S[v] * factor[ROWS_ON_M.row(v)]
        if (tile + 1) * TILE > ragged_from:
            mask(t, ROWS_ON_M, tile * TILE, limit, 0, tidx)
        m = maxima(t)
        gamma, moved = [None] * 2, False
        for i in cutlass.range_constexpr(2):
            old = m_ref[i]
            m_ref[i], gamma[i] = raise_m_ref(m[i], old)
            moved = moved or m_ref[i] > old
        part = [Float32(0.0) for _ in range(4)]
        for v in cutlass.range_constexpr(ROWS_ON_M.values):
            row = ROWS_ON_M.row(v)
            t[v] = cute.math.exp2(t[v] - m_ref[row], fastmath=True)
            part[2 * row + v % 2] = part[2 * row + v % 2] + t[v]
        p16 = cute.make_rmem_tensor((ROWS_ON_M.values,), self.parts.dtype)
        p16.store(t.load().to(self.parts.dtype))
        words = cute.recast_tensor(p16, U32)
        any_moved = cute.arch.vote_any_sync(moved)
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)  # all have read the RoPE columns
        p_at = self.parts.rope(st).toint() + stage * (TILE * HEAD_DIM_QK * 2)
        for x in cutlass.range_constexpr(4):
            store_words_of_p([words[4 * x + i] for i in range(4)], p_at + (line ^ (32 * x)))
        for i in cutlass.range_constexpr(2):
            l_run[i] = l_run[i] * gamma[i] + (part[2 * i] + part[2 * i + 1])
            # the four lanes of a quad store the same: cheaper than a branch
            at = 4 * (stage * ROWS_OF_CTA + ROWS_ON_M.row_at(wwarp, lane, i))
            compat.store_shared(st.gamma.data_ptr().toint() + at, gamma[i])
        flag = cutlass.select_(any_moved, Int32(1), Int32(0))
        at = 4 * (stage * SOFTMAX_WARPS + wwarp)
        compat.store_shared(st.flag.data_ptr().toint() + at, flag, "u32")
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.parts.p_ring.arrive_full_if(st, stage, lane == 0)

    @cute.jit
    def finish_rows(self, cta, inv_phase, m_ref, l_run, split, rows):
        tidx, _, _ = cute.arch.thread_idx()
        st, lane = cta.st, tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv_s = st.inv.get_tensor(cute.make_layout(ROWS_OF_CTA))
        INV_RING.wait_empty(st, 0, inv_phase)
        for i in cutlass.range_constexpr(2):
            total = l_run[i]
            for off in cutlass.range_constexpr(2):
                total = total + cute.arch.shuffle_sync_bfly(total, 1 << off)
            if lane % 4 == 0:
                row = ROWS_ON_M.row_at(wwarp, lane, i)
                inv_s[row] = finish_row(
                    cta.gmem.results, cta.call, split, rows, row, total, m_ref[i]
                )
        cute.arch.sync_warp()
        if lane == 0:
            INV_RING.arrive_full(st, 0)

    # ---------------------------------------------------------------- P.V warpgroups

    def pv_operands(self, st, layouts, half):
        """(P, V of each ``PV_N`` of the half's channels)."""
        tidx, _, _ = cute.arch.thread_idx()
        mma_o = self.pv_mma()
        thr_o, s_v = mma_o.get_slice(tidx % WARPGROUP), self.v_tiles(st, sm90.make_smem_layout_b)
        parts = [
            cute.local_tile(s_v, (PV_N, TILE), (HALF // PV_N * half + x, 0, None))
            for x in range(HALF // PV_N)
        ]
        return (
            mma_o.make_fragment_A(thr_o.partition_A(self.p_tiles(st, layouts))),
            [mma_o.make_fragment_B(thr_o.partition_B(v)) for v in parts],
        )

    def accumulators(self):
        shape = self.pv_mma().partition_shape_C((ROWS_OF_CTA, PV_N))
        return [cute.make_rmem_tensor(shape, Float32) for _ in range(HALF // PV_N)]

    @cute.jit
    def pv_block(self, st, acc_O, operands, stage):
        tidx, _, _ = cute.arch.thread_idx()
        lane, wwarp = tidx % 32, cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        if cute.arch.make_warp_uniform(self.flags(st)[wwarp, stage]) != 0:
            gamma_s = st.gamma.get_tensor(cute.make_layout((ROWS_OF_CTA, self.parts.stages)))
            gamma = [gamma_s[ROWS_ON_M.row_at(wwarp, lane, x), stage] for x in range(2)]
            for acc in acc_O:
                for v in cutlass.range_constexpr(PV_N // 2):
                    acc[v] = acc[v] * gamma[v // 2 % 2]
        compat.wgmma_fence()
        rP, rV = operands
        for acc, v in zip(acc_O, rV):
            rV_now = v[None, None, None, stage]
            issue(self.pv_mma(), acc, rP[None, None, None, stage], rV_now, accumulate=True)
            warpgroup.commit_group()
        warpgroup.wait_group(1)
        self.half_read(st, stage)
        warpgroup.wait_group(0)

    @cute.jit
    def write_rows(self, st, results, acc_O, split, rows, half):
        tidx, _, _ = cute.arch.thread_idx()
        lane, quad = tidx % 32, tidx % 4
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv_s = st.inv.get_tensor(cute.make_layout(ROWS_OF_CTA))
        row = ROWS_ON_M.row_at(wwarp, lane, 0)
        # a quad has the warpgroup's 256 channels of a row: one exponent, a quarter a lane
        shared = Shared((1, 2), half * HALF + 64 * quad, 4)
        at, woven = (row, half * HALF), Woven((1, 2), quad, 8)
        for i in cutlass.range_constexpr(2):
            inverse = inv_s[row + 8 * i]
            runs = {}
            for j in cutlass.range_constexpr(HALF // 8):
                acc, v = acc_O[8 * j // PV_N], 4 * (j % (PV_N // 8)) + 2 * i
                # in place: another 64 registers there are not
                acc[v], acc[v + 1] = acc[v] * inverse, acc[v + 1] * inverse
                runs[8 * j] = cute.make_tensor(acc.iterator + v, cute.make_layout(2))
            write_rows(results, split, rows, at, [Held(8 * i, runs)], shared, woven)
        cute.arch.sync_warp()
        if lane == 0:
            INV_RING.arrive_empty(st, 0)

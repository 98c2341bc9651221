"""FP8 MLA decode for SM90, pipeline ``etap``: O^T = V^T P^T with V^T as the *register* operand.

Idea: FlashMLA-ETAP's transposition, so that N is the number of query rows and few rows do not pay
for 64; numerics of SnapMLA (per-token scales, block-wise P), with fp32 promotion of every token
tile (docs/numerics.md).  V^T never goes back to shared memory: ldmatrix.trans + prmt turn the K
tile into A fragments (transpose.py).

Roles (4 warpgroups of 128 threads)
    wg 0  warp 0  KV producer     TMA: content, RoPE, scales of a 64-token tile into a free stage
          warp 1  Q producer      TMA: the row tile of each item
          warp 2  scale warp      sigma_k -> sigma, log2 sigma, 1/sigma in fragment order
                                  (64 rows only; with few rows a thread has just two tokens)
    wg 1          softmax         S = Q K^T (S^T = K Q^T for <= 32 rows), block softmax, P8 -> smem
    wg 2, 3       P.V             O^T += beta * (V^T P8^T), half of d_v each, beta in fp32

Timeline of tile i (one stage of the K ring)
    KV producer   |TMA i+3 ...
    scale warp    |  sigma i+1 |
    softmax       | Q.K i | max, exp2, e4m3 | Q.K i+1 | ...
    P.V           |  V^T frags i | wait P i | 4 x (WGMMA 64 channels, FFMA into O) | V^T frags i+1

Frames (log2 units).  A block has its own exponent frame m'_b = max_t(s2 + log2 sigma_k), so its
largest P' is 2^8 whatever the row's running maximum is.  O and l live in frame ``m_ref``, which is
*lazy*: it moves only when a block would exceed it by 2^20, so the usual step is one FFMA an
element, O += beta * tmp with beta = 2^(m'_b - 8 - m_ref), and no rescale; nothing overflows
however block maxima rise and fall.

Registers, 64 rows: softmax 104 (S in two partial sums of 32), P.V 192 (O 128, beta 16, product tile
16: rows are taken in halves of 32, because a tile of 64 would not fit beside S in two).

Shared memory, 64 rows and 4 stages (bytes)
    Q 40960 | K ring 4 x (32768 content + 8192 RoPE + 256 scales) | scale triples 4 x 960
    P 2 x 4096 | beta, gamma, flags, 1/l, maxima, barriers                        = 222208
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from ..common import budget as bud
from ..common.barriers import Ring, warps_meet
from ..common.epilogue import Shared, finish_row, write_runs
from ..common.fp8_per_token import safe_reciprocal
from ..common.frames import NEVER, P_LOG2_MAX, move_frame
from ..common.smem import array, staged, struct_of
from ..common.types import F8, ROW_MAJOR, U16
from ..dims import KV_LORA_RANK as D
from ..dims import QK_ROPE_HEAD_DIM as R
from ..dims import TOKEN_TILE as TILE
from ..smxx.fp8_entry import fake_args, row_facts
from ..stamp import Stamp
from . import transpose
from .block_softmax import block_p, store_p
from .fp8_decode import (
    SMALL_BYTES,
    STAGE_BYTES,
    WARPGROUP,
    Cta,
    Fp8Decode,
    Parts,
    barriers,
    infeasible,
)
from .fragments import RowsOnM, TokensOnM, mask, pad_layout, padded_size, row_position
from .qk import QK_GROUPS
from .wgmma import issue, tiled_mma, u16_view

if TYPE_CHECKING:
    from ..spec import VariantSpec

STAGES = 4  # of the K ring, unless the spec says otherwise
P_STAGES = 2
SOFTMAX_WARPS, PV_WARPS = 4, 8
P_RING = Ring("p", P_STAGES, {"softmax": SOFTMAX_WARPS}, {"P.V": PV_WARPS})
INV_RING = Ring("inv", 1, {"softmax": SOFTMAX_WARPS}, {"P.V": PV_WARPS})  # 1 / row sums of an item


class Barrier(IntEnum):
    """Named barriers; each P.V warpgroup has one of its own, ``PV`` and the next."""

    SOFTMAX = 1
    PV = 2


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return infeasible(spec, 2, budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    few, rows, stages = spec.row_tile <= 32, min(spec.row_tile, 64), spec.stages or STAGES
    # setmaxnreg hands out one pool of 65536 registers: 128, 128 and 256 threads
    producer, softmax, pv = (40, 120, 160) if few else (24, 104, 192)
    tiles = stages * STAGE_BYTES + q_stages(spec) * rows * 640 + P_STAGES * rows * TILE
    m, n = (TILE, rows) if few else (rows, TILE)  # S^T = K Q^T or S = Q K^T
    readers = {"softmax": SOFTMAX_WARPS}, {"softmax": SOFTMAX_WARPS, "P.V": PV_WARPS}
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", producer),
            bud.WarpGroup("softmax", softmax),
            bud.WarpGroup("P.V", pv, count=2),
        ),
        smem=tiles + (SMALL_BYTES // 2 if few else SMALL_BYTES),  # no scale triples
        barriers=(
            *barriers(spec, q_stages(spec), readers[0], stages, readers[1]),
            *P_RING.budget(),
            *INV_RING.budget(),
        ),
        mmas=(
            bud.Mma("Q.K content", m, n, D // QK_GROUPS, "e4m3"),
            bud.Mma("Q.K RoPE", m, n, R, "bf16"),
            bud.Mma("P.V", 64, min(rows, 32), TILE, "e4m3"),
        ),
    )


def q_stages(spec: VariantSpec) -> int:
    """Row tiles of Q in flight: the next item's is prefetched where there is room."""
    return 2 if spec.row_tile <= 32 and (spec.stages or STAGES) <= STAGES else 1


def build(spec: VariantSpec):
    return Fp8Decode(spec, Etap(spec)), fake_args(spec)


class Etap:
    """The pipeline: softmax and P.V roles (``fp8_decode.Pipeline``)."""

    threads = 512

    def __init__(self, spec: VariantSpec):
        self.few_rows = spec.row_tile <= 32  # S^T = K Q^T
        self.parts = Parts(
            spec, stages=spec.stages or STAGES, q_stages=q_stages(spec), q_warps=SOFTMAX_WARPS,
            k_warps=SOFTMAX_WARPS + PV_WARPS, few_rows=self.few_rows,
            scale_warp=not self.few_rows,
        )  # fmt: skip
        self.rows_cta, self.stages = self.parts.rows, self.parts.stages
        # rows of one P.V product tile: halves of 64, because O takes 128 registers and S is in two
        self.pv_rows = min(self.rows_cta, 32)
        self.names = transpose.TOKENS_ON_M if self.few_rows else transpose.ROWS_ON_M
        self.fragment = TokensOnM(self.rows_cta) if self.few_rows else RowsOnM()
        regs = (group.registers for group in budget(spec).groups)
        self.producer_regs, self.softmax_regs, self.pv_regs = regs

    # ---------------------------------------------------------------- host half

    def p_layout(self):
        return sm90.make_smem_layout_b(ROW_MAJOR, (64, self.rows_cta, TILE), F8, P_STAGES)

    def pv_mma(self):
        return tiled_mma(F8, self.pv_rows, a_in_registers=True)

    def storage(self, layouts):
        rows, padded = self.rows_cta, padded_size(self.rows_cta)
        return struct_of(
            **self.parts.barrier_fields,
            **P_RING.field,
            **INV_RING.field,
            flag=array(Int32, 4 * P_STAGES, 16),  # did a frame of warp w's rows move?
            beta=array(Float32, padded * P_STAGES, 128),
            gamma=array(Float32, padded * P_STAGES, 128),
            inv=array(Float32, padded, 128),  # 1 / row sum
            across=array(Float32, 2 * 4 * rows, 128),  # few rows: maxima, sums of the warps
            frame=array(Float32, rows, 128),
            **self.parts.tile_fields(layouts),
        )

    # ---------------------------------------------------------------- roles

    @cute.jit
    def init_barriers(self, st):
        P_RING.init(st)
        self.parts.triples.ready.init(st)
        INV_RING.init(st)

    @cute.jit
    def math_roles(self, cta, wg):
        if wg == 0:
            cute.arch.setmaxregister_decrease(self.softmax_regs)
            self.softmax_loop(cta)
        else:
            cute.arch.setmaxregister_increase(self.pv_regs)
            self.pv_loop(cta, wg - 1)

    # ---------------------------------------------------------------- softmax warpgroup

    @cute.jit
    def softmax_loop(self, cta: Cta):
        row_block, _, _ = cute.arch.block_idx()
        st, layouts, q_pipe, k_pipe, gmem, call, span = cta
        acc_S, frags, p16 = self.softmax_fragments(st, layouts)
        first_row, n_rows = row_block * self.rows_cta, const_expr(self.fragment.rows)
        row_of = self.thread_rows()
        m_ref = cute.make_rmem_tensor((n_rows,), Float32)
        l_run = cute.make_rmem_tensor((n_rows,), Float32)
        factor = cute.make_rmem_tensor((n_rows,), Float32)
        limit = cute.make_rmem_tensor((n_rows,), Int32)

        qst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.parts.q_stages)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        pst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, P_STAGES)
        inv_phase = Int32(1)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, slot = self.parts.work.item_at(gmem.work, i)
            for x in cutlass.range_constexpr(n_rows):
                factor[x], limit[x] = row_facts(
                    self.parts.work, gmem, call, batch, first_row + row_of[x]
                )
            m_ref.fill(NEVER)
            l_run.fill(0.0)
            ragged_from = self.parts.work.ragged_from(gmem.work, call, batch)
            rows_in = (factor, limit, ragged_from)
            q_pipe.consumer_wait(qst)
            for tile in cutlass.range(first, last, unroll=1):
                k_pipe.consumer_wait(kst)
                self.parts.stamps.put(gmem.results, Stamp.FIRST_TILE, kst.count == 0)
                self.parts.score.issue(acc_S, frags, qst.index, kst.index)
                block = self.block_few_rows if const_expr(self.few_rows) else self.block_many_rows
                block(st, k_pipe, tile, acc_S, p16, kst, pst, rows_in, m_ref, l_run)
                kst.advance()
                pst.advance()
            q_pipe.consumer_release(qst)
            qst.advance()
            self.parts.stamps.put(gmem.results, Stamp.SOFTMAX_END)
            self.finish_rows(st, gmem.results, call, inv_phase, m_ref, l_run, batch, slot)
            inv_phase = inv_phase ^ 1

    def thread_rows(self):
        """Rows of the tile that this thread's S (or S^T) fragment holds."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, wwarp = tidx % 32, tidx % WARPGROUP // 32
        return [self.fragment.row_at(wwarp, lane, x) for x in range(self.fragment.rows)]

    def softmax_fragments(self, st, layouts):
        """S accumulator, descriptors of Q.K's operands, 16-bit view of P (rows, 32, stage)."""
        tidx, _, _ = cute.arch.thread_idx()
        mma_c, mma_r = self.parts.score.mmas()
        q = (staged(st.qc, layouts.q[0]), staged(st.qr, layouts.q[1]))
        k = (staged(st.kc, layouts.k[0]), staged(st.kr, layouts.k[1]))
        a, b = (k, q) if self.few_rows else (q, k)
        thr_c, thr_r = (m.get_slice(tidx % WARPGROUP) for m in (mma_c, mma_r))
        frags = (
            mma_c.make_fragment_A(thr_c.partition_A(a[0])),
            mma_c.make_fragment_B(thr_c.partition_B(b[0])),
            mma_r.make_fragment_A(thr_r.partition_A(a[1])),
            mma_r.make_fragment_B(thr_r.partition_B(b[1])),
        )
        p16 = u16_view(staged(st.p, layouts.p), layouts.p.inner)
        return self.parts.score.accumulators(), frags, p16

    @cute.jit
    def block_many_rows(self, st, k_pipe, tile, acc_S, p16, kst, pst, rows_in, m_ref, l_run):
        """Softmax of one block, S = Q K^T: a thread holds 2 rows x 16 tokens."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        sigma = self.parts.triples.view(st, lane % 4, kst.index)
        self.parts.triples.ready.wait_full(st, kst.index, kst.phase)
        t = cute.make_rmem_tensor((32,), Float32)
        m0, m1, l0, l1 = block_p(acc_S, t, sigma, tile, *rows_in)
        cute.arch.sync_warp()  # one lane frees the stage for all: their reads come first
        k_pipe.consumer_release(kst)
        m, part = [m0, m1], [l0, l1]
        beta, gamma, moved = [None] * 2, [None] * 2, False
        for i in cutlass.range_constexpr(2):
            old = m_ref[i]
            m_ref[i], beta[i], gamma[i] = move_frame(m[i], old)
            l_run[i] = l_run[i] * gamma[i] + part[i] * beta[i]
            moved = moved or m_ref[i] > old
        any_moved = cute.arch.vote_any_sync(moved)

        P_RING.wait_empty(st, pst.index, pst.phase)
        store_p(t, p16[None, None, pst.index], wwarp, lane)
        if lane % 4 == 0:
            beta_s = st.beta.get_tensor(cute.make_layout((padded_size(64), P_STAGES)))
            gamma_s = st.gamma.get_tensor(cute.make_layout((padded_size(64), P_STAGES)))
            for i in cutlass.range_constexpr(2):
                pos = row_position(wwarp * 16 + lane // 4 + 8 * i, 64)
                beta_s[pos, pst.index] = beta[i]
                gamma_s[pos, pst.index] = gamma[i]
        self.hand_over(st, pst.index, any_moved, wwarp, lane)

    @cute.jit
    def hand_over(self, st, buf, any_moved, wwarp, lane):
        """P, beta, gamma of a block are written: tell the P.V warps."""
        if lane == 0:
            flag_s = st.flag.get_tensor(cute.make_layout((4, P_STAGES)))
            flag_s[wwarp, buf] = Int32(1) if any_moved else Int32(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            P_RING.arrive_full(st, buf)

    @cute.jit
    def block_few_rows(self, st, k_pipe, tile, acc_S, p16, kst, pst, rows_in, m_ref, l_run):
        """Softmax of one block, S^T = K Q^T: a thread holds 2 tokens x rows/4 rows."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        n_rows, row, token = self.fragment.rows, self.fragment.row, self.fragment.token
        factor, limit, ragged_from = rows_in
        sig, lg, inv = self.scales_few(st, kst.index, wwarp, lane)
        warpgroup.wait_group(0)
        cute.arch.sync_warp()  # one lane frees the stage for all: their reads come first
        k_pipe.consumer_release(kst)
        t = cute.make_rmem_tensor((2 * n_rows,), Float32)
        for v in cutlass.range_constexpr(2 * n_rows):
            i = token(v)
            t[v] = (acc_S[0][v] + acc_S[1][v]) * (factor[row(v)] * sig[i]) + lg[i]
        if (tile + 1) * TILE > ragged_from:
            mask(t, self.fragment, tile * TILE, limit, wwarp, lane)
        m = self.maxima_of_block(st, t, pst.index, wwarp, lane)
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
            m_ref[x], beta[x], gamma[x] = move_frame(m[x], old)
            l_run[x] = l_run[x] * gamma[x] + part * beta[x]
            moved = moved or m_ref[x] > old
        P_RING.wait_empty(st, pst.index, pst.phase)
        self.store_p_few(t, p16, pst.index, wwarp, lane)
        if (wwarp == 0) & (lane < 4):
            pad = pad_layout(self.rows_cta)
            at = pst.index * padded_size(self.rows_cta)
            for values, array_s in ((beta, st.beta), (gamma, st.gamma)):
                cute.autovec_copy(
                    values, cute.make_tensor(array_s.data_ptr() + at, pad)[None, lane % 4]
                )
        self.hand_over(st, pst.index, cute.arch.vote_any_sync(moved), wwarp, lane)

    def scales_few(self, st, stage, wwarp, lane):
        """(sigma, log2 sigma, 1/sigma) of the two tokens of a thread of S^T."""
        s_ks = self.parts.scales.of_stages(st)
        sigma = [s_ks[wwarp * 16 + lane // 4 + 8 * i, stage] for i in range(2)]
        logs = [cute.math.log2(s, fastmath=True) for s in sigma]
        return sigma, logs, [safe_reciprocal(s) for s in sigma]

    @cute.jit
    def maxima_of_block(self, st, t, buf, wwarp, lane):
        """Row maxima of an S^T fragment over all 64 tokens, in every thread that holds the row.

        The maximum runs along M: over the 8 lanes that share a quad position by shuffles, over the
        four warps through shared memory (two buffers, so one barrier a block is enough).
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
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)
        for j in cutlass.range_constexpr(n_rows // 2):
            top = [Float32(NEVER), Float32(NEVER)]
            for w in cutlass.range_constexpr(4):
                pair = cute.make_rmem_tensor((2,), Float32)
                cute.autovec_copy(across[None, j, quad, w, buf], pair)
                for e in cutlass.range_constexpr(2):
                    top[e] = cute.arch.fmax(top[e], pair[e])
            m[2 * j], m[2 * j + 1] = top[0], top[1]
        return m

    def store_p_few(self, t, p16, buf, wwarp, lane):
        """P8 into shared memory as [row][token], tokens renamed as TOKENS_ON_M.

        A thread's pair (token g, token g + 8) is one 16-bit unit of row 2c + e: stmatrix.trans.
        """
        n_mat = self.rows_cta // 8
        view = cute.make_tensor(t.iterator, cute.make_layout((2, 2, n_mat), stride=(2, 1, 4)))
        ordered = cute.make_rmem_tensor((2, 2, n_mat), Float32)
        ordered.store(view.load())
        p8 = cute.make_rmem_tensor((4 * n_mat,), F8)
        cute.make_tensor(p8.iterator, ordered.layout).store(ordered.load().to(F8))
        stsm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, n_mat), U16)
        row = lane % self.rows_cta  # matrix lane // 8, row lane % 8
        dst = cute.local_tile(p16[None, None, buf], (1, 8), (row, wwarp))
        # stmatrix takes 2 n_mat values a lane; the address is what matters
        line = cute.make_tensor(dst[0, None].iterator, cute.make_layout(2 * n_mat))
        cute.copy(stsm, cute.recast_tensor(p8, U16), line)

    @cute.jit
    def finish_rows(self, st, results, call, inv_phase, m_ref, l_run, batch, slot):
        """Row sums of an item -> 1/l for the P.V warps, LSE to memory."""
        tidx, _, _ = cute.arch.thread_idx()
        row_block, _, _ = cute.arch.block_idx()
        ctid, lane, first_row = tidx % WARPGROUP, tidx % 32, row_block * self.rows_cta
        wwarp = cute.arch.make_warp_uniform(ctid // 32)
        inv_s = st.inv.get_tensor(cute.make_layout(padded_size(self.rows_cta)))
        INV_RING.wait_empty(st, 0, inv_phase)
        if const_expr(self.few_rows):
            sums = st.across.get_tensor(cute.make_layout((self.rows_cta, 8)))
            frame = st.frame.get_tensor(cute.make_layout(self.rows_cta))
            # both buffers of ``across`` may still be read by a slower warp
            warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)
            for x in cutlass.range_constexpr(self.rows_cta // 4):
                total = l_run[x]
                for off in cutlass.range_constexpr(3):
                    total = total + cute.arch.shuffle_sync_bfly(total, 4 << off)
                if lane < 4:
                    row = 8 * (x // 2) + 2 * lane + x % 2
                    sums[row, wwarp] = total
                    if wwarp == 0:
                        frame[row] = m_ref[x]
            warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)
            if ctid < self.rows_cta:
                total = (sums[ctid, 0] + sums[ctid, 1]) + (sums[ctid, 2] + sums[ctid, 3])
                inv_s[row_position(ctid, self.rows_cta)] = finish_row(
                    results, call, batch, slot, first_row + ctid, total, frame[ctid]
                )
            # the next item's first block writes ``across`` again
            warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)
        else:
            for i in cutlass.range_constexpr(2):
                total = l_run[i]
                for off in cutlass.range_constexpr(2):
                    total = total + cute.arch.shuffle_sync_bfly(total, 1 << off)
                if lane % 4 == 0:
                    row = wwarp * 16 + lane // 4 + 8 * i
                    inv_s[row_position(row, self.rows_cta)] = finish_row(
                        results, call, batch, slot, first_row + row, total, m_ref[i]
                    )
        cute.arch.sync_warp()
        if lane == 0:
            INV_RING.arrive_full(st, 0)

    # ---------------------------------------------------------------- P.V warpgroups

    @cute.jit
    def pv_loop(self, cta: Cta, half):
        tidx, _, _ = cute.arch.thread_idx()
        st, layouts, _, k_pipe, gmem, call, span = cta
        mma_o = self.pv_mma()
        acc_O = [cute.make_rmem_tensor((self.rows_cta // 2,), Float32) for _ in range(4)]
        tmp = cute.make_rmem_tensor(mma_o.partition_shape_C((64, self.pv_rows)), Float32)
        thr_o, s_p = mma_o.get_slice(tidx % WARPGROUP), staged(st.p, layouts.p)
        rP = [
            mma_o.make_fragment_B(
                thr_o.partition_B(cute.local_tile(s_p, (self.pv_rows, TILE), (x, 0, None)))
            )
            for x in range(self.rows_cta // self.pv_rows)
        ]
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        pst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, P_STAGES)
        inv_phase = Int32(0)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, slot = self.parts.work.item_at(gmem.work, i)
            seqlen = self.parts.work.seqlen_of(gmem.work, batch)
            ragged_from = self.parts.work.ragged_from(gmem.work, call, batch)
            for d_block in cutlass.range_constexpr(4):
                acc_O[d_block].fill(0.0)
            for tile in cutlass.range(first, last, unroll=1):
                k_pipe.consumer_wait(kst)
                if (tile + 1) * TILE > ragged_from:
                    # whatever lies past the end, or under a NaN scale, must not meet P = 0;
                    # P being there means that Q.K has read the rows
                    P_RING.wait_full(st, pst.index, pst.phase)
                    self.parts.scales.zero_values(
                        st, kst.index, seqlen - tile * TILE, 2 * half, 2, Barrier.PV + half
                    )
                self.pv_block(st, k_pipe, acc_O, tmp, rP, half, kst, pst)
                kst.advance()
                pst.advance()
            self.write_rows(st, gmem.results, call, inv_phase, acc_O, batch, slot, half)
            self.parts.stamps.put(gmem.results, Stamp.ROWS_WRITTEN + half)
            inv_phase = inv_phase ^ 1

    @cute.jit
    def pv_block(self, st, k_pipe, acc_O, tmp, rP, half, kst, pst):
        """O^T += beta * (V^T P8^T) of one tile, 64 channels at a time."""
        tidx, _, _ = cute.arch.thread_idx()
        mma_o = self.pv_mma()
        lane, n = tidx % 32, self.rows_cta // 2
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        offset = transpose.lane_offset(wwarp, lane)
        base = st.kc.data_ptr() + (kst.index * (TILE * D) + half * (D // 2 * TILE))
        size = padded_size(self.rows_cta)
        raw = [transpose.load_raw(base, offset, d) for d in range(2)] + [None] * 2
        frags = [transpose.to_fragment(mma_o, raw[0], self.names)] + [None] * 3
        P_RING.wait_full(st, pst.index, pst.phase)
        flag_s = st.flag.get_tensor(cute.make_layout((4, P_STAGES)))
        flag = (flag_s[0, pst.index] | flag_s[1, pst.index]) | (
            flag_s[2, pst.index] | flag_s[3, pst.index]
        )
        pad = pad_layout(self.rows_cta)
        beta = cute.make_rmem_tensor((self.rows_cta // 4,), Float32)
        if cute.arch.make_warp_uniform(flag) != 0:
            gamma_s = cute.make_tensor(st.gamma.data_ptr() + pst.index * size, pad)
            for v in cutlass.range_constexpr(n):
                ga = gamma_s[2 * (v // 4) + v % 2, lane % 4]
                for d in cutlass.range_constexpr(4):
                    acc_O[d][v] = acc_O[d][v] * ga
        beta_s = cute.make_tensor((st.beta.data_ptr() + pst.index * size).align(16), pad)
        self.issue_pv(mma_o, tmp, frags[0], rP[0], pst.index)
        cute.autovec_copy(beta_s[None, lane % 4], beta)
        parts, n_tmp = len(rP), self.pv_rows // 2
        for step in cutlass.range_constexpr(4 * parts):
            d, x = step // parts, step % parts
            warpgroup.wait_group(0)
            # the fragment after next travels during the FFMAs, the next WGMMA and its FFMAs
            if const_expr(x == parts - 1 and d < 2):
                raw[d + 2] = transpose.load_raw(base, offset, d + 2)
            if const_expr(x == parts - 1 and d == 2):
                k_pipe.consumer_release(kst)
            for v in cutlass.range_constexpr(n_tmp):
                o = x * n_tmp + v
                acc_O[d][o] = acc_O[d][o] + tmp[v] * beta[2 * (o // 4) + o % 2]
            if const_expr(step + 1 < 4 * parts):
                if const_expr(x == parts - 1):
                    frags[d + 1] = transpose.to_fragment(mma_o, raw[d + 1], self.names)
                self.issue_pv(
                    mma_o, tmp, frags[(step + 1) // parts], rP[(step + 1) % parts], pst.index
                )
        cute.arch.sync_warp()
        if lane == 0:
            P_RING.arrive_empty(st, pst.index)

    def issue_pv(self, mma_o, tmp, frag, rP, buf):
        warpgroup.fence()
        issue(mma_o, tmp, frag, rP[None, None, None, buf], accumulate=False)
        warpgroup.commit_group()

    @cute.jit
    def write_rows(self, st, results, call, inv_phase, acc_O, batch, slot, half):
        """Normalised O^T fragment -> rows: fragment rows g and g + 8 are d = 2g and 2g + 1."""
        tidx, _, _ = cute.arch.thread_idx()
        row_block, _, _ = cute.arch.block_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv_s = cute.make_tensor(st.inv.data_ptr(), pad_layout(self.rows_cta))
        INV_RING.wait_full(st, 0, inv_phase)
        channel = half * (D // 2) + wwarp * 16 + 2 * (lane // 4)
        # the warp's four groups of 16 channels share an exponent; four lanes of a row write it
        own_group = half * (D // 2) + 64 * (lane // 4) + wwarp * 16
        shared = Shared((4, 8, 16), own_group, 1, lane < 16)
        for x in cutlass.range_constexpr(self.rows_cta // 4):
            row = row_block * self.rows_cta + 8 * (x // 2) + 2 * (lane % 4) + x % 2
            v = 4 * (x // 2) + x % 2
            inverse = inv_s[x, lane % 4]
            runs = []
            for d in cutlass.range_constexpr(4):
                pair = cute.make_rmem_tensor((2,), Float32)
                pair[0], pair[1] = acc_O[d][v] * inverse, acc_O[d][v + 2] * inverse
                runs.append((channel + 64 * d, pair))
            write_runs(results, call, batch, slot, row, runs, shared)
        cute.arch.sync_warp()
        if lane == 0:
            INV_RING.arrive_empty(st, 0)

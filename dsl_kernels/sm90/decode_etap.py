"""FP8 MLA decode for SM90, pipeline ``etap``: O^T = V^T P^T with V^T as the *register* operand.

Idea: FlashMLA-ETAP's transposition, so that N is the number of query rows and few rows do not pay
for 64; numerics of SnapMLA (per-token scales, block-wise P), with fp32 promotion of every token
tile (docs/numerics.md).  V^T never goes back to shared memory: ldmatrix.trans + prmt turn the K
tile into A fragments (common/transpose.py).

Roles (4 warpgroups of 128 threads)
    wg 0  warp 0  KV producer     TMA: content, RoPE, scales of a 64-token tile into a free stage
          warp 1  Q producer      TMA: the row tile of each item
          warp 2  scale warp      sigma_k -> (sigma, log2 sigma, 1/sigma) in fragment order
                                  (64 rows only; with few rows a thread has just two tokens)
    wg 1          softmax         S = Q K^T (or S^T = K Q^T for <= 32 rows), block softmax, P8 -> smem
    wg 2, 3       P.V             O^T += beta * (V^T P8^T), half of d_v each, beta in fp32

Timeline of tile i (one stage of the K ring)
    KV producer   |TMA i+3 ...
    scale warp    |  sigma i+1 |
    softmax       | Q.K i | max, exp2, e4m3 | Q.K i+1 | ...
    P.V           |  V^T frags i | wait P i | 4 x (WGMMA 64 channels, FFMA into O) | V^T frags i+1

Frames (log2 units).  A block has its own exponent frame m'_b = max_t(s2 + log2 sigma_k), so its
largest P' is 2^8 whatever the row's running maximum is.  O and l live in frame ``m_ref``, which is
*lazy*: it moves only when a block would exceed it by 2^60, so the usual step is one FFMA an element,
O += beta * tmp with beta = 2^(m'_b - 8 - m_ref), and no rescale; nothing overflows however block
maxima rise and fall.

Shared memory, 64 rows and 4 stages (bytes)
    Q 40960 | K ring 4 x (32768 content + 8192 RoPE + 256 scales) | scale triples 4 x 960
    P 2 x 4096 | beta, gamma, flags, 1/l, barriers 2 K                                  = 219 K
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from ..common import transpose
from ..common.mma import BF16, F8, ROW_MAJOR, U16, issue, staged, tiled_mma, u16_view
from ..spec import KV_LORA_RANK as D
from ..spec import TOKEN_TILE as TILE
from ..spec import VariantSpec
from .block_softmax import NEVER, P_LOG2_MAX, block_p, move_frame, store_p
from .decode_base import (
    DecodeBase,
    fake_args,
    kv_layouts,
    pad_layout,
    padded_size,
    q_layouts,
    row_position,
    safe_reciprocal,
    store_pair,
)

P_STAGES = 2
SOFTMAX_WARPS, PV_WARPS = 4, 8

BAR_SOFTMAX = 1  # named barrier: the four softmax warps
BAR_PV = 2  # and 3: each P.V warpgroup by itself


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.arch != "sm_90a":
        return "etap is an SM90 pipeline (WGMMA); SM100 has its own"
    if (spec.row_tile == 128) != (spec.cluster == 2):
        return "row tile 128 is two CTAs that share KV: it needs cluster=2, other tiles cluster=1"
    if spec.token_tile != TILE or spec.promote_tokens != TILE:
        return "etap promotes every 64-token tile"
    if spec.kv_scale_groups != 1 or spec.p_terms != 1 or spec.p_scale != "tile":
        return "etap is built for one scale a token and one-term P with a scale per tile"
    if spec.ragged or spec.sparse or spec.num_heads or spec.s_q:
        return "ragged, sparse and static-shape forms of etap do not exist yet"
    return None


def build(spec: VariantSpec):
    return DecodeEtap(spec), fake_args(spec)


class DecodeEtap(DecodeBase):
    def __init__(self, spec: VariantSpec):
        self.few_rows = spec.row_tile <= 32  # S^T = K Q^T
        super().__init__(spec, stages=4, q_stages=2 if self.few_rows else 1)
        self.names = transpose.TOKENS_ON_M if self.few_rows else transpose.ROWS_ON_M
        # setmaxnreg hands out one pool of 65536 registers; asking for more hangs without a word
        self.regs = (40, 120, 160) if self.few_rows else (24, 88, 200)
        if sum(r * n for r, n in zip(self.regs, (128, 128, 256), strict=True)) > 65536:
            raise ValueError(f"registers: {self.regs} exceed the SM's 65536")

    # ---------------------------------------------------------------- host half

    @cute.jit
    def __call__(
        self,
        q_nope: cute.Tensor, q_rope: cute.Tensor, q_scale: cute.Tensor, content: cute.Tensor,
        rope: cute.Tensor, scale: cute.Tensor, block_table: cute.Tensor,
        cache_seqlens: cute.Tensor, work_items: cute.Tensor, part_begin: cute.Tensor,
        out: cute.Tensor, lse: cute.Tensor, o_accum: cute.Tensor, lse_accum: cute.Tensor,
        softmax_scale: Float32, causal: Int32, lse_factor: Float32, empty_lse: Float32, stream,
    ):  # fmt: skip
        rows, tokens_on_m = self.rows_cta, self.few_rows
        n_s = rows if const_expr(tokens_on_m) else TILE
        mmas = (tiled_mma(F8, n_s), tiled_mma(BF16, n_s), tiled_mma(F8, rows, a_in_registers=True))
        l_qc, l_qr = q_layouts(rows, self.q_stages, tokens_on_m)
        l_kc, l_kr = kv_layouts(rows, self.stages, tokens_on_m)
        l_p = sm90.make_smem_layout_b(ROW_MAJOR, (64, rows, TILE), F8, P_STAGES)
        tma_q = self.tma_q(q_nope, q_rope, l_qc, l_qr)
        tma_kv = self.tma_kv(content, rope, l_kc, l_kr)

        @cute.struct
        class Storage:
            q_bar: cute.struct.MemRange[cutlass.Int64, 2 * self.q_stages]
            k_bar: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            sigma_bar: cute.struct.MemRange[cutlass.Int64, self.stages]
            p_bar: cute.struct.MemRange[cutlass.Int64, 2 * P_STAGES]
            inv_bar: cute.struct.MemRange[cutlass.Int64, 2]
            flag: cute.struct.Align[cute.struct.MemRange[Int32, 4 * P_STAGES], 16]
            beta: cute.struct.Align[cute.struct.MemRange[Float32, padded_size(rows) * P_STAGES], 128]
            gamma: cute.struct.Align[cute.struct.MemRange[Float32, padded_size(rows) * P_STAGES], 128]
            inv: cute.struct.Align[cute.struct.MemRange[Float32, padded_size(rows)], 128]
            across: cute.struct.Align[cute.struct.MemRange[Float32, 2 * 4 * rows], 128]
            frame: cute.struct.Align[cute.struct.MemRange[Float32, rows], 128]
            sigma: cute.struct.Align[
                cute.struct.MemRange[Float32, 3 * padded_size(TILE) * self.stages], 128
            ]
            ks: cute.struct.Align[cute.struct.MemRange[Float32, TILE * self.stages], 128]
            qc: cute.struct.Align[cute.struct.MemRange[F8, cute.cosize(l_qc)], 1024]
            kc: cute.struct.Align[cute.struct.MemRange[F8, cute.cosize(l_kc)], 1024]
            kr: cute.struct.Align[cute.struct.MemRange[BF16, cute.cosize(l_kr)], 1024]
            qr: cute.struct.Align[cute.struct.MemRange[BF16, cute.cosize(l_qr)], 1024]
            p: cute.struct.Align[cute.struct.MemRange[F8, cute.cosize(l_p)], 1024]

        self.Storage = Storage
        a_qc, g_qc, a_qr, g_qr = tma_q
        a_kc, g_kc, a_kr, g_kr = tma_kv
        self.kernel(
            a_qc, g_qc, a_qr, g_qr, a_kc, g_kc, a_kr, g_kr, q_scale, scale, block_table,
            cache_seqlens, work_items, part_begin, out, lse, o_accum, lse_accum,
            q_nope.shape[2], q_nope.shape[1] * q_nope.shape[2],
            softmax_scale, causal, lse_factor, empty_lse, *mmas, l_qc, l_qr, l_kc, l_kr, l_p,
        ).launch(
            grid=self.grid(q_nope, part_begin), block=(512, 1, 1), cluster=(self.cluster, 1, 1),
            stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )  # fmt: skip

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        a_qc: cute.CopyAtom, g_qc: cute.Tensor, a_qr: cute.CopyAtom, g_qr: cute.Tensor,
        a_kc: cute.CopyAtom, g_kc: cute.Tensor, a_kr: cute.CopyAtom, g_kr: cute.Tensor,
        q_scale: cute.Tensor, scale: cute.Tensor, block_table: cute.Tensor,
        cache_seqlens: cute.Tensor, work_items: cute.Tensor, part_begin: cute.Tensor,
        out: cute.Tensor, lse: cute.Tensor, o_accum: cute.Tensor, lse_accum: cute.Tensor,
        num_heads: Int32, rows: Int32, softmax_scale: Float32, causal: Int32, lse_factor: Float32,
        empty_lse: Float32, mma_c: cute.TiledMma, mma_r: cute.TiledMma, mma_o: cute.TiledMma,
        l_qc: cute.ComposedLayout, l_qr: cute.ComposedLayout, l_kc: cute.ComposedLayout,
        l_kr: cute.ComposedLayout, l_p: cute.ComposedLayout,
    ):  # fmt: skip
        tidx, _, _ = cute.arch.thread_idx()
        row_block, part, _ = cute.arch.block_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // 128)
        st = cutlass.memory.SmemAllocator().allocate(self.Storage)
        if warp_id == 0:
            for atom in (a_qc, a_qr, a_kc, a_kr):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(P_STAGES):
                    cute.arch.mbarrier_init(st.p_bar.data_ptr() + i, SOFTMAX_WARPS)
                    cute.arch.mbarrier_init(st.p_bar.data_ptr() + P_STAGES + i, PV_WARPS)
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(st.sigma_bar.data_ptr() + i, 1)
                cute.arch.mbarrier_init(st.inv_bar.data_ptr(), SOFTMAX_WARPS)
                cute.arch.mbarrier_init(st.inv_bar.data_ptr() + 1, PV_WARPS)
            cute.arch.mbarrier_init_fence()
        q_pipe = self.make_q_pipe(st.q_bar.data_ptr(), SOFTMAX_WARPS)
        k_pipe = self.make_k_pipe(st.k_bar.data_ptr(), SOFTMAX_WARPS + PV_WARPS)

        cute.arch.griddepcontrol_wait()  # q, the cache and the plan come from the kernels before
        begin, end = part_begin[part], part_begin[part + 1]
        producer_regs, softmax_regs, pv_regs = self.regs
        if wg == 0:
            cute.arch.setmaxregister_decrease(producer_regs)
            if warp_id == 0:
                self.produce_kv(st, k_pipe, work_items, begin, end, block_table, scale,
                                (a_kc, g_kc, a_kr, g_kr), l_kc, l_kr)  # fmt: skip
                cute.arch.griddepcontrol_launch_dependents()
            elif warp_id == 1:
                self.produce_q(st, q_pipe, work_items, begin, end, (a_qc, g_qc, a_qr, g_qr),
                               l_qc, l_qr, row_block)  # fmt: skip
            elif warp_id == 2:
                if const_expr(not self.few_rows):
                    self.prepare_scales(st, k_pipe, work_items, begin, end)
        elif wg == 1:
            if const_expr(softmax_regs < 128):
                cute.arch.setmaxregister_decrease(softmax_regs)
            self.softmax_loop(
                st, q_pipe, k_pipe, work_items, begin, end, cache_seqlens, q_scale, lse, lse_accum,
                (num_heads, rows, row_block, softmax_scale, causal, lse_factor, empty_lse),
                (mma_c, mma_r), (l_qc, l_qr, l_kc, l_kr, l_p),
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(pv_regs)
            self.pv_loop(
                st, k_pipe, work_items, begin, end, cache_seqlens, out, o_accum,
                (num_heads, rows, row_block, causal), wg - 2, mma_o, l_kc, l_p,
            )  # fmt: skip
        if const_expr(self.cluster > 1):
            # the peer signals barriers in this CTA's shared memory: leave together
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # ---------------------------------------------------------------- softmax warpgroup

    @cute.jit
    def softmax_loop(self, st, q_pipe, k_pipe, items, begin, end, cache_seqlens, q_scale, lse,
                     lse_accum, facts, mmas, layouts):  # fmt: skip
        num_heads, rows, row_block, softmax_scale, causal, lse_factor, empty_lse = facts
        mma_c, mma_r = mmas
        l_qc, l_qr, l_kc, l_kr, l_p = layouts
        tidx, _, _ = cute.arch.thread_idx()
        ctid, lane = tidx % 128, tidx % 32
        wwarp = cute.arch.make_warp_uniform(ctid // 32)
        thr_c, thr_r = mma_c.get_slice(ctid), mma_r.get_slice(ctid)
        q = (staged(st.qc, l_qc), staged(st.qr, l_qr))
        k = (staged(st.kc, l_kc), staged(st.kr, l_kr))
        a, b = (k, q) if const_expr(self.few_rows) else (q, k)
        frags = (
            mma_c.make_fragment_A(thr_c.partition_A(a[0])),
            mma_c.make_fragment_B(thr_c.partition_B(b[0])),
            mma_r.make_fragment_A(thr_r.partition_A(a[1])),
            mma_r.make_fragment_B(thr_r.partition_B(b[1])),
        )
        n_s = self.rows_cta if const_expr(self.few_rows) else TILE
        acc_S = cute.make_rmem_tensor(mma_c.partition_shape_C((64, n_s)), Float32)
        p16 = u16_view(staged(st.p, l_p), l_p.inner)  # (rows, 32, stage)

        # rows of this thread: two in S, rows_cta / 4 in S^T
        n_rows = const_expr(self.rows_cta // 4 if self.few_rows else 2)
        row_of = self.thread_rows(wwarp, lane)
        m_ref = cute.make_rmem_tensor((n_rows,), Float32)
        l_run = cute.make_rmem_tensor((n_rows,), Float32)
        factor = cute.make_rmem_tensor((n_rows,), Float32)
        limit = cute.make_rmem_tensor((n_rows,), Int32)

        qst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.q_stages)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        pst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, P_STAGES)
        inv_phase = Int32(1)
        for i in cutlass.range(begin, end, unroll=1):
            batch, first, last, slot = items[i, 0], items[i, 1], items[i, 2], items[i, 3]
            seqlen = cache_seqlens[batch]
            for x in cutlass.range_constexpr(n_rows):
                r = row_block * self.rows_cta + row_of[x]
                factor[x], limit[x] = self.row_facts(
                    q_scale, batch, r, num_heads, rows, softmax_scale, seqlen, causal
                )
            m_ref.fill(NEVER)
            l_run.fill(0.0)
            # tiles from here on hold a token that some row must not see
            ragged_from = seqlen - (rows // num_heads - 1 if causal != 0 else 0)
            q_pipe.consumer_wait(qst)
            for tile in cutlass.range(first, last, unroll=1):
                k_pipe.consumer_wait(kst)
                self.issue_qk(mma_c, mma_r, acc_S, frags, qst.index, kst.index)
                if const_expr(self.few_rows):
                    self.block_few_rows(st, k_pipe, tile, acc_S, p16, kst, pst, factor, limit,
                                        m_ref, l_run, ragged_from)  # fmt: skip
                else:
                    self.block_many_rows(st, k_pipe, tile, acc_S, p16, kst, pst, factor, limit,
                                         m_ref, l_run, ragged_from)  # fmt: skip
                kst.advance()
                pst.advance()
            q_pipe.consumer_release(qst)
            qst.advance()
            self.finish_rows(
                st, inv_phase, m_ref, l_run, lse, lse_accum, batch, slot,
                (num_heads, rows, row_block, lse_factor, empty_lse),
            )  # fmt: skip
            inv_phase = inv_phase ^ 1

    def thread_rows(self, wwarp, lane):
        """Rows of the tile that this thread's S (or S^T) fragment holds."""
        if self.few_rows:
            return [8 * (x // 2) + 2 * (lane % 4) + x % 2 for x in range(self.rows_cta // 4)]
        return [wwarp * 16 + lane // 4 + 8 * x for x in range(2)]

    @cute.jit
    def block_many_rows(self, st, k_pipe, tile, acc_S, p16, kst, pst, factor, limit, m_ref, l_run,
                        ragged_from):  # fmt: skip
        """Softmax of one block, S = Q K^T: a thread holds 2 rows x 16 tokens."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % 128 // 32)
        sigma = self.sigma_view(st, lane % 4, kst.index)
        cute.arch.mbarrier_wait(st.sigma_bar.data_ptr() + kst.index, kst.phase)
        t = cute.make_rmem_tensor((32,), Float32)
        m0, m1, l0, l1 = block_p(acc_S, t, sigma, tile, factor, limit, ragged_from)
        k_pipe.consumer_release(kst)
        m, part = [m0, m1], [l0, l1]
        beta, gamma, moved = [None] * 2, [None] * 2, False
        for i in cutlass.range_constexpr(2):
            old = m_ref[i]
            m_ref[i], beta[i], gamma[i] = move_frame(m[i], old)
            l_run[i] = l_run[i] * gamma[i] + part[i] * beta[i]
            moved = moved or m_ref[i] > old
        any_moved = cute.arch.vote_any_sync(moved)

        cute.arch.mbarrier_wait(st.p_bar.data_ptr() + P_STAGES + pst.index, pst.phase)
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
            cute.arch.mbarrier_arrive(st.p_bar.data_ptr() + buf)

    @cute.jit
    def block_few_rows(self, st, k_pipe, tile, acc_S, p16, kst, pst, factor, limit, m_ref, l_run,
                       ragged_from):  # fmt: skip
        """Softmax of one block, S^T = K Q^T: a thread holds 2 tokens x rows/4 rows.

        The maximum runs along M: over the 8 lanes that share a quad position by shuffles, over the
        four warps through shared memory (two buffers, so one barrier a block).
        """
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % 128 // 32)
        quad, n_rows = lane % 4, self.rows_cta // 4
        s_ks = st.ks.get_tensor(cute.make_layout((TILE, self.stages)))
        sig, lg, inv = ([None] * 2 for _ in range(3))
        for i in cutlass.range_constexpr(2):
            token = wwarp * 16 + lane // 4 + 8 * i
            s = s_ks[token, kst.index]
            sig[i], lg[i] = s, cute.math.log2(s, fastmath=True)
            inv[i] = safe_reciprocal(s)
        warpgroup.wait_group(0)
        k_pipe.consumer_release(kst)
        t = cute.make_rmem_tensor((2 * n_rows,), Float32)
        for v in cutlass.range_constexpr(2 * n_rows):
            x, i = 2 * (v // 4) + v % 2, v // 2 % 2
            t[v] = acc_S[v] * (factor[x] * sig[i]) + lg[i]
        if (tile + 1) * TILE > ragged_from:
            for v in cutlass.range_constexpr(2 * n_rows):
                x, i = 2 * (v // 4) + v % 2, v // 2 % 2
                if tile * TILE + wwarp * 16 + lane // 4 + 8 * i >= limit[x]:
                    t[v] = -Float32.inf
        m = [cute.arch.fmax(t[4 * (x // 2) + x % 2], t[4 * (x // 2) + x % 2 + 2]) for x in range(n_rows)]
        for x in cutlass.range_constexpr(n_rows):
            for off in cutlass.range_constexpr(3):
                m[x] = cute.arch.fmax(m[x], cute.arch.shuffle_sync_bfly(m[x], 4 << off))
        across = st.across.get_tensor(
            cute.make_layout((2, self.rows_cta // 8, 4, 4, 2), stride=(1, 8, 2, self.rows_cta, 4 * self.rows_cta))
        )  # ((e, j, quad), warp, buffer)
        if lane < 4:
            for j in cutlass.range_constexpr(n_rows // 2):
                pair = cute.make_rmem_tensor((2,), Float32)
                pair[0], pair[1] = m[2 * j], m[2 * j + 1]
                cute.autovec_copy(pair, across[None, j, quad, wwarp, pst.index])
        cute.arch.barrier(barrier_id=BAR_SOFTMAX, number_of_threads=128)
        for j in cutlass.range_constexpr(n_rows // 2):
            top = [Float32(NEVER), Float32(NEVER)]
            for w in cutlass.range_constexpr(4):
                pair = cute.make_rmem_tensor((2,), Float32)
                cute.autovec_copy(across[None, j, quad, w, pst.index], pair)
                for e in cutlass.range_constexpr(2):
                    top[e] = cute.arch.fmax(top[e], pair[e])
            m[2 * j], m[2 * j + 1] = top[0], top[1]
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
        cute.arch.mbarrier_wait(st.p_bar.data_ptr() + P_STAGES + pst.index, pst.phase)
        self.store_p_few(t, p16, pst.index, wwarp, lane)
        if ctid_is_first_quad(wwarp, lane):
            pad = pad_layout(self.rows_cta)
            size = padded_size(self.rows_cta)
            beta_s = cute.make_tensor(st.beta.data_ptr() + pst.index * size, pad)
            gamma_s = cute.make_tensor(st.gamma.data_ptr() + pst.index * size, pad)
            cute.autovec_copy(beta, beta_s[None, quad])
            cute.autovec_copy(gamma, gamma_s[None, quad])
        self.hand_over(st, pst.index, cute.arch.vote_any_sync(moved), wwarp, lane)

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
    def finish_rows(self, st, inv_phase, m_ref, l_run, lse, lse_accum, batch, slot, facts):
        """Row sums of an item -> 1/l for the P.V warps, LSE to memory."""
        num_heads, rows, row_block, lse_factor, empty_lse = facts
        tidx, _, _ = cute.arch.thread_idx()
        ctid, lane = tidx % 128, tidx % 32
        wwarp = cute.arch.make_warp_uniform(ctid // 32)
        inv_s = st.inv.get_tensor(cute.make_layout(padded_size(self.rows_cta)))
        cute.arch.mbarrier_wait(st.inv_bar.data_ptr() + 1, inv_phase)
        if const_expr(self.few_rows):
            sums = st.across.get_tensor(cute.make_layout((self.rows_cta, 8)))
            frame = st.frame.get_tensor(cute.make_layout(self.rows_cta))
            # both buffers of ``across`` may still be read by a slower warp
            cute.arch.barrier(barrier_id=BAR_SOFTMAX, number_of_threads=128)
            for x in cutlass.range_constexpr(self.rows_cta // 4):
                l = l_run[x]
                for off in cutlass.range_constexpr(3):
                    l = l + cute.arch.shuffle_sync_bfly(l, 4 << off)
                if lane < 4:
                    row = 8 * (x // 2) + 2 * lane + x % 2
                    sums[row, wwarp] = l
                    if wwarp == 0:
                        frame[row] = m_ref[x]
            cute.arch.barrier(barrier_id=BAR_SOFTMAX, number_of_threads=128)
            if ctid < self.rows_cta:
                l = (sums[ctid, 0] + sums[ctid, 1]) + (sums[ctid, 2] + sums[ctid, 3])
                self.finish_row(inv_s, l, frame[ctid], ctid, lse, lse_accum, batch, slot, facts)
            # the next item's first block writes ``across`` again
            cute.arch.barrier(barrier_id=BAR_SOFTMAX, number_of_threads=128)
        else:
            for i in cutlass.range_constexpr(2):
                l = l_run[i]
                for off in cutlass.range_constexpr(2):
                    l = l + cute.arch.shuffle_sync_bfly(l, 1 << off)
                if lane % 4 == 0:
                    row = wwarp * 16 + lane // 4 + 8 * i
                    self.finish_row(inv_s, l, m_ref[i], row, lse, lse_accum, batch, slot, facts)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(st.inv_bar.data_ptr())

    # ---------------------------------------------------------------- P.V warpgroups

    @cute.jit
    def pv_loop(self, st, k_pipe, items, begin, end, cache_seqlens, out, o_accum, facts, half, mma_o,
                l_kc, l_p):  # fmt: skip
        num_heads, rows, row_block, causal = facts
        tidx, _, _ = cute.arch.thread_idx()
        ctid = tidx % 128
        shape = mma_o.partition_shape_C((64, self.rows_cta))
        acc_O = [cute.make_rmem_tensor(shape, Float32) for _ in range(4)]
        tmp = cute.make_rmem_tensor(shape, Float32)
        rP = mma_o.make_fragment_B(mma_o.get_slice(ctid).partition_B(staged(st.p, l_p)))
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        pst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, P_STAGES)
        inv_phase = Int32(0)
        for i in cutlass.range(begin, end, unroll=1):
            batch, first, last, slot = items[i, 0], items[i, 1], items[i, 2], items[i, 3]
            seqlen = cache_seqlens[batch]
            ragged_from = seqlen - (rows // num_heads - 1 if causal != 0 else 0)
            for d_block in cutlass.range_constexpr(4):
                acc_O[d_block].fill(0.0)
            for tile in cutlass.range(first, last, unroll=1):
                k_pipe.consumer_wait(kst)
                if (tile + 1) * TILE > ragged_from:
                    # whatever lies past the end, or under a NaN scale, must not meet P = 0
                    cute.arch.mbarrier_wait(st.p_bar.data_ptr() + pst.index, pst.phase)
                    self.zero_rows(st, kst.index, seqlen - tile * TILE, 2 * half, 2, BAR_PV + half)
                self.pv_block(st, k_pipe, acc_O, tmp, rP, half, mma_o, kst, pst)
                kst.advance()
                pst.advance()
            self.write_rows(st, inv_phase, acc_O, out, o_accum, batch, slot, rows, row_block, half)
            inv_phase = inv_phase ^ 1

    @cute.jit
    def pv_block(self, st, k_pipe, acc_O, tmp, rP, half, mma_o, kst, pst):
        """O^T += beta * (V^T P8^T) of one tile, 64 channels at a time."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, n = tidx % 32, self.rows_cta // 2
        wwarp = cute.arch.make_warp_uniform(tidx % 128 // 32)
        offset = transpose.lane_offset(wwarp, lane)
        base = st.kc.data_ptr() + (kst.index * (TILE * D) + half * (D // 2 * TILE))
        size = padded_size(self.rows_cta)
        raw = [transpose.load_raw(base, offset, d) for d in range(2)] + [None] * 2
        frags = [transpose.to_fragment(mma_o, raw[0], self.names)] + [None] * 3
        cute.arch.mbarrier_wait(st.p_bar.data_ptr() + pst.index, pst.phase)
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
        self.issue_pv(mma_o, tmp, frags[0], rP, pst.index)
        cute.autovec_copy(beta_s[None, lane % 4], beta)
        frags[1] = transpose.to_fragment(mma_o, raw[1], self.names)
        for d in cutlass.range_constexpr(4):
            warpgroup.wait_group(0)
            # fragments of d + 2 travel during the FFMAs, the next WGMMA and its FFMAs
            if const_expr(d < 2):
                raw[d + 2] = transpose.load_raw(base, offset, d + 2)
            if const_expr(d == 2):
                k_pipe.consumer_release(kst)
            for v in cutlass.range_constexpr(n):
                acc_O[d][v] = acc_O[d][v] + tmp[v] * beta[2 * (v // 4) + v % 2]
            if const_expr(d < 3):
                if const_expr(d > 0):
                    frags[d + 1] = transpose.to_fragment(mma_o, raw[d + 1], self.names)
                self.issue_pv(mma_o, tmp, frags[d + 1], rP, pst.index)
        if lane == 0:
            cute.arch.mbarrier_arrive(st.p_bar.data_ptr() + P_STAGES + pst.index)

    def issue_pv(self, mma_o, tmp, frag, rP, buf):
        warpgroup.fence()
        issue(mma_o, tmp, frag, rP[None, None, None, buf], accumulate=False)
        warpgroup.commit_group()

    @cute.jit
    def write_rows(self, st, inv_phase, acc_O, out, o_accum, batch, slot, rows, row_block, half):
        """O^T fragment -> rows of ``out`` or of the split's slot: rows g / g+8 are d = 2g / 2g+1."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % 128 // 32)
        quad, g = lane % 4, lane // 4
        inv_s = cute.make_tensor(st.inv.data_ptr(), pad_layout(self.rows_cta))
        cute.arch.mbarrier_wait(st.inv_bar.data_ptr(), inv_phase)
        channel = half * (D // 2) + wwarp * 16 + 2 * g
        for x in cutlass.range_constexpr(self.rows_cta // 4):
            row = row_block * self.rows_cta + 8 * (x // 2) + 2 * quad + x % 2
            v = 4 * (x // 2) + x % 2
            sc = inv_s[x, quad]
            if row < rows:
                for d in cutlass.range_constexpr(4):
                    pair = cute.make_rmem_tensor((2,), Float32)
                    pair[0], pair[1] = acc_O[d][v] * sc, acc_O[d][v + 2] * sc
                    if slot < 0:
                        store_pair(out, (Int64(batch) * rows + row) * D + channel + 64 * d, pair)
                    else:
                        at = Int64(slot) * o_accum.stride[0] + row * D + channel + 64 * d
                        store_pair(o_accum, at, pair)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(st.inv_bar.data_ptr() + 1)


def ctid_is_first_quad(wwarp, lane):
    return (wwarp == 0) & (lane < 4)

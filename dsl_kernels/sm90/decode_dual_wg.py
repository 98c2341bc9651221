"""FP8 MLA decode for SM90, pipeline ``dual_wg``: Algorithm 1 of the SnapMLA paper.

Two warpgroups keep two token blocks in flight and own half of d_v each.  WG0 takes the even blocks
of Q.K and softmax, WG1 the odd ones; P0 and its scale reach WG1 through shared memory (and P1 WG0),
and both add block 0 before block 1 (the paper's monotone order).  V is transposed
shared memory -> registers -> shared memory: in place, because a K tile is not needed as K once its
own Q.K is through, so no second buffer is spent and four tiles fit.

Where we leave the paper (docs/numerics.md): its recurrence gamma = exp(dm) sigma_p / sigma_p'
overflows when a block lies ~80 nats below the last, and its accumulator loses accuracy with length.
Ours gives every block its own exponent frame m'_b, sums one block in the tensor core and adds it in
fp32: O = gamma O + beta (P8 V8).  gamma and beta are powers of two of *bounded* differences, and the
running frame moves lazily (decode_etap.py).

Roles (3 warpgroups)
    wg 0  warp 0 KV producer, warp 1 Q producer, warp 2 scale warp (decode_base.py)
    wg 1  WG0: even blocks, channels   0..255
    wg 2  WG1: odd blocks,  channels 256..511

Timeline of a pair (blocks a, b)
    WG0 | Q.K a | V_a^T | softmax a, P_a, frame | P_a V_a^L | wait b | P_b V_b^L |
    WG1 | Q.K b | V_b^T | softmax b, P_b | wait a, frame | P_a V_a^R | P_b V_b^R |

Shared memory (bytes): Q 40960 | K ring 4 x 41216, V^T in place | scale triples 3840 |
    P 2 blocks x 2 buffers x 4096 | frames, factors, row sums, barriers 4 K          = 225 K
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
from .block_softmax import NEVER, block_p, move_frame, store_p
from .decode_base import (
    DecodeBase,
    fake_args,
    kv_layouts,
    padded_size,
    q_layouts,
    store_pair,
)

ROWS = 64
PAIR_BUFFERS = 2
MATH_WARPS = 8
REGISTERS = (24, 240, 240)

BAR_WG = 1  # and 2: each math warpgroup by itself
BAR_BOTH = 3  # both math warpgroups


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.arch != "sm_90a":
        return "dual_wg is an SM90 pipeline (WGMMA); SM100 has its own"
    if spec.row_tile < ROWS:
        return "dual_wg puts rows on M = 64; row tile 64 with predicated rows serves fewer"
    if (spec.row_tile == 128) != (spec.cluster == 2):
        return "row tile 128 is two CTAs that share KV: it needs cluster=2, other tiles cluster=1"
    if spec.token_tile != TILE or spec.promote_tokens != TILE:
        return "dual_wg promotes every 64-token block"
    if spec.kv_scale_groups != 1 or spec.p_terms != 1 or spec.p_scale != "tile":
        return "dual_wg is built for one scale a token and one-term P with a scale per block"
    if spec.ragged or spec.sparse or spec.num_heads or spec.s_q:
        return "ragged, sparse and static-shape forms of dual_wg do not exist yet"
    return None


def build(spec: VariantSpec):
    return DecodeDualWg(spec), fake_args(spec)


class DecodeDualWg(DecodeBase):
    def __init__(self, spec: VariantSpec):
        super().__init__(spec, stages=4, q_stages=1)

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
        mmas = (tiled_mma(F8, TILE), tiled_mma(BF16, TILE), tiled_mma(F8, 64))
        l_qc, l_qr = q_layouts(ROWS, self.q_stages, False)
        l_kc, l_kr = kv_layouts(ROWS, self.stages, False)
        l_vt = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, D, TILE), F8, self.stages)
        l_p = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, D, TILE), F8, 2 * PAIR_BUFFERS)
        tma_q = self.tma_q(q_nope, q_rope, l_qc, l_qr)
        tma_kv = self.tma_kv(content, rope, l_kc, l_kr)

        @cute.struct
        class Storage:
            q_bar: cute.struct.MemRange[cutlass.Int64, 2 * self.q_stages]
            k_bar: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            sigma_bar: cute.struct.MemRange[cutlass.Int64, self.stages]
            ready_bar: cute.struct.MemRange[cutlass.Int64, 2 * PAIR_BUFFERS]
            # (row, [frame, beta, gamma], block of the pair, buffer)
            factors: cute.struct.Align[
                cute.struct.MemRange[Float32, ROWS * 3 * 2 * PAIR_BUFFERS], 128
            ]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 2 * ROWS], 128]
            inv: cute.struct.Align[cute.struct.MemRange[Float32, padded_size(ROWS)], 128]
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
            softmax_scale, causal, lse_factor, empty_lse, *mmas, l_qc, l_qr, l_kc, l_kr, l_vt, l_p,
        ).launch(
            grid=self.grid(q_nope, part_begin), block=(384, 1, 1), cluster=(self.cluster, 1, 1),
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
        l_kr: cute.ComposedLayout, l_vt: cute.ComposedLayout, l_p: cute.ComposedLayout,
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
                for i in cutlass.range_constexpr(2 * PAIR_BUFFERS):
                    cute.arch.mbarrier_init(st.ready_bar.data_ptr() + i, MATH_WARPS // 2)
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(st.sigma_bar.data_ptr() + i, 1)
            cute.arch.mbarrier_init_fence()
        q_pipe = self.make_q_pipe(st.q_bar.data_ptr(), MATH_WARPS)
        k_pipe = self.make_k_pipe(st.k_bar.data_ptr(), MATH_WARPS)

        cute.arch.griddepcontrol_wait()  # q, the cache and the plan come from the kernels before
        begin, end = part_begin[part], part_begin[part + 1]
        if wg == 0:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp_id == 0:
                self.produce_kv(st, k_pipe, work_items, begin, end, block_table, scale,
                                (a_kc, g_kc, a_kr, g_kr), l_kc, l_kr)  # fmt: skip
                cute.arch.griddepcontrol_launch_dependents()
            elif warp_id == 1:
                self.produce_q(st, q_pipe, work_items, begin, end, (a_qc, g_qc, a_qr, g_qr),
                               l_qc, l_qr, row_block)  # fmt: skip
            elif warp_id == 2:
                self.prepare_scales(st, k_pipe, work_items, begin, end)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            args = (
                st, q_pipe, k_pipe, work_items, begin, end, cache_seqlens, q_scale, out, lse,
                o_accum, lse_accum,
                (num_heads, rows, row_block, softmax_scale, causal, lse_factor, empty_lse),
                (mma_c, mma_r, mma_o), (l_qc, l_qr, l_kc, l_kr, l_vt, l_p),
            )  # fmt: skip
            if wg == 1:
                self.math_loop(0, *args)
            else:
                self.math_loop(1, *args)
        if const_expr(self.cluster > 1):
            # the peer signals barriers in this CTA's shared memory: leave together
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def math_loop(self, me: cutlass.Constexpr, st, q_pipe, k_pipe, items, begin, end, cache_seqlens,
                  q_scale, out, lse, o_accum, lse_accum, facts, mmas, layouts):  # fmt: skip
        """Items and pairs of one math warpgroup; ``me`` 0 is the paper's WG0, 1 its WG1."""
        num_heads, rows, row_block, softmax_scale, causal, lse_factor, empty_lse = facts
        mma_c, mma_r, mma_o = mmas
        frags = self.fragments(st, mmas, layouts)
        acc_S = cute.make_rmem_tensor(mma_c.partition_shape_C((64, TILE)), Float32)
        acc_O = [cute.make_rmem_tensor(mma_o.partition_shape_C((64, 64)), Float32) for _ in range(4)]
        factor = cute.make_rmem_tensor((2,), Float32)
        limit = cute.make_rmem_tensor((2,), Int32)
        m_ref = cute.make_rmem_tensor((2,), Float32)
        l_run = cute.make_rmem_tensor((2,), Float32)
        first_row = self.thread_row()

        qst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.q_stages)
        ka = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        pair_st = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, PAIR_BUFFERS)
        for i in cutlass.range(begin, end, unroll=1):
            batch, first, last, slot = items[i, 0], items[i, 1], items[i, 2], items[i, 3]
            seqlen = cache_seqlens[batch]
            for x in cutlass.range_constexpr(2):
                factor[x], limit[x] = self.row_facts(
                    q_scale, batch, row_block * ROWS + first_row + 8 * x, num_heads, rows,
                    softmax_scale, seqlen, causal,
                )  # fmt: skip
            ragged_from = seqlen - (rows // num_heads - 1 if causal != 0 else 0)
            m_ref.fill(NEVER)
            l_run.fill(0.0)
            for d in cutlass.range_constexpr(4):
                acc_O[d].fill(0.0)
            q_pipe.consumer_wait(qst)
            for pair in cutlass.range((last - first + 1) // 2, unroll=1):
                tile = first + 2 * pair
                kb = ka.clone()
                kb.advance()
                rows_in = (factor, limit, ragged_from, seqlen)
                if const_expr(me == 0):
                    self.pair_wg0(st, k_pipe, mmas, layouts, frags, acc_S, acc_O, tile, last, rows_in,
                                  m_ref, l_run, qst, ka, kb, pair_st)  # fmt: skip
                else:
                    self.pair_wg1(st, k_pipe, mmas, layouts, frags, acc_S, acc_O, tile, last, rows_in,
                                  m_ref, l_run, qst, ka, kb, pair_st)  # fmt: skip
                ka.advance()
                if tile + 1 < last:
                    ka.advance()
                pair_st.advance()
            q_pipe.consumer_release(qst)
            qst.advance()
            self.finish_item(me, st, acc_O, m_ref, l_run, out, lse, o_accum, lse_accum, batch, slot,
                             (num_heads, rows, row_block, lse_factor, empty_lse))  # fmt: skip

    def fragments(self, st, mmas, layouts):
        """Descriptors: Q and K of both operand types, P as A, V^T (64-channel chunks) as B."""
        mma_c, mma_r, mma_o = mmas
        l_qc, l_qr, l_kc, l_kr, l_vt, l_p = layouts
        tidx, _, _ = cute.arch.thread_idx()
        thr_c, thr_r, thr_o = (m.get_slice(tidx % 128) for m in (mma_c, mma_r, mma_o))
        s_vt = cute.make_tensor(cute.recast_ptr(st.kc.data_ptr(), l_vt.inner, dtype=F8), l_vt.outer)
        return (
            mma_c.make_fragment_A(thr_c.partition_A(staged(st.qc, l_qc))),
            mma_c.make_fragment_B(thr_c.partition_B(staged(st.kc, l_kc))),
            mma_r.make_fragment_A(thr_r.partition_A(staged(st.qr, l_qr))),
            mma_r.make_fragment_B(thr_r.partition_B(staged(st.kr, l_kr))),
            mma_o.make_fragment_A(thr_o.partition_A(staged(st.p, l_p))),
            [
                mma_o.make_fragment_B(thr_o.partition_B(cute.local_tile(s_vt, (64, TILE), (d, 0, None))))
                for d in range(D // 64)
            ],
        )

    def thread_row(self):
        tidx, _, _ = cute.arch.thread_idx()
        return tidx % 128 // 32 * 16 + tidx % 32 // 4

    @cute.jit
    def pair_wg0(self, st, k_pipe, mmas, layouts, frags, acc_S, acc_O, tile, last, rows_in, m_ref,
                 l_run, qst, ka, kb, pair_st):  # fmt: skip
        """WG0's column of Algorithm 1."""
        buf = pair_st.index
        m0, m1, l0, l1 = self.front(0, st, k_pipe, mmas, layouts, frags, acc_S, tile, rows_in, qst,
                                    ka, buf)  # fmt: skip
        beta, gamma = self.own_frame(st, 0, buf, (m0, m1), (l0, l1), m_ref, l_run)
        self.announce(st, 0, buf)
        self.add_pv(mmas[2], acc_O, frags, 0, buf, ka.index, 0, beta, gamma)
        k_pipe.consumer_release(ka)
        cute.arch.mbarrier_wait(st.ready_bar.data_ptr() + PAIR_BUFFERS + buf, pair_st.phase)
        if tile + 1 < last:
            beta, gamma = self.peer_frame(st, 1, buf, m_ref, l_run)
            self.add_pv(mmas[2], acc_O, frags, 1, buf, kb.index, 0, beta, gamma)
            k_pipe.consumer_release(kb)

    @cute.jit
    def pair_wg1(self, st, k_pipe, mmas, layouts, frags, acc_S, acc_O, tile, last, rows_in, m_ref,
                 l_run, qst, ka, kb, pair_st):  # fmt: skip
        """WG1's column; a lone block a has no partner, but both barriers keep their phases."""
        buf = pair_st.index
        m0, m1, l0, l1 = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
        if tile + 1 < last:
            m0, m1, l0, l1 = self.front(1, st, k_pipe, mmas, layouts, frags, acc_S, tile + 1, rows_in,
                                        qst, kb, buf)  # fmt: skip
        cute.arch.mbarrier_wait(st.ready_bar.data_ptr() + buf, pair_st.phase)
        beta_a, gamma_a = self.peer_frame(st, 0, buf, m_ref, l_run)
        beta_b, gamma_b = [Float32(0.0)] * 2, [Float32(1.0)] * 2
        if tile + 1 < last:
            beta_b, gamma_b = self.own_frame(st, 1, buf, (m0, m1), (l0, l1), m_ref, l_run)
        self.announce(st, 1, buf)
        k_pipe.consumer_wait(ka)
        self.add_pv(mmas[2], acc_O, frags, 0, buf, ka.index, 1, beta_a, gamma_a)
        k_pipe.consumer_release(ka)
        if tile + 1 < last:
            self.add_pv(mmas[2], acc_O, frags, 1, buf, kb.index, 1, beta_b, gamma_b)
            k_pipe.consumer_release(kb)

    @cute.jit
    def front(self, me: cutlass.Constexpr, st, k_pipe, mmas, layouts, frags, acc_S, tile, rows_in, qst,
              kst, buf):  # fmt: skip
        """Q.K, V^T in place, softmax and P of this warpgroup's block."""
        factor, limit, ragged_from, seqlen = rows_in
        mma_c, mma_r, _ = mmas
        l_vt, l_p = layouts[4], layouts[5]
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % 128 // 32)
        k_pipe.consumer_wait(kst)
        self.issue_qk(mma_c, mma_r, acc_S, frags[:4], qst.index, kst.index)
        cute.arch.mbarrier_wait(st.sigma_bar.data_ptr() + kst.index, kst.phase)
        t = cute.make_rmem_tensor((32,), Float32)
        m0, m1, l0, l1 = block_p(
            acc_S, t, self.sigma_view(st, lane % 4, kst.index), tile, factor, limit, ragged_from
        )
        p16 = u16_view(staged(st.p, l_p), l_p.inner)
        store_p(t, p16[None, None, 2 * buf + me], wwarp, lane)
        if (tile + 1) * TILE > ragged_from:
            # all four warps' Q.K must have read the rows that are zeroed
            cute.arch.barrier(barrier_id=BAR_WG + me, number_of_threads=128)
            self.zero_rows(st, kst.index, seqlen - tile * TILE, 0, 4, BAR_WG + me)
        self.transpose_in_place(me, st, l_vt, kst.index, wwarp, lane)
        return m0, m1, l0, l1

    @cute.jit
    def transpose_in_place(self, me: cutlass.Constexpr, st, l_vt, stage, wwarp, lane):
        """K tile (64 tokens x 512) -> V^T (512 x 64 tokens), 128 channels (8 KiB) at a time.

        Even and odd channels trade places in the upper half of the lanes, so that the eight rows
        of one stmatrix matrix fall into eight different bank groups.
        """
        base = st.kc.data_ptr() + stage * (TILE * D)
        offset = transpose.lane_offset(wwarp, lane)
        vt16 = u16_view(
            cute.make_tensor(cute.recast_ptr(st.kc.data_ptr(), l_vt.inner, dtype=F8), l_vt.outer),
            l_vt.inner,
        )[None, None, stage]
        stsm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), U16)
        names = transpose.ROWS_ON_M
        upper = lane >= 16
        first = Int32(names.odd) if upper else Int32(names.even)
        second = Int32(names.even) if upper else Int32(names.odd)
        row8 = lane % 8
        channel = 2 * row8 + ((row8 // 4) ^ (lane // 8 % 2))
        for block in cutlass.range_constexpr(4):
            raw = [transpose.load_raw(base, offset, 2 * block + x) for x in range(2)]
            cute.arch.barrier(barrier_id=BAR_WG + me, number_of_threads=128)
            for x in cutlass.range_constexpr(2):
                for kb in cutlass.range_constexpr(2):
                    w = raw[x][kb]
                    words = cute.make_rmem_tensor((4,), cutlass.Uint32)
                    for h in cutlass.range_constexpr(2):
                        words[2 * h] = cute.arch.prmt(w[2 * h], w[2 * h + 1], first)
                        words[2 * h + 1] = cute.arch.prmt(w[2 * h], w[2 * h + 1], second)
                    row = (2 * block + x) * 64 + wwarp * 16 + channel
                    dst = cute.local_tile(vt16, (1, 8), (row, kb * 2 + lane // 16))
                    cute.copy(stsm, cute.recast_tensor(words, U16), dst[0, None])

    @cute.jit
    def own_frame(self, st, which: cutlass.Constexpr, buf, m, part, m_ref, l_run):
        """Moves the frame for this warpgroup's block and publishes (frame, beta, gamma)."""
        factors = st.factors.get_tensor(cute.make_layout((ROWS, 3, 2, PAIR_BUFFERS)))
        row = self.thread_row()
        tidx, _, _ = cute.arch.thread_idx()
        beta, gamma = [None] * 2, [None] * 2
        for i in cutlass.range_constexpr(2):
            m_ref[i], beta[i], gamma[i] = move_frame(m[i], m_ref[i])
            l_run[i] = l_run[i] * gamma[i] + part[i] * beta[i]
            if tidx % 4 == 0:
                factors[row + 8 * i, 0, which, buf] = m_ref[i]
                factors[row + 8 * i, 1, which, buf] = beta[i]
                factors[row + 8 * i, 2, which, buf] = gamma[i]
        return beta, gamma

    @cute.jit
    def peer_frame(self, st, which: cutlass.Constexpr, buf, m_ref, l_run):
        """Takes over the frame of the other warpgroup's block."""
        factors = st.factors.get_tensor(cute.make_layout((ROWS, 3, 2, PAIR_BUFFERS)))
        row = self.thread_row()
        beta, gamma = [None] * 2, [None] * 2
        for i in cutlass.range_constexpr(2):
            m_ref[i] = factors[row + 8 * i, 0, which, buf]
            beta[i] = factors[row + 8 * i, 1, which, buf]
            gamma[i] = factors[row + 8 * i, 2, which, buf]
            l_run[i] = l_run[i] * gamma[i]
        return beta, gamma

    @cute.jit
    def announce(self, st, which: cutlass.Constexpr, buf):
        """P, V^T and factors of block ``which`` are written: both warpgroups' WGMMAs may read."""
        tidx, _, _ = cute.arch.thread_idx()
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=BAR_WG + which, number_of_threads=128)
        if tidx % 32 == 0:
            cute.arch.mbarrier_arrive(st.ready_bar.data_ptr() + which * PAIR_BUFFERS + buf)

    @cute.jit
    def add_pv(self, mma_o, acc_O, frags, which: cutlass.Constexpr, buf, stage,
               half: cutlass.Constexpr, beta, gamma):  # fmt: skip
        """O = gamma O + beta (P8 V8) for this warpgroup's 256 channels, 64 at a time.

        Two product tiles in flight: the FFMAs of one run under the WGMMA of the next.
        """
        tmp = [cute.make_rmem_tensor(acc_O[0].layout, Float32) for _ in range(2)]
        for d in cutlass.range_constexpr(2):
            self.start_pv(mma_o, tmp[d], frags, 2 * buf + which, 4 * half + d, stage)
        for d in cutlass.range_constexpr(4):
            warpgroup.wait_group(1 if d < 3 else 0)
            for v in cutlass.range_constexpr(32):
                i = v // 2 % 2
                acc_O[d][v] = acc_O[d][v] * gamma[i] + tmp[d % 2][v] * beta[i]
            if const_expr(d < 2):
                self.start_pv(mma_o, tmp[d], frags, 2 * buf + which, 4 * half + d + 2, stage)

    def start_pv(self, mma_o, tmp, frags, p_stage, d_block: int, stage):
        warpgroup.fence()
        rP, rV = frags[4][None, None, None, p_stage], frags[5][d_block][None, None, None, stage]
        issue(mma_o, tmp, rP, rV, accumulate=False)
        warpgroup.commit_group()

    @cute.jit
    def finish_item(self, me: cutlass.Constexpr, st, acc_O, m_ref, l_run, out, lse, o_accum, lse_accum,
                    batch, slot, facts):  # fmt: skip
        """BlockReduceSum of l over both warpgroups, normalise, write rows and LSE."""
        _, rows, row_block, _, _ = facts
        tidx, _, _ = cute.arch.thread_idx()
        quad, row = tidx % 4, self.thread_row()
        sums = st.sums.get_tensor(cute.make_layout((ROWS, 2)))
        inv_s = st.inv.get_tensor(cute.make_layout(padded_size(ROWS)))
        l = [l_run[0], l_run[1]]
        for i in cutlass.range_constexpr(2):
            for off in cutlass.range_constexpr(2):
                l[i] = l[i] + cute.arch.shuffle_sync_bfly(l[i], 1 << off)
            if quad == 0:
                sums[row + 8 * i, me] = l[i]
        cute.arch.barrier(barrier_id=BAR_BOTH, number_of_threads=256)
        for i in cutlass.range_constexpr(2):
            total = sums[row + 8 * i, 0] + sums[row + 8 * i, 1]
            if const_expr(me == 0):
                if quad == 0:
                    self.finish_row(inv_s, total, m_ref[i], row + 8 * i, lse, lse_accum, batch, slot,
                                    facts)  # fmt: skip
            inverse = 1.0 / total
            inverse = Float32(0.0) if total == 0.0 else inverse
            at_row = row_block * ROWS + row + 8 * i
            if at_row < rows:
                for d in cutlass.range_constexpr(4):
                    for j in cutlass.range_constexpr(8):
                        pair = cute.make_rmem_tensor((2,), Float32)
                        for e in cutlass.range_constexpr(2):
                            pair[e] = acc_O[d][4 * j + 2 * i + e] * inverse
                        channel = me * (D // 2) + 64 * d + 8 * j + 2 * quad
                        if slot < 0:
                            store_pair(out, (Int64(batch) * rows + at_row) * D + channel, pair)
                        else:
                            at = Int64(slot) * o_accum.stride[0] + at_row * D + channel
                            store_pair(o_accum, at, pair)
        # ``sums`` is written again by the next item
        cute.arch.barrier(barrier_id=BAR_BOTH, number_of_threads=256)

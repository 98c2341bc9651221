"""FP8 MLA decode for SM90, pipeline ``dual_wg``: Algorithm 1 of the SnapMLA paper.

Two warpgroups keep two token blocks in flight and own half of d_v each.  WG0 takes the even blocks
of Q.K and softmax, WG1 the odd ones; P0 and its scale reach WG1 through shared memory (and P1 WG0),
and both add block 0 before block 1 (the paper's monotone order).  V is transposed
shared memory -> registers -> shared memory: in place, because a K tile is not needed as K once its
own Q.K is through, so no second buffer is spent and four tiles fit.

Where we leave the paper (docs/numerics.md): its recurrence gamma = exp(dm) sigma_p / sigma_p'
overflows when a block lies ~80 nats below the last, and its accumulator loses accuracy with
length.  Ours gives every block its own exponent reference m'_b, sums one block in the tensor core
and adds it in fp32: O = gamma O + beta (P8 V8).  gamma and beta are powers of two of *bounded*
differences, and the running m_ref moves lazily (combine/online_softmax.py).

Roles (3 warpgroups)
    wg 0  warp 0 KV producer, warp 1 Q producer, warp 2 scale warp (fp8_parts.py)
    wg 1  WG0: even blocks, channels   0..255
    wg 2  WG1: odd blocks,  channels 256..511

Timeline of a pair (blocks a, b)
    WG0 | Q.K a | softmax a, P_a | V_a^T | m_ref | P_a V_a^L | wait b | P_b V_b^L |
    WG1 | Q.K b | softmax b, P_b | V_b^T | wait a, m_ref | P_a V_a^R | P_b V_b^R |

Shared memory (bytes): Q 40960 | K ring 4 x 41216, V^T in place | scale triples 3840 |
    P 2 blocks x 2 buffers x 4096 | m_refs, factors, row sums, barriers 4 K          = 225 K
"""

from __future__ import annotations

import functools
import math
from enum import IntEnum
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from ...blocks import budget as bud
from ...blocks.barriers import warps_meet
from ...blocks.compat import wgmma_fence
from ...blocks.registers import claim_registers
from ...blocks.smem import array, staged, struct_of
from ...blocks.types import F8, ROW_MAJOR, U16
from ...combine.epilogue import Held, Shared, finish_row, write_rows
from ...combine.online_softmax import NEVER, raise_m_ref
from ...entry.entries import Fp8Entry, row_facts
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import QK_ROPE_HEAD_DIM as R
from ...formats.dims import TOKEN_TILE as TILE
from .. import transpose
from ..block_softmax import block_p, store_p
from ..decode import Decode, infeasible
from ..qk import QK_GROUPS
from ..roles import WARPGROUP, Cta, Layouts
from ..wgmma import issue, tiled_mma, u16_view
from .fp8_parts import SMALL_BYTES, STAGE_BYTES, Parts

if TYPE_CHECKING:
    from ...spec import VariantSpec

ROWS = 64
STAGES = 4  # of the K ring, unless the spec says otherwise
PAIR_BUFFERS = 2
MATH_WARPS = 8
PRODUCER_REGS, MATH_REGS = 24, 240
READERS = {"WG0": 4, "WG1": 4}  # of Q, of a KV stage


class Barrier(IntEnum):
    """Named barriers; each math warpgroup has one of its own, ``WG`` and the next."""

    WG = 1
    BOTH = 3


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.row_tile < ROWS:
        return "dual_wg puts rows on M = 64; row tile 64 with predicated rows serves fewer"
    if spec.stamps:
        return "dual_wg records no stamps; etap does"
    if spec.p_terms > 1:
        return "dual_wg has one term of P; etap has two"
    return infeasible(spec, 2, budget(spec))  # both blocks of a pair are in flight


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    parts = parts_of(spec)
    tiles = parts.stages * STAGE_BYTES + ROWS * 640 + 2 * PAIR_BUFFERS * ROWS * TILE
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", PRODUCER_REGS),
            bud.WarpGroup("math", MATH_REGS, count=2),
        ),
        smem=tiles + SMALL_BYTES,
        barriers=(
            *parts.barriers(),
            bud.Barrier("block a ready", MATH_WARPS // 2, {"WG0": 4}, PAIR_BUFFERS),
            bud.Barrier("block b ready", MATH_WARPS // 2, {"WG1": 4}, PAIR_BUFFERS),
        ),
        mmas=(
            bud.Mma("Q.K content", ROWS, TILE, D // QK_GROUPS, "e4m3"),
            bud.Mma("Q.K RoPE", ROWS, TILE, R, "bf16"),
            bud.Mma("P.V", ROWS, 64, TILE, "e4m3"),
        ),
    )


def parts_of(spec: VariantSpec) -> Parts:
    """Components of the pipeline: a KV ring of ``spec.stages`` (``STAGES`` by default), one stage
    of Q."""
    stages = spec.stages or STAGES
    return Parts(spec, stages=stages, q_stages=1, q_readers=READERS, k_readers=READERS)


def build(spec: VariantSpec):
    return Fp8Entry.exported(Decode(spec, DualWg(spec)))


class DualWg:
    """The pipeline: two math roles (``decode.Pipeline``)."""

    def __init__(self, spec: VariantSpec):
        self.parts, self.budget = parts_of(spec), budget(spec)
        self.stages = self.parts.stages

    # ---------------------------------------------------------------- host half

    def layouts(self) -> Layouts:
        p = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, D, TILE), F8, 2 * PAIR_BUFFERS)
        return Layouts(*self.parts.score.layouts(self.parts.q_stages, self.stages), p)

    def vt_layout(self):
        """V^T (512, 64 tokens) of a stage, over the bytes of its K tile."""
        return sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, D, TILE), F8, self.stages)

    def pv_mma(self):
        return tiled_mma(F8, 64)

    def storage(self, layouts):
        return struct_of(
            **self.parts.barrier_fields,
            ready_bar=array(Int64, 2 * PAIR_BUFFERS),  # (buffer, block of the pair)
            factors=array(Float32, ROWS * 3 * 2 * PAIR_BUFFERS, 128),  # see factors_view
            sums=array(Float32, 2 * ROWS, 128),  # row sums of the two warpgroups
            **self.parts.tile_fields(layouts),
        )

    # ---------------------------------------------------------------- roles

    @cute.jit
    def init_barriers(self, st):
        for i in cutlass.range_constexpr(2 * PAIR_BUFFERS):
            cute.arch.mbarrier_init(st.ready_bar.data_ptr() + i, MATH_WARPS // 2)
        self.parts.triples.ready.init(st)

    @cute.jit
    def math_roles(self, cta, wg):
        claim_registers(self.budget, MATH_REGS)
        self.math_loop(wg, cta)

    @cute.jit
    def math_loop(self, me, cta: Cta):
        """Work tiles and pairs of one math warpgroup; ``me`` 0 is the paper's WG0, 1 its WG1.

        One loop for both: two of them are 39 KB of instructions, more than a scheduler's cache.
        """
        st, layouts, q_pipe, k_pipe, gmem, call, part = cta
        span = self.parts.work.work_tiles_of(gmem.work, part)
        frags = self.fragments(me, st, layouts)
        shape_o = self.pv_mma().partition_shape_C((64, 64))
        acc_O = [cute.make_rmem_tensor(shape_o, Float32) for _ in range(4)]
        factor, m_ref, l_run = (cute.make_rmem_tensor((2,), Float32) for _ in range(3))
        limit = cute.make_rmem_tensor((2,), Int32)
        consumer = functools.partial(
            pipeline.make_pipeline_state, pipeline.PipelineUserType.Consumer
        )
        qst, ka, pst = consumer(1), consumer(self.stages), consumer(PAIR_BUFFERS)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, split = self.parts.work.work_tile_at(gmem.work, i)
            rows = self.parts.work.witnessed_rows_at(gmem.work, call, i, batch, ROWS)
            for x in cutlass.range_constexpr(2):
                factor[x], limit[x] = row_facts(
                    self.parts.work, gmem, call, batch, rows, self.thread_row() + 8 * x
                )
            ragged_from = self.parts.work.ragged_from(gmem.work, call, batch, rows)
            seqlen = self.parts.work.seqlen_of(gmem.work, batch)
            rows_in = (factor, limit, ragged_from, seqlen)
            m_ref.fill(NEVER)
            l_run.fill(0.0)
            for d in cutlass.range_constexpr(4):
                acc_O[d].fill(0.0)
            q_pipe.consumer_wait(qst)
            for pair in cutlass.range((last - first + 1) // 2, unroll=1):
                tile = first + 2 * pair
                kb = ka.clone()
                kb.advance()
                self.pair(me, st, layouts, k_pipe, frags, acc_O, tile, last, rows_in, m_ref,
                          l_run, qst, ka, kb, pst)  # fmt: skip
                ka.advance()
                if tile + 1 < last:
                    ka.advance()
                pst.advance()
            q_pipe.consumer_release(qst)
            qst.advance()
            rows = self.parts.work.witnessed_rows_at(
                gmem.work, call, i, batch, ROWS
            )  # again: registers
            self.finish_work_tile(me, st, acc_O, m_ref, l_run, gmem.results, call, split, rows)

    def vt_view(self, st):
        l_vt = self.vt_layout()
        ptr = cute.recast_ptr(st.kc.data_ptr(), l_vt.inner, dtype=F8)
        return cute.make_tensor(ptr, l_vt.outer)

    def fragments(self, me, st, layouts):
        """Descriptors: Q and K of both operand types, P as A, this warpgroup's half of V^T (chunks
        of 64 channels) as B."""
        tidx, _, _ = cute.arch.thread_idx()
        (mma_c, mma_r), mma_o = self.parts.score.mmas(), self.pv_mma()
        thr_c, thr_r, thr_o = (m.get_slice(tidx % WARPGROUP) for m in (mma_c, mma_r, mma_o))
        chunks = [
            cute.local_tile(self.vt_view(st), (64, TILE), (4 * me + d, 0, None)) for d in range(4)
        ]
        return (
            mma_c.make_fragment_A(thr_c.partition_A(staged(st.qc, layouts.q[0]))),
            mma_c.make_fragment_B(thr_c.partition_B(staged(st.kc, layouts.k[0]))),
            mma_r.make_fragment_A(thr_r.partition_A(staged(st.qr, layouts.q[1]))),
            mma_r.make_fragment_B(thr_r.partition_B(staged(st.kr, layouts.k[1]))),
            mma_o.make_fragment_A(thr_o.partition_A(staged(st.p, layouts.p))),
            [mma_o.make_fragment_B(thr_o.partition_B(c)) for c in chunks],
        )

    def thread_row(self):
        """First of this thread's two rows in a fragment; the other is 8 below."""
        tidx, _, _ = cute.arch.thread_idx()
        return tidx % WARPGROUP // 32 * 16 + tidx % 32 // 4

    def factors_view(self, st):
        """(row, [m_ref, beta, gamma], block of the pair, buffer)"""
        return st.factors.get_tensor(cute.make_layout((ROWS, 3, 2, PAIR_BUFFERS)))

    @cute.jit
    def pair(self, me, st, layouts, k_pipe, frags, acc_O, tile, last, rows_in, m_ref, l_run,
             qst, ka, kb, pst):  # fmt: skip
        """A column of Algorithm 1: blocks a and b, of which this warpgroup makes the P of one.

        A lone block a has no partner, but both barriers keep their phases.

        P buffers need no barrier of their own: WG0 rewrites a buffer two pairs later, and has by
        then waited for WG1's announcement of the pair between, which follows WG1's last read; so
        has WG1 for WG0's, which WG0 makes after it has finished the pair before.
        """
        buf, both = pst.index, tile + 1 < last
        ready = st.ready_bar.data_ptr() + buf
        mine = ka.clone()
        if me == 1:
            mine.advance()
        m, row_sums = [Float32(0.0)] * 2, [Float32(0.0)] * 2
        if tile + me < last:
            m, row_sums = self.front(
                me, st, layouts, k_pipe, frags, tile + me, rows_in, qst, mine, buf
            )
        # Betas and gammas of two rows.  WG0's own block is a, b's are the peer's; WG1's is b.
        of_a, of_b = [Float32(0.0)] * 4, [Float32(0.0)] * 4
        if me == 1:
            # behind it K(a) is there, too: WG0 has read it
            cute.arch.mbarrier_wait(ready, pst.phase)
            of_a = self.peer_m_ref(st, 0, buf, m_ref, l_run)
        if tile + me < last:
            of_b = self.own_m_ref(st, me, buf, m, row_sums, m_ref, l_run)
        self.announce(st, me, buf)
        if me == 0:
            of_a = of_b
        wgmma_fence()  # for both blocks: what b's products lie in was last read a pair ago
        self.add_pv(acc_O, frags, 2 * buf, ka.index, of_a)
        k_pipe.consumer_release(ka)
        if me == 0:
            cute.arch.mbarrier_wait(ready + PAIR_BUFFERS, pst.phase)
        if both:
            if me == 0:
                of_b = self.peer_m_ref(st, 1, buf, m_ref, l_run)
            self.add_pv(acc_O, frags, 2 * buf + 1, kb.index, of_b)
            k_pipe.consumer_release(kb)

    @cute.jit
    def front(self, me, st, layouts, k_pipe, frags, tile, rows_in, qst, kst, buf):
        """Q.K, softmax, P and V^T of this warpgroup's block."""
        factor, limit, ragged_from, seqlen = rows_in
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        acc_S = self.parts.score.accumulators()
        k_pipe.consumer_wait(kst)
        self.parts.score.issue(acc_S, frags[:4], qst.index, kst.index)
        self.parts.triples.ready.wait_full(st, kst.index, kst.phase)
        t = cute.make_rmem_tensor((32,), Float32)
        sigma = self.parts.triples.view(st, lane % 4, kst.index)
        m0, m1, l0, l1 = block_p(acc_S, t, sigma, tile, factor, limit, ragged_from)
        p16 = u16_view(staged(st.p, layouts.p), layouts.p.inner)
        store_p(t, p16[None, None, 2 * buf + me], wwarp, lane)
        if (tile + 1) * TILE > ragged_from:
            # all four warps' Q.K must have read the rows that are zeroed
            self.warpgroup_meets(me)
            self.parts.scales.zero_values(st, kst.index, seqlen - tile * TILE, 0, 4)
            self.warpgroup_meets(me)  # the proxy fence is the announcement's
        self.transpose_in_place(me, st, kst.index, wwarp, lane)
        return [m0, m1], [l0, l1]

    @staticmethod
    def warpgroup_meets(me):
        """Wait for the other warps of warpgroup ``me``, which is known at run time only."""
        cute.arch.barrier(barrier_id=Barrier.WG + me, number_of_threads=WARPGROUP)

    @cute.jit
    def transpose_in_place(self, me, st, stage, wwarp, lane):
        """K tile (64 tokens x 512) -> V^T (512 x 64 tokens), 128 channels (8 KiB) at a time.

        Of 16 channels 4 q + 2 j + e becomes row 8 j + 2 q + e: what a thread of a quad then has in
        its accumulators are four neighbours (``finish_work_tile``).  Even and odd channels trade
        places where j is 1, so that the eight rows of one stmatrix matrix, all four q and both j,
        fall into eight different bank groups.
        """
        base = st.kc.data_ptr() + cute.assume(stage * (TILE * D), divby=1024)
        offset = transpose.lane_offset(wwarp, lane)
        vt16 = u16_view(self.vt_view(st), self.vt_layout().inner)[None, None, stage]
        stsm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), U16)
        names = transpose.ROWS_ON_M
        traded = lane // 4 % 2 == 1
        first = Int32(names.odd) if traded else Int32(names.even)
        second = Int32(names.even) if traded else Int32(names.odd)
        q, j = lane % 8 // 2, lane % 2
        row16 = 8 * j + 2 * q + (j ^ (lane // 8 % 2))
        for block in cutlass.range_constexpr(4):
            raw = [transpose.load_raw(base, offset, 2 * block + x) for x in range(2)]
            self.warpgroup_meets(me)
            for x in cutlass.range_constexpr(2):
                for kb in cutlass.range_constexpr(2):
                    w = raw[x][kb]
                    words = cute.make_rmem_tensor((4,), cutlass.Uint32)
                    for h in cutlass.range_constexpr(2):
                        words[2 * h] = cute.arch.prmt(w[2 * h], w[2 * h + 1], first)
                        words[2 * h + 1] = cute.arch.prmt(w[2 * h], w[2 * h + 1], second)
                    row = (2 * block + x) * 64 + wwarp * 16 + row16
                    dst = cute.local_tile(vt16, (1, 8), (row, kb * 2 + lane // 16))
                    cute.copy(stsm, cute.recast_tensor(words, U16), dst[0, None])

    @cute.jit
    def own_m_ref(self, st, which, buf, m, row_sums, m_ref, l_run):
        """Moves the m_ref for this warpgroup's block, publishes (m_ref, beta, gamma); returns the
        betas of both rows, then the gammas."""
        factors = self.factors_view(st)
        row = self.thread_row()
        tidx, _, _ = cute.arch.thread_idx()
        beta, gamma = [None] * 2, [None] * 2
        for i in cutlass.range_constexpr(2):
            m_ref[i], beta[i], gamma[i] = raise_m_ref(m[i], m_ref[i])
            l_run[i] = l_run[i] * gamma[i] + row_sums[i] * beta[i]
            if tidx % 4 == 0:
                factors[row + 8 * i, 0, which, buf] = m_ref[i]
                factors[row + 8 * i, 1, which, buf] = beta[i]
                factors[row + 8 * i, 2, which, buf] = gamma[i]
        return [*beta, *gamma]

    @cute.jit
    def peer_m_ref(self, st, which: cutlass.Constexpr, buf, m_ref, l_run):
        """Takes over the m_ref of the other warpgroup's block; returns as ``own_m_ref``."""
        factors = self.factors_view(st)
        row = self.thread_row()
        beta, gamma = [None] * 2, [None] * 2
        for i in cutlass.range_constexpr(2):
            m_ref[i] = factors[row + 8 * i, 0, which, buf]
            beta[i] = factors[row + 8 * i, 1, which, buf]
            gamma[i] = factors[row + 8 * i, 2, which, buf]
            l_run[i] = l_run[i] * gamma[i]
        return [*beta, *gamma]

    @cute.jit
    def announce(self, st, which, buf):
        """P, V^T and factors of block ``which`` are written: both warpgroups' WGMMAs may read."""
        tidx, _, _ = cute.arch.thread_idx()
        cute.arch.fence_proxy("async.shared", space="cta")
        self.warpgroup_meets(which)
        if tidx % 32 == 0:
            cute.arch.mbarrier_arrive(st.ready_bar.data_ptr() + which * PAIR_BUFFERS + buf)

    @cute.jit
    def add_pv(self, acc_O, frags, p_stage, stage, factors):
        """O = gamma O + beta (P8 V8) for this warpgroup's 256 channels, 64 at a time.

        Two product tiles in flight: the FFMAs of one run under the WGMMA of the next.  The caller
        has a fence to make before.
        """
        tmp = [cute.make_rmem_tensor(acc_O[0].layout, Float32) for _ in range(2)]
        for d in cutlass.range_constexpr(2):
            self.start_pv(tmp[d], frags, p_stage, d, stage)
        for d in cutlass.range_constexpr(4):
            warpgroup.wait_group(1 if d < 3 else 0)
            for v in cutlass.range_constexpr(32):
                i = v // 2 % 2
                acc_O[d][v] = acc_O[d][v] * factors[2 + i] + tmp[d % 2][v] * factors[i]
            if const_expr(d < 2):
                wgmma_fence()
                self.start_pv(tmp[d], frags, p_stage, d + 2, stage)

    def start_pv(self, tmp, frags, p_stage, d_block: int, stage):
        rP, rV = frags[4][None, None, None, p_stage], frags[5][d_block][None, None, None, stage]
        issue(self.pv_mma(), tmp, rP, rV, accumulate=False)
        warpgroup.commit_group()

    @cute.jit
    def finish_work_tile(self, me, st, acc_O, m_ref, l_run, results, call, split, rows):
        """BlockReduceSum of l over both warpgroups, normalise, write rows and LSE."""
        tidx, _, _ = cute.arch.thread_idx()
        quad, local = tidx % 4, self.thread_row()
        sums = st.sums.get_tensor(cute.make_layout((ROWS, 2)))
        for i in cutlass.range_constexpr(2):
            mine = l_run[i]
            for off in cutlass.range_constexpr(2):
                mine = mine + cute.arch.shuffle_sync_bfly(mine, 1 << off)
            if quad == 0:
                sums[local + 8 * i, me] = mine
        warps_meet(Barrier.BOTH, MATH_WARPS)
        for i in cutlass.range_constexpr(2):
            row = local + 8 * i
            total = sums[local + 8 * i, 0] + sums[local + 8 * i, 1]
            inverse = 1.0 / total
            inverse = Float32(0.0) if total == 0.0 else inverse
            inverse = Float32(cutlass.select_(rows.stands != 0, inverse, Float32(math.nan)))
            if me == 0 and quad == 0:
                finish_row(results, call, split, rows, row, total, m_ref[i])
            # a quad has the warpgroup's 256 channels of a row: one exponent, a quarter a lane
            shared = Shared((1, 2), me * (D // 2) + 64 * quad, 4)
            runs = {}
            for d in cutlass.range_constexpr(4):
                for j in cutlass.range_constexpr(0, 8, 2):  # two of them are neighbours
                    four = cute.make_rmem_tensor((4,), Float32)
                    for v in cutlass.range_constexpr(4):
                        four[v] = acc_O[d][4 * (j + v // 2) + 2 * i + v % 2] * inverse
                    runs[64 * d + 8 * j] = four
            at = (local, me * (D // 2) + 4 * quad)
            write_rows(results, split, rows, at, [Held(8 * i, runs)], shared)
        # ``sums`` is written again by the next work tile
        warps_meet(Barrier.BOTH, MATH_WARPS)

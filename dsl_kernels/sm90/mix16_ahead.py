"""Softmax of ``mix16`` with Q.K of the next tile under it.

As mix16_softmax.py's, but Q.K of tile i + 1 begins when the frames of tile i stand, and P(i) is
made between its first units; so the tensor cores have work while P(i) is made and handed over.
RoPE comes first.  Of 64 rows it is divided by sigma in fp32, and the content goes on top: no drain
at the end; fewer rows have a sum for it.

Timeline of block i (registers, 64 rows: S 32, t 32, two fragments of 8: units of 32 channels)
    S i is there | t = S sigma f + log2 sigma - m_ref | free K(i) | vote, rarely frames move
    | wait P free, K(i+1) | RoPE -> | exp2, first half | RoPE / sigma | unit 0 -> | exp2, second
    half | P -> hand over | units 1 ... -> | wait

No branch and no wait lies where WGMMAs are in flight (softmax_many.py).  Frames of rows are in
shared memory: field ``frames``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from .. import compat
from ..common.frames import NEVER
from ..common.types import F16, U32
from ..compat import wgmma_fence
from ..dims import TOKEN_TILE as TILE
from ..ds_mla import GROUPS
from ..stamp import Stamp
from .block_softmax import store_words_of_p
from .dense_frames import HEADROOM
from .fragments import pad_layout
from .mix16_softmax import STEPS, MixSoftmax
from .roles import SOFTMAX_WARPS, WARPGROUP
from .softmax_role import P_RING
from .wgmma import issue


class AheadSoftmax(MixSoftmax):
    """The role with a look-ahead of a tile."""

    def __init__(self, parts):
        super().__init__(parts)
        if not self.few_rows:  # beside t there is room for no more
            self.units = [range(k, k + 2) for k in range(0, STEPS, 2)]

    def tools(self, st, layouts):
        """S^T as well: one sum and RoPE's; of 64 rows both in one."""
        sums = GROUPS + 1 if self.few_rows else 1
        return *super().tools(st, layouts), [self.accumulator() for _ in range(sums)]

    # ---------------------------------------------------------------- tiles

    @cute.jit
    def tiles(self, cta, tools, span, states, rows_out):
        qst, kst, blocks = states
        first, last = span
        fresh = Int32(1)  # no token has been seen
        if first < last:
            cta.k_pipe.consumer_wait(kst)
            self.parts.stamps.put(cta.gmem.results, Stamp.FIRST_TILE, kst.count == 0)
            self.start(cta.st, tools, qst.index, kst.index)
            frag = self.first_unit(cta.st, tools, qst.index, kst.index)
            self.rest(cta.st, tools, qst.index, kst.index, frag)
        for tile in cutlass.range(first, last, unroll=1):
            if tile + 1 < last:
                kst, fresh = self.block_of(True, cta, tools, qst, kst, blocks, fresh, rows_out)
            else:
                kst, fresh = self.block_of(False, cta, tools, qst, kst, blocks, fresh, rows_out)
                self.forget(tools[-1])
            blocks += 1
        return kst, blocks

    def forget(self, sums) -> None:
        """S^T becomes undefined, so that the loop need not carry it past its last round."""
        for acc in sums:
            for v in range(self.fragment.values):
                acc[v] = Float32(0.0)

    def place(self):
        """(warp, lane, this thread's first token)"""
        tidx, _, _ = cute.arch.thread_idx()
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        return wwarp, tidx % 32, wwarp * 16 + tidx % 32 // 4

    def start(self, st, tools, q_stage, stage) -> None:
        """RoPE of a tile's S^T."""
        *operands, sums = tools
        _, rKr, rQr = self.operands(operands, q_stage, stage)
        wgmma_fence()
        issue(self.rope_mma(), sums[-1], rKr, rQr, accumulate=False)
        warpgroup.commit_group()

    def ratio(self, st, stage, unit: int):
        """Words by which the two tokens' channels of a unit are multiplied; of few rows None."""
        if self.few_rows:
            return None
        own, token = self.parts.scales.own(st), self.place()[2]
        return [own[self.group_of(unit), token + 8 * e, stage] for e in range(2)]

    def issue_next(self, tools, frag, q_stage, unit: int) -> None:
        """A unit's WGMMAs: on top of RoPE, or of few rows to the sum of its group."""
        rQ, sums = tools[0][None, None, None, q_stage], tools[-1]
        if self.few_rows:
            self.issue_of_group(sums, frag, rQ, unit)
        else:
            self.issue_unit(sums[0], frag, rQ, unit, True)

    @cute.jit
    def first_unit(self, st, tools, q_stage, stage):
        """Unit 0, behind RoPE, which of 64 rows is divided by sigma; returns its fragment."""
        wwarp, lane, token = self.place()
        frag = self.to_k(self.load_k(st, stage, wwarp, lane, 0), self.ratio(st, stage, 0))
        if const_expr(not self.few_rows):
            facts, (acc,) = self.parts.scales.facts(st), tools[-1]
            inverse = [cute.arch.rcp_approx(facts[2, token + 8 * e, stage]) for e in range(2)]
            warpgroup.wait_group(0)
            for v in cutlass.range_constexpr(self.fragment.values):
                acc[v] = acc[v] * inverse[self.fragment.token(v)]
        self.issue_next(tools, frag, q_stage, 0)
        return frag

    @cute.jit
    def rest(self, st, tools, q_stage, stage, frag):
        """Units 1 and on, until S^T is there; ``frag`` is in flight."""
        wwarp, lane, _ = self.place()
        units = const_expr(len(self.units))
        held = [frag, None]
        raws, ratio = self.load_k(st, stage, wwarp, lane, 1), self.ratio(st, stage, 1)
        for u in cutlass.range_constexpr(1, units):
            if const_expr(u > 1):
                warpgroup.wait_group(1)
            held[u % 2] = self.to_k(raws, ratio)
            self.issue_next(tools, held[u % 2], q_stage, u)
            if const_expr(u + 1 < units):
                raws = self.load_k(st, stage, wwarp, lane, u + 1)
                ratio = self.ratio(st, stage, u + 1)
        warpgroup.wait_group(0)

    @cute.jit
    def block_of(self, more: cutlass.Constexpr, cta, tools, qst, kst, blocks, fresh, rows_out):
        """P^T of one tile, whose S^T is there; with ``more`` the next one's S^T under it.

        Returns (the ring's state of the next tile, the next ``fresh``).
        """
        wwarp, lane, _ = self.place()
        st, buf, l_run = cta.st, blocks & 1, rows_out[1]
        t = cute.make_rmem_tensor((self.fragment.values,), Float32)
        inverse, top, first = self.logits(st, tools[-1], t, kst.index, fresh)
        self.free_stage(cta, kst)
        moves = self.vote(st, top > HEADROOM, buf, wwarp, lane) | first
        P_RING.wait_empty(st, buf, (blocks >> 1 & 1) ^ 1)
        if moves != 0:
            self.move_frames(st, t, buf, first, rows_out, wwarp, lane)
        kst.advance()
        stage = kst.index
        if const_expr(more):
            cta.k_pipe.consumer_wait(kst)
            self.start(st, tools, qst.index, stage)
        words = self.half_of_p(t, inverse, l_run, 0)
        frag = None
        if const_expr(more):
            frag = self.first_unit(st, tools, qst.index, stage)
        words += self.half_of_p(t, inverse, l_run, 1)
        self.hand_over(st, words, buf, moves, wwarp, lane)
        if const_expr(more):
            self.rest(st, tools, qst.index, stage, frag)
        return kst, fresh - first

    @cute.jit
    def logits(self, st, sums, t, stage, fresh):
        """S^T -> t; returns (1 / sigma of the two tokens, the thread's largest, whether this is the
        item's first tile with a token)."""
        row, token = self.fragment.row, self.fragment.token
        facts, own, lane = self.parts.scales.facts(st), self.place()[2], cute.arch.lane_idx()
        log, inverse, sigma, some = [None] * 2, [None] * 2, [None] * 2, Float32(0.0)
        for e in cutlass.range_constexpr(2):
            four = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(facts[None, own + 8 * e, stage], four)
            log[e], inverse[e], sigma[e], some = four[0], four[1], four[2], four[3]
        first = cute.arch.make_warp_uniform(
            Int32(cutlass.select_(some > Float32(0.0), fresh, Int32(0)))
        )
        self.combine(st, sums, t, stage, sigma)
        factor = cute.make_rmem_tensor((self.fragment.rows,), Float32)
        frame = cute.make_rmem_tensor((self.fragment.rows,), Float32)
        factors = cute.make_tensor(st.factors.data_ptr(), pad_layout(self.rows_cta))
        cute.autovec_copy(factors[None, lane % 4], factor)
        cute.autovec_copy(self.frames_of(st), frame)
        top = Float32(NEVER)
        for v in cutlass.range_constexpr(self.fragment.values):
            x, e = row(v), token(v)
            t[v] = t[v] * factor[x] + (log[e] - frame[x])
            top = cute.arch.fmax(top, t[v])
        return inverse, top, first

    def combine(self, st, sums, t, stage, sigma) -> None:
        """Sums of S^T -> t in the units of Q and K."""
        if not self.few_rows:
            for v in range(self.fragment.values):
                t[v] = sums[0][v] * sigma[self.fragment.token(v)]
            return
        scale = self.scales_of(st, stage)
        for v in range(self.fragment.values):
            t[v] = sums[GROUPS][v]
            for g in range(GROUPS):
                t[v] = t[v] + sums[g][v] * scale[self.fragment.token(v)][g]

    def half_of_p(self, t, inverse, l_run, half: int):
        """Exponentials of half of the rows, added to their sums; P as words."""
        rows = self.fragment.rows // 2
        for x in range(half * rows, (half + 1) * rows):
            v = 4 * (x // 2) + x % 2
            t[v] = cute.math.exp2(t[v], fastmath=True)
            t[v + 2] = cute.math.exp2(t[v + 2], fastmath=True)
            l_run[x] = l_run[x] + (t[v] * inverse[0] + t[v + 2] * inverse[1])
        part = cute.make_tensor(t.iterator + 2 * rows * half, cute.make_layout(2 * rows))
        p16 = cute.make_rmem_tensor((2 * rows,), F16)
        p16.store(part.load().to(F16))
        words = cute.recast_tensor(p16, U32)
        return [words[i] for i in range(rows)]

    def hand_over(self, st, words, buf, moves, wwarp, lane):
        """P^T to shared memory as ``store_p`` does; no branch."""
        base = st.p.data_ptr().toint() + buf * (self.rows_cta * TILE * 2)
        row, chunk = lane // 16 * 8 + lane % 8, 2 * wwarp + lane // 8 % 2
        line = row * 128 + (chunk ^ (row % 8)) * 16
        for x in range(self.rows_cta // 16):
            store_words_of_p(words[4 * x : 4 * x + 4], base + (line + x * 2048), transposed=True)
        flag = cutlass.select_(moves != 0, Int32(1), Int32(0))
        at = st.flag.data_ptr().toint() + (buf * SOFTMAX_WARPS + wwarp)
        compat.store_shared(at, flag, "u8")
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        P_RING.arrive_full_if(st, buf, lane == 0)

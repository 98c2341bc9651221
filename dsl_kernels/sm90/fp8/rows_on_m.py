"""Softmax of ``etap`` with 64 query rows: rows lie on M, S = Q K^T, and Q.K of the next block runs
under the softmax of this one.

Q.K streams both operands out of shared memory for 700 cycles a tile and starves every load of the
other roles meanwhile; issued in pieces between the steps of softmax it does so less.  S is in two
chains (qk.ScoreChains).  Chain A is issued first of all; RoPE on top of it while the first half of
P(i) is on its way to shared memory; chain B, whose 32 accumulators have no room beside t, when P(i)
is packed.

Timeline of block i (registers: S in two chains of 32, then t 32, 1/sigma 16, chain A 32)
    wait sigma(i) | t = S sigma f + log2 sigma, mask | free K(i) | wait P free | wait K(i+1)
    A -> | maxima | exp2, e4m3, first half, second | P, first half | RoPE -> | P, second half
    | B -> | proxy fence | beta, gamma, flag | hand over | wait for all of Q.K(i+1)

**The rule: no branch, no wait and as little address arithmetic as can be while WGMMAs are in
flight.**  ptxas serialises every WGMMA for the first (note C7514), the second holds P back, the
third takes issue slots of a role that is short of them.  So waits come before the first WGMMA,
addresses are computed once, arrivals are predicated, and the last block of a work tile, which has
nothing to issue, takes a branch of its own and leaves S undefined (``ScoreChains.forget``): else
the old S would be carried around the loop, 64 registers more.  ptxas decides in the end where the
WGMMAs go: codegen's audit refuses a build whose softmax has none of its steps between them, or a
branch; docs/lab-book.md tells what orders were tried and what they cost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...blocks import compat
from ...combine.epilogue import finish_row
from ...combine.online_softmax import P_LOG2_MAX, raise_m_ref
from ...formats.stamp import Stamp
from ..block_softmax import ROWS_ON_M, exp2_half, logits, maxima, pack_half, store_words_of_p
from ..fragments import padded_size, row_position
from ..qk import ScoreChains
from ..roles import INV_RING, WARPGROUP
from .fp8_parts import Parts
from .softmax_role import P_RING, SoftmaxRole

P_BYTES = 64 * 64  # of a buffer
ROW_8 = 8  # bytes between the factors of rows g and g + 8 of a warp (fragments.row_position)


class Addresses(NamedTuple):
    """Shared addresses of what this thread hands over, in buffer 0.

    Attributes:
        p: the row that it names to stmatrix, for the block's first 32 tokens.
        beta: factor of its row g.
        to_gamma: distance of gamma from there, a constant.
        flag: its warp's byte.
    """

    p: Any
    beta: Any
    to_gamma: Any
    flag: Any


class RowsOnMSoftmax(SoftmaxRole):
    """The form with rows on M."""

    def __init__(self, parts: Parts):
        super().__init__(parts, ROWS_ON_M)
        # P'/sigma of a row's second half in one chain of sums instead of two: 2 % slower with one
        # CTA, as much faster with two (docs/lab-book.md)
        self.one_sum = parts.cluster > 1
        self.chains = ScoreChains()

    def tools(self, st, layouts):
        """S, descriptor words of Q and K, addresses of the hand-over."""
        return self.chains.accumulators(), self.chains.words(st), self.addresses(st)

    @staticmethod
    def first(cta):
        """0, which the compiler does not know.  As an index of barriers it keeps ptxas from holding
        the base of shared memory in a vector register for the sake of their waits' slow paths."""
        return cta.call.causal >> 31

    def wait_q(self, cta, qst):
        cta.q_pipe.sync_object_full.wait(self.first(cta), qst.phase)

    def addresses(self, st):
        """``Addresses``, which the compiler is not to compute anew in every tile."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, wwarp = tidx % 32, tidx % WARPGROUP // 32
        row, chunk = (
            wwarp * 16 + lane % 16,
            lane // 16,
        )  # matrix lane // 8 of stmatrix, row lane % 8
        p = st.p.data_ptr().toint() + row * 64 + chunk * 16
        factor = 4 * row_position(wwarp * 16 + lane // 4, 64)
        return Addresses(
            compat.opaque(p ^ ((p >> 3) & 0x30)),  # the 64-byte swizzle
            st.beta.data_ptr().toint() + factor,  # computed anew: a register less
            st.gamma.data_ptr().toint() - st.beta.data_ptr().toint(),
            st.flag.data_ptr().toint() + wwarp,
        )

    @cute.jit
    def tiles(self, cta, tools, span, states, rows_in, rows_out):
        acc_S, operands, _ = tools
        _, kst, blocks = states
        first, last = span
        if first < last:
            cta.k_pipe.consumer_wait(kst)
            self.parts.stamps.put(cta.gmem.results, Stamp.FIRST_TILE, kst.count == 0)
            self.chains.issue(acc_S, operands, kst.index)
            warpgroup.wait_group(0)
        for tile in cutlass.range(first, last, unroll=1):
            if tile + 1 < last:
                kst = self.block(True, cta, tile, tools, kst, blocks, rows_in, rows_out)
            else:
                kst = self.block(False, cta, tile, tools, kst, blocks, rows_in, rows_out)
                self.chains.forget(acc_S)
            blocks += 1
        return kst, blocks

    @cute.jit
    def finish_scores(self, cta, tile, acc_S, t, kst, rows_in):
        """Accumulators -> t of a block, whose K stage is free of us then; returns 1/sigma."""
        tidx, _, _ = cute.arch.thread_idx()
        sigma = self.parts.triples.view(cta.st, tidx % 4, kst.index)
        self.parts.triples.ready.wait_full(cta.st, kst.index, kst.phase)
        inv = logits(acc_S, t, sigma, tile, *rows_in)
        cute.arch.sync_warp()  # one lane frees the stage for all: their reads come first
        cta.k_pipe.consumer_release(kst)
        return inv

    @cute.jit
    def block(self, more: cutlass.Constexpr, cta, tile, tools, kst, blocks, rows_in, rows_out):
        """S -> P of one block, handed over; with ``more`` the next one's Q.K under it.

        Returns the K state of the next tile.
        """
        tidx, _, _ = cute.arch.thread_idx()
        (acc_S, operands, at), (m_ref, l_run) = tools, rows_out
        st, buf = cta.st, blocks & 1
        t = cute.make_rmem_tensor((ROWS_ON_M.values,), Float32)
        inv = self.finish_scores(cta, tile, acc_S, t, kst, rows_in)
        P_RING.wait_empty(st, buf, (blocks >> 1 & 1) ^ 1)
        kst.advance()
        k_next = kst.index
        if const_expr(more):
            cta.k_pipe.consumer_wait(kst)
            self.chains.content_a(acc_S, operands, k_next)
        m = maxima(t)
        shift = [P_LOG2_MAX - m[0], P_LOG2_MAX - m[1]]  # m is taken from it again: a register each
        part = exp2_half(t, inv, shift, [Float32(0.0) for _ in range(4)], 0)
        words = pack_half(t, 0)
        if const_expr(self.one_sum):
            part = [part[0] + part[1], part[2] + part[3]]
        part = exp2_half(t, inv, shift, part, 1)
        words_2 = pack_half(t, 1)
        store_words_of_p(words, at.p + buf * P_BYTES)
        if const_expr(more):
            self.chains.rope(acc_S, operands, k_next)
        store_words_of_p(words_2, (at.p ^ 32) + buf * P_BYTES)
        if const_expr(more):
            self.chains.content_b(acc_S, operands, k_next)
        # P for the WGMMAs of P.V; what follows is read by ordinary loads, and its arithmetic is
        # what the fence's latency hides under
        cute.arch.fence_proxy("async.shared", space="cta")
        moved = False
        for i in cutlass.range_constexpr(2):
            old = m_ref[i]
            m_ref[i], beta, gamma = raise_m_ref(P_LOG2_MAX - shift[i], old)
            row_sum = part[i] if const_expr(self.one_sum) else part[2 * i] + part[2 * i + 1]
            l_run[i] = l_run[i] * gamma + row_sum * beta
            moved = moved or m_ref[i] > old
            # the four lanes of a quad store the same: cheaper than a branch
            offset = buf * (4 * padded_size(64)) + i * ROW_8
            compat.store_shared(at.beta + offset, beta)
            compat.store_shared(at.beta + at.to_gamma + offset, gamma)
        self.hand_over(st, at, buf, cute.arch.vote_any_sync(moved), tidx % 32)
        if const_expr(more):
            warpgroup.wait_group(0)
        return kst

    def hand_over(self, st, at, buf, any_moved, lane):
        """P, fenced, and beta, gamma are written: tell the P.V warps.  No branch (see above)."""
        flag = cutlass.select_(any_moved, Int32(1), Int32(0))
        compat.store_shared(at.flag + 4 * buf, flag, "u8")
        cute.arch.sync_warp()
        P_RING.arrive_full_if(st, buf, lane == 0)

    @cute.jit
    def finish_rows(self, cta, inv_phase, m_ref, l_run, split, rows):
        """Sums over the lanes of a quad by shuffles."""
        tidx, _, _ = cute.arch.thread_idx()
        st, lane = cta.st, tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv_s = st.inv.get_tensor(cute.make_layout(padded_size(self.rows_cta)))
        INV_RING.wait_empty(st, self.first(cta), inv_phase)
        for i in cutlass.range_constexpr(2):
            total = l_run[i]
            for off in cutlass.range_constexpr(2):
                total = total + cute.arch.shuffle_sync_bfly(total, 1 << off)
            if lane % 4 == 0:
                row = wwarp * 16 + lane // 4 + 8 * i
                inv_s[row_position(row, self.rows_cta)] = finish_row(
                    cta.gmem.results, cta.call, split, rows, row, total, m_ref[i]
                )
        cute.arch.sync_warp()
        if lane == 0:
            INV_RING.arrive_full(st, 0)

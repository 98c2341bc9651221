"""Sparse prefill with 64 heads a CTA: rows on M, S = Q K^T, O = P V (b16/dense_rows_on_m.py).

Maxima are a thread's own: only when one is above its row's m_ref by more than the headroom do lanes
compare them, and the m_ref moves.  Two thirds of Q are in registers, so that their room in shared
memory takes the next work tile's while this one runs.

Timeline of tile i
    softmax   | Q.K i: first half, second half | maxima | P of 32 tokens -> | of the others -> |
    P.V       | wait first P i | rescale O if an m_ref moved | 2 WGMMAs 64 x 128 x 16 | wait second
              | 2 WGMMAs, free half of KV i | 4 WGMMAs on the other half, free KV i
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...blocks import compat
from ...blocks.barriers import warps_meet
from ...blocks.rounding import fma
from ...blocks.smem import array
from ...blocks.types import BF16, U32
from ...combine.epilogue import Woven, store_woven
from ...formats.dims import HEAD_DIM_QK
from ...formats.dims import TOKEN_TILE as TILE
from ..attention_parts import release
from ..block_softmax import ROWS_ON_M, store_words_of_p
from ..fragments import padded_size
from ..line_stores import GROUP_BYTES, LineGroup
from ..online_softmax import HEADROOM, raise_m_ref
from ..roles import INV_RING, PV_WARPS, ROWS_OF_CTA, SOFTMAX_WARPS, WARPGROUP, Barrier
from ..wgmma import issue
from .dense_form import HALF
from .dense_parts import CHUNK_STEPS
from .dense_rows_on_m import PV_N, RowsOnM
from .sparse_prefill_form import GatheredForm, Parts
from .sparse_prefill_parts import (
    EARLY,
    LATE,
    REGISTER_BLOCKS,
    STAGES,
    GatheredTiles,
    finish_row,
    first_lse,
    place_of,
)


@cute.jit
def own_maxima(acc, scale):
    """Largest logits of the thread's two rows, over its own places."""
    m4 = [acc[v] for v in range(8)]  # four chains a row
    for v in cutlass.range_constexpr(8, ROWS_ON_M.values):
        m4[v % 8] = cute.arch.fmax(m4[v % 8], acc[v])
    return [
        scale
        * cute.arch.fmax(cute.arch.fmax(m4[i], m4[i + 1]), cute.arch.fmax(m4[i + 4], m4[i + 5]))
        for i in (0, 2)
    ]


class GatheredRowsOnM(GatheredForm, RowsOnM):
    """The form with rows on M."""

    def __init__(self, loads: GatheredTiles):
        RowsOnM.__init__(self, Parts(loads))
        self.loads = loads

    # ---------------------------------------------------------------- softmax warpgroup

    @cute.jit
    def begin(self, st, operands, work_tiles):
        self.loads.q.wait_full(st, EARLY, work_tiles & 1)
        self.take_q(st, operands)

    @cute.jit
    def scores(self, st, operands, turn, q_phase, first_tile):
        """S of a tile: Q.K half by half as they come.

        The room of what ``take_q`` reads is free once the first tile's products are issued: they
        wait for the registers.  An arrival right behind ``take_q`` does not wait for its loads, and
        a copy that was waiting for it overwrote rows that were still to be read (seen on an H100).
        """
        (rQ, sQ, sK, _), (mma_r, mma_s) = operands, self.score_mmas()
        acc = cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS_OF_CTA, TILE)), Float32)
        sQ_now, sK_now = sQ[None, None, None, 0], sK[None, None, None, turn.stage]
        self.loads.kv.wait_full(st, turn.slot(EARLY), turn.phase)
        compat.wgmma_fence()
        for i in cutlass.range_constexpr(len(self.loads.order)):
            block = self.loads.order[i]
            if const_expr(i == len(self.loads.halves[EARLY])):
                self.loads.kv.wait_full(st, turn.slot(LATE), turn.phase)
            if const_expr(block == REGISTER_BLOCKS):
                self.loads.q.wait_full(st, LATE, q_phase)
            first = block * CHUNK_STEPS
            mma, of_q = (mma_r, rQ) if block < REGISTER_BLOCKS else (mma_s, sQ_now)
            issue(mma, acc, of_q, sK_now, accumulate=i > 0, first=first, last=first + CHUNK_STEPS)
        warpgroup.commit_group()
        if first_tile:
            release(self.loads.q, st, EARLY)
        warpgroup.wait_group(0)
        return acc

    @cute.jit
    def tile(self, st, operands, state, turn, work_tiles, ends):
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        m_ref, sums, most, scale = state
        acc = self.scores(st, operands, turn, work_tiles & 1, ends[0])
        if ends[1]:
            release(self.loads.q, st, LATE)
        self.hide(st, acc, turn.stage, lane)
        high = own_maxima(acc, scale)
        beyond = False
        for i in cutlass.range_constexpr(2):
            most[i] = cute.arch.fmax(most[i], high[i])
            beyond = beyond | (high[i] > m_ref[i] + HEADROOM)
        any_beyond = cute.arch.vote_any_sync(beyond)
        if any_beyond:
            for i in cutlass.range_constexpr(2):
                top = high[i]
                for off in cutlass.range_constexpr(2):
                    top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << off))
                m_ref[i], gamma = raise_m_ref(top, m_ref[i])
                sums[i] = sums[i] * gamma
                # the four lanes of a quad store the same: cheaper than a branch
                at = 4 * (turn.stage * ROWS_OF_CTA + ROWS_ON_M.row_at(wwarp, lane, i))
                compat.store_shared(st.gamma.data_ptr().toint() + at, gamma)
        flag = cutlass.select_(any_beyond, Int32(1), Int32(0))
        at = 4 * (turn.stage * SOFTMAX_WARPS + wwarp)
        compat.store_shared(st.flag.data_ptr().toint() + at, flag, "u32")
        part = [Float32(0.0) for _ in range(4)]
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)  # all have read the RoPE columns
        for half in cutlass.range_constexpr(2):
            part = self.half_of_p(st, acc, m_ref, scale, part, turn, operands[3], half)
        for i in cutlass.range_constexpr(2):
            sums[i] = sums[i] + (part[2 * i] + part[2 * i + 1])

    @cute.jit
    def half_of_p(self, st, acc, m_ref, scale, part, turn, line, half: cutlass.Constexpr):
        """P of 32 tokens, handed over; returns the rows' sums, two each, which gain theirs."""
        tidx, _, _ = cute.arch.thread_idx()
        count = const_expr(ROWS_ON_M.values // 2)
        p = cute.make_rmem_tensor((count,), Float32)
        for x in cutlass.range_constexpr(count):
            v = count * half + x
            row = ROWS_ON_M.row(v)
            p[x] = cute.math.exp2(fma(acc[v], scale, -m_ref[row]), fastmath=True)
            part[2 * row + v % 2] = part[2 * row + v % 2] + p[x]
        p16 = cute.make_rmem_tensor((count,), BF16)
        p16.store(p.load().to(BF16))
        words = cute.recast_tensor(p16, U32)
        p_at = self.parts.rope(st).toint() + turn.stage * (TILE * HEAD_DIM_QK * 2)
        for x in cutlass.range_constexpr(2):
            four = [words[4 * x + i] for i in range(4)]
            store_words_of_p(four, p_at + (line ^ (32 * (2 * half + x))))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.parts.p_ring.arrive_full_if(st, turn.slot(half), tidx % 32 == 0)
        return part

    @cute.jit
    def hide(self, st, acc, stage, lane):
        """Takes away the logits of places without a token, whose rows of K are zeros."""
        named = self.places(st, stage)
        if (named[0] & named[1]) != -1:
            mine = [word >> (2 * (lane % 4)) for word in named]
            for v in cutlass.range_constexpr(ROWS_ON_M.values):
                place = ROWS_ON_M.token_at(0, 0, 0, v)
                if (mine[place // 32] >> (place % 32)) & 1 == 0:
                    acc[v] = -Float32.inf

    @cute.jit
    def finish(self, st, gmem, work_tile, state, work_tiles):
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        m_ref, sums, most, _ = state
        inv = st.inv.get_tensor(cute.make_layout(padded_size(ROWS_OF_CTA)))
        INV_RING.wait_empty(st, 0, (work_tiles & 1) ^ 1)
        for i in cutlass.range_constexpr(2):
            total, top = sums[i], most[i]
            for off in cutlass.range_constexpr(2):
                total = total + cute.arch.shuffle_sync_bfly(total, 1 << off)
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << off))
            if lane % 4 == 0:
                row = ROWS_ON_M.row_at(wwarp, lane, i)
                head = work_tile.block * ROWS_OF_CTA + row
                inv[row] = finish_row(gmem, head, work_tile.query, total, m_ref[i], top)
        cute.arch.sync_warp()
        if lane == 0:
            INV_RING.arrive_full(st, 0)

    @cute.jit
    def note_first(self, st, gmem, work_tile, state):
        """The four lanes of a quad have the same m_ref, and a share of the sum each."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        m_ref, sums, most, _ = state
        for i in cutlass.range_constexpr(2):
            total, top = sums[i], most[i]
            for off in cutlass.range_constexpr(2):
                total = total + cute.arch.shuffle_sync_bfly(total, 1 << off)
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << off))
            if lane % 4 == 0:
                head = work_tile.block * ROWS_OF_CTA + ROWS_ON_M.row_at(wwarp, lane, i)
                first_lse(gmem, head, work_tile.query, total, m_ref[i], top)

    # ---------------------------------------------------------------- P.V warpgroups

    @cute.jit
    def product(self, st, acc_O, operands, turn):
        """The first half of P meets the first half of the channels while softmax is at the other.

        The rest is as ``RowsOnM.pv_block`` does it.
        """
        tidx, _, _ = cute.arch.thread_idx()
        lane, stage = tidx % 32, turn.stage
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        rP, rV = operands
        rP_now, steps = rP[None, None, None, stage], const_expr(TILE // 16)
        self.parts.p_ring.wait_full(st, turn.slot(0), turn.phase)
        if cute.arch.make_warp_uniform(self.flags(st)[wwarp, stage]) != 0:
            gamma_s = st.gamma.get_tensor(cute.make_layout((ROWS_OF_CTA, STAGES)))
            gamma = [gamma_s[ROWS_ON_M.row_at(wwarp, lane, x), stage] for x in range(2)]
            for acc in acc_O:
                for v in cutlass.range_constexpr(PV_N // 2):
                    acc[v] = acc[v] * gamma[v // 2 % 2]
        compat.wgmma_fence()
        for i in cutlass.range_constexpr(len(acc_O)):
            mma, acc, rV_now = self.pv_mma(), acc_O[i], rV[i][None, None, None, stage]
            issue(mma, acc, rP_now, rV_now, accumulate=True, last=steps // 2)
            if const_expr(i == 0):
                self.parts.p_ring.wait_full(st, turn.slot(1), turn.phase)
            issue(mma, acc, rP_now, rV_now, accumulate=True, first=steps // 2)
            warpgroup.commit_group()
        warpgroup.wait_group(1)
        self.half_read(st, stage)
        warpgroup.wait_group(0)

    @cute.jit
    def write(self, st, gmem, acc_O, work_tile, half):
        """The four lanes of a quad hold pairs of channels of the same row, and swap them to store
        16 bytes each."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, quad = tidx % 32, tidx % 4
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv = st.inv.get_tensor(cute.make_layout(padded_size(ROWS_OF_CTA)))
        woven, out = Woven((1, 2), quad, 8), gmem.out
        for i in cutlass.range_constexpr(2):
            row = ROWS_ON_M.row_at(wwarp, lane, i)
            head, inverse = work_tile.block * ROWS_OF_CTA + row, inv[row]
            runs = {}
            for j in cutlass.range_constexpr(HALF // 8):
                acc, v = acc_O[8 * j // PV_N], 4 * (j % (PV_N // 8)) + 2 * i
                # in place: another 64 registers there are not
                acc[v], acc[v + 1] = acc[v] * inverse, acc[v + 1] * inverse
                runs[8 * j] = cute.make_tensor(acc.iterator + v, cute.make_layout(2))
            place = place_of(gmem, work_tile.query, head, half * HALF)
            target = out.iterator + (place + woven.offset(out.element_type))
            store_woven(target, 0, runs, head < gmem.heads, woven)


class GatheredLines(GatheredRowsOnM):
    """The same where lists are split: fp32 partial rows, stored as whole lines (line_stores.py).

    Shared memory has another 8192 bytes, ``lines``, a line group of each P.V warp.
    """

    lines_bytes = PV_WARPS * GROUP_BYTES

    def all_fields(self) -> dict:
        return {**super().all_fields(), "lines": array(U32, self.lines_bytes // 4, 1024)}

    @cute.jit
    def write(self, st, gmem, acc_O, work_tile, half):
        """Whole lines of 4 rows a store."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, wwarp = tidx % 32, cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv = st.inv.get_tensor(cute.make_layout(padded_size(ROWS_OF_CTA)))
        room, out = st.lines.data_ptr().toint() + (4 * half + wwarp) * GROUP_BYTES, gmem.out
        # 0, but known with a work tile only: what follows from it takes no registers before
        nothing = compat.opaque(Int32(work_tile.query)) >> 31
        lines = LineGroup(room, lane + nothing)
        head = work_tile.block * ROWS_OF_CTA + wwarp * 16 + lines.row
        place = place_of(gmem, work_tile.query, head, half * HALF + lines.channel)
        target, step = out.iterator + place, Int64(out.stride[1]) + Int64(nothing)
        for i in cutlass.range_constexpr(2):
            inverse = inv[ROWS_ON_M.row_at(wwarp, lane, i)]

            def pair(j, i=i, inverse=inverse):
                acc, v = acc_O[8 * j // PV_N], 4 * (j % (PV_N // 8)) + 2 * i
                return acc[v] * inverse, acc[v + 1] * inverse

            for row, first, words in lines.stored(HALF, pair):
                if head + (8 * i + row) < gmem.heads:
                    compat.store_words(target + ((8 * i + row) * step + first), words)

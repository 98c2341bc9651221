"""Sparse prefill with 32 heads a CTA or fewer: tokens on M, S^T = K Q^T, O^T = V^T P^T.

As in 16-bit decode (b16/dense_swap_ab.py) N is the number of heads, so that few heads do not pay
for 64; what is left is the gather.  Q has two stages: the next work tile's is there when this one
ends.

Timeline of tile i
    softmax   | Q.K i: first half, second half | maxima over warps, exp2 | P^T i -> | wait K i+1
    P.V       | wait P i | rescale O if an m_ref moved | 2 x 4 WGMMAs 64 x rows x 16, free half of
              | KV i | as many on the other half, free KV i
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...blocks import compat
from ...blocks.barriers import warps_meet
from ...blocks.rounding import fma
from ...combine.epilogue import store_run
from ...combine.online_softmax import NEVER
from ...formats.dims import TOKEN_TILE as TILE
from ..attention_parts import release
from ..fragments import pad_layout, padded_size, row_position
from ..online_softmax import raise_m_ref
from ..roles import INV_RING, SOFTMAX_WARPS, WARPGROUP, Barrier
from ..wgmma import issue
from .dense_form import HALF
from .dense_parts import CHUNK_STEPS
from .dense_swap_ab import D_BLOCKS, SwapAb
from .sparse_prefill_form import GatheredForm, Parts
from .sparse_prefill_parts import EARLY, LATE, GatheredTiles, finish_row, first_lse, place_of


class GatheredSwapAb(GatheredForm, SwapAb):
    """The form with tokens on M."""

    def __init__(self, loads: GatheredTiles):
        SwapAb.__init__(self, Parts(loads))
        self.loads = loads

    # ---------------------------------------------------------------- softmax warpgroup

    @cute.jit
    def begin(self, st, operands, work_tiles):
        slot, phase = self.loads.slot_of_q(work_tiles, EARLY)
        self.loads.q.wait_full(st, slot, phase)

    @cute.jit
    def scores(self, st, operands, turn, q_stage):
        """S^T of a tile: Q.K half by half as they come."""
        (sK, sQ), mma = operands, self.score_mma()
        acc = cute.make_rmem_tensor(mma.partition_shape_C((TILE, self.rows_cta)), Float32)
        sK_now, sQ_now = sK[None, None, None, turn.stage], sQ[None, None, None, q_stage]
        self.loads.kv.wait_full(st, turn.slot(EARLY), turn.phase)
        compat.wgmma_fence()
        for i in cutlass.range_constexpr(len(self.loads.order)):
            if const_expr(i == len(self.loads.halves[EARLY])):
                self.loads.kv.wait_full(st, turn.slot(LATE), turn.phase)
            first = self.loads.order[i] * CHUNK_STEPS
            issue(
                mma, acc, sK_now, sQ_now, accumulate=i > 0, first=first, last=first + CHUNK_STEPS
            )  # fmt: skip
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        return acc

    @cute.jit
    def tile(self, st, operands, state, turn, work_tiles, ends):
        """A thread holds 2 tokens x rows / 4 rows."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, n_rows = tidx % 32, self.fragment.rows
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        m_ref, sums, most, scale = state
        q_slot, _ = self.loads.slot_of_q(work_tiles, EARLY)
        t = self.scores(st, operands, turn, q_slot)
        if ends[1]:
            release(self.loads.q, st, q_slot)
        self.hide(st, t, turn.stage, wwarp, lane)
        # behind the barrier in it all warps have read the RoPE columns, where P goes
        m = self.maxima(st, t, turn.stage, wwarp, lane)
        gamma = cute.make_rmem_tensor((n_rows,), Float32)
        moved = False
        for x in cutlass.range_constexpr(n_rows):
            v = 4 * (x // 2) + x % 2
            old, high = m_ref[x], m[x] * scale
            # ``maxima`` begins at NEVER, which is no logit
            seen = Float32(cutlass.select_(m[x] > NEVER, high, -Float32.inf))
            most[x] = cute.arch.fmax(most[x], seen)
            m_ref[x], gamma[x] = raise_m_ref(high, old)
            t[v] = cute.math.exp2(fma(t[v], scale, -m_ref[x]), fastmath=True)
            t[v + 2] = cute.math.exp2(fma(t[v + 2], scale, -m_ref[x]), fastmath=True)
            sums[x] = sums[x] * gamma[x] + (t[v] + t[v + 2])
            moved = moved or m_ref[x] > old
        self.store_p(st, t, turn.stage, wwarp, lane)
        if (wwarp == 0) & (lane < 4):  # all warps have the same m_refs
            at = turn.stage * padded_size(self.rows_cta)
            gamma_s = cute.make_tensor(st.gamma.data_ptr() + at, pad_layout(self.rows_cta))
            for x in cutlass.range_constexpr(n_rows):
                gamma_s[x, lane] = gamma[x]
        flag = cutlass.select_(cute.arch.vote_any_sync(moved), Int32(1), Int32(0))
        at = 4 * (turn.stage * SOFTMAX_WARPS + wwarp)
        compat.store_shared(st.flag.data_ptr().toint() + at, flag, "u32")
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.parts.p_ring.arrive_full_if(st, turn.stage, lane == 0)

    @cute.jit
    def hide(self, st, t, stage, wwarp, lane):
        """Takes away the logits of places without a token, whose rows of K are zeros."""
        named = self.places(st, stage)
        if (named[0] & named[1]) != -1:
            mine = Int32(cutlass.select_(wwarp < 2, named[0], named[1]))
            mine = mine >> (wwarp % 2 * 16 + lane // 4)
            for v in cutlass.range_constexpr(self.fragment.values):
                if (mine >> (8 * self.fragment.token(v))) & 1 == 0:
                    t[v] = -Float32.inf

    @cute.jit
    def finish(self, st, gmem, work_tile, state, work_tiles):
        tidx, _, _ = cute.arch.thread_idx()
        row, lane = tidx % WARPGROUP, tidx % 32
        wwarp = cute.arch.make_warp_uniform(row // 32)
        inv = st.inv.get_tensor(cute.make_layout(padded_size(self.rows_cta)))
        across = st.across.get_tensor(cute.make_layout((self.rows_cta, 8)))
        INV_RING.wait_empty(st, 0, (work_tiles & 1) ^ 1)
        self.exchange(across, state, wwarp, lane)
        if row < self.rows_cta:
            total = (across[row, 0] + across[row, 1]) + (across[row, 2] + across[row, 3])
            head = work_tile.block * self.rows_cta + row
            inv[row_position(row, self.rows_cta)] = finish_row(
                gmem, head, work_tile.query, total, across[row, 4], across[row, 5]
            )
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)  # the next tile writes ``across``
        if lane == 0:
            INV_RING.arrive_full(st, 0)

    @cute.jit
    def note_first(self, st, gmem, work_tile, state):
        tidx, _, _ = cute.arch.thread_idx()
        row, lane = tidx % WARPGROUP, tidx % 32
        wwarp = cute.arch.make_warp_uniform(row // 32)
        across = st.across.get_tensor(cute.make_layout((self.rows_cta, 8)))
        self.exchange(across, state, wwarp, lane)
        if row < self.rows_cta:
            total = (across[row, 0] + across[row, 1]) + (across[row, 2] + across[row, 3])
            head = work_tile.block * self.rows_cta + row
            first_lse(gmem, head, work_tile.query, total, across[row, 4], across[row, 5])
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)  # the next tile writes ``across``

    @cute.jit
    def exchange(self, across, state, wwarp, lane):
        """Sums of the four warps, m_ref and largest logit of each row to ``across`` (row, 8), over
        the lanes by shuffles."""
        m_ref, sums, most, _ = state
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)  # ``across`` may still be read for maxima
        for x in cutlass.range_constexpr(self.fragment.rows):
            total = sums[x]
            for off in cutlass.range_constexpr(3):
                total = total + cute.arch.shuffle_sync_bfly(total, 4 << off)
            if lane < 4:
                own = self.fragment.row_at(wwarp, lane, x)
                across[own, wwarp] = total
                if wwarp == 0:  # all warps have the same
                    across[own, 4], across[own, 5] = m_ref[x], most[x]
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)

    # ---------------------------------------------------------------- P.V warpgroups

    @cute.jit
    def product(self, st, acc_O, operands, turn):
        self.parts.p_ring.wait_full(st, turn.stage, turn.phase)
        self.pv_block(st, acc_O, operands, turn.stage)

    @cute.jit
    def write(self, st, gmem, acc_O, work_tile, half):
        """A thread has channels g and g + 8 of a row, and after an exchange with its neighbour of
        the next g two adjacent ones."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv = cute.make_tensor(st.inv.data_ptr(), pad_layout(self.rows_cta))
        odd = lane // 4 % 2 == 1
        channel = half * HALF + wwarp * 16 + lane // 4 + lane // 4 % 2 * 7
        for x in cutlass.range_constexpr(self.fragment.rows):
            v = 4 * (x // 2) + x % 2
            inverse = inv[x, lane % 4]
            head = work_tile.block * self.rows_cta + self.fragment.row_at(wwarp, lane, x)
            place = place_of(gmem, work_tile.query, head, channel)
            target = gmem.out.iterator + cute.assume(place, divby=2)
            for d in cutlass.range_constexpr(D_BLOCKS):
                low, high = acc_O[d][v] * inverse, acc_O[d][v + 2] * inverse
                got = cute.arch.shuffle_sync_bfly(cutlass.select_(odd, low, high), 4)
                pair = cute.make_rmem_tensor((2,), Float32)
                pair[0], pair[1] = cutlass.select_(odd, got, low), cutlass.select_(odd, high, got)
                if head < gmem.heads:
                    store_run(target, 64 * d, pair)

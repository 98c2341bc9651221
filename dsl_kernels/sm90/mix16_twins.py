"""``mix16`` with 64 rows by two equal warpgroups: half of the channels each, in both products.

A warpgroup converts 256 channels of a tile twice: as K for its half of the sum S^T = K Q^T, and as
V for its half of O^T = V^T P^T.  So no warpgroup has a chain of conversions and products that the
other waits for, and a stage of the ring is held for one tile only.

Roles (3 warpgroups of 128 threads)
    wg 0     gathers and announces, as in mix16.py
    wg 1, 2  a twin each: Q -> f16, S^T over 256 channels and half of RoPE, softmax of 32 of the 64
             rows, O^T of 256 channels

Timeline of tile i in both twins (``=``: they meet)
    RoPE -> | unit 0 of K | RoPE / sigma | 4 x (4 WGMMAs, convert the next 64 channels)
    | half of S^T to the other = the other's half on top | vote, exp2 | P^T -> | unit 0 of V =
    | 8 x (2 WGMMAs, convert the next) | free i

S^T of a tile is a sum over channels: each twin has all rows' share of its channels, gives the other
the values of the other's 32 rows through shared memory, and adds what it gets.  P^T of both goes
where the tile's RoPE lay, which nobody reads any more.

Frames, numbers and the conversion of Q are mix16.py's; rows' frames move twin by twin.

Registers: O^T 128, S^T 32, two fragments of 16, of V 8.

Shared memory, 3 stages (bytes)
    Q 73728 | K ring 3 x (32768 content + 8192 RoPE, then P + 1024 scales + 2560 of theirs)
    exchange 16384, maxima, gamma, factors, 1/l, flags, barriers                           = 228352
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..common import budget as bud
from ..common.barriers import warps_meet
from ..common.epilogue import finish_row
from ..common.frames import NEVER
from ..common.registers import claim_registers
from ..common.smem import array, struct_of
from ..common.types import BF16, F16
from ..compat import wgmma_fence
from ..dims import KV_LORA_RANK as D
from ..dims import QK_ROPE_HEAD_DIM as R
from ..dims import TOKEN_TILE as TILE
from ..ds_mla import GROUPS
from ..stamp import Stamp
from .dense_frames import HEADROOM
from .fragments import TokensOnM, pad_layout, padded_size, row_position
from .item_notes import note, note_fields, noted
from .mix16_parts import STAGE_BYTES, SUM_LOG2, Parts, layouts_of
from .mix16_pv import ProductsOfV
from .mix16_softmax import MixSoftmax, new_frame
from .roles import ROWS_OF_CTA, WARPGROUP, Cta, Layouts
from .wgmma import issue_words, low_word, tiled_mma

if TYPE_CHECKING:
    from ..spec import VariantSpec

TWINS = 2
WARPS = 4  # of a twin
READERS = {"twins": TWINS * WARPS}
REGISTERS = (40, 232)  # of producers, of a twin
ROWS = ROWS_OF_CTA // TWINS  # whose softmax a twin has
STEPS = D // 16 // TWINS  # k steps of a twin over the content
UNIT_STEPS = 2  # that are converted at once: 32 channels
VALUES = ROWS * TILE // WARPGROUP  # of S^T a thread keeps, and gives away
SMALL_BYTES = 8192  # maxima, factors, barriers, alignment: an upper bound
EXCHANGE = TWINS * VALUES * WARPGROUP  # fp32 numbers


class Barrier(IntEnum):
    """Named barriers: a twin's own and the next one's; all twins'."""

    TWIN = 1
    SCORES = 3
    P = 4
    ITEM = 5


def budget(spec: VariantSpec, parts: Parts) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    tiles = parts.stages * STAGE_BYTES + ROWS_OF_CTA * 2 * (D + R) + 4 * EXCHANGE
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", REGISTERS[0]),
            bud.WarpGroup("twins", REGISTERS[1], count=TWINS),
        ),
        smem=tiles + SMALL_BYTES,
        barriers=parts.barriers(),
        mmas=(
            bud.Mma("Q.K content", TILE, ROWS_OF_CTA, D // TWINS, "f16"),
            bud.Mma("Q.K RoPE", TILE, ROWS_OF_CTA, R // TWINS, "bf16"),
            bud.Mma("P.V", 64, ROWS_OF_CTA, TILE, "f16"),
        ),
    )


def parts_of(spec: VariantSpec, stages: int) -> Parts:
    """What the pipeline is composed of."""
    return Parts(spec, stages=stages, q_stages=1, q_readers=READERS, k_readers=READERS)


class TwinScores(MixSoftmax):
    """S^T and softmax of a twin (``half`` 0 or 1): its half of the channels, then of the rows."""

    def __init__(self, parts: Parts):
        super().__init__(parts)
        self.units = [range(k, k + UNIT_STEPS) for k in range(0, STEPS, UNIT_STEPS)]
        self.own = TokensOnM(ROWS)

    def fields(self) -> dict:
        """Storage: what twins give each other; maxima and sums of the warps; frames; votes."""
        return dict(
            across=array(Float32, TWINS * WARPS * ROWS, 128),
            votes=array(cutlass.Uint8, TWINS * WARPS, 16),
            flag=array(cutlass.Uint8, TWINS * WARPS, 16),  # did a frame of the twin's rows move?
            frames=array(Float32, padded_size(ROWS_OF_CTA), 128),
            gamma=array(Float32, padded_size(ROWS_OF_CTA), 128),
            inv=array(Float32, padded_size(ROWS_OF_CTA), 128),  # 1 / row sum
            exchange=array(Float32, EXCHANGE, 128),
            **note_fields(),
        )

    def meet(self, half) -> None:
        """The twin's four warps."""
        cute.arch.barrier(barrier_id=Barrier.TWIN + half, number_of_threads=WARPGROUP)

    def place(self):
        """(warp of the twin, lane)"""
        tidx, _, _ = cute.arch.thread_idx()
        return cute.arch.make_warp_uniform(tidx % WARPGROUP // 32), tidx % 32

    def descriptors_of_q(self, st, layouts, half):
        """Of the twin's channels of Q's content."""
        tidx, _, _ = cute.arch.thread_idx()
        mma = tiled_mma(F16, ROWS_OF_CTA)
        first = st.qc.data_ptr() + cute.assume(half * (ROWS_OF_CTA * D // TWINS), divby=512)
        content = cute.recast_ptr(first, layouts.q[0].inner, dtype=F16)
        content = cute.make_tensor(content, layouts.q[0].outer)
        return mma.make_fragment_B(mma.get_slice(tidx % WARPGROUP).partition_B(content))

    def rows_of(self, field, lane, half):
        """The thread's rows of an array in ``pad_layout``."""
        at = field.data_ptr() + cute.assume(half * self.own.rows, divby=self.own.rows)
        tensor = cute.make_tensor(at, pad_layout(ROWS_OF_CTA))
        return cute.make_tensor(tensor[None, lane % 4].iterator, cute.make_layout(self.own.rows))

    def start_rope(self, st, stage, half):
        """The twin's half of RoPE, on its way: S^T begins with it."""
        t = self.accumulator()
        k = low_word(st.kr) + stage * (TILE * R * 2 // 16) + half * (R // TWINS * 2 // 16)
        q = low_word(st.qr) + half * (R // TWINS * 2 // 16)
        wgmma_fence()
        for step in range(R // TWINS // 16):
            issue_words(t, k + 2 * step, q + 2 * step, BF16, accumulate=step > 0)
        warpgroup.commit_group()
        return t

    @cute.jit
    def half_scores(self, st, rQ, stage, half, sigma):
        """The twin's share of S^T over sigma, of all rows: RoPE, then content on top."""
        wwarp, lane = self.place()
        token, units = wwarp * 16 + lane // 4, const_expr(len(self.units))
        ahead = half * (TILE * D // TWINS)
        own, groups = self.parts.scales.own(st), half * (GROUPS // TWINS)
        t = self.start_rope(st, stage, half)
        ratio = [own[groups, token + 8 * e, stage] for e in range(2)]
        raws = self.load_k(st, stage, wwarp, lane, 0, ahead)
        held = [self.to_k(raws, ratio), None]
        raws = self.load_k(st, stage, wwarp, lane, 1, ahead)
        inverse = [cute.arch.rcp_approx(x) for x in sigma]
        warpgroup.wait_group(0)
        for v in cutlass.range_constexpr(self.fragment.values):
            t[v] = t[v] * inverse[self.fragment.token(v)]
        for u in cutlass.range_constexpr(units):
            self.issue_unit(t, held[u % 2], rQ, u, True)
            if const_expr(u + 1 < units):
                if const_expr(self.group_of(u + 1) > self.group_of(u)):
                    group = groups + const_expr(self.group_of(u + 1))
                    ratio = [own[group, token + 8 * e, stage] for e in range(2)]
                if const_expr(u > 0):
                    warpgroup.wait_group(1)
                held[(u + 1) % 2] = self.to_k(raws, ratio)
                if const_expr(u + 2 < units):
                    raws = self.load_k(st, stage, wwarp, lane, u + 2, ahead)
        warpgroup.wait_group(0)
        return t

    def box(self, st):
        """(4 numbers, thread, chunk, twin that they are for)"""
        shape = (4, WARPGROUP, VALUES // 4, TWINS)
        return st.exchange.get_tensor(cute.make_layout(shape))

    def give(self, st, t, first: int, thread, to) -> None:
        """``VALUES`` numbers of S^T from ``first`` on, for the other twin."""
        for c in range(VALUES // 4):
            four = cute.make_tensor(t.iterator + (first + 4 * c), cute.make_layout(4))
            cute.autovec_copy(four, self.box(st)[None, thread, c, to])

    @cute.jit
    def trade(self, st, t, half):
        """S^T / sigma of the twin's rows: its own share and the other's."""
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx % WARPGROUP
        if half == 0:
            self.give(st, t, VALUES, thread, 1)
        else:
            self.give(st, t, 0, thread, 0)
        warps_meet(Barrier.SCORES, TWINS * WARPS)
        sums = cute.make_rmem_tensor((VALUES,), Float32)
        for c in cutlass.range_constexpr(VALUES // 4):
            part = cute.make_tensor(sums.iterator + 4 * c, cute.make_layout(4))
            cute.autovec_copy(self.box(st)[None, thread, c, half], part)
        for v in cutlass.range_constexpr(VALUES):
            sums[v] = sums[v] + cutlass.select_(half == 0, t[v], t[VALUES + v])
        return sums

    @cute.jit
    def softmax(self, st, t, facts, half, first, l_run):
        """Sums of S^T in place -> P^T of the twin's rows in place; returns whether frames moved."""
        wwarp, lane = self.place()
        log, inverse, sigma = facts
        row, token = self.own.row, self.own.token
        factor = cute.make_rmem_tensor((self.own.rows,), Float32)
        frame = cute.make_rmem_tensor((self.own.rows,), Float32)
        cute.autovec_copy(self.rows_of(st.factors, lane, half), factor)
        cute.autovec_copy(self.rows_of(st.frames, lane, half), frame)
        top = Float32(NEVER)
        for v in cutlass.range_constexpr(VALUES):
            t[v] = (t[v] * sigma[token(v)]) * factor[row(v)] + (log[token(v)] - frame[row(v)])
            top = cute.arch.fmax(top, t[v])
        moves = self.vote_of_twin(st, top > HEADROOM, half, wwarp, lane) | first
        if moves != 0:
            self.move(st, t, half, first, l_run, wwarp, lane)
        for x in cutlass.range_constexpr(self.own.rows):
            v = 4 * (x // 2) + x % 2
            t[v] = cute.math.exp2(t[v], fastmath=True)
            t[v + 2] = cute.math.exp2(t[v + 2], fastmath=True)
            l_run[x] = l_run[x] + (t[v] * inverse[0] + t[v + 2] * inverse[1])
        return moves

    @cute.jit
    def vote_of_twin(self, st, wanted, half, wwarp, lane):
        """The warps' votes as a word, the same in all of the twin's."""
        votes = st.votes.get_tensor(cute.make_layout((WARPS, TWINS)))
        mine = cute.arch.vote_any_sync(wanted)
        if lane == 0:
            votes[wwarp, half] = cutlass.Uint8(1) if mine else cutlass.Uint8(0)
        self.meet(half)
        words = cute.recast_ptr(st.votes.data_ptr().align(4), dtype=Int32)
        word = cute.make_tensor(words, cute.make_layout(TWINS))[half]
        return cute.arch.make_warp_uniform(word)

    @cute.jit
    def move(self, st, t, half, first, l_run, wwarp, lane):
        """Rows that pass 2^15, and all of the item's first tile with a token, get frames in which
        their largest value is 2^8."""
        m = self.maxima_of_twin(st, t, half, wwarp, lane)
        gamma, frames = self.rows_of(st.gamma, lane, half), self.rows_of(st.frames, lane, half)
        for x in cutlass.range_constexpr(self.own.rows):
            v = 4 * (x // 2) + x % 2
            shift, factor = new_frame(m[x], first)
            l_run[x] = l_run[x] * factor
            t[v], t[v + 2] = t[v] - shift, t[v + 2] - shift
            if (wwarp == 0) & (lane < 4):
                gamma[x] = factor
                frames[x] = frames[x] + shift

    def across_warps(self, st, half):
        """(row of the twin, warp): a number of each warp."""
        shape = (ROWS, WARPS, TWINS)
        return st.across.get_tensor(cute.make_layout(shape))[None, None, half]

    @cute.jit
    def maxima_of_twin(self, st, t, half, wwarp, lane):
        """Row maxima over the tile's tokens, in every thread that holds the row."""
        across, quad = self.across_warps(st, half), lane % 4
        m = [None] * self.own.rows
        for x in cutlass.range_constexpr(self.own.rows):
            v = 4 * (x // 2) + x % 2
            m[x] = cute.arch.fmax(t[v], t[v + 2])
            for off in cutlass.range_constexpr(3):
                m[x] = cute.arch.fmax(m[x], cute.arch.shuffle_sync_bfly(m[x], 4 << off))
            if lane < 4:
                across[8 * (x // 2) + 2 * lane + x % 2, wwarp] = m[x]
        self.meet(half)
        for x in cutlass.range_constexpr(self.own.rows):
            m[x] = Float32(NEVER)
            for w in cutlass.range_constexpr(WARPS):
                m[x] = cute.arch.fmax(m[x], across[8 * (x // 2) + 2 * quad + x % 2, w])
        return m

    @cute.jit
    def finish(self, cta: Cta, half, l_run, slot, rows):
        """Row sums of an item -> 1 / l of all rows in shared memory, LSE to memory."""
        tidx, _, _ = cute.arch.thread_idx()
        st, (wwarp, lane) = cta.st, self.place()
        sums = self.across_warps(st, half)
        for x in cutlass.range_constexpr(self.own.rows):
            total = l_run[x]
            for off in cutlass.range_constexpr(3):
                total = total + cute.arch.shuffle_sync_bfly(total, 4 << off)
            if lane < 4:
                sums[8 * (x // 2) + 2 * lane + x % 2, wwarp] = total
        self.meet(half)
        own, size = tidx % WARPGROUP, const_expr(padded_size(ROWS_OF_CTA))
        if own < ROWS:
            total = (sums[own, 0] + sums[own, 1]) + (sums[own, 2] + sums[own, 3])
            row = half * ROWS + own
            at = row_position(row, ROWS_OF_CTA)
            frame = st.frames.get_tensor(cute.make_layout(size))[at] + SUM_LOG2
            st.inv.get_tensor(cute.make_layout(size))[at] = finish_row(
                cta.gmem.results, cta.call, slot, rows, row, total, frame
            )
        warps_meet(Barrier.ITEM, TWINS * WARPS)


class Twins(ProductsOfV):
    """The pipeline (``decode.Pipeline``)."""

    def __init__(self, spec: VariantSpec, stages: int):
        self.parts = parts_of(spec, stages)
        self.budget = budget(spec, self.parts)
        self.rows_cta, self.stages = ROWS_OF_CTA, stages
        self.scores = TwinScores(self.parts)

    # ---------------------------------------------------------------- host half

    def layouts(self) -> Layouts:
        return layouts_of(ROWS_OF_CTA, self.stages, 1, self.stages)

    def storage(self, layouts):
        return struct_of(
            **self.parts.barrier_fields,
            **self.scores.fields(),
            **self.parts.tile_fields(layouts),
        )

    # ---------------------------------------------------------------- roles

    @cute.jit
    def init_barriers(self, st):
        """There are none but Q's and the loader's."""

    @cute.jit
    def math_roles(self, cta, wg):
        claim_registers(self.budget, REGISTERS[1])
        self.loop(cta, wg)

    def descriptors_of_p(self, st, layouts):
        """P^T, stage by stage where RoPE lay."""
        tidx, _, _ = cute.arch.thread_idx()
        mma = self.pv_mma()
        p = cute.recast_ptr(st.kr.data_ptr(), layouts.p.inner, dtype=F16)
        p = cute.make_tensor(p, layouts.p.outer)
        return mma.make_fragment_B(mma.get_slice(tidx % WARPGROUP).partition_B(p))

    @cute.jit
    def loop(self, cta: Cta, half):
        """Both products of the part's items."""
        st, layouts, q_pipe, k_pipe, gmem, call, part = cta
        wwarp, lane = self.scores.place()
        shape = self.pv_mma().partition_shape_C((64, ROWS_OF_CTA))
        acc_O = [cute.make_rmem_tensor(shape, Float32) for _ in range(4)]
        l_run = cute.make_rmem_tensor((self.scores.own.rows,), Float32)
        rQ = self.scores.descriptors_of_q(st, layouts, half)
        rP = self.descriptors_of_p(st, layouts)
        consumer = pipeline.PipelineUserType.Consumer
        qst = pipeline.make_pipeline_state(consumer, 1)
        kst = pipeline.make_pipeline_state(consumer, self.stages)
        span = self.parts.work.items_of(gmem.work, part)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, slot = self.parts.work.item_at(gmem.work, i)
            rows = self.parts.work.rows_at(gmem.work, call, i, batch, ROWS_OF_CTA)
            note(st, half, wwarp, slot, rows)
            q_pipe.consumer_wait(qst)
            self.begin_item(cta, half, acc_O, l_run)
            offset = self.own_offset(wwarp)
            fresh = Int32(1)  # no token has been seen
            for tile in cutlass.range(first, last, unroll=1):
                k_pipe.consumer_wait(kst)
                self.parts.stamps.put(gmem.results, Stamp.FIRST_TILE, kst.count == 0)
                facts, some = self.scores.facts_of(st, kst.index, wwarp * 16 + lane // 4)
                t = self.scores.half_scores(
                    st, rQ[None, None, None, 0], kst.index, half, facts[2]
                )  # fmt: skip
                if tile + 1 == last:
                    cute.arch.sync_warp()
                    q_pipe.consumer_release(qst)
                fresh_now = cutlass.select_(some > Float32(0.0), fresh, Int32(0))
                seen = cute.arch.make_warp_uniform(Int32(fresh_now))
                self.block_p(st, t, facts, kst.index, half, seen, l_run)
                fresh = fresh - seen
                self.products(st, acc_O, rP, kst.index, half, offset)
                k_pipe.consumer_release(kst)
                kst.advance()
            qst.advance()
            self.parts.stamps.put(gmem.results, Stamp.PRODUCTS_END, half == 0)
            slot, rows = noted(st, half, wwarp, ROWS_OF_CTA)
            self.scores.finish(cta, half, l_run, slot, rows)
            self.write_rows(st, gmem.results, acc_O, slot, rows, half)
            self.parts.stamps.put(gmem.results, Stamp.ROWS_WRITTEN + half)

    @cute.jit
    def begin_item(self, cta: Cta, half, acc_O, l_run):
        """Q as f16; no frames, no sums."""
        tidx, _, _ = cute.arch.thread_idx()
        st, (wwarp, _) = cta.st, self.scores.place()
        self.parts.queries.convert(st, 0, cta.call, half * WARPS + wwarp)
        size = const_expr(padded_size(ROWS_OF_CTA))
        if tidx - WARPGROUP < size:
            st.frames.get_tensor(cute.make_layout(size))[tidx - WARPGROUP] = Float32(0.0)
        l_run.fill(0.0)
        for d in cutlass.range_constexpr(4):
            acc_O[d].fill(0.0)
        cute.arch.fence_proxy("async.shared", space="cta")
        warps_meet(Barrier.ITEM, TWINS * WARPS)

    @cute.jit
    def block_p(self, st, t, facts, stage, half, first, l_run):
        """P^T of a tile, handed over to both twins."""
        wwarp, lane = self.scores.place()
        sums = self.scores.trade(st, t, half)
        moves = self.scores.softmax(st, sums, facts, half, first, l_run)
        at = stage * (TILE * R * 2) + half * (ROWS * TILE * 2)  # where the tile's RoPE lay
        self.scores.store_p(st.kr.data_ptr().toint() + at, sums, wwarp, lane)
        flags = st.flag.get_tensor(cute.make_layout((WARPS, TWINS)))
        if lane == 0:
            flags[wwarp, half] = cutlass.Uint8(1) if moves != 0 else cutlass.Uint8(0)

    @cute.jit
    def products(self, st, acc_O, rP, stage, half, offset):
        """O^T = gamma O^T + V^T P^T of a tile, over the twin's channels."""
        wwarp, _ = self.scores.place()
        tile = self.tile(st, stage, half, wwarp, offset)
        first = self.first_unit(st, tile)
        cute.arch.fence_proxy("async.shared", space="cta")  # P
        warps_meet(Barrier.P, TWINS * WARPS)
        for h in cutlass.range_constexpr(TWINS):
            self.rescale(st, acc_O, h)
        self.multiply(st, acc_O, lambda k: rP[None, None, k, stage], tile, first)
        warpgroup.wait_group(0)
        cute.arch.sync_warp()  # one lane frees the stage for all: their reads come first

    @cute.jit
    def rescale(self, st, acc_O, of: cutlass.Constexpr):
        """O^T of the rows whose softmax twin ``of`` has, if a frame of theirs moved."""
        words = cute.recast_ptr(st.flag.data_ptr().align(4), dtype=Int32)
        word = cute.make_tensor(words, cute.make_layout(TWINS))[of]
        if cute.arch.make_warp_uniform(word) != 0:
            gamma = self.scores.rows_of(st.gamma, cute.arch.lane_idx(), Int32(of))
            for v in cutlass.range_constexpr(of * ROWS // 2, (of + 1) * ROWS // 2):
                factor = gamma[2 * (v // 4) + v % 2 - of * (ROWS // 4)]
                for d in cutlass.range_constexpr(4):
                    acc_O[d][v] = acc_O[d][v] * factor

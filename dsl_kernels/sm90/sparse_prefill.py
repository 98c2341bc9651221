"""Sparse prefill for SM90: attention of each query token to the rows of KV that it names, BF16.

out = softmax(softmax_scale q kv^T) kv[:, :512] over a query's ``indices``; with the largest logit
and the LSE of each row.  Nothing is split: a CTA stays and takes work tiles, 64 heads of a query,
one behind the other (sparse_prefill_parts.py).  More than 64 heads are two work tiles, which two
CTAs compute side by side: each row of KV then comes once from DRAM and once more from L2.

Roles (4 warpgroups)
    wg 0  warps 0, 1, 3  gather KV rows by cp.async; warp 1 loads Q by TMA, too
          warp 2         announcer: a landed half of a tile, behind a proxy fence
    wg 1                 softmax: S = Q K^T, P to shared memory, where RoPE was
    wg 2, 3              P.V: O of half of the 512 channels each, in fp32 registers

Timeline of tile i
    gather    | first half of i+1 when P.V has read its half of i-1 | second half ...
    softmax   | Q.K i: first half, second half | maxima, exp2 | P i -> |
    P.V       | wait P i | first half of the channels | free it | second half | free it

Two thirds of Q are in registers (dense_many.py), so that their room in shared memory takes the next
work tile's while this one runs.

Frames (log2 units; dense_frames.py).  P' = 2^(t - frame) in BF16, O and the row sum in fp32 of the
same frame, which moves when a tile exceeds it by 2^15 only.

Shared memory   Q 73728 | KV 2 x 73728 (a stage has room for 576 channels; with 512 the last 64 are
P's alone) | gamma, 1 / row sums, flags, bits of the places, barriers
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from .. import compat
from ..common import budget as bud
from ..common.barriers import warps_meet
from ..common.frames import NEVER
from ..common.registers import claim_registers
from ..common.smem import array, struct_of
from ..common.types import BF16, U32
from ..common.work_list import LOG2E
from ..dims import HEAD_DIM_QK, KV_LORA_RANK
from ..dims import TOKEN_TILE as TILE
from .block_softmax import ROWS_ON_M, maxima, store_words_of_p
from .dense_form import HALF
from .dense_frames import move_frame
from .dense_many import PV_N, ManyRows
from .dense_parts import CHUNK_STEPS, p_ring
from .dense_parts import Parts as DenseParts
from .roles import INV_RING, ROWS_OF_CTA, SOFTMAX_WARPS, WARPGROUP, Barrier
from .sparse_prefill_parts import (
    EARLY,
    LATE,
    REGISTER_BLOCKS,
    STAGES,
    GatheredTiles,
    Gmem,
    Turn,
    Work,
    finish_row,
    release,
    write_row,
)
from .wgmma import issue

if TYPE_CHECKING:
    from ..spec import VariantSpec

SMALL_BYTES = 3072  # gamma, barriers, alignment: an upper bound


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the kernel cannot be built for ``spec``, or None."""
    return bud.check(budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    producer, softmax, pv = ManyRows.registers
    loads = GatheredTiles(spec.d_qk)
    tiles = (STAGES * TILE + ROWS_OF_CTA) * HEAD_DIM_QK * 2
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", producer),
            bud.WarpGroup("softmax", softmax),
            bud.WarpGroup("P.V", pv, count=2),
        ),
        smem=tiles + SMALL_BYTES,
        barriers=(
            *(barrier for ring in loads.rings for barrier in ring.budget()),
            *p_ring(STAGES).budget(), *INV_RING.budget(),
        ),
        mmas=(
            bud.Mma("Q.K", ROWS_OF_CTA, TILE, spec.d_qk, "bf16"),
            bud.Mma("P.V", ROWS_OF_CTA, PV_N, TILE, "bf16"),
        ),
    )  # fmt: skip


def build(spec: VariantSpec):
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    return SparsePrefill(spec), fake_args(spec)


def fake_args(spec: VariantSpec):
    """Symbolic arguments of the exported function by name, in the order of ``__call__``."""
    s_q, h, s_kv, topk, lengths, sinks = (
        compat.sym(name=x) for x in ("s_q", "h", "s_kv", "topk", "lengths_or_0", "sinks_or_0")
    )
    bf16, i32, f32 = (compat.DTYPES[x] for x in ("bf16", "i32", "f32"))

    def figures():
        return compat.strided(f32, (s_q, h), (compat.sym64(), compat.sym64()), 4)

    return {
        "q": compat.rows(bf16, (s_q, h, spec.d_qk)),
        "kv": compat.rows(bf16, (s_kv, 1, spec.d_qk)),
        "indices": compat.strided(i32, (s_q, 1, topk), (compat.sym64(), compat.sym64(), 1), 4),
        "topk_length": compat.vector(i32, lengths),
        "attn_sink": compat.vector(f32, sinks),
        "out": compat.rows(bf16, (s_q, h, KV_LORA_RANK)),
        "max_logits": figures(),
        "lse": figures(),
        "softmax_scale": Float32(1.0),
        "ctas": Int32(1),
    }


class Parts(DenseParts):
    """What ``ManyRows`` asks of its parts."""

    def __init__(self, loads: GatheredTiles):
        self.dtype, self.rows, self.stages, self.q_stages = BF16, ROWS_OF_CTA, STAGES, 1
        self.loads, self.p_ring = loads, p_ring(STAGES)


class Form(ManyRows):
    """Rows on M: softmax and P.V over gathered tiles."""

    def __init__(self, loads: GatheredTiles):
        super().__init__(Parts(loads))
        self.loads = loads

    def fields(self) -> dict:
        """Shared memory beside the tiles."""
        return dict(
            **self.loads.fields,
            **self.parts.p_ring.field,
            **INV_RING.field,
            flag=array(Int32, SOFTMAX_WARPS * STAGES, 16),  # did a frame of warp w's rows move?
            gamma=array(Float32, ROWS_OF_CTA * STAGES, 16),
            inv=array(Float32, ROWS_OF_CTA, 16),  # by what O is multiplied
        )

    def half_read(self, st, stage):
        """The first half of a P.V warpgroup's WGMMAs has been waited for."""
        release(self.loads.kv, st, 2 * stage + EARLY)

    # ---------------------------------------------------------------- softmax warpgroup

    @cute.jit
    def softmax(self, st, layouts, gmem, cta):
        """Work tiles and tiles of the softmax warpgroup."""
        operands = self.score_operands(st, layouts)
        frame, sums, most = (cute.make_rmem_tensor((2,), Float32) for _ in range(3))
        total, tiles, items = Work.total(gmem), Int32(0), Int32(0)  # behind us
        query, _ = Work.place(gmem, cta)
        count = Work.count(gmem, query)
        for j in cutlass.range(cta, total, gmem.ctas, unroll=1):
            item = Work.item(gmem, j, count)
            query, _ = Work.place(gmem, j + gmem.ctas)
            count = Work.count(gmem, query)
            frame.fill(NEVER)
            sums.fill(0.0)
            most.fill(NEVER)
            self.loads.q.wait_full(st, EARLY, items & 1)
            self.take_q(st, operands)
            release(self.loads.q, st, EARLY)
            state = (frame, sums, most, gmem.scale)
            for tile in cutlass.range(0, item.tiles, unroll=1):
                last = tile + 1 == item.tiles
                self.tile(st, operands, state, Turn.of(tiles), items & 1, last)
                tiles += 1
            self.finish(st, gmem, item, state, items)
            items += 1

    @cute.jit
    def scores(self, st, operands, turn, q_phase):
        """S of a tile: Q.K half by half as they come."""
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
        warpgroup.wait_group(0)
        return acc

    @cute.jit
    def tile(self, st, operands, state, turn, q_phase, last):
        """S -> P of one tile, handed over."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        frame, sums, most, scale = state
        acc = self.scores(st, operands, turn, q_phase)
        if last:
            release(self.loads.q, st, LATE)
        self.hide(st, acc, turn.stage, lane)
        m = maxima(acc)
        gamma, moved = [None] * 2, False
        for i in cutlass.range_constexpr(2):
            old, high = frame[i], m[i] * scale
            most[i] = cute.arch.fmax(most[i], high)
            frame[i], gamma[i] = move_frame(high, old)
            moved = moved or frame[i] > old
        part = [Float32(0.0) for _ in range(4)]
        for v in cutlass.range_constexpr(ROWS_ON_M.values):
            row = ROWS_ON_M.row(v)
            acc[v] = cute.math.exp2(acc[v] * scale - frame[row], fastmath=True)
            part[2 * row + v % 2] = part[2 * row + v % 2] + acc[v]
        p16 = cute.make_rmem_tensor((ROWS_ON_M.values,), BF16)
        p16.store(acc.load().to(BF16))
        words = cute.recast_tensor(p16, U32)
        any_moved = cute.arch.vote_any_sync(moved)
        line = operands[3]
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)  # all have read the RoPE columns
        p_at = self.parts.rope(st).toint() + turn.stage * (TILE * HEAD_DIM_QK * 2)
        for x in cutlass.range_constexpr(4):
            store_words_of_p([words[4 * x + i] for i in range(4)], p_at + (line ^ (32 * x)))
        for i in cutlass.range_constexpr(2):
            sums[i] = sums[i] * gamma[i] + (part[2 * i] + part[2 * i + 1])
            # the four lanes of a quad store the same: cheaper than a branch
            at = 4 * (turn.stage * ROWS_OF_CTA + ROWS_ON_M.row_at(wwarp, lane, i))
            compat.store_shared(st.gamma.data_ptr().toint() + at, gamma[i])
        flag = cutlass.select_(any_moved, Int32(1), Int32(0))
        at = 4 * (turn.stage * SOFTMAX_WARPS + wwarp)
        compat.store_shared(st.flag.data_ptr().toint() + at, flag, "u32")
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.parts.p_ring.arrive_full_if(st, turn.stage, lane == 0)

    @cute.jit
    def hide(self, st, acc, stage, lane):
        """Takes away the logits of places without a token, whose rows of K are zeros."""
        bits = st.named.get_tensor(cute.make_layout((2, STAGES)))
        named = [cute.arch.make_warp_uniform(Int32(bits[x, stage])) for x in range(2)]
        if (named[0] & named[1]) != -1:
            mine = [word >> (2 * (lane % 4)) for word in named]
            for v in cutlass.range_constexpr(ROWS_ON_M.values):
                place = ROWS_ON_M.token_at(0, 0, 0, v)
                if (mine[place // 32] >> (place % 32)) & 1 == 0:
                    acc[v] = -Float32.inf

    @cute.jit
    def finish(self, st, gmem, item, state, items):
        """Row sums of a work tile -> factors of O for the P.V warps; LSE and maxima to memory."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        frame, sums, most, _ = state
        inv = st.inv.get_tensor(cute.make_layout(ROWS_OF_CTA))
        INV_RING.wait_empty(st, 0, (items & 1) ^ 1)
        for i in cutlass.range_constexpr(2):
            total = sums[i]
            for off in cutlass.range_constexpr(2):
                total = total + cute.arch.shuffle_sync_bfly(total, 1 << off)
            if lane % 4 == 0:
                row = ROWS_ON_M.row_at(wwarp, lane, i)
                inv[row] = finish_row(gmem, item, row, total, frame[i], most[i])
        cute.arch.sync_warp()
        if lane == 0:
            INV_RING.arrive_full(st, 0)

    # ---------------------------------------------------------------- P.V warpgroups

    @cute.jit
    def products(self, st, layouts, gmem, cta, half):
        """Work tiles and tiles of a P.V warpgroup."""
        operands, acc_O = self.pv_operands(st, layouts, half), self.accumulators()
        total, tiles, items = Work.total(gmem), Int32(0), Int32(0)  # behind us
        query, _ = Work.place(gmem, cta)
        count = Work.count(gmem, query)
        for j in cutlass.range(cta, total, gmem.ctas, unroll=1):
            item = Work.item(gmem, j, count)
            query, _ = Work.place(gmem, j + gmem.ctas)
            count = Work.count(gmem, query)
            for x in cutlass.range_constexpr(len(acc_O)):
                acc_O[x].fill(0.0)
            for _ in cutlass.range(0, item.tiles, unroll=1):
                turn = Turn.of(tiles)
                # P being there means that all of K is, and that Q.K has read it
                self.parts.p_ring.wait_full(st, turn.stage, turn.phase)
                self.pv_block(st, acc_O, operands, turn.stage)
                release(self.loads.kv, st, turn.slot(LATE))
                tiles += 1
            INV_RING.wait_full(st, 0, items & 1)
            self.write(st, gmem, acc_O, item, half)
            items += 1

    @cute.jit
    def write(self, st, gmem, acc_O, item, half):
        """Normalised O -> rows, their factors being there."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, quad = tidx % 32, tidx % 4
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv = st.inv.get_tensor(cute.make_layout(ROWS_OF_CTA))
        for i in cutlass.range_constexpr(2):
            row = ROWS_ON_M.row_at(wwarp, lane, i)
            inverse = inv[row]
            runs = {}
            for j in cutlass.range_constexpr(HALF // 8):
                acc, v = acc_O[8 * j // PV_N], 4 * (j % (PV_N // 8)) + 2 * i
                if inverse == 0.0:  # a row that saw no token, or whose sink takes all
                    acc[v], acc[v + 1] = Float32(0.0), Float32(0.0)
                acc[v], acc[v + 1] = acc[v] * inverse, acc[v + 1] * inverse
                runs[8 * j] = cute.make_tensor(acc.iterator + v, cute.make_layout(2))
            write_row(gmem, item, row, half * HALF, runs, quad)
        cute.arch.sync_warp()
        if lane == 0:
            INV_RING.arrive_empty(st, 0)


class SparsePrefill:
    """The kernel of one head size."""

    def __init__(self, spec: VariantSpec):
        self.budget, self.loads = budget(spec), GatheredTiles(spec.d_qk)
        self.form = Form(self.loads)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # bf16 (s_q, h, d_qk)
        kv: cute.Tensor,  # bf16 (s_kv, 1, d_qk)
        indices: cute.Tensor,  # i32 (s_q, 1, topk), rows of kv
        topk_length: cute.Tensor,  # i32 (s_q,) or (0,)
        attn_sink: cute.Tensor,  # f32 (h,) or (0,)
        out: cute.Tensor,  # bf16 (s_q, h, 512)
        max_logits: cute.Tensor,  # f32 (s_q, h), natural
        lse: cute.Tensor,  # f32 (s_q, h), natural
        softmax_scale: Float32,
        ctas: Int32,
        stream,
    ):
        gmem = Gmem(
            kv, indices, topk_length, attn_sink, out, max_logits, lse, Int32(q.shape[1]),
            softmax_scale * LOG2E, ctas,
        )  # fmt: skip
        self.kernel(self.loads.source_of_q(q), gmem).launch(
            grid=(ctas, 1, 1), block=(self.budget.threads, 1, 1), stream=stream,
            min_blocks_per_mp=1, use_pdl=True,
        )  # fmt: skip

    def storage(self, layouts):
        """The CTA's shared memory."""
        return struct_of(**self.form.fields(), **self.form.parts.tile_fields(layouts))

    @cute.kernel
    def kernel(self, tma_q, gmem: Gmem):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts = self.form.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.storage(layouts))
        if warp_id == 0:
            cpasync.prefetch_descriptor(tma_q.atom)
            with cute.arch.elect_one():
                self.loads.init(st)
                self.form.init_barriers(st)
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        compat.pdl_wait()  # queries, KV and indices come from the kernels before
        producer, softmax, pv = self.form.registers
        if wg == 0:
            claim_registers(self.budget, producer)
            self.loads.run(st, warp_id, layouts, tma_q, gmem, Int32(cta))
        elif wg == 1:
            claim_registers(self.budget, softmax)
            self.form.softmax(st, layouts, gmem, Int32(cta))
        else:
            claim_registers(self.budget, pv)
            self.form.products(st, layouts, gmem, Int32(cta), wg - 2)

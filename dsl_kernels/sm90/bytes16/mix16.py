"""Sparse MLA decode for SM90 over 656-byte rows, pipeline ``mix16``: 16-bit products, and no
dequantised byte in shared memory.

A row is 512 e4m3 channels with an fp32 scale for each 128, and 64 BF16 RoPE channels (ds_mla.py).
The ring holds the rows' bytes.  Both products take what comes from the cache as *register* operand
and convert it on the way, four values in two instructions:

    S^T = K Q^T     ldmatrix, e4m3 -> f16 (exact); with 64 rows times scale / largest scale of the
                    token (at most 1), two values an instruction; RoPE in BF16 out of shared memory
    O^T = V^T P^T   ldmatrix.trans, one prmt, e4m3 -> f16, times scale / largest, two tokens an
                    instruction

Roles (4 warpgroups of 128 threads)
    wg 0  warps 0, 1, 3  gather rows (load/gather.py)
          warp 2         announcer: the tokens' scales -> log2, reciprocal, ratios; then full; has
                         Q's tiles copied (load/gather_bytes.py, mix16_parts.py)
    wg 1                 S^T, softmax, P^T to shared memory (mix16_softmax.py; 64 rows over
                         lists: P.V hears of it later, mix16_overlap.py)
    wg 2, 3              Q -> f16 (mix16_parts.py); P.V: O^T of half of d_v each, summed in the
                         tensor core (mix16_pv.py)

Timeline of tile i (one stage of the K ring)
    gather        | i+2 ...
    announcer     |  scales i+1 |
    softmax       | Q.K i: 8 x (convert 64 channels, 4 WGMMAs) | RoPE i | vote, exp2 of i | P i ->
    P.V           | V^T of 16 channels | wait P i | 8 x (2 WGMMAs, convert the next) | free i

With 64 rows over lists P i is announced when Q.K i + 1 has been issued, and no warp waits for votes
before its exponentials (mix16_overlap.py).

Work tiles meet like this: half of Q's stage is free when the last tile's Q.K is half done, the rest
when it is done; the announcer has the next work tile's Q copied then, out of L2, where it was asked
for a few tiles ago; while it comes, softmax gives the tile's P and the row sums, and P.V adds that
tile's products.  P.V's warps convert it, before they write the work tile's rows.  What softmax does
between the work tiles' tiles, m_refs and sums of rows (mix16_m_ref.py), short lists wait for.

m_ref (log2 units).  P' = 2^(t + log2 sigma - m_ref) in f16, sigma the token's largest scale; O and
the row sum are relative to ``m_ref``, which moves only when some value would pass 2^15, and then so
that the block's largest P' is 2^8.  The row sum adds P' / sigma times 2^-40; O is multiplied by
that as it is written.

The k index inside 16 channels is renamed: a thread of S^T's fragment has four neighbouring bytes
where the instruction wants two pairs; Q's channels follow (mix16_parts.py).

Registers, 64 rows: softmax 112, P.V 184: O 128, three fragments of 8, since ptxas converts a unit
before the wait behind which it is written.  With 176 it serialises every WGMMA (note C7512).

Shared memory, 64 rows and 3 stages (bytes)
    Q 73728 | K ring 3 x (32768 content + 8192 RoPE + 1024 scales + 2560 of theirs) | P 2 x 8192
    exchange, gamma, factors, 1/l, flags, barriers                                         = 228352
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...blocks import budget as bud
from ...blocks.registers import claim_registers
from ...blocks.smem import array, staged, struct_of
from ...blocks.types import F16
from ...entry.entries import BytesEntry
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import QK_ROPE_HEAD_DIM as R
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.ds_mla import GROUPS
from ...formats.stamp import Stamp
from ..decode import Decode, infeasible
from ..fp8.softmax_role import P_RING, P_STAGES, any_flag, hand_over_fields
from ..fragments import pad_layout, padded_size
from ..roles import FEW_ROWS, INV_RING, SOFTMAX_WARPS, WARPGROUP, Cta, Layouts
from ..work_tile_notes import noted
from .mix16_overlap import softmax_of, votes_of
from .mix16_parts import CONVERTED, CONVERTED_THREADS, STAGE_BYTES, Parts
from .mix16_pv import ProductsOfV
from .mix16_softmax import MixSoftmax

if TYPE_CHECKING:
    from ...spec import VariantSpec

# Of producers, softmax, P.V, by rows
REGISTERS = {16: (32, 160, 160), 32: (32, 160, 160), 64: (32, 112, 184)}
STAGES, FEW_STAGES = 3, 4
SMALL_BYTES = 8192  # exchange, factors, barriers, alignment: an upper bound


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.p_terms > 1:
        return "mix16 has a P of 16 bits: one term"
    return infeasible(spec, 2, budget(spec))


def stages_of(spec: VariantSpec) -> int:
    """KV tiles in flight."""
    return spec.stages or (FEW_STAGES if spec.row_tile <= FEW_ROWS else STAGES)


def q_stages(spec: VariantSpec) -> int:
    """Row tiles of Q in flight."""
    return 2 if spec.row_tile < FEW_ROWS else 1


def parts_of(spec: VariantSpec, made: Any = Parts, **members: Any) -> Parts:
    """Make the pipeline's components.

    Args:
        made: ``Parts`` or a subclass; ``members`` are further arguments of its constructor.
    """
    return made(spec, stages=stages_of(spec), q_stages=q_stages(spec), **members)


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    rows, few = spec.row_tile, spec.row_tile <= FEW_ROWS
    producer, softmax, pv = REGISTERS[rows]
    tiles = stages_of(spec) * STAGE_BYTES + rows * 2 * (q_stages(spec) * (D + R) + P_STAGES * TILE)
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", producer),
            bud.WarpGroup("softmax", softmax),
            bud.WarpGroup("P.V", pv, count=2),
        ),
        smem=tiles + SMALL_BYTES,
        barriers=barriers_of(spec, parts_of(spec)),
        mmas=(
            bud.Mma("Q.K content", TILE, rows, D // GROUPS if few else D, "f16"),
            bud.Mma("Q.K RoPE", TILE, rows, R, "bf16"),
            bud.Mma("P.V", 64, rows, TILE, "f16"),
        ),
    )


def barriers_of(spec: VariantSpec, parts: Parts) -> tuple[bud.Barrier, ...]:
    """Barriers of a CTA: of ``parts``, of P, of the row sums and of votes, if there are votes."""
    return *parts.barriers(), *P_RING.budget(), *INV_RING.budget(), *votes_of(spec)


def build(spec: VariantSpec):
    parts = parts_of(spec)
    pipeline = Mix16(parts, softmax_of(spec, MixSoftmax)(parts), budget(spec))
    return BytesEntry.exported(Decode(spec, pipeline))


class Mix16(ProductsOfV):
    """The pipeline: softmax and P.V roles (``decode.Pipeline``).

    Attributes:
        converts: whether warps of P.V convert Q.
    """

    converts = True

    def __init__(self, parts: Any, softmax: Any, budget: bud.Budget):
        self.parts, self.softmax, self.budget = parts, softmax, budget
        self.rows_cta, self.stages = parts.rows, parts.stages
        _, self.softmax_regs, self.pv_regs = (group.registers for group in budget.groups)

    # ---------------------------------------------------------------- host half

    def layouts(self) -> Layouts:
        return self.parts.layouts()

    def storage(self, layouts):
        return struct_of(
            **self.parts.barrier_fields,
            **hand_over_fields(self.rows_cta),
            **self.softmax.fields(),
            **self.parts.tile_fields(layouts),
            p=array(F16, cute.cosize(layouts.p), 1024),
        )

    # ---------------------------------------------------------------- roles

    @cute.jit
    def init_barriers(self, st):
        self.parts.q_tiles.init(st)
        P_RING.init(st)
        INV_RING.init(st)
        self.softmax.init(st)

    @cute.jit
    def math_roles(self, cta, wg):
        if wg == 0:
            claim_registers(self.budget, self.softmax_regs)
            self.softmax.loop(cta)
        elif const_expr(self.softmax_regs > self.pv_regs):
            # what claims the most is taken for both where warpgroups share code
            if wg == 1:
                claim_registers(self.budget, self.pv_regs)
                self.pv_loop(cta, Int32(0))
            else:
                claim_registers(self.budget, self.pv_regs)
                self.pv_loop(cta, Int32(1))
        else:
            claim_registers(self.budget, self.pv_regs)
            self.pv_loop(cta, wg - 1)

    # ---------------------------------------------------------------- P.V warpgroups

    @cute.jit
    def pv_loop(self, cta: Cta, half):
        tidx, _, _ = cute.arch.thread_idx()
        span = self.parts.work.work_tiles_of(cta.gmem.work, cta.part)
        mma_o = self.pv_mma()
        acc_O = [
            cute.make_rmem_tensor(mma_o.partition_shape_C((64, self.rows_cta)), Float32)
            for _ in range(4)
        ]
        operands, consumer = (
            self.pv_operands(cta.st, cta.layouts),
            pipeline.PipelineUserType.Consumer,
        )
        kst = pipeline.make_pipeline_state(consumer, self.stages)
        pst = pipeline.make_pipeline_state(consumer, P_STAGES)
        qst = pipeline.make_pipeline_state(consumer, self.parts.q_stages)
        states = (Int32(0), kst, pst, qst)  # work tiles behind us; rings of K, P and Q
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        for turn in cutlass.range(self.first_turn(span), span[1], unroll=1):
            states = self.turn(cta, acc_O, operands, (turn, span), states, half, wwarp)

    @cute.jit
    def turn(self, cta, acc_O, operands, at, states, half, wwarp):
        """A work tile's products, the next one's Q, the work tile's rows.

        Args:
            at: turn, and the span of work tiles.
            states: work tiles behind us, and of the rings of K, P and Q; returns the next ones.
        """
        turn, span = at
        work_tiles, kst, pst, qst = states
        results, work = cta.gmem.results, cta.gmem.work
        i, batch, first, last = self.work_tile_of(work, turn, span)
        ends = self.ends_of(cta.gmem, cta.call, i, batch)
        offset = self.own_offset(wwarp)
        for d_block in cutlass.range_constexpr(4):
            acc_O[d_block].fill(0.0)
        kst, pst = self.tiles(cta, acc_O, operands, half, (first, last), (kst, pst), offset, ends)
        self.parts.stamps.put(results, Stamp.PRODUCTS_END, (half == 0) & (i == turn))
        self.align(acc_O[-1], half)  # while the next Q is on its way
        if const_expr(self.converts):
            self.convert(cta, qst, at, first >= last, work_tiles, half, wwarp)
            qst.advance()
            if turn >= span[0]:
                self.end_work_tile(cta, acc_O, work_tiles, half, wwarp)
                work_tiles += 1
        else:
            self.end_work_tile(cta, acc_O, work_tiles, half, wwarp)
            work_tiles += 1
        return work_tiles, kst, pst, qst

    def first_turn(self, span):
        """First turn: one before the first work tile's; ``span[1]`` if there are no work tiles.
        Turn i has work tile i and converts the next Q, so one copy of the code, fetched once,
        converts every Q."""
        return Int32(cutlass.select_(span[0] < span[1], span[0] - 1, span[1]))

    @cute.jit
    def work_tile_of(self, work, turn, span):
        """(work tile, its sequence, first and last tile) of a turn; no tiles of the one before
        all."""
        i = cutlass.max(turn, span[0])
        batch, first, last, _ = self.parts.work.work_tile_at(work, i)
        return i, batch, first, Int32(cutlass.select_(turn < span[0], first, last))

    @cute.jit
    def end_work_tile(self, cta, acc_O, work_tiles, half, wwarp):
        """Rows of work tile number ``work_tiles`` to memory, when their sums are there."""
        INV_RING.wait_full(cta.st, 0, work_tiles & 1)
        split, rows = noted(cta.st, work_tiles, wwarp, self.rows_cta)
        self.write_rows(cta.st, cta.gmem.results, acc_O, split, rows, half, INV_RING)
        self.parts.stamps.put(cta.gmem.results, Stamp.ROWS_WRITTEN + half)

    @cute.jit
    def tiles(self, cta, acc_O, operands, half, span, states, offset, ends):
        """A work tile's tiles; returns the next states of the ring and of P."""
        tidx, _, _ = cute.arch.thread_idx()
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        kst, pst = states
        for tile in cutlass.range(span[0], span[1], unroll=1):
            cta.k_pipe.consumer_wait(kst)
            self.clear(cta.st, tile, ends, half, kst, pst)
            self.pv_block(cta.st, cta.k_pipe, acc_O, operands, half, kst, pst, offset, wwarp)
            kst.advance()
            pst.advance()
        return kst, pst

    @cute.jit
    def convert(self, cta, qst, at, without_tiles, work_tiles, half, wwarp):
        """The Q of a turn's next work tile, if there is one, to f16, eight rows a warp, while
        softmax is at the sums of this one; softmax hears of it.

        Args:
            at: turn, and the span of work tiles.
            without_tiles: whether this work tile, the ``work_tiles``-th, has none.
        """
        turn, span = at
        if (turn >= span[0]) & without_tiles:  # no P has told that softmax has heard of its Q
            INV_RING.wait_full(cta.st, 0, work_tiles & 1)
        if turn + 1 < span[1]:
            cta.q_pipe.consumer_wait(qst)
            group, groups = half * SOFTMAX_WARPS + wwarp, const_expr(self.rows_cta // 8)
            if (group < groups) & (half * SOFTMAX_WARPS < groups):  # which may be known
                self.parts.queries.convert(cta.st, qst.index, cta.call, group)
                cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier_arrive(barrier_id=CONVERTED, number_of_threads=CONVERTED_THREADS)

    def align(self, last, half) -> None:
        """Hook on the last block of O^T before rows are written, for RoPE in V; nothing here."""

    def ends_of(self, gmem, call, i, batch) -> Any:
        """Hook: facts of work tile ``i`` for ``clear``.  None here: rows without a token are
        zeros."""

    def clear(self, st, tile, ends, half, kst, pst) -> None:
        """Hook: zero V of a landed tile where P is 0 and V may not be finite; nothing here."""

    def pv_operands(self, st, layouts):
        """The operand of P.V in shared memory: B fragments of P^T, of both buffers."""
        tidx, _, _ = cute.arch.thread_idx()
        mma = self.pv_mma()
        thr = mma.get_slice(tidx % WARPGROUP)
        return mma.make_fragment_B(thr.partition_B(staged(st.p, layouts.p)))

    def products(self, st, acc_O, operands, kst, pst, tile, first) -> None:
        """Adds V^T P^T of a tile to O^T (``multiply``)."""
        self.multiply(
            st, acc_O, lambda k: operands[None, None, k, pst.index], tile, first,
            lambda: self.parts.free_first_half(st, kst.index),
        )  # fmt: skip

    @cute.jit
    def pv_block(self, st, k_pipe, acc_O, operands, half, kst, pst, offset, wwarp):
        """O^T = gamma O^T + V^T P^T of one tile."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        tile = self.tile(st, kst.index, half, wwarp, offset)
        first = self.first_unit(st, tile)
        P_RING.wait_full(st, pst.index, pst.phase)
        if cute.arch.make_warp_uniform(any_flag(st, pst.index)) != 0:
            at = pst.index * padded_size(self.rows_cta)
            gamma_s = cute.make_tensor(st.gamma.data_ptr() + at, pad_layout(self.rows_cta))
            for v in cutlass.range_constexpr(self.rows_cta // 2):
                gamma = gamma_s[2 * (v // 4) + v % 2, lane % 4]
                for d in cutlass.range_constexpr(4):
                    acc_O[d][v] = acc_O[d][v] * gamma
        self.products(st, acc_O, operands, kst, pst, tile, first)
        cute.arch.sync_warp()  # one lane frees the stage for all: their reads come first
        k_pipe.consumer_release(kst)
        warpgroup.wait_group(0)
        cute.arch.sync_warp()
        if lane == 0:
            P_RING.arrive_empty(st, pst.index)

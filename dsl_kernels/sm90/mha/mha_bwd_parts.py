"""Base of mha_dq and mha_dkv: 128 rows that stay, tiles that stream by them, and their products.

    item     producer -> consumers, clearing warp    which work tile comes
    still    producer -> consumers                   two operands of 128 rows of a work tile
    moving   producer -> clearing warp, consumers    tiles of two operands
    clean    clearing warp -> consumers              those tiles, looked at

Of each tile two products are made by WGMMA from shared memory, S and dP (or S^T and dP^T), whose 16
bits in registers are then the A of one or two further products with the same tile as B, its rows
along K.  So a tile is read twice, and a row of it that holds a NaN spoils sums of others even where
P and dS are 0: the clearing warp makes zeros of such a row before anything reads it.  Every tile
passes it, so that who waits for a tile need not know which are touched.

WGMMAs are fenced once a tile, before the first of them.  S and dP live in a tile alone: as
accumulators that are carried round a loop they get copies between fence and WGMMA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from ...blocks import budget as bud
from ...blocks import compat
from ...blocks.barriers import Ring
from ...blocks.registers import claim_registers
from ...blocks.smem import array, one_stage, staged, struct_of
from ...blocks.types import ROW_MAJOR, U32
from ...combine.epilogue import Woven
from ...formats.mha_list import ROWS, WIDTHS
from ...load.planes import Loaded
from ...load.work_list import LOG2E
from ..attention_parts import Boxes, Notes, WorkTiles, to_a
from ..hidden_keys import CONSUMER_WARPS, LINE
from ..wgmma import issue, tiled_mma
from .mha_delta import stats_fake

if TYPE_CHECKING:
    from ...spec import VariantSpec

COL_MAJOR = cutlass.tensor_utils.LayoutEnum.COL_MAJOR
WARPGROUP, D_V = 128, 128
PRODUCER, CONSUMER = 24, 240  # registers
SMALL_BYTES = 2048  # notes, barriers, alignment: an upper bound


@cute.jit
def store_rows(out, acc, factor, token, limit, head, row, channels: cutlass.Constexpr):
    """Rows ``row`` and ``row + 8`` below ``limit`` of a 64 x n accumulator, times ``factor``: its
    first ``channels``, 16 bytes a store."""
    quad = cute.arch.lane_idx() % 4
    woven = Woven((1, 2), quad, 8)
    for i in cutlass.range_constexpr(2):
        mine = row + 8 * i < limit
        for g in cutlass.range_constexpr(channels // 32):
            pairs = []
            for x in cutlass.range_constexpr(4):
                v = 4 * (4 * g + x) + 2 * i
                pairs.append([acc[v + y] * factor for y in range(2)])
            turned = woven.swap(pairs, out.element_type)
            if mine:
                at = cute.crd2idx((token + row + 8 * i, head, 32 * g + 8 * quad), out.layout)
                compat.store_words((out.iterator + at).align(16), turned)


class Summed(NamedTuple):
    """A sum over the rows that stream.

    Attributes:
        mma: of the product.
        r_b: its B, of all stages.
        acc: its accumulator, 64 rows.
        r_a, a16: its A in registers, as the product takes it and as a vector.
    """

    mma: Any
    r_b: Any
    acc: Any
    r_a: Any
    a16: Any

    @classmethod
    def of(cls, dtype, field, layout, thread, tile: int, channels: int) -> Summed:
        """Make a thread's share of the sum over tiles of ``tile`` rows in storage ``field``; the
        sum has ``channels`` columns."""
        mma = tiled_mma(dtype, channels, a_in_registers=True, b_mn=True)
        r_b = mma.make_fragment_B(mma.get_slice(thread).partition_B(staged(field, layout)))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((64, channels)), Float32)
        r_a = mma.make_fragment_A(mma.partition_shape_A((64, tile)))
        return cls(mma, r_b, acc, r_a, cute.make_tensor(r_a.iterator, cute.make_layout(tile // 2)))

    def take(self, weights) -> None:
        """P or dS of a tile -> A."""
        to_a(weights, self.a16, cute.size(self.a16), self.a16.element_type)

    def issue(self, slot) -> None:
        """Adds the tile in ``slot``."""
        issue(self.mma, self.acc, self.r_a, self.r_b[None, None, None, slot], accumulate=True)


class Gradients(WorkTiles):
    """A kernel of the backward.

    Attributes:
        d_qk: channels of Q and K.
        tile, stages: rows that stream at a time; how many such tiles there are.
        stat_words: fp32 words of ``stats`` that come with a tile.
        still_k: K and V stay, Q and dO stream; else the other way round.
    """

    def __init__(self, spec: VariantSpec, tile: int, stages: int, stat_words: int, still_k: bool):
        self.dtype, self.d_qk, self.widths = compat.dtype(spec.dtype), spec.d_qk, WIDTHS[spec.d_qk]
        self.tile, self.stages, self.stat_words, self.still_k = tile, stages, stat_words, still_k
        readers = {"consumers": CONSUMER_WARPS}
        # head (-1 ends the list), first token of what stays, query tokens, keys, tile of ROWS, and
        # a word of the kernel's own
        self.notes = Notes("item", 6, {**readers, "clearing": 1})
        self.still = Ring("still", 1, {"producer": 1}, readers)
        self.moving = Ring("moving", stages, {"producer": 1}, readers)
        self.clean = Ring("clean", stages, {"clearing": 1})
        self.rings = (self.notes.ring, self.still, self.moving, self.clean)
        self.fields: dict[str, Any] = dict(self.notes.fields)
        for ring in self.rings[1:]:
            self.fields.update(ring.field)
        self.budget = bud.Budget(
            groups=(
                bud.WarpGroup("producer", PRODUCER),
                bud.WarpGroup("consumers", CONSUMER, count=2),
            ),
            smem=2 * (ROWS + stages * tile) * (spec.d_qk + D_V) + 4 * stages * stat_words
            + SMALL_BYTES,
            barriers=tuple(barrier for ring in self.rings for barrier in ring.budget()),
            mmas=(
                bud.Mma("S", 64, tile, spec.d_qk, spec.dtype),
                bud.Mma("dP", 64, tile, D_V, spec.dtype),
                bud.Mma("sum", 64, spec.d_qk, tile, spec.dtype),
            ),
        )  # fmt: skip

    def fakes(self):
        """Fake arguments by name, without the results."""
        names = ("h", "h_k", "h_rope", "total_q", "total_k", "b_plus_1", "words", "blocks")
        h, h_k, h_rope, t_q, t_k, b1, words, blocks = (compat.sym(name=x) for x in names)
        dt, i32 = self.dtype, compat.DTYPES["i32"]
        keys = {
            name: compat.rows(dt, (t_k, heads, width))
            for name, heads, width in zip(("k_nope", "k_rope"), (h_k, h_rope), self.widths)
        }

        return {
            "q": compat.rows(dt, (t_q, h, self.d_qk)),
            **keys,
            "v": compat.rows(dt, (t_k, h_k, D_V)),
            "dout": compat.rows(dt, (t_q, h, D_V)),
            "stats": stats_fake(h, blocks),
            "cu_seqlens_q": compat.vector(i32, b1),
            "cu_seqlens_k": compat.vector(i32, b1),
            "work": compat.vector(i32, words),
        }

    def layouts(self):
        """Six shared-memory layouts, one of d_qk and one of d_v channels each: of what stays, as A;
        of what streams, as B with channels along K; of what streams, as B with rows along K."""
        t, d, n, dt = self.tile, self.d_qk, self.stages, self.dtype
        return (
            sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, t, d), dt, 1),
            sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, t, D_V), dt, 1),
            sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, t, d), dt, n),
            sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, t, D_V), dt, n),
            sm90.make_smem_layout_b(COL_MAJOR, (ROWS, d, t), dt, n),
            sm90.make_smem_layout_b(COL_MAJOR, (ROWS, D_V, t), dt, n),
        )

    @cute.jit
    def launch(self, tensors, rest, scale, causal, ctas, stream):
        """Host half; tensors = (q, dout, v, K's)."""
        ls = self.layouts()
        q, dout, v, *ks = tensors
        big = [array(self.dtype, cute.cosize(ls[i]), 1024) for i in range(4)]
        names = ("still_qk", "still_v", "moving_qk", "moving_v")
        if const_expr(self.stat_words > 0):
            self.fields["stats"] = array(Float32, self.stages * self.stat_words, 128)
        self.Storage = struct_of(**self.fields, **dict(zip(names, big, strict=True)))
        op = cpasync.CopyBulkTensorTileG2SOp()

        def load(t, stays, width):
            view = cute.make_tensor(t.iterator, cute.select(t.layout, mode=[0, 2, 1]))
            rows = ROWS if stays else self.tile
            make = sm90.make_smem_layout_a if stays else sm90.make_smem_layout_b
            box = one_stage(make(ROW_MAJOR, (ROWS, self.tile, width), self.dtype, 1))
            return Loaded(*list(cpasync.make_tiled_tma_atom(op, view, box, (rows, width)))[:2])

        rows = (load(q, not self.still_k, self.d_qk), load(dout, not self.still_k, D_V))
        keys = (load(v, self.still_k, D_V),
                *(load(k, self.still_k, w) for k, w in zip(ks, self.widths)))  # fmt: skip
        self.kernel((rows, keys), rest, scale, scale * LOG2E, causal, ctas).launch(
            grid=(ctas, 1, 1), block=(self.budget.threads, 1, 1), stream=stream,
            min_blocks_per_mp=1, use_pdl=True,
        )  # fmt: skip

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, tma, rest, scale: Float32, scale2: Float32, causal: Int32, ctas: Int32):
        tidx, _, _ = cute.arch.thread_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        ls = self.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.Storage)
        if warp_id == 0:
            for loaded in (*tma[0], *tma[1]):
                cpasync.prefetch_descriptor(loaded.atom)
            with cute.arch.elect_one():
                for ring in self.rings:
                    ring.init(st)
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        self.begin()
        if wg == 0:
            claim_registers(self.budget, PRODUCER)
            if warp_id == 0:
                self.produce(st, ls, tma, rest, causal, ctas)
            elif warp_id == 1:
                self.clear(st, rest, causal)
        else:
            claim_registers(self.budget, CONSUMER)
            self.consume(st, ls, rest, scale, scale2, causal, wg - 1)

    def q_boxes(self, st, ls, rows, q0, head) -> Boxes:
        """TMA boxes of Q and dO of ``head``, from query row ``q0`` on."""
        out = []
        stays = not self.still_k
        fields = (st.still_qk, st.still_v) if stays else (st.moving_qk, st.moving_v)
        for loaded, field, layout, width in zip(rows, fields, ls[0 if stays else 2 :],
                                                (self.d_qk, D_V)):  # fmt: skip
            moved = cute.domain_offset((q0, 0), loaded.coords[None, None, head])
            box = (ROWS if stays else self.tile, width)
            out.append((loaded, *self._boxes(loaded, staged(field, layout), moved, box, (None, 0))))
        return out

    def kv_boxes(self, st, ls, keys, k0, kv_head, rope_heads) -> Boxes:
        """TMA boxes of V and K's tensors of ``kv_head``, from key ``k0`` on."""
        tv, *tk = keys
        qk, v, at = (st.moving_qk, st.moving_v, 2)
        if self.still_k:
            qk, v, at = st.still_qk, st.still_v, 0
        count = ROWS if self.still_k else self.tile
        moved = cute.domain_offset((k0, 0), tv.coords[None, None, kv_head])
        values = self._boxes(tv, staged(v, ls[at + 1]), moved, (count, D_V), (None, 0))
        out = self._k_boxes(tk, staged(qk, ls[at]), k0, kv_head, rope_heads, count)
        return [(tv, *values), *out]

    @cute.jit
    def fill_still(self, st, boxes, done, tile):
        """Load the two operands that stay, of the ``done``-th work tile that has any products;
        ``tile``: index of their rows among the tiles of ``boxes``."""
        self.still.wait_empty(st, 0, (done & 1) ^ 1)
        barrier = self.still.full_barrier(st, 0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * ROWS * (self.d_qk + D_V))
        for loaded, target, source in boxes:
            cute.copy(loaded.atom, source[None, tile], target[None, 0], tma_bar_ptr=barrier)

    @cute.jit
    def fill(self, st, use, boxes, tile):
        """Load tile ``tile`` of what streams into the slot of ``use``; return slot and barrier, at
        which the words of ``stats`` are yet to arrive."""
        slot, phase = use % self.stages, (use // self.stages) & 1
        self.moving.wait_empty(st, slot, phase ^ 1)
        barrier = self.moving.full_barrier(st, slot)
        size = 2 * self.tile * (self.d_qk + D_V) + 4 * self.stat_words
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        for loaded, target, source in boxes:
            cute.copy(loaded.atom, source[None, tile], target[None, slot], tma_bar_ptr=barrier)
        return slot, barrier

    @cute.jit
    def end(self, st, count):
        """No further work tile."""
        self.notes.write(st, count, (Int32(-1),) * self.notes.words)

    @cute.jit
    def zero_row(self, field, slot, row, channels: cutlass.Constexpr):
        """Makes zeros of a row of the tile in ``slot``: a whole line of 128 bytes of each column
        block of 64 channels, so that there is no swizzle to mind."""
        lane = cute.arch.lane_idx()
        zero = cute.make_rmem_tensor((1,), U32)
        zero.fill(0)
        for block in cutlass.range_constexpr(channels * 2 // LINE):
            begin = field.data_ptr().toint() + (slot * channels * 2 + block * LINE) * self.tile
            at = Int32(begin + row * LINE + lane * 4)
            line = cute.make_ptr(U32, at, cute.AddressSpace.smem, assumed_align=4)
            cute.autovec_copy(zero, cute.make_tensor(line, cute.make_layout(1)))

    @cute.jit
    def cleared(self, st, slot):
        """Announce that the tile in ``slot`` may be read; all lanes of the clearing warp call
        this."""
        cute.arch.sync_warp()
        self.clean.arrive_full_if(st, slot, cute.arch.lane_idx() == 0)

    def wait_tile(self, st, use):
        """Slot of ``use``, once its tile is there and clean."""
        slot, phase = use % self.stages, (use // self.stages) & 1
        self.moving.wait_full(st, slot, phase)
        self.clean.wait_full(st, slot, phase)
        return slot

    # Turns: one consumer issues its products while the other has exponentials to make.

    @cute.jit
    def first_turn(self, which):
        """The first turn is consumer 0's."""
        if which == 1:
            cute.arch.barrier_arrive(barrier_id=1, number_of_threads=2 * WARPGROUP)

    def turn(self, which) -> None:
        cute.arch.barrier(barrier_id=1 + which, number_of_threads=2 * WARPGROUP)

    def pass_on(self, which) -> None:
        cute.arch.barrier_arrive(barrier_id=2 - which, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def last_turn(self, which):
        """Takes the turn that consumer 1 passed on last."""
        if which == 0:
            cute.arch.barrier(barrier_id=1, number_of_threads=2 * WARPGROUP)

    def operands(self, st, ls, thread, which):
        """MMA of S and dP; their A, and B of all stages."""
        mma = tiled_mma(self.dtype, self.tile)
        thr = mma.get_slice(thread)
        still, moving = [], []
        pairs = ((st.still_qk, st.moving_qk, self.d_qk), (st.still_v, st.moving_v, D_V))
        for i, (stays, streams, width) in enumerate(pairs):
            mine = cute.local_tile(staged(stays, ls[i]), (64, width), (which, 0, None))
            still.append(mma.make_fragment_A(thr.partition_A(mine))[None, None, None, 0])
            moving.append(mma.make_fragment_B(thr.partition_B(staged(streams, ls[2 + i]))))
        return mma, still, moving

    def scores(self, ops, slot):
        """Issues S and dP of the tile in ``slot``; their accumulators."""
        mma, still, moving = ops
        shape = mma.partition_shape_C((64, self.tile))
        accs = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        for acc, a, b in zip(accs, still, moving):
            issue(mma, acc, a, b[None, None, None, slot], accumulate=False)
        warpgroup.commit_group()
        return accs

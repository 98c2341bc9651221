"""index_logits: scores of cached tokens for query tokens, from a paged FP8 index cache.

    out[r, t] = scale[t] * sum_h w[r, h] * max(q[r, h] . k[t], 0)        t < tokens that row r sees

A unit is up to U query tokens (rows) of a sequence; a tile is a page of 64 tokens, read once for
all rows of a unit.  Each CTA stays for the whole launch and takes an equal run of (unit, tile)
(index_units.py); one kernel for decode, drafts and prefill, straight from the pages.

Roles           wg 0: warp 0 finds the CTA's run, announces each unit with its queries and weights,
                and fills the ring of pages; warps 1 to 3 idle.  wg 1 and on: maths, each takes
                every G-th tile whole (G of them), so one's sums run beside the others' products.
Shared memory   ring of pages, a stage: 64 x 128 e4m3 (128-byte swizzle), 64 scales | two units:
                N x 128 e4m3 of queries (N = heads * U), N weights, eight words about the unit |
                barriers
Timeline        a unit: wait until its slot is free; words about it, TMA of queries, bulk copy of
                weights -> full -> every maths warpgroup | a tile: wait empty; TMA of keys, bulk
                copy of scales -> full -> WGMMA m64nN x 4 -> ReLU, weights, sum over heads -> stage
                is free as soon as the products are there; 64 x U scores go out.  A unit of no tile
                ends the maths.

    pages   wg 0 -> the maths warpgroup whose turn it is   (full: TMA bytes, empty: its 4 warps)
    units   wg 0 -> all maths warpgroups                   (full: TMA bytes, empty: their warps)

Tokens lie on M, so the heads of a row lie in a quad of lanes.  Registers decide how many maths
warpgroups there are: a thread has half as many accumulators as a product has columns.  Four
warpgroups of one product each hide more latency than two that overlap their own (so a prototype of
this plan on an H200).  A thread's N / 4 weights stay in registers where there is room, else they
come from shared memory four at a time, which the order of heads in N is made for (index_mma.py).

Nothing behind a row's last token is written, and of pages that no row sees nothing is read; what a
tile holds behind the last token is read and computed, and no other score depends on it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from ...blocks import budget as bud
from ...blocks import compat
from ...blocks.barriers import Ring
from ...blocks.registers import claim_registers
from ...blocks.smem import struct_of
from ...formats.index_cache import INDEX_DIM, MMA_COLUMNS, PAGE, PAGE_BYTES
from ...indexer.index_ptx import four_weights, store_below, value_at
from ...indexer.index_scoring import (
    FIRST_TILE,
    ROW,
    ROWS,
    SEEN,
    SMALL_BYTES,
    TILES,
    UNIT_SLOTS,
    WARPGROUP,
    WARPS_OF_GROUP,
    Given,
    Maps,
    Scoring,
    registered,
)
from ..wgmma import low_word
from . import index_mma as mma

if TYPE_CHECKING:
    from ...spec import VariantSpec


class Shape(NamedTuple):
    """Division of a CTA into warpgroups, registers and stages.

    Attributes:
        groups: maths warpgroups.
        registers: of a producer's and of a maths thread.
        stages: pages in the ring, a multiple of ``groups``.
        keeps_weights: whether a thread's weights stay in registers.
    """

    groups: int
    registers: tuple[int, int]
    stages: int
    keeps_weights: bool


# by columns of a unit, heads * U
SHAPES = {
    32: Shape(4, (32, 112), 24, True),
    64: Shape(4, (32, 112), 20, True),
    128: Shape(4, (32, 112), 20, False),
    256: Shape(4, (32, 112), 16, False),
}


class IndexLogits(Scoring):
    """One variant."""

    def __init__(self, spec: VariantSpec):
        super().__init__(spec)
        self.columns = min(self.n, MMA_COLUMNS)  # of a product
        self.products = self.n // self.columns
        self.shape = SHAPES[self.n]
        self.stages = self.shape.stages
        readers = WARPS_OF_GROUP * self.shape.groups
        self.pages = Ring("pages", self.shape.stages, {"producer": 1}, {"maths": WARPS_OF_GROUP})
        self.slots = Ring("units", UNIT_SLOTS, {"producer": 1}, {"maths": readers})
        self.budget = budget_of(self)
        self.threads = self.budget.threads

    @property
    def queries_box(self):
        """Shape of a unit's TMA box of queries: (heads * rows, channels), the first in four
        modes."""
        return ((2, 4, 2, self.n // 16), INDEX_DIM)

    def query_layout(self, rows):
        """Heads in the order of the MMA's columns: the column's bits 0, 1 and 2, 3 step through
        heads by 1, 4 and 2; one mode for what is left of head and row, as heads are 16s."""
        of_16 = rows * (self.heads // 16)
        shape = ((2, 4, 2, of_16), INDEX_DIM)
        steps = (INDEX_DIM, 4 * INDEX_DIM, 2 * INDEX_DIM, 16 * INDEX_DIM)
        return cute.make_layout(shape, stride=(steps, 1))

    def first_query(self, row):
        """Coordinate of the row's first head, in the four modes."""
        return (0, 0, 0, row * (self.heads // 16))

    # ---------------------------------------------------------------- kernel

    def storage(self, layouts):
        return struct_of(**self.pages.field, **self.slots.field, **self.tile_fields(layouts))

    @cute.kernel
    def kernel(self, queries: Maps, keys: Maps, given: Given):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts = self.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.storage(layouts))
        if warp == 0:
            cpasync.prefetch_descriptor(queries.atom)
            cpasync.prefetch_descriptor(keys.atom)
            with cute.arch.elect_one():
                self.pages.init(st)
                self.slots.init(st)
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        if wg == 0:
            claim_registers(self.budget, self.shape.registers[0])
            if warp == 0:
                self._produce(st, layouts, queries, keys, given)
                cute.arch.griddepcontrol_launch_dependents()
        else:
            claim_registers(self.budget, self.shape.registers[1])
            self._compute(st, given.out, wg - 1, warp % WARPS_OF_GROUP)

    # ---------------------------------------------------------------- maths

    @cute.jit
    def _compute(self, st, out, group, warp):
        """A maths warpgroup: of all units, the tiles whose turn is its own."""
        groups, stages = self.shape.groups, self.shape.stages
        lane = cute.arch.lane_idx()
        # the token and the first row that this lane writes (index_mma.deal)
        token = warp * 16 + (lane >> 2) + 8 * (lane & 1)
        keys, queries = low_word(st.k), low_word(st.q)
        scale_at = st.scales.data_ptr().toint() + 4 * token
        weights_at = st.weights.data_ptr().toint() + 16 * (lane & 3)
        turn, stage, phase = Int32(group), Int32(group), Int32(0)  # of its next tile
        slot, of_slot, tiles = Int32(0), Int32(0), Int32(1)
        while tiles > 0:
            self.slots.wait_full(st, slot, of_slot)
            words = self._words(st, slot)
            tiles = words[TILES]
            if tiles > 0:
                to, limits = self._targets(words, out, token, lane)
                kept = self._kept(weights_at + 4 * self.n * slot)
                position = (words[FIRST_TILE] + turn) * PAGE
                query = queries + slot * (self.n * INDEX_DIM // 16)
                while turn < tiles:
                    self._tile(
                        st, keys + stage * (PAGE * INDEX_DIM // 16), query,
                        scale_at + stage * (4 * PAGE), stage, phase,
                        self._weights(kept, weights_at + 4 * self.n * slot), to, limits, position,
                    )  # fmt: skip
                    turn, position, stage = turn + groups, position + groups * PAGE, stage + groups
                    if stage >= stages:
                        stage, phase = stage - stages, phase ^ 1
                turn -= tiles
                cute.arch.sync_warp()  # one lane frees the slot for all
                with cute.arch.elect_one():
                    self.slots.arrive_empty(st, slot)
                slot ^= 1
                of_slot = of_slot ^ Int32(slot == 0)

    @cute.jit
    def _targets(self, words, out, token, lane):
        """Addresses of this lane's token in its rows of ``out``; tokens each row sees, less the
        token."""
        spread = const_expr(self.rows > 1)
        n = self.rows // 2 if spread else 1
        first = (lane >> 1) & 1 if spread else Int32(0)
        to = cute.make_rmem_tensor((n,), Int64)
        limits = cute.make_rmem_tensor((n,), Int32)
        for x in cutlass.range_constexpr(n):
            row = first + 2 * x
            there = row < words[ROWS]
            if const_expr(not spread):
                there = there & ((lane & 2) == 0)  # two lanes have the sum
            at = Int64(words[ROW] + row) * out.stride[0] + token
            to[x] = out.iterator.toint() + 4 * at
            seen = cutlass.min(words[SEEN] + row, Int32(out.shape[1]))
            limits[x] = Int32(cutlass.select_(there, seen, Int32(0))) - token
        return to, limits

    def _kept(self, at):
        """This thread's weights of all rows, where they stay in registers."""
        if not self.shape.keeps_weights:
            return None
        kept = cute.make_rmem_tensor((self.n // 4,), Float32)
        for i in range(self.n // 16):
            for x, value in enumerate(four_weights(at + 64 * i)):
                kept[4 * i + x] = value
        return kept

    def _weights(self, kept, at):
        """(row, i) -> a thread's four weights of heads 16 i ... of the row."""
        of_row = self.heads // 16

        def weights(row: int, i: int):
            if kept is None:
                return four_weights(at + 64 * (row * of_row + i))
            return [kept[4 * (row * of_row + i) + x] for x in range(4)]

        return weights

    @cute.jit
    def _tile(self, st, key, query, scale_at, stage, phase, weights, to, limits, position):
        """One page: products, sums, scores."""
        lane, rows = cute.arch.lane_idx(), self.columns // self.heads
        self.pages.wait_full(st, stage, phase)
        scale = value_at(scale_at)
        for x in cutlass.range_constexpr(self.products):
            acc = cute.make_rmem_tensor((self.columns // 2,), Float32)
            compat.wgmma_fence()
            mma.product(acc, key, query + x * (self.columns * INDEX_DIM // 16))
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if const_expr(x == self.products - 1):
                cute.arch.sync_warp()  # one lane frees the stage for all: their reads come first
                with cute.arch.elect_one():
                    self.pages.arrive_empty(st, stage)
            sums = [
                mma.row_sums(acc, y, self.heads, functools.partial(weights, x * rows + y))
                for y in range(rows)
            ]
            scores = mma.deal(sums, lane)
            for y in cutlass.range_constexpr(len(scores)):
                at = x * len(scores) + y
                score, to_row = scores[y] * scale, to[at] + 4 * Int64(position)
                store_below(to_row, score, position, limits[at])


def budget_of(kernel: IndexLogits) -> bud.Budget:
    """Budget of a CTA of ``kernel``."""
    shape, n = kernel.shape, kernel.n
    producer, maths = shape.registers
    tiles = shape.stages * PAGE_BYTES + UNIT_SLOTS * n * (INDEX_DIM + 4)
    return bud.Budget(
        groups=(
            bud.WarpGroup("producer", producer),
            bud.WarpGroup("maths", maths, count=shape.groups),
        ),
        smem=tiles + SMALL_BYTES,
        barriers=(*kernel.pages.budget(), *kernel.slots.budget()),
        mmas=(bud.Mma("Q.K", PAGE, kernel.columns, INDEX_DIM, "e4m3"),),
    )


budget, feasible, build = registered(IndexLogits, max(SHAPES))

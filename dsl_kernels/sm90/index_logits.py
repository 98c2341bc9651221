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
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from .. import compat
from ..common import budget as bud
from ..common.barriers import Ring
from ..common.registers import claim_registers
from ..common.smem import array, one_stage, staged, struct_of
from ..common.types import F8, ROW_MAJOR, U8
from ..index_cache import INDEX_DIM, MMA_COLUMNS, PAGE, PAGE_BYTES, SCALES_AT
from . import index_mma as mma
from .index_units import WARP, Lengths, Units
from .wgmma import low_word

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS_OF_GROUP, WARPGROUP = 4, 128
UNIT_SLOTS = 2
WORDS = 8  # about a unit
FIRST_TILE, TILES, ROW, SEEN, ROWS = range(5)  # of them
SMALL_BYTES = 4096  # barriers, words, alignment: an upper bound


class Shape(NamedTuple):
    """How a CTA is divided.

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


class Given(NamedTuple):
    """What is read and written without tensor maps."""

    w: cute.Tensor  # f32 (rows, heads)
    cache: cute.Tensor  # u8 (pages, bytes)
    block_table: cute.Tensor  # i32 (b, width)
    lengths: Lengths
    out: cute.Tensor  # f32 (rows, columns)


class Maps(NamedTuple):
    """A tensor map and what it shows."""

    atom: Any
    coords: Any


class IndexLogits:
    """One variant."""

    def __init__(self, spec: VariantSpec):
        self.heads, self.rows = spec.heads, spec.unit_rows
        self.n = self.heads * self.rows
        self.columns = min(self.n, MMA_COLUMNS)  # of a product
        self.products = self.n // self.columns
        self.shape = SHAPES[self.n]
        self.units = Units(self.rows)
        readers = WARPS_OF_GROUP * self.shape.groups
        self.pages = Ring("pages", self.shape.stages, {"producer": 1}, {"maths": WARPS_OF_GROUP})
        self.slots = Ring("units", UNIT_SLOTS, {"producer": 1}, {"maths": readers})
        self.budget = budget_of(self)
        self.threads = self.budget.threads

    # ---------------------------------------------------------------- host half

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # u8 (rows, heads, 128)
        w: cute.Tensor,  # f32 (rows, heads)
        cache: cute.Tensor,  # u8 (pages, bytes), 8448 or more
        block_table: cute.Tensor,  # i32 (b, width)
        cache_seqlens: cute.Tensor,  # i32 (b,)
        cu_seqlens_q: cute.Tensor,  # i32 (b + 1,), or (0,)
        out: cute.Tensor,  # f32 (rows, columns)
        s_q: Int32,
        ctas: Int32,
        stream: Any,
    ) -> None:
        most = cutlass.min(block_table.shape[1] * PAGE, out.shape[1])
        lengths = Lengths(cache_seqlens, cu_seqlens_q, s_q, q.shape[0], Int32(most))
        given = Given(w, cache, block_table, lengths, out)
        self.kernel(self._queries(q), self._keys(cache), given).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip

    def layouts(self):
        """Shared-memory layouts of queries and keys."""
        queries = sm90.make_smem_layout_b(ROW_MAJOR, (PAGE, self.n, INDEX_DIM), F8, UNIT_SLOTS)
        keys = sm90.make_smem_layout_a(ROW_MAJOR, (PAGE, self.n, INDEX_DIM), F8, self.shape.stages)
        return queries, keys

    @property
    def queries_box(self):
        """Of the queries that a unit takes: (head, channel) with the head in four modes."""
        return ((2, 4, 2, self.n // 16), INDEX_DIM)

    def _queries(self, q):
        """Heads in the order of the MMA's columns: the column's bits 0, 1 and 2, 3 step through
        heads by 1, 4 and 2; one mode for what is left of head and row, as heads are 16s."""
        of_16 = q.shape[0] * (self.heads // 16)
        shape = ((2, 4, 2, of_16), INDEX_DIM)
        steps = (INDEX_DIM, 4 * INDEX_DIM, 2 * INDEX_DIM, 16 * INDEX_DIM)
        layout = cute.make_layout(shape, stride=(steps, 1))
        view = cute.make_tensor(cute.recast_ptr(q.iterator, dtype=F8), layout)
        return self._map(view, self.layouts()[0], self.queries_box)

    def _keys(self, cache):
        """(token, channel, page)"""
        layout = cute.make_layout(
            (PAGE, INDEX_DIM, cache.shape[0]), stride=(INDEX_DIM, 1, cache.stride[0])
        )
        view = cute.make_tensor(cute.recast_ptr(cache.iterator, dtype=F8), layout)
        return self._map(view, self.layouts()[1], (PAGE, INDEX_DIM))

    def _map(self, view, layout, tiler):
        atom = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), view, one_stage(layout), tiler
        )
        return Maps(*list(atom)[:2])

    # ---------------------------------------------------------------- kernel

    def storage(self, layouts):
        queries, keys = (cute.cosize(x) for x in layouts)
        return struct_of(
            **self.pages.field,
            **self.slots.field,
            words=array(Int32, UNIT_SLOTS * WORDS, 16),
            weights=array(Float32, UNIT_SLOTS * self.n, 128),
            scales=array(Float32, self.shape.stages * PAGE, 128),
            q=array(F8, queries, 1024),
            k=array(F8, keys, 1024),
        )

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

    # ---------------------------------------------------------------- producer

    @cute.jit
    def _produce(self, st, layouts, queries, keys, given):
        """One warp: every unit of the CTA's run, and its pages."""
        lengths, lane = given.lengths, cute.arch.lane_idx()
        part, parts = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        at, end, i, before = self.units.run(lengths, part, parts, lane)
        stage, phase, count = Int32(0), Int32(1), Int32(0)
        if at < end:
            b = lengths.cache_seqlens.shape[0]
            seq = self.units.sequence(lengths, i)
            unit = self.units.unit_at(seq, at - before)
            first = at - before - self.units.start(seq.zero, unit)
            ids = self._ids(given, i, first + lane)
            while at < end:
                tiles = cutlass.min(self.units.tiles_of(seq, unit) - first, end - at)
                # of the next unit, on their way while this one's pages are
                following = cutlass.min(i + 1, b - 1)
                words = self.units.words_of(lengths, following)
                to_come = self._ids(
                    given, Int32(cutlass.select_(unit + 1 < seq.units, i, following)), lane
                )
                if tiles > 0:
                    self._announce(st, layouts[0], queries, given, seq, unit, first, tiles, count)
                    stage, phase = self._fill(
                        st, layouts[1], keys, given, (i, ids), first, tiles, stage, phase, lane
                    )
                    count += 1
                at += tiles
                first, unit, ids = Int32(0), unit + 1, to_come
                while (at < end) & (unit >= seq.units):
                    i, unit = i + 1, Int32(0)
                    seq = self.units.sequence_of(lengths, words)
                    if seq.units == 0:  # has no unit that was looked ahead to
                        following = cutlass.min(i + 1, b - 1)
                        words = self.units.words_of(lengths, following)
                        ids = self._ids(given, following, lane)
        slot, turn = count % UNIT_SLOTS, count // UNIT_SLOTS % 2
        self.slots.wait_empty(st, slot, turn ^ 1)
        with cute.arch.elect_one():
            words = self._words(st, slot)
            words[TILES] = Int32(0)
            self.slots.arrive_full(st, slot)

    @cute.jit
    def _announce(self, st, layout, queries, given, seq, unit, first, tiles, count):
        """A unit's words, queries and weights into the next slot."""
        slot, turn = count % UNIT_SLOTS, count // UNIT_SLOTS % 2
        skipped = unit << self.units.log
        row, rows = seq.first + skipped, cutlass.min(seq.n - skipped, Int32(self.rows))
        self.slots.wait_empty(st, slot, turn ^ 1)
        bar = self.slots.full_barrier(st, slot)
        moved = cute.domain_offset(((0, 0, 0, row * (self.heads // 16)), 0), queries.coords)
        target, source = cpasync.tma_partition(
            queries.atom, 0, cute.make_layout(1), cute.group_modes(staged(st.q, layout), 0, 2),
            cute.group_modes(cute.local_tile(moved, self.queries_box, (0, 0)), 0, 2),
        )  # fmt: skip
        with cute.arch.elect_one():
            words = self._words(st, slot)
            words[FIRST_TILE], words[TILES] = first, tiles
            words[ROW], words[ROWS] = row, rows
            words[SEEN] = seq.length - seq.n + skipped + 1
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.n * (INDEX_DIM + 4))
            for x in cutlass.range_constexpr(self.rows):
                # a row that is not there has the last one's, and its sums go nowhere
                of = row + cutlass.min(Int32(x), rows - 1)
                to = st.weights.data_ptr() + (slot * self.n + x * self.heads)
                source_of = given.w.iterator + Int64(of) * self.heads
                bulk_copy(to, source_of, Int32(4 * self.heads), bar)
        cute.copy(queries.atom, source, target[None, slot], tma_bar_ptr=bar)

    @cute.jit
    def _fill(self, st, layout, keys, given, pages_of, first, tiles, stage, phase, lane):
        """Pages of a unit into the ring; returns the stage and phase behind them.

        ``pages_of``: the sequence, and a page of it for each lane, from tile ``first`` on.  Those
        of the next 32 tiles are asked for as soon as these are in use: behind a full ring an answer
        takes as long as the ring does.
        """
        target, source = cpasync.tma_partition(
            keys.atom, 0, cute.make_layout(1), cute.group_modes(staged(st.k, layout), 0, 2),
            cute.group_modes(keys.coords, 0, 2),
        )  # fmt: skip
        i, ids = pages_of
        to_come = self._ids(given, i, first + WARP + lane)
        for x in cutlass.range(0, tiles, unroll=1):
            if (x % WARP == 0) & (x > 0):
                ids, to_come = to_come, self._ids(given, i, first + x + WARP + lane)
            page = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(ids, x % WARP))
            page = cutlass.min(cutlass.max(page, Int32(0)), given.cache.shape[0] - 1)
            self.pages.wait_empty(st, stage, phase)
            bar = self.pages.full_barrier(st, stage)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, PAGE_BYTES)
                scales = given.cache.iterator + (Int64(page) * given.cache.stride[0] + SCALES_AT)
                to = st.scales.data_ptr() + stage * PAGE
                bulk_copy(to, scales, Int32(4 * PAGE), bar)
            cute.copy(keys.atom, source[None, page], target[None, stage], tma_bar_ptr=bar)
            stage += 1
            if stage == self.shape.stages:
                stage, phase = Int32(0), phase ^ 1
        return stage, phase

    def _ids(self, given, i, tile):
        """What the block table has for a tile of sequence ``i``, or for its last one."""
        return given.block_table[i, compat.at_most(tile, given.block_table.shape[1] - 1)]

    def _words(self, st, slot):
        return cute.make_tensor(st.words.data_ptr() + slot * WORDS, cute.make_layout(WORDS))

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
            for x, value in enumerate(mma.four_weights(at + 64 * i)):
                kept[4 * i + x] = value
        return kept

    def _weights(self, kept, at):
        """(row, i) -> a thread's four weights of heads 16 i ... of the row."""
        of_row = self.heads // 16

        def weights(row: int, i: int):
            if kept is None:
                return mma.four_weights(at + 64 * (row * of_row + i))
            return [kept[4 * (row * of_row + i) + x] for x in range(4)]

        return weights

    @cute.jit
    def _tile(self, st, key, query, scale_at, stage, phase, weights, to, limits, position):
        """One page: products, sums, scores."""
        lane, rows = cute.arch.lane_idx(), self.columns // self.heads
        self.pages.wait_full(st, stage, phase)
        scale = mma.value_at(scale_at)
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
                mma.store_below(to_row, score, position, limits[at])


@compat.dsl_user_op
def bulk_copy(to, source, size, bar, *, loc=None, ip=None) -> None:
    """``size`` bytes, a multiple of 16, from global memory; by one thread."""
    compat.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[
            to.toint(loc=loc, ip=ip), source.toint(loc=loc, ip=ip), size, bar.toint(loc=loc, ip=ip)
        ],
        loc=loc, ip=ip,
    )  # fmt: skip


def budget_of(kernel: IndexLogits) -> bud.Budget:
    """Of a CTA of ``kernel``."""
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


def budget(spec: VariantSpec) -> bud.Budget:
    """See ``registry``."""
    return IndexLogits(spec).budget


def feasible(spec: VariantSpec) -> str | None:
    """Why this variant cannot be built, or None; see ``registry``."""
    n = spec.heads * spec.unit_rows
    if n not in SHAPES:
        return (
            f"{spec.heads} heads of {spec.unit_rows} rows are {n} columns, more than {max(SHAPES)}"
        )
    return bud.check(budget(spec))


def build(spec: VariantSpec):
    """(callable, fake arguments by name); see ``registry``."""
    names = ("rows", "b", "pages", "bytes", "width", "columns", "b_plus_1_or_0")
    rows, b, pages, size, width, columns, b1 = (compat.sym(name=x) for x in names)
    return IndexLogits(spec), {
        "q": compat.contiguous(U8, (rows, spec.heads, INDEX_DIM)),
        "w": compat.contiguous(Float32, (rows, spec.heads)),
        "cache": compat.rows(U8, (pages, size)),
        "block_table": compat.strided(Int32, (b, width), (compat.sym64(), 1), 4),
        "cache_seqlens": compat.vector(Int32, b),
        "cu_seqlens_q": compat.vector(Int32, b1),
        "out": compat.strided(Float32, (rows, columns), (compat.sym64(), 1), 4),
        "s_q": Int32(1),
        "ctas": Int32(1),
    }

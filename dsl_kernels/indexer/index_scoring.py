"""The part of ``index_logits`` that no MMA shapes: arguments, tensor maps, the producer's warp.

A kernel (sm90/indexer/index_logits.py, sm100/indexer/index_logits.py) derives from ``Scoring``, and
adds its barriers, its MMAs and the sums over heads.  Here its first warp finds the CTA's run of
tiles (index_units.py), announces each unit with its queries and weights in one of two slots, and
fills a ring with the unit's pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as layouts_of
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ..blocks import budget as bud
from ..blocks import compat
from ..blocks.barriers import Ring
from ..blocks.smem import array, one_stage, staged
from ..blocks.types import F8, ROW_MAJOR, U8
from ..formats.index_cache import INDEX_DIM, PAGE, PAGE_BYTES, SCALES_AT
from .index_ptx import bulk_copy
from .index_units import WARP, Lengths, Units

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS_OF_GROUP, WARPGROUP = 4, 128
UNIT_SLOTS = 2
WORDS = 8  # about a unit
FIRST_TILE, TILES, ROW, SEEN, ROWS = range(5)  # of them
SMALL_BYTES = 4096  # barriers, words, alignment: an upper bound


class Given(NamedTuple):
    """Arguments that are read or written without tensor maps: of ``cache`` only the scales."""

    w: cute.Tensor  # f32 (rows, heads)
    cache: cute.Tensor  # u8 (pages, bytes)
    block_table: cute.Tensor  # i32 (b, width)
    lengths: Lengths
    out: cute.Tensor  # f32 (rows, columns)


class Maps(NamedTuple):
    """A tensor map and what it shows."""

    atom: Any
    coords: Any


class Scoring:
    """A kernel's host half and its producer.

    Attributes:
        n: columns of a unit, heads times rows.
        pages_of_stage: pages in a stage of the ring; behind an odd run the last one stands twice.
        stages: of the ring.
        pages, slots: rings of the kernel, of pages and of units; a producer fills both.
        threads: of a CTA.
        queries_box: (heads of a unit, channels) as ``query_layout`` has them.
        kernel: of the subclass.
    """

    pages_of_stage = 1
    stages: int
    pages: Ring
    slots: Ring
    threads: int
    queries_box: tuple
    kernel: Any

    def __init__(self, spec: VariantSpec):
        self.heads, self.rows = spec.heads, spec.unit_rows
        self.n = self.heads * self.rows
        self.units = Units(self.rows)

    def query_layout(self, rows):
        """(heads of all ``rows``, channels) over q, in the order of the MMA's columns."""
        raise NotImplementedError

    def first_query(self, row):
        """Coordinate of the first head of ``row`` in the first mode of ``query_layout``."""
        raise NotImplementedError

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
        """Shared-memory layouts of queries and of pages of keys."""
        tile, pages = (PAGE, self.n, INDEX_DIM), self.pages_of_stage * self.stages
        queries = layouts_of.make_smem_layout_b(ROW_MAJOR, tile, F8, UNIT_SLOTS)
        return queries, layouts_of.make_smem_layout_a(ROW_MAJOR, tile, F8, pages)

    def _queries(self, q):
        layout = self.query_layout(q.shape[0])
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

    def tile_fields(self, layouts) -> dict:
        """Storage of what the producer fills."""
        queries, keys = (cute.cosize(x) for x in layouts)
        return dict(
            words=array(Int32, UNIT_SLOTS * WORDS, 16),
            weights=array(Float32, UNIT_SLOTS * self.n, 128),
            scales=array(Float32, self.stages * self.pages_of_stage * PAGE, 128),
            q=array(F8, queries, 1024),
            k=array(F8, keys, 1024),
        )

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
        moved = cute.domain_offset((self.first_query(row), 0), queries.coords)
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
        together = self.pages_of_stage
        to_come = self._ids(given, i, first + WARP + lane)
        for x in cutlass.range(0, tiles, together, unroll=1):
            if (x % WARP == 0) & (x > 0):
                ids, to_come = to_come, self._ids(given, i, first + x + WARP + lane)
            pages = [self._page(given, ids, x, y, tiles) for y in range(together)]
            self.pages.wait_empty(st, stage, phase)
            bar = self.pages.full_barrier(st, stage)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, together * PAGE_BYTES)
                for y, page in enumerate(pages):
                    at = Int64(page) * given.cache.stride[0] + SCALES_AT
                    scales = given.cache.iterator + at
                    to = st.scales.data_ptr() + (stage * together + y) * PAGE
                    bulk_copy(to, scales, Int32(4 * PAGE), bar)
            for y, page in enumerate(pages):
                into = target[None, stage * together + y]
                cute.copy(keys.atom, source[None, page], into, tma_bar_ptr=bar)
            stage += 1
            if stage == self.stages:
                stage, phase = Int32(0), phase ^ 1
        return stage, phase

    def _page(self, given, ids, x, y: int, tiles):
        """The page of tile ``x + y`` of a run, or of its last one, by the lane that knows it."""
        at = x if const_expr(y == 0) else cutlass.min(x + y, tiles - 1)
        page = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(ids, at % WARP))
        return cutlass.min(cutlass.max(page, Int32(0)), given.cache.shape[0] - 1)

    def _ids(self, given, i, tile):
        """Block-table entry of sequence ``i`` for ``tile``; the last if the row is shorter."""
        return given.block_table[i, compat.at_most(tile, given.block_table.shape[1] - 1)]

    def _words(self, st, slot):
        return cute.make_tensor(st.words.data_ptr() + slot * WORDS, cute.make_layout(WORDS))


def too_many(spec: VariantSpec, most: int) -> str | None:
    """Why a unit of so many columns cannot be built, or None."""
    n = spec.heads * spec.unit_rows
    if n <= most:
        return None
    return f"{spec.heads} heads of {spec.unit_rows} rows are {n} columns, more than {most}"


def fake_args(spec: VariantSpec) -> dict[str, Any]:
    """Arguments by name; see ``registry``."""
    names = ("rows", "b", "pages", "bytes", "width", "columns", "b_plus_1_or_0")
    rows, b, pages, size, width, columns, b1 = (compat.sym(name=x) for x in names)
    return {
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


def registered(kernel: Callable[[VariantSpec], Any], most: int) -> tuple[Callable, ...]:
    """(budget, feasible, build) of a module, see ``registry``; units have ``most`` columns at most.

    ``kernel`` makes the kernel of a variant, which knows its ``budget``.
    """

    def budget(spec: VariantSpec) -> bud.Budget:
        return kernel(spec).budget

    def feasible(spec: VariantSpec) -> str | None:
        return too_many(spec, most) or bud.check(budget(spec))

    def build(spec: VariantSpec):
        return kernel(spec), fake_args(spec)

    return budget, feasible, build

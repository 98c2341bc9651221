"""Loads of Q, K and V into shared memory, for a pair of CTAs with a 16-bit cache (dense_pair.py).

A tile has 128 tokens.  As operand B of Q.K a CTA holds *its 64 tokens* of all channels, as operand
B of P.V *its 256 channels*, 128 of each half, of all tokens: the same bytes cannot serve both, so
the first 512 channels cross into the pair twice and RoPE once.  V comes behind K, from L2.

    warp 0   chunks of 64 channels: a work tile's Q, then K tile by tile.  The chunks of Q that go
             to tensor memory pass through K's ring, the others have a region of their own
    warp 3   V, 64 tokens at a time

All tiles are made of *squares*: 64 rows (tokens, or query rows) of 64 channels, 8192 bytes.  Q and
K of both CTAs complete at the leader's barriers (``cta_group::2``: PTX ISA 9.7.9.27), where the
issuing thread waits; V at the CTA's own, where its correction warps do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as helpers
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05

from ...blocks import budget as bud
from ...blocks.barriers import Ring
from ...blocks.smem import array, one_stage, staged
from ...blocks.types import ROW_MAJOR
from ...load.paged_tma import page_at
from ...load.planes import EVICT_NORMAL, Loaded, atoms
from ...load.work_list import WorkList
from .. import umma
from ..fp8.pair_loads import boxed
from ..rings import LEADER
from .dense_parts import CHUNKS, HALF, RUN, Cta, work_tiles_of

CTAS, ROWS = 2, 64  # of the pair; query rows of a CTA
TILE = 128  # tokens of a tile, and of a block of P
RUNS = TILE // RUN  # of tokens: a CTA's own of K; of V, what a stage holds
SQUARE = ROWS * umma.LINE  # bytes
V_SQUARES = CHUNKS // CTAS  # of a stage of V: a CTA's 256 channels
HALF_SQUARES = V_SQUARES // 2
K_STAGES, V_STAGES = 12, RUNS  # squares of K; runs of V
Q_IN_TMEM = 256  # channels of Q: what tensor memory has left beside O and S
TMEM_CHUNKS = Q_IN_TMEM // RUN
Q_REST = CHUNKS - TMEM_CHUNKS  # chunks of Q in shared memory
V_AT = K_STAGES + Q_REST  # first square of V, counted from those of K, behind which Q lies
V_BYTES = V_SQUARES * SQUARE
BYTES = (K_STAGES + Q_REST + V_STAGES * V_SQUARES) * SQUARE  # of all


class Source(NamedTuple):
    """Tensor maps of the cache, a square or a page's part of it at a time; they differ in whose
    barrier a copy completes at."""

    k: Loaded
    v: Loaded


class Layouts(NamedTuple):
    """Shared-memory layouts of squares: Q's in a region of their own, K's, V's."""

    q: tuple
    k: tuple
    v: Any


class PairLoads:
    """Host half, barriers and warps of the loads.

    Attributes:
        dtype: of Q and of the cache.
        work: the work list, whose tile is the pair's.
        box: tokens of a copy.
    """

    def __init__(self, dtype, page_size: int):
        self.dtype, self.work = dtype, WorkList(page_size, TILE)
        self.box = min(page_size, RUN)
        self.k = Ring("k", K_STAGES, {"KV producer": 1}, {"Q.K commit": 1})
        self.q = Ring("q", 1, {"KV producer": 1}, {"Q.K commit": 1})
        self.v = Ring("v", V_STAGES, {"V producer": 1}, {"P.V commit": 1})
        self.rings = self.k, self.q, self.v

    # ---------------------------------------------------------------- host half

    def layouts(self) -> Layouts:
        """K-major squares, 128-byte swizzle."""
        counts = Q_REST, K_STAGES, V_STAGES * V_SQUARES
        shape = (ROWS, ROWS, RUN)
        q, k, v = [helpers.make_smem_layout_b(ROW_MAJOR, shape, self.dtype, n) for n in counts]
        return Layouts((q,), (k,), v)

    def source(self, tensors, layouts):
        """``Source`` of the cache (pages, P, KV heads, 576)."""
        (t,) = tensors
        pages = cute.group_modes(cute.select(t.layout, mode=[1, 3, 2, 0]), 2, 4)
        view = cute.make_tensor(cute.recast_ptr(t.iterator, dtype=self.dtype), pages)
        groups = {"k": tcgen05.CtaGroup.TWO, "v": tcgen05.CtaGroup.ONE}
        return Source(
            **{
                name: boxed(
                    cpasync.CopyBulkTensorTileG2SOp(group), view, layouts[0], (self.box, RUN)
                )
                for name, group in groups.items()
            }
        )

    def descriptors(self, source: Source) -> tuple:
        """Copy atoms whose tensor maps should be prefetched."""
        return atoms(tuple(source))

    def tile_fields(self, layouts: Layouts) -> dict:
        """Storage of the squares, one behind the other, at multiples of the swizzle period of 1024
        bytes."""
        fields = dict(kc=layouts.k[0], qc=layouts.q[0], v=layouts.v)
        return {
            name: array(self.dtype, cute.cosize(layout), 1024) for name, layout in fields.items()
        }

    def barriers(self) -> tuple[bud.Barrier, ...]:
        """All of them in a budget."""
        return tuple(barrier for ring in self.rings for barrier in ring.budget())

    # ---------------------------------------------------------------- device

    def _boxes(self, loaded, target):
        """TMA view of shared memory and of the cache, box by box: (values, box, square), (values,
        part of a page, chunk, page)."""
        tiler = (self.box, RUN)
        boxes = cute.group_modes(cute.local_tile(target, tiler, (None, 0, None)), 0, 2)
        tiles = cute.group_modes(cute.local_tile(loaded.coords, tiler, (None, None, None)), 0, 2)
        return cpasync.tma_partition(loaded.atom, 0, cute.make_layout(1), boxes, tiles)

    def _place(self, page, token):
        """(page, part of it) of the box that begins with ``token`` of the tile; ``page``: of this
        lane's box of the work list."""
        of_box, within = token // self.work.box, token % self.work.box
        return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, of_box)), within // self.box

    @cute.jit
    def run_k(self, cta: Cta, source, q_tiles, rank):
        """Q and K, chunk by chunk in the order in which they are multiplied; by one warp."""
        st, gmem = cta.st, cta.gmem
        span, layouts = work_tiles_of(self, cta), cta.tiles
        lane = cute.arch.lane_idx()
        policy = {"cache_policy": Int64(EVICT_NORMAL)}  # the pair reads 512 channels twice
        ds, dg = self._boxes(source.k, staged(st.kc, layouts.k[0]))
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, K_STAGES)
        q_phase = Int32(1)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, _ = self.work.work_tile_at(gmem.work, i)
            rows = self.work.rows_at(gmem.work, cta.call, i, batch, ROWS)
            some = Int32(cutlass.select_(first < last, Int32(1), Int32(0)))
            for c in cutlass.range(0, some * TMEM_CHUNKS, unroll=1):
                bar = self._claim(st, kst, rank)
                q_tiles.copy(staged(st.kc, layouts.k[0]), rows, c, kst.index, bar)
                kst.advance()
            table = gmem.work.block_table[batch, None]
            for tile in cutlass.range(first, last, unroll=1):
                page = self.work.page_of(table, tile, lane, gmem.num_pages)
                for c in cutlass.range(0, CHUNKS, unroll=1):
                    if (tile == first) & (c == TMEM_CHUNKS):
                        self._rest_of_q(cta, q_tiles, rows, q_phase, rank)
                    bar = self._claim(st, kst, rank)
                    for j in cutlass.range_constexpr(RUN // self.box):
                        p, part = self._place(page, rank * RUN + j * self.box)
                        cute.copy(
                            source.k.atom, dg[None, part, c, page_at(p, batch, gmem.kv_heads)],
                            ds[None, j, kst.index], tma_bar_ptr=bar, **policy,
                        )  # fmt: skip
                    kst.advance()
            q_phase = q_phase ^ some

    @cute.jit
    def _claim(self, st, kst, rank):
        """The barrier of a free square; the leader's expects the bytes of both CTAs."""
        self.k.wait_empty(st, kst.index, kst.phase)
        bar = self.k.full_barrier(st, kst.index)
        if rank == LEADER:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, CTAS * SQUARE)
        return bar

    @cute.jit
    def _rest_of_q(self, cta: Cta, q_tiles, rows, q_phase, rank):
        """The chunks of a work tile's Q that stay in shared memory, when the work tile's before are
        read."""
        st = cta.st
        self.q.wait_empty(st, 0, q_phase)
        bar = self.q.full_barrier(st, 0)
        if rank == LEADER:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, CTAS * Q_REST * SQUARE)
        target = staged(st.qc, cta.tiles.q[0])
        for c in cutlass.range(0, Q_REST, unroll=1):
            q_tiles.copy(target, rows, TMEM_CHUNKS + c, c, bar)

    @cute.jit
    def run_v(self, cta: Cta, source, rank):
        """V: the CTA's channels of 64 tokens at a time; by one warp."""
        st, gmem = cta.st, cta.gmem
        span = work_tiles_of(self, cta)
        lane = cute.arch.lane_idx()
        policy = {"cache_policy": Int64(EVICT_NORMAL)}  # the pair reads 512 channels twice
        ds, dg = self._boxes(source.v, staged(st.v, cta.tiles.v))
        vst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, V_STAGES)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, _ = self.work.work_tile_at(gmem.work, i)
            table = gmem.work.block_table[batch, None]
            for tile in cutlass.range(first, last, unroll=1):
                page = self.work.page_of(table, tile, lane, gmem.num_pages)
                for run in cutlass.range(0, RUNS, unroll=1):
                    self.v.wait_empty(st, vst.index, vst.phase)
                    bar = self.v.full_barrier(st, vst.index)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(bar, V_BYTES)
                    for j in cutlass.range_constexpr(RUN // self.box):
                        p, part = self._place(page, run * RUN + j * self.box)
                        for x in cutlass.range_constexpr(V_SQUARES):
                            half, within = divmod(x, HALF_SQUARES)
                            chunk = HALF // RUN * half + HALF_SQUARES * rank + within
                            cute.copy(
                                source.v.atom,
                                dg[None, part, chunk, page_at(p, batch, gmem.kv_heads)],
                                ds[None, j, V_SQUARES * vst.index + x], tma_bar_ptr=bar, **policy,
                            )  # fmt: skip
                    vst.advance()


class PairQ:
    """Q, in squares: 64 channels of a CTA's rows."""

    def __init__(self, dtype):
        self.dtype = dtype

    def source(self, tensors, layouts):
        """``Loaded`` of the queries (b, s_q, h, 576)."""
        (t,) = tensors
        b, s_q, h, width = t.shape
        view = cute.make_tensor(
            cute.recast_ptr(t.iterator, dtype=self.dtype),
            cute.make_layout((b * s_q * h, width), stride=(width, 1)),
        )
        op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        atom = cpasync.make_tiled_tma_atom(op, view, one_stage(layouts[0]), (ROWS, RUN))
        return (Loaded(*list(atom)[:2]),)

    descriptors = staticmethod(atoms)

    def bound(self, source):
        """Return a ``BoundQ`` of the tensor maps ``source``, for the producer."""
        return BoundQ(*source)


class BoundQ(NamedTuple):
    """``PairQ`` on the device."""

    source: Loaded

    def copy(self, squares, rows, chunk, to, bar) -> None:
        """Copy 64 channels of this CTA's rows of a work tile to square ``to`` of ``squares``.  Rows
        past the sequence's end may be another sequence's: no results are stored for them.  Rows
        past the last query are zeros."""
        moved = cute.domain_offset((rows.first, 0), self.source.coords)
        tiles = cute.local_tile(moved, (ROWS, RUN), (0, None))
        target, source = cpasync.tma_partition(
            self.source.atom, 0, cute.make_layout(1), cute.group_modes(squares, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )  # fmt: skip
        cute.copy(self.source.atom, source[None, chunk], target[None, to], tma_bar_ptr=bar)

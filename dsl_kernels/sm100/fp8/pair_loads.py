"""Loads of shared memory for a pair of CTAs (fp8/pair.py): halves of K, halves of V, scales, Q.

A tile has ``work.tile`` = 128 tokens.  As operand B of Q.K a CTA holds *its 64 tokens* of all
channels; as operand B of P.V *its 256 channels* of all tokens, 128 of each half: the same bytes
cannot serve both, so content crosses into the pair twice and RoPE once.  V comes behind K, from L2.

    warp 0   a work tile's Q tile, then the K halves and all tokens' scales of its tiles
    warp 3   the V halves

K and Q of both CTAs complete at the leader's barriers (``cta_group::2``: PTX ISA 9.7.9.27), where
the issuing thread waits; V and scales at the CTA's own, where its softmax warps do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync, tcgen05

from ...blocks import budget as bud
from ...blocks.barriers import Ring
from ...blocks.smem import array, one_stage, staged
from ...blocks.types import F8
from ...formats.dims import KV_LORA_RANK as D
from ...load.fp8_per_token import FORMAT, LINE, TokenScales
from ...load.paged_tma import in_lines
from ...load.planes import EVICT_NORMAL, Loaded, atoms
from ...load.work_list import WorkList
from ..rings import part_of_cta

CTAS, ROWS = 2, 64  # of the pair; query rows of a CTA
TILE = 128  # tokens of a tile, and of a block of P
K_TOKENS = TILE // CTAS  # of a tile, that a CTA multiplies with Q
V_BLOCKS = D // LINE // CTAS  # column blocks of V of a CTA: one of each half
K_STAGES, V_STAGES, Q_STAGES = 3, 2, 2
SOFTMAX_WARPS = 4
K_BYTES = K_TOKENS * (FORMAT.token_bytes - 4)  # without scales; a Q tile's too
V_BYTES = TILE * LINE * V_BLOCKS
SCALE_BYTES = TILE * 4


class Source(NamedTuple):
    """Tensor maps of the cache: ``k`` content and RoPE, boxes of K's tokens; ``v``: of V's."""

    k: tuple
    v: Loaded


class Layouts(NamedTuple):
    """Shared-memory layouts: of Q tiles and of K tiles, content and RoPE; ``v`` column block by
    column block of V's stages."""

    q: tuple
    k: tuple
    v: Any


class PairTma:
    """Host half, barriers and warps of the loads.

    Attributes:
        work: the work list, whose tile is the pair's; its box is a copy's of V and of scales.
        k_work: the same for K, whose boxes are in a CTA's tokens.
        scales: of the tokens, in a ring of ``k_stages``.
    """

    def __init__(self, page_size: int, k_stages: int = K_STAGES):
        self.work, self.k_work = WorkList(page_size, TILE), WorkList(page_size, K_TOKENS)
        self.k_stages = k_stages
        self.scales = TokenScales(TILE, k_stages, self.work.box)
        self.k = Ring("k", k_stages, {"KV producer": 1}, {"Q.K commit": 1})
        self.v = Ring("v", V_STAGES, {"V producer": 1}, {"P.V commit": 1})
        self.c = Ring("c", k_stages, {"KV producer": 1}, {"softmax": SOFTMAX_WARPS})
        self.q = Ring("q", Q_STAGES, {"Q.K commit": 1})  # full: its RoPE has been read
        self.rings = self.k, self.v, self.c, self.q

    # ---------------------------------------------------------------- host half

    def source(self, tensors, layouts):
        """``Source`` of the planes of the cache, content and RoPE."""
        whole = self.k_work.box == self.k_work.tile
        k = []
        for plane, t, layout in zip(FORMAT.planes, tensors, layouts[:2], strict=True):
            line = LINE * 8 // plane.dtype.width
            pages = cute.select(t.layout, mode=[1, 2, 0])
            if whole and plane.width > line:
                pages = in_lines(pages, line)
            view = cute.make_tensor(cute.recast_ptr(t.iterator, dtype=plane.dtype), pages)
            op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
            k.append(boxed(op, view, layout, (self.k_work.box, plane.width)))
        content = cute.make_tensor(
            cute.recast_ptr(tensors[0].iterator, dtype=F8),
            cute.select(tensors[0].layout, mode=[1, 2, 0]),
        )
        op = cpasync.CopyBulkTensorTileG2SOp()
        return Source(tuple(k), boxed(op, content, layouts[2], (self.work.box, LINE)))

    def descriptors(self, source: Source) -> tuple:
        """Copy atoms whose tensor maps should be prefetched."""
        return atoms((*source.k, source.v))

    # ---------------------------------------------------------------- barriers

    @property
    def fields(self) -> dict:
        """Storage of the barriers and scales."""
        rings = dict(pair for ring in self.rings for pair in ring.field.items())
        return {**rings, **self.scales.fields}

    def barriers(self) -> tuple[bud.Barrier, ...]:
        """All of them in a budget."""
        return tuple(barrier for ring in self.rings for barrier in ring.budget())

    # ---------------------------------------------------------------- device

    def _boxes(self, loaded, target, tiler, pick):
        """TMA view of shared memory and of the cache, box by box."""
        boxes = cute.group_modes(cute.local_tile(target, tiler, pick), 0, 2)
        tiles = cute.group_modes(cute.local_tile(loaded.coords, tiler, pick), 0, 2)
        return cpasync.tma_partition(loaded.atom, 0, cute.make_layout(1), boxes, tiles)

    @cute.jit
    def run_k(self, cta: Any, source, q_tiles, rank):
        """Q tiles, K halves and scales, in the order of the work tiles; by one warp."""
        st, gmem = cta.st, cta.gmem
        span = self.work.work_tiles_of(gmem.work, part_of_cta())
        layouts = cta.layouts
        lane, pages = cute.arch.lane_idx(), gmem.scale.shape[0]
        copy_scales = self.scales.copier(st, gmem.scale)
        policy = {"cache_policy": Int64(EVICT_NORMAL)}  # the pair reads content twice
        content, rope = [
            self._boxes(x, staged(field, layout), (self.k_work.box, p.width), (None, 0, None))
            for p, x, field, layout in zip(
                FORMAT.planes, source.k, (st.kc, st.kr), layouts.k[:2], strict=True
            )
        ]
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.k_stages)
        cst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.k_stages)
        qst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, Q_STAGES)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, _ = self.work.work_tile_at(gmem.work, i)
            rows = self.work.rows_at(gmem.work, cta.call, i, batch, ROWS)
            self.q.wait_full(st, qst.index, qst.phase)  # at once, the first times: phase 1
            bar = self._claim(st, kst, rank)
            q_tiles.copy(st, layouts, rows, kst.index, qst.index, bar)
            kst.advance()
            qst.advance()
            table = gmem.work.block_table[batch, None]
            for tile in cutlass.range(first, last, unroll=1):
                page = self.work.page_of(table, tile, lane, pages)
                bar = self._claim(st, kst, rank)
                for j in cutlass.range_constexpr(self.k_work.boxes):
                    token = rank * K_TOKENS + j * self.k_work.box  # of the tile
                    of_box, within = token // self.work.box, token % self.work.box
                    p = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, of_box))
                    place = tile % self.work.tiles_of_page * (self.work.box // self.k_work.box)
                    place = place + within // self.k_work.box
                    for x in cutlass.range_constexpr(2):
                        ds, dg = (content, rope)[x]
                        cute.copy(
                            source.k[x].atom, dg[None, place, p], ds[None, j, kst.index],
                            tma_bar_ptr=bar, **policy,
                        )  # fmt: skip
                self.c.wait_empty(st, cst.index, cst.phase)
                own = self.c.full_barrier(st, cst.index)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(own, SCALE_BYTES)
                for j in cutlass.range(self.work.boxes, unroll=1):  # unrolled, pages of 16 spill
                    p = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, j))
                    with cute.arch.elect_one():
                        copy_scales(p, tile % self.work.tiles_of_page, j, cst.index, own)
                kst.advance()
                cst.advance()

    @cute.jit
    def _claim(self, st, kst, rank):
        """The barrier of a free stage of K; the leader's expects the bytes of both CTAs."""
        self.k.wait_empty(st, kst.index, kst.phase)
        bar = self.k.full_barrier(st, kst.index)
        if rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, CTAS * K_BYTES)
        return bar

    @cute.jit
    def run_v(self, cta: Any, source, rank):
        """V halves: a column block of each half of the channels; by one warp."""
        st, gmem = cta.st, cta.gmem
        span = self.work.work_tiles_of(gmem.work, part_of_cta())
        lane, pages = cute.arch.lane_idx(), gmem.scale.shape[0]
        policy = {"cache_policy": Int64(EVICT_NORMAL)}  # the pair reads content twice
        ds, dg = self._boxes(
            source.v, staged(st.v, cta.layouts.v), (self.work.box, LINE), (None, None, None)
        )
        vst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, V_STAGES)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, _ = self.work.work_tile_at(gmem.work, i)
            table = gmem.work.block_table[batch, None]
            for tile in cutlass.range(first, last, unroll=1):
                page = self.work.page_of(table, tile, lane, pages)
                self.v.wait_empty(st, vst.index, vst.phase)
                bar = self.v.full_barrier(st, vst.index)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bar, V_BYTES)
                place = tile % self.work.tiles_of_page
                for j in cutlass.range_constexpr(self.work.boxes):
                    p = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, j))
                    for half in cutlass.range_constexpr(V_BLOCKS):
                        block = CTAS * half + rank
                        to = ds[None, j, 0, V_BLOCKS * vst.index + half]
                        cute.copy(
                            source.v.atom, dg[None, place, block, p], to, tma_bar_ptr=bar, **policy
                        )
                vst.advance()


class PairQ:
    """Q tiles: content through a stage of K, from where it goes to tensor memory; RoPE to a region
    of its own, where the MMAs of the work tile read it."""

    def source(self, tensors, layouts):
        """``Loaded`` of content and RoPE of the queries, a CTA's rows each."""
        out = []
        for plane, t, layout in zip(FORMAT.planes, tensors, layouts, strict=True):
            b, s_q, h, width = t.shape
            view = cute.make_tensor(
                cute.recast_ptr(t.iterator, dtype=plane.dtype),
                cute.make_layout((b * s_q * h, width), stride=(width, 1)),
            )
            op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
            atom = cpasync.make_tiled_tma_atom(op, view, one_stage(layout), (ROWS, width))
            out.append(Loaded(*list(atom)[:2]))
        return tuple(out)

    descriptors = staticmethod(atoms)

    def bound(self, source):
        """Return a ``BoundQ`` of the tensor maps ``source``, for the producer."""
        return BoundQ(source)


class BoundQ(NamedTuple):
    """``PairQ`` on the device."""

    source: tuple

    def copy(self, st, layouts, rows, stage, q_stage, bar) -> None:
        """This CTA's rows of a work tile; rows behind the last query are zeros."""
        for plane, loaded, field, layout, at in zip(
            FORMAT.planes, self.source, (st.kc, st.qr), layouts.q, (stage, q_stage), strict=True
        ):  # fmt: skip
            moved = cute.domain_offset((rows.first, 0), loaded.coords)
            target, source = cpasync.tma_partition(
                loaded.atom, 0, cute.make_layout(1),
                cute.group_modes(staged(field, layout), 0, 2),
                cute.group_modes(cute.local_tile(moved, (ROWS, plane.width), (0, 0)), 0, 2),
            )  # fmt: skip
            cute.copy(loaded.atom, source, target[None, at], tma_bar_ptr=bar)


def fields_of(layouts: Layouts) -> dict:
    """Storage of the tiles."""
    kinds = [plane.dtype for plane in FORMAT.planes]
    return dict(
        kc=array(kinds[0], cute.cosize(layouts.k[0]), 1024),
        kr=array(kinds[1], cute.cosize(layouts.k[1]), 1024),
        v=array(kinds[0], cute.cosize(layouts.v), 1024),
        qr=array(kinds[1], cute.cosize(layouts.q[1]), 1024),
    )


def boxed(op, view, layout, tiler):
    """A tensor map of ``view`` in boxes of ``tiler`` = (tokens, channels), as ``layout`` has them
    in shared memory."""
    one = one_stage(layout)
    part = cute.get(cute.zipped_divide(one.outer, tiler), mode=[0])
    atom = cpasync.make_tiled_tma_atom(
        op, view, cute.make_composed_layout(one.inner, 0, part), tiler
    )
    return Loaded(*list(atom)[:2])

"""The ring of KV tiles, loaded by TMA from pages of a block table: a loader (loader.py).

Works for any ``CacheFormat``, on every arch that has TMA.

    warp 0   fills the ring (and issues Q's tiles where they pass through it)
    warp 1   issues Q's tiles into their own ring
    warp 2   calls the kernel's ``on_full`` for every full stage, if it has one

    k_pipe   warp 0 -> who reads the KV tile    (full: TMA bytes, empty: warps)

A tile may come in ``chunks`` of its channels, each with a full barrier of its own, so that Q.K
begins on the first while the others are on their way.  Some of them may also be freed ``early``, by
a barrier of the stage for them all, and come first.

Shared memory: ``k_bar`` and the chunks' barriers; the tiles are fields ``k<plane>`` of the kernel's
plan, and the format's field of scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ..blocks import budget as bud
from ..blocks.barriers import Ring
from ..blocks.smem import array, one_stage, staged
from .loader import Feed, Readers, ring_barriers, ring_pipe
from .planes import EVICT_FIRST, EVICT_NORMAL, MANY_BLOCKS, CacheFormat, Loaded, atoms
from .work_list import WorkList

if TYPE_CHECKING:
    from .fp8_per_token import TokenScales

# ``start_tiles`` of SM90.  All CTAs start at once: if each asks for all stages, everyone's first
# tile comes when nearly everyone's last does.  Two keep DRAM busy.
START_TILES = 2
LINE_BYTES = 128  # of a swizzled row in shared memory


class Early(NamedTuple):
    """Chunks of a tile that are freed before its stage is, and come first.

    Attributes:
        chunks: which.
        warps: that read them last.
    """

    chunks: tuple[int, ...]
    warps: int


class PagedTma:
    """Host half (descriptors), barriers and warps of one kernel's loader.

    Attributes:
        rows: query rows of a CTA.
        stages, q_stages: KV tiles, Q tiles in flight; 0: Q tiles, if any, are in the KV ring.
        cluster: CTAs that receive each KV tile.
        readers: who frees a KV stage.
        scales: of the tokens in the ring; None where the format has none.
        start_tiles: KV tiles of a part in flight until its first has landed; 0: all stages.
        chunks: equal parts of a plane's channels; the pipe's barrier is that of the first.
        early: those that are freed before the stage is; ``order``: of arrival, these first.
    """

    warps = 3

    def __init__(
        self, fmt: CacheFormat, work: WorkList, *, rows: int, stages: int, readers: Readers,
        q_stages: int = 0, cluster: int = 1, scales: TokenScales | None = None,
        start_tiles: int = 0, chunks: int = 1, early: Early | None = None,
    ):  # fmt: skip
        self.format, self.work = fmt, work
        self.rows, self.cluster = rows, cluster
        self.stages, self.q_stages, self.readers = stages, q_stages, readers
        self.scales, self.start_tiles = scales, start_tiles
        self.chunks, self.more = chunks, chunk_ring(stages, chunks)
        self.early = early or Early((), 0)
        self.freed = early_ring(stages, self.early)
        rest = [c for c in range(chunks) if c not in self.early.chunks]
        self.order = (*self.early.chunks, *rest)

    # ---------------------------------------------------------------- host half

    def source(self, tensors, layouts):
        """``Loaded`` of each plane of the cache, one box of ``work.box`` tokens each."""
        op = (
            cpasync.CopyBulkTensorTileG2SMulticastOp()
            if const_expr(self.cluster > 1)
            else cpasync.CopyBulkTensorTileG2SOp()
        )
        out = []
        for plane, t, layout in zip(self.format.planes, tensors, layouts, strict=True):
            order = [1, 2, 0]
            if const_expr(cute.rank(t) == 4):  # (pages, P, KV heads, width)
                order = [1, 3, 2, 0]
            layout_of = cute.select(t.layout, mode=order)
            if const_expr(cute.rank(t) == 4):
                layout_of = cute.group_modes(layout_of, 2, 4)
            line = LINE_BYTES * 8 // plane.dtype.width
            if const_expr(self.work.box == self.work.tile and plane.width // self.chunks > line):
                layout_of = in_lines(layout_of, line)
            view = cute.make_tensor(cute.recast_ptr(t.iterator, dtype=plane.dtype), layout_of)
            one, tiler = one_stage(layout), (self.work.box, plane.width // self.chunks)
            box = cute.make_composed_layout(
                one.inner, 0, cute.get(cute.zipped_divide(one.outer, tiler), mode=[0])
            )
            atom = cpasync.make_tiled_tma_atom(op, view, box, tiler, num_multicast=self.cluster)
            out.append(Loaded(*list(atom)[:2]))
        return tuple(out)

    descriptors = staticmethod(atoms)

    # ---------------------------------------------------------------- barriers

    @property
    def fields(self) -> dict:
        """Storage of the barriers."""
        fields = dict(k_bar=array(Int64, 2 * self.stages))
        for ring in self._rings():
            fields.update(ring.field)
        return fields

    def barriers(self) -> tuple[bud.Barrier, ...]:
        """All of them in a budget."""
        pipe = ring_barriers("k", self.stages, "KV producer", self.readers, self.cluster)
        return (*pipe, *(barrier for ring in self._rings() for barrier in ring.budget()))

    def _rings(self) -> list[Ring]:
        """Rings of chunks that this loader has: ``more`` if there are several chunks, ``freed``
        if some are freed early."""
        used = (self.more, self.chunks > 1), (self.freed, len(self.early.chunks) > 0)
        return [ring for ring, wanted in used if wanted]

    @property
    def chunk_bytes(self) -> int:
        """Bytes that arrive for one chunk of a KV tile, of all planes and of scales."""
        return self.work.tile * self.format.token_bytes // self.chunks

    def init(self, st) -> None:
        """Barriers of the chunks behind the first; by one thread, before ``pipe``."""
        for ring in self._rings():
            ring.init(st)

    def pipe(self, st):
        """The ring: TMA bytes fill a stage, one lane of each reading warp frees it."""
        return ring_pipe(st.k_bar, self.stages, self.readers, self.chunk_bytes, self.cluster)

    def wait_chunk(self, st, turn: int, index, phase) -> None:
        """Wait until chunk ``order[turn]``, ``turn`` > 0, of a stage is there; the first one's
        barrier is the pipe's."""
        self.more.wait_full(st, index * (self.chunks - 1) + (turn - 1), phase)

    def free_early(self, st, index, chosen) -> None:
        """Free the early chunks of stage ``index``: the lanes with ``chosen`` arrive, one of each
        reading warp."""
        self.freed.arrive_full_if(st, index, chosen)

    # ---------------------------------------------------------------- device: producers

    def cluster_copy(self):
        """(this CTA's rank, options of copies that all CTAs of the cluster receive)."""
        if const_expr(self.cluster == 1):
            return 0, {}
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        vmnk = cute.make_layout((1, self.cluster, 1, 1))
        return rank, {"mcast_mask": cute.make_layout_image_mask(vmnk, (0, rank, 0, 0), mode=1)}

    def _policy(self, work, query_rows):
        """L2 policy of the cache's tiles (load/planes.py): normal if sequences have
        ``MANY_BLOCKS`` row blocks or more on average, else evict first."""
        blocks = query_rows // (self.rows * self.cluster)
        many = blocks // MANY_BLOCKS >= work.cache_seqlens.shape[0]  # of them a sequence
        return Int64(cutlass.select_(many, Int64(EVICT_NORMAL), Int64(EVICT_FIRST)))

    def _boxes(self, loaded, target, width, rank):
        """TMA view of the KV ring and of the cache, box by box: (values, box, stage), (values, part
        of a page, page); with several chunks (values, box, chunk, stage), and so on."""
        pick = (None, 0, None) if self.chunks == 1 else (None, None, None)
        boxes = cute.local_tile(target, (self.work.box, width // self.chunks), pick)
        tiles = cute.local_tile(loaded.coords, (self.work.box, width // self.chunks), pick)
        return cpasync.tma_partition(
            loaded.atom, rank, cute.make_layout(self.cluster), cute.group_modes(boxes, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )  # fmt: skip

    @cute.jit
    def run(self, warp, feed, tile_of_q, on_full):
        """The role of one of the first ``warps`` warps (``Loader.run``)."""
        if warp == 0:
            self._fill(feed, tile_of_q)
            cute.arch.griddepcontrol_launch_dependents()
        elif warp == 1:
            if const_expr(self.q_stages > 0):
                self._fill_q(feed, tile_of_q)
        elif warp == 2:  # noqa: SIM102 (only the inner condition is a compile-time one)
            if const_expr(on_full is not None):
                self._watch(feed, on_full)

    @cute.jit
    def _fill(self, feed: Feed, tile_of_q):
        """Load every plane and the scales of each tile into the next free stage."""
        st, layouts, k_pipe, cache, work, call, part, mark = feed
        span, kv_heads = self.work.work_tiles_of(work, part), cache.kv_heads
        copy_scales = self._copier(st, cache.scale)
        lane = cute.arch.lane_idx()
        rank, extra = self.cluster_copy()
        extra["cache_policy"] = self._policy(work, call.rows)
        planes = [
            self._boxes(x, staged(getattr(st, "k" + p.name), layout), p.width, rank)
            for p, x, layout in zip(self.format.planes, cache.source, layouts, strict=True)
        ]
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        landed = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, _ = self.work.work_tile_at(work, i)
            if const_expr(tile_of_q is not None and self.q_stages == 0):
                tile_of_q(i, batch, kst)
                kst.advance()
            row = work.block_table[batch, None]
            page = self.work.page_of(row, first, lane, cache.pages)
            for tile in cutlass.range(first, last, unroll=1):
                now = page
                page = self.work.page_of(row, tile + 1, lane, cache.pages)
                place = tile % self.work.tiles_of_page  # in its page
                if const_expr(self.start_tiles):  # noqa: SIM102 (only this is a compile-time one)
                    if (i == span[0]) & (tile == first + self.start_tiles):
                        # this warp alone begins the stage's next phase, so it cannot miss this one
                        k_pipe.consumer_wait(landed)
                for turn in cutlass.range_constexpr(self.chunks):
                    c = self.order[turn]
                    bar = self._chunk_barrier(st, k_pipe, kst, turn)
                    for j in cutlass.range_constexpr(self.work.boxes):
                        p = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(now, j))
                        at = [target[self._at(j, c, kst.index)] for target, _ in planes]
                        for x in cutlass.range_constexpr(len(planes)):
                            source = planes[x][1][self._at(place, c, page_at(p, batch, kv_heads))]
                            cute.copy(cache.source[x].atom, source, at[x], tma_bar_ptr=bar, **extra)
                        if const_expr(copy_scales is not None):
                            with cute.arch.elect_one():
                                copy_scales(p, place, j, kst.index, bar)
                if const_expr(mark is not None):
                    mark(kst.count == 0)
                kst.advance()
        # no producer_tail: every stage is read before the math warps end, and a cluster leaves
        # together, so no arrival can reach a CTA that is gone

    def _copier(self, st, scale):
        """Function that copies the scales of a box (``TokenScales.copier``); None without
        scales."""
        return None if self.scales is None else self.scales.copier(st, scale)

    def _at(self, box, chunk, stage):
        """Coordinate in a view of ``_boxes``."""
        return (None, box, stage) if self.chunks == 1 else (None, box, chunk, stage)

    @cute.jit
    def _chunk_barrier(self, st, k_pipe, kst, turn: cutlass.Constexpr):
        """Arm and return the barrier that the copies of chunk ``order[turn]`` complete, once the
        chunk is free."""
        early = len(self.early.chunks)
        if const_expr(turn == 0 and early == 0):
            k_pipe.producer_acquire(kst)
            return k_pipe.producer_get_barrier(kst)
        if const_expr(early > 0 and turn == 0):
            self.freed.wait_full(st, kst.index, kst.phase)  # at once, the first time: phase 1
        if const_expr(early > 0 and turn == early):
            k_pipe.sync_object_empty.wait(kst.index, kst.phase)
        bar = k_pipe.producer_get_barrier(kst)
        if const_expr(turn > 0):
            bar = self.more.full_barrier(st, kst.index * (self.chunks - 1) + (turn - 1))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.chunk_bytes)
        return bar

    @cute.jit
    def _fill_q(self, feed: Feed, tile_of_q):
        """This CTA's row tile of each work tile, into Q's own ring."""
        span = self.work.work_tiles_of(feed.work, feed.part)
        qst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.q_stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, _, _, _ = self.work.work_tile_at(feed.work, i)
            tile_of_q(i, batch, qst)
            qst.advance()

    @cute.jit
    def _watch(self, feed: Feed, on_full):
        """``on_full`` for each tile."""
        span = self.work.work_tiles_of(feed.work, feed.part)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.work.work_tile_at(feed.work, i)
            for _ in cutlass.range(first, last, unroll=1):
                feed.k_pipe.consumer_wait(kst)
                on_full(kst)
                kst.advance()


def in_lines(layout, line: int):
    """A plane's layout (token, channel, page) with the channels as (of a line, line).

    Shared memory has the lines of 128 bytes of a tile one behind the other, each for all tokens; a
    box of both modes fills them with one copy.
    """
    (tokens, channels, pages), (of_token, one, of_page) = layout.shape, layout.stride
    return cute.make_layout(
        (tokens, (line, channels // line), pages), stride=(of_token, (one, line * one), of_page)
    )


def chunk_ring(stages: int, chunks: int) -> Ring:
    """Full barriers of the chunks behind the first: stage by stage."""
    return Ring("k_more", stages * (chunks - 1), {"KV producer": 1})


def early_ring(stages: int, early: Early) -> Ring:
    """Barriers of early chunks, one a stage: their ``full`` side completes when ``early.warps``
    warps have read them."""
    return Ring("k_early", stages, {"P.V": early.warps})


def page_at(page, sequence, kv_heads):
    """A page as coordinate of a cache: with the KV head that ``sequence`` reads, where there are
    several (``kv_heads``: divisor by their number; None: pages have none)."""
    return page if kv_heads is None else (divmod(sequence, kv_heads)[1], page)

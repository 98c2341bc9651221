"""Q tiles and the ring of KV tiles, loaded by TMA: the two producer warps of a decode kernel.

Works for any ``CacheFormat``, on every arch that has TMA.  Queries have the planes of the cache:
(b, s_q, h, width) each, and a Q tile is any run of rows of theirs (work_list.Rows).

    q_pipe   Q producer warp  -> who reads Q    (full: TMA bytes, empty: warps)
    k_pipe   KV producer warp -> who reads the KV tile

A Q tile has the planes of a KV tile and may be as large, so it can also pass through the KV ring
(no Q stages: ``q_stages`` 0): an item is then one Q tile and its KV tiles, and whoever reads the
ring sees the Q tile first.

A tile may come in ``chunks`` of its channels, each with a full barrier of its own, so that Q.K
begins on the first while the others are on their way.  Some of them may also be freed ``early``, by
a barrier of the stage for them all, and come first.

Shared memory: a field ``q<plane>`` and ``k<plane>`` for each plane, ``q_bar``, ``k_bar``, and the
format's field of scales.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from . import budget as bud
from .barriers import Ring
from .cache_format import EVICT_FIRST, EVICT_NORMAL, MANY_BLOCKS, CacheFormat
from .smem import array, one_stage, staged
from .work_list import WorkList

# ``start_tiles`` of SM90.  All CTAs start at once: if each asks for all stages, everyone's first
# tile comes when nearly everyone's last does.  Two keep DRAM busy.
START_TILES = 2
LINE_BYTES = 128  # of a swizzled row in shared memory


class Loaded(NamedTuple):
    """A plane as TMA sees it: Q (rows, k), cache (tokens of a page, k, page)."""

    atom: cute.CopyAtom
    coords: cute.Tensor


class Early(NamedTuple):
    """Chunks of a tile that are freed before its stage is, and come first.

    Attributes:
        chunks: which.
        warps: that read them last.
    """

    chunks: tuple[int, ...]
    warps: int


class PagedTma:
    """Host half (descriptors), barriers and producer warps of one kernel.

    Attributes:
        rows: query rows of a CTA.
        stages, q_stages: KV tiles, Q tiles in flight; 0: Q tiles are in the KV ring.
        cluster: CTAs that receive each KV tile.
        q_warps, k_warps: warps of a CTA that free a Q tile, a KV tile.
        start_tiles: KV tiles of a part in flight until its first has landed; 0: all stages.
        chunks: equal parts of a plane's channels; the pipe's barrier is that of the first.
        early: those that are freed before the stage is; ``order``: of arrival, these first.
    """

    def __init__(
        self, fmt: CacheFormat, work: WorkList, *, rows: int, stages: int, q_stages: int,
        cluster: int, q_warps: int, k_warps: int, start_tiles: int = 0, chunks: int = 1,
        early: Early | None = None,
    ):  # fmt: skip
        self.format, self.work = fmt, work
        self.rows, self.cluster = rows, cluster
        self.stages, self.q_stages = stages, q_stages
        self.q_warps, self.k_warps, self.start_tiles = q_warps, k_warps, start_tiles
        self.chunks, self.more = chunks, chunk_ring(stages, chunks)
        self.early = early or Early((), 0)
        self.freed = early_ring(stages, self.early)
        rest = [c for c in range(chunks) if c not in self.early.chunks]
        self.order = (*self.early.chunks, *rest)

    # ---------------------------------------------------------------- host half

    def load_kv(self, tensors, layouts):
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

    def load_q(self, tensors, layouts):
        """``Loaded`` of each plane of the queries, the CTA's rows each."""
        out = []
        for plane, t, layout in zip(self.format.planes, tensors, layouts, strict=True):
            b, s_q, h, width = t.shape
            view = cute.make_tensor(
                cute.recast_ptr(t.iterator, dtype=plane.dtype),
                cute.make_layout((b * s_q * h, width), stride=(width, 1)),
            )
            atom = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), view, one_stage(layout), (self.rows, width)
            )
            out.append(Loaded(*list(atom)[:2]))
        return tuple(out)

    # ---------------------------------------------------------------- barriers

    @property
    def fields(self) -> dict:
        """Storage of the barriers."""
        fields = dict(k_bar=array(Int64, 2 * self.stages))
        if self.chunks > 1:
            fields.update(self.more.field)
        if self.early.chunks:
            fields.update(self.freed.field)
        return dict(q_bar=array(Int64, 2 * self.q_stages), **fields) if self.q_stages else fields

    @property
    def chunk_bytes(self) -> int:
        """Of a chunk of a KV tile."""
        return self.work.tile * self.format.token_bytes // self.chunks

    @property
    def q_bytes(self) -> int:
        """Of a Q tile."""
        return self.rows * sum(p.token_bytes for p in self.format.planes)

    def pipes(self, st):
        """(q_pipe, k_pipe): TMA bytes fill a stage, one lane of each reading warp frees it.

        The second one's fence and barrier publish every mbarrier initialised so far; without Q
        stages there is no first.
        """
        group = lambda n: pipeline.CooperativeGroup(pipeline.Agent.Thread, n)
        q_pipe, extra = None, {}
        if self.q_stages:
            q_pipe = pipeline.PipelineTmaAsync.create(
                barrier_storage=st.q_bar.data_ptr(), num_stages=self.q_stages,
                producer_group=group(1), consumer_group=group(self.q_warps),
                tx_count=self.q_bytes, defer_sync=True,
            )  # fmt: skip
        if self.cluster > 1:
            extra = dict(
                cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)), mcast_mode_mn=(0, 1)
            )
        k_pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=st.k_bar.data_ptr(), num_stages=self.stages, producer_group=group(1),
            consumer_group=group(self.k_warps * self.cluster),
            tx_count=self.chunk_bytes, **extra,
        )  # fmt: skip
        return q_pipe, k_pipe

    def init_chunks(self, st) -> None:
        """Barriers of the chunks behind the first; by one thread, before ``pipes``."""
        if self.chunks > 1:
            self.more.init(st)
        if self.early.chunks:
            self.freed.init(st)

    def wait_chunk(self, st, turn: int, index, phase) -> None:
        """Until ``order[turn]`` of a stage is there; the first one's barrier is the pipe's."""
        self.more.wait_full(st, index * (self.chunks - 1) + (turn - 1), phase)

    def free_early(self, st, index, chosen) -> None:
        """By the lanes with ``chosen``, one of each reading warp: the early chunks are read."""
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
        """What L2 does with tiles of the cache (cache_format.py)."""
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

    def _planes(self, st, side, loaded, layouts):
        """(plane, its TMA view, its tiles in shared memory) of Q (``q``) or the cache (``k``)."""
        tiles = [staged(getattr(st, side + p.name), x) for p, x in zip(self.format.planes, layouts)]
        return list(zip(self.format.planes, loaded, tiles, strict=True))

    @cute.jit
    def produce_kv(
        self, st, layouts, k_pipe, loaded, work, span, num_pages, query_rows, copy_scales,
        loaded_q=None, mark=None, kv_heads=None,
    ):  # fmt: skip
        """One warp: for each tile, every plane and the scales into the next free stage.

        ``query_rows``: of all sequences.
        ``copy_scales(page, part, box, stage, bar)`` is run by one lane for every box; None without.
        ``loaded_q``: planes of the queries where their tiles pass through this ring, and the call.
        ``mark(is_first)`` is run behind each tile's copies; None without.
        ``kv_heads``: divisor by their number where the cache has several: sequence i reads head
        i % heads; None where a page has none.
        """
        lane = cute.arch.lane_idx()
        rank, extra = self.cluster_copy()
        extra["cache_policy"] = self._policy(work, query_rows)
        planes = [
            self._boxes(x, tiles, p.width, rank)
            for p, x, tiles in self._planes(st, "k", loaded, layouts)
        ]
        if const_expr(loaded_q is not None):
            loaded_q, call = loaded_q
            q_planes = self._planes(st, "k", loaded_q, layouts)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        landed = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, _ = self.work.item_at(work, i)
            if const_expr(loaded_q is not None):
                rows = self.work.rows_at(work, call, i, batch, self.rows)
                self._fill_with_q(k_pipe, kst, q_planes, rows)
                kst.advance()
            row = work.block_table[batch, None]
            page = self.work.page_of(row, first, lane, num_pages)
            for tile in cutlass.range(first, last, unroll=1):
                now = page
                page = self.work.page_of(row, tile + 1, lane, num_pages)
                part = tile % self.work.tiles_of_page
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
                            source = planes[x][1][self._at(part, c, page_at(p, batch, kv_heads))]
                            cute.copy(loaded[x].atom, source, at[x], tma_bar_ptr=bar, **extra)
                        if const_expr(copy_scales is not None):
                            with cute.arch.elect_one():
                                copy_scales(p, part, j, kst.index, bar)
                if const_expr(mark is not None):
                    mark(kst.count == 0)
                kst.advance()
        # no producer_tail: every stage is read before the math warps end, and a cluster leaves
        # together, so no arrival can reach a CTA that is gone

    def _at(self, box, chunk, stage):
        """Coordinate in a view of ``_boxes``."""
        return (None, box, stage) if self.chunks == 1 else (None, box, chunk, stage)

    @cute.jit
    def _chunk_barrier(self, st, k_pipe, kst, turn: cutlass.Constexpr):
        """What the copies of ``order[turn]`` complete, armed, once the chunk is free."""
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
    def _fill_with_q(self, k_pipe, kst, planes, rows):
        """A Q tile into the next free stage of the KV ring."""
        k_pipe.sync_object_empty.wait(kst.index, kst.phase)
        bar = k_pipe.producer_get_barrier(kst)
        with cute.arch.elect_one():  # fewer bytes than a KV tile's, which has scales
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.q_bytes)
        self._copy_q(planes, rows, kst.index, bar)

    def _copy_q(self, planes, rows, stage, bar):
        """This CTA's row tile of an item into a stage: rows behind the sequence's end, which may be
        another's, are nobody's and are not written; behind the last query there are zeros."""
        for plane, loaded, tiles in planes:
            moved = cute.domain_offset((rows.first, 0), loaded.coords)
            target, source = cpasync.tma_partition(
                loaded.atom, 0, cute.make_layout(1), cute.group_modes(tiles, 0, 2),
                cute.group_modes(cute.local_tile(moved, (self.rows, plane.width), (0, 0)), 0, 2),
            )  # fmt: skip
            cute.copy(loaded.atom, source, target[None, stage], tma_bar_ptr=bar)

    @cute.jit
    def produce_q(self, st, layouts, q_pipe, loaded, work, call, span):
        """One warp: this CTA's row tile of each item."""
        planes = self._planes(st, "q", loaded, layouts)
        qst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.q_stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, _, _, _ = self.work.item_at(work, i)
            rows = self.work.rows_at(work, call, i, batch, self.rows)
            q_pipe.producer_acquire(qst)
            self._copy_q(planes, rows, qst.index, q_pipe.producer_get_barrier(qst))
            qst.advance()


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
    """Who has read the early chunks of a stage (its ``full`` side)."""
    return Ring("k_early", stages, {"P.V": early.warps})


def page_at(page, sequence, kv_heads):
    """A page as coordinate of a cache: with the KV head that ``sequence`` reads, where there are
    several (``kv_heads``: divisor by their number; None: pages have none)."""
    return page if kv_heads is None else (divmod(sequence, kv_heads)[1], page)


def pipe_barriers(
    q_stages: int, q_readers: dict[str, int], k_stages: int, k_readers: dict[str, int], cluster: int
) -> tuple[bud.Barrier, ...]:
    """The pipes' barriers in a budget; ``*_readers``: role -> warps that free a stage."""
    k_free = {role: n * cluster for role, n in k_readers.items()}  # the peer's warps arrive too
    q_pipe = (
        bud.Barrier("q_full", 1, {"Q producer": 1}, q_stages),
        bud.Barrier("q_empty", sum(q_readers.values()), q_readers, q_stages),
    )
    return (
        *(q_pipe if q_stages else ()),
        bud.Barrier("k_full", 1, {"KV producer": 1}, k_stages),
        bud.Barrier("k_empty", sum(k_readers.values()) * cluster, k_free, k_stages),
    )

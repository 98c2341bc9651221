"""The gathering loader of a KV ring that Q passes through, by TMA: ``tile::gather4``, which copies
four rows of 128 bytes, each from a place of its own.

    warps 0, 3   32 tokens of each tile, a lane each: where a token's bytes are, as rows of the
                 tensor maps, to shared memory, and its scale by ``cp.async``; then one lane has
                 content and RoPE copied, four tokens an instruction.  Warp 0 has Q's tiles copied,
                 too

    k_pipe   gather warps -> who reads the tile   (full: each warp arrives with the bytes that TMA
                                                  will bring, each lane when its scale has landed;
                                                  empty: readers)

So the barrier that readers wait for is completed by the copies themselves: nobody announces a tile,
and no proxy fence is needed, since MMAs read what TMA wrote, and scales are read as ordinary words.

Tensor maps.  A row of a map is not a token but ``pitch`` bytes of memory, and a copy takes 128
bytes from where a row begins, of one column block of content, or RoPE.  A token begins at row
``page * (page stride / pitch) + offset * (token stride / pitch)``: any page size, and any strides
that are multiples of 16 bytes.  ``pitch`` is the largest power of two that divides both strides, at
most 128: where it is 128, rows do not overlap, which is what the driver's checks of a map ask for.
Rows are int32: a plane of up to 2^31 pitches.  What is no token is row -1, which TMA fills with
zeros; its scale is 0, so that its logit is -inf.

Shared memory: ``k_bar``; ``c_rows`` and ``r_rows``, the maps' rows of each stage's tokens.  They
are freed with the stage: the lane that reads them does so before the bytes come that fill it.

Timeline of a tile in a gather warp: its entries, asked for a tile ago, become rows | wait until the
stage is free | rows to shared memory, scales | arrive | one lane: 8 times 4 + 1 copies
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64, const_expr
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import cpasync

from ...blocks import budget as bud
from ...blocks import compat
from ...blocks.smem import array, one_stage
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import QK_ROPE_HEAD_DIM as R
from ...load.fp8_per_token import FORMAT
from ...load.gather import CHUNK, LINE, SCALE, GatherRows, Plane, TokenLists, arrive_landed, copy
from ...load.loader import Feed, Readers
from ...load.planes import Loaded, atoms

WARPS, LANES = 2, 32
FIRST = {0: 0, 3: LANES}  # token of a tile that a gather warp's first lane has
Q_WARP = 0
FOUR = 4  # rows of an instruction


class Rows(NamedTuple):
    """A plane of the cache as rows of a tensor map.

    Attributes:
        loaded: the map.
        page, token: rows from a page to the next, from a token of a page to the next.
    """

    loaded: Loaded
    page: Int32
    token: Int32

    def of(self, page, offset):
        """The row of a token; -1 where there is none (page -1)."""
        row = page * self.page + offset * self.token
        return Int32(cutlass.select_(page >= 0, row, Int32(-1)))


class Source(NamedTuple):
    """The cache as ``Gather4.source`` gives it to the kernel.

    Attributes:
        content, rope: planes.
        count: tokens of the pool.
        by_page: divisor by the page size.
    """

    content: Rows
    rope: Rows
    count: Int32
    by_page: compat.FastDivisor


class Gather4(GatherRows):
    """A loader (load/loader.py) whose KV ring has a work tile's Q tile in front of its KV tiles."""

    def __init__(self, work: TokenLists, *, stages: int, readers: Readers):
        self.work, self.stages, self.readers = work, stages, readers

    # ---------------------------------------------------------------- host half

    def source(self, tensors, layouts):
        """``Source`` of (content, RoPE)."""
        pages, page_size, _ = tensors[0].shape
        planes = [
            rows_of(plane, t, layout)
            for plane, t, layout in zip(FORMAT.planes, tensors, layouts, strict=True)
        ]
        return Source(*planes, pages * page_size, compat.fast_divisor(page_size))

    @staticmethod
    def descriptors(source: Source):
        return atoms((source.content.loaded, source.rope.loaded))

    # ---------------------------------------------------------------- barriers

    @property
    def table_bytes(self) -> int:
        """Bytes of ``c_rows`` and ``r_rows`` together, of all stages."""
        return 2 * 4 * self.work.tile * self.stages

    @property
    def fields(self) -> dict:
        table = array(Int32, self.work.tile * self.stages, 128)
        return dict(k_bar=array(Int64, 2 * self.stages), c_rows=table, r_rows=table)

    def barriers(self) -> tuple[bud.Barrier, ...]:
        full = {"gather": WARPS, "scales": WARPS * LANES}
        return (
            bud.Barrier("k_full", sum(full.values()), full, self.stages),
            bud.Barrier("k_empty", sum(self.readers.values()), self.readers, self.stages),
        )

    def init(self, st) -> None:
        """None beside the ring's."""

    def pipe(self, st):
        """The ring, which two warps and their lanes fill."""
        group = lambda n: pipeline.CooperativeGroup(pipeline.Agent.Thread, n)
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=st.k_bar.data_ptr(), num_stages=self.stages,
            producer_group=group(WARPS * (1 + LANES)),
            consumer_group=group(sum(self.readers.values())), tx_count=0, defer_sync=False,
        )  # fmt: skip

    # ---------------------------------------------------------------- roles

    @cute.jit
    def run(self, warp: cutlass.Constexpr, feed: Feed, tile_of_q, on_full):
        """The role of warp 0, with ``tile_of_q``, or of warp 3, without."""
        self._fill_ring(feed, FIRST[warp], tile_of_q)
        if const_expr(warp == Q_WARP):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _fill_ring(self, feed: Feed, first: cutlass.Constexpr, tile_of_q: Any):
        """Tokens ``first`` ... of each tile; a work tile's first stage is Q's."""
        st, _, k_pipe, cache, work, call, part, _ = feed
        ahead = first + cute.arch.lane_idx()
        scale = Plane.of(cache.scale, SCALE, 0)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        span = self.work.work_tiles_of(work, part)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, begin, last, _ = self.work.work_tile_at(work, i)
            row, count = self.work.row_of_table(work, call, i, batch)
            entry = self.work.entry(row, begin, ahead)
            bar = k_pipe.producer_get_barrier(kst)
            if const_expr(tile_of_q is not None):
                tile_of_q(i, batch, kst)
            else:
                k_pipe.sync_object_empty.wait(kst.index, kst.phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bar)
            arrive_landed(bar)  # of no copies: to keep count
            kst.advance()
            for tile in cutlass.range(begin, last, unroll=1):
                page, offset = self.work.place(entry, tile, ahead, count, cache.source)
                entry = self.work.entry(row, tile + 1, ahead)
                k_pipe.sync_object_empty.wait(kst.index, kst.phase)
                self._note_rows(st, kst.index, ahead, page, offset, cache.source)
                self._copy_scale(st, kst.index, ahead, page, offset, scale)
                bar = k_pipe.producer_get_barrier(kst)
                arrive_landed(bar)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bar, LANES * (D + 2 * R))
                    self._copy_rows(st, kst.index, first, cache.source, bar)
                kst.advance()

    @staticmethod
    def wait_q(_st, k_pipe, kst) -> None:
        """Wait until an item's Q tile is there; Q.K's issuer calls this."""
        k_pipe.consumer_wait(kst)

    wait_tile = wait_q  # the same of a KV tile

    def last_warp(self, feed: Feed) -> None:
        """Warp 3's share of the tiles."""
        self.run(3, feed, None, None)

    # ---------------------------------------------------------------- a tile

    def _note_rows(self, st, stage, ahead, page, offset, source):
        """Store in ``c_rows`` and ``r_rows`` the token's rows of the tensor maps; -1: no token."""
        tables = cute.make_layout((self.work.tile, self.stages))
        st.c_rows.get_tensor(tables)[ahead, stage] = source.content.of(page, offset)
        st.r_rows.get_tensor(tables)[ahead, stage] = source.rope.of(page, offset)

    def _copy_scale(self, st, stage, ahead, page, offset, scale):
        """This lane's token's; 0 where there is none."""
        at, size = self._source(scale, page, offset, SCALE)
        target = st.ks.data_ptr().toint() + (stage * self.work.tile + ahead) * SCALE
        copy(target, at, size, n=SCALE)

    def _copy_rows(self, st, stage, first, source, bar):
        """Content and RoPE of a warp's tokens, by one thread."""
        place = stage * self.work.tile + first
        to_c = st.kc.data_ptr().toint() + stage * (self.work.tile * D) + first * LINE
        to_r = st.kr.data_ptr().toint() + stage * (self.work.tile * 2 * R) + first * LINE
        maps = [map_of(x.loaded.atom) for x in (source.content, source.rope)]
        for q in range(0, LANES, FOUR):
            c_rows, r_rows = (
                four_words(rows.data_ptr().toint() + 4 * (place + q))
                for rows in (st.c_rows, st.r_rows)
            )
            for block in range(D // LINE):
                at = to_c + (block * self.work.tile + q) * LINE
                gather4(at, maps[0], block * LINE, c_rows, bar)
            gather4(to_r + q * LINE, maps[1], 0, r_rows, bar)


# ---------------------------------------------------------------------------------- instructions


def rows_of(plane, t, layout) -> Rows:
    """A plane (pages, P, width) as rows of a map; ``layout``: of its tiles in shared memory."""
    size = plane.dtype.width // 8
    pages, page_size, _ = t.shape
    page, token = (Int64(t.stride[x]) * (t.element_type.width // 8) for x in range(2))
    both = page | token | LINE
    pitch = cute.assume(both & -both, divby=CHUNK)
    of_page, of_token = Int32(page // pitch), Int32(token // pitch)
    count = (pages - 1) * of_page + (page_size - 1) * of_token + 1
    stride = cute.assume(pitch // size, divby=CHUNK // size)
    view = cute.make_tensor(
        cute.recast_ptr(t.iterator, dtype=plane.dtype),
        cute.make_layout((count, plane.width), stride=(stride, 1)),
    )
    box, tiler = one_stage(layout), (1, LINE // size)
    line = cute.get(cute.zipped_divide(box.outer, tiler), mode=[0])
    box = cute.make_composed_layout(box.inner, 0, line)
    atom = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, box, tiler)
    return Rows(Loaded(*list(atom)[:2]), of_page, of_token)


@compat.dsl_user_op
def map_of(atom, *, loc=None, ip=None):
    """Address of an atom's tensor map."""
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>")
    executable = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    return cute_nvgpu.get_tma_desc_addr(kind, executable, loc=loc, ip=ip).toint(loc=loc, ip=ip)


@compat.dsl_user_op
def four_words(address, *, loc=None, ip=None):
    """Four words of shared memory, from a multiple of 16 bytes on."""
    return compat.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4, read_only_args=[address], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def gather4(target, tensor_map, column, four, bar, *, loc=None, ip=None) -> None:
    """128 bytes of four rows of a map, from ``column`` on, one below the other to ``target``; by
    one thread, bytes complete ``bar``."""
    compat.inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}];",
        read_only_args=[
            target, tensor_map, Int32(column), *four, bar.toint(loc=loc, ip=ip)
        ],
        loc=loc, ip=ip,
    )  # fmt: skip

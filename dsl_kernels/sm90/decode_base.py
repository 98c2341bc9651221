"""What every SM90 decode pipeline shares: TMA, work list, KV and Q producers, output rows.

A part (one CTA, or one cluster when ``row_tile`` is 128) walks its items of the work list.  An item
is (sequence, token tiles, slot).  Every warp role runs the same two loops, items and tiles, and
meets the others only at mbarriers:

    k_pipe   KV producer warp -> all who read the K tile        (full: TMA bytes, empty: warps)
    q_pipe   Q producer warp  -> the Q.K warpgroup(s)
    others   belong to the pipeline (see decode_etap.py, decode_dual_wg.py)

Roles here      wg 0: warp 0 KV producer, warp 1 Q producer, warp 2 scale warp (if asked for)
Shared memory   Q tile(s) of rows x 640 bytes | K ring, a stage: 64 x 512 content in four column
                blocks of 64 tokens x 128 B (128-byte swizzle), 64 x 128 RoPE, 64 scales | scale
                triples (sigma, log2, 1/) of 960 bytes a stage | what the pipeline adds
Timeline        PDL wait | an item: Q tile | a tile: wait empty, TMA content and RoPE, bulk
                scales -> full -> scale warp -> sigma_bar -> softmax | PDL trigger at the end

Query rows of a sequence are numbered r = s * num_heads + head, the memory order of (s_q, h), and
CTA x owns rows x * rows_cta ... of them; rows past the end are zero-filled by TMA and not written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from .. import compat
from ..common import budget as bud
from ..common.mma import BF16, F8, ROW_MAJOR, U8, U32, issue, one_stage, staged
from ..common.smem import array
from ..common.transpose import COLUMN_BLOCK
from ..smxx import merge
from ..spec import KV_LORA_RANK as D
from ..spec import OUT_DTYPES, PAGE_SIZES, ROW_TILES, VariantSpec, cluster_of
from ..spec import QK_ROPE_HEAD_DIM as R
from ..spec import TOKEN_TILE as TILE

LOG2E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-100  # append_kv's floor is 2^-80
WARPGROUP = 128
STAGE_BYTES = TILE * (D + 2 * R + 4)
SMALL_BYTES = 8192  # scale triples, factors, barriers, alignment: an upper bound
NOWHERE = 2**31 - 1  # slot of an item whose results are not stored
QK_GROUPS = 2  # partial sums of Q.K over the content channels


def fake_args(spec: VariantSpec) -> list:
    """Symbolic arguments of the exported function, in ABI order (docs/architecture.md)."""
    names = ["b", "s_q", "h", "pages", "width", "n_items", "parts_plus_1", "slots", "rows_pad"]
    b, s_q, h, pages, width, items, parts1, slots, rows_pad = (
        compat.sym(name=name) for name in names
    )
    free = compat.sym64
    return [
        compat.contiguous(U8, (b, s_q, h, D)),
        compat.contiguous(BF16, (b, s_q, h, R)),
        compat.strided(Float32, (b, s_q, h), (free(), free(), free()), 4),
        *compat.cache_fakes(pages, spec.page_size),
        compat.strided(Int32, (b, width), (free(), 1), 4),
        compat.vector(Int32, b),
        compat.contiguous(Int32, (items, 4)),
        compat.vector(Int32, parts1),
        compat.vector(Int32, compat.sym(name="b_plus_1")),
        compat.contiguous(compat.dtype(spec.out_dtype), (b, s_q, h, D)),
        compat.contiguous(Float32, (b, h, s_q), 4),
        compat.contiguous(Float32, (slots, rows_pad, D)),
        compat.contiguous(Float32, (slots, rows_pad), 4),
        Float32(1.0),
        Int32(1),
        Float32(1.0),
        Float32(0.0),
        Int32(1),
    ]


def pipe_barriers(
    q_stages: int, q_readers: dict[str, int], k_stages: int, k_readers: dict[str, int], cluster: int
) -> tuple[bud.Barrier, ...]:
    """Barriers that live here; ``*_readers``: role -> warps that free a stage."""
    k_free = {role: n * cluster for role, n in k_readers.items()}  # the peer's warps arrive too
    return (
        bud.Barrier("q_full", 1, {"Q producer": 1}, q_stages),
        bud.Barrier("q_empty", sum(q_readers.values()), q_readers, q_stages),
        bud.Barrier("k_full", 1, {"KV producer": 1}, k_stages),
        bud.Barrier("k_empty", sum(k_readers.values()) * cluster, k_free, k_stages),
        bud.Barrier("sigma", 1, {"scale warp": 1}, k_stages),
    )


def infeasible(
    spec: VariantSpec, min_stages: int, budget: Callable[[VariantSpec], bud.Budget]
) -> str | None:
    """Reasons that hold for every SM90 decode pipeline, or None; ``budget`` is the pipeline's."""
    allowed = {
        "q_dtype": ("e4m3",),
        "kv_dtype": ("e4m3",),
        "out_dtype": OUT_DTYPES,
        "row_tile": ROW_TILES,
        "page_size": PAGE_SIZES,
        "cluster": (cluster_of(spec.row_tile),),
        "token_tile": (TILE,),
        "promote_tokens": (TILE,),
        "kv_scale_groups": (1,),
        "p_terms": (1,),
        "p_scale": ("tile",),
        "causal": ("runtime",),
        "num_heads": (None,),
        "s_q": (None,),
        "ragged": (False,),
        "sparse": (False,),
    }
    if spec.arch != "sm_90a":
        return f"{spec.pipeline} is an SM90 pipeline (WGMMA); SM100 has none yet"
    for axis, values in allowed.items():
        if getattr(spec, axis) not in values:
            return f"{spec.pipeline}: {axis} must be in {values}, got {getattr(spec, axis)!r}"
    if spec.stages and spec.stages < min_stages:
        return f"{spec.pipeline} needs at least {min_stages} stages, got {spec.stages}"
    reason = bud.check(budget(spec))
    return None if reason is None else f"{spec.pipeline}: {reason}"


class Tma(NamedTuple):
    """TMA atoms, coordinate tensors: Q (rows, k, b), cache (tokens of a page, k, page)."""

    qc: cute.CopyAtom
    qc_coords: cute.Tensor
    qr: cute.CopyAtom
    qr_coords: cute.Tensor
    kc: cute.CopyAtom
    kc_coords: cute.Tensor
    kr: cute.CopyAtom
    kr_coords: cute.Tensor


class Gmem(NamedTuple):
    """Tensors that are read and written without TMA."""

    q_scale: cute.Tensor  # (b, s_q, h)
    scale: cute.Tensor  # (pages, P)
    block_table: cute.Tensor  # (b, width)
    cache_seqlens: cute.Tensor  # (b,)
    work_items: cute.Tensor  # (n_items, 4): batch, first tile, last tile, slot
    part_begin: cute.Tensor  # (parts + 1,)
    out: cute.Tensor  # (b, s_q, h, 512)
    lse: cute.Tensor  # (b, h, s_q)
    o_accum: cute.Tensor  # (slots, rows_pad, 512)
    lse_accum: cute.Tensor  # (slots, rows_pad)


class Call(NamedTuple):
    """Scalars of a call."""

    num_heads: Int32
    rows: Int32  # num_heads * s_q
    softmax_scale: Float32
    causal: Int32
    lse_factor: Float32
    empty_lse: Float32


class Layouts(NamedTuple):
    """Shared-memory layouts of Q, K ring and P."""

    qc: cute.ComposedLayout
    qr: cute.ComposedLayout
    kc: cute.ComposedLayout
    kr: cute.ComposedLayout
    p: cute.ComposedLayout


class DecodeBase:
    """Host half, and the roles that do not depend on the pipeline.

    A pipeline provides ``layouts()``, ``storage()``, ``init_barriers(st)``, ``math_roles(...)`` and
    the class attributes below.
    """

    threads: int
    q_consumer_warps: int
    k_consumer_warps: int
    producer_regs: int
    scale_warp: bool  # does the pipeline want prepare_scales?

    few_rows = False  # S^T = K Q^T instead of S = Q K^T

    def __init__(self, spec: VariantSpec, stages: int, q_stages: int):
        self.spec = spec
        self.rows_cta = min(spec.row_tile, 64)
        self.cluster = spec.cluster
        self.stages = spec.stages or stages
        self.q_stages = q_stages
        self.box = min(spec.page_size, TILE)  # tokens of one TMA box
        self.boxes = TILE // self.box

    # ---------------------------------------------------------------- host half

    @cute.jit
    def __call__(
        self,
        q_nope: cute.Tensor, q_rope: cute.Tensor, q_scale: cute.Tensor, content: cute.Tensor,
        rope: cute.Tensor, scale: cute.Tensor, block_table: cute.Tensor,
        cache_seqlens: cute.Tensor, work_items: cute.Tensor, part_begin: cute.Tensor,
        split_begin: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, o_accum: cute.Tensor,
        lse_accum: cute.Tensor, softmax_scale: Float32, causal: Int32, lse_factor: Float32,
        empty_lse: Float32, may_split: Int32, stream,
    ):  # fmt: skip
        layouts = self.layouts()
        self.Storage = self.storage(layouts)
        tma = Tma(*self.tma_q(q_nope, q_rope, layouts), *self.tma_kv(content, rope, layouts))
        gmem = Gmem(
            q_scale, scale, block_table, cache_seqlens, work_items, part_begin, out, lse, o_accum,
            lse_accum,
        )  # fmt: skip
        rows = q_nope.shape[1] * q_nope.shape[2]
        call = Call(q_nope.shape[2], rows, softmax_scale, causal, lse_factor, empty_lse)
        self.kernel(tma, gmem, call).launch(
            grid=(cute.ceil_div(rows, self.spec.row_tile) * self.cluster,
                  cute.size(part_begin) - 1, 1),
            block=(self.threads, 1, 1), cluster=(self.cluster, 1, 1),
            stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )  # fmt: skip
        if may_split != 0:  # on the host: the caller knows when no plan could cut a sequence
            merge.merge(
                o_accum, lse_accum, split_begin, out, lse, lse_factor, empty_lse, stream
            )  # fmt: skip

    def common_fields(self, layouts):
        """Barriers of the roles that live here."""
        return dict(
            q_bar=array(Int64, 2 * self.q_stages),
            k_bar=array(Int64, 2 * self.stages),
            sigma_bar=array(Int64, self.stages),
        )

    def tile_fields(self, layouts):
        """Scales, Q, K ring and P; the tiles start at multiples of the 1024-byte swizzle period."""
        size = cute.cosize
        triples = 3 * padded_size(TILE) * self.stages if self.scale_warp else 4
        return dict(
            sigma=array(Float32, triples, 128),
            ks=array(Float32, TILE * self.stages, 128),
            qc=array(F8, size(layouts.qc), 1024),
            kc=array(F8, size(layouts.kc), 1024),
            kr=array(BF16, size(layouts.kr), 1024),
            qr=array(BF16, size(layouts.qr), 1024),
            p=array(F8, size(layouts.p), 1024),
        )

    def tma_kv(self, content, rope, layouts):
        """TMA atoms and coordinate tensors of the cache, one box of ``self.box`` tokens each."""
        op = (
            cpasync.CopyBulkTensorTileG2SMulticastOp()
            if const_expr(self.cluster > 1)
            else cpasync.CopyBulkTensorTileG2SOp()
        )
        out = []
        for t, dtype, layout, width in ((content, F8, layouts.kc, D), (rope, BF16, layouts.kr, R)):
            view = cute.make_tensor(
                cute.recast_ptr(t.iterator, dtype=dtype), cute.select(t.layout, mode=[1, 2, 0])
            )
            one = one_stage(layout)
            box = cute.make_composed_layout(
                one.inner, 0, cute.get(cute.zipped_divide(one.outer, (self.box, width)), mode=[0])
            )
            out += list(
                cpasync.make_tiled_tma_atom(
                    op, view, box, (self.box, width), num_multicast=self.cluster
                )
            )[:2]
        return out

    def tma_q(self, q_nope, q_rope, layouts):
        """TMA atoms and coordinate tensors of Q as (rows, k, b)."""
        b, s_q, h, _ = q_nope.shape
        rows = s_q * h
        out = []
        for t, dtype, layout, width in ((q_nope, F8, layouts.qc, D), (q_rope, BF16, layouts.qr, R)):
            batch_stride = cute.assume(Int64(rows) * width, divby=width)
            view = cute.make_tensor(
                cute.recast_ptr(t.iterator, dtype=dtype),
                cute.make_layout((rows, width, b), stride=(width, 1, batch_stride)),
            )
            out += list(
                cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileG2SOp(),
                    view,
                    one_stage(layout),
                    (self.rows_cta, width),
                )
            )[:2]
        return out

    # ---------------------------------------------------------------- device: entry

    @cute.kernel
    def kernel(self, tma: Tma, gmem: Gmem, call: Call):
        tidx, _, _ = cute.arch.thread_idx()
        _, part, _ = cute.arch.block_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts = self.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.Storage)
        if warp_id == 0:
            for atom in (tma.qc, tma.qr, tma.kc, tma.kr):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                self.init_barriers(st)  # fenced with the pipes' own, below
        q_pipe, k_pipe = self.make_pipes(st)

        cute.arch.griddepcontrol_wait()  # q, the cache and the plan come from the kernels before
        span = self.items_of(gmem, part)
        if wg == 0:
            cute.arch.setmaxregister_decrease(self.producer_regs)
            if warp_id == 0:
                self.produce_kv(st, layouts, k_pipe, tma, gmem, span)
                cute.arch.griddepcontrol_launch_dependents()
            elif warp_id == 1:
                self.produce_q(st, layouts, q_pipe, tma, gmem, span)
            elif warp_id == 2:
                self.prepare_scales(st, k_pipe, gmem, span)
        else:
            self.math_roles(st, layouts, q_pipe, k_pipe, gmem, call, span, wg - 1)
        if const_expr(self.cluster > 1):
            # the peer signals barriers in this CTA's shared memory: leave together
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # ---------------------------------------------------------------- device: work list

    @cute.jit
    def items_of(self, gmem, part):
        """(first, end) of a part's items; inside the work list whatever ``part_begin`` holds."""
        items = gmem.work_items.shape[0]
        first, end = gmem.part_begin[part], gmem.part_begin[part + 1]
        return compat.at_most(first, items), compat.at_most(end, items)

    @cute.jit
    def item_at(self, gmem, i):
        """(sequence, first tile, end tile, slot) of item ``i``, safe whatever the work list holds.

        Every role reads items here, and so they agree about tiles, which are those of the block
        table: behind its end there are none.  An item of a sequence that is not there, or that
        begins before the first tile, has none and goes nowhere; nor does one whose slot does not
        exist (``rows_written``).
        """
        batch, first, last, slot = (gmem.work_items[i, x] for x in range(4))
        tiles = cute.ceil_div(gmem.block_table.shape[1] * self.spec.page_size, TILE)
        last = compat.at_most(last, tiles)
        there = compat.unsigned(batch) < compat.unsigned(gmem.cache_seqlens.shape[0])
        if not (there & (first >= 0)):
            batch, last, slot = Int32(0), first, Int32(NOWHERE)
        return batch, first, last, slot

    def rows_written(self, gmem, call, slot):
        """Query rows below which results are stored: all, or none if the slot does not exist."""
        return cutlass.select_(slot < gmem.o_accum.shape[0], call.rows, Int32(0))

    # ---------------------------------------------------------------- device: producers

    def make_pipes(self, st):
        """(q_pipe, k_pipe): TMA bytes fill a stage, one lane of each reading warp frees it.

        The second one's fence and barrier publish every mbarrier initialised so far.
        """
        group = lambda n: pipeline.CooperativeGroup(pipeline.Agent.Thread, n)
        q_pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=st.q_bar.data_ptr(), num_stages=self.q_stages,
            producer_group=group(1), consumer_group=group(self.q_consumer_warps),
            tx_count=self.rows_cta * (D + 2 * R), defer_sync=True,
        )  # fmt: skip
        extra = {}
        if self.cluster > 1:
            extra = dict(
                cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)), mcast_mode_mn=(0, 1)
            )
        k_pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=st.k_bar.data_ptr(), num_stages=self.stages, producer_group=group(1),
            consumer_group=group(self.k_consumer_warps * self.cluster),
            tx_count=STAGE_BYTES, **extra,
        )  # fmt: skip
        return q_pipe, k_pipe

    @cute.jit
    def page_of(self, row, tile, lane, num_pages):
        """Page id of this lane's box of ``tile`` (lanes repeat), from the sequence's ``row`` of the
        block table.  Clamped: ids past the sequence's end may be anything, and their tokens are
        masked later."""
        if const_expr(self.spec.page_size > TILE):
            index = tile // (self.spec.page_size // TILE)
        else:
            index = tile * self.boxes + lane % self.boxes
        last = row.shape[0] - 1
        page = row[compat.at_most(index, last)]
        page = page if page > 0 else Int32(0)
        return page if page < num_pages else num_pages - 1

    def kv_boxes(self, atom, source, target, width, rank):
        """TMA view of the K ring and of the cache, box by box: (values, box, stage), (values, half,
        page)."""
        boxes = cute.local_tile(target, (self.box, width), (None, 0, None))
        tiles = cute.local_tile(source, (self.box, width), (None, 0, None))
        return cpasync.tma_partition(
            atom, rank, cute.make_layout(self.cluster), cute.group_modes(boxes, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )  # fmt: skip

    def cluster_copy(self):
        """(this CTA's rank, options of copies that all CTAs of the cluster receive)."""
        if const_expr(self.cluster == 1):
            return 0, {}
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        vmnk = cute.make_layout((1, self.cluster, 1, 1))
        return rank, {"mcast_mask": cute.make_layout_image_mask(vmnk, (0, rank, 0, 0), mode=1)}

    @cute.jit
    def produce_kv(self, st, layouts, k_pipe, tma, gmem, span):
        """One warp: for each tile, content, RoPE and scales into the next free stage."""
        lane = cute.arch.lane_idx()
        rank, extra = self.cluster_copy()
        content = self.kv_boxes(tma.kc, tma.kc_coords, staged(st.kc, layouts.kc), D, rank)
        rope = self.kv_boxes(tma.kr, tma.kr_coords, staged(st.kr, layouts.kr), R, rank)
        num_pages = gmem.scale.shape[0]
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, _ = self.item_at(gmem, i)
            row = gmem.block_table[batch, None]
            page = self.page_of(row, first, lane, num_pages)
            for tile in cutlass.range(first, last, unroll=1):
                now = page
                page = self.page_of(row, tile + 1, lane, num_pages)
                half = tile % max(self.spec.page_size // TILE, 1)
                k_pipe.producer_acquire(kst)
                bar = k_pipe.producer_get_barrier(kst)
                for j in cutlass.range_constexpr(self.boxes):
                    p = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(now, j))
                    at = [dst[None, j, kst.index] for dst, _ in (content, rope)]
                    cute.copy(tma.kc, content[1][None, half, p], at[0], tma_bar_ptr=bar, **extra)
                    cute.copy(tma.kr, rope[1][None, half, p], at[1], tma_bar_ptr=bar, **extra)
                    with cute.arch.elect_one():
                        self.copy_scales(st, gmem.scale, p, half, j, kst.index, bar)
                kst.advance()
        # no producer_tail: every stage is read before the math warps end, and a cluster leaves
        # together (see kernel), so no arrival can reach a CTA that is gone

    def copy_scales(self, st, scale, page, half, box, stage, bar):
        """Scales of one box of tokens, by one lane."""
        bulk = cute.make_copy_atom(
            cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=self.box * 32
        )
        offset = Int64(page) * scale.stride[0] + half * self.box
        src = cute.make_tensor(
            (scale.iterator + cute.assume(offset, divby=4)).align(16), cute.make_layout(self.box)
        )
        s_ks = st.ks.get_tensor(cute.make_layout((TILE, self.stages)))
        dst = cute.local_tile(s_ks[None, stage], (self.box,), (box,))
        cute.copy(bulk, src, dst, mbar_ptr=bar)

    @cute.jit
    def produce_q(self, st, layouts, q_pipe, tma, gmem, span):
        """One warp: the row tile of each item's sequence."""
        row_block, _, _ = cute.arch.block_idx()

        def part(atom, g, s, width):
            tiles = cute.local_tile(g, (self.rows_cta, width), (None, 0, None))
            return cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2),
                cute.group_modes(tiles, 0, 2),
            )  # fmt: skip

        qc_s, qc_g = part(tma.qc, tma.qc_coords, staged(st.qc, layouts.qc), D)
        qr_s, qr_g = part(tma.qr, tma.qr_coords, staged(st.qr, layouts.qr), R)
        qst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.q_stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, _, _, _ = self.item_at(gmem, i)
            q_pipe.producer_acquire(qst)
            bar = q_pipe.producer_get_barrier(qst)
            cute.copy(tma.qc, qc_g[None, row_block, batch], qc_s[None, qst.index], tma_bar_ptr=bar)
            cute.copy(tma.qr, qr_g[None, row_block, batch], qr_s[None, qst.index], tma_bar_ptr=bar)
            qst.advance()

    # ---------------------------------------------------------------- scale warp

    @cute.jit
    def prepare_scales(self, st, k_pipe, gmem, span):
        """sigma, log2 sigma, 1/sigma of each token, in the order a thread of S reads them."""
        lane = cute.arch.lane_idx()
        first, last = span if const_expr(self.scale_warp) else (0, 0)
        s_ks = st.ks.get_tensor(cute.make_layout((TILE, self.stages)))
        out = st.sigma.get_tensor(cute.make_layout((padded_size(TILE), 3, self.stages)))
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        for i in cutlass.range(first, last, unroll=1):
            _, begin, end, _ = self.item_at(gmem, i)
            for _ in cutlass.range(begin, end, unroll=1):
                k_pipe.consumer_wait(kst)
                for x in cutlass.range_constexpr(2):
                    token = lane + 32 * x
                    s = s_ks[token, kst.index]
                    pos = row_position(token, TILE)
                    out[pos, 0, kst.index] = s
                    out[pos, 1, kst.index] = cute.math.log2(s, fastmath=True)
                    out[pos, 2, kst.index] = safe_reciprocal(s)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(st.sigma_bar.data_ptr() + kst.index)
                kst.advance()

    def sigma_view(self, st, quad, stage):
        """(16 tokens of quad lane ``quad``, 3) of one stage: sigma, log2 sigma, 1/sigma."""
        view = st.sigma.get_tensor(
            cute.make_layout(
                (TILE // 4, 4, 3, self.stages),
                stride=(1, TILE // 4 + 4, padded_size(TILE), 3 * padded_size(TILE)),
            )
        )
        return view[None, quad, None, stage]

    # ---------------------------------------------------------------- device: Q.K

    def issue_qk(self, mma_c, mma_r, acc_S, frags, q_stage, k_stage):
        """S in QK_GROUPS partial sums over the content channels, RoPE on top of the first.

        Hopper's FP8 accumulator keeps 13 bits below the largest addend: shorter chains lose less,
        and RoPE logits, which can be large, come last in their chain.  By then the first chain's
        results are there, so that the BF16 WGMMAs do not wait for the FP8 ones.
        """
        a_stage, b_stage = (k_stage, q_stage) if self.few_rows else (q_stage, k_stage)
        rA, rB, rAr, rBr = (
            f[None, None, None, s]
            for f, s in zip(frags, (a_stage, b_stage, a_stage, b_stage), strict=True)
        )
        steps = D // 32 // QK_GROUPS
        warpgroup.fence()
        for g in range(QK_GROUPS):
            issue(mma_c, acc_S[g], rA, rB, accumulate=False, first=g * steps, last=(g + 1) * steps)
        warpgroup.fence()  # another shape of WGMMA on the same accumulator: order the two chains
        issue(mma_r, acc_S[0], rAr, rBr, accumulate=True)
        warpgroup.commit_group()

    def make_acc_S(self):
        """Accumulators of S, one for each group of content channels."""
        n_s = self.rows_cta if self.few_rows else TILE
        shape = self.mmas()[0].partition_shape_C((64, n_s))
        return [cute.make_rmem_tensor(shape, Float32) for _ in range(QK_GROUPS)]

    # ---------------------------------------------------------------- device: rows

    @cute.jit
    def zero_rows(self, st, stage, valid, first_block, blocks: cutlass.Constexpr, barrier_id):
        """Zeroes V bytes of tokens >= ``valid`` or with a NaN scale: 0 * NaN must not reach O.

        One warpgroup clears ``blocks`` column blocks (128 channels each) from ``first_block``; a
        thread clears whole 128-byte lines, so there is no swizzle to mind.
        """
        tidx, _, _ = cute.arch.thread_idx()
        token, column = tidx % 128 // 2, tidx % 2
        s_ks = st.ks.get_tensor(cute.make_layout((TILE, self.stages)))
        s = s_ks[token, stage]
        if token >= valid or s != s:
            zero = cute.make_rmem_tensor((32,), U32)
            zero.fill(0)
            for x in cutlass.range_constexpr(blocks // 2):
                block = first_block + 2 * x + column
                offset = stage * (TILE * D) + block * COLUMN_BLOCK + token * 128
                ptr = cute.recast_ptr((st.kc.data_ptr() + offset).align(128), dtype=U32)
                cute.autovec_copy(zero, cute.make_tensor(ptr, cute.make_layout(32)))
        # later TMA writes of this stage must come after these stores
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)

    @cute.jit
    def seqlen_of(self, gmem, batch):
        """Tokens of a sequence, no more than its row of the block table can name."""
        seqlen = gmem.cache_seqlens[batch]
        most = gmem.block_table.shape[1] * self.spec.page_size
        return seqlen if seqlen < most else most

    @cute.jit
    def row_facts(self, gmem, call, batch, row):
        """(factor of the logits in log2 units, number of visible tokens) of one query row."""
        seqlen = self.seqlen_of(gmem, batch)
        factor, limit = Float32(0.0), seqlen
        if row < call.rows:
            s = row // call.num_heads
            q_scale = gmem.q_scale[batch, s, row - s * call.num_heads]
            factor = q_scale * (call.softmax_scale * LOG2E)
            if call.causal != 0:
                limit = seqlen - (call.rows // call.num_heads - 1 - s)
        return factor, limit

    @cute.jit
    def ragged_from(self, gmem, call, batch):
        """First token that some row of the sequence must not see."""
        hidden = call.rows // call.num_heads - 1 if call.causal != 0 else Int32(0)
        return self.seqlen_of(gmem, batch) - hidden

    @cute.jit
    def finish_row(self, gmem, call, batch, slot, row, row_sum, frame):
        """LSE of row ``row`` of the sequence to memory, final or (log2) into the split's slot.

        Returns 1/row_sum for the epilogue, 0 for a row that saw no token.
        """
        empty = row_sum == 0.0
        value = cute.math.log2(row_sum, fastmath=True) + frame
        if slot < 0:
            if row < call.rows:
                s = row // call.num_heads
                final = value * call.lse_factor
                gmem.lse[batch, row - s * call.num_heads, s] = call.empty_lse if empty else final
        elif slot < gmem.o_accum.shape[0]:
            gmem.lse_accum[slot, row] = -Float32.inf if empty else value
        inverse = 1.0 / row_sum
        return Float32(0.0) if empty else inverse

    @cute.jit
    def write_pair(self, gmem, call, batch, slot, row, channel, pair):
        """Two neighbouring normalised channels of a row: into ``out``, or the split's slot."""
        if slot < 0:
            store_pair(gmem.out, (Int64(batch) * call.rows + row) * D + channel, pair)
        else:
            store_pair(gmem.o_accum, Int64(slot) * gmem.o_accum.stride[0] + row * D + channel, pair)


@cute.jit
def safe_reciprocal(s):
    """1/s, but 0 for what is no scale (NaN rows, bytes past the end): masked tokens have P' = 0 and
    must add 0 to the sums, and a NaN row's P' is NaN already."""
    inv = cute.arch.rcp_approx(s)
    return inv if s >= SMALLEST_SCALE else Float32(0.0)


def store_pair(t, offset, pair):
    """Two neighbouring fp32 values, converted to the element type of ``t``."""
    ptr = (t.iterator + cute.assume(offset, divby=2)).align(2 * t.element_type.width // 8)
    value = cute.make_rmem_tensor((2,), t.element_type)
    value.store(pair.load().to(t.element_type))
    cute.autovec_copy(value, cute.make_tensor(ptr, cute.make_layout(2)))


def pad_layout(rows: int):
    """Row factors in the order in which an O^T fragment wants them.

    A thread of quad lane c needs rows 8j + 2c + e for all j, e: they lie side by side, and the four
    lanes' runs are 4 words apart modulo the banks, so that 16-byte reads do not collide.
    Shape (rows // 4, 4): (2j + e, c).
    """
    return cute.make_layout((rows // 4, 4), stride=(1, rows // 4 + 4))


def padded_size(rows: int) -> int:
    return rows + 16


def row_position(row, rows: int):
    """Offset of ``row`` in ``pad_layout``."""
    return (row % 8) // 2 * (rows // 4 + 4) + row // 8 * 2 + row % 2


def qk_layouts(rows: int, q_stages: int, k_stages: int, tokens_on_m: bool):
    """(qc, qr, kc, kr): Q is operand A and K operand B, or the other way round."""
    a, b = sm90.make_smem_layout_a, sm90.make_smem_layout_b
    make_q, make_k = (b, a) if tokens_on_m else (a, b)
    tiler = (TILE, rows) if tokens_on_m else (rows, TILE)
    return (
        make_q(ROW_MAJOR, (*tiler, D), F8, q_stages),
        make_q(ROW_MAJOR, (*tiler, R), BF16, q_stages),
        make_k(ROW_MAJOR, (*tiler, D), F8, k_stages),
        make_k(ROW_MAJOR, (*tiler, R), BF16, k_stages),
    )

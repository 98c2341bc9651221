"""What every SM90 decode pipeline shares: TMA, work list, KV and Q producers, output rows.

A part (one CTA, or one cluster when ``row_tile`` is 128) walks its items of the work list.  An item
is (sequence, token tiles, slot).  Every warp role runs the same two loops, items and tiles, and
meets the others only at mbarriers:

    k_pipe   KV producer warp -> all who read the K tile        (full: TMA bytes, empty: warps)
    q_pipe   Q producer warp  -> the Q.K warpgroup(s)
    others   belong to the pipeline (see decode_etap.py, decode_dual_wg.py)

Query rows of a sequence are numbered r = s * num_heads + head, the memory order of (s_q, h), and
CTA x owns rows x * rows_cta ... of them; rows past the end are zero-filled by TMA and not written.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from ..common.mma import BF16, F8, ROW_MAJOR, U8, U32, issue, one_stage, staged
from ..common.transpose import COLUMN_BLOCK
from ..spec import KV_LORA_RANK as D
from ..spec import QK_ROPE_HEAD_DIM as R
from ..spec import TOKEN_TILE as TILE
from ..spec import VariantSpec

LN2 = math.log(2.0)
LOG2E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-100  # append_kv's floor is 2^-80
WARPGROUP = 128
DTYPES = {"bf16": cutlass.BFloat16, "f32": cutlass.Float32}


def fake_args(spec: VariantSpec) -> list:
    """Symbolic arguments of the exported function, in ABI order (docs/architecture.md)."""
    b, s_q, h, pages, width, items, parts1, slots, rows_pad = (cute.sym_int() for _ in range(9))
    byte_row = lambda n: cute.sym_int64(divisibility=n)

    def compact(dtype, shape, align=16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    def strided(dtype, shape, stride, align=16):
        return make_fake_tensor(dtype, shape, stride, assumed_align=align)

    page = spec.page_size
    return [
        compact(U8, (b, s_q, h, D)),
        compact(BF16, (b, s_q, h, R)),
        strided(Float32, (b, s_q, h), tuple(cute.sym_int64() for _ in range(3)), 4),
        strided(U8, (pages, page, D), (byte_row(16), byte_row(16), 1)),
        strided(BF16, (pages, page, R), (byte_row(8), byte_row(8), 1)),
        strided(Float32, (pages, page), (byte_row(4), 1)),
        strided(Int32, (b, width), (cute.sym_int64(), 1), 4),
        compact(Int32, (b,), 4),
        compact(Int32, (items, 4)),
        compact(Int32, (parts1,), 4),
        compact(DTYPES[spec.out_dtype], (b, s_q, h, D)),
        compact(Float32, (b, h, s_q), 4),
        compact(Float32, (slots, rows_pad, D)),
        compact(Float32, (slots, rows_pad), 4),
        Float32(1.0),
        Int32(1),
        Float32(1.0),
        Float32(0.0),
    ]


class DecodeBase:
    """Host half, and the roles that do not depend on the pipeline."""

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

    def tma_kv(self, content, rope, l_kc, l_kr):
        """TMA atoms and coordinate tensors of the cache, one box of ``self.box`` tokens each."""
        op = (
            cpasync.CopyBulkTensorTileG2SMulticastOp()
            if const_expr(self.cluster > 1)
            else cpasync.CopyBulkTensorTileG2SOp()
        )
        out = []
        for t, dtype, layout, width in ((content, F8, l_kc, D), (rope, BF16, l_kr, R)):
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

    def tma_q(self, q_nope, q_rope, l_qc, l_qr):
        """TMA atoms and coordinate tensors of Q as (rows, k, b)."""
        b, s_q, h, _ = q_nope.shape
        rows = s_q * h
        out = []
        for t, dtype, layout, width in ((q_nope, F8, l_qc, D), (q_rope, BF16, l_qr, R)):
            batch_stride = cute.assume(Int64(rows) * width, divby=width)
            view = cute.make_tensor(
                cute.recast_ptr(t.iterator, dtype=dtype),
                cute.make_layout((rows, width, b), stride=(width, 1, batch_stride)),
            )
            out += list(
                cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileG2SOp(), view, one_stage(layout), (self.rows_cta, width)
                )
            )[:2]
        return out

    def kv_bytes(self):
        return TILE * (D + 2 * R + 4)

    def q_bytes(self):
        return self.rows_cta * (D + 2 * R)

    def grid(self, q_nope, part_begin):
        rows = q_nope.shape[1] * q_nope.shape[2]
        m_blocks = cute.ceil_div(rows, self.spec.row_tile)
        return (m_blocks * self.cluster, cute.size(part_begin) - 1, 1)

    # ---------------------------------------------------------------- device: producers

    def make_k_pipe(self, storage, consumer_warps: int):
        group = lambda n: pipeline.CooperativeGroup(pipeline.Agent.Thread, n)
        extra = {}
        if self.cluster > 1:
            extra = dict(
                cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)), mcast_mode_mn=(0, 1)
            )
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=storage, num_stages=self.stages, producer_group=group(1),
            consumer_group=group(consumer_warps * self.cluster), tx_count=self.kv_bytes(), **extra,
        )  # fmt: skip

    def make_q_pipe(self, storage, consumer_warps: int):
        group = lambda n: pipeline.CooperativeGroup(pipeline.Agent.Thread, n)
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=storage, num_stages=self.q_stages, producer_group=group(1),
            consumer_group=group(consumer_warps), tx_count=self.q_bytes(),
        )  # fmt: skip

    @cute.jit
    def page_of(self, block_table, batch, tile, lane, num_pages):
        """Page id of this lane's box of ``tile`` (lanes repeat), clamped: ids past the sequence's
        end may be anything, and their tokens are masked later."""
        if const_expr(self.spec.page_size > TILE):
            index = tile // (self.spec.page_size // TILE)
        else:
            index = tile * self.boxes + lane % self.boxes
        last = block_table.shape[1] - 1
        index = index if index < last else last
        page = block_table[batch, index]
        page = page if page > 0 else Int32(0)
        return page if page < num_pages else num_pages - 1

    @cute.jit
    def produce_kv(self, st, k_pipe, items, begin, end, block_table, scale, tma, l_kc, l_kr):
        """One warp: for each tile, content, RoPE and scales into the next free stage."""
        a_kc, g_kc, a_kr, g_kr = tma
        lane = cute.arch.lane_idx()
        s_kc, s_kr = staged(st.kc, l_kc), staged(st.kr, l_kr)
        s_ks = st.ks.get_tensor(cute.make_layout((TILE, self.stages)))
        rank = (
            cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            if const_expr(self.cluster > 1)
            else 0
        )

        def part(atom, g, s, width):
            boxes = cute.local_tile(s, (self.box, width), (None, 0, None))  # (box, k, n, stage)
            tiles = cute.local_tile(g, (self.box, width), (None, 0, None))  # (box, k, n, page)
            return cpasync.tma_partition(
                atom, rank, cute.make_layout(self.cluster), cute.group_modes(boxes, 0, 2),
                cute.group_modes(tiles, 0, 2),
            )  # fmt: skip

        kc_s, kc_g = part(a_kc, g_kc, s_kc, D)
        kr_s, kr_g = part(a_kr, g_kr, s_kr, R)
        extra = {}
        if const_expr(self.cluster > 1):
            vmnk = cute.make_layout((1, self.cluster, 1, 1))
            extra["mcast_mask"] = cute.make_layout_image_mask(vmnk, (0, rank, 0, 0), mode=1)
        bulk = cute.make_copy_atom(
            cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=self.box * 32
        )
        num_pages = scale.shape[0]
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for i in cutlass.range(begin, end, unroll=1):
            batch, first, last = items[i, 0], items[i, 1], items[i, 2]
            page = self.page_of(block_table, batch, first, lane, num_pages)
            for tile in cutlass.range(first, last, unroll=1):
                now = page
                page = self.page_of(block_table, batch, tile + 1, lane, num_pages)
                half = tile % max(self.spec.page_size // TILE, 1)
                k_pipe.producer_acquire(kst)
                bar = k_pipe.producer_get_barrier(kst)
                for j in cutlass.range_constexpr(self.boxes):
                    p = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(now, j))
                    cute.copy(
                        a_kc, kc_g[None, half, p], kc_s[None, j, kst.index], tma_bar_ptr=bar, **extra
                    )
                    cute.copy(
                        a_kr, kr_g[None, half, p], kr_s[None, j, kst.index], tma_bar_ptr=bar, **extra
                    )
                    with cute.arch.elect_one():
                        offset = Int64(p) * scale.stride[0] + half * self.box
                        src = cute.make_tensor(
                            (scale.iterator + cute.assume(offset, divby=4)).align(16),
                            cute.make_layout(self.box),
                        )
                        dst = cute.local_tile(s_ks[None, kst.index], (self.box,), (j,))
                        cute.copy(bulk, src, dst, mbar_ptr=bar)
                kst.advance()
        k_pipe.producer_tail(kst)

    @cute.jit
    def produce_q(self, st, q_pipe, items, begin, end, tma, l_qc, l_qr, row_block):
        """One warp: the row tile of each item's sequence."""
        a_qc, g_qc, a_qr, g_qr = tma
        s_qc, s_qr = staged(st.qc, l_qc), staged(st.qr, l_qr)

        def part(atom, g, s, width):
            tiles = cute.local_tile(g, (self.rows_cta, width), (None, 0, None))
            return cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(tiles, 0, 2)
            )

        qc_s, qc_g = part(a_qc, g_qc, s_qc, D)
        qr_s, qr_g = part(a_qr, g_qr, s_qr, R)
        qst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.q_stages)
        for i in cutlass.range(begin, end, unroll=1):
            batch = items[i, 0]
            q_pipe.producer_acquire(qst)
            bar = q_pipe.producer_get_barrier(qst)
            cute.copy(a_qc, qc_g[None, row_block, batch], qc_s[None, qst.index], tma_bar_ptr=bar)
            cute.copy(a_qr, qr_g[None, row_block, batch], qr_s[None, qst.index], tma_bar_ptr=bar)
            qst.advance()

    # ---------------------------------------------------------------- scale warp

    @cute.jit
    def prepare_scales(self, st, k_pipe, items, begin, end):
        """sigma, log2 sigma, 1/sigma of each token, in the order a thread of an S fragment reads."""
        lane = cute.arch.lane_idx()
        s_ks = st.ks.get_tensor(cute.make_layout((TILE, self.stages)))
        out = st.sigma.get_tensor(cute.make_layout((padded_size(TILE), 3, self.stages)))
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        for i in cutlass.range(begin, end, unroll=1):
            for _ in cutlass.range(items[i, 1], items[i, 2], unroll=1):
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
        """FP8 content by 128 channels, then RoPE: last, because Hopper's FP8 accumulator keeps 13
        bits below the largest addend, and RoPE logits can be large."""
        a_stage, b_stage = (k_stage, q_stage) if self.few_rows else (q_stage, k_stage)
        rA, rB, rAr, rBr = (
            f[None, None, None, s]
            for f, s in zip(frags, (a_stage, b_stage, a_stage, b_stage), strict=True)
        )
        warpgroup.fence()
        for group in range(D // 128):
            issue(mma_c, acc_S, rA, rB, accumulate=group > 0, first=4 * group, last=4 * group + 4)
        warpgroup.fence()  # another shape of WGMMA on the same accumulator: order the two chains
        issue(mma_r, acc_S, rAr, rBr, accumulate=True)
        warpgroup.commit_group()

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
    def finish_row(self, inv_s, l, frame, row, lse, lse_accum, batch, slot, facts):
        """1/l of one row for the epilogue, LSE to memory; a row that saw no token gives 0."""
        num_heads, rows, row_block, lse_factor, empty_lse = facts
        empty = l == 0.0
        value = 1.0 / l
        inv_s[row_position(row, self.rows_cta)] = Float32(0.0) if empty else value
        self.write_lse(
            lse, lse_accum, batch, slot, row_block * self.rows_cta + row, num_heads, rows,
            cute.math.log2(l, fastmath=True) + frame, lse_factor, empty_lse, empty,
        )  # fmt: skip

    @cute.jit
    def row_facts(self, q_scale, batch, row, num_heads, rows, softmax_scale, seqlen, causal):
        """(factor of the logits in log2 units, number of visible tokens) of one query row."""
        factor, limit = Float32(0.0), seqlen
        if row < rows:
            s = row // num_heads
            factor = q_scale[batch, s, row - s * num_heads] * (softmax_scale * LOG2E)
            if causal != 0:
                limit = seqlen - (rows // num_heads - 1 - s)
        return factor, limit

    @cute.jit
    def write_lse(self, lse, lse_accum, batch, slot, row, num_heads, rows, value, lse_factor,
                  empty_lse, empty):  # fmt: skip
        """LSE of one row: final, or in log2 units into the split's slot."""
        if slot < 0:
            if row < rows:
                s = row // num_heads
                v = value * lse_factor
                lse[batch, row - s * num_heads, s] = empty_lse if empty else v
        else:
            lse_accum[slot, row] = -Float32.inf if empty else value


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


def kv_layouts(rows: int, stages: int, tokens_on_m: bool):
    """Shared-memory layouts of the K tile; the bytes are the same for both operand roles."""
    make = sm90.make_smem_layout_a if tokens_on_m else sm90.make_smem_layout_b
    tiler = (TILE, rows) if tokens_on_m else (rows, TILE)
    return (
        make(ROW_MAJOR, (*tiler, D), F8, stages),
        make(ROW_MAJOR, (*tiler, R), BF16, stages),
    )


def q_layouts(rows: int, stages: int, tokens_on_m: bool):
    make = sm90.make_smem_layout_b if tokens_on_m else sm90.make_smem_layout_a
    tiler = (TILE, rows) if tokens_on_m else (rows, TILE)
    return (
        make(ROW_MAJOR, (*tiler, D), F8, stages),
        make(ROW_MAJOR, (*tiler, R), BF16, stages),
    )

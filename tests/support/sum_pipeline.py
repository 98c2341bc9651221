"""A decode kernel that only adds up: out = sum over the tokens that a row sees of their content.

It shows what a new system takes: a family of its own, a cache format of one BF16 plane, the shared
work list, TMA producer and epilogue; nothing of the FP8 format, no MMA.

Roles           wg 0: warp 0 KV producer | wg 1: a thread adds 4 channels, for every row of the CTA
Shared memory   ring of 2 x 64 tokens x 576 BF16
Timeline        producer | TMA i + 1 |    adders | wait full i, add 64 tokens, free i |
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as helpers
from cutlass import Float32, Int32

from dsl_kernels import compat
from dsl_kernels.common import budget as bud
from dsl_kernels.common.cache_format import CacheFormat, Plane
from dsl_kernels.common.epilogue import Results, finish_row, write_pair
from dsl_kernels.common.paged_tma import PagedTma, pipe_barriers
from dsl_kernels.common.smem import array, staged, struct_of
from dsl_kernels.common.types import BF16, ROW_MAJOR
from dsl_kernels.common.work_list import Call, Work, WorkList
from dsl_kernels.dims import HEAD_DIM_QK, KV_LORA_RANK
from dsl_kernels.families.family import Axis, Family

TILE, STAGES, ADDERS, CHANNELS = 64, 2, 4, 4  # tokens; warps; channels of a thread
FORMAT = CacheFormat((Plane("v", BF16, HEAD_DIM_QK),))
FAMILY = Family(
    "sum_rows",
    (Axis("row_tile", "r", (8,), 8), Axis("page_size", "p", (16, 64, 128), 64)),
    module=lambda _arch, _values: "tests.support.sum_pipeline",
    points=lambda _arch: iter(()),
)


def budget(spec) -> bud.Budget:
    reads = {"adders": ADDERS}
    return bud.Budget(
        groups=(bud.WarpGroup("producer"), bud.WarpGroup("adders")),
        smem=STAGES * TILE * FORMAT.token_bytes + 2048,
        barriers=pipe_barriers(1, reads, STAGES, reads, 1),
        arch=spec.arch,
    )


def build(spec):
    size = compat.sym
    b, s_q, h, pages, slots, rows_pad = (size() for _ in range(6))
    return SumRows(spec), [
        compat.rows(BF16, (pages, spec.page_size, HEAD_DIM_QK)),
        compat.strided(Int32, (b, size()), (compat.sym64(), 1), 4),
        compat.vector(Int32, b),
        compat.contiguous(Int32, (size(), 4)),
        compat.vector(Int32, size()),
        compat.contiguous(Float32, (b, s_q, h, KV_LORA_RANK)),
        compat.contiguous(Float32, (b, h, s_q), 4),
        compat.contiguous(Float32, (slots, rows_pad, KV_LORA_RANK)),
        compat.contiguous(Float32, (slots, rows_pad), 4),
        Int32(1),
    ]


class SumRows:
    def __init__(self, spec):
        self.rows, self.work = spec.row_tile, WorkList(spec.page_size, TILE)
        self.loads = PagedTma(
            FORMAT, self.work, rows=self.rows, stages=STAGES, q_stages=1, cluster=1,
            q_warps=ADDERS, k_warps=ADDERS,
        )  # fmt: skip

    def layout(self):
        return helpers.make_smem_layout_b(ROW_MAJOR, (64, TILE, HEAD_DIM_QK), BF16, STAGES)

    @cute.jit
    def __call__(self, cache: cute.Tensor, block_table: cute.Tensor, cache_seqlens: cute.Tensor,
                 work_items: cute.Tensor, part_begin: cute.Tensor, out: cute.Tensor,
                 lse: cute.Tensor, o_accum: cute.Tensor, lse_accum: cute.Tensor, causal: Int32,
                 stream):  # fmt: skip
        tile = array(BF16, cute.cosize(self.layout()), 1024)
        self.Storage = struct_of(**self.loads.fields, kv=tile)
        rows = out.shape[1] * out.shape[2]
        self.kernel(
            self.loads.load_kv((cache,), (self.layout(),)), cache.shape[0],
            Work(block_table, cache_seqlens, work_items, part_begin),
            Results(out, lse, o_accum, lse_accum),
            Call(out.shape[2], rows, Float32(1.0), causal, Float32(1.0), Float32(0.0)),
        ).launch(
            grid=(cute.ceil_div(rows, self.rows), cute.size(part_begin) - 1, 1),
            block=(256, 1, 1), stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, loaded: tuple, num_pages: Int32, work: Work, results: Results, call: Call):
        _, part, _ = cute.arch.block_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        st = cutlass.memory.SmemAllocator().allocate(self.Storage)
        _, k_pipe = self.loads.pipes(st)
        span = self.work.items_of(work, part)
        if warp_id == 0:
            self.loads.produce_kv(st, (self.layout(),), k_pipe, loaded, work, span, num_pages, None)
        elif warp_id >= 4:
            self.add(st, k_pipe, work, results, call, span)

    @cute.jit
    def add(self, st, k_pipe, work, results, call, span):
        tidx, _, _ = cute.arch.thread_idx()
        first_row, channel = cute.arch.block_idx()[0] * self.rows, tidx % 128 * CHANNELS
        tokens_s = staged(st.kv, self.layout())
        total = cute.make_rmem_tensor((self.rows, CHANNELS), Float32)
        limit = cute.make_rmem_tensor((self.rows,), Int32)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, slot = self.work.item_at(work, i)
            for r in cutlass.range_constexpr(self.rows):
                _, limit[r] = self.work.row_facts(
                    work, call, batch, first_row + r, lambda *_: Float32(1.0)
                )
            total.fill(0.0)
            for tile in cutlass.range(first, last, unroll=1):
                k_pipe.consumer_wait(kst)
                for token in cutlass.range(TILE, unroll=1):
                    for c in cutlass.range_constexpr(CHANNELS):
                        x = tokens_s[token, channel + c, kst.index].to(Float32)
                        for r in cutlass.range_constexpr(self.rows):
                            seen = tile * TILE + token < limit[r]
                            total[r, c] = total[r, c] + (x if seen else Float32(0.0))
                cute.arch.sync_warp()
                k_pipe.consumer_release(kst)
                kst.advance()
            for r in cutlass.range_constexpr(self.rows):
                if first_row + r < call.rows:
                    if tidx % 128 == 0:
                        finish_row(results, call, batch, slot, first_row + r, Float32(1.0), 0.0)
                    for c in cutlass.range_constexpr(CHANNELS // 2):
                        pair = cute.make_rmem_tensor((2,), Float32)
                        pair[0], pair[1] = total[r, 2 * c], total[r, 2 * c + 1]
                        write_pair(results, call, batch, slot, first_row + r, channel + 2 * c, pair)

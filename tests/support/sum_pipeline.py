"""A decode kernel that only adds up: out = sum over the tokens that a row sees of their content.

What a new system takes (and a family, sum_family.py); nothing of the FP8 format, no MMA.

Roles           wg 0: warp 0 KV producer | wg 1, 2: a thread adds 2 channels, for every row
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

from dsl_kernels.blocks import budget as bud
from dsl_kernels.blocks import compat
from dsl_kernels.blocks.smem import array, staged, struct_of
from dsl_kernels.blocks.types import BF16, F16, ROW_MAJOR
from dsl_kernels.combine.epilogue import Held, Results, Shared, finish_row, write_rows
from dsl_kernels.formats.dims import HEAD_DIM_QK, ITEM_WORDS, KV_LORA_RANK, PARTIAL_ROW
from dsl_kernels.load.loader import Cache, Feed
from dsl_kernels.load.paged_tma import PagedTma
from dsl_kernels.load.planes import CacheFormat, Plane
from dsl_kernels.load.work_list import Call, Work, WorkList

TILE, STAGES, ADDERS = 64, 2, 8  # tokens; tiles in flight; warps
FORMAT = CacheFormat((Plane("v", BF16, HEAD_DIM_QK),))


def budget(spec) -> bud.Budget:
    groups, smem = (bud.WarpGroup("load"), bud.WarpGroup("adders", count=2)), TILE * 1152 * STAGES
    return bud.Budget(groups, smem + 2048, SumRows(spec).loads.barriers(), arch=spec.arch)


def build(spec):
    b, s_q, h, pages, width, items, parts1, slots, unit_rows = (compat.sym() for _ in range(9))
    f32, i32 = (lambda *shape, t=t: compat.contiguous(t, shape, 4) for t in (Float32, Int32))
    return SumRows(spec), dict(
        cache=compat.rows(BF16, (pages, spec.page_size, HEAD_DIM_QK)), block_table=i32(b, width),
        cache_seqlens=i32(b), part_begin=i32(parts1), row_limits=i32(compat.sym()),
        work_items=compat.contiguous(Int32, (items, ITEM_WORDS)),
        out=f32(b, s_q, h, KV_LORA_RANK), lse=f32(b, h, s_q),
        o_accum=compat.contiguous(F16, (slots, unit_rows, PARTIAL_ROW)),
        lse_accum=f32(slots, unit_rows), causal=Int32(1),
    )  # fmt: skip


class SumRows:
    def __init__(self, spec):
        self.rows, self.work = spec.row_tile, WorkList(spec.page_size, TILE)
        self.loads = PagedTma(FORMAT, self.work, rows=self.rows, stages=STAGES,
                              readers={"adders": ADDERS})  # fmt: skip

    def layout(self):
        return helpers.make_smem_layout_b(ROW_MAJOR, (64, TILE, HEAD_DIM_QK), BF16, STAGES)

    @cute.jit
    def __call__(self, cache: cute.Tensor, block_table: cute.Tensor, cache_seqlens: cute.Tensor,
                 part_begin: cute.Tensor, row_limits: cute.Tensor, work_items: cute.Tensor,
                 out: cute.Tensor, lse: cute.Tensor, o_accum: cute.Tensor, lse_accum: cute.Tensor,
                 causal: Int32, stream):  # fmt: skip
        ring = array(BF16, cute.cosize(self.layout()), 1024)
        self.Storage = struct_of(**self.loads.fields, kv=ring)
        b, s_q, h, _ = out.shape
        divisors = compat.fast_divisor(h), compat.fast_divisor(s_q)
        self.kernel(
            self.loads.source((cache,), (self.layout(),)), cache.shape[0],
            Work(block_table, cache_seqlens, work_items, part_begin, row_limits),
            Results(out, lse, o_accum, lse_accum),
            Call(*divisors, b * s_q * h, Int32(0), Float32(1.0), causal, Float32(1.0), Float32(0)),
        ).launch(grid=(cute.ceil_div(o_accum.shape[1], self.rows), cute.size(part_begin) - 1, 1),
                 block=(384, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(self, loaded: tuple, num_pages: Int32, work: Work, results: Results, call: Call):
        _, part, _ = cute.arch.block_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        st = cutlass.memory.SmemAllocator().allocate(self.Storage)
        k_pipe = self.loads.pipe(st)
        span = self.work.work_tiles_of(work, part)
        if warp_id < 4:
            feed = Feed(st, (self.layout(),), k_pipe, Cache(loaded, num_pages), work, call, part)
            self.loads.run(warp_id, feed, None, None)
        else:
            self.add(st, k_pipe, work, results, call, span)

    @cute.jit
    def add(self, st, k_pipe, work, results, call, span):
        channel = (cute.arch.thread_idx()[0] - 128) * 2
        tokens_s = staged(st.kv, self.layout())
        total = cute.make_rmem_tensor((2, self.rows), Float32)
        limit = cute.make_rmem_tensor((self.rows,), Int32)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, split = self.work.work_tile_at(work, i)
            rows = self.work.rows_at(work, call, i, batch, self.rows)
            for r in cutlass.range_constexpr(self.rows):
                _, limit[r] = self.work.row_facts(work, call, batch, rows.first + r, rows.end)
            total.fill(0.0)
            for tile in cutlass.range(first, last, unroll=1):
                k_pipe.consumer_wait(kst)
                for token in cutlass.range(TILE, unroll=1):
                    for c in cutlass.range_constexpr(2):
                        x = tokens_s[token, channel + c, kst.index].to(Float32)
                        for r in cutlass.range_constexpr(self.rows):
                            seen = tile * TILE + token < limit[r]
                            total[c, r] = total[c, r] + (x if seen else Float32(0.0))
                cute.arch.sync_warp()
                k_pipe.consumer_release(kst)
                kst.advance()
            for r in cutlass.range_constexpr(self.rows):
                if channel == 0:
                    finish_row(results, call, split, rows, r, Float32(1.0), 0.0)
                shared = Shared((1, 2, 4), channel, 1, channel % 16 == 0)  # of eight lanes
                held = [Held(r, {0: total[None, r]})]
                write_rows(results, split, rows, (0, channel), held, shared)

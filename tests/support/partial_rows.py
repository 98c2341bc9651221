"""Programs that write fp32 rows as partial rows, as decode pipelines do at the end of an item.

    narrow  a thread has 2 channels; 8 lanes share the exponent of 16     (o_accum of 16)
    warp    likewise, and a warp shares the exponent of 64                (of 64)
    thread  a thread has 128 channels and their exponent                  (of 128)

Built as ``tests.support.dsl_program`` says.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from dsl_kernels.combine.epilogue import Held, Results, Shared, write_rows
from dsl_kernels.formats.dims import KV_LORA_RANK, PARTIAL_ROW
from dsl_kernels.load.work_list import Rows
from tests.support.dsl_program import command, fake


class PartialRows:
    @cute.jit
    def __call__(self, x: cute.Tensor, narrow: cute.Tensor, warp: cute.Tensor, thread: cute.Tensor,
                 stream):  # fmt: skip
        for channels, o_accum in ((16, narrow), (64, warp), (128, thread)):
            threads = KV_LORA_RANK // (128 if channels == 128 else 2)
            self.kernel(channels, x, o_accum).launch(
                grid=(x.shape[1], x.shape[0], 1), block=(threads, 1, 1), stream=stream
            )

    @cute.kernel
    def kernel(self, channels: cutlass.Constexpr, x: cute.Tensor, o_accum: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        row, split, _ = cute.arch.block_idx()
        run, runs = const_expr(8 if channels == 128 else 2), {}
        first = tidx * const_expr(128 if channels == 128 else 2)
        for c in cutlass.range_constexpr(0, 128 if channels == 128 else 2, run):
            values = cute.make_rmem_tensor((run,), Float32)
            for v in cutlass.range_constexpr(run):
                values[v] = x[split, row, first + c + v]
            runs[c] = values
        lane_bits = {16: (1, 2, 4), 64: (1, 2, 4, 8, 16), 128: ()}[channels]
        shared = Shared(lane_bits, first, {16: 1, 64: 4, 128: 8}[channels], first % channels == 0)
        zero = Int32(0)
        rows = Rows(zero, x.shape[1], zero, zero)
        results = Results(x, x, o_accum, x)
        write_rows(results, split, rows, (row, first), [Held(0, runs)], shared)


if __name__ == "__main__":
    slots, rows = cute.sym_int(), cute.sym_int()
    partial = fake(Float16, slots, rows, PARTIAL_ROW)
    command("partial_rows", PartialRows(), (
        fake(Float32, slots, rows, KV_LORA_RANK), partial, partial, partial,
    ))  # fmt: skip

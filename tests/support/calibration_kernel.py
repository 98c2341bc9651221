"""A kernel that never changes, compiled to learn how fast a machine compiles.

It shares nothing with the kernels of ``dsl_kernels``, so
that no edit of theirs moves the unit of ``tests.support.calibration``; importing it needs the
compiler.
"""

from __future__ import annotations

import time

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

THREADS, STEPS = 128, 24


@cute.kernel
def _kernel(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row = block * THREADS + thread
    total = Float32(0.0)
    for step in cutlass.range_constexpr(STEPS):
        value = x[row, step]
        if value > total:
            total = total * Float32(0.5) + value
        else:
            total = total - value * Float32(step + 1)
    out[row] = total
    cute.arch.barrier()
    if thread == Int32(0):
        out[row] = total + out[row + 1]


@cute.jit
def _program(x: cute.Tensor, out: cute.Tensor, stream):
    _kernel(x, out).launch(grid=(8, 1, 1), block=(THREADS, 1, 1), stream=stream)


def _fake(*shape: int):
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(Float32, shape, stride_order=order, assumed_align=16)


def compile_once() -> float:
    """CPU seconds of one compile."""
    started = time.process_time()
    arguments = (_fake(1032, STEPS), _fake(1032), make_fake_stream(use_tvm_ffi_env_stream=True))
    cute.compile(_program, *arguments, options="--enable-tvm-ffi")
    return time.process_time() - started

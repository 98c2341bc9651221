"""scale_rows: out = x * scale of rows, the device half of scale_rows.py.

Roles           a CTA owns a row; its threads stride over the columns
Shared memory   none
Timeline        wait for the previous grid | load, multiply, store
"""

from __future__ import annotations

import cutlass
from cutlass import cute

from dsl_kernels.blocks import compat

THREADS = 32


@cute.jit
def scale_rows(x: cute.Tensor, scale: cute.Tensor, out: cute.Tensor, stream):
    _rows(x, scale, out).launch(
        grid=(x.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
    )


@cute.kernel
def _rows(x: cute.Tensor, scale: cute.Tensor, out: cute.Tensor):
    row, _, _ = cute.arch.block_idx()
    compat.pdl_wait()
    for column in cutlass.range(cute.arch.thread_idx()[0], x.shape[1], THREADS, unroll=1):
        out[row, column] = x[row, column] * scale[row]


def build(spec):
    f32, n, width = compat.DTYPES["f32"], compat.sym(name="n"), compat.sym(name="width")
    x, out = (compat.rows(f32, (n, width), align=4) for _ in range(2))
    return scale_rows, {"x": x, "scale": compat.vector(f32, n), "out": out}

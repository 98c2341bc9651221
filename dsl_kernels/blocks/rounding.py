"""fp32 arithmetic whose rounding is written down.

Of ``x * y + z`` LLVM and ptxas may make one instruction or two, each as it likes.  The software GPU
runs what LLVM wrote, so where ptxas chose otherwise its bits are not the GPU's.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32

from .compat import dsl_user_op, inline_ptx


@dsl_user_op
def fma(x: Any, y: Any, z: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """x * y + z, rounded once."""
    return inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32], read_only_args=[x, y, z], loc=loc, ip=ip,
    )  # fmt: skip

"""Views and issue helpers that every WGMMA kernel of ours needs."""

from __future__ import annotations

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ..common.types import U16


def tiled_mma(dtype, n: int, a_in_registers: bool = False):
    """m64 x n WGMMA of one warpgroup, both operands K-major, fp32 accumulator."""
    k = OperandMajorMode.K
    shape = ((1, 1, 1), (64, n))
    if a_in_registers:
        return sm90.make_trivial_tiled_mma(
            dtype, dtype, k, k, Float32, *shape, warpgroup.OperandSource.RMEM
        )
    return sm90.make_trivial_tiled_mma(dtype, dtype, k, k, Float32, *shape)


def issue(mma, acc, rA, rB, *, accumulate: bool, first: int = 0, last: int | None = None) -> None:
    """Issues the WGMMAs of k blocks ``first``..``last``; ``accumulate`` is a Python bool.

    The atom is made afresh each time: its accumulate flag is mutable, and a flag that changes
    across run-time control flow breaks dominance in the compiler's IR.
    """
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(first, cute.size(rB.shape[2]) if last is None else last):
        cute.gemm(atom, acc, rA[None, None, k], rB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)


def u16_view(t, swizzle):
    """16-bit view of 8-bit shared memory (``recast_tensor`` would drop the pointer's swizzle)."""
    return cute.make_tensor(
        cute.recast_ptr(t.iterator, swizzle, dtype=U16), cute.recast_layout(16, 8, t.layout)
    )

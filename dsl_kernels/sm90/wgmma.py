"""Views and issue helpers that every WGMMA kernel of ours needs."""

from __future__ import annotations

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ..blocks.compat import dsl_user_op, undefined
from ..blocks.types import BF16, F8, U16

# High word of a shared-memory descriptor: 128-byte swizzle, 1024 bytes between groups of 8 rows.
DESCRIPTOR_HIGH = 0x40000040
KIND = {F8: ("k32.f32.e4m3.e4m3", ""), BF16: ("k16.f32.bf16.bf16", ", 0, 0")}  # K-major both


def tiled_mma(dtype, n: int, a_in_registers: bool = False, *, a_mn=False, b_mn=False):
    """m64 x n WGMMA of one warpgroup, fp32 accumulator; operands K-major, or MN-major where told,
    which 16-bit types may be."""
    a, b = (OperandMajorMode.MN if mn else OperandMajorMode.K for mn in (a_mn, b_mn))
    shape = ((1, 1, 1), (64, n))
    if a_in_registers:
        return sm90.make_trivial_tiled_mma(
            dtype, dtype, a, b, Float32, *shape, warpgroup.OperandSource.RMEM
        )
    return sm90.make_trivial_tiled_mma(dtype, dtype, a, b, Float32, *shape)


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


def low_word(field):
    """Low word of the descriptor of a storage field's first byte: address / 16, leading offset 1
    (unused with a swizzle).  Byte offsets / 16 may be added to it."""
    return ((field.data_ptr().toint() >> 4) & 0x3FFF) | 0x10000


@dsl_user_op
def issue_words(acc, a, b, dtype, *, accumulate: bool, loc=None, ip=None) -> None:
    """One m64n64 WGMMA of K-major operands in shared memory with the 128-byte swizzle.

    ``a``, ``b``: low words of their descriptors.  With the high word a constant, an instruction
    takes four instructions of the uniform path instead of seven.  Without ``accumulate`` the old
    values of ``acc`` are no operands, so that their registers are free until here.
    """
    f32, n = Float32.mlir_type, cute.size(acc)
    kind, major = KIND[dtype]
    registers = ", ".join(f"${i}" for i in range(n))
    code = (
        "{\n.reg .b64 da, db;\n.reg .pred p;\n"
        f"mov.b64 da, {{${n}, ${n + 2}}};\nmov.b64 db, {{${n + 1}, ${n + 2}}};\n"
        f"setp.ne.b32 p, {int(accumulate)}, 0;\n"
        f"wgmma.mma_async.sync.aligned.m64n64{kind} {{{registers}}}, da, db, p, 1, 1{major};\n}}"
    )
    words = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b, Int32(DESCRIPTOR_HIGH))]
    old = [
        (acc[v] if accumulate else undefined(Float32)).ir_value(loc=loc, ip=ip) for v in range(n)
    ]
    out = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * n), words + old, code,
        ",".join(["=f"] * n + ["r"] * 3 + [str(i) for i in range(n)]),
        has_side_effects=True, loc=loc, ip=ip,
    )  # fmt: skip
    for v in range(n):
        acc[v] = Float32(llvm.extractvalue(f32, out, [v], loc=loc, ip=ip))

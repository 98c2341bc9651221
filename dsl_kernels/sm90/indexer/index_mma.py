"""The product of a page with a unit's queries, and the sum over heads of one tile.

    acc[t, n] = k[t] . q[n]          tokens on M, one WGMMA m64nN a 32 channels, n: row and head
    sum[r, t] = sum_h w[r, h] * max(acc[t, (r, h)], 0)

A thread of quad lane c holds, of two tokens, columns 8 j + 2 c + e.  Column 16 i + 8 y + 2 c + e
is head 16 i + 4 c + 2 y + e (index_logits.py has Q brought in that order): four heads side by side,
whose weights are one load of 16 bytes.

Order of a row's sum, the same in every variant of as many heads: a thread adds its heads of each
parity in ascending order, then the two sums, then its neighbour's in the quad, then the other
pair's.  So the bits of a score follow from its row and its token alone.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, select_
from cutlass._mlir.dialects import llvm

from ...blocks.compat import dsl_user_op
from ...blocks.rounding import fma
from ...indexer.index_ptx import relu
from ..wgmma import DESCRIPTOR_HIGH

STEPS = 4  # of 32 channels
STEP = 2  # between them in descriptor words


@dsl_user_op
def product(acc, a, b, *, loc=None, ip=None) -> None:
    """Issues acc = K Q^T over all 128 channels; rows of 128 bytes with the 128-byte swizzle.

    ``a``, ``b``: low words of the tiles' descriptors (wgmma.low_word).  One statement for the four
    instructions: their registers are results only, so no old value is kept or cleared.
    """
    f32, size = Float32.mlir_type, cute.size(acc)
    registers = ", ".join(f"${i}" for i in range(size))
    lines = ["{", ".reg .b64 da, db;", ".reg .b32 a, b;", ".reg .pred p;"]
    for step in range(STEPS):
        lines += [
            f"add.s32 a, ${size}, {step * STEP};",
            f"add.s32 b, ${size + 1}, {step * STEP};",
            f"mov.b64 da, {{a, ${size + 2}}};",
            f"mov.b64 db, {{b, ${size + 2}}};",
            f"setp.ne.b32 p, {int(step > 0)}, 0;",
            f"wgmma.mma_async.sync.aligned.m64n{2 * size}k32.f32.e4m3.e4m3 {{{registers}}}, "
            "da, db, p, 1, 1;",
        ]
    words = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b, Int32(DESCRIPTOR_HIGH))]
    out = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * size), words, "\n".join([*lines, "}"]),
        ",".join(["=f"] * size + ["r"] * 3), has_side_effects=True, loc=loc, ip=ip,
    )  # fmt: skip
    for v in range(size):
        acc[v] = Float32(llvm.extractvalue(f32, out, [v], loc=loc, ip=ip))


def row_sums(acc, row: int, heads: int, weights):
    """This thread's share of a row's sum for each of its two tokens.

    ``weights(i)``: those of its heads 16 i ... of the row, four.
    """
    sums = [[None, None], [None, None]]  # token, parity of the head
    for i in range(heads // 16):
        w = weights(i)
        for y in range(2):
            for v in range(4):
                token, parity = v // 2, v % 2
                x = relu(acc[row * (heads // 2) + 8 * i + 4 * y + v])
                by, old = w[2 * y + parity], sums[token][parity]
                sums[token][parity] = x * by if old is None else fma(x, by, old)
    return [even + odd for even, odd in sums]


def deal(sums, lane):
    """Sums over the quad, dealt to its lanes: [x] is row 2 x + lane // 2 % 2 and token
    8 * (lane % 2) of the two; of a single row each is in two lanes.

    ``sums``: of each row, what ``row_sums`` gave.
    """
    odd, upper = (lane & 1) != 0, (lane & 2) != 0
    halves = [_exchange(low, high, odd, 1) for low, high in sums]
    if len(halves) == 1:
        return [halves[0] + cute.arch.shuffle_sync_bfly(halves[0], 2)]
    pairs = zip(halves[::2], halves[1::2], strict=True)
    return [_exchange(a, b, upper, 2) for a, b in pairs]


def _exchange(low, high, takes_high, distance: int):
    """Own and partner's ``low``, or ``high``, added: each lane of a pair keeps one."""
    keep = Float32(select_(takes_high, high, low))
    give = Float32(select_(takes_high, low, high))
    return keep + cute.arch.shuffle_sync_bfly(give, distance)

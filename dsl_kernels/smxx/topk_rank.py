"""``select_topk`` where one CTA has a row: the keys of the threshold's bin are ranked at once.

The first pass has bins of 13 bits, sixteen to a power of two: of 8192 scores some eighty share the
bin of the 2048th, as a rule.  A key's lower 19 bits and its column are one word, so that words in
descending order are scores as a stable sort has them.  A warp takes a word and counts those above
it, eight a lane: no further pass, no ties to be told apart, five barriers less.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

from .. import compat
from . import quant, topk_keys
from .prefix_sum import warp_scan
from .topk_keys import CHUNK, COLUMN, LISTED, Row, address

RANKED = 256  # keys of the bin, at most
WORDS = RANKED // quant.WARP  # a lane
REST = 19  # bits of a key below its bin
LAST_COLUMN = (1 << COLUMN) - 1


@compat.dsl_user_op
def _inside(rest: Any, count: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """``count``, and one more if a key that is ``rest`` above the bin's lowest is in the bin."""
    return compat.inline_ptx(
        f"{{\n.reg .pred p;\nsetp.lt.u32 p, {{$r0}}, {1 << REST};\nmov.b32 {{$w0}}, {{$r1}};\n"
        "@p add.s32 {$w0}, {$w0}, 1;\n}",
        write_only_types=[Int32], read_only_args=[rest, count], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def _append(rest: Any, column: Any, at: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Writes the word of a key in the bin to ``at``; where the next one goes."""
    return compat.inline_ptx(
        f"{{\n.reg .pred p;\n.reg .b32 a;\nsetp.lt.u32 p, {{$r0}}, {1 << REST};\n"
        f"shl.b32 a, {{$r0}}, {COLUMN};\nsub.u32 a, a, {{$r1}};\nadd.u32 a, a, {LAST_COLUMN};\n"
        "@p st.shared.b32 [{$r2}], a;\nmov.b32 {$w0}, {$r2};\n@p add.s32 {$w0}, {$w0}, 4;\n}",
        write_only_types=[Int32], read_only_args=[rest, column, at], loc=loc, ip=ip,
    )  # fmt: skip


@cute.jit
def mark(
    shape: cutlass.Constexpr, sm: Any, keys: cute.Tensor, row: Row, found: Uint32, left: Int32
) -> None:
    """Sets the bits of selected columns: of keys above the bin ``found``, and of the first ``left``
    of its keys, of which there are ``RANKED`` at most.  Words of the bin's keys are in the list's
    place, which this path does not use otherwise."""
    _above(shape, sm, keys, row, found << REST)
    _words(shape, sm, keys, row, found << REST)
    cute.arch.sync_threads()
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    count = sm.sums[LISTED]
    others = cute.make_rmem_tensor((WORDS,), Uint32)
    for m in cutlass.range_constexpr(WORDS):
        others[m] = Uint32(0)
        if lane + m * quant.WARP < count:
            others[m] = _word(sm, lane + m * quant.WARP)
    for i in cutlass.range(warp, count, shape.warps, unroll=1):
        word, ahead = _word(sm, i), Int32(0)
        for m in cutlass.range_constexpr(WORDS):
            ahead += Int32(others[m] > word)
        ahead = cute.arch.warp_redux_sync(ahead, "add")
        if (lane == 0) & (ahead < left):
            column = LAST_COLUMN - Int32(word & LAST_COLUMN)
            topk_keys.set_bits(address(sm.bits, 0), column >> 5, Uint32(1) << (column & 31))


def _word(sm: Any, index: Any) -> Any:
    return sm.list[index // 2, index % 2]


@cute.jit
def _above(
    shape: cutlass.Constexpr, sm: Any, keys: cute.Tensor, row: Row, least: Uint32
) -> None:
    """Stores the bits of columns whose keys are above the bin that begins with ``least``."""
    tidx, _, _ = cute.arch.thread_idx()
    lane, highest = tidx % quant.WARP, least | ((1 << REST) - 1)
    for c in cutlass.range_constexpr(shape.window):
        if row.chunks > c:
            bits = Uint32(0)
            for j in cutlass.range_constexpr(4):
                over = keys[4 * c + j] > highest
                bits |= Uint32(cutlass.select_(over, Uint32(1 << j), Uint32(0)))
            word = (row.place >> 5) + c * (CHUNK // 32)
            topk_keys.put_word(sm.bits, word, bits << (row.place & 31), lane)


@cute.jit
def _words(
    shape: cutlass.Constexpr, sm: Any, keys: cute.Tensor, row: Row, least: Uint32
) -> None:
    """Appends the words of the bin's keys, in any order."""
    tidx, _, _ = cute.arch.thread_idx()
    lane, count = tidx % quant.WARP, Int32(0)
    for c in cutlass.range_constexpr(shape.window):
        if row.chunks > c:
            for j in cutlass.range_constexpr(4):
                count = _inside(keys[4 * c + j] - least, count)
    upto = warp_scan(count, lane)
    begin = Int32(0)
    if (lane == quant.WARP - 1) & (upto > 0):
        begin = Int32(cute.arch.atomic_add(sm.sums.iterator + LISTED, upto, scope="cta"))
    begin = cute.arch.shuffle_sync(begin, quant.WARP - 1)
    if cute.arch.shuffle_sync(upto, quant.WARP - 1) > 0:
        at = address(sm.list, 0) + (begin + upto - count) * 4
        for c in cutlass.range_constexpr(shape.window):
            if row.chunks > c:
                for j in cutlass.range_constexpr(4):
                    column = row.place + (c * CHUNK + j)
                    at = _append(keys[4 * c + j] - least, column, at)

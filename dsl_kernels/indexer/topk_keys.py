"""The scores of a row as ordered keys, and the sweeps of ``select_topk`` over them.

A key is 32 bits that compare unsigned as scores do: x + 0.0 makes -0 zero and any NaN 0x7fffffff;
then a negative number's bits are all turned, of others the sign.  0 is no score's key.

A lane holds four neighbouring columns of each chunk of 128, so a warp's loads are whole lines.
Columns are counted from the last multiple of 16 bytes at or before the row's first score, wherever
in memory that is, so that loads of 16 bytes may begin there.  The two quads that a row may share
with what lies around it are read by single words.  What is behind
the row's end in its last chunk has the key of -inf: it ties behind all scores of the row, of which
there are more than k, and is never selected.  What is before ``start`` has key 0.

Sweeps are predicated, without a branch around an atomic or a store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ..blocks import compat, quant
from ..blocks.prefix_sum import warp_scan
from ..formats.topk_share import share

CHUNK = 128  # columns of a warp's load
WINDOW = 16  # keys a thread where none stay in registers
BINS = 2048
LISTED_BY = 6  # entries of the list for each thread
MOST_POSITIONS = 2048  # selected of a row, the largest k
MINUS_INFINITY = 0xFF800000


@dataclass(frozen=True)
class Shape:
    """Compile-time sizes of a variant.

    Attributes:
        threads: of a CTA.
        keys: of a thread that stay in registers; 0: none.
        cluster: CTAs that share a row.
    """

    threads: int
    keys: int
    cluster: int

    @property
    def streams(self) -> bool:
        """True if no keys stay in registers: every sweep reads memory."""
        return self.keys == 0

    @property
    def alone(self) -> Shape:
        """Shape for rows that fit one CTA's registers, in a variant that streams longer ones."""
        return Shape(self.threads, WINDOW, 1)

    @property
    def warps(self) -> int:
        return self.threads // quant.WARP

    @property
    def window(self) -> int:
        """Chunks that are in registers at a time."""
        return (self.keys or WINDOW) // 4

    @property
    def share(self) -> int:
        """Columns of a CTA, at most."""
        return share(self.threads, self.keys, self.cluster)

    @property
    def words(self) -> int:
        """Words of a bitmap for each thread, at most: a power of two."""
        return 1 << (-(-self.share // (32 * self.threads)) - 1).bit_length()

    @property
    def ranks_at_once(self) -> int:
        """CTAs that are read from side by side: as many as registers beside the keys allow."""
        return min(self.cluster, 4 if self.keys == 32 else 8)

    @property
    def listed(self) -> int:
        """Entries of the list; twice as many positions fit, of which there are k at most."""
        return min(max(LISTED_BY * self.threads, MOST_POSITIONS // 2), self.share * 3 // 4)


class Row(NamedTuple):
    """A thread's part of a row of scores."""

    at: Any  # pointer to its first column
    left: Int32  # columns from there to the end of its warp's run
    head: Int32  # words before the row's first score that its first quad begins with
    chunks: Int32  # of its warp
    place: Int32  # its first column in the CTA's run
    begin: Int32  # position of the CTA's first column in the row, below 0 if that lies before it
    run: Int32  # chunks of each warp of the cluster, at most


@cute.jit
def words_shift(shape: cutlass.Constexpr, row: Row) -> Int32:
    """Two to this are the words of a bitmap that a thread owns: as few as the row needs."""
    shift = Int32(0)
    if cutlass.const_expr(shape.words > 1):
        per_word = 32 * quant.WARP // CHUNK  # chunks of a warp whose columns fill a word a thread
        shift = 32 - Int32(cute.arch.clz((row.run - 1) // per_word))
    return shift


@cute.jit
def row_of(shape: cutlass.Constexpr, logits: cute.Tensor, what: Any) -> Row:
    """A thread's part; what = (row, start, length, rank of its CTA)."""
    row, start, length, rank = what
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    begin = logits.iterator + (Int64(row) * logits.stride[0] + start)
    head = (Int32(begin.toint()) >> 2) & 3
    end = head + length
    warps = shape.warps * shape.cluster
    # chunks of a warp: as few as this length needs
    run = (((end + (CHUNK - 1)) // CHUNK) + (warps - 1)) // warps * CHUNK
    cta = rank * shape.warps * run
    place = warp * run + lane * 4
    first = cta + place
    chunks = cutlass.min(cutlass.max(end - (cta + warp * run) + (CHUNK - 1), 0), run) // CHUNK
    return Row(
        begin + (first - head), cutlass.min(end - first, run - lane * 4),
        Int32(cutlass.select_(first == 0, head, Int32(0))), chunks, place, cta - head,
        run // CHUNK,
    )  # fmt: skip


def window(shape: Shape) -> Any:
    """The registers of a thread's keys."""
    return cute.make_rmem_tensor((shape.window * 4,), Uint32)


@compat.dsl_user_op
def _load_quad(at: Any, left: Any, chunk: int, *, loc: Any = None, ip: Any = None) -> Any:
    """Four columns ``chunk`` chunks behind ``at``, or -inf where fewer than four are left."""
    pad = "".join(f"mov.b32 {{$w{i}}}, {MINUS_INFINITY:#x};\n" for i in range(4))
    return compat.inline_ptx(
        f"{{\n.reg .pred p;\nsetp.ge.s32 p, {{$r1}}, {chunk * CHUNK + 4};\n{pad}"
        f"@p ld.global.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        f"[{{$r0}}+{chunk * CHUNK * 4}];\n}}",
        write_only_types=[Uint32] * 4,
        read_only_args=[at, left],
        loc=loc,
        ip=ip,
    )


@compat.dsl_user_op
def _ordered(raw: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The key of a score."""
    return compat.inline_ptx(
        "{\n.reg .f32 x;\n.reg .b32 b, s;\nmov.b32 x, {$r0};\nadd.rn.f32 x, x, 0f00000000;\n"
        "mov.b32 b, x;\nshr.s32 s, b, 31;\nor.b32 s, s, 0x80000000;\nxor.b32 {$w0}, b, s;\n}",
        write_only_types=[Uint32],
        read_only_args=[raw],
        loc=loc,
        ip=ip,
    )


@cute.jit
def load(shape: cutlass.Constexpr, keys: cute.Tensor, row: Row, first: Any) -> None:
    """Loads the window's chunks, from chunk ``first`` on, as bits of scores."""
    left = row.left - first * CHUNK
    at = row.at + first * CHUNK
    hidden = Int32(0)  # columns of the first quad that are not the row's
    if first == 0:
        hidden = row.head
    for c in cutlass.range_constexpr(shape.window):
        enough = left
        if cutlass.const_expr(c == 0):
            enough = Int32(cutlass.select_(hidden > 0, Int32(0), left))
        quad = _load_quad(at, enough, c)
        for j in cutlass.range_constexpr(4):
            keys[4 * c + j] = quad[j]
    rest = left & (CHUNK - 1)
    if ((left > 0) & (left < shape.window * CHUNK) & (rest > 0) & (rest < 4)) | (hidden > 0):
        _load_ragged(shape, keys, at, left, hidden)


@cute.jit
def _load_ragged(
    shape: cutlass.Constexpr, keys: cute.Tensor, at: Any, left: Int32, hidden: Int32
) -> None:
    """Words of the quads that are not all the row's: the one that ``left`` ends in, and the first
    without its ``hidden`` columns."""
    for c in cutlass.range_constexpr(shape.window):
        here = (left > c * CHUNK) & (left < c * CHUNK + 4)
        low = Int32(0)
        if cutlass.const_expr(c == 0):
            here = here | (hidden > 0)
            low = hidden
        if here:
            for j in cutlass.range_constexpr(4):
                if (left > c * CHUNK + j) & (low <= j):
                    keys[4 * c + j] = compat.load_words(at + (c * CHUNK + j), 1)[0]


@cute.jit
def order(shape: cutlass.Constexpr, keys: cute.Tensor, row: Row, first: Any) -> None:
    """Bits of scores become keys; 0 in chunks that the warp does not have."""
    live = row.chunks - first
    for c in cutlass.range_constexpr(shape.window):
        if live > c:
            for j in cutlass.range_constexpr(4):
                keys[4 * c + j] = _ordered(keys[4 * c + j])
    if (row.head > 0) & (first == 0):
        for j in cutlass.range_constexpr(3):
            if row.head > j:
                keys[j] = Uint32(0)


# ---------------------------------------------------------------------------- sweeps


@compat.dsl_user_op
def _count(key: Any, table: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Counts a key in the histogram of upper bits."""
    compat.inline_ptx(
        "{\n.reg .b32 a;\nshr.u32 a, {$r0}, 21;\nmad.lo.u32 a, a, 4, {$r1};\n"
        "red.shared.add.u32 [a], 1;\n}",
        read_only_args=[key, table], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def _count_in(
    key: Any, table: Any, prefix: Any, lowest: Any, digits: tuple[int, int, int], *,
    loc: Any = None, ip: Any = None,
) -> None:  # fmt: skip
    """Counts a key whose upper bits are ``prefix``, unless it is ``lowest`` of them; digits = (bits
    below the prefix, bits below the bin, mask of the bin).

    Bin 0 has what the counts leave of the keys with that prefix.  Where thousands of scores tie
    they are zeros as a rule, the lowest of their bin, and additions to one word take turns.
    """
    above, shift, mask = digits
    compat.inline_ptx(
        "{\n.reg .pred p;\n.reg .b32 a, b;\n"
        f"shr.u32 b, {{$r0}}, {above};\nsetp.eq.u32 p, b, {{$r2}};\n"
        "setp.ne.and.u32 p, {$r0}, {$r3}, p;\n"
        f"shr.u32 a, {{$r0}}, {shift};\nand.b32 a, a, {mask};\nmad.lo.u32 a, a, 4, {{$r1}};\n"
        "@p red.shared.add.u32 [a], 1;\n}",
        read_only_args=[key, table, prefix, lowest], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def _at_least(key: Any, least: Any, count: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """``count``, and one more if the key is ``least`` or above."""
    return compat.inline_ptx(
        "{\n.reg .pred p;\nsetp.ge.u32 p, {$r0}, {$r1};\nmov.b32 {$w0}, {$r2};\n"
        "@p add.s32 {$w0}, {$w0}, 1;\n}",
        write_only_types=[Int32], read_only_args=[key, least, count], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def _append(key: Any, least: Any, place: Any, at: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Writes (key, place) to ``at`` if the key is ``least`` or above; where the next one goes."""
    return compat.inline_ptx(
        "{\n.reg .pred p;\nsetp.ge.u32 p, {$r0}, {$r1};\n"
        "@p st.shared.v2.b32 [{$r3}], {{$r0}, {$r2}};\nmov.b32 {$w0}, {$r3};\n"
        "@p add.s32 {$w0}, {$w0}, 8;\n}",
        write_only_types=[Int32], read_only_args=[key, least, place, at], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def _set_bits(table: Any, word: Any, bits: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Sets bits, if there are any, of a word of a bitmap."""
    compat.inline_ptx(
        "{\n.reg .pred p;\n.reg .b32 a;\nsetp.ne.u32 p, {$r2}, 0;\n"
        "mad.lo.u32 a, {$r1}, 4, {$r0};\n@p red.shared.or.b32 [a], {$r2};\n}",
        read_only_args=[table, word, bits], loc=loc, ip=ip,
    )  # fmt: skip


@cute.jit
def _again(shape: cutlass.Constexpr, keys: cute.Tensor, row: Row, first: Any) -> None:
    """The window's keys, for a sweep that is not the first over them."""
    if cutlass.const_expr(shape.streams):
        load(shape, keys, row, first)
        order(shape, keys, row, first)


@cute.jit
def count_upper(shape: cutlass.Constexpr, sm: Any, keys: cute.Tensor, row: Row) -> None:
    """Orders all keys and counts their upper 11 bits."""
    table = address(sm.hist, 0)
    if cutlass.const_expr(shape.streams):
        for first in cutlass.range(0, row.chunks, shape.window, unroll=1):
            _again(shape, keys, row, first)
            _count_window(shape, keys, row.chunks - first, table)
    else:
        order(shape, keys, row, 0)
        _count_window(shape, keys, row.chunks, table)


@cute.jit
def _count_window(shape: cutlass.Constexpr, keys: cute.Tensor, live: Int32, table: Int32) -> None:
    for c in cutlass.range_constexpr(shape.window):
        if live > c:
            for j in cutlass.range_constexpr(4):
                _count(keys[4 * c + j], table)


@compat.dsl_user_op
def _score_at(key: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The lowest score with that key or a higher one; NaN, which no score is below, if all have."""
    return compat.inline_ptx(
        "{\n.reg .pred p;\n.reg .b32 k, a, b;\nmin.u32 k, {$r0}, 0xff800000;\n"
        "xor.b32 a, k, 0x80000000;\nnot.b32 b, k;\nsetp.ge.u32 p, k, 0x80000000;\n"
        "selp.b32 {$w0}, a, b, p;\n}",
        write_only_types=[Uint32], read_only_args=[key], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def _not_below(raw: Any, bound: Any, count: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """``count``, and one more unless the score is below the bound."""
    return compat.inline_ptx(
        "{\n.reg .pred p;\n.reg .f32 x, y;\nmov.b32 x, {$r0};\nmov.b32 y, {$r1};\n"
        "setp.geu.f32 p, x, y;\nmov.b32 {$w0}, {$r2};\n@p add.s32 {$w0}, {$w0}, 1;\n}",
        write_only_types=[Int32], read_only_args=[raw, bound, count], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def _append_raw(
    raw: Any, bound: Any, place: Any, at: Any, *, loc: Any = None, ip: Any = None
) -> Any:
    """Writes (score, place) to ``at`` unless it is below the bound; where the next one goes."""
    return compat.inline_ptx(
        "{\n.reg .pred p;\n.reg .f32 x, y;\nmov.b32 x, {$r0};\nmov.b32 y, {$r1};\n"
        "setp.geu.f32 p, x, y;\n@p st.shared.v2.b32 [{$r3}], {{$r0}, {$r2}};\n"
        "mov.b32 {$w0}, {$r3};\n@p add.s32 {$w0}, {$w0}, 8;\n}",
        write_only_types=[Int32], read_only_args=[raw, bound, place, at], loc=loc, ip=ip,
    )  # fmt: skip


@cute.jit
def collect(shape: cutlass.Constexpr, sm: Any, keys: cute.Tensor, row: Row, least: Uint32) -> None:
    """Appends keys that are ``least`` or above to the list, with their columns; of rows that are
    streamed scores as they are.

    Its length counts those too for which there was no room.
    """
    if cutlass.const_expr(shape.streams):
        bound = _score_at(least)
        for first in cutlass.range(0, row.chunks, shape.window, unroll=1):
            load(shape, keys, row, first)
            here = (row.chunks - first, row.place + first * CHUNK)
            _collect_window(shape, sm, keys, here, (_not_below, _append_raw, bound))
    else:
        here = (row.chunks, row.place)
        _collect_window(shape, sm, keys, here, (_at_least, _append, least))


@cute.jit
def _room(shape: cutlass.Constexpr, sm: Any, count: Int32) -> tuple[Int32, Any]:
    """(index in the list of this lane's first of ``count`` entries, whether its warp has any and
    there is room for them)."""
    tidx, _, _ = cute.arch.thread_idx()
    lane = tidx % quant.WARP
    upto = warp_scan(count, lane)
    begin = Int32(0)
    if (lane == quant.WARP - 1) & (upto > 0):
        begin = Int32(cute.arch.atomic_add(sm.sums.iterator + LISTED, upto, scope="cta"))
    begin = cute.arch.shuffle_sync(begin, quant.WARP - 1)
    of_warp = cute.arch.shuffle_sync(upto, quant.WARP - 1)
    room = (of_warp > 0) & (begin + of_warp <= shape.listed)
    return begin + upto - count, room


@cute.jit
def _collect_window(
    shape: cutlass.Constexpr, sm: Any, keys: cute.Tensor, here: Any, by: Any
) -> None:
    """here = (chunks of the warp from the window's first on, column of the thread's first key);
    by = (what counts, what appends, bound of both)."""
    live, place = here
    counted, append, least = by
    count = Int32(0)
    for c in cutlass.range_constexpr(shape.window):
        if live > c:
            for j in cutlass.range_constexpr(4):
                count = counted(keys[4 * c + j], least, count)
    index, room = _room(shape, sm, count)
    if room:
        at = address(sm.list, 0) + index * 8
        for c in cutlass.range_constexpr(shape.window):
            if live > c:
                for j in cutlass.range_constexpr(4):
                    at = append(keys[4 * c + j], least, place + (c * CHUNK + j), at)


@cute.jit
def listed_key(shape: cutlass.Constexpr, sm: Any, row: Row, index: Int32) -> Uint32:
    """The key of an entry of the list."""
    key = sm.list[index, 0]
    if cutlass.const_expr(shape.streams):
        key = _ordered(key)
        if row.begin + Int32(sm.list[index, 1]) < 0:  # before the row's first score
            key = Uint32(0)
    return key


@cute.jit
def count_in(shape: cutlass.Constexpr, sm: Any, keys: cute.Tensor, row: Row, what: Any) -> None:
    """Counts the next digit of keys with a prefix; what = (pass, prefix, length of the list)."""
    number, prefix, listed = what
    digits = DIGITS[number]
    table = address(sm.hist, number * BINS)
    lowest = prefix << digits[0]
    if listed <= shape.listed:
        tidx, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(tidx, listed, shape.threads, unroll=1):
            _count_in(listed_key(shape, sm, row, i), table, prefix, lowest, digits)
    elif cutlass.const_expr(shape.streams):
        for first in cutlass.range(0, row.chunks, shape.window, unroll=1):
            _again(shape, keys, row, first)
            _count_in_window(shape, keys, row.chunks - first, (table, prefix, lowest, digits))
    else:
        _count_in_window(shape, keys, row.chunks, (table, prefix, lowest, digits))


@cute.jit
def _count_in_window(shape: cutlass.Constexpr, keys: cute.Tensor, live: Int32, what: Any) -> None:
    table, prefix, lowest, digits = what
    for c in cutlass.range_constexpr(shape.window):
        if live > c:
            for j in cutlass.range_constexpr(4):
                _count_in(keys[4 * c + j], table, prefix, lowest, digits)


@cute.jit
def mark(shape: cutlass.Constexpr, sm: Any, keys: cute.Tensor, row: Row, what: Any) -> None:
    """Sets bits of selected columns; what = (least key, whether it is one of ties, length of the
    list).  Keys above ``least``, without ties those at it too, go to bitmap 0, ties to bitmap 1."""
    least, ties, listed = what
    # with ties: above = least + 1, which is 0 behind NaN's key; so compared as "above least - tie"
    over = least - Uint32(1 - ties)
    if listed <= shape.listed:
        tidx, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(tidx, listed, shape.threads, unroll=1):
            key, place = listed_key(shape, sm, row, i), sm.list[i, 1]
            bit = Uint32(1) << (place & 31)
            above = Uint32(cutlass.select_(key > over, bit, Uint32(0)))
            tie = Uint32(cutlass.select_((key == least) & (ties != 0), bit, Uint32(0)))
            _set_bits(address(sm.bits, 0), place >> 5, above)
            _set_bits(address(sm.bits, shape.words * shape.threads), place >> 5, tie)
    elif cutlass.const_expr(shape.streams):
        for first in cutlass.range(0, row.chunks, shape.window, unroll=1):
            _again(shape, keys, row, first)
            here = (row.chunks - first, row.place + first * CHUNK)
            _mark_window(shape, sm, keys, here, (over, least, ties))
    else:
        _mark_window(shape, sm, keys, (row.chunks, row.place), (over, least, ties))


@cute.jit
def _mark_window(
    shape: cutlass.Constexpr, sm: Any, keys: cute.Tensor, here: Any, what: Any
) -> None:
    """here: as of ``_collect_window``."""
    live, place = here
    over, least, ties = what
    tidx, _, _ = cute.arch.thread_idx()
    lane, shift = tidx % quant.WARP, place & 31
    for c in cutlass.range_constexpr(shape.window):
        if live > c:
            above, tie = Uint32(0), Uint32(0)
            for j in cutlass.range_constexpr(4):
                key = keys[4 * c + j]
                above |= Uint32(cutlass.select_(key > over, Uint32(1 << j), Uint32(0)))
                tie |= Uint32(cutlass.select_(key == least, Uint32(1 << j), Uint32(0)))
            word = (place >> 5) + c * (CHUNK // 32)
            _put_word(sm.bits, word, above << shift, lane)
            if ties != 0:
                _put_word(sm.bits, shape.words * shape.threads + word, tie << shift, lane)


@cute.jit
def _put_word(bits: cute.Tensor, word: Any, mine: Uint32, lane: Int32) -> None:
    """A word of a bitmap, of which eight neighbouring lanes have four bits each.  A chunk's four
    words are one warp's, so they are stored, not added to."""
    whole = mine
    for distance in (1, 2, 4):
        whole |= Uint32(cute.arch.shuffle_sync_bfly(whole, distance))
    if lane % 8 == 0:
        bits[word] = whole


def address(tensor: Any, index: Any) -> Any:
    """Address in shared memory of a word."""
    return Int32((tensor.iterator + index).toint())


# (bits below the prefix, bits below the bin, mask of the bin) of each pass
DIGITS = ((32, 21, BINS - 1), (21, 10, BINS - 1), (10, 0, 1023))
LISTED = 4  # in ``sums``: entries of the list

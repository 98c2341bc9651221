"""mha_items: the list of work of dense MHA prefill, from lengths that stay on the device.

``work`` names every row tile of every sequence once, and says how many there are (mha_list.py): the
sequence first that sees the most keys, its row tiles from the last on, so that CTAs read the same K
and V at the same time.  Persistent CTAs take from its front, and what is left at the end is short.
Where keys may be split, it names every piece of a row tile, those that see the most keys first.
Of the backward there is a second list, of tiles of keys, the sequence of most rows first.

Roles        one CTA a list; a warp a sequence, a lane a row tile (a piece of one).
Memory       shared: ``BINS`` counts, which become places; sums of warps.
Timeline     wait for the previous grid | (split: which sequences are, prefix sums of their partial
             rows and row tiles) | count tiles by keys seen | prefix sum, longest first |
             each tile takes the next place of its count
Bytes moved  8 a sequence read twice, 8 a row tile written (16 a piece, 16 a split row tile).

A counting sort: sequences (pieces) that see equally many tiles of keys, or with more than ``BINS``
nearly so, come in any order, which no result depends on.  Lengths below 0 count as 0, and tiles
beyond the room of ``work`` are left out, so that no ``cu_seqlens`` makes it write elsewhere; nor is
a sequence split whose partial rows, or split row tiles, there is no room for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.memory
from cutlass import Int32, cute

from ..blocks import compat, quant
from ..blocks.prefix_sum import SUMS, THREADS, WARPS, scan
from ..formats.mha_list import (
    ENTRY_WORDS,
    HEADER,
    KEYS,
    LIST,
    PIECE_TILES,
    PIECES,
    ROWS,
    SPLITS,
    TILE_WORDS,
    TILES,
)

if TYPE_CHECKING:
    from ..spec import VariantSpec

BINS = 2 * THREADS  # a thread sums two


def key_tiles(s_q: Any, s_k: Any, tile: Any, causal: Any, keys: int = KEYS) -> Any:
    """Tiles of ``keys`` keys that some row of a row tile sees."""
    last = cutlass.select_(causal != 0, (tile + 1) * ROWS + s_k - s_q, s_k)
    seen = cutlass.max(cutlass.min(s_k, last), 0)
    return (seen + (keys - 1)) // keys


def length(cu_seqlens: Any, sequence: Any) -> Any:
    """Tokens of a sequence."""
    return cutlass.max(cu_seqlens[sequence + 1] - cu_seqlens[sequence], 0)


def pieces_of(s_q: Any, s_k: Any) -> Any:
    """Pieces that a sequence's keys are cut into; 1: it is not split."""
    splits = cutlass.min((s_k + (KEYS - 1)) // KEYS // PIECE_TILES, PIECES)
    row_tiles = cutlass.max((s_q + (ROWS - 1)) // ROWS, 1)
    return cutlass.max(splits // row_tiles, 1)


def piece_begin(s_k: Any, pieces: Any, piece: Any) -> Any:
    """The first tile of keys of a piece; of the piece behind the last, all tiles."""
    return (s_k + (KEYS - 1)) // KEYS * piece // pieces


@cute.jit
def mha_items(
    cu_seqlens_q: cute.Tensor,  # i32 (b + 1,)
    cu_seqlens_k: cute.Tensor,  # i32 (b + 1,)
    work: cute.Tensor,  # i32 (words,)
    causal: Int32,  # 0 or 1
    max_seqlen_k: Int32,  # makes counts coarser where it is long; nothing else depends on it
    stream: Any,
) -> None:
    """Host half: one CTA."""
    _list(cu_seqlens_q, cu_seqlens_k, work, causal, max_seqlen_k, None).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
    )


@cute.jit
def mha_split_items(
    cu_seqlens_q: cute.Tensor,  # i32 (b + 1,)
    cu_seqlens_k: cute.Tensor,  # i32 (b + 1,)
    work: cute.Tensor,  # i32 (words,)
    causal: Int32,  # 0 or 1
    max_seqlen_k: Int32,  # makes counts coarser where it is long; nothing else depends on it
    most_splits: Int32,  # room for row tiles that are split
    partial_rows: Int32,  # room for partial rows
    stream: Any,
) -> None:
    """Host half where keys may be split: one CTA."""
    room = (most_splits, partial_rows)
    _list(cu_seqlens_q, cu_seqlens_k, work, causal, max_seqlen_k, room).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
    )


@cute.jit
def mha_backward_items(
    cu_seqlens_q: cute.Tensor,  # i32 (b + 1,)
    cu_seqlens_k: cute.Tensor,  # i32 (b + 1,)
    work: cute.Tensor,  # i32 (words,): row tiles
    key_work: cute.Tensor,  # i32 (key_words,): tiles of keys, by the rows of their sequence
    causal: Int32,  # 0 or 1
    max_seqlen_q: Int32,  # as max_seqlen_k, of key_work
    max_seqlen_k: Int32,
    stream: Any,
) -> None:
    """Host half of both lists of the backward: a CTA each."""
    longest = (max_seqlen_q, max_seqlen_k)
    _two_lists(cu_seqlens_q, cu_seqlens_k, work, key_work, causal, longest).launch(
        grid=(2, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
    )


@cute.kernel
def _list(
    cu_seqlens_q: cute.Tensor,
    cu_seqlens_k: cute.Tensor,
    work: cute.Tensor,
    causal: Int32,
    max_seqlen_k: Int32,
    split: Any,  # room for splits, None where there are none
) -> None:
    memory = _memory()
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    _make((cu_seqlens_q, cu_seqlens_k), work, memory, causal, max_seqlen_k, split)


@cute.kernel
def _two_lists(
    cu_seqlens_q: cute.Tensor,
    cu_seqlens_k: cute.Tensor,
    work: cute.Tensor,
    key_work: cute.Tensor,
    causal: Int32,
    longest: Any,  # max_seqlen_q, max_seqlen_k
) -> None:
    block, _, _ = cute.arch.block_idx()
    memory = _memory()
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    if block == 0:
        _make((cu_seqlens_q, cu_seqlens_k), work, memory, causal, longest[1], None)
    else:
        _make((cu_seqlens_k, cu_seqlens_q), key_work, memory, Int32(0), longest[0], None)


def _memory() -> Any:
    """The thread's number, sums of warps, counts."""
    tidx, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    sums = smem.allocate_tensor(Int32, cute.make_layout(SUMS), 16)
    return tidx, sums, smem.allocate_tensor(Int32, cute.make_layout(BINS), 16)


@cute.jit
def _make(
    lengths: Any, work: cute.Tensor, memory: Any, causal: Int32, max_seqlen_k: Int32, split: Any
) -> None:
    """The list of row tiles by the keys that they see; ``lengths`` = (cu_seqlens_q, .._k)."""
    cu_seqlens_q, _ = lengths
    tidx, sums, places = memory
    shift = Int32(0)
    while ((max_seqlen_k + (KEYS - 1)) // KEYS) >> shift >= BINS:
        shift += 1
    for x in cutlass.range_constexpr(BINS // THREADS):
        places[x * THREADS + tidx] = Int32(0)
    begin, splits, words = Int32(HEADER), Int32(0), TILE_WORDS
    if cutlass.const_expr(split is not None):
        splits = _splits(lengths, work, sums, split)
        begin, words = _bases_at(split) + cu_seqlens_q.shape[0] - 1, ENTRY_WORDS
    cute.arch.sync_threads()
    if cutlass.const_expr(split is None):
        _each_sequence(lengths, work, places, causal, shift, False)
    else:
        _each_piece(lengths, work, places, causal, shift, (begin, _bases_at(split)), False)
    cute.arch.sync_threads()
    first, second = places[2 * tidx], places[2 * tidx + 1]
    upto, _, total, _ = scan(sums, first + second, Int32(0), True)
    places[2 * tidx] = upto - first - second
    places[2 * tidx + 1] = upto - second
    if tidx == 0:
        room = (work.shape[0] - begin) // words
        for word in cutlass.range_constexpr(HEADER):
            work[word] = Int32(0)
        work[TILES] = cutlass.min(total, room)
        if cutlass.const_expr(split is not None):
            work[SPLITS] = splits
            work[LIST] = begin
    cute.arch.sync_threads()
    if cutlass.const_expr(split is None):
        _each_sequence(lengths, work, places, causal, shift, True)
    else:
        _each_piece(lengths, work, places, causal, shift, (begin, _bases_at(split)), True)


def _bases_at(split: Any) -> Any:
    """Index in ``work`` of the table of sequences' first partial rows, behind the split tiles."""
    return HEADER + ENTRY_WORDS * split[0]


@cute.jit
def _splits(lengths: Any, work: cute.Tensor, sums: cute.Tensor, split: Any) -> Int32:
    """Notes each sequence's first partial row, -1 where it is not split, and the row tiles that are
    split, whose number it returns.  Every thread must come here."""
    tidx, _, _ = cute.arch.thread_idx()
    cu_q, cu_k = lengths
    batch = cu_q.shape[0] - 1
    most_splits, partial_rows = split
    all_rows, all_tiles = Int32(0), Int32(0)
    for first in cutlass.range(0, batch, THREADS, unroll=1):
        sequence = first + tidx
        rows, tiles, pieces, s_q = Int32(0), Int32(0), Int32(1), Int32(0)
        if sequence < batch:
            s_q = length(cu_q, sequence)
            pieces = pieces_of(s_q, length(cu_k, sequence))
            if (pieces > 1) & (s_q > 0):
                rows, tiles = s_q * pieces, (s_q + (ROWS - 1)) // ROWS
        upto_rows, upto_tiles, more_rows, more_tiles = scan(sums, rows, tiles)
        row, tile = all_rows + upto_rows - rows, all_tiles + upto_tiles - tiles
        # what does not fit, as of lengths that are not those of the call's tokens, is not split
        fits = (row >= 0) & (row <= partial_rows - rows) & (tile <= most_splits - tiles)
        if sequence < batch:
            work[_bases_at(split) + sequence] = row if fits & (tiles > 0) else Int32(-1)
        if ~fits:
            pieces = Int32(0)  # its places may exist: there is nothing to merge
        for x in cutlass.range(cutlass.min(tiles, most_splits - tile), unroll=1):
            at = HEADER + ENTRY_WORDS * (tile + x)
            for word, value in enumerate((sequence, x, pieces, row)):
                work[at + word] = Int32(value)
        all_rows += more_rows
        all_tiles += more_tiles
    return cutlass.min(all_tiles, most_splits)


@cute.jit
def _each_piece(
    lengths: Any, work: cute.Tensor, places: cute.Tensor, causal: Int32, shift: Int32,
    entries: Any, write: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Counts the pieces by keys seen, or writes each to the next place of its count.

    ``entries``: where the list begins, and where the sequences' first partial rows stand.
    """
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    cu_q, cu_k = lengths
    begin, bases = entries
    room = (work.shape[0] - begin) // ENTRY_WORDS
    for sequence in cutlass.range(warp, cu_q.shape[0] - 1, WARPS, unroll=1):
        s_q, s_k = length(cu_q, sequence), length(cu_k, sequence)
        tiles = (s_q + (ROWS - 1)) // ROWS
        base, pieces = work[bases + sequence], Int32(1)
        if base >= 0:
            pieces = pieces_of(s_q, s_k)
            tiles = tiles * pieces
        for x in cutlass.range(lane, tiles, quant.WARP, unroll=1):
            tile = x // pieces
            piece = x - tile * pieces
            seen = key_tiles(s_q, s_k, tile, causal)
            end = cutlass.min(seen, piece_begin(s_k, pieces, piece + 1))
            count = cutlass.max(end - piece_begin(s_k, pieces, piece), 0) >> shift
            place = places.iterator + (BINS - 1 - cutlass.min(count, BINS - 1))
            at = Int32(cute.arch.atomic_add(place, Int32(1)))
            if cutlass.const_expr(write):  # noqa: SIM102 (a compile-time condition and another)
                if at < room:
                    for word, value in enumerate((sequence, tile, piece, base)):
                        work[begin + ENTRY_WORDS * at + word] = Int32(value)


@cute.jit
def _each_sequence(
    lengths: Any, work: cute.Tensor, places: cute.Tensor, causal: Int32, shift: Int32,
    write: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Counts each sequence's row tiles, or writes them to the next places of their count.

    All of them go by the key tiles that the sequence's last row tile sees, which are the most.
    They lie side by side in the list, the last one first.
    """
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    cu_q, cu_k = lengths
    room = (work.shape[0] - HEADER) // TILE_WORDS
    for sequence in cutlass.range(warp, cu_q.shape[0] - 1, WARPS, unroll=1):
        s_q, s_k = length(cu_q, sequence), length(cu_k, sequence)
        tiles = (s_q + (ROWS - 1)) // ROWS
        count = key_tiles(s_q, s_k, tiles - 1, causal) >> shift
        place = places.iterator + (BINS - 1 - cutlass.min(count, BINS - 1))
        at = Int32(0)
        if lane == 0:
            at = Int32(cute.arch.atomic_add(place, tiles))
        if cutlass.const_expr(write):
            end = cute.arch.shuffle_sync(at, 0) + tiles
            for tile in cutlass.range(lane, tiles, quant.WARP, unroll=1):
                at = end - 1 - tile
                if at < room:
                    work[HEADER + TILE_WORDS * at] = Int32(sequence)
                    work[HEADER + TILE_WORDS * at + 1] = Int32(tile)


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the kernel cannot be built for ``spec``, or None."""
    if spec.lists == "backward" and spec.keys == "split":
        return "the backward's lists have no pieces"
    return None


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    i32 = compat.DTYPES["i32"]
    sequences = compat.sym(name="b_plus_1")
    fakes = {
        "cu_seqlens_q": compat.vector(i32, sequences),
        "cu_seqlens_k": compat.vector(i32, sequences),
        "work": compat.vector(i32, compat.sym(name="words")),
        "causal": Int32(1),
        "max_seqlen_k": Int32(1),
    }
    if spec.lists == "backward":
        more = {"key_work": compat.vector(i32, compat.sym(name="key_words")), "causal": Int32(1)}
        order = ("cu_seqlens_q", "cu_seqlens_k", "work")
        ends = {"max_seqlen_q": Int32(1), "max_seqlen_k": Int32(1)}
        return mha_backward_items, {**{name: fakes[name] for name in order}, **more, **ends}
    if spec.keys == "split":
        return mha_split_items, {**fakes, "most_splits": Int32(1), "partial_rows": Int32(1)}
    return mha_items, fakes

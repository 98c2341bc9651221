"""Coverage check of a work list from outside; ``merge`` runs it for a sequence before it merges.

A plan of ours fits its call by construction.  A pair of FlashMLA's form is the caller's memory
(``snapmla.compat.metadata_pair``): it may have been made for another batch or for other lengths, be
another pair's half, or be cut off.  Decode then computes what the work tiles say, each for the
query rows of its own sequence (``work_list.rows_at``), and a sequence is *covered* if that is all
of it:

* its work tiles stand together, the first begins at tile 0, each begins where the one before it
  ends, and the last ends behind the sequence's tokens;
* it is one work tile without a split, or as many as it has splits, one behind the other;
* no work tile of another sequence names its splits;
* every work tile that is listed belongs to one part, and splits are dealt in ascending order.

Of a sequence that is not, ``out`` and ``lse`` become NaN: never another's, nor what the memory
held.

Roles        every CTA of merge that has strips to merge, or would write NaN: for its unit there; if
             nothing is split, or the tables are not sound, for the unit of its own number.  All its
             threads read the list.
Memory       counts of the warps in shared memory.
Timeline     in front of merge's wait: under the end of decode, since only tables are read.
Bytes read   32 a work tile, 4 a part and 4 a sequence, in each such CTA; from L2.

The rule in Python is ``snapmla.compat.metadata_pair.covered``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ..blocks import compat, quant
from ..formats.dims import ITEM_WORDS, KV_LORA_RANK
from ..load.unplanned import NAN

COUNTS = 5  # what threads add up, see ``covers``
AHEAD = 4  # entries of a table that a thread has in flight


class Listed(NamedTuple):
    """A work list, and what it is to cover."""

    work_items: cute.Tensor  # i32 (n_items, ITEM_WORDS)
    part_begin: cute.Tensor  # i32 (parts + 1,)
    cache_seqlens: cute.Tensor  # i32 (b,)
    most_tiles: Int32  # that a row of the block table can name
    by_tile: compat.FastDivisor  # tokens of a tile
    wanted: Int32  # whether to ask; 0: the tables are a plan's, or have units of other rows


@cute.jit
def covers(
    listed: Listed, split_begin: cute.Tensor, splits: Int32, unit: Int32, counts: cute.Tensor,
    threads: cutlass.Constexpr,
) -> Any:  # fmt: skip
    """(True if the tables as a whole are sound, True if they also cover sequence ``unit``).

    Args:
        splits: number of splits that ``o_accum`` has room for.
        counts: i32 (COUNTS, warps) in shared memory.
        threads: of the CTA; all come here.
    """
    tidx, _, _ = cute.arch.thread_idx()
    parts, sequences = listed.part_begin.shape[0] - 1, split_begin.shape[0] - 1
    unsound = _descents(listed.part_begin, parts, tidx, threads)
    unsound += _descents(split_begin, sequences, tidx, threads)
    work_tiles = listed.part_begin[parts]
    if (work_tiles > listed.work_items.shape[0]) | (split_begin[sequences] > splits):
        unsound += 1
    first_split, end_split = split_begin[unit], split_begin[unit + 1]
    wrong, heads, own, tiles = Int32(0), Int32(0), Int32(0), Int32(0)
    work_tiles = compat.at_most(work_tiles, listed.work_items.shape[0])
    for base in cutlass.range(tidx, work_tiles, AHEAD * threads, unroll=1):
        places = [base + k * threads for k in range(AHEAD)]
        loaded = [_work_tile(listed, cutlass.min(i, work_tiles - 1)) for i in places]
        for k in cutlass.range_constexpr(AHEAD):
            i, (sequence, first, last, split) = places[k], loaded[k]
            if (i < work_tiles) & (sequence == unit):
                before, _, begin, split_before = _work_tile(listed, cutlass.max(i - 1, 0))
                if (i == 0) | (before != unit):
                    heads += 1
                    begin = Int32(0)
                    split_before = Int32(
                        cutlass.select_(end_split > first_split, first_split - 1, -2)
                    )
                if (first != begin) | (split != split_before + 1) | (last < first):
                    wrong += 1
                own += 1
                tiles += last - first
            elif (i < work_tiles) & (split >= first_split) & (split < end_split):
                wrong += 1
    total = _added((unsound, wrong, heads, own, tiles), counts, tidx, threads)
    whole, rest = divmod(cutlass.max(listed.cache_seqlens[unit], 0), listed.by_tile)
    needed = cutlass.min(whole + cutlass.min(rest, 1), listed.most_tiles)
    sound = total[0] == 0
    pieces = cutlass.max(end_split - first_split, 1)
    covered = (total[1] == 0) & (total[2] == 1) & (total[3] == pieces) & (total[4] >= needed)
    return sound, sound & covered


def _descents(table: cute.Tensor, count: Any, tidx: Any, threads: int) -> Any:
    """Entries of this thread's share that are above the next one; and a first one that is not 0."""
    found = Int32(cutlass.select_(table[0] == 0, Int32(0), Int32(1)))
    return _descents_behind(table, count, tidx, threads, found)


@cute.jit
def _descents_behind(
    table: cute.Tensor, count: Int32, tidx: Int32, threads: cutlass.Constexpr, found: Int32
) -> Int32:
    for base in cutlass.range(AHEAD * tidx, count, AHEAD * threads, unroll=1):
        places = [cutlass.min(base + k, count - 1) for k in range(AHEAD)]
        pairs = [(table[i], table[i + 1]) for i in places]
        for k in cutlass.range_constexpr(AHEAD):
            if pairs[k][0] > pairs[k][1]:
                found += 1
    return found


def _work_tile(listed: Listed, i: Any) -> list[Any]:
    """Sequence, first tile, end tile, split of a work tile."""
    words = compat.load_words(listed.work_items.iterator + i * ITEM_WORDS, 4)
    return [Int32(word) for word in words]


def _added(values: tuple[Any, ...], counts: cute.Tensor, tidx: Any, threads: int) -> list[Any]:
    """Sums over all threads of the CTA, in each of them."""
    for n, value in enumerate(values):
        counts[n, tidx // quant.WARP] = cute.arch.warp_redux_sync(value, "add")
    cute.arch.sync_threads()
    warps = range(threads // quant.WARP)
    return [sum((counts[n, w] for w in warps), Int32(0)) for n in range(len(values))]


@cute.jit
def no_result(
    out: cute.Tensor, lse: cute.Tensor, first: Int32, rows: Int32, threads: cutlass.Constexpr
) -> None:
    """NaN in the rows of one sequence, ``rows`` from query row ``first`` on; by one CTA.

    ``lse`` holds a sequence's rows in another order, but the same number at the same place.
    """
    tidx, _, _ = cute.arch.thread_idx()
    bits = cutlass.const_expr(out.element_type.width)
    step = cutlass.const_expr(128 // bits)  # channels of a store
    begin = out.iterator + Int64(first) * KV_LORA_RANK
    for i in cutlass.range(tidx, rows * (KV_LORA_RANK // step), threads, unroll=1):
        compat.store_words(begin + i * step, [Uint32(NAN[bits])] * 4)
    for i in cutlass.range(tidx, rows, threads, unroll=1):
        compat.store_words(lse.iterator + (first + i), [Uint32(NAN[32])])

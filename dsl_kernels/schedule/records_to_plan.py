"""records_to_plan: a plan's tables from FlashMLA's scheduler metadata, whatever it holds.

The beginning of a row of it (request, 64-token block) is a *cut*: a position on the line of all
requests' tiles under the current lengths, on which an empty request has one place too.  Part i
takes what lies between cut i and cut i + 1; the first cut is 0, the last the end, and a cut that
lies before its predecessor is moved there.  Ends, splits and flags are not read, splits are
numbered anew.  So stale, sliced, hand-made or random metadata give other balance and the same
results: every tile of the current lengths is in exactly one work tile, there are at most requests +
parts - 1 work tiles and 2 * (parts - 1) splits, and those that FlashMLA made for these lengths give
its own cuts.

With several KV heads every request is one for each of them, sequence request * heads + head, and
so is every part: part * heads + head has what its row says of that head.

Roles        one CTA, a thread a request, a cut, a part, a work tile, in turn.
Memory       dynamic shared, 16 KiB: for each cut its position, its request, splits and work tiles
             before it; sums of warps.  ``tile_begin`` is scratch in global memory: a position a
             request.
Timeline     wait for the previous grid
             | requests: lengths to tiles, prefix sum      -> tile_begin
             | cuts: position, running maximum
             | cuts: request by binary search; prefix sum of the splits that they open
             | parts: requests met, prefix sum             -> part_begin
             | requests: splits before them, by binary search in the cuts -> split_begin
             | work tiles: part by binary search                -> work_items
Bytes moved  8 a row of metadata, 4 a request read; 32 a work tile, 4 a part, 12 a request written.

The rule in Python is ``snapmla.testing.reference_plan.records_reference``, whose output this kernel
equals entry for entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.memory
from cutlass import Int32, Uint32, cute

from ..blocks import compat
from ..blocks.prefix_sum import SUMS, THREADS, scan, scan_max
from ..formats.dims import ITEM_WORDS
from ..formats.sched_meta import META_WORDS, MOST_PARTS

if TYPE_CHECKING:
    from ..spec import VariantSpec

NOTHING_HIDDEN = 2**31 - 1  # first hidden token of a work tile whose rows have no limits


class Given(NamedTuple):
    """Inputs: FlashMLA's scheduler metadata and the current lengths."""

    sched_meta: cute.Tensor  # i32 (parts, META_WORDS), rows strided
    cache_seqlens: cute.Tensor  # i32 (b,)


class Tables(NamedTuple):
    """Outputs: the plan's tables, and ``tile_begin``, which is scratch."""

    tile_begin: cute.Tensor  # i32 (b + 1,): position of each request's first tile; scratch
    work_items: cute.Tensor  # i32 (n_items, ITEM_WORDS)
    part_begin: cute.Tensor  # i32 (parts * heads + 1,)
    split_begin: cute.Tensor  # i32 (b * heads + 1,)
    planned_seqlens: cute.Tensor  # i32 (b * heads,)


class Rule(NamedTuple):
    """Scalars of a call."""

    max_tokens: Int32
    rows: Int32  # of a request that read one KV head
    by_tile: compat.FastDivisor
    by_heads: compat.FastDivisor  # KV heads


class Smem(NamedTuple):
    """Shared memory, one entry a cut unless said otherwise."""

    cut: cute.Tensor  # its position
    request: cute.Tensor  # in which it lies; b at the end
    split: cute.Tensor  # splits, of one KV head, that it and those before it open
    work_tile: cute.Tensor  # work tiles, of one KV head, before its part
    sums: cute.Tensor  # ``prefix_sum.SUMS``


@cute.jit
def records_to_plan(
    records: cute.Tensor,  # i32 (parts, META_WORDS)
    cache_seqlens: cute.Tensor,  # i32 (b,)
    tile_begin: cute.Tensor,  # i32 (b + 1,)
    work_items: cute.Tensor,  # i32 (n_items, ITEM_WORDS)
    part_begin: cute.Tensor,  # i32 (parts * heads + 1,)
    split_begin: cute.Tensor,  # i32 (b * heads + 1,)
    planned_seqlens: cute.Tensor,  # i32 (b * heads,)
    max_tokens: Int32,
    token_tile: Int32,
    rows: Int32,
    num_kv_heads: Int32,
    stream: Any,
) -> None:
    """Host half: one CTA."""
    tables = Tables(tile_begin, work_items, part_begin, split_begin, planned_seqlens)
    rule = Rule(
        max_tokens, rows, compat.fast_divisor(token_tile), compat.fast_divisor(num_kv_heads)
    )
    _convert(Given(records, cache_seqlens), tables, rule).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
    )


@cute.kernel
def _convert(given: Given, tables: Tables, rule: Rule) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    sm = _allocate()
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    parts = cutlass.min(Int32(given.sched_meta.shape[0]), MOST_PARTS)
    end = _place_requests(sm, given, tables, rule)
    _place_cuts(sm, given, tables, parts, end)
    _open_splits(sm, given, tables, parts)
    _deal(sm, tables, rule, parts)
    _number_splits(sm, given, tables, rule, parts)
    work_tiles = cutlass.min(
        sm.work_tile[parts] * rule.by_heads.divisor, tables.work_items.shape[0]
    )
    for i in cutlass.range(tidx, work_tiles, THREADS, unroll=1):
        _emit(sm, given, tables, rule, parts, i)


def _allocate() -> Smem:
    smem = cutlass.memory.SmemAllocator()
    one = [smem.allocate_tensor(Int32, cute.make_layout(MOST_PARTS + 1), 16) for _ in range(4)]
    return Smem(*one, smem.allocate_tensor(Int32, cute.make_layout(SUMS), 16))


@cute.jit
def _place_requests(sm: Smem, given: Given, tables: Tables, rule: Rule) -> Int32:
    """Writes ``tile_begin``; returns the end of the line."""
    tidx, _, _ = cute.arch.thread_idx()
    b, total = given.cache_seqlens.shape[0], Int32(0)
    for chunk in cutlass.range(0, b, THREADS, unroll=1):
        request, mine = chunk + tidx, Int32(0)
        if request < b:
            tokens = cutlass.min(cutlass.max(given.cache_seqlens[request], 0), rule.max_tokens)
            whole, rest = divmod(tokens, rule.by_tile)
            mine = cutlass.max(whole + cutlass.min(rest, 1), 1)
        upto, _, all_tiles, _ = scan(sm.sums, mine, Int32(0))
        if request < b:
            tables.tile_begin[request + 1] = total + upto
        total += all_tiles
    if tidx == 0:
        tables.tile_begin[0] = Int32(0)
    cute.arch.sync_threads()
    return total


@cute.jit
def _place_cuts(sm: Smem, given: Given, tables: Tables, parts: Int32, end: Int32) -> None:
    """Positions of the cuts, ascending."""
    tidx, _, _ = cute.arch.thread_idx()
    b, most = given.cache_seqlens.shape[0], Int32(0)
    for chunk in cutlass.range(0, parts + 1, THREADS, unroll=1):
        i, cut = chunk + tidx, Int32(0)
        if i >= parts:
            cut = end
        elif i > 0:
            request, block = given.sched_meta[i, 0], given.sched_meta[i, 1]
            if request >= b:
                cut = end
            elif request >= 0:
                first = tables.tile_begin[request]
                tiles = tables.tile_begin[request + 1] - first
                cut = first + cutlass.min(cutlass.max(block, 0), tiles)
        cut, most = scan_max(sm.sums, cutlass.max(cut, most))
        if i <= parts:
            sm.cut[i] = cut
    cute.arch.sync_threads()


@cute.jit
def _open_splits(sm: Smem, given: Given, tables: Tables, parts: Int32) -> None:
    """Requests of the cuts, and the splits that they open.

    A cut inside a request begins a piece, which has a split; the first such cut of a request gives
    the piece before it one, too.  Cuts at the same place are one.
    """
    tidx, _, _ = cute.arch.thread_idx()
    total = Int32(0)
    for chunk in cutlass.range(0, parts + 1, THREADS, unroll=1):
        i, opened = chunk + tidx, Int32(0)
        at = cutlass.min(i, parts)
        cut, before = sm.cut[at], sm.cut[cutlass.max(at - 1, 0)]
        request = _last_up_to(tables.tile_begin, given.cache_seqlens.shape[0] + 1, cut)
        first = tables.tile_begin[request]
        if (i <= parts) & (cut > first) & (cut > before):
            opened = Int32(1)
            if before <= first:
                opened = Int32(2)
        upto, _, all_opened, _ = scan(sm.sums, opened, Int32(0))
        if i <= parts:
            sm.request[i] = request
            sm.split[i] = total + upto
        total += all_opened
    cute.arch.sync_threads()


@cute.jit
def _deal(sm: Smem, tables: Tables, rule: Rule, parts: Int32) -> None:
    """Work tiles of the parts: the requests that lie between two cuts.  ``sm.work_tile`` may be
    read behind the next barrier, that of ``_number_splits``, which does not read it."""
    tidx, _, _ = cute.arch.thread_idx()
    heads, total = rule.by_heads.divisor, Int32(0)
    for chunk in cutlass.range(0, parts, THREADS, unroll=1):
        part, mine = chunk + tidx, Int32(0)
        at = cutlass.min(part, parts - 1)
        if (part < parts) & (sm.cut[at + 1] > sm.cut[at]):
            last = sm.request[at + 1]
            mine = last - sm.request[at]
            if sm.cut[at + 1] > tables.tile_begin[last]:
                mine += 1
        upto, _, all_work_tiles, _ = scan(sm.sums, mine, Int32(0))
        if part < parts:
            first = total + upto - mine
            sm.work_tile[part] = first
            for head in cutlass.range(heads, unroll=1):
                tables.part_begin[part * heads + head] = first * heads + head * mine
        total += all_work_tiles
    if tidx == 0:
        sm.work_tile[parts] = total
        tables.part_begin[parts * heads] = total * heads


@cute.jit
def _number_splits(sm: Smem, given: Given, tables: Tables, rule: Rule, parts: Int32) -> None:
    """Writes ``split_begin`` and ``planned_seqlens``."""
    tidx, _, _ = cute.arch.thread_idx()
    b, heads = given.cache_seqlens.shape[0], rule.by_heads.divisor
    for chunk in cutlass.range(0, b, THREADS, unroll=1):
        request = cutlass.min(chunk + tidx, b - 1)  # threads without one write the last one's, too
        first = _splits_before(sm, parts, tables.tile_begin[request])
        pieces = _splits_before(sm, parts, tables.tile_begin[request + 1]) - first
        tokens = given.cache_seqlens[request]
        if chunk + tidx < b:
            for head in cutlass.range(heads, unroll=1):
                tables.split_begin[request * heads + head] = first * heads + head * pieces
                tables.planned_seqlens[request * heads + head] = tokens
    if tidx == 0:
        tables.split_begin[b * heads] = sm.split[parts] * heads
    cute.arch.sync_threads()


@cute.jit
def _splits_before(sm: Smem, parts: Int32, position: Int32) -> Int32:
    """Splits, of one KV head, of requests that end at a position or before."""
    return sm.split[_last_up_to(sm.cut, parts + 1, position)]


@cute.jit
def _last_up_to(ascending: cute.Tensor, count: Int32, value: Int32) -> Int32:
    """Index of the last of ``count`` entries that is not above ``value``; the first one is not.

    All threads go the same number of rounds (``plan_units._sequence_of`` says why).
    """
    found, bits = Int32(0), 32 - Int32(cute.arch.clz(Int32(count)))
    for k in cutlass.range(bits, unroll=1):
        probe = found + (Int32(1) << (bits - 1 - k))
        if probe < count:
            below = ascending[cutlass.min(probe, count - 1)] <= value
            found = Int32(cutlass.select_(below, probe, found))
    return found


@cute.jit
def _emit(sm: Smem, given: Given, tables: Tables, rule: Rule, parts: Int32, i: Int32) -> None:
    """Writes work tile ``i``."""
    heads = rule.by_heads.divisor
    of_one, _ = divmod(i, rule.by_heads)  # work tiles of a part are the same for all its KV heads
    part = _last_up_to(sm.work_tile, parts, of_one)
    rest, head = i - sm.work_tile[part] * heads, Int32(0)
    if heads > 1:
        work_tiles = sm.work_tile[part + 1] - sm.work_tile[part]
        head = rest // work_tiles
        rest -= head * work_tiles
    request = sm.request[part] + rest
    begin, end = tables.tile_begin[request], tables.tile_begin[request + 1]
    first, last = cutlass.max(sm.cut[part], begin), cutlass.min(sm.cut[part + 1], end)
    sequence, split = request * heads + head, Int32(-1)
    if (first > begin) | (last < end):
        split = tables.split_begin[sequence]
        if first > begin:  # the cut of this part opened the split
            before, _ = divmod(tables.split_begin[request * heads], rule.by_heads)
            split += sm.split[part] - 1 - before
    last_tile = last - begin
    if given.cache_seqlens[request] <= 0:
        last_tile = Int32(0)  # its place on the line is no tile
    target = tables.work_items.iterator + i * ITEM_WORDS
    what = (sequence, first - begin, last_tile, split)
    compat.store_words(target, [Uint32(x) for x in what])
    whose = (sequence * rule.rows, (sequence + 1) * rule.rows, Int32(NOTHING_HIDDEN), Int32(0))
    compat.store_words(target + 4, [Uint32(x) for x in whose])


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    i32 = compat.DTYPES["i32"]
    b = compat.sym(name="b")
    records = (compat.sym(name="parts"), META_WORDS)
    fakes = {
        "records": compat.strided(i32, records, (compat.sym64(1), 1), 4),
        "cache_seqlens": compat.vector(i32, b),
        "tile_begin": compat.vector(i32, compat.sym(name="b_plus_1")),
        "work_items": compat.contiguous(i32, (compat.sym(name="n_items"), ITEM_WORDS)),
        "part_begin": compat.vector(i32, compat.sym(name="parts_plus_1")),
        "split_begin": compat.vector(i32, compat.sym(name="sequences_plus_1")),
        "planned_seqlens": compat.vector(i32, compat.sym(name="sequences")),
        "max_tokens": Int32(0),
        "token_tile": Int32(64),
        "rows": Int32(1),
        "num_kv_heads": Int32(1),
    }
    return records_to_plan, fakes

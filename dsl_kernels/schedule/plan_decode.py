"""plan_decode: cut a ragged batch into parts of nearly equal cost, on the device.

What is cut is *units*: ``unit_rows`` query rows of one sequence, which see the tokens up to the
last that any of them sees.  Usually a unit is a whole sequence.

Roles        one CTA, a thread a unit. Warp w tries part capacity T0 + w; all threads number and
             write the work tiles.
Memory       dynamic shared, 72 KiB: for CHUNK units tile counts, running costs, first work tiles,
             last parts, first splits, and for each warp's capacity where every unit begins.
             A batch of any size passes through in chunks.
Timeline     wait for the previous grid
             | ragged queries, all: prefix sum of the sequences' units -> unit_begin
             | all: lengths to tiles, prefix sum of costs              -> lower bound T0; copies
             | warp w: greedy fill with T0 + w, a step a part boundary -> smallest T that fits
             | warp w: the same without cuts, of what is not much longer -> which takes less time
             | all: prefix sums of work tiles and splits
             | all: a thread a work tile: find its unit, write it, part_begin, split_begin
             Each step is made for all chunks in turn, if there is more than one.
Bytes moved  4 a sequence read; 32 a work tile + 4 a part + 4 a unit + 4 a sequence written; 8 a
             unit where sequences have several; 8 a query token with limits of its own.

The fill advances by part boundaries, not by units: with the running costs in the lanes of a warp,
one ballot finds the first unit that does not fit, and that unit says by a division how many further
parts it fills.  So a step costs what a division and two warp exchanges cost, and there are at most
min(units, parts) + units / 32 of them, however large the batch is.

The rule, its optimality, its capacity, when units stay whole, stretches of a part and the
batch-independent form (``split_tiles`` > 0) are written in ``snapmla/testing/reference_plan.py``,
whose output this kernel equals entry for entry.
T0 + 2 * fixed_overhead + 1 is always feasible, so 7 tiles of overhead need one round of search.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.memory
from cutlass import Boolean, Int32, Int64, Uint32, cute

from ..blocks import compat, quant
from ..blocks.prefix_sum import SUMS, THREADS, WARPS, scan
from ..formats.dims import ITEM_WORDS
from .plan_units import (
    CHUNK,
    Lengths,
    Rule,
    Smem,
    Tables,
    choose,
    largest_of,
    number_units,
    pieces_of,
    stage,
    unit_at,
)

if TYPE_CHECKING:
    from ..spec import VariantSpec

TOO_MANY = 1 << 24  # parts, of a warp that tries nothing
# Nanoseconds of a merge beside one that finds nothing split, and of five rows of a split (H200)
MERGE_NS, FIVE_ROWS_NS = 1200, 4


class Walk(NamedTuple):
    """Running state of the emission, the same in all threads."""

    cost: Int32
    work_tile: Int32
    split: Int32
    part: Int32  # of the last work tile so far, -1 before the first


@cute.jit
def plan_decode(
    cache_seqlens: cute.Tensor,  # i32 (b,)
    cu_seqlens_q: cute.Tensor,  # i32 (b + 1,) or (0,)
    row_seqlens: cute.Tensor,  # i32 (tokens,) or (0,)
    work_items: cute.Tensor,  # i32 (n_items, ITEM_WORDS)
    part_begin: cute.Tensor,  # i32 (parts + 1,)
    split_begin: cute.Tensor,  # i32 (n_units + 1,)
    planned_seqlens: cute.Tensor,  # i32 (b,)
    units: cute.Tensor,  # i32 (n_units, 2) or (0, 2)
    unit_begin: cute.Tensor,  # i32 (b + 1,) or (0,)
    row_limits: cute.Tensor,  # i32 (tokens,) or (0,)
    max_tokens: Int32,
    token_tile: Int32,
    fixed_overhead: Int32,
    split_tiles: Int32,
    longest_item: Int32,
    max_stretches: Int32,
    tile_ns: Int32,
    read_ns: Int32,
    num_heads: Int32,
    s_q: Int32,
    unit_rows: Int32,
    causal: Int32,
    stream: Any,
) -> None:
    """Host half: one CTA."""
    tables = Tables(
        work_items, part_begin, split_begin, planned_seqlens, units, unit_begin, row_limits
    )
    rule = Rule(
        max_tokens, fixed_overhead, split_tiles, longest_item, max_stretches, tile_ns, read_ns,
        s_q, unit_rows, causal,
        compat.fast_divisor(token_tile), compat.fast_divisor(num_heads),
        compat.fast_divisor(cute.ceil_div(s_q * num_heads, unit_rows)),
    )  # fmt: skip
    _plan(Lengths(cache_seqlens, cu_seqlens_q, row_seqlens), tables, rule).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
    )


@cute.kernel
def _plan(lengths: Lengths, tables: Tables, rule: Rule) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    sm = _allocate()
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    parts, room = tables.part_begin.shape[0] - 1, tables.split_begin.shape[0] - 1
    count = Int32(room)  # of units
    if lengths.cu_seqlens_q.shape[0] > 0:
        count = cutlass.min(number_units(sm, lengths, tables, rule), room)
    total, largest = Int32(0), Int32(0)
    for first in cutlass.range(0, count, CHUNK, unroll=1):
        total = stage(sm, lengths, tables, rule, first, count, total)
        if rule.longest_item > 0:
            largest = cutlass.max(largest, largest_of(sm, cutlass.min(count - first, CHUNK)))
    # not first: what they read is on its way to this thread by now
    _copy(lengths.cache_seqlens, tables.planned_seqlens)
    _copy(lengths.row_seqlens, tables.row_limits)
    share = cutlass.max((total + (parts - 1)) // parts, 1)
    capacity, row, stretches = Int32(1), Int32(0), Int32(1)
    if rule.split_tiles == 0:
        if largest > rule.longest_item:
            wanted = (share + (rule.longest_item - 1)) // rule.longest_item
            stretches = cutlass.max(cutlass.min(wanted, rule.max_stretches), 1)
            share = cutlass.max((total + (parts * stretches - 1)) // (parts * stretches), 1)
        capacity, row, used = _search(sm, lengths, tables, rule, count, share, parts * stretches)
        if (rule.tile_ns > 0) & (stretches == 1) & (count <= CHUNK):
            capacity, row = _weigh(sm, rule, count, capacity, row, used, parts)

    if count > CHUNK:
        row = Int32(0)  # the fill of the last chunk tried is not the first one's: filled anew
    zero = Int32(0)
    walk = Walk(zero, zero, zero, Int32(-1))
    part, reach = zero, capacity
    for first in cutlass.range(0, count, CHUNK, unroll=1):
        here = cutlass.min(count - first, CHUNK)
        end_cost = total
        if count > CHUNK:
            end_cost = stage(sm, lengths, tables, rule, first, count, walk.cost)
            if rule.split_tiles == 0:
                if tidx < quant.WARP:
                    part, reach = _fill(
                        sm, Int32(0), here, part, reach, capacity, rule.overhead, False
                    )
                cute.arch.sync_threads()
        where = (first, here, row, capacity, share, stretches)
        walk = _emit(sm, lengths, tables, rule, where, walk)
        walk = Walk(end_cost, walk.work_tile, walk.split, walk.part)
    left = (walk.part + stretches) // stretches
    for p in cutlass.range(left + tidx, parts + 1, THREADS, unroll=1):
        tables.part_begin[p] = walk.work_tile
    for u in cutlass.range(count + tidx, room + 1, THREADS, unroll=1):
        tables.split_begin[u] = walk.split


def _allocate() -> Smem:
    smem = cutlass.memory.SmemAllocator()
    one = [smem.allocate_tensor(Int32, cute.make_layout(CHUNK + 1), 16) for _ in range(5)]
    many = [smem.allocate_tensor(Int32, cute.make_layout((CHUNK, WARPS)), 16) for _ in range(2)]
    return Smem(*one, *many, smem.allocate_tensor(Int32, cute.make_layout(SUMS), 16))


@cute.jit
def _copy(source: cute.Tensor, target: cute.Tensor) -> None:
    """Copies as many entries as ``target`` has; all threads take part."""
    tidx, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(tidx, target.shape[0], THREADS, unroll=1):
        target[i] = source[i]


# ---------------------------------------------------------------- capacity


@cute.jit
def _search(
    sm: Smem, lengths: Lengths, tables: Tables, rule: Rule, count: Int32, share: Int32, parts: Int32
) -> tuple[Int32, Int32, Int32]:
    """(smallest capacity with which the greedy fill does with ``parts``, its warp, parts that it
    uses)."""
    tidx, _, _ = cute.arch.thread_idx()
    warp, overhead = tidx // quant.WARP, rule.overhead
    lower = cutlass.max(share, overhead + 1)
    capacity, row, used = Int32(0), Int32(0), Int32(0)
    # lower + 2 * overhead + 1 is feasible, so the loop always finds one
    for extra in cutlass.range(0, 2 * overhead + 2, WARPS, unroll=1):
        mine = lower + extra + warp
        if capacity == 0:
            fits = _that_fit(sm, _last_part(sm, lengths, tables, rule, count, mine), parts)
            if fits != 0:
                row = Int32(_lowest(fits))
                capacity = lower + extra + row
                used = sm.sums[row, 0] + 1
    return capacity, row, used


@cute.jit
def _that_fit(sm: Smem, part: Int32, parts: Int32) -> Uint32:
    """A bit for each warp whose last ``part`` is one of ``parts``."""
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    cute.arch.sync_threads()
    if lane == 0:
        sm.sums[warp, 0] = part
    cute.arch.sync_threads()
    fits = Boolean(lane < WARPS) & Boolean(sm.sums[lane % WARPS, 0] < parts)
    return Uint32(cute.arch.vote_ballot_sync(fits))


@cute.jit
def _weigh(
    sm: Smem, rule: Rule, count: Int32, capacity: Int32, row: Int32, used: Int32, parts: Int32
) -> tuple[Int32, Int32]:
    """(capacity, its warp) of the fill that was found, which uses ``used`` parts, or of one without
    cuts if that takes no more time.  The first one's column of ``part`` and ``head`` stays."""
    tidx, _, _ = cute.arch.thread_idx()
    warp = tidx // quant.WARP
    lower = cutlass.max(capacity, largest_of(sm, count) + rule.overhead)
    mine = lower + warp - choose(warp > row, 1, 0)
    part = Int32(TOO_MANY)
    if warp != row:
        part, _ = _fill(sm, warp, count, Int32(0), mine, mine, rule.overhead, True)
    fits = _that_fit(sm, part, parts)
    if fits != 0:
        at = Int32(_lowest(fits))
        whole = lower + at - choose(at > row, 1, 0)
        merge_ns = Int64(MERGE_NS) + Int64(rule.unit_rows) * FIVE_ROWS_NS // 5 * used
        with_cuts = _time(rule, capacity, used) + merge_ns
        if _time(rule, whole, sm.sums[at, 0] + 1) <= with_cuts:
            capacity, row = whole, at
    return capacity, row


def _time(rule: Rule, capacity: Any, used: Any) -> Any:
    """Nanoseconds (Int64) of parts of this capacity, if ``used`` of them share the memory."""
    tile = cutlass.max(Int64(rule.tile_ns), Int64(rule.read_ns) * used)
    return Int64(capacity - rule.overhead) * tile


@cute.jit
def _last_part(
    sm: Smem, lengths: Lengths, tables: Tables, rule: Rule, count: Int32, capacity: Int32
) -> Int32:
    """Part in which the greedy fill with this warp's ``capacity`` ends."""
    tidx, _, _ = cute.arch.thread_idx()
    base, part, reach = Int32(0), Int32(0), capacity
    for first in cutlass.range(0, count, CHUNK, unroll=1):
        if count > CHUNK:
            base = stage(sm, lengths, tables, rule, first, count, base)
        here = cutlass.min(count - first, CHUNK)
        part, reach = _fill(
            sm, tidx // quant.WARP, here, part, reach, capacity, rule.overhead, False
        )
    return part


def _lowest(mask: Any) -> Any:
    """Index of the lowest set bit of a non-zero Uint32."""
    return cute.arch.clz(cute.arch.brev(mask))


@cute.jit
def _fill(
    sm: Smem,
    row: Int32,
    count: Int32,
    part: Int32,
    reach: Int32,
    capacity: Int32,
    overhead: Int32,
    whole: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """Greedy fill of one chunk by one warp: notes part and first tiles of every unit; of ``whole``
    ones, which are not cut.

    What ends at a running cost of at most ``reach`` fits into ``part``.
    Every lane works out what happens if its own unit is the one that does not fit, so that
    only one exchange follows the ballot.  Returns the state after the chunk.
    """
    tidx, _, _ = cute.arch.thread_idx()
    lane = tidx % quant.WARP
    cap = capacity - overhead
    magic = Uint32(0xFFFFFFFF) // Uint32(cap)
    for base in cutlass.range(0, count, quant.WARP, unroll=1):
        number, end = sm.tiles[base + lane], sm.cost[base + lane]
        my_part, my_head = Int32(0), number
        noted = Int32(0)  # lanes below this one are done
        over = Uint32(cute.arch.vote_ballot_sync(Boolean(end > reach)))
        while over != 0:
            k = Int32(_lowest(over))
            rest = cutlass.min(end - reach, number)  # tiles that the present part cannot take
            if cutlass.const_expr(whole):
                rest = number
            more = cutlass.max(_ceil_div(rest, cap, magic), 1)
            skip = rest == number  # not even one tile fits: it starts the next part
            here = (lane >= noted) & (lane <= k)
            my_part = choose(here, part + choose((lane == k) & skip, 1, 0), my_part)
            head = choose(skip, cutlass.min(number, cap), number - rest)
            my_head = choose(lane == k, head, my_head)
            reach = cute.arch.shuffle_sync(end + more * cap - rest, k)
            part += cute.arch.shuffle_sync(more, k)
            noted = k + 1
            over = Uint32(cute.arch.vote_ballot_sync(Boolean(end > reach)))
        if lane >= noted:
            my_part = part
        sm.part[base + lane, row] = my_part
        sm.head[base + lane, row] = my_head
    return part, reach


@cute.jit
def _ceil_div(x: Int32, cap: Int32, magic: Uint32) -> Int32:
    """ceil(x / cap), x >= 0; magic = floor((2^32 - 1) / cap) estimates at most 1 too low."""
    up = Uint32(x + (cap - 1))
    quotient = Uint32(cute.arch.mul_hi(up, magic))
    if up - quotient * Uint32(cap) >= Uint32(cap):
        quotient += 1
    return Int32(quotient)


# ---------------------------------------------------------------- output


@cute.jit
def _emit(sm: Smem, lengths: Lengths, tables: Tables, rule: Rule, where: Any, walk: Walk) -> Walk:
    """Writes work tiles, part_begin and split_begin of one chunk; where = (first unit, count,
    column of ``part`` and ``head``, capacity, share, stretches of a part)."""
    tidx, _, _ = cute.arch.thread_idx()
    first, count, row, capacity, share, _ = where
    cap, parts = capacity - rule.overhead, tables.part_begin.shape[0] - 1
    work_tiles, last = Int32(0), Int32(0)
    if tidx < count:
        number = sm.tiles[tidx]
        if rule.split_tiles > 0:
            work_tiles = pieces_of(number, rule.split_tiles)
            _, _, last = _fixed_work_tile(sm, rule, tidx, work_tiles - 1, share, parts)
        else:
            work_tiles = 1 + (number - sm.head[tidx, row] + (cap - 1)) // cap
            last = sm.part[tidx, row] + work_tiles - 1
    splits = work_tiles if work_tiles > 1 else Int32(0)
    work_tile_end, split_end, all_work_tiles, all_splits = scan(sm.sums, work_tiles, splits)
    sm.work_tile[tidx] = work_tile_end - work_tiles
    if tidx == 0:
        sm.work_tile[CHUNK] = all_work_tiles
    sm.split[tidx] = walk.split + split_end - splits
    sm.last[tidx] = last
    if tidx < count:
        tables.split_begin[first + tidx] = walk.split + split_end - splits
    cute.arch.sync_threads()
    for i in cutlass.range(tidx, all_work_tiles, THREADS, unroll=1):
        _emit_work_tile(sm, lengths, tables, rule, where, walk, i)
    return Walk(
        walk.cost, walk.work_tile + all_work_tiles, walk.split + all_splits, sm.last[count - 1]
    )


@cute.jit
def _balanced_work_tile(sm: Smem, at: Int32, q: Int32, row: Int32, cap: Int32) -> Any:
    """(first tile, end tile, part) of work tile ``q`` of a unit."""
    head = sm.head[at, row]
    begin = cutlass.max(head + (q - 1) * cap, 0)
    if q == 0:
        begin = Int32(0)
    return begin, cutlass.min(head + q * cap, sm.tiles[at]), sm.part[at, row] + q


@cute.jit
def _fixed_work_tile(sm: Smem, rule: Rule, at: Int32, q: Int32, share: Int32, parts: Int32) -> Any:
    """The same with fixed splits."""
    number, size = sm.tiles[at], rule.split_tiles
    cost = sm.cost[at] - number - rule.overhead * pieces_of(number, size)
    cost += q * (size + rule.overhead)
    begin = q * size
    return begin, cutlass.min(begin + size, number), cutlass.min(cost // share, parts - 1)


@cute.jit
def _emit_work_tile(
    sm: Smem, lengths: Lengths, tables: Tables, rule: Rule, where: Any, walk: Walk, i: Int32
) -> None:
    """Work tile ``i`` of the chunk, and the entries of part_begin between its predecessor's part
    and its own."""
    first, _, row, capacity, share, stretches = where
    parts = tables.part_begin.shape[0] - 1
    at = Int32(0)  # the unit: the last one whose first work tile is i or earlier
    for bit in cutlass.range_constexpr(CHUNK.bit_length() - 1):
        probe = at + (CHUNK >> (bit + 1))
        if sm.work_tile[probe] <= i:
            at = probe
    q = i - sm.work_tile[at]
    before = walk.part  # of the work tile before this one
    if at > 0:
        before = sm.last[cutlass.max(at - 1, 0)]
    begin, end, part = Int32(0), Int32(0), Int32(0)
    if rule.split_tiles > 0:
        begin, end, part = _fixed_work_tile(sm, rule, at, q, share, parts)
        if q > 0:
            _, _, before = _fixed_work_tile(sm, rule, at, q - 1, share, parts)
    else:
        begin, end, part = _balanced_work_tile(sm, at, q, row, capacity - rule.overhead)
        if q > 0:
            before = part - 1
    split = Int32(-1)
    if sm.work_tile[at + 1] - sm.work_tile[at] > 1:
        split = sm.split[at] + q
    work_tile = walk.work_tile + i
    if work_tile < tables.work_items.shape[0]:
        unit = unit_at(lengths, tables, rule, first + at)
        target = tables.work_items.iterator + work_tile * ITEM_WORDS
        what = (unit.batch, begin, end, split)
        compat.store_words(target, [Uint32(x) for x in what])
        whose = (unit.first, unit.end, unit.hidden_from, unit.most)
        compat.store_words(target + 4, [Uint32(x) for x in whose])
    begun = (before + stretches) // stretches
    for p in cutlass.range(begun, part // stretches + 1, unroll=1):
        tables.part_begin[p] = work_tile


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    i32 = compat.DTYPES["i32"]
    b, tokens = compat.sym(name="b"), compat.sym(name="tokens_or_0")
    ragged = compat.sym(name="b_plus_1_or_0")
    fakes = {
        "cache_seqlens": compat.vector(i32, b),
        "cu_seqlens_q": compat.vector(i32, ragged),
        "row_seqlens": compat.vector(i32, tokens),
        "work_items": compat.contiguous(i32, (compat.sym(name="n_items"), ITEM_WORDS)),
        "part_begin": compat.vector(i32, compat.sym(name="parts_plus_1")),
        "split_begin": compat.vector(i32, compat.sym(name="n_units_plus_1")),
        "planned_seqlens": compat.vector(i32, b),
        "units": compat.units_fake(i32),
        "unit_begin": compat.vector(i32, ragged),
        "row_limits": compat.vector(i32, tokens),
        "max_tokens": Int32(0),
        "token_tile": Int32(64),
        "fixed_overhead": Int32(0),
        "split_tiles": Int32(0),
        "longest_item": Int32(0),
        "max_stretches": Int32(1),
        "tile_ns": Int32(0),
        "read_ns": Int32(0),
        "num_heads": Int32(1),
        "s_q": Int32(1),
        "unit_rows": Int32(1),
        "causal": Int32(0),
    }
    return plan_decode, fakes

"""plan_decode: cut a ragged batch into parts of nearly equal cost, on the device.

Roles        one CTA. All threads stage tile counts and write the tables; warp 0 searches the part
             capacity and walks the batch.
Memory       shared: CHUNK tile counts (4 KiB) and CHUNK walk states (16 KiB); a batch of any size
             passes through in chunks.
Timeline     wait for the previous grid
             | all: stage lengths as tiles, sum the cost                      -> lower bound T0
             | warp 0: lane j fills parts of capacity T0 + j; ballot          -> T (next 32 if none)
             | warp 0: fill once more with T, note the state before each sequence
             | all: a warp a sequence, a lane an item: write items, part_begin, split_begin
             With more than CHUNK sequences the chunks are staged anew in each step.
Bytes moved  4 a sequence read; 16 an item + 4 a part + 4 a sequence written.

The rule, its optimality and its capacity (n_items <= parts + b - 1, slots <= 2 * (parts - 1)) are
written down in ``snapmla/reference_plan.py``, whose output this kernel equals entry for entry.
T0 + 2 * fixed_overhead + 1 is always feasible, so 15 tiles of overhead need one round of search.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.memory
from cutlass import Boolean, Int32, Uint32, cute

from .. import compat
from ..spec import VariantSpec
from . import quant

WARPS = 16
THREADS = WARPS * quant.WARP
CHUNK = 1024
PART, ROOM, ITEM, SLOT = range(4)  # fields of a walk state; PART holds 2 * part + "starts it"


def feasible(spec: VariantSpec) -> str | None:
    """Reason that ``spec`` cannot be built, or None."""
    return None


@cute.jit
def plan_decode(
    cache_seqlens: cute.Tensor,  # i32 (b,)
    work_items: cute.Tensor,  # i32 (n_items, 4)
    part_begin: cute.Tensor,  # i32 (parts + 1,)
    split_begin: cute.Tensor,  # i32 (b + 1,)
    max_tokens: Int32,
    token_tile: Int32,
    fixed_overhead: Int32,
    stream: Any,
) -> None:
    """Host half: one CTA."""
    by_tile = compat.fast_divisor(token_tile)
    _plan(
        cache_seqlens, work_items, part_begin, split_begin, max_tokens, fixed_overhead, by_tile
    ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)


@cute.jit
def _stage(
    tiles: cute.Tensor,
    cache_seqlens: cute.Tensor,
    first: Int32,
    count: Int32,
    max_tokens: Int32,
    by_tile: compat.FastDivisor,
) -> Int32:
    """Tile counts of sequences first .. first + count - 1 to shared memory; this thread's sum."""
    tidx, _, _ = cute.arch.thread_idx()
    total = Int32(0)
    cute.arch.sync_threads()  # the previous chunk has been read
    for i in cutlass.range(tidx, count, THREADS, unroll=1):
        tokens = cutlass.min(cutlass.max(cache_seqlens[first + i], 0), max_tokens)
        whole, rest = divmod(tokens, by_tile)
        number = whole + cutlass.min(rest, 1)
        tiles[i] = number
        total += number
    cute.arch.sync_threads()
    return total


@cute.jit
def _more_parts(rest: Int32, cap: Int32) -> Int32:
    """ceil(rest / cap); mostly 0 or 1, where the division is skipped."""
    more = cutlass.min(rest, 1)
    if rest > cap:
        more = Int32(Uint32(rest + (cap - 1)) // Uint32(cap))
    return more


@cute.jit
def _place(number: Int32, part: Int32, room: Int32, capacity: Int32, overhead: Int32) -> Any:
    """Where a sequence of ``number`` tiles begins: (part, room, tiles in that part, more parts)."""
    if room < overhead + cutlass.min(number, 1):
        part += 1
        room = capacity
    head = cutlass.min(number, room - overhead)
    return part, room, head, _more_parts(number - head, capacity - overhead)


@cute.jit
def _after(
    number: Int32, room: Int32, head: Int32, more: Int32, capacity: Int32, overhead: Int32
) -> Int32:
    """Room left in the part in which the sequence ends."""
    last = number - head - (more - 1) * (capacity - overhead)
    left = room - head - overhead
    if more > 0:
        left = capacity - last - overhead
    return left


@cute.jit
def _simulate(
    tiles: cute.Tensor, count: Int32, part: Int32, room: Int32, capacity: Int32, overhead: Int32
) -> Any:
    """Greedy fill of one chunk with this lane's capacity; returns the new (part, room)."""
    for i in cutlass.range(count, unroll=1):
        number = tiles[i]
        part, room, head, more = _place(number, part, room, capacity, overhead)
        room = _after(number, room, head, more, capacity, overhead)
        part += more
    return part, room


@cute.jit
def _walk(
    tiles: cute.Tensor,
    states: cute.Tensor,
    count: Int32,
    walk: Any,
    capacity: Int32,
    overhead: Int32,
) -> Any:
    """Fills one chunk, noting the state before each sequence; returns the state after it."""
    part, room, item, slot = walk
    for i in cutlass.range(count, unroll=1):
        number = tiles[i]
        before = part
        part, room, head, more = _place(number, part, room, capacity, overhead)
        starts = cutlass.min(part - before, 1)
        if item == 0:
            starts = Int32(1)
        states[PART, i] = 2 * part + starts
        states[ROOM, i] = room
        states[ITEM, i] = item
        states[SLOT, i] = slot
        room = _after(number, room, head, more, capacity, overhead)
        part += more
        item += 1 + more
        if more > 0:
            slot += 1 + more
    return part, room, item, slot


@cute.jit
def _emit(
    tiles: cute.Tensor,
    states: cute.Tensor,
    i: Int32,
    work_items: cute.Tensor,
    part_begin: cute.Tensor,
    batch: Int32,
    capacity: Int32,
    overhead: Int32,
) -> None:
    """One warp writes the items of one sequence, a lane an item."""
    tidx, _, _ = cute.arch.thread_idx()
    number, room, item, slot = tiles[i], states[ROOM, i], states[ITEM, i], states[SLOT, i]
    part, starts = states[PART, i] // 2, states[PART, i] % 2
    cap = capacity - overhead
    head = cutlass.min(number, room - overhead)
    more = _more_parts(number - head, cap)
    for j in cutlass.range(tidx % quant.WARP, 1 + more, quant.WARP, unroll=1):
        end = cutlass.min(head + j * cap, number)
        begin = head + (j - 1) * cap
        if j == 0:
            begin = Int32(0)
        own_slot = Int32(-1)
        if more > 0:
            own_slot = slot + j
        if item + j < work_items.shape[0]:
            words = [Uint32(x) for x in (batch, begin, end, own_slot)]
            compat.store_words(work_items.iterator + (item + j) * 4, words)
        if j + starts > 0:
            part_begin[part + j] = item + j


@cute.kernel
def _plan(
    cache_seqlens: cute.Tensor,
    work_items: cute.Tensor,
    part_begin: cute.Tensor,
    split_begin: cute.Tensor,
    max_tokens: Int32,
    overhead: Int32,
    by_tile: compat.FastDivisor,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    smem = cutlass.memory.SmemAllocator()
    tiles = smem.allocate_tensor(Int32, cute.make_layout(CHUNK), 16)
    states = smem.allocate_tensor(Int32, cute.make_layout((4, CHUNK)), 16)
    shared = smem.allocate_tensor(Int32, cute.make_layout(WARPS + 1), 16)
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    b, parts = cache_seqlens.shape[0], part_begin.shape[0] - 1
    source = (cache_seqlens, max_tokens, by_tile)

    total = Int32(0)
    for first in cutlass.range(0, b, CHUNK, unroll=1):
        total += _stage_chunk(tiles, source, first, b)
    total = cute.arch.warp_redux_sync(total, "add")
    if lane == 0:
        shared[warp] = total
    cute.arch.sync_threads()
    mine = Int32(0)
    if lane < WARPS:
        mine = shared[lane]
    total = cute.arch.warp_redux_sync(mine, "add") + overhead * b

    capacity = _search(tiles, shared, source, b, total, parts, overhead)

    walk = (Int32(0), capacity, Int32(0), Int32(0))
    for first in cutlass.range(0, b, CHUNK, unroll=1):
        count = cutlass.min(b - first, CHUNK)
        if b > CHUNK:
            _stage_chunk(tiles, source, first, b)
        if warp == 0:
            walk = _walk(tiles, states, count, walk, capacity, overhead)
        cute.arch.sync_threads()
        for i in cutlass.range(warp, count, WARPS, unroll=1):
            _emit(tiles, states, i, work_items, part_begin, first + i, capacity, overhead)
            if lane == 0:
                split_begin[first + i] = states[SLOT, i]
    if warp == 0:
        part, _, n_items, slots = walk
        for p in cutlass.range(part + 1 + lane, parts + 1, quant.WARP, unroll=1):
            part_begin[p] = n_items
        if lane == 0:
            split_begin[b] = slots


@cute.jit
def _stage_chunk(tiles: cute.Tensor, source: Any, first: Int32, b: Int32) -> Int32:
    cache_seqlens, max_tokens, by_tile = source
    count = cutlass.min(b - first, CHUNK)
    return _stage(tiles, cache_seqlens, first, count, max_tokens, by_tile)


@cute.jit
def _search(
    tiles: cute.Tensor,
    shared: cute.Tensor,
    source: Any,
    b: Int32,
    total: Int32,
    parts: Int32,
    overhead: Int32,
) -> Int32:
    """Smallest capacity with which the greedy fill needs at most ``parts`` parts."""
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    lower = cutlass.max((total + (parts - 1)) // parts, overhead + 1)
    capacity = Int32(0)
    # lower + 2 * overhead + 1 is feasible, so the loop always finds one
    for extra in cutlass.range(0, 2 * overhead + 2, quant.WARP, unroll=1):
        mine = lower + extra + lane
        part, room = Int32(0), mine
        if capacity == 0:
            for first in cutlass.range(0, b, CHUNK, unroll=1):
                if b > CHUNK:
                    _stage_chunk(tiles, source, first, b)
                if warp == 0:
                    count = cutlass.min(b - first, CHUNK)
                    part, room = _simulate(tiles, count, part, room, mine, overhead)
            if warp == 0:
                lanes = cute.arch.vote_ballot_sync(Boolean(part < parts))
                found = Int32(0)
                if lanes != 0:
                    found = lower + extra + cute.arch.popc((lanes & -lanes) - 1)
                if lane == 0:
                    shared[WARPS] = found
            cute.arch.sync_threads()
            capacity = shared[WARPS]
            cute.arch.sync_threads()
    return capacity


def build(spec: VariantSpec) -> tuple[Callable[..., Any], list[Any]]:
    """(callable, fake arguments) of one variant; see ``registry``."""
    i32 = compat.DTYPES["i32"]
    fakes = [
        compat.vector(i32, compat.sym(name="b")),
        compat.contiguous(i32, (compat.sym(name="n_items"), 4)),
        compat.vector(i32, compat.sym(name="parts_plus_1")),
        compat.vector(i32, compat.sym(name="b_plus_1")),
        Int32(0),
        Int32(64),
        Int32(0),
    ]
    return plan_decode, fakes

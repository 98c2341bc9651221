"""Units of ``plan_decode`` and what they cost: query rows of one sequence, and the tiles they see.

Roles        all threads of the one CTA; thread i stages the chunk's unit i.
Memory       ``Smem`` of ``plan_decode``: tile counts and running costs are written here.
Timeline     number the units of ragged queries | a chunk: lengths to tiles, prefix sum of costs
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from ..blocks import compat, quant
from ..blocks.prefix_sum import THREADS, scan

CHUNK = THREADS  # units in shared memory; a power of two
NEVER = -(2**31)  # running cost of a lane without a unit: it always fits
NOTHING_HIDDEN = 2**31 - 1  # first hidden token of a unit whose rows have no limits of their own


class Lengths(NamedTuple):
    """Lengths that ``plan_decode`` reads; extent 0: the call has no such table."""

    cache_seqlens: cute.Tensor  # i32 (b,)
    cu_seqlens_q: cute.Tensor  # i32 (b + 1,) of ragged queries, or (0,)
    row_seqlens: cute.Tensor  # i32 (tokens,), or (0,)


class Tables(NamedTuple):
    """Tables that ``plan_decode`` writes; one of extent 0 is left out."""

    work_items: cute.Tensor  # i32 (n_items, ITEM_WORDS)
    part_begin: cute.Tensor  # i32 (parts + 1,)
    split_begin: cute.Tensor  # i32 (n_units + 1,)
    planned_seqlens: cute.Tensor  # i32 (b,), cache_seqlens as they were
    units: cute.Tensor  # i32 (n_units, 2) first row, end row; (0, 2) if merge needs no table
    unit_begin: cute.Tensor  # i32 (b + 1,) of ragged queries, or (0,)
    row_limits: cute.Tensor  # i32 (tokens,), row_seqlens as they were, or (0,)


class Rule(NamedTuple):
    """Scalars of a call."""

    max_tokens: Int32
    overhead: Int32
    split_tiles: Int32  # 0: cut for balance
    longest_item: Int32  # tiles of a work tile, about, where some unit has more; 0: any number
    max_stretches: Int32  # of a part, for that
    tile_ns: Int32  # time of a tile where memory does not bound it; 0: cuts cost nothing
    read_ns: Int32  # time of reading one
    tokens: Int32  # query tokens of a sequence; of all, if ragged
    unit_rows: Int32
    causal: Int32
    by_tile: compat.FastDivisor
    by_heads: compat.FastDivisor
    by_units: compat.FastDivisor  # of a sequence


class Unit(NamedTuple):
    """A unit: whose, which query rows, and what they see."""

    batch: Int32
    first: Int32
    end: Int32  # behind the sequence's last row
    most: Int32  # tokens that some row sees
    hidden_from: Int32  # first token that some row does not see, if rows have limits of their own


class Smem(NamedTuple):
    """Shared memory, one entry a unit of the chunk unless said otherwise."""

    tiles: cute.Tensor
    cost: cute.Tensor  # running cost of the batch, this unit included
    work_tile: cute.Tensor  # (CHUNK + 1): work tiles of the chunk before this unit
    split: cute.Tensor  # splits before this unit
    last: cute.Tensor  # part of its last work tile
    part: cute.Tensor  # (CHUNK, WARPS): part of its first work tile, by capacity tried
    head: cute.Tensor  # (CHUNK, WARPS): tiles of its first work tile
    sums: cute.Tensor  # (WARPS, 2): of warps, for prefix sums and votes


@cute.jit
def _tokens_of(lengths: Lengths, rule: Rule, batch: Int32) -> Any:
    """(first, end) query token of a sequence of ragged queries, within 0 .. rule.tokens."""
    first = cutlass.min(cutlass.max(lengths.cu_seqlens_q[batch], 0), rule.tokens)
    end = cutlass.min(cutlass.max(lengths.cu_seqlens_q[batch + 1], first), rule.tokens)
    return first, end


@cute.jit
def number_units(sm: Smem, lengths: Lengths, tables: Tables, rule: Rule) -> Int32:
    """Writes ``unit_begin`` of ragged queries; returns how many units there are."""
    tidx, _, _ = cute.arch.thread_idx()
    b, heads = lengths.cache_seqlens.shape[0], rule.by_heads.divisor
    total = Int32(0)
    for chunk in cutlass.range(0, b, THREADS, unroll=1):
        batch, mine = chunk + tidx, Int32(0)
        if batch < b:
            first, end = _tokens_of(lengths, rule, batch)
            mine = ((end - first) * heads + (rule.unit_rows - 1)) // rule.unit_rows
        upto, _, all_units, _ = scan(sm.sums, mine, Int32(0))
        if batch < b:
            tables.unit_begin[batch] = total + upto - mine
        total += all_units
    if tidx == 0:
        tables.unit_begin[b] = total
    cute.arch.sync_threads()
    return total


@cute.jit
def unit_at(lengths: Lengths, tables: Tables, rule: Rule, u: Int32) -> Unit:
    """Unit ``u``, whose tile counts and work tiles are the plan's."""
    heads = rule.by_heads.divisor
    batch, j = divmod(u, rule.by_units)
    first, tokens_end = batch * rule.tokens, (batch + 1) * rule.tokens
    if lengths.cu_seqlens_q.shape[0] > 0:
        batch = _sequence_of(tables.unit_begin, lengths.cache_seqlens.shape[0], u)
        j = u - tables.unit_begin[batch]
        first, tokens_end = _tokens_of(lengths, rule, batch)
    first, end = first * heads + j * rule.unit_rows, tokens_end * heads
    last = cutlass.min(first + rule.unit_rows, end) - 1
    seqlen = cutlass.min(cutlass.max(lengths.cache_seqlens[batch], 0), rule.max_tokens)
    most, hidden_from = seqlen, Int32(NOTHING_HIDDEN)
    if lengths.row_seqlens.shape[0] > 0:
        most = Int32(0)
        begin, _ = divmod(first, rule.by_heads)
        behind, _ = divmod(last, rule.by_heads)
        # as many rounds for every thread: see ``_sequence_of``
        for k in cutlass.range((rule.unit_rows - 2) // heads + 2, unroll=1):
            token = cutlass.min(begin + k, behind)
            limit = cutlass.min(cutlass.max(lengths.row_seqlens[token], 0), seqlen)
            most, hidden_from = cutlass.max(most, limit), cutlass.min(hidden_from, limit)
    elif rule.causal != 0:
        after, _ = divmod(end - 1 - last, rule.by_heads)
        most = cutlass.max(seqlen - after, 0)
    return Unit(batch, first, end, most, hidden_from)


@cute.jit
def _sequence_of(unit_begin: cute.Tensor, b: Int32, u: Int32) -> Int32:
    """The sequence of unit ``u``: the last one that begins there or before.

    All threads go the same number of rounds: divergent loops so deep inside need more registers of
    convergence than there are, and ptxas puts them into local memory.
    """
    found, bits = Int32(0), 32 - Int32(cute.arch.clz(b))
    for k in cutlass.range(bits, unroll=1):
        probe = found + (Int32(1) << (bits - 1 - k))
        if probe < b:
            found = choose(unit_begin[cutlass.min(probe, b - 1)] <= u, probe, found)
    return found


# ---------------------------------------------------------------- costs


@cute.jit
def stage(
    sm: Smem, lengths: Lengths, tables: Tables, rule: Rule, first: Int32, count: Int32, base: Int32
) -> Int32:
    """Tile counts and running costs of one chunk; returns the running cost at its end."""
    tidx, _, _ = cute.arch.thread_idx()
    number, pieces = Int32(0), Int32(1)
    valid = first + tidx < count
    if valid:
        unit = unit_at(lengths, tables, rule, first + tidx)
        whole, rest = divmod(unit.most, rule.by_tile)
        number = whole + cutlass.min(rest, 1)
        if tables.units.shape[0] > 0:
            tables.units[first + tidx, 0] = unit.first
            tables.units[first + tidx, 1] = unit.end
    if rule.split_tiles > 0:
        pieces = pieces_of(number, rule.split_tiles)
    cost = number + rule.overhead * pieces if valid else Int32(0)
    upto, _, total, _ = scan(sm.sums, cost, Int32(0))
    sm.tiles[tidx] = number
    sm.cost[tidx] = base + upto if valid else Int32(NEVER)
    cute.arch.sync_threads()
    return base + total


@cute.jit
def largest_of(sm: Smem, here: Int32) -> Int32:
    """Tiles of the largest of the chunk's ``here`` units; by whole warps."""
    tidx, _, _ = cute.arch.thread_idx()
    most = Int32(0)
    for at in cutlass.range(tidx % quant.WARP, here, quant.WARP, unroll=1):
        most = cutlass.max(most, sm.tiles[at])
    return cute.arch.warp_redux_sync(most, "max")


@cute.jit
def pieces_of(number: Int32, split_tiles: Int32) -> Int32:
    """Work tiles of a unit with fixed splits; an empty one is one work tile."""
    return cutlass.max((number + (split_tiles - 1)) // split_tiles, 1)


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """A select instruction: no branch in the loop that all else waits for."""
    return Int32(cutlass.select_(condition, yes, no))

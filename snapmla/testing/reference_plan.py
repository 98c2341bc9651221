"""The decode schedule in plain Python: the mirror of the ``plan_decode`` kernel.

Query rows are numbered in memory order over the whole call: row g = token * num_heads + head.  A
*unit* is ``unit_rows`` consecutive rows of one sequence, fewer at its end.  A sequence of n query
tokens has ceil(n * num_heads / unit_rows) of them, none if n = 0.  With as many rows as a sequence
has, a unit is a sequence, and its row blocks run side by side (*in step*); with a row tile's,
every row block is scheduled for itself (*balanced*).

A unit reads the token tiles that some row of it sees.  Let seqlen be the sequence's length, clamped
to 0..max_tokens.  A query token sees

* with ``row_seqlens`` as many tokens as that says, clamped to 0..seqlen;
* by the causal rule seqlen minus the number of the sequence's query tokens behind it;
* else seqlen.

A *part* is the share of work of one row of CTAs (``grid.y`` of the decode kernel).  Units are laid
end to end, sequence by sequence, and cut into at most ``parts`` parts; a piece of a unit inside one
part is an *item*.  An item of n tiles costs n + fixed_overhead tiles: the overhead stands for what
every item pays (loading Q, first tile's latency, epilogue).  A unit that sees nothing still is an
item: somebody must write its rows.

Among all in-order cuts the one returned has the smallest possible largest part cost T:

* For a given T the greedy fill (take as much of the next unit as fits, move on when less than one
  tile would fit) needs the fewest parts.  From a later starting position one part reaches at least
  as far, because any range costs no more when its beginning is cut off; so taking the farthest end
  in every part is optimal.
* Feasibility is monotone in T, so trying T = T0, T0 + 1, ... from a lower bound finds the optimum.
  T0 = max(ceil(total cost / parts), fixed_overhead + 1).
* T0 + 2 * fixed_overhead + 1 is always feasible: a part that the greedy fill leaves has less than
  fixed_overhead + 1 of room, and every part adds at most one overhead by cutting a unit.

A cut costs a merge.  Where a tile's time is known (``Cuts.tile_ns``), the fill with T is weighed
against the one that cuts nothing (a unit that does not fit begins the next part) with the smallest
T' >= max(T, longest unit + fixed_overhead) among the first 15 that does with the parts.  With p
parts in use, which share the memory, capacity T takes (T - fixed_overhead) * max(tile_ns, p *
read_ns); cuts take ``MERGE_NS`` more, and 0.8 ns for each of p * unit_rows partial rows.  Units
stay whole if that takes no longer.  (Of batches of more than ``WEIGHED`` units nothing is weighed.)

An accumulator's error grows with the tiles that it sums.  If some unit has more than
``Cuts.longest_item`` of them, a part is k *stretches*, k = ceil(ceil(total cost / parts) /
longest_item), at most ``max_stretches``: what was said of parts is then true of k * parts
stretches, and part p walks those from k * p on.

Capacity: every cut of a unit is a boundary between two parts, so there are at most parts - 1 cuts
and n_items <= units + parts - 1.  A unit with c cuts is split into c + 1 <= 2 c items that need an
accumulation slot, hence slots <= 2 * (parts - 1).  Ragged queries of at most total_q tokens have at
most b + floor(total_q * num_heads / unit_rows) units: a sequence rounds up by less than one.  With
stretches read ``max_stretches * parts`` for parts.

Fixed splits (``split_tiles`` > 0) trade balance for independence of the batch: every unit is cut
after each ``split_tiles`` tiles, whoever its neighbours are, so the pieces, and the order in which
they are merged, are its own.  Items are laid end to end by cost and part p gets those that begin in
[p, p + 1) * ceil(total / parts); a part exceeds that by less than one item.  There are at most
units * ceil(max_tokens / token_tile / split_tiles) items, and as many slots.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

WEIGHED = 512  # units at most
TRIED = 15  # capacities without cuts
MERGE_NS = 1200
NOTHING_HIDDEN = 2**31 - 1  # first hidden token of a unit whose rows have no limits of their own

Piece = tuple[int, int, int]  # (unit, tile_begin, tile_end)
# sequence, first tile, end tile, slot, first row, end row of the sequence, first hidden token, 0
Item = tuple[int, int, int, int, int, int, int, int]


@dataclass(frozen=True)
class Unit:
    """Consecutive rows of one sequence, which share items.

    Attributes:
        sequence: whose.
        first_row: its first row, numbered over all query tokens.
        end_row: end of the *sequence's* rows; the unit's are at most ``unit_rows``.
        tiles: token tiles that some row of it sees.
        first_hidden: first token that some row must not see, with row limits; else
            ``NOTHING_HIDDEN``.
        most: tokens that some row of it sees.
    """

    sequence: int
    first_row: int
    end_row: int
    tiles: int
    first_hidden: int = NOTHING_HIDDEN
    most: int = 0


@dataclass(frozen=True)
class PlanReference:
    """The schedule's tables.

    Attributes:
        work_items: (sequence, first tile, end tile, slot, first row, end row of the sequence, first
            hidden token, tokens that some of the rows see); slot -1 writes the output directly.
        part_begin: parts + 1 indices into ``work_items``.
        split_begin: an index of accumulation slots for each unit that there may be, and the end;
            an empty range means unsplit.
        part_cost: the T that was found, in tiles; with fixed splits ceil(total / parts).
        units: (first row, end row of the sequence) of each unit; empty where every sequence is one.
        unit_begin: b + 1 indices into ``units`` with ragged queries, else empty.
        row_limits: what ``row_seqlens`` says, if given, else empty.
    """

    work_items: list[Item]
    part_begin: list[int]
    split_begin: list[int]
    part_cost: int
    units: list[tuple[int, int]]
    unit_begin: list[int]
    row_limits: list[int]

    @property
    def tiles(self) -> int:
        """Token tiles of all items."""
        return sum(end - begin for _, begin, end, *_ in self.work_items)


@dataclass(frozen=True)
class Queries:
    """The query tokens of a step, and how their rows are dealt to units.

    Attributes:
        num_heads: rows of a token.
        s_q: query tokens of every sequence; of the whole step, at most, with ``begins``.
        unit_rows: rows of a unit; 0: those of a sequence.
        causal: whether the causal rule holds (not with ``row_seqlens``).
        begins: where each sequence's query tokens begin, and the end of the last; None: all
            sequences have ``s_q``.  Anything may stand there: values are clamped to 0..s_q, a
            sequence's end to its beginning, and units past the capacity are dropped.
        row_seqlens: how many cached tokens each query token sees; None: by rule.
    """

    num_heads: int = 1
    s_q: int = 1
    unit_rows: int = 0
    causal: bool = False
    begins: Sequence[int] | None = None
    row_seqlens: Sequence[int] | None = None

    @property
    def rows(self) -> int:
        """Rows of ``s_q`` tokens."""
        return self.s_q * self.num_heads

    def capacity(self, batch: int) -> int:
        """Units that there may be."""
        if self.begins is None:
            return batch * -(-self.rows // self.unit_rows)
        return batch + self.rows // self.unit_rows

    def tokens_of(self, batch: int) -> list[tuple[int, int]]:
        """First and end query token of each sequence."""
        if self.begins is None:
            return [(i * self.s_q, (i + 1) * self.s_q) for i in range(batch)]
        inside = (min(max(x, 0), self.s_q) for x in self.begins)
        return [(first, max(first, end)) for first, end in itertools.pairwise(inside)]

    def unit(
        self, sequence: int, first_row: int, tokens: tuple[int, int], seqlen: int, token_tile: int
    ) -> Unit:
        """The unit of a sequence with these query tokens that begins at a row."""
        end_row = tokens[1] * self.num_heads
        last = (min(first_row + self.unit_rows, end_row) - 1) // self.num_heads
        most, hidden = seqlen, NOTHING_HIDDEN
        if self.row_seqlens is not None:
            own = self.row_seqlens[first_row // self.num_heads : last + 1]
            limits = [min(max(n, 0), seqlen) for n in own]
            most, hidden = max(limits), min(limits)
        elif self.causal:
            most = max(0, seqlen - (tokens[1] - 1 - last))
        return Unit(sequence, first_row, end_row, -(-most // token_tile), hidden, most)

    def units(self, lengths: Sequence[int], token_tile: int) -> tuple[list[Unit], list[int]]:
        """(units of all sequences, index of each sequence's first, and their number)."""
        found: list[Unit] = []
        begin = [0]
        for i, tokens in enumerate(self.tokens_of(len(lengths))):
            first, end = (x * self.num_heads for x in tokens)
            for row in range(first, end, self.unit_rows):
                found.append(self.unit(i, row, tokens, lengths[i], token_tile))
            begin.append(len(found))
        return found[: self.capacity(len(lengths))], begin


ONE_ROW = Queries()


@dataclass(frozen=True)
class Cuts:
    """Limits and times that decide where to cut, beside balance.

    Attributes:
        longest_item: most tiles of an item, approximately; 0: no limit.
        max_stretches: most stretches that a part is made of to keep items that short.
        tile_ns: nanoseconds of a tile if memory does not bound it; 0: cuts cost nothing.
        read_ns: nanoseconds to read a tile if no other part reads.
    """

    longest_item: int = 0
    max_stretches: int = 1
    tile_ns: int = 0
    read_ns: int = 0


BALANCE = Cuts()


def tile_counts(cache_seqlens: Sequence[int], token_tile: int, max_tokens: int) -> list[int]:
    """Tiles of each sequence; negative lengths count as 0, longer ones than max_tokens as that."""
    return [-(-min(max(n, 0), max_tokens) // token_tile) for n in cache_seqlens]


def parts_needed(tiles: Sequence[int], capacity: int, fixed_overhead: int) -> int:
    """Parts that the greedy in-order fill uses with parts of cost ``capacity``."""
    return len(_fill(tiles, capacity, fixed_overhead))


def plan_reference(
    cache_seqlens: Sequence[int],
    parts: int,
    token_tile: int,
    fixed_overhead: int,
    max_tokens: int = 2**31 - 1,
    split_tiles: int = 0,
    queries: Queries = ONE_ROW,
    cuts: Cuts = BALANCE,
) -> PlanReference:
    """The schedule that ``plan_decode`` computes on the device, entry for entry.

    Args:
        cache_seqlens: tokens of each of the b >= 1 sequences.
        parts: upper bound of parts, >= 1.
        token_tile: tokens in a tile.
        fixed_overhead: cost of an item beyond its tiles, in tiles, >= 0.
        max_tokens: capacity of a block-table row in tokens.
        split_tiles: tiles of a piece with fixed splits; 0 cuts for balance.
        queries: the query tokens; a unit of one row for each sequence unless told.
        cuts: what decides beside balance; not with fixed splits.

    Raises:
        ValueError: for an empty batch or a parameter out of range.
    """
    if not len(cache_seqlens):
        raise ValueError("cache_seqlens: expected at least one sequence, got none")
    for name, value, least in (
        ("parts", parts, 1),
        ("token_tile", token_tile, 1),
        ("fixed_overhead", fixed_overhead, 0),
        ("max_tokens", max_tokens, 0),
        ("split_tiles", split_tiles, 0),
        ("queries.num_heads", queries.num_heads, 1),
        ("queries.s_q", queries.s_q, 1),
        ("queries.unit_rows", queries.unit_rows, 0),
    ):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    if not queries.unit_rows:
        queries = replace(queries, unit_rows=queries.rows)
    lengths = [min(max(n, 0), max_tokens) for n in cache_seqlens]
    units, unit_begin = queries.units(lengths, token_tile)
    tiles = [unit.tiles for unit in units]
    stretches = 1
    if split_tiles:
        filled, capacity = _fixed(tiles, parts, fixed_overhead, split_tiles)
    else:
        total = sum(tiles) + fixed_overhead * len(tiles)
        if cuts.longest_item and max(tiles, default=0) > cuts.longest_item:
            share = -(-total // parts)
            stretches = max(min(-(-share // cuts.longest_item), cuts.max_stretches), 1)
        capacity = max(-(-total // (parts * stretches)), fixed_overhead + 1)
        while parts_needed(tiles, capacity, fixed_overhead) > parts * stretches:
            capacity += 1
        filled = _fill(tiles, capacity, fixed_overhead)
        if cuts.tile_ns and stretches == 1 and len(tiles) <= WEIGHED:
            filled, capacity = _weighed(
                (filled, capacity), tiles, parts, fixed_overhead, queries.unit_rows, cuts
            )
    items, part_begin, split_begin = _number(filled, units, parts * stretches)
    part_begin = part_begin[::stretches]
    ragged = queries.begins is not None
    split_begin += [split_begin[-1]] * (queries.capacity(len(lengths)) - len(units))
    alone = not ragged and queries.unit_rows >= queries.rows
    return PlanReference(
        work_items=items,
        part_begin=part_begin,
        split_begin=split_begin,
        part_cost=capacity,
        units=[] if alone else [(unit.first_row, unit.end_row) for unit in units],
        unit_begin=unit_begin if ragged else [],
        row_limits=list(queries.row_seqlens or ()),
    )


def _number(
    filled: list[list[Piece]], units: list[Unit], parts: int
) -> tuple[list[Item], list[int], list[int]]:
    """(work_items, part_begin, split_begin) of pieces that are already dealt to parts."""
    pieces = [0] * len(units)
    for part in filled:
        for at, _, _ in part:
            pieces[at] += 1
    split_begin = [0]
    for count in pieces:
        split_begin.append(split_begin[-1] + (count if count > 1 else 0))
    work_items: list[Item] = []
    part_begin = [0]
    used = list(split_begin)
    for part in filled:
        for at, begin, end in part:
            slot, unit = -1, units[at]
            if pieces[at] > 1:
                slot = used[at]
                used[at] += 1
            rows = (unit.first_row, unit.end_row, unit.first_hidden, unit.most)
            work_items.append((unit.sequence, begin, end, slot, *rows))
        part_begin.append(len(work_items))
    part_begin += [len(work_items)] * (parts + 1 - len(part_begin))
    return work_items, part_begin, split_begin


def _fixed(
    tiles: Sequence[int], parts: int, fixed_overhead: int, split_tiles: int
) -> tuple[list[list[Piece]], int]:
    """Pieces of ``split_tiles`` tiles, dealt to parts by where they begin; and a part's share."""
    pieces = [
        (unit, begin, min(begin + split_tiles, count))
        for unit, count in enumerate(tiles)
        for begin in range(0, max(count, 1), split_tiles)
    ]
    total = sum(end - begin + fixed_overhead for _, begin, end in pieces)
    share = max(-(-total // parts), 1)
    filled: list[list[Piece]] = [[] for _ in range(parts)]
    position = 0
    for piece in pieces:
        filled[min(position // share, parts - 1)].append(piece)
        position += piece[2] - piece[1] + fixed_overhead
    return filled, share


def _weighed(
    found: tuple[list[list[Piece]], int],
    tiles: Sequence[int],
    parts: int,
    fixed_overhead: int,
    unit_rows: int,
    cuts: Cuts,
) -> tuple[list[list[Piece]], int]:
    """The fill that was ``found`` and its capacity, or those without cuts."""

    def time(used: int, capacity: int) -> int:
        return (capacity - fixed_overhead) * max(cuts.tile_ns, cuts.read_ns * used)

    filled, capacity = found
    lower = max(capacity, max(tiles, default=0) + fixed_overhead)
    for more in range(lower, lower + TRIED):
        whole = _fill(tiles, more, fixed_overhead, whole=True)
        if len(whole) <= parts:
            merge = MERGE_NS + unit_rows * 4 // 5 * len(filled)
            if time(len(whole), more) <= time(len(filled), capacity) + merge:
                return whole, more
            break
    return found


def _fill(
    tiles: Sequence[int], capacity: int, fixed_overhead: int, *, whole: bool = False
) -> list[list[Piece]]:
    """Greedy in-order fill: parts as lists of (unit, tile_begin, tile_end).

    Args:
        whole: units are not cut; each fits into a part.
    """
    parts: list[list[Piece]] = [[]]
    room = capacity
    for unit, count in enumerate(tiles):
        begin = 0
        while True:
            # a unit that sees nothing still is an item, and needs room for its overhead only
            if room < fixed_overhead + (count if whole else min(1, count)):
                parts.append([])
                room = capacity
            end = min(count, begin + room - fixed_overhead)
            parts[-1].append((unit, begin, end))
            room -= end - begin + fixed_overhead
            begin = end
            if begin == count:
                break
    return parts


def records_reference(
    records: Sequence[Sequence[int]],
    cache_seqlens: Sequence[int],
    max_tokens: int,
    token_tile: int = 64,
    rows: int = 1,
    num_kv_heads: int = 1,
) -> PlanReference:
    """The tables that ``records_to_plan`` makes of FlashMLA's records, entry for entry.

    Only where a record begins counts, as a cut on the line of all requests' tiles, on which an
    empty request has one place; ``dsl_kernels/schedule/records_to_plan.py`` says more.

    Args:
        records: one a part; its request and block come first.
        cache_seqlens: tokens of each of the b >= 1 requests.
        max_tokens: capacity of a block-table row in tokens.
        rows: query rows of a request that read one KV head.
        num_kv_heads: every request is one sequence for each.
    """
    tiles = tile_counts(cache_seqlens, token_tile, max_tokens)
    at = [0, *itertools.accumulate(max(count, 1) for count in tiles)]

    def position(request: int, block: int) -> int:
        if request < 0:
            return 0
        if request >= len(tiles):
            return at[-1]
        return min(at[request] + max(block, 0), at[request + 1])

    begins = (position(*record[:2]) for record in records[1:])
    cuts = [0, *itertools.accumulate(begins, max), at[-1]]
    pieces = [
        1 + len({cut for cut in cuts if first < cut < end}) for first, end in itertools.pairwise(at)
    ]
    counts = [n if n > 1 else 0 for n in pieces for _ in range(num_kv_heads)]
    split_begin = [0, *itertools.accumulate(counts)]
    used = list(split_begin)
    work_items: list[Item] = []
    part_begin = [0]
    for first, end in itertools.pairwise(cuts):
        for head in range(num_kv_heads):
            place = first
            while place < end:
                request = bisect.bisect_right(at, place) - 1
                stop = min(end, at[request + 1])
                sequence, slot = request * num_kv_heads + head, -1
                if pieces[request] > 1:
                    slot = used[sequence]
                    used[sequence] += 1
                what = (place - at[request], min(stop - at[request], tiles[request]), slot)
                whose = (sequence * rows, (sequence + 1) * rows, NOTHING_HIDDEN, 0)
                work_items.append((sequence, *what, *whose))
                place = stop
            part_begin.append(len(work_items))
    return PlanReference(work_items, part_begin, split_begin, 0, [], [], [])


def records_of(plan: PlanReference) -> tuple[list[tuple[int, ...]], list[int]]:
    """(records, num_splits) that ``plan_to_records`` makes of a plan whose units are sequences.

    Row p: first request, its first block, last request, the end block in it, piece of the first
    request, whether the first is split, whether the last is, 0; a part without work begins behind
    the last request.  num_splits: pieces of requests, cumulative, one of a request that is whole.
    """
    split = plan.split_begin
    records: list[tuple[int, ...]] = []
    for first, end in itertools.pairwise(plan.part_begin):
        if first == end:
            records.append((len(split) - 1, 0, len(split) - 1, 0, 0, 0, 0, 0))
            continue
        one, last = plan.work_items[first], plan.work_items[end - 1]
        piece = one[3] - split[one[0]] if one[3] >= 0 else 0
        own = (one[0], one[1], last[0], last[2], piece, int(one[3] >= 0), int(last[3] >= 0), 0)
        records.append(own)
    pieces = (max(end - first, 1) for first, end in itertools.pairwise(split))
    return records, [0, *itertools.accumulate(pieces)]

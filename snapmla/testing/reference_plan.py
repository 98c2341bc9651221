"""The decode schedule in plain Python: the mirror of the ``plan_decode`` kernel.

A *part* is the share of work of one row of CTAs (``grid.y`` of the decode kernel).  Sequences are
laid end to end in batch order and cut into at most ``parts`` parts; a piece of a sequence inside
one part is an *item*.  An item of n tiles costs n + fixed_overhead tiles: the overhead stands for
what every item pays (loading Q, first tile's latency, epilogue).

Among all in-order cuts the one returned has the smallest possible largest part cost T:

* For a given T the greedy fill (take as much of the next sequence as fits, move on when less than
  one tile would fit) needs the fewest parts.  From a later starting position one part reaches at
  least as far, because any range costs no more when its beginning is cut off; so taking the
  farthest end in every part is optimal.
* Feasibility is monotone in T, so trying T = T0, T0 + 1, ... from a lower bound finds the optimum.
  T0 = max(ceil(total cost / parts), fixed_overhead + 1).
* T0 + 2 * fixed_overhead + 1 is always feasible: a part that the greedy fill leaves has less than
  fixed_overhead + 1 of room, and every part adds at most one overhead by cutting a sequence.

Capacity: every cut of a sequence is a boundary between two parts, so there are at most parts - 1
cuts and n_items <= b + parts - 1.  A sequence with c cuts is split into c + 1 <= 2 c items that
need an accumulation slot, hence slots <= 2 * (parts - 1).

Fixed splits (``split_tiles`` > 0) trade balance for independence of the batch: every sequence is
cut after each ``split_tiles`` tiles, whoever its neighbours are, so the pieces, and the order in
which they are merged, are its own.  Items are laid end to end by cost and part p gets those that
begin in [p, p + 1) * ceil(total / parts); a part exceeds that by less than one item.  There are at
most b * ceil(max_tokens / token_tile / split_tiles) items, and as many slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Piece = tuple[int, int, int]  # (batch, tile_begin, tile_end)


@dataclass(frozen=True)
class PlanReference:
    """The schedule's tables.

    Attributes:
        work_items: (batch, tile_begin, tile_end, slot); slot -1 writes the output directly.
        part_begin: parts + 1 indices into ``work_items``.
        split_begin: b + 1 indices of accumulation slots; an empty range means unsplit.
        part_cost: the T that was found, in tiles; with fixed splits ceil(total / parts).
    """

    work_items: list[tuple[int, int, int, int]]
    part_begin: list[int]
    split_begin: list[int]
    part_cost: int


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
) -> PlanReference:
    """The schedule that ``plan_decode`` computes on the device, entry for entry.

    Args:
        cache_seqlens: tokens of each of the b >= 1 sequences.
        parts: upper bound of parts, >= 1.
        token_tile: tokens in a tile.
        fixed_overhead: cost of an item beyond its tiles, in tiles, >= 0.
        max_tokens: capacity of a block-table row in tokens.
        split_tiles: tiles of a piece with fixed splits; 0 cuts for balance.

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
    ):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    tiles = tile_counts(cache_seqlens, token_tile, max_tokens)
    if split_tiles:
        filled, capacity = _fixed(tiles, parts, fixed_overhead, split_tiles)
        return _number(filled, len(tiles), parts, capacity)
    total = sum(tiles) + fixed_overhead * len(tiles)
    capacity = max(-(-total // parts), fixed_overhead + 1)
    while parts_needed(tiles, capacity, fixed_overhead) > parts:
        capacity += 1
    return _number(_fill(tiles, capacity, fixed_overhead), len(tiles), parts, capacity)


def _number(filled: list[list[Piece]], batch_size: int, parts: int, capacity: int) -> PlanReference:
    """Numbers items and slots of pieces that are already dealt to parts."""
    pieces = [0] * batch_size
    for part in filled:
        for batch, _, _ in part:
            pieces[batch] += 1
    split_begin = [0]
    for count in pieces:
        split_begin.append(split_begin[-1] + (count if count > 1 else 0))
    work_items: list[tuple[int, int, int, int]] = []
    part_begin = [0]
    used = list(split_begin)
    for part in filled:
        for batch, begin, end in part:
            slot = -1
            if pieces[batch] > 1:
                slot = used[batch]
                used[batch] += 1
            work_items.append((batch, begin, end, slot))
        part_begin.append(len(work_items))
    part_begin += [len(work_items)] * (parts + 1 - len(part_begin))
    return PlanReference(work_items, part_begin, split_begin, capacity)


def _fixed(
    tiles: Sequence[int], parts: int, fixed_overhead: int, split_tiles: int
) -> tuple[list[list[Piece]], int]:
    """Pieces of ``split_tiles`` tiles, dealt to parts by where they begin; and a part's share."""
    pieces = [
        (batch, begin, min(begin + split_tiles, count))
        for batch, count in enumerate(tiles)
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


def _fill(tiles: Sequence[int], capacity: int, fixed_overhead: int) -> list[list[Piece]]:
    """Greedy in-order fill: parts as lists of (batch, tile_begin, tile_end)."""
    parts: list[list[Piece]] = [[]]
    room = capacity
    for batch, count in enumerate(tiles):
        begin = 0
        while True:
            # an empty sequence still is an item, and needs room for its overhead only
            if room < fixed_overhead + min(1, count):
                parts.append([])
                room = capacity
            end = min(count, begin + room - fixed_overhead)
            parts[-1].append((batch, begin, end))
            room -= end - begin + fixed_overhead
            begin = end
            if begin == count:
                break
    return parts

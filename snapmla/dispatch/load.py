"""What the busiest part has to do where all units are equally long and the host knows it: sparse
decode over full lists."""

from __future__ import annotations

import math
from typing import NamedTuple

# What a call takes longer where something is cut and merged: ``profiles.merge_cost``, an H200.
MERGE_US = 1.5
# What an item takes beside its tiles, in tiles, of any sparse kernel: ``profiles.sparse_tiles``.
ITEM_TILES = 3.0


class Share(NamedTuple):
    """How units are shared out among parts.

    Attributes:
        parts: how many.
        whole: whether no unit is cut, so that no merge is launched.
        work: of the busiest part, in tiles, what its items take beside them included.
        merges: whether some unit is cut.
    """

    parts: int
    whole: bool
    work: float
    merges: bool

    def us(self, tile_us: float) -> float:
        """What it takes beside what every call takes."""
        return self.work * tile_us + (MERGE_US if self.merges else 0.0)


class Load(NamedTuple):
    """Units of query rows, all of as many tiles, and the parts that there may be."""

    units: int
    parts: int
    tiles: int

    def whole(self) -> Share:
        """Units that nobody cuts."""
        rounds = -(-self.units // self.parts)
        return Share(self.parts, True, rounds * (self.tiles + ITEM_TILES), False)

    def cut(self, parts: int) -> Share:
        """Parts of equal cost: a unit is cut wherever a part ends in it."""
        ends_meet = math.gcd(self.units, parts)
        items = self.units + parts - ends_meet
        work = (self.units * self.tiles + ITEM_TILES * items) / parts
        return Share(parts, False, max(work, 1 + ITEM_TILES), items > self.units)

    def shares(self) -> tuple[Share, ...]:
        """Those to choose from: whole, cut for all parts, cut into equal pieces."""
        found = [self.whole(), self.cut(self.parts)]
        if self.units < self.parts and self.parts % self.units:
            found.append(self.cut(self.parts // self.units * self.units))
        return tuple(found)

    def best(self, tile_us: float) -> Share:
        """The one that takes least, by a tile's time."""
        return min(self.shares(), key=lambda share: share.us(tile_us))

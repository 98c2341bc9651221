"""Work of the busiest part, for calls whose units have one length that the host knows.

Such calls are sparse decodes over full lists.
"""

from __future__ import annotations

from typing import NamedTuple

# Tiles that an item costs beside its own, in any sparse kernel: ``profiles.tables.sparse_tiles``.
ITEM_TILES = 2.0


class Share(NamedTuple):
    """Units shared out among parts.

    Attributes:
        work: of the busiest part, in tiles, what its items take beside them included.
        cut: whether units are cut, so that their pieces must be merged.
    """

    work: float
    cut: bool


class Load(NamedTuple):
    """Units of query rows, all of as many tiles, and how many parts there are."""

    units: int
    parts: int
    tiles: int

    def shares(self) -> tuple[Share, ...]:
        """The candidate schedules: units whole, and units cut into equal shares if that differs."""
        units, parts, tiles = self
        whole = Share(-(-units // parts) * (tiles + ITEM_TILES), False)
        if units % parts == 0:
            return (whole,)
        # a part that begins in a unit and ends in another takes no longer than one of one piece
        return whole, Share((units * tiles + ITEM_TILES * max(units, parts)) / parts, True)

"""Events of V4 decode's items that a build with stamps records (``stamps1`` in a variant's name,
sm90/mix16_v4_stamps.py).

Standard library only: the host that reads them needs no compiler (``profiles/item_stamps.py``).
"""

from __future__ import annotations

from enum import IntEnum

EVENTS, KEPT = 20, 8  # of a CTA's record, words of an event: its first times
SLOTS = 8  # of ``o_accum``, the last ones, that records lie in


class Event(IntEnum):
    """Place of an event; each is recorded by the first thread of its warp or warpgroup."""

    ENTRY = 0  # first instructions of the kernel
    WAITED = 1  # behind the PDL wait
    STAGE_WANTED = 2  # a tile's rows are known, by gather warp 0
    STAGE_FREE = 3
    COPIES_ISSUED = 4
    Q_WANTED = 5  # an item's rows of Q are known, by the warp that asks for them
    Q_ASKED = 6  # their stage is free
    LANDED = 7  # a tile's bytes, as the announcer sees it
    SCALES_MADE = 8
    Q_WAITED = 9  # softmax has nothing to do without an item's Q
    Q_CONVERTED = 10  # as softmax sees it
    TILE_THERE = 11
    SCORES = 12  # of a tile
    P_GIVEN = 13  # of a tile; of 64 rows over lists it is announced with the next one's scores
    SUMS_GIVEN = 14  # 1 / row sums of an item
    P_TAKEN = 15  # of a tile, by the first half of P.V
    PRODUCTS_END = 16  # of an item
    ROWS_WRITTEN = 17  # of an item

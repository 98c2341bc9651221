"""The list of work of dense MHA prefill: its layout in the workspace, for kernels and hosts.

Standard library only.

A *row tile* is ``ROWS`` query rows of one sequence and one head.  Tiles of all heads are alike, so
the list names a tile once, longest first, and kernels walk it by sections of ``SECTION`` heads:
work tile j of t row tiles is head ``j mod heads`` of the section ``j // (SECTION t)``.

    words 0..3       work tiles taken beyond the first of each CTA | row tiles t | 0 | 0
    words 4 + 2 i    sequence, row tile of it; i < t
"""

from __future__ import annotations

ROWS = 128  # query rows of a row tile
KEYS = 128  # keys of a tile
SECTION = 8  # heads that are worked on side by side, so that K and V stay in L2
HEADER = 4  # words before the list
TILE_WORDS = 2
TAKEN, TILES = 0, 1  # words of the header


def most_tiles(total_q: int, batch: int) -> int:
    """The most row tiles that ``batch`` sequences of ``total_q`` query tokens together have."""
    return total_q // ROWS + min(batch, total_q)


def workspace_words(total_q: int, batch: int) -> int:
    """int32 words of the workspace of a call."""
    return HEADER + TILE_WORDS * most_tiles(total_q, batch)

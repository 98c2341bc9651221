"""Events of a decode CTA that a build with stamps records (``stamps1`` in a variant's name).

Standard library only: the host that reads them needs no compiler (``profiles/stamps.py``).
"""

from __future__ import annotations

from enum import IntEnum


class Stamp(IntEnum):
    """Word of a CTA's record; an event of every work tile leaves the last work tile's time."""

    ENTRY = 0  # first instructions of the kernel
    WAITED = 1  # behind the PDL wait: the kernels before are done
    FIRST_TMA = 2  # the first KV tile is asked for
    FIRST_TILE = 3  # and has landed
    SOFTMAX_END = 4  # of the last tile
    PRODUCTS_END = 5  # P.V of the last tile added up, by the first half of the P.V warps
    ROWS_WRITTEN = 6  # stores issued, by the same
    ROWS_WRITTEN_TOO = 7  # by the second half


WORDS = 8  # of 32 bits, a CTA's record: low halves of %globaltimer, nanoseconds; 0: never happened

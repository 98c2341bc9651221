"""Shared memory's 32 banks: wavefronts of an access, and how many it would take without conflicts.

A wavefront serves 128 bytes: one 4-byte word of each bank, to any number of lanes that want it.
Lanes that want other words of one bank wait for another wavefront.  Accesses of 8 bytes a lane go
by halves of the warp, of 16 bytes by quarters, whatever they ask for: an H200 takes 2 and 4
wavefronts even when all lanes read one address.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BANKS = 32
WIDTH = 128  # bytes of a wavefront


class Waves(NamedTuple):
    """Wavefronts of accesses: ``needed``, and ``ideal`` without bank conflicts."""

    needed: int
    ideal: int

    @property
    def conflicts(self) -> int:
        """Wavefronts that conflicts cost."""
        return self.needed - self.ideal


def wavefronts(addresses: NDArray[Any], nbytes: int, lanes: NDArray[Any] | None = None) -> Waves:
    """Wavefronts of one access of a warp: needed, and without bank conflicts.

    Args:
        addresses: (lanes,) byte addresses in shared memory of the lanes that take part.
        nbytes: that each lane accesses: 1, 2, 4, 8 or 16 (32 counts as two of 16).
        lanes: (lanes,) their numbers in the warp; None: 0, 1, 2, ...
    """
    at = np.asarray(addresses).astype(np.int64)
    if nbytes > 16:
        halves = [wavefronts(at + half, 16, lanes) for half in range(0, nbytes, 16)]
        return Waves(sum(x.needed for x in halves), sum(x.ideal for x in halves))
    lane = np.arange(len(at)) if lanes is None else np.asarray(lanes)
    together = min(32, WIDTH // max(nbytes, 4))  # lanes that are served together
    needed = ideal = 0
    for phase in np.unique(lane // together):
        words = (at[lane // together == phase, None] >> 2) + np.arange(max(1, nbytes // 4))
        distinct = np.unique(words)
        needed += int(np.bincount(distinct % BANKS).max())
        ideal += max(1, -(-len(distinct) // BANKS))
    return Waves(needed, ideal)

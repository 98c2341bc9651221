"""Proxy fences of global memory: which generic writes a cluster's async proxy may read.

``WarpClock.avc`` is of shared memory.  A second table for global memory would make each release
and acquire slower, and few kernels read by copy what they stored.  So each fence is kept with what
its lanes knew: a copy may read a write if its lane knows of a fence whose lane knew of the write.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .clocks import Ints, WarpClock, lanes_of


class GlobalFences:
    """The ``fence.proxy.async`` of one cluster that cover global memory.

    Args:
        lanes: threads of the cluster, whose numbers are their components.
    """

    def __init__(self, lanes: int) -> None:
        self.written: Ints = np.zeros(lanes, np.int32)  # time of each lane's last store
        # (components of the lanes, their time, [lane, writer] time up to which it knew the writer)
        self._kept: list[tuple[NDArray[np.int64], int, Ints]] = []
        self._last: dict[int, int] = {}  # by warp: its last one

    def wrote(self, comp: Any, time: int) -> None:
        """Lanes ``comp`` store to global memory."""
        self.written[comp] = time

    def fence(self, clock: WarpClock, m: Any) -> None:
        """Lanes ``m`` fence; to be told before their time steps."""
        if not self.written.any():
            return
        lanes = lanes_of(m)
        own = clock.own[lanes]
        seen = np.minimum(clock.vc[lanes, : len(self.written)], self.written)
        last = self._last.get(clock.warp)
        if last is not None:
            before, _, known = self._kept[last]
            if np.array_equal(before, own) and np.array_equal(known, seen):
                return  # who knows of this one knows of that one, which says the same
        self._last[clock.warp] = len(self._kept)
        self._kept.append((own, clock.time, seen))

    def visible(self, clock: WarpClock, lane: int, comp: Any, time: Any) -> NDArray[np.bool_]:
        """Tells which of the stores (comp, time) a copy may read that ``lane`` issues now."""
        found = np.zeros(len(comp), bool)
        for own, when, seen in self._kept:
            heard = clock.vc[lane, own] >= when
            if heard.any():
                found |= seen[heard].max(0)[comp] >= time
        return found

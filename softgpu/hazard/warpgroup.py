"""Instructions that the warps of a warpgroup must execute alike: wgmma and setmaxnreg.

PTX ISA 9.7.15 and 9.7.19: ``.aligned`` asks that all threads of the warpgroup execute the same
instruction; in code that runs under a condition, all of them must have evaluated it alike.  The
n-th such instruction of each of the four warps is therefore one and the same, and no warp ends
with fewer than another.  That the lanes of a warp come together is not for this rule: a warp whose
lanes do not is a ``Deadlock``.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .reports import PC_MASK, Reports

if TYPE_CHECKING:
    from .warp import WarpHazards

WARPS = 4  # of a warpgroup; the rank of its first warp is a multiple of this


class Warpgroup:
    """Aligned instructions that the warps of one warpgroup have executed, in order.

    Only those that some warp has not come to yet are kept.  The first difference is reported.  Then
    nothing can be said about the order, and the warpgroup is no longer looked at.
    """

    def __init__(self, report: Reports, warps: int) -> None:
        self._report = report
        self._counts = [0] * warps
        self._exits: dict[int, int] = {}  # events, by warp
        self._queue: deque[int] = deque()  # events; the first is the _passed-th of the warpgroup
        self._passed = 0
        self._follows = True

    def execute(self, warp: WarpHazards) -> None:
        """``warp`` executes such an instruction, with all its lanes."""
        if not self._follows:
            return
        who = warp.warp.index % WARPS
        number = self._counts[who]
        self._counts[who] = number + 1
        at = number - self._passed
        if at == len(self._queue):
            self._queue.append(warp.event)
            if self._exits:
                self._differ(warp, number, self._exits[min(self._exits)], "exit")
                return
        elif self._queue[at] & PC_MASK != warp.warp.pc:
            self._differ(warp, number, self._queue[at], "aligned instruction")
            return
        if at == 0 and min(self._counts) > self._passed:
            self._queue.popleft()
            self._passed += 1

    def leave(self, warp: WarpHazards) -> None:
        """All lanes of ``warp`` have exited."""
        who = warp.warp.index % WARPS
        self._exits[who] = warp.event
        missed = self._counts[who] - self._passed
        if self._follows and missed < len(self._queue):
            self._differ(warp, self._counts[who], self._queue[missed], "aligned instruction")

    def _differ(self, warp: WarpHazards, number: int, event: int, action: str) -> None:
        self._follows = False
        self._report.divergent_warpgroup(warp, number, event, action)

"""Global memory: races between the threads of one launch, and with the grid before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..memory import Region
from .clocks import lanes_of
from .shadow import Conflict, Index, first_unknown
from .warp import WarpHazards

if TYPE_CHECKING:
    from ..machine import Machine


@dataclass(frozen=True)
class Footprint:
    """Bytes that a finished grid wrote, for a dependent grid that started early.

    Attributes:
        start: first address; shift: log2 of a granule's bytes.
        mask: by granule, whether the grid wrote there.
        content: the bytes when it had finished.
        kernel: its name.
    """

    start: int
    shift: int
    mask: NDArray[np.bool_]
    content: NDArray[np.uint8]
    kernel: str

    def stale(self, address: int, nbytes: int, region: Region) -> bool:
        """The range holds bytes this grid wrote, and nobody rewrote them since."""
        first = (address - self.start) >> self.shift
        last = (address - self.start + nbytes - 1) >> self.shift
        if last < 0 or first >= len(self.mask) or not self.mask[max(first, 0) : last + 1].any():
            return False
        at = max(address, self.start)
        end = min(address + nbytes, self.start + len(self.content))
        now = region.bytes[at - region.base : end - region.base]
        return bool((now == self.content[at - self.start : end - self.start]).all())


class _Last:
    """The last access of one kind to each granule; cluster 0 means that there was none."""

    def __init__(self, granules: int) -> None:
        self.cluster = np.zeros(granules, np.int32)
        self.comp = np.zeros(granules, np.int32)
        self.time = np.zeros(granules, np.int32)
        self.event = np.zeros(granules, np.int32)

    def record(self, wh: WarpHazards, idx: Any, comp: Any, time: int) -> None:
        self.cluster[idx] = wh.owner.number
        self.comp[idx] = comp
        self.time[idx] = time
        self.event[idx] = wh.event


class _Shadow:
    """Last write and last generic read of the granules of one region."""

    def __init__(self, granules: int) -> None:
        self.writes, self.reads = _Last(granules), _Last(granules)
        self.written = False

    def write(self, wh: WarpHazards, idx: Any, comp: Any, time: int) -> None:
        self.written = True
        self.writes.record(wh, idx, comp, time)


class GlobalHazards:
    """Races in global memory between the threads of one launch, and with the grid before it.

    Blocks of different clusters run in no order, so any conflict between them is a hazard, except
    after an atomic or an acquire at gpu scope: what those order is not tracked.

    Attributes:
        ordered: numbers of the clusters that used such synchronisation.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.memory = machine, machine.memory
        self.shift = machine.program.global_shift
        self.ordered: set[int] = set()
        self._shadows: dict[int, _Shadow] = {}  # by the region's base
        spans = [(f.start, f.start + len(f.content)) for f in machine.prior]
        self._before = np.array(spans, np.int64).reshape(-1, 2)  # what grids before this one wrote

    def _shadow(self, region: Region) -> _Shadow:
        found = self._shadows.get(region.base)
        if found is None:
            found = _Shadow((region.end - region.base >> self.shift) + 1)
            self._shadows[region.base] = found
        return found

    def _granules(self, region: Region, address: int, nbytes: int) -> Index:
        first = address - region.base >> self.shift
        last = address - region.base + nbytes - 1 >> self.shift
        return np.arange(first, last + 1)

    # ---- accesses of lanes ---------------------------------------------------------------------
    def _lanes(self, addr: Any, m: Any, nbytes: int) -> tuple[_Shadow, Region, Index, Any] | None:
        """(shadow, region, granules, lane of each) of an access within one region, else None."""
        a = addr if m is True else addr[m]
        region = self.memory.find(int(a[0]))
        if region is None or int(a.min()) < region.start or int(a.max()) >= region.end:
            return None
        idx = (a - np.uint64(region.base)).astype(np.int64) >> self.shift
        rows = lanes_of(m)
        if nbytes >> self.shift > 1:
            idx, rows = idx[:, None] + np.arange(nbytes >> self.shift), rows[:, None]
        return self._shadow(region), region, idx, rows

    def _check(
        self, wh: WarpHazards, region: Region, last: _Last, idx: Any, rows: Any,
        actions: tuple[str, str],
    ) -> None:  # fmt: skip
        """Reports if the lanes do not know the recorded accesses; ``actions``: theirs, this."""
        cluster, comp, me = last.cluster[idx], last.comp[idx], wh.owner.number
        unknown = (cluster == me) & (wh.clock.vc[rows, comp] < last.time[idx])
        if me not in self.ordered:
            unknown |= (cluster != 0) & (cluster != me)
        if unknown.any():
            self._report(wh, region, last, idx, rows, unknown, actions)

    def read(self, wh: WarpHazards, addr: Any, m: Any, nbytes: int) -> None:
        """Lanes ``m`` load ``nbytes`` each."""
        self.early(wh, addr, m, nbytes, "read")
        found = self._lanes(addr, m, nbytes)
        if found is None:
            return
        sh, region, idx, rows = found
        if sh.written:
            self._check(wh, region, sh.writes, idx, rows, ("write", "read"))
        sh.reads.record(wh, idx, wh.clock.first + rows, wh.clock.time)

    def write(self, wh: WarpHazards, addr: Any, m: Any, nbytes: int) -> None:
        """Lanes ``m`` store ``nbytes`` each; ``early`` was told before the bytes changed."""
        found = self._lanes(addr, m, nbytes)
        if found is None:
            return
        sh, region, idx, rows = found
        self._check(wh, region, sh.writes, idx, rows, ("write", "write"))
        self._check(wh, region, sh.reads, idx, rows, ("read", "write"))
        sh.write(wh, idx, wh.clock.first + rows, wh.clock.time)
        wh.owner.fences.wrote(wh.clock.first + rows, wh.clock.time)

    def synchronising(self, wh: WarpHazards, addr: Any, m: Any, nbytes: int) -> None:
        """An atomic, relaxed or acquire access: races with nothing, but may come too early."""
        self.early(wh, addr, m, nbytes, "access")

    # ---- asynchronous accesses -----------------------------------------------------------------
    def async_read(self, wh: WarpHazards, lane: int, starts: Any, nbytes: int) -> None:
        """A copy issued by ``lane`` reads ``nbytes`` at each address of ``starts``."""
        one = np.arange(32) == lane
        for start in map(int, starts):
            region = self.memory.find(start)
            if region is None:
                continue
            self.early(wh, np.full(32, start, np.uint64), one, nbytes, "asynchronous read")
            sh = self._shadows.get(region.base)
            if sh is None or not sh.written:
                continue
            idx = self._granules(region, start, nbytes)
            last, me = sh.writes, wh.owner.number
            cluster = last.cluster[idx]
            unknown = (cluster != 0) & (cluster != me)
            mine = np.nonzero(cluster == me)[0]
            if len(mine):
                unknown[mine] = ~self._visible(wh, lane, last.comp[idx[mine]], last.time[idx[mine]])
            if unknown.any():
                rows = np.full(len(idx), lane)
                actions = ("write", "asynchronous read")
                self._report(wh, region, last, idx, rows, unknown, actions)

    def _visible(self, wh: WarpHazards, lane: int, comp: Any, time: Any) -> NDArray[np.bool_]:
        """Tells which of its own cluster's writes a copy may read that ``lane`` issues.

        Bulk stores are the async proxy's own; what lanes stored needs a fence of global memory.
        """
        known = wh.clock.avc[lane, comp] >= time
        stored = comp < wh.owner.layout.lanes
        if stored.any():
            fences = wh.owner.fences
            known[stored] = fences.visible(wh.clock, lane, comp[stored], time[stored])
        out: NDArray[np.bool_] = known
        return out

    def async_add(self, wh: WarpHazards, lane: int, starts: Any, nbytes: int) -> None:
        """A bulk addition: atomic, so it races with no other, but it may come too early."""
        one = np.arange(32) == lane
        for start in map(int, starts):
            self.early(wh, np.full(32, start, np.uint64), one, nbytes, "access")

    def async_write(self, wh: WarpHazards, lane: int, starts: Any, nbytes: int) -> None:
        """A bulk store writes ``nbytes`` at each address; complete when its group is waited for."""
        one = np.arange(32) == lane
        for start in map(int, starts):
            addr = np.full(32, start, np.uint64)
            whole = max(nbytes, 1 << self.shift)
            self.early(wh, addr, one, whole, "write")
            self.write(wh, addr, one, whole)
            region = self.memory.find(start)
            if region is not None:
                idx = self._granules(region, start, nbytes)
                comp = wh.agents["bulk-write"]
                self._shadow(region).write(wh, idx, comp, wh.bulk_group)

    # ---- reports -------------------------------------------------------------------------------
    def early(self, wh: WarpHazards, addr: Any, m: Any, nbytes: int, action: str) -> None:
        """Before griddepcontrol.wait: touches what the grid before this one writes?

        Not its own parameters: they may lie where a tensor was that the grid before wrote.
        """
        if wh.prior_known:
            return
        lanes = wh.ignorant(lanes_of(m))
        at = addr[lanes].astype(np.int64)[:, None]
        begin, end = self._before.T
        first, last = self.machine.parameter_span
        near = (at < end) & (at + nbytes > begin) & ((at < first) | (at >= last))
        if not near.any():
            return
        for row, grid in np.argwhere(near):
            address, before = int(at[row, 0]), self.machine.prior[grid]
            region = self.memory.find(address)
            if region is not None and before.stale(address, nbytes, region):
                wh.report.early_access(wh, address, int(lanes[row]), action, before.kernel)
                return

    def _report(
        self, wh: WarpHazards, region: Region, last: _Last, idx: Any, rows: Any,
        unknown: NDArray[np.bool_], actions: tuple[str, str],
    ) -> None:  # fmt: skip
        granule, row = first_unknown(idx, ~unknown, rows)
        found = Conflict(
            granule, row,
            int(last.comp[granule]), int(last.time[granule]), int(last.event[granule]),
        )  # fmt: skip
        at = region.base + (granule << self.shift)
        wh.report.global_race(wh, at, found, int(last.cluster[granule]), actions)

    # ---- the next grid -------------------------------------------------------------------------
    def footprints(self) -> list[Footprint]:
        """Footprints of this launch, one for each region that it wrote to."""
        name = self.machine.program.kernel.name
        out = []
        for region in self.memory.regions:
            sh = self._shadows.get(region.base)
            if sh is not None and sh.written:
                mask = sh.writes.cluster != 0
                out.append(Footprint(region.base, self.shift, mask, region.bytes.copy(), name))
        return out

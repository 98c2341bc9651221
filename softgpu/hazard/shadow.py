"""The shadow of shared memory: who accessed each granule last, and who does not know it.

A granule is the narrowest access of the kernel, 1 to 4 bytes.  Its index is what
``ClusterHazards.granules`` and ``span`` give.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]
FALSE = b"\0"  # of a bool array's bytes: to look for it there is cheaper than all() of 32 lanes
READERS = 128  # rows of last reads to begin with: of those without a read no page is touched


class Conflict(NamedTuple):
    """An earlier access that an accessor does not know.

    Attributes:
        granule: the first one where that is so.
        row: lane of the accessor, -1 for the whole warp.
        component, time, event: of the earlier access; component -1: nobody has written there.
    """

    granule: int
    row: int
    component: int
    time: int
    event: int


def first_unknown(idx: Any, known: NDArray[Any], rows: Any) -> tuple[int, int]:
    """(granule, row) of the first False in ``known``.

    Args:
        idx: granules, an array or a slice.
        rows: lanes, of a shape that broadcasts to that of ``known``; None: row is -1.
    """
    flat = int(np.argmin(known.reshape(-1)))
    if isinstance(idx, slice):
        granule = idx.start + flat
    else:
        granule = int(np.broadcast_to(idx, known.shape).reshape(-1)[flat])
    row = -1 if rows is None else int(np.broadcast_to(rows, known.shape).reshape(-1)[flat])
    return granule, row


class Shadow:
    """Last write and last reads of every granule.

    The queries take ``vc``, what the accessor knows: a (lanes, components) table with ``rows``, the
    lane of each granule; or one row of it for all granules, with ``rows`` None.
    """

    def __init__(self, granules: int) -> None:
        self.granules = granules
        self.comp = np.full(granules, -1, np.int32)
        self.time = np.zeros(granules, np.int32)
        self.event = np.zeros(granules, np.int32)
        self._rows: dict[int, int] = {}  # of the reads below, by reader
        self._reads = [np.zeros((READERS, granules), np.int32) for _ in range(3)]

    def write(self, idx: Any, comp: Any, time: Any, event: int) -> None:
        """Granules ``idx`` are written."""
        self.comp[idx] = comp
        self.time[idx] = time
        self.event[idx] = event

    def read(self, key: int, idx: Any, comp: Any, time: int, event: int) -> None:
        """Granules ``idx`` are read; ``key``: a row of last reads per warp and kind of reader."""
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows)
            if row == len(self._reads[0]):
                more = np.zeros((row, self.granules), np.int32)
                self._reads = [np.concatenate([x, more]) for x in self._reads]
        comps, times, events = self._reads
        comps[row][idx] = comp
        times[row][idx] = time
        events[row][idx] = event

    def unknown_write(
        self, idx: Any, vc: NDArray[Any], rows: Any, uninitialised: bool
    ) -> Conflict | None:
        """The first granule whose last write the accessor does not know.

        ``uninitialised``: one that nobody has written counts.
        """
        comp = self.comp[idx]
        known = vc[comp] >= self.time[idx] if rows is None else vc[rows, comp] >= self.time[idx]
        if FALSE not in known.tobytes():
            return None
        if not uninitialised:
            known |= comp < 0
            if known.all():
                return None
        granule, row = first_unknown(idx, known, rows)
        return Conflict(
            granule, row,
            int(self.comp[granule]), int(self.time[granule]), int(self.event[granule]),
        )  # fmt: skip

    def unknown_read(self, idx: Any, vc: NDArray[Any], rows: Any) -> Conflict | None:
        """A granule with a last read that the accessor does not know: of the first such reader."""
        used = len(self._rows)
        comps, times, events = (x[:used] for x in self._reads)
        comp = comps[:, idx] if isinstance(idx, slice) else comps.take(idx, 1)
        time = times[:, idx] if isinstance(idx, slice) else times.take(idx, 1)
        known = vc[comp] >= time if rows is None else vc[rows, comp] >= time
        if FALSE not in known.tobytes():
            return None
        reader = next(i for i, one in enumerate(known) if not one.all())
        granule, row = first_unknown(idx, known[reader], rows)
        last = (int(x[reader, granule]) for x in (comps, times, events))
        return Conflict(granule, row, *last)

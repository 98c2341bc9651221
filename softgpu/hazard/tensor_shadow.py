"""The shadow of tensor memory: who accessed each block of cells last.

A block is 16 lanes of one column: every form of tcgen05 touches whole blocks, but for lane masks of
an mma.  CTA r's blocks are rows 8 r to 8 r + 7 of (rows, 512) tables; an *area* indexes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..tensor_memory import COLUMNS, LANES

if TYPE_CHECKING:
    from ..tensor_memory import Cells

TALL = 16  # lanes of a block
ROWS = LANES // TALL  # of a CTA
Area = tuple[Any, slice]
Table = NDArray[np.int32]


class TensorConflict(NamedTuple):
    """An earlier access that an accessor does not know.

    Attributes:
        place: the CTA's rank and the cells in words; all that the same earlier instruction touched
            and this one touches.
        agent, time, event: of the earlier access; ``nobody`` of the columns: never written.
        order: of its pipeline, an index into ``Pipelines``; -1: none.
    """

    place: tuple[int, str]
    agent: int
    time: int
    event: int
    order: int = -1


@lru_cache(maxsize=256)
def _rows(lanes: bytes) -> Any:
    """Rows of a CTA that some lanes lie in: a slice if they are evenly spaced."""
    rows = np.unique(np.frombuffer(lanes, np.int64) // TALL)
    steps = np.unique(np.diff(rows))
    if len(steps) > 1:
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1, int(steps[0]) if len(steps) else 1)


def area_of(cells: Cells) -> Area:
    """Area of a rectangle of cells in the tables."""
    rows, first = _rows(np.ascontiguousarray(cells.lanes, np.int64).tobytes()), ROWS * cells.rank
    if isinstance(rows, slice):
        rows = slice(rows.start + first, rows.stop + first, rows.step)
    else:
        rows = rows + first
    return rows, slice(cells.first, cells.first + cells.columns)


def columns_of(rank: int, first: int, columns: int) -> Area:
    """All lanes of some columns of CTA ``rank``."""
    return slice(ROWS * rank, ROWS * (rank + 1)), slice(first, first + columns)


def _spans(numbers: NDArray[Any], size: int) -> str:
    """``0-31, 64-95`` of blocks of ``size``."""
    breaks = np.nonzero(np.diff(numbers) > 1)[0] + 1
    parts = np.split(numbers, breaks)
    return ", ".join(f"{int(p[0]) * size}-{int(p[-1]) * size + size - 1}" for p in parts)


def cells_text(area: Area, bad: NDArray[np.bool_] | None = None) -> tuple[int, str]:
    """(rank, ``columns 128-159, lanes 0-31``) of an area of one CTA, or of its marked blocks."""
    rows, columns = area
    at = np.arange(rows.stop)[rows] if isinstance(rows, slice) else rows
    if bad is None:
        bad = np.ones((len(at), columns.stop - columns.start), bool)
    rank, inside = np.divmod(at[bad.any(1)], ROWS)
    wide = np.nonzero(bad.any(0))[0] + columns.start
    return int(rank[0]), f"columns {_spans(wide, 1)}, lanes {_spans(inside, TALL)}"


class _Readers:
    """The last read of every block by one agent; ``latest`` is the newest of all."""

    def __init__(self, rows: int) -> None:
        self.time: Table = np.zeros((rows, COLUMNS), np.int32)
        self.event: Table = np.zeros((rows, COLUMNS), np.int32)
        self.latest = 0


class TensorShadow:
    """Last write and, for each agent, last read of every block of the cluster's tensor memory.

    Attributes:
        agent, time, event: of the last write; agent ``nobody`` at time 1: none.
        order: the pipeline it belongs to, see ``Pipelines``.
    """

    def __init__(self, ctas: int, nobody: int) -> None:
        shape = (ROWS * ctas, COLUMNS)
        self.nobody = nobody
        self.agent: Table = np.full(shape, nobody, np.int32)
        self.time: Table = np.ones(shape, np.int32)
        self.event: Table = np.zeros(shape, np.int32)
        self.order: Table = np.full(shape, -1, np.int32)
        self.readers: dict[int, _Readers] = {}

    def write(self, area: Area, agent: int, time: int, event: int, order: int = -1) -> None:
        """Blocks are written."""
        self.agent[area], self.time[area] = agent, time
        self.event[area], self.order[area] = event, order

    def relabel(self, area: Area, marked: NDArray[np.bool_], order: int) -> None:
        """The last write of the marked blocks belongs to another pipeline from now on."""
        labels = self.order[area]
        labels[marked] = order
        self.order[area] = labels

    def read(self, area: Area, agent: int, time: int, event: int) -> None:
        """Blocks are read."""
        row = self.readers.get(agent)
        if row is None:
            row = self.readers[agent] = _Readers(len(self.agent))
        row.time[area], row.event[area], row.latest = time, event, time

    def superseded(self, area: Area, agents: Iterable[int]) -> None:
        """A write that comes after these agents' reads stands for them: whoever knows that it is
        complete knows that they are."""
        for agent in agents:
            row = self.readers.get(agent)
            if row is not None:
                row.time[area] = 0

    def forget(self, area: Area) -> None:
        """Blocks hold nothing: nobody has written or read them."""
        self.write(area, self.nobody, 1, 0)
        for row in self.readers.values():
            row.time[area] = 0

    def unknown_writes(self, area: Area, known: NDArray[Any]) -> NDArray[np.bool_]:
        """Blocks whose last write is not covered by ``known``, a row over the agents."""
        out: NDArray[np.bool_] = known[self.agent[area]] < self.time[area]
        return out

    def writer(self, area: Area, bad: NDArray[np.bool_]) -> TensorConflict:
        """The write behind the first of the marked blocks."""
        row, column = np.unravel_index(int(np.argmax(bad)), bad.shape)
        agent, time, event, order = (
            int(t[area][row, column]) for t in (self.agent, self.time, self.event, self.order)
        )
        same = bad & (self.agent[area] == agent) & (self.event[area] == event)
        return TensorConflict(cells_text(area, same), agent, time, event, order)

    def read_since_written(self, area: Area, agent: int) -> NDArray[np.bool_]:
        """Blocks that ``agent`` wrote last, and has read after that."""
        mine: NDArray[np.bool_] = self.agent[area] == agent
        row = self.readers.get(agent)
        return mine & (row.time[area] > self.time[area]) if row is not None else mine & False

    def unknown_read(
        self, area: Area, known: NDArray[Any], but: frozenset[int]
    ) -> TensorConflict | None:
        """A read of some block that is not covered by ``known``; not of the agents ``but``."""
        for agent, row in self.readers.items():
            if known[agent] >= row.latest or agent in but:
                continue
            bad = known[agent] < row.time[area]
            if bad.any():
                at = np.unravel_index(int(np.argmax(bad)), bad.shape)
                time, event = int(row.time[area][at]), int(row.event[area][at])
                same = bad & (row.event[area] == event)
                return TensorConflict(cells_text(area, same), agent, time, event)
        return None


class OperandFormats:
    """The element format in which an mma last took each 16-byte chunk of shared memory.

    A chunk, named by its first granule, counts while it holds what it held then: its last write is
    the same.
    """

    def __init__(self, granules: int) -> None:
        self._names = [""]
        self.format: Table = np.zeros(granules, np.int32)
        self.event: Table = np.zeros(granules, np.int32)
        self._writer: Table = np.zeros(granules, np.int32)
        self._time: Table = np.zeros(granules, np.int32)

    def take(
        self, chunks: NDArray[Any], name: str, writer: NDArray[Any], time: NDArray[Any], event: int
    ) -> tuple[int, str, int] | None:
        """An mma takes chunks, last written by ``writer`` at ``time``, in format ``name``.

        Returns:
            (a chunk, its other format, that mma), if one took the same bytes in another format.
        """
        if name not in self._names:
            self._names.append(name)
        mine, before, found = self._names.index(name), self.format[chunks], None
        other = (before != mine) & (before != 0)
        if other.any():
            other &= (self._writer[chunks] == writer) & (self._time[chunks] == time)
            if other.any():
                first = int(np.argmax(other))
                chunk = int(chunks[first])
                found = chunk, self._names[int(before[first])], int(self.event[chunk])
        self.format[chunks], self.event[chunks] = mine, event
        self._writer[chunks], self._time[chunks] = writer, time
        return found


class Pipeline(NamedTuple):
    """Facts by which two asynchronous operations follow each other in order, PTX ISA 9.7.18.6.

    Attributes:
        warp: the issuer's, in the cluster.
        kind, group, shape: as in ``TensorOp``.
        address: first lane and column of what it writes.
        elements: "f16" or "f8f6f4" of an mma.
        taken: of cells that an mma of the warp has taken as its A since a cp wrote them: what may
            follow that mma follows the cp.
    """

    warp: int
    kind: str
    group: int
    shape: Any
    address: tuple[int, int]
    elements: str
    taken: bool = False

    def leads(self, after: Pipeline, role: str) -> bool:
        """``after``, which uses what this one writes as its ``role``, comes after it.

        ``role``: A or D of an mma, empty for what a cp writes.
        """
        if (self.warp, self.group) != (after.warp, after.group):
            return False
        if self.kind == "cp":
            return self.taken or role == "A"
        return role == "D" and (self.shape, self.address) == (after.shape, after.address)


class Pipelines:
    """Every pipeline of a cluster, numbered."""

    def __init__(self) -> None:
        self._numbers: dict[Pipeline, int] = {}
        self.all: list[Pipeline] = []

    def number(self, one: Pipeline) -> int:
        """Its number."""
        found = self._numbers.get(one)
        if found is None:
            found = self._numbers[one] = len(self.all)
            self.all.append(one)
        return found

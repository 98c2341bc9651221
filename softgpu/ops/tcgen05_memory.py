"""tcgen05.alloc, dealloc, ld, st, wait, fence: PTX ISA 9.7.18.7-9, 9.7.18.11."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decode import Decoder, Handler, Mods, op, unmodelled
from ..errors import TensorMemoryError
from ..ptx import Imm, Instr
from ..tensor_memory import (
    COLUMN_MASK,
    LANE_SHIFT,
    Cells,
    Request,
    TensorMemory,
    blocks_of,
    peer,
)
from ..warp import Wait
from .common import whole_warp
from .load_store import address, write
from .tcgen05_common import cta_group, memory_of, need_blackwell

QUARTER = 32  # lanes of tensor memory that a warp may load and store


# ---- allocation ----------------------------------------------------------------------------------
def _common_room(memories: list[TensorMemory], columns: int) -> int | None:
    """First column from which all of these CTAs have so many free."""
    rooms = [set(m.free_at(columns)) for m in memories]
    return min(set.intersection(*rooms), default=None)


def _serve(w: Any, kind: str, group: int, columns: int, first: int, *peer: Any) -> int | None:
    """Allocates or frees in every CTA of the group; None where an allocation has to wait.

    ``peer``: the hazard checker's ticket of the peer's warp.
    """
    blocks = blocks_of(w.block, group)
    memories = [memory_of(b) for b in blocks]
    place: int | None = first
    if kind == "alloc":
        for memory in memories:
            memory.check_request(columns)
        place = _common_room(memories, columns)
    if place is None:
        return None
    for block, memory in zip(blocks, memories, strict=True):
        if kind == "alloc":
            memory.take(place, columns)
        else:
            memory.free(place, columns)
        if w.hazard is not None:
            note = w.hazard.tensor.allocated if kind == "alloc" else w.hazard.tensor.freed
            note(block.rank, place, columns, *peer)
    w.machine.version += 1
    return place


def _meet(w: Any, request: Request) -> Any:
    """Serves a pair when both CTAs have asked for the same: a Wait, or the first column.

    The CTA that asks first waits for its peer, and then for room.
    """
    pair = w.block.cluster.pairs[request.rank // 2]
    other = pair.get(request.meets)
    if other is None:
        pair[request.meets] = request
        w.machine.version += 1
        return None
    if other.rank == request.rank:
        return Wait(
            lambda: pair.get(request.meets) is not other,
            lambda: f"an earlier tcgen05.{other.kind} of this CTA to meet its peer's",
        )
    if other.columns != request.columns:
        raise TensorMemoryError(
            f"tcgen05.{request.kind} of {request.columns} columns, but the CTA's peer executes "
            f"tcgen05.{other.kind} of {other.columns}"
        )
    tickets = () if other.ticket is None else (other.ticket,)
    place = _serve(w, request.kind, 2, request.columns, request.first or 0, *tickets)
    if place is None:
        return Wait(
            lambda: (
                _common_room([memory_of(b) for b in blocks_of(w.block, 2)], request.columns)
                is not None
            ),
            lambda: f"tcgen05.alloc: {request.columns} free columns in both CTAs",
        )
    other.place = place
    del pair[request.meets]
    w.machine.version += 1
    return place


@op("tcgen05.alloc", "tcgen05.dealloc")
def manage(ins: Instr, k: Decoder) -> Handler:
    """alloc [where], columns; dealloc address, columns.  A warp of each CTA for cta_group::2."""
    kind = ins.parts[1]
    mods = Mods(ins, 2)
    group = cta_group(ins, k, mods)
    for name in ("sync", "aligned", "b32", "shared::cta"):
        mods.flag(name)
    mods.done()
    columns = k.src(ins.args[1], "u32")
    alloc = kind == "alloc"
    where = address(k, ins.args[0], "shared") if alloc else None
    freed = -1 if alloc else k.src(ins.args[0], "u32")

    def finish(w: Any, place: int) -> None:
        if where is not None:
            mask = np.arange(32) == 0
            write(w, where(w.v), mask, np.full(32, place, np.uint32), 1, "shared")

    def run(w: Any, m: Any) -> Any:
        if m is not True:
            return whole_warp(w, m, f"tcgen05.{ins.parts[1]}")
        count = int(w.v[columns][0])
        first = 0 if alloc else _start(int(w.v[freed][0]), ins.opcode)
        memory = memory_of(w.block)
        if alloc:
            memory.check_request(count)
        if group == 1:
            place = _serve(w, kind, 1, count, first)
            if place is None:
                return Wait(
                    lambda: bool(memory.free_at(count)),
                    lambda: f"tcgen05.alloc: {count} free columns; allocated are {memory.owned}",
                )
            return finish(w, place)
        peer(w.block)
        ticket = None if w.hazard is None else w.hazard.tensor.ticket()
        request = Request(kind, w.block.rank, count, None if alloc else first, ticket)
        met = _meet(w, request)
        if isinstance(met, int):
            return finish(w, met)
        if met is not None:
            return met
        return Wait(
            lambda: request.place is not None,
            lambda: f"tcgen05.{kind} of the CTA's peer",
            retry=False,
            resume=lambda: finish(w, request.place or 0),
        )

    return run


def _start(where: int, what: str) -> int:
    """First column of an allocation from its address."""
    if where >> LANE_SHIFT:
        raise TensorMemoryError(f"{what}: address {where:#x} has a lane")
    return where


@op("tcgen05.relinquish_alloc_permit")
def relinquish(ins: Instr, k: Decoder) -> Handler:
    """No warp of this CTA allocates after it."""
    mods = Mods(ins, 2)
    cta_group(ins, k, mods)
    mods.flag("sync"), mods.flag("aligned")
    mods.done()

    def run(w: Any, m: Any) -> Any:
        if m is not True:
            return whole_warp(w, m, f"tcgen05.{ins.parts[1]}")
        memory_of(w.block).permit = False
        return None

    return run


# ---- load and store ------------------------------------------------------------------------------
@lru_cache(maxsize=256)
def fragment(shape: str, num: int, offset: int, half: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """(lane, column) of register r in thread t, each (registers, 32), relative to the address.

    Figures of PTX ISA 9.7.18.2.3.  ``half``: a register holds the low halves of this column and of
    the next one.  ``offset``: of the second half of 16x32bx2.
    """
    t = np.arange(32)[None, :]
    r = np.arange(num * {"16x128b": 2, "16x256b": 4}.get(shape, 1))[:, None]
    step = 2 if half else 1
    if shape == "32x32b":
        lane, column = t, r
    elif shape == "16x32bx2":
        lane, column = t % 16, r
    elif shape == "16x64b":
        lane, column = t // 4 + 8 * (t & 1), 2 * r + (t >> 1 & 1)
    elif shape == "16x128b":
        lane, column = t // 4 + 8 * (r & 1), 4 * (r >> 1) + t % 4
    else:  # 16x256b
        lane, column = t // 4 + 8 * (r >> 1 & 1), 8 * (r >> 2) + 2 * (t % 4) + (r & 1)
    column = step * column
    if shape == "16x32bx2":
        column = column + np.where(t < 16, 0, offset)
    lane, column = np.broadcast_arrays(lane, column)
    return lane, column


class _Transfer:
    """One tcgen05.ld or tcgen05.st."""

    def __init__(self, ins: Instr, k: Decoder) -> None:
        need_blackwell(ins, k)
        self.ins, self.load = ins, ins.parts[1] == "ld"
        mods = Mods(ins, 2)
        shape = mods.take("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
        num = mods.take(*(f"x{1 << i}" for i in range(8)))
        self.half = mods.flag("pack::16b" if self.load else "unpack::16b")
        for name in ("sync", "aligned", "b32"):
            mods.flag(name)
        mods.done()
        if shape is None or num is None:
            raise unmodelled(ins, "shape")
        args = list(ins.args)
        registers = args.pop(0) if self.load else args.pop()
        self.base, self.plus = k.mem(args[0], "u32")
        offset = 0
        if shape == "16x32bx2":
            if len(args) != 2 or not isinstance(args[1], Imm):
                raise unmodelled(ins, "immediate offset expected")
            offset = args[1].bits
        self._slots(k, registers)
        self.lane, self.column = fragment(shape, int(num[1:]), offset, self.half)
        if len(self.slots) != len(self.lane):
            raise unmodelled(ins, f"{len(self.slots)} registers, expected {len(self.lane)}")
        self.height = int(self.lane.max()) + 1
        width = int(self.column[:, :16].max()) + (2 if self.half else 1)
        parts = [(0, width)] if shape != "16x32bx2" else [(0, width), (offset, width)]
        self.parts = parts  # first column, columns

    def _slots(self, k: Decoder, registers: Any) -> None:
        items = k.items(registers)
        if self.load:
            found = [k.views[k.dst(x, "u32")] for x in items]
            self.slots = np.array([view[2] for view in found])
        else:
            self.sources = [k.src(x, "u32") for x in items]
            self.slots = np.array(self.sources)

    def run(self, w: Any, m: Any) -> Any:
        """The handler."""
        if m is not True:
            return whole_warp(w, m, f"tcgen05.{self.ins.parts[1]}")
        where = w.v[self.base]
        if (where != where[0]).any():
            raise TensorMemoryError(f"{self.ins.opcode}: the lanes name different addresses")
        at = int(where[0]) + self.plus
        cells = self._cells(w, at)
        rows = self.lane + int(cells[0].lanes[0])
        columns = self.column + (at & COLUMN_MASK)
        if w.hazard is not None:
            (w.hazard.tensor.load if self.load else w.hazard.tensor.store)(cells)
        memory = memory_of(w.block)
        if self.load:
            w.tensor_queue.before_load(cells)
            w.store[32][self.slots] = self._gather(memory.cells, rows, columns)
            return None
        data = np.stack([w.v[s] for s in self.sources])

        def land() -> None:
            for part in cells:
                memory.check(part.first, part.columns, self.ins.opcode)
            self._scatter(memory.cells, rows, columns, data)

        w.tensor_queue.store(cells, land, self.ins)
        return None

    def _cells(self, w: Any, at: int) -> tuple[Cells, ...]:
        """Cells that it touches, from address ``at``.

        Its lane field counts within the warp's quarter, or within the CTA's 128 lanes.

        Raises:
            TensorMemoryError: columns nobody owns, lanes of another quarter, a 16-lane shape that
                starts elsewhere than at lane 0 or 16.
        """
        first, lane, quarter = at & COLUMN_MASK, at >> LANE_SHIFT, w.index % 4
        low = lane % QUARTER
        if lane >= QUARTER and lane // QUARTER != quarter:
            raise TensorMemoryError(
                f"{self.ins.opcode}: lane {lane}; warp {w.index} reaches lanes "
                f"{QUARTER * quarter} to {QUARTER * quarter + QUARTER - 1}"
            )
        if low not in ((0,) if self.height == QUARTER else (0, 16)):
            raise TensorMemoryError(
                f"{self.ins.opcode}: starts at lane {low} of the warp's 32, expected "
                f"{'0' if self.height == QUARTER else '0 or 16'}"
            )
        lanes = np.arange(self.height) + low + QUARTER * quarter
        for start, n in self.parts:
            memory_of(w.block).check(first + start, n, self.ins.opcode)
        return tuple(Cells(w.block.rank, lanes, first + start, n) for start, n in self.parts)

    def _gather(self, memory: NDArray[np.uint32], rows: Any, columns: Any) -> NDArray[np.uint32]:
        got: NDArray[np.uint32] = memory[rows, columns]
        if self.half:
            low = got & np.uint32(0xFFFF)
            got = low | memory[rows, columns + 1] << np.uint32(16)
        return got

    def _scatter(self, memory: NDArray[np.uint32], rows: Any, columns: Any, data: Any) -> None:
        if self.half:
            memory[rows, columns] = data & np.uint32(0xFFFF)
            memory[rows, columns + 1] = data >> np.uint32(16)
        else:
            memory[rows, columns] = data


@op("tcgen05.ld", "tcgen05.st")
def transfer(ins: Instr, k: Decoder) -> Handler:
    """A warp and its quarter of the lanes.

    What a load returns is what the cells hold at its issue; whether something may change them
    before the wait::ld is the hazard checker's question.
    """
    return _Transfer(ins, k).run


@op("tcgen05.wait::ld", "tcgen05.wait::st")
def wait(ins: Instr, k: Decoder) -> Handler:
    need_blackwell(ins, k)
    load = ins.parts[1] == "wait::ld"

    def run(w: Any, m: Any) -> Any:
        if m is not True:
            return whole_warp(w, m, f"tcgen05.{ins.parts[1]}")
        if not load:
            w.tensor_queue.wait_store()
        if w.hazard is not None:
            (w.hazard.tensor.wait_load if load else w.hazard.tensor.wait_store)()
        return None

    return run


@op("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(ins: Instr, k: Decoder) -> Handler:
    """Orders code, not data: only the hazard checker looks at it."""
    need_blackwell(ins, k)
    before = ins.parts[1] == "fence::before_thread_sync"

    def run(w: Any, m: Any) -> None:
        if w.hazard is not None:
            w.hazard.tensor.fence(before, m)

    return run

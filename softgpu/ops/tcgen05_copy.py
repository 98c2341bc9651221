"""tcgen05.cp and tcgen05.commit: PTX ISA 9.7.18.9.1, 9.7.18.12.1."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decode import Decoder, Handler, Mods, op, unmodelled
from ..errors import TensorMemoryError
from ..memory import RANK_SHIFT
from ..ptx import Instr
from ..tensor_memory import COLUMN_MASK, LANE_SHIFT, LANES, Cells, blocks_of
from ..tensor_queue import TensorOp
from . import operands
from .common import lanes_of
from .copy_async import ranks_of, spread
from .load_store import address
from .mbarrier import arrive, find
from .tcgen05_common import cta_group, memory_of, operand_index

_LANE = np.arange(LANES)
_QUARTERS = np.arange(4)
# shape -> (the lanes written, the row of the source that each of them gets)
_ROWS: dict[tuple[str, str | None], tuple[NDArray[np.int64], NDArray[np.int64]]] = {
    ("128x256b", None): (_LANE, _LANE),
    ("128x128b", None): (_LANE, _LANE),
    ("64x128b", "warpx2::02_13"): (_LANE, _LANE % 64),
    ("64x128b", "warpx2::01_23"): (_LANE, _LANE % 32 + _LANE // 64 * 32),
    ("32x128b", "warpx4"): (_LANE, _LANE % 32),
    ("4x256b", None): (32 * _QUARTERS, _QUARTERS),
}


class _Copy:
    """Rows of 128 or 256 bits from shared memory, K-major, to columns of tensor memory.

    4x256b writes one lane of each quarter, the one of the address; the others write all lanes.
    """

    def __init__(self, ins: Instr, k: Decoder) -> None:
        mods = Mods(ins, 2)
        self.ins, self.group = ins, cta_group(ins, k, mods)
        shape = mods.take("128x256b", "128x128b", "64x128b", "32x128b", "4x256b")
        cast = mods.take("warpx2::02_13", "warpx2::01_23", "warpx4")
        mods.done()
        found = _ROWS.get((shape or "", cast))
        if shape is None or found is None:
            raise unmodelled(ins, "shape")
        self.shape = (shape, cast)
        self.lanes, self.source = found
        self.base, self.plus = k.mem(ins.args[0], "u32")
        self.descriptor = k.src(ins.args[1], "u64")
        self.rows = int(self.source.max()) + 1
        self.width = int(shape.split("x")[1].removesuffix("b")) // 8  # bytes of a row
        self.columns = self.width // 4

    def run(self, w: Any, m: Any) -> None:
        """The handler."""
        for lane in lanes_of(m):
            at = int(w.v[self.base][lane]) + self.plus
            self._issue(w, int(lane), at, int(w.v[self.descriptor][lane]))

    def _issue(self, w: Any, lane: int, at: int, descriptor: int) -> None:
        first, low = at & COLUMN_MASK, at >> LANE_SHIFT
        if low >= (32 if len(self.lanes) == 4 else 1):
            raise TensorMemoryError(f"{self.ins.opcode}: target at lane {low}")
        lanes = self.lanes + low
        writes, shared = [], []
        blocks = blocks_of(w.block, self.group)
        for block in blocks:
            memory_of(block).check(first, self.columns, self.ins.opcode)
            index = operand_index(block, descriptor, self.rows, self.width, 1, False)
            writes.append(Cells(block.rank, lanes, first, self.columns))
            shared.append((block.rank, index, ""))

        def land() -> None:
            for block, (_, index, _) in zip(blocks, shared, strict=True):
                data = operands.read(block.shared.view(np.uint64, 2), index, 1, False)
                memory = memory_of(block)
                memory.check(first, self.columns, self.ins.opcode)
                columns = slice(first, first + self.columns)
                memory.cells[lanes, columns] = data.view(np.uint32)[self.source]
            w.machine.version += 1

        issued = TensorOp(
            "cp", self.ins.opcode, self.group, tuple(writes), False, (), tuple(shared), self.shape
        )
        if w.hazard is not None:
            w.hazard.tensor.issue(issued, lane)
        w.tensor_queue.submit(lane, issued, land, self.ins)


@op("tcgen05.cp")
def copy(ins: Instr, k: Decoder) -> Handler:
    return _Copy(ins, k).run


@op("tcgen05.commit")
def commit(ins: Instr, k: Decoder) -> Handler:
    """One arrival when everything that the thread has issued so far is complete."""
    mods = Mods(ins, 2)
    group = cta_group(ins, k, mods)
    if not mods.flag("mbarrier::arrive::one"):
        raise unmodelled(ins)
    mods.flag("shared::cluster"), mods.flag("b64")
    multicast = mods.flag("multicast::cluster")
    mods.done()
    where = address(k, ins.args[0], "shared")
    mask = k.src(ins.args[1], "u16") if multicast else -1

    def run(w: Any, m: Any) -> None:
        for lane in lanes_of(m):
            at = int(where(w.v)[lane])
            ranks = ranks_of(w, int(w.v[mask][lane])) if multicast else [at >> RANK_SHIFT]
            targets = spread(at, ranks)

            found = [(target >> RANK_SHIFT, find(w, target, ins.opcode)) for target in targets]
            stamp = None if w.hazard is None else w.hazard.tensor.commit(int(lane), found)

            def signal(targets: list[int] = targets, stamp: Any = stamp) -> None:
                for target in targets:
                    if stamp is not None:
                        w.hazard.tensor.arrived(find(w, target, ins.opcode), stamp)
                    arrive(w, target, 1)

            w.tensor_queue.commit(int(lane), group, signal, ins)

    return run

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
# shape -> (lanes written, the row of the source that each gets)
_ROWS: dict[tuple[str, str | None], NDArray[np.int64]] = {
    ("128x256b", None): _LANE,
    ("128x128b", None): _LANE,
    ("64x128b", "warpx2::02_13"): _LANE % 64,
    ("64x128b", "warpx2::01_23"): _LANE % 32 + _LANE // 64 * 32,
    ("32x128b", "warpx4"): _LANE % 32,
}


@op("tcgen05.cp")
def copy(ins: Instr, k: Decoder) -> Handler:
    """Rows of 128 or 256 bits from shared memory, K-major, to columns of every lane."""
    mods = Mods(ins, 2)
    group = cta_group(ins, k, mods)
    shape = mods.take("128x256b", "128x128b", "64x128b", "32x128b")
    cast = mods.take("warpx2::02_13", "warpx2::01_23", "warpx4")
    mods.done()
    source = _ROWS.get((shape or "", cast))
    if shape is None or source is None:
        raise unmodelled(ins, "shape")
    base, plus = k.mem(ins.args[0], "u32")
    descriptor = k.src(ins.args[1], "u64")
    rows, width = int(source.max()) + 1, int(shape.split("x")[1][:-1]) // 8
    columns = width // 4

    def run(w: Any, m: Any) -> None:
        for lane in lanes_of(m):
            at, d = int(w.v[base][lane]) + plus, int(w.v[descriptor][lane])
            if at >> LANE_SHIFT:
                raise TensorMemoryError(f"{ins.opcode}: address {at:#x} has a lane")
            first = at & COLUMN_MASK
            blocks = blocks_of(w.block, group)
            for block in blocks:
                memory_of(block).check(first, columns, ins.opcode)
            found = [(b, operand_index(b, d, rows, width, 1, False)) for b in blocks]

            def land(found: Any = found, first: int = first) -> None:
                for block, index in found:
                    data = operands.read(block.shared.view(np.uint64, 2), index, 1, False)
                    cells = data.view(np.uint32)[source]
                    memory_of(block).cells[:, first : first + columns] = cells
                w.machine.version += 1

            writes = tuple(Cells(b.rank, _LANE, first, columns) for b in blocks)
            shared = tuple((b.rank, index) for b, index in found)
            issued = TensorOp("cp", ins.opcode, group, writes, False, (), shared, (shape, cast))
            if w.hazard is not None:
                w.hazard.tensor.issue(issued, int(lane))
            w.tensor_queue.submit(int(lane), issued, land, ins)

    return run


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

            def signal(targets: list[int] = targets) -> None:
                for target in targets:
                    arrive(w, target, 1)

            found = [find(w, target, ins.opcode) for target in targets]
            if w.hazard is not None:
                w.hazard.tensor.commit(int(lane), group, found)
            w.tensor_queue.commit(int(lane), group, signal, ins)

    return run

"""tcgen05.mma: PTX ISA 9.7.18.10 (the instruction), 9.7.18.4.2 (instruction descriptor).

One thread issues it for the whole CTA, or for a pair of CTAs.  D lies in tensor memory in one of
the layouts A to G (9.7.18.10.5), A in shared or tensor memory, B in shared memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decode import Decoder, Handler, Mods, op, unmodelled
from ..errors import DescriptorError, SoftGpuError, TensorMemoryError
from ..ptx import Imm, Instr, Mem, Vec
from ..tensor_memory import COLUMN_MASK, LANE_SHIFT, LANES, Cells, blocks_of
from ..tensor_queue import TensorOp
from . import operands
from .common import lanes_of
from .tcgen05_common import cta_group, memory_of, operand_index

_COLLECTOR = re.compile(r"collector::(a|b[0-3])::(fill|use|lastuse|discard)$")
_FORMATS = {"f16": {0: "f16", 1: "bf16"}, "f8f6f4": {0: "e4m3", 1: "e5m2"}}
_PADDED = {3: "e2m3", 4: "e3m2", 5: "e2m1"}
_HEIGHTS = {(1, False): (64, 128), (1, True): (32, 64, 128), (2, False): (128, 256)}
A_COLUMNS = operands.STEP // 4  # of a K step of A in tensor memory


# ---- instruction descriptor ----------------------------------------------------------------------
@dataclass(frozen=True)
class Instruction:
    """An instruction descriptor.

    Attributes:
        m, n: of the whole instruction, both CTAs of a pair together.
        element: bytes of an element of A and B.
        a, b: element formats.
        a_mn, b_mn: the operand is MN-major.
        a_sign, b_sign: 1 or -1.
    """

    m: int
    n: int
    element: int
    a: str
    b: str
    a_mn: bool
    b_mn: bool
    a_sign: int
    b_sign: int

    @property
    def formats(self) -> str:
        """Formats of A and B, as an accumulate function wants them."""
        return self.a if self.a == self.b else f"{self.a}/{self.b}"

    @property
    def depth(self) -> int:
        """K, in elements."""
        return operands.STEP // self.element


@lru_cache(maxsize=256)
def instruction(word: int, kind: str, ws: bool, group: int) -> Instruction:
    """Decodes an instruction descriptor of ``kind::f16`` or ``kind::f8f6f4``.

    Raises:
        DescriptorError: the field that the hardware or this model does not take.
    """

    def refuse(what: str) -> DescriptorError:
        return DescriptorError(f"instruction descriptor {word:#010x}: {what}")

    zero = {
        "sparsity selector": word & 3, "sparsity": word >> 2 & 1, "saturate": word >> 3 & 1,
        "bit 6": word >> 6 & 1, "bit 23": word >> 23 & 1, "bit 29": word >> 29 & 1,
        "maximum shift": word >> 30,
    }  # fmt: skip
    for name, value in zero.items():
        if value:
            raise refuse(f"{name} is {value}, expected 0")
    if word >> 4 & 3 != 1:
        raise refuse(f"D format {word >> 4 & 3}, expected 1 (f32); f16 is not modelled")
    formats = []
    for name, code in (("A", word >> 7 & 7), ("B", word >> 10 & 7)):
        if code not in _FORMATS[kind]:
            known = f" ({_PADDED[code]})" if kind == "f8f6f4" and code in _PADDED else ""
            raise refuse(f"{name} format {code}{known} is not modelled for kind::{kind}")
        formats.append(_FORMATS[kind][code])
    element = 1 if kind == "f8f6f4" else 2
    m, n = (word >> 24 & 31) << 4, (word >> 17 & 63) << 3
    b_mn = bool(word >> 16 & 1)
    if m not in _HEIGHTS[group, ws]:
        raise refuse(f"M {m}, expected one of {_HEIGHTS[group, ws]}")
    step = 8 * group * (2 if element == 1 and b_mn else 1)
    if n % step or not step <= n <= 256 or (ws and n not in (64, 128, 256)):
        expected = "64, 128 or 256" if ws else f"a multiple of {step} up to 256"
        raise refuse(f"N {n}, expected {expected}")
    signs = [-1 if word >> at & 1 else 1 for at in (13, 14)]
    a_mn = bool(word >> 15 & 1)
    return Instruction(m, n, element, formats[0], formats[1], a_mn, b_mn, signs[0], signs[1])


# ---- layout of D ---------------------------------------------------------------------------------
@lru_cache(maxsize=32)
def lane_groups(rows: int, group: int, ws: bool, low: int) -> tuple[NDArray[np.int64], ...]:
    """Lanes of D in each CTA: row m of its ``rows`` lies in lane m of every group.

    Group g holds the g-th share of the columns; A in tensor memory lies in the lanes of D, once
    for each group.  Layouts A, D: one group of 128.  F (M 64, one CTA): one group, 16 of every 32
    lanes.  B (M 128, two CTAs), E (.ws, M 64): two groups.  G (.ws, M 32): four.

    Args:
        low: lane field of D's address; 16 selects the other half of layout F.

    Raises:
        TensorMemoryError: D at such a lane.
    """
    row = np.arange(rows)
    spread = rows == 64 and group == 1 and not ws
    if low not in ((0, 16) if spread else (0,)):
        raise TensorMemoryError(f"tcgen05.mma: D at lane {low}")
    if spread:
        return (row % 16 + row // 16 * 32 + low,)
    return tuple(row + rows * g for g in range(LANES // rows))


@dataclass(frozen=True)
class _Call:
    """The operands of one mma as its thread gave them."""

    shape: Instruction
    d: int
    a: int
    b: int
    keep: bool
    off: NDArray[np.bool_] | None
    scale: float


class _Mma:
    """[d], a or [a], b, idesc [, {lanes to leave}], enable-input-d [, scale-input-d]"""

    def __init__(self, ins: Instr, k: Decoder) -> None:
        mods = Mods(ins, 2)
        self.ins, self.ws = ins, mods.flag("ws")
        self.group = cta_group(ins, k, mods)
        kind = mods.take("kind::f16", "kind::f8f6f4")
        mods.left = [x for x in mods.left if not _COLLECTOR.match(x)]
        mods.done()
        if kind is None or (self.ws and self.group == 2):
            raise unmodelled(ins, "kind" if kind is None else ".ws of a pair")
        self.kind = kind.removeprefix("kind::")
        args = list(ins.args)
        self.d, self.d_plus = k.mem(args[0], "u32")
        self.a_in_tensor_memory = isinstance(args[1], Mem)
        if self.a_in_tensor_memory:
            self.a, self.a_plus = k.mem(args[1], "u32")
        else:
            self.a, self.a_plus = k.src(args[1], "u64"), 0
        self.b, self.descriptor = k.src(args[2], "u64"), k.src(args[3], "u32")
        rest = args[4:]
        self.lanes: list[int] = []
        if isinstance(rest[0], Vec):
            self.lanes = [k.src(x, "u32") for x in k.items(rest.pop(0))]
            if len(self.lanes) != 4 * self.group or self.ws:
                raise unmodelled(ins, "disable-output-lane")
        self.enable, self.negated = k.pred(rest.pop(0))
        self._last(rest, k)

    def _last(self, rest: list[Any], k: Decoder) -> None:
        """scale-input-d, or the zero-column mask of .ws."""
        self.scale, self.columns = 1.0, -1
        if len(rest) > 1:
            raise unmodelled(self.ins, "operands")
        if rest and self.ws:
            self.columns = k.src(rest[0], "u64")
        elif rest:
            if not isinstance(rest[0], Imm) or rest[0].bits > 15 or self.kind != "f16":
                raise unmodelled(self.ins, "scale-input-d")
            self.scale = 2.0 ** -rest[0].bits

    def run(self, w: Any, m: Any) -> None:
        """The handler."""
        v = w.v
        for lane in lanes_of(m):
            if self.columns >= 0 and int(v[self.columns][lane]):
                raise SoftGpuError(f"{self.ins.opcode}: a zero-column mask is not modelled")
            off = None
            if self.lanes:
                words = np.array([int(v[x][lane]) for x in self.lanes], np.uint32)
                if words.any():
                    off = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
            word = int(v[self.descriptor][lane])
            call = _Call(
                instruction(word, self.kind, self.ws, self.group),
                int(v[self.d][lane]) + self.d_plus, int(v[self.a][lane]) + self.a_plus,
                int(v[self.b][lane]), bool(v[self.enable][lane]) != self.negated, off, self.scale,
            )  # fmt: skip
            self._issue(w, int(lane), call)

    def _issue(self, w: Any, lane: int, call: _Call) -> None:
        """Checks what can be checked now, and hands the work to the warp's queue."""
        s = call.shape
        rows, low = s.m // self.group, call.d >> LANE_SHIFT
        groups = lane_groups(rows, self.group, self.ws, low)
        first, width = call.d & COLUMN_MASK, s.n // len(groups)
        blocks = blocks_of(w.block, self.group)
        if self.a_in_tensor_memory and (s.a_mn or call.a >> LANE_SHIFT != low):
            why = "MN-major" if s.a_mn else f"at lane {call.a >> LANE_SHIFT}, D at lane {low}"
            raise TensorMemoryError(f"{self.ins.opcode}: A in tensor memory {why}")
        writes, reads, shared, a_index, b_index = [], [], [], [], []
        for block in blocks:
            memory_of(block).check(first, width, self.ins.opcode)
            lanes = np.concatenate(groups)
            writes.append(Cells(block.rank, lanes, first, width))
            index = operand_index(block, call.b, s.n // self.group, s.depth, s.element, s.b_mn)
            b_index.append(index)
            shared.append((block.rank, index, s.b))
            if self.a_in_tensor_memory:
                memory_of(block).check(call.a & COLUMN_MASK, A_COLUMNS, self.ins.opcode)
                reads.append(Cells(block.rank, lanes, call.a & COLUMN_MASK, A_COLUMNS))
            else:
                index = operand_index(block, call.a, rows, s.depth, s.element, s.a_mn)
                a_index.append(index)
                shared.append((block.rank, index, s.a))
        issued = TensorOp(
            "mma", self.ins.opcode, self.group, tuple(writes), call.keep, tuple(reads),
            tuple(shared), (s.m, s.n, self.ws, low), self.kind,
        )  # fmt: skip
        if w.hazard is not None:
            w.hazard.tensor.issue(issued, lane)
        land = partial(self._compute, w.machine, call, blocks, groups, a_index, b_index)
        w.tensor_queue.submit(lane, issued, land, self.ins)

    def _compute(
        self, machine: Any, call: _Call, blocks: list[Any], groups: Any, a_index: Any, b_index: Any
    ) -> None:
        """Reads the operands and replaces D."""
        s = call.shape
        parts = [
            self._shared(x, index, s.b_mn, s) for x, index in zip(blocks, b_index, strict=True)
        ]
        b = operands.decode(np.concatenate(parts), s.b) * np.float32(s.b_sign)
        first, width = call.d & COLUMN_MASK, s.n // len(groups)
        for i, block in enumerate(blocks):
            memory = memory_of(block)
            memory.check(first, width, self.ins.opcode)
            if not self.a_in_tensor_memory:
                raw = self._shared(block, a_index[i], s.a_mn, s)
            for g, lanes in enumerate(groups):
                if self.a_in_tensor_memory:
                    raw = self._from_cells(memory.cells, lanes, call.a & COLUMN_MASK)
                a = operands.decode(raw, s.a) * np.float32(s.a_sign)
                cells = memory.cells[lanes, first : first + width]
                acc = self._accumulator(cells, call)
                out = machine.accumulate(acc, a, b[g * width : (g + 1) * width], s.formats)
                new = out.view(np.uint32)
                if call.off is not None:
                    new = np.where(call.off[LANES * i + lanes][:, None], cells, new)
                memory.cells[lanes, first : first + width] = new
        machine.version += 1

    def _shared(self, block: Any, index: Any, mn_major: bool, s: Instruction) -> NDArray[np.uint8]:
        """(rows, 32) bytes of an operand in shared memory."""
        return operands.read(block.shared.view(np.uint64, 2), index, s.element, mn_major)

    def _from_cells(self, cells: NDArray[np.uint32], lanes: Any, first: int) -> NDArray[np.uint8]:
        """The same of A in tensor memory, row by row in ``lanes``."""
        found: NDArray[np.uint8] = np.ascontiguousarray(
            cells[lanes, first : first + A_COLUMNS]
        ).view(np.uint8)
        return found

    def _accumulator(self, cells: NDArray[np.uint32], call: _Call) -> NDArray[np.float32]:
        if not call.keep:
            return np.zeros(cells.shape, np.float32)
        acc = cells.view(np.float32)
        return acc if call.scale == 1.0 else acc * np.float32(call.scale)


@op("tcgen05.mma")
def mma(ins: Instr, k: Decoder) -> Handler:
    return _Mma(ins, k).run

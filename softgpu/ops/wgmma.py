"""wgmma: PTX ISA 9.7.15 (asynchronous warpgroup level matrix instructions).

Every warp computes its own 16 rows, at issue (``early``) or when a wait_group covers the group
(``late``); operands and accumulators are read at that moment.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decode import Decoder, Handler, op, unmodelled
from ..errors import DescriptorError
from ..in_flight import InFlight
from ..ptx import Imm, Instr, Not, Vec
from . import operands
from .common import whole_warp

_OPCODE = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(e4m3|e5m2|bf16|f16)\.(e4m3|e5m2|bf16|f16)$"
)
_SPAN = {0: 0, 1: 128, 2: 64, 3: 32}  # bytes of a swizzled row, by the descriptor's field


def operand_index(w: Any, descriptor: int, rows: int, mn_major: bool) -> NDArray[np.int64]:
    """16-byte chunks of shared memory that a descriptor names, see ``operands.chunk_index``.

    MN-major operands have 16-bit elements.
    """
    return _index_of(descriptor, rows, mn_major, w.block.base, w.shared.limit)


@lru_cache(maxsize=1024)
def _index_of(
    descriptor: int, rows: int, mn_major: bool, base: int, limit: int
) -> NDArray[np.int64]:
    start = (descriptor & 0x3FFF) << 4
    lbo, sbo = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    swizzle, offset = descriptor >> 62 & 3, descriptor >> 49 & 7
    if offset:
        raise DescriptorError("matrix descriptor: a base offset is not modelled")
    element, depth = (2, 16) if mn_major else (1, operands.STEP)
    index = operands.chunk_index(
        rows, depth, element, start & 1023, lbo, sbo, _SPAN[swizzle], mn_major
    )
    index = index + ((base + (start & ~1023)) >> 4)
    top = int(index.max()) * 16 + 16 - base
    if top > limit:
        raise DescriptorError(
            f"matrix descriptor {descriptor:#018x}: reaches offset {top} of {limit} bytes of "
            "shared memory"
        )
    return index


def operand_bytes(w: Any, descriptor: int, rows: int, mn_major: bool) -> NDArray[np.uint8]:
    """A matrix operand through its descriptor: (rows, 32) bytes, K contiguous in each row."""
    index = operand_index(w, descriptor, rows, mn_major)
    return operands.read(w.shared.view(np.uint64, 2), index, 2, mn_major)


def _fragment_maps(n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """C fragment: (row, column) of register r in lane l, each (n / 2, 32)."""
    r, lane = np.arange(n // 2)[:, None], np.arange(32)[None, :]
    row = lane // 4 + 8 * (r // 2 % 2)
    column = 8 * (r // 4) + 2 * (lane % 4) + r % 2
    return row, column


def _a_registers(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """A registers (4, 32) -> (16, 32) bytes: register i + 2h holds row g + 8i, bytes 16h + 4c."""
    grid = words.view(np.uint8).reshape(2, 2, 8, 4, 4)  # h, i, g, c, byte
    return np.ascontiguousarray(grid.transpose(1, 2, 0, 3, 4)).reshape(16, 32)


class _Registers:
    """Several 32-bit registers read and written at once."""

    def __init__(self, k: Decoder, items: tuple[Any, ...]) -> None:
        slots = [k.slot(x.name) for x in items]
        if any(width != 32 for width, _ in slots):
            raise k.error("32-bit registers expected")
        self.slots = np.array([s for _, s in slots])
        self.bits = sum(1 << s for s in {s for _, s in slots})  # as a bit set

    def read(self, w: Any) -> NDArray[np.uint32]:
        out: NDArray[np.uint32] = w.store[32][self.slots]
        return out

    def write(self, w: Any, values: NDArray[np.uint32]) -> None:
        w.store[32][self.slots] = values


def _flag(k: Decoder, operand: Any) -> Any:
    """scale-d: immediate or predicate, the same in all lanes."""
    if isinstance(operand, Imm):
        value = operand.bits != 0
        return lambda v: value
    index, negated = k.pred(operand)
    return lambda v: bool(v[index][0]) != negated


class _Mma:
    """One wgmma.mma_async: d, a or [a], [b], scale-d, negate-a, negate-b [, trans-a], trans-b."""

    def __init__(self, ins: Instr, k: Decoder) -> None:
        match = _OPCODE.match(ins.opcode)
        if match is None:
            raise unmodelled(ins)
        self.opcode = ins.opcode
        self.n, depth = int(match.group(1)), int(match.group(2))
        self.a_kind, self.b_kind = match.group(3), match.group(4)
        wide = self.a_kind in ("bf16", "f16")
        if self.n % 8 or not 8 <= self.n <= 256 or depth != (16 if wide else 32):
            raise unmodelled(ins, "shape")
        self.shape = f"n{self.n}k{depth} {self.a_kind}"
        self.d = _Registers(k, k.items(ins.args[0]))
        from_registers = isinstance(ins.args[1], Vec)
        self.a = _Registers(k, k.items(ins.args[1])) if from_registers else None
        self.a_descriptor = -1 if from_registers else k.src(ins.args[1], "u64")
        self.b_descriptor = k.src(ins.args[2], "u64")
        self.scale_d = _flag(k, ins.args[3]) if len(ins.args) > 3 else (lambda v: True)
        rest = [k.imm(x) for x in ins.args[4:] if not isinstance(x, Not)]
        self.sign_a, self.sign_b = (rest[0], rest[1]) if len(rest) > 1 else (1, 1)
        trans = rest[2:]
        self.a_mn = bool(trans[0]) if len(trans) == 2 else False
        self.b_mn = bool(trans[-1]) if trans else False
        self._fragments()

    def _fragments(self) -> None:
        """Places of the C fragment's registers in the (16, N) matrix, and the other way round."""
        row, column = _fragment_maps(self.n)
        self.gather = np.empty((16, self.n), np.int64)
        self.gather[row, column] = np.arange(self.n // 2)[:, None] * 32 + np.arange(32)[None, :]
        self.scatter = row * self.n + column

    def run(self, w: Any, m: Any) -> Any:
        """The handler."""
        if m is not True:
            return whole_warp(w, m, "wgmma")
        v = w.v
        at_a = int(v[self.a_descriptor][0]) if self.a is None else 0
        at_b, keep = int(v[self.b_descriptor][0]), self.scale_d(v)
        if w.hazard is not None:
            self._track(w, at_a, at_b)
        if w.machine.options.asynchronous == "early":
            self._compute(w, at_a, at_b, keep)
        else:
            land = partial(self._compute, w, at_a, at_b, keep)
            w.mma_groups[-1].append(InFlight(land, self.opcode))
        return None

    def _track(self, w: Any, at_a: int, at_b: int) -> None:
        chunks = [operand_index(w, at_b, self.n, self.b_mn)]
        if self.a is None:
            index, first = operand_index(w, at_a, 64, self.a_mn), 16 * (w.index % 4)
            chunks.append(index if self.a_mn else index[first : first + 16])
        granules = w.hazard.owner.granules
        w.hazard.mma(
            [granules(x.reshape(-1) << 4, 16) for x in chunks],
            self.d.bits, 0 if self.a is None else self.a.bits, self.shape,
        )  # fmt: skip

    def _compute(self, w: Any, at_a: int, at_b: int, keep: bool) -> None:
        if self.a is not None:
            a_raw = _a_registers(self.a.read(w))
        else:
            first = 16 * (w.index % 4)
            a_raw = operand_bytes(w, at_a, 64, self.a_mn)[first : first + 16]
        b_raw = operand_bytes(w, at_b, self.n, self.b_mn)
        a, b = operands.decode(a_raw, self.a_kind), operands.decode(b_raw, self.b_kind)
        if self.sign_a == -1:
            a = -a
        if self.sign_b == -1:
            b = -b
        if keep:
            acc = self.d.read(w).view(np.float32).reshape(-1)[self.gather]
        else:
            acc = np.zeros((16, self.n), np.float32)
        result = w.machine.accumulate(acc, a, b, self.a_kind)
        self.d.write(w, result.reshape(-1)[self.scatter].view(np.uint32))


@op("wgmma.mma_async")
def mma(ins: Instr, k: Decoder) -> Handler:
    return _Mma(ins, k).run


@op("wgmma.fence")
def fence(ins: Instr, k: Decoder) -> Handler:
    def run(w: Any, m: Any) -> Any:
        wait = w.join(m, -1, ins.opcode)
        if wait is None and w.hazard is not None:
            w.hazard.wgmma_fence()
        return wait

    return run


@op("wgmma.commit_group")
def commit(ins: Instr, k: Decoder) -> Handler:
    def run(w: Any, m: Any) -> Any:
        wait = w.join(m, -1, ins.opcode)
        if wait is None:
            if w.machine.options.asynchronous != "early":
                w.mma_groups.append([])
            if w.hazard is not None:
                w.hazard.wgmma_commit()
        return wait

    return run


@op("wgmma.wait_group")
def wait_group(ins: Instr, k: Decoder) -> Handler:
    """Waits until at most N committed groups stay pending; ``random`` may complete more of them."""
    pending = k.imm(ins.args[0])

    def run(w: Any, m: Any) -> Any:
        wait = w.join(m, -1, ins.opcode)
        if wait is None and w.hazard is not None:
            w.hazard.wgmma_wait(pending)
        if wait is not None or len(w.mma_groups) == 1:
            return wait
        options = w.machine.options
        keep = pending
        if options.asynchronous == "random":
            keep = w.machine.random.randint(0, pending)
        done = max(len(w.mma_groups) - 1 - keep, 0)
        for group in w.mma_groups[:done]:
            for item in group:
                item.complete()
        w.mma_groups = w.mma_groups[done:]
        return None

    return run

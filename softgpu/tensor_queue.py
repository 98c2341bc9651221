"""Asynchronous tcgen05 operations and what keeps them in order: PTX ISA 9.7.18.6.

Operations that one warp issues form pipelines only where the memory model says so
(``must_follow``); everything else may overtake, which ``asynchronous`` "late" and "random" make use
of.  An operation reads and writes everything at one moment, when it lands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from .errors import SoftGpuError
from .in_flight import InFlight
from .ptx import Instr
from .tensor_memory import Cells


class Ordered(InFlight):
    """An operation that lands after some others."""

    __slots__ = ("before",)

    def __init__(
        self, action: Callable[[], None], text: str, before: Iterable[InFlight] = ()
    ) -> None:
        super().__init__(action, text)
        self.before = tuple(before)

    def complete(self) -> None:
        """Performs it, after what comes before it."""
        if not self.finished:
            for op in self.before:
                op.complete()
            self.before = ()
            super().complete()


@dataclass(frozen=True)
class TensorOp:
    """Memory that a tcgen05.mma or tcgen05.cp touches.

    Attributes:
        kind: "mma" or "cp".
        text: the opcode.
        group: 1 or 2, its ``.cta_group``.
        writes: cells of D, or of the target of a copy.
        accumulates: D is read too.
        reads: cells of A in tensor memory.
        shared: (rank, 16-byte chunks of the cluster's shared memory, element format) of every
            operand there; a copy's format is "".
        shape: M, N and form of an mma; shape of a copy.
        elements: "f16", "f8f6f4" of an mma; "" of a copy.
    """

    kind: str
    text: str
    group: int
    writes: tuple[Cells, ...]
    accumulates: bool
    reads: tuple[Cells, ...]
    shared: tuple[tuple[int, Any, str], ...]
    shape: Hashable
    elements: str = ""


def _overlap(some: Iterable[Cells], others: Iterable[Cells]) -> bool:
    others = tuple(others)
    return any(x.overlaps(y) for x in some for y in others)


def must_follow(first: TensorOp, second: TensorOp) -> bool:
    """True if ``second``, issued later by the same warp, may not overtake ``first``."""
    if first.group != second.group:
        return False
    if _overlap(first.reads, second.writes):  # A is read before anything overwrites it
        return True
    if first.kind == "cp":
        return second.kind == "mma" and _overlap(first.writes, second.reads)
    same = first.shape == second.shape and first.writes[0].first == second.writes[0].first
    return second.kind == "mma" and same and _overlap(first.writes, second.writes)


class TensorQueue:
    """The operations of one warp that have not landed."""

    def __init__(self, warp: Any) -> None:
        self.warp, self.machine = warp, warp.machine
        self._early = self.machine.options.asynchronous == "early"
        self._operations: list[tuple[int, TensorOp, Ordered]] = []  # issuing lane
        self._stores: list[tuple[tuple[Cells, ...], Ordered]] = []

    def submit(self, lane: int, op: TensorOp, action: Callable[[], None], ins: Instr) -> None:
        """An mma or cp that ``lane`` issues."""
        if self._early:
            action()
            return
        self._operations = [x for x in self._operations if not x[2].finished]
        before = [o for _, earlier, o in self._operations if must_follow(earlier, op)]
        ordered = Ordered(self._placed(action, ins), op.text, before)
        self._operations.append((lane, op, ordered))
        self.machine.put(ordered)

    def commit(self, lane: int, group: int, action: Callable[[], None], ins: Instr) -> None:
        """Calls ``action`` when all that ``lane`` issued for this ``.cta_group`` has landed."""
        before = [o for who, op, o in self._operations if who == lane and op.group == group]
        self.machine.put(Ordered(self._placed(action, ins), ins.opcode, before))

    def store(self, cells: tuple[Cells, ...], action: Callable[[], None], ins: Instr) -> None:
        """A tcgen05.st; stores of a warp land in order."""
        if self._early:
            action()
            return
        before = [o for _, o in self._stores]
        ordered = Ordered(self._placed(action, ins), ins.opcode, before)
        self._stores = [x for x in self._stores if not x[1].finished]
        self._stores.append((cells, ordered))
        self.machine.put(ordered)

    def before_load(self, cells: tuple[Cells, ...]) -> None:
        """A tcgen05.ld comes after the stores of its warp."""
        for written, op in self._stores:
            if _overlap(written, cells):
                op.complete()

    def wait_store(self) -> None:
        """All stores of the warp have landed."""
        for _, op in self._stores:
            op.complete()
        self._stores = []

    def _placed(self, action: Callable[[], None], ins: Instr) -> Callable[[], None]:
        """The action with the place where it was issued in its errors, wherever it lands."""
        warp, kernel = self.warp, self.machine.program.kernel

        def run() -> None:
            try:
                action()
            except SoftGpuError as error:
                raise type(error)(
                    f"{error}\n  issued at {kernel.where(ins)}: {ins.text or ins.opcode}\n"
                    f"  by {warp.block}, warp {warp.index}"
                ) from error

        return run

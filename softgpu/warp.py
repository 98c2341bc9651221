"""Warps: registers, divergence and reconvergence (PTX ISA section 3).

A warp executes the group of its lanes with the lowest pc; groups that reach the same pc merge.
Nothing here knows an instruction: a handler returns a ``Wait`` when its warp has to stop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .decode import BRANCH, NORMAL
from .errors import SoftGpuError
from .hazard import WarpHazards
from .memory import LocalMemory, Mask, SharedMemory
from .tensor_queue import TensorQueue

if TYPE_CHECKING:
    from .cluster import Block
    from .in_flight import InFlight
    from .machine import Machine

LANES = np.arange(32, dtype=np.uint32)
ALL = np.ones(32, bool).tobytes()
NONE = np.zeros(32, bool).tobytes()
FAR = 1 << 60
REGISTERS = 65536  # of an SM


def uniform_view(values: NDArray[np.uint64], dtype: Any) -> NDArray[Any]:
    """Truncates unsigned values to the width of ``dtype`` and reinterprets them."""
    size = np.dtype(dtype).itemsize
    return values.astype(f"u{size}").view(dtype)


class Wait:
    """Reason why a group of lanes stopped.

    ``ready`` is polled.  ``retry``: the instruction runs again, otherwise execution goes on behind
    it, and ``resume`` is called first.  ``expires``: the wait has a time limit; when nothing else
    can run it gives up once.
    """

    __slots__ = ("expires", "ready", "resume", "retry", "text")

    def __init__(
        self,
        ready: Callable[[], bool],
        text: Callable[[], str],
        retry: bool = True,
        expires: bool = False,
        resume: Callable[[], None] | None = None,
    ) -> None:
        self.ready, self.text, self.retry, self.expires = ready, text, retry, expires
        self.resume = resume


class Group:
    """Lanes of a warp that share a pc."""

    __slots__ = ("expired", "mask", "pc", "wait")

    def __init__(self, pc: int, mask: Mask) -> None:
        self.pc, self.mask = pc, mask
        self.wait: Wait | None = None
        self.expired = False


class Warp:
    """Registers and control state of 32 lanes."""

    def __init__(self, block: Block, index: int) -> None:
        self.block, self.index = block, index
        self.machine: Machine = block.machine
        self.shared: SharedMemory = block.shared
        threads = block.machine.threads
        count = min(32, threads - 32 * index)
        self.alive: Mask = True if count == 32 else count > LANES
        self.groups = [Group(0, self.alive)]
        self.current = self.groups[0]
        self.done = False
        self.pc = 0  # of the instruction that runs, kept for the hazard checker
        program = block.machine.program
        checker = block.cluster.hazards
        self.hazard = WarpHazards(checker, self) if checker is not None else None
        self.code = program.code if checker is None else program.checked
        # a kernel that moves registers about is launched with all that its CTA can own; with few
        # threads it is what the compiler chose, which the PTX does not say
        self.registers = REGISTERS // threads // 8 * 8 if threads > REGISTERS // 256 else None
        self.mood: float | None = None  # how often an adversarial scheduler passes it over
        self.cluster_waits: list[int] = []  # generations of barrier.cluster it arrived at, no wait
        self.arriving: dict[int, Any] = {}  # named barriers that some of its threads have come to
        self.bulk_groups: dict[int, list[Any]] = {}  # cp.async.bulk, by lane; the last is open
        self.copies: list[list[InFlight]] = [[]]  # cp.async; the last one is open
        self.mma_groups: list[list[InFlight]] = [[]]  # wgmma; the last one is open
        self.tensor_queue = TensorQueue(self)  # tcgen05
        self.local = LocalMemory(block.machine.program.local_size)
        self.file = program.files.take()
        self.store = self.file.store
        self.v = self.file.views
        for i, value in block.values:
            self.v[i] = value
        for i, value in block.machine.specials(index):
            self.v[i] = value
        if self.machine.options.observer is not None:
            self.machine.options.observer.started(self)

    # ---- convergence ---------------------------------------------------------------------------
    def lanes(self, m: Mask) -> NDArray[np.bool_]:
        """A mask as a bool array."""
        return np.ones(32, bool) if m is True else m

    def join(self, m: Mask, members: int, what: str) -> Wait | None:
        """Blocks until all live lanes of ``members`` are at this instruction."""
        if m is True:
            return None
        need = ((members >> LANES.astype(np.int64)) & 1).astype(bool)
        if self.alive is not True:
            need &= self.alive
        if not (need & ~m).any():
            return None
        group, had = self.current, m.tobytes()

        def ready() -> bool:
            return group.mask is True or group.mask.tobytes() != had

        return Wait(ready, lambda: f"{what}: the other lanes of mask {members & 0xFFFFFFFF:#010x}")

    def _pick(self) -> Group | None:
        """Lowest pc that can run; groups at one pc are merged."""
        best = None
        merged: dict[int, Group] = {}
        keep = []
        for g in self.groups:
            w = g.wait
            if w is not None and (len(self.groups) == 1 or not w.retry):
                if not w.ready():
                    keep.append(g)
                    continue
                if w.resume is not None:
                    w.resume()
                g.wait = w = None
            other = merged.get(g.pc)
            if other is not None:
                mask = other.mask | g.mask
                other.mask = True if mask.tobytes() == ALL else mask
                other.wait = None
                other.expired = other.expired and g.expired
                continue
            merged[g.pc] = g
            keep.append(g)
        self.groups = keep
        for g in merged.values():
            if g.wait is not None:
                if not g.wait.ready():
                    continue
                g.wait = None
            if best is None or g.pc < best.pc:
                best = g
        return best

    def run(self, limit: int) -> int:
        """Executes up to ``limit`` instructions; returns how many."""
        count = 0
        while count < limit:
            if len(self.groups) == 1 and self.groups[0].wait is None:
                g = self.groups[0]
            else:
                picked = self._pick()
                if picked is None:
                    return count
                g = picked
            count += self._run_group(g, limit - count)
            if self.done:
                return count
        return count

    def _run_group(self, g: Group, limit: int) -> int:
        code, v = self.code, self.v
        self.current = g
        pc, mask, n = g.pc, g.mask, 0
        multi = len(self.groups) > 1
        stop = min((o.pc for o in self.groups if o.pc > pc), default=FAR) if multi else FAR
        try:
            while n < limit:
                kind, fn, guard, negated = code[pc]
                n += 1
                m = mask
                if guard >= 0:
                    m = v[guard]
                    m = ~m if negated else m.copy()
                    if mask is not True:
                        m &= mask
                    key = m.tobytes()
                    if key == NONE:
                        pc += 1
                        if pc >= stop:
                            break
                        continue
                    if key == ALL:
                        m = True
                if kind == NORMAL:
                    wait = fn(self, m)
                    if wait is None:
                        pc += 1
                        if pc >= stop:
                            break
                        continue
                    g.wait = wait
                    if not wait.retry:
                        pc += 1
                    break
                taken_by_all = m is True or (mask is not True and m.tobytes() == mask.tobytes())
                if kind == BRANCH:
                    if taken_by_all:
                        pc = fn
                        if multi:
                            break
                        continue
                    g.pc = pc + 1
                    g.mask = ~m if mask is True else mask & ~m
                    self.groups.append(Group(fn, m))
                    return n
                return self._exit(g, m, pc, taken_by_all, n)
        except SoftGpuError as error:
            g.pc = pc
            raise self.machine.locate(error, self, pc) from error
        except (IndexError, ValueError, OverflowError, ZeroDivisionError) as error:
            g.pc = pc
            wrapped = SoftGpuError(f"{type(error).__name__} in the interpreter: {error}")
            raise self.machine.locate(wrapped, self, pc) from error
        g.pc = pc
        return n

    def _exit(self, g: Group, m: Mask, pc: int, whole: bool, n: int) -> int:
        gone = self.lanes(m)
        if self.hazard is not None:
            self.pc = pc
            self.hazard.exit(gone)
        self.alive = (~gone) if self.alive is True else self.alive & ~gone
        if whole:
            self.groups.remove(g)
        else:
            g.mask = self.lanes(g.mask) & ~gone
            g.pc = pc + 1
        self.block.cluster.thread_exit(int(gone.sum()))
        if not self.groups:
            self.done = True
            self.block.warp_done()
        return n

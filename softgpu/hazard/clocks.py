"""Knowledge of what has happened: vector clocks of lanes, asynchronous agents and mbarriers.

A *component* is something whose work can be known or not known: every lane, and for every warp its
collective accesses (``ldmatrix``, ``stmatrix``), its WGMMA groups, its bulk stores (reads of shared
memory done, writes done) and its ``cp.async``; every mbarrier (1: initialised, p + 2: phase p has
completed, with all copies that count on it); the end of the grids before this one; and what works
on tensor memory (``tensor_clock``).  Row l of a warp's matrix ``vc`` holds, for each component, the
time up to which lane l knows its work. ``avc`` is the same for what the *async proxy* may rely on
in shared memory (global memory: ``fences``), if lane l starts asynchronous work: the columns of
lanes and of ``cp.async``, whose copies are the generic proxy's, advance only with
``fence.proxy.async`` (PTX ISA 8.1.3, proxies).

Synchronisation moves rows: a release takes a ``Stamp``, an acquire joins it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BarrierError
from ..ptx import Instr
from .tensor_clock import TensorColumns

Ints = NDArray[np.int32]
LANES = np.arange(32)
OWN = 1 << 30  # a lane's knowledge of itself
MBARRIERS = 96  # initialisations for each CTA of a cluster, unless the kernel shows more
LOOPED_MBARRIERS = 256  # the same for kernels that initialise them in a loop


def lanes_of(m: Any) -> NDArray[np.int64]:
    """Lane numbers of a mask."""
    return LANES if m is True else np.nonzero(m)[0]


def mbarrier_room(code: list[Instr]) -> int:
    """Initialisations for each CTA that the kernel ``code`` may execute: its mbarrier.init.

    More columns make every acquire slower, so few kernels get more than ``MBARRIERS``.
    """
    inits = [ins.pc for ins in code if ins.opcode.startswith("mbarrier.init")]
    back = [(ins.target, ins.pc) for ins in code if ins.target is not None and ins.target <= ins.pc]
    looped = any(start <= pc <= end for pc in inits for start, end in back)
    return max(MBARRIERS, len(inits), LOOPED_MBARRIERS if looped else 0)


class Layout:
    """Component numbers of one cluster of ``ctas`` blocks of ``warps`` warps.

    Attributes:
        tensor: the columns of tensor memory's agents, None for kernels that have no such memory.
    """

    KINDS = ("collective", "wgmma", "bulk-read", "bulk-write", "cp.async")

    def __init__(
        self, ctas: int, warps: int, tensor: bool = False, mbarriers: int = MBARRIERS
    ) -> None:
        self.warps = ctas * warps
        self.lanes = 32 * self.warps
        self.kinds = {k: self.lanes + i * self.warps for i, k in enumerate(self.KINDS)}
        self.prior = self.lanes + len(self.KINDS) * self.warps
        self.tensor = TensorColumns(self.prior + 1, ctas, self.warps) if tensor else None
        self.mbarriers = self.tensor.end if self.tensor else self.prior + 1
        self.used = self.mbarriers
        # the last column knows nothing, so that "written by component -1" is never known
        self.size = self.mbarriers + mbarriers * ctas + 1

    def lane(self, warp: int) -> int:
        """Lane 0 of a warp; the others follow."""
        return 32 * warp

    def agent(self, kind: str, warp: int) -> int:
        """Component of a warp's work of ``kind``, one of ``KINDS``: collective or asynchronous."""
        return self.kinds[kind] + warp

    def new_mbarrier(self) -> int:
        """The component of an mbarrier.  Raises BarrierError when the table is full."""
        if self.used >= self.size - 1:
            held = self.size - 1 - self.mbarriers
            raise BarrierError(
                f"too many mbarriers in one cluster: the hazard check has room for {held} "
                "initialisations"
            )
        self.used += 1
        return self.used - 1

    def name(self, component: int) -> tuple[str, int]:
        """(kind, warp of the cluster) of a component; the warp is -1 for mbarriers and grids.

        The kinds are ``lane``, ``KINDS``, ``TensorColumns.KINDS``, ``prior`` and ``mbarrier``.
        """
        if component < self.lanes:
            return "lane", component // 32
        if component < self.prior:
            kind, warp = divmod(component - self.lanes, self.warps)
            return self.KINDS[kind], warp
        if self.tensor is not None and self.tensor.first <= component < self.tensor.end:
            return self.tensor.name(component - self.tensor.first)
        return ("prior", -1) if component == self.prior else ("mbarrier", -1)


class Stamp:
    """Clocks that a release publishes; joins of several releases accumulate."""

    __slots__ = ("a", "v")

    def __init__(self, v: Ints, a: Ints) -> None:
        self.v, self.a = v, a

    def join(self, other: Stamp) -> Stamp:
        """Stamp of what is known after both."""
        return Stamp(np.maximum(self.v, other.v), np.maximum(self.a, other.a))


def joined(first: Stamp | None, second: Stamp | None) -> Stamp | None:
    """The join of two stamps; None publishes nothing."""
    if first is None or second is None:
        return first or second
    return first.join(second)


class WarpClock:
    """Clocks of the 32 lanes of one warp; ``time`` stamps its accesses and steps at releases."""

    def __init__(self, layout: Layout, warp: int) -> None:
        self.layout, self.warp = layout, warp
        self.first = layout.lane(warp)
        self.own = self.first + LANES
        self.collective = layout.agent("collective", warp)
        self.vc: Ints = np.zeros((32, layout.size), np.int32)
        self.avc: Ints = np.zeros((32, layout.size), np.int32)
        self.vc[LANES, self.own] = OWN
        self.vc[:, self.collective] = OWN
        self.vc[:, -1] = self.avc[:, -1] = -1
        self.time = 1
        self._least: tuple[Ints, Ints] | None = None

    def least(self) -> tuple[Ints, Ints]:
        """(vc, avc) of what all 32 lanes know: for operations of the whole warp."""
        if self._least is None:
            self._least = (self.vc.min(0), self.avc.min(0))
        return self._least

    def knowledge(self, row: int) -> Ints:
        """Clocks that a lane knows; a negative row asks for those that all 32 lanes know."""
        return self.vc[row] if row >= 0 else self.least()[0]

    def release(self, m: Any) -> Stamp:
        """Publishes what lanes ``m`` did and know, and starts a new time."""
        if m is True:
            v, a = self.vc.max(0), self.avc.max(0)
            v[self.own] = self.time
        else:
            lanes = np.nonzero(m)[0]
            if len(lanes) == 1:
                v, a = self.vc[lanes[0]].copy(), self.avc[lanes[0]].copy()
            else:
                v, a = self.vc[lanes].max(0), self.avc[lanes].max(0)
            v[self.own[lanes]] = self.time
        v[self.collective] = self.time
        self.time += 1
        return Stamp(v, a)

    def release_barriers_only(self, m: Any) -> Stamp:
        """A relaxed arrival: only mbarrier initialisations that were fenced travel with it."""
        a = np.zeros(self.layout.size, np.int32)
        first = self.layout.mbarriers
        rows = self.avc if m is True else self.avc[m]
        a[first:-1] = np.minimum(rows.max(0)[first:-1], 1)
        a[-1] = -1
        return Stamp(a, a.copy())

    def acquire(self, m: Any, stamp: Stamp | None) -> None:
        """Lanes ``m`` learn what was published."""
        if stamp is None:
            return
        self._least = None
        if m is True:
            np.maximum(self.vc, stamp.v, out=self.vc)
            np.maximum(self.avc, stamp.a, out=self.avc)
            return
        lanes = np.nonzero(m)[0]
        self.vc[lanes] = np.maximum(self.vc[lanes], stamp.v)
        self.avc[lanes] = np.maximum(self.avc[lanes], stamp.a)

    def initialised(self, lane: int, mbarrier: int) -> None:
        """``lane`` has initialised an mbarrier; nobody else knows that, nor the async proxy."""
        self._least = None
        self.vc[lane, mbarrier] = 1

    def learn(self, m: Any, component: int, time: int, generic: bool = False) -> None:
        """Lanes ``m`` know that ``component``'s work up to ``time`` is complete and visible;
        ``generic``: that was the generic proxy's, which the async proxy sees behind a fence."""
        self._least = None
        rows: Any = slice(None) if m is True else np.nonzero(m)[0]
        for table in (self.vc,) if generic else (self.vc, self.avc):
            table[rows, component] = np.maximum(table[rows, component], time)

    def note(self, m: Any, source: Any, target: Any) -> None:
        """Lanes ``m`` know of the components ``target`` at least what they know of ``source``."""
        self._least = None
        lanes = lanes_of(m)[:, None]
        self.vc[lanes, target] = np.maximum(self.vc[lanes, target], self.vc[lanes, source])

    def fence_proxy(self, m: Any) -> None:
        """A proxy fence of shared memory: what lanes ``m`` know of it the async proxy may use."""
        self._least = None
        lanes = lanes_of(m)
        fenced = np.maximum(self.avc[lanes], self.vc[lanes])
        fenced[np.arange(len(lanes)), self.own[lanes]] = self.time
        fenced[:, self.collective] = self.time
        self.avc[lanes] = fenced
        self.time += 1

    def fence_mbarriers(self, m: Any) -> None:
        """fence.mbarrier_init: initialisations that lanes ``m`` know reach every observer."""
        self._least = None
        lanes = lanes_of(m)
        first = self.layout.mbarriers
        part = np.minimum(self.vc[lanes, first:-1], 1)
        self.avc[lanes, first:-1] = np.maximum(self.avc[lanes, first:-1], part)

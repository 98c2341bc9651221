"""Clusters, blocks and their barriers (PTX ISA sections 3.2, 9.7.13)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import BarrierError, TensorMemoryError
from .hazard import ClusterHazards
from .memory import RANK_SHIFT, SHARED_BASE, SharedMemory
from .tensor_memory import PairRequests, TensorMemory
from .warp import Warp, uniform_view

if TYPE_CHECKING:
    from .machine import Machine


def place_of(rank: int, dims: tuple[int, int, int]) -> tuple[int, int, int]:
    """Coordinates of a CTA in a cluster of these dimensions."""
    return rank % dims[0], rank // dims[0] % dims[1], rank // (dims[0] * dims[1])


class Block:
    """A CTA: warps, named barriers, its window of the cluster's shared memory."""

    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int]) -> None:
        self.cluster, self.rank, self.ctaid = cluster, rank, ctaid
        self.machine: Machine = cluster.machine
        self.shared: SharedMemory = cluster.shared
        self.base = rank << RANK_SHIFT
        self.named: dict[int, NamedBarrier] = {}
        blackwell = self.machine.program.architecture >= 100
        self.tensor_memory: TensorMemory | None = TensorMemory() if blackwell else None
        self.values: list[tuple[int, Any]] = list(self.machine.values)
        for i, view in self.machine.per_block:
            self.values.append((i, uniform_view(np.full(32, self.value(view), np.uint64), view[2])))
        warps = -(-self.machine.threads // 32)
        self.warps = [Warp(self, i) for i in range(warps)]
        self.live = warps

    def value(self, view: tuple[Any, ...]) -> int:
        """Value of a view that is the same for the block: a shared address or a coordinate."""
        kind, name = view[0], view[1]
        if kind == "symbol":
            return self.base + SHARED_BASE + self.machine.program.variables[name]
        dims = self.machine.launch.cluster
        axis = "xyz".index(name[-1]) if name[-2:-1] == "." else 0
        return {
            "%ctaid": self.ctaid[axis],
            "%clusterid": self.ctaid[axis] // dims[axis],
            "%cluster_ctaid": place_of(self.rank, dims)[axis],
            "%cluster_ctarank": self.rank,
            "%smid": self.cluster.first + self.rank,
        }[name.split(".")[0]]

    def warp_done(self) -> None:
        """A warp has ended."""
        self.live -= 1
        self.machine.version += 1
        if self.live == 0 and self.cluster.hazards is not None:
            self.cluster.hazards.block_done(self.rank)

    def __str__(self) -> str:
        return f"block {self.ctaid}"


@dataclass
class NamedBarrier:
    """bar.sync / bar.arrive state: threads arrived, threads expected, completed generations."""

    arrived: int = 0
    expected: int = 0
    generation: int = 0
    open: Any = None  # what this generation's arrivals published (hazard checker)


@dataclass
class MBarrier:
    """An mbarrier object, PTX ISA section 9.7.13.15: ``phase`` counts completed phases."""

    expected: int
    pending: int
    phase: int = 0
    tx: int = 0
    track: Any = None  # hazard.BarrierTrack, when the check is on

    @property
    def counts(self) -> str:
        """Arrivals and bytes that the open phase still waits for, as text."""
        return f"pending {self.pending} of {self.expected}, tx {self.tx}"

    def settle(self) -> None:
        """Completes the phase if nothing is pending."""
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            if self.track is not None:
                self.track.complete()


class Cluster:
    """CTAs that share a shared::cluster window; a plain launch has clusters of one."""

    def __init__(self, machine: Machine, index: int, origin: tuple[int, int, int]) -> None:
        self.machine = machine
        self.size = math.prod(machine.launch.cluster)
        self.first = index * self.size
        self.shared = machine.shared_memory(self.size)
        self.mbarriers: dict[int, MBarrier] = {}
        self.barrier_arrived = 0
        self.barrier_generation = 0
        self.cancel_refused = False  # it has read that no further cluster can be cancelled
        self.barrier_expected = self.size * machine.threads
        checking = machine.options.hazards != "off"
        self.hazards: ClusterHazards | None = ClusterHazards(self) if checking else None
        self.pairs: list[PairRequests] = [{} for _ in range(self.size // 2)]
        self.blocks: list[Block] = []
        for rank in range(self.size):
            x, y, z = place_of(rank, machine.launch.cluster)
            self.blocks.append(Block(self, rank, (origin[0] + x, origin[1] + y, origin[2] + z)))
        self.warps = [w for b in self.blocks for w in b.warps]

    def barrier_arrive(self, threads: int) -> None:
        """Threads arrive at barrier.cluster."""
        self.barrier_arrived += threads
        self._settle()

    def thread_exit(self, threads: int) -> None:
        """Exited threads no longer take part in barrier.cluster."""
        self.barrier_expected -= threads
        self._settle()

    def _settle(self) -> None:
        if self.barrier_arrived and self.barrier_arrived >= self.barrier_expected:
            self.barrier_arrived = 0
            self.barrier_generation += 1
            self.machine.version += 1
            if self.hazards is not None:
                self.hazards.cluster_complete()

    def _check_armed(self, address: int, b: MBarrier) -> None:
        """Bytes copied that were not expected are an error; the other way round it is a rule.

        A producer that acquires its stages once more at its end, as a tail, may expect bytes that
        it never copies; nobody waits for them.
        """
        rule = "armed-exit"
        if b.tx > 0 and rule not in self.machine.options.rules:
            return
        if b.tx > 0 and b.track is not None and self.hazards is not None:
            self.hazards.report.armed_exit(b.track, b.tx, b.phase)
            return
        switch = f"; the rule {rule} of Options(rules=) asks for this" if b.tx > 0 else ""
        raise BarrierError(
            f"{self.machine.barrier_at(address)}: the cluster ended with a transaction "
            f"count of {b.tx} in phase {b.phase}: bytes expected and bytes copied differ{switch}"
        )

    def check_end(self) -> None:
        """Checks that the cluster leaves nothing unfinished when it ends.

        Raises:
            BarrierError: an mbarrier has more bytes copied than expected; a named barrier has
                arrivals that nobody waited for; by rule ``armed-exit``, an mbarrier has fewer bytes
                copied than expected: with the hazard check on that is a hazard instead.
            TensorMemoryError: columns of tensor memory were not given back.
        """
        for address, b in sorted(self.mbarriers.items()):
            if b.tx:
                self._check_armed(address, b)
        for block in self.blocks:
            for number, bar in block.named.items():
                if bar.arrived:
                    raise BarrierError(
                        f"barrier {number} of {block}: the block ended with {bar.arrived} of "
                        f"{bar.expected} threads arrived"
                    )
            memory = block.tensor_memory
            if memory is not None and memory.sizes:
                raise TensorMemoryError(
                    f"{block} ended with {memory.owned} of tensor memory allocated"
                )

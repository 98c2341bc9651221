"""The hazard checker's view of one cluster: granules, mbarriers, and the end of its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..memory import KNOWN, OFFSET_MASK, RANK_SHIFT
from .clocks import Layout, Stamp, joined
from .fences import GlobalFences
from .reports import Reports
from .shadow import Index, Shadow
from .tensor import TensorHazards
from .warpgroup import WARPS, Warpgroup

if TYPE_CHECKING:
    from ..cluster import Cluster


class BarrierTrack:
    """Clocks of one mbarrier: its component and what its arrivals published.

    Attributes:
        event: its initialisation.
        copy, expect: events, -1 before the first: the last copy, the last arrival with expect_tx.
        open: arrivals of the phase that is not complete; done: of all completed phases.
        flying: bytes of copies that were issued for it and have not landed; no phase can complete
            with some on the way, unless it expects too few.
    """

    __slots__ = ("comp", "copy", "done", "event", "expect", "flying", "open", "owner")

    def __init__(self, owner: ClusterHazards, comp: int, event: int) -> None:
        self.owner, self.comp, self.event = owner, comp, event
        self.open: Stamp | None = None
        self.done: Stamp | None = None
        self.flying = 0
        self.copy = self.expect = -1

    def complete(self) -> None:
        """A phase completes."""
        self.done, self.open = joined(self.done, self.open), None
        if self.flying > 0:
            self.owner.report.early_phase(self)
            self.flying = 0


class ClusterHazards:
    """The shadow of a cluster's shared memory and what concerns all its warps.

    Attributes:
        tensor: tensor memory, None where the architecture has none.
        fences: proxy fences of global memory.
        number: of the cluster, from 1; 0 means nobody in shadows of global memory.
        pending: by rank, what may still touch a block's shared memory when it ends:
            component -> (time, event).
        ended: event of the last exit of each block.
        barrier, barrier_done: what the arrivals at barrier.cluster published, those of the open
            and of the last completed generation.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.machine = cluster, cluster.machine
        self.number = cluster.first // cluster.size + 1
        self.warps_per_block = -(-self.machine.threads // 32)
        blackwell = self.machine.program.architecture >= 100
        room = self.machine.mbarrier_room
        self.layout: Layout = Layout(cluster.size, self.warps_per_block, blackwell, room)
        self.shift = self.machine.program.shared_shift
        self.per_block = (cluster.shared.limit >> self.shift) + 1
        self.shared: Shadow = Shadow(cluster.size * self.per_block)
        self.fences = GlobalFences(self.layout.lanes)
        self.report = Reports(self)
        columns = self.layout.tensor
        self.tensor = TensorHazards(self, columns) if columns is not None else None
        self.barrier: Stamp | None = None
        self.barrier_done: Stamp | None = None
        self.pending: list[dict[int, tuple[int, int]]] = [{} for _ in range(cluster.size)]
        self._granules: dict[tuple[bytes, int, int], Index] = {}
        self._steps = {n: np.arange(n >> self.shift) for n in (1, 2, 4, 8, 16, 32)}
        self.ended = [0] * cluster.size
        self._exits: list[Stamp | None] = [None] * cluster.size
        self._warpgroups: dict[tuple[int, int], Warpgroup] = {}

    def warpgroup(self, rank: int, warp: int) -> Warpgroup:
        """The one that warp ``warp`` of block ``rank`` belongs to; a block's last may be short."""
        number = warp // WARPS
        warps = min(WARPS, self.warps_per_block - number * WARPS)
        return self._warpgroups.setdefault((rank, number), Warpgroup(self.report, warps))

    def cluster_complete(self) -> None:
        """All threads have arrived at barrier.cluster."""
        self.barrier_done, self.barrier = self.barrier, None

    # ---- granules ------------------------------------------------------------------------------
    def granules(self, addresses: NDArray[Any], nbytes: int) -> Index:
        """(n,) shared addresses -> (n,) or (n, k) granules, which are not to be written to."""
        key = addresses.tobytes(), addresses.itemsize, nbytes
        found = self._granules.get(key)
        if found is None:
            if len(self._granules) == KNOWN:
                self._granules.clear()
            found = self._granules[key] = self._find(addresses, nbytes)
        return found

    def _find(self, addresses: NDArray[Any], nbytes: int) -> Index:
        a = addresses.astype(np.int64)
        i = (a >> RANK_SHIFT) * self.per_block + ((a & OFFSET_MASK) >> self.shift)
        k = nbytes >> self.shift
        if k <= 1:
            return i
        steps = self._steps[nbytes] if nbytes in self._steps else np.arange(k)
        out: Index = i[:, None] + steps
        return out

    def span(self, address: int, nbytes: int) -> slice:
        """Granules of ``nbytes`` bytes from a shared address on."""
        first = (address >> RANK_SHIFT) * self.per_block + ((address & OFFSET_MASK) >> self.shift)
        return slice(first, first + max(nbytes >> self.shift, 1))

    # ---- end of a block ------------------------------------------------------------------------
    def leave(self, rank: int, stamp: Stamp, event: int) -> None:
        """Threads of block ``rank`` exit, in ``event``, and publish ``stamp``."""
        self.ended[rank] = event
        self._exits[rank] = joined(self._exits[rank], stamp)

    def block_done(self, rank: int) -> None:
        """Everything that touches the block's shared memory must be known to have ended."""
        known = self._exits[rank]
        for comp, (time, event) in self.pending[rank].items():
            if known is None or known.v[comp] < time:
                self.report.exit_in_flight(rank, comp, time, event)

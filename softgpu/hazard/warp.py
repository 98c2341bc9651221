"""The rules: what the instruction handlers tell the hazard checker, warp by warp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory import RANK_SHIFT
from .clocks import Layout, WarpClock, joined, lanes_of
from .cluster import BarrierTrack, ClusterHazards
from .registers import WgmmaRegisters
from .reports import PC_BITS
from .shadow import Index
from .tensor import WarpTensor

if TYPE_CHECKING:
    from ..cluster import MBarrier
    from ..warp import Warp


def _rows(lanes: Any, idx: Index) -> Any:
    """The lane of every granule: (n,), or (n, 1) where a lane has several granules."""
    return lanes if idx.ndim == 1 else lanes[:, None]


class WarpHazards:
    """Hazard checks of one warp, which the instruction handlers call.

    Attributes:
        agents: components of the warp's collective and asynchronous work, by ``Layout.KINDS``.
        bulk_group, cp_group: numbers of the open groups of bulk stores and of cp.async.
        tensor: its tcgen05 instructions, None where the architecture has none.
        warpgroup: what it must execute together with three other warps.
        prior_known: all lanes know that the grids before this one are complete.
    """

    def __init__(self, owner: ClusterHazards, warp: Warp) -> None:
        self.owner, self.warp, self.report = owner, warp, owner.report
        self.index: int = warp.block.rank * owner.warps_per_block + warp.index
        self.clock: WarpClock = WarpClock(owner.layout, self.index)
        self.agents = {k: owner.layout.agent(k, self.index) for k in Layout.KINDS}
        self.tag = self.index << PC_BITS
        self.registers = WgmmaRegisters(self)
        self.warpgroup = owner.warpgroup(warp.block.rank, warp.index)
        self.tensor: WarpTensor | None = (
            None if owner.tensor is None else WarpTensor(self, owner.tensor)
        )
        self.bulk_group = 1
        self.cp_group = 1
        self.prior_known = not warp.machine.prior
        if self.prior_known:
            self.clock.learn(True, owner.layout.prior, 1)

    @property
    def event(self) -> int:
        """The instruction that runs, see ``reports``."""
        return int(self.tag | self.warp.pc)

    def _key(self, comp: int) -> int:
        """Row of last reads: generic reads of a warp have its index, other components follow."""
        return comp - self.owner.layout.lanes + self.owner.layout.warps

    # ---- generic accesses of lanes -------------------------------------------------------------
    def read_shared(self, addr: Any, m: Any, nbytes: int) -> None:
        """Lanes ``m`` load ``nbytes`` each."""
        idx = self.owner.granules(addr if m is True else addr[m], nbytes)
        rows = _rows(lanes_of(m), idx)
        self._check_read(idx, rows)
        comp = self.clock.first + rows
        self.owner.shared.read(self.index, idx, comp, self.clock.time, self.event)
        self._remote(addr, m)

    def write_shared(self, addr: Any, m: Any, nbytes: int) -> None:
        """Lanes ``m`` store ``nbytes`` each."""
        idx = self.owner.granules(addr if m is True else addr[m], nbytes)
        rows = _rows(lanes_of(m), idx)
        self._check_write(idx, rows)
        self.owner.shared.write(idx, self.clock.first + rows, self.clock.time, self.event)
        self._remote(addr, m)

    def _check_read(self, idx: Any, rows: Any) -> None:
        found = self.owner.shared.unknown_write(idx, self.clock.vc, rows, True)
        if found is not None:
            self.report.unknown_write(self, found, "read")

    def _check_write(self, idx: Any, rows: Any) -> None:
        found = self.owner.shared.unknown_write(idx, self.clock.vc, rows, False)
        if found is not None:
            self.report.unknown_write(self, found, "write")
        busy = self.owner.shared.unknown_read(idx, self.clock.vc, rows)
        if busy is not None:
            self.report.unknown_read(self, busy, "write")

    def _remote(self, addr: Any, m: Any) -> None:
        """Notes accesses to another block's shared memory, which must not have ended."""
        if self.owner.cluster.size == 1:
            return
        ranks = addr >> np.uint32(RANK_SHIFT)
        own = self.warp.block.rank
        for lane in lanes_of(m):
            rank = int(ranks[lane])
            if rank != own:
                self.touch_remote(rank, int(lane))

    def touch_remote(self, rank: int, lane: int) -> None:
        """An access of ``lane`` to block ``rank`` that its end has to wait for."""
        if self.owner.cluster.blocks[rank].live == 0:
            self.report.exited_block(self, rank, lane)
            return
        self.owner.pending[rank][self.clock.first + lane] = (self.clock.time, self.event)

    # ---- ldmatrix, stmatrix: one operation of the warp -----------------------------------------
    def read_rows(self, addr: Any) -> None:
        """Row i of 16 bytes is addressed by lane i; the warp reads them as one."""
        idx = self.owner.granules(addr, 16)
        self._check_read(idx, _rows(np.arange(len(addr)), idx))
        comp = self.agents["collective"]
        self.owner.shared.read(self._key(comp), idx, comp, self.clock.time, self.event)

    def write_rows(self, addr: Any) -> None:
        """The stores of ``read_rows``."""
        idx = self.owner.granules(addr, 16)
        self._check_write(idx, _rows(np.arange(len(addr)), idx))
        comp = self.agents["collective"]
        self.owner.shared.write(idx, comp, self.clock.time, self.event)

    # ---- asynchronous accesses -----------------------------------------------------------------
    def _check_async_read(self, idx: Any, lane: int) -> None:
        """The async proxy reads for ``lane``, or for the whole warp (-1)."""
        avc = self.clock.avc[lane] if lane >= 0 else self.clock.least()[1]
        found = self.owner.shared.unknown_write(idx, avc, None, True)
        if found is not None:
            self.report.unknown_write(self, found._replace(row=lane), "asynchronous read", True)

    def async_read(self, lane: int, idx: Any, comp: int, time: int) -> None:
        """Notes an asynchronous read of granules, which lasts until (comp, time) is known.

        ``lane`` has issued it, or the whole warp (-1).  Only the last read
        of a granule by each component is kept.
        """
        self._check_async_read(idx, lane)
        self.owner.shared.read(self._key(comp), idx, comp, time, self.event)

    def async_write(self, lane: int, idx: Any, comp: int, time: int) -> None:
        """A copy issued by ``lane`` writes shared granules and completes as (comp, time)."""
        sh, action = self.owner.shared, "asynchronous write"
        busy = sh.unknown_read(idx, self.clock.vc[lane], None)
        if busy is not None:  # says more than that the earlier copy is not known to be complete
            self.report.unknown_read(self, busy._replace(row=lane), action)
        found = sh.unknown_write(idx, self.clock.avc[lane], None, False)
        if found is not None:
            self.report.unknown_write(self, found._replace(row=lane), action, True)
        sh.write(idx, comp, time, self.event)

    def copy_in(
        self, lane: int, address: int, where: int | Any, bar: MBarrier, nbytes: int = 0
    ) -> None:
        """A copy into shared memory that completes on ``bar``.

        Args:
            where: bytes from ``address`` on, or granules; then ``nbytes`` says how many bytes.
        """
        self.use_barrier(bar, lane, "asynchronous")
        bar.track.flying += where if isinstance(where, int) else nbytes
        bar.track.copy = self.event
        comp, time = bar.track.comp, bar.phase + 2
        idx = self.owner.span(address, where) if isinstance(where, int) else where
        self.async_write(lane, idx, comp, time)
        rank = address >> RANK_SHIFT
        self.owner.pending[rank][comp] = (time, self.event)
        if self.owner.cluster.blocks[rank].live == 0:
            self.report.exited_block(self, rank, lane)

    def copy_out(self, lane: int, idx: Any, rank: int) -> None:
        """A bulk store reads granules of block ``rank`` until its group has been read."""
        comp = self.agents["bulk-read"]
        self.async_read(lane, idx, comp, self.bulk_group)
        self.owner.pending[rank][comp] = (self.bulk_group, self.event)

    def copied_from(self, lane: int, idx: Any, bar: MBarrier) -> None:
        """A shared-to-shared copy reads its source until ``bar``'s phase completes."""
        self._check_async_read(idx, lane)
        key = self._key(self.agents["bulk-read"])
        self.owner.shared.read(key, idx, bar.track.comp, bar.phase + 2, self.event)

    def bulk_commit(self) -> int:
        """Closes the group of bulk stores; returns its number."""
        self.bulk_group += 1
        return self.bulk_group - 1

    def bulk_waited(self, m: Any, group: int, written: bool) -> None:
        """Lanes ``m`` know the bulk stores up to ``group`` to be read, or ``written``."""
        self.clock.learn(m, self.agents["bulk-read"], group)
        if written:
            self.clock.learn(m, self.agents["bulk-write"], group)

    def cp_async(self, m: Any, idx: Any) -> None:
        """Non-bulk cp.async: generic proxy, complete after its wait."""
        self._check_write(idx, _rows(lanes_of(m), idx))
        comp = self.agents["cp.async"]
        self.owner.shared.write(idx, comp, self.cp_group, self.event)
        self.owner.pending[self.warp.block.rank][comp] = (self.cp_group, self.event)

    def cp_commit(self) -> None:
        """Closes the group of cp.async."""
        self.cp_group += 1

    def cp_waited(self, m: Any, keep: int) -> None:
        """Lanes ``m`` know all but the last ``keep`` closed groups of cp.async to be complete."""
        self.clock.learn(m, self.agents["cp.async"], self.cp_group - 1 - keep, generic=True)

    def fence_proxy(self, m: Any, shared: bool, outside: bool) -> None:
        """fence.proxy.async: of ``shared`` memory, of global memory (``outside``), or both."""
        if outside:
            self.owner.fences.fence(self.clock, m)
        if shared:
            self.clock.fence_proxy(m)
        else:
            self.clock.time += 1

    # ---- mbarriers -----------------------------------------------------------------------------
    def init_barrier(self, lane: int, bar: MBarrier) -> None:
        """``lane`` initialises ``bar``.  Raises BarrierError if there are too many of them."""
        if bar.track is None:  # the first of the lanes that initialise it together
            bar.track = BarrierTrack(self.owner, self.owner.layout.new_mbarrier(), self.event)
        self.clock.initialised(lane, bar.track.comp)

    def use_barrier(self, bar: MBarrier, lane: int, how: str) -> None:
        """The initialisation must be known; to the async proxy and other blocks, fenced too."""
        table = self.clock.vc if how == "generic" else self.clock.avc
        if table[lane, bar.track.comp] < 1:
            self.report.unknown_barrier(self, bar.track, lane, how)

    def arrive(self, bar: MBarrier, m: Any, remote: bool) -> None:
        """Lanes ``m`` arrive (release)."""
        first = int(lanes_of(m)[0])
        self.use_barrier(bar, first, "remote" if remote else "generic")
        bar.track.open = joined(bar.track.open, self.clock.release(m))

    def waited(self, bar: MBarrier, m: Any) -> None:
        """Lanes ``m`` saw all phases before the current one complete (acquire)."""
        self.clock.acquire(m, bar.track.done)
        self.clock.learn(m, bar.track.comp, bar.phase + 1)

    # ---- wgmma ---------------------------------------------------------------------------------
    def mma(self, operands: list[Index], acc: int, a: int, shape: str) -> None:
        """A wgmma.mma_async is issued: granules of its operands, its registers as bit sets."""
        self.warpgroup.execute(self)
        group = self.registers.group
        self.registers.issue(acc, a, shape)
        comp = self.agents["wgmma"]
        for idx in operands:
            self.async_read(-1, idx, comp, group)
        self.owner.pending[self.warp.block.rank][comp] = (group, self.event)

    def wgmma_wait(self, keep: int) -> None:
        """wgmma.wait_group: all but the last ``keep`` groups are complete."""
        self.warpgroup.execute(self)
        done = self.registers.wait(keep)
        if done > 0:
            self.clock.learn(True, self.agents["wgmma"], done)

    def wgmma_fence(self) -> None:
        """wgmma.fence"""
        self.warpgroup.execute(self)
        self.registers.fence()

    def wgmma_commit(self) -> None:
        """wgmma.commit_group"""
        self.warpgroup.execute(self)
        self.registers.commit()

    # ---- earlier grids -------------------------------------------------------------------------
    def prior_complete(self, m: Any) -> None:
        """griddepcontrol.wait: the grids before this one are complete and visible."""
        self.clock.learn(m, self.owner.layout.prior, 1)

    def ignorant(self, lanes: Any) -> Any:
        """Subset of ``lanes`` that do not know that the earlier grids are complete."""
        if self.prior_known:
            return lanes[:0]
        known = self.clock.vc[:, self.owner.layout.prior] >= 1
        self.prior_known = bool(known.all())
        return lanes[~known[lanes]]

    # ---- end -----------------------------------------------------------------------------------
    def exit(self, m: Any) -> None:
        """Lanes ``m`` exit."""
        self.owner.leave(self.warp.block.rank, self.clock.release(m), self.event)
        if not (self.warp.lanes(self.warp.alive) & ~m).any():
            self.warpgroup.leave(self)

"""The hazard checker: happens-before between every two conflicting accesses.

For each granule of shared memory (and of global memory that the launch writes) the shadow keeps
the last write and the last read of each warp and asynchronous agent, as (component, time, event),
see ``clocks``.  An access is a hazard when the accessing lane does not *know* a conflicting one,
whatever the order in which the simulation happened to run them.  So a missing wait, fence or
barrier is found even if the data came out right.

PTX ISA 8 (memory consistency model), 8.1.3 and 9.7.13.4 (proxies), 9.7.13.15 (mbarrier),
9.7.15.7 (wgmma.fence, wait_group).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .clocks import LANES, Layout, Stamp, WarpClock, joined
from .errors import BarrierError, Hazard
from .memory import OFFSET_MASK, RANK_SHIFT, SHARED_BASE

Index = NDArray[np.int64]
_PC_BITS = 20
_PC_MASK = (1 << _PC_BITS) - 1


@dataclass(frozen=True)
class Event:
    """One of the two sides of a hazard.

    Attributes:
        action: what it did, such as ``read`` or ``asynchronous write``.
        source: ``file.py:line``; ptx_line: line of the PTX text; text: the instruction.
        block: CTA coordinates; warp: index in the block; lanes: who did it, as text.
        note: what is known of its completion, may be empty.
    """

    action: str
    source: str
    ptx_line: int
    text: str
    block: tuple[int, int, int]
    warp: int
    lanes: str
    note: str = ""

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 110 else self.text[:107] + "..."
        note = f"\n      {self.note}" if self.note else ""
        return (
            f"{self.action}: {self.source} (PTX line {self.ptx_line}): {text}\n"
            f"      block {self.block}, warp {self.warp}, {self.lanes}{note}"
        )


class Shadow:
    """Last write and last reads of every granule."""

    def __init__(self, granules: int) -> None:
        self.granules = granules
        self.comp = np.full(granules, -1, np.int32)
        self.time = np.zeros(granules, np.int32)
        self.event = np.zeros(granules, np.int32)
        self.readers: dict[int, tuple[NDArray[np.int32], ...]] = {}

    def write(self, idx: Any, comp: Any, time: Any, event: int) -> None:
        self.comp[idx] = comp
        self.time[idx] = time
        self.event[idx] = event

    def read(self, key: int, idx: Any, comp: Any, time: int, event: int) -> None:
        """``key``: one row of last reads per warp and kind of reader."""
        row = self.readers.get(key)
        if row is None:
            row = (
                np.zeros(self.granules, np.int32),
                np.zeros(self.granules, np.int32),
                np.zeros(self.granules, np.int32),
            )
            self.readers[key] = row
        row[0][idx] = comp
        row[1][idx] = time
        row[2][idx] = event


def lane_text(lanes: Any) -> str:
    """``lane 3``, ``lanes 0-31``, ``lanes 1,4,9``."""
    numbers = [int(x) for x in lanes]
    if len(numbers) == 1:
        return f"lane {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"lanes {numbers[0]}-{numbers[-1]}"
    return "lanes " + ",".join(str(i) for i in numbers)


class BarrierTrack:
    """Clocks of one mbarrier: its component and what its arrivals published.

    ``flying`` counts the bytes of copies that were issued for it and have not landed; no phase can
    complete with some on the way, unless it expects too few.
    """

    __slots__ = ("comp", "copy", "done", "event", "expect", "flying", "open", "owner")

    def __init__(self, owner: ClusterHazards, comp: int, event: int) -> None:
        self.owner, self.comp, self.event = owner, comp, event
        self.open: Stamp | None = None  # arrivals of the phase that is not complete
        self.done: Stamp | None = None  # of all completed phases
        self.flying = 0
        self.copy = self.expect = -1  # events: the last copy, the last arrival with expect_tx

    def complete(self) -> None:
        self.done, self.open = joined(self.done, self.open), None
        if self.flying > 0:
            self.owner.report_early_phase(self)
            self.flying = 0


class ClusterHazards:
    """Shadows and clocks of one cluster."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.machine = cluster, cluster.machine
        self.number = cluster.first // cluster.size + 1  # 0 means nobody in global shadows
        program = self.machine.program
        warps = -(-self.machine.threads // 32)
        self.warps_per_block = warps
        self.layout = Layout(cluster.size, warps)
        self.shift = program.shared_shift
        self.per_block = (cluster.shared.limit >> self.shift) + 1
        self.shared = Shadow(cluster.size * self.per_block)
        self.steps = {n: np.arange(n >> self.shift) for n in (1, 2, 4, 8, 16, 32)}
        self.barrier: Stamp | None = None  # barrier.cluster
        self.barrier_done: Stamp | None = None
        # what may still touch a block's shared memory: component -> (time, event), by rank
        self.pending: list[dict[int, tuple[int, int]]] = [{} for _ in range(cluster.size)]
        self.exits: list[Stamp | None] = [None] * cluster.size

    def cluster_complete(self) -> None:
        self.barrier_done, self.barrier = self.barrier, None

    # ---- granules ------------------------------------------------------------------------------
    def granules(self, addresses: NDArray[Any], nbytes: int) -> Index:
        """(n,) shared addresses -> (n,) or (n, k) granules."""
        a = addresses.astype(np.int64)
        i = (a >> RANK_SHIFT) * self.per_block + ((a & OFFSET_MASK) >> self.shift)
        k = nbytes >> self.shift
        if k <= 1:
            return i
        steps = self.steps[nbytes] if nbytes in self.steps else np.arange(k)
        out: Index = i[:, None] + steps
        return out

    def span(self, address: int, nbytes: int) -> slice:
        first = (address >> RANK_SHIFT) * self.per_block + ((address & OFFSET_MASK) >> self.shift)
        return slice(first, first + max(nbytes >> self.shift, 1))

    def place(self, granule: int) -> str:
        rank, offset = divmod(granule, self.per_block)
        at = (offset << self.shift) - SHARED_BASE
        where = self.machine.shared_name(at)
        block = self.cluster.blocks[rank].ctaid
        return f"shared memory, {where}, block {block}"

    # ---- events --------------------------------------------------------------------------------
    def describe(self, action: str, event: int, comp: int, note: str = "") -> Event:
        pc, warp = event & _PC_MASK, event >> _PC_BITS
        kernel = self.machine.program.kernel
        ins = kernel.code[pc]
        block = self.cluster.blocks[warp // self.warps_per_block]
        kind, _ = self.layout.name(comp) if comp >= 0 else ("lane", 0)
        lanes = f"lane {comp % 32}" if kind == "lane" and comp >= 0 else "the warp"
        if kind in ("mbarrier", "bulk-read", "bulk-write", "cp.async"):
            lanes = "asynchronous"
        return Event(
            action, kernel.source_of(ins), ins.line, ins.text or ins.opcode, block.ctaid,
            warp % self.warps_per_block, lanes, note,
        )  # fmt: skip

    def note_of(self, comp: int, time: int) -> str:
        """How the work (comp, time) becomes known."""
        kind, _ = self.layout.name(comp)
        if kind == "mbarrier":
            return f"completes phase {time - 2} of {self.machine.barrier_name(self.cluster, comp)}"
        return {
            "wgmma": "in flight until a wgmma.wait_group covers it",
            "bulk-read": "in flight until a cp.async.bulk.wait_group covers it",
            "bulk-write": "in flight until a cp.async.bulk.wait_group covers it",
            "cp.async": "in flight until its cp.async.wait_group",
        }.get(kind, "")

    def report_early_phase(self, track: BarrierTrack) -> None:
        """A phase of ``track`` completes although copies for it are on their way."""
        events = [self.describe("asynchronous write", track.copy, track.comp, "not landed yet")]
        if track.expect >= 0:
            events.insert(0, self.describe("expected bytes", track.expect, -1))
        self.machine.hazard(
            "wrong-tx-count",
            f"a phase completes while {track.flying} bytes of copies for it are on their way",
            self.machine.barrier_name(self.cluster, track.comp),
            events,
            "expect_tx must count the bytes of all copies of the phase",
        )

    # ---- end of a block ------------------------------------------------------------------------
    def leave(self, rank: int, stamp: Stamp) -> None:
        self.exits[rank] = joined(self.exits[rank], stamp)

    def block_done(self, rank: int) -> None:
        """Everything that touches the block's shared memory must be known to have ended."""
        known = self.exits[rank]
        for comp, (time, event) in self.pending[rank].items():
            if known is not None and known.v[comp] >= time:
                continue
            first = self.describe("access", event, comp, self.note_of(comp, time))
            self.machine.hazard(
                "exit-in-flight",
                "a block ends while an access to its shared memory may still be on its way",
                f"shared memory of block {self.cluster.blocks[rank].ctaid}",
                [first],
                "wait for the operation (or a cluster barrier) before the block's last warp exits",
            )


@dataclass(frozen=True)
class _Mma:
    """Registers of a WGMMA in flight, as bit sets over the 32-bit slots."""

    acc: int
    a: int
    shape: str

    def continues(self, other: _Mma) -> bool:
        """Same accumulators, same shape: the tensor core keeps such a chain in order."""
        return self.acc == other.acc and self.shape == other.shape


class WarpHazards:
    """What the instruction handlers call; one object a warp."""

    def __init__(self, owner: ClusterHazards, warp: Any) -> None:
        self.owner, self.warp = owner, warp
        self.index = warp.block.rank * owner.warps_per_block + warp.index
        self.clock = WarpClock(owner.layout, self.index)
        self.agents = {k: owner.layout.agent(k, self.index) for k in Layout.KINDS}
        self.tag = self.index << _PC_BITS
        self.touched = 0  # registers accessed since the last wgmma.fence, as a bit set
        self.busy = 0  # registers of WGMMAs in flight
        self.flight: dict[_Mma, tuple[int, int, int]] = {}  # -> (group, event, epoch)
        self.epoch = 0  # counts wgmma.fence
        self.group = 1  # of wgmma; the open one
        self.fenced = False
        self.bulk_group = 1
        self.cp_group = 1
        self.prior_known = not warp.machine.prior
        if self.prior_known:
            self.clock.learn(True, owner.layout.prior, 1)

    @property
    def event(self) -> int:
        return int(self.tag | self.warp.pc)

    # ---- rules ---------------------------------------------------------------------------------
    def _unknown_write(
        self, sh: Shadow, idx: Any, vc: NDArray[Any], rows: Any, uninitialised: bool
    ) -> Any:
        """First granule whose last write the accessor does not know: (granule, row) or None."""
        comp = sh.comp[idx]
        known = vc[comp] >= sh.time[idx] if rows is None else vc[rows, comp] >= sh.time[idx]
        if known.all():
            return None
        if not uninitialised:
            known |= comp < 0
            if known.all():
                return None
        return self._first(idx, known, rows)

    @staticmethod
    def _first(idx: Any, known: NDArray[Any], rows: Any) -> tuple[int, int]:
        flat = int(np.argmin(known.reshape(-1)))
        if isinstance(idx, slice):
            granule = idx.start + flat
        else:
            granule = int(np.broadcast_to(idx, known.shape).reshape(-1)[flat])
        row = -1 if rows is None else int(np.broadcast_to(rows, known.shape).reshape(-1)[flat])
        return granule, row

    def _unknown_read(self, sh: Shadow, idx: Any, vc: NDArray[Any], rows: Any) -> Any:
        """(granule, row, (component, time, event) of the read) or None."""
        for comp, time, event in sh.readers.values():
            c, t = comp[idx], time[idx]
            known = vc[c] >= t if rows is None else vc[rows, c] >= t
            if not known.all():
                granule, row = self._first(idx, known, rows)
                return granule, row, (int(comp[granule]), int(time[granule]), int(event[granule]))
        return None

    def _report_write(self, found: tuple[int, int], action: str, is_async: bool) -> None:
        """The last write of a granule is not known to this access."""
        owner, (granule, row) = self.owner, found
        sh = owner.shared
        comp, time, event = int(sh.comp[granule]), int(sh.time[granule]), int(sh.event[granule])
        lanes = f"lane {row}" if row >= 0 else "the warp"
        second = self._here(action, lanes)
        if comp < 0:
            self.warp.machine.hazard(
                "uninitialised", "shared memory is read before anything was written there",
                owner.place(granule), [second], "poison or a stale value is what it reads",
            )  # fmt: skip
            return
        kind, _ = owner.layout.name(comp)
        wrote = "asynchronous write" if kind not in ("lane", "collective") else "write"
        first = owner.describe(wrote, event, comp, owner.note_of(comp, time))
        reads = "read" in action
        if is_async and kind in ("lane", "collective"):
            v = self.clock.least()[0] if row < 0 else self.clock.vc[row]
            if v[comp] >= time:
                self.warp.machine.hazard(
                    "missing-proxy-fence",
                    "the async proxy accesses what generic stores wrote, without a proxy fence",
                    owner.place(granule), [first, second],
                    "fence.proxy.async after the stores, before the barrier that hands them over",
                )  # fmt: skip
                return
        if kind in ("mbarrier", "cp.async") and reads:
            what = "shared memory is read before the copy that fills it is known to be complete"
            why = "the reader has not seen that phase complete: a missing wait, or another stage's"
            if kind == "cp.async":
                why = "cp.async.wait_group by the thread that copied; a barrier for all others"
            self.warp.machine.hazard(
                "read-before-complete", what, owner.place(granule), [first, second], why
            )
            return
        what = "two accesses, one of them a write, that nothing orders"
        self.warp.machine.hazard(
            "race", what, owner.place(granule), [first, second],
            "no barrier, arrive and wait, or fence leads from the first to the second",
        )  # fmt: skip

    def _report_read(self, found: Any, action: str) -> None:
        """A write to a granule that a reader may not have finished with."""
        owner, (granule, row, (comp, time, event)) = self.owner, found
        kind, _ = owner.layout.name(comp)
        first = owner.describe(
            "asynchronous read" if kind not in ("lane", "collective") else "read", event, comp,
            owner.note_of(comp, time),
        )  # fmt: skip
        second = self._here(action, f"lane {row}" if row >= 0 else "the warp")
        self.warp.machine.hazard(
            "overwrite-in-use",
            "shared memory is overwritten while it may still be read",
            owner.place(granule), [first, second],
            "the writer has not been told that the reader is done: a missing wait_group before "
            "the release, a missing release, or a missing wait for it",
        )  # fmt: skip

    def _here(self, action: str, lanes: str) -> Event:
        kernel = self.warp.machine.program.kernel
        ins = kernel.code[self.warp.pc]
        return Event(
            action, kernel.source_of(ins), ins.line, ins.text or ins.opcode,
            self.warp.block.ctaid, self.warp.index, lanes,
        )  # fmt: skip

    # ---- generic accesses of lanes -------------------------------------------------------------
    def _lanes(self, m: Any) -> Any:
        return LANES if m is True else np.nonzero(m)[0]

    def read_shared(self, addr: Any, m: Any, nbytes: int) -> None:
        """Lanes ``m`` load ``nbytes`` each."""
        lanes = self._lanes(m)
        idx = self.owner.granules(addr if m is True else addr[m], nbytes)
        rows = lanes if idx.ndim == 1 else lanes[:, None]
        sh = self.owner.shared
        found = self._unknown_write(sh, idx, self.clock.vc, rows, True)
        if found is not None:
            self._report_write(found, "read", False)
        comp = self.clock.first + rows
        sh.read(self.index, idx, comp, self.clock.time, self.event)
        self._remote(addr, m)

    def write_shared(self, addr: Any, m: Any, nbytes: int) -> None:
        """Lanes ``m`` store ``nbytes`` each."""
        lanes = self._lanes(m)
        idx = self.owner.granules(addr if m is True else addr[m], nbytes)
        rows = lanes if idx.ndim == 1 else lanes[:, None]
        self._check_write(idx, rows)
        self.owner.shared.write(idx, self.clock.first + rows, self.clock.time, self.event)
        self._remote(addr, m)

    def _check_write(self, idx: Any, rows: Any) -> None:
        sh = self.owner.shared
        found = self._unknown_write(sh, idx, self.clock.vc, rows, False)
        if found is not None:
            self._report_write(found, "write", False)
        busy = self._unknown_read(sh, idx, self.clock.vc, rows)
        if busy is not None:
            self._report_read(busy, "write")

    def _remote(self, addr: Any, m: Any) -> None:
        """Notes accesses to another block's shared memory, which must not have ended."""
        if self.owner.cluster.size == 1:
            return
        ranks = addr >> np.uint32(RANK_SHIFT)
        own = self.warp.block.rank
        for lane in self._lanes(m):
            rank = int(ranks[lane])
            if rank != own:
                self.touch_remote(rank, self.clock.first + int(lane))

    def touch_remote(self, rank: int, comp: int) -> None:
        """An access to block ``rank`` that its end has to wait for."""
        if self.owner.cluster.blocks[rank].live == 0:
            self.warp.machine.hazard(
                "exited-block", "distributed shared memory of a block that has ended is accessed",
                f"shared memory of block {self.owner.cluster.blocks[rank].ctaid}",
                [self._here("access", f"lane {comp % 32}")],
                "blocks of a cluster must not end before the last access to them",
            )  # fmt: skip
            return
        self.owner.pending[rank][comp] = (self.clock.time, self.event)

    # ---- ldmatrix, stmatrix: one operation of the warp -----------------------------------------
    def read_rows(self, addr: Any) -> None:
        """Row i of 16 bytes is addressed by lane i; the warp reads them as one."""
        idx = self.owner.granules(addr, 16)
        rows = np.arange(len(addr))[:, None] if idx.ndim == 2 else np.arange(len(addr))
        found = self._unknown_write(self.owner.shared, idx, self.clock.vc, rows, True)
        if found is not None:
            self._report_write(found, "read", False)
        comp, key = self.agents["collective"], self._key("collective")
        self.owner.shared.read(key, idx, comp, self.clock.time, self.event)

    def write_rows(self, addr: Any) -> None:
        idx = self.owner.granules(addr, 16)
        rows = np.arange(len(addr))[:, None] if idx.ndim == 2 else np.arange(len(addr))
        self._check_write(idx, rows)
        comp = self.agents["collective"]
        self.owner.shared.write(idx, comp, self.clock.time, self.event)

    def _key(self, kind: str) -> int:
        """Row of last reads: generic reads of a warp have its index, the others follow."""
        return self.agents[kind] - self.owner.layout.lanes + self.owner.layout.warps

    # ---- asynchronous accesses -----------------------------------------------------------------
    def async_write(self, lane: int, idx: Any, comp: int, time: int) -> None:
        """A copy issued by ``lane`` writes shared granules and completes as (comp, time)."""
        sh, avc = self.owner.shared, self.clock.avc[lane]
        busy = self._unknown_read(sh, idx, self.clock.vc[lane], None)
        if busy is not None:  # says more than that the earlier copy is not known to be complete
            self._report_read((busy[0], lane, busy[2]), "asynchronous write")
        found = self._unknown_write(sh, idx, avc, None, False)
        if found is not None:
            self._report_write((found[0], lane), "asynchronous write", True)
        sh.write(idx, comp, time, self.event)

    def copy_in(self, lane: int, address: int, where: int | Any, bar: Any, nbytes: int = 0) -> None:
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
        pending = self.owner.pending[address >> RANK_SHIFT]
        pending[comp] = (time, self.event)
        rank = address >> RANK_SHIFT
        if self.owner.cluster.blocks[rank].live == 0:
            self.touch_remote(rank, self.clock.first + lane)

    def copy_out(self, lane: int, idx: Any, rank: int) -> None:
        """A bulk store (or a copy from shared to shared) reads granules until its group is read."""
        sh = self.owner.shared
        found = self._unknown_write(sh, idx, self.clock.avc[lane], None, True)
        if found is not None:
            self._report_write((found[0], lane), "asynchronous read", True)
        comp = self.agents["bulk-read"]
        sh.read(self._key("bulk-read"), idx, comp, self.bulk_group, self.event)
        self.owner.pending[rank][comp] = (self.bulk_group, self.event)

    def copied_from(self, lane: int, idx: Any, bar: Any) -> None:
        """A shared-to-shared copy reads its source until ``bar``'s phase completes."""
        sh = self.owner.shared
        found = self._unknown_write(sh, idx, self.clock.avc[lane], None, True)
        if found is not None:
            self._report_write((found[0], lane), "asynchronous read", True)
        key = self._key("bulk-read")
        sh.read(key, idx, bar.track.comp, bar.phase + 2, self.event)

    def bulk_commit(self) -> int:
        self.bulk_group += 1
        return self.bulk_group - 1

    def bulk_waited(self, m: Any, group: int, written: bool) -> None:
        self.clock.learn(m, self.agents["bulk-read"], group)
        if written:
            self.clock.learn(m, self.agents["bulk-write"], group)

    def cp_async(self, m: Any, idx: Any) -> None:
        """Non-bulk cp.async: generic proxy, complete after its wait."""
        lanes = self._lanes(m)
        rows = lanes if idx.ndim == 1 else lanes[:, None]
        self._check_write(idx, rows)
        comp = self.agents["cp.async"]
        self.owner.shared.write(idx, comp, self.cp_group, self.event)
        self.owner.pending[self.warp.block.rank][comp] = (self.cp_group, self.event)

    # ---- mbarriers -----------------------------------------------------------------------------
    def init_barrier(self, lane: int, bar: Any) -> None:
        try:
            comp = self.owner.layout.new_mbarrier()
        except IndexError as error:
            raise BarrierError(str(error)) from error
        bar.track = BarrierTrack(self.owner, comp, self.event)
        one = np.zeros(32, bool)
        one[lane] = True
        self.clock._least = None
        self.clock.vc[lane, comp] = 1

    def use_barrier(self, bar: Any, lane: int, how: str) -> None:
        """The initialisation must be known; to the async proxy and other blocks, fenced too."""
        table = self.clock.vc if how == "generic" else self.clock.avc
        if table[lane, bar.track.comp] >= 1:
            return
        first = self.owner.describe("initialisation", bar.track.event, -1)
        name = self.warp.machine.barrier_name(self.owner.cluster, bar.track.comp)
        if self.clock.vc[lane, bar.track.comp] >= 1:
            why = "fence.mbarrier_init (or fence.proxy.async) after mbarrier.init, then a barrier"
        else:
            why = "no barrier leads from the initialisation to this use"
        self.warp.machine.hazard(
            "mbarrier-init", "an mbarrier is used that may not be initialised yet", name,
            [first, self._here(f"{how} use", f"lane {lane}")], why,
        )  # fmt: skip

    def arrive(self, bar: Any, m: Any, remote: bool) -> None:
        """Lanes ``m`` arrive (release)."""
        first = int(self._lanes(m)[0])
        self.use_barrier(bar, first, "remote" if remote else "generic")
        bar.track.open = joined(bar.track.open, self.clock.release(m))

    def waited(self, bar: Any, m: Any) -> None:
        """Lanes ``m`` saw all phases before the current one complete (acquire)."""
        self.clock.acquire(m, bar.track.done)
        self.clock.learn(m, bar.track.comp, bar.phase + 1)

    # ---- wgmma ---------------------------------------------------------------------------------
    def access(self, bits: int) -> None:
        """An ordinary instruction touches the 32-bit registers ``bits``."""
        self.touched |= bits
        if self.busy & bits:
            self._report_registers(bits)

    def _report_registers(self, bits: int) -> None:
        """Registers ``bits`` are accessed although a WGMMA in flight uses some of them."""
        found = (f for mma, f in self.flight.items() if (mma.acc | mma.a) & bits)
        group, event, _ = next(found)
        hit = self.busy & bits
        self.busy &= ~bits  # each register is reported once
        wgmma = self.agents["wgmma"]
        self.warp.machine.hazard(
            "register-in-flight",
            "registers of a WGMMA in flight are accessed",
            f"registers {self.warp.machine.program.register_names(hit)}",
            [
                self.owner.describe("wgmma", event, wgmma, self.owner.note_of(wgmma, group)),
                self._here("access", "the warp"),
            ],
            "wgmma.wait_group before the accumulators are read or the A registers reused",
        )  # fmt: skip

    def mma(self, operands: list[Index], acc: int, a: int, shape: str) -> None:
        """A wgmma.mma_async is issued: granules of its operands, its registers as bit sets."""
        used = acc | a
        if not self.fenced or self.touched & used:
            names = self.warp.machine.program.register_names(self.touched & used)
            which = f"registers {names}" if self.touched & used else "the first WGMMA of the warp"
            self.warp.machine.hazard(
                "missing-wgmma-fence",
                "WGMMA uses registers that other instructions accessed, with no wgmma.fence since",
                which, [*self._last_access(used), self._here("wgmma", "the warp")],
                "wgmma.fence.sync.aligned between them",
            )  # fmt: skip
            self.fenced, self.touched = True, 0
        mine = _Mma(acc, a, shape)
        for other, (_, event, epoch) in self.flight.items():
            if other == mine:
                continue
            if other.acc & a or other.a & acc:
                self._report_registers(used)
                break
            if other.acc & acc and not mine.continues(other) and epoch == self.epoch:
                self.warp.machine.hazard(
                    "missing-wgmma-fence",
                    "WGMMAs of different shapes share accumulators, with no wgmma.fence between",
                    f"registers {self.warp.machine.program.register_names(other.acc & acc)}",
                    [
                        self.owner.describe("wgmma", event, self.agents["wgmma"]),
                        self._here("wgmma", "the warp"),
                    ],
                    "wgmma.fence.sync.aligned between them; only one shape keeps its own order",
                )
                break
        _, avc = self.clock.least()
        sh, key, comp = self.owner.shared, self._key("wgmma"), self.agents["wgmma"]
        for idx in operands:
            found = self._unknown_write(sh, idx, avc, None, True)
            if found is not None:
                self._report_write(found, "asynchronous read", True)
            sh.read(key, idx, comp, self.group, self.event)
        self.owner.pending[self.warp.block.rank][comp] = (self.group, self.event)
        self.flight[mine] = (self.group, self.event, self.epoch)
        self.busy |= used

    def _last_access(self, bits: int) -> list[Event]:
        """The instruction nearest before this one, in program order, that names a register."""
        program = self.warp.machine.program
        for pc in range(self.warp.pc - 1, -1, -1):
            if program.registers[pc] & bits and "wgmma" not in program.kernel.code[pc].opcode:
                return [self.owner.describe("access", int(self.tag | pc), -1)]
        return []

    def wgmma_fence(self) -> None:
        self.fenced, self.touched = True, 0
        self.epoch += 1

    def wgmma_commit(self) -> None:
        self.group += 1

    def wgmma_wait(self, keep: int) -> None:
        done = self.group - 1 - keep
        self.flight = {m: f for m, f in self.flight.items() if f[0] > done}
        self.busy = 0
        for m in self.flight:
            self.busy |= m.acc | m.a
        if done > 0:
            self.clock.learn(True, self.agents["wgmma"], done)

    # ---- global memory, earlier grids ----------------------------------------------------------
    def prior_complete(self, m: Any) -> None:
        """griddepcontrol.wait: the grids before this one are complete and visible."""
        self.clock.learn(m, self.owner.layout.prior, 1)

    def ignorant(self, lanes: Any) -> Any:
        """Those of ``lanes`` that do not know that the earlier grids are complete."""
        if self.prior_known:
            return lanes[:0]
        known = self.clock.vc[:, self.owner.layout.prior] >= 1
        self.prior_known = bool(known.all())
        return lanes[~known[lanes]]

    # ---- end -----------------------------------------------------------------------------------
    def exit(self, m: Any) -> None:
        rank = self.warp.block.rank
        self.owner.leave(rank, self.clock.release(m))


class _Region:
    """Last write and last generic read of a global region's granules, with their clusters."""

    def __init__(self, granules: int) -> None:
        def zeros() -> NDArray[np.int32]:
            return np.zeros(granules, np.int32)

        self.w_cluster, self.w_comp, self.w_time, self.w_event = (zeros() for _ in range(4))
        self.r_cluster, self.r_comp, self.r_time, self.r_event = (zeros() for _ in range(4))
        self.written = False


@dataclass(frozen=True)
class Footprint:
    """What a finished grid wrote: for a dependent grid that started early."""

    start: int
    shift: int
    mask: NDArray[np.bool_]
    content: NDArray[np.uint8]
    kernel: str

    def stale(self, address: int, nbytes: int, region: Any) -> bool:
        """The range holds bytes this grid wrote, and nobody rewrote them since."""
        first = (address - self.start) >> self.shift
        last = (address - self.start + nbytes - 1) >> self.shift
        if last < 0 or first >= len(self.mask) or not self.mask[max(first, 0) : last + 1].any():
            return False
        at = max(address, self.start)
        end = min(address + nbytes, self.start + len(self.content))
        now = region.bytes[at - region.base : end - region.base]
        return bool((now == self.content[at - self.start : end - self.start]).all())


class GlobalHazards:
    """Races in global memory between the threads of one launch, and with the grid before it.

    Blocks of different clusters run in no order, so any conflict between them is a hazard, except
    after an atomic or an acquire at gpu scope: what those order is not tracked.
    """

    def __init__(self, machine: Any) -> None:
        self.machine, self.memory = machine, machine.memory
        self.shift = machine.program.global_shift
        self.regions: dict[int, _Region] = {}
        self.ordered: set[int] = set()  # clusters that used gpu-scope synchronisation

    def _region(self, region: Any) -> _Region:
        found = self.regions.get(region.base)
        if found is None:
            found = _Region((region.end - region.base >> self.shift) + 1)
            self.regions[region.base] = found
        return found

    def _lanes(self, wh: WarpHazards, addr: Any, m: Any, nbytes: int) -> Any:
        """(region, shadow, granules, rows) of an access within one region, else None."""
        a = addr if m is True else addr[m]
        region = self.memory.find(int(a[0]))
        if region is None or int(a.min()) < region.start or int(a.max()) >= region.end:
            return None
        idx = (a - np.uint64(region.base)).astype(np.int64) >> self.shift
        rows = LANES if m is True else np.nonzero(m)[0]
        if nbytes >> self.shift > 1:
            idx = idx[:, None] + np.arange(nbytes >> self.shift)
            rows = rows[:, None]
        return region, self._region(region), idx, rows

    def _bad(self, wh: WarpHazards, cluster: Any, comp: Any, time: Any, rows: Any) -> Any:
        """Which of the recorded accesses the lanes do not know."""
        me = wh.owner.number
        unknown = (cluster == me) & (wh.clock.vc[rows, comp] < time)
        if me not in self.ordered:
            unknown |= (cluster != 0) & (cluster != me)
        return unknown

    def read(self, wh: WarpHazards, addr: Any, m: Any, nbytes: int) -> None:
        """Lanes ``m`` load ``nbytes`` each."""
        if not wh.prior_known:
            self._early(wh, addr, m, nbytes, "read")
        found = self._lanes(wh, addr, m, nbytes)
        if found is None:
            return
        region, sh, idx, rows = found
        if sh.written:
            bad = self._bad(wh, sh.w_cluster[idx], sh.w_comp[idx], sh.w_time[idx], rows)
            if bad.any():
                self._report(wh, region, sh, idx, rows, bad, "read", write_first=True)
        sh.r_cluster[idx] = wh.owner.number
        sh.r_comp[idx] = wh.clock.first + rows
        sh.r_time[idx] = wh.clock.time
        sh.r_event[idx] = wh.event

    def write(self, wh: WarpHazards, addr: Any, m: Any, nbytes: int) -> None:
        """Lanes ``m`` store ``nbytes`` each."""
        if not wh.prior_known:
            self._early(wh, addr, m, nbytes, "write")
        found = self._lanes(wh, addr, m, nbytes)
        if found is None:
            return
        region, sh, idx, rows = found
        for first in (True, False):
            parts = (
                (sh.w_cluster, sh.w_comp, sh.w_time) if first
                else (sh.r_cluster, sh.r_comp, sh.r_time)
            )  # fmt: skip
            cluster, comp, time = (x[idx] for x in parts)
            bad = self._bad(wh, cluster, comp, time, rows)
            if bad.any():
                self._report(wh, region, sh, idx, rows, bad, "write", write_first=first)
        self._record(wh, sh, idx, wh.clock.first + rows, wh.clock.time)

    def synchronising(self, wh: WarpHazards, addr: Any, m: Any, nbytes: int) -> None:
        """An atomic, relaxed or acquire access: races with nothing, but may come too early."""
        if not wh.prior_known:
            self._early(wh, addr, m, nbytes, "access")

    @staticmethod
    def _record(wh: WarpHazards, sh: _Region, idx: Any, comp: Any, time: int) -> None:
        sh.written = True
        sh.w_cluster[idx] = wh.owner.number
        sh.w_comp[idx] = comp
        sh.w_time[idx] = time
        sh.w_event[idx] = wh.event

    def async_read(self, wh: WarpHazards, lane: int, starts: Any, nbytes: int) -> None:
        """A copy issued by ``lane`` reads ``nbytes`` at each address of ``starts``."""
        one = np.zeros(32, bool)
        one[lane] = True
        for start in starts:
            region = self.memory.find(int(start))
            if region is None:
                continue
            if not wh.prior_known:
                self._early(wh, np.full(32, start, np.uint64), one, nbytes, "asynchronous read")
            sh = self.regions.get(region.base)
            if sh is None or not sh.written:
                continue
            part = slice(
                int(start) - region.base >> self.shift,
                (int(start) - region.base + nbytes - 1 >> self.shift) + 1,
            )
            idx = np.arange(part.start, part.stop)
            me = wh.owner.number
            cluster = sh.w_cluster[part]
            bad = (cluster == me) & (wh.clock.avc[lane, sh.w_comp[part]] < sh.w_time[part])
            bad |= (cluster != 0) & (cluster != me)
            if bad.any():
                rows = np.full(len(idx), lane)
                self._report(wh, region, sh, idx, rows, bad, "asynchronous read", write_first=True)

    def async_write(self, wh: WarpHazards, lane: int, starts: Any, nbytes: int) -> None:
        """A bulk store writes ``nbytes`` at each address; complete when its group is waited for."""
        one = np.zeros(32, bool)
        one[lane] = True
        for start in starts:
            addr = np.full(32, start, np.uint64)
            self.write(wh, addr, one, max(nbytes, 1 << self.shift))
            region = self.memory.find(int(start))
            if region is None:
                continue
            first = int(start) - region.base >> self.shift
            last = int(start) - region.base + nbytes - 1 >> self.shift
            idx = np.arange(first, last + 1)
            comp = wh.agents["bulk-write"]
            self._record(wh, self._region(region), idx, comp, wh.bulk_group)

    def _early(self, wh: WarpHazards, addr: Any, m: Any, nbytes: int, action: str) -> None:
        """Before griddepcontrol.wait: touches what the grid before this one writes?"""
        lanes = LANES if m is True else np.nonzero(m)[0]
        for lane in wh.ignorant(lanes):
            at = int(addr[lane])
            region = self.memory.find(at)
            for f in self.machine.prior:
                if region is not None and f.stale(at, nbytes, region):
                    self.machine.hazard(
                        "early-dependent-access",
                        f"{action} of what the grid launched before this one writes, before "
                        "griddepcontrol.wait",
                        self.memory.name(at), [wh._here(action, f"lane {lane}")],
                        f"the writer is {f.kernel[:80]}; griddepcontrol.wait must come first",
                    )  # fmt: skip
                    return

    def _report(
        self, wh: WarpHazards, region: Any, sh: _Region, idx: Any, rows: Any, bad: Any,
        action: str, write_first: bool,
    ) -> None:  # fmt: skip
        granule, row = WarpHazards._first(idx, ~bad, rows)
        part = (
            (sh.w_cluster, sh.w_comp, sh.w_event) if write_first
            else (sh.r_cluster, sh.r_comp, sh.r_event)
        )  # fmt: skip
        cluster, comp, event = (int(x[granule]) for x in part)
        first = wh.owner.describe(
            "write" if write_first else "read", event, comp,
            "" if cluster == wh.owner.number else f"by the cluster numbered {cluster - 1}",
        )  # fmt: skip
        self.machine.hazard(
            "global-race",
            "two accesses to global memory, one of them a write, that nothing orders",
            self.memory.name(region.base + (granule << self.shift)),
            [first, wh._here(action, f"lane {row}")],
            "blocks of one grid run in any order; threads of one block need a barrier between",
        )

    def footprints(self) -> list[Footprint]:
        """What this launch wrote."""
        out = []
        for region in self.memory.regions:
            sh = self.regions.get(region.base)
            if sh is not None and sh.written:
                mask = sh.w_cluster != 0
                name = self.machine.program.kernel.name
                out.append(Footprint(region.base, self.shift, mask, region.bytes.copy(), name))
        return out


__all__ = [
    "BarrierTrack", "ClusterHazards", "Event", "Footprint", "GlobalHazards", "Hazard", "Shadow",
    "WarpHazards",
]  # fmt: skip

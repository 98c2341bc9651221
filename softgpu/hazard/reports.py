"""Reports of hazards: every kind, in words, with the place and the two conflicting events.

The rules are elsewhere (``warp``, ``registers``, ``cluster``, ``global_memory``); they call one
method a finding, which raises or collects the ``Hazard`` as ``Machine.hazard`` decides.  In all of
them ``event`` is (warp of the cluster, pc) packed into a number, as the shadows keep it, and the
earlier access comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..memory import SHARED_BASE
from ..ptx import short_name

if TYPE_CHECKING:
    from .clocks import Layout
    from .cluster import BarrierTrack, ClusterHazards
    from .shadow import Conflict
    from .warp import WarpHazards

PC_BITS = 20
PC_MASK = (1 << PC_BITS) - 1
_GENERIC = ("lane", "collective")  # components whose accesses are the generic proxy's own
_STORES = (*_GENERIC, "cp.async")  # whose writes are


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


def lane_text(row: int) -> str:
    """``lane 3``; a negative row is the warp as a whole."""
    return f"lane {row}" if row >= 0 else "the warp"


class Reports:
    """The reports of one cluster."""

    def __init__(self, owner: ClusterHazards) -> None:
        self.owner, self.machine = owner, owner.machine
        self.layout: Layout = owner.layout

    # ---- parts of a report ---------------------------------------------------------------------
    def event(
        self, action: str, event: int, comp: int, note: str = "", cluster: int | None = None
    ) -> Event:
        """An earlier event; component ``comp`` says who did it, -1: not known which lane.

        ``cluster``: number of the cluster it happened in, this one's if None.
        """
        pc, warp = event & PC_MASK, event >> PC_BITS
        kind = self.layout.name(comp)[0] if comp >= 0 else ""
        if kind == "lane":
            lanes = f"lane {comp % 32}"
        elif kind == "tcgen05":
            lanes = self.owner.tensor.report.issuer_text(comp) if self.owner.tensor else ""
        elif kind in ("mbarrier", "bulk-read", "bulk-write", "cp.async"):
            lanes = "asynchronous"
        else:
            lanes = "the warp"
        return self._event(action, pc, warp, lanes, note, cluster)

    def here(self, warp: WarpHazards, action: str, lanes: str) -> Event:
        """Event of the instruction that ``warp`` executes now."""
        return self._event(action, warp.warp.pc, warp.index, lanes, "")

    def _event(
        self, action: str, pc: int, warp: int, lanes: str, note: str, cluster: int | None = None
    ) -> Event:
        kernel = self.machine.program.kernel
        ins = kernel.code[pc]
        rank, index = divmod(warp, self.owner.warps_per_block)
        block = self.machine.block_at((cluster or self.owner.number) - 1, rank)
        text = ins.text or ins.opcode
        return Event(action, kernel.source_of(ins), ins.line, text, block, index, lanes, note)

    def note_of(self, comp: int, time: int) -> str:
        """Sentence on how the work (comp, time) becomes known."""
        kind, _ = self.layout.name(comp)
        if kind == "mbarrier":
            return f"completes phase {time - 2} of {self.barrier(comp)}"
        if kind.startswith("tcgen05") and self.owner.tensor is not None:
            return self.owner.tensor.report.note_of(comp, time)
        return {
            "wgmma": "in flight until a wgmma.wait_group covers it",
            "bulk-read": "in flight until a cp.async.bulk.wait_group covers it",
            "bulk-write": "in flight until a cp.async.bulk.wait_group covers it",
            "cp.async": "in flight until its cp.async.wait_group",
        }.get(kind, "")

    def place(self, granule: int) -> str:
        """A granule of shared memory."""
        rank, offset = divmod(granule, self.owner.per_block)
        where = self.machine.shared_name((offset << self.owner.shift) - SHARED_BASE)
        return f"shared memory, {where}, block {self.owner.cluster.blocks[rank].ctaid}"

    def barrier(self, comp: int) -> str:
        """An mbarrier."""
        return self.machine.barrier_name(self.owner.cluster, comp)

    def _registers(self, bits: int) -> str:
        return f"registers {self.machine.program.register_names(bits)}"

    # ---- shared memory -------------------------------------------------------------------------
    def unknown_write(
        self, warp: WarpHazards, found: Conflict, action: str, is_async: bool = False
    ) -> None:
        """``warp`` accesses a granule whose last write it does not know."""
        place, comp, time = self.place(found.granule), found.component, found.time
        second = self.here(warp, action, lane_text(found.row))
        if comp < 0:
            self.machine.hazard(
                "uninitialised", "shared memory is read before anything was written there",
                place, [second], "poison or a stale value is what it reads",
            )  # fmt: skip
            return
        kind, _ = self.layout.name(comp)
        wrote = "write" if kind in _GENERIC else "asynchronous write"
        both = [self.event(wrote, found.event, comp, self.note_of(comp, time)), second]
        if is_async and kind in _STORES and warp.clock.knowledge(found.row)[comp] >= time:
            self.machine.hazard(
                "missing-proxy-fence",
                "the async proxy accesses what generic stores wrote, without a proxy fence",
                place, both,
                "fence.proxy.async after the stores, before the barrier that hands them over",
            )  # fmt: skip
        elif kind in ("mbarrier", "cp.async") and "read" in action:
            why = "the reader has not seen that phase complete: a missing wait, or another stage's"
            if kind == "cp.async":
                why = "cp.async.wait_group by the thread that copied; a barrier for all others"
            self.machine.hazard(
                "read-before-complete",
                "shared memory is read before the copy that fills it is known to be complete",
                place, both, why,
            )  # fmt: skip
        else:
            self.machine.hazard(
                "race", "two accesses, one of them a write, that nothing orders", place, both,
                "no barrier, arrive and wait, or fence leads from the first to the second",
            )  # fmt: skip

    def unknown_read(self, warp: WarpHazards, found: Conflict, action: str) -> None:
        """``warp`` writes a granule that a reader may not have finished with."""
        kind, _ = self.layout.name(found.component)
        first = self.event(
            "read" if kind in _GENERIC else "asynchronous read",
            found.event, found.component, self.note_of(found.component, found.time),
        )  # fmt: skip
        self.machine.hazard(
            "overwrite-in-use", "shared memory is overwritten while it may still be read",
            self.place(found.granule), [first, self.here(warp, action, lane_text(found.row))],
            "the writer has not been told that the reader is done: a missing wait_group before "
            "the release, a missing release, or a missing wait for it",
        )  # fmt: skip

    def exited_block(self, warp: WarpHazards, rank: int, lane: int) -> None:
        """``lane`` accesses the shared memory of block ``rank``, which has ended."""
        self.machine.hazard(
            "exited-block", "distributed shared memory of a block that has ended is accessed",
            f"shared memory of block {self.owner.cluster.blocks[rank].ctaid}",
            [self._end(rank), self.here(warp, "access", lane_text(lane))],
            "blocks of a cluster must not end before the last access to them",
        )  # fmt: skip

    def _end(self, rank: int) -> Event:
        """The last exit of block ``rank``, which has ended."""
        return self.event("end of the block", self.owner.ended[rank], -1)

    def exit_in_flight(self, rank: int, comp: int, time: int, event: int) -> None:
        """Block ``rank`` ends and nothing says that the work (comp, time) on it is over."""
        self.machine.hazard(
            "exit-in-flight",
            "a block ends while an access to its shared memory may still be on its way",
            f"shared memory of block {self.owner.cluster.blocks[rank].ctaid}",
            [self.event("access", event, comp, self.note_of(comp, time)), self._end(rank)],
            "wait for the operation (or a cluster barrier) before the block's last warp exits",
        )  # fmt: skip

    # ---- mbarriers -----------------------------------------------------------------------------
    def early_phase(self, track: BarrierTrack) -> None:
        """A phase of ``track`` completes although copies for it are on their way."""
        events = [self.event("asynchronous write", track.copy, track.comp, "not landed yet")]
        if track.expect >= 0:
            events.insert(0, self.event("expected bytes", track.expect, -1))
        self.machine.hazard(
            "wrong-tx-count",
            f"a phase completes while {track.flying} bytes of copies for it are on their way",
            self.barrier(track.comp), events,
            "expect_tx must count the bytes of all copies of the phase",
        )  # fmt: skip

    def unknown_barrier(self, warp: WarpHazards, track: BarrierTrack, lane: int, how: str) -> None:
        """``lane`` uses an mbarrier whose initialisation it does not know, or is not fenced."""
        if warp.clock.vc[lane, track.comp] >= 1:
            why = "fence.mbarrier_init (or fence.proxy.async) after mbarrier.init, then a barrier"
        else:
            why = "no barrier leads from the initialisation to this use"
        first = self.event("initialisation", track.event, -1)
        self.machine.hazard(
            "mbarrier-init", "an mbarrier is used that may not be initialised yet",
            self.barrier(track.comp), [first, self.here(warp, f"{how} use", lane_text(lane))], why,
        )  # fmt: skip

    def armed_exit(self, track: BarrierTrack, tx: int, phase: int) -> None:
        """A cluster ends while an mbarrier expects ``tx`` bytes more."""
        event = track.expect if track.expect >= 0 else track.event
        self.machine.hazard(
            "armed-exit",
            f"a cluster ends while an mbarrier expects {tx} bytes that nobody copied",
            f"{self.barrier(track.comp)}, phase {phase}", [self.event("expected bytes", event, -1)],
            "fewer bytes were copied than expected, or a copy was never issued; harmless only if "
            "nobody would have waited for them",
        )  # fmt: skip

    def arrived_twice(self, warp: WarpHazards) -> None:
        """``warp`` arrives at barrier.cluster and has not waited for its last arrival."""
        self.machine.hazard(
            "cluster-arrive-twice", "a thread arrives at barrier.cluster twice without a wait",
            "barrier.cluster", [self.here(warp, "second arrival", "the warp")],
            "barrier.cluster.wait between the two: each thread arrives once before it completes",
        )  # fmt: skip

    # ---- registers of WGMMAs -------------------------------------------------------------------
    def register_in_flight(self, warp: WarpHazards, bits: int, group: int, event: int) -> None:
        """Registers ``bits`` are accessed; a WGMMA of ``group`` uses them until a wait_group."""
        comp = warp.agents["wgmma"]
        first = self.event("wgmma", event, comp, self.note_of(comp, group))
        self.machine.hazard(
            "register-in-flight", "registers of a WGMMA in flight are accessed",
            self._registers(bits), [first, self.here(warp, "access", "the warp")],
            "wgmma.wait_group before the accumulators are read or the A registers reused",
        )  # fmt: skip

    def unfenced_registers(self, warp: WarpHazards, bits: int, used: int) -> None:
        """A WGMMA that uses ``used``, of which ``bits`` were touched since the last fence."""
        which = self._registers(bits) if bits else "the first WGMMA of the warp"
        self.machine.hazard(
            "missing-wgmma-fence",
            "WGMMA uses registers that other instructions accessed, with no wgmma.fence since",
            which, [*self._last_access(warp, used), self.here(warp, "wgmma", "the warp")],
            "wgmma.fence.sync.aligned between them",
        )  # fmt: skip

    def _last_access(self, warp: WarpHazards, bits: int) -> list[Event]:
        """The instruction nearest before this one, in program order, that names a register."""
        program = self.machine.program
        for pc in range(warp.warp.pc - 1, -1, -1):
            if program.registers[pc] & bits and "wgmma" not in program.kernel.code[pc].opcode:
                return [self.event("access", int(warp.tag | pc), -1)]
        return []

    def shapes_share_registers(self, warp: WarpHazards, bits: int, event: int) -> None:
        """A WGMMA accumulates into ``bits``, as one of another shape does that is in flight."""
        self.machine.hazard(
            "missing-wgmma-fence",
            "WGMMAs of different shapes share accumulators, with no wgmma.fence between",
            self._registers(bits),
            [
                self.event("wgmma", event, warp.agents["wgmma"]),
                self.here(warp, "wgmma", "the warp"),
            ],
            "wgmma.fence.sync.aligned between them; only one shape keeps its own order",
        )

    # ---- warpgroups ----------------------------------------------------------------------------
    def divergent_warpgroup(self, warp: WarpHazards, number: int, event: int, action: str) -> None:
        """``warp`` executes another aligned instruction than a warp of its warpgroup, or exits.

        Args:
            number: of aligned instructions that ``warp`` has executed before.
            event, action: what the other warp has done in its place.
        """
        first = warp.warp.index // 4 * 4
        exits = self.machine.program.kernel.code[warp.warp.pc].parts[0] in ("ret", "exit")
        self.machine.hazard(
            "warpgroup-divergence",
            "the warps of a warpgroup do not execute the same aligned instructions",
            f"warpgroup of warps {first}-{first + 3}, after {number} such instructions",
            [
                self.event(action, event, -1),
                self.here(warp, "exit" if exits else "aligned instruction", "the warp"),
            ],
            "all four warps execute each wgmma and setmaxnreg, or none: take it out of the branch, "
            "or let the warpgroup decide together",
        )

    # ---- global memory -------------------------------------------------------------------------
    def global_race(
        self, warp: WarpHazards, at: int, found: Conflict, cluster: int, actions: tuple[str, str]
    ) -> None:
        """``warp`` accesses address ``at`` and does not know ``found``, which ``cluster`` did.

        ``actions``: what the earlier access did and what this one does.
        """
        first = self.event(actions[0], found.event, found.component, cluster=cluster)
        self.machine.hazard(
            "global-race",
            "two accesses to global memory, one of them a write, that nothing orders",
            self.machine.memory.name(at),
            [first, self.here(warp, actions[1], lane_text(found.row))],
            "blocks of one grid run in any order; threads of one block need a barrier between",
        )

    def early_access(self, warp: WarpHazards, at: int, lane: int, action: str, writer: str) -> None:
        """``lane`` accesses what kernel ``writer`` wrote, before griddepcontrol.wait."""
        self.machine.hazard(
            "early-dependent-access",
            f"{action} of what the grid launched before this one writes, before "
            "griddepcontrol.wait",
            self.machine.memory.name(at), [self.here(warp, action, lane_text(lane))],
            f"the writer is {short_name(writer)}; griddepcontrol.wait must come first",
        )  # fmt: skip

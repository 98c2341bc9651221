"""Reports of hazards of tensor memory; the rules are in ``tensor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .reports import Event, lane_text
from .tensor_shadow import area_of, cells_text

if TYPE_CHECKING:
    from ..tensor_memory import Cells
    from .cluster import ClusterHazards
    from .tensor_clock import Issuer, TensorColumns
    from .tensor_shadow import Pipelines, TensorConflict
    from .warp import WarpHazards

WHAT = {
    "read-before-complete": "tensor memory is read before the operation that writes it is known to "
    "be complete",
    "unordered-mma": "tensor memory that an mma in flight writes is used by another mma or cp, and "
    "no implicit pipeline orders the two",
    "unordered-cp": "tensor memory that a cp in flight writes is used by an mma or another cp, and "
    "no implicit pipeline orders the two",
    "race": "two accesses to tensor memory, one of them a write, that nothing orders",
    "overwrite-in-use": "tensor memory is overwritten while it may still be read",
    "uninitialised": "tensor memory is read before anything was written there",
    "tcgen05-fence": "an access to tensor memory is handed on by a synchronisation of threads "
    "without tcgen05.fence",
    "mixed-kind": "an mma accumulates on what an mma of another kind, still in flight, writes",
    "operand-format": "two MMAs take the same bytes of shared memory in different formats",
    "early-dealloc": "tensor memory is deallocated while an access to it may still be on its way",
    "commit-tracks-nothing": "a commit by a thread that has issued nothing it could wait for",
}
FREE = "deallocation"  # an action
_COMMIT = "tcgen05.commit by the issuing thread, behind the operation; then a wait for that phase"
_LOAD = "tcgen05.wait::ld by the loading warp, then a barrier, or an arrive and a wait"
_STORE = "tcgen05.wait::st by the storing warp, then a barrier, or an arrive and a wait"


class TensorReports:
    """The reports of one cluster about its tensor memory."""

    def __init__(self, owner: ClusterHazards, columns: TensorColumns, pipelines: Pipelines) -> None:
        self.owner, self.machine, self.columns = owner, owner.machine, columns
        self.pipelines = pipelines

    # ---- parts of a report ---------------------------------------------------------------------
    def issuer_text(self, component: int) -> str:
        """Issuer of an agent's work, as text."""
        issuer = self.columns.issuer_of(component - self.columns.first)
        return "asynchronous" if issuer is None else f"issued by lane {issuer.lane}"

    def note_of(self, component: int, time: int) -> str:
        """Sentence on how an agent's work becomes known."""
        issuer = self.columns.issuer_of(component - self.columns.first)
        if issuer is None:
            kind, _ = self.columns.name(component - self.columns.first)
            return f"in flight until tcgen05.wait::{kind[-2:]}"
        for covered, barriers in issuer.commits:
            if covered >= time:
                at = " and ".join(map(self.owner.report.barrier, barriers))
                return f"complete when a tcgen05.commit arrives at {at}"
        return "in flight: no tcgen05.commit of its thread has followed"

    def _place(self, place: tuple[int, str]) -> str:
        rank, text = place
        return f"tensor memory, {text}, block {self.owner.cluster.blocks[rank].ctaid}"

    def _is(self, found: TensorConflict, read: bool) -> str:
        """Word for the earlier access: load, store, "mma, A", or the operation's kind."""
        if self.columns.issuer_of(found.agent) is None:
            return "load" if read else "store"
        if read:
            return "mma, A"
        return self.pipelines.all[found.order].kind

    def _both(
        self, warp: WarpHazards, found: TensorConflict, action: str, lane: int, read: bool
    ) -> list[Event]:
        report, component = self.owner.report, self.columns.first + found.agent
        known = warp.clock.knowledge(lane)[component] >= found.time
        note = "" if known else self.note_of(component, found.time)
        first = report.event(self._is(found, read), found.event, component, note)
        return [first, report.here(warp, action, lane_text(lane))]

    def _remedy(self, agent: int) -> str:
        """Remedy that makes an agent's work complete and known."""
        if self.columns.issuer_of(agent) is not None:
            return _COMMIT
        return _STORE if self.columns.name(agent)[0].endswith("st") else _LOAD

    def _tell(self, kind: str, place: tuple[int, str], events: list[Event], why: str) -> None:
        self.machine.hazard(kind, WHAT[kind], self._place(place), events, why)

    # ---- accesses ------------------------------------------------------------------------------
    def unknown_write(
        self, warp: WarpHazards, found: TensorConflict, action: str, lane: int, reads: bool
    ) -> None:
        """``action`` meets cells whose last write is not known to be complete."""
        if found.agent == self.columns.nobody:
            second = self.owner.report.here(warp, action, lane_text(lane))
            self._tell("uninitialised", found.place, [second], "what it holds is undefined")
            return
        issued, issues = self.columns.issuer_of(found.agent) is not None, lane >= 0
        if action == FREE:
            kind = "early-dealloc"
        elif issued and issues:
            kind = f"unordered-{self._is(found, False)}"
        else:
            kind = "read-before-complete" if reads else "race"
        both = self._both(warp, found, action, lane, False)
        self._tell(kind, found.place, both, self._remedy(found.agent))

    def unknown_read(
        self, warp: WarpHazards, found: TensorConflict, action: str, lane: int
    ) -> None:
        """``action`` overwrites cells that a reader may not have finished with."""
        both = self._both(warp, found, action, lane, True)
        kind = "early-dealloc" if action == FREE else "overwrite-in-use"
        self._tell(kind, found.place, both, self._remedy(found.agent))

    def unfenced(
        self, warp: WarpHazards, found: TensorConflict, action: str, lane: int, read: bool = False
    ) -> None:
        """The earlier access is complete and known, but not past both fences."""
        twin = self.columns.first + self.columns.twin(found.agent)
        if warp.clock.knowledge(lane)[twin] < found.time:
            why = "tcgen05.fence::before_thread_sync behind the first, before its thread's release"
        else:
            why = "tcgen05.fence::after_thread_sync before the second, behind its thread's acquire"
        self._tell("tcgen05-fence", found.place, self._both(warp, found, action, lane, read), why)

    def mixed_kind(self, warp: WarpHazards, found: TensorConflict, action: str, lane: int) -> None:
        """Two kinds of mma in one pipeline."""
        both = self._both(warp, found, action, lane, False)
        why = "editions of the manual differ in whether the kind must be the same"
        self._tell("mixed-kind", found.place, both, why)

    def other_format(
        self, warp: WarpHazards, granule: int, before: str, event: int, now: str, lane: int
    ) -> None:
        """An mma takes bytes as ``now`` that the one of ``event`` took as ``before``."""
        report = self.owner.report
        first = report.event(f"operand as {before}", event, -1)
        self.machine.hazard(
            "operand-format", WHAT["operand-format"], report.place(granule),
            [first, report.here(warp, f"operand as {now}", lane_text(lane))],
            "one of the instruction descriptors names another element format than the bytes have",
        )  # fmt: skip

    # ---- allocation and commit -----------------------------------------------------------------
    def unknown_allocation(
        self, warp: WarpHazards, cells: Cells, event: int, action: str, lane: int
    ) -> None:
        """``action`` uses columns whose allocation it does not know to have happened."""
        report = self.owner.report
        events = [
            report.event("allocation", event, -1), report.here(warp, action, lane_text(lane))
        ]  # fmt: skip
        why = "a barrier between tcgen05.alloc and the first access of another warp"
        self._tell("race", cells_text(area_of(cells)), events, why)

    def commit_tracks_nothing(self, warp: WarpHazards, other: Issuer, lane: int) -> None:
        """``lane`` commits; what is outstanding was issued by ``other``."""
        report = self.owner.report
        first = report.event("issue", other.event, self.columns.first + other.agent)
        self.machine.hazard(
            "commit-tracks-nothing", WHAT["commit-tracks-nothing"], "tensor memory",
            [first, report.here(warp, "commit", lane_text(lane))],
            "the thread that issues the operations must execute their commit",
        )  # fmt: skip

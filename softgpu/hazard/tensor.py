"""The rules for tensor memory: what the handlers of tcgen05 tell the hazard checker.

PTX ISA 9.7.18.6 (memory consistency of tcgen05).  tcgen05.mma, cp, ld and st are asynchronous, even
for the thread that issues them.  Two of them that conflict are in order only if the list of
implicit pipelines says so (``Pipeline.leads``; ld and st of one warp) or if the second one's thread
knows that the first is complete: through the mbarrier phase of a tcgen05.commit, or through
tcgen05.wait::ld or ::st and a release and acquire.  Operands in shared memory are read through the
async proxy.  See ``tensor_clock`` for who knows what.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .clocks import OWN, Ints, Stamp, joined
from .shadow import Index
from .tensor_clock import Issuer, TensorColumns
from .tensor_reports import FREE, TensorReports
from .tensor_shadow import (
    Area,
    OperandFormats,
    Pipeline,
    Pipelines,
    TensorShadow,
    area_of,
    columns_of,
)

if TYPE_CHECKING:
    from ..cluster import MBarrier
    from ..tensor_memory import Cells
    from ..tensor_queue import TensorOp
    from .cluster import ClusterHazards
    from .warp import WarpHazards

# the rules that ``Options.rules`` switches
FENCE, MIXED, FORMAT = "tcgen05-fence", "mixed-kind", "operand-format"
_NONE: frozenset[int] = frozenset()


class Ticket(NamedTuple):
    """Evidence of an allocation or deallocation: the warp's clock and knowledge at that time.

    Attributes:
        component, time: who knows this knows that the warp came here.
        known, usable: what all lanes of the warp know and may rely on, by agent.
    """

    component: int
    time: int
    known: Ints
    usable: Ints


class _Allocation(NamedTuple):
    """Columns that are allocated, by one warp or by one of each CTA of a pair."""

    number: int
    rank: int
    first: int
    columns: int
    tickets: tuple[Ticket, ...]
    event: int


class TensorHazards:
    """Tensor memory of one cluster."""

    def __init__(self, owner: ClusterHazards, columns: TensorColumns) -> None:
        self.owner, self.columns = owner, columns
        self.shadow = TensorShadow(owner.cluster.size, columns.nobody)
        self.pipelines = Pipelines()
        self.formats = OperandFormats(owner.shared.granules)
        self.report = TensorReports(owner, columns, self.pipelines)
        self.allocations: list[_Allocation] = []
        self.numbers = itertools.count()  # of allocations
        self.rules: frozenset[str] = owner.machine.options.rules


class _Accessor(NamedTuple):
    """Accessor of tensor memory now.

    Attributes:
        known: by agent, the work it knows to be complete; usable: what fences let it rely on.
        lane: of an mma or cp, -1 for the warp.
        action: in words.
        order: the number of its own pipeline, -1 for ld and st.
    """

    known: Ints
    usable: Ints
    lane: int
    action: str
    order: int = -1


class WarpTensor:
    """Checks of one warp's use of tensor memory; ``WarpHazards.tensor``.

    Attributes:
        usable: (32, agents + 1), the work of every agent that a lane may rely on: complete loads
            and stores of this warp, and work that the lane knows of, that a
            fence::before_thread_sync on the agent's side passed on, and that a
            fence::after_thread_sync of this lane took over.
        loads, stores: number of the group that the next tcgen05.wait::ld or ::st completes.
        allocations: number of the next allocation or deallocation.
    """

    def __init__(self, owner: WarpHazards, tensor: TensorHazards) -> None:
        self.owner, self.clock, self.tensor = owner, owner.clock, tensor
        self.columns, self.shadow, self.report = tensor.columns, tensor.shadow, tensor.report
        self.usable: Ints = np.zeros((32, self.columns.agents + 1), np.int32)
        self.loads = self.stores = self.allocations = 1
        self._load, self._store, self._alloc = (
            self.columns.of_warp(kind, owner.index) for kind in TensorColumns.OF_WARP
        )
        first = self.columns.first
        self._agents = slice(first, first + self.columns.agents + 1)
        self._told: set[tuple[int, int]] = set()

    # ---- who accesses --------------------------------------------------------------------------
    def _warp(self, action: str) -> _Accessor:
        """The whole warp, whose own ld and st are in order."""
        known, usable = self.clock.least()[0][self._agents].copy(), self.usable.min(0)
        known[[self._load, self._store]] = usable[[self._load, self._store]] = OWN
        return _Accessor(known, usable if FENCE in self.tensor.rules else known, -1, action)

    def _thread(self, lane: int, action: str, order: int) -> _Accessor:
        known = self.clock.vc[lane, self._agents]
        usable = self.usable[lane] if FENCE in self.tensor.rules else known
        return _Accessor(known, usable, lane, action, order)

    # ---- the rules -----------------------------------------------------------------------------
    def _check_last_write(self, area: Area, who: _Accessor, reads: bool, role: str = "") -> None:
        """The last writes must be complete to ``who``; if it ``reads``, there must be one."""
        bad = self.shadow.unknown_writes(area, who.usable)
        if not bad.any():
            return
        blank = self.shadow.agent[area] == self.shadow.nobody
        if not reads:
            bad &= ~blank
        elif who.lane < 0:  # of layout F a warp loads the lanes between as well
            bad &= ~blank | blank.all(0)
        if who.order >= 0:
            self._leave_out_pipelined(area, bad, who, role)
        if not bad.any():
            return
        unordered = bad & self.shadow.unknown_writes(area, who.known)
        if unordered.any():
            found = self.shadow.writer(area, unordered)
            self.report.unknown_write(self.owner, found, who.action, who.lane, reads)
        else:
            found = self.shadow.writer(area, bad)
            self.report.unfenced(self.owner, found, who.action, who.lane)

    def _leave_out_pipelined(self, area: Area, bad: Any, who: _Accessor, role: str) -> None:
        """Unmarks what an implicit pipeline orders before ``who``."""
        pipelines, orders = self.tensor.pipelines.all, self.shadow.order[area]
        mine = pipelines[who.order]
        if mine.kind == "cp":  # behind an mma of this warp that read, as its A, an earlier copy
            for issuer in self.columns.issuers.values():
                if issuer.warp == self.owner.index:
                    bad &= ~self.shadow.read_since_written(area, issuer.agent)
        for number in np.unique(orders[bad]):
            if number < 0 or not pipelines[number].leads(mine, role):
                continue
            same, first = bad & (orders == number), pipelines[number]
            bad &= ~same
            if role == "A":
                taken = first._replace(taken=True)
                self.shadow.relabel(area, same, self.tensor.pipelines.number(taken))
            mixed = first.kind == mine.kind and first.elements != mine.elements
            if MIXED in self.tensor.rules and mixed:
                found = self.shadow.writer(area, same)
                self.report.mixed_kind(self.owner, found, who.action, who.lane)

    def _check_reads(self, area: Area, who: _Accessor) -> None:
        """Nobody may still read what ``who`` writes."""
        but = self._own_issuers() if who.order >= 0 else _NONE
        found = self.shadow.unknown_read(area, who.usable, but)
        if found is None:
            return
        unordered = self.shadow.unknown_read(area, who.known, but)
        if unordered is not None:
            self.report.unknown_read(self.owner, unordered, who.action, who.lane)
        else:
            self.report.unfenced(self.owner, found, who.action, who.lane, read=True)

    def _own_issuers(self) -> frozenset[int]:
        """An mma of this warp reads its A before a later mma or cp of the warp writes."""
        issuers = self.columns.issuers
        return frozenset(i.agent for (w, _), i in issuers.items() if w == self.owner.index)

    def _check_allocated(self, cells: Cells, lane: int, action: str) -> None:
        """The allocation must be known, not only have happened."""
        for a in self.tensor.allocations:
            if a.rank != cells.rank or (a.number, lane) in self._told:
                continue
            if cells.first >= a.first + a.columns or a.first >= cells.first + cells.columns:
                continue
            known = self.clock.knowledge(lane)
            if not any(known[t.component] >= t.time for t in a.tickets):
                self.report.unknown_allocation(self.owner, cells, a.event, action, lane)
            self._told.add((a.number, lane))

    # ---- allocation ----------------------------------------------------------------------------
    def ticket(self) -> Ticket:
        """The warp as one that allocates or frees, now."""
        known = self.clock.least()[0][self._agents]
        usable = self.usable.min(0) if FENCE in self.tensor.rules else known
        component, number = self.columns.first + self._alloc, self.allocations
        self.clock.learn(True, component, number)
        self.allocations += 1
        return Ticket(component, number, known, usable)

    def allocated(self, rank: int, first: int, columns: int, *peer: Ticket) -> None:
        """The warp has been given columns of CTA ``rank``; ``peer``: with a warp of the peer."""
        self.shadow.forget(columns_of(rank, first, columns))
        number, tickets = next(self.tensor.numbers), (self.ticket(), *peer)
        self.tensor.allocations.append(
            _Allocation(number, rank, first, columns, tickets, self.owner.event)
        )

    def freed(self, rank: int, first: int, columns: int, *peer: Ticket) -> None:
        """The warp gives columns of CTA ``rank`` back: every access must be known to be over."""
        area, tickets = columns_of(rank, first, columns), (self.ticket(), *peer)
        known = np.max([t.known for t in tickets], 0)
        usable = np.max([t.usable for t in tickets], 0)
        who = _Accessor(known, usable, -1, FREE)
        self._check_reads(area, who)
        self._check_last_write(area, who, False)
        self.shadow.forget(area)
        kept = [a for a in self.tensor.allocations if (a.rank, a.first) != (rank, first)]
        self.tensor.allocations[:] = kept

    # ---- load and store ------------------------------------------------------------------------
    def load(self, cells: Sequence[Cells]) -> None:
        """tcgen05.ld of the whole warp: it reads ``cells`` until ``wait_load``."""
        who = self._warp("load")
        for c in cells:
            area = area_of(c)
            self._check_allocated(c, -1, who.action)
            self._check_last_write(area, who, True)
            self.shadow.read(area, self._load, self.loads, self.owner.event)

    def store(self, cells: Sequence[Cells]) -> None:
        """tcgen05.st of the whole warp: it writes ``cells`` until ``wait_store``."""
        who = self._warp("store")
        for c in cells:
            area = area_of(c)
            self._check_allocated(c, -1, who.action)
            self._check_reads(area, who)
            self._check_last_write(area, who, False)
            self.shadow.superseded(area, (self._load,))
            self.shadow.write(area, self._store, self.stores, self.owner.event)

    def wait_load(self) -> None:
        """tcgen05.wait::ld: the warp's loads are complete, which its lanes know."""
        self._complete(self._load, self.loads)
        self.loads += 1

    def wait_store(self) -> None:
        """tcgen05.wait::st."""
        self._complete(self._store, self.stores)
        self.stores += 1

    def _complete(self, agent: int, group: int) -> None:
        self.clock.learn(True, self.columns.first + agent, group)
        self.usable[:, agent] = group

    # ---- mma and cp ----------------------------------------------------------------------------
    def issue(self, op: TensorOp, lane: int) -> None:
        """``lane`` issues an mma or a cp, before it is performed."""
        issuer = self.columns.issuer(self.owner.index, lane)
        target = op.writes[0]
        pipeline = Pipeline(
            self.owner.index, op.kind, op.group, op.shape,
            (int(target.lanes[0]), target.first), op.elements,
        )  # fmt: skip
        who = self._thread(lane, op.kind, self.tensor.pipelines.number(pipeline))
        for c in (*op.reads, *op.writes):
            self._check_allocated(c, lane, who.action)
        issuer.issued += 1
        issuer.event = self.owner.event
        reads, writes = [area_of(c) for c in op.reads], [area_of(c) for c in op.writes]
        for area in reads:
            self._check_last_write(area, who._replace(action="mma, A"), True, "A")
        for area in writes:
            self._check_reads(area, who)
            self._check_last_write(area, who, op.accumulates, "D" if op.kind == "mma" else "")
        for area in reads:
            self.shadow.read(area, issuer.agent, issuer.issued, issuer.event)
        for area in writes:
            self.shadow.superseded(area, self._own_issuers())
            self.shadow.write(area, issuer.agent, issuer.issued, issuer.event, who.order)
        self._shared_operands(op, issuer)

    def _shared_operands(self, op: TensorOp, issuer: Issuer) -> None:
        """Operands in shared memory: read by the async proxy until a commit's phase."""
        cluster, component = self.owner.owner, self.columns.first + issuer.agent
        for rank in {c.rank for c in op.writes} | {rank for rank, _, _ in op.shared}:
            self._busy(rank, issuer, component)
        for _, chunks, form in op.shared:
            idx = cluster.granules(chunks.reshape(-1) << 4, 16)
            self.owner.async_read(issuer.lane, idx, component, issuer.issued)
            if form and FORMAT in self.tensor.rules:
                self._check_format(idx if idx.ndim == 1 else idx[:, 0], form, issuer)

    def _check_format(self, granules: Index, form: str, issuer: Issuer) -> None:
        """Nobody means the same bytes, chunks by their first granules, in another format."""
        shared = self.owner.owner.shared
        found = self.tensor.formats.take(
            granules, form, shared.comp[granules], shared.time[granules], issuer.event
        )
        if found is not None:
            self.report.other_format(self.owner, *found, form, issuer.lane)

    def _busy(self, rank: int, issuer: Issuer, component: int) -> None:
        """Notes that issued work uses CTA ``rank``, which must not end before it is complete.

        Reports a hazard if the CTA has ended.
        """
        cluster = self.owner.owner
        if cluster.cluster.blocks[rank].live == 0:
            cluster.report.exited_block(self.owner, rank, issuer.lane)
        cluster.pending[rank][component] = (issuer.issued, self.owner.event)

    # ---- commit and fences ---------------------------------------------------------------------
    def commit(self, lane: int, barriers: Sequence[tuple[int, MBarrier]]) -> Stamp:
        """``lane`` asks for one arrival at each (rank, mbarrier) when its operations are complete.

        Returns:
            What the arrival publishes, for ``arrived`` when it lands: the operations the thread has
            issued, and what it knew before.  Of its generic accesses only those that a proxy fence
            has covered: the arrival is the tensor core's.
        """
        issuer = self.columns.issuer(self.owner.index, lane)
        self._check_tracked(issuer)
        for rank, bar in barriers:
            self.owner.use_barrier(bar, lane, "asynchronous")
            if issuer.issued and rank != self.owner.warp.block.rank:
                self._busy(rank, issuer, self.columns.first + issuer.agent)
        issuer.committed = issuer.issued
        issuer.commits = [
            *issuer.commits[-15:], (issuer.issued, [bar.track.comp for _, bar in barriers])
        ]  # fmt: skip
        self._pass_on(lane == np.arange(32))  # a commit implies fence::before_thread_sync
        v, a = self.clock.vc[lane].copy(), self.clock.avc[lane].copy()
        own = [int(self.clock.own[lane]), self.clock.collective]
        v[own] = a[own]
        first = self.columns.first
        v[[first + issuer.agent, first + self.columns.twin(issuer.agent)]] = issuer.issued
        return Stamp(v, a)

    def _check_tracked(self, issuer: Issuer) -> None:
        """A commit speaks for its own thread: is that the one whose work is outstanding?"""
        if issuer.committed < issuer.issued:
            return
        home = self.owner.warp.block.rank * self.owner.owner.warps_per_block
        others = [
            i
            for (warp, _), i in self.columns.issuers.items()
            if i.committed < i.issued and 0 <= warp - home < self.owner.owner.warps_per_block
        ]
        if issuer.issued:  # it may well signal a second mbarrier for what it has committed
            others = [i for i in others if i.warp == issuer.warp]
        if others:
            self.report.commit_tracks_nothing(self.owner, others[0], issuer.lane)

    @staticmethod
    def arrived(bar: MBarrier, stamp: Stamp) -> None:
        """The arrival of a commit at ``bar`` lands; ``stamp`` is what ``commit`` returned."""
        bar.track.open = joined(bar.track.open, stamp)

    def fence(self, before: bool, m: Any) -> None:
        """tcgen05.fence::before_thread_sync (``before``) or ::after_thread_sync of lanes ``m``."""
        if before:
            self._pass_on(m)
            return
        lanes = slice(None) if m is True else np.nonzero(m)[0]
        first, n = self.columns.first, self.columns.agents
        twins = self.clock.vc[lanes, first + n + 1 : first + 2 * n + 1]
        self.usable[lanes, :n] = np.maximum(self.usable[lanes, :n], twins)

    def _pass_on(self, m: Any) -> None:
        """Lets the warp's complete ld and st travel on with the next release."""
        own = self.columns.first + np.array([self._load, self._store])
        self.clock.note(m, own, own + self.columns.agents + 1)

"""A modelled timeline of one cluster: who runs, who waits, which handovers make the time.

Events of ``Recorder`` are played in order of time on servers: four schedulers, special function
units, the shared-memory port and the tensor cores of each CTA, and the CTA's share of memory
bandwidth.  A server takes requests one after the other.  A stretch of a warp's instructions takes
as long as its longest chain of dependent ones (``LATENCY``), or as its instructions at ``PIPES``
cycles each if that is more: ptxas orders instructions well, but only between barriers.  Nothing
here was measured; read the picture for its order and for what waits for what, not for
microseconds.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..decode import register_names as registers
from ..errors import SoftGpuError
from ..ptx import Kernel
from .recorder import Event, Key, WarpRecord

PIPES = 1.5  # cycles of an instruction of one warp: FP32 takes 1, integers 2
LATENCY: dict[str, float] = {
    "ld": 30, "ldmatrix": 33, "shfl": 24, "vote": 12, "redux": 24, "atom": 500, "ld.global": 500,
    "ex2": 18, "lg2": 18, "rcp": 18, "rsqrt": 18, "sqrt": 18, "tcgen05": 40, "mov": 0,
}  # fmt: skip
ALU = 4.0  # cycles to a result of all others
NO_RESULT = ("st", "stmatrix", "red", "bar", "barrier", "wgmma", "mbarrier", "cp", "fence")
HANDOVER = 30.0  # from an arrival to the waiting warp's next instruction
COPY = 700.0  # latency of a copy from memory, besides its bytes
TENSOR = 60.0  # of an MMA, besides its cycles
CHUNK = 16.0  # instructions that a scheduler takes from a warp at a time
SPECIAL = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")


class Slice(NamedTuple):
    """A stretch of a track: ``start`` and ``end`` in cycles, what it is, and numbers about it."""

    start: float
    end: float
    name: str
    about: dict[str, float | str]


class Handover(NamedTuple):
    """A wait on the critical path: for what, until when, who came last, by which unit."""

    key: Key
    at: float
    source: int
    unit: str


@dataclass
class Timeline:
    """Results of ``play``.

    Attributes:
        cycles: until the last warp ends.
        warps: slices by (rank, warp).
        units: slices by (rank, unit): ``tensor``, ``copy``.
        busy: cycles by (rank, unit), of ``port`` and ``issue`` too.
        path: handovers of the critical path, last first.
    """

    cycles: float
    warps: dict[tuple[int, int], list[Slice]]
    units: dict[tuple[int, str], list[Slice]]
    busy: dict[tuple[int, str], float]
    path: list[Handover]

    def waits(self) -> dict[str, float]:
        """Kind of wait -> how often the critical path has it."""
        found = Counter(kind_of(h) for h in self.path)
        return {kind: float(n) for kind, n in found.items()}


class Stretch(NamedTuple):
    """Instructions between two events, as one warp that is alone runs them.

    Attributes:
        ptx: instructions.
        special: special functions among them.
        depth: cycles of the longest chain of dependent instructions.
        file: that most come from.
    """

    ptx: int
    special: int
    depth: float
    file: str


def stretch(kernel: Kernel, path: tuple[int, ...]) -> Stretch:
    """``Stretch`` of the instructions ``path``, in the order of execution.

    What was made before it, by loads too, is taken to be there when it begins.
    """
    ready: dict[str, float] = {}
    special, depth = 0, 0.0
    files: Counter[str] = Counter()
    for pc in path:
        ins = kernel.code[pc]
        head = ins.parts[0]
        special += head in SPECIAL
        files[kernel.source_of(ins).split(":")[0]] += 1
        made = [] if head in NO_RESULT else registers(ins.args[0]) if ins.args else []
        needed = [n for x in ins.args[bool(made) :] for n in registers(x)]
        if ins.pred is not None:
            needed += registers(ins.pred)
        at = max((ready.get(n, 0.0) for n in needed), default=0.0)
        head = "ld.global" if head == "ld" and "global" in ins.parts else head
        at += LATENCY.get(head, ALU)
        for name in made:
            ready[name] = at
        depth = max(depth, at)
    return Stretch(len(path), special, depth, files.most_common(1)[0][0])


class _Server:
    """Takes requests one after the other."""

    def __init__(self) -> None:
        self.free = self.busy = 0.0

    def serve(self, now: float, amount: float) -> tuple[float, float]:
        """(start, end) of a request."""
        start = max(now, self.free)
        self.free = start + amount
        self.busy += amount
        return start, self.free


class _Came(NamedTuple):
    """One contribution to a completion: when, by which warp and its event, by which unit."""

    at: float
    warp: int
    event: int
    unit: str


@dataclass
class _Warp:
    """Position of a warp in its events."""

    record: WarpRecord
    factor: float  # issued instructions of a PTX instruction
    at: int = 0
    left: tuple[float, float, float] | None = None  # of a stretch: slots, special, wavefronts
    whole: float = 1.0  # slots of the whole stretch
    pace: float = PIPES  # cycles of each of its slots
    began: float = 0.0
    last: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    slices: list[Slice] = field(default_factory=list)
    stalls: list[tuple[int, Key]] = field(default_factory=list)  # (event, what it waited for)


class Player:
    """Plays the events of one cluster."""

    def __init__(
        self, kernel: Kernel, records: Sequence[WarpRecord], issued: Mapping[int, float],
        memory: float,
    ) -> None:  # fmt: skip
        """
        Args:
            records: of the warps of one cluster.
            issued: warp of a CTA -> issued instructions for each PTX instruction.
            memory: bytes a cycle that one SM gets from memory.
        """
        self.kernel, self.memory = kernel, memory
        self.warps = [_Warp(r, issued.get(r.index, 1.0)) for r in records]
        self.stretches: dict[tuple[int, ...], Stretch] = {}
        self.expected: Counter[Key] = Counter(
            key for r in records for e in r.history() if e.kind != "await" for key in e.keys
        )
        self.came: dict[Key, list[_Came]] = defaultdict(list)
        self.waiting: dict[Key, list[int]] = defaultdict(list)
        self.servers: dict[tuple[int, str], _Server] = defaultdict(_Server)
        self.units: dict[tuple[int, str], list[Slice]] = defaultdict(list)
        self.heap: list[tuple[float, int, int]] = []
        self.pushed = 0

    def play(self) -> Timeline:
        """Raises SoftGpuError if warps wait for what never comes."""
        for i in range(len(self.warps)):
            self._push(0.0, i)
        ends = [0.0] * len(self.warps)
        while self.heap:
            now, _, i = heapq.heappop(self.heap)
            w = self.warps[i]
            if w.at >= len(w.record.events):
                ends[i] = now
                continue
            self._step(now, i, w, w.record.events[w.at])
        stuck = [w.record.index for w in self.warps if w.at < len(w.record.events)]
        if stuck:
            raise SoftGpuError(f"timeline: warps {stuck} wait for what nobody completes")
        last = max(range(len(ends)), key=ends.__getitem__)
        busy: dict[tuple[int, str], float] = defaultdict(float)
        for (rank, name), server in self.servers.items():
            busy[rank, name.split(" ")[0]] += server.busy
        return Timeline(
            max(ends), {(w.record.rank, w.record.index): w.slices for w in self.warps},
            dict(self.units), dict(busy), self._path(last),
        )  # fmt: skip

    # ---- events ----------------------------------------------------------------------------------
    def _push(self, at: float, i: int) -> None:
        self.pushed += 1
        heapq.heappush(self.heap, (at, self.pushed, i))

    def _step(self, now: float, i: int, w: _Warp, e: Event) -> None:
        if e.kind == "work":
            self._work(now, i, w, e)
            return
        if e.kind == "await":
            self._await(now, i, w, e)
            return
        at, unit = now, ""
        if e.kind == "launch":
            at, unit = self._launch(now, w, e), e.unit
        elif e.kind == "commit":
            at, unit = max(now, w.last[e.unit]), e.unit
        self._contribute(e.keys, _Came(at, i, w.at, unit))
        w.at += 1
        self._push(now, i)

    def _work(self, now: float, i: int, w: _Warp, e: Event) -> None:
        """A chunk of a stretch; the warp comes back for the rest."""
        if w.left is None:
            found = self._stretch(e.amount)
            slots = w.factor * found.ptx
            w.left = slots, float(found.special), float(e.waves)
            w.whole = slots
            w.pace = max(PIPES, found.depth / slots)
            w.began = now
        slots, special, waves = w.left
        share = min(1.0, CHUNK / slots)
        rank, quarter = w.record.rank, w.record.index % 4
        start, end = self.servers[rank, f"issue {quarter}"].serve(now, slots * share)
        end = max(end, start + slots * share * w.pace)
        if special:
            mufu = self.servers[rank, f"mufu {quarter}"]
            end = max(end, mufu.serve(now, 8 * special * share)[1])
        if e.nbytes:
            # in line with other loads only: rings of copies are deep, and loads overtake them
            loads = self.servers[rank, "loads"]
            end = max(end, loads.serve(now, e.nbytes * share * slots / w.whole / self.memory)[1])
        if waves:
            end = max(end, self.servers[rank, "port"].serve(now, waves * share)[1])
        w.left = (slots - slots * share, special - special * share, waves - waves * share)
        if share == 1.0:
            found = self._stretch(e.amount)
            about: dict[str, float | str] = {"PTX instructions": found.ptx, "wavefronts": e.waves}
            w.slices.append(Slice(w.began, end, found.file, about))
            w.left = None
            w.at += 1
        self._push(end, i)

    def _stretch(self, path: tuple[int, ...]) -> Stretch:
        if path not in self.stretches:
            self.stretches[path] = stretch(self.kernel, path)
        return self.stretches[path]

    def _await(self, now: float, i: int, w: _Warp, e: Event) -> None:
        for key in e.keys:
            if len(self.came[key]) < self.expected[key]:
                self.waiting[key].append(i)
                w.began = min(w.began, now) if w.stalls and w.stalls[-1][0] == w.at else now
                w.stalls.append((w.at, key))
                return
        ready = max((self._complete(key) for key in e.keys), default=0.0)
        resumed = now
        if ready + HANDOVER > now and ready > 0.0:
            resumed = max(now, ready + HANDOVER)
            latest = max(e.keys, key=self._complete)
            stalled = w.stalls and w.stalls[-1][0] == w.at
            began = w.began if stalled else now
            w.stalls = [s for s in w.stalls if s[0] != w.at] + [(w.at, latest)]
            if resumed > began:
                w.slices.append(Slice(began, resumed, f"wait: {name_of(latest)}", {}))
        w.at += 1
        self._push(resumed, i)

    def _launch(self, now: float, w: _Warp, e: Event) -> float:
        """Time at which asynchronous work is done."""
        rank = w.record.rank
        if e.unit == "tensor":
            done = now
            for place in range(rank, rank + e.ctas):
                start, end = self.servers[place, "tensor"].serve(now, e.amount)
                end = max(end, self.servers[place, "port"].serve(now, e.waves)[1])
                self._unit(place, "tensor", start, end, self.kernel.code[e.pc].opcode)
                done = max(done, end + TENSOR)
        else:
            start, end = self.servers[rank, "copy"].serve(now, e.amount / self.memory)
            self._unit(rank, "copy", start, end, f"{e.amount} bytes")
            done = end
            # what lands later takes its share of the port now: requests come in order of time
            self.servers[rank, "port"].serve(now, e.waves)
            if e.unit != "store":
                done = end + COPY
        w.last[e.unit] = max(w.last[e.unit], done)
        return done

    def _unit(self, rank: int, unit: str, start: float, end: float, name: str) -> None:
        """A slice of a unit; those that follow each other are joined."""
        track = self.units[rank, unit]
        if track and start <= track[-1].end + 1e-9 and track[-1].name == name:
            start = track.pop().start
        track.append(Slice(max(start, track[-1].end if track else 0.0), end, name, {}))

    def _contribute(self, keys: tuple[Key, ...], came: _Came) -> None:
        for key in keys:
            self.came[key].append(came)
            if len(self.came[key]) == self.expected[key]:
                for i in self.waiting.pop(key, ()):
                    self._push(max(came.at, self._complete(key)), i)

    def _complete(self, key: Key) -> float:
        return max((c.at for c in self.came[key]), default=0.0)

    # ---- critical path ---------------------------------------------------------------------------
    def _path(self, i: int) -> list[Handover]:
        """Path back from the end of the last warp: what it waited for last, who caused that, ..."""
        path: list[Handover] = []
        event = len(self.warps[i].record.events)
        while True:
            earlier = [s for s in self.warps[i].stalls if s[0] < event]
            if not earlier or len(path) > 1 << 20:
                return path
            _, key = earlier[-1]
            if not self.came[key]:
                return path
            last = max(self.came[key])
            path.append(Handover(key, last.at, i, last.unit))
            if (last.warp, last.event) == (i, event):
                return path
            i, event = last.warp, last.event


WORDS = {"wgmma": "wait for wgmma", "cp.async": "wait for cp.async", "bulk": "wait for stores"}


def kind_of(h: Handover) -> str:
    """Words in a report for what a warp waited for."""
    kind = str(h.key[0])
    if kind == "mbarrier":
        ends = {"copy": " that a copy fills", "tensor": " that an MMA commits to"}
        return "mbarrier" + ends.get(h.unit, " that a warp arrives at")
    return WORDS.get(kind, "named barrier" if kind == "bar" else "cluster barrier")


def name_of(key: Key) -> str:
    """A completion in words."""
    kind = key[0]
    if kind == "mbarrier":
        return f"mbarrier {key[1] & 0xFFFFFF:#x} phase {key[2]}"
    if kind == "bar":
        return f"barrier {key[2]}"
    return "cluster barrier" if kind == "cluster" else f"{kind} group"

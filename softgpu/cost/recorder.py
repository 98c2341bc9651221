"""Watches launches: what each warp fetches, what it asks of shared memory, whom it waits for.

``Recorder`` is an observer (``Options.observer``).  It wraps the code of every warp, and the shared
and global memory of every launch; handlers stay as they are, and launches that nobody observes run
as if this were not here.  Asynchronous work must land early, so that all that an instruction
causes happens while its handler runs.

What is recorded, by warp:

* ``fetched``: executions of each PTX instruction.  What a warp tries again after waiting counts
  once: hardware suspends it in the instruction.
* ``waves``: wavefronts of shared memory by instruction and kind of access, with the ideal count.
* ``moved``: bytes by instruction and path.
* ``tensor``: cycles that tensor cores take, by instruction.
* ``events``: of the first cluster, in program order: stretches of work, and what orders warps
  (see ``Event``).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..cluster import Cluster
from ..decode import NORMAL, Program
from ..errors import SoftGpuError
from ..memory import GlobalMemory, SharedMemory
from ..ops import tma
from ..ptx import Imm, Instr, Mem, Reg, Vec
from ..tensor_queue import TensorOp, TensorQueue
from ..warp import LANES, Warp
from . import rates
from .banks import Waves, wavefronts

SECTOR = 32  # bytes, of L2 and DRAM
LSU = ("load", "store", "ldmatrix", "stmatrix", "cp.async")  # kinds of accesses by threads
EXCHANGE = ("shuffle", "arrive")  # one wavefront each: an H200's counter adds up only with them
ENGINE = ("fill", "drain")  # by copies
OPERANDS = "operands"  # by MMAs
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k\d+\.f32\.(\w+)")

Key = tuple[Any, ...]  # names one completion: ("mbarrier", address, phase), ("wgmma", ...), ...


class Event(NamedTuple):
    """One thing that a warp does.

    Attributes:
        kind: ``work``: a stretch of instructions; ``signal``: contributes to ``keys`` now;
            ``await``: waits until ``keys`` are complete; ``launch``: asynchronous work of ``unit``
            that contributes to ``keys`` when it is done; ``commit``: contributes to ``keys`` when
            all that the warp has launched on ``unit`` is done.
        pc: the instruction; of work the first one.
        keys: completions.
        unit: ``tensor``, ``copy``, ``cp.async``, ``store``.
        amount: of a launch its cycles (tensor) or bytes; of work the instructions, in order.
        waves: wavefronts of shared memory of a launch, or of a stretch of work.
        nbytes: bytes of global memory that a stretch of work loads and stores, whole sectors.
        ctas: whose tensor cores and port a launch takes, from the warp's own on.
    """

    kind: str
    pc: int
    keys: tuple[Key, ...] = ()
    unit: str = ""
    amount: Any = 0
    waves: int = 0
    nbytes: int = 0
    ctas: int = 1


@dataclass
class WarpRecord:
    """Counts and events of one warp; see the module's text."""

    kernel: str
    cluster: int
    rank: int
    index: int
    fetched: Counter[int] = field(default_factory=Counter)
    waves: Counter[tuple[int, str]] = field(default_factory=Counter)
    ideal: Counter[tuple[int, str]] = field(default_factory=Counter)
    moved: Counter[tuple[int, str]] = field(default_factory=Counter)
    tensor: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    events: list[Event] = field(default_factory=list)
    path: list[int] = field(default_factory=list)  # fetched since the last event
    pending_waves: int = 0  # of shared memory since then
    pending_bytes: int = 0  # of global memory, by loads and stores
    groups: Counter[str] = field(default_factory=Counter)  # committed, of each unit that has groups

    def count(self, pc: int, kind: str, waves: Waves) -> None:
        """Adds an access to shared memory."""
        self.waves[pc, kind] += waves.needed
        self.ideal[pc, kind] += waves.ideal

    def flush(self) -> None:
        """Makes what was fetched since the last event a stretch of work."""
        if self.path and self.cluster == 0:
            done = tuple(self.path)
            self.events.append(
                Event("work", done[0], (), "", done, self.pending_waves, self.pending_bytes)
            )
        self.path.clear()
        self.pending_waves = self.pending_bytes = 0

    def history(self) -> list[Event]:
        """All events, the stretch behind the last one too.  For after the launch."""
        self.flush()
        return self.events


class Recorder:
    """Records every launch that runs with ``Options(observer=recorder)``.

    Attributes:
        warps: a record each, in order of launch, cluster, CTA and warp.
        programs: kernel name -> its program.
        ctas: kernel name -> CTAs that ran.
        sectors: (kernel name, ``read`` or ``written``) -> the sectors of global memory, each once.

    Raises:
        SoftGpuError: a launch whose asynchronous work does not land early.
    """

    def __init__(self) -> None:
        self.warps: list[WarpRecord] = []
        self.programs: dict[str, Program] = {}
        self.ctas: Counter[str] = Counter()
        self.sectors: dict[tuple[str, str], set[int]] = defaultdict(set)
        self._kernel = ""
        self.last_map = b""  # the tensor map that was read last
        self._codes: dict[str, list[Any]] = {}
        self._step: _Step | None = None

    # ---- softgpu.options.Observer ----------------------------------------------------------------
    def launched(self, machine: Any) -> None:
        """Puts watched memories into the machine."""
        if machine.options.asynchronous != "early" or machine.options.seed is not None:
            raise SoftGpuError("cost: asynchronous work must land early, warps run in order")
        name = self._kernel = machine.program.kernel.name
        self.programs[name] = machine.program
        self.ctas[name] += int(np.prod(machine.launch.grid))
        machine.memory = _Global(machine.memory, self)
        machine.shared_type = self._shared

    def started(self, warp: Warp) -> None:
        """Gives a warp code that counts."""
        cluster: Cluster = warp.block.cluster
        if not isinstance(cluster.mbarriers, _Barriers):
            cluster.mbarriers = _Barriers(self)
        kernel = warp.machine.program.kernel
        index = cluster.first // cluster.size
        record = WarpRecord(kernel.name, index, warp.block.rank, warp.index)
        self.warps.append(record)
        warp.code = _Code(self._code(warp.machine.program), record)
        warp.tensor_queue = _Queue(warp, self)

    def _shared(self, ctas: int, limit: int) -> SharedMemory:
        return _Shared(ctas, limit, self)

    def _code(self, program: Program) -> list[Any]:
        """The program's code, with the instructions that need a look wrapped."""
        name = program.kernel.name
        if name not in self._codes:
            code = []
            for pc, (kind, fn, guard, negated) in enumerate(program.code):
                watch = _watcher(program.kernel.code[pc])
                if kind == NORMAL and watch is not None:
                    fn = self._wrapped(fn, pc, watch)
                code.append((kind, fn, guard, negated))
            self._codes[name] = code
        return self._codes[name]

    def _wrapped(self, fn: Any, pc: int, watch: Any) -> Any:
        def run(w: Any, m: Any) -> Any:
            record: WarpRecord = w.code.record
            step = self._step = _Step(self, w, m, pc, record)
            try:
                wait = fn(w, m)
            finally:
                self._step = None
            if wait is not None and wait.retry:
                record.fetched[pc] -= 1
                record.path.pop()
                return wait
            watch(step)
            return wait

        return run

    # ---- what happens while a handler runs -------------------------------------------------------
    def shared(self, kind: str, addresses: Any, nbytes: int, lanes: Any) -> None:
        """An access to shared memory."""
        if self._step is not None:
            self._step.shared.append((kind, np.asarray(addresses), nbytes, lanes))

    def barrier(self, address: int, bar: Any) -> None:
        """Somebody looks at an mbarrier."""
        if self._step is not None and bar is not None:
            self._step.barriers.setdefault(address, bar.phase)

    def tensor(self, op: TensorOp) -> None:
        """A tcgen05 operation is issued."""
        if self._step is not None:
            self._step.tensor.append(op)

    def touched(self, what: str, first: Any, nbytes: int) -> int:
        """Bytes of the distinct sectors of an access; what memory moves counts each sector once."""
        at = np.asarray(first).astype(np.int64).reshape(-1)
        if not at.size:
            return 0
        low, high = at // SECTOR, (at + nbytes - 1) // SECTOR
        spans = low[:, None] + np.arange(int((high - low).max()) + 1)
        found = np.unique(np.minimum(spans, high[:, None]))
        self.sectors[self._kernel, what].update(found.tolist())
        return SECTOR * len(found)

    def global_access(self, what: str, addresses: Any, nbytes: int) -> None:
        """A load or store by threads."""
        step = self._step
        if step is None:
            return
        first, last = step.warp.machine.parameter_span
        if first <= int(addresses[0]) < last:
            return  # constant memory
        sectors = self.touched(what, addresses, nbytes)
        step.record.moved[step.pc, "load" if what == "read" else "store"] += sectors
        step.record.pending_bytes += sectors


@dataclass
class _Step:
    """One execution of an instruction by a warp."""

    recorder: Recorder
    warp: Any
    mask: Any
    pc: int
    record: WarpRecord
    shared: list[tuple[str, Any, int, Any]] = field(default_factory=list)
    barriers: dict[int, int] = field(default_factory=dict)
    tensor: list[TensorOp] = field(default_factory=list)
    named: dict[int, tuple[int, int]] = field(init=False)
    cluster_generation: int = field(init=False)
    cluster_wait: int = field(init=False)

    def __post_init__(self) -> None:
        block = self.warp.block
        self.named = {n: (b.generation, b.arrived) for n, b in block.named.items()}
        self.cluster_generation = block.cluster.barrier_generation
        waits = self.warp.cluster_waits
        self.cluster_wait = waits[0] if waits else -1

    @property
    def ins(self) -> Instr:
        """The instruction."""
        found: Instr = self.warp.machine.program.kernel.code[self.pc]
        return found

    def phases(self) -> tuple[Key, ...]:
        """The phases that the instruction contributes to."""
        return tuple(("mbarrier", a, phase) for a, phase in self.barriers.items())

    def add(self, kind: str, keys: tuple[Key, ...] = (), unit: str = "", amount: Any = 0,
            waves: int = 0, ctas: int = 1) -> None:  # fmt: skip
        """An event, behind the work before it; only the first cluster's are kept."""
        self.record.flush()
        if self.record.cluster == 0:
            self.record.events.append(Event(kind, self.pc, keys, unit, amount, waves, 0, ctas))

    def accesses(self, *kinds: str) -> int:
        """Counts the accesses that the handler made, of these kinds; their wavefronts."""
        total = 0
        for kind, addresses, nbytes, lanes in self.shared:
            if kind in kinds:
                waves = wavefronts(addresses, nbytes, lanes)
                self.record.count(self.pc, kind, waves)
                total += waves.needed
        return total


# ---- watchers: what an instruction means ---------------------------------------------------------
def _watcher(ins: Instr) -> Any:
    """Function to call after each execution of an instruction; None if it is only counted.

    One with ``sync`` that has no watcher gets ``_nothing``: then retried attempts do not count.
    """
    for prefix, watch in _WATCHERS:
        if ins.opcode.startswith(prefix):
            return watch
    return _nothing if "sync" in ins.parts else None


def _nothing(step: _Step) -> None:
    """Executions are counted, attempts are not."""


def _memory(step: _Step) -> None:
    step.record.pending_waves += step.accesses("load", "store", "ldmatrix", "stmatrix")


def _wait(step: _Step) -> None:
    step.add("await", tuple(("mbarrier", a, phase - 1) for a, phase in step.barriers.items()))


def _arrive(step: _Step) -> None:
    step.record.count(step.pc, "arrive", Waves(1, 1))
    step.add("signal", step.phases())


def _shuffle(step: _Step) -> None:
    step.record.count(step.pc, "shuffle", Waves(1, 1))
    step.record.pending_waves += 1


def _bar(step: _Step) -> None:
    """The barrier is the one whose counts have changed."""
    block = step.warp.block
    for number, bar in block.named.items():
        generation, arrived = step.named.get(number, (0, 0))
        if (bar.generation, bar.arrived) != (generation, arrived):
            key = ("bar", block.rank, number, generation)
            step.add("signal", (key,))
            if "sync" in step.ins.parts:
                step.add("await", (key,))


def _cluster_barrier(step: _Step) -> None:
    if "arrive" in step.ins.parts:
        step.add("signal", (("cluster", step.cluster_generation),))
    else:
        step.add("await", (("cluster", step.cluster_wait),))


def _group(step: _Step, unit: str, behind: int = 0) -> Key:
    """The group of a unit that is open, or that many before it."""
    r = step.record
    return unit, r.rank, r.index, r.groups[unit] - behind


def _commit(unit: str) -> Any:
    def watch(step: _Step) -> None:
        step.record.groups[unit] += 1

    return watch


def _wait_group(unit: str) -> Any:
    def watch(step: _Step) -> None:
        keep = step.ins.args[0] if step.ins.args else Imm(-1)
        assert isinstance(keep, Imm)
        step.add("await", (_group(step, unit, keep.bits + 1),))

    return watch


def _wgmma(step: _Step) -> None:
    """A warp multiplies 16 of 64 rows; what the warpgroup reads is charged to its warps equally."""
    match = _WGMMA.match(step.ins.opcode)
    if match is None:
        raise SoftGpuError(f"cost: {step.ins.opcode} is not understood")
    n = int(match[1])
    rows = n + (0 if isinstance(step.ins.args[1], Vec) else 64)
    waves = Waves(rows * 32 // 128 // 4, rows * 32 // 128 // 4)
    cycles = rates.wgmma_cycles(n) / 4
    step.record.count(step.pc, OPERANDS, waves)
    step.record.tensor[step.pc] += cycles
    step.add("launch", (_group(step, "wgmma"),), "tensor", cycles, waves.needed)


def _tcgen05(step: _Step) -> None:
    """An MMA or a copy to tensor memory; each CTA of a pair reads its own operands, and both are
    counted here, where one of them issues."""
    for op in step.tensor:
        waves = max(
            sum(index.size for rank, index, _ in op.shared if rank == own) * 16 // 128
            for own in {rank for rank, _, _ in op.shared} or {0}
        )
        both = op.group * waves
        step.record.count(step.pc, OPERANDS, Waves(both, both))
        cycles = rates.tcgen05_cycles(op)
        step.record.tensor[step.pc] += op.group * cycles
        step.add("launch", (), "tensor", cycles, waves, op.group)


def _tensor_commit(step: _Step) -> None:
    step.add("commit", step.phases(), "tensor")


def _cp_async(step: _Step) -> None:
    """Its lanes' writes come one by one."""
    found = [(int(a[0]), nbytes) for kind, a, nbytes, _ in step.shared if kind == "cp.async"]
    if not found:
        return
    lanes = np.nonzero(step.warp.lanes(step.mask))[0]
    at, nbytes = np.array([a for a, _ in found]), found[0][1]
    waves = wavefronts(at, nbytes, lanes)
    step.record.count(step.pc, "cp.async", waves)
    step.record.pending_waves += waves.needed
    step.record.moved[step.pc, "cp.async"] += nbytes * len(at)
    step.add("launch", (_group(step, "cp.async"),), "cp.async", nbytes * len(at))


def _cp_arrive(step: _Step) -> None:
    step.add("commit", step.phases(), "cp.async")


def _copy(step: _Step) -> None:
    """A bulk or tensor copy; what it moves is a whole box, also where that leaves the tensor."""
    loads = "mbarrier::complete_tx::bytes" in step.ins.opcode
    sizes = [nbytes for kind, _, nbytes, _ in step.shared if kind == "copy"]
    if not sizes:
        return
    waves = -(-sum(sizes) // 128)
    kind = "fill" if loads else "drain"
    step.record.count(step.pc, kind, Waves(waves, waves))
    nbytes = max(sizes) * max(1, _copies(step))  # a multicast reads once
    step.record.moved[step.pc, "TMA load" if loads else "TMA store"] += nbytes
    _tensor_rows(step, "read" if loads else "written")
    if loads:
        step.add("launch", step.phases(), "copy", nbytes, waves)
    else:
        step.add("launch", (_group(step, "bulk"),), "store", nbytes, waves)


def _copies(step: _Step) -> int:
    """Lanes that issue the copy."""
    return 32 if step.mask is True else int(np.sum(step.mask))


def _tensor_rows(step: _Step, what: str) -> None:
    """Notes the sectors of a tensor copy: its map and coordinates, as the registers hold them."""
    operand = next((x for x in step.ins.args if isinstance(x, Mem) and x.coords is not None), None)
    if operand is None or operand.coords is None:
        return
    lane = 0 if step.mask is True else int(np.argmax(step.mask))
    found = tma.decode_map(step.recorder.last_map)
    coords = [_value(step.warp, c, lane) for c in operand.coords]
    if len(coords) != found.rank:
        found = tma.gathered(found)
    rows, nbytes = tma.rows_inside(found, coords)
    if nbytes:
        step.recorder.touched(what, rows, nbytes)


def _value(w: Any, operand: Any, lane: int) -> int:
    """A 32-bit operand in a lane."""
    if isinstance(operand, Imm):
        return int(np.int32(np.uint32(operand.bits & 0xFFFFFFFF)))
    assert isinstance(operand, Reg)
    slots = {name: slot for slot, name in w.machine.program.slot_names.items()}
    return int(w.store[32][slots[operand.name]][lane].view(np.int32))


_WATCHERS: tuple[tuple[str, Any], ...] = (
    ("shfl", _shuffle),
    ("mbarrier.try_wait", _wait),
    ("mbarrier.test_wait", _wait),
    ("mbarrier.arrive", _arrive),
    ("barrier.cluster", _cluster_barrier),
    ("bar.warp", _nothing),
    ("bar.", _bar),
    ("barrier.", _bar),
    ("wgmma.mma_async", _wgmma),
    ("wgmma.commit_group", _commit("wgmma")),
    ("wgmma.wait_group", _wait_group("wgmma")),
    ("tcgen05.commit", _tensor_commit),
    ("tcgen05.mma", _tcgen05),
    ("tcgen05.cp", _tcgen05),
    ("cp.async.ca", _cp_async),
    ("cp.async.cg", _cp_async),
    ("cp.async.commit_group", _commit("cp.async")),
    ("cp.async.wait", _wait_group("cp.async")),
    ("cp.async.mbarrier.arrive", _cp_arrive),
    ("cp.async.bulk.commit_group", _commit("bulk")),
    ("cp.async.bulk.wait_group", _wait_group("bulk")),
    ("cp.async.bulk.prefetch", None),
    ("cp.async.bulk", _copy),
    ("cp.reduce.async.bulk", _copy),
    ("ld", _memory),
    ("st", _memory),
    ("atom", _memory),
    ("red.", _memory),
)


# ---- what is put in the machine's place ----------------------------------------------------------
class _Code(list[Any]):
    """A program's code that counts what a warp fetches."""

    def __init__(self, code: list[Any], record: WarpRecord) -> None:
        super().__init__(code)
        self.record, self.fetched, self.path = record, record.fetched, record.path

    def __getitem__(self, pc: Any) -> Any:
        self.fetched[pc] += 1
        self.path.append(pc)
        return list.__getitem__(self, pc)


class _Barriers(dict[int, Any]):
    """The mbarriers of a cluster: tells who is looked at."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def get(self, key: int, default: Any = None) -> Any:
        found = super().get(key, default)
        self._recorder.barrier(key, found)
        return found


class _Queue(TensorQueue):
    """Tells what is issued."""

    def __init__(self, warp: Any, recorder: Recorder) -> None:
        super().__init__(warp)
        self._recorder = recorder

    def submit(self, lane: int, op: TensorOp, action: Any, ins: Instr) -> None:
        self._recorder.tensor(op)
        super().submit(lane, op, action, ins)


_COPIES = ("tensor load", "tensor store", "cp.async.bulk")


class _Shared(SharedMemory):
    """Tells of every access."""

    def __init__(self, ctas: int, limit: int, recorder: Recorder) -> None:
        super().__init__(ctas, limit)
        self._recorder = recorder

    def check(self, a: Any, nbytes: int, rank: int | None, what: str, align: int) -> None:
        super().check(a, nbytes, rank, what, align)
        if what in _COPIES:
            self._recorder.shared("copy", a, nbytes, None)
        elif what in ("ldmatrix", "stmatrix", "cp.async"):
            self._recorder.shared(what, a, nbytes, None)

    def places(self, a: Any, nbytes: int, rank: int | None, what: str) -> Any:
        """Anew each time: ``check`` counts."""
        self.check(a, nbytes, rank, what, nbytes)
        return a // np.uint32(nbytes)

    def load(self, addr: Any, m: Any, dtype: Any, n: int, rank: int | None) -> Any:
        self._note("load", addr, m, np.dtype(dtype).itemsize * n)
        return super().load(addr, m, dtype, n, rank)

    def store(self, addr: Any, m: Any, data: Any, n: int, rank: int | None) -> None:
        self._note("store", addr, m, data.dtype.itemsize * n)
        super().store(addr, m, data, n, rank)

    def _note(self, kind: str, addr: Any, m: Any, nbytes: int) -> None:
        lanes = LANES if m is True else np.nonzero(m)[0]
        self._recorder.shared(kind, addr[lanes], nbytes, lanes)


class _Global(GlobalMemory):
    """Tells of loads and stores by threads, and keeps the tensor map that was read last.

    It shares everything with the memory it stands for, whose owner goes on using that.
    """

    def __init__(self, memory: GlobalMemory, recorder: Recorder) -> None:
        self.__dict__ = memory.__dict__
        self._recorder = recorder

    def load(self, addr: Any, m: Any, dtype: Any, n: int) -> Any:
        a = addr if m is True else addr[m]
        self._recorder.global_access("read", a, np.dtype(dtype).itemsize * n)
        return super().load(addr, m, dtype, n)

    def store(self, addr: Any, m: Any, data: Any, n: int) -> None:
        a = addr if m is True else addr[m]
        self._recorder.global_access("written", a, data.dtype.itemsize * n)
        super().store(addr, m, data, n)

    def read(self, address: int, nbytes: int, what: str = "load") -> Any:
        got = super().read(address, nbytes, what)
        if what == "tensor map load":
            self._recorder.last_map = got.tobytes()
        elif what in ("cp.async", "cp.async.bulk", "store"):
            self._recorder.touched("written" if what == "store" else "read", [address], nbytes)
        return got

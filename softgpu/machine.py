"""Grid -> clusters -> blocks -> warps, and who runs next.

PTX ISA sections 3 (threads, warps, convergence) and 9.7.12-13 (what may block).  A warp executes
the group of its lanes with the lowest pc; groups that reach the same pc merge.  Nothing here knows
an instruction: handlers return a ``Wait`` when a warp has to stop, and the scheduler asks it again.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import accumulate as arithmetic
from .decode import BRANCH, NORMAL, Program
from .errors import BarrierError, Deadlock, Hazard, LaunchError, SoftGpuError
from .hazard import ClusterHazards, Footprint, GlobalHazards, WarpHazards
from .memory import (
    LOCAL_WINDOW,
    OFFSET_MASK,
    RANK_SHIFT,
    SHARED_BASE,
    SHARED_MAX,
    GlobalMemory,
    LocalMemory,
    Mask,
    SharedMemory,
)
from .runtime import Launch

LANES = np.arange(32, dtype=np.uint32)
ALL = np.ones(32, bool).tobytes()
NONE = np.zeros(32, bool).tobytes()
FAR = 1 << 60
QUANTUM = 512
QUANTA = (1, 7, 60, QUANTUM)  # instructions a warp runs at a time when the order is random
MOODS = (0.0, 0.0, 0.5, 0.95)  # how often such a warp is passed over, redrawn now and then
SPIN_PASSES = 2000  # scheduler passes without any visible effect before a spin counts as a hang


def _environment(name: str, default: str) -> str:
    return os.environ.get(f"SOFTGPU_{name}", default)


@dataclass
class Options:
    """How to execute.  Defaults come from SOFTGPU_ACCUMULATE, _ASYNC, _SEED and _HAZARDS.

    Attributes:
        accumulate: WGMMA arithmetic, see ``softgpu.accumulate``; ``hopper`` unless said otherwise.
        asynchronous: when asynchronous work lands: ``early`` (at issue), ``late`` (copies when
            nothing else can run, wgmma when a wait_group covers it) or ``random``.
        seed: None runs warps in order; a number schedules them adversarially: random order,
            random stretches, some warps held back for long.
        hazards: ``off``, ``raise`` (stop at the first one) or ``collect`` (one a pair of
            instructions, in ``Stats.hazards``).
        resident: clusters that run at the same time; more are admitted when those all wait.
        max_instructions: stop after so many warp instructions, 0 for no limit.
    """

    accumulate: Callable[..., NDArray[np.float32]] = field(
        default_factory=lambda: arithmetic.BY_NAME[_environment("ACCUMULATE", "hopper")]
    )
    asynchronous: str = field(default_factory=lambda: _environment("ASYNC", "early"))
    seed: int | None = field(default_factory=lambda: int(_environment("SEED", "-1")))
    hazards: str = field(default_factory=lambda: _hazards(_environment("HAZARDS", "off")))
    resident: int = 1
    max_instructions: int = 0

    def __post_init__(self) -> None:
        if self.asynchronous not in ("early", "late", "random"):
            raise ValueError(f"asynchronous: early, late or random, got {self.asynchronous!r}")
        if self.hazards not in ("off", "raise", "collect"):
            raise ValueError(f"hazards: off, raise or collect, got {self.hazards!r}")
        if self.seed is not None and self.seed < 0:
            self.seed = None


def _hazards(text: str) -> str:
    """SOFTGPU_HAZARDS: 1 stands for raise, 0 and nothing for off."""
    return {"": "off", "0": "off", "1": "raise"}.get(text, text)


class Wait:
    """Why a group of lanes stopped.

    ``ready`` is polled.  ``retry``: the instruction runs again, otherwise execution goes on behind
    it, and ``resume`` is called first.  ``expires``: the wait has a time limit; when nothing else
    can run it gives up once.
    """

    __slots__ = ("expires", "ready", "resume", "retry", "text")

    def __init__(
        self,
        ready: Callable[[], bool],
        text: Callable[[], str],
        retry: bool = True,
        expires: bool = False,
        resume: Callable[[], None] | None = None,
    ) -> None:
        self.ready, self.text, self.retry, self.expires = ready, text, retry, expires
        self.resume = resume


class Group:
    """Lanes of a warp that share a pc."""

    __slots__ = ("expired", "mask", "pc", "wait")

    def __init__(self, pc: int, mask: Mask) -> None:
        self.pc, self.mask = pc, mask
        self.wait: Wait | None = None
        self.expired = False


class Warp:
    """Registers and control state of 32 lanes."""

    def __init__(self, block: Block, index: int) -> None:
        self.block, self.index = block, index
        self.machine: Machine = block.machine
        self.shared: SharedMemory = block.shared
        threads = block.machine.threads
        count = min(32, threads - 32 * index)
        self.alive: Mask = True if count == 32 else count > LANES
        self.groups = [Group(0, self.alive)]
        self.current = self.groups[0]
        self.done = False
        self.pc = 0  # of the instruction that runs, kept for the hazard checker
        program = block.machine.program
        checker = block.cluster.hazards
        self.hazard = WarpHazards(checker, self) if checker is not None else None
        self.code = program.code if checker is None else program.checked
        self.barrier_gen = 0
        self.cluster_gen = -1
        self.bulk_groups: dict[int, list[Any]] = {}  # cp.async.bulk, by lane; the last is open
        self.copies: list[list[InFlight]] = [[]]  # cp.async; the last one is open
        self.mma_groups: list[list[InFlight]] = [[]]  # wgmma; the last one is open
        self.local = LocalMemory(block.machine.program.local_size)
        self.v = self._views()

    def _views(self) -> list[NDArray[Any]]:
        program = self.machine.program
        store = {
            0: np.zeros((program.counts[0], 32), np.bool_),
            16: np.zeros((program.counts[16], 32), np.uint16),
            32: np.zeros((program.counts[32], 32), np.uint32),
            64: np.zeros((program.counts[64], 32), np.uint64),
        }
        self.store = store
        typed: dict[tuple[int, Any], NDArray[Any]] = {}
        out = list(self.block.template)
        for i, view in self.machine.per_warp:
            if view[0] == "reg":
                _, width, slot, dtype, part = view
                array = typed.get((width, dtype))
                if array is None:
                    array = typed[(width, dtype)] = store[width].view(dtype)
                ratio = array.shape[1] // 32 if width else 1
                row = array[slot]
                out[i] = row if ratio == 1 else row[part::ratio]
            else:
                out[i] = _as(self.special(view[1]), view[2])
        return out

    def special(self, name: str) -> NDArray[np.uint64]:
        """Per-thread special registers, PTX ISA section 10."""
        lin = LANES.astype(np.uint64) + np.uint64(32 * self.index)
        bx, by = np.uint64(self.machine.launch.block[0]), np.uint64(self.machine.launch.block[1])
        values: dict[str, Callable[[], NDArray[np.uint64]]] = {
            "%tid.x": lambda: lin % bx,
            "%tid.y": lambda: lin // bx % by,
            "%tid.z": lambda: lin // (bx * by),
            "%laneid": lambda: LANES.astype(np.uint64),
            "%warpid": lambda: np.full(32, self.index, np.uint64),
            "%lanemask_eq": lambda: np.uint64(1) << LANES.astype(np.uint64),
            "%lanemask_lt": lambda: (np.uint64(1) << LANES.astype(np.uint64)) - np.uint64(1),
            "%lanemask_le": lambda: (np.uint64(2) << LANES.astype(np.uint64)) - np.uint64(1),
            "%lanemask_gt": lambda: ~((np.uint64(2) << LANES.astype(np.uint64)) - np.uint64(1)),
            "%lanemask_ge": lambda: ~((np.uint64(1) << LANES.astype(np.uint64)) - np.uint64(1)),
        }
        if name not in values:
            raise SoftGpuError(f"special register {name} is not modelled")
        return values[name]()

    # ---- convergence ---------------------------------------------------------------------------
    def full(self, m: Mask) -> bool:
        """All lanes that have not exited are in ``m``."""
        if m is True:
            return True
        return self.alive is not True and bool(m.tobytes() == self.alive.tobytes())

    def lanes(self, m: Mask) -> NDArray[np.bool_]:
        return np.ones(32, bool) if m is True else m

    def join(self, m: Mask, members: int, what: str) -> Wait | None:
        """Blocks until all live lanes of ``members`` are at this instruction."""
        if m is True:
            return None
        need = ((members >> LANES.astype(np.uint64).astype(np.int64)) & 1).astype(bool)
        if self.alive is not True:
            need &= self.alive
        if not (need & ~m).any():
            return None
        group, had = self.current, m.tobytes()

        def ready() -> bool:
            return group.mask is True or group.mask.tobytes() != had

        return Wait(ready, lambda: f"{what}: the other lanes of mask {members & 0xFFFFFFFF:#010x}")

    def _pick(self) -> Group | None:
        """Lowest pc that can run; groups at one pc are merged."""
        best = None
        merged: dict[int, Group] = {}
        keep = []
        for g in self.groups:
            w = g.wait
            if w is not None and (len(self.groups) == 1 or not w.retry):
                if not w.ready():
                    keep.append(g)
                    continue
                if w.resume is not None:
                    w.resume()
                g.wait = w = None
            other = merged.get(g.pc)
            if other is not None:
                mask = other.mask | g.mask
                other.mask = True if mask.tobytes() == ALL else mask
                other.wait = None
                other.expired = other.expired and g.expired
                continue
            merged[g.pc] = g
            keep.append(g)
        self.groups = keep
        for g in merged.values():
            if g.wait is not None:
                if not g.wait.ready():
                    continue
                g.wait = None
            if best is None or g.pc < best.pc:
                best = g
        return best

    def run(self, limit: int) -> int:
        """Executes up to ``limit`` instructions; returns how many."""
        count = 0
        while count < limit:
            if len(self.groups) == 1 and self.groups[0].wait is None:
                g = self.groups[0]
            else:
                picked = self._pick()
                if picked is None:
                    return count
                g = picked
            count += self._run_group(g, limit - count)
            if self.done:
                return count
        return count

    def _run_group(self, g: Group, limit: int) -> int:
        code, v = self.code, self.v
        self.current = g
        pc, mask, n = g.pc, g.mask, 0
        multi = len(self.groups) > 1
        stop = min((o.pc for o in self.groups if o.pc > pc), default=FAR) if multi else FAR
        try:
            while n < limit:
                kind, fn, guard, negated = code[pc]
                n += 1
                m = mask
                if guard >= 0:
                    m = v[guard]
                    m = ~m if negated else m.copy()
                    if mask is not True:
                        m &= mask
                    key = m.tobytes()
                    if key == NONE:
                        pc += 1
                        if pc >= stop:
                            break
                        continue
                    if key == ALL:
                        m = True
                if kind == NORMAL:
                    wait = fn(self, m)
                    if wait is None:
                        pc += 1
                        if pc >= stop:
                            break
                        continue
                    g.wait = wait
                    if not wait.retry:
                        pc += 1
                    break
                taken_by_all = m is True or (mask is not True and m.tobytes() == mask.tobytes())
                if kind == BRANCH:
                    if taken_by_all:
                        pc = fn
                        if multi:
                            break
                        continue
                    g.pc = pc + 1
                    g.mask = ~m if mask is True else mask & ~m
                    self.groups.append(Group(fn, m))
                    return n
                return self._exit(g, m, pc, taken_by_all, n)
        except SoftGpuError as error:
            g.pc = pc
            raise self.machine.locate(error, self, pc) from error
        except (IndexError, ValueError, OverflowError, ZeroDivisionError) as error:
            g.pc = pc
            wrapped = SoftGpuError(f"{type(error).__name__} in the interpreter: {error}")
            raise self.machine.locate(wrapped, self, pc) from error
        g.pc = pc
        return n

    def _exit(self, g: Group, m: Mask, pc: int, whole: bool, n: int) -> int:
        gone = self.lanes(m)
        if self.hazard is not None:
            self.pc = pc
            self.hazard.exit(gone)
        self.alive = (~gone) if self.alive is True else self.alive & ~gone
        if whole:
            self.groups.remove(g)
        else:
            g.mask = self.lanes(g.mask) & ~gone
            g.pc = pc + 1
        self.block.cluster.thread_exit(int(gone.sum()))
        if not self.groups:
            self.done = True
            self.block.warp_done()
        return n


def _as(values: NDArray[np.uint64], dtype: Any) -> NDArray[Any]:
    """Truncates unsigned values to the width of ``dtype`` and reinterprets them."""
    size = np.dtype(dtype).itemsize
    return values.astype(f"u{size}").view(dtype)


class InFlight:
    """An asynchronous operation that has been issued; ``complete`` performs it, once."""

    __slots__ = ("action", "finished", "text")

    def __init__(self, action: Callable[[], None], text: str) -> None:
        self.action, self.text, self.finished = action, text, False

    def complete(self) -> None:
        if not self.finished:
            self.finished = True
            self.action()


class Block:
    """A CTA: warps, named barriers, its window of the cluster's shared memory."""

    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int]) -> None:
        self.cluster, self.rank, self.ctaid = cluster, rank, ctaid
        self.machine: Machine = cluster.machine
        self.shared: SharedMemory = cluster.shared
        self.base = rank << RANK_SHIFT
        self.named: dict[int, NamedBarrier] = {}
        self.template: list[Any] = list(self.machine.template)
        for i, view in self.machine.per_block:
            self.template[i] = _as(np.full(32, self.value(view), np.uint64), view[2])
        warps = -(-self.machine.threads // 32)
        self.warps = [Warp(self, i) for i in range(warps)]
        self.live = warps

    def value(self, view: tuple[Any, ...]) -> int:
        kind, name = view[0], view[1]
        if kind == "symbol":
            return self.base + SHARED_BASE + self.machine.program.variables[name]
        cx, cy, _ = self.machine.launch.cluster
        cluster_dims = self.machine.launch.cluster
        axis = "xyz".index(name[-1]) if name[-2:-1] == "." else 0
        rank3 = (self.rank % cx, self.rank // cx % cy, self.rank // (cx * cy))
        return {
            "%ctaid": self.ctaid[axis],
            "%clusterid": self.ctaid[axis] // cluster_dims[axis],
            "%cluster_ctaid": rank3[axis],
            "%cluster_ctarank": self.rank,
            "%smid": self.cluster.first + self.rank,
        }[name.split(".")[0]]

    def warp_done(self) -> None:
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
    track: Any = None  # hazard.BarrierTrack

    def settle(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            if self.track is not None:
                self.track.complete()


class Cluster:
    """CTAs that share a shared::cluster window; a plain launch has clusters of one."""

    def __init__(self, machine: Machine, index: int, origin: tuple[int, int, int]) -> None:
        self.machine = machine
        cx, cy, cz = machine.launch.cluster
        self.size = cx * cy * cz
        self.first = index * self.size
        self.shared = SharedMemory(self.size, machine.shared_limit)
        self.mbarriers: dict[int, MBarrier] = {}
        self.barrier_arrived = 0
        self.barrier_generation = 0
        self.barrier_expected = self.size * machine.threads
        checking = machine.options.hazards != "off"
        self.hazards: ClusterHazards | None = ClusterHazards(self) if checking else None
        self.blocks: list[Block] = []
        for rank in range(self.size):
            r = (rank % cx, rank // cx % cy, rank // (cx * cy))
            ctaid = (origin[0] + r[0], origin[1] + r[1], origin[2] + r[2])
            self.blocks.append(Block(self, rank, ctaid))
        self.warps = [w for b in self.blocks for w in b.warps]

    def barrier_arrive(self, threads: int) -> None:
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

    def check_end(self) -> None:
        """What must not be left when a cluster ends.  Raises BarrierError."""
        for address, b in sorted(self.mbarriers.items()):
            if b.tx:
                raise BarrierError(
                    f"{self.machine.barrier_at(address)}: the cluster ended with a transaction "
                    f"count of {b.tx} in phase {b.phase}: bytes expected and bytes copied differ"
                )
        for block in self.blocks:
            for number, bar in block.named.items():
                if bar.arrived:
                    raise BarrierError(
                        f"barrier {number} of {block}: the block ended with {bar.arrived} of "
                        f"{bar.expected} threads arrived"
                    )


@dataclass
class Stats:
    """Counts of one launch."""

    instructions: int = 0
    blocks: int = 0
    hazards: list[Hazard] = field(default_factory=list)


class Machine:
    """Executes one launch of one kernel."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: GlobalMemory,
        options: Options,
        prior: list[Footprint] | None = None,
    ) -> None:
        self.program, self.launch, self.memory, self.options = program, launch, memory, options
        # a grid launched with programmatic stream serialization starts before the last one ended
        self.prior = list(prior or []) if launch.pdl else []
        self.prior_waited = not self.prior
        self._seen: set[tuple[Any, ...]] = set()
        self.globals = GlobalHazards(self) if options.hazards != "off" else None
        self.threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.version = 0  # counts effects other warps can see
        self.in_flight: list[InFlight] = []
        self.stats = Stats()
        self.random = random.Random(options.seed)
        self._moods: dict[int, float] = {}
        self.clock = 0
        self.shared_limit = SHARED_BASE + program.static_shared + launch.dynamic_smem
        self._check()
        self._params()
        self._template()

    def _check(self) -> None:
        launch, cluster = self.launch, self.launch.cluster
        size = cluster[0] * cluster[1] * cluster[2]
        required = self.program.kernel.directives.get("reqntid")
        if not 1 <= self.threads <= 1024:
            raise LaunchError(f"block {launch.block}: expected 1 to 1024 threads")
        if required:
            want = tuple(int(x) for x in required.replace(" ", "").split(","))
            if want + (1,) * (3 - len(want)) != launch.block:
                raise LaunchError(f"block {launch.block}: the kernel requires {want}")
        if any(g % c for g, c in zip(launch.grid, cluster, strict=True)):
            raise LaunchError(f"grid {launch.grid} is not a multiple of cluster {cluster}")
        if not 1 <= size <= 16:
            raise LaunchError(f"cluster {cluster}: expected at most 16 CTAs")
        total = self.program.static_shared + launch.dynamic_smem
        if total > SHARED_MAX:
            raise LaunchError(f"{total} bytes of shared memory: at most {SHARED_MAX} can be had")
        if launch.dynamic_smem > max(49152, launch.max_dynamic_smem):
            raise LaunchError(
                f"{launch.dynamic_smem} bytes of dynamic shared memory: the kernel's limit is "
                f"{max(49152, launch.max_dynamic_smem)}"
            )
        if min(launch.grid) < 1:
            raise LaunchError(f"grid {launch.grid}: every extent must be at least 1")

    def _params(self) -> None:
        """Copies the parameters into one block of memory; the copy is a registered buffer."""
        kernel, offset = self.program.kernel, 0
        offsets = []
        for p in kernel.params:
            offset = -(-offset // p.align) * p.align
            offsets.append(offset)
            offset += p.size
        self._param_block = np.zeros(offset + 256, np.uint8)
        start = -self._param_block.ctypes.data % 128
        self.symbols: dict[str, int] = {}
        for i, (p, o) in enumerate(zip(kernel.params, offsets, strict=True)):
            raw = ctypes.string_at(self.launch.params[i], p.size)
            self._param_block[start + o : start + o + p.size] = np.frombuffer(raw, np.uint8)
            self.symbols[p.name] = self._param_block.ctypes.data + start + o
        self.memory.add("kernel parameters", self._param_block.ctypes.data + start, offset)
        self._globals: list[NDArray[np.uint8]] = []
        for name, var in self.program.globals.items():
            data = np.zeros(var.size + 32, np.uint8)
            skip = -data.ctypes.data % 16
            data[skip : skip + len(var.data)] = np.frombuffer(var.data, np.uint8)
            self._globals.append(data)
            self.symbols[name] = data.ctypes.data + skip
            self.memory.add(name, data.ctypes.data + skip, var.size)

    def _template(self) -> None:
        """Views that are the same for the whole grid; the rest is sorted by who provides it."""
        self.template: list[Any] = [None] * len(self.program.views)
        self.per_block: list[tuple[int, tuple[Any, ...]]] = []
        self.per_warp: list[tuple[int, tuple[Any, ...]]] = []
        launch = self.launch
        clusters = tuple(g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
        size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        fixed = {
            "%nwarpid": -(-self.threads // 32),
            "%nsmid": 132,
            "%cluster_nctarank": size,
            "%is_explicit_cluster": int(size > 1),
            "%dynamic_smem_size": launch.dynamic_smem,
            "%total_smem_size": self.program.static_shared + launch.dynamic_smem,
            "%gridid": 0,
            "WARP_SZ": 32,
        }
        for axis, i in (("x", 0), ("y", 1), ("z", 2)):
            fixed[f"%ntid.{axis}"] = launch.block[i]
            fixed[f"%nctaid.{axis}"] = launch.grid[i]
            fixed[f"%nclusterid.{axis}"] = clusters[i]
            fixed[f"%cluster_nctaid.{axis}"] = launch.cluster[i]
        local = {v.name for v in self.program.kernel.variables.values() if v.space == "local"}
        per_block = ("%ctaid", "%clusterid", "%cluster_ctaid", "%cluster_ctarank", "%smid")
        for i, view in enumerate(self.program.views):
            kind, name = view[0], view[1]
            if kind == "const":
                value = name
            elif kind == "symbol" and name in self.symbols:
                value = self.symbols[name]
            elif kind == "symbol" and name in local:
                value = self.program.variables[name]
            elif kind == "special" and name in fixed:
                value = fixed[name]
            elif kind == "symbol" or (kind == "special" and name.split(".")[0] in per_block):
                self.per_block.append((i, view))
                continue
            else:
                self.per_warp.append((i, view))
                continue
            if view[2] is np.bool_:
                self.template[i] = np.full(32, bool(value))
            else:
                self.template[i] = _as(np.full(32, value, np.uint64), view[2])
            self.template[i].flags.writeable = False

    # ---- running -------------------------------------------------------------------------------
    def issue(self, action: Callable[[], None], text: str) -> InFlight:
        """An asynchronous operation: performs it now or keeps it, as the options say."""
        op = InFlight(action, text)
        mode = self.options.asynchronous
        if mode == "early" or (mode == "random" and self.random.random() < 0.5):
            op.complete()
        else:
            self.in_flight.append(op)
        return op

    def _land(self, all_of_them: bool) -> bool:
        """Completes the oldest operation in flight, or all."""
        done = False
        while self.in_flight:
            op = self.in_flight.pop(0)
            if not op.finished:
                op.complete()
                done = True
                if not all_of_them:
                    break
        return done

    def run(self) -> Stats:
        """Runs the grid to its end.  Raises SoftGpuError."""
        gx, gy, gz = self.launch.grid
        cx, cy, cz = self.launch.cluster
        origins = [
            (x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx)
        ]
        waiting = iter(enumerate(origins))
        resident: list[Cluster] = []
        expired_at = -1
        passes, seen_version = 0, -1
        with np.errstate(all="ignore"):
            for index, origin in itertools.islice(waiting, self.options.resident):
                resident.append(Cluster(self, index, origin))
            while resident:
                moved = self._pass(resident)
                finished = [c for c in resident if all(w.done for w in c.warps)]
                if finished:
                    self._land(True)
                    for c in finished:
                        c.check_end()
                    resident = [c for c in resident if c not in finished]
                    self.stats.blocks += sum(len(c.blocks) for c in finished)
                    for index, origin in itertools.islice(waiting, len(finished)):
                        resident.append(Cluster(self, index, origin))
                    continue
                passes = passes + 1 if self.version == seen_version else 0
                seen_version = self.version
                if moved and passes < SPIN_PASSES:
                    continue
                passes = 0
                if self._land(False):
                    continue
                if expired_at != self.version and self._expire(resident):
                    expired_at = self.version
                    continue
                more = next(waiting, None)
                if more is None or len(resident) * len(resident[0].blocks) >= 132:
                    raise Deadlock(self.report(resident, bool(moved)))
                resident.append(Cluster(self, *more))
        self._land(True)
        return self.stats

    def _pass(self, resident: list[Cluster]) -> int:
        warps = [w for c in resident for w in c.warps if not w.done]
        moved = 0
        if self.options.seed is None:
            for w in warps:
                moved += w.run(QUANTUM)
        else:
            moved = self._adversarial(warps)
        self.stats.instructions += moved
        limit = self.options.max_instructions
        if limit and self.stats.instructions > limit:
            raise Deadlock(
                f"stopped after {self.stats.instructions} warp instructions\n"
                + self.report(resident, True)
            )
        return moved

    def _adversarial(self, warps: list[Warp]) -> int:
        """A pass in random order and stretches; nobody is passed over if that would be a stop."""
        pick = self.random
        if pick.random() < 0.1:
            self._moods.clear()
        if self.options.asynchronous == "random":
            for op in pick.sample(self.in_flight, len(self.in_flight)):
                if pick.random() < 0.2:
                    op.complete()
        pick.shuffle(warps)
        moved = 0
        for w in warps:
            mood = self._moods.setdefault(id(w), pick.choice(MOODS))
            if mood == 0.0 or pick.random() >= mood:
                moved += w.run(pick.choice(QUANTA))
        if not moved:
            for w in warps:
                moved += w.run(QUANTUM)
        return moved

    def _expire(self, resident: list[Cluster]) -> bool:
        """Time limits of try_wait run out: every such wait returns false once."""
        any_expired = False
        for w in (w for c in resident for w in c.warps if not w.done):
            for g in w.groups:
                if g.wait is not None and g.wait.expires:
                    g.wait, g.expired, any_expired = None, True, True
        return any_expired

    # ---- reports -------------------------------------------------------------------------------
    def hazard(self, kind: str, what: str, place: str, events: list[Any], why: str) -> None:
        """Reports a hazard: raises it, or keeps one a pair of instructions."""
        found = Hazard(kind, what, place, events, why)
        if self.options.hazards == "raise":
            raise found
        key = (kind, *((e.ptx_line, e.action) for e in events))
        if key not in self._seen:
            self._seen.add(key)
            self.stats.hazards.append(found)

    def shared_name(self, offset: int) -> str:
        """``name + offset`` of a byte of dynamic shared memory."""
        offset -= self.program.static_shared
        for name, start, size in self.program.shared_map:
            if start <= offset < start + size:
                return f"{name} + {offset - start} (offset {offset})"
        return f"offset {offset}"

    def barrier_at(self, address: int) -> str:
        """An mbarrier by address, for reports."""
        offset = (address & OFFSET_MASK) - SHARED_BASE
        return f"mbarrier at CTA {address >> RANK_SHIFT}, {self.shared_name(offset)}"

    def barrier_name(self, cluster: Cluster, component: int) -> str:
        """An mbarrier by its component in the hazard checker's clocks."""
        for address, bar in cluster.mbarriers.items():
            if bar.track is not None and bar.track.comp == component:
                return self.barrier_at(address)
        return "an mbarrier that was invalidated"

    def locate(self, error: SoftGpuError, warp: Warp, pc: int) -> SoftGpuError:
        """The same error with the place added."""
        if isinstance(error, Hazard):
            return error  # it names both places itself
        kernel = self.program.kernel
        ins = kernel.code[pc]
        g = warp.current
        lanes = "all lanes"
        if g.mask is not True:
            lanes = "lanes " + ",".join(str(i) for i in np.nonzero(g.mask)[0])
        return type(error)(
            f"{error}\n  at {kernel.where(ins)}, pc {pc}: {ins.text or ins.opcode}\n"
            f"  {warp.block}, warp {warp.index}, {lanes}; kernel {kernel.name[:80]}"
        )

    def report(self, resident: list[Cluster], spinning: bool) -> str:
        """What every warp waits for."""
        kernel = self.program.kernel
        head = "warps spin without effect" if spinning else "deadlock: no warp can run"
        lines = [f"{head}; kernel {kernel.name[:80]}"]
        for c in resident:
            for w in (w for w in c.warps if not w.done):
                for g in w.groups:
                    ins = kernel.code[g.pc]
                    why = g.wait.text() if g.wait is not None else "runs: " + ins.text
                    lanes = 32 if g.mask is True else int(g.mask.sum())
                    lines.append(
                        f"  {w.block} warp {w.index} ({lanes} lanes) pc {g.pc} "
                        f"{kernel.where(ins)}: {why}"
                    )
            for address, b in sorted(c.mbarriers.items()):
                lines.append(
                    f"  mbarrier at CTA {address >> RANK_SHIFT} offset {address & OFFSET_MASK}: "
                    f"phase {b.phase} (parity {b.phase & 1}), pending {b.pending} of {b.expected}, "
                    f"tx {b.tx}"
                )
        return "\n".join(lines)


__all__ = [
    "LOCAL_WINDOW", "Block", "Cluster", "Group", "InFlight", "MBarrier", "Machine", "NamedBarrier",
    "Options", "Stats", "Wait", "Warp",
]  # fmt: skip

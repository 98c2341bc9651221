"""One launch: the grid's clusters, who runs next, what is in flight, and what is reported.

Handlers return a ``Wait`` when a warp has to stop (PTX ISA 9.7.12-13 say what may block); the
scheduler here asks it again.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import accumulate as arithmetic
from .cluster import Cluster, place_of
from .decode import OF_BLOCK, Program
from .errors import Deadlock, Hazard, LaunchError, SoftGpuError
from .hazard import Footprint, GlobalHazards, mbarrier_room
from .in_flight import InFlight
from .memory import OFFSET_MASK, RANK_SHIFT, SHARED_BASE, SHARED_MAX, GlobalMemory, SharedMemory
from .options import Options, Stats
from .registers import of_warp
from .runtime import Launch
from .warp import Warp, uniform_view

QUANTUM = 512
QUANTA = (1, 7, 60, QUANTUM)  # instructions a warp runs at a time when the order is random
MOODS = (0.0, 0.0, 0.5, 0.95)  # how often such a warp is passed over, redrawn now and then
SPIN_PASSES = 2000  # scheduler passes without any visible effect before a spin counts as a hang
SMS = {90: 132, 100: 148}  # multiprocessors of an H200 and of a B200; each holds one CTA


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
        self.threads = math.prod(launch.block)
        self.sms = SMS[100 if program.architecture >= 100 else 90]
        self.accumulate = options.accumulate or arithmetic.of(program.architecture)
        self.version = 0  # counts effects other warps can see
        self.in_flight: list[InFlight] = []
        self.stats = Stats()
        self.random = random.Random(options.seed)
        self.clock = 0
        self.waiting: Iterator[tuple[int, tuple[int, int, int]]] = iter(())  # clusters not started
        self.shared_limit = SHARED_BASE + program.static_shared + launch.dynamic_smem
        self.shared_type: type[SharedMemory] = SharedMemory
        if options.observer is not None:
            options.observer.launched(self)
        self._check()
        self._params()
        self._values()

    def _check(self) -> None:
        """Raises LaunchError for what the hardware would refuse."""
        launch, cluster = self.launch, self.launch.cluster
        required = self.program.kernel.directives.get("reqntid")
        if not 1 <= self.threads <= 1024:
            raise LaunchError(f"block {launch.block}: expected 1 to 1024 threads")
        if required:
            want = tuple(int(x) for x in required.replace(" ", "").split(","))
            if want + (1,) * (3 - len(want)) != launch.block:
                raise LaunchError(f"block {launch.block}: the kernel requires {want}")
        most = self.program.kernel.directives.get("maxntid")
        if most and self.threads > math.prod(int(x) for x in most.replace(" ", "").split(",")):
            raise LaunchError(f"block {launch.block}: the kernel allows {most} threads at most")
        if any(g % c for g, c in zip(launch.grid, cluster, strict=True)):
            raise LaunchError(f"grid {launch.grid} is not a multiple of cluster {cluster}")
        if not 1 <= math.prod(cluster) <= 16:
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
        self.parameters: dict[int, Any] = {}  # what a load of a parameter gave, by its pc
        start = -self._param_block.ctypes.data % 128
        self.symbols: dict[str, int] = {}
        for i, (p, o) in enumerate(zip(kernel.params, offsets, strict=True)):
            raw = ctypes.string_at(self.launch.params[i], p.size)
            self._param_block[start + o : start + o + p.size] = np.frombuffer(raw, np.uint8)
            self.symbols[p.name] = self._param_block.ctypes.data + start + o
        begin = self._param_block.ctypes.data + start
        self.memory.add("kernel parameters", begin, offset)
        self.parameter_span = begin, begin + offset
        self._globals: list[NDArray[np.uint8]] = []
        for name, var in self.program.globals.items():
            data = np.zeros(var.size + 32, np.uint8)
            skip = -data.ctypes.data % 16
            data[skip : skip + len(var.data)] = np.frombuffer(var.data, np.uint8)
            self._globals.append(data)
            self.symbols[name] = data.ctypes.data + skip
            self.memory.add(name, data.ctypes.data + skip, var.size)

    def _values(self) -> None:
        """Views that are the same for the whole grid; the rest is sorted by who provides it."""
        self.values: list[tuple[int, Any]] = []
        self.per_block: list[tuple[int, tuple[Any, ...]]] = []
        self.per_warp: list[tuple[int, tuple[Any, ...]]] = []
        launch = self.launch
        clusters = tuple(g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
        size = math.prod(launch.cluster)
        fixed = {
            "%nwarpid": -(-self.threads // 32),
            "%nsmid": self.sms,
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
        for i, view in self.program.other_views:
            kind, name = view[0], view[1]
            if kind == "const":
                value = name
            elif kind == "symbol" and name in self.symbols:
                value = self.symbols[name]
            elif kind == "symbol" and name in local:
                value = self.program.variables[name]
            elif kind == "special" and name in fixed:
                value = fixed[name]
            elif kind == "symbol" or (kind == "special" and name in OF_BLOCK):
                self.per_block.append((i, view))
                continue
            else:
                self.per_warp.append((i, view))
                continue
            if view[2] is np.bool_:
                lanes = np.full(32, bool(value))
            else:
                lanes = uniform_view(np.full(32, value, np.uint64), view[2])
            lanes.flags.writeable = False
            self.values.append((i, lanes))
        self._specials: dict[int, list[tuple[int, NDArray[Any]]]] = {}
        self._shared: list[SharedMemory] = []

    @functools.cached_property
    def mbarrier_room(self) -> int:
        """Columns of a CTA's mbarriers in the clocks of the hazard check, in every cluster."""
        return mbarrier_room(self.program.kernel.code)

    def specials(self, index: int) -> list[tuple[int, NDArray[Any]]]:
        """Views of the special registers of warp ``index`` of any CTA."""
        if index not in self._specials:
            block = self.launch.block
            self._specials[index] = [
                (i, uniform_view(of_warp(name, index, block), dtype))
                for i, (_, name, dtype) in self.per_warp
            ]
        return self._specials[index]

    def shared_memory(self, ctas: int) -> SharedMemory:
        """Poison: that of a cluster that is gone, or new; pages of memory cost more than poison."""
        if not self._shared:
            return self.shared_type(ctas, self.shared_limit)
        shared = self._shared.pop()
        shared.poison()
        return shared

    # ---- running -------------------------------------------------------------------------------
    def issue(self, action: Callable[[], None], text: str) -> InFlight:
        """An asynchronous operation: performs it now or keeps it, as the options say."""
        return self.put(InFlight(action, text))

    def put(self, op: InFlight) -> InFlight:
        """The same for an operation that knows what comes before it."""
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

    def _clusters(self) -> tuple[int, int, int]:
        """Clusters of the grid along each axis."""
        x, y, z = (-(-g // c) for g, c in zip(self.launch.grid, self.launch.cluster, strict=True))
        return x, y, z

    def cancel(self) -> tuple[int, int, int] | None:
        """Takes a cluster that has not started off the grid: its first CTA; None is a refusal.

        Hardware may refuse at any time; the adversarial scheduler now and then does.
        """
        if self.options.seed is not None and self.random.random() < 0.1:
            return None
        taken = next(self.waiting, None)
        return None if taken is None else taken[1]

    def block_at(self, index: int, rank: int = 0) -> tuple[int, int, int]:
        """Coordinates of CTA ``rank`` of cluster ``index``; x runs fastest."""
        sizes = self.launch.cluster
        origin, place = place_of(index, self._clusters()), place_of(rank, sizes)
        x, y, z = (o * n + p for o, n, p in zip(origin, sizes, place, strict=True))
        return x, y, z

    def run(self) -> Stats:
        """Runs the grid to its end.  Raises SoftGpuError."""
        clusters = math.prod(self._clusters())
        self.waiting = ((index, self.block_at(index)) for index in range(clusters))
        resident: list[Cluster] = []
        expired_at = -1
        passes, seen_version = 0, -1
        with np.errstate(all="ignore"):
            for index, origin in itertools.islice(self.waiting, self.options.resident):
                resident.append(Cluster(self, index, origin))
            while resident:
                moved = self._pass(resident)
                finished = [c for c in resident if all(w.done for w in c.warps)]
                if finished:
                    self._land(True)
                    for c in finished:
                        c.check_end()
                        self.program.files.give_back(w.file for w in c.warps)
                        self._shared.append(c.shared)
                    resident = [c for c in resident if c not in finished]
                    self.stats.blocks += sum(len(c.blocks) for c in finished)
                    for index, origin in itertools.islice(self.waiting, len(finished)):
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
                more = next(self.waiting, None)
                if more is None or len(resident) * len(resident[0].blocks) >= self.sms:
                    raise Deadlock(self.report(resident, bool(moved)))
                resident.append(Cluster(self, *more))
        self._land(True)
        return self.stats

    def _pass(self, resident: list[Cluster]) -> int:
        """Lets every warp run once; returns how many instructions were executed."""
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
            for w in warps:
                w.mood = None
        if self.options.asynchronous == "random":
            for op in pick.sample(self.in_flight, len(self.in_flight)):
                if pick.random() < 0.2:
                    op.complete()
        pick.shuffle(warps)
        moved = 0
        for w in warps:
            mood = pick.choice(MOODS)
            w.mood = mood if w.mood is None else w.mood
            if w.mood == 0.0 or pick.random() >= w.mood:
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
            if self.options.on_hazard is not None:
                self.options.on_hazard(found)

    def shared_name(self, offset: int) -> str:
        """``name + offset`` of a byte of dynamic shared memory; of an mbarrier its name alone."""
        offset -= self.program.static_shared
        for name, start, size in self.program.shared_map:
            if start <= offset < start + size:
                if name.endswith("]") and start == offset:
                    return f"{name} (offset {offset})"
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
            f"  {warp.block}, warp {warp.index}, {lanes}; kernel {kernel.short_name}"
        )

    def report(self, resident: list[Cluster], spinning: bool) -> str:
        """Text that says what every warp waits for, and the state of each mbarrier."""
        kernel = self.program.kernel
        head = "warps spin without effect" if spinning else "deadlock: no warp can run"
        lines = [f"{head}; kernel {kernel.short_name}"]
        for c in resident:
            for w in (w for w in c.warps if not w.done):
                for g in w.groups:
                    behind = g.wait is not None and not g.wait.retry
                    pc = g.pc - 1 if behind else g.pc
                    ins = kernel.code[pc]
                    why = g.wait.text() if g.wait is not None else "runs: " + ins.text
                    lanes = 32 if g.mask is True else int(g.mask.sum())
                    lines.append(
                        f"  {w.block} warp {w.index} ({lanes} lanes) pc {pc} "
                        f"{kernel.where(ins)}: {why}"
                    )
            for address, b in sorted(c.mbarriers.items()):
                at = self.barrier_at(address)
                lines.append(f"  {at}: phase {b.phase} (parity {b.phase & 1}), {b.counts}")
        return "\n".join(lines)


__all__ = ["Machine", "Options", "Stats"]

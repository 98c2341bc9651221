"""bar / barrier and barrier.cluster: PTX ISA 9.7.13.1-3."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cluster import NamedBarrier
from ..decode import Decoder, Handler, Mods, op, unmodelled
from ..errors import BarrierError
from ..hazard.clocks import joined
from ..ptx import Imm, Instr, Operand
from ..warp import Wait


def _scalar(k: Decoder, operand: Operand, ins: Instr) -> Any:
    """A function of the registers and the lanes: the operand's value, one for all of them."""
    if isinstance(operand, Imm):
        value = operand.bits
        return lambda v, m: value
    index = k.src(operand, "u32")

    def uniform(v: Any, m: Any) -> int:
        values = v[index] if m is True else v[index][m]
        if (values != values[0]).any():
            raise BarrierError(f"{ins.opcode}: lanes that execute it together disagree: {values}")
        return int(values[0])

    return uniform


class _Generation:
    """Stamp that the arrivals of one generation published, for the hazard checker."""

    def __init__(self) -> None:
        self.stamp: Any = None


class WarpArrival:
    """Threads of one warp that have come to a barrier one by one, by instructions without .aligned.

    The last of them marks the arrival of the warp, see ``_arrive``; ``state`` is None until then.
    """

    def __init__(self, threads: int | None) -> None:
        self.threads = threads
        self.lanes = np.zeros(32, bool)
        self.stamp: Any = None
        self.state: NamedBarrier | None = None
        self.generation = 0
        self.published = _Generation()

    def whole(self, w: Any, number: int) -> bool:
        """True if the warp has arrived: all its threads that have not exited are here."""
        if self.state is None and not (w.lanes(w.alive) & ~self.lanes).any():
            del w.arriving[number]
            arrived = _arrive(w, number, self.threads, self.stamp)
            self.state, self.generation, self.published = arrived
        return self.state is not None

    def complete(self) -> bool:
        """True if all other warps of the generation have arrived too."""
        return self.state is not None and self.state.generation != self.generation

    def text(self, w: Any, number: int) -> str:
        """Text that says what the threads wait for."""
        if self.state is not None:
            return f"barrier {number}: {self.state.arrived} of {self.state.expected} threads"
        missing = np.nonzero(w.lanes(w.alive) & ~self.lanes)[0].tolist()
        return f"barrier {number}: lanes {missing} of its own warp, which have not come to it"


def _arrive(
    w: Any, number: int, threads: int | None, stamp: Any
) -> tuple[NamedBarrier, int, _Generation]:
    """Counts one warp in; completes the generation when the expected number is there.

    Returns the barrier, the generation that the warp belongs to, and what that one publishes.
    """
    total = threads if threads is not None else 32 * len(w.block.warps)
    if total % 32 or total <= 0:
        raise BarrierError(f"barrier {number}: thread count {total}, expected a multiple of 32")
    bar: NamedBarrier = w.block.named.setdefault(number, NamedBarrier())
    if bar.arrived and bar.expected != total:
        raise BarrierError(
            f"barrier {number}: this warp expects {total} threads, those that arrived before it "
            f"expect {bar.expected}"
        )
    bar.expected = total
    bar.arrived += 32
    mine: _Generation = bar.open if bar.open is not None else _Generation()
    bar.open = mine
    if w.hazard is not None:
        mine.stamp = joined(mine.stamp, stamp)
    w.machine.version += 1
    generation = bar.generation
    if bar.arrived == total:
        bar.arrived = 0
        bar.generation += 1
        bar.open = None
    return bar, generation, mine


def _wait_for_all(
    w: Any, m: Any, number: int, state: NamedBarrier, generation: int, mine: _Generation
) -> Wait | None:
    """Lanes ``m`` of .sync wait for the other warps of the generation, and acquire."""

    def resume() -> None:
        if w.hazard is not None:
            w.hazard.clock.acquire(m, mine.stamp)

    if state.generation != generation:
        resume()
        return None
    return Wait(
        lambda: state.generation != generation,
        lambda: f"barrier {number}: {state.arrived} of {state.expected} threads have arrived",
        retry=False,
        resume=resume,
    )


def _number(w: Any, number: int) -> int:
    if not 0 <= number < 16:
        raise BarrierError(f"barrier {number}: expected 0 to 15")
    return number


def _arrive_by_threads(w: Any, m: Any, number: int, threads: int | None, sync: bool) -> Wait | None:
    """Lanes ``m`` come to a barrier; other lanes of the warp may by another instruction.

    A thread waits for those of its warp that have not exited, then the warp has arrived, and with
    .sync it waits for the other warps (PTX ISA 9.7.13.1).
    """
    part: WarpArrival = w.arriving.setdefault(number, WarpArrival(threads))
    if part.threads != threads:
        raise BarrierError(f"barrier {number}: lanes of one warp expect {part.threads}, {threads}")
    part.lanes |= w.lanes(m)
    if w.hazard is not None:
        part.stamp = joined(part.stamp, w.hazard.clock.release(m))
    w.machine.version += 1

    def resume() -> None:
        if sync and w.hazard is not None:
            w.hazard.clock.acquire(m, part.published.stamp)

    def ready() -> bool:
        return part.whole(w, number) and (part.complete() or not sync)

    if ready():
        resume()
        return None
    return Wait(ready, lambda: part.text(w, number), retry=False, resume=resume)


@op("bar.sync", "barrier.sync", "bar.cta.sync", "barrier.cta.sync", "bar.arrive", "barrier.arrive",
    "bar.cta.arrive", "barrier.cta.arrive")  # fmt: skip
def bar(ins: Instr, k: Decoder) -> Handler:
    """bar is barrier.aligned: the warp executes it as one.  Without .aligned threads arrive."""
    mods = Mods(ins)
    mods.flag("cta")
    aligned = mods.flag("aligned") or ins.parts[0] == "bar"
    sync = mods.take("sync", "arrive") == "sync"
    mods.done()
    number = _scalar(k, ins.args[0], ins)
    threads = _scalar(k, ins.args[1], ins) if len(ins.args) > 1 else None
    if not sync and threads is None:
        raise unmodelled(ins, "arrive without a count")

    def run(w: Any, m: Any) -> Any:
        wait = w.join(m, -1, ins.opcode)
        if wait is not None:
            return wait
        v = w.v
        i = _number(w, number(v, m))
        stamp = w.hazard.clock.release(True) if w.hazard is not None else None
        arrived = _arrive(w, i, threads(v, m) if threads else None, stamp)
        return _wait_for_all(w, True, i, *arrived) if sync else None

    def run_threads(w: Any, m: Any) -> Any:
        v = w.v
        i = _number(w, number(v, m))
        return _arrive_by_threads(w, m, i, threads(v, m) if threads else None, sync)

    return run if aligned else run_threads


@op("bar.red", "barrier.red", "bar.cta.red", "barrier.cta.red")
def bar_red(ins: Instr, k: Decoder) -> Handler:
    raise unmodelled(ins)


@op("barrier.cluster.arrive")
def cluster_arrive(ins: Instr, k: Decoder) -> Handler:
    """A thread arrives once before the barrier completes (PTX ISA 9.7.13.3): a hazard.

    Programs that work do it all the same (arrive, arrive, wait, wait).  Here the second arrival
    stands still until the first barrier is complete, and each wait belongs to the oldest arrival.
    """
    mods = Mods(ins, 3)
    relaxed = mods.take("release", "relaxed") == "relaxed"
    mods.flag("aligned")
    mods.done()

    def run(w: Any, m: Any) -> Any:
        wait = w.join(m, -1, "barrier.cluster.arrive")
        if wait is not None:
            return wait
        cluster, owed = w.block.cluster, w.cluster_waits
        if owed and owed[-1] == cluster.barrier_generation:
            generation = owed[-1]
            return Wait(
                lambda: cluster.barrier_generation != generation,
                lambda: "barrier.cluster.arrive a second time: the first barrier is not complete",
            )
        if w.hazard is not None:
            if owed:
                w.hazard.report.arrived_twice(w.hazard)
            clock, checker = w.hazard.clock, cluster.hazards
            stamp = clock.release_barriers_only(m) if relaxed else clock.release(m)
            checker.barrier = joined(checker.barrier, stamp)
        owed.append(cluster.barrier_generation)
        w.machine.version += 1
        cluster.barrier_arrive(int(w.lanes(m).sum()))
        return None

    return run


@op("barrier.cluster.wait")
def cluster_wait(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins, 3)
    mods.take("acquire")
    mods.flag("aligned")
    mods.done()

    def run(w: Any, m: Any) -> Any:
        wait = w.join(m, -1, "barrier.cluster.wait")
        if wait is not None:
            return wait
        cluster = w.block.cluster
        if not w.cluster_waits:
            raise BarrierError("barrier.cluster.wait without an arrive")
        generation = w.cluster_waits[0]
        if cluster.barrier_generation != generation:
            del w.cluster_waits[0]
            if w.hazard is not None:
                w.hazard.clock.acquire(m, cluster.hazards.barrier_done)
            return None
        return Wait(
            lambda: cluster.barrier_generation != generation,
            lambda: (
                f"cluster barrier: {cluster.barrier_arrived} of {cluster.barrier_expected} "
                "threads have arrived"
            ),
        )

    return run

"""bar / barrier and barrier.cluster: PTX ISA 9.7.13.1-3."""

from __future__ import annotations

from typing import Any

from ..cluster import NamedBarrier
from ..decode import Decoder, Handler, Mods, op, unmodelled
from ..errors import BarrierError
from ..hazard.clocks import joined
from ..ptx import Imm, Instr, Operand
from ..warp import Wait
from .common import first_lane


def _scalar(k: Decoder, operand: Operand) -> Any:
    if isinstance(operand, Imm):
        value = operand.bits
        return lambda v, m: value
    index = k.src(operand, "u32")
    return lambda v, m: int(v[index][first_lane(m)])


class _Generation:
    """What the arrivals of one generation published, for the hazard checker."""

    def __init__(self) -> None:
        self.stamp: Any = None


def _arrive(w: Any, number: int, threads: int | None) -> tuple[NamedBarrier, _Generation]:
    """Counts one warp in; completes the generation when the expected number is there."""
    if not 0 <= number < 16:
        raise BarrierError(f"barrier {number}: expected 0 to 15")
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
        mine.stamp = joined(mine.stamp, w.hazard.clock.release(True))
    w.machine.version += 1
    if bar.arrived == total:
        bar.arrived = 0
        bar.generation += 1
        bar.open = None
    return bar, mine


@op("bar.sync", "barrier.sync", "bar.cta.sync", "barrier.cta.sync", "bar.arrive", "barrier.arrive",
    "bar.cta.arrive", "barrier.cta.arrive")  # fmt: skip
def bar(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    mods.flag("cta")
    mods.flag("aligned")
    sync = mods.take("sync", "arrive") == "sync"
    mods.done()
    number = _scalar(k, ins.args[0])
    threads = _scalar(k, ins.args[1]) if len(ins.args) > 1 else None
    if not sync and threads is None:
        raise unmodelled(ins, "arrive without a count")

    def run(w: Any, m: Any) -> Any:
        wait = w.join(m, -1, ins.opcode)
        if wait is not None:
            return wait
        v = w.v
        i = number(v, m)
        state, mine = _arrive(w, i, threads(v, m) if threads else None)
        generation = state.generation

        def resume() -> None:
            if w.hazard is not None:
                w.hazard.clock.acquire(True, mine.stamp)

        if not sync:
            return None
        if state.arrived == 0:
            resume()
            return None
        return Wait(
            lambda: state.generation != generation,
            lambda: f"barrier {i}: {state.arrived} of {state.expected} threads have arrived",
            retry=False,
            resume=resume,
        )

    return run


@op("bar.red", "barrier.red", "bar.cta.red", "barrier.cta.red")
def bar_red(ins: Instr, k: Decoder) -> Handler:
    raise unmodelled(ins)


@op("barrier.cluster.arrive")
def cluster_arrive(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins, 3)
    relaxed = mods.take("release", "relaxed") == "relaxed"
    mods.flag("aligned")
    mods.done()

    def run(w: Any, m: Any) -> Any:
        wait = w.join(m, -1, "barrier.cluster.arrive")
        if wait is not None:
            return wait
        cluster = w.block.cluster
        if w.cluster_gen >= 0:
            raise BarrierError("barrier.cluster.arrive twice without a wait")
        w.cluster_gen = cluster.barrier_generation
        if w.hazard is not None:
            clock, checker = w.hazard.clock, cluster.hazards
            stamp = clock.release_barriers_only(m) if relaxed else clock.release(m)
            checker.barrier = joined(checker.barrier, stamp)
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
        cluster, generation = w.block.cluster, w.cluster_gen
        if generation < 0:
            raise BarrierError("barrier.cluster.wait without an arrive")
        if cluster.barrier_generation != generation:
            w.cluster_gen = -1
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

"""mbarrier objects: PTX ISA 9.7.13.15.

The state lives beside shared memory, keyed by address.  A phase completes when the pending count
and the transaction count are both zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cluster import MBarrier
from ..decode import Decoder, Handler, Mods, op, unmodelled
from ..errors import BarrierError
from ..memory import RANK_SHIFT
from ..ptx import Instr, Mem
from ..warp import Wait
from .common import first_lane, lanes_of, put
from .load_store import address

_MAX_COUNT = (1 << 20) - 1
_SPACE = ("shared", "shared::cta", "shared::cluster")
_SCOPES = ("release", "acquire", "relaxed", "cta", "cluster")


def find(w: Any, a: int, what: str) -> MBarrier:
    """The mbarrier at a shared address.  Raises BarrierError if there is none."""
    bar = w.block.cluster.mbarriers.get(a)
    if bar is None:
        w.shared.check(np.array([a], np.uint32), 8, None, what, 8)
        raise BarrierError(f"{what}: {w.machine.barrier_at(a)} was not initialised")
    found: MBarrier = bar
    return found


def complete_tx(w: Any, a: int, nbytes: int) -> None:
    """The transaction part of an asynchronous copy's completion."""
    bar = find(w, a, "complete_tx")
    if bar.track is not None:
        bar.track.flying -= nbytes
    _count_tx(w, a, bar, nbytes)


def _count_tx(w: Any, a: int, bar: MBarrier, nbytes: int) -> None:
    bar.tx -= nbytes
    if abs(bar.tx) > _MAX_COUNT:
        raise BarrierError(
            f"{w.machine.barrier_at(a)}: transaction count {bar.tx} leaves the 20 bits it has"
        )
    w.machine.version += 1
    bar.settle()


def arrive(w: Any, a: int, count: int) -> None:
    """``count`` arrivals, which may complete the phase.  Raises BarrierError if too many."""
    bar = find(w, a, "mbarrier.arrive")
    if count > bar.pending:
        raise BarrierError(
            f"{w.machine.barrier_at(a)}: {count} more arrivals than pending "
            f"({bar.pending} of {bar.expected}) in phase {bar.phase}"
        )
    bar.pending -= count
    w.machine.version += 1
    bar.settle()


@op("mbarrier.init")
def init(ins: Instr, k: Decoder) -> Handler:
    where, count = address(k, ins.args[0], "shared"), k.src(ins.args[1], "u32")

    def run(w: Any, m: Any) -> None:
        a = where(w.v)
        made: dict[int, MBarrier] = {}  # lanes that store the same object together make one
        for lane in lanes_of(m):
            n, at = int(w.v[count][lane]), int(a[lane])
            if not 1 <= n <= _MAX_COUNT:
                raise BarrierError(f"mbarrier.init: count {n}, expected 1 to {_MAX_COUNT}")
            w.shared.check(a[lane : lane + 1], 8, w.block.rank, "mbarrier.init", 8)
            bar = made.get(at) or MBarrier(n, n)
            bar.expected = bar.pending = n
            made[at] = w.block.cluster.mbarriers[at] = bar
            if w.hazard is not None:
                w.hazard.init_barrier(int(lane), bar)
        w.machine.version += 1

    return run


@op("mbarrier.inval")
def inval(ins: Instr, k: Decoder) -> Handler:
    where = address(k, ins.args[0], "shared")

    def run(w: Any, m: Any) -> None:
        a = where(w.v)
        for lane in lanes_of(m):
            find(w, int(a[lane]), "mbarrier.inval")
            del w.block.cluster.mbarriers[int(a[lane])]

    return run


def publish(w: Any, a: Any, m: Any) -> None:
    """Arrivals release: one stamp for each mbarrier that the lanes arrive at."""
    lanes = w.lanes(m)
    for at in np.unique(a[lanes]):
        rank = int(at) >> RANK_SHIFT
        mine = lanes & (a == at)
        bar = find(w, int(at), "mbarrier.arrive")
        if rank != w.block.rank:
            w.hazard.touch_remote(rank, int(np.argmax(mine)))
        w.hazard.arrive(bar, True if mine.all() else mine, rank != w.block.rank)


@op("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive_(ins: Instr, k: Decoder) -> Handler:
    """[state,] [addr] [, count or tx-count]"""
    mods = Mods(ins, 2)
    mods.type()
    expect, no_complete = mods.flag("expect_tx"), mods.flag("noComplete")
    while mods.take(*_SCOPES):
        pass
    mods.take(*_SPACE)
    mods.done()
    drop = ins.parts[1] == "arrive_drop"
    args = list(ins.args)
    state = None if isinstance(args[0], Mem) else k.dst(args.pop(0), "u64")
    where = address(k, args[0], "shared")
    extra = k.src(args[1], "u32") if len(args) > 1 else None
    if no_complete:
        raise unmodelled(ins, "noComplete")

    def run(w: Any, m: Any) -> None:
        v = w.v
        a = where(v)
        if w.hazard is not None:
            publish(w, a, m)
        for lane in lanes_of(m):
            at = int(a[lane])
            value = int(v[extra][lane]) if extra is not None else 1
            bar = find(w, at, "mbarrier.arrive")
            phase = bar.phase
            if expect:
                bar.tx += value
                if bar.track is not None:
                    bar.track.expect = w.hazard.event
            if drop:
                bar.expected -= 1 if expect else value
            arrive(w, at, 1 if expect else value)
            if state is not None:
                v[state][lane] = phase

    return run


@op("mbarrier.expect_tx", "mbarrier.complete_tx")
def tx(ins: Instr, k: Decoder) -> Handler:
    where, amount = address(k, ins.args[0], "shared"), k.src(ins.args[1], "u32")
    expect = ins.parts[1] == "expect_tx"

    def run(w: Any, m: Any) -> None:
        a = where(w.v)
        for lane in lanes_of(m):
            n, at = int(w.v[amount][lane]), int(a[lane])
            _count_tx(w, at, find(w, at, ins.parts[1]), -n if expect else n)

    return run


@op("mbarrier.pending_count")
def pending_count(ins: Instr, k: Decoder) -> Handler:
    raise unmodelled(ins)


@op("mbarrier.test_wait", "mbarrier.try_wait")
def wait(ins: Instr, k: Decoder) -> Handler:
    """waitComplete, [addr], state or parity [, time limit]

    try_wait suspends; its time limit runs out only when no warp can do anything else.
    """
    mods = Mods(ins, 2)
    mods.type()
    parity = mods.flag("parity")
    while mods.take(*_SCOPES):
        pass
    mods.take(*_SPACE)
    mods.done()
    blocking = ins.parts[1] == "try_wait"
    d = k.dst(ins.args[0], "pred")
    where = address(k, ins.args[1], "shared")
    token = k.src(ins.args[2], "u32" if parity else "u64")

    def complete(bar: MBarrier, value: int) -> bool:
        return (bar.phase & 1) != value if parity else bar.phase != value

    def one(w: Any, m: Any, at: int, want: int) -> Any:
        """All lanes look at the same phase of the same mbarrier."""
        if parity and want > 1:
            raise BarrierError(f"{w.machine.barrier_at(at)}: parity {want}, expected 0 or 1")
        bar = find(w, at, ins.parts[1])
        done = complete(bar, want)
        if blocking and not done and not w.current.expired:
            what = f"phase parity {want}" if parity else f"phase {want}"
            return Wait(
                lambda: complete(bar, want),
                lambda: (
                    f"{w.machine.barrier_at(at)} to complete {what}; it is in phase {bar.phase}, "
                    f"{bar.counts}"
                ),
                expires=True,
            )
        if done and w.hazard is not None:
            w.hazard.use_barrier(bar, first_lane(m), "generic")
            w.hazard.waited(bar, m)
        w.current.expired = False
        put(w.v[d], done, m)
        return None

    def several(w: Any, m: Any, a: Any, t: Any) -> Any:
        done = np.zeros(32, bool)
        bars = {int(i): find(w, int(a[i]), ins.parts[1]) for i in lanes_of(m)}
        for lane, bar in bars.items():
            done[lane] = complete(bar, int(t[lane]))
            if done[lane] and w.hazard is not None:
                w.hazard.waited(bar, lane == np.arange(32))
        if blocking and not done.any() and not w.current.expired:
            at = w.machine.barrier_at(int(a[first_lane(m)]))
            wanted = [(bar, int(t[lane])) for lane, bar in bars.items()]
            return Wait(
                lambda: any(complete(bar, want) for bar, want in wanted),
                lambda: f"several mbarriers, first {at}",
                expires=True,
            )
        w.current.expired = False
        put(w.v[d], done, m)
        return None

    def run(w: Any, m: Any) -> Any:
        a, t = where(w.v), w.v[token]
        first = first_lane(m)
        same = (a == a[first]) & (t == t[first])
        if same.all() if m is True else same[m].all():
            return one(w, m, int(a[first]), int(t[first]))
        return several(w, m, a, t)

    return run

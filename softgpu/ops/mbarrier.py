"""mbarrier objects: PTX ISA 9.7.13.15.

The state lives beside shared memory, keyed by address.  A phase completes when the pending count
and the transaction count are both zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import Decoder, Handler, Mods, op, unmodelled
from ..errors import BarrierError
from ..machine import MBarrier, Wait
from ..memory import OFFSET_MASK, RANK_SHIFT, SHARED_BASE
from ..ptx import Instr
from .load_store import address

_MAX_COUNT = (1 << 20) - 1
_SPACE = ("shared", "shared::cta", "shared::cluster")
_SCOPES = ("release", "acquire", "relaxed", "cta", "cluster")


def name(w: Any, a: int) -> str:
    """An mbarrier for messages, with the name of its array where that is known."""
    at = f"mbarrier at CTA {a >> RANK_SHIFT} offset {a & OFFSET_MASK}"
    array = w.machine.shared_name((a & OFFSET_MASK) - SHARED_BASE)
    return at if array.startswith("offset") else f"{at} ({array.split(' (')[0]})"


def find(w: Any, a: int, what: str) -> MBarrier:
    bar = w.block.cluster.mbarriers.get(a)
    if bar is None:
        w.shared.check(np.array([a], np.uint32), 8, None, what, 8)
        raise BarrierError(f"{what}: {name(w, a)} was not initialised")
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
        raise BarrierError(f"{name(w, a)}: transaction count {bar.tx} leaves the 20 bits it has")
    w.machine.version += 1
    bar.settle()


def arrive(w: Any, a: int, count: int) -> None:
    bar = find(w, a, "mbarrier.arrive")
    if count > bar.pending:
        raise BarrierError(
            f"{name(w, a)}: {count} more arrivals than pending "
            f"({bar.pending} of {bar.expected}) in phase {bar.phase}"
        )
    bar.pending -= count
    w.machine.version += 1
    bar.settle()


def _lanes(m: Any) -> Any:
    return range(32) if m is True else np.nonzero(m)[0]


@op("mbarrier.init")
def init(ins: Instr, k: Decoder) -> Handler:
    where, count = address(k, ins.args[0], "shared"), k.src(ins.args[1], "u32")

    def run(w: Any, m: Any) -> None:
        a = where(w.v)
        for lane in _lanes(m):
            n = int(w.v[count][lane])
            if not 1 <= n <= _MAX_COUNT:
                raise BarrierError(f"mbarrier.init: count {n}, expected 1 to {_MAX_COUNT}")
            w.shared.check(a[lane : lane + 1], 8, w.block.rank, "mbarrier.init", 8)
            bar = w.block.cluster.mbarriers[int(a[lane])] = MBarrier(n, n)
            if w.hazard is not None:
                w.hazard.init_barrier(int(lane), bar)
        w.machine.version += 1

    return run


@op("mbarrier.inval")
def inval(ins: Instr, k: Decoder) -> Handler:
    where = address(k, ins.args[0], "shared")

    def run(w: Any, m: Any) -> None:
        a = where(w.v)
        for lane in _lanes(m):
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
    from ..ptx import Mem

    state = None
    if not isinstance(args[0], Mem):
        target = args.pop(0)
        state = k.dst(target, "u64")
    where = address(k, args[0], "shared")
    extra = k.src(args[1], "u32") if len(args) > 1 else None
    if no_complete:
        raise unmodelled(ins, "noComplete")

    def run(w: Any, m: Any) -> None:
        v = w.v
        a = where(v)
        if w.hazard is not None:
            publish(w, a, m)
        for lane in _lanes(m):
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
        for lane in _lanes(m):
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

    def run(w: Any, m: Any) -> Any:
        v = w.v
        a, t = where(v), v[token]
        first = 0 if m is True else int(np.argmax(m))
        at, want = int(a[first]), int(t[first])
        same = (a == a[first]) & (t == t[first])
        if same.all() if m is True else same[m].all():
            if parity and want > 1:
                raise BarrierError(f"{name(w, at)}: parity {want}, expected 0 or 1")
            bar = find(w, at, ins.parts[1])
            if complete(bar, want):
                w.current.expired = False
                if w.hazard is not None:
                    w.hazard.use_barrier(bar, first, "generic")
                    w.hazard.waited(bar, m)
                np.copyto(v[d], True, where=m)
                return None
            if blocking and not w.current.expired:
                what = f"phase parity {want}" if parity else f"phase {want}"
                return Wait(
                    lambda: complete(bar, want),
                    lambda: (
                        f"{name(w, at)} to complete {what}; it is in phase {bar.phase}, pending "
                        f"{bar.pending} of {bar.expected}, tx {bar.tx}"
                    ),
                    retry=True,
                    expires=True,
                )
            w.current.expired = False
            np.copyto(v[d], False, where=m)
            return None
        done = np.zeros(32, bool)
        for lane in _lanes(m):
            bar = find(w, int(a[lane]), ins.parts[1])
            done[lane] = complete(bar, int(t[lane]))
            if done[lane] and w.hazard is not None:
                w.hazard.waited(bar, lane == np.arange(32))
        if blocking and not done.any() and not w.current.expired:
            bars = [(find(w, int(a[i]), "wait"), int(t[i])) for i in _lanes(m)]
            return Wait(
                lambda: any(complete(b, x) for b, x in bars),
                lambda: "several mbarriers, first " + name(w, at),
                retry=True,
                expires=True,
            )
        w.current.expired = False
        np.copyto(v[d], done, where=m)
        return None

    return run

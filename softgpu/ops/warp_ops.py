"""shfl, vote, match, redux, elect, activemask, bar.warp: PTX ISA 9.7.9.6-7, 9.7.13.7-11."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import DTYPES, Decoder, Handler, Mods, op, unmodelled
from ..errors import SoftGpuError
from ..ptx import Imm, Instr, Operand
from .common import put

LANES = np.arange(32)
FULL = 0xFFFFFFFF  # the membermask of all lanes
KEPT = 256  # source lanes of a shfl whose operands are registers


def members(k: Decoder, operand: Operand) -> Any:
    """(views, mask) -> membermask as an int, which must be the same in all active lanes."""
    if isinstance(operand, Imm):
        value = operand.bits & 0xFFFFFFFF
        return lambda v, m: value
    index = k.src(operand, "u32")

    def mask_of(v: Any, m: Any) -> int:
        masks = v[index] if m is True else v[index][m]
        raw = masks.tobytes()
        if raw != raw[:4] * len(masks):
            raise SoftGpuError("lanes with different membermasks at one instruction: not modelled")
        return int.from_bytes(raw[:4], "little")

    return mask_of


@op("shfl")
def shfl(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    kind = mods.type()
    if not mods.flag("sync") or kind != "b32":
        raise unmodelled(ins)
    mode = mods.take("up", "down", "bfly", "idx")
    mods.done()
    first, second = k.pair(ins.args[0])
    d = k.dst(first, "u32")
    p = k.dst(second, "pred") if second is not None else -1
    a, b, c = k.src(ins.args[1], "u32"), k.src(ins.args[2], "u32"), k.src(ins.args[3], "u32")
    member = members(k, ins.args[4])
    fixed = None
    if isinstance(ins.args[2], Imm) and isinstance(ins.args[3], Imm):
        fixed = _sources(mode, np.full(32, ins.args[2].bits), np.full(32, ins.args[3].bits))
    known: dict[bytes, Any] = {}  # sources by the bytes of both operands

    def sources(v: Any) -> Any:
        key = v[b].tobytes() + v[c].tobytes()
        if key not in known:
            if len(known) == KEPT:
                known.clear()
            known[key] = _sources(mode, v[b].astype(int), v[c].astype(int))
        return known[key]

    def run(w: Any, m: Any) -> Any:
        v = w.v
        if m is not True:
            wait = w.join(m, member(v, m), "shfl.sync")
            if wait is not None:
                return wait
        source, valid = fixed or sources(v)
        if m is True:
            v[d][...] = v[a][source]
            if p >= 0:
                v[p][...] = valid
            return None
        np.copyto(v[d], v[a][source], where=m)
        if p >= 0:
            np.copyto(v[p], valid, where=m)
        return None

    return run


def _sources(mode: str | None, b: Any, c: Any) -> Any:
    """(source lane, in range) for each lane, as PTX's pseudo code has it."""
    b, clamp, segment = b & 31, c & 31, (c >> 8) & 31
    top = (LANES & segment) | (clamp & ~segment)
    low = LANES & segment
    if mode == "up":
        j = LANES - b
        ok = j >= top
    elif mode == "down":
        j = LANES + b
        ok = j <= top
    elif mode == "bfly":
        j = LANES ^ b
        ok = j <= top
    else:
        j = low | (b & ~segment)
        ok = j <= top
    return np.where(ok, j, LANES), ok


@op("vote")
def vote(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    kind = mods.type()
    if not mods.flag("sync"):
        raise unmodelled(ins)
    mode = mods.take("all", "any", "uni", "ballot")
    mods.done()
    d = k.dst(ins.args[0], "u32" if kind == "b32" else "pred")
    a, negated = k.pred(ins.args[1])
    member = members(k, ins.args[2])

    def run(w: Any, m: Any) -> Any:
        v = w.v
        mask = member(v, m)
        wait = w.join(m, mask, "vote.sync")
        if wait is not None:
            return wait
        whole = m is True and mask == FULL
        lanes = True if whole else w.lanes(m) & (((mask >> LANES) & 1) != 0)
        p = (v[a] ^ negated) & lanes
        value: Any
        if mode == "ballot":
            value = np.uint32(int(np.packbits(p, bitorder="little").view(np.uint32)[0]))
        elif mode == "any":
            value = bool(p.any())
        elif mode == "all":
            value = bool(p[lanes].all())
        else:
            value = bool(p[lanes].all() or not p.any())
        put(v[d], value, m)
        return None

    return run


@op("match")
def match(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    kind = mods.type()
    mods.flag("sync")
    mode = mods.take("any", "all")
    mods.done()
    first, second = k.pair(ins.args[0])
    d = k.dst(first, "u32")
    p = k.dst(second, "pred") if second is not None else -1
    a, member = k.src(ins.args[1], kind), members(k, ins.args[2])

    def run(w: Any, m: Any) -> Any:
        v = w.v
        mask = member(v, m)
        wait = w.join(m, mask, "match.sync")
        if wait is not None:
            return wait
        lanes = w.lanes(m)
        same = (v[a][:, None] == v[a][None, :]) & lanes
        bits = (same.astype(np.uint64) << LANES.astype(np.uint64)).sum(1).astype(np.uint32)
        if mode == "all":
            ok = bool(same[lanes][:, lanes].all())
            put(v[d], bits if ok else np.zeros_like(bits), m)
            if p >= 0:
                put(v[p], ok, m)
        else:
            put(v[d], bits, m)
        return None

    return run


_REDUCE: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@op("redux")
def redux(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    kind = mods.type()
    mods.flag("sync")
    name = mods.take(*_REDUCE)
    absolute, nan = mods.flag("abs"), mods.flag("NaN")
    mods.done()
    if name is None:
        raise unmodelled(ins)
    function = _REDUCE[name]
    if kind == "f32" and not nan:
        function = {"min": np.fmin, "max": np.fmax}[name]
    d, a = k.dst(ins.args[0], kind), k.src(ins.args[1], kind)
    member = members(k, ins.args[2])
    dtype = DTYPES[kind]

    def run(w: Any, m: Any) -> Any:
        v = w.v
        wait = w.join(m, member(v, m), "redux.sync")
        if wait is not None:
            return wait
        x = v[a] if m is True else v[a][m]
        if absolute:
            x = np.abs(x)
        put(v[d], function.reduce(x, dtype=dtype), m)
        return None

    return run


@op("elect")
def elect(ins: Instr, k: Decoder) -> Handler:
    """The leader is the lowest member lane that is here."""
    mods = Mods(ins)
    mods.flag("sync")
    mods.done()
    first, second = k.pair(ins.args[0])
    d = k.dst(first, "u32")
    p = k.dst(second, "pred") if second is not None else -1
    member = members(k, ins.args[1])
    table = [i == LANES for i in range(32)]

    def run(w: Any, m: Any) -> Any:
        v = w.v
        mask = member(v, m)
        if m is not True:
            wait = w.join(m, mask, "elect.sync")
            if wait is not None:
                return wait
        lanes = w.lanes(m) & (((mask >> LANES) & 1) != 0)
        leader = int(np.argmax(lanes))
        put(v[d], np.uint32(leader), m)
        if p >= 0:
            put(v[p], table[leader], m)
        return None

    return run


@op("activemask")
def activemask(ins: Instr, k: Decoder) -> Handler:
    d = k.dst(ins.args[0], "u32")

    def run(w: Any, m: Any) -> None:
        bits = int(np.packbits(w.lanes(m), bitorder="little").view(np.uint32)[0])
        put(w.v[d], np.uint32(bits), m)

    return run


@op("bar.warp.sync", "barrier.warp.sync")
def bar_warp(ins: Instr, k: Decoder) -> Handler:
    member = members(k, ins.args[0])

    def run(w: Any, m: Any) -> Any:
        mask = member(w.v, m)
        wait = w.join(m, mask, "bar.warp.sync")
        if wait is None and w.hazard is not None:
            lanes = m if m is True else m & (((mask >> LANES) & 1) != 0)
            clock = w.hazard.clock
            clock.acquire(lanes, clock.release(lanes))
        return wait

    return run

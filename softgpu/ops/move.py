"""mov, prmt, cvta, mapa and other data movement between registers: PTX ISA 9.7.9."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import DTYPES, Decoder, Handler, Mods, op, unmodelled
from ..memory import LOCAL_WINDOW, OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW, WINDOW_MASK
from ..ptx import Instr, Mem, Reg, Vec
from .common import put, write

_CLOCKS = ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo", "%clock_hi", "%globaltimer_hi")


def copy(d: int, a: int) -> Handler:
    def run(w: Any, m: Any) -> None:
        v = w.v
        if m is True:
            v[d][...] = v[a]
        else:
            np.copyto(v[d], v[a], where=m)

    return run


@op("mov")
def mov(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    kind = mods.type()
    mods.done()
    target, source = ins.args
    if isinstance(target, Vec):
        return _unpack(target, source, kind, k)
    if isinstance(source, Vec):
        return _pack(target, source, kind, k)
    if isinstance(source, Reg) and source.name in _CLOCKS:
        shift = 32 if source.name.endswith("_hi") else 0
        return _clock(k.dst(target, kind), DTYPES[kind], shift)
    if isinstance(source, Mem):
        base, offset = k.src(source.base, kind), source.offset
        d = k.dst(target, kind)
        return write(d, lambda v: v[base] + v[base].dtype.type(offset))
    if kind in ("pred", "b128"):
        return copy(k.dst(target, kind), k.src(source, kind))
    unsigned = f"u{8 * np.dtype(DTYPES[kind]).itemsize}"
    if np.dtype(DTYPES[kind]).kind == "f":  # an f32 literal keeps its bits either way
        unsigned = kind
    return copy(k.dst(target, unsigned), k.src(source, unsigned))


def _clock(d: int, dtype: Any, shift: int) -> Handler:
    """All clocks are one counter of readings, so later readings are larger, in any thread."""

    def run(w: Any, m: Any) -> None:
        w.machine.clock += 1
        put(w.v[d], np.array(w.machine.clock >> shift).astype(dtype), m)

    return run


def _parts(vec: Vec, kind: str) -> Any:
    size = np.dtype(DTYPES[kind]).itemsize // len(vec.items)
    return np.dtype(f"u{size}").type


def _unpack(target: Vec, source: Any, kind: str, k: Decoder) -> Handler:
    part = _parts(target, kind)
    pairs = []
    for i, item in enumerate(target.items):
        if item != Reg("_"):
            pairs.append((k.dst(item, part), k.src(source, part, i)))

    def run(w: Any, m: Any) -> None:
        v = w.v
        values = [v[a].copy() for _, a in pairs]
        for (d, _), value in zip(pairs, values, strict=True):
            put(v[d], value, m)

    return run


def _pack(target: Any, source: Vec, kind: str, k: Decoder) -> Handler:
    part = _parts(source, kind)
    pairs = [(k.dst(target, part, i), k.src(x, part)) for i, x in enumerate(source.items)]

    def run(w: Any, m: Any) -> None:
        v = w.v
        values = [v[a].copy() for _, a in pairs]
        for (d, _), value in zip(pairs, values, strict=True):
            put(v[d], value, m)

    return run


@op("prmt")
def prmt(ins: Instr, k: Decoder) -> Handler:
    """Byte permutation; bit 3 of a selector nibble replicates the sign of the byte."""
    mods = Mods(ins)
    mods.type()
    mods.done()
    d, a, b, c = (k.dst(ins.args[0], "u32"), *(k.src(x, "u32") for x in ins.args[1:4]))
    lanes, shifts = np.arange(32)[:, None], np.arange(0, 16, 4, dtype=np.uint32)

    def compute(v: Any) -> Any:
        both = np.stack([v[a], v[b]], 1).view(np.uint8)
        nibble = (v[c][:, None] >> shifts) & np.uint32(15)
        out = both[lanes, nibble & np.uint32(7)]
        if (nibble & 8).any():
            sign = np.where(out & 0x80, np.uint8(255), np.uint8(0))
            out = np.where(nibble & 8, sign, out)
        return np.ascontiguousarray(out).view(np.uint32)[:, 0]

    return write(d, compute)


@op("cvta")
def cvta(ins: Instr, k: Decoder) -> Handler:
    """Generic addresses: global and parameter addresses as they are, others get a window bit."""
    mods = Mods(ins)
    kind = mods.type()
    to = mods.flag("to")
    space = mods.take(
        "global", "param", "const", "shared", "shared::cta", "shared::cluster", "local",
        "param::entry",
    )  # fmt: skip
    mods.done()
    d, a = k.dst(ins.args[0], kind), k.src(ins.args[1], kind)
    if space is None:
        raise unmodelled(ins)
    if not space.startswith(("shared", "local")):
        return copy(d, a)
    window = np.uint64(LOCAL_WINDOW if space == "local" else SHARED_WINDOW)
    if to:
        return write(d, lambda v: v[a] & ~np.uint64(WINDOW_MASK))
    return write(d, lambda v: v[a] | window)


@op("isspacep")
def isspacep(ins: Instr, k: Decoder) -> Handler:
    """Shared memory of this CTA, of any CTA of the cluster (shared::cluster), local or global."""
    space = ins.parts[1]
    d, a = k.dst(ins.args[0], "pred"), k.src(ins.args[1], "u64")
    if space == "local":
        return write(d, lambda v: (v[a] & np.uint64(LOCAL_WINDOW)) != 0)
    if space == "shared::cluster":
        return write(d, lambda v: (v[a] & np.uint64(SHARED_WINDOW)) != 0)
    if space == "global":
        return write(d, lambda v: (v[a] & np.uint64(WINDOW_MASK)) == 0)
    if space not in ("shared", "shared::cta"):
        raise unmodelled(ins, "state space")

    def own(w: Any, m: Any) -> None:
        first = np.uint64(SHARED_WINDOW | w.block.rank << RANK_SHIFT)
        put(w.v[d], w.v[a] & ~np.uint64(OFFSET_MASK) == first, m)

    return own


@op("mapa")
def mapa(ins: Instr, k: Decoder) -> Handler:
    """Address of the same variable in CTA ``b`` of the cluster."""
    mods = Mods(ins)
    kind = mods.type()
    space = mods.take("shared::cluster")
    mods.done()
    source = ins.args[1]
    if isinstance(source, Mem):
        raise unmodelled(ins, "symbol + offset")
    d, a, b = k.dst(ins.args[0], kind), k.src(source, kind), k.src(ins.args[2], "u32")
    dtype = DTYPES[kind]
    keep = dtype(OFFSET_MASK | (0 if space or kind == "u32" else WINDOW_MASK))

    def compute(v: Any) -> Any:
        return (v[a] & keep) | (v[b].astype(dtype) << dtype(RANK_SHIFT))

    return write(d, compute)


@op("getctarank")
def getctarank(ins: Instr, k: Decoder) -> Handler:
    kind = ins.parts[-1]
    d, a = k.dst(ins.args[0], "u32"), k.src(ins.args[1], kind)
    dtype = DTYPES[kind]
    return write(d, lambda v: ((v[a] >> dtype(RANK_SHIFT)) & dtype(0xFF)).astype(np.uint32))

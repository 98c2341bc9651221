"""ld, st, prefetch and friends: PTX ISA 9.7.9.8-9.7.9.18."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import DTYPES, Decoder, Handler, Mods, op, unmodelled
from ..memory import LOCAL_WINDOW, SHARED_WINDOW
from ..ptx import Imm, Instr, Mem, Reg
from .common import put

# Ordering, caching and eviction words: no effect here, where every access is performed in order.
HINTS = (
    "weak", "relaxed", "acquire", "release", "volatile", "mmio", "cta", "cluster", "gpu", "sys",
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L1::evict_normal", "L1::evict_unchanged",
    "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::evict_normal", "L2::evict_last",
    "L2::evict_first", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B", "unified",
)  # fmt: skip
SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "param::entry", "const",
          "local")  # fmt: skip


def address(k: Decoder, operand: Any, space: str | None) -> Any:
    """A function of the views to lane addresses: u32 for shared, u64 otherwise."""
    if not isinstance(operand, Mem):
        raise k.error("[address] expected")
    shared = space is not None and space.startswith("shared")
    base_width = k.width(operand.base)
    if shared:
        # a 64-bit register may hold a shared address; its low half is the address
        base, offset = k.mem(operand, "u32")
        step = np.uint32(offset & 0xFFFFFFFF)
        if isinstance(operand.base, Imm):
            value = np.full(32, (operand.base.bits + offset) & 0xFFFFFFFF, np.uint32)
            return lambda v: value
        return (lambda v: v[base] + step) if offset else (lambda v: v[base])
    if base_width == 32 and isinstance(operand.base, Reg):
        base, offset = k.src(operand.base, "u32"), operand.offset
        return lambda v: v[base].astype(np.uint64) + np.uint64(offset & ((1 << 64) - 1))
    base, offset = k.mem(operand)
    step64 = np.uint64(offset & ((1 << 64) - 1))
    return (lambda v: v[base] + step64) if offset else (lambda v: v[base])


def read(w: Any, a: Any, m: Any, dtype: Any, n: int, space: str | None, track: bool = True) -> Any:
    """Loads through the space named at decode time; generic addresses (None) are sorted here.

    ``track``: the hazard checker sees it as an ordinary access.
    """
    if space == "local":
        return w.local.load(a, m, dtype, n)
    h = w.hazard if track else None
    if space == "global":
        got = w.machine.memory.load(a, m, dtype, n)
        if h is not None:
            w.machine.globals.read(h, a, m, n * got.dtype.itemsize)
        elif w.hazard is not None:
            w.machine.globals.synchronising(w.hazard, a, m, n * got.dtype.itemsize)
        return got
    if space is not None:
        got = w.shared.load(a, m, dtype, n, w.block.rank if space == "shared" else None)
        if h is not None:
            h.read_shared(a, m, n * got.dtype.itemsize)
        return got
    lanes = w.lanes(m)
    out = np.zeros((32, n) if n > 1 else 32, dtype)
    for part, inner in _split(a, lanes):
        low = a.astype(np.uint32) if inner == "cluster" else a
        got = read(w, low, part, dtype, n, inner, track)
        out[part] = got[part]
    return out


def write(w: Any, a: Any, m: Any, data: Any, n: int, space: str | None, track: bool = True) -> None:
    """The stores of ``read``."""
    w.machine.version += 1
    h = w.hazard if track else None
    if space == "global":
        if h is not None:  # compares bytes: before they change
            w.machine.globals.early(h, a, m, n * data.dtype.itemsize, "write")
        w.machine.memory.store(a, m, data, n)
        if h is not None:
            w.machine.globals.write(h, a, m, n * data.dtype.itemsize)
    elif space == "local":
        w.local.store(a, m, data, n)
    elif space is not None:
        w.shared.store(a, m, data, n, w.block.rank if space == "shared" else None)
        if h is not None:
            h.write_shared(a, m, n * data.dtype.itemsize)
    else:
        for part, inner in _split(a, w.lanes(m)):
            low = a.astype(np.uint32) if inner == "cluster" else a
            write(w, low, part, data, n, inner, track)


def _split(a: Any, lanes: Any) -> Any:
    """Generic addresses by window: (mask, space)."""
    shared = lanes & ((a & np.uint64(SHARED_WINDOW)) != 0)
    local = lanes & ((a & np.uint64(LOCAL_WINDOW)) != 0)
    for part, space in (
        (shared, "cluster"),
        (local, "local"),
        (lanes & ~shared & ~local, "global"),
    ):
        if part.any():
            yield part, space


def synchronises(w: Any) -> None:
    """This block talks to others through global memory: their order is not tracked from here."""
    if w.hazard is not None:
        w.machine.globals.ordered.add(w.hazard.owner.number)


def space_of(space: str | None) -> str | None:
    """PTX state space -> how ``read`` and ``write`` call it; None is generic."""
    if space in ("shared", "shared::cta"):
        return "shared"
    if space == "shared::cluster":
        return "cluster"
    if space == "local":
        return "local"
    return None if space is None else "global"


def _modifiers(ins: Instr) -> tuple[str | None, int, str]:
    """(state space, vector length, type)"""
    mods = Mods(ins)
    kind = mods.type()
    space = mods.take(*SPACES)
    vector = mods.take("v2", "v4", "v8")
    while mods.take(*HINTS):
        pass
    mods.done()
    return space, int(vector[1]) if vector else 1, kind


@op("ld", "ldu")
def ld(ins: Instr, k: Decoder) -> Handler:
    space, n, kind = _modifiers(ins)
    targets = k.items(ins.args[0])
    if len(targets) != n:
        raise unmodelled(ins, "vector length")
    wide = [k.dst_wide(t, kind) for t in targets]
    where = address(k, ins.args[1], space)
    dtype, place = DTYPES[kind], space_of(space)
    track = space is None or space.split("::")[0] not in ("param", "const")
    acquires = place in (None, "global") and "acquire" in ins.parts
    if space is not None and space.startswith("param") and k.is_symbol(ins.args[1]):
        return _parameter(ins.pc, where, dtype, wide)
    if n == 1:
        d, final = wide[0]

        def one(w: Any, m: Any) -> None:
            v = w.v
            if acquires:
                synchronises(w)
            got = read(w, where(v), m, dtype, 1, place, track)
            if m is True:
                v[d][...] = got
            else:
                np.copyto(v[d], got.astype(final), where=m)

        return one

    def many(w: Any, m: Any) -> None:
        v = w.v
        if acquires:
            synchronises(w)
        got = read(w, where(v), m, dtype, n, place, track)
        for i, (d, _) in enumerate(wide):
            put(v[d], got[:, i], m)

    return many


def _parameter(pc: int, where: Any, dtype: Any, wide: list[tuple[int, Any]]) -> Handler:
    """A load of a place among the parameters: what one warp of a launch read, all of them read."""

    def run(w: Any, m: Any) -> None:
        v, known = w.v, w.machine.parameters
        if pc not in known:
            got = read(w, where(v), True, dtype, len(wide), "global", False)
            columns = got.reshape(32, -1).T
            known[pc] = [c.astype(f) for c, (_, f) in zip(columns, wide, strict=True)]
        for value, (d, _) in zip(known[pc], wide, strict=True):
            if m is True:
                v[d][...] = value
            else:
                np.copyto(v[d], value, where=m)

    return run


@op("st")
def st(ins: Instr, k: Decoder) -> Handler:
    space, n, kind = _modifiers(ins)
    items = k.items(ins.args[1])
    if len(items) != n:
        raise unmodelled(ins, "vector length")
    sources = [k.src(x, kind) for x in items]
    where = address(k, ins.args[0], space)
    dtype, place = DTYPES[kind], space_of(space)
    if n == 1:
        s = sources[0]

        def one(w: Any, m: Any) -> None:
            v = w.v
            write(w, where(v), m, v[s], 1, place)

        return one

    def many(w: Any, m: Any) -> None:
        v = w.v
        data = np.empty((32, n), dtype)
        for i, s in enumerate(sources):
            data[:, i] = v[s]
        write(w, where(v), m, data, n, place)

    return many


@op("createpolicy")
def createpolicy(ins: Instr, k: Decoder) -> Handler:
    d = k.dst(ins.args[0], "u64")

    def run(w: Any, m: Any) -> None:
        put(w.v[d], np.uint64(0), m)

    return run

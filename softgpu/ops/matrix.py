"""ldmatrix, stmatrix, movmatrix: PTX ISA 9.7.14.5.15-17 (8x8 matrices of 16-bit elements).

stmatrix also stores 16x8 matrices of bytes, transposed (sm_100a).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import Decoder, Handler, Mods, op, unmodelled
from ..ptx import Instr
from .common import whole_warp
from .load_store import address


def _modifiers(ins: Instr, byte: bool = False) -> tuple[int, bool]:
    mods = Mods(ins)
    if mods.type() != ("b8" if byte else "b16"):
        raise unmodelled(ins, "element type")
    mods.flag("sync")
    mods.flag("aligned")
    if not mods.flag("m16n8" if byte else "m8n8"):
        raise unmodelled(ins, "shape")
    count = mods.take("x1", "x2", "x4")
    trans = mods.flag("trans")
    if mods.take("shared", "shared::cta") is None:
        raise unmodelled(ins, "state space")
    mods.done()
    return int((count or "x1")[1]), trans


@op("ldmatrix")
def ldmatrix(ins: Instr, k: Decoder) -> Handler:
    """Lane l names row l % 8 of matrix l / 8; afterwards it holds two elements of each matrix."""
    n, trans = _modifiers(ins)
    d = [k.dst(x, "u32") for x in k.items(ins.args[0])]
    where = address(k, ins.args[1], "shared")
    rows = 8 * n

    def run(w: Any, m: Any) -> Any:
        if m is not True:
            return whole_warp(w, m, "ldmatrix")
        v = w.v
        a = where(v)[:rows]
        places = w.shared.places(a, 16, w.block.rank, "ldmatrix")
        data = w.shared.view(np.uint16, 8)[places].reshape(n, 8, 8)
        if w.hazard is not None:
            w.hazard.read_rows(a)
        if trans:
            data = data.transpose(0, 2, 1)
        words = np.ascontiguousarray(data).view(np.uint32).reshape(n, 32)
        for i in range(n):
            v[d[i]][...] = words[i]
        return None

    return run


@op("stmatrix")
def stmatrix(ins: Instr, k: Decoder) -> Handler:
    """Lane l names row l % 8 of matrix l / 8.  Of bytes, a matrix is 8 rows of 16 once transposed:

    byte b of lane l's register goes to row 2 (l % 4) + b % 2, place l / 4 + 8 (b / 2).
    """
    byte = "m16n8" in ins.parts
    n, trans = _modifiers(ins, byte)
    if byte and not (trans and k.architecture >= 100):
        raise unmodelled(ins, "m16n8 without .trans, or before sm_100a")
    s = [k.src(x, "u32") for x in k.items(ins.args[1])]
    where = address(k, ins.args[0], "shared")
    rows = 8 * n

    def run(w: Any, m: Any) -> Any:
        if m is not True:
            return whole_warp(w, m, "stmatrix")
        v = w.v
        a = where(v)[:rows]
        places = w.shared.places(a, 16, w.block.rank, "stmatrix")
        held = np.empty((n, 32), np.uint32)
        for i, index in enumerate(s):
            held[i] = v[index]
        if byte:  # (matrix, place % 8, row / 2, place / 8, row % 2)
            parts = held.view(np.uint8).reshape(n, 8, 4, 2, 2).transpose(0, 2, 4, 3, 1)
            held = np.ascontiguousarray(parts)
        data = held.view(np.uint16).reshape(n, 8, 8)
        if trans and not byte:
            data = data.transpose(0, 2, 1)
        w.shared.view(np.uint16, 8)[places] = data.reshape(rows, 8)
        if w.hazard is not None:
            w.hazard.write_rows(a)
        w.machine.version += 1
        return None

    return run


@op("movmatrix")
def movmatrix(ins: Instr, k: Decoder) -> Handler:
    if "trans" not in ins.parts:
        raise unmodelled(ins)
    d, a = k.dst(ins.args[0], "u32"), k.src(ins.args[1], "u32")

    def run(w: Any, m: Any) -> Any:
        if m is not True:
            return whole_warp(w, m, "movmatrix")
        data = np.ascontiguousarray(w.v[a]).view(np.uint16).reshape(8, 8).T
        w.v[d][...] = np.ascontiguousarray(data).view(np.uint32).reshape(32)
        return None

    return run

"""ldmatrix, stmatrix, movmatrix: PTX ISA 9.7.14.5.15-17 (8x8 matrices of 16-bit elements)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import Decoder, Handler, Mods, op, unmodelled
from ..ptx import Instr
from .common import whole_warp
from .load_store import address


def _modifiers(ins: Instr) -> tuple[int, bool]:
    mods = Mods(ins)
    if mods.type() != "b16":
        raise unmodelled(ins, "element type")
    mods.flag("sync")
    mods.flag("aligned")
    if not mods.flag("m8n8"):
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
        w.shared.check(a, 16, w.block.rank, "ldmatrix", 16)
        data = w.shared.view(np.uint16, 8)[a >> np.uint32(4)].reshape(n, 8, 8)
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
    n, trans = _modifiers(ins)
    s = [k.src(x, "u32") for x in k.items(ins.args[1])]
    where = address(k, ins.args[0], "shared")
    rows = 8 * n

    def run(w: Any, m: Any) -> Any:
        if m is not True:
            return whole_warp(w, m, "stmatrix")
        v = w.v
        a = where(v)[:rows]
        w.shared.check(a, 16, w.block.rank, "stmatrix", 16)
        data = np.stack([v[i] for i in s]).view(np.uint16).reshape(n, 8, 8)
        if trans:
            data = data.transpose(0, 2, 1)
        w.shared.view(np.uint16, 8)[a >> np.uint32(4)] = data.reshape(rows, 8)
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

"""atom, red: PTX ISA 9.7.13.5-6.  Lanes are performed in ascending order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import floats
from ..decode import DTYPES, Decoder, Handler, Mods, op, unmodelled
from ..ptx import Instr
from .common import put
from .load_store import HINTS, SPACES, address, read, space_of, synchronises, write

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda o, b: o + b,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda o, b: b,
    "inc": lambda o, b: np.where(o >= b, o.dtype.type(0), o + o.dtype.type(1)),
    "dec": lambda o, b: np.where((o == 0) | (o > b), b, o - o.dtype.type(1)),
}


def _packed_add(half: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def add(o: Any, b: Any) -> Any:
        x, y = np.ascontiguousarray(o).view(np.uint16), np.ascontiguousarray(b).view(np.uint16)
        return half(x, y).view(np.uint32)

    return add


def _bf16_add(x: Any, y: Any) -> Any:
    return floats.to_bf16(floats.bf16_to_f32(x) + floats.bf16_to_f32(y))


def _f16_add(x: Any, y: Any) -> Any:
    return (x.view(np.float16) + y.view(np.float16)).view(np.uint16)


def _add_flushed(o: Any, b: Any) -> Any:
    """f32 in global memory: subnormal inputs and results become zero (PTX ISA, atom)."""
    return floats.flush(floats.flush(o) + floats.flush(b))


@op("atom", "red")
def atom(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    if "async" in mods.left:
        raise unmodelled(ins)
    kind = mods.type()
    space = mods.take(*SPACES)
    name = mods.take("cas", *_OPERATIONS)
    vector = mods.take("v2", "v4")
    mods.flag("noftz")
    while mods.take(*HINTS, "acq_rel"):
        pass
    mods.done()
    if name is None or vector:
        raise unmodelled(ins)
    args = list(ins.args)
    d = k.dst(args.pop(0), kind) if ins.parts[0] == "atom" else -1
    where = address(k, args[0], space)
    b = k.src(args[1], kind)
    c = k.src(args[2], kind) if name == "cas" else -1
    dtype, place = DTYPES[kind], space_of(space)
    function = _OPERATIONS.get(name)
    if name == "add" and kind in ("bf16x2", "f16x2"):
        function = _packed_add(_bf16_add if kind[0] == "b" else _f16_add)
    elif kind in ("bf16", "f16x2", "bf16x2"):
        raise unmodelled(ins)
    elif name == "add" and kind == "f32" and place == "global":
        function = _add_flushed

    def run(w: Any, m: Any) -> None:
        v = w.v
        a = where(v)
        if place in ("global", None):
            synchronises(w)
        out = np.zeros(32, dtype)
        one = np.zeros(32, bool)
        for lane in np.nonzero(w.lanes(m))[0]:
            one[:] = False
            one[lane] = True
            old = read(w, a, one, dtype, 1, place, track=False)
            if function is None:
                new = np.where(old == v[b], v[c], old)
            else:
                new = function(old, v[b])
            write(w, a, one, np.asarray(new).astype(dtype), 1, place, track=False)
            out[lane] = old[lane]
        if d >= 0:
            put(v[d], out, m)

    return run

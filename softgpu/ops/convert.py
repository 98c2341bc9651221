"""cvt: PTX ISA 9.7.9.21."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import floats
from ..decode import DTYPES, Decoder, Handler, Mods, op, unmodelled
from ..ptx import Instr
from .integer_alu import write

_PACKED = ("e4m3x2", "e5m2x2", "bf16x2", "f16x2")
_ROUND_TO_INT = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@op("cvt")
def cvt(ins: Instr, k: Decoder) -> Handler:
    parts = ins.parts
    target, source = parts[-2], parts[-1]
    if target in _PACKED or source in _PACKED:
        return _packed(ins, k, target, source)
    mods = Mods(ins)
    mods.left = mods.left[:-2]
    rounding = mods.take("rn", "rz", "rm", "rp", "rna", *_ROUND_TO_INT)
    ftz, sat = mods.flag("ftz"), mods.take("sat", "satfinite")
    relu = mods.flag("relu")
    mods.done()
    if target not in DTYPES or source not in DTYPES:
        raise unmodelled(ins)
    # cvt reads and writes registers at least as wide as its types; results are extended
    a = k.src(ins.args[1], source)
    d, wide = k.dst_wide(ins.args[0], target)
    compute = _scalar(ins, target, source, rounding, ftz, sat, relu)
    return write(d, lambda v: compute(v[a]).astype(wide))


def _is_float(kind: str) -> bool:
    return kind in ("f16", "bf16", "f32", "f64")


def _scalar(
    ins: Instr, target: str, source: str, rounding: str | None, ftz: bool, sat: str | None,
    relu: bool,
) -> Any:  # fmt: skip
    """A function of the source values (in their own dtype) to the target dtype."""
    dtype = DTYPES[target]
    if not _is_float(source) and not _is_float(target):
        if sat:
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            return lambda x: _clip_int(x, low, high).astype(dtype)
        return lambda x: x.astype(dtype)
    if _is_float(source) and not _is_float(target):
        to_int = _ROUND_TO_INT.get(rounding or "")
        if to_int is None:
            raise unmodelled(ins, "rounding")
        wide = source == "f64" or np.dtype(dtype).itemsize == 8
        return lambda x: _float_to_int(_read(x, source, ftz), to_int, dtype, wide)
    if not _is_float(source):
        if sat or relu or (target == "f64" and rounding not in ("rn", None)):
            raise unmodelled(ins, "modifier of an integer to floating-point conversion")
        if target == "f32":
            return lambda x: _int_to_f32(x, rounding or "rn")
        if target == "f64":
            return lambda x: x.astype(np.float64)
        if target == "f16" and rounding == "rn":
            return lambda x: x.astype(np.float64).astype(np.float16)
        raise unmodelled(ins)
    return _float_to_float(ins, target, source, rounding, ftz, sat, relu)


def _clip_int(x: Any, low: int, high: int) -> Any:
    info = np.iinfo(x.dtype)
    return np.clip(x, max(low, info.min), min(high, info.max))


def _read(x: Any, kind: str, ftz: bool) -> Any:
    if kind == "bf16":
        return floats.bf16_to_f32(x)
    if kind == "f32" and ftz:
        return floats.flush(x)
    return x


def _float_to_int(x: Any, to_int: Any, dtype: Any, wide: bool) -> Any:
    """Clamps to the range; NaN gives 0, or the top bit alone where either side has 64 bits."""
    info = np.iinfo(dtype)
    r = to_int(x.astype(np.float64))
    nan = np.isnan(r)
    low, high = r <= float(info.min), r >= float(info.max)
    out = np.where(nan | low | high, 0, r).astype(dtype)
    out = np.where(low, dtype(info.min), np.where(high, dtype(info.max), out))
    if not wide:
        return np.where(nan, dtype(0), out)
    top = 1 << (8 * np.dtype(dtype).itemsize - 1)
    return np.where(nan, np.array([top], np.uint64).astype(dtype), out)


def _int_to_f32(x: Any, rounding: str) -> Any:
    if rounding == "rn":
        return x.astype(np.float32)
    r = x.astype(np.float32)
    if x.dtype.itemsize <= 4:
        return floats.directed(x.astype(np.float64), rounding)
    exact = [int(i) for i in x]
    down = {"rz": lambda e, g: abs(g) > abs(e), "rm": lambda e, g: g > e}.get(rounding)
    out = r.copy()
    for i, e in enumerate(exact):
        g = int(r[i])
        if down is not None and down(e, g):
            out[i] = np.nextafter(r[i], np.float32(0) if rounding == "rz" else np.float32(-np.inf))
        elif rounding == "rp" and g < e:
            out[i] = np.nextafter(r[i], np.float32(np.inf))
    return out


def _float_to_float(
    ins: Instr, target: str, source: str, rounding: str | None, ftz: bool, sat: str | None,
    relu: bool,
) -> Any:  # fmt: skip
    to_int = _ROUND_TO_INT.get(rounding or "")

    def prepare(x: Any) -> Any:
        y = _read(x, source, ftz)
        if to_int is not None:
            y = to_int(y)
        if sat == "sat":
            y = np.where(np.isnan(y), y.dtype.type(0), np.clip(y, 0, 1))
        if relu:
            y = np.where(y < 0, y.dtype.type(0), y)
        return y

    if target == "f32":
        if source == "f64" and rounding not in ("rn", None):
            return lambda x: floats.directed(prepare(x), rounding or "rz")
        return lambda x: (
            floats.flush(prepare(x).astype(np.float32)) if ftz else (prepare(x).astype(np.float32))
        )
    if target == "f64":
        return lambda x: prepare(x).astype(np.float64)
    if source not in ("f32", "f16", "bf16") or rounding not in ("rn", "rz", None, *_ROUND_TO_INT):
        raise unmodelled(ins)
    mode = rounding if rounding in ("rn", "rz") else "rn"
    if target == "bf16":
        return lambda x: floats.to_bf16(prepare(x).astype(np.float32), mode)
    limit = np.float32(65504)

    def to_f16(x: Any) -> Any:
        y = prepare(x).astype(np.float32)
        if sat == "satfinite":
            y = np.where(np.isnan(y), y, np.clip(y, -limit, limit))
        return floats.to_f16(y, mode).view(np.float16)

    return to_f16


def _packed(ins: Instr, k: Decoder, target: str, source: str) -> Handler:
    """Two elements at once; the first source operand is the upper half."""
    mods = Mods(ins)
    mods.left = mods.left[:-2]
    rounding = mods.take("rn", "rz") or "rn"
    satfinite, relu = mods.flag("satfinite"), mods.flag("relu")
    mods.flag("ftz")
    mods.done()
    encoders: dict[str, Any] = {
        "e4m3x2": floats.to_e4m3,
        "e5m2x2": floats.to_e5m2,
        "bf16x2": lambda x: floats.to_bf16(x, rounding),
        "f16x2": lambda x: floats.to_f16(x, rounding),
    }
    if source == "f32":
        encode = encoders[target]
        half = np.uint8 if target[0] == "e" else np.uint16
        d = [k.dst(ins.args[0], half, p) for p in (0, 1)]
        high, low = k.src(ins.args[1], "f32"), k.src(ins.args[2], "f32")
        limit = np.float32(65504 if target == "f16x2" else 3.3895314e38)

        def prepare(x: Any) -> Any:
            if relu:
                x = np.where(x < 0, np.float32(0), x)
            if satfinite and target in ("f16x2", "bf16x2"):
                x = np.where(np.isnan(x), x, np.clip(x, -limit, limit))
            return x

        def run(w: Any, m: Any) -> None:
            v = w.v
            both = encode(prepare(np.concatenate([v[low], v[high]])))
            np.copyto(v[d[0]], both[:32], where=m)
            np.copyto(v[d[1]], both[32:], where=m)

        return run
    if source in ("e4m3x2", "e5m2x2") and target == "f16x2":
        table = (floats.E4M3 if source == "e4m3x2" else floats.E5M2).astype(np.float16)
        bits = np.where(np.isnan(table), np.uint16(0x7FFF), table.view(np.uint16))
        d = [k.dst(ins.args[0], np.uint16, p) for p in (0, 1)]
        s = [k.src(ins.args[1], np.uint8, p) for p in (0, 1)]

        def widen(w: Any, m: Any) -> None:
            v = w.v
            values = [bits[v[i]] for i in s]
            for i, value in zip(d, values, strict=True):
                if relu:
                    value = np.where(value & 0x8000, np.uint16(0), value)
                np.copyto(v[i], value, where=m)

        return widen
    if source == "f16x2" and target[0] == "e":
        encode = encoders[target]
        d = [k.dst(ins.args[0], np.uint8, p) for p in (0, 1)]
        s = [k.src(ins.args[1], np.float16, p) for p in (0, 1)]

        def narrow(w: Any, m: Any) -> None:
            v = w.v
            values = [encode(np.where(relu & (v[i] < 0), 0, v[i]).astype(np.float32)) for i in s]
            for i, value in zip(d, values, strict=True):
                np.copyto(v[i], value, where=m)

        return narrow
    raise unmodelled(ins)

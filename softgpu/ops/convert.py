"""cvt: PTX ISA 9.7.9.21."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import floats
from ..decode import DTYPES, Decoder, Handler, Mods, op, unmodelled
from ..ptx import Instr
from .common import put, write

_PACKED = ("e4m3x2", "e5m2x2", "bf16x2", "f16x2", "ue8m0x2")
_ROUND_TO_INT = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@dataclass(frozen=True)
class _Cvt:
    """A conversion of one value.

    Attributes:
        target, source: PTX types; the functions below take arrays of the source's dtype.
        rounding: modifier, or None.
        saturate: ``sat``, ``satfinite`` or None.
    """

    ins: Instr
    target: str
    source: str
    rounding: str | None
    ftz: bool
    saturate: str | None
    relu: bool

    @property
    def to_int(self) -> Any:
        """The rounding to an integral value, or None."""
        return _ROUND_TO_INT.get(self.rounding or "")

    def read(self, x: Any) -> Any:
        """Source values in a dtype that numpy computes with."""
        if self.source == "bf16":
            return floats.bf16_to_f32(x)
        return floats.flush(x) if self.source == "f32" and self.ftz else x


@op("cvt")
def cvt(ins: Instr, k: Decoder) -> Handler:
    target, source = ins.parts[-2], ins.parts[-1]
    if target in _PACKED or source in _PACKED:
        return _packed(ins, k, target, source)
    mods = Mods(ins)
    mods.left = mods.left[:-2]
    how = _Cvt(
        ins, target, source,
        rounding=mods.take("rn", "rz", "rm", "rp", "rna", *_ROUND_TO_INT),
        ftz=mods.flag("ftz"),
        saturate=mods.take("sat", "satfinite"),
        relu=mods.flag("relu"),
    )  # fmt: skip
    mods.done()
    if target not in DTYPES or source not in DTYPES:
        raise unmodelled(ins)
    # cvt reads and writes registers at least as wide as its types; results are extended
    a = k.src(ins.args[1], source)
    d, wide = k.dst_wide(ins.args[0], target)
    compute = _conversion(how)
    return write(d, lambda v: compute(v[a]).astype(wide))


def _is_float(kind: str) -> bool:
    return kind in ("f16", "bf16", "f32", "f64")


def _conversion(how: _Cvt) -> Any:
    """A function of the source values to the target's dtype."""
    dtype = DTYPES[how.target]
    if _is_float(how.source):
        if _is_float(how.target):
            return _float_to_float(how)
        if how.to_int is None:
            raise unmodelled(how.ins, "rounding")
        wide = how.source == "f64" or np.dtype(dtype).itemsize == 8
        return lambda x: _float_to_int(how.read(x), how.to_int, dtype, wide)
    if _is_float(how.target):
        return _int_to_float(how)
    if how.saturate:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return lambda x: _clip_int(x, low, high).astype(dtype)
    return lambda x: x.astype(dtype)


def _int_to_float(how: _Cvt) -> Any:
    target, rounding = how.target, how.rounding
    if how.saturate or how.relu or (target == "f64" and rounding not in ("rn", None)):
        raise unmodelled(how.ins, "modifier of an integer to floating-point conversion")
    if target == "f32":
        return lambda x: _int_to_f32(x, rounding or "rn")
    if target == "f64":
        return lambda x: x.astype(np.float64)
    if target == "f16" and rounding == "rn":
        return lambda x: x.astype(np.float64).astype(np.float16)
    raise unmodelled(how.ins)


def _clip_int(x: Any, low: int, high: int) -> Any:
    info = np.iinfo(x.dtype)
    return np.clip(x, max(low, info.min), min(high, info.max))


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


def _float_to_float(how: _Cvt) -> Any:
    target, rounding = how.target, how.rounding

    def prepare(x: Any) -> Any:
        y = how.read(x)
        if how.to_int is not None:
            y = how.to_int(y)
        if how.saturate == "sat":
            y = np.where(np.isnan(y), y.dtype.type(0), np.clip(y, 0, 1))
        if how.relu:
            y = np.where(y < 0, y.dtype.type(0), y)
        return y

    if target == "f32":
        if how.source == "f64" and rounding not in ("rn", None):
            return lambda x: floats.directed(prepare(x), rounding or "rz")
        if how.ftz:
            return lambda x: floats.flush(prepare(x).astype(np.float32))
        return lambda x: prepare(x).astype(np.float32)
    if target == "f64":
        return lambda x: prepare(x).astype(np.float64)
    if how.source == "f64" or rounding not in ("rn", "rz", None, *_ROUND_TO_INT):
        raise unmodelled(how.ins)
    mode = rounding if rounding in ("rn", "rz") else "rn"
    if target == "bf16":
        return lambda x: floats.to_bf16(prepare(x).astype(np.float32), mode)

    def to_f16(x: Any) -> Any:
        y = prepare(x).astype(np.float32)
        if how.saturate == "satfinite":
            y = floats.clamp(y, floats.LARGEST_F16)
        return floats.to_f16(y, mode).view(np.float16)

    return to_f16


def _packed(ins: Instr, k: Decoder, target: str, source: str) -> Handler:
    """Two elements at once; the first source operand is the upper half."""
    mods = Mods(ins)
    mods.left = mods.left[:-2]
    if target == "ue8m0x2":
        return _to_e8m0(ins, k, mods, source)
    if source == "ue8m0x2":
        return _from_e8m0(ins, k, mods, target)
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
        limit = {"f16x2": floats.LARGEST_F16, "bf16x2": floats.LARGEST_BF16}.get(target)
        return _pack_f32(ins, k, target, encoders[target], relu, limit if satfinite else None)
    if source in ("e4m3x2", "e5m2x2") and target == "f16x2":
        return _widen_fp8(ins, k, floats.E4M3 if source == "e4m3x2" else floats.E5M2, relu)
    if source == "f16x2" and target[0] == "e":
        return _narrow_f16(ins, k, encoders[target], relu)
    raise unmodelled(ins)


def _pack_f32(
    ins: Instr, k: Decoder, target: str, encode: Any, relu: bool, limit: np.float32 | None
) -> Handler:
    """Two f32 to one pair; ``limit``: the largest magnitude, where the encoder has none itself."""
    half = np.uint8 if target[0] == "e" else np.uint16
    d = [k.dst(ins.args[0], half, p) for p in (0, 1)]
    high, low = k.src(ins.args[1], "f32"), k.src(ins.args[2], "f32")

    def run(w: Any, m: Any) -> None:
        v = w.v
        x = np.concatenate([v[low], v[high]])
        if relu:
            x = np.where(x < 0, np.float32(0), x)
        both = encode(x if limit is None else floats.clamp(x, limit))
        put(v[d[0]], both[:32], m)
        put(v[d[1]], both[32:], m)

    return run


def _widen_fp8(ins: Instr, k: Decoder, values: Any, relu: bool) -> Handler:
    """Two 8-bit elements to f16; ``values``: by code."""
    table = values.astype(np.float16)
    bits = np.where(np.isnan(table), np.uint16(0x7FFF), table.view(np.uint16))
    d = [k.dst(ins.args[0], np.uint16, p) for p in (0, 1)]
    s = [k.src(ins.args[1], np.uint8, p) for p in (0, 1)]

    def run(w: Any, m: Any) -> None:
        v = w.v
        wide = [bits[v[i]] for i in s]
        for i, value in zip(d, wide, strict=True):
            if relu:
                value = np.where(value & 0x8000, np.uint16(0), value)
            put(v[i], value, m)

    return run


def _narrow_f16(ins: Instr, k: Decoder, encode: Any, relu: bool) -> Handler:
    """Two f16 to 8-bit elements."""
    d = [k.dst(ins.args[0], np.uint8, p) for p in (0, 1)]
    s = [k.src(ins.args[1], np.float16, p) for p in (0, 1)]

    def run(w: Any, m: Any) -> None:
        v = w.v
        codes = [encode(np.where(relu & (v[i] < 0), 0, v[i]).astype(np.float32)) for i in s]
        for i, value in zip(d, codes, strict=True):
            put(v[i], value, m)

    return run


def _to_e8m0(ins: Instr, k: Decoder, mods: Mods, source: str) -> Handler:
    """Two f32, or a pair of bf16, to exponents: powers of two without a sign, code - 127.

    .rz takes the exponent, .rp that of the next power of two; the sign does not matter, zero is
    2^-127.  What is too large, and NaN, is NaN; with .satfinite only NaN is.
    """
    rounding, satfinite = mods.take("rz", "rp"), mods.flag("satfinite")
    mods.done()
    if rounding is None or source not in ("f32", "bf16x2"):
        raise unmodelled(ins)
    d = [k.dst(ins.args[0], np.uint8, p) for p in (0, 1)]
    if source == "f32":
        s = [k.src(ins.args[2 - p], np.uint32) for p in (0, 1)]
    else:
        s = [k.src(ins.args[1], np.uint16, p) for p in (0, 1)]
    shift = np.uint32(0 if source == "f32" else 16)

    def run(w: Any, m: Any) -> None:
        v = w.v
        codes = [floats.to_e8m0(v[i].astype(np.uint32) << shift, rounding, satfinite) for i in s]
        for i, value in zip(d, codes, strict=True):
            put(v[i], value, m)

    return run


def _from_e8m0(ins: Instr, k: Decoder, mods: Mods, target: str) -> Handler:
    """Two exponents to bf16, exactly; 0xff is NaN."""
    if mods.take("rn") is None or target != "bf16x2":
        raise unmodelled(ins)
    mods.done()
    d = [k.dst(ins.args[0], np.uint16, p) for p in (0, 1)]
    s = [k.src(ins.args[1], np.uint8, p) for p in (0, 1)]

    def run(w: Any, m: Any) -> None:
        v = w.v
        both = [floats.E8M0_AS_BF16[v[i]] for i in s]
        for i, value in zip(d, both, strict=True):
            put(v[i], value, m)

    return run

"""Integer, logic and shift instructions: PTX ISA 9.7.1, 9.7.2, 9.7.8."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import DTYPES, Decoder, Handler, Mods, op, unmodelled
from ..ptx import Imm, Instr, Not
from . import float_alu
from .common import binary, put, unary, write

INTEGER = ("b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64")
_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def _is_float(ins: Instr) -> bool:
    return ins.parts[-1] in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")


@op("add", "sub", "mul", "max", "min", "mad", "div", "neg", "abs", "rem")
def arithmetic(ins: Instr, k: Decoder) -> Handler:
    if _is_float(ins):
        return float_alu.arithmetic(ins, k)
    name = ins.parts[0]
    if ins.parts[-1] in ("u16x2", "s16x2"):
        return _packed(ins, k)
    if name == "mul":
        return _mul(ins, k)
    if name == "mad":
        return _mad(ins, k)
    mods = Mods(ins)
    kind = mods.type()
    relu = mods.flag("relu")
    sat = mods.flag("sat")
    mods.done()
    if kind not in INTEGER or sat:
        raise unmodelled(ins)
    d, a = k.dst(ins.args[0], kind), k.src(ins.args[1], kind)
    if name == "neg":
        return write(d, lambda v: 0 - v[a])
    if name == "abs":
        return write(d, lambda v: np.abs(v[a]))
    b = k.src(ins.args[2], kind)
    if name in ("div", "rem"):
        return _divide(name, DTYPES[kind], d, a, b)
    function = {
        "add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum,
    }[name]  # fmt: skip
    if relu:
        return write(d, lambda v: np.maximum(function(v[a], v[b]), 0))
    return binary(function, d, a, b)


def _packed(ins: Instr, k: Decoder) -> Handler:
    """add, max, min on the two halves of a 32-bit register."""
    mods = Mods(ins)
    kind = mods.left.pop()[:3]
    relu = mods.flag("relu")
    mods.done()
    functions = {"add": np.add, "max": np.maximum, "min": np.minimum}
    function = functions.get(ins.parts[0])
    if function is None:
        raise unmodelled(ins)
    halves = [
        (k.dst(ins.args[0], kind, p), k.src(ins.args[1], kind, p), k.src(ins.args[2], kind, p))
        for p in (0, 1)
    ]

    def run(w: Any, m: Any) -> None:
        v = w.v
        for d, a, b in halves:
            r = function(v[a], v[b])
            put(v[d], np.maximum(r, 0) if relu else r, m)

    return run


def _divide(name: str, dtype: Any, d: int, a: int, b: int) -> Handler:
    """Truncating division; division by zero gives all ones, its remainder the dividend."""
    signed = np.dtype(dtype).kind == "i"
    unsigned = np.dtype(dtype).str.replace("i", "u")

    def compute(v: Any) -> Any:
        x, y = v[a], v[b]
        zero = y == 0
        safe = np.where(zero, np.ones_like(y), y)
        if signed:
            # magnitudes, so that the most negative number behaves
            mx, my = np.abs(x).view(unsigned), np.abs(safe).view(unsigned)
            quotient = (mx // my).view(dtype)
            q = np.where((x < 0) != (safe < 0), 0 - quotient, quotient)
        else:
            q = x // safe
        if name == "div":
            return np.where(zero, np.array(-1).astype(dtype), q)
        return np.where(zero, x, x - q * safe)

    return write(d, compute)


def _mul(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    kind = mods.type()
    mode = mods.take("lo", "hi", "wide")
    mods.done()
    if mode == "wide":
        wide = DTYPES[_WIDE[kind]]
        d = k.dst(ins.args[0], _WIDE[kind])
        a, b = k.src(ins.args[1], kind), k.src(ins.args[2], kind)
        return write(d, lambda v: v[a].astype(wide) * v[b])
    d, a, b = k.dst(ins.args[0], kind), k.src(ins.args[1], kind), k.src(ins.args[2], kind)
    if mode == "hi":
        return write(d, lambda v: multiply_high(v[a], v[b]))
    if mode != "lo":
        raise unmodelled(ins)
    return binary(np.multiply, d, a, b)


def multiply_high(x: Any, y: Any) -> Any:
    """Upper half of the full product."""
    size = x.dtype.itemsize
    if size < 8:
        wide = np.dtype(f"{x.dtype.kind}{2 * size}")
        return ((x.astype(wide) * y) >> wide.type(8 * size)).astype(x.dtype)
    mask = (1 << 64) - 1
    out = [((int(p) * int(q)) >> 64) & mask for p, q in zip(x, y, strict=True)]
    return np.array(out, np.uint64).view(x.dtype)


def _mad(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    kind = mods.type()
    mode = mods.take("lo", "hi", "wide")
    mods.done()
    if mode == "wide":
        wide = DTYPES[_WIDE[kind]]
        d, c = k.dst(ins.args[0], _WIDE[kind]), k.src(ins.args[3], _WIDE[kind])
        a, b = k.src(ins.args[1], kind), k.src(ins.args[2], kind)
        return write(d, lambda v: v[a].astype(wide) * v[b] + v[c])
    d, a, b, c = (k.dst(ins.args[0], kind), *(k.src(x, kind) for x in ins.args[1:4]))
    if mode == "hi":
        return write(d, lambda v: multiply_high(v[a], v[b]) + v[c])
    if mode != "lo":
        raise unmodelled(ins)
    return write(d, lambda v: v[a] * v[b] + v[c])


@op("and", "or", "xor")
def logic(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    kind = mods.type()
    mods.done()
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[ins.parts[0]]
    d = k.dst(ins.args[0], kind)
    if kind == "pred" and any(isinstance(x, Not) for x in ins.args[1:]):
        (a, na), (b, nb) = k.pred(ins.args[1]), k.pred(ins.args[2])
        return write(d, lambda v: function(v[a] ^ na, v[b] ^ nb))
    return binary(function, d, k.src(ins.args[1], kind), k.src(ins.args[2], kind))


@op("not")
def invert(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    kind = mods.type()
    mods.done()
    d, a = k.dst(ins.args[0], kind), k.src(ins.args[1], kind)
    return unary(np.invert, d, a)


@op("cnot")
def cnot(ins: Instr, k: Decoder) -> Handler:
    kind = ins.parts[-1]
    d, a = k.dst(ins.args[0], kind), k.src(ins.args[1], kind)
    return write(d, lambda v: v[a] == 0)


@op("shl", "shr")
def shift(ins: Instr, k: Decoder) -> Handler:
    """Shift counts above the width behave as the width (shl 0, shr 0 or the sign)."""
    mods = Mods(ins)
    kind = mods.type()
    mods.done()
    d, a, by = k.dst(ins.args[0], kind), k.src(ins.args[1], kind), ins.args[2]
    dtype = np.dtype(DTYPES[kind])
    bits = 8 * dtype.itemsize
    left = ins.parts[0] == "shl"
    function = np.left_shift if left else np.right_shift
    top = bits - 1 if dtype.kind == "i" and not left else bits
    # numpy itself defines over-wide shifts as PTX does once the count fits the type
    if isinstance(by, Imm):
        return binary(function, d, a, k.src(Imm(min(by.bits & 0xFFFFFFFF, top)), kind))
    b = k.src(by, "u32")
    return write(d, lambda v: function(v[a], np.minimum(v[b], np.uint32(top)).astype(dtype)))


@op("shf")
def funnel(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    mods.type()
    direction, mode = mods.take("l", "r"), mods.take("clamp", "wrap")
    mods.done()
    d, a, b, c = (k.dst(ins.args[0], "u32"), *(k.src(x, "u32") for x in ins.args[1:4]))

    def compute(v: Any) -> Any:
        n = v[c] & np.uint32(31) if mode == "wrap" else np.minimum(v[c], np.uint32(32))
        both = (v[b].astype(np.uint64) << np.uint64(32)) | v[a]
        n64 = n.astype(np.uint64)
        if direction == "l":
            return ((both << n64) >> np.uint64(32)).astype(np.uint32)
        return (both >> n64).astype(np.uint32)

    return write(d, compute)


@op("lop3")
def lop3(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    mods.type()
    mods.done()
    d, a, b, c = (k.dst(ins.args[0], "u32"), *(k.src(x, "u32") for x in ins.args[1:4]))
    table = k.imm(ins.args[4])

    def compute(v: Any) -> Any:
        x, y, z = v[a], v[b], v[c]
        out = np.zeros(32, np.uint32)
        for i in range(8):
            if table >> i & 1:
                out |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        return out

    return write(d, compute)


@op("bfe")
def bfe(ins: Instr, k: Decoder) -> Handler:
    kind = ins.parts[1]
    dtype = DTYPES[kind]
    bits = 8 * np.dtype(dtype).itemsize
    d, a = k.dst(ins.args[0], kind), k.src(ins.args[1], kind)
    b, c = k.src(ins.args[2], "u32"), k.src(ins.args[3], "u32")
    mask = (1 << bits) - 1

    def one(x: int, pos: int, length: int) -> int:
        pos, length = pos & 255, length & 255
        signed = kind[0] == "s"
        sign = (x >> min(pos + length - 1, bits - 1)) & 1 if signed and length else 0
        x &= mask
        field = (x >> pos) & ((1 << length) - 1) if pos < bits else 0
        have = max(0, min(length, bits - pos))
        return (field | (mask & ~((1 << have) - 1) if sign else 0)) & mask

    def compute(v: Any) -> Any:
        rows = zip(v[a], v[b], v[c], strict=True)
        out = [one(int(x), int(p), int(n)) for x, p, n in rows]
        return np.array(out, f"u{bits // 8}").view(dtype)

    return write(d, compute)


@op("bfi")
def bfi(ins: Instr, k: Decoder) -> Handler:
    kind = ins.parts[1]
    dtype = DTYPES[kind]
    bits = 8 * np.dtype(dtype).itemsize
    d, a, b = k.dst(ins.args[0], kind), k.src(ins.args[1], kind), k.src(ins.args[2], kind)
    p, n = k.src(ins.args[3], "u32"), k.src(ins.args[4], "u32")

    def one(x: int, y: int, pos: int, length: int) -> int:
        pos, length = pos & 255, length & 255
        field = ((1 << length) - 1) << pos & ((1 << bits) - 1) if pos < bits else 0
        return (y & ~field) | (x << pos & field)

    def compute(v: Any) -> Any:
        rows = zip(v[a], v[b], v[p], v[n], strict=True)
        return np.array([one(int(x), int(y), int(q), int(z)) for x, y, q, z in rows], dtype)

    return write(d, compute)


@op("popc", "clz", "brev", "bfind")
def bits_of(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    kind = mods.type()
    amount = mods.flag("shiftamt")
    mods.done()
    unsigned = kind.replace("s", "b")
    bits = 8 * np.dtype(DTYPES[kind]).itemsize
    name = ins.parts[0]
    d = k.dst(ins.args[0], unsigned if name == "brev" else "u32")
    a = k.src(ins.args[1], unsigned)

    def one(x: int) -> int:
        if name == "popc":
            return x.bit_count()
        if name == "clz":
            return bits - x.bit_length()
        if name == "brev":
            return int(format(x, f"0{bits}b")[::-1], 2)
        if kind[0] == "s" and x >> (bits - 1):
            x = ~x & ((1 << bits) - 1)
        if x == 0:
            return 0xFFFFFFFF
        return bits - x.bit_length() if amount else x.bit_length() - 1

    out = DTYPES[unsigned] if name == "brev" else np.uint32
    return write(d, lambda v: np.array([one(int(x)) for x in v[a]], out))


@op("dp4a")
def dp4a(ins: Instr, k: Decoder) -> Handler:
    ka, kb = ins.parts[1], ins.parts[2]
    out = "s32" if "s32" in (ka, kb) else "u32"
    d, c = k.dst(ins.args[0], out), k.src(ins.args[3], out)
    a, b = k.src(ins.args[1], ka), k.src(ins.args[2], kb)

    def compute(v: Any) -> Any:
        x = np.ascontiguousarray(v[a]).view(np.int8 if ka == "s32" else np.uint8).reshape(32, 4)
        y = np.ascontiguousarray(v[b]).view(np.int8 if kb == "s32" else np.uint8).reshape(32, 4)
        dot = (x.astype(np.int64) * y).sum(1)
        return (dot + v[c]).astype(np.int64).astype(DTYPES[out])

    return write(d, compute)


@op("sad")
def sad(ins: Instr, k: Decoder) -> Handler:
    kind = ins.parts[1]
    d, a, b, c = (k.dst(ins.args[0], kind), *(k.src(x, kind) for x in ins.args[1:4]))
    return write(d, lambda v: v[c] + np.maximum(v[a], v[b]) - np.minimum(v[a], v[b]))

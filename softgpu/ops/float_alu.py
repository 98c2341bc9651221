"""Floating point: PTX ISA 9.7.3 (f32, f64), 9.7.4 (f16, bf16), 9.7.6-7 (compare, select).

IEEE where PTX defines it.  ``ex2``, ``lg2`` and ``rcp`` ``.approx.ftz.f32`` give the bits of an
H200 (``softgpu.mufu``), or with ``Options.accumulate`` = ``exact`` the correctly rounded result,
like all other ``.approx`` functions: computed in float64 and rounded once, within every bound PTX
gives.  NaN results of f32 arithmetic are 0x7fffffff.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .. import accumulate, floats, mufu
from ..decode import DTYPES, Decoder, Handler, Mods, op, unmodelled
from ..ptx import Instr, Not
from .common import binary, put, write

f32, f64 = np.float32, np.float64


def _extreme(name: str, nan: bool) -> Any:
    """max / min: NaN loses (or wins with .NaN), -0 < +0."""
    pick = {
        ("max", False): np.fmax, ("max", True): np.maximum,
        ("min", False): np.fmin, ("min", True): np.minimum,
    }[(name, nan)]  # fmt: skip

    def compute(x: Any, y: Any) -> Any:
        r = pick(x, y)
        if not r.all():  # a zero: its sign may matter
            zero = (x == 0) & (y == 0)
            sx, sy = np.signbit(x), np.signbit(y)
            negative = sx & sy if name == "max" else sx | sy
            r = np.where(zero, np.where(negative, f32(-0.0), f32(0.0)), r)
        return floats.canonical(r) if r.dtype == f32 else r

    return compute


def arithmetic(ins: Instr, k: Decoder) -> Handler:
    """add sub mul max min mad div neg abs of floating types (dispatched from integer_alu)."""
    kind = ins.parts[-1]
    if kind in ("f16", "bf16") and ins.parts[-2] == "f32":
        return _mixed(ins, k)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return _half(ins, k)
    if kind == "f32x2":
        return _pair(ins, k)
    name = ins.parts[0]
    mods = Mods(ins)
    mods.type()
    ftz, sat = mods.flag("ftz"), mods.flag("sat")
    rounding = mods.take("rn", "rz", "rm", "rp")
    if name == "div":
        approx = mods.take("approx", "full")
        mods.done()
        return _quotient(ins, k, kind, ftz, bool(approx), rounding or "rn")
    if name == "mad":
        mods.done()
        return fma(ins, k)
    nan, xorsign = mods.flag("NaN"), mods.flag("xorsign")
    if xorsign:
        raise unmodelled(ins, ".xorsign")
    mods.done()
    d, a = k.dst(ins.args[0], kind), k.src(ins.args[1], kind)
    if name in ("neg", "abs"):
        function = np.negative if name == "neg" else np.abs
        return write(d, lambda v: function(floats.flush(v[a]) if ftz else v[a]))
    b = k.src(ins.args[2], kind)
    if name in ("max", "min"):
        pick = _extreme(name, nan)
        if len(ins.args) == 4:
            c = k.src(ins.args[3], kind)
            return write(d, lambda v: pick(pick(v[a], v[b]), v[c]))
        if ftz:
            return write(d, lambda v: pick(floats.flush(v[a]), floats.flush(v[b])))
        return write(d, lambda v: pick(v[a], v[b]))
    function2 = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    if kind == "f32" and rounding not in (None, "rn"):
        return _directed(name, rounding, d, a, b, ftz, sat)
    if rounding not in (None, "rn"):
        raise unmodelled(ins, "f64 rounding")
    if not ftz and not sat:
        return _binary32(function2, d, a, b) if kind == "f32" else binary(function2, d, a, b)

    def compute(v: Any) -> Any:
        x, y = v[a], v[b]
        if ftz:
            x, y = floats.flush(x), floats.flush(y)
        r = function2(x, y)
        return _finish(r, ftz, sat)

    return write(d, compute)


def _binary32(function: Any, d: int, a: int, b: int) -> Handler:
    def run(w: Any, m: Any) -> None:
        v = w.v
        r = floats.canonical(function(v[a], v[b]))
        if m is True:
            v[d][...] = r
        else:
            np.copyto(v[d], r, where=m)

    return run


def _finish(r: Any, ftz: bool, sat: bool) -> Any:
    if r.dtype == f32:
        r = floats.canonical(r)
    if ftz:
        r = floats.flush(r)
    if sat:
        r = np.where(np.isnan(r), r.dtype.type(0), np.clip(r, 0, 1))
    return r


def _rounded(name: str, rounding: str, x: Any, y: Any) -> Any:
    """One f32 add, sub or mul by rz, rm or rp: the float64 result, odd where it is inexact."""
    x, y = x.astype(f64), y.astype(f64)
    if name == "mul":
        return floats.directed(x * y, rounding)
    if name == "sub":
        y = -y
    s = x + y
    t = s - x
    error = (x - (s - t)) + (y - t)
    s = floats.to_odd(s, error)  # an even s may be an f32 itself, an odd one never is
    if rounding == "rm":  # x - x is -0, but +0 + +0 is +0
        s = np.where((s == 0) & (np.signbit(x) | np.signbit(y)), -0.0, s)
    return floats.directed(s, rounding)


def _directed(name: str, rounding: str, d: int, a: int, b: int, ftz: bool, sat: bool) -> Handler:
    def compute(v: Any) -> Any:
        x, y = (floats.flush(v[i]) if ftz else v[i] for i in (a, b))
        return _finish(_rounded(name, rounding, x, y), ftz, sat)

    return write(d, compute)


def _quotient(ins: Instr, k: Decoder, kind: str, ftz: bool, approx: bool, rounding: str) -> Handler:
    if rounding != "rn":
        raise unmodelled(ins, "div rounding")
    d, a, b = k.dst(ins.args[0], kind), k.src(ins.args[1], kind), k.src(ins.args[2], kind)

    def compute(v: Any) -> Any:
        x, y = v[a], v[b]
        if ftz:
            x, y = floats.flush(x), floats.flush(y)
        return _finish(x / y, ftz, False)

    return write(d, compute)


@op("fma")
def fma(ins: Instr, k: Decoder) -> Handler:
    kind = ins.parts[-1]
    if kind in ("f16", "bf16") and ins.parts[-2] == "f32":
        return _mixed(ins, k)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return _half(ins, k)
    if kind == "f32x2":
        return _pair(ins, k)
    mods = Mods(ins)
    mods.type()
    ftz, sat = mods.flag("ftz"), mods.flag("sat")
    rounding = mods.take("rn", "rz", "rm", "rp")
    mods.done()
    if kind != "f32" or rounding not in ("rn", None):
        raise unmodelled(ins)
    d, a, b, c = (k.dst(ins.args[0], kind), *(k.src(x, kind) for x in ins.args[1:4]))
    if not ftz and not sat:
        return write(d, lambda v: floats.fma32(v[a], v[b], v[c]))

    def compute(v: Any) -> Any:
        x, y, z = v[a], v[b], v[c]
        if ftz:
            x, y, z = floats.flush(x), floats.flush(y), floats.flush(z)
        return _finish(floats.fma32(x, y, z), ftz, sat)

    return write(d, compute)


def _pair(ins: Instr, k: Decoder) -> Handler:
    """add / mul / fma .f32x2 (sm_100): two f32 in one 64-bit register."""
    mods = Mods(ins)
    mods.left.remove("f32x2")
    rounding = mods.take("rn", "rz", "rm", "rp") or "rn"
    ftz = mods.flag("ftz")
    mods.done()
    name = ins.parts[0]
    function: Any = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": floats.fma32,
    }[name]  # fmt: skip
    if rounding != "rn":
        if name == "fma":
            raise unmodelled(ins, "rounding of fma")
        function = partial(_rounded, name, rounding)
    d = [k.dst(ins.args[0], f32, p) for p in (0, 1)]
    sources = [[k.src(x, f32, p) for x in ins.args[1:]] for p in (0, 1)]

    def run(w: Any, m: Any) -> None:
        v = w.v
        results = []
        for s in sources:
            args = [v[i] for i in s]
            if ftz:
                args = [floats.flush(x) for x in args]
            results.append(_finish(function(*args), ftz, False))
        for i, r in zip(d, results, strict=True):
            put(v[i], r, m)

    return run


# ---- 16-bit formats ------------------------------------------------------------------------------
def _read16(bits: Any, bf: bool) -> Any:
    if bf:
        return floats.bf16_to_f32(bits).astype(f64)
    return np.ascontiguousarray(bits).view(np.float16).astype(f64)


def _round16(x: Any, error: Any, bf: bool) -> Any:
    """float64 (+ sign of what it lost) to 16 bits with one rounding."""
    odd = floats.to_odd(x, error)
    if not bf:
        h = odd.astype(np.float16)
        return np.where(np.isnan(odd), np.uint16(0x7FFF), h.view(np.uint16))
    # float64 -> f32 rounded to odd, then f32 -> bf16: no double rounding (24 >= 8 + 2 bits)
    r = odd.astype(f32)
    back = r.astype(f64)
    u = r.view(np.uint32).copy()
    wrong = np.abs(back) > np.abs(odd)
    u[wrong] -= np.uint32(1)
    u[(back != odd) & np.isfinite(odd)] |= np.uint32(1)
    return floats.to_bf16(u.view(f32))


def _half(ins: Instr, k: Decoder) -> Handler:
    """f16, bf16 and their packed forms."""
    name, kind = ins.parts[0], ins.parts[-1]
    mods = Mods(ins)
    mods.left.pop()
    mods.take("rn")
    relu, nan = mods.flag("relu"), mods.flag("NaN")
    bf = kind.startswith("bf16")
    if bf:
        mods.flag("ftz")
    mods.done()
    parts = (0, 1) if kind.endswith("x2") else (0,)
    d = [k.dst(ins.args[0], np.uint16, p) for p in parts]
    sources = [[k.src(x, np.uint16, p) for x in ins.args[1:]] for p in parts]

    def one(bits: list[Any]) -> Any:
        if name == "neg":
            return bits[0] ^ np.uint16(0x8000)
        if name == "abs":
            return bits[0] & np.uint16(0x7FFF)
        x = [_read16(b, bf) for b in bits]
        zero = np.zeros(32)
        if name in ("max", "min"):
            return _round16(_extreme(name, nan)(x[0], x[1]).astype(f64), zero, bf)
        if name == "mul":
            return _round16(x[0] * x[1], zero, bf)
        p = x[0] * x[1] if name == "fma" else x[0]
        c = x[2] if name == "fma" else -x[1] if name == "sub" else x[1]
        s = p + c
        t = s - p
        error = (p - (s - t)) + (c - t)
        r = _round16(s, np.where(np.isfinite(error), error, 0), bf)
        return np.where((r & 0x8000) != 0, np.uint16(0), r) if relu else r

    if name not in ("add", "sub", "mul", "fma", "max", "min", "neg", "abs"):
        raise unmodelled(ins)

    def run(w: Any, m: Any) -> None:
        v = w.v
        results = [one([v[i] for i in s]) for s in sources]
        for i, r in zip(d, results, strict=True):
            put(v[i], r, m)

    return run


def _mixed(ins: Instr, k: Decoder) -> Handler:
    """add / sub / fma .rn.f32.bf16 or .f16 (sm_100): the last source is f32, the others widen."""
    name, narrow = ins.parts[0], ins.parts[-1]
    mods = Mods(ins)
    mods.left = mods.left[:-2]
    mods.take("rn")
    mods.done()
    function: Any = {"add": np.add, "sub": np.subtract, "fma": floats.fma32}[name]
    d = k.dst(ins.args[0], "f32")
    wide = [k.src(x, np.uint16) for x in ins.args[1:-1]]
    last = k.src(ins.args[-1], "f32")

    def compute(v: Any) -> Any:
        sources = [_read16(v[i], narrow == "bf16").astype(f32) for i in wide]
        return floats.canonical(function(*sources, v[last]))

    return write(d, compute)


# ---- special functions ---------------------------------------------------------------------------
_FUNCTIONS: dict[str, Any] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@op(*_FUNCTIONS)
def special(ins: Instr, k: Decoder) -> Handler:
    """The hardware's bits where they are known, else float64 rounded once: exact for .rn."""
    mods = Mods(ins)
    kind = mods.type()
    approx = mods.take("approx", "rn") == "approx"
    ftz = mods.flag("ftz")
    mods.done()
    if kind not in ("f32", "f64"):
        raise unmodelled(ins)
    function = _FUNCTIONS[ins.parts[0]]
    d, a = k.dst(ins.args[0], kind), k.src(ins.args[1], kind)
    if kind == "f64":
        return write(d, lambda v: function(v[a]))

    def compute(v: Any) -> Any:
        x = floats.flush(v[a]) if ftz else v[a]
        r = floats.canonical(function(x.astype(f64)).astype(f32))
        return floats.flush(r) if ftz else r

    name = ins.parts[0]
    if not (approx and ftz and name in mufu.FUNCTIONS):
        return write(d, compute)

    def run(w: Any, m: Any) -> None:
        v = w.v
        if w.machine.accumulate is accumulate.exact:
            r = compute(v)
        else:
            r = mufu.FUNCTIONS[name](v[a])
        put(v[d], r, m)

    return run


@op("copysign")
def copysign(ins: Instr, k: Decoder) -> Handler:
    kind = ins.parts[-1]
    d, a, b = k.dst(ins.args[0], kind), k.src(ins.args[1], kind), k.src(ins.args[2], kind)
    return write(d, lambda v: np.copysign(v[b], v[a]))


@op("testp")
def testp(ins: Instr, k: Decoder) -> Handler:
    d, a = k.dst(ins.args[0], "pred"), k.src(ins.args[1], ins.parts[2])
    tiny = np.finfo(DTYPES[ins.parts[2]]).tiny
    tests: dict[str, Any] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < tiny),
    }
    test = tests[ins.parts[1]]
    return write(d, lambda v: test(v[a]))


# ---- compare and select --------------------------------------------------------------------------
_COMPARE: dict[str, Any] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _comparison(name: str, is_float: bool) -> Any:
    if name in _COMPARE:
        return _COMPARE[name]
    if name == "ne":
        if is_float:
            return lambda x, y: (x < y) | (x > y)
        return np.not_equal
    if name == "num":
        return lambda x, y: ~(np.isnan(x) | np.isnan(y))
    if name == "nan":
        return lambda x, y: np.isnan(x) | np.isnan(y)
    if name == "neu":
        return np.not_equal
    if name.endswith("u") and name[:-1] in _COMPARE:
        inner = _COMPARE[name[:-1]]
        return lambda x, y: inner(x, y) | np.isnan(x) | np.isnan(y)
    return None


@op("setp")
def setp(ins: Instr, k: Decoder) -> Handler:
    """setp.cmp[.boolop][.ftz].type p[|q], a, b[, c]"""
    mods = Mods(ins)
    kind = mods.type()
    ftz = mods.flag("ftz")
    boolop = mods.take("and", "or", "xor")
    name = mods.left.pop(0) if mods.left else ""
    mods.done()
    compare = _comparison(name, kind[0] == "f" or kind == "bf16")
    if compare is None or kind == "bf16":
        raise unmodelled(ins)
    first, second = k.pair(ins.args[0])
    p = k.dst(first, "pred")
    q = k.dst(second, "pred") if second is not None else -1
    a, b = k.src(ins.args[1], kind), k.src(ins.args[2], kind)
    c, negated = k.pred(ins.args[3]) if boolop else (-1, False)
    if not ftz and not boolop and q < 0:
        if isinstance(compare, np.ufunc):
            return binary(compare, p, a, b)
        return write(p, lambda v: compare(v[a], v[b]))
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: None}[
        boolop
    ]

    def run(w: Any, m: Any) -> None:
        v = w.v
        x, y = v[a], v[b]
        if ftz:
            x, y = floats.flush(x), floats.flush(y)
        r = compare(x, y)
        other = ~r
        if combine is not None:
            extra = v[c] ^ negated
            r, other = combine(r, extra), combine(other, extra)
        put(v[p], r, m)
        if q >= 0:
            put(v[q], other, m)

    return run


@op("set")
def set_(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    source = mods.type()
    target = mods.type()
    ftz = mods.flag("ftz")
    name = mods.left.pop(0)
    mods.done()
    compare = _comparison(name, source[0] == "f")
    if compare is None:
        raise unmodelled(ins)
    d, a, b = k.dst(ins.args[0], target), k.src(ins.args[1], source), k.src(ins.args[2], source)
    true = 1.0 if target[0] == "f" else -1

    def compute(v: Any) -> Any:
        x, y = (floats.flush(v[a]), floats.flush(v[b])) if ftz else (v[a], v[b])
        return np.where(compare(x, y), np.array(true).astype(DTYPES[target]), DTYPES[target](0))

    return write(d, compute)


@op("selp")
def selp(ins: Instr, k: Decoder) -> Handler:
    kind = ins.parts[-1]
    if kind not in DTYPES:
        raise unmodelled(ins)
    d, a, b = k.dst(ins.args[0], kind), k.src(ins.args[1], kind), k.src(ins.args[2], kind)
    p, negated = k.pred(ins.args[3])
    if isinstance(ins.args[3], Not):
        negated = True
    if negated:
        a, b = b, a
    return write(d, lambda v: np.where(v[p], v[a], v[b]))


@op("slct")
def slct(ins: Instr, k: Decoder) -> Handler:
    mods = Mods(ins)
    test, kind = mods.type(), mods.type()
    ftz = mods.flag("ftz")
    mods.done()
    d, a, b = k.dst(ins.args[0], kind), k.src(ins.args[1], kind), k.src(ins.args[2], kind)
    c = k.src(ins.args[3], test)
    return write(d, lambda v: np.where((floats.flush(v[c]) if ftz else v[c]) >= 0, v[a], v[b]))

"""Software GPU: every registered instruction against an oracle of its own.

Oracles are Python integers, fractions, torch or numpy, never the interpreter's own functions.
``covers`` says which registered names a test is about and makes sure that it runs them;
``test_every_registered_name_has_a_test`` fails for a name that no test claims.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from softgpu import BarrierError, Options, SoftGpuError, UnmodelledInstruction, decode
from softgpu.coverage import coverage
from softgpu.testing import aligned, launch
from tests.softgpu.test_memory import encode_map, swizzled

HERE = Path(__file__).resolve().parent
CLAIMED: set[str] = set()
FEW = settings(
    max_examples=25, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


def registered(opcode: str) -> str | None:
    """The name under which an opcode's builder is registered."""
    parts = opcode.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((x for x in names if x in decode._BUILDERS), None)


def covers(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated test is about these registered names, and must decode each of them."""
    CLAIMED.update(names)

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            seen: set[str | None] = set()
            original = decode.builder_for

            def builder_for(opcode: str) -> Any:
                seen.add(registered(opcode))
                return original(opcode)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(decode, "builder_for", builder_for)
                test(*args, **kwargs)
            assert set(names) <= seen, f"claimed but not run: {sorted(set(names) - seen)}"

        return run

    return wrap


# ---- running instructions ------------------------------------------------------------------------
REGISTERS = ".reg .b16 %h<40>; .reg .b32 %w<60>; .reg .b64 %d<40>; .reg .pred %q<40>;"
PREFIX = {2: "%h", 4: "%w", 8: "%d"}
Case = tuple[str, Any, str]  # opcode, dtype of the result (bool: a predicate), source operands


def evaluate(cases: list[Case], **inputs: np.ndarray) -> list[np.ndarray]:
    """Runs each case once on 32 lanes.  Operands name the inputs; predicates are inputs != 0."""
    order = sorted(inputs)
    results = [np.zeros(32, np.uint32 if t is bool else t) for _, t, _ in cases]
    arrays = [*results, *(np.ascontiguousarray(inputs[x]) for x in order)]
    slots = np.zeros((len(arrays), 32), np.uint64)
    for row, x in zip(slots, arrays, strict=True):
        row.view(x.dtype)[:32] = x
    body = "mov.u32 %w59, %tid.x; cvt.u64.u32 %d39, %w59;\n"
    for i, name in enumerate(order):
        size, number = inputs[name].dtype.itemsize, ord(name) - 96
        body += f"mad.lo.s64 %d38, %d39, {size}, %rd1;\n"
        at = 256 * (len(cases) + i)
        body += f"ld.global.b{8 * size} {PREFIX[size]}{number}, [%d38+{at}];\n"
        body += f"setp.ne.b{8 * size} %q{number}, {PREFIX[size]}{number}, 0;\n"
    for i, (opcode, kind, operands) in enumerate(cases):
        sources = re.sub(
            r"\b(P)?([a-m])\b(?![\w:.])",
            lambda m: f"{PREFIX[inputs[m[2]].dtype.itemsize]}{ord(m[2]) - 96}",
            re.sub(r"P([a-m])\b", lambda m: f"%q{ord(m[1]) - 96}", operands),
        )
        size = results[i].dtype.itemsize
        target = "%q39" if kind is bool else f"{PREFIX[size]}30"
        body += f"{opcode} {target}, {sources};\n"
        if kind is bool:
            target = "%w30"
            body += "selp.b32 %w30, 1, 0, %q39;\n"
        body += f"mad.lo.s64 %d38, %d39, {size}, %rd1; "
        body += f"st.global.b{8 * size} [%d38+{256 * i}], {target};\n"
    launch(body, [slots], declarations=REGISTERS)
    return [
        slots[i].view(r.dtype)[:32].astype(bool if cases[i][1] is bool else r.dtype)
        for i, r in enumerate(results)
    ]


def check(cases: list[tuple[str, Any, str, Callable[..., Any]]], **inputs: np.ndarray) -> None:
    """Every case against its oracle, a function of Python numbers named in its operands."""
    got = evaluate([(opcode, kind, operands) for opcode, kind, operands, _ in cases], **inputs)
    for (opcode, kind, operands, oracle), result in zip(cases, got, strict=True):
        names = re.findall(r"\b!?P?([a-m])\b", operands)
        rows = zip(*(inputs[x].tolist() for x in names), strict=True)
        for lane, row in enumerate(rows):
            want = oracle(*row)
            value = result[lane]
            if kind is not bool and result.dtype.kind in "iu":
                want, value = wrap(want, result.dtype), int(value)
            assert value == want, f"{opcode} {operands}: {row} gave {value}, expected {want}"


def wrap(value: int, dtype: Any) -> int:
    dtype = np.dtype(dtype)
    bits = 8 * dtype.itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value


def ints(kind: str) -> st.SearchStrategy[np.ndarray]:
    """32 values of a PTX integer type, edges likely."""
    bits = int(kind[1:])
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
    edges = [0, 1, 2, 31, 32, 33, -1, -2, 1 << (bits - 1), (1 << (bits - 1)) - 1, 0x80, 0xFF00]
    one = st.one_of(
        st.sampled_from(edges), st.integers(0, (1 << bits) - 1), st.integers(-64, 64)
    ).map(lambda x: wrap(x, dtype))
    return st.lists(one, min_size=32, max_size=32).map(lambda x: np.array(x, dtype))


def numpy_type(kind: str) -> np.dtype:
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")


# ---- integers ------------------------------------------------------------------------------------
def trunc_div(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def bit_field(kind: str) -> Callable[[int, int, int], int]:
    """bfe as the manual's pseudo code has it, bit by bit."""
    bits = int(kind[1:])

    def extract(a: int, pos: int, length: int) -> int:
        pos, length, msb = pos & 255, length & 255, bits - 1
        sign = 0 if kind[0] == "u" or length == 0 else a >> min(pos + length - 1, msb) & 1
        return sum(
            ((a >> (pos + i) & 1) if i < length and pos + i <= msb else sign) << i
            for i in range(bits)
        )

    return extract


def bit_insert(bits: int) -> Callable[[int, int, int, int], int]:
    def insert(a: int, b: int, pos: int, length: int) -> int:
        pos, length = pos & 255, length & 255
        for i in range(length):
            if pos + i <= bits - 1:
                b = b & ~(1 << (pos + i)) | (a >> i & 1) << (pos + i)
        return b

    return insert


@covers("add", "sub", "mul", "mad", "min", "max", "div", "rem", "neg", "abs", "sad", "and", "or",
        "xor", "not", "cnot", "shl", "shr")  # fmt: skip
@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@FEW
@given(data=st.data())
def test_integer_arithmetic(kind: str, data: Any) -> None:
    a, b, c = (data.draw(ints(kind)) for _ in range(3))
    d, e = np.where(b == 0, 1, b).astype(b.dtype), data.draw(ints("u32"))
    t, bits = numpy_type(kind), int(kind[1:])
    logic = "b" + kind[1:]
    cases: list[Any] = [
        (f"add.{kind}", t, "a, b", lambda x, y: x + y),
        (f"sub.{kind}", t, "a, b", lambda x, y: x - y),
        (f"mul.lo.{kind}", t, "a, b", lambda x, y: x * y),
        (f"mul.hi.{kind}", t, "a, b", lambda x, y: x * y >> bits),
        (f"mad.lo.{kind}", t, "a, b, c", lambda x, y, z: x * y + z),
        (f"min.{kind}", t, "a, b", min),
        (f"max.{kind}", t, "a, b", max),
        (f"div.{kind}", t, "a, d", trunc_div),
        (f"rem.{kind}", t, "a, d", lambda x, y: x - y * trunc_div(x, y)),
        (f"sad.{kind}", t, "a, b, c", lambda x, y, z: z + abs(x - y)),
        (f"and.{logic}", t, "a, b", lambda x, y: x & y),
        (f"or.{logic}", t, "a, b", lambda x, y: x | y),
        (f"xor.{logic}", t, "a, b", lambda x, y: x ^ y),
        (f"not.{logic}", t, "a", lambda x: ~x),
        (f"cnot.{logic}", t, "a", lambda x: int(x == 0)),
        (f"shl.{logic}", t, "a, e", lambda x, n: x << min(n, 64)),
        (f"shr.{kind}", t, "a, e", lambda x, n: x >> min(n, 64)),
    ]  # fmt: skip
    if kind[0] == "s":
        cases += [
            (f"neg.{kind}", t, "a", lambda x: -x),
            (f"abs.{kind}", t, "a", abs),
        ]
    else:
        cases += [("neg.s32", np.int32, "f", lambda x: -x), ("abs.s32", np.int32, "f", abs)]
    if bits < 64:
        wide = np.dtype(f"{t.kind}{2 * t.itemsize}")
        g = data.draw(ints(f"{kind[0]}{2 * bits}"))
        cases += [
            (f"mul.wide.{kind}", wide, "a, b", lambda x, y: x * y),
            (f"mad.wide.{kind}", wide, "a, b, g", lambda x, y, z: x * y + z),
        ]
    else:
        g = a
    check(cases, a=a, b=b, c=c, d=d, e=e, f=data.draw(ints("s32")), g=g)


@covers("popc", "clz", "brev", "bfind", "bfe", "bfi")
@pytest.mark.parametrize("bits", [32, 64])
@FEW
@given(data=st.data())
def test_bits(bits: int, data: Any) -> None:
    u, s = data.draw(ints(f"u{bits}")), data.draw(ints(f"s{bits}"))
    p, n = data.draw(ints("u32")), data.draw(ints("u32"))
    t, b = numpy_type(f"u{bits}"), f"b{bits}"
    top = bits - 1

    def find(x: int) -> int:
        x = ~x if x < 0 else x
        return x.bit_length() - 1 if x else -1

    check(
        [
            (f"popc.{b}", np.uint32, "a", lambda x: bin(x).count("1")),
            (f"clz.{b}", np.uint32, "a", lambda x: bits - len(f"{x:b}" if x else "")),
            (f"brev.{b}", t, "a", lambda x: sum((x >> i & 1) << (top - i) for i in range(bits))),
            (f"bfind.u{bits}", np.uint32, "a", find),
            (f"bfind.s{bits}", np.uint32, "b", find),
            (f"bfind.shiftamt.u{bits}", np.uint32, "a", lambda x: top - find(x) if x else -1),
            (f"bfe.u{bits}", t, "a, c, d", bit_field(f"u{bits}")),
            (f"bfe.s{bits}", numpy_type(f"s{bits}"), "b, c, d", bit_field(f"s{bits}")),
            (f"bfi.{b}", t, "a, e, c, d", bit_insert(bits)),
        ],
        a=u, b=s, c=p, d=n, e=data.draw(ints(f"u{bits}")),
    )  # fmt: skip


def permute(a: int, b: int, c: int) -> int:
    data = [(b << 32 | a) >> (8 * i) & 255 for i in range(8)]
    out = []
    for i in range(4):
        nibble = c >> (4 * i) & 15
        byte = data[nibble & 7]
        out.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return sum(x << (8 * i) for i, x in enumerate(out))


def packed(kind: str, function: Callable[[int, int], int]) -> Callable[[int, int], int]:
    def run(a: int, b: int) -> int:
        out = 0
        for i in (0, 16):
            x, y = (wrap(v >> i, numpy_type(kind)) for v in (a, b))
            out |= (function(x, y) & 0xFFFF) << i
        return out

    return run


def dot(signed_a: bool, signed_b: bool) -> Callable[[int, int, int], int]:
    def run(a: int, b: int, c: int) -> int:
        ta, tb = ("i1" if signed_a else "u1"), ("i1" if signed_b else "u1")
        return c + sum(wrap(a >> i, ta) * wrap(b >> i, tb) for i in (0, 8, 16, 24))

    return run


@covers("prmt", "lop3", "shf", "dp4a", "selp", "slct", "set", "setp")
@FEW
@given(data=st.data(), table=st.integers(0, 255))
def test_words(data: Any, table: int) -> None:
    a, b, c = (data.draw(ints("u32")) for _ in range(3))
    s, t = data.draw(ints("s32")), data.draw(ints("s32"))
    u32, s32 = np.uint32, np.int32

    def lut(x: int, y: int, z: int) -> int:
        return sum(
            (table >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | (z >> i & 1)) & 1) << i
            for i in range(32)
        )

    def pair(x: int, y: int) -> int:
        return y << 32 | x

    low, high = min, max
    check(
        [
            ("prmt.b32", u32, "a, b, c", permute),
            ("lop3.b32", u32, f"a, b, c, {table}", lut),
            ("shf.l.wrap.b32", u32, "a, b, c", lambda x, y, n: pair(x, y) << (n & 31) >> 32),
            ("shf.r.wrap.b32", u32, "a, b, c", lambda x, y, n: pair(x, y) >> (n & 31)),
            ("shf.l.clamp.b32", u32, "a, b, c", lambda x, y, n: pair(x, y) << min(n, 32) >> 32),
            ("shf.r.clamp.b32", u32, "a, b, c", lambda x, y, n: pair(x, y) >> min(n, 32)),
            ("dp4a.u32.u32", u32, "a, b, c", dot(False, False)),
            ("dp4a.s32.s32", s32, "a, b, d", dot(True, True)),
            ("dp4a.s32.u32", s32, "a, b, d", dot(True, False)),
            ("dp4a.u32.s32", s32, "a, b, d", dot(False, True)),
            ("add.u16x2", u32, "a, b", packed("u16", lambda x, y: x + y)),
            ("min.u16x2", u32, "a, b", packed("u16", low)),
            ("max.s16x2", u32, "a, b", packed("s16", high)),
            ("min.s16x2", u32, "a, b", packed("s16", low)),
            ("max.relu.s32", s32, "d, e", lambda x, y: max(x, y, 0)),
            ("selp.b32", u32, "a, b, Pc", lambda x, y, p: x if p else y),
            ("slct.u32.s32", u32, "a, b, d", lambda x, y, z: x if z >= 0 else y),
            ("set.lt.u32.s32", u32, "d, e", lambda x, y: -1 if x < y else 0),
            ("set.ge.u32.u32", u32, "a, b", lambda x, y: -1 if x >= y else 0),
            ("and.pred", bool, "Pa, Pd", lambda x, y: bool(x and y)),
            ("or.pred", bool, "Pa, !Pd", lambda x, y: bool(x or not y)),
            ("xor.pred", bool, "Pa, Pd", lambda x, y: bool(x) != bool(y)),
            ("not.pred", bool, "Pa", lambda x: not x),
            *(
                (f"setp.{name}.{kind}", bool, "d, e" if kind == "s32" else "a, b", function)
                for kind in ("s32", "u32")
                for name, function in {
                    "eq": int.__eq__, "ne": int.__ne__, "lt": int.__lt__, "le": int.__le__,
                    "gt": int.__gt__, "ge": int.__ge__,
                }.items()
            ),
            *(
                (f"setp.{name}.u32", bool, "a, b", function)
                for name, function in {
                    "lo": int.__lt__, "ls": int.__le__, "hi": int.__gt__, "hs": int.__ge__,
                }.items()
            ),
            ("setp.lt.and.s32", bool, "d, e, Pc", lambda x, y, p: x < y and bool(p)),
            ("setp.lt.or.s32", bool, "d, e, !Pc", lambda x, y, p: x < y or not p),
            ("setp.lt.xor.s32", bool, "d, e, Pc", lambda x, y, p: (x < y) != bool(p)),
        ],
        a=a, b=b, c=c, d=s, e=t,
    )  # fmt: skip


@covers("setp")
def test_second_predicate_is_the_complement_before_the_combination() -> None:
    out = aligned(32, np.uint32)
    launch(
        """mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 1; setp.ne.s32 %p3, %r2, 0;
        setp.lt.and.s32 %p1|%p2, %r1, 10, %p3; selp.b32 %r3, 1, 0, %p1; selp.b32 %r4, 2, 0, %p2;
        add.s32 %r5, %r3, %r4; mad.wide.u32 %rd2, %r1, 4, %rd1; st.global.b32 [%rd2], %r5;""",
        [out],
    )
    assert out.tolist() == [(0 if i % 2 == 0 else 1 if i < 10 else 2) for i in range(32)]


@covers("cvt")
@FEW
@given(data=st.data())
def test_integer_conversions(data: Any) -> None:
    kinds = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"]
    source = {
        letter: data.draw(ints(kind))
        for letter, kind in zip("abc", ("u16", "u32", "u64"), strict=True)
    }
    cases: list[Any] = []
    for letter, names in {
        "a": ("u8", "s8", "u16", "s16"), "b": ("u32", "s32"), "c": ("u64", "s64"),
    }.items():  # fmt: skip
        for name in names:
            for target in kinds:
                size = max(int(target[1:]), 16)
                wide = np.dtype(f"{'i' if target[0] == 's' else 'u'}{size // 8}")
                low = -(1 << int(target[1:]) - 1) if target[0] == "s" else 0
                high = (1 << int(target[1:]) - (target[0] == "s")) - 1

                def plain(x: int, name: str = name, target: str = target) -> int:
                    return wrap(wrap(x, numpy_type(name)), numpy_type(target))

                def clamp(x: int, name: str = name, low: int = low, high: int = high) -> int:
                    return min(max(wrap(x, numpy_type(name)), low), high)

                cases.append((f"cvt.{target}.{name}", wide, letter, plain))
                cases.append((f"cvt.sat.{target}.{name}", wide, letter, clamp))
    check(cases, **source)


# ---- floating point ------------------------------------------------------------------------------
# format: (bits of the significand with the hidden one, least exponent, greatest exponent)
FORMATS = {"f32": (24, -126, 127), "f16": (11, -14, 15), "bf16": (8, -126, 127)}


def rounded(value: Fraction, kind: str, mode: str = "rn", zero: float = 0.0) -> float:
    """An exact value in a format; ``zero`` is what an exact zero becomes (its sign)."""
    if value == 0:
        return zero
    precision, low, high = FORMATS[kind]
    sign, value = (-1 if value < 0 else 1), abs(value)
    e = value.numerator.bit_length() - value.denominator.bit_length()
    e -= Fraction(2) ** e > value
    unit = Fraction(2) ** (max(e, low) - precision + 1)
    n, rest = divmod(value, unit)
    up = {
        "rn": rest > unit / 2 or (rest == unit / 2 and n % 2 == 1), "rz": False,
        "rp": rest > 0 and sign > 0, "rm": rest > 0 and sign < 0,
    }[mode]  # fmt: skip
    result = (n + up) * unit
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** high
    if result > largest:
        toward = mode == "rz" or (mode == "rp" and sign < 0) or (mode == "rm" and sign > 0)
        return sign * (float(largest) if toward else math.inf)
    return sign * float(result)


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def exactly(name: str, x: float, y: float, z: float, kind: str, mode: str) -> float:
    """add, sub, mul, fma or div of finite or special values with one rounding."""
    if name == "sub":
        name, y = "add", -y
    special = not all(math.isfinite(v) for v in (x, y, z))
    if name == "fma":
        if special:
            with np.errstate(all="ignore"):
                return float(np.float64(x) * np.float64(y) + np.float64(z))
        product = math.copysign(1, x) * math.copysign(1, y)
        alike = product == math.copysign(1, z)
        zero = math.copysign(0.0, product if alike else -1 if mode == "rm" else 1)
        return rounded(Fraction(x) * Fraction(y) + Fraction(z), kind, mode, zero)
    if name == "add":
        if special:
            return x + y
        alike = math.copysign(1, x) == math.copysign(1, y)
        zero = math.copysign(0.0, x) if alike else -0.0 if mode == "rm" else 0.0
        return rounded(Fraction(x) + Fraction(y), kind, mode, zero)
    sign = math.copysign(0.0, math.copysign(1, x) * math.copysign(1, y))
    if name == "mul":
        if special:
            return x * y
        return rounded(Fraction(x) * Fraction(y), kind, mode, sign)
    if special or y == 0:
        with np.errstate(all="ignore"):
            return float(np.float64(x) / np.float64(y))
    return rounded(Fraction(x) / Fraction(y), kind, mode, sign)


def values(kind: str) -> st.SearchStrategy[np.ndarray]:
    """32 bit patterns of a format: random ones, neighbours of powers of two, specials."""
    dtype, fraction = (np.uint32, 23) if kind == "f32" else (np.uint16, FORMATS[kind][0] - 1)
    bits = 8 * np.dtype(dtype).itemsize
    top = (1 << bits - 1 - fraction) - 1 << fraction
    near = st.tuples(st.integers(0, top >> fraction), st.integers(-3, 3)).map(
        lambda x: max((x[0] << fraction) + x[1], 0)
    )
    edges = [0, 1, 2, 1 << fraction, (1 << fraction) - 1, top - 1, top, top + 1]
    middle = st.integers(
        (top >> fraction + 1) - 3 << fraction, (top >> fraction + 1) + 3 << fraction
    )
    one = st.one_of(st.sampled_from(edges), near, middle, st.integers(0, (1 << bits - 1) - 1))
    signed = st.tuples(one, st.booleans()).map(lambda x: x[0] | x[1] << bits - 1)
    return st.lists(signed, min_size=32, max_size=32).map(lambda x: np.array(x, dtype))


def numbers(x: np.ndarray, kind: str) -> list[float]:
    if kind == "f32":
        return [float(v) for v in x.view(np.float32)]
    t = torch.from_numpy(x.view(np.int16).copy())
    return [float(v) for v in t.view(torch.float16 if kind == "f16" else torch.bfloat16)]


def same(got: float, want: float) -> bool:
    if math.isnan(want) or math.isnan(got):
        return math.isnan(want) and math.isnan(got)
    return got == want and math.copysign(1, got) == math.copysign(1, want)


def compare(
    cases: list[tuple[str, str, Callable[..., float]]], kind: str, **inputs: np.ndarray
) -> None:
    """Cases (opcode, operands, oracle on floats) whose operands and results have one format."""
    t = np.uint32 if kind == "f32" else np.uint16
    got = evaluate([(opcode, t, operands) for opcode, operands, _ in cases], **inputs)
    numeric = {n: numbers(x, kind) for n, x in inputs.items()}
    for (opcode, operands, oracle), raw in zip(cases, got, strict=True):
        rows = zip(*(numeric[n] for n in re.findall(r"\b([a-m])\b", operands)), strict=True)
        for value, row in zip(numbers(raw, kind), rows, strict=True):
            want = oracle(*row)
            assert same(value, want), f"{opcode}: {row} gave {value!r}, expected {want!r}"


def extreme(name: str, nan: bool) -> Callable[..., float]:
    """max / min: a NaN loses or wins, -0 is less than +0."""

    def pick(*args: float) -> float:
        numeric = [x for x in args if not math.isnan(x)]
        if not numeric or (nan and len(numeric) < len(args)):
            return math.nan
        key = lambda x: (x, math.copysign(1, x))
        return max(numeric, key=key) if name == "max" else min(numeric, key=key)

    return pick


def clamped(x: float) -> float:
    return 0.0 if math.isnan(x) else min(max(x, 0.0), 1.0)


@covers("add", "sub", "mul", "fma", "div", "min", "max", "neg", "abs", "copysign", "slct")
@FEW
@given(a=values("f32"), b=values("f32"), c=values("f32"))
def test_single_precision(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    def op(name: str, mode: str = "rn", ftz: bool = False) -> Callable[..., float]:
        def run(x: float, y: float, z: float = 0.0) -> float:
            if ftz:
                x, y, z = flushed(x), flushed(y), flushed(z)
            r = exactly(name, x, y, z, "f32", mode)
            return flushed(r) if ftz and not math.isnan(r) else r

        return run

    cases: list[Any] = [
        (f"{name}.{mode}.f32", "a, b", op(name, mode))
        for name in ("add", "sub", "mul") for mode in ("rn", "rz", "rm", "rp")
    ]  # fmt: skip
    cases += [(f"{name}.ftz.f32", "a, b", op(name, ftz=True)) for name in ("add", "sub", "mul")]
    cases += [
        ("fma.rn.f32", "a, b, c", op("fma")),
        ("fma.rn.ftz.f32", "a, b, c", op("fma", ftz=True)),
        ("mad.rn.f32", "a, b, c", op("fma")),
        ("div.rn.f32", "a, b", op("div")),
        ("neg.f32", "a", lambda x: -x),
        ("abs.f32", "a", abs),
        ("copysign.f32", "a, b", lambda x, y: math.copysign(y, x)),
        ("slct.f32.f32", "a, b, c", lambda x, y, z: x if z >= 0 else y),
        ("slct.ftz.f32.f32", "a, b, c", lambda x, y, z: x if flushed(z) >= 0 else y),
        ("max.f32", "a, b, c", extreme("max", False)),
        ("min.NaN.f32", "a, b, c", extreme("min", True)),
    ]
    for name in ("min", "max"):
        cases += [
            (f"{name}.f32", "a, b", extreme(name, False)),
            (f"{name}.NaN.f32", "a, b", extreme(name, True)),
        ]
    compare(cases, "f32", a=a, b=b, c=c)
    got = evaluate([("fma.rn.sat.f32", np.uint32, "a, b, c")], a=a, b=b, c=c)[0]
    rows = zip(*(numbers(x, "f32") for x in (a, b, c)), strict=True)
    assert [x + 0.0 for x in numbers(got, "f32")] == [clamped(op("fma")(*r)) + 0.0 for r in rows]


@covers("add", "sub")
def test_directed_sums_next_to_a_float() -> None:
    """Exact sums a fraction of a float64 ulp away from an f32: rounding twice would show."""
    tiny = [2.0**-53 * (1 - 2.0**-24), 2.0**-60, 2.0**-30, 2.0**-53, 2.0**-149, 2.0**-54]
    pairs = [(s * 1.0, t * y) for s in (1, -1) for t in (1, -1) for y in tiny]
    pairs = (pairs + [(x, -x) for x in (1.0, -3.0, 2.0**-149, -0.0)] * 2)[:32]
    a, b = (np.array(x, np.float32).view(np.uint32) for x in zip(*pairs, strict=True))
    compare(
        [
            (f"{name}.{mode}.f32", "a, b",
             lambda x, y, name=name, mode=mode: exactly(name, x, y, 0.0, "f32", mode))
            for name in ("add", "sub") for mode in ("rn", "rz", "rm", "rp")
        ],
        "f32", a=a, b=b,
    )  # fmt: skip


@covers("add", "sub", "mul", "fma", "min", "max", "neg", "abs")
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@FEW
@given(data=st.data())
def test_half_precision(kind: str, data: Any) -> None:
    a, b, c = (data.draw(values(kind)) for _ in range(3))

    def op(name: str, relu: bool = False) -> Callable[..., float]:
        def run(x: float, y: float, z: float = 0.0) -> float:
            r = exactly(name, x, y, z, kind, "rn")
            return 0.0 if relu and (r < 0 or (r == 0 and math.copysign(1, r) < 0)) else r

        return run

    cases: list[Any] = [
        (f"add.rn.{kind}", "a, b", op("add")), (f"sub.rn.{kind}", "a, b", op("sub")),
        (f"mul.rn.{kind}", "a, b", op("mul")), (f"fma.rn.{kind}", "a, b, c", op("fma")),
        (f"fma.rn.relu.{kind}", "a, b, c", op("fma", True)),
        (f"neg.{kind}", "a", lambda x: -x), (f"abs.{kind}", "a", abs),
        (f"min.{kind}", "a, b", extreme("min", False)),
        (f"max.NaN.{kind}", "a, b", extreme("max", True)),
    ]  # fmt: skip
    compare(cases, kind, a=a, b=b, c=c)
    words = {"a": a, "b": b, "c": c}
    pairs = {n: x.astype(np.uint32) | np.roll(x, 5).astype(np.uint32) << 16
             for n, x in words.items()}  # fmt: skip
    for (opcode, operands, _), twice in zip(cases, evaluate(
        [(f"{o}x2", np.uint32, operands) for o, operands, _ in cases], **pairs
    ), strict=True):  # fmt: skip
        once = evaluate([(opcode, np.uint16, operands)], **words)[0]
        low, high = (twice & 0xFFFF).astype(np.uint16), (twice >> 16).astype(np.uint16)
        assert low.tolist() == once.tolist() and high.tolist() == np.roll(once, 5).tolist(), opcode


@covers("add", "sub", "mul", "fma", "div", "min", "sqrt", "rcp", "neg", "abs", "setp")
def test_double_precision_and_pairs() -> None:
    rng = random.Random(4)
    a, b = (
        np.array([rng.choice([rng.uniform(-9, 9), 0.0, 1e-310, 2.0**-1074, math.inf])
                  for _ in range(32)])
        for _ in range(2)
    )  # fmt: skip
    root = np.array([rng.uniform(0, 1e9) for _ in range(32)])
    cases: list[Any] = [
        ("add.f64", "a, b", np.add), ("sub.f64", "a, b", np.subtract),
        ("mul.f64", "a, b", np.multiply), ("div.rn.f64", "a, b", np.divide),
        ("min.f64", "a, b", np.fmin), ("neg.f64", "a", np.negative), ("abs.f64", "a", np.abs),
    ]  # fmt: skip
    got = evaluate([(o, np.float64, x) for o, x, _ in cases], a=a, b=b)
    for (opcode, operands, oracle), r in zip(cases, got, strict=True):
        with np.errstate(all="ignore"):
            want = oracle(*([a, b][: operands.count(",") + 1]))
        np.testing.assert_array_equal(r, want, opcode)
    up, one = evaluate([("sqrt.rn.f64", np.float64, "a"), ("rcp.rn.f64", np.float64, "a")], a=root)
    for x, r, inverse in zip(root, up, one, strict=True):
        half = Fraction(float(np.spacing(r))) / 2
        assert (Fraction(r) - half) ** 2 <= Fraction(x) <= (Fraction(r) + half) ** 2
        assert abs(Fraction(inverse) * Fraction(x) - 1) <= Fraction(2) ** -53
    f = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    x, y, z = (np.ascontiguousarray(v).view(np.uint64) for v in f)
    two = evaluate(
        [("add.f32x2", np.uint64, "a, b"), ("mul.f32x2", np.uint64, "a, b"),
         ("sub.f32x2", np.uint64, "a, b"), ("fma.rn.f32x2", np.uint64, "a, b, c")],
        a=x, b=y, c=z,
    )  # fmt: skip
    fused = [rounded(Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r)), "f32")
             for p, q, r in f.T]  # fmt: skip
    for got_, want in zip(two, (f[0] + f[1], f[0] * f[1], f[0] - f[1], fused), strict=True):
        assert got_.view(np.float32).tolist() == list(want)


@covers("sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh", "div")
@FEW
@given(seed=st.integers(0, 2**32))
def test_special_functions(seed: int) -> None:
    """Correct rounding of .rn; the manual's bounds for the others."""
    rng = np.random.default_rng(seed)
    x = np.exp2(rng.uniform(-100, 100, 32)).astype(np.float32)
    root, inverse = evaluate([("sqrt.rn.f32", np.float32, "a"), ("rcp.rn.f32", np.float32, "a")],
                             a=x)  # fmt: skip
    for v, r, i in zip(x, root, inverse, strict=True):
        assert i == rounded(1 / Fraction(float(v)), "f32")
        half = Fraction(float(np.spacing(r))) / 2
        assert (Fraction(float(r)) - half) ** 2 <= Fraction(float(v))
        assert Fraction(float(v)) <= (Fraction(float(r)) + half) ** 2
    small = rng.uniform(-math.pi, math.pi, 32).astype(np.float32)
    y = np.exp2(rng.uniform(-55, 55, 32)).astype(np.float32)
    relative = [
        ("rsqrt.approx.f32", "a", x, lambda v: 1 / math.sqrt(v), 2.0**-22.9),
        ("sqrt.approx.f32", "a", x, math.sqrt, 2.0**-22),
        ("rcp.approx.ftz.f32", "a", x, lambda v: 1 / v, 2.0**-23),
        ("ex2.approx.ftz.f32", "a", small * 10, lambda v: 2.0**v, 2.0**-22),
        ("tanh.approx.f32", "a", small, math.tanh, 2.0**-10.9),
        ("lg2.approx.ftz.f32", "a", x, math.log2, 2.0**-22),
    ]
    for opcode, operands, data, oracle, bound in relative:
        got = evaluate([(opcode, np.float32, operands)], a=data)[0]
        want = np.array([oracle(float(v)) for v in data])
        # lg2 between 1/2 and 2: an absolute bound
        scale = np.maximum(np.abs(want), 1) if opcode.startswith("lg2") else np.abs(want)
        assert (np.abs(got - want) <= bound * scale).all(), opcode
    for opcode, oracle in (("sin.approx.f32", math.sin), ("cos.approx.f32", math.cos)):
        got = evaluate([(opcode, np.float32, "a")], a=small)[0]
        assert (np.abs(got - [oracle(float(v)) for v in small]) <= 2.0**-20.5).all(), opcode
    for opcode in ("div.approx.f32", "div.full.f32"):
        got = evaluate([(opcode, np.float32, "a, b")], a=y[::-1].copy(), b=y)[0]
        want = y[::-1].astype(np.float64) / y
        assert (np.abs(got - want) <= 2 * np.spacing(want.astype(np.float32))).all(), opcode


@covers("setp", "set", "testp")
@FEW
@given(a=values("f32"), b=values("f32"))
def test_float_comparisons(a: np.ndarray, b: np.ndarray) -> None:
    b = np.where(np.arange(32) % 4 == 0, a, b)
    isnan, finite = math.isnan, math.isfinite
    plain: dict[str, Callable[[float, float], bool]] = {
        "eq": lambda x, y: x == y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
        "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
        "ne": lambda x, y: x != y and not isnan(x) and not isnan(y),
    }  # fmt: skip
    table = {
        **plain,
        **{n + "u": (lambda x, y, f=f: isnan(x) or isnan(y) or f(x, y)) for n, f in plain.items()},
        "num": lambda x, y: not isnan(x) and not isnan(y),
        "nan": lambda x, y: isnan(x) or isnan(y),
    }
    tests = {
        "finite": finite,
        "infinite": math.isinf,
        "notanumber": isnan,
        "number": lambda x: not isnan(x),
        "normal": lambda x: finite(x) and abs(x) >= 2.0**-126,
        "subnormal": lambda x: 0 < abs(x) < 2.0**-126,
    }
    x, y = a.view(np.float32), b.view(np.float32)
    check(
        [
            *((f"setp.{n}.f32", bool, "a, b", f) for n, f in table.items()),
            *((f"setp.{n}.ftz.f32", bool, "a, b",
               lambda p, q, f=f: f(flushed(p), flushed(q))) for n, f in table.items()),
            *((f"testp.{n}.f32", bool, "a", f) for n, f in tests.items()),
            ("set.lt.u32.f32", np.uint32, "a, b", lambda p, q: -1 if p < q else 0),
            ("set.geu.f32.f32", np.float32, "a, b",
             lambda p, q: 1.0 if isnan(p) or isnan(q) or p >= q else 0.0),
        ],
        a=x, b=y,
    )  # fmt: skip
    h, g = (np.where(v & 0x7C00 == 0x7C00, 0x3C00, v).astype(np.uint16) for v in (a, b))
    got = evaluate([("setp.lt.f16", bool, "a, b")], a=h, b=g)[0]
    assert got.tolist() == [p < q for p, q in zip(numbers(h, "f16"), numbers(g, "f16"))]


@covers("cvt")
@FEW
@given(a=values("f32"), data=st.data())
def test_conversions_from_single_precision(a: np.ndarray, data: Any) -> None:
    x = [float(v) for v in a.view(np.float32)]
    to_int: dict[str, Callable[[float], int]] = {
        "rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil,
    }  # fmt: skip
    for kind in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        bits = int(kind[1:])
        wide = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{max(bits, 16) // 8}")
        low = -(1 << bits - 1) if kind[0] == "s" else 0
        high = (1 << bits - (kind[0] == "s")) - 1
        for source, nan in (("f32", 1 << 63 if bits == 64 else 0), ("f64", 1 << bits - 1)):
            values_ = np.array(x, np.float64 if source == "f64" else np.float32)
            cases = [(f"cvt.{mode}.{kind}.{source}", wide, "a") for mode in to_int]
            for (opcode, _, _), got in zip(cases, evaluate(cases, a=values_), strict=True):
                function = to_int[opcode.split(".")[1]]
                for v, r in zip(x, got.tolist(), strict=True):
                    if math.isnan(v):
                        want = wrap(nan, np.dtype(f"{wide.kind}{bits // 8}"))
                    elif math.isinf(v):
                        want = high if v > 0 else low
                    else:
                        want = min(max(function(v), low), high)
                    assert r == want, f"{opcode}: {v} gave {r}, expected {want}"
    for kind in ("f16", "bf16"):
        for mode in ("rn", "rz"):
            got = numbers(evaluate([(f"cvt.{mode}.{kind}.f32", np.uint16, "a")], a=a)[0], kind)
            for v, r in zip(x, got, strict=True):
                want = v if not math.isfinite(v) else rounded(
                    Fraction(v), kind, mode, math.copysign(0.0, v))  # fmt: skip
                assert same(r, want), f"cvt.{mode}.{kind}.f32: {v!r} gave {r!r}"
    y = data.draw(ints("s64"))
    cases = [(f"cvt.{mode}.f32.s64", np.float32, "a") for mode in ("rn", "rz", "rm", "rp")]
    for (opcode, _, _), got in zip(cases, evaluate(cases, a=y), strict=True):
        want = [rounded(Fraction(v), "f32", opcode.split(".")[1]) for v in y.tolist()]
        assert got.tolist() == want, opcode
    z = y.view(np.uint64)
    got = evaluate([("cvt.rn.f32.u64", np.float32, "a"), ("cvt.rn.f64.u64", np.float64, "a")], a=z)
    assert got[0].tolist() == [rounded(Fraction(v), "f32") for v in z.tolist()]
    assert got[1].tolist() == [float(v) for v in z.tolist()]


@covers("cvt")
@FEW
@given(a=values("f32"), b=values("f32"), h=values("f16"), g=values("bf16"))
def test_packed_conversions(a: np.ndarray, b: np.ndarray, h: np.ndarray, g: np.ndarray) -> None:
    ta, tb = (torch.from_numpy(x.view(np.float32).copy()) for x in (a, b))

    def eight(t: torch.Tensor, e4m3: bool) -> np.ndarray:
        kind, most = (torch.float8_e4m3fn, 448) if e4m3 else (torch.float8_e5m2, 57344)
        code = t.clamp(-most, most).to(kind).view(torch.uint8)
        return torch.where(t.isnan(), torch.tensor(0x7F, dtype=torch.uint8), code).numpy()

    def sixteen(t: torch.Tensor, kind: torch.dtype) -> np.ndarray:
        bits = t.to(kind).view(torch.int16).numpy().view(np.uint16)
        return np.where(t.isnan().numpy(), 0x7FFF, bits)

    two = torch.from_numpy(np.stack([h, np.roll(h, 3)], 1).view(np.int16).copy())
    two = two.view(torch.float16).float()
    pair = h.astype(np.uint32) | np.roll(h, 3).astype(np.uint32) << 16
    got = evaluate(
        [
            ("cvt.rn.satfinite.e4m3x2.f32", np.uint16, "a, b"),
            ("cvt.rn.satfinite.e5m2x2.f32", np.uint16, "a, b"),
            ("cvt.rn.satfinite.relu.e4m3x2.f32", np.uint16, "a, b"),
            ("cvt.rn.f16x2.f32", np.uint32, "a, b"),
            ("cvt.rn.bf16x2.f32", np.uint32, "a, b"),
            ("cvt.rn.satfinite.e4m3x2.f16x2", np.uint16, "c"),
            ("cvt.f32.f16", np.uint32, "d"),
            ("cvt.f32.bf16", np.uint32, "e"),
            ("cvt.rn.f16x2.e4m3x2", np.uint32, "d"),
            ("cvt.rn.f16x2.e5m2x2", np.uint32, "d"),
        ],
        a=a, b=b, c=pair, d=h, e=g,
    )  # fmt: skip
    for i, e4m3 in ((0, True), (1, False)):
        want = eight(tb, e4m3) | eight(ta, e4m3).astype(np.uint16) << 8
        assert got[i].tolist() == want.tolist()
    want = eight(tb.relu(), True) | eight(ta.relu(), True).astype(np.uint16) << 8
    assert (got[2] & 0x7F7F).tolist() == (want & 0x7F7F).tolist()
    for i, kind in ((3, torch.float16), (4, torch.bfloat16)):
        want = sixteen(tb, kind) | sixteen(ta, kind).astype(np.uint32) << 16
        assert got[i].tolist() == want.tolist()
    want = eight(two[:, 0], True) | eight(two[:, 1], True).astype(np.uint16) << 8
    assert got[5].tolist() == want.tolist()
    for i, x, kind in ((6, h, "f16"), (7, g, "bf16")):
        assert all(same(p, q) for p, q in zip(numbers(got[i], "f32"), numbers(x, kind)))
    for i, kind8 in ((8, torch.float8_e4m3fn), (9, torch.float8_e5m2)):
        wide = torch.from_numpy(h.view(np.uint8).copy()).view(kind8).float()
        assert got[i].tolist() == sixteen(wide, torch.float16).view(np.uint32).tolist()


# ---- registers, addresses, warps -----------------------------------------------------------------
TID = "mov.u32 %r99, %tid.x; cvt.u64.u32 %rd60, %r99; mov.u32 %r50, smem; "
TID += "setp.eq.s32 %p50, %r99, 0;\n"
PUT = "mad.lo.s64 %rd61, %rd60, 4, %rd1; st.global.b32 [%rd61], %r10;\n"


def run(body: str, *args: Any, threads: int = 32, grid: int = 1, **kw: Any) -> list[int]:
    """Runs ``body``, which leaves a word in %r10, and returns it of every thread."""
    out = aligned(threads * grid, np.uint32)
    head = TID
    if grid > 1:
        head += f"mov.u32 %r98, %ctaid.x; mad.lo.s32 %r97, %r98, {threads}, %r99; "
        head += "cvt.u64.u32 %rd60, %r97;\n"
    launch(head + body + PUT, [out, *args], block=threads, grid=grid, **kw)
    return out.tolist()


@covers("mov", "cvta", "isspacep", "mapa", "getctarank", "createpolicy", "prefetch", "prefetchu",
        "applypriority", "discard", "nanosleep", "pmevent", "setmaxnreg", "fence", "membar",
        "griddepcontrol.wait", "griddepcontrol.launch_dependents", "cp.async.bulk.prefetch",
        "cp.async.bulk.prefetch.tensor")  # fmt: skip
def test_moves_addresses_and_hints() -> None:
    got = run("""
    mov.b64 %rd5, {%r99, %r50}; mov.b64 {%r1, %r2}, %rd5; mov.b32 {%rs1, %rs2}, %r50;
    mov.b32 %r3, {%rs2, %rs1}; sub.s32 %r2, %r2, %r50; shr.u32 %r4, %r50, 16;
    shl.b32 %r5, %r50, 16; or.b32 %r4, %r4, %r5; sub.s32 %r3, %r3, %r4;
    add.s32 %r10, %r1, %r2; add.s32 %r10, %r10, %r3;
    """)
    assert got == list(range(32))
    source = aligned(32, np.uint32)
    got = run("""
    cvt.u64.u32 %rd5, %r50; cvta.shared.u64 %rd6, %rd5; cvta.to.shared.u64 %rd7, %rd6;
    cvta.to.global.u64 %rd8, %rd2;
    prefetch.global.L2 [%rd2]; prefetchu.L1 [%rd2];
    applypriority.global.L2::evict_normal [%rd2], 128;
    discard.global.L2 [%rd2], 128; createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;
    cp.async.bulk.prefetch.L2.global [%rd2], 64; nanosleep.u32 20; pmevent 1;
    fence.acq_rel.gpu; fence.proxy.async; fence.proxy.alias; membar.gl;
    fence.mbarrier_init.release.cluster;
    setmaxnreg.inc.sync.aligned.u32 240; griddepcontrol.wait; griddepcontrol.launch_dependents;
    @!%p50 bra OVER; cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%rd2, {0}]; OVER:
    mov.u32 %r20, %cluster_ctarank; xor.b32 %r21, %r20, 1;
    mapa.shared::cluster.u32 %r22, %r50, %r21; getctarank.shared::cluster.u32 %r23, %r22;
    mapa.u64 %rd10, %rd6, %r21; getctarank.u64 %r24, %rd10;
    isspacep.shared %p1, %rd6; isspacep.global %p2, %rd2; isspacep.shared::cta %p3, %rd10;
    isspacep.shared::cluster %p4, %rd10; isspacep.local %p5, %rd6; isspacep.global %p6, %rd6;
    setp.eq.u64 %p7, %rd7, %rd5; setp.eq.u64 %p8, %rd8, %rd2;
    mov.u32 %r10, 0;
    @%p1 or.b32 %r10, %r10, 1; @%p2 or.b32 %r10, %r10, 2; @%p3 or.b32 %r10, %r10, 4;
    @%p4 or.b32 %r10, %r10, 8; @%p5 or.b32 %r10, %r10, 16; @%p6 or.b32 %r10, %r10, 32;
    @%p7 or.b32 %r10, %r10, 64; @%p8 or.b32 %r10, %r10, 128;
    shl.b32 %r23, %r23, 8; or.b32 %r10, %r10, %r23; shl.b32 %r24, %r24, 9; or.b32 %r10, %r10, %r24;
    """, source, grid=2, cluster=2)  # fmt: skip
    flags = 1 | 2 | 8 | 64 | 128
    assert got == [flags | 0x300] * 32 + [flags] * 32


@covers("shfl", "vote", "match", "redux", "elect", "activemask", "bar.warp.sync",
        "barrier.warp.sync")  # fmt: skip
@FEW
@given(
    mask=st.integers(1, 2**32 - 1), b=st.integers(0, 31),
    mode=st.sampled_from(["up", "down", "bfly", "idx"]), data=ints("u32"),
    votes=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_collectives_of_some_lanes(
    mask: int, b: int, mode: str, data: np.ndarray, votes: int
) -> None:
    """Lanes of ``mask`` branch off and work together; the others stay away."""
    inside = [i for i in range(32) if mask >> i & 1]
    body = f"""
    mov.u32 %r1, 1; shl.b32 %r1, %r1, %r99; and.b32 %r2, %r1, {mask}; setp.eq.s32 %p1, %r2, 0;
    mov.u32 %r10, 77; and.b32 %r3, %r1, {votes}; setp.ne.s32 %p2, %r3, 0; mov.u32 %r9, {mask};
    mad.lo.s64 %rd5, %rd60, 4, %rd2; ld.global.b32 %r4, [%rd5];
    @%p1 bra OUT;
    OP
    OUT:
    """

    def each(operation: str, oracle: Callable[[int], int]) -> None:
        got = run(body.replace("OP", operation), data)
        want = [oracle(i) & 0xFFFFFFFF if i in inside else 77 for i in range(32)]
        assert got == want, operation

    x = data.tolist()
    signed = data.view(np.int32).tolist()
    voters = [i for i in inside if votes >> i & 1]
    ballot = sum(1 << i for i in voters)
    each("vote.sync.ballot.b32 %r10, %p2, %r9;", lambda i: ballot)
    for name, truth in {
        "any": bool(voters), "all": voters == inside, "uni": voters in ([], inside),
    }.items():  # fmt: skip
        each(f"vote.sync.{name}.pred %p3, %p2, %r9; selp.b32 %r10, 1, 0, %p3;",
             lambda i, truth=truth: truth)  # fmt: skip
    each("activemask.b32 %r10;", lambda i: mask)
    each("bar.warp.sync %r9; barrier.warp.sync %r9; mov.u32 %r10, 5;", lambda i: 5)
    each(f"elect.sync %r5|%p3, {mask}; selp.b32 %r6, 64, 0, %p3; add.s32 %r10, %r5, %r6;",
         lambda i: inside[0] + (64 if i == inside[0] else 0))  # fmt: skip
    each(
        "match.any.sync.b32 %r10, %r4, %r9;", lambda i: sum(1 << j for j in inside if x[j] == x[i])
    )
    alike = len({x[i] for i in inside}) == 1
    each("match.all.sync.b32 %r10|%p3, %r4, %r9;", lambda i: mask if alike else 0)
    for name, kind, function in (
        ("add", "s32", sum), ("min", "u32", min), ("max", "u32", max), ("min", "s32", min),
        ("max", "s32", max), ("and", "b32", lambda v: functools.reduce(int.__and__, v)),
        ("or", "b32", lambda v: functools.reduce(int.__or__, v)),
        ("xor", "b32", lambda v: functools.reduce(int.__xor__, v)),
    ):  # fmt: skip
        value = function([(signed if kind == "s32" else x)[i] for i in inside])
        each(f"redux.sync.{name}.{kind} %r10, %r4, %r9;", lambda i, value=value: value)

    def shuffled(i: int) -> int:
        j = {"up": i - b, "down": i + b, "bfly": i ^ b, "idx": b}[mode]
        return x[j] if 0 <= j < 32 else x[i]

    source = {"up": lambda i: i - b, "down": lambda i: i + b, "bfly": lambda i: i ^ b,
              "idx": lambda i: b}[mode]  # fmt: skip
    if all(source(i) in inside or not 0 <= source(i) < 32 for i in inside):
        clamp = 0 if mode == "up" else 31
        each(f"shfl.sync.{mode}.b32 %r10, %r4, {b}, {clamp}, %r9;", shuffled)


@covers("vote")
def test_membermasks_that_differ_between_lanes_are_refused() -> None:
    body = "setp.lt.s32 %p1, %r99, 16; selp.b32 %r1, 0xffff, 0xffff0000, %p1;"
    with pytest.raises(SoftGpuError, match="different membermasks"):
        run(body + "vote.sync.ballot.b32 %r10, %p1, %r1;")


# ---- memory --------------------------------------------------------------------------------------
@covers("ld", "ldu", "st", "ldmatrix", "stmatrix", "movmatrix")
@FEW
@given(seed=st.integers(0, 2**32), count=st.sampled_from([1, 2, 4]), trans=st.booleans(),
       back=st.booleans())  # fmt: skip
def test_matrices(seed: int, count: int, trans: bool, back: bool) -> None:
    """ldmatrix[.trans] of scattered rows, movmatrix, stmatrix[.trans] to other scattered rows."""
    rng = np.random.default_rng(seed)
    source = aligned((32, 8), np.uint16)
    source[...] = rng.integers(0, 65536, (32, 8))
    place, target = aligned(32, np.uint32), aligned(32, np.uint32)
    place[:], target[:] = rng.permutation(64)[:32] * 16, rng.permutation(64)[:32] * 16
    fragments, moved, out = (aligned((4, 32), np.uint32) for _ in range(3))
    regs = "{" + ", ".join(f"%r{20 + i}" for i in range(count)) + "}"
    lines = "".join(
        f"st.global.b32 [%rd11+{128 * i}], %r{20 + i};"
        f"movmatrix.sync.aligned.m8n8.trans.b16 %r30, %r{20 + i};"
        f"st.global.b32 [%rd12+{128 * i}], %r30;"
        for i in range(count)
    )
    t, s = (".trans" if x else "" for x in (trans, back))
    body = f"""
    mad.lo.s64 %rd11, %rd60, 4, %rd4; mad.lo.s64 %rd12, %rd60, 4, %rd5;
    mad.lo.s64 %rd13, %rd60, 16, %rd1; mad.lo.s64 %rd14, %rd60, 4, %rd2;
    mad.lo.s64 %rd15, %rd60, 4, %rd3; mad.lo.s64 %rd16, %rd60, 16, %rd6;
    ldu.global.b32 %r1, [%rd14]; ld.global.b32 %r2, [%rd15];
    add.s32 %r1, %r1, %r50; add.s32 %r2, %r2, %r50;
    ld.global.v4.b32 {{%r3,%r4,%r5,%r6}}, [%rd13]; st.shared.v4.b32 [%r1], {{%r3,%r4,%r5,%r6}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{count}{t}.shared.b16 {regs}, [%r1];
    {lines}
    stmatrix.sync.aligned.m8n8.x{count}{s}.shared.b16 [%r2+2048], {regs};
    bar.warp.sync -1; setp.ge.s32 %p1, %r99, {8 * count}; @%p1 bra END;
    ld.shared.v4.b32 {{%r3,%r4,%r5,%r6}}, [%r2+2048]; st.global.v4.b32 [%rd16], {{%r3,%r4,%r5,%r6}};
    END:
    """
    launch(TID + body, [source, place, target, fragments, moved, out],
           options=Options(hazards="raise"))  # fmt: skip
    for i in range(count):
        matrix = source[8 * i : 8 * i + 8]
        held = matrix.T if trans else matrix
        assert fragments[i].tolist() == [
            int(held[n // 4, n % 4 * 2]) | int(held[n // 4, n % 4 * 2 + 1]) << 16 for n in range(32)
        ]
        turned = np.ascontiguousarray(held.T)
        assert moved[i].tolist() == turned.view(np.uint32).reshape(-1).tolist()
        got = out.reshape(-1).view(np.uint16).reshape(32, 8)[8 * i : 8 * i + 8]
        np.testing.assert_array_equal(got, turned if back else held)


ATOMS: dict[str, Callable[[int, int], int]] = {
    "add": lambda o, b: o + b, "min": min, "max": max, "and": int.__and__, "or": int.__or__,
    "xor": int.__xor__, "exch": lambda o, b: b, "inc": lambda o, b: 0 if o >= b else o + 1,
    "dec": lambda o, b: b if o == 0 or o > b else o - 1,
}  # fmt: skip


@covers("atom", "red")
@pytest.mark.parametrize("name", sorted(ATOMS))
@FEW
@given(data=st.data(), space=st.sampled_from(["global", "shared", ""]))
def test_atomics(name: str, data: Any, space: str) -> None:
    """Lanes act one after the other, in ascending order."""
    kind = data.draw(st.sampled_from(["u32", "s32", "u64", "s64"]))
    if name in ("inc", "dec"):
        kind = "u32"
    typed = "b" + kind[1:] if name in ("and", "or", "xor", "exch") else kind
    if name == "add" and kind == "s64":
        typed = "u64"
    size, reg = int(kind[1:]) // 8, "%r" if kind[1:] == "32" else "%rd"
    x, start = data.draw(ints(kind)), int(data.draw(ints(kind))[0])
    dtype = numpy_type(kind)
    cell, old, red = (aligned(n, dtype) for n in (2, 32, 2))
    cell[0] = red[0] = start
    middle = "" if not space else "." + space
    target = "%rd1" if space != "shared" else "%r50"
    move = f"ld.global.b{8 * size} {reg}40, [%rd1]; @%p50 st.shared.b{8 * size} [%r50], {reg}40;"
    body = f"""
    {move} bar.warp.sync -1; mad.lo.s64 %rd11, %rd60, {size}, %rd2;
    mad.lo.s64 %rd12, %rd60, {size}, %rd3; ld.global.b{8 * size} {reg}41, [%rd11];
    atom{middle}.{name}.{typed} {reg}42, [{target}], {reg}41;
    st.global.b{8 * size} [%rd12], {reg}42;
    red.global.{"add.u" + kind[1:] if name == "exch" else f"{name}.{typed}"} [%rd4], {reg}41;
    bar.warp.sync -1;
    """
    if space == "shared":
        body += (
            f"ld.shared.b{8 * size} {reg}40, [%r50]; @%p50 st.global.b{8 * size} [%rd1], {reg}40;"
        )
    launch(TID + body, [cell, x, old, red])
    value, seen, total = start, [], start
    for b in x.tolist():
        seen.append(value)
        value = wrap(ATOMS[name](value, b), dtype)
        total = wrap(total + b, dtype)
    assert old.tolist() == seen and int(cell[0]) == value
    assert int(red[0]) == (total if name == "exch" else value)


@covers("atom", "red")
def test_float_and_compare_and_swap_atomics() -> None:
    x = np.arange(1, 33, dtype=np.float32) * np.float32(0.1)
    tiny = np.full(32, 2.0**-140, np.float32)
    cells = aligned(8, np.uint32)
    launch(
        TID
        + """
    mad.lo.s64 %rd10, %rd60, 4, %rd2; ld.global.b32 %r1, [%rd10];
    mad.lo.s64 %rd11, %rd60, 4, %rd3; ld.global.b32 %r2, [%rd11];
    red.global.add.f32 [%rd1], %r1; red.global.add.f32 [%rd1+4], %r2;
    @%p50 st.shared.b32 [%r50], 0; bar.warp.sync -1;
    atom.shared.add.f32 %r3, [%r50], %r2; bar.warp.sync -1;
    ld.shared.b32 %r4, [%r50]; @%p50 st.global.b32 [%rd1+8], %r4;
    atom.global.cas.b32 %r5, [%rd1+12], %r99, 7;
    mov.b32 %r6, 0x40003C00; red.global.add.noftz.f16x2 [%rd1+16], %r6;
    mov.b32 %r7, 0x40003F80; red.global.add.noftz.bf16x2 [%rd1+20], %r7;
    """,
        [cells, x, tiny],
    )
    total = np.float32(0)
    for v in x:
        total = np.float32(total + v)
    f = cells.view(np.float32)
    assert f[0] == total
    assert f[1] == 0.0 and f[2] == np.float32(32 * 2.0**-140)  # global memory flushes
    assert cells[3] == 7  # lane 0 swaps 0 for 7, lane 7 swaps 7 for 7
    assert cells[4:5].view(np.float16).tolist() == [32.0, 64.0]
    halves = torch.from_numpy(cells[5:6].view(np.int16).copy()).view(torch.bfloat16)
    assert halves.tolist() == [32.0, 64.0]


# ---- asynchronous copies -------------------------------------------------------------------------
@covers("cp.async.ca", "cp.async.cg", "cp.async.commit_group", "cp.async.wait_group",
        "cp.async.wait_all")  # fmt: skip
def test_cp_async_groups() -> None:
    """Four groups; wait_group N lets the last N stay in flight, so that their target is poison."""
    for keep in (0, 1, 2, 3, None):
        cp_async_groups(keep)


def cp_async_groups(keep: int | None) -> None:
    source, out = aligned((4, 32, 4), np.uint32), aligned((4, 32, 4), np.uint32)
    source[...] = np.arange(512).reshape(source.shape)
    body = "mad.lo.s64 %rd10, %rd60, 16, %rd2; mad.lo.s64 %rd11, %rd60, 16, %rd1;"
    body += "mad.lo.s32 %r1, %r99, 16, %r50;"
    sizes = [16, 16, 8, 4]
    for g, size in enumerate(sizes):
        form = "cg" if size == 16 else "ca"
        body += f"cp.async.{form}.shared.global [%r1+{512 * g}], [%rd10+{512 * g}], {size};"
        body += "cp.async.commit_group;" if g < 3 or keep is not None else ""
    body += "cp.async.wait_all;" if keep is None else f"cp.async.wait_group {keep};"
    for g in range(4):
        body += f"ld.shared.v4.b32 {{%r3,%r4,%r5,%r6}}, [%r1+{512 * g}];"
        body += f"st.global.v4.b32 [%rd11+{512 * g}], {{%r3,%r4,%r5,%r6}};"
    launch(TID + body, [out, source], options=Options(asynchronous="late"))
    want = source.copy()
    for g, size in enumerate(sizes):
        want[g, :, size // 4 :] = 0xFFFFFFFF
    want[4 - (keep or 0) :] = 0xFFFFFFFF
    np.testing.assert_array_equal(out, want)


@covers("cp.async.mbarrier.arrive", "mbarrier.init", "mbarrier.try_wait")
@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_cp_async_arrives_at_an_mbarrier(mode: str) -> None:
    source = aligned(32, np.uint32)
    source[:] = np.arange(32) * 3
    got = run("""
    @%p50 mbarrier.init.shared.b64 [%r50], 32; bar.warp.sync -1;
    mad.lo.s64 %rd10, %rd60, 4, %rd2; mad.lo.s32 %r1, %r99, 4, %r50;
    cp.async.ca.shared.global [%r1+64], [%rd10], 4;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r50];
    W: mbarrier.try_wait.parity.shared.b64 %p1, [%r50], 0; @!%p1 bra W;
    xor.b32 %r2, %r1, 0; ld.shared.b32 %r10, [%r2+64];
    """, source, options=Options(asynchronous=mode, seed=3))  # fmt: skip
    assert got == source.tolist()


BULK_LOAD = "cp.async.bulk.shared::{}.global.mbarrier::complete_tx::bytes"
WAIT = "W{0}: mbarrier.try_wait.parity.shared.b64 %p51, [%r50], {1}; @!%p51 bra W{0};\n"


@covers("cp.async.bulk.shared", "cp.async.bulk.shared::cluster", "cp.async.bulk.shared::cta",
        "mbarrier.init", "mbarrier.arrive", "mbarrier.try_wait")  # fmt: skip
@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_bulk_loads_multicast_and_between_ctas(mode: str) -> None:
    """CTA 0 loads, multicasts, and copies into CTA 1; all on the barriers of the targets."""
    source = aligned(64, np.uint32)
    source[:] = 1000 + np.arange(64)
    body = (
        """
    mov.u32 %r20, %cluster_ctarank; setp.eq.s32 %p2, %r20, 0; and.pred %p2, %p2, %p50;
    @%p50 mbarrier.init.shared.b64 [%r50], 1;
    @%p50 fence.mbarrier_init.release.cluster;
    mov.u32 %r22, 1; mov.u16 %rs5, 3;
    @%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], 256;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
        + f"@%p2 {BULK_LOAD.format('cta')} [%r50+128], [%rd2], 64, [%r50];\n"
        + "@%p2 cp.async.bulk.shared.global.mbarrier::complete_tx::bytes"
        + " [%r50+192], [%rd2+64], 64, [%r50];\n"
        + f"@%p2 {BULK_LOAD.format('cluster')}.multicast::cluster"
        + " [%r50+256], [%rd2+128], 128, [%r50], %rs5;\n"
        + """
    mapa.shared::cluster.u32 %r30, %r50, %r22;
    add.s32 %r31, %r30, 128;
    """
        + "setp.ne.s32 %p4, %r20, 0; @%p4 bra W0;\n"
        + "W9: mbarrier.try_wait.parity.shared.b64 %p51, [%r50], 0; @!%p51 bra W9;\n"
        + "@%p50 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        + " [%r31], [%r50+128], 128, [%r30];\n"
        + WAIT.format(0, 0)
        + """
    mad.lo.s32 %r1, %r99, 4, %r50; ld.shared.b32 %r2, [%r1+128]; ld.shared.b32 %r3, [%r1+256];
    shl.b32 %r3, %r3, 16; or.b32 %r10, %r2, %r3;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    )
    options = Options(asynchronous=mode, seed=5, hazards="raise")
    got = run(body, source, grid=2, cluster=2, options=options)
    want = [int(source[i]) | int(source[32 + i]) << 16 for i in range(32)]
    assert got == want * 2


@covers("cp.async.bulk.global", "cp.async.bulk.commit_group", "cp.async.bulk.wait_group",
        "cp.async.bulk.wait_group.read", "fence")  # fmt: skip
def test_bulk_groups_belong_to_threads() -> None:
    """Lanes 0 and 1 commit three stores each; lane 0 waits for all but ``keep``, lane 1 not."""
    for read in ("", ".read"):
        for keep in range(3):
            bulk_groups(keep, read)


def bulk_groups(keep: int, read: str) -> None:
    out, landed = aligned((2, 3, 4), np.uint32), aligned((2, 3, 4), np.uint32)
    body = """
    mad.lo.s32 %r1, %r99, 4, %r50; add.s32 %r2, %r99, 1; st.shared.b32 [%r1], %r2;
    fence.proxy.async; bar.warp.sync -1;
    setp.ge.s32 %p1, %r99, 2; @%p1 bra OUT;
    mad.lo.s64 %rd10, %rd60, 48, %rd1; mad.lo.s32 %r3, %r99, 48, %r50;
    """
    for i in range(3):
        body += f"cp.async.bulk.global.shared::cta.bulk_group [%rd10+{16 * i}], [%r3+{16 * i}], 16;"
        body += "cp.async.bulk.commit_group;"
    body += f"@%p50 cp.async.bulk.wait_group{read} {keep};"
    for i in range(6):
        body += f"ld.global.v4.b32 {{%r4,%r5,%r6,%r7}}, [%rd1+{16 * i}];"
        body += f"@%p50 st.global.v4.b32 [%rd2+{16 * i}], {{%r4,%r5,%r6,%r7}};"
    launch(TID + body + "OUT:\n", [out, landed], options=Options(asynchronous="late"))
    assert out.reshape(-1).tolist() == list(range(1, 25))  # by the end all have landed
    assert landed[0].reshape(-1).tolist() == [x * (x <= 12 - 4 * keep) for x in range(1, 13)]
    assert not landed[1].any()


@covers("cp.async.bulk.tensor", "mbarrier.init", "mbarrier.arrive", "mbarrier.try_wait")
@pytest.mark.parametrize("swizzle", range(4))
@FEW
@given(data=st.data())
def test_tensor_copies(swizzle: int, data: Any) -> None:
    """A box anywhere, also outside, of a random tensor: loaded (zeros outside), then stored."""
    rank = data.draw(st.integers(1, 5))
    dtype = np.dtype(data.draw(st.sampled_from([np.uint8, np.uint16, np.uint32])))
    span = {0: 128, 1: 32, 2: 64, 3: 128}[swizzle]
    inner = data.draw(st.integers(1, span // 16)) * 16 // dtype.itemsize if swizzle == 0 else (
        span // dtype.itemsize)  # fmt: skip
    most = (9, 3, 2, 2)
    box = (inner, *(data.draw(st.integers(1, n)) for n in most[: rank - 1]))
    extent = (data.draw(st.integers(1, 2 * inner)), *(
        data.draw(st.integers(1, 5)) for _ in range(rank - 1)))  # fmt: skip
    coords = [data.draw(st.integers(-b, e)) for b, e in zip(box, extent, strict=True)]
    pitch = -(-extent[0] * dtype.itemsize // 16) * 16 // dtype.itemsize
    tensor = aligned((*reversed(extent[1:]), pitch), dtype)
    seed = data.draw(st.integers(0, 2**32))
    tensor[...] = np.random.default_rng(seed).integers(1, np.iinfo(dtype).max, tensor.shape)
    copy = aligned(tensor.shape, dtype)
    strides = tuple(reversed(tensor.strides[:-1]))
    maps = [encode_map(x, extent, strides, box, swizzle) for x in (tensor, copy)]
    # the oracle: pad the tensor on all sides, slice
    real = tensor[..., : extent[0]]
    width = [(b, b) for b in reversed(box)]
    dense = np.pad(real, width)[tuple(
        slice(c + b, c + 2 * b) for c, b in zip(reversed(coords), reversed(box), strict=True)
    )]  # fmt: skip
    whole = -(-dense.nbytes // 1024) * 1024  # read back to the end of the last swizzle atom
    out = aligned(whole, np.uint8)
    where = ", ".join(map(str, coords))
    body = f"""
    @%p50 mbarrier.init.shared.b64 [%r50], 1; @%p50 fence.mbarrier_init.release.cluster;
    @%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], {dense.nbytes};
    bar.warp.sync -1; add.s32 %r1, %r50, 1024; mov.u64 %rd10, arg1; mov.u64 %rd11, arg2;
    @%p50 cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%rd10, {{{where}}}], [%r50];
    {WAIT.format(0, 0)}
    @%p50 cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group
        [%rd11, {{{where}}}], [%r1];
    @%p50 cp.async.bulk.commit_group; @%p50 cp.async.bulk.wait_group 0;
    mul.lo.s32 %r3, %r99, 16;
    COPY: setp.ge.s32 %p1, %r3, {whole}; @%p1 bra END;
    add.s32 %r4, %r3, %r1; ld.shared.v4.b32 {{%r5,%r6,%r7,%r8}}, [%r4];
    cvt.u64.u32 %rd12, %r3; add.s64 %rd12, %rd12, %rd1;
    st.global.v4.b32 [%rd12], {{%r5,%r6,%r7,%r8}};
    add.s32 %r3, %r3, 512; bra COPY;
    END:
    """
    mode = data.draw(st.sampled_from(["early", "late", "random"]))
    launch(TID + body, [out, *maps, tensor, copy], smem=65536, options=Options(asynchronous=mode))
    flat = np.ascontiguousarray(dense).reshape(-1).view(np.uint8)
    got = [int(out[swizzled(i, swizzle)]) for i in range(dense.nbytes)]
    assert got == flat.tolist()
    back = np.zeros_like(np.pad(real, width))
    back[tuple(
        slice(c + b, c + 2 * b) for c, b in zip(reversed(coords), reversed(box), strict=True)
    )] = dense  # fmt: skip
    inside = tuple(slice(b, b + e) for b, e in zip(reversed(box), reversed(extent), strict=True))
    np.testing.assert_array_equal(copy[..., : extent[0]], back[inside])
    assert not copy[..., extent[0] :].any()


# ---- mbarriers -----------------------------------------------------------------------------------
class ModelBarrier:
    """The manual's mbarrier: a phase ends when nothing is pending, neither arrivals nor bytes."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.phase = self.bytes = 0

    def step(self, arrivals: int = 0, nbytes: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += nbytes
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


@covers("mbarrier.init", "mbarrier.arrive", "mbarrier.arrive_drop", "mbarrier.expect_tx",
        "mbarrier.complete_tx", "mbarrier.test_wait", "mbarrier.inval")  # fmt: skip
@FEW
@given(data=st.data())
def test_mbarrier_arithmetic(data: Any) -> None:
    """Random operations of one thread; both parities and an old state are tested after each."""
    count = data.draw(st.integers(1, 6))
    model = ModelBarrier(count)
    body = f"@%p50 mbarrier.init.shared.b64 [%r50], {count}; bar.warp.sync -1;"
    body += "mov.u64 %rd20, 0;\n"
    want: list[int] = []
    token = -1
    for i in range(24):
        choice = data.draw(st.sampled_from(["arrive", "arrive tx", "expect", "complete", "drop"]))
        most = model.pending
        if choice == "arrive" and most:
            n = data.draw(st.integers(1, most))
            token = model.phase
            model.step(n)
            body += f"@%p50 mbarrier.arrive.shared.b64 %rd20, [%r50], {n};"
        elif choice == "arrive tx" and most:
            n = data.draw(st.integers(0, 64)) * 16
            token = model.phase
            model.bytes += n
            model.step(1)
            body += f"@%p50 mbarrier.arrive.expect_tx.shared.b64 %rd20, [%r50], {n};"
        elif choice == "drop" and most and model.count > 1:
            model.count -= 1
            model.step(1)
            body += "@%p50 mbarrier.arrive_drop.shared.b64 _, [%r50];"
        elif choice == "expect":
            n = data.draw(st.integers(1, 64)) * 16
            model.step(0, n)
            body += f"@%p50 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r50], {n};"
        else:  # bytes may also land before they are expected
            n = model.bytes if model.bytes > 0 else 32
            model.step(0, -n)
            body += f"@%p50 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r50], {n};"
        state = (model.phase & 1) + 2 * (model.phase & 1 == 0)
        old = 4 if token >= 0 and model.phase != token else 0
        want.append(state | old)
        body += f"""
        mbarrier.test_wait.parity.shared.b64 %p1, [%r50], 0;
        mbarrier.test_wait.parity.shared.b64 %p2, [%r50], 1; mov.u32 %r1, 0; mov.pred %p3, 0;
        {"@%p50 mbarrier.test_wait.shared.b64 %p3, [%r50], %rd20;" if token >= 0 else ""}
        @%p1 or.b32 %r1, %r1, 1; @%p2 or.b32 %r1, %r1, 2; @%p3 or.b32 %r1, %r1, 4;
        @%p50 st.global.b32 [%rd1+{4 * i}], %r1;
        """
    # leave no bytes behind, as the end of a cluster demands
    if model.bytes:
        way = "complete_tx" if model.bytes > 0 else "expect_tx"
        body += f"@%p50 mbarrier.{way}.shared.b64 [%r50], {abs(model.bytes)};"
    body += "@%p50 mbarrier.inval.shared.b64 [%r50];"
    out = aligned(24, np.uint32)
    launch(TID + body, [out])
    assert out.tolist() == want


@covers("mbarrier.inval", "mbarrier.arrive")
def test_an_invalidated_mbarrier_is_gone() -> None:
    body = "@%p50 mbarrier.init.shared.b64 [%r50], 1; @%p50 mbarrier.inval.shared.b64 [%r50];"
    with pytest.raises(BarrierError, match="not initialised"):
        run(body + "@%p50 mbarrier.arrive.shared.b64 _, [%r50];")


# ---- barriers, clusters --------------------------------------------------------------------------
@covers("bar.sync", "barrier.sync", "bar.cta.sync", "barrier.cta.sync", "bar.arrive",
        "barrier.arrive", "bar.cta.arrive", "barrier.cta.arrive")  # fmt: skip
@pytest.mark.parametrize("seed", range(4))
def test_named_barriers_by_every_name(seed: int) -> None:
    """Warps 0 and 1 hand a value to warp 2 four times, each time through another spelling."""
    names = [("bar", "bar"), ("barrier", "barrier"), ("bar.cta", "bar.cta"),
             ("barrier.cta", "barrier.cta")]  # fmt: skip
    body = "shr.u32 %r2, %r99, 5; mov.u32 %r10, 0; setp.eq.s32 %p1, %r2, 2; @%p1 bra TAKE;\n"
    body += "mad.lo.s32 %r1, %r99, 4, %r50;\n"
    for i, (_, give) in enumerate(names):
        body += f"add.s32 %r3, %r99, {i}; st.shared.b32 [%r1+{256 * i}], %r3;"
        body += f"{give}.arrive {i + 1}, 96;\n"
    body += "bra OUT; TAKE: and.b32 %r4, %r99, 31; mad.lo.s32 %r1, %r4, 4, %r50;\n"
    for i, (take, _) in enumerate(names):
        body += f"{take}.sync {i + 1}, 96; ld.shared.b32 %r5, [%r1+{256 * i}];"
        body += f"ld.shared.b32 %r6, [%r1+{256 * i + 128}]; add.s32 %r10, %r10, %r5;"
        body += "add.s32 %r10, %r10, %r6;\n"
    got = run(body + "OUT: bar.sync 0;\n", threads=96, options=Options(seed=seed, hazards="raise"))
    assert got == [0] * 64 + [sum(2 * j + 32 + 2 * i for i in range(4)) for j in range(32)]


@covers("barrier.cluster.arrive", "barrier.cluster.wait", "st.async", "mapa", "ld", "st",
        "mbarrier.try_wait")  # fmt: skip
@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_every_cta_sends_to_the_next(mode: str) -> None:
    """A ring of four: st.async of 4, 8 and 16 bytes counts on the receiver's mbarrier."""
    body = (
        """
    @%p50 mbarrier.init.shared.b64 [%r50], 1; @%p50 fence.mbarrier_init.release.cluster;
    @%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], 896;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r20, %cluster_ctarank; add.s32 %r21, %r20, 1; and.b32 %r21, %r21, 3;
    mapa.shared::cluster.u32 %r22, %r50, %r21; mad.lo.s32 %r23, %r99, 16, %r22;
    mad.lo.s32 %r24, %r20, 100, %r99; mov.b64 %rd10, {%r24, %r20};
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r23+128], %r24, [%r22];
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%r23+640], %rd10, [%r22];
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r23+1152],
        {%r24, %r20, %r99, %r24}, [%r22];
    """
        + WAIT.format(0, 0)
        + """
    mad.lo.s32 %r1, %r99, 16, %r50; ld.shared.b32 %r2, [%r1+128]; ld.shared.b32 %r3, [%r1+644];
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r1+1152];
    add.s32 %r10, %r2, %r3; add.s32 %r10, %r10, %r4; add.s32 %r10, %r10, %r5;
    add.s32 %r10, %r10, %r6; add.s32 %r10, %r10, %r7;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    )
    options = Options(asynchronous=mode, seed=2, hazards="raise")
    got = run(body, grid=4, cluster=4, options=options)
    want = []
    for rank in range(4):
        sender = (rank - 1) % 4
        want += [3 * (100 * sender + i) + 2 * sender + i for i in range(32)]
    assert got == want


# ---- what stops ----------------------------------------------------------------------------------
@covers("trap", "brkpt")
def test_traps_stop() -> None:
    for name in ("trap", "brkpt"):
        with pytest.raises(SoftGpuError, match=f"executed {name}"):
            run(f"{name};")
    launch("setp.ne.s32 %p1, %r1, %r1; @%p1 trap; @%p1 brkpt;", [])


@pytest.mark.parametrize("text", [
    "mul.wide.s64 %rd1, %rd2, %rd3", "redux.sync.add.f32 %f1, %f2, -1", "add.s32 %r1, %r2",
    "ld.global.b32 %r1, %rd1", "st.shared.b32 %r1, %r2", "mov.u32 %r1, %envreg3",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%r1], [%rd1], [%r2]",
])  # fmt: skip
def test_malformed_instructions_stop_where_they_are_reached(text: str) -> None:
    launch(f"bra END; {text}; END:", [])
    with pytest.raises(UnmodelledInstruction, match=re.escape(text)):
        launch(f"{text};", [])


def test_matrix_moves_need_the_whole_warp() -> None:
    move = "movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;"
    with pytest.raises(SoftGpuError, match="movmatrix needs all 32 lanes"):
        launch(f"mov.u32 %r1, %tid.x; setp.gt.s32 %p1, %r1, 7; @%p1 exit; {move}", [])


@covers("bar.red", "barrier.red", "bar.cta.red", "barrier.cta.red", "mbarrier.pending_count")
def test_named_but_unmodelled_instructions_say_so() -> None:
    for text in (
        "bar.red.popc.u32 %r1, 0, %p1", "barrier.red.popc.u32 %r1, 0, %p1",
        "bar.cta.red.popc.u32 %r1, 0, %p1", "barrier.cta.red.and.pred %p2, 0, %p1",
        "mbarrier.pending_count.b64 %r1, %rd1",
    ):  # fmt: skip
        with pytest.raises(UnmodelledInstruction) as error:
            launch(f".loc 1 42 7\n{text};", [])
        assert text in str(error.value) and "file 1:42 (PTX line" in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["cvt.rn.sat.f32.s32 %f1, %r1", "cvt.rz.f64.s64 %fd1, %rd1", "isspacep.const %p1, %rd1",
     "fma.rz.f32 %f1, %f1, %f1, %f1", "max.xorsign.abs.f32 %f1, %f1, %f1",
     "slct.sparkling.u32.s32 %r1, %r1, %r1, %r1", "cvt.pack.sat.u8.s32.b32 %r1, %r1, %r1, %r1"],
)  # fmt: skip
def test_forms_that_are_not_modelled_stop(text: str) -> None:
    with pytest.raises(UnmodelledInstruction, match="PTX line"):
        launch(text + ";", [])


def test_compiled_variants_have_no_unmodelled_form(variant_dir: Path) -> None:
    files = sorted(variant_dir.glob("*.ptx"))
    if not files:
        pytest.skip("nothing is built")
    assert not coverage(files).missing


ELSEWHERE = {  # registered name -> file whose PTX uses it
    name: "test_wgmma.py"
    for name in ("wgmma.mma_async", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")
}


def test_every_registered_name_has_a_test() -> None:
    for name, file in ELSEWHERE.items():
        assert f"{name}." in (HERE / file).read_text(), f"{name} is not in {file}"
    missing = set(decode._BUILDERS) - CLAIMED - set(ELSEWHERE)
    assert not missing, f"registered, but no test: {sorted(missing)}"
    assert set(decode._BUILDERS) >= CLAIMED, "tests claim names that are not registered"

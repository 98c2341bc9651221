"""Software GPU: integer arithmetic, bits, bytes, comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softgpu.testing import aligned, launch
from tests.support.ptx import FEW, check, covers, ints, numpy_type, wrap


def trunc_div(a: int, b: int) -> int:
    """Towards 0; by 0 all bits are set."""
    if b == 0:
        return -1
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
    e = data.draw(ints("u32"))
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
        (f"div.{kind}", t, "a, b", trunc_div),
        (f"rem.{kind}", t, "a, b", lambda x, y: x - y * trunc_div(x, y)),
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
        cases += [
            (f"shr.{logic}", t, "a, e", lambda x, n: x >> min(n, 64)),
            ("neg.s32", np.int32, "f", lambda x: -x),
            ("abs.s32", np.int32, "f", abs),
        ]
    if bits < 64:
        wide = np.dtype(f"{t.kind}{2 * t.itemsize}")
        g = data.draw(ints(f"{kind[0]}{2 * bits}"))
        cases += [
            (f"mul.wide.{kind}", wide, "a, b", lambda x, y: x * y),
            (f"mad.wide.{kind}", wide, "a, b, g", lambda x, y, z: x * y + z),
        ]
    else:
        g = a
    check(cases, a=a, b=b, c=c, e=e, f=data.draw(ints("s32")), g=g)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_shifts_by_constants(kind: str) -> None:
    """Counts above the width give what the width gives, those with the sign's bit too."""
    t, bits = numpy_type(kind), int(kind[1:])
    rng = np.random.default_rng(0)
    a = rng.integers(np.iinfo(t).min, np.iinfo(t).max, 32, t, endpoint=True)
    cases: list[Any] = []
    for n in (0, 1, bits - 1, bits, bits + 1, 200, 0x8000, 0xFFFF, 0x80000000, 0xFFFFFFFF):
        cases += [
            (f"shl.b{bits}", t, f"a, {n}", lambda x, n=n: x << min(n, 64)),
            (f"shr.{kind}", t, f"a, {n}", lambda x, n=n: x >> min(n, 64)),
        ]
    check(cases, a=a)


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
            ("max.u16x2", u32, "a, b", packed("u16", high)),
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

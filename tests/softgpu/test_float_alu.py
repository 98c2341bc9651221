"""Software GPU: floating-point arithmetic with one rounding, special functions, comparisons."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ptx import FEW, check, compare, covers, evaluate, numbers, rounded, same, values


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


@covers("add", "sub", "fma")
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@FEW
@given(data=st.data())
def test_mixed_precision(kind: str, data: Any) -> None:
    """16-bit sources and an f32 addend, rounded once to f32."""
    a, b, c = data.draw(values(kind)), data.draw(values(kind)), data.draw(values("f32"))
    cases = [
        ("add", "a, c", lambda x, y, z: exactly("add", x, z, 0.0, "f32", "rn")),
        ("sub", "a, c", lambda x, y, z: exactly("sub", x, z, 0.0, "f32", "rn")),
        ("fma", "a, b, c", lambda x, y, z: exactly("fma", x, y, z, "f32", "rn")),
    ]
    got = evaluate(
        [(f"{name}.rn.f32.{kind}", np.uint32, operands) for name, operands, _ in cases],
        a=a, b=b, c=c,
    )  # fmt: skip
    rows = list(zip(numbers(a, kind), numbers(b, kind), numbers(c, "f32"), strict=True))
    for (name, _, oracle), result in zip(cases, got, strict=True):
        for value, row in zip(numbers(result, "f32"), rows, strict=True):
            assert same(value, oracle(*row)), f"{name}: {row} gave {value!r}"


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


def test_nan_results_are_canonical() -> None:
    bad = np.array([np.inf, -np.inf, 0.0, 1.0] * 8, np.float32)
    bad[3::4] = np.array([0xFFC12345], np.uint32).view(np.float32)
    other = np.array([-np.inf, np.inf, np.nan, 1.0] * 8, np.float32)
    zero, one = np.zeros(32, np.float32), np.ones(32, np.float32)
    cases = [
        ("add.f32", np.uint32, "a, b"), ("mul.f32", np.uint32, "c, d"),
        ("fma.rn.f32", np.uint32, "a, e, b"),
    ]  # fmt: skip
    infinite = np.where(bad == 0, np.float32(np.inf), bad)
    for (opcode, _, _), got in zip(
        cases, evaluate(cases, a=bad, b=other, c=zero, d=infinite, e=one), strict=True
    ):
        assert got.tolist() == [0x7FFFFFFF] * 32, opcode


def test_special_functions_at_the_edges() -> None:
    x = np.array([-np.inf, -200, -126, 0, 128, np.inf, np.nan, -0.0] * 4, np.float32)
    (got,) = evaluate([("ex2.approx.ftz.f32", np.float32, "a")], a=x)
    want = np.array([0, 0, 2.0**-126, 1, np.inf, np.inf, np.nan, 1], np.float32)
    np.testing.assert_array_equal(got[:8], want)
    x = np.array([0, -1, 1, np.inf, np.nan, 2, 0.5, 4] * 4, np.float32)
    (got,) = evaluate([("lg2.approx.ftz.f32", np.float32, "a")], a=x)
    step = np.float32(2.0**-23)  # the unit complements a negative sum: a little above -1
    want = np.array([-np.inf, np.nan, 0, np.inf, np.nan, 1, step - 1, 2], np.float32)
    np.testing.assert_array_equal(got[:8], want)

"""Software GPU: arithmetic, conversion, movement against integers, fractions and torch."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from softgpu import UnmodelledInstruction, floats
from softgpu.testing import launch

RNG = np.random.default_rng(7)
SIZES = {"16": 2, "32": 4, "64": 8}


def lanes(opcode: str, inputs: list[np.ndarray], out: Any, tail: str = "") -> np.ndarray:
    """Runs ``opcode d, a, b, ...{tail}`` with one element of each array per lane."""
    prefix = {2: "%rs", 4: "%r", 8: "%rd"}
    result = np.zeros(32, out)
    body, names = "mov.u32 %r99, %tid.x;\n", []
    for i, x in enumerate([result, *inputs]):
        size = x.dtype.itemsize
        body += f"mul.wide.u32 %rd50, %r99, {size}; add.s64 %rd{40 + i}, %rd{i + 1}, %rd50;\n"
        names.append(f"{prefix[size]}{20 + i}")
        if i:
            body += f"ld.global.b{8 * size} {names[i]}, [%rd{40 + i}];\n"
    body += f"{opcode} {', '.join(names)}{tail};\n"
    body += f"st.global.b{8 * result.dtype.itemsize} [%rd40], {names[0]};"
    launch(body, [result, *inputs])
    return result


def integers(kind: str) -> np.ndarray:
    """32 values of a PTX integer type, edges included."""
    bits = int(kind[1:])
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
    edges = [0, 1, 2, 3, -1, -2, 1 << (bits - 1), (1 << (bits - 1)) - 1, 5, 31, 32, 33]
    rest = [random.Random(bits).getrandbits(bits) for _ in range(20)]
    values = [x & ((1 << bits) - 1) for x in edges + rest]
    return RNG.permutation(np.array(values, f"u{bits // 8}")).view(dtype)


def wrap(value: int, dtype: np.dtype) -> int:
    bits = 8 * dtype.itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value


def trunc_div(a: int, b: int) -> int:
    return -1 if b == 0 else int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b))


ORACLES: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "max": max,
    "min": min,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "div": trunc_div,
    "rem": lambda a, b: a if b == 0 else a - b * trunc_div(a, b),
}


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "u16", "s16"])
@pytest.mark.parametrize("name", sorted(ORACLES))
def test_integer_binary(name: str, kind: str) -> None:
    a, b = integers(kind), integers(kind)
    typed = kind if name not in ("and", "or", "xor") else "b" + kind[1:]
    got = lanes(f"{name}.{typed}", [a, b], a.dtype)
    want = [wrap(ORACLES[name](int(x), int(y)), a.dtype) for x, y in zip(a, b)]
    assert got.tolist() == want


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_multiply_high_and_mad(kind: str) -> None:
    a, b, c = integers(kind), integers(kind), integers(kind)
    bits = int(kind[1:])
    got = lanes(f"mul.hi.{kind}", [a, b], a.dtype)
    assert got.tolist() == [wrap(int(x) * int(y) >> bits, a.dtype) for x, y in zip(a, b)]
    got = lanes(f"mad.lo.{kind}", [a, b, c], a.dtype)
    want = [wrap(int(x) * int(y) + int(z), a.dtype) for x, y, z in zip(a, b, c)]
    assert got.tolist() == want


@pytest.mark.parametrize("kind", ["s32", "u32", "s16", "u16"])
def test_multiply_wide(kind: str) -> None:
    a, b = integers(kind), integers(kind)
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    got = lanes(f"mul.wide.{kind}", [a, b], wide)
    assert got.tolist() == [int(x) * int(y) for x, y in zip(a, b)]


@pytest.mark.parametrize("kind", ["s32", "u32", "b32", "s64", "u64", "s16", "u16"])
def test_shifts(kind: str) -> None:
    typed = kind.replace("b", "u")
    a, bits = integers(typed), int(kind[1:])
    count = np.array([0, 1, 5, bits - 1, bits, bits + 1, 100, 0xFFFFFFFF] * 4, np.uint32)
    got = lanes(f"shr.{kind}", [a, count], a.dtype)
    assert got.tolist() == [int(x) >> min(int(n), 200) for x, n in zip(a, count)]
    got = lanes(f"shl.b{bits}", [a, count], a.dtype)
    assert got.tolist() == [wrap(int(x) << min(int(n), 200), a.dtype) for x, n in zip(a, count)]


def test_bit_fields() -> None:
    a, b = integers("u32"), integers("u32")
    pos = np.array([0, 3, 31, 32, 40, 7, 16, 24] * 4, np.uint32)
    length = np.array([0, 1, 8, 32, 33, 5, 16, 20] * 4, np.uint32)[::-1].copy()
    got = lanes("bfe.u32", [a, pos, length], np.uint32)
    want = [(int(x) >> int(p)) & ((1 << int(n)) - 1) for x, p, n in zip(a, pos, length)]
    assert got.tolist() == want
    mask = [((1 << int(n)) - 1) << int(p) & 0xFFFFFFFF for p, n in zip(pos, length)]
    got = lanes("bfi.b32", [a, b, pos, length], np.uint32)
    assert got.tolist() == [
        (int(y) & ~k) | ((int(x) << int(p)) & k) for x, y, p, k in zip(a, b, pos, mask)
    ]
    assert lanes("popc.b32", [a], np.uint32).tolist() == [int(x).bit_count() for x in a]
    assert lanes("clz.b32", [a], np.uint32).tolist() == [32 - int(x).bit_length() for x in a]
    assert lanes("brev.b32", [a], np.uint32).tolist() == [int(f"{x:032b}"[::-1], 2) for x in a]
    want = [int(x).bit_length() - 1 & 0xFFFFFFFF for x in a]
    assert lanes("bfind.u32", [a], np.uint32).tolist() == want


def test_prmt_lop3_and_funnel_shift() -> None:
    a, b, c = integers("u32"), integers("u32"), integers("u32")

    def permute(x: int, y: int, selector: int) -> int:
        both = (y << 32 | x).to_bytes(8, "little")
        out = []
        for i in range(4):
            nibble = selector >> (4 * i) & 15
            byte = both[nibble & 7]
            out.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
        return int.from_bytes(bytes(out), "little")

    got = lanes("prmt.b32", [a, b, c], np.uint32)
    assert got.tolist() == [permute(int(x), int(y), int(s)) for x, y, s in zip(a, b, c)]
    got = lanes("lop3.b32", [a, b, c], np.uint32, tail=", 0x96")
    assert got.tolist() == (a ^ b ^ c).tolist()
    n = (c % 64).astype(np.uint32)
    got = lanes("shf.l.wrap.b32", [a, b, n], np.uint32)
    want = [
        ((int(y) << 32 | int(x)) << (int(k) & 31) >> 32) & 0xFFFFFFFF for x, y, k in zip(a, b, n)
    ]
    assert got.tolist() == want
    got = lanes("shf.r.clamp.b32", [a, b, n], np.uint32)
    want = [((int(y) << 32 | int(x)) >> min(int(k), 32)) & 0xFFFFFFFF for x, y, k in zip(a, b, n)]
    assert got.tolist() == want


def test_packed_max_u16x2() -> None:
    a, b = integers("u32"), integers("u32")
    got = lanes("max.u16x2", [a, b], np.uint32)
    want = np.maximum(a.view(np.uint16), b.view(np.uint16)).view(np.uint32)
    assert got.tolist() == want.tolist()


# ---- floating point ------------------------------------------------------------------------------
def floats32(seed: int, count: int = 32) -> np.ndarray:
    """Random bit patterns without NaN, plus awkward values."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    x = np.where(np.isnan(x), np.float32(1.5), x)
    awkward = [0.0, -0.0, 1.0, -1.0, 2.0**-126, 2.0**-149, -(2.0**-140), np.inf, 3.4e38, 65504.0]
    x[: len(awkward)] = np.array(awkward, np.float32)
    return rng.permutation(x).astype(np.float32)


def round32(value: Fraction) -> float:
    """Nearest-even fp32 of an exact fraction, subnormals included."""
    if value == 0:
        return 0.0
    sign, value = (-1 if value < 0 else 1), abs(value)
    e = max(math.floor(math.log2(value)) if value else 0, -126)
    while Fraction(2) ** (e + 1) <= value:
        e += 1
    while e > -126 and Fraction(2) ** e > value:
        e -= 1
    unit = Fraction(2) ** (e - 23)
    n, rest = divmod(value, unit)
    if rest > unit / 2 or (rest == unit / 2 and n % 2):
        n += 1
    result = n * unit
    return sign * (math.inf if result >= Fraction(2) ** 128 else float(result))


def test_fma_rounds_once() -> None:
    rng = random.Random(3)
    cases = []
    for _ in range(2000):
        scale = 2.0 ** rng.randint(-70, 40)
        a = np.float32(rng.uniform(-2, 2) * scale)
        b = np.float32(rng.uniform(-2, 2) * 2.0 ** rng.randint(-80, 20))
        # c near half an ulp of the product, or the other way round: where double rounding shows
        p = float(a) * float(b)
        c = np.float32(p * 2.0 ** rng.choice([-25, -24, 24, 25, 0, 30, -53, -40]))
        cases.append((a, b, c))
    cases += [
        (np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(2.0**-60)),
        (np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(-(2.0**-60))),
        (np.float32(2.0**-100), np.float32(2.0**-49), np.float32(2.0**-149)),
        (np.float32(3 * 2.0**-100), np.float32(2.0**-50), np.float32(2.0**-149)),
    ]
    a, b, c = (np.array(x, np.float32) for x in zip(*cases))
    got = floats.fma32(a, b, c)
    want = [
        round32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c)
    ]
    assert got.tolist() == want


def test_fma_instruction_and_special_values() -> None:
    a, b, c = floats32(1), floats32(2), floats32(3)
    with np.errstate(all="ignore"):
        want = floats.fma32(a, b, c)
    got = lanes("fma.rn.f32", [a, b, c], np.float32)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div.rn"])
def test_float_arithmetic(name: str) -> None:
    a, b = floats32(4), floats32(5)
    with np.errstate(all="ignore"):
        want = {"add": a + b, "sub": a - b, "mul": a * b, "div.rn": a / b}[name]
    np.testing.assert_array_equal(lanes(f"{name}.f32", [a, b], np.float32), want)


def test_nan_results_are_canonical() -> None:
    bad = np.array([np.inf, -np.inf, 0.0, 1.0] * 8, np.float32)
    bad[3::4] = np.array([0xFFC12345], np.uint32).view(np.float32)
    other = np.array([-np.inf, np.inf, np.nan, 1.0] * 8, np.float32)
    for opcode, inputs in (
        ("add.f32", [bad, other]),
        ("mul.f32", [np.zeros(32, np.float32), np.where(bad == 0, np.float32(np.inf), bad)]),
        ("fma.rn.f32", [bad, np.ones(32, np.float32), other]),
    ):
        got = lanes(opcode, inputs, np.float32)
        assert got.view(np.uint32).tolist() == [0x7FFFFFFF] * 32, opcode


def test_flush_to_zero() -> None:
    tiny = np.array([2.0**-127, -(2.0**-149), 2.0**-126, 1.0] * 8, np.float32)
    one = np.ones(32, np.float32)
    got = lanes("mul.ftz.f32", [tiny, one], np.float32)
    want = np.array([0.0, -0.0, 2.0**-126, 1.0] * 8, np.float32)
    assert got.view(np.uint32).tolist() == want.view(np.uint32).tolist()


@pytest.mark.parametrize(("name", "pick"), [("max", np.fmax), ("min", np.fmin)])
def test_extremes(name: str, pick: Any) -> None:
    a, b = floats32(6), floats32(7)
    a[3], b[9], a[11], b[11] = np.nan, np.nan, -0.0, 0.0
    got = lanes(f"{name}.f32", [a, b], np.float32)
    np.testing.assert_array_equal(got, pick(a, b))
    assert np.signbit(got[11]) == (name == "min")
    got = lanes(f"{name}.NaN.f32", [a, b], np.float32)
    assert np.isnan(got[[3, 9]]).all()


@pytest.mark.parametrize("name", ["rz", "rm", "rp"])
def test_directed_rounding(name: str) -> None:
    a, b = floats32(8), floats32(9)
    finite = np.isfinite(a) & np.isfinite(b) & (np.abs(a) < 1e30) & (np.abs(b) < 1e30)
    a, b = np.where(finite, a, np.float32(1)), np.where(finite, b, np.float32(3))
    for kind in ("add", "mul"):
        got = lanes(f"{kind}.{name}.f32", [a, b], np.float32)
        for x, y, r in zip(a, b, got):
            fx, fy = Fraction(float(x)), Fraction(float(y))
            exact = fx + fy if kind == "add" else fx * fy
            if math.isinf(r):
                continue
            assert {"rz": abs(Fraction(float(r))) <= abs(exact), "rm": Fraction(float(r)) <= exact,
                    "rp": Fraction(float(r)) >= exact}[name]  # fmt: skip
            gap = Fraction(float(np.spacing(np.abs(r))))
            assert abs(Fraction(float(r)) - exact) < gap or exact == Fraction(float(r))


@pytest.mark.parametrize(
    ("name", "function", "tolerance"),
    [
        ("ex2.approx.ftz", lambda x: 2.0**x, 2.0**-22),
        ("lg2.approx.ftz", math.log2, 2.0**-22),
        ("rcp.rn", lambda x: 1 / x, 2.0**-24),
        ("rsqrt.approx", lambda x: 1 / math.sqrt(x), 2.0**-22),
        ("sqrt.rn", math.sqrt, 2.0**-24),
    ],
)
def test_special_functions(name: str, function: Any, tolerance: float) -> None:
    x = np.random.default_rng(1).uniform(0.01, 90, 32).astype(np.float32)
    got = lanes(f"{name}.f32", [x], np.float32)
    want = np.array([function(float(v)) for v in x])
    assert (np.abs(got - want) <= tolerance * np.maximum(np.abs(want), 1e-30)).all()


def test_special_functions_at_the_edges() -> None:
    x = np.array([-np.inf, -200, -126, 0, 128, np.inf, np.nan, -0.0] * 4, np.float32)
    got = lanes("ex2.approx.ftz.f32", [x], np.float32)[:8]
    np.testing.assert_array_equal(
        got, np.array([0, 0, 2.0**-126, 1, np.inf, np.inf, np.nan, 1], np.float32)
    )
    x = np.array([0, -1, 1, np.inf, np.nan, 2, 0.5, 4] * 4, np.float32)
    got = lanes("lg2.approx.ftz.f32", [x], np.float32)[:8]
    step = np.float32(2.0**-23)  # the unit complements a negative sum: a little above -1
    np.testing.assert_array_equal(
        got, np.array([-np.inf, np.nan, 0, np.inf, np.nan, 1, step - 1, 2], np.float32)
    )


def test_compare_and_select() -> None:
    a, b = floats32(10), floats32(11)
    a[5] = np.nan
    b[:4] = a[:4]
    for name, function in {
        "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "eq": a == b,
        "ne": (a < b) | (a > b), "neu": ~(a == b), "ltu": (a < b) | np.isnan(a),
        "nan": np.isnan(a), "num": ~np.isnan(a),
    }.items():  # fmt: skip
        got = _compare(name, a, b)
        assert got.tolist() == function.astype(np.uint32).tolist(), name


def _compare(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = np.zeros(32, np.uint32)
    launch(
        f"""mov.u32 %r1, %tid.x; mul.wide.u32 %rd4, %r1, 4;
        add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4; add.s64 %rd7, %rd3, %rd4;
        ld.global.f32 %f1, [%rd6]; ld.global.f32 %f2, [%rd7];
        setp.{name}.f32 %p1, %f1, %f2; selp.b32 %r2, 1, 0, %p1; st.global.b32 [%rd5], %r2;""",
        [out, a, b],
    )
    return out


# ---- conversions ---------------------------------------------------------------------------------
def wide_f32() -> np.ndarray:
    """Every bf16 pattern widened, all rounding neighbours of it, and random patterns."""
    base = np.arange(65536, dtype=np.uint32) << 16
    extra = np.concatenate([base | 0x8000, base | 0x7FFF, base | 0x8001])
    rng = np.random.default_rng(0).integers(0, 1 << 32, 200000, dtype=np.uint32)
    return np.concatenate([base, extra, rng]).view(np.float32)


def test_e4m3_against_torch() -> None:
    x = wide_f32()
    got = floats.to_e4m3(x)
    clamped = torch.from_numpy(x.copy()).clamp(-448, 448)
    want = clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    nan = np.isnan(x)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert (got[nan] == 0x7F).all()
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(floats.E4M3, table)


def test_e5m2_against_torch() -> None:
    x = wide_f32()
    x = x[~np.isnan(x)]
    clamped = torch.from_numpy(x.copy()).clamp(-57344, 57344)
    want = clamped.to(torch.float8_e5m2).view(torch.uint8).numpy()
    np.testing.assert_array_equal(floats.to_e5m2(x), want)
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float().numpy()
    np.testing.assert_array_equal(floats.E5M2, table)


def test_bf16_and_f16_against_torch() -> None:
    x = wide_f32()
    nan = np.isnan(x)
    t = torch.from_numpy(x.copy())
    want = t.bfloat16().view(torch.int16).numpy().view(np.uint16)
    got = floats.to_bf16(x)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert (got[nan] == 0x7FFF).all()
    want = t.half().view(torch.int16).numpy().view(np.uint16)
    with np.errstate(over="ignore"):
        got = floats.to_f16(x)
    np.testing.assert_array_equal(got[~nan], want[~nan])


def test_packed_conversions() -> None:
    a, b = floats32(12), floats32(13)
    got = lanes("cvt.rn.satfinite.e4m3x2.f32", [a, b], np.uint16)
    want = floats.to_e4m3(a).astype(np.uint16) << 8 | floats.to_e4m3(b)
    np.testing.assert_array_equal(got, want)
    got = lanes("cvt.rn.bf16x2.f32", [a, b], np.uint32)
    want = floats.to_bf16(a).astype(np.uint32) << 16 | floats.to_bf16(b)
    np.testing.assert_array_equal(got, want)
    codes = np.random.default_rng(3).integers(0, 65536, 32, dtype=np.uint16)
    got = lanes("cvt.rn.f16x2.e4m3x2", [codes], np.uint32).view(np.float16)
    np.testing.assert_array_equal(got, floats.E4M3[codes.view(np.uint8)].astype(np.float16))


def test_float_to_integer() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, np.nan, np.inf, -np.inf, 7.9, -7.9,
                  2147483520.0, 0.0, 1e-30, 123456.7] * 2, np.float32)  # fmt: skip
    clamp = lambda r: 0 if math.isnan(r) else int(min(max(r, -(2**31)), 2**31 - 1))
    functions = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    for name, function in functions.items():
        got = lanes(f"cvt.{name}.s32.f32", [x], np.int32)
        assert got.tolist() == [clamp(float(function(v))) for v in x], name


def test_integer_conversions() -> None:
    a = integers("s32")
    np.testing.assert_array_equal(
        lanes("cvt.rn.f32.s32", [a], np.float32), a.astype(np.float64).astype(np.float32)
    )
    np.testing.assert_array_equal(lanes("cvt.s64.s32", [a], np.int64), a.astype(np.int64))
    np.testing.assert_array_equal(
        lanes("cvt.u64.u32", [a.view(np.uint32)], np.uint64), a.view(np.uint32).astype(np.uint64)
    )
    h = integers("u16")
    np.testing.assert_array_equal(
        lanes("cvt.s32.s8", [h], np.int32), (h & 0xFF).astype(np.uint8).view(np.int8)
    )
    np.testing.assert_array_equal(lanes("cvt.u32.u8", [h], np.uint32), (h & 0xFF))


def test_half_arithmetic_rounds_once() -> None:
    rng = np.random.default_rng(5)
    a, b, c = (rng.integers(0, 1 << 32, 32, dtype=np.uint32) & 0x3FFF3FFF for _ in range(3))
    got = lanes("fma.rn.bf16x2", [a, b, c], np.uint32).view(np.uint16)
    x, y, z = (floats.bf16_to_f32(t.view(np.uint16)) for t in (a, b, c))
    for g, p, q, r in zip(got, x, y, z):
        exact = Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r))
        value = Fraction(float(floats.bf16_to_f32(np.array([g], np.uint16))[0]))
        below, above = np.array([g - 1, g + 1], np.uint16)
        for neighbour in (below, above):
            other = Fraction(float(floats.bf16_to_f32(np.array([neighbour], np.uint16))[0]))
            assert abs(value - exact) <= abs(other - exact)


# ---- decoding ------------------------------------------------------------------------------------
def test_unmodelled_instruction_names_itself_and_its_line() -> None:
    body = "mov.u32 %r1, %tid.x;\n.loc 1 42 7\nfrobnicate.sync.b32 %r2, %r1;"
    with pytest.raises(UnmodelledInstruction, match=r"frobnicate\.sync\.b32.*(\n.*)*PTX line"):
        launch(body, [])


def test_unknown_modifier_is_refused() -> None:
    with pytest.raises(UnmodelledInstruction, match="modifier .sparkling"):
        launch("add.sparkling.s32 %r1, %r2, %r3;", [])


def test_unreached_unmodelled_instruction_is_harmless() -> None:
    launch("mov.u32 %r1, 0; setp.ne.b32 %p1, %r1, 0; @%p1 frobnicate.b32 %r2, %r1;", [])

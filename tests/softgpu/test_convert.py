"""Software GPU: ``cvt`` among integers and floating-point formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ptx import (
    FEW,
    check,
    covers,
    evaluate,
    ints,
    numbers,
    numpy_type,
    rounded,
    same,
    values,
    wrap,
)


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
    w = data.draw(ints("s32"))
    (got,) = evaluate([("cvt.rn.f32.s32", np.float32, "a")], a=w)
    assert got.tolist() == [rounded(Fraction(v), "f32") for v in w.tolist()]
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


# ---- exponents of block scales -------------------------------------------------------------------
def to_e8m0(x: float, mode: str, satfinite: bool) -> int:
    """The power of two 2^(code - 127) that is not above |x|, or not below it (``rp``)."""
    if math.isnan(x):
        return 255
    if math.isinf(x):
        return 254 if satfinite else 255
    if x == 0:
        return 0
    exact = Fraction(abs(x))
    code = exact.numerator.bit_length() - exact.denominator.bit_length() + 127
    power = Fraction(2) ** (code - 127)
    code -= power > exact
    code += mode == "rp" and Fraction(2) ** (code - 127) != exact
    return min(max(code, 0), 254 if satfinite else 255)


@covers("cvt")
@FEW
@given(data=st.data())
def test_conversions_to_exponents(data: Any) -> None:
    """Of f32 and of pairs of bf16, into the upper byte and the lower one."""
    a, b = data.draw(values("f32")), data.draw(values("f32"))
    pair = data.draw(values("bf16")).astype(np.uint32) << 16 | data.draw(values("bf16"))
    modes = [(r, s) for r in ("rz", "rp") for s in ("", ".satfinite")]
    got = evaluate(
        [(f"cvt.{r}{s}.ue8m0x2.f32", np.uint16, "a, b") for r, s in modes]
        + [(f"cvt.{r}{s}.ue8m0x2.bf16x2", np.uint16, "c") for r, s in modes],
        a=a, b=b, c=pair,
    )  # fmt: skip
    halves = [(pair >> 16).astype(np.uint16), pair.astype(np.uint16)]
    sources = [(numbers(a, "f32"), numbers(b, "f32"))] * 4
    sources += [(numbers(halves[0], "bf16"), numbers(halves[1], "bf16"))] * 4
    for (mode, sat), result, (high, low) in zip(modes * 2, got, sources, strict=True):
        for value, x, y in zip(result, high, low, strict=True):
            want = to_e8m0(x, mode, bool(sat)) << 8 | to_e8m0(y, mode, bool(sat))
            assert int(value) == want, (mode, sat, x, y)


@covers("cvt")
def test_exponents_as_bf16() -> None:
    for start in range(0, 256, 32):
        codes = np.arange(start, start + 32, dtype=np.uint16)
        pair = codes << 8 | (255 - codes)
        [got] = evaluate([("cvt.rn.bf16x2.ue8m0x2", np.uint32, "a")], a=pair)
        for half, code in ((got >> 16, codes), (got & 0xFFFF, 255 - codes)):
            for value, c in zip(numbers(half.astype(np.uint16), "bf16"), code, strict=True):
                assert same(value, math.nan if c == 255 else 2.0 ** (int(c) - 127))

"""Software GPU: the sum of a tcgen05.mma against the same rules in exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from softgpu import blackwell
from softgpu.tensor_core import half_step_numpy

FORMATS = {  # torch type, integer type, exponent of the smallest normal number
    "e4m3": (torch.float8_e4m3fn, torch.uint8, -6), "e5m2": (torch.float8_e5m2, torch.uint8, -14),
    "f16": (torch.float16, torch.int16, -14), "bf16": (torch.bfloat16, torch.int16, -126),
}  # fmt: skip
NAN = 0x7FFFFFFF


def numbers(kind: str, shape: tuple[int, ...], rng: np.random.Generator, style: str) -> np.ndarray:
    """float32 values of a format: all bit patterns, or normal ones with few or many zeros."""
    dtype, raw, _ = FORMATS[kind]
    if style in ("normal", "sparse"):
        x = rng.standard_normal(shape) * (rng.random(shape) < {"normal": 0.7, "sparse": 0.1}[style])
        return torch.from_numpy(x).to(dtype).float().numpy()
    bits = rng.integers(0, 1 << 8 * raw.itemsize, shape)
    codes = torch.from_numpy(bits.astype(np.uint8 if raw == torch.uint8 else np.int16))
    x = codes.view(dtype).float().numpy()
    return x if style == "special" else np.where(np.isfinite(x), x, np.float32(0))


def exponent(x: Fraction, smallest: int) -> int:
    e = x.numerator.bit_length() - x.denominator.bit_length()
    e -= Fraction(2) ** e > abs(x)
    return max(e, smallest)


def cut(x: Fraction, unit: Fraction) -> Fraction:
    """Toward zero to a multiple."""
    return math.trunc(x / unit) * unit


def step(acc: float, a: list[float], b: list[float], kinds: tuple[str, str]) -> int:
    """The bits of one accumulator."""
    products = [x * y for x, y in zip(a, b, strict=True)]
    plain = math.fsum(products) if all(map(math.isfinite, products)) else sum(products)
    if not math.isfinite(plain) or not math.isfinite(acc):
        total = plain + acc
        if math.isnan(total):
            return NAN
        return int(np.array([total], np.float32).view(np.uint32)[0])
    low = [FORMATS[k][2] for k in kinds]
    exponents = [
        exponent(Fraction(x), low[0]) + exponent(Fraction(y), low[1])
        for x, y in zip(a, b, strict=True) if x and y
    ]  # fmt: skip
    exponents += [exponent(Fraction(acc), -126)] if acc else []
    unit = Fraction(2) ** (max([*exponents, -133]) - 25)
    addends = [Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)] + [Fraction(acc)]
    total = sum((cut(x, unit) for x in addends), Fraction(0))
    if total:
        total = cut(total, Fraction(2) ** (exponent(total, -126) - 23))
    with np.errstate(over="ignore"):
        return int(np.array([float(total)], np.float32).view(np.uint32)[0])


ACCUMULATORS = [0.0, 1e-44, 1e-30, 1e-3, 1.0, 1e4, 1e9, 1e30, math.inf, math.nan]


@pytest.mark.parametrize("style", ["any", "normal", "sparse", "special"])
@pytest.mark.parametrize(
    "kinds",
    [("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("f16", "f16"),
     ("bf16", "bf16")],
)  # fmt: skip
def test_sum_in_fractions(kinds: tuple[str, str], style: str) -> None:
    rng = np.random.default_rng(5)
    k = 32 if kinds[0].startswith("e") else 16
    a, b = numbers(kinds[0], (10, k), rng, style), numbers(kinds[1], (4, k), rng, style)
    acc = rng.standard_normal((10, 4)) * np.array(ACCUMULATORS)[:, None]
    acc = acc.astype(np.float32)
    name = kinds[0] if kinds[0] == kinds[1] else "/".join(kinds)
    got = blackwell(acc, a, b, name).view(np.uint32)
    for i in range(10):
        for j in range(4):
            want = step(float(acc[i, j]), a[i].tolist(), b[j].tolist(), kinds)
            assert got[i, j] == want, (kinds, i, j, acc[i, j], hex(got[i, j]), hex(want))


@pytest.mark.parametrize("kind", FORMATS)
def test_the_shortcut_changes_nothing(kind: str) -> None:
    """Many accumulators against the version that cuts every product."""
    rng = np.random.default_rng(6)
    k = 32 if kind.startswith("e") else 16
    for style in ("any", "normal", "special"):
        a, b = numbers(kind, (70, k), rng, style), numbers(kind, (256, k), rng, style)
        acc = (rng.standard_normal((70, 256)) * 10.0 ** rng.integers(-3, 4, (70, 256))).astype("f4")
        want = half_step_numpy(acc, a, b, 2.0 ** FORMATS[kind][2])
        got = blackwell(acc, a, b, kind)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))

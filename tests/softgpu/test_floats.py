"""Software GPU: formats and fused multiply-add, over every pattern of the narrow formats."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import torch

from softgpu import floats
from tests.support.ptx import rounded


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
        rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), "f32")
        for x, y, z in zip(a, b, c)
    ]
    assert got.tolist() == want


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

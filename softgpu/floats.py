"""Number formats that numpy lacks, and PTX rounding.  All functions take and return arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
TINY32 = np.float32(2.0**-126)
TRUE = b"\1"  # of a bool array's bytes: to look for it there is cheaper than any() of 32 lanes
_BELOW_F32 = np.uint64(0x1FFFFFFF)  # fraction bits of a float64 that a float32 lacks
_MIDPOINT = np.uint64(0x10000000)
_NEAR_SUBNORMAL = 2.0**-125
LARGEST_F16 = np.float32(65504)
LARGEST_BF16 = np.float32(2.0**128 - 2.0**120)


def _decode_table(exponent_bits: int, fraction_bits: int, ieee_inf: bool) -> NDArray[np.float32]:
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    e = (codes >> fraction_bits) & ((1 << exponent_bits) - 1)
    f = codes & ((1 << fraction_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    scale = 2.0**-fraction_bits
    value = np.where(e == 0, f * scale * 2.0 ** (1 - bias), (1 + f * scale) * 2.0 ** (e - bias))
    top = (1 << exponent_bits) - 1
    if ieee_inf:
        value = np.where(e == top, np.where(f == 0, np.inf, np.nan), value)
    else:
        value = np.where((codes & 0x7F) == 0x7F, np.nan, value)
    return (sign * value).astype(np.float32)


E4M3 = _decode_table(4, 3, ieee_inf=False)
E5M2 = _decode_table(5, 2, ieee_inf=True)


def _encode8(x: F32, fraction_bits: int, bias: int, largest: float) -> NDArray[np.uint8]:
    """Round to nearest even with saturation to the largest finite value; NaN gives 0x7f."""
    bits = x.view(np.uint32)
    mag = np.minimum(np.abs(x), np.float32(largest))
    u = mag.view(np.uint32)
    drop = 23 - fraction_bits
    half = np.uint32((1 << (drop - 1)) - 1)
    rounded = (u + half + ((u >> np.uint32(drop)) & np.uint32(1))) >> np.uint32(drop)
    normal = rounded - np.uint32((127 - bias) << fraction_bits)
    small = mag < np.float32(2.0 ** (1 - bias))
    scaled = np.where(small, mag, np.float32(0)) * np.float32(2.0 ** (bias - 1 + fraction_bits))
    code = np.where(small, np.rint(scaled).astype(np.uint32), normal)
    code |= (bits >> np.uint32(24)) & np.uint32(0x80)
    return np.where(np.isnan(x), np.uint32(0x7F), code).astype(np.uint8)


def to_e4m3(x: F32) -> NDArray[np.uint8]:
    """cvt.rn.satfinite.e4m3x2.f32, one element."""
    return _encode8(x, 3, 7, 448.0)


def to_e5m2(x: F32) -> NDArray[np.uint8]:
    """cvt.rn.satfinite.e5m2x2.f32, one element."""
    return _encode8(x, 2, 15, 57344.0)


def to_e8m0(bits: NDArray[np.uint32], rounding: str, satfinite: bool) -> NDArray[np.uint8]:
    """cvt.rz or .rp to ue8m0 of f32 bits, one element; the sign is dropped.

    The code is the exponent field; ``rp`` takes the next one unless the value is a power of two.
    Code 0 is 2^-127, so ``rp`` gives it to all up to that.
    """
    magnitude = bits & np.uint32(0x7FFFFFFF)
    code = magnitude >> np.uint32(23)
    finite = magnitude < np.uint32(0x7F800000)
    if rounding == "rp":
        above = (magnitude & np.uint32(0x7FFFFF) != 0) & (magnitude > np.uint32(0x400000))
        code = code + (above & finite)
    if satfinite:
        code = np.where(magnitude > np.uint32(0x7F800000), np.uint32(255), np.minimum(code, 254))
    return code.astype(np.uint8)


# cvt.rn.bf16x2.ue8m0x2 by code: 2^-127 is a subnormal of bf16, 0xff is NaN
E8M0_AS_BF16 = np.array([0x0040, *(e << 7 for e in range(1, 255)), 0x7FFF], np.uint16)


def bf16_to_f32(x: NDArray[np.uint16]) -> F32:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: F32, rounding: str = "rn") -> NDArray[np.uint16]:
    """f32 to bf16 bits, ``rn`` or ``rz``; NaN is 0x7fff."""
    u = x.view(np.uint32)
    if rounding == "rn":
        r = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    else:
        r = u >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), r).astype(np.uint16)


def to_f16(x: F32, rounding: str = "rn") -> NDArray[np.uint16]:
    """f32 to f16 bits; NaN is 0x7fff."""
    h = x.astype(np.float16)
    if rounding == "rz":
        back = h.astype(np.float32)
        over = (np.abs(back) > np.abs(x)) & np.isfinite(x)
        h = np.where(over, (h.view(np.uint16) - np.uint16(1)).view(np.float16), h)
    return np.where(np.isnan(x), np.uint16(0x7FFF), h.view(np.uint16))


def clamp(x: F32, limit: np.float32) -> F32:
    """.satfinite: magnitudes above ``limit`` become it; NaN stays."""
    return np.where(np.isnan(x), x, np.clip(x, -limit, limit))


def canonical(x: F32) -> F32:
    """Every NaN becomes the one that f32 arithmetic gives on the device, 0x7fffffff."""
    if TRUE in (x != x).tobytes():
        bits = np.where(np.isnan(x), np.uint32(0x7FFFFFFF), x.view(np.uint32))
        return bits.view(np.float32)
    return x


def flush(x: F32) -> F32:
    """.ftz: subnormals become zero of the same sign."""
    small = np.abs(x) < TINY32
    if TRUE in small.tobytes():
        return np.where(small, np.copysign(np.float32(0), x), x)
    return x


def to_odd(s: NDArray[np.float64], error: NDArray[np.float64]) -> NDArray[np.float64]:
    """s + error rounded to odd; s is that sum rounded to nearest, and error what it lost.

    Rounding the result to a narrower format equals rounding the sum once (Boldo, Melquiond).
    """
    bits = s.view(np.int64).copy()
    inexact = (error != 0) & ((bits & 1) == 0) & np.isfinite(s)
    up = (error > 0) == (s > 0)
    bits[inexact & up] += 1
    bits[inexact & ~up] -= 1
    return bits.view(np.float64)


def fma32(a: F32, b: F32, c: F32) -> F32:
    """fma.rn.f32: one rounding, through float64 with a fix-up where that would round twice."""
    p = a.astype(np.float64) * b  # exact: 48 bits
    s = p + c
    r = s.astype(np.float32)
    # Twice rounded results can only differ where s is a midpoint of two f32, or below the normals.
    bad = (s.view(np.uint64) & _BELOW_F32) == _MIDPOINT
    bad |= np.abs(s) < _NEAR_SUBNORMAL
    if TRUE in bad.tobytes():
        c64 = c.astype(np.float64)
        t = s - p
        error = (p - (s - t)) + (c64 - t)  # TwoSum
        r = np.where(bad & np.isfinite(s), to_odd(s, error).astype(np.float32), r)
    return canonical(r)


def directed(exact: NDArray[np.float64], rounding: str) -> F32:
    """An exactly representable float64 result to f32 by rz, rm or rp."""
    r = exact.astype(np.float32)
    back = r.astype(np.float64)
    if rounding == "rz":
        wrong = np.abs(back) > np.abs(exact)
        return np.where(wrong, np.nextafter(r, np.float32(0)), r)
    if rounding == "rm":
        return np.where(back > exact, np.nextafter(r, np.float32(-np.inf)), r)
    return np.where(back < exact, np.nextafter(r, np.float32(np.inf)), r)

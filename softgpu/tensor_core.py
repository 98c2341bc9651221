"""Additions of tensor cores: models of one step of WGMMA (bit-exact) and of tcgen05, in numpy.

**Hopper.**  Fitted to 9.9 million accumulators recorded on an H200 (``profiles/record_wgmma.py``):
every one is reproduced bit for bit, for m64nNk32 e4m3 x e4m3 and m64nNk16 bf16 x bf16 and f16 x f16
with an fp32 accumulator, single steps and chains, A from shared memory or registers, any N.
A second record (``profiles/record_softgpu.py``: 10.3 million accumulators of single instructions
with N of 16, 32 and 64, and 48 decode kernels), not used for the fit, agrees bit for bit too.

One step adds all products of the step and the incoming accumulator at once:

1. Each product has the exponent e_a + e_b; its significand stays un-normalised, in [1, 4) (a
   subnormal operand keeps its format's smallest exponent).  The accumulator counts with its own.
2. Let e be the largest of these exponents, zeros left out (and at least -133).  Every addend is cut
   toward zero to a multiple of 2^(e - F): F = 13 for fp8 operands, 25 for 16-bit ones.
3. The cut addends are summed exactly.
4. The sum is cut toward zero to 13 fraction bits (fp8) or to fp32 (16-bit operands).

So an fp8 accumulator never holds more than 14 significant bits, and its error is a bias toward
zero: it grows with the length of the sum.  A zero sum is +0; infinities follow IEEE; every NaN is
0x7fffffff.  What happens when the sum exceeds fp32's range was not recorded.

The torch twin is ``snapmla.testing.accumulate``.

**Blackwell** (``blackwell_step_numpy``).  Nothing of ours was recorded on one.  MMA-Sim (arXiv
2511.10909) reports bit equality on a B200 with the same four rules, F = 25 and a sum cut to fp32
for every operand format of ``kind::f16`` and ``kind::f8f6f4``; a user's measurement of fp8
(DeepGEMM issue 176) found 25 bits too.  Both are about plain tcgen05.mma of one CTA: that ``.ws``
and pairs of CTAs add the same way is a hypothesis.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FP8_FRACTION_BITS = 13
HALF_FRACTION_BITS = 25  # bf16 and f16 operands
CANONICAL_NAN = 0x7FFFFFFF
FP32_MIN_NORMAL = 2.0**-126
HALF_SMALLEST_TOP = 2.0**-133  # seen with products of subnormal bf16 numbers
_FP8_RESULT_MASK = np.uint32(0xFFFFFFFF << (23 - FP8_FRACTION_BITS) & 0xFFFFFFFF)
_FP32_RESULT_MASK = np.uint64(0xFFFFFFFFFFFFFFFF << (52 - 23) & 0xFFFFFFFFFFFFFFFF)

_LEAST_TOP = -133  # exponent of HALF_SMALLEST_TOP
_NO_EXPONENT = np.int16(-8192)  # of zero
_ONE_THREAD = 1 << 18  # multiplications up to which OpenBLAS stays in the calling thread


class _Operand(NamedTuple):
    """An operand format.

    Attributes:
        smallest: exponent of the smallest normal number.
        fraction: bits.
        wide: a type that holds every product of two such numbers.
    """

    smallest: int
    fraction: int
    wide: type[np.floating[Any]]


_OPERANDS = {
    "e4m3": _Operand(-6, 3, np.float32), "e5m2": _Operand(-14, 2, np.float32),
    "f16": _Operand(-14, 10, np.float32), "bf16": _Operand(-126, 7, np.float64),
}  # fmt: skip

F32 = NDArray[np.float32]


def _power_of_two(x: NDArray[Any], smallest: float) -> NDArray[Any]:
    """2^exponent(x); 0 where x is 0, ``smallest`` where it is subnormal."""
    if x.dtype == np.float64:
        power = (x.view(np.uint64) & np.uint64(0x7FF0000000000000)).view(np.float64)
    else:
        power = (x.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    return np.where(x == 0, x.dtype.type(0), np.maximum(power, x.dtype.type(smallest)))


def _finish(out: F32, acc: F32, total: NDArray[Any]) -> F32:
    """Puts infinities of the accumulator back and makes every NaN the hardware's."""
    out = np.where(np.isfinite(acc) & np.isfinite(total), out, (acc + total).astype(np.float32))
    return np.where(np.isnan(out), np.uint32(CANONICAL_NAN), out.view(np.uint32)).view(np.float32)


def fp8_step_numpy(acc: F32, a: F32, b: F32) -> F32:
    """One wgmma m64nNk32 with e4m3 operands.

    Args:
        acc: (M, N) float32, the accumulator before the step.
        a: (M, 32) float32 that hold e4m3 values.
        b: (N, 32) float32 that hold e4m3 values.

    Returns:
        (M, N) float32, bit for bit what the tensor core leaves.
    """
    one = np.float32(1)
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        # k first: sums and maxima over it then run along rows of N; all of them are exact
        a, b = np.ascontiguousarray(a.T)[:, :, None], np.ascontiguousarray(b.T)[:, None, :]
        products = a * b  # exact: 8 significant bits
        smallest = 2.0**-6  # of an e4m3 operand
        powers = _power_of_two(a, smallest) * _power_of_two(b, smallest)
        finite_acc = np.where(np.isfinite(acc), acc, np.float32(0))
        top = np.maximum(powers.max(0), _power_of_two(finite_acc, FP32_MIN_NORMAL))
        top = np.maximum(top, np.float32(FP32_MIN_NORMAL))
        # Below 2^-100 only the accumulator can be non-zero, and 2^13/top might overflow.
        scale = np.float32(2.0**FP8_FRACTION_BITS) * (one / np.maximum(top, np.float32(2.0**-100)))
        products *= scale
        total = np.trunc(products, out=products).sum(0, dtype=np.float32)  # exact: under 2^20
        total += np.trunc(finite_acc * (one / top) * np.float32(2.0**FP8_FRACTION_BITS))
        kept = (total.view(np.uint32) & _FP8_RESULT_MASK).view(np.float32)
        out = kept * np.float32(2.0**-FP8_FRACTION_BITS) * top + np.float32(0)  # + 0: no minus zero
        return _finish(out, acc, total)


def half_step_numpy(acc: F32, a: F32, b: F32, smallest: float = FP32_MIN_NORMAL) -> F32:
    """One wgmma m64nNk16 with bf16 or f16 operands.

    Args:
        acc: (M, N) float32, the accumulator before the step.
        a: (M, 16) float32 that hold bf16 (or f16) values.
        b: (N, 16) float32, likewise.
        smallest: the smallest normal number of the operand format (2^-14 for f16).

    Returns:
        (M, N) float32, bit for bit what the tensor core leaves.
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        wide_a, wide_b, wide = a.astype(np.float64), b.astype(np.float64), acc.astype(np.float64)
        products = wide_a[:, None, :] * wide_b[None, :, :]
        powers = (
            _power_of_two(wide_a, smallest)[:, None, :]
            * _power_of_two(wide_b, smallest)[None, :, :]
        )
        special = products.sum(-1)  # not finite where an operand is not
        finite_acc = np.where(np.isfinite(acc) & np.isfinite(special), wide, 0.0)
        top = np.maximum(powers.max(-1), _power_of_two(finite_acc, FP32_MIN_NORMAL))
        top = np.where(np.isfinite(special), np.maximum(top, HALF_SMALLEST_TOP), 1.0)
        scale = 2.0**HALF_FRACTION_BITS / top
        products *= scale[:, :, None]
        total = np.trunc(products, out=products).sum(-1) + np.trunc(finite_acc * scale)
        kept = (total.view(np.uint64) & _FP32_RESULT_MASK).view(np.float64) / scale
        subnormal = np.trunc(kept * 2.0**149) * 2.0**-149
        out = np.where(np.abs(kept) < FP32_MIN_NORMAL, subnormal, kept).astype(
            np.float32
        ) + np.float32(0)
        return _finish(out, acc, special.astype(np.float32))


def _exponents(x: F32, smallest: int, zero: Any, dtype: Any) -> NDArray[Any]:
    """Exponents of finite numbers, at least ``smallest``; ``zero`` where there is none."""
    e = (x.view(np.uint32) >> np.uint32(23) & np.uint32(0xFF)).astype(np.int16) - np.int16(127)
    return np.where(x == 0, zero, np.maximum(e, np.int16(smallest))).astype(dtype)


def _largest(ea: NDArray[Any], eb: NDArray[Any]) -> NDArray[np.int16]:
    """The largest ea[i, k] + eb[j, k] over k: (M, N)."""
    rows, columns = np.ascontiguousarray(ea.T)[:, :, None], np.ascontiguousarray(eb.T)[:, None, :]
    top = rows[0] + columns[0]
    step = np.empty_like(top)
    for k in range(1, len(rows)):
        np.add(rows[k], columns[k], out=step)
        np.maximum(top, step, out=top)
    return top.astype(np.int16)


def _lowest_bit(e: NDArray[Any], zero: Any, fraction: int) -> NDArray[np.int16]:
    """The exponent of the lowest bit that any number of a row can have."""
    out: NDArray[np.int16] = np.where(e > zero, e.astype(np.int16), -_NO_EXPONENT).min(1) - fraction
    return out


def _powers(exponent: NDArray[np.int16]) -> NDArray[np.float64]:
    """2^exponent of normal float64 numbers."""
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)


def _cut_products(a: F32, b: F32, cut: NDArray[np.int16], wide: Any) -> NDArray[np.float64]:
    """The sum over k of a[i, k] b[j, k] / 2^cut[i, j], each product cut to an integer."""
    scale = _powers(np.minimum(-cut, np.int16(100 if wide is np.float32 else 1000))).astype(wide)
    rows, columns = a.T.astype(wide)[:, :, None], b.T.astype(wide)[:, None, :]
    total = np.zeros(cut.shape, np.float64)
    product = np.empty(cut.shape, wide)
    for k in range(len(rows)):
        np.multiply(rows[k], columns[k], out=product)
        np.multiply(product, scale, out=product)
        total += np.trunc(product, out=product)
    return total


def wide_product(a: F32, b: F32) -> NDArray[np.float64]:
    """a b^T in float64, (M, N), in parts too small for the BLAS to start its threads."""
    rows = max(_ONE_THREAD // (b.shape[0] * b.shape[1]), 1)
    right = b.T.astype(np.float64)
    parts = [a[i : i + rows].astype(np.float64) @ right for i in range(0, len(a), rows)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def blackwell_step_numpy(acc: F32, a: F32, b: F32, kind: str) -> F32:
    """One step of tcgen05.mma.

    Args:
        acc: (M, N) float32, the accumulator before the step.
        a: (M, K) float32 that hold values of its format.
        b: (N, K) float32, likewise.
        kind: the format, "e4m3", "e5m2", "f16" or "bf16"; two as in "e4m3/e5m2" if B has another.

    Returns:
        (M, N) float32.
    """
    formats = tuple(_OPERANDS[name] for name in kind.split("/"))
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        finite = bool(np.isfinite(a).all() and np.isfinite(b).all())
        special = np.zeros(acc.shape)
        if not finite:
            special = wide_product(a, b)
            a, b = (np.where(np.isfinite(x), x, np.float32(0)) for x in (a, b))
        finite = finite and bool(np.isfinite(acc).all())
        old = acc if finite else np.where(np.isfinite(acc), acc, np.float32(0))
        rows = max(_ONE_THREAD // (b.shape[0] * b.shape[1]), 1)
        out = np.empty(acc.shape, np.float32)
        for i in range(0, len(a), rows):
            part = slice(i, i + rows)
            out[part] = _blackwell_rows(old[part], a[part], b, formats[0], formats[-1])
        return out if finite else _finish(out, acc, special)


def _blackwell_rows(acc: F32, a: F32, b: F32, of_a: _Operand, of_b: _Operand) -> F32:
    """Some rows of a step on finite numbers.

    Most often no product has a bit below the cut, and then a matrix product in float64 is exact:
    only the rows of A where one may have pay for cutting.
    """
    wide = np.promote_types(of_a.wide, of_b.wide).type
    narrow = wide is np.float32  # sums of two exponents fit in a byte
    zero, dtype = (-64, np.int8) if narrow else (_NO_EXPONENT, np.int16)
    ea = _exponents(a, of_a.smallest, zero, dtype)
    eb = _exponents(b, of_b.smallest, zero, dtype)
    top = _largest(ea, eb)
    top[top < of_a.smallest + of_b.smallest] = _NO_EXPONENT  # a product of zeros
    np.maximum(top, _exponents(acc, -126, _NO_EXPONENT, np.int16), out=top)
    cut = np.maximum(top, np.int16(_LEAST_TOP)) - np.int16(HALF_FRACTION_BITS)
    unit = _powers(-cut)
    total = wide_product(a, b)
    total *= unit
    low_a, low_b = _lowest_bit(ea, zero, of_a.fraction), _lowest_bit(eb, zero, of_b.fraction)
    loses = (low_a[:, None] + low_b < cut).any(1)
    if loses.any():
        total[loses] = _cut_products(a[loses], b, cut[loses], wide)
    total += np.trunc(acc * unit)
    kept = (total.view(np.uint64) & _FP32_RESULT_MASK).view(np.float64) / unit
    if int(cut.min()) < -126:  # otherwise no sum but zero is that small
        subnormal = np.trunc(kept * 2.0**149) * 2.0**-149
        kept = np.where(np.abs(kept) < FP32_MIN_NORMAL, subnormal, kept)
    return kept.astype(np.float32) + np.float32(0)  # + 0: no minus zero


def chain_numpy(acc: F32, a: F32, b: F32, *, fp8: bool, smallest: float = FP32_MIN_NORMAL) -> F32:
    """Consecutive steps: acc (M, N), a (M, K), b (N, K); K a multiple of 32 (fp8) or 16."""
    k = 32 if fp8 else 16
    for start in range(0, a.shape[-1], k):
        part_a = np.ascontiguousarray(a[:, start : start + k])
        part_b = np.ascontiguousarray(b[:, start : start + k])
        acc = (
            fp8_step_numpy(acc, part_a, part_b)
            if fp8
            else half_step_numpy(acc, part_a, part_b, smallest)
        )
    return acc

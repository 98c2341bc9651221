"""How WGMMA adds: the one place where its arithmetic is decided.

An accumulate function has the signature

    accumulate(acc, a, b, kind) -> float32 (M, N)
        acc   float32 (M, N)   accumulator before the step (zeros where scale-d is 0)
        a     float64 (M, K)   decoded A elements of one instruction: 32 of e4m3, 16 of bf16 / f16
        b     float64 (N, K)   decoded B elements
        kind  "e4m3", "e5m2", "bf16" or "f16" (of A)

and is chosen by ``Options.accumulate``.  ``exact`` is the mathematical sum, rounded once.
``hopper`` is the model of the hardware: per instruction the products and the accumulator are aligned
to the largest exponent and truncated.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Accumulate = Callable[[F32, F64, F64, str], F32]

FP8_FRACTION_BITS = 13


def exact(acc: F32, a: F64, b: F64, kind: str) -> F32:
    """acc + a b^T in float64, rounded to nearest even once."""
    out: F32 = (acc + a @ b.T).astype(np.float32)
    return out


def _exponent(x: F64) -> NDArray[np.int32]:
    """floor(log2 |x|); very small for 0."""
    _, e = np.frexp(x)
    return np.where(x == 0, -10000, e - 1).astype(np.int32)


def _truncate(x: F64, exponent: NDArray[np.int32], bits: int) -> F64:
    """Towards zero, to a multiple of 2**(exponent - bits)."""
    shift = np.clip(bits - exponent, -1000, 1000)
    out: F64 = np.ldexp(np.trunc(np.ldexp(x, shift)), -shift)
    return out


def hopper(acc: F32, a: F64, b: F64, kind: str) -> F32:
    """FP8 steps as a Hopper tensor core adds them; 16-bit types as ``exact``."""
    if kind not in ("e4m3", "e5m2"):
        return exact(acc, a, b, kind)
    start = acc.astype(np.float64)
    out = np.empty_like(start)
    for first in range(0, len(b), 64):  # bounds the size of the (M, N, K) products
        cols = slice(first, first + 64)
        products = a[:, None, :] * b[None, cols, :]
        top = np.maximum(np.abs(products).max(-1), np.abs(start[:, cols]))
        e = _exponent(top)
        total = _truncate(products, e[..., None], FP8_FRACTION_BITS).sum(-1)
        total += _truncate(start[:, cols], e, FP8_FRACTION_BITS)
        out[:, cols] = _truncate(total, _exponent(total), FP8_FRACTION_BITS)
    plain = (start + a @ b.T).astype(np.float32)
    special = ~np.isfinite(plain)
    result: F32 = np.where(special, plain, out.astype(np.float32))
    return result

"""Additions of tensor cores: the one place where the arithmetic of wgmma and tcgen05 is decided.

An accumulate function has the signature

    accumulate(acc, a, b, kind) -> float32 (M, N)
        acc   float32 (M, N)   accumulator before the step (zeros where it is not to be added)
        a     float32 (M, K)   decoded A elements of one instruction: 32 of e4m3, 16 of bf16 / f16
        b     float32 (N, K)   decoded B elements
        kind  "e4m3", "e5m2", "bf16" or "f16"; "e4m3/e5m2" if a tcgen05.mma's B has another format

and is chosen by ``Options.accumulate``, or by the target of the module.  ``hopper`` is the tensor
core of an H200, bit for bit; ``blackwell`` is what is published about a B200's (both models and
their evidence: ``softgpu.tensor_core``); ``exact`` is the mathematical sum, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .tensor_core import blackwell_step_numpy, fp8_step_numpy, half_step_numpy, wide_product

F32 = NDArray[np.float32]
Accumulate = Callable[[F32, F32, F32, str], F32]

_SMALLEST_NORMAL = {"bf16": 2.0**-126, "f16": 2.0**-14}


def exact(acc: F32, a: F32, b: F32, kind: str) -> F32:
    """acc + a b^T in float64, rounded to nearest even once."""
    out: F32 = (acc + wide_product(a, b)).astype(np.float32)
    return out


def hopper(acc: F32, a: F32, b: F32, kind: str) -> F32:
    """Adds like a Hopper tensor core.  Raises ValueError for e5m2, which was not recorded."""
    if kind == "e4m3":
        return fp8_step_numpy(acc, a, b)
    if kind in _SMALLEST_NORMAL:
        return half_step_numpy(acc, a, b, _SMALLEST_NORMAL[kind])
    raise ValueError(f"hopper accumulation: no model for {kind} operands; use softgpu.exact")


def blackwell(acc: F32, a: F32, b: F32, kind: str) -> F32:
    """Adds like a Blackwell tensor core, by what is said of it."""
    return blackwell_step_numpy(acc, a, b, kind)


BY_NAME: dict[str, Accumulate] = {"exact": exact, "hopper": hopper, "blackwell": blackwell}


def of(architecture: int) -> Accumulate:
    """The arithmetic of a target: 90 for sm_90a, 100 for sm_100a."""
    return blackwell if architecture >= 100 else hopper

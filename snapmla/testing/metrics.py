"""Error measures: the three of the SnapMLA paper's Figure 4, and the LSE's.

All take tensors of any dtype, work in float64 and return a Python float.  A NaN in one operand only
gives NaN, so that no comparison against a gate passes by accident.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _pair(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    if actual.shape != expected.shape:
        raise ValueError(
            f"actual: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
        )
    return actual.double().flatten(), expected.double().flatten()


def largest(*errors: float) -> float:
    """The largest error; NaN if one is, which ``max`` keeps only where it comes first."""
    return next((x for x in errors if x != x), max(errors))


def rmse(actual: Tensor, expected: Tensor) -> float:
    """Root mean square error."""
    a, e = _pair(actual, expected)
    return float((a - e).square().mean().sqrt()) if a.numel() else 0.0


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| (Frobenius); 0 if both vanish."""
    a, e = _pair(actual, expected)
    difference, size = float((a - e).norm()), float(e.norm())
    if size or difference != difference:
        return difference / (size or 1.0)
    return 0.0 if difference == 0 else float("inf")


def one_minus_cosine(actual: Tensor, expected: Tensor) -> float:
    """1 - cosine similarity; 0 if both vanish.

    Computed as |u - v|^2 / 2 of the unit vectors, which stays exact where the plain form cancels.
    """
    a, e = _pair(actual, expected)
    size_a, size_e = float(a.norm()), float(e.norm())
    if size_a == 0 or size_e == 0:
        nan = size_a + size_e != size_a + size_e
        return float("nan") if nan else 0.0 if size_a == size_e else 1.0
    return float((a / size_a - e / size_e).square().sum()) / 2


def lse_error(actual: Tensor, expected: Tensor) -> float:
    """Largest |actual - expected|; equal infinities (empty rows) count as equal."""
    a, e = _pair(actual, expected)
    same = torch.isinf(e) & (a == e)
    return float(torch.where(same, 0.0, a - e).abs().max()) if a.numel() else 0.0

"""Metrics, on figures done by hand; a NaN never passes."""

from __future__ import annotations

import math

import pytest
import torch

from snapmla import metrics
from snapmla.testing.metrics import largest


@pytest.mark.parametrize("expected", [torch.zeros(2), torch.ones(2)])
def test_metrics_of_one_nan_are_nan(expected: torch.Tensor) -> None:
    """Whatever the other operand is, zero included: no gate passes by accident."""
    nan = torch.tensor([math.nan, 1.0])
    for metric in (
        metrics.rmse, metrics.relative_l2, metrics.one_minus_cosine, metrics.lse_error,
    ):  # fmt: skip
        assert math.isnan(metric(nan, expected)), metric
    assert math.isnan(metrics.one_minus_cosine(expected, nan))


def test_the_largest_of_errors_keeps_a_nan() -> None:
    """Wherever it stands: Python's ``max`` would give what stands before it."""
    assert largest(1.0, 3.0, 2.0) == 3.0
    for errors in ((0.5, math.nan), (math.nan, 0.5), (0.0, math.nan, 2.0)):
        assert math.isnan(largest(*errors))


def test_metrics() -> None:
    expected = torch.tensor([3.0, 4.0])
    actual = torch.tensor([3.0, 4.5])
    assert metrics.rmse(actual, expected) == pytest.approx(math.sqrt(0.125))
    assert metrics.relative_l2(actual, expected) == pytest.approx(0.1)
    cosine = (9 + 18) / (5 * math.hypot(3, 4.5))
    assert metrics.one_minus_cosine(actual, expected) == pytest.approx(1 - cosine)
    assert metrics.one_minus_cosine(2 * expected, expected) < 1e-30
    assert metrics.relative_l2(torch.zeros(3), torch.zeros(3)) == 0
    low = torch.tensor([-math.inf, 1.0])
    assert metrics.lse_error(low, torch.tensor([-math.inf, 1.5])) == 0.5
    assert metrics.lse_error(torch.tensor([0.0, 1.0]), low) == math.inf
    nan = torch.tensor([math.nan, 4.0])
    for metric in (metrics.rmse, metrics.relative_l2, metrics.one_minus_cosine, metrics.lse_error):
        assert not metric(nan, expected) <= 1e9
    with pytest.raises(ValueError, match="actual: expected shape"):
        metrics.rmse(torch.zeros(2), torch.zeros(3))

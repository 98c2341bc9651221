"""``snapmla.dense.choices``: options of a decode as its kernels take them."""

from __future__ import annotations

import math

import pytest

from snapmla.dense.choices import choices


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("empty", [-math.inf, math.inf])
@pytest.mark.parametrize(("base", "value"), [("e", math.e), ("2", 2.0)])
def test_what_kernels_are_told(causal: bool, empty: float, base: str, value: float) -> None:
    """Whether rows are causal; by what a logarithm to base 2 is multiplied; an empty row's LSE."""
    sees, factor, lse = choices(causal, base, "+inf" if empty > 0 else "-inf")
    assert sees == causal and lse == empty
    assert factor * math.log2(value) == pytest.approx(1)

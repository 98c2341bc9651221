"""Words for the logarithm of the sum of exponentials, and what kernels take for them."""

from __future__ import annotations

import math

import torch

from snapmla import checks

LSE_FACTOR = {"e": math.log(2.0), "2": 1.0}
EMPTY_LSE = {"-inf": -math.inf, "+inf": math.inf}
OUT_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}  # of an FP8 cache
_CHOICES = {
    (causal, base, empty): (int(causal), factor, value)
    for causal in (False, True)
    for base, factor in LSE_FACTOR.items()
    for empty, value in EMPTY_LSE.items()
}


def choices(causal: bool, lse_base: str, empty_lse: str) -> tuple[int, float, float]:
    """(causal, lse_factor, empty_lse) as the kernels take them; checks all three."""
    try:
        return _CHOICES[causal, lse_base, empty_lse]
    except (KeyError, TypeError):
        checks.flag("causal", causal)
        checks.choice("lse_base", lse_base, LSE_FACTOR)
        checks.choice("empty_lse", empty_lse, EMPTY_LSE)
        raise

"""``lse_bounds`` holds for what kernels and the tensor core's model compute, and is not vacuous."""

from __future__ import annotations

import pytest
import torch

from snapmla import metrics
from snapmla.testing import aligned, qk_bounds, rounding
from snapmla.testing.accumulate import bf16_dot, hopper_fp8_dot
from tests.support.needs import DEVICES, needs_kernels

LOGIT = 40.0
ANY_INPUT = 8 * 34 * 2.0**-13  # of sum |q k|, as the docs have it
# Share of the bound that every row and the best one reach; the largest |error| / logit.
REACHED = {
    "key": (0.33, 0.5, 2e-3),
    "heavy tails": (0.3, 0.5, 2e-3),
    "loud channel": (0.4, 0.75, 8e-3),
    "448 among 3.75": (0.05, 0.95, 1.6e-2),
}


@needs_kernels
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("kind", aligned.KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_query_that_equals_a_key(kind: str, rows: int, device: str) -> None:
    """LSE is low by up to 1.6e-2 of the logit, inside the bounds, and near them."""
    step = aligned.each_its_key(kind, rows, LOGIT, device)
    _, lse = step.decoded(step.plan(pipeline="etap", row_tile=rows))
    _, truth = step.truth()
    low, high = qk_bounds.lse_bounds(*step.stored)
    error, (every, best, bias) = lse.double() - truth, REACHED[kind]
    share = error / low
    assert (low <= error).all() and (error <= high).all()
    assert (share >= every).all() and share.max() >= best
    assert -error.min() >= bias * LOGIT
    assert -low.min() <= ANY_INPUT * LOGIT * 1.001  # its products have one sign


def draw(kind: str, rows: int, channels: int, random: torch.Generator) -> torch.Tensor:
    """(rows, channels) fp32 that hold e4m3 values."""
    x = torch.randn(rows, channels, generator=random)
    if kind == "any":  # every exponent, subnormal ones too
        x = x * 2.0 ** torch.randint(-10, 8, x.shape, generator=random)
    if kind == "positive":
        x = 30 * x.abs()
    if kind == "loud":
        x = x * 50.0 ** (torch.rand(x.shape, generator=random) < 0.03)
    return rounding.to_e4m3(x).float()


@pytest.mark.parametrize("kind", ["any", "positive", "loud"])
def test_the_tensor_cores_sums_are_inside(kind: str) -> None:
    """Of its model, which is an H200's bit for bit; RoPE behind the first chain."""
    random = torch.Generator().manual_seed(1)
    a, b = draw(kind, 8, 512, random), draw(kind, 24, 512, random)
    rope_a, rope_b = (torch.randn(n, 64, generator=random).bfloat16() for n in (8, 24))
    got = bf16_dot(hopper_fp8_dot(a[:, :256], b[:, :256]), rope_a, rope_b)
    got = (got + hopper_fp8_dot(a[:, 256:], b[:, 256:])).double()
    exact, low, high = qk_bounds.dot_bounds(*(x.double() for x in (a, b, rope_a, rope_b)))
    truth = a.double() @ b.double().T + rope_a.double() @ rope_b.double().T
    torch.testing.assert_close(exact, truth, rtol=1e-12, atol=1e-9)
    error = got - exact
    assert (low <= error).all() and (error <= high).all()
    share = torch.where(error < 0, error / low, error / high)
    assert share.max() > {"any": 0.3, "positive": 0.5, "loud": 0.2}[kind]


@pytest.mark.parametrize("channel", [1, 40])
def test_one_addend_that_is_cut_reaches_the_bound(channel: int) -> None:
    """A product below the unit of its step, 2^(16 - 13), is lost whole, and an accumulator below
    that of the step behind it.  Nothing else is: all sums are multiples of that unit."""
    a, rope = torch.zeros(1, 512, dtype=torch.float64), torch.zeros(1, 64, dtype=torch.float64)
    a[0, 0], a[0, channel] = 2.75, 256.0
    exact, low, high = (float(x) for x in qk_bounds.dot_bounds(a, a, rope, rope))
    got = float(hopper_fp8_dot(a[:, :256].float(), a[:, :256].float()))
    assert (got, exact, got - exact) == (65536, 65536 + 2.75**2, -(2.75**2))
    # to fp32: in RoPE's steps, and of the two chains' sum
    rounding = 6 * 2.0**-7 + 2.0**-24 * 65536 * (1 + 1e-3)
    assert -(2.75**2) - rounding <= low <= got - exact and 0 <= high <= rounding


def test_rows_that_see_nothing_and_rows_that_see_less() -> None:
    step = aligned.each_its_key("key", 2, LOGIT)
    whole, _ = qk_bounds.lse_bounds(*step.stored)
    few, _ = qk_bounds.lse_bounds(*step.stored, row_seqlens=torch.tensor([[1]]))
    assert float(few[0, 0, 0]) == pytest.approx(float(whole[0, 0, 0]), rel=1e-6)
    assert abs(float(few[0, 1, 0])) < 0.2 * abs(float(whole[0, 1, 0]))  # its key is token 1
    step.cache_seqlens.zero_()
    low, high = qk_bounds.lse_bounds(*step.stored)
    assert low.shape == (1, 2, 1) and not low.any() and not high.any()


@needs_kernels
@pytest.mark.whole_matrix  # its variant is built when it is asked for
def test_the_second_term_of_p_leaves_lse_as_it_is() -> None:
    step = aligned.two_of_one_logit(20.0)
    results = [
        step.decoded(step.plan(accuracy=accuracy, pipeline="etap"), torch.float32)
        for accuracy in ("standard", "high")
    ]
    truth, _ = step.truth()
    assert torch.equal(results[0][1], results[1][1])
    for out, _ in results:  # what P's terms cannot mend
        assert 1.5e-2 < metrics.relative_l2(out, truth) < 2e-2

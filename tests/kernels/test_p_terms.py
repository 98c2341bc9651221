"""Two e4m3 terms of P: what they gain, and why they share one product tile without a scale."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import snapmla
from snapmla import metrics
from snapmla.reference import FP64, MIMIC_HW_FULL, mla_decode_reference
from snapmla.testing import comparison
from snapmla.testing.accumulate import hopper_fp8_dot
from snapmla.testing.rounding import to_e4m3
from softgpu import mutate, using
from tests.support import cases
from tests.support.needs import needs_kernels

GATE = 1e-3  # relative L2 to fp64 of fp32 results, at any length
TWO = replace(MIMIC_HW_FULL, p_terms=2)


RARELY = pytest.mark.whole_matrix  # two terms are built when they are asked for


def decoded(inputs: cases.DecodeInputs, accuracy: str) -> tuple[Tensor, Tensor, snapmla.DecodePlan]:
    """(out float32, lse, plan); the first sequence is split over two parts."""
    case, lengths = inputs.case, inputs.cache_seqlens
    plan = snapmla.plan_decode(
        lengths, case.heads, case.s_q, page_size=case.page_size,
        max_pages=inputs.block_table.shape[1], num_parts=2, fixed_overhead=0, accuracy=accuracy,
        pipeline="etap",
    )  # fmt: skip
    out, lse = snapmla.decode(
        snapmla.QuantizedQuery(inputs.q8, inputs.q_rope_scaled, inputs.q_scale),
        snapmla.PagedKVCache.from_tensors(inputs.content, inputs.rope, inputs.scale),
        inputs.block_table, lengths, softmax_scale=inputs.softmax_scale, plan=plan,
        out_dtype=torch.float32,
    )  # fmt: skip
    return out, lse, plan


class Watched(TorchDispatchMode):
    """Notes the terms of P of ``torch.ops.snapmla.decode``."""

    def __init__(self) -> None:
        super().__init__()
        self.p_terms: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func).startswith("snapmla.decode"):
            self.p_terms.append((kwargs or {}).get("p_terms", 1))
        return func(*args, **kwargs or {})


@needs_kernels
@RARELY
@pytest.mark.parametrize(
    ("heads", "s_q", "row_tile", "adversarial"), [(16, 1, 16, True), (20, 2, 32, True)]
)
def test_the_gate_that_one_term_misses(
    heads: int, s_q: int, row_tile: int, adversarial: bool
) -> None:
    """Near-uniform attention over a latent of mean 0, where e4m3's rounding shows most.

    40 rows are two blocks of 32; what lies past an end is NaN, splits are merged.
    """
    case = cases.DecodeCase(
        lengths=(180, 0, 64), heads=heads, s_q=s_q, logit_std=0.02, amplitude_std=0.0
    )
    inputs = cases.build(case)
    truth, truth_lse = mla_decode_reference(*inputs.stored, inputs.softmax_scale, config=FP64)
    mimic, _ = mla_decode_reference(*inputs.stored, inputs.softmax_scale, config=TWO)
    with using(mutate.schedule(1)) if adversarial else contextlib.nullcontext():
        out, lse, plan = decoded(inputs, "high")
    assert (plan.row_tile, plan.p_terms) == (row_tile, 2) and plan.split_begin[-1] >= 2
    assert (out[1] == 0).all() and torch.isneginf(lse[1]).all()
    assert metrics.relative_l2(out, truth) <= 0.75 * GATE
    assert metrics.relative_l2(out, mimic) <= 1.5 * comparison.FLIPS_OF_TWO
    assert metrics.lse_error(lse, truth_lse) <= comparison.FP32_SLACK
    if not adversarial:
        usual, usual_lse, plan = decoded(inputs, "standard")
        assert plan.p_terms == 1 and torch.equal(lse, usual_lse)
        assert metrics.relative_l2(usual, truth) > 10 * GATE


@needs_kernels
@RARELY
def test_the_residual_is_summed_first() -> None:
    """Sums are large by a latent's mean: the other order costs 5e-4, and this one 7e-5."""
    inputs = cases.build(
        cases.DecodeCase(lengths=(64,), logit_std=0.02, amplitude_std=0.0, latent_mean=2.0)
    )
    truth, _ = mla_decode_reference(*inputs.stored, inputs.softmax_scale, config=FP64)
    out, _, plan = decoded(inputs, "high")
    assert plan.split_begin[-1] == 0
    assert metrics.relative_l2(out, truth) <= 1.5e-4
    with Watched() as seen:  # one node then, which must name the kernel all the same
        again, _, _ = decoded(inputs, "high")
    assert seen.p_terms == [2] and torch.equal(again, out)


def test_one_product_tile_serves_both_terms() -> None:
    """With the residual's products first, Hopper's accumulator loses hardly more than two would.

    In the other order it cuts each of them below the first term's sum.
    """
    generator = torch.Generator().manual_seed(0)
    p = 256 * torch.rand(16, 64, generator=generator)
    v = to_e4m3(100 * (torch.randn(512, 64, generator=generator) + 1)).float()
    p8 = to_e4m3(p).float()
    r8 = to_e4m3(p - p8).float()
    truth = p.double() @ v.double().T

    def error(product: Tensor) -> float:
        return metrics.relative_l2(product, truth)

    one, tile = error(hopper_fp8_dot(p8, v)), hopper_fp8_dot(p8, v, hopper_fp8_dot(r8, v))
    apart = error(hopper_fp8_dot(p8, v) + hopper_fp8_dot(r8, v))
    scaled = to_e4m3(32 * (p - p8)).float()
    with_gain = error(hopper_fp8_dot(p8, v).double() + hopper_fp8_dot(scaled, v).double() / 32)
    wrong_order = error(hopper_fp8_dot(r8, v, hopper_fp8_dot(p8, v)))
    assert error(tile) < one / 15
    assert error(tile) < 1.1 * min(apart, with_gain)
    assert wrong_order > 1.5 * error(tile)

"""The self-check can fail, and allows no more than it says."""

from __future__ import annotations

import pytest
import torch

import snapmla
from snapmla import reference
from snapmla.testing import selfcheck
from tests.support.needs import needs_compiler
from tests.support.steps import SCALE, make_step

pytestmark = needs_compiler


def test_selfcheck_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail is none: a wrong scale must be noticed."""
    step = make_step((70, 3), 4, 1)
    out, lse = snapmla.decode(
        step.q, step.cache, step.block_table, step.cache_seqlens, softmax_scale=1.05 * SCALE
    )
    errors = selfcheck.decode_errors(
        out, lse, step.q, step.cache, step.block_table, step.cache_seqlens, SCALE
    )
    assert not errors.right


def test_fp32_results_get_no_allowance_for_bf16() -> None:
    """Errors that FP8 P drowns: a rounding on the way, and 1.5 times the mimic's own error."""
    step = make_step((70, 3), 4, 1)
    arguments = (step.q, step.cache, step.block_table, step.cache_seqlens)
    out, lse = snapmla.decode(*arguments, softmax_scale=SCALE, out_dtype=torch.float32)
    right = selfcheck.decode_errors(out, lse, *arguments, SCALE)
    assert right.right, str(right)
    rounded = selfcheck.decode_errors(out.bfloat16().float(), lse, *arguments, SCALE)
    assert rounded.error <= rounded.allowed and rounded.apart > rounded.apart_allowed
    assert (
        not rounded.right and selfcheck.decode_errors(out.bfloat16(), lse, *arguments, SCALE).right
    )
    truth, _ = reference.mla_decode_reference(
        step.q.nope, step.q.rope, step.q.scale, step.cache.content, step.cache.rope,
        step.cache.scale, step.block_table, step.cache_seqlens, SCALE, config=reference.FP64,
    )  # fmt: skip
    for factor in (1.15, 1.5):
        worse = (truth + factor * (out.double() - truth)).float()
        found = selfcheck.decode_errors(worse, lse, *arguments, SCALE)
        assert found.error > found.allowed and not found.right
    late = selfcheck.decode_errors(out, lse + 5e-5 + right.lse_error, *arguments, SCALE)
    assert late.lse_error > late.lse_allowed and not late.right

"""What counts as right of a 16-bit decode, on results that are made up: LSEs near 0."""

from __future__ import annotations

import math

import pytest
import torch

from dsl_kernels.spec import VariantSpec
from snapmla.testing import dense_job
from snapmla.testing.dense_job import LSE_CONDITION, DenseErrors, DenseJob
from snapmla.testing.dense_reference import dense_decode_reference
from tests.support.dense_steps import SCALE, DenseStep

BATCH = 5


def against(keys: torch.Tensor) -> torch.Tensor:
    """Queries whose products with ``keys`` (..., 576) cancel, of magnitudes some 17 / SCALE."""
    return 64 * torch.stack((keys[..., 1::2], -keys[..., ::2]), -1).flatten(-2)


class Cancelled:
    """Sequences of one token, LSEs of 0 but for their error.

    Args:
        form: ``even`` and ``ragged`` queries of two KV heads, by ``decode_errors``; ``kernel``: the
            same as kernels see it, by ``DenseJob``.
    """

    def __init__(self, form: str) -> None:
        torch.manual_seed(0)
        self.form = form
        if form == "kernel":
            spec = VariantSpec.from_name("dense_decode_split_r16_p16_df16_sm90a")
            self.job = DenseJob(spec, [1] * BATCH, s_q=1, heads=1, kv_heads=2)
            keys = torch.cat(self.job.tokens).flatten(0, 1)  # (sequences of the plan, 576)
            self.job.q = against(keys)[:, None, None]
            self.lse = torch.zeros(2 * BATCH, 1, 1)
            self.out = keys[:, None, None, :512]
            keys = keys[:, None]
        else:
            tokens = [1] * BATCH if form == "ragged" else None
            self.step = step = DenseStep.make([1] * BATCH, 2, kv_heads=2, tokens=tokens)
            assert step.cache.kv is not None
            keys = step.cache.kv[step.block_table[:, 0].long(), 0]  # (b, 2, 576)
            self.lse = torch.zeros(*step.q.shape[:-1]).mT.contiguous()
            self.out = torch.zeros(*step.q.shape[:-1], 512)
            step.q[:BATCH] = against(keys) if tokens else against(keys)[:, None]
            self.out[:BATCH] = keys[..., :512] if tokens else keys[:, None, :, :512]
        magnitudes = (against(keys).double() * keys.double()).abs().sum(-1) * SCALE
        self.allowance = LSE_CONDITION * magnitudes.flatten()

    def errors(self, *factors: float) -> DenseErrors:
        """With the last LSEs off by these multiples of what each is allowed."""
        lse = self.lse.clone()
        place = range(len(self.allowance))[-len(factors) :] if factors else ()
        for index, factor in zip(place, factors, strict=True):
            at = (index // 2, index % 2, 0)
            if self.form != "even":
                at = (index, 0, 0) if self.form == "kernel" else (index % 2, index // 2)
            lse[at] = factor * self.allowance[index]
        if self.form == "kernel":
            return self.job.errors((self.out, lse))
        return self.step.errors(self.out, lse)


@pytest.mark.parametrize("form", ["even", "ragged", "kernel"])
def test_an_lse_near_zero_may_be_off_by_its_logits_condition(form: str) -> None:
    made = Cancelled(form)
    assert float(made.allowance.min()) > 3e-6 and made.errors().right
    half = made.errors(0.5, -0.5)
    assert half.right and (half.by_condition, half.by_condition_allowed) == (2, 2)
    assert "0 outside of FlashMLA's gates, 2 LSEs right by their logits' condition" in str(half)
    far = made.errors(3.0)
    assert not far.right and (far.outside, far.by_condition) == (1, 0)
    assert made.errors(1.01).outside == 1 and made.errors(0.99).outside == 0
    assert [w[:4] for w in far.where] == ["lse["]


@pytest.mark.parametrize("form", ["even", "kernel"])
def test_few_may(form: str) -> None:
    """A kernel whose logits are off a little everywhere is not right."""
    errors = Cancelled(form).errors(0.5, 0.5, 0.5)
    assert errors.outside == 0 and errors.by_condition == 3 and not errors.right
    counts = [dense_job.by_condition_allowed(n) for n in (1, 2999, 3000, 32768)]
    assert counts == [2, 2, 3, 32]


def test_of_the_token_that_is_worst() -> None:
    """Of those that the row sees: the second query token sees the loud one."""
    step = DenseStep.make((2,), 1, 2)
    kv, page = step.cache.kv, step.block_table[0, 0]
    assert kv is not None
    kv[page, 1, 0] = 32 * kv[page, 0, 0]
    step.q[0, :, 0] = against(kv[page, 0, 0])
    rule = step.cache.kv, step.block_table, step.cache_seqlens, SCALE
    out, lse = dense_decode_reference(step.q, *rule)
    assert lse[0, 0].tolist() == pytest.approx([0.0, math.log(2)])
    assert step.errors(out, lse + torch.tensor([4e-6, 0.0])).right
    assert step.errors(out, lse + torch.tensor([2e-4, 0.0])).outside == 1
    errors = step.errors(out, lse + torch.tensor([0.0, 2e-4]))  # 8 x 2^-24 x 32 x 17 = 2.6e-4
    assert errors.right and errors.by_condition == 1
    assert step.errors(out, lse + torch.tensor([0.0, 4e-4])).outside == 1


def test_an_ordinary_lse_is_right_by_flashmlas_gate_alone() -> None:
    """log 2 with logits of next to nothing."""
    step = DenseStep.make((2,), 2)
    step.q *= 1e-4
    rule = step.cache.kv, step.block_table, step.cache_seqlens, SCALE
    out, lse = dense_decode_reference(step.q, *rule)
    assert step.errors(out, lse + 8e-5).right
    errors = step.errors(out, lse + 9e-5)
    assert errors.outside == 2 and errors.by_condition == 0 and not errors.right


def test_what_is_not_finite_excuses_nothing() -> None:
    """Neither an infinite magnitude nor a NaN, and no LSE that is either."""
    truth = torch.zeros(4, dtype=torch.float64)
    for size in (math.inf, math.nan):
        missed, excused = dense_job.lse_outside(
            truth + 1, truth, lambda of, size=size: torch.full(of.shape, size)
        )
        assert missed.all() and not excused
    got = torch.tensor([math.nan, math.inf, -math.inf, 4e-6])
    missed, excused = dense_job.lse_outside(got, truth, lambda of: torch.full(of.shape, 17.0))
    assert missed.tolist() == [True, True, True, False] and excused == 1


@pytest.mark.parametrize(("kept", "right"), [(torch.float16, True), (torch.bfloat16, False)])
def test_partial_results_of_split_sequences_may_have_11_bits(
    kept: torch.dtype, right: bool
) -> None:
    """Rows of a BF16 cache, merged from two parts whose partial results were rounded to ``kept``;
    results in fp32, so that their own rounding hides nothing."""
    torch.manual_seed(0)
    spec = VariantSpec.from_name("dense_decode_split_r16_p16_dbf16_sm90a")
    job = DenseJob(spec, [640], parts=2, s_q=1, heads=16, amplitude=30.0)
    (pieces,) = job._pieces().values()
    assert [begin for begin, _ in pieces[1:]] == [end for _, end in pieces[:-1]]
    assert pieces[0][0] == 0 and pieces[-1][1] >= 640
    results = [
        dense_job.dense_reference(
            job.q, [job.tokens[0][a:b]], [x.sub(a).clamp(min=0) for x in job.limits()],
            dense_job.SCALE, torch.bfloat16,
        )
        for a, b in pieces
    ]  # fmt: skip
    lse = torch.stack([lse for _, lse in results])
    weights = lse.softmax(0).permute(0, 1, 3, 2)[..., None]
    out = sum(w * o.to(kept).double() for w, (o, _) in zip(weights, results, strict=True))
    errors = job.errors((out.float(), lse.logsumexp(0).float()))
    assert errors.right is right, errors

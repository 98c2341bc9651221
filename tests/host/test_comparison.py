"""The self-check can fail, and allows no more than it says."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import snapmla
from snapmla import reference
from snapmla.testing import comparison, rounding
from snapmla.testing.aligned import Aligned, two_of_one_logit
from snapmla.testing.comparison import decode_errors
from tests.support.needs import needs_compiler
from tests.support.steps import SCALE, make_step
from tests.support.ties import LENGTHS, Tied


@needs_compiler
def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail is none: a wrong scale must be noticed."""
    step = make_step((70, 3), 4, 1)
    out, lse = snapmla.decode(
        step.q, step.cache, step.block_table, step.cache_seqlens, softmax_scale=1.05 * SCALE
    )
    errors = decode_errors(
        out, lse, step.q, step.cache, step.block_table, step.cache_seqlens, SCALE
    )
    assert not errors.right


@needs_compiler
def test_fp32_results_get_no_allowance_for_bf16() -> None:
    """Errors that FP8 P drowns: a rounding on the way, and 1.5 times the mimic's own error."""
    step = make_step((70, 3), 4, 1)
    arguments = (step.q, step.cache, step.block_table, step.cache_seqlens)
    out, lse = snapmla.decode(*arguments, softmax_scale=SCALE, out_dtype=torch.float32)
    right = decode_errors(out, lse, *arguments, SCALE)
    assert right.right, str(right)
    rounded = decode_errors(out.bfloat16().float(), lse, *arguments, SCALE)
    assert rounded.error <= rounded.allowed and rounded.apart > rounded.apart_allowed
    assert not rounded.right and decode_errors(out.bfloat16(), lse, *arguments, SCALE).right
    truth, _ = reference.mla_decode_reference(
        step.q.nope, step.q.rope, step.q.scale, step.cache.content, step.cache.rope,
        step.cache.scale, step.block_table, step.cache_seqlens, SCALE, config=reference.FP64,
    )  # fmt: skip
    for factor in (1.15, 1.5):
        worse = (truth + factor * (out.double() - truth)).float()
        found = decode_errors(worse, lse, *arguments, SCALE)
        assert found.error > found.allowed and not found.right
    late = decode_errors(out, lse + 5e-5 + right.lse_error, *arguments, SCALE)
    assert late.lse_error > late.lse_allowed and not late.right


@pytest.fixture(scope="module")
def tied() -> Tied:
    return Tied.make()


def flipped(tied: Tied, factor: float = 1) -> torch.Tensor:
    """The mimic with the P at a tie rounded the other way, or that move multiplied."""
    out = tied.out.clone()
    out[tied.move.row] += factor * tied.move.step
    return out


def test_a_p_at_a_tie_may_be_rounded_either_way(
    tied: Tied, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one step of its own token, and nothing else that large."""
    plain = tied.errors(tied.out.bfloat16(), tied.lse)
    assert plain.right and plain.flipped == 0
    assert float(tied.move.step.norm() / tied.out.norm()) > plain.apart_allowed
    for factor, right in ((1, True), (2, False), (-1, False), (0.5, False)):
        errors = tied.errors(flipped(tied, factor).bfloat16(), tied.lse)
        assert errors.right == right and errors.flipped <= 1, (factor, str(errors))
        assert errors.apart_allowed == plain.apart_allowed
    row, step = tied.move.row, tied.move.step
    for at, wrong in ((row, step.roll(1)), ((0, *row[1:]), step)):
        out = tied.out.clone()
        out[at] += wrong  # of no token; of a row without a tie
        assert not tied.errors(out.bfloat16(), tied.lse).right
    other_way = tied.errors(flipped(tied).bfloat16(), tied.lse)
    assert "1 P at ties rounded the other way" in str(other_way)
    monkeypatch.setattr(comparison, "_nearest", lambda out, mimic, moves: (mimic, 0))
    assert not tied.errors(flipped(tied).bfloat16(), tied.lse).right  # what the test is about


@pytest.mark.whole_matrix
def test_faults_show_beside_a_p_at_a_tie(tied: Tied) -> None:
    """A channel of V that is 0, and the scale of a token that is off by 2 %, whichever way the P
    went: of all but those tokens that weigh next to nothing."""
    caught: dict[int, list[bool]] = {0: [], 1: []}
    for token in range(LENGTHS[1]):
        own = tied.scales[token].clone()
        tied.scales[token] *= 1.02
        wrong, lse = tied.mimic()
        tied.scales[token] = own
        for flip, verdicts in caught.items():
            out = wrong.clone()
            out[tied.move.row] += flip * tied.move.step
            verdicts.append(not tied.errors(out.bfloat16(), lse).right)
    assert caught[0] == caught[1] and sum(caught[0]) >= 30
    for flip in caught:
        out = flipped(tied, flip)
        out[1, ..., 7] = 0.0
        assert not tied.errors(out.bfloat16(), tied.lse).right


@needs_compiler
def test_the_plan_tells_the_mimic_and_what_q_k_does() -> None:
    """Two tokens of one logit, of 512 products of one sign and of one product: an error of 1.8e-2,
    which is the kernel's as built, and Q.K's; with exact logits there is none of it."""
    step = two_of_one_logit(19.4)
    for accuracy in ("standard", "high"):
        high = accuracy == "high"
        plan = step.plan(accuracy=accuracy)
        out, lse = step.decoded(plan, torch.float32)
        errors = decode_errors(out, lse, *step.arguments, plan=plan)
        assert (plan.pipeline == "f16") == high and errors.right, str(errors)
        assert errors.qk is not None and errors.qk_share is not None
        if high:
            assert errors.error < 2e-4 and abs(errors.qk.lse_error) < 1e-5
        else:
            assert errors.error > 1.5e-2 and errors.qk_share > 0.9
            assert -2e-2 < errors.qk.lse_error < -1.5e-2
            assert "Q.K's sums alone 1." in str(errors) and "would remain" in str(errors)
        assert errors.qk.rest < (2e-4 if high else 8e-3)
        alone = decode_errors(out, lse, *step.arguments)
        assert alone.qk is alone.qk_share is None and "Q.K" not in str(alone)
        assert alone.right != high  # it is the mimic of FP8 products
        config = rounding.MIMIC_F16 if high else comparison.MIMIC_OF["sm_90a"]
        given = decode_errors(out, lse, *step.arguments, config=config)
        assert (given.right, given.error) == (True, errors.error)
    two = replace(step.plan(pipeline="etap"), p_terms=2)
    assert comparison._mimic_of(two) == replace(comparison.MIMIC_OF["sm_90a"], p_terms=2)


@needs_compiler
def test_q_k_has_no_share_where_logits_are_small() -> None:
    """Near-uniform attention over a latent of mean 0: all is P's, and nothing with no error."""
    random = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(60, 576, generator=random), torch.randn(16, 576, generator=random)
    step = Aligned.of(keys, 0.02 * queries)
    plan = step.plan()
    out, lse = step.decoded(plan, torch.float32)
    errors = decode_errors(out, lse, *step.arguments, plan=plan)
    assert errors.right and errors.error > 1e-2
    assert errors.qk_share is not None and errors.qk_share < 1e-3
    assert errors.qk is not None and errors.qk.rest == pytest.approx(errors.error, rel=0.1)
    assert replace(errors, error=0.0).qk_share == 0.0


@needs_compiler
def test_a_plan_that_does_not_fit_is_refused() -> None:
    step = two_of_one_logit(1.0)
    results = (torch.zeros(1, 1, 16, 512), torch.zeros(1, 16, 1))
    make = functools.partial(snapmla.plan_decode, step.cache_seqlens, 16, page_size=64, max_pages=1)
    begin = torch.tensor([0, 1], dtype=torch.int32)
    for plan, kind, words in (
        ("high", TypeError, "plan: expected a DecodePlan, got str (what plan_decode made"),
        (
            make(1, cache_dtype=torch.bfloat16),
            ValueError,
            "plan: expected one of an FP8 cache",
        ),
        (
            make(cu_seqlens_q=begin, total_q=1),
            ValueError,
            "cu_seqlens_q: expected the ragged plan's",
        ),
        (
            make(1, row_seqlens=torch.ones(1, 1).int()),
            ValueError,
            "row_seqlens: expected the plan's",
        ),
    ):
        with pytest.raises(kind) as caught:
            decode_errors(*results, *step.arguments, plan=plan)  # type: ignore[arg-type]
        assert str(caught.value).startswith(words)

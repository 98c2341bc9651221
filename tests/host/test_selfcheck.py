"""The self-check can fail, and allows no more than it says."""

from __future__ import annotations

import pytest
import torch

import snapmla
from snapmla import reference
from snapmla.testing import selfcheck
from tests.support.needs import needs_compiler
from tests.support.steps import SCALE, make_step
from tests.support.ties import LENGTHS, Tied


@needs_compiler
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


@needs_compiler
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
    monkeypatch.setattr(selfcheck, "_nearest", lambda out, mimic, moves: (mimic, 0))
    assert not tied.errors(flipped(tied).bfloat16(), tied.lse).right  # what the test is about


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

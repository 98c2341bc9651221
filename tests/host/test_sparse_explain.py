"""``explain_prefill``: beside what was measured, when lists cover a prompt, errors."""

from __future__ import annotations

from typing import Any

import pytest

from snapmla.mha import backward_workspace_size
from snapmla.sparse.explain import explain_prefill, seen_by_lists


def test_lists_of_a_causal_prompt() -> None:
    for tokens, topk in ((1, 1), (5, 9), (9, 5), (7, 7), (100, 1)):
        assert seen_by_lists(tokens, topk) == sum(min(i + 1, topk) for i in range(tokens))


def test_a_prompt_that_its_lists_cover() -> None:
    """Dense prefill is the faster call with the same result; beyond, it is another result."""
    short, longer = (explain_prefill(n, 2048, 128, card="H200") for n in (2048, 4096))
    assert short.covers and short.best.call.startswith("mha_prefill")
    assert not longer.covers and longer.best.call == "sparse_prefill, FP8 cache"
    assert not next(c for c in longer.candidates if c.call.startswith("mha")).same
    assert "lists cover it" in str(short) and "another result: dense" in str(longer)
    assert short.gradients_bytes == 4 * backward_workspace_size(2048, 2048, 1, 128, 128)
    assert "gradients of mha_prefill: 18." in str(short)
    assert [c.us for c in short.candidates] == sorted(c.us for c in short.candidates)


@pytest.mark.parametrize(
    ("tokens", "heads", "call", "us"),
    [
        (512, 16, "mha_prefill, 192/128 channels", 12.1),
        (2048, 16, "mha_prefill, 192/128 channels", 39.0),
        (16384, 16, "mha_prefill, 192/128 channels", 2073.8),
    ],
)
def test_beside_what_was_measured(tokens: int, heads: int, call: str, us: float) -> None:
    """By a quarter (mha_cost.md)."""
    found = {c.call: c.us for c in explain_prefill(tokens, 2048, heads, card="H200").candidates}
    assert abs(found[call] / us - 1) < 0.25


def test_long_lists_as_measured() -> None:
    """4096 more lists of 2048 entries take what the table has (sparse_prefill_cost.md)."""
    for heads, us in ((128, 4260.9), (64, 2237.7), (16, 1492.8)):
        two = [explain_prefill(n, 2048, heads, card="H200").candidates for n in (16384, 20480)]
        rows = [next(c.us for c in found if "BF16" in c.call) for found in two]
        assert abs((rows[1] - rows[0]) / us - 1) < 0.05


def test_other_cards_are_slower() -> None:
    times = {
        card: {c.call: c.us for c in explain_prefill(1000, 2048, 64, card=card).candidates}
        for card in ("H200", "H20")
    }
    assert all(times["H20"][call] > us for call, us in times["H200"].items())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1, 1), "tokens: expected"), ((1, 0, 1), "topk: expected"),
        ((1, 1, 129), "num_heads: expected"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        explain_prefill(*arguments, card="H200")


def test_a_card_without() -> None:
    with pytest.raises(ValueError, match="card: expected a card of SM90"):
        explain_prefill(1, 1, 1, card="B200")

"""The MLA model in plain torch: the same function, whichever way it is computed."""

from __future__ import annotations

import cmath
from typing import Any

import pytest
import torch
from torch import Tensor

from profiles.model.attention import attend_plainly
from profiles.model.model import MlaModel, rotate
from tests.support.mla_model import CONFIG, small_model, some_tokens

CONTEXT, NEW = 20, 7


def logits(model: MlaModel, absorbed: bool) -> Tensor:
    """Of the last tokens, all at once or behind cached latents."""
    tokens = some_tokens(CONTEXT + NEW)
    if not absorbed:
        return model(tokens)[0][:, CONTEXT:]
    _, past = model(tokens[:, :CONTEXT])
    return model(tokens[:, CONTEXT:], past, attend_plainly)[0]


def test_latents_with_absorbed_queries_are_keys_and_values() -> None:
    model = small_model().double()
    expanded = logits(model, absorbed=False)
    assert expanded.std() > 0.1, "a model that says nothing proves nothing"
    torch.testing.assert_close(logits(model, absorbed=True), expanded, rtol=1e-6, atol=1e-6)


def test_a_context_in_two_pieces_is_one_context() -> None:
    model = small_model().double()
    tokens = some_tokens(CONTEXT + NEW)
    _, past = model(tokens[:, :CONTEXT])
    torch.testing.assert_close(
        model(tokens[:, CONTEXT:], past)[0], logits(model, absorbed=False), rtol=1e-6, atol=1e-6
    )


def test_no_token_sees_a_later_one() -> None:
    model, tokens = small_model(), some_tokens(16)
    changed = tokens.clone()
    changed[0, 10] += 1
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:, :10], after[:, :10])
    assert (before[:, 10:] != after[:, 10:]).any(-1).all()


def test_rotary_pairs_are_neighbours() -> None:
    """Against complex multiplication, channel by channel."""
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    got = rotate(x, torch.tensor([0, 5, 11]), 500_000.0)
    for row, position in enumerate((0, 5, 11)):
        for j in (0, 1, 17, 31):
            angle = position * 500_000.0 ** (-2 * j / 64)
            pair = complex(x[0, row, 2 * j], x[0, row, 2 * j + 1]) * cmath.exp(1j * angle)
            assert got[0, row, 2 * j] == pytest.approx(pair.real, abs=1e-5)
            assert got[0, row, 2 * j + 1] == pytest.approx(pair.imag, abs=1e-5)


def test_parameters_are_counted() -> None:
    with torch.device("meta"):
        model = MlaModel(CONFIG)
    assert sum(p.numel() for p in model.parameters()) == CONFIG.parameters


def test_the_same_logits_as_transformers() -> None:
    """transformers is no dependency: this runs where it is installed."""
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    made = transformers.DeepseekV3Config(**CONFIG.deepseek_v3())
    theirs = transformers.DeepseekV3ForCausalLM(made).eval()
    ours = small_model()
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    tokens = some_tokens(24)
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens)[0], expected, rtol=1e-4, atol=1e-4)


def test_pairs_in_another_order_are_another_function() -> None:
    """What scales halves (j, j + 32) is no function-preserving change of pairs (2j, 2j + 1)."""
    model, wrong = small_model(), small_model()
    for layer in wrong.layers:
        attention = layer.self_attn
        keys = attention.kv_a_proj_with_mqa.weight[512:]
        queries = attention.q_proj.weight.unflatten(0, (4, -1))[:, 16:]
        for channel in (3, 3 + 32):
            keys[channel] *= 16.0
            queries[:, channel] /= 16.0
    difference = (logits(model, False) - logits(wrong, False)).abs().max()
    assert difference > 1e-2

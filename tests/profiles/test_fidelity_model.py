"""The study's model and its outlier dials: the same function, whichever way it is computed."""

from __future__ import annotations

import cmath
from typing import Any

import pytest
import torch
from torch import Tensor

from profiles.fidelity import dials
from profiles.fidelity.attention import attend_plainly
from profiles.fidelity.config import RECIPES
from profiles.fidelity.dials import DIALS, Recorded
from profiles.fidelity.model import MlaModel, rotate
from tests.support.fidelity import CONFIG, small_model, some_tokens

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


@pytest.mark.parametrize("name", RECIPES)
def test_sizes(name: str) -> None:
    config = RECIPES[name].model
    with torch.device("meta"):
        model = MlaModel(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (512, 64), "what the kernels take"
    low, high = {"full": (55e6, 65e6), "small": (0, 15e6), "rehearsal": (0, 1e6)}[name]
    assert low < config.parameters <= high


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


# ------------------------------------------------------------------------------------ dials


@pytest.mark.parametrize("dial", DIALS, ids=lambda dial: dial.name)
def test_a_dial_leaves_the_function(dial: dials.Dial) -> None:
    """In fp32 within rounding, in bf16 to the bit: factors are powers of two."""
    model = small_model()
    _, seen = model(some_tokens(CONTEXT + NEW))
    turned = dial.turn(model, seen)
    for absorbed in (False, True):
        before, after = logits(model, absorbed), logits(turned, absorbed)
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    model, turned = model.bfloat16(), turned.bfloat16()
    assert torch.equal(logits(turned, absorbed=True), logits(model, absorbed=True))


def test_dials_do_what_they_say() -> None:
    model = small_model()
    tokens = some_tokens(CONTEXT)
    _, before = model(tokens)
    for dial in DIALS:
        _, after = dial.turn(model, before)(tokens)
        for old, new in zip(before, after, strict=True):
            reach = float(new.k_rope.abs().max())
            ratio = new.c_kv / old.c_kv
            if dial.kind == "rope":
                assert dial.value / 1.5 < reach < dial.value * 1.5
            else:
                assert reach == float(old.k_rope.abs().max())
            if dial.kind == "gain":
                torch.testing.assert_close(ratio, torch.full_like(ratio, dial.value))
            if dial.kind == "channels":
                loud = (ratio > 1.5).all(1).sum()
                assert loud == dials.LOUD_CHANNELS and ratio.max() == pytest.approx(dial.value)
    for dial in dials.by_kind("gain"):
        said = float(dial.name.removeprefix("gain "))
        assert max(said, 1 / said) <= max(dial.value, 1 / dial.value) < 2 * max(said, 1 / said)


def test_pairs_in_another_order_are_another_function() -> None:
    """What a dial for halves (j, j + 32) would do to pairs (2j, 2j + 1)."""
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


def test_changed_latents() -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    one = Recorded(normal(1, 2, 4, 512), normal(1, 2, 4, 64), normal(1, 400, 512),
                   normal(1, 400, 64), 0.1)  # fmt: skip
    assert torch.equal(dials.with_amplitudes(one, 0.0, 1).c_kv, one.c_kv)
    loud = dials.with_amplitudes(one, 2.0, 1)
    spread = (loud.c_kv.norm(dim=-1) / one.c_kv.norm(dim=-1)).log()
    assert spread.std() == pytest.approx(2.0, rel=0.1) and torch.equal(loud.k_rope, one.k_rope)
    shifted = dials.with_constant(one, 2.0)
    torch.testing.assert_close(shifted.c_kv - one.c_kv, torch.full_like(one.c_kv, 2.0), rtol=0.01,
                               atol=0.01)  # fmt: skip
    assert torch.equal(one.newest(100).c_kv, one.c_kv[:, 300:])

"""A slice of the rehearsal: every part of the evaluation on a small model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from profiles.fidelity import evaluate, study
from profiles.fidelity.attention import attend_plainly, backends
from profiles.fidelity.data import Bytes, Corpus
from profiles.fidelity.dials import AMPLITUDES, CONSTANTS, DIALS
from profiles.fidelity.fake import SETTINGS
from profiles.fidelity.study import MEASURES, REHEARSAL, Study
from tests.support.fidelity import CONFIG, small_model
from tests.support.needs import needs_kernels

SCOPE = dataclasses.replace(
    REHEARSAL, seeds=(1, 2), layer_length=80, layer_tail=16, layer_windows=1, lengths=(64, 128),
    tail=16, needle_lengths=(192,), depths=(0.5,), needles=1, prompt=40, prompts=3, steps=12,
    drift_lengths=(32, 64), drift_tail=8, biases=(0.0, 2.0), names=("bf16", "ours", "A", "B"),
    far=("bf16", "ours", "A"), few=("bf16", "ours"),
)  # fmt: skip
FACTS = {"trained_length": 64, "corpus": {"sha256": "same"}}


def made(**changes: Any) -> Study:
    stream = (np.arange(4000, dtype=np.uint16) * 7919 % 1009 % 89 + 33).astype(np.uint16)
    corpus = Corpus(stream, stream, Bytes(257), {"sha256": "same"})
    scope = dataclasses.replace(SCOPE, **changes)
    model = small_model().bfloat16()
    return Study("tiny", "rehearsal", model, FACTS, corpus, torch.device("cpu"), None, scope)


@pytest.fixture(scope="module")
def tiny() -> Study:
    return made()


def test_a_corpus_that_was_not_trained_on_is_refused(tiny: Study) -> None:
    facts = {**FACTS, "corpus": {"sha256": "another"}}
    with pytest.raises(ValueError, match="corpus: expected the one that tiny was trained on"):
        dataclasses.replace(tiny, facts=facts)


def test_layers(tiny: Study) -> None:
    found = evaluate.layers(tiny)
    assert len(found) == len(DIALS) + len(AMPLITUDES) + len(CONSTANTS)
    for dial, entry in found.items():
        assert set(entry["errors"]) == set(SCOPE.names), dial
        for row in entry["errors"].values():
            assert set(row) == set(MEASURES)
            for values in row.values():
                assert np.isfinite(values).all() and np.shape(values) == (2, 2)
    natural = found["natural"]["errors"]
    # powers of two: nothing changes but where P is at a tie, log2 of a scale rounds otherwise
    for dial in ("rope 1000", "gain 1e-3", "gain 1e3"):
        turned = found[dial]["errors"]["ours"]
        for measure in ("l2", "median", "worst"):
            assert np.allclose(turned[measure], natural["ours"][measure], rtol=1e-3), dial
    assert np.all(np.array(natural["bf16"]["l2"]) < 4e-3), "bf16 results"
    assert np.all(np.array(natural["ours"]["l2"]) > 5e-3)
    extreme = np.array(found["gain 1e-3"]["errors"]["B"]["median"])
    assert np.all(extreme > 3 * np.array(natural["B"]["median"]))
    assert found["amplitude 0"]["errors"] == found["constant 0"]["errors"] == natural


def test_statistics(tiny: Study) -> None:
    found = evaluate.statistics(tiny)["dials"]
    assert set(found) == {dial.name for dial in DIALS}
    assert 600 < found["rope 1000"]["rope"][0][-1] < 1500
    natural, gain = found["natural"], found["gain 1e3"]
    assert gain["content"][0][0] == pytest.approx(1024 * natural["content"][0][0])
    assert gain["content_mse"][0] == pytest.approx(1024**2 * natural["content_mse"][0], rel=1e-3)
    assert 0.01 < natural["content_l2"][0] < 0.04


def test_whole_model(tiny: Study) -> None:
    found = evaluate.perplexity(tiny)
    assert set(found[64]) == set(SCOPE.names), "within the trained length"
    assert set(found[128]) == set(SCOPE.far), "beyond"
    for row in found.values():
        assert row["bf16"]["kl"] == [0.0, 0.0] and row["bf16"]["agree"] == [1.0, 1.0]
        assert all(0 < kl < 0.5 for kl in row["ours"]["kl"])
    assert found[64]["ours"]["nll"] != found[64]["bf16"]["nll"]
    shifted = evaluate.bias(tiny)
    assert shifted[0.0][64] == {name: found[64][name] for name in SCOPE.far}
    assert all(0 < kl < 0.5 for kl in shifted[2.0][64]["ours"]["kl"])


def test_nats_are_those_of_the_next_token(tiny: Study) -> None:
    """A model that knows the stream would score 0: score the true logits by hand instead."""
    tokens = evaluate._context(tiny, 1, 65)
    row = evaluate._tails(tiny, tokens, 16, {"bf16": attend_plainly})
    with torch.no_grad():
        logits, _ = tiny.model(tokens[:, :-1])
    by_hand = -logits[0, -16:].double().log_softmax(-1)
    by_hand = by_hand.gather(1, tokens[0, -16:, None]).mean()
    assert row["bf16"]["nll"] == pytest.approx(float(by_hand), rel=5e-3)


def test_where_greedy_continuations_part(tiny: Study) -> None:
    """One pass over BF16's continuation against writing token by token with each attention."""
    found = evaluate.greedy(tiny)
    assert found["first"]["bf16"] == [[SCOPE.steps] * 3] * 2
    for name in ("ours", "B"):
        (backend,) = backends([name], torch.device("cpu"), None)
        for seed, steps in zip(SCOPE.seeds, found["first"][name], strict=True):
            source = tiny.sampler(seed)
            rows = [source.window(source.rng("greedy", i), SCOPE.prompt) for i in range(3)]
            tokens = tiny.tokens(rows)
            past = tiny.prefill(tokens[:, :-1])
            ours, theirs = (
                evaluate._written(tiny, past, tokens[:, -1:], attend)
                for attend in (backend.attend, tiny._known["bf16"].attend)
            )
            for row, step in enumerate(steps):
                same = (ours[row] == theirs[row]).tolist()
                assert same[:step] == [True] * step and (step == SCOPE.steps or not same[step])


def test_needles_that_are_found(tiny: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    assert evaluate.needles(tiny)["bf16"] == {192: {0.5: [0.0, 0.0]}}, "random weights know none"

    def knows(past: Any, tokens: torch.Tensor, attend: Any) -> tuple[torch.Tensor, Any]:
        """Logits of the token that comes; the last one's do not count."""
        logits = torch.zeros(1, tokens.shape[1], 257)
        logits[0, torch.arange(tokens.shape[1] - 1), tokens[0, 1:]] = 1.0
        return logits, past

    monkeypatch.setattr(tiny, "continued", knows)
    assert evaluate.needles(tiny)["ours"] == {192: {0.5: [1.0, 1.0]}}


def test_drift(tiny: Study) -> None:
    found = evaluate.drift(tiny)
    assert set(found) == set(CONSTANTS) and set(found[2.0]) == set(SCOPE.far)
    for name in ("ours", "A"):
        for lengths in found[0.5][name].values():
            assert set(lengths) == {32, 64} and np.shape(lengths[32]) == (2, 2)
    total, own = (np.array(found[0.0]["ours"][kind][64]) for kind in ("total", "own"))
    assert np.all(own < total), "what is stored is off already"
    assert np.all(np.array(found[2.0]["bf16"]["own"][64]) < 4e-3)


@needs_kernels
def test_the_kernel_in_the_whole_model() -> None:
    """The software GPU decodes for the model; KL to BF16 is that of its fake-quantised twin."""
    small = made(names=("bf16", "ours", "kernel"), lengths=(64,), seeds=(1,), tail=8)
    result = evaluate.evaluate(small, "perplexity")
    row = json.loads(json.dumps(result))["data"]["64"]
    ours, kernel = (row[name]["kl"][0] for name in ("ours", "kernel"))
    assert kernel == pytest.approx(ours, rel=0.3), "eight positions"
    assert row["kernel"]["nll"][0] == pytest.approx(row["ours"]["nll"][0], abs=0.05)
    assert result["skipped"]["flashmla_fp8"] == "needs a GPU" and result["seeds"] == [1]
    assert set(result["texts"]) == set(SETTINGS)


def test_a_limit_on_kernels(tiny: Study) -> None:
    assert [b.name for b in tiny.available(("ours", "kernel"), 65)] == ["ours"]
    assert CONFIG.kv_lora_rank == 512


def test_a_foreign_kernel_that_is_off_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = made()
    known = odd._known["flashmla_bf16"]
    odd._known["flashmla_bf16"] = dataclasses.replace(known, attend=attend_plainly)
    odd.check_peers()
    assert odd._known["flashmla_bf16"].attend is not None
    zero = lambda q, r, c, k, scale: torch.zeros_like(q)
    odd._known["flashmla_bf16"] = dataclasses.replace(known, attend=zero)
    odd.check_peers()
    assert "relative L2 1 on random data" in odd.skipped["flashmla_bf16"]

    def broken(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("no such operator")

    odd._known["flashmla_fp8"] = dataclasses.replace(known, name="flashmla_fp8", attend=broken)
    odd.check_peers()
    assert odd.skipped["flashmla_fp8"] == "RuntimeError: no such operator"


def test_numbers_keep_four_digits() -> None:
    given = {1: [0.123456, float("nan")], "a": (3, True)}
    assert study.rounded(given) == {"1": [0.1235, None], "a": [3, True]}

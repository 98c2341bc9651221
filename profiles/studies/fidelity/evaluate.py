"""The parts of the evaluation; each gives one JSON-able result of one model.

``statistics``: how the latents are distributed, naturally and dialled (SnapMLA, Figure 3);
``layers``: errors of each layer's attention under every dial (Figure 4);
``perplexity``: the whole model at each context length; ``needles``; ``greedy``;
``drift``: error against length on replayed latents; ``bias``: the same through the whole model.
"""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional

from profiles.bench import commit
from profiles.model.attention import Backend, attend_plainly
from profiles.studies.fidelity.dials import (
    AMPLITUDES,
    CONSTANTS,
    DIALS,
    NATURAL,
    Dial,
    Recorded,
    with_amplitudes,
    with_constant,
)
from profiles.model.fake import SETTINGS
from profiles.model.model import Attend
from profiles.studies.fidelity.study import MEASURES, Study, biased, divergence, errors, rounded
from snapmla.testing import metrics
from snapmla.testing.rounding import E4M3_MAX, to_e4m3

QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
MAX_SAMPLE = 1 << 22  # of a quantile: torch's takes no more than 2^24 numbers

Data = dict[Any, Any]


def _context(study: Study, seed: int, length: int, index: int = 0) -> Tensor:
    """(1, length) held-out tokens."""
    sampler = study.sampler(seed)
    return study.tokens([sampler.window(sampler.rng(seed, index), length)])


def _shown(items: Iterable[Any], text: str, total: int) -> Iterable[Any]:
    return track(items, text, total=total, transient=True)


# ---------------------------------------------------------------------------- distributions


def _quantiles(x: Tensor) -> list[float]:
    flat = x.float().abs().flatten()
    flat = flat[:: max(1, -(-len(flat) // MAX_SAMPLE))]
    found = [float(flat.quantile(q)) for q in QUANTILES[:-1]]
    return [*found, float(x.float().abs().max())]


def _rounding_error(x: Tensor) -> tuple[float, float]:
    """(mean square error, relative L2) of e4m3 with one scale a token."""
    wide = x.double()
    scale = (wide.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(2.0**-80)
    difference = to_e4m3(wide / scale).double() * scale - wide
    return float(difference.square().mean()), float(difference.norm() / wide.norm())


def statistics(study: Study) -> Data:
    """By dial: of content and RoPE, quantiles of |x| and what e4m3 costs, by layer."""
    seed, scope = study.scope.seeds[0], study.scope
    tokens = _context(study, seed, scope.layer_length)
    natural = study.prefill(tokens)
    found: Data = {"quantiles": QUANTILES, "dials": {}}
    for dial in _shown(DIALS, "statistics", len(DIALS)):
        latents = study.prefill(tokens, dial.turn(study.model, natural))
        rows: dict[str, list[Any]] = defaultdict(list)
        for each in latents:
            for part, x in (("content", each.c_kv), ("rope", each.k_rope)):
                rows[part].append(_quantiles(x))
                mse, l2 = _rounding_error(x)
                rows[f"{part}_mse"].append(mse)
                rows[f"{part}_l2"].append(l2)
            tops = each.c_kv.float().abs().amax(-1).flatten()
            rows["token_spread"].append(float(tops.log().std()))
        found["dials"][dial.name] = {"kind": dial.kind, "value": dial.value} | rows
    return found


# ----------------------------------------------------------------------------------- layers


def _layer_errors(
    study: Study, recorded: Sequence[Recorded], judged: list[Backend]
) -> dict[str, dict[str, list[float]]]:
    """By attention and measure: a list over layers."""
    found: dict[str, dict[str, list[float]]] = {}
    for each in recorded:
        truth = attend_plainly(*each.arguments)
        for backend in judged:
            assert backend.attend is not None
            row = errors(backend.attend(*each.arguments), truth)
            kept = found.setdefault(backend.name, {measure: [] for measure in MEASURES})
            for measure, value in row.items():
                kept[measure].append(value)
    return found


def _mean(rows: Sequence[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, list[float]]]:
    """Of the same errors in several contexts."""
    return {
        name: {
            measure: [fmean(column) for column in zip(*(row[name][measure] for row in rows))]
            for measure in MEASURES
        }
        for name in rows[0]
    }


def layers(study: Study) -> Data:
    """By dial, attention and measure: a list over seeds of lists over layers."""
    scope = study.scope
    judged = study.available(scope.names, scope.layer_length)
    found: Data = {}

    def add(name: str, kind: str, value: float, contexts: Sequence[Sequence[Recorded]]) -> None:
        entry = found.setdefault(name, {"kind": kind, "value": value, "errors": {}})
        rows = [_layer_errors(study, recorded, judged) for recorded in contexts]
        for attention, row in _mean(rows).items():
            kept = entry["errors"].setdefault(attention, {measure: [] for measure in MEASURES})
            for measure, values in row.items():
                kept[measure].append(values)

    for seed in _shown(scope.seeds, "layers", len(scope.seeds)):
        contexts = [
            _context(study, seed, scope.layer_length, i) for i in range(scope.layer_windows)
        ]
        for dial in DIALS:
            recorded = [_turned(study, dial, tokens) for tokens in contexts]
            add(dial.name, dial.kind, dial.value, recorded)
            if dial is NATURAL:
                natural = recorded
        for deviation in AMPLITUDES:
            changed = [[with_amplitudes(x, deviation, seed) for x in each] for each in natural]
            add(f"amplitude {deviation:g}", "amplitude", deviation, changed)
        for constant in CONSTANTS:
            shifted = [[with_constant(x, constant) for x in each] for each in natural]
            add(f"constant {constant:g}", "constant", constant, shifted)
    return found


def _turned(study: Study, dial: Dial, tokens: Tensor) -> list[Recorded]:
    """What the layers' attention is given with a dial turned."""
    model = dial.turn(study.model, study.prefill(tokens))
    return study.record(model, tokens, study.scope.layer_tail)


# ------------------------------------------------------------------------------ whole model


@torch.no_grad()
def _tails(
    study: Study, tokens: Tensor, tail: int, judged: dict[str, Attend]
) -> dict[str, dict[str, float]]:
    """By attention: nats a token, KL to BF16, agreement, over the last ``tail`` of a context."""
    past = study.prefill(tokens[:, : -tail - 1])
    inputs, wanted = tokens[:, -tail - 1 : -1], tokens[0, -tail:]
    baseline = study.continued(past, inputs, judged["bf16"])[0][0]
    found = {}
    for name, attend in judged.items():
        logits = baseline if name == "bf16" else study.continued(past, inputs, attend)[0][0]
        kl, same = divergence(logits, baseline)
        nll = float(functional.cross_entropy(logits.double(), wanted))
        found[name] = {"nll": nll, "kl": kl, "agree": same}
    return found


def _over_windows(
    study: Study, length: int, windows: int, judged: dict[str, Attend]
) -> dict[str, dict[str, list[float]]]:
    """By attention and measure: a list over seeds of means over windows."""
    found: dict[str, dict[str, list[float]]] = {}
    tail = min(study.scope.tail, length // 2)
    for seed in study.scope.seeds:
        sums: dict[str, dict[str, float]] = {}
        for index in range(windows):
            tokens = _context(study, seed, length + 1, index)
            for name, row in _tails(study, tokens, tail, judged).items():
                kept = sums.setdefault(name, dict.fromkeys(row, 0.0))
                for measure, value in row.items():
                    kept[measure] += value / windows
        for name, row in sums.items():
            for measure, value in row.items():
                found.setdefault(name, {}).setdefault(measure, []).append(value)
    return found


def _attends(study: Study, names: Sequence[str], length: int) -> dict[str, Attend]:
    return {b.name: b.attend for b in study.available(names, length) if b.attend is not None}


def perplexity(study: Study) -> Data:
    """By context length and attention: nats a token, KL to BF16, agreement, by seed."""
    scope = study.scope
    found: dict[int, Any] = {}
    for length in _shown(scope.lengths, "perplexity", len(scope.lengths)):
        names = scope.names if length <= study.trained_length else scope.far
        found[length] = _over_windows(study, length, scope.windows, _attends(study, names, length))
    return found


def bias(study: Study) -> Data:
    """By constant and length: what ``perplexity`` gives, the constant taken off again."""
    scope = study.scope
    lengths = [n for n in scope.lengths if n <= study.trained_length]
    found: Data = {}
    for constant in _shown(scope.biases, "bias", len(scope.biases)):
        for length in {lengths[0], lengths[-1]}:
            judged = _attends(study, scope.far, length)
            shifted = {name: biased(attend, constant) for name, attend in judged.items()}
            found.setdefault(constant, {})[length] = _over_windows(study, length, 1, shifted)
    return found


def needles(study: Study) -> Data:
    """By attention, length and depth: the part of needles retrieved, by seed.

    The answer counts if each of its tokens is the best one behind the tokens before: that is what
    greedy decoding would write.
    """
    scope = study.scope
    found: dict[str, dict[int, dict[float, list[float]]]] = {}
    for length in _shown(scope.needle_lengths, "needles", len(scope.needle_lengths)):
        judged = _attends(study, scope.few, length)
        for depth in scope.depths:
            for seed in scope.seeds:
                hits = dict.fromkeys(judged, 0.0)
                for index in range(scope.needles):
                    for name, hit in _retrieved(study, seed, index, length, depth, judged).items():
                        hits[name] += hit / scope.needles
                for name, value in hits.items():
                    row = found.setdefault(name, {}).setdefault(length, {})
                    row.setdefault(depth, []).append(value)
    return found


def _retrieved(
    study: Study, seed: int, index: int, length: int, depth: float, judged: dict[str, Attend]
) -> dict[str, bool]:
    sampler = study.sampler(seed)
    rng = sampler.rng("needle", seed, index, length, depth)
    context, wanted = sampler.needle(rng, length, depth)
    tokens = study.tokens([context + wanted])
    tail = min(64, length // 2)  # question and answer are in it
    past = study.prefill(tokens[:, :-tail])
    found = {}
    for name, attend in judged.items():
        logits, _ = study.continued(past, tokens[:, -tail:], attend)
        best = logits[0, -len(wanted) - 1 : -1].argmax(-1).tolist()
        found[name] = best == wanted
    return found


@torch.no_grad()
def greedy(study: Study) -> Data:
    """By attention and seed: the step at which each prompt's continuation leaves BF16's.

    Until they part, both have written the same tokens; so one pass over BF16's continuation shows
    the first step whose best token differs.  ``steps`` stands for never.
    """
    scope = study.scope
    judged = _attends(study, scope.names, scope.prompt + scope.steps)
    found: Data = {name: [] for name in judged}
    for seed in _shown(scope.seeds, "greedy", len(scope.seeds)):
        sampler = study.sampler(seed)
        rows = [
            sampler.window(sampler.rng("greedy", i), scope.prompt) for i in range(scope.prompts)
        ]
        tokens = study.tokens(rows)
        past = study.prefill(tokens[:, :-1])
        written = _written(study, past, tokens[:, -1:], judged["bf16"])
        inputs = torch.cat((tokens[:, -1:], written[:, :-1]), 1)
        for name, attend in judged.items():
            best = study.continued(past, inputs, attend)[0].argmax(-1)
            apart = (best != written).int()
            first = torch.where(apart.any(1), apart.argmax(1), scope.steps)
            found[name].append(first.tolist())
    return {"steps": scope.steps, "first": found}


def _written(study: Study, past: list[Any], token: Tensor, attend: Attend) -> Tensor:
    """(prompts, steps) tokens, one after another."""
    tokens = []
    for _ in range(study.scope.steps):
        logits, past = study.continued(past, token, attend)
        token = logits[:, -1:].argmax(-1)
        tokens.append(token)
    return torch.cat(tokens, 1)


def drift(study: Study) -> Data:
    """By constant, attention, error and length: of replayed attention, seeds by layers.

    ``total`` is relative L2 against the BF16 inputs; ``own`` against exact attention over what the
    attention itself has stored, so that only its arithmetic counts.
    """
    scope = study.scope
    longest = scope.drift_lengths[-1]
    found: dict[float, Data] = {}
    for seed in _shown(scope.seeds, "drift", len(scope.seeds)):
        recorded = study.record(study.model, _context(study, seed, longest), scope.drift_tail)
        for constant in CONSTANTS:
            shifted = [with_constant(each, constant) for each in recorded]
            for length in scope.drift_lengths:
                over = [each.newest(length) for each in shifted]
                for backend in study.available(scope.far, length):
                    kept = found.setdefault(constant, {}).setdefault(backend.name, {})
                    for error, by_layer in _drift_errors(backend, over).items():
                        kept.setdefault(error, {}).setdefault(length, []).append(by_layer)
    return found


def _drift_errors(backend: Backend, recorded: list[Recorded]) -> dict[str, list[float]]:
    """``total`` and ``own`` by layer."""
    assert backend.attend is not None
    found: dict[str, list[float]] = {"total": [], "own": []}
    for each in recorded:
        out = backend.attend(*each.arguments)
        stored = backend.stored(each.arguments[:4])
        for error, inputs in (("total", each.arguments[:4]), ("own", stored)):
            truth = attend_plainly(*inputs, each.softmax_scale)
            found[error].append(metrics.relative_l2(out, truth))
    return found


PARTS: dict[str, Callable[[Study], Data]] = {
    part.__name__: part for part in (layers, perplexity, drift, bias, needles, greedy, statistics)
}
# seconds that a part of the full model is expected to take on an H200: none begins with less left
EXPECTED = {
    "layers": 150, "perplexity": 120, "drift": 60, "bias": 60, "needles": 90, "greedy": 40,
    "statistics": 20,
}  # fmt: skip


def evaluate(study: Study, part: str) -> Data:
    """One part's result with its circumstances."""
    begin = time.monotonic()
    data = PARTS[part](study)
    if study.device.type == "cuda":
        torch.cuda.synchronize()
    cuda = study.device.type == "cuda"
    return {
        "model": study.name,
        "kind": study.kind,
        "part": part,
        "trained_length": study.trained_length,
        "seeds": list(study.scope.seeds),
        "device": torch.cuda.get_device_name(study.device) if cuda else "CPU (software GPU)",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "seconds": round(time.monotonic() - begin, 1),
        "skipped": study.skipped,
        "texts": {name: setting.text for name, setting in SETTINGS.items()},
        "data": rounded(data),
    }

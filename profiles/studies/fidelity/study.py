"""What every part of the evaluation stands on: a model, held-out text, who attends, error measures.

A context is prefilled in BF16, as engines do; only its last tokens go through the attention that is
judged, over the latents that it has stored in its own format.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiles.model.attention import KERNELS, NAMES, Backend, backends, sane
from profiles.studies.fidelity.data import Corpus, Sampler
from profiles.studies.fidelity.dials import Recorded
from profiles.model.model import Attend, Latents, MlaModel
from snapmla.testing import metrics

SANE = 0.15  # relative L2 that a foreign kernel may show on random data before it counts


@dataclass(frozen=True, kw_only=True)
class Scope:
    """How much is evaluated.

    Attributes:
        seeds: evaluation seeds; they choose windows, needles and prompts.
        layer_length, layer_tail, layer_windows: contexts of the layer study, their judged tokens,
            how many per seed.
        lengths, tail, windows: contexts of perplexity and KL, judged tokens, windows per seed.
        needle_lengths, depths, needles: of the retrieval map; needles per cell and seed.
        prompt, prompts, steps: greedy decoding.
        drift_lengths, drift_tail: of the replayed latents.
        biases: constants, in standard deviations, of the whole-model bias study.
        kernel_length: no kernel attends to more tokens than that; 0: no limit.
        names: attentions; ``far`` those beyond the trained length, ``few`` those of costly parts.
    """

    seeds: tuple[int, ...] = (11, 12, 13)
    layer_length: int = 16_384
    layer_tail: int = 128
    layer_windows: int = 2
    lengths: tuple[int, ...] = (1024, 4096, 16_384, 32_768, 65_536)
    tail: int = 256
    windows: int = 2
    needle_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needles: int = 4
    prompt: int = 1024
    prompts: int = 8
    steps: int = 128
    drift_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
    drift_tail: int = 64
    biases: tuple[float, ...] = (0.0, 0.5, 2.0, 8.0)
    kernel_length: int = 0
    names: tuple[str, ...] = NAMES
    far: tuple[str, ...] = ("bf16", "ours", "ours2", "high", "A", *KERNELS)
    few: tuple[str, ...] = ("bf16", "ours", "ours2", "A", "D", *KERNELS)


REHEARSAL = Scope(
    layer_length=256, layer_tail=32, lengths=(64, 128, 256, 384), tail=32, windows=1,
    needle_lengths=(192, 256), depths=(0.0, 1.0), needles=2, prompt=96, prompts=2, steps=24,
    drift_lengths=(64, 256, 1024), drift_tail=8, biases=(0.0, 2.0), kernel_length=64,
)  # fmt: skip
SCOPES = {"rehearsal": REHEARSAL, "small": Scope(), "full": Scope()}


@dataclass
class Study:
    """One model under evaluation.

    Attributes:
        name, kind: of the checkpoint, of its recipe.
        model: in bf16.
        facts: what was saved with it.
        corpus: whose held-out stream is read.
        skipped: attentions that cannot run here, and why; grows as they are asked for.
    """

    name: str
    kind: str
    model: MlaModel
    facts: dict[str, Any]
    corpus: Corpus
    device: torch.device
    peers: Path | None = None
    scope: Scope = field(default_factory=Scope)
    skipped: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        theirs = self.facts["corpus"]["sha256"]
        if theirs != self.corpus.listing["sha256"]:
            raise ValueError(
                f"corpus: expected the one that {self.name} was trained on, sha256 "
                f"{theirs[:12]}, got {self.corpus.listing['sha256'][:12]}; held-out packages "
                "would not be held out"
            )
        self._known = {b.name: b for b in backends(NAMES, self.device, self.peers)}
        for each in self._known.values():
            if each.attend is None:
                self.skipped[each.name] = each.reason

    @property
    def trained_length(self) -> int:
        return int(self.facts["trained_length"])

    def sampler(self, seed: int) -> Sampler:
        return Sampler(self.corpus.held, self.corpus.tokenizer, seed)

    def available(self, names: Sequence[str], length: int) -> list[Backend]:
        """Those of the names that can run here over so many tokens."""
        limit = self.scope.kernel_length
        return [
            self._known[name]
            for name in names
            if self._known[name].attend is not None
            and not (name in KERNELS and limit and length > limit)
        ]

    def check_peers(self) -> None:
        """Leaves out kernels of other libraries that fail, or are far off, on random data."""
        for name in ("flashmla_bf16", "flashmla_fp8"):
            each = self._known[name]
            if each.attend is None:
                continue
            try:
                error = sane(each.attend, self.device)
                reason = "" if error <= SANE else f"relative L2 {error:.2g} on random data"
            except Exception as problem:
                reason = f"{type(problem).__name__}: {problem}"[:200]
            if reason:
                self._known[name] = replace(each, attend=None, reason=reason)
                self.skipped[name] = reason

    # ------------------------------------------------------------------ passes over the model

    def tokens(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, device=self.device)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, model: MlaModel | None = None) -> list[Latents]:
        """Latents of each layer, (b, n) tokens in BF16."""
        return (model or self.model)(tokens, last=1)[1]

    @torch.no_grad()
    def continued(
        self, past: list[Latents], tokens: Tensor, attend: Attend | None
    ) -> tuple[Tensor, list[Latents]]:
        """(logits (b, n, vocabulary) fp32, latents) of tokens behind a context."""
        logits, latents = self.model(tokens, past, attend)
        return logits.float(), latents

    @torch.no_grad()
    def record(self, model: MlaModel, tokens: Tensor, tail: int) -> list[Recorded]:
        """What each layer's attention is given for the last ``tail`` of (1, n) tokens, in BF16."""
        bf16 = self._known["bf16"].attend
        assert bf16 is not None
        seen: list[Recorded] = []

        def recording(*arguments: Any) -> Tensor:
            seen.append(Recorded(*arguments))
            return bf16(*arguments)

        past = self.prefill(tokens[:, :-tail], model)
        model(tokens[:, -tail:], past, recording)
        return seen


def biased(attend: Attend, deviations: float) -> Attend:
    """The same attention over latents with a constant on every channel, taken off the output again.

    In exact arithmetic the model is unchanged: a constant adds the same to all logits of a query,
    and itself to the weighted mean.  What is left is what the arithmetic makes of it.
    """

    def shifted(
        q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, softmax_scale: float
    ) -> Tensor:
        constant = (deviations * c_kv.float().std()).to(c_kv.dtype)
        out = attend(q_nope, q_rope, c_kv + constant, k_rope, softmax_scale)
        return out.float() - constant.float()

    return shifted if deviations else attend


# ---------------------------------------------------------------------------------- measures

MEASURES = ("rmse", "cosine", "l2", "median", "p99", "worst")


def errors(actual: Tensor, truth: Tensor) -> dict[str, float]:
    """The three of Figure 4, then relative L2 by token: median, 99 %, worst.

    Args:
        actual, truth: (b, n, h, 512).
    """
    difference = (actual.double() - truth.double()).flatten(0, 1).flatten(1).norm(dim=1)
    by_token = difference / truth.double().flatten(0, 1).flatten(1).norm(dim=1)
    return {
        "rmse": metrics.rmse(actual, truth),
        "cosine": metrics.one_minus_cosine(actual, truth),
        "l2": metrics.relative_l2(actual, truth),
        "median": float(by_token.median()),
        "p99": float(by_token.quantile(0.99)),
        "worst": float(by_token.max()),
    }


def divergence(logits: Tensor, baseline: Tensor) -> tuple[float, float]:
    """(mean KL(baseline || logits) in nats, part of positions with the same best token)."""
    ours, theirs = logits.log_softmax(-1), baseline.log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    same = logits.argmax(-1) == baseline.argmax(-1)
    return float(kl.double().mean()), float(same.double().mean())


def rounded(x: Any, digits: int = 4) -> Any:
    """Every number of a nested result to so many significant digits, as JSON keeps it."""
    if isinstance(x, dict):
        return {str(key): rounded(value, digits) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(value, digits) for value in x]
    if isinstance(x, float):
        return float(f"{x:.{digits}g}") if math.isfinite(x) else None
    return x


def peers_folder() -> Path | None:
    """SNAPMLA_PEERS, where other libraries' kernels are."""
    folder = os.environ.get("SNAPMLA_PEERS")
    return Path(folder) if folder else None

"""Sizes: what a model is (in DeepSeek-V3's keys), and how it is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from profiles.model.config import MlaConfig


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of training: ``steps`` batches of ``batch`` sequences of ``length`` tokens.

    ``spans`` is the part of the sequences with retrieval or copy spans; ``micro`` sequences go
    through the model at once.
    """

    steps: int
    batch: int
    length: int
    lr: float
    spans: float
    micro: int

    @property
    def tokens(self) -> int:
        return self.steps * self.batch * self.length


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A size: the model, how it is trained, and how much text for."""

    model: MlaConfig
    phases: tuple[Phase, ...]
    corpus_bytes: int
    warmup: int = 100
    weight_decay: float = 0.1

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def trained_length(self) -> int:
        return max(phase.length for phase in self.phases)

    def at(self, step: int) -> tuple[Phase, int]:
        """The phase of a step, and the step inside of it."""
        for phase in self.phases:
            if step < phase.steps:
                return phase, step
            step -= phase.steps
        raise ValueError(f"step: expected less than {self.steps}")

    def with_vocabulary(self, size: int) -> Recipe:
        return replace(self, model=replace(self.model, vocab_size=size))


_SHORT = Phase(steps=1500, batch=64, length=1024, lr=1.5e-3, spans=0.1, micro=32)
_LONG = Phase(steps=100, batch=4, length=16_384, lr=4e-4, spans=0.5, micro=2)

RECIPES = {
    "rehearsal": Recipe(
        model=MlaConfig(
            vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=256, qk_nope_head_dim=32, v_head_dim=32, max_position_embeddings=256,
        ),
        phases=(
            Phase(steps=180, batch=4, length=256, lr=3e-3, spans=0.1, micro=4),
            Phase(steps=20, batch=4, length=256, lr=1e-3, spans=0.5, micro=4),
        ),
        corpus_bytes=2_000_000,
        warmup=20,
    ),
    "small": Recipe(
        model=MlaConfig(
            vocab_size=8192, hidden_size=256, num_hidden_layers=5, num_attention_heads=8,
            intermediate_size=704,
        ),
        phases=(replace(_SHORT, steps=1000), replace(_LONG, steps=60)),
        corpus_bytes=300_000_000,
    ),
    "full": Recipe(
        model=MlaConfig(
            vocab_size=8192, hidden_size=512, num_hidden_layers=8, num_attention_heads=16,
            intermediate_size=1408,
        ),
        phases=(_SHORT, _LONG),
        corpus_bytes=300_000_000,
    ),
}  # fmt: skip

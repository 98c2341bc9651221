"""Training: deterministic, and resumed from where it was stopped.

The batch of a step depends on seed and step alone, so that a run that was stopped and goes on sees
what it would have seen.  The finished model is packed (``profiles.studies.fidelity.checkpoint``).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.nn import functional

from profiles.studies.fidelity import checkpoint
from profiles.studies.fidelity.config import Recipe
from profiles.studies.fidelity.data import Corpus, Sampler
from profiles.model.model import MlaModel

SAVE_EVERY = 120.0  # seconds
BETAS = (0.9, 0.95)
CLIP = 1.0


@dataclass
class Trainer:
    """A model on its way.

    Attributes:
        name: of the checkpoint and the log.
        recipe: size and phases; its vocabulary is the corpus's.
        seed: of weights and batches.
        folder: where state, log and checkpoint go.
        compiled: ``torch.compile`` the model (a GPU's speed; not the same bits as without).
    """

    name: str
    recipe: Recipe
    corpus: Corpus
    seed: int
    folder: Path
    device: torch.device
    compiled: bool = False

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.recipe = self.recipe.with_vocabulary(self.corpus.tokenizer.size)
        self.sampler = Sampler(self.corpus.train, self.corpus.tokenizer, self.seed)
        self.model = MlaModel(self.recipe.model)
        self.model.initialise(self.seed)
        self.model.to(self.device)
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if p.ndim != 2]
        groups = [
            {"params": matrices, "weight_decay": self.recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, betas=BETAS, fused=self.device.type == "cuda" or None
        )
        self.forward: Callable[..., Any] = (
            torch.compile(self.model) if self.compiled else self.model
        )
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []
        if self.state_file.exists():
            self._resume()

    @property
    def state_file(self) -> Path:
        return self.folder / f"{self.name}.state"

    def _resume(self) -> None:
        state = torch.load(self.state_file, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses, self.seconds = state["step"], state["losses"], state["seconds"]

    def save(self) -> None:
        """Writes what ``_resume`` reads; a run that is killed meanwhile keeps the older one."""
        partial = self.state_file.with_suffix(".partial")
        torch.save(
            {
                "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "step": self.step, "losses": self.losses, "seconds": self.seconds,
            },
            partial,
        )  # fmt: skip
        partial.replace(self.state_file)

    def rate(self) -> float:
        """The learning rate of the next step: warm-up, then a cosine down to a tenth in a phase."""
        phase, inside = self.recipe.at(self.step)
        warm = min(1.0, (self.step + 1) / self.recipe.warmup)
        cosine = 0.55 + 0.45 * math.cos(math.pi * inside / phase.steps)
        return phase.lr * warm * cosine

    def advance(self) -> float:
        """One step; its loss in nats a token."""
        phase, _ = self.recipe.at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        tokens = self.sampler.batch(self.step, phase.batch, phase.length, phase.spans)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for part in tokens.split(phase.micro):
            loss = self._loss(part.to(self.device)) * (len(part) / phase.batch)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.step += 1
        return float(total)

    def _loss(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits, _ = self.forward(tokens)
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )

    @torch.no_grad()
    def held_out_loss(self, sequences: int = 8) -> float:
        """Nats a token on held-out text, windows of the first phase's length."""
        sampler = Sampler(self.corpus.held, self.corpus.tokenizer, 0)
        length = self.recipe.phases[0].length
        rows = [sampler.window(sampler.rng(i), length) for i in range(sequences)]
        return float(self._loss(torch.tensor(rows, device=self.device)))

    def run(self, limit: float, console: Console) -> bool:
        """Trains until done, then packs; or until ``limit`` seconds are over: then False."""
        with _deterministic():
            return self._run(limit, console)

    def _run(self, limit: float, console: Console) -> bool:
        begin = saved = time.monotonic()
        earlier = self.seconds
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.description}"), console=console) as bar:
            task = bar.add_task(self.name, total=self.recipe.steps, completed=self.step)
            while self.step < self.recipe.steps:
                self.losses.append(self.advance())
                now = time.monotonic()
                self.seconds = earlier + now - begin
                bar.update(task, completed=self.step, description=self._said())
                if self.step % 100 == 0:
                    bar.console.print(self._said(), markup=False)
                if now - begin >= limit:
                    self.save()
                    return False
                if now - saved >= SAVE_EVERY:
                    self.save()
                    saved = now
        self._finish(console)
        return True

    def _said(self) -> str:
        recent = self.losses[-20:]
        return f"{self.name}: step {self.step}, loss {sum(recent) / len(recent):.3f}"

    def _finish(self, console: Console) -> None:
        """Packs the model and writes the facts beside it."""
        self.save()
        held = self.held_out_loss()
        every = max(1, len(self.losses) // 100)
        facts = {
            "name": self.name,
            "seed": self.seed,
            "steps": self.step,
            "tokens": sum(phase.tokens for phase in self.recipe.phases),
            "trained_length": self.recipe.trained_length,
            "seconds": round(self.seconds, 1),
            "device": _device_name(self.device),
            "torch": torch.__version__,
            "held_out_loss": round(held, 4),
            "losses": [[i, round(self.losses[i], 3)] for i in range(0, len(self.losses), every)],
            "corpus": self.corpus.listing,
        }
        files = checkpoint.save(self.model, self.folder, self.name, facts)
        size = sum(file.stat().st_size for file in files)
        console.print(
            f"{self.name}: {self.recipe.model.parameters / 1e6:.1f} M parameters, held-out loss "
            f"{held:.3f} nats, {self.seconds:.0f} s, packed in {size / 1e6:.1f} MB",
            markup=False,
        )


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic kernels where torch has them; the setting of before comes back."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"

"""How a kernel is executed (``Options``) and what was counted (``Stats``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from . import accumulate as arithmetic
from .errors import Hazard


def _environment(name: str, default: str) -> str:
    return os.environ.get(f"SOFTGPU_{name}", default)


def _accumulate() -> Callable[..., NDArray[np.float32]]:
    name = _environment("ACCUMULATE", "hopper")
    if name not in arithmetic.BY_NAME:
        raise ValueError(
            f"SOFTGPU_ACCUMULATE: expected one of {', '.join(arithmetic.BY_NAME)}, got {name!r}"
        )
    return arithmetic.BY_NAME[name]


def _seed() -> int:
    text = _environment("SEED", "-1")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"SOFTGPU_SEED: expected a whole number, got {text!r}") from None


def _hazards() -> str:
    """SOFTGPU_HAZARDS: 1 stands for raise, 0 and nothing for off."""
    text = _environment("HAZARDS", "off")
    return {"": "off", "0": "off", "1": "raise"}.get(text, text)


@dataclass
class Options:
    """How to execute.  Defaults come from SOFTGPU_ACCUMULATE, _ASYNC, _SEED and _HAZARDS.

    Attributes:
        accumulate: WGMMA arithmetic, see ``softgpu.accumulate``; ``hopper`` unless said otherwise.
        asynchronous: when asynchronous work lands: ``early`` (at issue), ``late`` (copies when
            nothing else can run, wgmma when a wait_group covers it) or ``random``.
        seed: None runs warps in order; a number schedules them adversarially: random order,
            random stretches, some warps held back for long.  It also seeds what ``random``
            lands; without one that differs from run to run.
        hazards: ``off``, ``raise`` (stop at the first one) or ``collect`` (one a pair of
            instructions, in ``Stats.hazards``).
        on_hazard: called with every hazard that is collected; may be None.
        resident: clusters that run at the same time; more are admitted when those all wait.
        max_instructions: stop after so many warp instructions, 0 for no limit.

    Raises:
        ValueError: an unknown name.
    """

    accumulate: Callable[..., NDArray[np.float32]] = field(default_factory=_accumulate)
    asynchronous: str = field(default_factory=lambda: _environment("ASYNC", "early"))
    seed: int | None = field(default_factory=_seed)
    hazards: str = field(default_factory=_hazards)
    resident: int = 1
    max_instructions: int = 0
    on_hazard: Callable[[Hazard], None] | None = None

    def __post_init__(self) -> None:
        if self.asynchronous not in ("early", "late", "random"):
            raise ValueError(f"asynchronous: early, late or random, got {self.asynchronous!r}")
        if self.hazards not in ("off", "raise", "collect"):
            raise ValueError(f"hazards: off, raise or collect, got {self.hazards!r}")
        if self.seed is not None and self.seed < 0:
            self.seed = None


@dataclass
class Stats:
    """Counts of one launch: warp instructions, blocks, and hazards if they are collected."""

    instructions: int = 0
    blocks: int = 0
    hazards: list[Hazard] = field(default_factory=list)

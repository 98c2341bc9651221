"""Options of a kernel's execution (``Options``) and what was counted (``Stats``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from . import accumulate as arithmetic
from .errors import Hazard

if TYPE_CHECKING:
    from .machine import Machine
    from .warp import Warp

LANDINGS = ("early", "late", "random")
HAZARDS = ("off", "raise", "collect")
RULES = (
    "tcgen05-fence",
    "operand-format",
    "mixed-kind",
    "armed-exit",
)  # of the hazard checker, those that can be switched
_OTHER_WORDS = {"": "off", "0": "off", "1": "raise"}  # that SOFTGPU_HAZARDS may be


def _one_of(name: str, value: str, options: Iterable[str]) -> str:
    options = tuple(options)
    if value not in options:
        raise ValueError(f"{name}: expected one of {', '.join(options)}, got {value!r}")
    return value


def _accumulate() -> Callable[..., NDArray[np.float32]] | None:
    name = os.environ.get("SOFTGPU_ACCUMULATE", "")
    if not name:
        return None
    return arithmetic.BY_NAME[_one_of("SOFTGPU_ACCUMULATE", name, arithmetic.BY_NAME)]


def _asynchronous() -> str:
    return _one_of("SOFTGPU_ASYNC", os.environ.get("SOFTGPU_ASYNC", "early"), LANDINGS)


def _seed() -> int:
    text = os.environ.get("SOFTGPU_SEED", "-1")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"SOFTGPU_SEED: expected a whole number, got {text!r}") from None


def _hazards() -> str:
    text = os.environ.get("SOFTGPU_HAZARDS", "off")
    return _one_of("SOFTGPU_HAZARDS", _OTHER_WORDS.get(text, text), HAZARDS)


class Observer(Protocol):
    """Observer of launches; None costs nothing."""

    def launched(self, machine: Machine) -> None:
        """A launch is about to begin: the place to put other memories into the machine."""

    def started(self, warp: Warp) -> None:
        """A warp has been made and has executed nothing: the place to put other code into it."""


@dataclass
class Options:
    """Options of execution.  Defaults come from SOFTGPU_ACCUMULATE, _ASYNC, _SEED and _HAZARDS.

    Attributes:
        accumulate: arithmetic of the tensor cores, see ``softgpu.accumulate``; None takes that of
            the module's target.
        asynchronous: when asynchronous work lands: ``early`` (at issue), ``late`` (copies and
            tcgen05 when nothing else can run, wgmma when a wait_group covers it) or ``random``.
        seed: None runs warps in order; a number schedules them adversarially: random order,
            random stretches, some warps held back for long.  It also seeds what ``random``
            lands; without one that differs from run to run.
        hazards: ``off``, ``raise`` (stop at the first one) or ``collect`` (one a pair of
            instructions, in ``Stats.hazards``).
        rules: those of ``RULES`` that the hazard checker applies.  ``tcgen05-fence`` asks for
            tcgen05.fence on both sides of a synchronisation, which many programs of others leave
            out; ``operand-format`` for one element format in which MMAs take the same bytes of
            shared memory; ``mixed-kind`` for one kind of MMA in each accumulator, which only some
            editions of the manual want; ``armed-exit`` for no mbarrier that ends expecting bytes
            which nobody copies (with the check off an error), as tails of some producers leave.
        on_hazard: called with every hazard that is collected; may be None.
        resident: clusters that run at the same time; more are admitted when those all wait.
        max_instructions: stop after so many warp instructions, 0 for no limit.
        observer: is told of every launch and may watch it (``softgpu.cost.recorder``); None.

    Raises:
        ValueError: an unknown name, of a field or of the environment variable behind it.
    """

    accumulate: Callable[..., NDArray[np.float32]] | None = field(default_factory=_accumulate)
    asynchronous: str = field(default_factory=_asynchronous)
    seed: int | None = field(default_factory=_seed)
    hazards: str = field(default_factory=_hazards)
    rules: frozenset[str] = frozenset({"tcgen05-fence", "operand-format", "armed-exit"})
    resident: int = 1
    max_instructions: int = 0
    on_hazard: Callable[[Hazard], None] | None = None
    observer: Observer | None = None

    def __post_init__(self) -> None:
        _one_of("asynchronous", self.asynchronous, LANDINGS)
        _one_of("hazards", self.hazards, HAZARDS)
        for rule in self.rules:
            _one_of("rules", rule, RULES)
        if self.seed is not None and self.seed < 0:
            self.seed = None


@dataclass
class Stats:
    """Counts of one launch: warp instructions, blocks, and hazards if they are collected."""

    instructions: int = 0
    blocks: int = 0
    hazards: list[Hazard] = field(default_factory=list)

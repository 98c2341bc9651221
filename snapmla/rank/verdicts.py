"""Ranking of kernels for one call: candidates, reasons, times, the winner.

Knows no op: a ``Problem`` brings its candidates and what is known of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dsl_kernels.spec import VariantSpec
from snapmla.rank.cards import Card
from snapmla.runtime import variants

TIE = 0.03  # relative times that the model cannot tell apart


class Size(NamedTuple):
    """Extents for which times are given: sequences, and tokens of each."""

    batch: int
    seqlen: int


class Problem(Protocol):
    """A call for which candidates are judged: the host's facts and its op's times; hashable."""

    @property
    def card(self) -> Card:
        """Card that it runs on."""

    @property
    def reference(self) -> Size:
        """The size at which candidates are compared."""

    def candidates(self) -> Sequence[VariantSpec]:
        """All variants to look at, the pipeline first that wins ties."""

    def rejection(self, spec: VariantSpec) -> str | None:
        """Reason that a candidate cannot serve, or None."""

    def order(self, spec: VariantSpec, us: float) -> tuple[float, ...]:
        """Tie-break in one pipeline: of candidates whose times tie, the smallest order wins."""

    def model_us(self, spec: VariantSpec, size: Size) -> float | None:
        """Microseconds by the cost model; None if nothing is known."""

    def measured_us(self, spec: VariantSpec, size: Size) -> float | None:
        """Microseconds that a committed table has; None if none has."""

    def roof_us(self, size: Size) -> float:
        """The least time that the card allows."""

    def describe(self, size: Size) -> tuple[str, str]:
        """(the call in words, the ceilings that the roof is made of)."""

    def remarks(self, size: Size) -> list[str]:
        """Lines for people, beside that."""

    def __hash__(self) -> int:
        """Hash under which ``judge`` remembers its verdict."""


def predict(problem: Problem, spec: VariantSpec, size: Size) -> tuple[float | None, str]:
    """(microseconds, ``measured`` or ``model``) of a candidate; (None, ``none``) if unknown."""
    us = problem.measured_us(spec, size)
    if us is not None:
        return us, "measured"
    us = problem.model_us(spec, size)
    return us, "none" if us is None else "model"


@functools.lru_cache(maxsize=1024)
def judge(problem: Problem) -> tuple[VariantSpec | None, dict[VariantSpec, str]]:
    """(the candidate to use, why others cannot serve).

    Among those that can, the one with the least predicted time at the reference size wins, by the
    model alone: it knows every candidate, measured points only some.  Within ``TIE`` of the best
    the pipeline that comes first among the candidates wins: the model is no finer.
    """
    reasons: dict[VariantSpec, str] = {}
    times: dict[VariantSpec, float] = {}
    for spec in problem.candidates():
        reason = problem.rejection(spec)
        if reason is not None:
            reasons[spec] = reason
            continue
        us = problem.model_us(spec, problem.reference)
        times[spec] = float("inf") if us is None else us
    if not times:
        return None, reasons
    limit = (1 + TIE) * min(times.values())
    close = [spec for spec, us in times.items() if us <= limit]
    first = close[0].pipeline
    own = (spec for spec in close if spec.pipeline == first)
    return min(own, key=lambda spec: problem.order(spec, times[spec])), reasons


@dataclass(frozen=True)
class Verdict:
    """One candidate's fate.

    Attributes:
        pipeline, row_tile: the candidate; ``variant`` is its kernel's name.
        us: predicted time in microseconds, None if nothing is known.
        source: ``measured`` (a committed table) or ``model``; ``none``.
        built: whether the kernel is built on this machine (else its first use compiles it, or fails
            where that is forbidden).
        reason: why it is not used, None for the chosen one.
    """

    pipeline: str
    row_tile: int
    variant: str
    us: float | None
    source: str
    built: bool
    reason: str | None

    @property
    def chosen(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class Explanation:
    """Every candidate for one problem at one size; ``print`` it.

    Attributes:
        problem: what was asked.
        batch, seqlen: the size that times and roof are for.
        roof_us: max(bytes / read rate, FLOP / effective peak) of the card.
        verdicts: all candidates, the chosen one first, then by time.
    """

    problem: Problem
    batch: int
    seqlen: int
    roof_us: float
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Verdict | None:
        return next((v for v in self.verdicts if v.chosen), None)

    def __str__(self) -> str:
        size = Size(self.batch, self.seqlen)
        asked, ceilings = self.problem.describe(size)
        source = self.problem.card.source
        lines = [asked, f"roof {self.roof_us:.1f} us: {ceilings} ({source})"]
        lines += self.problem.remarks(size)
        for v in self.verdicts:
            time = "      ?" if v.us is None else f"{v.us:7.1f}"
            share = "" if v.us is None else f"{100 * self.roof_us / v.us:3.0f} % of roof"
            what = "chosen" if v.reason is None else f"rejected: {v.reason}"
            what += "" if v.built or v.us is None else " (not built here)"
            name = f"{v.pipeline} row_tile {v.row_tile}"
            lines.append(f"  {name:<22} {time} us {v.source:<9}{share:<15} {what}")
        return "\n".join(lines)


def explain(problem: Problem, size: Size) -> Explanation:
    """Every candidate's predicted time at one size, and why it is used or not."""
    best, reasons = judge(problem)
    times: dict[VariantSpec, tuple[float | None, str]] = {
        spec: (None, "") if spec in reasons else predict(problem, spec, size)
        for spec in problem.candidates()
    }
    best_us = None if best is None else times[best][0]
    there = {spec.name for spec in variants.available()}
    verdicts = []
    for spec, (us, source) in times.items():
        reason = reasons.get(spec)
        if reason is None and spec != best:
            reason = _slower(us, best_us, best, problem.reference)
        built = spec.name in there
        verdicts.append(Verdict(spec.pipeline, spec.row_tile, spec.name, us, source, built, reason))
    verdicts.sort(key=lambda v: (not v.chosen, v.us is None, v.us or 0.0))
    return Explanation(problem, *size, problem.roof_us(size), tuple(verdicts))


def _slower(
    us: float | None, best_us: float | None, best: VariantSpec | None, reference: Size
) -> str:
    """Reason why a candidate that could serve is not used."""
    assert best is not None
    name = f"{best.pipeline} row_tile {best.row_tile}"
    if us is None or best_us is None:
        return "nothing is known of its time"
    if us >= best_us:
        return f"{us / best_us:.2f}x the time of {name}"
    if best_us <= (1 + TIE) * us:
        return f"within {100 * TIE:.0f} % of {name}, nearer than the model can tell"
    return (
        f"{name} is chosen by times at {reference.batch} x {reference.seqlen} tokens; at this size "
        f"this one is predicted {best_us / us:.2f}x as fast: ask for it by row_tile and pipeline"
    )

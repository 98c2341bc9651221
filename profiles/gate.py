"""Named checks over results, and their page: what a study or a comparison has to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gate:
    """One line of the acceptance.

    Attributes:
        name: short.
        claim: what has to hold.
        passed: None if what it needs has not been measured.
        figures: what was found, a line each.
    """

    name: str
    claim: str
    passed: bool | None
    figures: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return "not measured" if self.passed is None else "holds" if self.passed else "FAILS"


def page(found: Sequence[Gate]) -> str:
    """The gates as Markdown."""
    lines = ["| gate | what has to hold | verdict |", "|---|---|---|"]
    lines += [f"| {gate.name} | {gate.claim} | {gate.verdict} |" for gate in found]
    for gate in found:
        if gate.figures:
            lines += ["", f"## {gate.name}: {gate.verdict}", ""]
            lines += [f"- {figure}" for figure in gate.figures]
    return "\n".join(lines) + "\n"

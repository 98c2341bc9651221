"""How a page of measurements begins."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from profiles.bench import command_line, commit


def told(facts: Mapping[str, Any], names: Sequence[str]) -> str:
    """Facts of a machine by these names, those that are known."""
    return ", ".join(f"{name} {facts[name]}" for name in names if facts.get(name) is not None)


def head(title: str, module: str, machine: str, *notes: str) -> list[str]:
    """Lines of a page up to its table: title, command, commit and time, machine, notes.

    Args:
        module: that this process runs.
        machine: a line, as ``told`` makes it.
        notes: lines on what was measured, and how.
    """
    now = datetime.datetime.now(datetime.UTC)
    return [
        f"# {title}",
        "",
        f"`{command_line(sys.argv[1:], f'-m {module}')}`",
        "",
        f"- commit {commit()}, {now:%Y-%m-%dT%H:%M:%S}Z",
        f"- {machine}",
        *(f"- {note}" for note in notes),
        "",
    ]

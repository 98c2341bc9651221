"""Pages of measurements: how one begins, and its table, row by row."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from codegen.artifacts import ROOT, write_atomic

# Of a machine (``profiles.machine``), on pages of times
FACTS = ("gpu", "driver", "cuda", "torch", "max_sm_mhz", "power_limit_w")


def commit() -> str:
    """The checkout's commit, with ``-dirty``; ``SNAPMLA_COMMIT`` where there is no git."""
    if os.environ.get("SNAPMLA_COMMIT"):
        return os.environ["SNAPMLA_COMMIT"]
    try:
        command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def command_line(arguments: list[str], program: str = "-m profiles.bench") -> str:
    """The command of this run, without folders, which differ from machine to machine."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        if skip or word.startswith(("--out=", "--peers=")):
            skip = False
        elif word in ("--out", "--peers"):
            skip = True
        else:
            kept.append(word)
    return shlex.join(["python", *program.split(), *kept])


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


def write_rows(
    path: Path, beginning: Sequence[str], columns: Sequence[str], rows: Iterable[str]
) -> None:
    """Writes a page with one table; prints each row as it comes.

    The file is written anew behind every row: a run that is stopped keeps what it has measured.

    Args:
        beginning: what ``head`` gives.
        rows: lines of the table, such as a generator that measures one after another.
    """
    lines = [*beginning, f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        lines.append(row)
        print(row, flush=True)
        write_atomic(path, "\n".join(lines) + "\n")


Body = Callable[[Sequence[Any]], list[str]]  # a page's tables of its rows


def write_record(
    path: Path, beginning: Sequence[str], rows: Sequence[Mapping[str, Any]], body: Body
) -> None:
    """Writes what was measured as ``path``, JSON, and beside it the page that ``body`` makes of it.

    Args:
        beginning: what ``head`` gives.
        rows: one a line of the table, of numbers and texts.
    """
    record = {"head": list(beginning), "rows": list(rows)}
    write_atomic(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
    write_atomic(path.with_suffix(".md"), "\n".join([*beginning, *body(rows)]) + "\n")


def render(path: Path, body: Body) -> None:
    """Writes the page of a record again."""
    record = json.loads(path.read_text())
    lines = [*record["head"], *body(record["rows"])]
    write_atomic(path.with_suffix(".md"), "\n".join(lines) + "\n")


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table of cells."""
    first = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return first + [f"| {' | '.join(cells)} |" for cells in lines]

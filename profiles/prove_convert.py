"""Outcomes of ``make prove`` from before keys of what is executed, once: into ``build/prove``.

    python -m profiles.prove_convert OLD_CHECKOUT [--build FOLDER]

OLD_CHECKOUT is a checkout of the last commit whose steps were keyed by bytes, with that record (and
its ``build/prove``, if there is one).  What passed there by its own keys is given the key that
today's tools make of the old sources: a copy of the old checkout with the files of ``OVERLAID`` put
over it.  So an outcome counts here if what it ran is the same but for docstrings and those tools,
and else waits for ``prove carry``.  FOLDER, a build of the old sources (by default the old
checkout's own), tells what was executed; where it lacks a variant an outcome counts by its sources
alone, until ``prove carry`` has seen a build of the same sources.

Mutants were judged when they ran; their survivors are not known.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from codegen.artifacts import ROOT
from dsl_kernels.spec import VariantSpec
from profiles import prove, prove_keys
from profiles.prove_book import Book, Outcome

# The tools themselves: they decide nothing of what a kernel does, or of what it is given.
OVERLAID = (
    "codegen/digests.py", "profiles/explained.py", "profiles/prove.py", "profiles/prove_asked.py",
    "profiles/prove_away.py", "profiles/prove_book.py", "profiles/prove_convert.py",
    "profiles/prove_keys.py", "snapmla/testing/__main__.py", "snapmla/testing/explanations.py",
    "snapmla/testing/launches.py",
)  # fmt: skip
COPIED = ("codegen", "dsl_kernels", "profiles", "snapmla", "softgpu", "tests", "pyproject.toml")
FIELDS = ("name", "key", "commit", "cpu_seconds", "message", "finished")
OLD_KEYS = (
    "import json; from profiles import prove; "
    "print(json.dumps({step.name: step.key for step in prove.steps()}))"
)
INSIDE = (
    "import sys; from pathlib import Path; from profiles import prove_convert; "
    "prove_convert.inside(*map(Path, sys.argv[1:]))"
)

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


def passed(old: Path, keys: dict[str, str]) -> list[dict[str, Any]]:
    """Outcomes that counted in the old checkout: of its record, and of its own ``build/prove``."""
    rows = json.loads((old / "profiles/results/prove.json").read_text())["steps"]
    rows = [row for row in rows if row["state"] == "passed"]
    for file in sorted((old / "build/prove").glob("*.json")):
        row = json.loads(file.read_text())
        rows += [row] if row.get("passed") else []
    found = {row["name"]: row for row in rows if row["key"] == keys.get(row["name"])}
    return [{name: row[name] for name in FIELDS} for row in found.values()]


def overlay(old: Path, at: Path) -> None:
    """Copies the old checkout, and puts today's tools over it."""
    skipped = shutil.ignore_patterns("__pycache__", "results")
    for name in COPIED:
        if (old / name).is_dir():
            shutil.copytree(old / name, at / name, ignore=skipped)
        else:
            at.mkdir(parents=True, exist_ok=True)
            shutil.copy(old / name, at / name)
    for name in OVERLAID:
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, at / name)


def _python(at: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(at)}
    done = subprocess.run(
        [sys.executable, *command], cwd=at, env=environment, text=True, stdout=subprocess.PIPE
    )
    if done.returncode:
        raise typer.Exit(done.returncode)
    return done.stdout.splitlines()[-1]


@app.command()
def convert(
    old: Annotated[Path, typer.Argument(help="checkout of the last commit with the old keys")],
    build: Annotated[Path | None, typer.Option(help="variants of the old sources")] = None,
) -> None:
    """Enter the old checkout's outcomes here, and write the record."""
    old = old.resolve()
    found = passed(old, json.loads(_python(old, "-c", OLD_KEYS)))
    folder = (old / "build/variants" if build is None else build).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        overlay(old, at := Path(temporary))
        Path(at, "found.json").write_text(json.dumps(found))
        told = _python(at, "-c", INSIDE, "found.json", str(folder))
    steps, book = prove.steps(), Book(prove.STATE)
    for row in json.loads(told):
        book.write(Outcome(**row))
    count = sum(book.outcome(step) is not None for step in steps)
    prove.write_record(steps, book, prove.checkout(), prove.RECORD)
    typer.echo(f"{len(found)} outcomes counted there, {count} count here; wrote {prove.RECORD}")


def inside(found: Path, folder: Path) -> None:
    """In the copy: prints outcomes with the keys that today's tools make of the old sources."""
    prove.ASKED = tuple(name for name in prove.ASKED if _known(name))
    steps = {step.name: step for step in prove.steps()}
    rows = []
    for row in json.loads(found.read_text()):
        step = steps.get(row["name"])
        if step is None:
            continue
        built = prove_keys.fresh(step, folder)
        received = prove_keys.launches(step, folder) if built else ""
        ran = prove_keys.executed(step, folder, received) if built else {}
        rows.append(
            dataclasses.asdict(Outcome(**{**row, "key": step.key}, passed=True, executed=ran))
        )
    print(json.dumps(rows))


def _known(name: str) -> bool:
    """Whether the old sources have the variant's family."""
    try:
        VariantSpec.from_name(name)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    app()

"""The record of a run of the GPU tests, in one part or in several.

    python -m profiles.test_record page tests.xml --out DIR        there, behind pytest --junitxml
    python -m profiles.test_record join ONE.json TWO.json --out DIR            parts of one commit

``page`` writes ``gpu-tests-<card>.md``: card, driver, commit, how many tests passed, which failed,
and which were skipped and why; and the same as JSON, which ``join`` reads.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from codegen.artifacts import write_atomic

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@dataclass
class Tally:
    """Results of the tests of a run.

    Attributes:
        passed: tests passed by file.
        failed: (test, first line of the message) of failures and errors.
        skipped: reason -> tests.
        seconds: of the whole run.
    """

    passed: dict[str, int] = field(default_factory=dict)
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0


def read(path: Path) -> Tally:
    """The tally of a junit file.

    Raises:
        ValueError: it is not one, or holds no test at all.
    """
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise ValueError(f"{path.name}: not a junit file: {error}") from error
    tally = Tally(seconds=sum(float(suite.get("time", 0)) for suite in root.iter("testsuite")))
    for case in root.iter("testcase"):
        module = case.get("classname", "").replace(".", "/")
        name = f"{module}::{case.get('name')}"
        skip = case.find("skipped")
        bad = next((e for kind in ("failure", "error") if (e := case.find(kind)) is not None), None)
        if bad is not None:
            tally.failed.append((name, (bad.get("message") or "no message").splitlines()[0]))
        elif skip is not None:
            tally.skipped.setdefault(skip.get("message") or "no reason", []).append(name)
        else:
            tally.passed[module] = tally.passed.get(module, 0) + 1
    if not (tally.passed or tally.failed or tally.skipped):
        raise ValueError(f"{path.name}: no test ran")
    return tally


@dataclass
class Run:
    """A run of the tests, or several of one commit on cards of one kind.

    Attributes:
        parts: of gpu_run.sh.
        when: when the last ended, UTC.
        machine: ``worker.machine`` and ``gpus``.
    """

    parts: list[str]
    commit: str
    when: str
    machine: dict[str, Any]
    tally: Tally

    @classmethod
    def load(cls, path: Path) -> Run:
        """Reads the JSON that ``page`` wrote."""
        fields = json.loads(path.read_text())
        tally = fields.pop("tally")
        return cls(**fields, tally=Tally(**tally))


def joined(runs: list[Run]) -> Run:
    """Runs of parts of the tests as one.

    Raises:
        ValueError: of several commits or cards, or a file's tests are in two of them.
    """
    first = runs[0]
    total = Run([], first.commit, "", first.machine, Tally())
    for run in runs:
        for what in ("gpu", "gpus"):
            if run.machine.get(what) != first.machine.get(what):
                raise ValueError(f"runs on {run.machine.get(what)} and {first.machine.get(what)}")
        if run.commit != first.commit:
            raise ValueError(f"runs of commits {run.commit} and {first.commit}")
        if twice := run.tally.passed.keys() & total.tally.passed.keys():
            raise ValueError(f"more than one run has {', '.join(sorted(twice))}")
        total.parts += run.parts
        total.when = max(total.when, run.when)
        total.tally.passed |= run.tally.passed
        total.tally.failed += run.tally.failed
        total.tally.seconds += run.tally.seconds
        for reason, names in run.tally.skipped.items():
            total.tally.skipped.setdefault(reason, []).extend(names)
    return total


def page(run: Run) -> str:
    """The record as markdown."""
    named = ("gpu", "gpus", "driver", "power_limit_w", "cuda", "torch", "tvm_ffi", "python")
    tally, machine = run.tally, run.machine
    skipped = sum(map(len, tally.skipped.values()))
    commands = " and ".join(f"`bash profiles/gpu_run.sh {part}`" for part in run.parts)
    lines = [
        "# GPU tests", "", commands, "",
        f"- commit {run.commit}, {run.when}",
        f"- {', '.join(f'{k} {machine[k]}' for k in named if machine.get(k) is not None)}", "",
        f"{sum(tally.passed.values())} passed, {len(tally.failed)} failed, {skipped} skipped in "
        f"{tally.seconds:.0f} s.", "",
        "| file | passed |", "|---|---|",
        *(f"| {module}.py | {count} |" for module, count in sorted(tally.passed.items())),
    ]  # fmt: skip
    if tally.failed:
        lines += ["", "Failed:", "", *(f"- `{name}`: {why}" for name, why in tally.failed)]
    for reason, names in sorted(tally.skipped.items()):
        lines += ["", f"Skipped, {reason}:", "", *(f"- `{name}`" for name in names)]
    return "\n".join([*lines, ""])


def file_name(machine: dict[str, Any]) -> str:
    """``gpu-tests-h200.md``; with several GPUs ``gpu-tests-h200-x2.md``."""
    card = re.search(r"[A-Z]+\d+\w*", str(machine.get("gpu", "")))
    several = f"-x{machine['gpus']}" if machine.get("gpus", 1) > 1 else ""
    return f"gpu-tests-{card[0].lower() if card else 'none'}{several}.md"


def write(run: Run, out: Path) -> None:
    """Writes the record; exit code 1 if a test failed."""
    target = out / file_name(run.machine)
    write_atomic(target.with_suffix(".json"), json.dumps(dataclasses.asdict(run), indent=1))
    write_atomic(target, page(run))
    typer.echo(f"wrote {target.name}")
    if run.tally.failed:
        raise typer.Exit(1)


@app.command("page")
def main(
    xml: Annotated[Path, typer.Argument(help="What pytest wrote with --junitxml.")],
    part: Annotated[str, typer.Option(help="The part of gpu_run.sh that ran.")] = "tests",
    out: Annotated[Path, typer.Option(help="Folder of the record.")] = Path("build/bench"),
) -> None:
    """The record of a run on this machine."""
    import torch

    from profiles import timing, worker
    from profiles.page import commit

    try:
        tally = read(xml)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    machine = worker.machine(device, timing.Nvml() if cuda else None)
    machine["gpus"] = torch.cuda.device_count() if cuda else 0
    when = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S}Z"
    write(Run([part], commit(), when, machine, tally), out)


@app.command()
def join(
    runs: Annotated[list[Path], typer.Argument(help="JSON of runs of one commit.")],
    out: Annotated[Path, typer.Option(help="Folder of the record.")] = Path("build/bench"),
) -> None:
    """The record of runs of several parts, as of one."""
    try:
        write(joined([Run.load(path) for path in runs]), out)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    app()

"""The record of a run of the GPU tests: ``python -m profiles.test_record tests.xml --out DIR``.

Reads what pytest wrote with ``--junitxml``, writes ``gpu-tests-<card>.md``: card, driver, commit,
how many tests passed, which failed, and which were skipped and why.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from codegen.artifacts import write_atomic


@dataclass
class Tally:
    """What became of the tests of a run.

    Attributes:
        passed: tests passed by file.
        failed: (test, first line of the message) of failures and errors.
        skipped: reason -> tests.
        seconds: of the whole run.
    """

    passed: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
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
            tally.skipped[skip.get("message") or "no reason"].append(name)
        else:
            tally.passed[module] += 1
    if not (tally.passed or tally.failed or tally.skipped):
        raise ValueError(f"{path.name}: no test ran")
    return tally


def page(tally: Tally, part: str, commit: str, when: str, machine: dict[str, Any]) -> str:
    """The record as markdown."""
    named = ("gpu", "gpus", "driver", "power_limit_w", "cuda", "torch", "tvm_ffi", "python")
    skipped = sum(map(len, tally.skipped.values()))
    lines = [
        "# GPU tests", "", f"`bash profiles/gpu_run.sh {part}`", "",
        f"- commit {commit}, {when}",
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


def main(
    xml: Annotated[Path, typer.Argument(help="What pytest wrote with --junitxml.")],
    part: Annotated[str, typer.Option(help="The part of gpu_run.sh that ran.")] = "tests",
    out: Annotated[Path, typer.Option(help="Folder of the record.")] = Path("build/bench"),
) -> None:
    """Writes the record; exit code 1 if a test failed."""
    import datetime

    import torch

    from profiles import timing, worker
    from profiles.bench import commit

    try:
        tally = read(xml)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    machine = worker.machine(device, timing.Nvml() if cuda else None)
    machine["gpus"] = torch.cuda.device_count() if cuda else 0
    when = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S}Z"
    target = out / file_name(machine)
    write_atomic(target, page(tally, part, commit(), when, machine))
    typer.echo(f"wrote {target.name}")
    if tally.failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

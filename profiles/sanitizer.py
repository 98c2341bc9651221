"""compute-sanitizer on a variant of every form of every op: memcheck, synccheck, racecheck.

    python -m profiles.sanitizer run --out DIR            # on a GPU: what is built there
    python -m profiles.sanitizer run --only 'mha_*' --tools synccheck --out DIR
    python -m profiles.sanitizer page DIR/sanitizer-h100.json

Each run is a process of its own under the tool: the small calls of one variant's op, judged as the
software GPU's self-check judges them (``snapmla.testing.on_card``).  ``run`` goes on where a folder
holds a run of the same commit and card.  It writes ``sanitizer-<card>.md``, the same as JSON and
one log a run, and returns 1 if anything is wrong: an error, a pair of racecheck without an
explanation (``sanitizer_pairs``), a wrong result, a run that did not end in time or did not begin.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import fnmatch
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from codegen import matrix
from codegen.artifacts import write_atomic
from dsl_kernels.families import HELPER
from dsl_kernels.spec import VariantSpec
from profiles import sanitizer_pairs
from profiles.device import require_cuda

TOOLS = ("synccheck", "racecheck", "memcheck")
# A variant's form: what makes it another kernel, and not a parameter of one.  Row tiles of 32 run
# the code of 16, those of 128 are two CTAs of 64.
FORM = ("pipeline", "row_tile", "cache_dtype", "mode", "keys", "lists")
SAME_CODE = {"row_tile": (32, 128)}
OPTIONS = {  # of each tool
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
    "synccheck": (),
}
PRINT_LIMIT = 1000  # reports of one run
EXPLAINED = (
    "Each is ordered in both directions: the write before the read, and the read before the next "
    "write; racecheck does not say which of them it could not follow. An explanation goes by the "
    "functions that write and read (`profiles/sanitizer_pairs.py`), and may be of a later commit "
    "than the runs; functions have their names of the runs' commit."
)
app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


# ---------------------------------------------------------------- what to run


def form_of(spec: VariantSpec) -> tuple[Any, ...]:
    """Key that variants of one kernel share: op, row tile and the named axes in ``FORM``."""
    values = dict(spec.values)
    named = [values[x] for x in FORM if isinstance(values.get(x), str)]
    return (spec.op, values.get("row_tile"), *named)


def chosen(names: Iterable[str], arch: str) -> list[str]:
    """One variant of every form, attention first: what a limit cuts off are helpers.

    Of a form it is the one whose other axes are the most usual.  Builds that record events write
    into the workspace.
    """
    found: dict[tuple[Any, ...], str] = {}
    specs = [VariantSpec.from_name(name) for name in names]
    for spec in sorted(specs, key=lambda spec: (matrix.changed(spec), spec.name)):
        name, values = spec.name, dict(spec.values)
        if spec.arch != arch or values.get("stamps", 0):
            continue
        if any(values.get(axis) in same for axis, same in SAME_CODE.items()):
            continue
        found.setdefault(form_of(spec), name)
    helper = lambda name: VariantSpec.from_name(name).family.kind == HELPER
    return sorted(found.values(), key=helper)


def built() -> list[str]:
    """Names of the variants that were built and linked."""
    from snapmla.runtime import env

    return sorted({path.stem for at in env.variant_dirs() for path in at.glob("*_sm*a.so")})


# ---------------------------------------------------------------- what a tool said


@dataclass(frozen=True)
class Finding:
    """An error, or a pair of accesses.

    Attributes:
        what: the tool's words.
        places: ``file.py:12``, or of racecheck's pairs two; empty where it names none.
        functions: ``file.py:function`` of each of them.
        why: of a pair that is explained, why it is ordered.
    """

    what: str
    places: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    why: str = ""


@dataclass
class Run:
    """One variant under one tool; ``state``: ok, error, wrong, time, failed."""

    variant: str
    tool: str
    state: str
    seconds: float
    findings: list[Finding] = field(default_factory=list)
    note: str = ""

    @property
    def good(self) -> bool:
        """Nothing but pairs that are explained."""
        return self.state == "ok" and all(f.why for f in self.findings)


_RULE = re.compile(r"^=========\s?(.*)$")
_RACE = re.compile(r"Race reported between (\w+) access at (.+)$")
_OTHER_SIDE = re.compile(r"^\s+and (\w+) access at (.+?)(?: \[(\d+) hazards?\])?$")
_PLACE = re.compile(r" in (\S+?):(\d+)(?:$|[:\s])")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) ")


def _place(text: str) -> str:
    """``path/file.py:12`` of where an access was; empty without line information."""
    match = _PLACE.search(text)
    return f"{match[1]}:{match[2]}" if match else ""


def parse(text: str, arch: str = "sm_90a") -> list[Finding]:
    """Reads the findings out of a tool's output, each once, in order.

    Raises:
        ValueError: the tool printed no summary, or counted errors that were not understood.
    """
    lines = [m[1] for line in text.splitlines() if (m := _RULE.match(line))]
    found: dict[tuple[str, ...], Finding] = {}
    first: tuple[str, str] | None = None  # the first side of a race: access, place
    for at, line in enumerate(lines):
        if race := _RACE.search(line):
            first = race[1].lower(), _place(race[2])
        elif first is not None and (other := _OTHER_SIDE.match(line)):
            places = first[1], _place(other[2])
            _keep(found, f"{sanitizer_pairs.RACE}{first[0]} ~ {other[1].lower()}", places, arch)
        elif re.match(r"\s+at \S", line) and at and not lines[at - 1].startswith(" "):
            place = _place(line)
            _keep(found, lines[at - 1].strip(), (place,) if place else (), arch)
            first = None
    summary = [int(m[1]) for line in lines if (m := _SUMMARY.search(line))]
    if not summary:
        raise ValueError("the tool printed no summary")
    if summary[-1] and not found:
        raise ValueError(f"the tool counts {summary[-1]} errors, of which none was understood")
    return list(found.values())


def _keep(
    found: dict[tuple[str, ...], Finding], what: str, places: tuple[str, ...], arch: str
) -> None:
    functions = tuple(sanitizer_pairs.function_at(place, arch) for place in places)
    why = sanitizer_pairs.explanation(functions, what)
    short = tuple(place.rpartition("/")[2] for place in places)
    found.setdefault((what, *short), Finding(what, short, functions, why))


# ---------------------------------------------------------------- running


def command(tool: str, variant: str) -> list[str]:
    """The process of one run."""
    return [
        "compute-sanitizer", "--tool", tool, "--print-limit", str(PRINT_LIMIT), *OPTIONS[tool],
        sys.executable, "-m", "profiles.sanitizer", "call", variant,
    ]  # fmt: skip


def run_one(tool: str, variant: str, seconds: float, logs: Path) -> Run:
    """Runs a variant under a tool, at most so long; its log is a file."""
    # memory of torch's cache would hide accesses behind a tensor's end
    variables = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    begin, code = time.monotonic(), 0
    log = logs / f"{variant}.{tool}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command(tool, variant), stdout=file, stderr=subprocess.STDOUT, env=variables,
                timeout=seconds, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = -1
    took = round(time.monotonic() - begin, 1)
    if code == -1:
        return Run(variant, tool, "time", took, note=f"not done within {seconds:.0f} s")
    return verdict(variant, tool, log.read_text(errors="replace"), code, took)


def verdict(variant: str, tool: str, text: str, code: int, seconds: float) -> Run:
    """Judges a run that printed ``text`` and returned ``code``."""
    try:
        findings = parse(text, VariantSpec.from_name(variant).arch)
    except ValueError as error:
        return Run(variant, tool, "failed", seconds, note=f"{error}; exit code {code}")
    wrong = re.search(r"^WRONG: (.*)$", text, re.MULTILINE)
    if wrong:
        return Run(variant, tool, "wrong", seconds, findings, wrong[1])
    if not re.search(r"^RIGHT: ", text, re.MULTILINE):
        return Run(variant, tool, "failed", seconds, findings, f"no result; exit code {code}")
    bad = [f for f in findings if not f.why]
    return Run(variant, tool, "error" if bad else "ok", seconds, findings)


def run_all(
    todo: Sequence[tuple[str, str]], jobs: int, each: float, limit: float, logs: Path
) -> list[Run]:
    """Runs (tool, variant) in parallel; what has not begun when ``limit`` seconds are over is
    none of what comes back."""
    deadline, done = time.monotonic() + limit, []

    def one(work: tuple[str, str]) -> Run | None:
        left = deadline - time.monotonic()
        return run_one(*work, min(each, left), logs) if left > 10 else None

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for work in concurrent.futures.as_completed([pool.submit(one, x) for x in todo]):
            result = work.result()
            if result is not None:
                done.append(result)
                said = "ok" if result.good else f"{result.state.upper()} {result.note}"
                print(f"{result.variant} {result.tool}: {said} ({result.seconds} s)", flush=True)
    return done


# ---------------------------------------------------------------- the page


@dataclass
class Record:
    """Everything a page tells; ``missing``: (tool, variant) that did not run."""

    commit: str
    when: str
    machine: dict[str, Any]
    runs: list[Run]
    missing: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Reads the record that ``run`` wrote."""
        fields = json.loads(path.read_text())
        runs = [
            Run(**{**run, "findings": [_finding(f) for f in run["findings"]]})
            for run in fields.pop("runs")
        ]
        missing = [(tool, variant) for tool, variant in fields.pop("missing")]
        return cls(**fields, runs=runs, missing=missing)

    @property
    def good(self) -> bool:
        """Everything ran, and nothing is wrong."""
        return bool(self.runs) and not self.missing and all(run.good for run in self.runs)


def _finding(fields: dict[str, Any]) -> Finding:
    places, functions = tuple(fields["places"]), tuple(fields["functions"])
    return Finding(fields["what"], places, functions, fields["why"])


def page(record: Record) -> str:
    """The record as markdown."""
    named = ("gpu", "driver", "cuda", "sanitizer", "torch", "tvm_ffi", "python")
    machine = record.machine
    bad = [run for run in record.runs if not run.good]
    lines = [
        "# compute-sanitizer", "", "`bash profiles/gpu_run.sh sanitizer`", "",
        f"- commit {record.commit}, {record.when}; line numbers are of that commit",
        f"- {', '.join(f'{k} {machine[k]}' for k in named if machine.get(k) is not None)}", "",
        f"{len(record.runs)} runs: {len(record.runs) - len(bad)} clean or explained, {len(bad)} "
        f"not, {len(record.missing)} not run. One variant of every form of every op, the small "
        "calls of its op; results are right in every run unless it says so.", "",
        "| op | variant | memcheck | synccheck | racecheck |", "|---|---|---|---|---|",
        *_rows(record), *_explained(record),
    ]  # fmt: skip
    lines += ["", "## Not explained", ""] if bad or record.missing else []
    for run in bad:
        said = [f"{f.what} at {' ~ '.join(f.places) or '?'}" for f in run.findings if not f.why]
        lines.append(f"- `{run.variant}`, {run.tool}: {'; '.join([run.note, *said]).strip('; ')}")
    lines += [f"- `{variant}`, {tool}: not run" for tool, variant in record.missing]
    return "\n".join([*lines, ""])


def _explained(record: Record) -> list[str]:
    """The pairs that are ordered: by means, by what is handed over."""
    found: dict[sanitizer_pairs.Handover, dict[str, None]] = {}
    for finding in (f for run in record.runs for f in run.findings if f.why):
        handover = sanitizer_pairs.handover_of(finding.functions, finding.what)
        if handover is not None:
            writes = finding.what.endswith("read")  # the first of the two
            pair = finding.functions if writes else finding.functions[::-1]
            found.setdefault(handover, {})["`" + "` -> `".join(pair) + "`"] = None
    if not found:
        return []
    lines = ["", "## Pairs of racecheck that are explained", "", EXPLAINED]
    for means in dict.fromkeys(x.means for x in sanitizer_pairs.HANDOVERS if x in found):
        lines += ["", f"### {means.title}", "", means.text, ""]
        for handover in (x for x in sanitizer_pairs.HANDOVERS if x in found and x.means == means):
            lines.append(f"- {handover.why}: {', '.join(sorted(found[handover]))}")
    return lines


def _rows(record: Record) -> list[str]:
    """A row a variant."""
    by = {(run.variant, run.tool): run for run in record.runs}
    variants = dict.fromkeys([run.variant for run in record.runs] + [v for _, v in record.missing])
    rows = []
    for name in variants:
        cells = [_cell(by.get((name, tool))) for tool in ("memcheck", "synccheck", "racecheck")]
        rows.append(f"| {VariantSpec.from_name(name).op} | `{name}` | {' | '.join(cells)} |")
    return sorted(rows)


def _cell(run: Run | None) -> str:
    if run is None:
        return "not run"
    if run.state in ("time", "failed", "wrong"):
        return {"time": "time is up", "failed": "did not run", "wrong": "wrong result"}[run.state]
    explained = [f for f in run.findings if f.why]
    bad = len(run.findings) - len(explained)
    pairs = ", ".join(" ~ ".join(f.places) for f in explained)
    return "; ".join(filter(None, [f"**{bad} errors**" if bad else "", pairs])) or "0"


def file_name(machine: dict[str, Any]) -> str:
    """``sanitizer-h200.md``"""
    card = re.search(r"[A-Z]+\d+\w*", str(machine.get("gpu", "")))
    return f"sanitizer-{card[0].lower() if card else 'none'}.md"


def write(record: Record, out: Path) -> None:
    """Writes page and JSON; exit code 1 if it is not good."""
    target = out / file_name(record.machine)
    write_atomic(target.with_suffix(".json"), json.dumps(asdict(record), indent=1))
    write_atomic(target, page(record))
    typer.echo(f"wrote {target.name}")
    if not record.good:
        raise typer.Exit(1)


# ---------------------------------------------------------------- command line


def _machine() -> dict[str, Any]:
    import torch

    from profiles import timing
    from profiles.machine import machine

    facts = machine(torch.device("cuda"), timing.Nvml())
    facts.pop("variants", None)
    said = subprocess.run(
        ["compute-sanitizer", "--version"], capture_output=True, text=True, check=False
    ).stdout
    version = re.search(r"[Vv]ersion (\S+)", said)
    return {**facts, "sanitizer": version[1] if version else None}


def _earlier(path: Path, commit: str) -> list[Run]:
    """Runs of a folder that count: of this commit, and done."""
    if not path.exists():
        return []
    record = Record.load(path)
    return [run for run in record.runs if record.commit == commit and run.state != "time"]


@app.command("run")
def main(
    out: Annotated[Path, typer.Option(help="Folder of the page, JSON and logs.")],
    only: Annotated[str, typer.Option(help="Globs over variant names, by commas.")] = "*",
    tools: Annotated[str, typer.Option(help="Tools, by commas.")] = ",".join(TOOLS),
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 12,
    each: Annotated[float, typer.Option(help="Seconds that one run may take.")] = 240,
    limit: Annotated[float, typer.Option(help="Seconds that all may take.")] = 520,
) -> None:
    """Runs what is built under the tools, and writes the page."""
    require_cuda()
    import torch

    from profiles.page import commit
    from snapmla.runtime import variants as runtime

    asked = tools.split(",")
    if unknown := set(asked) - set(TOOLS):
        raise typer.BadParameter(f"tools: expected some of {', '.join(TOOLS)}, got {unknown}")
    names = chosen(built(), runtime.arch_of(torch.device("cuda")))
    wanted = [n for n in names if any(fnmatch.fnmatchcase(n, g) for g in only.split(","))]
    if not wanted:
        raise typer.BadParameter(f"only: no built variant of this card matches {only!r}")
    logs = out / "sanitizer-logs"
    logs.mkdir(parents=True, exist_ok=True)
    machine = _machine()
    earlier = _earlier((out / file_name(machine)).with_suffix(".json"), commit())
    known = {(run.tool, run.variant) for run in earlier}
    todo = [(t, v) for t in asked for v in wanted if (t, v) not in known]
    runs = earlier + run_all(todo, jobs, each, limit, logs)
    ran = {(run.tool, run.variant) for run in runs}
    missing = [work for work in todo if work not in ran]
    when = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S}Z"
    write(Record(commit(), when, machine, runs, missing), out)


@app.command("page")
def again(record: Annotated[Path, typer.Argument(help="JSON that run wrote.")]) -> None:
    """Writes the page of a record again, with the explanations that there are now."""
    loaded = Record.load(record)
    for run in loaded.runs:
        run.findings = [
            dataclasses.replace(f, why=sanitizer_pairs.explanation(f.functions, f.what))
            for f in run.findings
        ]
        if run.state in ("ok", "error"):
            run.state = "ok" if all(f.why for f in run.findings) else "error"
    write(loaded, record.parent)


@app.command()
def call(variant: Annotated[str, typer.Argument(help="Name of a built variant.")]) -> None:
    """The process under the tool: the variant's small calls, and whether they came out right."""
    from snapmla.testing import on_card

    result = on_card.check(VariantSpec.from_name(variant))
    print(f"{'RIGHT' if result.passed else 'WRONG'}: {result.summary}", flush=True)


if __name__ == "__main__":
    app()

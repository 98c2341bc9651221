"""``make prove``: what is too long for every ``make test``, in steps that stop and go on.

    python -m profiles.prove                           all that has not passed on these sources
    python -m profiles.prove --slice 2/8 --limit 600   the second eighth; no step begins after 600 s
    python -m profiles.prove --only 'mutants:*'        some steps;  --list: all, and how they stand

    python -m profiles.prove carry [OLD_BUILD]         keep what executes the same on new sources

A step is a few commands that any shell could run.  Its outcome is a file in ``build/prove`` and
counts as long as what runs is the same, whatever docstrings and comments say (``prove_keys``); a
step that failed, was interrupted or whose sources changed runs again.  ``carry`` keeps an outcome
whose sources changed but not its variants' PTX, the software GPU, seeds, counts and launches, as
where a kernel's file has another name.  Mutants that survived are judged by the explanations of
today.  Slices part the list of
steps, so that several shells or machines can share it.  Every run ends by writing the record,
``profiles/results/prove.md`` and ``prove.json``: what passed at which commit, what failed and why,
and what has not run.
"""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import itertools
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from codegen import matrix, toolchain
from codegen.artifacts import ROOT, default_dir, write_atomic
from dsl_kernels import registry
from dsl_kernels.families import ARCHS, DECODE
from dsl_kernels.spec import VariantSpec
from profiles import prove_keys
from profiles.explained import EXPLAINED, EXPLAINED_OF, EXPLAINED_SM100
from profiles.page import commit
from profiles.prove_asked import ASKED, ASKED_BLACKWELL, ASKED_FEW, BESIDE
from profiles.prove_book import STUDIED, Book, Outcome, carried
from profiles.prove_keys import EXPLANATIONS, ROLES, Command, Step, step

STATE = ROOT / "build" / "prove"
RECORD = ROOT / "profiles" / "results" / "prove.md"
SCHEDULES, FEW = 100, 12
# Times of kernels, which decide what a call chooses, and nothing of a kernel that is named.
COSTS = "snapmla/data/decode_costs.json"
# Samples of SM100's decode (tests/support/sm100_sample.py): op, steps that they are dealt out to.
SAMPLES = {"fp8": ("decode", 12), "dense": ("dense_decode", 8)}
# Ops whose variants of the matrix take too long under schedules, as their rows are thousands of
# scores a CTA: ASKED has smaller ones of the same source.
STAND_INS = ("select_topk",)
TWINS = ("select_topk_t64_e8_c2_sm100a",)  # of SM90's source, the smaller one of SM100
KINDS = {
    "build": "every variant compiled and audited",
    "variant": "the shipped object, hazard check on, in all cache layouts; bits against the H200's",
    "schedules": f"the test set under {SCHEDULES} adversarial schedules with the hazard check, "
    f"every other variant of SM100's own under {FEW}",
    "mutants": "a variant of each kernel and row tile without each synchronisation: who notices",
    "replay": "all 2^32 arguments of each special function against the H200's",
    "sample": "SM100's decode at points where every two values of every two axes meet",
    "tests": "test files over the whole matrix instead of the test set",
}
# Whole-matrix tests of these files run variant by variant, in the steps ``variant``.
PER_VARIANT = ("tests/kernels/test_variants.py", "tests/kernels/test_h200.py")
CONFTEST = ("tests/conftest.py", "tests/support/needs.py", "tests/support/variants.py")
REPLAYED = (
    "softgpu", "profiles/record_softgpu.py", "profiles/vectors.py", "profiles/instructions.py",
    "snapmla/testing/workloads", "tests/data",
)  # fmt: skip
SAID = 4000  # characters of a failed step's output that are kept

app = typer.Typer(add_completion=False, help=__doc__)


# ---------------------------------------------------------------------------------------- steps


def steps() -> list[Step]:
    """All steps on the sources as they are now, those first that others build on."""
    prove_keys.forget()
    hopper, blackwell = (matrix.default_specs(arch) for arch in ("sm_90a", "sm_100a"))
    every = [*hopper, *blackwell]
    # of kernels of one source for both architectures one variant an op is studied on SM100, too
    own = [spec for spec in blackwell if not one_source(spec)]
    found = [_build(group) for group in _families(every)]
    found += [_variant(spec) for spec in every]
    chosen = [spec for some in (hopper, own) for spec in matrix.sample(some, thorough=True)]
    chosen = [spec for spec in chosen if spec.op not in STAND_INS]
    found += [_schedules(spec) for spec in chosen]
    found += [_schedules(spec, FEW) for spec in own if spec not in chosen]
    shared = twins(blackwell)
    found += [_schedules(spec) for spec in shared] + [_mutants(spec) for spec in shared]
    studied = _families(chosen)
    found += [_mutants(min(group, key=matrix.changed)) for group in studied]
    asked = [VariantSpec.from_name(name) for name in (*ASKED, *BESIDE)]
    found += [_schedules(spec) for spec in asked if spec not in chosen]
    found += [_mutants(spec) for spec in asked]
    found += [_schedules(VariantSpec.from_name(name), FEW) for name in ASKED_FEW]
    waiting = [VariantSpec.from_name(name) for name in ASKED_BLACKWELL]
    found += [_schedules(spec) for spec in waiting] + [_mutants(spec) for spec in waiting]
    found += [_sample(name, k + 1, blackwell) for name in SAMPLES for k in range(SAMPLES[name][1])]
    replay = ("-m", "profiles.record_softgpu", "replay", "mufu", "--all")
    found.append(step("replay", "mufu", replay, reads=REPLAYED, specs=()))
    found += [_tests(path, every) for path in whole_matrix_files()]
    return found


def one_source(spec: VariantSpec) -> bool:
    """True if one module builds the variant and its twin of the other architecture."""
    modules = {registry.module_name(spec.replace(arch=arch)) for arch in ARCHS}
    return len(modules) == 1


def twins(blackwell: Iterable[VariantSpec]) -> list[VariantSpec]:
    """SM100's variants to prove: a sample of those built from SM90's sources, and ``TWINS``."""
    shared = [spec for spec in blackwell if one_source(spec) and spec.op not in STAND_INS]
    return [*matrix.sample(shared), *map(VariantSpec.from_name, TWINS)]


def _families(specs: Iterable[VariantSpec]) -> list[list[VariantSpec]]:
    """Variants of one kernel and row tile."""
    found: dict[tuple[object, ...], list[VariantSpec]] = {}
    for spec in specs:
        values = dict(spec.values)
        key = (spec.arch, spec.op, *map(values.get, ("pipeline", "row_tile")))
        found.setdefault(key, []).append(spec)
    return list(found.values())


def _build(specs: list[VariantSpec]) -> Step:
    first = specs[0]
    values, helper = dict(first.values), first.family.helper
    told = () if helper else (values.get("pipeline"), values.get("row_tile"))
    words = (f"r{value}" if isinstance(value, int) else value for value in told if value)
    family = "_".join((first.op, *words))
    # an op's name may begin another's (merge, merge_states): its first axis tells them apart
    letters = first.family.axes[0].letters if helper and first.family.axes else ""
    pattern = f"{family}_{letters}*"
    command = ("-m", "codegen", "precompile", "--arch", first.arch, "--filter", pattern)
    what = f"{family}_*_{first.arch.replace('_', '')}"
    return step("build", what, command, reads=(), specs=specs)


def _needs(spec: VariantSpec) -> list[VariantSpec]:
    """The variant, and what plans for it."""
    if spec.family.kind != DECODE:
        return [spec]
    return [spec, VariantSpec(op="plan_decode", arch=spec.arch)]


def _variant(spec: VariantSpec) -> Step:
    command = ("-m", "pytest", "--whole-matrix", "-q", "-k", spec.name, *PER_VARIANT)
    reads = ("snapmla", *CONFTEST, *PER_VARIANT, *REPLAYED)
    return step("variant", spec.name, command, reads=reads, specs=_needs(spec))


def _schedules(spec: VariantSpec, count: int = SCHEDULES) -> Step:
    command = ("-m", "snapmla.testing", "check", spec.name, "--seeds", str(count))
    return _on_objects("schedules", spec, command, f"{count} schedules")


def _mutants(spec: VariantSpec) -> Step:
    own = [text for glob, text in EXPLAINED_OF.items() if fnmatch.fnmatchcase(spec.name, glob)]
    usual = EXPLAINED if spec.arch == "sm_90a" or one_source(spec) else EXPLAINED_SM100
    texts = (*usual, *itertools.chain.from_iterable(own))
    explained = [word for text in texts for word in ("--explained", text)]
    command = ("-m", "snapmla.testing", "mutate", spec.name, *explained)
    return _on_objects("mutants", spec, command, f"{STUDIED} schedules", texts)


def _sample(name: str, k: int, blackwell: list[VariantSpec]) -> Step:
    """A part of a sample of SM100's decode."""
    op, parts = SAMPLES[name]
    specs = [VariantSpec(op="plan_decode", arch="sm_100a")]
    specs += [spec for spec in blackwell if spec.op == op]
    builds = ("-m", "codegen", "build", *(spec.name for spec in specs))
    command = ("-m", "tests.support.sm100_sample", name, f"{k}/{parts}")
    reads = ("softgpu", "snapmla", "tests/support")
    counts = f"{k}/{parts}"
    return step("sample", f"{name}-{k}", builds, command, reads=reads, specs=specs, counts=counts)


def _on_objects(
    kind: str, spec: VariantSpec, command: Command, counts: str, explained: tuple[str, ...] = ()
) -> Step:
    """A command of the software GPU, which takes objects as they lie, behind their build."""
    builds = [("-m", "codegen", "build", each.name) for each in _needs(spec)]
    return step(
        kind, spec.name, *builds, command, reads=("softgpu",), specs=_needs(spec),
        host=("snapmla",), without=(COSTS, ROLES), counts=counts, explained=explained,
    )  # fmt: skip


def whole_matrix_files() -> list[str]:
    """Test files that ``--whole-matrix`` gives more to do and that no step ``variant`` runs."""
    asks = re.compile(r"mark\.(variants|whole_matrix)\b|\b(built: Report|specs: list|TARGETS)\b")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [str(p.relative_to(ROOT)) for p in files if asks.search(p.read_text())]
    return [name for name in names if name not in PER_VARIANT]


def _tests(path: str, every: list[VariantSpec]) -> Step:
    command = ("-m", "pytest", "--whole-matrix", "-q", path)
    reads = ("softgpu", "snapmla", "codegen", "profiles", "tests")
    what = path.removeprefix("tests/")
    return step("tests", what, command, reads=reads, specs=every, without=(EXPLANATIONS,))


def part(found: Sequence[Step], text: str) -> list[Step]:
    """The ``k/n``-th part of the steps; the n parts are disjoint and together all.

    Raises:
        ValueError: not of that form, or k is not 1 to n.
    """
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"--slice: expected k/n with k from 1 to n, such as 2/8, got {text!r}")
    return list(found[int(match[1]) - 1 :: int(match[2])])


# ------------------------------------------------------------------------------------- outcomes


def execute(step: Step, at: str) -> Outcome:
    """Runs a step's commands; nothing is left running if this is interrupted."""
    before = _cpu_seconds()
    passed, output, told = True, "", None
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        for command in step.commands:
            if step.recorded and command is step.commands[-1]:
                command = (*command, "--record", str(record))
            done = subprocess.run(
                [sys.executable, *command], cwd=ROOT, text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            output = done.stdout.rstrip()
            told = read_told(record)
            if done.returncode and told is None:  # mutants that were told are judged when read
                output = (
                    f"python {' '.join(command)}: exit code {done.returncode}\n{output[-SAID:]}"
                )
                passed = False
                break
    message = (output.splitlines() or [""])[-1].strip("= ") if passed else output
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    cpu = round(_cpu_seconds() - before, 2)
    told = told or {}
    ran = prove_keys.executed(step, default_dir(), told.get("launches", "")) if passed else {}
    return Outcome(
        step.name, step.key, passed, at, cpu, message, now, ran, told.get("survivors")
    )  # fmt: skip


def read_told(record: Path) -> dict[str, Any] | None:
    """Reads the record of a command with ``--record``; None if it did not get so far."""
    try:
        return dict(json.loads(record.read_text()))
    except (OSError, ValueError):
        return None


def checkout() -> str:
    """The commit; ``-dirty`` if anything but the record itself was changed since."""
    changed = subprocess.run(
        ["git", "diff", "--quiet", "HEAD", "--", ".", ":!profiles/results/prove.*"],
        cwd=ROOT,
        capture_output=True,
    )
    at = commit()
    return at if changed.returncode else at.removesuffix("-dirty")


def _cpu_seconds() -> float:
    """CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(
    found: Sequence[Step],
    book: Book,
    at: str,
    *,
    limit: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
    on_start: Callable[[Step], None] = lambda step: None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Runs what has not passed; returns what it ran.

    Args:
        at: the commit, as the outcomes tell it.
        limit: no step begins later than this many seconds of ``clock`` after the start.
    """
    started, ran = clock(), []
    for each in book.pending(found):
        if clock() - started >= limit:
            break
        on_start(each)
        ran.append(execute(each, at))
        book.write(ran[-1])
        on_end(ran[-1])
    return ran


# --------------------------------------------------------------------------------------- record


STATES = ("passed", "failed", "not run")


def table(found: Sequence[Step], book: Book, at: str) -> dict[str, Any]:
    """The record as data: every step and how it stands."""
    rows: list[dict[str, Any]] = []
    for each in found:
        outcome, last = book.outcome(each), book.last(each)
        row: dict[str, Any] = {"name": each.name, "state": "not run", "key": each.key}
        if last is not None:  # on these sources or others: the record keeps it
            row |= dataclasses.asdict(last)
        if outcome is not None:
            row["state"] = "passed" if outcome.passed else "failed"
            if outcome.message != row["message"]:
                row["judged"] = outcome.message
        rows.append(row)
    return {"commit": at, "command": "make prove", "steps": rows}


def page(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    rows = record["steps"]
    passed, failed, left = (_in_state(rows, state) for state in STATES)
    lines = [
        "# What `make prove` ran",
        "",
        f"At commit {record['commit']}: {len(passed)} of {len(rows)} steps passed, {len(failed)} "
        f"failed, {len(left)} have not run on these sources; {_minutes(rows):.1f} CPU minutes.",
        "",
        "| steps | what they do | all | passed | failed | not run | CPU minutes | ran at |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys(_kind(row) for row in rows)
    lines += [_line(kind, _of(kind, rows)) for kind in kinds]
    for row in failed:
        lines += [
            "",
            f"## Failed: {row['name']}",
            "",
            "```",
            row.get("judged", row["message"]),
            "```",
        ]
    if left:
        lines += ["", "## Not run on these sources", ""]
        lines += [_names(kind, rows) for kind in kinds if _in_state(_of(kind, rows), STATES[2])]
    mutants = [f"- {row['message']}" for row in passed if _kind(row) == "mutants"]
    if mutants:
        lines += ["", "## Mutants", "", *mutants]
    return "\n".join(lines) + "\n"


def _line(kind: str, rows: list[dict[str, Any]]) -> str:
    """A kind's row of the table."""
    counts = [len(rows), *(len(_in_state(rows, state)) for state in STATES)]
    commits = dict.fromkeys(_short(row["commit"]) for row in _ran(rows))
    cells = [kind, KINDS.get(kind, ""), *counts, f"{_minutes(rows):.1f}", ", ".join(commits)]
    return f"| {' | '.join(map(str, cells))} |"


def _short(commit: str) -> str:
    sha, dirty, _ = commit.partition("-dirty")
    return sha[:12] + dirty


def _names(kind: str, rows: list[dict[str, Any]]) -> str:
    """The steps of a kind that have not run."""
    group = _of(kind, rows)
    left = [f"`{row['name'].partition(':')[2]}`" for row in _in_state(group, STATES[2])]
    return f"- {kind}: {'all' if len(left) == len(group) else ', '.join(left)}"


def _of(kind: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if _kind(row) == kind]


def _kind(row: dict[str, Any]) -> str:
    return str(row["name"]).partition(":")[0]


def _in_state(rows: list[dict[str, Any]], state: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["state"] == state]


def _minutes(rows: list[dict[str, Any]]) -> float:
    return sum(row["cpu_seconds"] for row in _ran(rows)) / 60


def _ran(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of steps that ran on these sources."""
    return [row for row in rows if row["state"] != STATES[2]]


def write_record(found: Sequence[Step], book: Book, at: str, to: Path) -> None:
    """Writes ``to`` and the JSON beside it."""
    record = table(found, book, at)
    write_atomic(to.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    write_atomic(to, page(record))


# --------------------------------------------------------------------------------- command line


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    slice_: Annotated[str, typer.Option("--slice", help="k/n: one part of the steps")] = "1/1",
    limit: Annotated[float, typer.Option(help="no step begins after so many seconds")] = 1e9,
    only: Annotated[str, typer.Option(help="glob over names of steps")] = "*",
    show: Annotated[bool, typer.Option("--list", help="list steps, run none")] = False,
) -> None:
    """Run what has not passed on these sources; exit code 1 if any step failed."""
    console = _console()
    if not toolchain.have_compiler():
        raise _fail(console, "nvidia-cutlass-dsl is not installed: pip install 'snapmla[compile]'")
    if context.invoked_subcommand is not None:
        return
    every, book, at = steps(), Book(STATE, RECORD.with_suffix(".json")), checkout()
    try:
        mine = [s for s in part(every, slice_) if fnmatch.fnmatchcase(s.name, only)]
    except ValueError as error:
        raise _fail(console, str(error)) from None
    if not mine:
        raise _fail(console, f"--only: no step of slice {slice_} matches {only!r}; see --list")
    if show:
        for each in mine:
            console.print(f"{_standing(book, each):8} {each.name}", markup=False)
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell began it in the background
        signal.signal(number, signal.default_int_handler)
    try:
        _run_shown(mine, book, at, limit, console)
    except KeyboardInterrupt:
        console.print("interrupted: the next run goes on from here")
        raise typer.Exit(130) from None
    finally:
        write_record(every, book, at, RECORD)
    left, failed = book.pending(mine), book.failed(mine)
    console.print(
        f"{len(mine) - len(left)} of {len(mine)} steps passed, {len(failed)} failed, "
        f"{len(left) - len(failed)} left to run; wrote {RECORD}",
        soft_wrap=True,
    )
    raise typer.Exit(1 if failed else 0)


def _console() -> Console:
    return Console(
        width=None if Console().is_terminal else 140, highlight=False, markup=False, emoji=False
    )


def _standing(book: Book, step: Step) -> str:
    """Standing of a step, by its sources alone; ``elsewhere``: it passed on others."""
    outcome, last = book.outcome(step), book.last(step)
    if outcome is None:
        other = last is not None and last.passed and last.key != step.key
        return "elsewhere" if other else "not run"
    return "passed" if outcome.passed else "failed"


@app.command()
def carry(
    old: Annotated[
        Path | None, typer.Argument(help="build that the outcomes are of: compared, too")
    ] = None,
    build: Annotated[Path | None, typer.Option(help="variants of the sources as they are")] = None,
) -> None:
    """Keep outcomes of other sources where PTX, software GPU, counts and launches are equal."""
    console = _console()
    every, book = steps(), Book(STATE, RECORD.with_suffix(".json"))
    kept, left = carried(every, book, default_dir() if build is None else build, old)
    for name, why in left.items():
        console.print(f"not kept: {name}: {why}", markup=False, soft_wrap=True)
    write_record(every, book, checkout(), RECORD)
    console.print(f"{len(kept)} outcomes kept, {len(left)} not; wrote {RECORD}", soft_wrap=True)


def _run_shown(mine: list[Step], book: Book, at: str, limit: float, console: Console) -> None:
    """``run`` with a bar, and a line for each step."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as bar:
        done = len(mine) - len(book.pending(mine))
        task = bar.add_task("", total=len(mine), completed=done)

        def started(each: Step) -> None:
            bar.update(task, description=each.name)

        def ended(outcome: Outcome) -> None:
            bar.update(task, advance=int(outcome.passed))
            state = "passed" if outcome.passed else "FAILED"
            text = f"{state} {outcome.name}  {outcome.cpu_seconds:.1f} CPU s  {outcome.message}"
            bar.console.print(text, markup=False, soft_wrap=True)

        run(mine, book, at, limit=limit, on_start=started, on_end=ended)


def _fail(console: Console, message: str) -> typer.Exit:
    console.print(message, markup=False, soft_wrap=True)
    return typer.Exit(2)


if __name__ == "__main__":
    app()

"""Steps of ``make prove`` on another machine, which has many cores and no compiler.

    python -m profiles.prove_away pack [GLOB...]          here: build/carry/prove.tar.xz
    python -m profiles.prove_away run PACKED --jobs 14 --limit 500 --out FILE         there
    python -m profiles.prove_away take FILE               here: into build/prove and the record

Steps ``schedules``, ``mutants`` and ``sample`` take compiled objects as they lie: ``pack`` takes
along those that are built from the sources as they are, with their steps' keys.  ``run`` deals out
a step's 100 schedules, and its mutants, in shares, begins what took longest last time first, else
in the order of pack's globs, and drops what has not ended in time: ``pack --shares 20`` makes the
shares of long steps short.  What each share said lies beside FILE, in a ``.log``.  ``take``
believes an outcome whose key is still the step's: what runs of sources and of the checks' own code
is what ran.
"""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from codegen.artifacts import ROOT, write_atomic
from codegen.matrix import did_you_mean
from profiles import prove, prove_keys
from profiles.prove_book import judged

PACKED = ROOT / "build" / "carry" / "prove.tar.xz"
KINDS = ("schedules", "mutants", "sample")
SHARES = 4  # of a step's schedules, and of its mutants, if pack is told no other number
KILLED = re.compile(r"(\S+: )(\d+) of (\d+) mutants killed \(\d+ %\)(.*)")
SUFFIXES = ("o", "ptx", "json")  # what the software GPU reads of a variant

app = typer.Typer(add_completion=False, no_args_is_help=True)


@dataclass(frozen=True)
class Share:
    """A part of a step: one command, of ``of`` that make the step.

    Attributes:
        recorded: the command takes ``--record``.
        executed: what the step executes (``prove_keys.executed``).
    """

    name: str
    key: str
    command: tuple[str, ...]
    of: int = 1
    recorded: bool = False
    executed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """Result of a share: exit code, output, CPU seconds, and what it recorded."""

    share: Share
    code: int
    output: str
    cpu_seconds: float
    told: dict[str, Any] | None = None  # by --record

    @property
    def failed(self) -> bool:
        """Mutants that were told are judged when they are read."""
        return bool(self.code) and self.told is None


def shares(step: prove.Step, most: int = SHARES) -> list[Share]:
    """A step's command, its mutants dealt out in ``most`` shares, its schedules in as many of them
    as are equal; builds are left out."""
    (command,) = [c for c in step.commands if c[1] != "codegen"]

    def share(command: tuple[str, ...], of: int = 1) -> Share:
        return Share(step.name, step.key, command, of, step.recorded)

    if step.kind == "mutants":
        parts = [(*command, "--part", f"{i + 1}/{most}") for i in range(most)]
        return [share(part, most) for part in parts]
    if step.kind != "schedules":
        return [share(command)]
    at = command.index("--seeds") + 1
    seeds = int(command[at])
    of = max(n for n in range(1, most + 1) if seeds % n == 0)
    few = (*command[:at], str(seeds // of), *command[at + 1 :])
    return [share((*few, "--first", str(i * (seeds // of))), of) for i in range(of)]


def chosen(found: Iterable[prove.Step], globs: Sequence[str]) -> list[prove.Step]:
    """Steps that another machine can run and that a glob names, those of the first glob first."""
    able = [step for step in found if step.kind in KINDS]
    named = [s for g in globs for s in able if fnmatch.fnmatchcase(s.name, g)]
    return list(dict.fromkeys(named))


def built(step: prove.Step, folder: Path) -> list[str]:
    """Names of the variants that a step takes; empty where one is not built from these sources."""
    return list(step.specs) if prove_keys.fresh(step, folder) else []


def _book() -> prove.Book:
    return prove.Book(prove.STATE, prove.RECORD.with_suffix(".json"))


@app.command()
def pack(
    globs: Annotated[
        list[str] | None,
        typer.Argument(help="over names of steps; what the first names is begun first"),
    ] = None,
    out: Annotated[Path, typer.Option(help="file to write")] = PACKED,
    most: Annotated[int, typer.Option("--shares", min=1, help="of a step, at most")] = SHARES,
) -> None:
    """Pack the steps that have not passed, with the objects they take."""
    folder, book = ROOT / "build" / "variants", _book()
    mine = chosen(prove.steps(), globs or ["*"])
    names: dict[str, None] = {}
    listed: list[dict[str, Any]] = []
    for step in book.pending(mine):
        needs = built(step, folder)
        if not needs:
            typer.echo(f"left out, not built from these sources: {step.name}")
            continue
        names.update(dict.fromkeys(needs))
        last = book.last(step)
        seconds = last.cpu_seconds if last is not None else 0.0
        more = {"executed": prove_keys.executed(step, folder)}
        listed += [
            {**dataclasses.asdict(s), **more, "seconds": seconds / s.of} for s in shares(step, most)
        ]
    text = json.dumps({"commit": prove.checkout(), "shares": listed}).encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    with tarfile.open(partial, "w:xz", preset=1) as tar:
        entry = tarfile.TarInfo("steps.json")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
        for name in names:
            for suffix in SUFFIXES:
                tar.add(folder / f"{name}.{suffix}", f"variants/{name}.{suffix}")
    os.replace(partial, out)
    typer.echo(f"{len(listed)} shares, {len(names)} variants, {out.stat().st_size / 1e6:.1f} MB")


def execute(share: Share, environment: dict[str, str], stop: float) -> Ended | None:
    """Runs a share; None if it had to be ended at ``stop``, of ``time.monotonic``."""
    if time.monotonic() >= stop:
        return None
    with tempfile.TemporaryFile() as said, tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        more = ("--record", str(record)) if share.recorded else ()
        process = subprocess.Popen(
            [sys.executable, *share.command, *more], cwd=ROOT, env=environment,
            stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        late = threading.Event()

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(max(stop - time.monotonic(), 0), end)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        if late.is_set():
            return None
        said.seek(0)
        output = said.read().decode(errors="replace").rstrip()
        told = prove.read_told(record)
    cpu = usage.ru_utime + usage.ru_stime
    return Ended(share, process.returncode, output, cpu, told)


def outcome(ended: Sequence[Ended], at: str) -> prove.Outcome:
    """Outcome of a step from all its shares; the message is of the first that failed, else joined.

    Raises:
        ValueError: shares recorded different launches.
    """
    first = ended[0].share
    bad = [e for e in ended if e.failed]
    told = [e.told for e in ended if e.told is not None]
    launches = {each["launches"] for each in told}
    survived = [s for each in told for s in each.get("survivors", [])]
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if bad:
        said = f"python {' '.join(bad[0].share.command)}: exit code {bad[0].code}\n"
        message = said + bad[0].output[-prove.SAID :]
    else:
        lines = [(e.output.splitlines() or [""])[-1].strip("= ") for e in ended]
        message = _together(lines)
    cpu = round(sum(e.cpu_seconds for e in ended), 2)
    if len(launches) > 1:
        raise ValueError(f"{first.name}: its shares told different launches")
    executed = first.executed | {"launches": "".join(launches)} if launches else first.executed
    survivors = survived if any("survivors" in each for each in told) else None
    return prove.Outcome(
        first.name, first.key, not bad, at, cpu, message, now, executed, survivors
    )  # fmt: skip


def _together(lines: Sequence[str]) -> str:
    """Joins the shares' last lines: the sum if all count mutants, else the last of them."""
    if len(lines) == 1:
        return lines[0]
    counted = [match for line in lines if (match := KILLED.fullmatch(line))]
    if len(counted) < len(lines):
        return f"{lines[-1]} ({len(lines)} such shares)"
    killed, studied = (sum(int(match[i]) for match in counted) for i in (2, 3))
    name, rest, percent = counted[0][1], counted[0][4], 100 * killed / max(studied, 1)
    return f"{name}{killed} of {studied} mutants killed ({percent:.0f} %){rest}"


def complete(found: Iterable[Ended], at: str) -> list[prove.Outcome]:
    """Outcomes of the steps all of whose shares have ended, or one of whose has failed."""
    by_name: dict[str, list[Ended]] = {}
    for ended in found:
        by_name.setdefault(ended.share.name, []).append(ended)
    return [
        outcome(some, at)
        for some in by_name.values()
        if len(some) == some[0].share.of or any(e.failed for e in some)
    ]


@app.command()
def run(
    packed: Annotated[Path, typer.Argument(help="what pack wrote")] = PACKED,
    jobs: Annotated[int, typer.Option(min=1, help="processes at a time")] = 4,
    limit: Annotated[float, typer.Option(help="seconds, of all")] = 500,
    out: Annotated[Path, typer.Option(help="outcomes, renewed as steps end")] = Path("prove.json"),
) -> None:
    """Run packed steps side by side; what has not ended in time is dropped."""
    stop = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(packed) as tar:
            tar.extractall(folder, filter="data")
        steps = json.loads(Path(folder, "steps.json").read_text())
        environment = {
            **os.environ, "SNAPMLA_VARIANT_DIR": str(Path(folder, "variants")),
            "SNAPMLA_NO_JIT": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        order = sorted(steps["shares"], key=lambda share: -float(share.pop("seconds")))
        todo = [Share(**{**share, "command": tuple(share["command"])}) for share in order]
        found: list[Ended] = []
        with ThreadPoolExecutor(jobs) as pool:
            waiting = [pool.submit(execute, share, environment, stop) for share in todo]
            for each in as_completed(waiting):
                ended = each.result()
                if ended is None:
                    continue
                found.append(ended)
                words = " ".join(ended.share.command)
                with out.with_suffix(".log").open("a") as log:
                    log.write(f"$ python {words}\n{ended.output}\n")
                    log.write(f"exit code {ended.code}, {ended.cpu_seconds:.0f} CPU seconds\n\n")
                done = complete(found, steps["commit"])
                write_atomic(out, json.dumps([dataclasses.asdict(o) for o in done], indent=1))
    failed = [o for o in complete(found, steps["commit"]) if not o.passed]
    typer.echo(f"{len(found)} of {len(todo)} shares ended, {len(failed)} steps failed")
    for o in failed:
        typer.echo(f"FAILED {o.name}\n{o.message}")


def drawn_here(step: prove.Step, outcome: prove.Outcome) -> prove.Outcome:
    """An outcome of the step's sources with the launches that this machine draws.

    Another CPU's numbers may differ in a last bit, and ``prove carry`` compares digests here.
    """
    folder = ROOT / "build" / "variants"
    if not (step.recorded and outcome.passed and prove_keys.fresh(step, folder)):
        return outcome
    launches = {"launches": prove_keys.launches(step, folder)}
    return dataclasses.replace(outcome, executed=outcome.executed | launches)


@app.command()
def take(file: Annotated[Path, typer.Argument(help="what run wrote")]) -> None:
    """Enter outcomes whose keys are those of the sources here, and write the record."""
    every, book = prove.steps(), _book()
    named = {step.name: step for step in every}
    taken = 0
    for each in map(lambda o: prove.Outcome(**o), json.loads(file.read_text())):
        step = named.get(each.name)
        if step is None:
            typer.echo(f"no step {each.name}{did_you_mean(each.name, named)}")
        elif each.key != step.key:
            typer.echo(f"of other sources: {each.name}")
        else:
            book.write(drawn_here(step, each))
            taken += 1
            judgement = judged(each, step.explained)
            if each.passed and (judgement is None or not judgement.passed):
                typer.echo(f"survivors without an explanation: {each.name}")
    prove.write_record(every, book, prove.checkout(), prove.RECORD)
    typer.echo(f"{taken} outcomes taken; wrote {prove.RECORD.relative_to(ROOT)}")


if __name__ == "__main__":
    app()

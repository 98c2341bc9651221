"""Runs the worker process and outlives what may happen to it.

A kernel under development can hang, or read out of bounds and take the CUDA context with it.
Either costs one contender on one row here: the worker is replaced by a fresh one that leaves the
culprit out and carries on after the rows that are done.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKER = (sys.executable, "-m", "profiles.worker")
STRIKES = 3  # failures after which a contender is left out of all further rows


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run, which travel to its worker as JSON.

    Attributes:
        shapes: labels of the rows.
        backends: names of the decode contenders.
        banned: ``shape|backend`` -> why that pair is left out; shape ``*`` is any.
        device: ``cuda`` or ``cpu``.
        peers: folder of the peers' libraries.
        probe: measure the ceilings first; ``quick`` with less data.
        power: also measure rows alone, with watts, and with ``probe`` what bytes and FLOP cost.
        latents: fields of ``pools.Latents``.
        timing: fields of ``timing.TimingConfig``.
    """

    shapes: list[str]
    backends: list[str]
    banned: dict[str, str] = field(default_factory=dict)
    device: str = "cuda"
    peers: str | None = None
    probe: bool = True
    quick: bool = False
    power: bool = False
    latents: dict[str, float] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)

    def ban_reason(self, shape: str, backend: str) -> str | None:
        """Reason why ``backend`` must not run ``shape``, or None."""
        return self.banned.get(f"{shape}|{backend}") or self.banned.get(f"*|{backend}")


@dataclass(frozen=True)
class Limits:
    """Seconds: ``quiet`` without any event is a hang, ``total`` ends the run."""

    quiet: float = 120.0
    total: float = 1800.0


@dataclass
class Outcome:
    """Reports of the workers.

    Attributes:
        machine, ceilings, power: their events, empty if none came.
        jobs: shape label -> rows, in the order they were finished.
        notes: crashes, hangs, limits.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, Any] = field(default_factory=dict)
    power: dict[str, Any] = field(default_factory=dict)
    jobs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def run(
    config: RunConfig,
    limits: Limits,
    log: Path,
    progress: Callable[[Outcome, str], None] = lambda outcome, job: None,
    worker: Sequence[str] = WORKER,
) -> Outcome:
    """Runs all rows of ``config``.

    ``progress(outcome, label)`` is called after every finished row.  The workers' own output goes
    to ``log``; ``worker`` is the command that takes the paths of a config and of an event file.
    """
    outcome = Outcome()
    fields = dataclasses.asdict(config)
    deadline = time.monotonic() + limits.total
    strikes: dict[str, int] = {}
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, open(log, "wb") as sink:
        attempt = 0
        while left := [s for s in fields["shapes"] if s not in outcome.jobs]:
            attempt += 1
            command = [*worker, str(Path(folder) / str(attempt))]
            child = _Child({**fields, "shapes": left}, command, sink)
            reason = child.watch(outcome, limits.quiet, deadline, progress)
            if reason is None:
                break
            outcome.notes.append(f"{child.where()}: {reason}")
            if time.monotonic() >= deadline or not _blame(child, reason, fields, outcome, strikes):
                break
    return outcome


def _blame(
    child: _Child, reason: str, fields: dict[str, Any], outcome: Outcome, strikes: dict[str, int]
) -> bool:
    """Leaves the culprit out of what comes; False if carrying on is pointless."""
    job, backend = child.last.get("job"), child.last.get("backend")
    if job == "ceilings" and fields["probe"]:
        fields["probe"] = False
        return True
    if job in (None, "pools", "ceilings"):
        return False
    if not backend:  # while all contenders were timed in turn: nobody to single out
        outcome.jobs[str(job)] = [
            {"backend": b, "peer": not b.startswith("snapmla"), "status": "failed", "note": reason}
            for b in fields["backends"]
        ]
        return True
    strikes[backend] = strikes.get(backend, 0) + 1
    key = "*" if strikes[backend] >= STRIKES else job
    fields["banned"] = {**fields["banned"], f"{key}|{backend}": f"{child.last['stage']}: {reason}"}
    return True


class _Child:
    """One worker process and its event file."""

    def __init__(self, fields: dict[str, Any], command: Sequence[str], log: Any) -> None:
        self.last: dict[str, Any] = {}
        *program, stem = command
        base = Path(stem)
        config, self._events = base.with_suffix(".json"), base.with_suffix(".events")
        config.write_text(json.dumps(fields))
        self._events.touch()
        self._read = 0
        environment = dict(os.environ)
        path = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        self._process = subprocess.Popen(
            [*program, str(config), str(self._events)],
            cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def where(self) -> str:
        """Job, backend and stage that the worker last reported; ``start-up`` before any."""
        if not self.last:
            return "start-up"
        return " ".join(filter(None, (self.last["job"], self.last["backend"], self.last["stage"])))

    def watch(
        self,
        outcome: Outcome,
        quiet: float,
        deadline: float,
        progress: Callable[[Outcome, str], None],
    ) -> str | None:
        """Follows the worker to its end; None if it finished, else what went wrong."""
        heard = time.monotonic()
        try:
            while True:
                code = self._process.poll()
                events = self._new_events()
                if events:
                    heard = time.monotonic()
                for event in events:
                    if self._take(event, outcome, progress):
                        self._leave(outcome, grace=30)
                        return None
                if code is not None and not events:
                    return f"the worker left with exit code {code}"
                if time.monotonic() > deadline:
                    return "the time limit of the whole run was reached"
                if time.monotonic() - heard > quiet:
                    return f"no sign of life for {quiet:.0f} s"
                time.sleep(0.05)
        finally:
            self._leave(outcome, grace=0)

    def _leave(self, outcome: Outcome, grace: float) -> None:
        """Waits ``grace`` seconds for the process to end, then ends it."""
        try:
            self._process.wait(timeout=grace)
            return
        except subprocess.TimeoutExpired:
            self._process.kill()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            outcome.notes.append("a worker could not be ended: the driver does not let go")

    def _take(
        self, event: dict[str, Any], outcome: Outcome, progress: Callable[[Outcome, str], None]
    ) -> bool:
        kind = event.pop("kind")
        if kind == "start":
            self.last = event
        elif kind == "machine":
            outcome.machine = event
        elif kind == "ceilings":
            outcome.ceilings = event
        elif kind == "power":
            outcome.power = event
        elif kind == "job":
            outcome.jobs[event["job"]] = event["rows"]
            progress(outcome, event["job"])
        return bool(kind == "end")

    def _new_events(self) -> list[dict[str, Any]]:
        with open(self._events, "rb") as source:
            source.seek(self._read)
            data = source.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

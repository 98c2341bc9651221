"""Steps of a deep DSA model in vLLM: by FlashMLA's names replaced (``SNAPMLA_VLLM_FLASHMLA``), by
the plug-in's backend (``SNAPMLA_VLLM_SPARSE``), and by that of an older packed checkout, in turn.

Each engine runs in vLLM's own process and schedules ahead, as users have it, so no step of one can
be put between two steps of another.  But rounds can: all engines start side by side, and when the
last one is ready each times a round of steps, one after another, and again.  An engine whose
requests are over is idle.  Prompts are not read: their rows are random (``filled.py``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from codegen.artifacts import ROOT
from profiles.engine import study
from profiles.engine.spec import VOCABULARY, Case, shape_of
from profiles.gate import Gate
from profiles.gate import page as gates_page
from snapmla.runtime import env

TIMING, PROMPTS = "32x32768", "prompts-in-turn.json"
SWITCH, BACKEND, OLD = "switch", "backend", "old"
ROUNDS, WARM, STEPS = 5, 6, 34
LEAST, EQUAL = 1.15, 1.02  # old's step by the backend's; times that count as equal
BEHIND = 120.0  # seconds that a ready engine waits for the others
TITLE = "# A step of a deep DSA model in vLLM, by FlashMLA's names and by the plug-in's backend"


def cases(folder: Path, old: bool) -> list[Case]:
    """An engine each, which reads its prompts from ``PROMPTS``."""
    names = (SWITCH, BACKEND, *((OLD,) if old else ()))
    shared: dict[str, Any] = study.SPARSE
    return [
        Case(
            name=name, model=str((folder / f"sparse{study.LAYERS}").resolve()), study="switch",
            lane=name, beside=names, prompts=str((folder / PROMPTS).resolve()), own_process=True,
            filled=True, flashmla=name == SWITCH, sparse=name != SWITCH,
            longest=study.SPARSE_LONGEST, cache_gib=study.LAYERS * 0.9 + 2, **shared,
        )
        for name in names
    ]  # fmt: skip


def environment(case: Case, old: Path | None) -> tuple[Path, dict[str, str]]:
    """Folder that a case's process runs in, and its settings: package and variants of the older
    checkout for ``OLD``, the study of this one."""
    settings = os.environ | {"PYTHONUNBUFFERED": "1"}
    if case.name != OLD or old is None:
        return ROOT, settings
    there = old.resolve()
    path = (str(there), str(ROOT), settings.get("PYTHONPATH", ""))
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    settings[env.VARIANT_DIR.name] = str(there / "build" / "variants")
    return there, settings


def run(folder: Path, old: Path | None, limit: float, timing: str = TIMING) -> list[str]:
    """Runs all engines side by side; returns what failed.

    Args:
        timing: ``BxTOKENS`` of a step.
    """
    end, running = time.monotonic() + limit, {}
    (folder / PROMPTS).write_text(json.dumps(prompts(timing)))
    for mark in folder.glob("turn-*"):
        mark.unlink()
    for case in cases(folder, old is not None):
        file = folder / f"{case.name}.case.json"
        case.write(file)
        (folder / f"{case.name}.json").unlink(missing_ok=True)
        there, settings = environment(case, old)
        with (folder / f"{case.name}.log").open("wb") as log:
            running[case.name] = subprocess.Popen(
                [*study.CASE, str(file.resolve()), str(folder.resolve())],
                cwd=there, env=settings, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
    failed = []
    for name, process in running.items():
        try:
            code = process.wait(max(1.0, end - time.monotonic()))
            if code:
                failed.append(f"{name}: exit code {code}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its engine's process holds GPU memory
            failed.append(f"{name}: no time was left")
    return failed


class Turns:
    """Turns of processes that share a folder: a file says what each has done."""

    def __init__(self, folder: Path, name: str, names: Sequence[str]) -> None:
        self.folder, self.name, self.names = folder, name, list(names)

    def _done(self, name: str, what: str) -> Path:
        return self.folder / f"turn-{name}-{what}"

    def _wait(self, name: str, what: str, seconds: float = BEHIND) -> bool:
        """Says if it was done in that time."""
        end = time.monotonic() + seconds
        while not (there := self._done(name, what).exists()) and time.monotonic() < end:
            time.sleep(0.02)
        return there

    def ready(self) -> None:
        """Waits for the others, and goes on without those that do not come."""
        self._done(self.name, "ready").touch()
        end = time.monotonic() + BEHIND
        self.names = [
            each for each in self.names if self._wait(each, "ready", end - time.monotonic())
        ]

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """A round, behind that of the engine before.

        Raises:
            TimeoutError: that one does not end.
        """
        at = self.names.index(self.name)
        before, which = (self.names[at - 1], number - (at == 0))
        if which >= 0 and not self._wait(before, f"round{which}"):
            raise TimeoutError(f"round {which} of {before} did not end in {BEHIND:.0f} s")
        yield
        self._done(self.name, f"round{number}").touch()


def prompts(timing: str) -> list[list[int]]:
    """Random tokens of each request."""
    requests, tokens = shape_of(timing)
    generator = torch.Generator().manual_seed(len(timing))
    return [
        torch.randint(2, VOCABULARY, (tokens,), generator=generator).tolist()
        for _ in range(requests)
    ]


def steps(engine: Any, given: Sequence[list[int]], name: str, count: int) -> list[float]:
    """Seconds of so many steps with all requests past their prompts."""
    from vllm import SamplingParams, TokensPrompt

    asked = SamplingParams(
        temperature=0.0, max_tokens=count + 200, ignore_eos=True, detokenize=False
    )
    names = [f"{name}-{i}" for i in range(len(given))]
    for each, ids in zip(names, given, strict=True):
        engine.add_request(each, TokensPrompt(prompt_token_ids=ids), asked)
    seen: set[str] = set()
    times: list[float] = []
    last = time.perf_counter()
    while len(times) < count:
        out = engine.step()
        now = time.perf_counter()
        if not out:
            continue
        if len(out) == len(seen) == len(names):
            times.append(now - last)
        seen |= {each.request_id for each in out}
        last = now
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return times


def measure(engine: Any, out: Path) -> dict[str, Any]:
    """Milliseconds of an engine's steps: each round's median."""
    case = engine.case
    given = json.loads(Path(case.prompts).read_text())
    turns, inner = Turns(out, case.name, case.beside), engine.llm.llm_engine
    steps(inner, given, "prompts", 2)
    time.sleep(0.5)  # the engine has aborted them
    turns.ready()
    rounds = []
    for number in range(ROUNDS):
        with turns.turn(number):
            times = steps(inner, given, f"round{number}", WARM + STEPS)[WARM:]
            rounds.append(round(median(times) * 1e3, 4))
            time.sleep(0.1)
    shape = f"{len(given)}x{len(given[0])}"
    return {"ms": rounds, "beside": turns.names, "shape": shape}


def ratios(results: Mapping[str, Mapping[str, Any]], slow: str, fast: str) -> list[float]:
    """One's steps by another's, of each round; none if one of them is missing or was alone."""
    rows = results.get(slow), results.get(fast)
    if None in rows:
        return []
    one, other = (row for row in rows if row is not None)
    if slow not in other["beside"] or fast not in one["beside"]:
        return []
    return [a / b for a, b in zip(one["ms"], other["ms"], strict=True)]


def gates(results: Mapping[str, Mapping[str, Any]]) -> list[Gate]:
    """The acceptance."""
    each = ratios(results, OLD, BACKEND)
    claim = f"a step of the build before takes >= {LEAST} of the backend's"
    passed = median(each) * EQUAL >= LEAST if each else None
    shown = ", ".join(f"{ratio:.3f}" for ratio in each)
    return [Gate("before", claim, passed, (f"by round: {shown}",) if each else ())]


def page(header: Sequence[str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Page of the rounds, as Markdown."""
    judged = gates_page(gates(results)).rstrip()
    shape = " and ".join(dict.fromkeys(row["shape"] for row in results.values()))
    lines = [TITLE, "", *header, f"- {shape}, {study.LAYERS} layers; each round's median of "
             f"{STEPS} steps in vLLM's own process, rounds in turn",
             "- prompts are not read: their rows in the cache are random", "", judged, "",
             "| engine | ms of a step, by round | median |", "|---|---|---|"]  # fmt: skip
    lines += [
        f"| {name} | {', '.join(f'{ms:.3f}' for ms in row['ms'])} | {median(row['ms']):.3f} |"
        for name, row in results.items()
    ]
    lines.append("")
    for slow, fast in ((BACKEND, SWITCH), (OLD, SWITCH), (OLD, BACKEND)):
        if each := ratios(results, slow, fast):
            lines.append(
                f"- {slow} by {fast}, the median of the rounds' ratios: {median(each):.3f}"
            )
    return "\n".join(lines) + "\n"

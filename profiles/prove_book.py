"""Outcomes of ``make prove``'s steps: a file each, and the committed record behind them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codegen.artifacts import write_atomic
from profiles import prove_keys
from profiles.prove_keys import Step

STUDIED = 10  # schedules that a mutant survives before it counts as a survivor


@dataclass(frozen=True)
class Outcome:
    """Result of a step; ``message`` is the last line it printed, or why it failed.

    Attributes:
        key: the step's source key when it ran.
        executed: what it executed (``prove_keys.executed``); empty: not recorded.
        survivors: of mutants, which no schedule noticed, to be judged by whoever reads; None: of
            other steps, and of those that were judged when they ran.
    """

    name: str
    key: str
    passed: bool
    commit: str
    cpu_seconds: float
    message: str
    finished: str
    executed: dict[str, str] = field(default_factory=dict)
    survivors: list[dict[str, Any]] | None = None

    @classmethod
    def read(cls, path: Path) -> Outcome | None:
        """None if there is none, or none that can be read."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


FIELDS = tuple(f.name for f in dataclasses.fields(Outcome))


def judged(outcome: Outcome, explained: Sequence[str]) -> Outcome | None:
    """The outcome of mutants by the explanations of today.

    It fails if a survivor is explained no more; None, so that it runs again, if that was tried
    under few schedules only, because it was explained.
    """
    if outcome.survivors is None:
        return outcome
    from snapmla.testing.explanations import Survivor, unexplained  # torch takes seconds

    left = unexplained([Survivor.read(data) for data in outcome.survivors], explained)
    if any(survivor.tried < STUDIED for survivor in left):
        return None
    if not left:
        return outcome
    places = (f"{s.instruction} ({s.source}; {', '.join(s.roles) or 'no role'})" for s in left)
    message = f"{outcome.message}\nsurvived unexplained: {', '.join(places)}"
    return dataclasses.replace(outcome, passed=False, message=message)


@functools.lru_cache(maxsize=8)
def _rows(path: Path, _stamp: int) -> dict[str, Outcome]:
    """The outcomes in a record, by step."""
    try:
        rows = json.loads(path.read_text())["steps"]
        told = ({k: row[k] for k in FIELDS if k in row} for row in rows if "finished" in row)
        return {row["name"]: Outcome(**row) for row in told if "passed" in row}
    except (ValueError, KeyError, TypeError):
        return {}


@dataclass(frozen=True)
class Book:
    """Outcomes by step: one file each in ``folder``, which several processes may write.

    Attributes:
        record: JSON whose rows count where the folder has no file: what others ran.
    """

    folder: Path
    record: Path | None = None

    def _path(self, name: str) -> Path:
        return self.folder / (re.sub(r"[^\w.-]", "-", name) + ".json")

    def outcome(self, step: Step) -> Outcome | None:
        """Outcome of a step on these sources; None if it has not finished on them."""
        found = self.last(step)
        return None if found is None or found.key != step.key else judged(found, step.explained)

    def last(self, step: Step) -> Outcome | None:
        """Outcome of a step on whatever sources it last ran on; None if there is none."""
        found = Outcome.read(self._path(step.name))
        if found is None and self.record is not None and self.record.exists():
            return _rows(self.record, self.record.stat().st_mtime_ns).get(step.name)
        return found

    def write(self, outcome: Outcome) -> None:
        text = json.dumps(dataclasses.asdict(outcome), indent=1) + "\n"
        write_atomic(self._path(outcome.name), text)

    def pending(self, found: Iterable[Step]) -> list[Step]:
        """Steps that have not passed: first those that have not run, then those that failed."""
        outcomes = [(step, self.outcome(step)) for step in found]
        fresh = [step for step, outcome in outcomes if outcome is None]
        return fresh + [step for step, outcome in outcomes if outcome and not outcome.passed]

    def failed(self, found: Iterable[Step]) -> list[Outcome]:
        return [o for step in found if (o := self.outcome(step)) is not None and not o.passed]


def carried(
    found: Iterable[Step], book: Book, folder: Path, old: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """Gives outcomes of other sources the key of these, if what they executed is the same.

    An outcome of these sources that lacks what it executed gets that.

    Args:
        folder: variants, built from the sources as they are.
        old: those that the outcomes are of; None: what the outcomes say of them is enough.

    Returns:
        Names of the steps that were kept, and why others were not.
    """
    kept: list[str] = []
    left: dict[str, str] = {}
    for each in found:
        last = book.last(each)
        if last is None or not last.passed:
            continue
        if last.key == each.key:
            if "objects" not in last.executed and each.specs and prove_keys.fresh(each, folder):
                ran = prove_keys.executed(each, folder, prove_keys.launches(each, folder))
                book.write(dataclasses.replace(last, executed=ran))
            continue
        why = prove_keys.same(each, last.executed, folder)
        if not why and old is not None:
            proven = prove_keys.objects(each, old) == last.executed["objects"]
            why = "" if proven else "OLD_BUILD is not what was proven"
        if why:
            left[each.name] = why
        else:
            book.write(dataclasses.replace(last, key=each.key))
            kept.append(each.name)
    return kept, left

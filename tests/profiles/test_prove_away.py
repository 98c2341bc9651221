"""Steps of ``make prove`` on another machine: dealt out, ended in time, believed by key."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import tarfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from profiles import prove, prove_away, prove_keys
from profiles.prove import Book, Step
from profiles.prove_away import Ended, Share
from tests.support.needs import needs_compiler

BUILD = ("-m", "codegen", "build", "merge_obf16_sm90a")
CHECK = ("-m", "snapmla.testing", "check", "merge_obf16_sm90a", "--seeds", "100")


def step(kind: str = "schedules", key: str = "1") -> Step:
    return Step(kind, "merge_obf16_sm90a", (BUILD, CHECK), key)


def share(code: str, name: str = "small:a", of: int = 1) -> Share:
    return Share(name, "1", ("-c", code), of)


def run(*commands: Share, limit: float = 60) -> list[Ended | None]:
    stop = time.monotonic() + limit
    return [prove_away.execute(each, dict(os.environ), stop) for each in commands]


def test_schedules_are_dealt_out_and_none_is_left_out() -> None:
    found = prove_away.shares(step())
    seeds: list[int] = []
    for each in found:
        words = each.command
        first, count = (int(words[words.index(f"--{w}") + 1]) for w in ("first", "seeds"))
        seeds += range(first, first + count)
        assert words[:4] == CHECK[:4] and each.of == len(found) > 1
    assert seeds == list(range(100))
    parts = [(each.command[-1], each.of) for each in prove_away.shares(step("mutants"))]
    assert parts == [(f"{k}/4", 4) for k in (1, 2, 3, 4)]
    assert prove_away.shares(step("sample")) == [Share("sample:merge_obf16_sm90a", "1", CHECK)]


def test_a_share_that_takes_too_long_is_ended() -> None:
    begun = time.monotonic()
    slow, late = run(share("import time; time.sleep(60)"), share("print()"), limit=0.5)
    assert slow is None and late is None and time.monotonic() - begun < 30


def test_a_step_passes_when_all_of_its_shares_have() -> None:
    shares = [share(f"print('part {i}')", of=2) for i in range(2)]
    ended = [e for e in run(*shares) if e is not None]
    assert prove_away.complete(ended[:1], "c0ffee") == []
    (found,) = prove_away.complete(ended, "c0ffee")
    assert found.passed and found.message == "part 1 (2 such shares)" and found.cpu_seconds > 0
    assert (found.name, found.key, found.commit) == ("small:a", "1", "c0ffee")


def test_mutants_of_all_shares_are_counted() -> None:
    said = "merge_obf16_sm90a: {} of {} mutants killed (0 %), at most 10 schedules each"
    shares = [share(f"print('{said.format(k, k + 1)}')", of=2) for k in (3, 0)]
    (found,) = prove_away.complete([e for e in run(*shares) if e is not None], "c0ffee")
    assert found.message == said.format(3, 5).replace("(0 %)", "(60 %)")


def test_a_share_that_fails_fails_its_step() -> None:
    bad = share("import sys; print('wrong row'); sys.exit(3)", of=2)
    (found,) = prove_away.complete([e for e in run(bad) if e is not None], "c0ffee")
    assert not found.passed and "exit code 3\nwrong row" in found.message


def test_run_reads_what_was_packed(tmp_path: Path) -> None:
    """A file of the pack's form; what fails is told, and its outcome written."""
    listed = [
        {**dataclasses.asdict(each), "seconds": 1.0}
        for each in (share("print('right')"), share("raise SystemExit(2)", "small:b"))
    ]
    text = json.dumps({"commit": "c0ffee", "shares": listed}).encode()
    packed, out = tmp_path / "packed", tmp_path / "out.json"
    with tarfile.open(packed, "w:xz", preset=1) as tar:
        entry = tarfile.TarInfo("steps.json")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    told = CliRunner().invoke(prove_away.app, ["run", str(packed), "--out", str(out)])
    assert "2 of 2 shares ended, 1 steps failed" in told.output and "FAILED small:b" in told.output
    found = {o["name"]: o["passed"] for o in json.loads(out.read_text())}
    assert found == {"small:a": True, "small:b": False}


@needs_compiler
def test_outcomes_of_other_sources_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "STATE", tmp_path / "book")
    monkeypatch.setattr(prove, "RECORD", prove_away.ROOT / "build" / "test-prove.md")
    steps = [step(), step("mutants")]
    monkeypatch.setattr(prove, "steps", lambda: steps)
    ended = Ended(Share(steps[0].name, "1", CHECK), 0, "clean", 2.0)
    right = prove_away.outcome([ended], "c0ffee")
    other = dataclasses.replace(right, name=steps[1].name, key="2")
    file = tmp_path / "outcomes.json"
    file.write_text(json.dumps([dataclasses.asdict(o) for o in (right, other)]))
    told = CliRunner().invoke(prove_away.app, ["take", str(file)])
    assert f"of other sources: {steps[1].name}" in told.output and "1 outcomes taken" in told.output
    book = Book(tmp_path / "book")
    assert book.outcome(steps[0]) == right and book.outcome(steps[1]) is None


def test_launches_are_those_that_are_drawn_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step that records them, has passed, and whose variants are built; others stay."""
    monkeypatch.setattr(prove, "STATE", tmp_path / "book")
    monkeypatch.setattr(prove, "RECORD", prove_away.ROOT / "build" / "test-prove.md")
    names = ("passed", "failed", "plain", "stale")
    steps = [
        dataclasses.replace(step(), what=name, specs=(name,), recorded=name != "plain")
        for name in names
    ]
    monkeypatch.setattr(prove, "steps", lambda: steps)
    monkeypatch.setattr(prove_keys, "fresh", lambda step, folder: step.what != "stale")
    folders = list[Path]()

    def launches(step: Step, folder: Path) -> str:
        folders.append(folder)
        return f"of {step.what} here"

    monkeypatch.setattr(prove_keys, "launches", launches)
    there = {"objects": "1", "launches": "of there"}
    told = [
        dataclasses.replace(
            prove_away.outcome([Ended(Share(each.name, "1", CHECK), 0, "clean", 2.0)], "c0ffee"),
            executed=there, passed=each.what != "failed",
        )
        for each in steps
    ]  # fmt: skip
    file = tmp_path / "outcomes.json"
    file.write_text(json.dumps([dataclasses.asdict(o) for o in told]))
    result = CliRunner().invoke(prove_away.app, ["take", str(file)])
    assert "4 outcomes taken" in result.output, result.output
    book = Book(tmp_path / "book")
    found = {each.what: book.outcome(each) for each in steps}
    executed = {name: outcome.executed for name, outcome in found.items() if outcome is not None}
    assert executed == {n: there for n in names} | {
        "passed": {"objects": "1", "launches": "of passed here"}
    }
    assert folders == [prove_away.ROOT / "build" / "variants"]


def test_what_is_not_built_from_these_sources_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = dataclasses.replace(step(), specs=("merge_obf16_sm90a",))
    assert prove_away.built(mine, tmp_path) == []
    prove_keys.forget()
    monkeypatch.setattr(prove_keys.compiler, "up_to_date", lambda spec, folder, linked: spec)
    assert prove_away.built(mine, tmp_path) == ["merge_obf16_sm90a"]
    prove_keys.forget()


def test_shares_tell_one_record(tmp_path: Path) -> None:
    """Launches are the same in all of a step's shares; survivors come together."""
    told = {"launches": "1", "survivors": [{"instruction": "fence"}]}
    code = f"import sys; open(sys.argv[2], 'w').write({json.dumps(told)!r}); sys.exit(1)"
    mine = [
        dataclasses.replace(share(code, of=2), recorded=True, executed={"objects": "2"})
        for _ in range(2)
    ]
    ended = [e for e in run(*mine) if e is not None]
    (found,) = prove_away.complete(ended, "c0ffee")
    assert found.passed, "mutants that were told are judged when they are read"
    assert found.executed == {"objects": "2", "launches": "1"}
    assert found.survivors == [{"instruction": "fence"}] * 2
    ended[1] = dataclasses.replace(ended[1], told={"launches": "2"})
    with pytest.raises(ValueError, match="different launches"):
        prove_away.complete(ended, "c0ffee")

"""``profiles.engine.switch``: whose package a case runs with, rounds in turn, what is told."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from codegen.artifacts import ROOT
from profiles.engine import rows, switch
from profiles.engine.spec import Case
from snapmla.runtime import env


def test_cases(tmp_path: Path) -> None:
    two, three = switch.cases(tmp_path, False), switch.cases(tmp_path, True)
    assert [each.name for each in two] == ["switch", "backend"]
    assert [(each.flashmla, each.sparse) for each in three] == [
        (True, False), (False, True), (False, True),
    ]  # fmt: skip
    for each in three:
        assert each.beside == ("switch", "backend", "old") and each.own_process
        assert each.filled and each.lane == each.name
        each.write(tmp_path / "case.json")
        assert Case.read(tmp_path / "case.json") == each


def test_caches_of_random_rows() -> None:
    """Standard normal channels where each format has them, in pages that lie apart."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.zeros(3, 2, 64 * 656, dtype=torch.uint8)
    cache = pool[:, 0].unflatten(1, (64, 656))
    rows.fill(cache, generator)
    assert not pool[:, 1].any()
    parts = cache.contiguous().view(-1, 656).split((512, 16, 128), 1)
    stored, scales, rope = (part.contiguous() for part in parts)
    latents = stored.view(torch.float8_e4m3fn).float() * scales.view(
        torch.float32
    ).repeat_interleave(128, 1)
    index = torch.zeros(3, 64, 132, dtype=torch.uint8)
    rows.fill(index, generator)
    keys, of_keys = (part.contiguous() for part in index.view(3, -1).split((64 * 128, 64 * 4), 1))
    keys = keys.view(torch.float8_e4m3fn).float().unflatten(1, (64, 128))
    keys = keys * of_keys.view(torch.float32)[..., None]
    for values in (latents, rope.view(torch.bfloat16).float(), keys):
        assert abs(values.mean()) < 0.02 and abs(values.std() - 1) < 0.02
    assert len(keys.flatten(0, 1).unique(dim=0)) == 3 * 64
    with pytest.raises(ValueError, match="rows of 576 bytes"):
        rows.fill(torch.zeros(1, 64, 576, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a cache of bytes in pages"):
        rows.fill(torch.zeros(1, 64, 656))


def test_whose_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "site")
    ours, _, theirs = switch.cases(tmp_path, True)
    where, settings = switch.environment(ours, tmp_path)
    assert where == ROOT and settings["PYTHONPATH"] == "site"
    where, settings = switch.environment(theirs, tmp_path)
    assert where == tmp_path
    assert settings["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), str(ROOT), "site"]
    assert settings[env.VARIANT_DIR.name] == str(tmp_path / "build" / "variants")


class Engine:
    """vLLM's, whose requests take a step of prompts each before they write."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.steps = 0

    def add_request(self, name: str, *_: Any) -> None:
        self.running.append(name)

    def step(self) -> list[Any]:
        self.steps += 1
        return [SimpleNamespace(request_id=name) for name in self.running[: self.steps]]

    def abort_request(self, names: list[str]) -> None:
        self.running = [name for name in self.running if name not in names]

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("vllm")
    vars(made).update(SamplingParams=dict, TokensPrompt=dict)
    monkeypatch.setitem(sys.modules, "vllm", made)


def test_steps_with_all_requests(vllm: None) -> None:
    engine = Engine()
    times = switch.steps(engine, [[1], [2], [3]], "x", 4)
    assert len(times) == 4 and not engine.running
    assert engine.steps == 3 + 4  # three until the last one has written


def test_rounds_are_in_turn(vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / switch.PROMPTS).write_text(json.dumps(switch.prompts("2x3")))
    said: list[str] = []
    theirs = switch.steps

    def steps(engine: Any, given: Any, name: str, count: int) -> list[float]:
        case = next(each for each in engines if each.llm.llm_engine is engine).case
        said.append(f"{case.name} {name}")
        return theirs(engine, given, name, count)

    monkeypatch.setattr(switch, "steps", steps)
    engines = [
        SimpleNamespace(case=case, llm=SimpleNamespace(llm_engine=Engine()))
        for case in switch.cases(tmp_path, True)
    ]
    found: dict[str, Any] = {}

    def run(each: Any) -> None:
        found[each.case.name] = switch.measure(each, tmp_path)

    threads = [threading.Thread(target=run, args=(each,)) for each in reversed(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = ["switch", "backend", "old"]
    rounds = [x for x in said if "prompts" not in x]
    assert rounds == [f"{name} round{i}" for i in range(switch.ROUNDS) for name in names]
    assert all(len(row["ms"]) == switch.ROUNDS for row in found.values())
    assert all(row["beside"] == names for row in found.values())
    assert {row["shape"] for row in found.values()} == {"2x3"}


def test_who_does_not_come_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "BEHIND", 0.05)
    turns = switch.Turns(tmp_path, "backend", ("switch", "backend"))
    turns.ready()
    assert turns.names == ["backend"]
    for number in range(2):
        with turns.turn(number):
            pass
    turns.names = ["switch", "backend"]
    with pytest.raises(TimeoutError, match="round 0 of switch"), turns.turn(0):
        pass


def row(*ms: float, beside: tuple[str, ...] = ("switch", "backend", "old")) -> dict[str, Any]:
    return {"ms": list(ms), "beside": list(beside), "shape": "32x32768"}


def test_gate_and_page() -> None:
    found = {"switch": row(4.2, 4.4, 4.2), "backend": row(4.0, 4.0, 4.0),
             "old": row(4.6, 4.8, 4.4)}  # fmt: skip
    assert switch.gates(found)[0].verdict == "holds"
    page = switch.page(["- x"], found)
    assert "| switch | 4.200, 4.400, 4.200 | 4.200 |" in page
    assert "backend by switch, the median of the rounds' ratios: 0.952" in page
    assert "old by backend, the median of the rounds' ratios: 1.150" in page
    assert switch.gates(found | {"old": row(4.5, 4.5, 4.5)})[0].verdict == "FAILS"
    alone = found | {"old": row(9.0, 9.0, 9.0, beside=("old",))}
    assert switch.gates(alone)[0].verdict == "not measured"
    assert switch.gates({"switch": row(1.0)})[0].verdict == "not measured"
    assert "old by" not in switch.page(["- x"], {"switch": row(1.0), "backend": row(1.0)})

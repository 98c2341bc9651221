"""Tables of times: a page is made of its record; what is wrong is not timed."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from profiles import bench, table, tables, timing
from profiles.table import Table
from profiles.timing import Call

# Rows of records, and the lines that the scripts of commit d9798985, one a table, made of them.
RECORDS = json.loads((Path(__file__).parent / "data" / "tables.json").read_text())
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", RECORDS)
def test_pages_are_as_before(name: str) -> None:
    made = tables.of(name)
    assert table.body(made, RECORDS[name]["rows"]) == RECORDS[name]["lines"]
    assert made.alone == () or set(made.alone) <= set(made.shapes)


def test_every_name_is_a_table() -> None:
    found = [tables.of(name) for name in tables.NAMES]
    assert [each.name for each in found] == list(tables.NAMES)
    assert len(set(tables.NAMES)) == len(tables.NAMES)
    for each in found:
        assert each.shapes and each.ours != [], each.name


class Doubling(table.Problem):
    """Twice a row of numbers."""

    def __init__(self, _: Any, n: int) -> None:
        self.x = torch.arange(1.0, n + 1)

    def facts(self) -> dict[str, Any]:
        return {"shape": str(len(self.x)), "units": len(self.x)}

    def contenders(self) -> table.Calls:
        return {"ours": [lambda: self.x + self.x], "peer": [lambda: 2 * self.x, lambda: self.x * 2]}

    def check(self, name: str, calls: Sequence[Call]) -> float:
        return float((calls[0]() - 2 * self.x).abs().max())


SMALL = Table(
    "small", "Doubling", Doubling, (3, 5),
    (
        table.fact("n", "shape"), table.us("ours", "µs"), table.us("peer"), table.error("ours"),
        table.ratio("peer", "ours"),
    ),
    timing.TimingConfig(rounds=3, warmup_rounds=0, cold_iters=0), gate=1e-3,
)  # fmt: skip


def test_a_run_is_checked_timed_and_recorded(tmp_path: Path) -> None:
    rows = table.run(SMALL, table.Run(CPU), tmp_path, first=1)
    record = json.loads((tmp_path / "small.json").read_text())
    assert record["rows"] == [dict(row) for row in rows] and len(rows) == 1
    assert set(rows[0]["us"]) == {"ours", "peer"} and len(rows[0]["rounds"]["peer"]) == 3
    page = (tmp_path / "small.md").read_text()
    assert page.startswith("# Doubling\n") and "| 3 | " in page and "| 0.0e+00 |" in page


@pytest.mark.parametrize("factor", [2.1, float("nan")])
def test_a_peer_that_is_wrong_is_said_and_not_timed(factor: float) -> None:
    """Of ours it ends the run, before anything is timed."""

    class Wrong(Doubling):
        who = "peer"

        def contenders(self) -> table.Calls:
            return {**super().contenders(), self.who: [lambda: factor * self.x]}

    class Ours(Wrong):
        who = "ours"

    excused = dataclasses.replace(SMALL, problem=Wrong, ours=("ours",))
    row = table.measure(excused, None, 3, CPU)
    assert set(row["us"]) == {"ours"} and "not below 1e-03" in row["wrong"]["peer"]
    lines = table.body(excused, [row])
    assert lines[2].endswith("| – |") and lines[-1].startswith("- 3, peer: ValueError: error")
    for strict in (dataclasses.replace(excused, problem=Ours),
                   dataclasses.replace(excused, ours=None)):  # fmt: skip
        with pytest.raises(ValueError, match=r"3, (ours|peer): error .* is not below 1e-03"):
            table.measure(strict, None, 3, CPU)


class Right(Doubling):
    """Of three numbers the peer is wrong, of five everybody."""

    def check(self, name: str, calls: Sequence[Call]) -> float:
        if len(self.x) == 5 or name == "peer":
            raise ValueError(f"{name} is lost")
        return super().check(name, calls)


@pytest.fixture
def run_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """``python -m profiles.bench merge_cost``, of a table as small as ``SMALL``, on the CPU."""
    run = table.Run
    monkeypatch.setattr(table, "Run", lambda device, **given: run(CPU, **given))
    monkeypatch.setattr(bench, "require_cuda", lambda: None)

    def of(*arguments: str, **changes: Any) -> Result:
        made = dataclasses.replace(SMALL, **changes)
        monkeypatch.setattr(tables, "of", lambda name: made)
        return CliRunner().invoke(bench.app, ["merge_cost", "--out", str(tmp_path), *arguments])

    return of


def test_a_shape_of_which_no_contender_is_right_ends_the_run(
    run_small: Callable[..., Result], tmp_path: Path
) -> None:
    """With exit code 2, and it says who was wrong and why; the rows before it are recorded."""
    done = run_small(problem=Right, ours=())
    assert done.exit_code == 2, done.output
    told = "5: no contender is right: ours: ValueError: ours is lost; peer: ValueError: peer is"
    assert told in done.output and "| 3 |" in done.output
    assert [row["shape"] for row in json.loads((tmp_path / "small.json").read_text())["rows"]] == [
        "3"
    ]
    done = run_small(problem=Right, ours=(), shapes=(5,))
    assert done.exit_code == 2 and "| 3 |" not in done.output


def test_a_shape_without_contenders_ends_the_run(run_small: Callable[..., Result]) -> None:
    """Such as one whose variants are none of those that were asked for."""

    class Nobody(Doubling):
        def contenders(self) -> table.Calls:
            return {}

    done = run_small(problem=Nobody, ours=())
    assert done.exit_code == 2 and "3: no contender is right: there is none" in done.output


def test_exit_codes_of_a_table(run_small: Callable[..., Result], tmp_path: Path) -> None:
    """1 where all must be right and one was not, of which the page tells; a peer may be wrong."""
    assert run_small().exit_code == 0
    done = run_small("--first", "1", problem=Right, ours=())
    assert done.exit_code == 1 and "- 3, peer: ValueError: peer is lost" in done.output
    assert "Left out:" in (tmp_path / "small.md").read_text()
    assert run_small("--only", "3", problem=Right, ours=("ours",)).exit_code == 0
    done = run_small(problem=Right, ours=None)
    assert done.exit_code == 2 and "3, peer: peer is lost" in done.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("merge_cost --quick --shape b1_L64_h16_q1",
         "the table merge_cost does not take --shape, --quick; it takes --out, --time-limit, "
         "--first, --only, --render"),
        ("merge_cost --peers .", "the table merge_cost does not take --peers; it takes --out"),
        ("merge_cost --no-probe --device cuda", "does not take --device, --probe; it takes"),
        ("merge_cost --set variants=A", "does not take --set variants; it takes --out"),
        ("append_cost --set variants=A --rounds 3",
         "does not take --rounds, --set variants; it takes --peers, --out, --time-limit, --first, "
         "--only, --render, --set against=..."),
        ("append_cost --set against", "--set: expected NAME=VALUE, got 'against'"),
        ("sparse_528_cost --render x.json --only 64", "does not take --only; it takes --render"),
        ("sparse_528_cost tiny", "a table is run by itself: give its name alone"),
        ("tiny --first 3 --set a=1", "a preset does not take --first, --set a; it takes --shape"),
    ],
)  # fmt: skip
def test_an_option_that_is_not_taken_is_refused(arguments: str, told: str) -> None:
    done = CliRunner().invoke(bench.app, arguments.split())
    assert done.exit_code == 2 and told in done.output.replace("\n", " "), done.output


def test_what_is_taken_arrives(
    run_small: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the environment reaches tables that take one, and nothing refuses it."""
    seen = list[table.Run]()
    setup = {"setup": seen.append, "shapes": ()}
    monkeypatch.setenv("SNAPMLA_PEERS", "libraries")
    assert run_small("--set", "a=b=c", **setup, takes=("peers", "a")).exit_code == 0
    assert run_small(**setup).exit_code == 0
    assert [(run.peers, run.options) for run in seen] == [
        (Path("libraries"), {"a": "b=c"}), (None, {}),
    ]  # fmt: skip


def reads(setup: Callable[[Any], Any]) -> set[str]:
    """Options that a setup, and what it hands its run to, reads of it, by their text."""
    text = inspect.getsource(setup)
    found = set(re.findall(r"\brun\.(peers)\b", text))
    found |= set(re.findall(r"\brun\.options\.get\(\"(\w+)\"", text))
    for name in re.findall(r"([\w.]+)\(run\)", text):
        module, _, own = name.rpartition(".")
        names = inspect.unwrap(setup).__globals__
        found |= reads(getattr(names[module], own) if module else names[own])
    return found


@pytest.mark.parametrize("name", tables.NAMES)
def test_a_table_declares_what_it_reads(name: str) -> None:
    assert reads(tables.of(name).setup) == set(tables.of(name).takes)


def test_verdicts_are_of_the_rounds() -> None:
    row = {"rounds": {"ours": [1.0, 2.0, 4.0], "peer": [2.0, 3.0, 4.0]}, "gate": 1.5}
    assert table.by_rounds(row, "peer", "ours") == 1.5
    assert table.spread("ours")[1](row) == "2.0 (1.0–4.0)" and table.spread("none")[1](row) == "–"
    for gate, verdict in ((1.5, "met"), (1.53, "met"), (1.54, "missed")):
        assert table.met("peer", "ours")[1]({**row, "gate": gate}) == f"{gate} {verdict}"
    assert table.met("peer", "none")[1](row) == table.met("peer", "ours")[1]({**row, "gate": 0})


def test_a_record_is_rendered_again(tmp_path: Path) -> None:
    record: dict[str, Any] = {"head": ["# Title", ""], "rows": RECORDS["sparse_528_cost"]["rows"]}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(record))
    done = CliRunner().invoke(bench.app, ["sparse_528_cost", "--render", str(path)])
    assert done.exit_code == 0, done.output
    lines = path.with_suffix(".md").read_text().splitlines()
    assert lines == ["# Title", "", *RECORDS["sparse_528_cost"]["lines"]]

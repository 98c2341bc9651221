"""Tables of times: a page is made of its record; what is wrong is not timed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

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

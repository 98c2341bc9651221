"""``profiles.parallel_cost``: its rehearsal with gloo writes the table that a machine with several
GPUs would."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import distributed
from typer.testing import CliRunner

from profiles import parallel_cost
from tests.support.needs import needs_compiler


def test_ratios_and_cells() -> None:
    """What could not be captured is told in its cell, and has no ratio."""
    assert parallel_cost.ratio(50.0, 125.0) == "2.50"
    assert parallel_cost.ratio("not captured: busy", 125.0) == "-"
    assert parallel_cost.cell(1.26) == "1.3" and parallel_cost.cell("not captured") == (
        "not captured"
    )


@pytest.mark.whole_matrix
@needs_compiler
@pytest.mark.skipif(not distributed.is_available(), reason="torch lacks distributed")
def test_rehearsal(tmp_path: Path) -> None:
    app = parallel_cost.typer.Typer()
    app.command()(parallel_cost.main)
    done = CliRunner().invoke(app, ["--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "parallel_cost-x2.md").read_text().splitlines()
    rows = [line for line in lines if re.match(r"\| \d+ x \d+ \|", line)]
    assert len(rows) == len(parallel_cost.TINY) * len(parallel_cost.TURNS) * len(parallel_cost.WAYS)
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == len(parallel_cost.COLUMNS)
        assert float(cells[3]) > 0 and float(cells[6]) > 0
        assert (cells[5] == "-") == cells[2].startswith("reduce_scatter")

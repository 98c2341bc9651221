"""The table of top-k by rows: its shapes, the comparison of results, a line of its table."""

from __future__ import annotations

import pytest
import torch

from dsl_kernels.spec import VariantSpec
from profiles import table, tables
from profiles.tables import topk_rows_cost
from profiles.tables.topk_rows_cost import Cell, Problem
from snapmla.indexer import shapes
from tests.support.needs import needs_kernels

CPU = torch.device("cpu")


def test_shapes() -> None:
    """Wide and exact, or wide alone; only variants that hold the width are called."""
    cells = topk_rows_cost.SHAPES
    wide = [cell for cell in cells if cell.width > cell.length]
    assert len(set(cells)) == len(cells) == 108
    assert wide == [cell for cell in cells if f"width={topk_rows_cost.WIDE}" in str(cell)]
    for width in (8192, topk_rows_cost.WIDE):
        clusters = {(s.keys, s.cluster) for s in topk_rows_cost.built(width, CPU).values()}
        chosen = {shapes.choose(rows, width)[1:] for rows in topk_rows_cost.ROWS}
        assert chosen <= clusters
        assert ((8, 1) in clusters) == (width == 8192)


def test_a_line() -> None:
    cell = Cell(8, topk_rows_cost.WIDE, 4096)
    name = topk_rows_cost.chosen(cell, CPU)
    assert name == "t1024_e0_c8"
    row = {"shape": "x", "rows_": 8, "chosen": name, "us": {"a": 2.0, name: 1.0}}
    row["wrong"] = {"b": "ValueError: differs"}
    lines = table.body(tables.of("topk_rows_cost"), [row])
    assert lines[2].endswith(f"| 8 | {name} | 1.0 | {name} 1.0, a 2.0 |")
    assert lines[-1] == "- x, b: ValueError: differs"


@needs_kernels
def test_results_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch.topk's, and with the first variant's."""
    monkeypatch.setattr(topk_rows_cost, "K", 40)
    cell = Cell(3, 320, 250)
    problem = Problem(cell, [torch.randn(3 * 320) for _ in range(2)])
    spec = VariantSpec(op="select_topk", threads=64, keys=8, cluster=2)
    call = problem.call(spec, slots=False)
    first, wrong = problem.check(call, None)
    assert not wrong and not problem.check(call, first)[1]
    assert problem.check(call, first.flip(1))[1] == "differs"

    def other(change: torch.Tensor) -> str:
        def write(_: int) -> None:
            problem.out.copy_(change)

        return problem.check(write, None)[1]

    assert other(first.flip(1)) == "is not ascending"
    assert other(torch.arange(40).int().expand(3, -1)) == "is not what torch.topk selects"

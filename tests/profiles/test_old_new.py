"""Old and new in turn: which rows are asked for, the page's arithmetic; its times need a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from profiles import old_new, old_new_rows, old_new_worker, supervise
from profiles.old_new import Tables
from profiles.old_new_rows import TABLES, WITNESSED, Side
from profiles.shapes import preset

TITLES = {name: table.title for name, table in TABLES.items()}


def job(first: list[float], second: list[float], **changes: Any) -> list[dict[str, Any]]:
    """The two rows that a worker reports."""
    common = {"status": "ok", "difference": 0.0, "kernel": "etap 16 x 132"}
    return [{**common, "times": times, **changes} for times in (first, second)]


def test_every_table_has_its_shapes() -> None:
    counts = {name: len(table.shapes) for name, table in TABLES.items()}
    assert counts["dense"] == 18 and counts["mha"] + counts["mha_causal"] == 20
    assert counts["ragged"] == len(preset("ragged")) + len(preset("ragged-q"))
    assert counts["sparse"] == 48 and counts["sparse_v4"] == 13
    assert counts["topk"] == 42 and counts["prefill"] == 12
    assert all(table.tiny for table in (*TABLES.values(), *WITNESSED.values()))
    assert all("ragged_q" in label for table in WITNESSED.values() for label in table.shapes)


def test_rows_that_are_asked_for() -> None:
    labels = old_new.asked_for("", TABLES, tiny=False)
    assert len(labels) == sum(len(table.shapes) for table in TABLES.values())
    assert old_new.asked_for("topk:8x8192+topk:8x8192", TABLES, tiny=False) == ["topk:8x8192"]
    some = old_new.asked_for("dense,topk", TABLES, tiny=True)
    assert [label.partition(":")[0] for label in some] == ["dense", "topk"]
    with pytest.raises(ValueError, match="--rows: expected some of dense, .*; got 'x'"):
        old_new.asked_for("x", TABLES, tiny=False)
    with pytest.raises(ValueError, match="--rows: topk has .*; got '9x9'"):
        old_new.asked_for("topk:9x9", TABLES, tiny=False)


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    """A clock that drops for some rounds changes the medians, not their ratio."""
    row = old_new.row_of("x", job([10.0, 20.0, 20.0, 10.0, 30.0], [10.0, 20.0, 20.0, 20.0, 15.0]))
    assert (row.first, row.second, row.ratio, row.same) == (20.0, 20.0, 1.0, True)
    slower = old_new.row_of("x", job([9.8] * 4, [10.0] * 4, difference=1e-3))
    assert slower.ratio == pytest.approx(0.98) and not slower.same
    for changes, said in (
        ({"status": "failed", "note": "ValueError: no"}, "failed: ValueError: no"),
        ({"status": "wrong", "difference": 0.3}, "wrong: results differ: relative L2 0.3"),
    ):
        with pytest.raises(ValueError, match=said):
            old_new.row_of("x", job([1.0], [1.0], **changes))


@pytest.mark.parametrize(
    ("times", "met"),
    [
        ({"a": 10.0, "b": 10.1}, True),  # geometric mean 0.99504
        ({"a": 10.0, "b": 10.12}, False),  # 0.99406
        ({"a": 9.7, "b": 10.25}, False),  # 1.003, but a row of 0.976
    ],
)
def test_gates(times: dict[str, float], met: bool) -> None:
    jobs = {f"dense:{label}": job([10.0] * 3, [us] * 3) for label, us in times.items()}
    found = Tables.of(jobs, list(jobs))
    assert old_new.good(found, witness=False) == met
    (text,) = old_new.summary(found, TITLES)[2:]
    assert text.endswith(f"| {'met' if met else 'missed'} |")
    assert ("b 0.98" in text) == (times["b"] > 10.11) or not met
    assert not old_new.good(Tables.of(jobs, [*jobs, "dense:c"]), witness=False)


def test_the_page_tells_what_it_lacks() -> None:
    jobs = {
        "dense:a": job([10.0, 10.0], [8.0, 8.0]),
        "topk:b": job([1.0], [1.0], status="failed", note="RuntimeError: snapmla@x: gone"),
    }
    jobs["dense:a"][0]["kernel"] = "dual_wg 64 x 66"
    found = Tables.of(jobs, [*jobs, "mha:c"])
    text = "\n".join(old_new.written(found, TITLES, witness=False))
    assert "| Dense decode | 1 | 1.2500 | a 1.250 | none | met |" in text
    assert (
        "| a | 10.00 | 8.00 | 1.250 | 1.250–1.250 | same | dual_wg 64 x 66 → etap 16 x 132 |"
        in text
    )
    assert "- topk:b: failed: RuntimeError: snapmla@x: gone" in text
    assert "- not run: mha:c" in text and "Top-k" not in text


def test_what_a_witness_may_cost() -> None:
    """A share of long calls, a time of short ones."""
    jobs = {
        f"dense:{label}": job([first] * 2, [second] * 2)
        for label, first, second in (
            ("long", 100.0, 100.4), ("too long", 100.0, 100.6), ("short", 10.0, 10.15),
            ("too short", 10.0, 10.3),
        )
    }  # fmt: skip
    found = Tables.of(jobs, list(jobs))
    assert [old_new.within(row) for row in found.rows["dense"]] == [True, False, True, False]
    assert not old_new.good(found, witness=True)
    text = "\n".join(old_new.written(found, TITLES, witness=True))
    assert "| short | 10.00 | 10.15 | 1.0150 | +0.15 | same | met |" in text


def test_a_run_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides, rounds and limit reach the worker; its rows reach the page, and a gate that is
    missed the exit code."""
    seen: list[Any] = []
    new_us = [10.0]

    def run(config: Any, limits: Any, log: Path, progress: Any, worker: Any) -> Any:
        seen.append((config, limits))
        outcome = supervise.Outcome(machine={"gpu": "NVIDIA H100 80GB HBM3"})
        for label in config.shapes:
            outcome.jobs[label] = job([10.0] * 3, new_us * 3)
            progress(outcome, label)
        return outcome

    monkeypatch.setenv("SNAPMLA_COMMIT", "0123abc")
    monkeypatch.setattr(supervise, "run", run)
    app = old_new.typer.Typer()
    app.command()(old_new.main)
    base = ["--out", str(tmp_path), "--rows", "topk+mha", "--repeats", "7", "--limit", "99"]
    for new_us[0], code in ((10.0, 0), (11.0, 1)):
        given = [*base, "--device", "cpu", "--old", str(tmp_path / "base")]
        done = CliRunner().invoke(app, given)
        assert done.exit_code == code, done.output
    config, limits = seen[0]
    assert config.backends == [f"snapmla@{tmp_path / 'base'}", "snapmla"]
    assert config.timing["rounds"] == 7 and limits.total == 99
    text = (tmp_path / "old-new-h100.md").read_text()
    assert "| Top-k | 1 | 0.9091 |" in text and "commit unknown" in text
    done = CliRunner().invoke(app, base)
    assert done.exit_code == 2 and "--witness" in done.output


class Package(SimpleNamespace):
    """Records the keywords of ``decode``; plans nothing."""

    def __init__(self) -> None:
        plan = SimpleNamespace(pipeline="p", row_tile=16, num_parts=4)
        self.given: list[dict[str, Any]] = []
        super().__init__(
            quantize_q=lambda nope, rope: (nope, rope),
            plan_decode=lambda *_, **kw: self.given.append(kw) or plan,
            plan_sparse_decode=lambda *_, **kw: self.given.append(kw) or plan,
            decode=lambda *_, **kw: self.given.append(kw),
        )


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_a_witness_is_what_the_plan_was_made_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very tensors; without one a call is as ever."""
    monkeypatch.setattr(old_new_rows, "cache_of", lambda *_: SimpleNamespace(kv=None))
    monkeypatch.setattr(old_new_rows, "seen_by", lambda package, cache: cache)
    for label, shape in WITNESSED[name].tiny.items():
        problem: Any = WITNESSED[name].draw(shape, old_new_rows.TINY, torch.device("cpu"))
        for witness in (False, True):
            package = Package()
            side = problem.side(package, witness)
            side.calls[-1]()
            plan, call = package.given
            assert ("cu_seqlens_q" in call) == witness and len(side.calls) > 1
            assert int(plan["cu_seqlens_q"][-1]) == plan["total_q"] == len(side.results[0])
            assert ("row_seqlens" in call) == (witness and label.endswith(":rows"))
            for key in call.keys() & {"cu_seqlens_q", "row_seqlens"}:
                assert call[key] is plan[key]
    with pytest.raises(ValueError, match="witness: expected ragged queries"):
        old_new_rows.witnesses(None)


def test_rows_see_their_tokens() -> None:
    """Of a request of 40 tokens and two query tokens 39 and 40."""
    (shape, _) = next(iter(WITNESSED["dense"].tiny.values()))
    tokens = shape.query_tokens()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(old_new_rows, "cache_of", lambda *_: None)
        drawn = old_new_rows.Dense.draw((shape, True), old_new_rows.TINY, torch.device("cpu"))
    want = [40 - behind for n in tokens for behind in range(n - 1, -1, -1)]
    assert drawn.rows is not None and drawn.rows.tolist() == want
    assert all(int(table.max()) < old_new_rows.TINY.tokens // 64 for table in drawn.tables)


def test_results_are_compared() -> None:
    """Bits, small differences, results that nobody wrote, integers."""

    def side(out: list[float], slots: list[int]) -> Side:
        return Side([], (torch.tensor(out), torch.tensor(slots, dtype=torch.int32)))

    old = side([1.0, 2.0], [3, 4])
    assert old_new_worker.difference(old, side([1.0, 2.0], [3, 4])) == 0
    assert 0 < old_new_worker.difference(old, side([1.0, 2.001], [3, 4])) < 1e-3
    unwritten = side([1.0, 2.0], [3, 4])
    old_new_worker.poison(unwritten)
    for wrong in (side([1.0, torch.nan], [3, 4]), side([1.0, 2.0], [4, 3]), unwritten):
        assert old_new_worker.difference(old, wrong) == float("inf")
    assert old_new_worker.difference(unwritten, unwritten) == float("inf")


def test_a_side_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rows of the shape say whose fault it was; one that hung before is left out."""

    class Broken:
        def side(self, package: Any, witness: bool) -> Side:
            if package == "new":
                raise ValueError("no such plan")
            return Side([lambda: None], (torch.zeros(1),))

    @contextlib.contextmanager
    def package_of(name: str) -> Iterator[str]:
        yield "old" if "@" in name else "new"

    table = old_new_rows.Table("T", lambda *_: Broken(), {}, {"x": None})  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(old_new_worker, "package_of", package_of)
    monkeypatch.setattr(old_new_worker, "table_of", lambda *_: table)
    sink: Any = SimpleNamespace(write=lambda _: None, flush=lambda: None)
    config = supervise.RunConfig(["t:x"], ["snapmla@b", "snapmla"], device="cpu")
    rows = old_new_worker.Worker(config, sink).row("t:x")
    assert [row["backend"] for row in rows] == config.backends
    assert all("snapmla: ValueError: no such plan" in row["note"] for row in rows)
    config.banned["t:x|snapmla@b"] = "prepare: no sign of life for 90 s"
    (first, _) = old_new_worker.Worker(config, sink).row("t:x")
    assert first["note"] == "RuntimeError: snapmla@b: prepare: no sign of life for 90 s"

"""Plots show what the committed tables say; without matplotlib, too, a stale one is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from profiles.roofline import Energies
from tests.docs.test_docs import load
from tests.support import ROOT

plots = load(ROOT / "docs" / "plots.py")
NAMES = [plot.file for plot in plots.PLOTS]
EVENTS = (
    "entry", "behind the PDL wait", "first TMA issued", "first tile landed", "softmax ends",
    "products end", "rows written",
)  # fmt: skip


def plot_of(name: str) -> Any:
    return plots.PLOTS[NAMES.index(name)]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the committed tables, which the plots then read."""
    for path in plots.RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path / path.name)
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    return tmp_path


def edit(path: Path, change: Any) -> None:
    report = json.loads(path.read_text())
    change(report)
    path.write_text(json.dumps(report))


def stamps_report() -> dict:
    events = {e: {"min": i + 0.5, "median": i + 1.0, "max": i + 2.0} for i, e in enumerate(EVENTS)}
    entry = {"shape": "b32_L4096_h64_q1", "events": events, "merge_us": 5.5}
    idle = {**entry, "events": {**events, "rows written": None}}
    machine = {"gpu": "NVIDIA H200"}
    return {"machine": machine, "commit": "0123456789", "stamps": [entry, idle]}


@pytest.mark.parametrize("name", NAMES)
def test_plots_are_fresh(name: str) -> None:
    """Of the figures that are committed; drawn again where the matplotlib is the same."""
    plot = plot_of(name)
    try:
        data = plot.data()
    except plots.Missing:
        assert not plot.path.exists(), f"{name} was drawn from no committed table"
        return
    assert not plot.stale(data), "stale: run `python docs/plots.py` (pip install matplotlib)"
    ElementTree.parse(plot.path)


def test_a_changed_figure_is_seen(results: Path) -> None:
    def slower(report: dict) -> None:
        for row in report["rows"]:
            if (row["shape"], row["backend"]) == ("b32_L16384_h64_q1", "snapmla"):
                row["us"], row["tflops"] = row["us"] * 1.01, row["tflops"] / 1.01

    for table in ("h200-table.json", "lengths.json"):
        edit(results / table, slower)
    assert [plot_of(n).stale(plot_of(n).data()) for n in ("speed.svg", "roofline.svg")] == [
        True
    ] * 2


def test_speed_is_beside_the_fastest_peer() -> None:
    rows = json.loads((plots.RESULTS / f"{plots.SPEED_TABLES[1]}.json").read_text())["rows"]
    us = {r["backend"]: r["us"] for r in rows if r["shape"] == "b32_L16384_h64_q1"}
    best = min(us["flashmla_bf16"], us["flashmla_fp8"])
    lines = plots.speed_data()["lines"]
    for backend in plots.COLOURS:
        speeds = dict(lines["64"][backend])
        if "lengths" not in plots.speed_data()["commits"]:
            assert speeds[16384] == pytest.approx(best / us[backend], abs=1e-4)
        assert list(speeds) == sorted(speeds)
    for heads, of in lines.items():
        for (_, bf16), (_, fp8) in zip(of["flashmla_bf16"], of["flashmla_fp8"], strict=True):
            assert max(bf16, fp8) == 1.0, heads


def test_rows_that_failed_are_not_drawn(results: Path) -> None:
    def fail(report: dict) -> None:
        for row in report["rows"]:
            row["status"] = "wrong"

    before = plots.speed_data()["lines"]["16"]["snapmla"]
    for name in ("snapmla-fig5", "lengths"):
        if (results / f"{name}.json").exists():
            edit(results / f"{name}.json", fail)
    after = plots.speed_data()["lines"]["16"]["snapmla"]
    assert {t for t, _ in before} - {t for t, _ in after} == {131072}
    for path in results.glob("*.json"):
        path.unlink()
    with pytest.raises(plots.Missing, match="batches of 32"):
        plots.speed_data()
    with pytest.raises(plots.Missing, match="h200-table"):
        plots.roofline_data()


def test_the_power_roof_is_drawn_where_it_was_measured(results: Path) -> None:
    energies = {
        "cap_w": 700.0, "floor_w": 200.0, "dram_pj": 80.0, "l2_pj": 30.0, "bf16_pj": 1.0,
        "fp8_pj": 0.5,
    }  # fmt: skip
    power = {"machine": {"gpu": "NVIDIA H200"}, "power": {"energies": energies}}
    (results / "power.json").write_text(json.dumps(power))
    assert plots.roofline_data()["energies"] == energies
    other = {**power, "machine": {"gpu": "NVIDIA H100 80GB HBM3"}}
    (results / "power.json").write_text(json.dumps(other))
    assert plots.roofline_data()["energies"] is None
    few = plots.power_tflops(Energies(**energies), 2.0)  # memory alone: 500 W at 80 pJ a byte
    assert few == pytest.approx(2 * 500 / 80, rel=1e-6)


def test_stamps_wait_for_their_table(results: Path) -> None:
    (results / "stamps-h200.json").unlink(missing_ok=True)
    with pytest.raises(plots.Missing, match=r"profiles/results/stamps-h200.json: run `python -m"):
        plots.stamps_data()
    (results / "stamps-h200.json").write_text(json.dumps(stamps_report()))
    (entry,) = plots.stamps_data()["entries"]  # the other has CTAs without rows only
    assert (entry["tokens"], entry["name"], entry["merge_us"]) == (4096, "64 rows", 5.5)


def test_pictures_are_drawn_the_same_twice(results: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (results / "stamps-h200.json").write_text(json.dumps(stamps_report()))
    for plot in plots.PLOTS:
        data = plot.data()
        text = plot.text(data)
        assert text == plot.text(data) and f"data {plots.digest(data)}<" in text
        assert plots.drawn_by(text) == plots.matplotlib_version()
        words = "".join(ElementTree.fromstring(text).itertext())
        assert data.get("card", "H200") in words


def test_the_merged_error_follows_from_the_bias(results: Path) -> None:
    """Half of it, of two equal ranks: the weights are wrong by a quarter of it, each."""
    assert plots.merged_error(-0.01) == pytest.approx(0.005, rel=1e-3)
    assert plots.merged_error(0.0) == 0.0
    for _, standard, two, high, bias in plots.bias_data()["points"]:
        for error in (standard, two):
            assert error == pytest.approx(plots.merged_error(bias), rel=0.1)
        assert high < standard / 5
    (results / "qk-bias.json").unlink()
    with pytest.raises(plots.Missing, match=r"qk-bias.json: it is committed"):
        plots.bias_data()


def test_pages_show_them() -> None:
    numerics = (ROOT / "docs" / "numerics.md").read_text()
    assert "(lse-bias.svg)" in numerics
    assert "(docs/speed.svg)" in (ROOT / "README.md").read_text()
    assert "(roofline.svg)" in (ROOT / "docs" / "performance.md").read_text()

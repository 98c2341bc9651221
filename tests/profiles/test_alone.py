"""``profiles.alone``: energy by the counter, its table, records with and without it."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from profiles import alone, page, power, table, tables, timing
from profiles.tables import sparse_cost
from tests.profiles.test_power import FakeEvent

US, WATTS = 50.0, 600.0  # a call's, at least, as a busy host sleeps longer; the card's


class Counter:
    """NVML of a card that draws ``WATTS`` while it works: energy moves in ticks, power lags."""

    def __init__(self, tick_s: float | None = 0.01) -> None:
        self.tick_s, self.begin = tick_s, time.monotonic()

    def describe(self) -> dict[str, float]:
        return {"power_limit_w": 700.0}

    def watts(self) -> float:
        return 123.0  # what ran a second ago

    def instant_watts(self) -> float:
        return 321.0

    def mhz(self) -> float:
        return 1500.0

    def joules(self) -> float | None:
        if self.tick_s is None:
            return None
        return WATTS * self.tick_s * ((time.monotonic() - self.begin) // self.tick_s)


def solo(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A loop of 100 calls that takes 5 ms, alone for a fifth of a second."""
    monkeypatch.setattr(power.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(power.torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(FakeEvent, "synchronize", lambda self: time.sleep(0.2))
    run = lambda: time.sleep(0.005)
    loop = timing.Loop("x", [run], run, 100, "graph", run)
    with alone.meter_of(counter) as meter:  # type: ignore[arg-type]
        return alone.of_loop(loop, meter, 0.2, 0.02)


def test_energy_is_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the driver's other powers say; of a card without a counter there is none."""
    found = solo(Counter(), monkeypatch)
    assert found["us"] > 0.9 * US and found["mhz"] == 1500.0
    assert found["watts"] == pytest.approx(WATTS, rel=0.2)
    assert found["uj"] == found["us"] * found["watts"] and found["source"] == power.COUNTER
    without = solo(Counter(tick_s=None), monkeypatch)
    assert without["uj"] is None and without["watts"] == 321.0


def row(**more: Any) -> dict[str, Any]:
    """Ours is twice as fast in turn, 1.25 times alone."""
    return {
        "shape": "128, 1, 64, 2048", "sizes": [128, 1, 64, 2048], "units": 4096,
        "us": {"FlashMLA": 200.0, "rows": 100.0}, "error": {"FlashMLA": 1e-3, "rows": 2e-3}, **more,
    }  # fmt: skip


def times(us: float, uj: float | None) -> dict[str, Any]:
    return {"us": us, "uj": uj, "watts": 600.0, "mhz": 1500.0, "source": "x"}


ALONE = {"FlashMLA": times(150.0, 81920.0), "rows": times(120.0, None)}


def test_lines() -> None:
    """Both ratios stand side by side; energy is a tile's, a dash where nothing counted it."""
    assert alone.lines([row()], "FlashMLA") == []
    lines = alone.lines([row(), row(alone=ALONE)], "FlashMLA", "tile")
    assert (
        lines[-2] == "| 128, 1, 64, 2048 | FlashMLA | 200.0 | 1 | 150.0 | 1 | 20.00 | 600 | 1500 |"
    )
    assert lines[-1] == "| 128, 1, 64, 2048 | rows | 100.0 | 2.00 | 120.0 | 1.25 | – | 600 | 1500 |"
    assert any("µJ a tile" in line for line in lines)


def test_records_are_rendered_again(tmp_path: Path) -> None:
    """Also those that were made before there were times alone, or errors to the BF16 query."""
    path = tmp_path / "sparse_cost.json"
    native = row(
        us={"FlashMLA": 200.0, "native": 80.0}, error={"FlashMLA": 1e-3, "native": 2e-3},
        query_error={"native": 3e-2}, alone={**ALONE, "native": times(90.0, 1.0)},
    )  # fmt: skip
    body = functools.partial(table.body, tables.of("sparse_cost"))
    page.write_record(path, ["# Title", ""], [native], body)
    text = path.with_suffix(".md").read_text()
    assert "## Each alone" in text and "| 3.0e-02 |" in text and "| 2.50 |" in text
    path.with_suffix(".md").unlink()
    page.render(path, body)
    assert path.with_suffix(".md").read_text() == text
    old = {"head": ["# Title", ""], "rows": [row()]}
    path.write_text(json.dumps(old))
    page.render(path, body)
    text = path.with_suffix(".md").read_text()
    assert "alone" not in text and "BF16 query" not in text and "| 100.0 | 2.00 |" in text


def test_v4s_record(tmp_path: Path) -> None:
    made = row(us={"FlashMLA": 200.0, "snapmla": 100.0}, sizes=[128, 2, 64, 228],
               error={"FlashMLA": 1e-3, "snapmla": 2e-3})  # fmt: skip
    path = tmp_path / "sparse_v4_cost.json"
    body = functools.partial(table.body, tables.of("sparse_v4_cost"))
    page.write_record(path, ["# Title", ""], [made], body)
    assert "| 100.0 | 2.00 | 77 |" in path.with_suffix(".md").read_text()


def test_shapes_with_tails() -> None:
    """How many entries are tokens is told, and counts in tiles."""
    assert sparse_cost.label((32, 1, 128, 2048, 300)) == "32, 1, 128, 2048 (300 tokens)"
    assert sparse_cost.label((32, 1, 128, 2048)) == "32, 1, 128, 2048"
    assert sparse_cost.tiles(32, 1, 128, 300) == 32 * 2 * 5 and sparse_cost.tiles(2, 2, 16, 1) == 4
    assert set(sparse_cost.ALONE) <= set(sparse_cost.SHAPES)
    assert all(held < topk for *_, topk, held in sparse_cost.TAILS)

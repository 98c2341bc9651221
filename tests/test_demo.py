"""The demo's table of times, which must not need what only a checkout has."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from rich.console import Console

from snapmla import demo

MEASURED = {"decode + merge": 100.0, "plan.update_": 3.0}


def shown(card: str) -> str:
    console = Console(file=io.StringIO(), width=120)
    demo.show_roofs(demo.gpu_job(torch.device("cpu")), card, 1000, MEASURED, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_times_without_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel has no ``profiles``."""
    monkeypatch.setitem(sys.modules, "profiles", None)
    text = shown("NVIDIA H200")
    assert "decode + merge" in text and "100.0" in text and "no roof" in text


def test_times_on_an_unknown_card() -> None:
    text = shown("Some Card 1")
    assert "decode + merge" in text and "no roof" in text


def test_roof_of_a_known_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiles.ceilings.probe", lambda nvml, quick: (None, [], ["no device"]))
    text = shown("NVIDIA H200")
    assert "of the roof" in text and "GB/s read" in text and "not measured: no device" in text

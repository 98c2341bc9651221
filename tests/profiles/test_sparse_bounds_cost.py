"""Which builds are timed for the bounds of sparse decode; their times need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from profiles import sparse_bounds_cost as bounds
from profiles.sparse_cost import Contender
from snapmla import runtime
from snapmla.dispatch import PIPELINES
from snapmla.errors import VariantError
from snapmla.sparse.plan import variant_of

CPU = torch.device("cpu")


class Plan:
    """All that is asked of a plan."""

    def __init__(self, row_tile: int, cache: str) -> None:
        self.variant = variant_of(CPU, PIPELINES[cache], row_tile, 1, cache)


def contender(plan: Plan, calls: list[Any]) -> Contender:
    return Contender("rows", calls, torch.empty(0), lambda at: at, plan)


def test_builds_of_a_plan() -> None:
    """The plan's kernel, of which half is left out."""
    names = {
        ("rows", only): bounds.build_of(contender(Plan(64, "fp8_ds_mla"), []), only).name
        for only in bounds.HALVES
    }
    names["native", "gather"] = bounds.build_of(contender(Plan(16, "fp8"), []), "gather").name
    assert names == {
        ("rows", "all"): "sparse_decode_mix16_r64_obf16_sm90a",
        ("rows", "gather"): "sparse_decode_mix16_r64_obf16_gather_sm90a",
        ("rows", "math"): "sparse_decode_mix16_r64_obf16_math_sm90a",
        ("native", "gather"): "sparse_decode_etap_r16_obf16_gather_sm90a",
    }


def test_a_call_takes_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans share their kernels, so each call says which is its own; one that is not built is
    named, with the command."""
    plan = Plan(64, "fp8_ds_mla")
    kernels = plan.variant.kernels
    monkeypatch.setattr(runtime, "find", lambda spec: spec.name)
    monkeypatch.setattr(runtime, "kernel", lambda spec, device: (spec.only, device))
    made = [
        bounds.by_build(contender(plan, [lambda: kernels[torch.bfloat16]]), only)
        for only in bounds.HALVES
    ]
    assert [one.name for one in made] == ["all", "gather", "math"]
    for one in (*made, *reversed(made)):
        assert one.calls[0]() == (one.name, "cpu")
    kernels.clear()
    monkeypatch.setattr(runtime, "find", lambda spec: None)
    with pytest.raises(VariantError, match="codegen build sparse_decode_mix16_r64_obf16_math"):
        bounds.by_build(contender(plan, []), "math")


def test_gates_are_of_the_gather_alone() -> None:
    assert bounds.gate("rows", (128, 1, 64, 2048), 2.95) == "3.0 met"
    assert bounds.gate("rows", (128, 1, 64, 2048), 2.93) == "3.0 missed"
    assert bounds.gate("native", (128, 1, 16, 2048), 3.2) == "3.3 missed"
    assert bounds.gate("rows", (2, 1, 64, 2048), 9.9) == "–"
    assert bounds.gate("rows", (128, 1, 16, 2048), 9.9) == "–"

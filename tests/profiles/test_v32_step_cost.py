"""A step of DeepSeek-V3.2's attention: layers on the software GPU, the table, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import snapmla
from profiles import page, v32_layers, v32_step_cost, v32_vllm
from profiles.v32_layers import Made, Memory, Step
from tests.support.needs import needs_compiler

CPU = torch.device("cpu")


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Step:
    """A small model's: a sequence of 130 tokens, of which 64 are chosen, two layers."""
    for module, name, value in (
        (v32_layers, "HEADS", 16), (v32_layers, "INDEX_HEADS", 32), (v32_layers, "LONGEST", 512),
        (v32_layers, "K", 64),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    torch.manual_seed(0)
    return Step(Memory(1024, CPU), 1, 130, layers=2)


def test_tensors_of_a_step(step: Step) -> None:
    """Layers have other pages; the new token's slot is the last; tables are of the width of the
    longest context."""
    first, second = step.tables
    assert first.shape == (1, 8) and not first[:, 3:].any()
    assert not set(first[0, :3].tolist()) & set(second[0, :3].tolist())
    assert step.slots[1].tolist() == [int(second[0, 2]) * 64 + 1]
    assert (
        step.cos_sin.shape == (512, 64) and step.cos_sin_of(torch.bfloat16).dtype is torch.bfloat16
    )


@needs_compiler
@pytest.mark.whole_matrix
def test_layers_are_checked(step: Step) -> None:
    """Ours in one call and in single ones choose the same tokens; a wrong layer is refused."""
    today = v32_layers.today(step)
    assert v32_step_cost.check(step, "today", today, None)["error"] < 4e-3
    chosen = today(0).slots.clone()
    single = v32_layers.single(step, snapmla, *v32_step_cost.helpers(step, None))
    assert v32_step_cost.check(step, "single", single, chosen)["shared"] == 1.0
    made = single(1)
    assert set(made.slots[0].tolist()).isdisjoint(chosen[0].tolist())  # another layer's pages

    def wrong(_: int) -> Made:
        return made._replace(out=made.out * 1.05)

    with pytest.raises(ValueError, match="wrong, 1 x 130"):
        v32_step_cost.check(step, "wrong", wrong, None)
    with pytest.raises(ValueError, match="0.0000 shared"):
        v32_step_cost.check(step, "other", single_of(made), chosen)


def single_of(made: Made) -> v32_layers.Layer:
    return lambda _: made


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v32_vllm, "vllm_ops", lambda folder: None)
    monkeypatch.setattr(v32_vllm, "peer_of", lambda folder: None)
    assert v32_vllm.Peers(tmp_path).missing == "FlashMLA, vLLM's operators, DeepGEMM"


def row(**ms: float) -> dict[str, Any]:
    checks = {name: {"error": 1e-3, "shared": 0.99} for name in ms}
    return {"batch": 8, "tokens": 4096, "ms": ms, "checks": checks, "left_out": {}}


def test_the_table(tmp_path: Path) -> None:
    """Columns of contenders that were there; a dash, and why, where one failed."""
    rows = [row(today=1.22, single=1.83, vLLM=2.44), row(today=1.22, single=1.83)]
    rows[1]["left_out"] = {"vLLM": "RuntimeError: no"}
    path = tmp_path / "v32_step_cost.json"
    page.write_record(path, ["# Title", ""], rows, v32_step_cost.body)
    text = path.with_suffix(".md").read_text()
    assert "| 8 × 4096 | 1.22 | 20.0 | 1.83 | 1.50 | 2.44 | 2.00 | today 1.0e-03 (0.9900)" in text
    assert "| 1.83 | 1.50 | – | – |" in text and "- 8 × 4096, vLLM: RuntimeError: no" in text
    assert "before" not in text

"""``profiles.host_time``: calls of steps, and what stands for many times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from profiles import host_time
from tests.support.needs import needs_kernels


def test_the_calls_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their arguments are made outside of their times; a step follows another."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    done: list[object] = []

    def step() -> Iterator[host_time.Call]:
        done.append("step")
        for layer in range(3):
            done.append("made")
            yield lambda layer=layer: done.append(layer)

    times = host_time.timed(host_time.Step(step), 5)
    assert done == ["step", "made", 0, "made", 1, "made", 2, "step", "made", 0, "made", 1]
    assert len(times) == 5


def test_what_stands_for_many_times() -> None:
    """A step's mean leaves out what the host did beside."""
    times = [4.0, *[1.0] * 149, *[2.0] * 49, 5000.0]
    assert host_time.usual("decode", times) == 1
    step = host_time.usual(host_time.STEP, times)
    assert step == pytest.approx((149 + 2 * 49) / 198)


@needs_kernels
@pytest.mark.whole_matrix
def test_calls_of_a_dense_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs, on the software GPU; memory that is given has the gradients that autograd has."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host_time, "HEADS", 1)
    calls = host_time.prefill_calls(torch.device("cpu"))
    results: list[Any] = []
    for name, call in calls.items():
        if before := getattr(call, "before", None):
            before()
        if "backward" in name:
            results.append(call())
        else:
            assert len(host_time.timed(call, 1)) == 1
    assert len(results) == 3
    by_autograd, made, given = ([*each] for each in results)
    by_autograd = [by_autograd[0], by_autograd[1], by_autograd[3], by_autograd[2]]
    for want, *others in zip(by_autograd, made, given):
        assert all(torch.equal(want, x) for x in others)


def test_gradients_stand_alone() -> None:
    with pytest.raises(typer.BadParameter, match="no --against"):
        host_time.main(gradients=True, against=Path())

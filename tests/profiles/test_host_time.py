"""``profiles.host_time``: calls of steps, and what stands for many times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from profiles import host_time


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

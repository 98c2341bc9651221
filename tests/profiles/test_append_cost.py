"""The table of ``append_kv`` rehearsed on the software GPU, and ``profiles.spans``."""

import dataclasses
from typing import Any

import pytest
import torch

from profiles import spans, table, tables, timing
from profiles.spans import Span
from profiles.tables import append_cost

CPU = torch.device("cpu")
ONCE = timing.TimingConfig(rounds=1, warmup_rounds=0, rotate_bytes=1.0)


def row(monkeypatch: pytest.MonkeyPatch, **makes: append_cost.Make) -> dict[str, Any]:
    """Three tokens of ``fp8_ds_mla``."""
    monkeypatch.setattr(append_cost, "CONFIG", ONCE)
    one = dataclasses.replace(tables.of("append_cost"), config=ONCE)
    return table.measure(one, (makes, CPU), ("fp8_ds_mla", 3), CPU)


def test_a_line_a_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = table.body(tables.of("append_cost"), [row(monkeypatch, ours=append_cost.ours())])
    assert [line.split(" | ")[:3] for line in lines[-2:]] == [
        ["| fp8_ds_mla", "3", "ours"], ["| fp8_ds_mla", "3", "copy"]
    ]  # fmt: skip


def test_who_writes_another_byte_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(kind: str, given: append_cost.Given) -> timing.Call:
        right = append_cost.ours()(kind, given)
        assert right is not None

        def call() -> None:
            right()
            given["kv"].view(-1)[17] ^= 1

        return call

    told = "1 byte"
    made = row(monkeypatch, peer=wrong)
    assert set(made["us"]) == {"copy"} and told in made["wrong"]["peer"]
    with pytest.raises(ValueError, match=f"fp8_ds_mla, 3 tokens, ours: {told}"):
        row(monkeypatch, ours=wrong)


def test_a_kernel_that_waits_is_charged_from_the_end_of_the_other() -> None:
    ran = [
        Span(0.0, 10.0, "topk"), Span(2.0, 12.0, "append"),  # waits until 10
        Span(3.0, 9.0, "inside"), Span(20.0, 21.0, "append"),
    ]  # fmt: skip
    assert spans.charged(reversed(ran)) == {"topk": 10.0, "append": 3.0, "inside": 0.0}
    assert spans.durations(ran) == {"topk": 10.0, "append": 11.0, "inside": 6.0}
    assert spans.charged([]) == {}

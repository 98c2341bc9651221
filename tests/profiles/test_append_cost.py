"""``profiles.append_cost`` rehearsed on the software GPU, and ``profiles.spans``."""

import pytest
import torch

from profiles import append_cost, spans, timing
from profiles.spans import Span

CPU = torch.device("cpu")
ONCE = timing.TimingConfig(rounds=1, warmup_rounds=0, rotate_bytes=1.0)


def test_a_line_a_contender() -> None:
    lines = append_cost.alone("fp8_ds_mla", 3, {"ours": append_cost.ours()}, CPU, ONCE)
    assert [line.split(" | ")[:3] for line in lines] == [
        ["| fp8_ds_mla", "3", "ours"], ["| fp8_ds_mla", "3", "copy"]
    ]  # fmt: skip


def test_who_writes_another_byte_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(kind: str, given: append_cost.Given) -> timing.Call:
        right = append_cost.ours()(kind, given)
        assert right is not None

        def call() -> None:
            right()
            given["kv"].view(-1)[17] ^= 1

        return call

    told = "fp8_ds_mla, 3 tokens: 1 byte"
    (line,) = append_cost.alone("fp8_ds_mla", 3, {"peer": wrong}, CPU, ONCE)
    assert "| copy |" in line and f"peer, {told}" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"ours, {told}"):
        append_cost.alone("fp8_ds_mla", 3, {"ours": wrong}, CPU, ONCE)


def test_a_kernel_that_waits_is_charged_from_the_end_of_the_other() -> None:
    ran = [
        Span(0.0, 10.0, "topk"), Span(2.0, 12.0, "append"),  # waits until 10
        Span(3.0, 9.0, "inside"), Span(20.0, 21.0, "append"),
    ]  # fmt: skip
    assert spans.charged(reversed(ran)) == {"topk": 10.0, "append": 3.0, "inside": 0.0}
    assert spans.durations(ran) == {"topk": 10.0, "append": 11.0, "inside": 6.0}
    assert spans.charged([]) == {}

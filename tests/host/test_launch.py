"""``snapmla.launch``: what is asked of the device, and how arguments become what TVM FFI takes."""

from __future__ import annotations

import pytest
import torch

from snapmla import flash_mla_fp8, launch


def test_capture_is_asked_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs the second's stream is captured, and the first is current."""
    current = [0]

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    monkeypatch.setattr(launch, "several_gpus", lambda: True)
    assert [launch.capturing(torch.device("cuda", i)) for i in (0, 1)] == [False, True]
    assert flash_mla_fp8._stream_of(torch.device("cpu")) == 0 and current == [0]
    assert flash_mla_fp8._stream_of(torch.device("cuda", 1)) is None

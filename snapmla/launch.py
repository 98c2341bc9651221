"""What launches share: the device they go to, and arguments that are converted once.

With several GPUs a launch must go to its tensors' device, whichever is current.  The stream is
torch's current one on that device; the exported functions ask for it themselves.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.lru_cache(maxsize=1)
def several_gpus() -> bool:
    """Whether this process sees more than one GPU."""
    return torch.cuda.device_count() > 1


def elsewhere(device: torch.device) -> bool:
    """Whether ``device`` is a GPU other than the current one; quick where there is only one."""
    return several_gpus() and device.type == "cuda" and device.index != torch.cuda.current_device()


def all_on(device: torch.device, *tensors: torch.Tensor | None) -> bool:
    """Whether all tensors that are given live on ``device``."""
    for tensor in tensors:  # noqa: SIM110 (on every call: faster than all())
        if tensor is not None and tensor.device != device:
            return False
    return True


def call(device: torch.device, kernel: Any, *args: Any) -> None:
    """Calls one exported function with ``device`` as the current one."""
    if elsewhere(device):
        with torch.cuda.device(device):
            kernel(*args)
    else:
        kernel(*args)


def prepared(*tensors: torch.Tensor) -> tuple[Any, ...]:
    """Long-lived arguments in the form that exported functions take them fastest.

    Turning a torch tensor into an argument costs about 0.1 us a call; a plan's and a cache's
    tensors stay the same, so they are turned once.  At least one argument of a call must remain a
    torch tensor: the stream is found through it.  CPU tensors stay as they are, for the software
    GPU.
    """
    if tensors[0].device.type != "cuda":
        return tensors
    import tvm_ffi

    return tuple(tvm_ffi.from_dlpack(t) for t in tensors)

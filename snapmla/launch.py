"""The device that a launch goes to: with several GPUs, the tensors' one, whichever is current.

The stream is torch's current one on that device; the exported functions ask for it themselves.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


@functools.lru_cache(maxsize=1)
def _several_gpus() -> bool:
    return torch.cuda.device_count() > 1


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes ``device`` the current one; costs nothing for CPU tensors or where there is one GPU."""
    if device.type == "cuda" and _several_gpus() and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return _NOTHING

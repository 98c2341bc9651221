"""What launches share: whether tensors are together, and arguments that are converted once.

The exported functions launch on their tensors' device, whichever is current, and on torch's current
stream there; they put the caller's device back.  With several GPUs no guard is needed around them.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any, cast

import torch


@functools.lru_cache(maxsize=1)
def several_gpus() -> bool:
    """Whether this process sees more than one GPU."""
    return torch.cuda.device_count() > 1


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device, current or not, is being captured."""
    if not several_gpus():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def all_on(device: torch.device, *tensors: torch.Tensor | None) -> bool:
    """Whether all tensors that are given live on ``device``."""
    for tensor in tensors:  # noqa: SIM110 (on every call: faster than all())
        if tensor is not None and tensor.device != device:
            return False
    return True


class OfTensors:
    """A dataclass of tensors: what copies take along, and a ``repr`` of shapes.

    Prepared arguments that it remembers belong to its memory, not to a copy's.  Values of tensors
    are never shown: printing them waits for the device.
    """

    def __repr__(self) -> str:
        shown = (f for f in fields(cast(Any, self)) if f.repr)
        values = (f"{f.name}={_brief(getattr(self, f.name, None))}" for f in shown)
        return f"{type(self).__name__}({', '.join(values)})"

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(cast(Any, self))}


def _brief(value: Any) -> str:
    """``float32(4, 16, 512)`` and where it lives, of a tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{dtype}{tuple(value.shape)}{where}"


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

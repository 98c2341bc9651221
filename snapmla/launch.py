"""What launches share: whether tensors are together, and arguments that are converted once.

The exported functions launch on their tensors' device, whichever is current, and on torch's current
stream there; they put the caller's device back, or leave the thread without a context if it had
none.  With several GPUs no guard is needed around them.
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


def all_on(device: torch.device, *tensors: torch.Tensor | None) -> bool:
    """Whether all tensors that are given live on ``device``."""
    for tensor in tensors:  # noqa: SIM110 (on every call: faster than all())
        if tensor is not None and tensor.device != device:
            return False
    return True


class CopiedByFields:
    """A dataclass that remembers prepared arguments: they belong to its memory, not to a copy's."""

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(cast(Any, self))}


def prepared(*tensors: torch.Tensor) -> tuple[Any, ...]:
    """Long-lived arguments in the form that exported functions take them fastest.

    Turning a torch tensor into an argument costs about 0.1 us a call; a plan's and a cache's
    tensors stay the same, so they are turned once.  At least one argument of a call must remain a
    torch tensor: the stream is found through it.  CPU tensors stay as they are, for the software
    GPU.
    """
    if tensors[0].device.type != "cuda":
        return tensors
    return tuple(map(as_argument, tensors))


def as_argument(tensor: torch.Tensor) -> Any:
    """``tensor`` as a TVM FFI tensor on the same memory, which lives as long.

    By way of the plain capsule, in every version of torch: ``Tensor.__dlpack__``, which TVM FFI
    would call before torch 2.10, synchronises streams and cares which device is current.
    """
    import tvm_ffi

    return tvm_ffi.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))

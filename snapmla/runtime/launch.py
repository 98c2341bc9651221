"""Helpers of launches: checks of where tensors lie, allocators, arguments converted once.

The exported functions launch on their tensors' device, whichever is current, and on torch's current
stream there; they put the caller's device back, or leave the thread without a context if it had
none.  With several GPUs no guard is needed around them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, NamedTuple, cast

import torch

from snapmla.checks import overlap

_Tensor = torch.Tensor  # looked up on every call
SOFTGPU_SMS = 4  # the software GPU counts as this many SMs: enough parts to split and merge
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # with torch's allocators


@functools.lru_cache(maxsize=1)
def several_gpus() -> bool:
    """True if this process sees more than one GPU."""
    return torch.cuda.device_count() > 1


def capturing(device: torch.device) -> bool:
    """True if the current stream of a CUDA device, current or not, is being captured."""
    if not several_gpus() or torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def all_on(device: torch.device, *tensors: torch.Tensor | None) -> bool:
    """True if all tensors that are given live on ``device``."""
    for tensor in tensors:  # noqa: SIM110 (on every call: faster than all())
        if tensor is not None and tensor.device != device:
            return False
    return True


def addressable(device: torch.device, *tensors: torch.Tensor | None) -> bool:
    """True if kernels may take the addresses of those that are given as they are: plain tensors on
    ``device``, whose memory holds their values."""
    for tensor in tensors:
        if tensor is not None and (tensor.__class__ is not _Tensor or tensor.is_neg()):
            return False
    return not several_gpus() or all_on(device, *tensors)  # functions ask for its kind only


Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def allocator(device: torch.device) -> Allocator:
    """Makes uninitialised tensors on ``device`` from shape, strides and dtype.

    On the only device of its kind by what compiled code of torch allocates with, in half the time
    of ``torch.empty_strided``, which goes through the dispatcher: only for calls that nobody
    watches.
    """
    found = getattr(_guards, f"_empty_strided_{device.type}", None)
    if found is not None and not (device.type == "cuda" and several_gpus()):
        return cast(Allocator, found)
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


def alike(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Makes a check: do other tensors, each in its turn, have the metadata of these?

    Class, device, dtype, shape and strides must be equal; addresses may differ.  False if a flag of
    ``torch`` (negative, conjugate, inference) differs, or if one tensor is passed twice: pass each
    once (``Places``).  Uses the guards of torch's compiled code: one call, which takes 0.1 us a
    tensor, half of comparing each here.
    """
    guards = getattr(_guards, "TensorGuards", None)
    if guards is not None:
        made = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return cast("Callable[..., bool]", made.check)
    forms = tuple(map(_form, tensors))

    def check(*others: object) -> bool:
        return len(set(map(id, others))) == len(others) and tuple(map(_form, others)) == forms

    return check


class Places(NamedTuple):
    """The places of a call in which one tensor stands more than once.

    Attributes:
        first: of each place the first one that has its tensor.
        once: the places whose tensor has not come before.
    """

    first: tuple[int, ...]
    once: tuple[int, ...]

    @classmethod
    def of(cls, tensors: tuple[torch.Tensor, ...]) -> Places | None:
        """Finds them among a call's tensors; None where all differ."""
        found: dict[int, int] = {}
        first = tuple([found.setdefault(id(t), i) for i, t in enumerate(tensors)])
        return None if len(found) == len(first) else cls(first, tuple(found.values()))


def _form(value: object) -> tuple[Any, ...]:
    """Metadata of a tensor that ``alike`` compares; of anything else its type."""
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    form = type(value), value.device, value.dtype, value.shape, value.stride()
    return *form, value.is_neg(), value.is_conj(), value.is_inference()


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


STEP, MOST_STEP = 16, 1 << 32  # bytes: what strides that TMA is told are multiples of, less than


def regular(tensor: torch.Tensor) -> torch.Tensor:
    """The same view, whose dimensions of one or no element have strides that TMA takes.

    Nothing is reached by such a stride, so that a caller's may be anything: a descriptor holds it
    all the same.  A tensor without such dimensions is returned as it is.
    """
    strides, step, odd = list(tensor.stride()), 1, False
    for i in range(tensor.ndim - 1, -1, -1):
        extent, size = tensor.shape[i], strides[i] * tensor.element_size()
        last = i == tensor.ndim - 1
        if extent <= 1 and (strides[i] != 1 if last else size % STEP or not 0 < size < MOST_STEP):
            strides[i], odd = step, True
        step = strides[i] * max(extent, 1)
    return tensor.as_strided(tensor.shape, strides) if odd else tensor


# what asks where a tensor begins, and the answer that it gave; NOWHERE if it had no memory
Begin = tuple[Callable[[], int], int]
NOWHERE = -1


def begin_of(tensor: torch.Tensor, asked: torch.Tensor | None = None) -> Begin:
    """(function that returns the address of ``tensor``, that address now).

    Args:
        asked: one that begins at the same byte, and is asked in its place.
    """
    at = tensor.data_ptr()
    return (tensor if asked is None else asked).data_ptr, at or (NOWHERE if tensor.numel() else 0)


class OverTensors:
    """A frozen dataclass over tensors, which remembers what follows from where they lie.

    Copies are made from the fields that make it, so that what is remembered stays with its memory,
    and from whole storages as bytes: views of one memory stay views of one memory, and neither
    float8 nor one memory under two dtypes need be known to whoever writes them to a file.

    ``repr`` shows shapes, never values: printing those waits for the device.
    """

    def __repr__(self) -> str:
        shown = (f for f in fields(cast(Any, self)) if f.repr)
        values = (f"{f.name}={_brief(getattr(self, f.name, None))}" for f in shown)
        return f"{type(self).__name__}({', '.join(values)})"

    def _parts(self) -> Iterable[torch.Tensor]:
        """The tensors that kernels read and write."""
        return (v for v in _made_of(self).values() if isinstance(v, torch.Tensor))

    @functools.cached_property
    def spans(self) -> tuple[overlap.Span, ...]:
        """Spans of the tensors."""
        return tuple(map(overlap.span, self._parts()))

    @functools.cached_property
    def begins(self) -> tuple[Begin, ...]:
        """Address of each tensor when a call first asked."""
        return tuple(map(begin_of, self._parts()))

    @property
    def stays(self) -> bool:
        """True if its memory is where it was: storage can be freed or moved in place."""
        return all(ask() == at for ask, at in self.begins)

    @functools.cached_property
    def place(self) -> int:
        """A number for ``spans``: equal numbers are equal spans."""
        return overlap.place(self.spans)

    def __reduce__(self) -> tuple[Any, ...]:
        memories: list[torch.Tensor] = []
        values = {
            name: _View.of(value, memories) if isinstance(value, torch.Tensor) else value
            for name, value in _made_of(self).items()
        }
        return _made_again, (type(self), values, memories)


class _View(NamedTuple):
    """A tensor but for its bytes."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, memories: list[torch.Tensor]) -> _View:
        """Describes ``tensor`` and adds all bytes of its storage, if they are not there yet."""
        storage = tensor.untyped_storage()
        known = [memory.untyped_storage()._cdata for memory in memories]
        if storage._cdata not in known:
            known.append(storage._cdata)
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            memories.append(empty.set_(storage))  # type: ignore[call-overload]
        number, offset = known.index(storage._cdata), int(tensor.storage_offset())
        return cls(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def over(self, memories: list[torch.Tensor]) -> torch.Tensor:
        """The tensor, over bytes as ``of`` added them."""
        memory = memories[self.memory]
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.shape, self.strides)


def _made_of(value: Any) -> dict[str, Any]:
    """Values of a dataclass' fields that its constructor takes, by name."""
    return {f.name: getattr(value, f.name) for f in fields(value) if f.init}


def _made_again(cls: type, values: dict[str, Any], memories: list[torch.Tensor]) -> Any:
    """An ``OverTensors`` from what its ``__reduce__`` gave."""
    return cls(**{n: v.over(memories) if isinstance(v, _View) else v for n, v in values.items()})


PICKLED_WITH = (_View, _made_again)  # what ``torch.load`` has to know to load an ``OverTensors``


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
    return tuple(map(as_argument, tensors))


def as_argument(tensor: torch.Tensor) -> Any:
    """``tensor`` as a TVM FFI tensor on the same memory, which lives as long.

    By way of the plain capsule, in every version of torch: ``Tensor.__dlpack__``, which TVM FFI
    would call before torch 2.10, synchronises streams and cares which device is current.
    """
    import tvm_ffi

    return tvm_ffi.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))


@functools.lru_cache(maxsize=64)
def nothing(device: torch.device) -> Any:
    """An int32 table without entries, as kernels take it."""
    return prepared(torch.empty(0, dtype=torch.int32, device=device))[0]


@functools.lru_cache(maxsize=64)
def sm_count(device: torch.device) -> int:
    """SMs that a device has, or counts as."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return SOFTGPU_SMS

"""Checks of any tensor: kind, dtype, shape, strides, alignment, device, and what its memory is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from snapmla.checks import overlap
from snapmla.checks.messages import ADVICE, APART, dtype_name, type_error, value_error

FP8 = torch.float8_e4m3fn
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # what surely has an address
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ALIGN = 16  # bytes; rows are moved by vector instructions and TMA
TRANSPOSED = "it is transposed or strided inside a row: call .contiguous() once"
Shape = Sequence[int | str]  # a string names a free extent


def tensor(
    name: str,
    value: Any,
    dtypes: tuple[torch.dtype, ...],
    shape: Shape,
    device: torch.device | None = None,
    advice: str = "",
) -> None:
    """Checks kind, dtype, shape and device of one tensor argument.

    Args:
        shape: extents; an int must match, a string names an extent that may be anything.
        device: where it must live, None for anywhere.
        advice: what to change where the shape does not fit; empty: by the argument's name.
    """
    if not isinstance(value, torch.Tensor):
        hint = f"build it once with torch.as_tensor(..., dtype=torch.{dtype_name(dtypes[0])})"
        if type(value).__name__ == "PagedKVCache":  # which is made of what is here
            hint = "snapmla.fetch_dequant reads a cache's tokens into tensors"
        type_error(name, "a torch.Tensor", type(value).__name__, hint)
    not_nested(name, value)
    if value.layout is not torch.strided:
        got = f"layout {str(value.layout).removeprefix('torch.')}"
        value_error(name, "a dense tensor", got, "call .to_dense() once")
    if not torch.compiler.is_compiling():
        held(name, value)
    if value.dtype not in dtypes:
        wanted = " or ".join(dtype_name(d) for d in dtypes)
        type_error(name, f"dtype {wanted}", dtype_name(value.dtype), _dtype_hint(name, dtypes))
    actual = value.shape
    if actual != shape and not _fits(actual, shape):
        hint = "" if _is_output(name) else _shape_hint(actual, shape, name.startswith("lse"))
        value_error(name, f"shape {shape_text(shape)}", shape_text(actual), hint or advice)
    if device is not None and value.device != device:
        hint = f"move it with .to({str(device)!r}) when you build it"
        value_error(name, f"a tensor on {device}", value.device, hint)


def not_nested(name: str, value: Any) -> None:
    """Checks that what may be a tensor has a shape to ask for."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        hint = "pad it, or pack its rows: ragged queries are (total_q, num_heads, ...)"
        type_error(name, "a tensor of one shape", "a nested tensor", hint)


def held(name: str, value: torch.Tensor) -> None:
    """Checks that memory, which is what kernels read and write, holds a tensor's values."""
    if value.is_neg():
        hint = "call .resolve_neg() once"
        value_error(name, "values as memory holds them", "a view with the negative bit", hint)
    if value.__class__ not in PLAIN or address_of(value) != 0 or not value.numel():
        return
    if value._is_zerotensor():
        type_error(
            name, "a tensor with memory", "one of torch's zeros without", "call .clone() once"
        )
    if not value.untyped_storage().nbytes():
        value_error(name, "memory", "a storage that was freed", "keep the storage")


def negative(value: torch.Tensor) -> bool:
    """True if memory, which is what kernels read and write, holds the opposites of a view's values.

    Operators are given what a tracer's values will be: the dispatcher changes signs before them.
    """
    return not torch.compiler.is_compiling() and value.is_neg()


def _is_output(name: str) -> bool:
    """True if the caller gives this argument to be written."""
    return name.startswith(("out.", "out[")) or name in ("out", "lse", "o_accum", "lse_accum")


def _dtype_hint(name: str, dtypes: tuple[torch.dtype, ...]) -> str:
    """Advice on the right dtype; quantised values are not a matter of ``.to``."""
    first = dtype_name(dtypes[0])
    if _is_output(name):
        return f"allocate it with dtype=torch.{first}"
    if FP8 in dtypes:
        if name.startswith("q"):
            return ADVICE["q.nope"]
        return "append_kv quantises bfloat16 latents into it; bytes are .view(torch.float8_e4m3fn)"
    if dtypes == (torch.uint8,):
        return "its bytes are .view(torch.uint8)"
    if dtypes[0] in FLOATS:
        return f"convert it with .to(torch.{first})"
    return f"use .to(torch.{first}) once when you build it, not on every call"


def shape_text(shape: Iterable[int | str]) -> str:
    items = [str(x) for x in shape]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _fits(actual: Sequence[int], shape: Shape) -> bool:
    """True if extents match where ``shape`` has an int."""
    if len(actual) != len(shape):
        return False
    for want, got in zip(shape, actual):  # noqa: SIM110 (on every call: faster than any())
        if want != got and isinstance(want, int):
            return False
    return True


def _shape_hint(actual: Sequence[int], shape: Shape, any_strides: bool) -> str:
    """Advice about a wrong shape: a dimension to drop, or two to exchange; empty if neither fits.

    Args:
        any_strides: whether a view with its dimensions exchanged would do.
    """
    shorter = [[*actual[:i], *actual[i + 1 :]] for i, n in enumerate(actual) if n == 1]
    if any(_fits(one, shape) for one in shorter):
        return "drop the dimension of 1, for example by squeeze()"
    if len(actual) == len(shape) >= 2:
        *outer, a, b = actual
        if _fits([*outer, b, a], shape):
            turn = ".mT" if any_strides else ".mT.contiguous()"
            return f"the last two dimensions are exchanged: {turn}"
    return ""


def contiguous(name: str, value: torch.Tensor) -> None:
    """Checks that ``value`` is row-major without gaps."""
    if not value.is_contiguous():
        hint = "call .contiguous() once when you build it"
        if _is_output(name):
            hint = "allocate it contiguous; a slice or transposed view is not"
        value_error(name, "a contiguous tensor", f"strides {value.stride()}", hint)


def aligned_rows(name: str, value: torch.Tensor, align: int = ALIGN, least: int = 2) -> None:
    """Checks innermost stride 1 and that every row starts on a multiple of ``align`` bytes.

    Args:
        least: dimensions of a smaller extent may have any stride; nothing is ever reached by it.
    """
    *outer, inner = value.stride()
    if value.shape[-1] > 1 and inner != 1:
        value_error(name, "innermost stride 1", f"strides {value.stride()}", TRANSPOSED)
    size = value.element_size()
    if any(s * size % align for s, n in zip(outer, value.shape) if n >= least):
        wanted = f"outer strides that are multiples of {align} bytes"
        hint = f"pad rows to a multiple of {align // size} elements"
        value_error(name, wanted, f"strides {value.stride()}", hint)
    aligned(name, value, align)


def aligned(name: str, value: torch.Tensor, align: int = ALIGN) -> None:
    """Checks where the storage starts; a slice of a tensor may start anywhere."""
    address = address_of(value)
    if address is not None and address % align:
        hint = f"start slices at multiples of {max(1, align // value.element_size())} elements"
        value_error(name, f"storage aligned to {align} bytes", f"address {address:#x}", hint)


def address_of(value: torch.Tensor) -> int | None:
    """Address of the first element; None for a tracer's stand-in, which lies nowhere."""
    if torch.compiler.is_compiling():
        return None
    if value.__class__ not in PLAIN and isinstance(value, FakeTensor):
        return None
    try:
        return value.data_ptr()
    except RuntimeError:
        return None


def output(
    name: str,
    value: Any,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
    align: int = ALIGN,
) -> None:
    """Checks a tensor that the caller gives to be written: also contiguous and aligned."""
    tensor(name, value, dtypes, shape, device)
    contiguous(name, value)
    aligned(name, value, align)


def vector(name: str, value: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """Checks an int32 table of a step: contiguous.  Its values are never read here."""
    tensor(name, value, (torch.int32,), shape, device)
    contiguous(name, value)


def distinct(name: str, value: torch.Tensor) -> None:
    """Checks that no two elements of a tensor that is written share memory."""
    if overlaps_itself(value):
        hint = "expanded views share memory between rows: allocate them"
        value_error(name, "strides of distinct rows", f"strides {value.stride()}", hint)


def overlaps_itself(view: torch.Tensor) -> bool:
    """True if elements may share memory: a step is shorter than what it steps over."""
    reach = 1
    for stride, extent in sorted(zip(view.stride(), view.shape)):
        if extent > 1 and stride < reach:
            return True
        reach += stride * (extent - 1)
    return False


def in_place(name: str, begins: Iterable[tuple[Callable[[], int], int]], hint: str = "") -> None:
    """Checks that the memory of an ``OverTensors`` is there, and where it was."""
    for ask, begin in begins:
        at, part = ask(), ask.__self__  # type: ignore[attr-defined]  # a tensor's method
        if not at and part.numel() and not part.untyped_storage().nbytes():
            value_error(name, "memory", "a storage that was freed", hint)
        if at and at != begin:
            value_error(name, "memory where it was", "a storage that was moved", hint)


def apart(name: str, value: torch.Tensor | None, others: Mapping[str, Any]) -> None:
    """Checks that a tensor shares no memory with others, of which it or they are written.

    Args:
        value: None, or a stand-in of a tensor, lies nowhere.
        others: by the names that the message gives them; None where one is not given.
    """
    if value is None or not address_of(value):
        return
    for other, tensor_ in others.items():
        if tensor_ is not None and overlap.shared(value, tensor_):
            hint = "give it memory of its own; views may interleave, not overlap"
            value_error(name, f"{APART} {other}", "tensors that overlap", hint)


def together(values: Mapping[str, torch.Tensor]) -> None:
    """Checks that two tensors are on one device; one without memory is the one that is wrong."""
    (first, a), (second, b) = values.items()
    if a.device != b.device:
        if a.is_meta:
            (first, a), (second, b) = (second, b), (first, a)
        hint = f"move it with .to({str(a.device)!r}) when you build it"
        value_error(second, f"a tensor on {a.device}, where {first} is", b.device, hint)

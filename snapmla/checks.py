"""The one layer that checks arguments.

Every function raises ``TypeError`` (wrong kind or dtype) or ``ValueError`` (wrong value, shape,
strides, device) whose text names the argument, what was expected and what came.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from dsl_kernels.spec import KV_LORA_RANK, PAGE_SIZES, QK_ROPE_HEAD_DIM

FP8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEADS = 128
MAX_S_Q = 8
ALIGN = 16  # bytes; rows are moved by vector instructions and TMA
# Kernels multiply the scale by log2(e) in fp32: the product must stay finite.
MAX_SOFTMAX_SCALE = torch.finfo(torch.float32).max / math.log2(math.e)

Shape = Sequence[int | str]  # a string names a free extent


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _shape_text(shape: Iterable[int | str]) -> str:
    items = [str(x) for x in shape]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _fits(actual: Sequence[int], shape: Shape) -> bool:
    """Whether extents match where ``shape`` has an int."""
    if len(actual) != len(shape):
        return False
    for want, got in zip(shape, actual):  # noqa: SIM110 (on every call: faster than any())
        if want != got and isinstance(want, int):
            return False
    return True


def value_error(name: str, expected: str, got: object, hint: str = "") -> NoReturn:
    """Raises the package's standard ValueError."""
    raise ValueError(f"{name}: expected {expected}, got {got}{f' ({hint})' if hint else ''}")


def type_error(name: str, expected: str, got: object, hint: str = "") -> NoReturn:
    """Raises the package's standard TypeError."""
    raise TypeError(f"{name}: expected {expected}, got {got}{f' ({hint})' if hint else ''}")


def tensor(
    name: str,
    value: Any,
    dtypes: tuple[torch.dtype, ...],
    shape: Shape,
    device: torch.device | None = None,
) -> None:
    """Checks kind, dtype, shape and device of one tensor argument.

    Args:
        shape: extents; an int must match, a string names an extent that may be anything.
        device: where it must live, None for anywhere.
    """
    if not isinstance(value, torch.Tensor):
        type_error(name, "a torch.Tensor", type(value).__name__)
    if value.dtype not in dtypes:
        wanted = " or ".join(dtype_name(d) for d in dtypes)
        hint = ""
        if value.dtype == torch.int64 and dtypes == (torch.int32,):
            hint = "use .to(torch.int32) once when you build it, not on every call"
        type_error(name, f"dtype {wanted}", dtype_name(value.dtype), hint)
    actual = value.shape
    if actual != shape and not _fits(actual, shape):
        value_error(name, f"shape {_shape_text(shape)}", _shape_text(actual))
    if device is not None and value.device != device:
        value_error(name, f"a tensor on {device}", value.device)


def contiguous(name: str, value: torch.Tensor) -> None:
    """Checks that ``value`` is row-major without gaps."""
    if not value.is_contiguous():
        value_error(name, "a contiguous tensor", f"strides {value.stride()}")


def aligned_rows(name: str, value: torch.Tensor, align: int = ALIGN, least: int = 2) -> None:
    """Checks innermost stride 1 and that every row starts on a multiple of ``align`` bytes.

    Args:
        least: dimensions of a smaller extent may have any stride; nothing is ever reached by it.
    """
    *outer, inner = value.stride()
    if value.shape[-1] > 1 and inner != 1:
        value_error(name, "innermost stride 1", f"strides {value.stride()}")
    size = value.element_size()
    if any(s * size % align for s, n in zip(outer, value.shape) if n >= least):
        value_error(
            name, f"outer strides that are multiples of {align} bytes", f"strides {value.stride()}"
        )
    _aligned(name, value, align)


def _aligned(name: str, value: torch.Tensor, align: int = ALIGN) -> None:
    """Checks where the storage starts; a slice of a tensor may start anywhere."""
    address = value.data_ptr()
    if address % align:
        value_error(name, f"storage aligned to {align} bytes", f"address {address:#x}")


def same_device(tensors: dict[str, torch.Tensor]) -> torch.device:
    """Checks that all tensors live on one device, and returns it."""
    (first, reference), *rest = tensors.items()
    for name, value in rest:
        if value.device != reference.device:
            value_error(name, f"a tensor on {reference.device}, where {first} is", value.device)
    return reference.device


def integer(name: str, value: Any, low: int, high: int | None = None, hint: str = "") -> int:
    """Checks ``low <= value <= high`` and returns it."""
    if isinstance(value, bool) or not isinstance(value, int):
        type_error(name, "an int", type(value).__name__)
    if value < low or (high is not None and value > high):
        wanted = f"{low} or more" if high is None else f"{low} to {high}"
        value_error(name, wanted, value, hint)
    return value


def choice(name: str, value: Any, options: Iterable[Any]) -> None:
    """Checks that ``value`` is one of ``options``."""
    options = tuple(options)
    if value not in options:
        value_error(name, "one of " + ", ".join(repr(o) for o in options), repr(value))


def page_size(value: Any) -> int:
    """Checks a page size: 16, 32, 64 or 128 tokens."""
    if isinstance(value, bool) or not isinstance(value, int):
        type_error("page_size", "an int", type(value).__name__)
    if value not in PAGE_SIZES:
        near = min(PAGE_SIZES, key=lambda p: (abs(p - value), p))
        options = ", ".join(map(str, PAGE_SIZES))
        value_error("page_size", f"one of {options}", value, f"the nearest is {near}")
    return value


def num_heads(value: Any) -> int:
    """Checks a head count, 1 to 128."""
    return integer("num_heads", value, 1, MAX_HEADS, "split more heads over several calls")


def s_q(value: Any) -> int:
    """Checks the number of query tokens per sequence, 1 to 8."""
    return integer("s_q", value, 1, MAX_S_Q, "longer queries are prefill, not decode")


def softmax_scale(value: Any) -> float:
    """Checks the softmax scale: a positive Python number that is finite in fp32."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        type_error(
            "softmax_scale",
            "a Python float",
            type(value).__name__,
            "DeepSeek models want 192**-0.5 * mscale**2; FlashMLA's default is 576**-0.5",
        )
    if not 0 < value <= MAX_SOFTMAX_SCALE:
        wanted = f"a positive finite number of at most {MAX_SOFTMAX_SCALE:.3g}"
        value_error("softmax_scale", wanted, value)
    return float(value)


def cache(content: Any, rope: Any, scale: Any) -> None:
    """Checks the three views of a cache: dtypes, shapes, strides, alignment, one device."""
    tensor("content", content, (FP8,), ("num_pages", "page_size", KV_LORA_RANK))
    pages, tokens = content.shape[0], page_size(content.shape[1])
    if pages < 1:
        value_error("content", "1 page or more", pages, "kernels clamp page ids into the pool")
    tensor("rope", rope, (torch.bfloat16,), (pages, tokens, QK_ROPE_HEAD_DIM), content.device)
    tensor("scale", scale, (torch.float32,), (pages, tokens), content.device)
    for name, view in (("content", content), ("rope", rope), ("scale", scale)):
        aligned_rows(name, view, least=1)  # TMA descriptors hold the strides of even one page
        if min(view.stride()) < 1:
            value_error(name, "strides of distinct tokens", f"strides {view.stride()}")


def query(nope: Any, rope: Any, scale: Any) -> None:
    """Checks a quantised query: dtypes, shapes, contiguity, ranges of heads and s_q."""
    tensor("q.nope", nope, (FP8,), ("b", "s_q", "num_heads", KV_LORA_RANK))
    b, queries, heads, _ = nope.shape
    s_q(queries)
    num_heads(heads)
    shape = (b, queries, heads, QK_ROPE_HEAD_DIM)
    tensor("q.rope", rope, (torch.bfloat16,), shape, nope.device)
    if isinstance(scale, torch.Tensor) and scale.ndim == 2:
        tensor("q.scale", scale, (torch.float32,), (b, queries), nope.device)
    else:
        tensor("q.scale", scale, (torch.float32,), (b, queries, heads), nope.device)
    for name, part in (("q.nope", nope), ("q.rope", rope)):
        contiguous(name, part)
        _aligned(name, part)


def lengths(value: Any, batch: int | str, device: torch.device | None = None) -> None:
    """Checks ``cache_seqlens``: int32 (b,), contiguous.  Its values are never read here."""
    tensor("cache_seqlens", value, (torch.int32,), (batch,), device)
    contiguous("cache_seqlens", value)


def block_table(value: Any, batch: int, device: torch.device) -> None:
    """Checks ``block_table``: int32 (b, width), width 1 or more, rows of innermost stride 1."""
    tensor("block_table", value, (torch.int32,), (batch, "width"), device)
    if batch and value.shape[1] < 1:
        value_error("block_table", "a width of 1 or more pages", value.shape[1])
    if value.shape[1] > 1 and value.stride(1) != 1:
        value_error("block_table", "innermost stride 1", f"strides {value.stride()}")


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
    _aligned(name, value, align)

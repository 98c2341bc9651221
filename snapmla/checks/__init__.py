"""The one layer that checks arguments.

Every function raises ``TypeError`` (wrong kind or dtype) or ``ValueError`` (wrong value, shape,
strides, device).  The text names the argument, what was expected, what came and, in parentheses,
what to change: the particular advice if the check knows one, else ``ADVICE`` of the argument.

Here are numbers, words and whole arguments; ``tensors`` has what is asked of any tensor,
``messages`` the words.  All of it is called by this package's name.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dsl_kernels.families.fp8_decode import PAGE_SIZES
from dsl_kernels.formats import rows16
from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.registered import DEFAULT, FORMATS
from snapmla.checks.messages import (  # noqa: F401 (called as checks.NAME)
    ADVICE,
    APART,
    class_name,
    dtype_name,
    explain,
    renamed,
    type_error,
    value_error,
)  # fmt: skip
from snapmla.checks.of_formats import (  # noqa: F401
    fetched_of,
    named_by_width,
    query_of,
    tokens_of,
)
from snapmla.checks.tensors import (  # noqa: F401
    ALIGN,
    FLOATS,
    FP8,
    PLAIN,
    TRANSPOSED,
    Shape,
    address_of,
    aligned,
    aligned_rows,
    apart,
    contiguous,
    distinct,
    held,
    in_place,
    negative,
    not_nested,
    output,
    overlaps_itself,
    shape_text,
    tensor,
    together,
    vector,
)  # fmt: skip

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}  # as names have them
ROWS = tuple(getattr(torch, each.element) for each in (rows16.BF16, rows16.F16))
ROWS_TILE = 64  # tokens: larger pages of 16-bit rows are multiples of a KV tile
MAX_HEADS = 128
MAX_ROWS = 2**29 - 1  # query tokens * heads: four counts a row fit int32 (combine/merge.py)
MAX_UNIT_ROWS = 4_000_000  # of one unit: their places in a slot fit int32 (combine/epilogue.py)
# Kernels start their running maximum at -1e30, in log2 units: a logit below it would be no token.
# 576 channels of float16's largest value in q and k, times this scale, stay above.
MAX_SOFTMAX_SCALE = 2.0**57
# Kernels of rows in 16 bits that have no scales of their own (``mha_prefill``, ``sparse_prefill``,
# lists over a BF16 cache) know a logit's distance from its frame below 2^31 in log2 units: rows of
# norm 128 in q and k, times this scale, stay below (2^14 * 2^16 * log2 e = 1.5e9).
MAX_ROWS_SCALE = 2.0**16


def integer(name: str, value: Any, low: int, high: int | None = None, hint: str = "") -> int:
    """Checks ``low <= value <= high`` and returns it; a tracer's extent becomes its number."""
    if isinstance(value, torch.SymInt):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        advice = (hint or ADVICE.get(name, "")) if value is None else ""
        type_error(name, "an int", class_name(value), advice or "convert it with int(...)")
    if value < low or (high is not None and value > high):
        wanted = f"{low} or more" if high is None else f"{low} to {high}"
        wanted = str(low) if high == low else wanted
        value_error(name, wanted, value, hint)
    return value


def choice(name: str, value: Any, options: Iterable[Any], hint: str = "") -> None:
    """Checks that ``value`` is one of ``options``; one that is close to it is a better hint."""
    options = tuple(options)
    if value not in options:
        if isinstance(value, str) and not torch.compiler.is_compiling():  # it cannot trace difflib
            words = [o for o in options if isinstance(o, str)]
            signed = [word for word in words if word == f"+{value}"]  # as close as the other sign
            begun = [word for word in words if len(value) > 3 and word.startswith(value)]
            close = signed or begun or difflib.get_close_matches(value, words, 1)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else hint
        value_error(name, "one of " + ", ".join(repr(o) for o in options), repr(value), hint)


def page_size(value: Any) -> int:
    """Checks a page size: 16, 32, 64 or 128 tokens."""
    if isinstance(value, torch.SymInt):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        type_error("page_size", "an int", class_name(value), "convert it with int(...)")
    if value not in PAGE_SIZES:
        near = min(PAGE_SIZES, key=lambda p: (abs(p - value), p))
        options = ", ".join(map(str, PAGE_SIZES))
        value_error("page_size", f"one of {options}", value, f"the nearest is {near}")
    return value


def rows_page_size(value: Any) -> int:
    """Checks a page size of 16-bit rows: 16 or 32 tokens, or a multiple of 64."""
    integer("page_size", value, 1)
    if value % ROWS_TILE and value not in PAGE_SIZES:
        near = min((16, 32, -(-value // ROWS_TILE) * ROWS_TILE), key=lambda p: (abs(p - value), p))
        value_error("page_size", "16, 32 or a multiple of 64", value, f"the nearest is {near}")
    return value


def page_size_of(fmt: str, value: Any) -> int:
    """Checks the page size of a cache of a format."""
    if FORMATS[fmt].any_page:
        return integer("page_size", value, 1, hint="tokens of a page")
    return (rows_page_size if FORMATS[fmt].large_pages else page_size)(value)


def cache_dtype(value: Any, name: str = "cache_dtype", more: Sequence[str] = ()) -> Any:
    """Checks what a cache may hold and returns it: ``fp8``, which float8_e4m3fn is another word
    for, a dtype of 16-bit rows, or one of ``more`` formats."""
    if value is FP8:
        return "fp8"
    hint = "'fp8' is float8_e4m3fn with a scale a token; 16 bits are given as torch's dtype"
    choice(name, value, ("fp8", *ROWS, *more), hint)
    return value


class Unsaid(str):
    """Default of an argument; identity alone tells it from an equal value that a caller gave."""


UNSAID = Unsaid(DEFAULT)  # default of ``cache_dtype`` in calls that take ``format`` beside it


def given_format(format: Any, cache_dtype: Any) -> tuple[str, Any]:
    """(name, value) of the argument that says a cache's format; ValueError if both are given."""
    if format is None:
        return "cache_dtype", DEFAULT if cache_dtype is UNSAID else cache_dtype
    if cache_dtype is not UNSAID:
        hint = "they mean the same: leave out cache_dtype"
        value_error("format", "one of format and cache_dtype", "both", hint)
    return "format", format


def format_of(content: torch.Tensor) -> str:
    """Name of the format (``dsl_kernels.formats.registered``) whose content is of this dtype."""
    names = _by_dtype()
    if content.dtype not in names:
        wanted = " or ".join(map(dtype_name, names))
        type_error("content", f"dtype {wanted}", dtype_name(content.dtype))
    return names[content.dtype]


@functools.cache
def _by_dtype() -> dict[torch.dtype, str]:
    """Names of the formats that the dtype of content tells apart."""
    return {getattr(torch, each.element): n for n, each in FORMATS.items() if not each.named}


def format_named(cache_dtype: str | torch.dtype) -> str:
    """Name of the format that a checked ``cache_dtype`` means."""
    return cache_dtype if isinstance(cache_dtype, str) else _by_dtype()[cache_dtype]


def format_wished(cache_dtype: Any) -> str:
    """Name of the format that an unchecked ``cache_dtype`` may mean, empty if none."""
    if isinstance(cache_dtype, torch.dtype):
        return _by_dtype().get(cache_dtype, "")
    return cache_dtype if isinstance(cache_dtype, str) else ""


def cache_heads(fmt: str, value: Any) -> None:
    """Checks the KV heads of a cache of a format."""
    most, about = FORMATS[fmt].most_kv_heads, FORMATS[fmt].about
    integer("num_kv_heads", value, 1, most, f"{about} has one KV head" if most == 1 else "")


def kv_heads(value: Any, heads: int, fmt: str) -> None:
    """Checks the KV heads, of a cache of a format, that ``heads`` query heads share evenly."""
    cache_heads(fmt, value)
    if heads % value:
        value_error("num_kv_heads", f"a divisor of num_heads = {heads}", value)


def num_heads(value: Any) -> int:
    """Checks a head count, 1 to 128."""
    more = isinstance(value, int) and value > MAX_HEADS
    hint = "split more heads over several calls" if more else ""
    return integer("num_heads", value, 1, MAX_HEADS, hint)


def s_q(value: Any) -> int:
    """Checks the number of query tokens per sequence, 1 or more."""
    return integer("s_q", value, 1, MAX_ROWS)


def rows(name: str, tokens: int, heads: int) -> None:
    """Checks how many query rows a call has: a kernel counts them in 32 bits."""
    if tokens * heads > MAX_ROWS:
        wanted = f"at most {MAX_ROWS} query tokens times heads"
        value_error(name, wanted, f"{tokens} * {heads}", "split the tokens over several calls")


def unit_rows(name: str, rows: int) -> int:
    """Checks how many query rows of a sequence are scheduled together."""
    if rows > MAX_UNIT_ROWS:
        wanted = f"at most {MAX_UNIT_ROWS} query rows of a sequence in step"
        value_error(name, wanted, rows, "split the tokens over several calls")
    return rows


def softmax_scale(value: Any, most: float | None = None) -> float:
    """Checks the softmax scale: a positive Python number whose logits kernels can hold.

    Args:
        most: the largest that is taken; None: ``MAX_SOFTMAX_SCALE``.
    """
    most = MAX_SOFTMAX_SCALE if most is None else most
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = "" if value is None else "convert it with float(...)"
        type_error("softmax_scale", "a Python float", class_name(value), hint)
    if not 0 < value <= most:
        shown = f"{most:.0f}" if most < 1e6 else f"{most:.3g}"
        wanted = f"a positive finite number of at most {shown}"
        value_error("softmax_scale", wanted, value)
    return float(value)


def no_dropout(value: Any) -> None:
    """Checks that ``dropout_p`` is 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != 0:
        value_error("dropout_p", "0", value, "there is no dropout")


def device(name: str, value: Any) -> torch.device:
    """Checks that torch can make tensors on a device, by making one without elements."""
    try:
        where = torch.device(value)
        if not torch.compiler.is_compiling():
            torch.empty(0, device=where)
        return where
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError, TypeError) as error:
        refused = error
    expected = "'cpu' or a CUDA device that torch can use"
    if isinstance(refused, TypeError):
        type_error(name, expected, repr(value))
    reason = re.split(r"\. |\n", str(refused))[0].rstrip(".")
    known = len(reason) < 100  # else torch lists every type of device that ever was
    hint = f"{reason}; {ADVICE['device']}" if known else ADVICE["device"]
    value_error(name, expected, repr(value), hint)


def cache(content: Any, rope: Any, scale: Any) -> None:
    """Checks the views of a cache: dtypes, shapes, strides, alignment, one device."""
    if scale is None and isinstance(content, torch.Tensor) and content.dtype in ROWS:
        _cache_rows(content, rope)
        return
    tensor("content", content, (FP8,), ("num_pages", "page_size", KV_LORA_RANK))
    pages, tokens = content.shape[0], page_size(content.shape[1])
    if pages < 1:
        value_error("content", "1 page or more", pages, "allocate at least one page")
    tensor("rope", rope, (torch.bfloat16,), (pages, tokens, QK_ROPE_HEAD_DIM), content.device)
    tensor("scale", scale, (torch.float32,), (pages, tokens), content.device)
    for name, view in (("content", content), ("rope", rope), ("scale", scale)):
        _cache_strides(name, view)
    apart("rope", rope, {"content": content})
    apart("scale", scale, {"content": content, "rope": rope})


def _cache_strides(name: str, view: torch.Tensor) -> None:
    """Checks that rows of a cache are aligned, and memory of their own."""
    aligned_rows(name, view, least=1)  # TMA descriptors hold the strides of even one page
    if min(view.stride()) < 1 or overlaps_itself(view):
        hint = "expanded views share memory between tokens: allocate them"
        value_error(name, "strides of distinct tokens", f"strides {view.stride()}", hint)


def cache_rows(value: Any) -> None:
    """Checks kind, dtype and shape of 16-bit rows, with or without a dimension of heads."""
    if isinstance(value, torch.Tensor) and value.dtype in (FP8, torch.uint8, torch.int8):
        width = value.shape[-1] if value.ndim else 0
        if said := named_by_width(width):
            value_error("format", f"the name of what has {width} bytes a token", None, said)
        hint = "content, rope and scale make an FP8 cache"
        value_error("rope", "a tensor beside FP8 content", None, hint)
    heads = () if isinstance(value, torch.Tensor) and value.ndim == 3 else ("num_kv_heads",)
    tensor("content", value, ROWS, ("num_pages", "page_size", *heads, HEAD_DIM_QK))
    if value.stride(-1) != 1:
        value_error("content", "innermost stride 1", f"strides {value.stride()}", TRANSPOSED)


def _cache_rows(content: torch.Tensor, rope: Any) -> None:
    """Checks the two slices of 16-bit rows."""
    tensor("content", content, ROWS, ("num_pages", "page_size", "num_kv_heads", KV_LORA_RANK))
    pages, tokens, heads, _ = content.shape
    if pages < 1:
        value_error("content", "1 page or more", pages, "allocate at least one page")
    rows_page_size(tokens)
    integer("num_kv_heads", heads, 1, MAX_HEADS)
    shape = (pages, tokens, heads, QK_ROPE_HEAD_DIM)
    tensor("rope", rope, (content.dtype,), shape, content.device)
    first, second = address_of(content), address_of(rope)
    behind = None if first is None else first + KV_LORA_RANK * content.element_size()
    if rope.stride() != content.stride() or behind != second:
        hint = "PagedKVCache.from_tensors takes rows of 576 channels whole"
        value_error("rope", "the 64 channels behind content's, in the same rows", "others", hint)
    whole = content.as_strided((*content.shape[:-1], HEAD_DIM_QK), content.stride())
    _cache_strides("content", whole)


def flag(name: str, value: Any) -> int:
    """Checks a bool (or 0, 1) and returns it as an int; a tensor would have to be waited for."""
    if not isinstance(value, int) or value not in (0, 1):
        got = value if isinstance(value, int) else class_name(value)
        type_error(name, "True or False", got)
    return int(value)


def query(nope: Any, rope: Any, scale: Any) -> None:
    """Checks a quantised query, of one or of ragged numbers of tokens: dtypes, shapes, contiguity,
    ranges of heads and tokens."""
    tokens = query_tokens("q.nope", nope)
    tensor("q.nope", nope, (FP8,), (*tokens, "num_heads", KV_LORA_RANK))
    outer = tuple(nope.shape[:-1])
    query_rows(outer)
    tensor("q.rope", rope, (torch.bfloat16,), (*outer, QK_ROPE_HEAD_DIM), nope.device)
    shared = isinstance(scale, torch.Tensor) and scale.ndim == len(outer) - 1
    tensor("q.scale", scale, (torch.float32,), outer[:-1] if shared else outer, nope.device)
    for name, part in (("q.nope", nope), ("q.rope", rope)):
        contiguous(name, part)
        aligned(name, part)


def query_of_rows(
    value: Any,
    dtype: torch.dtype,
    heads: int,
    channels: int = HEAD_DIM_QK,
    advice: str = "",
) -> None:
    """Checks a query of 16 bits for a cache of ``heads`` KV heads and so many channels: as
    ``query``; ``advice``: as of ``tensor``."""
    tokens = query_tokens("q", value)
    tensor("q", value, (dtype,), (*tokens, "num_heads", channels), advice=advice)
    query_rows(tuple(value.shape[:-1]))
    if value.shape[-2] % heads:
        wanted = f"a multiple of the cache's {heads} KV heads"
        value_error("q", wanted, f"{value.shape[-2]} heads", ADVICE["num_kv_heads"])
    contiguous("q", value)
    aligned("q", value)


def query_tokens(name: str, value: Any) -> tuple[str, ...]:
    """Names of the extents before ``num_heads``: a tensor of three dimensions is ragged."""
    return ("total_q",) if isinstance(value, torch.Tensor) and value.ndim == 3 else ("b", "s_q")


def query_rows(outer: tuple[int, ...]) -> None:
    """Checks the extents (b, s_q, h) or (total_q, h) of a query."""
    *tokens, heads = outer
    if len(tokens) == 2:
        s_q(tokens[1])
    num_heads(heads)
    rows("s_q" if len(tokens) == 2 else "total_q", math.prod(tokens), heads)


def lengths(value: Any, batch: int | str, device: torch.device | None = None) -> None:
    """Checks ``cache_seqlens``: int32 (b,), contiguous.  Its values are never read here."""
    tensor("cache_seqlens", value, (torch.int32,), (batch,), device)
    contiguous("cache_seqlens", value)


def block_table(value: Any, batch: int, device: torch.device) -> None:
    """Checks ``block_table``: int32 (b, width), width 1 or more, rows of innermost stride 1."""
    tensor("block_table", value, (torch.int32,), (batch, "width"), device)
    if batch and value.shape[1] < 1:
        hint = "give even empty sequences one column"
        value_error("block_table", "a width of 1 or more pages", value.shape[1], hint)
    if value.shape[1] > 1 and value.stride(1) != 1:
        value_error("block_table", "innermost stride 1", f"strides {value.stride()}", TRANSPOSED)

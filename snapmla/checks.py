"""The one layer that checks arguments.

Every function raises ``TypeError`` (wrong kind or dtype) or ``ValueError`` (wrong value, shape,
strides, device).  The text names the argument, what was expected, what came and, in parentheses,
what to change: the particular advice if the check knows one, else ``ADVICE`` of the argument.
"""

from __future__ import annotations

import builtins
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from dsl_kernels.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.families.formats import FORMATS
from dsl_kernels.families.fp8_decode import PAGE_SIZES
from snapmla import overlap

FP8 = torch.float8_e4m3fn
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # what surely has an address
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FORMAT_OF = {getattr(torch, each.element): name for name, each in FORMATS.items() if not each.named}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}  # as names have them
ROWS = tuple(dtype for dtype, name in FORMAT_OF.items() if FORMATS[name].rows)
ROWS_TILE = 64  # tokens: larger pages of 16-bit rows are multiples of a KV tile
MAX_HEADS = 128
MAX_ROWS = 2**29 - 1  # query tokens * heads: four counts a row fit int32 (smxx/merge.py)
MAX_UNIT_ROWS = 4_000_000  # of one unit: their places in a slot fit int32 (common/epilogue.py)
ALIGN = 16  # bytes; rows are moved by vector instructions and TMA
TRANSPOSED = "it is transposed or strided inside a row: call .contiguous() once"
# Kernels start their running maximum at -1e30, in log2 units: a logit below it would be no token.
# 576 channels of float16's largest value in q and k, times this scale, stay above.
MAX_SOFTMAX_SCALE = 2.0**57

APART = "memory apart from"  # and another argument's name: what ``apart`` expects
MAX_GOT = 200  # characters of a value that a message shows

Shape = Sequence[int | str]  # a string names a free extent

# What to change, by argument, where the check itself has no better idea.
ADVICE: dict[str, str] = {
    "q": "512 channels absorbed into the latent space, then 64 of RoPE",
    "q.nope": "make it with snapmla.quantize_q(q_nope, q_rope)",
    "q.rope": "make it with snapmla.quantize_q(q_nope, q_rope)",
    "q.scale": "make it with snapmla.quantize_q(q_nope, q_rope)",
    "cache": "make it with PagedKVCache.allocate, or from_tensors over existing memory",
    "content": "PagedKVCache.allocate shows shapes and strides; docs/formats.md draws them",
    "rope": "PagedKVCache.allocate shows shapes and strides; docs/formats.md draws them",
    "scale": "PagedKVCache.allocate shows shapes and strides; docs/formats.md draws them",
    "block": "a page of P tokens is 644 * P bytes; wrap wider pages by PagedKVCache.from_tensors",
    "rows": "512 content bytes, then 64 bfloat16 RoPE channels; docs/formats.md draws them",
    "block_table": "one row of page ids for each sequence of the batch",
    "cache_seqlens": "one length for each sequence of the batch, new tokens included",
    "where": "a 2-D block table with cache_seqlens or cu_seqlens, or 1-D indices alone",
    "indices": "flat token indices, page * page_size + offset",
    "c_kv": "the latent alone: joint[:, :512], with k_rope=joint[:, 512:]",
    "k_rope": "one row for each row of c_kv, in the same dtype",
    "slot_mapping": "one slot for each row of c_kv; -1 skips a row",
    "positions": "one row of cos_sin_cache for each token",
    "cos_sin_cache": "torch.cat([cos, sin], -1) of the 32 angles of each position",
    "is_neox": "False pairs channels 2 i and 2 i + 1, as DeepSeek's models do",
    "norm_weight": "kv_a_layernorm's weight in c_kv's dtype; leave it out for normalised c_kv",
    "norm_eps": "rms_norm_eps of the model, such as 1e-6",
    "q_nope": "queries absorbed into the latent space: joint[..., :512]",
    "q_rope": "one row for each row of q_nope, in the same dtype: joint[..., 512:]",
    "out": "leave it out to have it allocated",
    "out[0]": "leave out= away to have it allocated",
    "out[1]": "leave out= away to have it allocated",
    "out.nope": "leave out= away, or keep one QuantizedQuery for each shape",
    "out.scale": "leave out= away, or keep one QuantizedQuery for each shape and granularity",
    "lse": "heads come before query tokens; leave it out to have it allocated",
    "out_a": "rows as decode gives them, or packed without the batch",
    "out_b": "both parts have the same rows in the same dtype",
    "lse_a": "heads come before tokens: .mT of an LSE in which they do not",
    "lse_b": "heads come before tokens: .mT of an LSE in which they do not",
    "outs": "a list of n tensors, or one that stacks them in its first dimension",
    "lses": "as outs: a list beside a list, a tensor beside a tensor; heads come before tokens",
    "o_accum": "allocate it like plan.o_accum: torch.empty_like(plan.o_accum)",
    "lse_accum": "allocate it like plan.lse_accum: torch.empty_like(plan.lse_accum)",
    "plan": "make one for this step's shapes with snapmla.plan_decode",
    "pipeline": "leave it out to let the dispatcher choose",
    "row_tile": "leave it out to let the dispatcher choose",
    "accuracy": "leave it out for one term of P, as fast as it gets",
    "num_parts": "leave it out to fill the device",
    "fixed_split_tokens": "leave it out to cut for balance",
    "fixed_overhead": "leave it out for the measured default",
    "max_pages": "the width of the block table",
    "num_heads": "query heads of this rank; without any no call is needed",
    "s_q": "query tokens of each sequence; without any no call is needed",
    "cu_seqlens_q": "where each sequence's query tokens begin, and the end of the last",
    "total_q": "the first extent of q",
    "cu_seqlens": "where each sequence's rows begin in the packed result, and the end of the last",
    "seq_starts": "the first cached token wanted of each sequence, beside cu_seqlens",
    "total": "rows of the packed result, beside cu_seqlens",
    "row_seqlens": "for each query token how many of its sequence's cached tokens it sees",
    "row_blocks": "leave it out to go by how many SMs would idle",
    "check_stale": "leave it out to go by SNAPMLA_CHECK_PLAN",
    "num_pages": "pages of the pool",
    "num_kv_heads": "query heads j * g to (j + 1) * g - 1 share KV head j",
    "capacity": "plans that are not pinned; pinned ones do not count",
    "pin": "True keeps the plan for a graph until release",
    "softmax_scale": "DeepSeek models want 192**-0.5 * mscale**2; FlashMLA's default is 576**-0.5",
    "dtype": "convert the result afterwards",
    "out_dtype": "convert out afterwards",
    "granularity": "token_head is SnapMLA's, token is for one scale per query token",
    "lse_base": "e is the natural logarithm",
    "empty_lse": "-inf merges like an empty sum; FlashMLA writes +inf",
    "layout": "split is the default",
    "pages": "page numbers of source, where they are fewer than all",
    "out_pages": "page numbers of out, one for each page of source",
    "format": "tensors of other formats tell it by their dtype",
    "scale_fmt": "None writes fp32 scales, 'ue8m0' powers of two",
    "SNAPMLA_SOFTGPU_ARCH": "sm_90a is the default",
    "batch": "sequences",
    "seqlen": "tokens of a sequence",
    "card": "leave it out to ask about this machine",
    "device": "device='cpu' runs the software GPU",
    "causal": "True: query token s of s_q sees the first length - (s_q - 1 - s) tokens",
    "limit": "sequences and parts to list",
    "head_dim_v": "kernels are built for kv_lora_rank 512",
    "kv_lora_rank": "kernels are built for kv_lora_rank 512",
    "k_cache_lora": "pool.view(-1, page_size, 1, 512)",
    "k_cache_rope": "pool.view(-1, page_size, 1, 64)",
    "q_scale": "make it with quantize_ckv_per_token_head",
    "key": "latent and RoPE in one row of 576: (n, 1, 576)",
    "tile_scheduler_metadata": "make it with get_mla_metadata",
    "num_splits": "make it with get_mla_metadata; slice [:b + 1] of a longer one",
    "max_batch": "sequences of the largest batch",
}


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
    raise ValueError(_text(name, expected, got, hint))


def type_error(name: str, expected: str, got: object, hint: str = "") -> NoReturn:
    """Raises the package's standard TypeError."""
    raise TypeError(_text(name, expected, got, _of_a_tracer(got) or hint))


def _of_a_tracer(got: object) -> str:
    """What to say of a value that torch's older tracers put in an argument's place."""
    if got == torch.fx.Proxy.__name__:
        return "torch.fx.symbolic_trace cannot record it: use make_fx or torch.compile"
    if got == torch.Tensor.__name__ and torch.jit.is_tracing():
        return "torch.jit.trace cannot record it: use make_fx or torch.compile"
    return ""


def _text(name: str, expected: str, got: object, hint: str) -> str:
    advice = hint or ADVICE.get(name) or ADVICE.get(name.partition("[")[0], "")
    got = str(got)
    got = got if len(got) <= MAX_GOT else f"{got[:MAX_GOT]}..."
    return f"{name}: expected {expected}, got {got}{f' ({advice})' if advice else ''}"


def explain(
    error: Exception, check: Callable[..., object], *arguments: Any, **options: Any
) -> None:
    """Raises what ``check`` finds wrong with a call that raised ``error``; returns if nothing.

    ``check`` launches nothing: a call is never made twice, whatever failed.
    """
    try:
        check(*arguments, **options)
    except (TypeError, ValueError) as wrong:
        refused = isinstance(error, (TypeError, ValueError))  # the same, in other words
        raise wrong from (None if refused else error)


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """The same error with its argument called as a wrapper's caller knows it.

    Args:
        error: one of this module's, whose text starts with ``argument:``.
        names: inner argument name -> outer one; others stay.
    """
    given = str(error)
    inner, colon, rest = given.partition(":")
    for name, outer in names.items():
        rest = rest.replace(f"{APART} {name},", f"{APART} {outer},")
    text = f"{names.get(inner, inner)}{colon}{rest}"
    return error if text == given else type(error)(text)


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
        made = f"torch.as_tensor(..., dtype=torch.{dtype_name(dtypes[0])})"
        type_error(name, "a torch.Tensor", type(value).__name__, f"build it once with {made}")
    not_nested(name, value)
    if value.layout is not torch.strided:
        got = f"layout {str(value.layout).removeprefix('torch.')}"
        value_error(name, "a dense tensor", got, "call .to_dense() once")
    if not torch.compiler.is_compiling():
        _held(name, value)
    if value.dtype not in dtypes:
        wanted = " or ".join(dtype_name(d) for d in dtypes)
        type_error(name, f"dtype {wanted}", dtype_name(value.dtype), _dtype_hint(name, dtypes))
    actual = value.shape
    if actual != shape and not _fits(actual, shape):
        hint = "" if _is_output(name) else _shape_hint(actual, shape, name.startswith("lse"))
        value_error(name, f"shape {_shape_text(shape)}", _shape_text(actual), hint)
    if device is not None and value.device != device:
        hint = f"move it with .to({str(device)!r}) when you build it"
        value_error(name, f"a tensor on {device}", value.device, hint)


def not_nested(name: str, value: Any) -> None:
    """Checks that what may be a tensor has a shape to ask for."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        hint = "pad it, or pack its rows: ragged queries are (total_q, num_heads, ...)"
        type_error(name, "a tensor of one shape", "a nested tensor", hint)


def _held(name: str, value: torch.Tensor) -> None:
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
    """Whether memory, which is what kernels read and write, holds the opposites of a view's values.

    Operators are given what a tracer's values will be: the dispatcher changes signs before them.
    """
    return not torch.compiler.is_compiling() and value.is_neg()


def _is_output(name: str) -> bool:
    """Whether the caller gives this argument to be written."""
    return name.startswith(("out.", "out[")) or name in ("out", "lse", "o_accum", "lse_accum")


def _dtype_hint(name: str, dtypes: tuple[torch.dtype, ...]) -> str:
    """How to come by the right dtype; quantised values are not a matter of ``.to``."""
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


def _shape_hint(actual: Sequence[int], shape: Shape, any_strides: bool) -> str:
    """What is wrong with a shape, where that can be told.

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
    _aligned(name, value, align)


def _aligned(name: str, value: torch.Tensor, align: int = ALIGN) -> None:
    """Checks where the storage starts; a slice of a tensor may start anywhere."""
    address = address_of(value)
    if address is not None and address % align:
        hint = f"start slices at multiples of {max(1, align // value.element_size())} elements"
        value_error(name, f"storage aligned to {align} bytes", f"address {address:#x}", hint)


def address_of(value: torch.Tensor) -> int | None:
    """Where the first element lies; None for a tracer's stand-in, which lies nowhere."""
    if torch.compiler.is_compiling():
        return None
    if value.__class__ not in PLAIN and isinstance(value, FakeTensor):
        return None
    try:
        return value.data_ptr()
    except RuntimeError:
        return None


def class_name(value: Any) -> str:
    """A value's class, with its module where Python has one of that name too: numpy's ``bool``."""
    cls = type(value)
    alike = getattr(builtins, cls.__name__, cls) is not cls
    return f"{cls.__module__}.{cls.__name__}" if alike else cls.__name__


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
            close = signed or difflib.get_close_matches(value, words, 1)
            hint = f"did you mean {close[0]!r}?" if close else hint
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
        return integer("page_size", value, 1)
    return (rows_page_size if FORMATS[fmt].large_pages else page_size)(value)


def cache_dtype(value: Any, name: str = "cache_dtype", more: tuple[str, ...] = ()) -> Any:
    """Checks what a cache may hold and returns it: ``fp8``, which float8_e4m3fn is another word
    for, a dtype of 16-bit rows, or one of ``more`` formats."""
    if value is FP8:
        return "fp8"
    hint = "'fp8' is float8_e4m3fn with a scale a token; 16 bits are given as torch's dtype"
    choice(name, value, ("fp8", *ROWS, *more), hint)
    return value


def format_of(content: torch.Tensor) -> str:
    """Name of the format (``dsl_kernels.families.formats``) whose content is of this dtype."""
    if content.dtype not in FORMAT_OF:
        wanted = " or ".join(dtype_name(dtype) for dtype in FORMAT_OF)
        type_error("content", f"dtype {wanted}", dtype_name(content.dtype))
    return FORMAT_OF[content.dtype]


def format_named(cache_dtype: str | torch.dtype) -> str:
    """Name of the format that a checked ``cache_dtype`` means."""
    return cache_dtype if isinstance(cache_dtype, str) else FORMAT_OF[cache_dtype]


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


def softmax_scale(value: Any) -> float:
    """Checks the softmax scale: a positive Python number whose logits fp32 can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = "" if value is None else "convert it with float(...)"
        type_error("softmax_scale", "a Python float", class_name(value), hint)
    if not 0 < value <= MAX_SOFTMAX_SCALE:
        wanted = f"a positive finite number of at most {MAX_SOFTMAX_SCALE:.3g}"
        value_error("softmax_scale", wanted, value)
    return float(value)


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
    if min(view.stride()) < 1 or _overlaps(view):
        hint = "expanded views share memory between tokens: allocate them"
        value_error(name, "strides of distinct tokens", f"strides {view.stride()}", hint)


def cache_rows(value: Any) -> None:
    """Checks kind, dtype and shape of 16-bit rows, with or without a dimension of heads."""
    if isinstance(value, torch.Tensor) and value.dtype in (FP8, torch.uint8):
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


def _overlaps(view: torch.Tensor) -> bool:
    """Whether elements may share memory: a step is shorter than what it steps over."""
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


def distinct(name: str, value: torch.Tensor) -> None:
    """Checks that no two elements of a tensor that is written share memory."""
    if _overlaps(value):
        hint = "expanded views share memory between rows: allocate them"
        value_error(name, "strides of distinct rows", f"strides {value.stride()}", hint)


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
        _aligned(name, part)


def query_of_rows(value: Any, dtype: torch.dtype, heads: int) -> None:
    """Checks a query for a cache of 16-bit rows of ``heads`` KV heads: as ``query``."""
    tokens = query_tokens("q", value)
    tensor("q", value, (dtype,), (*tokens, "num_heads", HEAD_DIM_QK))
    query_rows(tuple(value.shape[:-1]))
    if value.shape[-2] % heads:
        wanted = f"a multiple of the cache's {heads} KV heads"
        value_error("q", wanted, f"{value.shape[-2]} heads", ADVICE["num_kv_heads"])
    contiguous("q", value)
    _aligned("q", value)


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


def vector(name: str, value: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """Checks an int32 table of a step: contiguous.  Its values are never read here."""
    tensor(name, value, (torch.int32,), shape, device)
    contiguous(name, value)


def block_table(value: Any, batch: int, device: torch.device) -> None:
    """Checks ``block_table``: int32 (b, width), width 1 or more, rows of innermost stride 1."""
    tensor("block_table", value, (torch.int32,), (batch, "width"), device)
    if batch and value.shape[1] < 1:
        hint = "give even empty sequences one column"
        value_error("block_table", "a width of 1 or more pages", value.shape[1], hint)
    if value.shape[1] > 1 and value.stride(1) != 1:
        value_error("block_table", "innermost stride 1", f"strides {value.stride()}", TRANSPOSED)


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

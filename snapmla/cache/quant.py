"""Rows that go into kernels: append to the cache, quantise queries.

Rounding, for a row c (512 content values) and r (64 RoPE values):
``scale = max(max|c| / top, max|r| * 2^-40, 2^-80)``, ``nope = e4m3(c / scale)``,
``rope = bf16(r / scale)``, where top is 448 for queries and ``CACHE_TOPS[slot % 8]`` for tokens; a
row with NaN or Inf is stored as NaN (bytes, scale and RoPE).
A cache of 16 bits holds rows as they are; of one of ``fp8_ds_mla`` docs/formats.md has the rule.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from dsl_kernels.formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.registered import DEFAULT, FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.cache.paged import PagedKVCache, expect_cache
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.checks import overlap
from snapmla.runtime import launch, variants

GRANULARITIES = ("token_head", "token")
FLOAT_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
INDEX_NAMES = {torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedQuery(launch.OverTensors):
    """A quantised query: q_nope is ``nope * scale``, q_rope is ``rope * scale``.

    Attributes:
        nope: float8_e4m3fn (b, s_q, h, 512), contiguous; ragged queries are packed,
            (total_q, h, 512), and so for the other two.
        rope: bfloat16 (b, s_q, h, 64), contiguous, divided by the scale.
        scale: float32 (b, s_q, h) for granularity ``token_head``, (b, s_q) for ``token``.
        nope_u8: ``nope`` as bytes.
        row_scale: ``scale`` as (b, s_q, h), stride 0 over heads for granularity ``token``.
        arguments: nope_u8, rope, row_scale as kernels take them: ragged ones (1, total_q, h, ...).
        plain: whether kernels may take the addresses of its tensors.

    Raises:
        TypeError, ValueError: see ``snapmla.checks.query``.

    Source: SnapMLA paper, section 3.1 (RoPE-aware per-token scales, the pre-scaled domain);
    ``token`` granularity is Modular's SM100 kernel's.
    """

    plain: ClassVar[bool] = True  # of all but those that __post_init__ finds otherwise

    nope: torch.Tensor
    rope: torch.Tensor
    scale: torch.Tensor
    nope_u8: torch.Tensor = field(init=False, repr=False)
    row_scale: torch.Tensor = field(init=False, repr=False)
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():  # a tracer's tensors have no address to check
            tracing.refuse_transforms()
            checks.query(self.nope, self.rope, self.scale)
            if not tracing.plain(self.nope, self.rope, self.scale):
                object.__setattr__(self, "plain", False)
        object.__setattr__(self, "nope_u8", self.nope.view(torch.uint8))
        object.__setattr__(self, "row_scale", per_row(self.scale, self.nope.shape[:-1]))
        object.__setattr__(self, "arguments", as_batch(self.nope_u8, self.rope, self.row_scale))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # ``nope`` of a query that ``empty_query`` made is viewed when it is first asked for:
            # kernels take its bytes
            if name != "nope" or "nope_u8" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            object.__setattr__(self, "nope", self.nope_u8.view(checks.FP8))
            return self.nope

    @functools.cached_property
    def rows_shape(self) -> tuple[int, ...]:
        """(b, s_q, h); (total_q, h) of ragged queries"""
        return tuple(self.rope.shape[:-1])

    @functools.cached_property
    def written(self) -> tuple[Any, Any, Any]:
        """Tensors that a quantising kernel writes: nope_u8, rope, scale; ragged (1, total_q, ...).

        Converted once, for tensors that are written more than once."""
        return launch.prepared(*as_batch(self.nope_u8, self.rope, self.scale))

    def _parts(self) -> Triple:
        return self.nope_u8, self.rope, self.scale

    @functools.cached_property
    def begins(self) -> tuple[launch.Begin, ...]:
        nope = launch.begin_of(self.nope_u8, self.__dict__.get("nope"))
        return nope, launch.begin_of(self.rope), launch.begin_of(self.scale)

    @functools.cached_property
    def place(self) -> int:
        """A number for the tensors' spans and the shape of a call's rows."""
        return overlap.place((*self.spans, *((0, extent) for extent in self.rows_shape)))

    @property
    def ragged(self) -> bool:
        """True if sequences have different numbers of query tokens, packed one after another."""
        return self.rope.ndim == 3

    @property
    def granularity(self) -> str:
        return "token_head" if self.scale.ndim == self.rope.ndim - 1 else "token"

    @property
    def batch(self) -> int | None:
        """Sequences; None of ragged queries, which do not tell."""
        return None if self.ragged else self.rope.shape[0]

    @property
    def s_q(self) -> int | None:
        """Query tokens of every sequence; None of ragged queries."""
        return None if self.ragged else self.rope.shape[1]

    @property
    def num_heads(self) -> int:
        return self.rope.shape[-2]

    @property
    def device(self) -> torch.device:
        return self.rope.device


def per_row(scale: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A scale of ``rows``, (b, s_q, h) or (total_q, h), or of whole tokens, as that of rows without
    copying."""
    if scale.ndim == len(rows):
        return scale
    return scale.unsqueeze(-1).expand(*scale.shape, rows[-1])


Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def as_batch(nope: torch.Tensor, rope: torch.Tensor, scale: torch.Tensor) -> Triple:
    """Parts of a query as kernels take them: ragged ones are of one sequence for them."""
    if nope.ndim == 4:
        return nope, rope, scale
    return nope.unsqueeze(0), rope.unsqueeze(0), scale.unsqueeze(0)


@functools.lru_cache(maxsize=256)
def variant_kernel(device: torch.device, op: str, **axes: str) -> variants.Kernel:
    """The kernel of these axes for tensors on ``device``, loaded once."""
    spec = VariantSpec(op=op, arch=variants.arch_of(device), **axes)  # type: ignore[arg-type]
    return variants.kernel(spec, device.type)


@functools.lru_cache(maxsize=64)
def _appender(
    device: torch.device, dtype: torch.dtype, index: torch.dtype, fmt: str
) -> variants.Kernel:
    return variant_kernel(
        device, "append_kv", in_dtype=FLOAT_NAMES[dtype], index_dtype=INDEX_NAMES[index],
        cache_dtype=fmt,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _quantizer(device: torch.device, dtype: torch.dtype, granularity: str) -> variants.Kernel:
    return variant_kernel(device, "quantize_q", in_dtype=FLOAT_NAMES[dtype], mode=granularity)


for _cached in (variant_kernel, _appender, _quantizer):
    variants.on_forget(_cached.cache_clear)


def append_kv(
    cache: PagedKVCache,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> None:
    """Quantises tokens and scatters them into the cache (SnapMLA's fused K-append), in place.

    A cache of 16 bits takes them as they are, of another dtype rounded to nearest.  Built by
    default for tokens of its dtype, of formats of bytes for bfloat16; others are compiled when they
    are first asked for.

    Args:
        cache: written at the slots.
        c_kv: bfloat16, float16 or float32 (n, 512), or as many channels as the format's content
            has; rows may be strided, 16-byte aligned.  Of several KV heads (n, num_kv_heads, 512),
            rows evenly spaced.
        k_rope: same dtype, (n, 64), RoPE already applied; rows may be strided.  Of several KV heads
            (n, num_kv_heads, 64).  None, or no channels, of a format that has no RoPE apart.
        slot_mapping: int32 or int64 (n,), ``page * page_size + offset``; negative slots and slots
            past the pool are skipped.

    Raises:
        TypeError, ValueError: naming the argument.

    Example:
        cache = snapmla.PagedKVCache.allocate(2, page_size=64, device="cpu")
        kv, slots = torch.randn(3, 576).bfloat16(), torch.arange(64, 67)  # the start of page 1
        snapmla.append_kv(cache, kv[:, :512], kv[:, 512:], slots)

    Source: SnapMLA paper, section 3.3.1 (fused K-append); the scale's floors are our own
    (docs/numerics.md).  Of ``fp8_ds_mla`` vLLM's ``concat_and_cache_mla``.
    """
    if k_rope is None and isinstance(c_kv, torch.Tensor):
        k_rope = c_kv[..., :0]
    calls.run(_APPEND, _APPEND, (cache, c_kv, k_rope, slot_mapping))


# of an append: cache, c_kv, k_rope, slot_mapping
Append = tuple[PagedKVCache, torch.Tensor, torch.Tensor, torch.Tensor]


def _append_parts(call: Append) -> calls.Parts:
    cache, c_kv, k_rope, slot_mapping = call
    content, rope, scale = cache.asks
    return (
        (c_kv, k_rope, slot_mapping),
        (cache.format, cache.num_kv_heads),
        (
            c_kv.data_ptr(), k_rope.data_ptr(), slot_mapping.data_ptr(), cache.place, content(),
            rope(), scale(),
        ),
    )  # fmt: skip


def _append_places(call: Append, _: object) -> calls.Groups | None:
    cache, *tokens = call
    return cache_places(cache, tokens)


def cache_places(
    cache: PagedKVCache, read: Sequence[torch.Tensor]
) -> tuple[Sequence[overlap.Span], ...] | None:
    """Spans of a cache that is written, and of what is read; None if it is not where it was."""
    if not (tracing.plain(cache) and cache.stays and launch.all_on(cache.device, *read)):
        return None
    return cache.spans, tuple(map(overlap.span, read))


def check_append(
    cache: PagedKVCache, c_kv: torch.Tensor, k_rope: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """The checks of ``append_kv`` on a cache that ``expect_cache`` has seen."""
    check_tokens(c_kv, k_rope, slot_mapping, cache.device, cache.num_kv_heads, cache.format)
    check_apart(cache, {"c_kv": c_kv, "k_rope": k_rope, "slot_mapping": slot_mapping})


def check_apart(cache: PagedKVCache, read: Mapping[str, torch.Tensor]) -> None:
    """Checks that what is read shares no memory with the cache, which is written."""
    if not overlap.lie_apart(cache.spans, tuple(map(overlap.span, read.values()))):
        for name, value in read.items():
            checks.apart(name, value, named("cache", cache))


def _check_append(call: Append) -> Append:
    expect_cache(call[0])
    check_append(*call)
    return call


def _launch_append(call: Append, _: object) -> tuple[None, bool]:
    cache, c_kv, k_rope, slot_mapping = call
    tokens, options = (c_kv, k_rope, slot_mapping), cache.append_options
    launch_append(cache.arguments, *tokens, cache.format, options)
    return None, True


def _traced_append(call: Append) -> None:
    """``append_kv`` as an operator, for tracers."""
    cache, c_kv, k_rope, slot_mapping = call
    expect_cache(cache)
    expect_traceable(cache)
    if not tracing.by_dynamo():
        check_tokens(c_kv, k_rope, slot_mapping, cache.device, cache.num_kv_heads, cache.format)
    memory, tokens = cache.memory_now(), (c_kv, k_rope, slot_mapping)
    if FORMATS[cache.format].named:
        told = cache.format, cache.scale_fmt
        torch.ops.snapmla.append_bytes(memory[0], *told, *tokens)
    else:
        torch.ops.snapmla.append_kv(*memory, *tokens)


_APPEND = calls.Op(
    "append_kv", _check_append, _launch_append, _traced_append, _append_parts, _append_places
)


def expect_traceable(cache: PagedKVCache) -> None:
    """Refuses memory that a tracer, which makes new values of what is written, would lose."""
    if not cache.traceable and tracing.functionalises():
        checks.value_error(
            "cache", "layout split, paged or row640, made outside of torch.compile",
            f"layout {cache.layout!r}, whose views share memory in a way that tracers cannot "
            "follow",
            "append outside of the compiled function",
        )  # fmt: skip


def named(owner: str, value: PagedKVCache | QuantizedQuery) -> dict[str, torch.Tensor]:
    """The tensors that make up a cache or a query, as messages call them."""
    if isinstance(value, PagedKVCache):
        return {f"{owner}.{name}": part for name, part in value.named_tensors.items()}
    parts = {"nope": value.nope, "rope": value.rope, "scale": value.scale}
    return {f"{owner}.{name}": part for name, part in parts.items()}


def check_tokens(
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    device: torch.device,
    heads: int = 1,
    fmt: str = DEFAULT,
) -> None:
    """Checks what ``append_kv`` is given beside a cache of a format and so many KV heads."""
    own, record = () if heads == 1 else (heads,), FORMATS[fmt]
    plain = [t for t in (c_kv, k_rope) if isinstance(t, torch.Tensor) and not t.is_nested]
    widths = [t.shape[-1] for t in plain if t.ndim]
    fits = widths == [record.content.count, record.rope_channels]
    said = checks.tokens_of(record) if record.named and not fits else ""
    checks.tensor("c_kv", c_kv, checks.FLOATS, ("n", *own, record.content.count), device, said)
    n = c_kv.shape[0]
    checks.tensor("k_rope", k_rope, (c_kv.dtype,), (n, *own, record.rope_channels), device, said)
    checks.tensor("slot_mapping", slot_mapping, tuple(INDEX_NAMES), (n,), device)
    checks.contiguous("slot_mapping", slot_mapping)
    if n:
        checks.aligned_rows("c_kv", c_kv)
        if record.rope is not None:
            checks.aligned_rows("k_rope", k_rope)
    if n > 1 and own:
        for name, value in (("c_kv", c_kv), ("k_rope", k_rope)):
            if value.stride(0) != heads * value.stride(1):
                hint = "kernels see heads as rows: call .contiguous() once"
                wanted = "rows evenly spaced over tokens and heads"
                checks.value_error(name, wanted, f"strides {value.stride()}", hint)


def launch_append(
    cache: tuple[Any, ...],
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    fmt: str = DEFAULT,
    options: tuple[int, ...] = (),
) -> None:
    """The launch of ``append_kv`` on checked arguments.

    Args:
        cache: content bytes, RoPE and scale; or rows of one tensor.
        fmt: the cache's format. options: its ``append_options``.
    """
    if c_kv.shape[0] == 0:
        return
    if c_kv.ndim == 3:
        c_kv, k_rope = (rows.as_strided((rows.shape[0] * rows.shape[1], rows.shape[2]),
                                        rows.stride()[1:]) for rows in (c_kv, k_rope))  # fmt: skip
    kernel = _appender(c_kv.device, c_kv.dtype, slot_mapping.dtype, fmt)
    if FORMATS[fmt].rope is None:
        kernel(*cache, c_kv, slot_mapping, *options)
    else:
        kernel(*cache, c_kv, k_rope, slot_mapping, *options)


def quantize_q(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    granularity: str = "token_head",
    out: QuantizedQuery | None = None,
) -> QuantizedQuery:
    """Quantises queries (SnapMLA's fused Q-quant).

    Args:
        q_nope: bfloat16, float16 or float32 (b, s_q, h, 512), absorbed into the latent space;
            1 <= h <= 128, s_q >= 1; may be strided with 16-byte aligned rows.  Ragged queries are
            packed: (total_q, h, 512).
        q_rope: same dtype, (b, s_q, h, 64) or (total_q, h, 64), RoPE already applied.
        granularity: ``token_head``: a scale per token and head; ``token``: per token.
        out: tensors to write into; None allocates.

    Returns:
        The quantised query (``out`` itself if given).

    Raises:
        TypeError, ValueError: naming the argument.

    Example:
        q = torch.randn(2, 1, 16, 576).bfloat16()
        query = snapmla.quantize_q(q[..., :512], q[..., 512:])

    Source: SnapMLA paper, section 3.3.1 (fused Q-quant).
    """
    return calls.run(_QUANTIZE, _QUANTIZE, (q_nope, q_rope, granularity, out))


# of a quantisation: q_nope, q_rope, granularity, out
Quantize = tuple[torch.Tensor, torch.Tensor, str, QuantizedQuery | None]


class _Ready(NamedTuple):
    """Kernel and extents for calls like one that passed every check."""

    kernel: variants.Kernel
    extents: _Extents


def _quantize_parts(call: Quantize) -> calls.Parts:
    q_nope, q_rope, granularity, out = call
    if out is None:
        return (q_nope, q_rope), (granularity, True), None
    where = q_nope.data_ptr(), q_rope.data_ptr(), out.place, out.nope_u8.data_ptr()
    return (q_nope, q_rope), (granularity, False), where


def _quantize_places(call: Quantize, _: object) -> calls.Groups | None:
    q_nope, q_rope, granularity, out = call
    return query_places(out, q_nope, granularity, (q_nope, q_rope))


def query_places(
    out: QuantizedQuery | None,
    q_nope: torch.Tensor,
    granularity: str,
    read: Sequence[torch.Tensor],
) -> calls.Groups | None:
    """Spans of a query that is written, and of what is read; None if it does not fit ``q_nope``, or
    is not where it was."""
    assert out is not None  # else nobody asks
    if not (
        out.plain
        and out.stays
        and out.rows_shape == q_nope.shape[:-1]
        and out.granularity == granularity
        and out.device == q_nope.device
    ):
        return None
    return *((span,) for span in out.spans), tuple(map(overlap.span, read))


def quantize_now(
    q_nope: torch.Tensor, q_rope: torch.Tensor, granularity: str, out: QuantizedQuery | None
) -> QuantizedQuery:
    """``quantize_q`` on tensors with memory, whoever traces."""
    made, _ = _run_quantize(_check_quantize((q_nope, q_rope, granularity, out)), None)
    return made


def _check_quantize(call: Quantize) -> Quantize:
    check_quantize(*call)
    return call


def _run_quantize(call: Quantize, ready: _Ready | None) -> tuple[QuantizedQuery, _Ready | None]:
    q_nope, q_rope, granularity, out = call
    if ready is None:
        device = q_nope.device
        extents = _extents(q_nope.shape, granularity, device)
        if not q_nope.shape[0]:
            return out or _empty_query(extents), None
        ready = _Ready(_quantizer(device, q_nope.dtype, granularity), extents)
    out = out or _empty_query(ready.extents)
    return _launch_quantize(q_nope, q_rope, out, ready.kernel), ready


def _advice(name: str) -> str:
    """Advice on a query's part that does not fit; only format ``fp8`` has quantised queries."""
    return f"{checks.ADVICE[name]}; only caches of format 'fp8' want queries quantised"


def check_quantize(
    q_nope: torch.Tensor, q_rope: torch.Tensor, granularity: str, out: QuantizedQuery | None
) -> None:
    """The checks of ``quantize_q``."""
    checks.choice("granularity", granularity, GRANULARITIES)
    tokens = checks.query_tokens("q_nope", q_nope)
    said = _advice("q_nope")
    checks.tensor(
        "q_nope", q_nope, checks.FLOATS, (*tokens, "num_heads", KV_LORA_RANK), advice=said
    )
    rows = tuple(q_nope.shape[:-1])
    checks.query_rows(rows)
    rope_shape, said = (*rows, QK_ROPE_HEAD_DIM), _advice("q_rope")
    if q_rope is None:
        checks.type_error("q_rope", "a torch.Tensor", "None", said)
    checks.tensor("q_rope", q_rope, (q_nope.dtype,), rope_shape, advice=said)
    checks.together({"q_nope": q_nope, "q_rope": q_rope})
    if out is not None:
        expect_query("out", out)
        device = q_nope.device
        checks.tensor("out.nope", out.nope, (checks.FP8,), tuple(q_nope.shape), device)
        scale_shape = rows if granularity == "token_head" else rows[:-1]
        checks.output("out.scale", out.scale, (torch.float32,), scale_shape, device, align=4)
    if not rows[0]:
        return
    checks.aligned_rows("q_nope", q_nope)
    checks.aligned_rows("q_rope", q_rope)
    _check_query_apart(q_nope, q_rope, out)


def _launch_quantize(
    q_nope: torch.Tensor, q_rope: torch.Tensor, out: QuantizedQuery, kernel: variants.Kernel
) -> QuantizedQuery:
    """The launch, on checked arguments."""
    if q_nope.ndim != 4:
        q_nope, q_rope = q_nope.unsqueeze(0), q_rope.unsqueeze(0)
    kernel(q_nope, q_rope, *out.written)
    return out


def _check_query_apart(
    q_nope: torch.Tensor, q_rope: torch.Tensor, out: QuantizedQuery | None
) -> None:
    """Checks that ``out`` shares no memory with what is quantised, nor its parts with another."""
    if out is None:
        return
    others: dict[str, torch.Tensor] = {"q_nope": q_nope, "q_rope": q_rope}
    for name, value in named("out", out).items():
        checks.apart(name, value, others)
        others[name] = value


class _Extents(NamedTuple):
    """Tensors to allocate for a query, as (shape, strides, dtype), and their allocator."""

    empty: launch.Allocator
    nope_u8: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    rope: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    scale: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@functools.lru_cache(maxsize=256)
def _extents(shape: tuple[int, ...], granularity: str, device: torch.device) -> _Extents:
    rows = tuple(shape[:-1])
    scales = rows if granularity == "token_head" else rows[:-1]
    dense = lambda extents, dtype: (extents, launch.dense_strides(extents), dtype)
    return _Extents(
        launch.allocator(device),
        dense(tuple(shape), torch.uint8),
        dense((*rows, QK_ROPE_HEAD_DIM), torch.bfloat16),
        dense(scales, torch.float32),
    )


def empty_query(shape: tuple[int, ...], granularity: str, device: torch.device) -> QuantizedQuery:
    """Uninitialised tensors that need no checks: made to measure."""
    return _empty_query(_extents(shape, granularity, device))


def _empty_query(extents: _Extents) -> QuantizedQuery:
    empty, *parts = extents
    nope_u8, rope, scale = (empty(*part) for part in parts)
    row_scale = scale
    if scale.ndim != rope.ndim - 1:
        row_scale = per_row(scale, rope.shape[:-1])
    query = object.__new__(QuantizedQuery)
    query.__dict__.update(  # as __post_init__ sets them, in a third of the time; ``nope`` can wait
        rope=rope, scale=scale, nope_u8=nope_u8, row_scale=row_scale,
        arguments=as_batch(nope_u8, rope, row_scale), written=as_batch(nope_u8, rope, scale),
    )  # fmt: skip
    return query


def _traced_quantize(call: Quantize) -> QuantizedQuery:
    """``quantize_q`` as an operator, for tracers."""
    q_nope, q_rope, granularity, out = call
    if out is None:
        nope, rope, scale = torch.ops.snapmla.quantize_q(q_nope, q_rope, granularity)
        return QuantizedQuery(nope.view(checks.FP8), rope, scale)
    nope = out.nope.view(torch.uint8)  # made here, as in ``PagedKVCache.memory_now``
    torch.ops.snapmla.quantize_q_out(q_nope, q_rope, granularity, nope, out.rope, out.scale)
    return out


_QUANTIZE = calls.Op(
    "quantize_q", _check_quantize, _run_quantize, _traced_quantize, _quantize_parts,
    _quantize_places,
)  # fmt: skip
variants.on_forget(_QUANTIZE.memo.forget)  # kernels


def expect_query(name: str, value: object) -> None:
    """TypeError for what is no ``QuantizedQuery``."""
    if not isinstance(value, QuantizedQuery):
        hint = "call snapmla.quantize_q(q_nope, q_rope) first"
        got = type(value).__name__
        if isinstance(value, torch.Tensor):
            got = f"a {checks.dtype_name(value.dtype)} tensor"
        checks.type_error(name, "a snapmla.QuantizedQuery", got, hint)
    parts = value.nope_u8, value.rope, value.scale  # made under a tracer it counts as plain
    if not tracing.by_dynamo() and tracing.plain(*parts):
        checks.in_place(name, value.begins, "keep the storage, or make another query")

"""The fused quantisation kernels: append to the cache, quantise queries.

Rounding, for a row c (512 content values) and r (64 RoPE values):
``scale = max(max|c| / 448, max|r| * 2^-40, 2^-80)``, ``nope = e4m3(c / scale)``,
``rope = bf16(r / scale)``; a row with NaN or Inf is stored as NaN (bytes, scale and RoPE).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from dsl_kernels.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.spec import VariantSpec
from snapmla import checks, launch, overlap, runtime, tracing
from snapmla.cache import PagedKVCache, expect_cache

GRANULARITIES = ("token_head", "token")
_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_INDEX = {torch.int32: "i32", torch.int64: "i64"}


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
        query = (self.nope_u8, self.rope, self.row_scale)
        object.__setattr__(self, "arguments", as_batch(*query))

    @functools.cached_property
    def rows_shape(self) -> tuple[int, ...]:
        """(b, s_q, h); (total_q, h) of ragged queries"""
        return tuple(self.nope.shape[:-1])

    @property
    def ragged(self) -> bool:
        """Whether sequences have different numbers of query tokens, packed one after another."""
        return self.nope.ndim == 3

    @property
    def granularity(self) -> str:
        return "token_head" if self.scale.ndim == self.nope.ndim - 1 else "token"

    @property
    def batch(self) -> int | None:
        """Sequences; None of ragged queries, which do not tell."""
        return None if self.ragged else self.nope.shape[0]

    @property
    def s_q(self) -> int | None:
        """Query tokens of every sequence; None of ragged queries."""
        return None if self.ragged else self.nope.shape[1]

    @property
    def num_heads(self) -> int:
        return self.nope.shape[-2]

    @property
    def device(self) -> torch.device:
        return self.nope.device


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
def _kernel(device: torch.device, op: str, **axes: str) -> runtime.Kernel:
    spec = VariantSpec(op=op, arch=runtime.arch_of(device), **axes)  # type: ignore[arg-type]
    return runtime.kernel(spec, device.type)


runtime.on_forget(_kernel.cache_clear)


def append_kv(
    cache: PagedKVCache, c_kv: torch.Tensor, k_rope: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Quantises tokens and scatters them into the cache (SnapMLA's fused K-append), in place.

    Args:
        cache: written at the slots.
        c_kv: bfloat16, float16 or float32 (n, 512); rows may be strided, 16-byte aligned.
        k_rope: same dtype, (n, 64), RoPE already applied; rows may be strided.
        slot_mapping: int32 or int64 (n,), ``page * page_size + offset``; negative slots and slots
            past the pool are skipped.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: SnapMLA paper, section 3.3.1 (fused K-append); the scale's floors are our own
    (docs/numerics.md).
    """
    expect_cache(cache)
    if tracing.wanted(cache, c_kv, k_rope, slot_mapping):
        if not cache.traceable and tracing.functionalises():
            checks.value_error(
                "cache", "layout split, paged or row640, made outside of torch.compile",
                f"layout {cache.layout!r}, whose views share memory in a way that tracers cannot "
                "follow",
                "append outside of the compiled function",
            )  # fmt: skip
        if not tracing.by_dynamo():
            check_tokens(c_kv, k_rope, slot_mapping, cache.device)
        torch.ops.snapmla.append_kv(*cache.memory_now(), c_kv, k_rope, slot_mapping)
        return
    check_append(cache, c_kv, k_rope, slot_mapping)
    launch_append(cache.arguments, c_kv, k_rope, slot_mapping)


_APART = overlap.Apart()


def check_append(
    cache: PagedKVCache, c_kv: torch.Tensor, k_rope: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """The checks of ``append_kv`` on a cache that ``expect_cache`` has seen."""
    check_tokens(c_kv, k_rope, slot_mapping, cache.device)
    key = (
        c_kv.data_ptr(), k_rope.data_ptr(), slot_mapping.data_ptr(), c_kv.shape[0], c_kv.stride(),
        k_rope.stride(), c_kv.dtype, slot_mapping.dtype, cache.place,
    )  # fmt: skip
    if key in _APART:
        return
    read = {"c_kv": c_kv, "k_rope": k_rope, "slot_mapping": slot_mapping}
    if not _APART.see(key, cache.spans, tuple(map(overlap.span, read.values()))):
        for name, value in read.items():
            checks.apart(name, value, named("cache", cache))


def named(owner: str, value: PagedKVCache | QuantizedQuery) -> dict[str, torch.Tensor]:
    """The tensors that make up a cache or a query, as messages call them."""
    content = value.content if isinstance(value, PagedKVCache) else value.nope
    first = "content" if isinstance(value, PagedKVCache) else "nope"
    return {f"{owner}.{first}": content, f"{owner}.rope": value.rope, f"{owner}.scale": value.scale}


def check_tokens(
    c_kv: torch.Tensor, k_rope: torch.Tensor, slot_mapping: torch.Tensor, device: torch.device
) -> None:
    """Checks what ``append_kv`` is given beside the cache."""
    checks.tensor("c_kv", c_kv, checks.FLOATS, ("n", KV_LORA_RANK), device)
    n = c_kv.shape[0]
    checks.tensor("k_rope", k_rope, (c_kv.dtype,), (n, QK_ROPE_HEAD_DIM), device)
    checks.tensor("slot_mapping", slot_mapping, tuple(_INDEX), (n,), device)
    checks.contiguous("slot_mapping", slot_mapping)
    if n:
        checks.aligned_rows("c_kv", c_kv)
        checks.aligned_rows("k_rope", k_rope)


def launch_append(
    cache: tuple[Any, ...], c_kv: torch.Tensor, k_rope: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """The launch of ``append_kv`` on checked arguments; cache = (content bytes, rope, scale)."""
    if c_kv.shape[0] == 0:
        return
    kernel = _kernel(
        c_kv.device,
        "append_kv",
        in_dtype=_SHORT[c_kv.dtype],
        index_dtype=_INDEX[slot_mapping.dtype],
    )
    kernel(*cache, c_kv, k_rope, slot_mapping)


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

    Source: SnapMLA paper, section 3.3.1 (fused Q-quant).
    """
    if tracing.wanted(q_nope, q_rope, out):
        return _traced_quantize(q_nope, q_rope, granularity, out)
    return quantize_now(q_nope, q_rope, granularity, out)


def quantize_now(
    q_nope: torch.Tensor, q_rope: torch.Tensor, granularity: str, out: QuantizedQuery | None
) -> QuantizedQuery:
    """``quantize_q`` on tensors with memory, whoever traces."""
    checks.choice("granularity", granularity, GRANULARITIES)
    tokens = checks.query_tokens("q_nope", q_nope)
    checks.tensor("q_nope", q_nope, checks.FLOATS, (*tokens, "num_heads", KV_LORA_RANK))
    rows = tuple(q_nope.shape[:-1])
    checks.query_rows(rows)
    rope_shape = (*rows, QK_ROPE_HEAD_DIM)
    checks.tensor("q_rope", q_rope, (q_nope.dtype,), rope_shape, q_nope.device)
    scale_shape = rows if granularity == "token_head" else rows[:-1]
    device = q_nope.device
    if out is None:
        out = _empty_query(tuple(q_nope.shape), scale_shape, device)
    else:
        expect_query("out", out)
        checks.tensor("out.nope", out.nope, (checks.FP8,), tuple(q_nope.shape), device)
        checks.output("out.scale", out.scale, (torch.float32,), scale_shape, device, align=4)
        _check_query_apart(q_nope, q_rope, out)
    if not rows[0]:
        return out
    checks.aligned_rows("q_nope", q_nope)
    checks.aligned_rows("q_rope", q_rope)
    kernel = _kernel(device, "quantize_q", in_dtype=_SHORT[q_nope.dtype], mode=granularity)
    nope_u8, rope, _ = out.arguments
    if len(rows) == 2:
        q_nope, q_rope = q_nope.unsqueeze(0), q_rope.unsqueeze(0)
    kernel(q_nope, q_rope, nope_u8, rope, out.scale if len(rows) == 3 else out.scale.unsqueeze(0))
    return out


def _check_query_apart(q_nope: torch.Tensor, q_rope: torch.Tensor, out: QuantizedQuery) -> None:
    """Checks that ``out`` shares no memory with what is quantised, nor its parts with another."""
    key = (
        q_nope.data_ptr(), q_rope.data_ptr(), q_nope.shape, q_nope.stride(), q_rope.stride(),
        q_nope.dtype, out.place,
    )  # fmt: skip
    if key in _APART:
        return
    read = (overlap.span(q_nope), overlap.span(q_rope))
    if _APART.see(key, *((span,) for span in out.spans), read):
        return
    others: dict[str, torch.Tensor] = {"q_nope": q_nope, "q_rope": q_rope}
    for name, value in named("out", out).items():
        checks.apart(name, value, others)
        others[name] = value


def _empty_query(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], device: torch.device
) -> QuantizedQuery:
    """Uninitialised tensors that need no checks: made to measure."""
    query = object.__new__(QuantizedQuery)
    nope_u8 = torch.empty(shape, dtype=torch.uint8, device=device)
    rope = nope_u8.new_empty((*shape[:-1], QK_ROPE_HEAD_DIM), dtype=torch.bfloat16)
    scale = torch.empty(scale_shape, dtype=torch.float32, device=device)
    row_scale = per_row(scale, shape[:-1])
    for name, value in (
        ("nope", nope_u8.view(checks.FP8)),
        ("rope", rope),
        ("scale", scale),
        ("nope_u8", nope_u8),
        ("row_scale", row_scale),
        ("arguments", as_batch(nope_u8, rope, row_scale)),
    ):
        object.__setattr__(query, name, value)
    return query


def _traced_quantize(
    q_nope: torch.Tensor, q_rope: torch.Tensor, granularity: str, out: QuantizedQuery | None
) -> QuantizedQuery:
    """``quantize_q`` as an operator, for tracers."""
    if out is None:
        nope, rope, scale = torch.ops.snapmla.quantize_q(q_nope, q_rope, granularity)
        return QuantizedQuery(nope.view(checks.FP8), rope, scale)
    nope = out.nope.view(torch.uint8)  # made here, as in ``PagedKVCache.memory_now``
    torch.ops.snapmla.quantize_q_out(q_nope, q_rope, granularity, nope, out.rope, out.scale)
    return out


def expect_query(name: str, value: object) -> None:
    """TypeError for what is no ``QuantizedQuery``."""
    if not isinstance(value, QuantizedQuery):
        hint = "call snapmla.quantize_q(q_nope, q_rope) first"
        got = type(value).__name__
        if isinstance(value, torch.Tensor):
            got = f"a {checks.dtype_name(value.dtype)} tensor"
        checks.type_error(name, "a snapmla.QuantizedQuery", got, hint)

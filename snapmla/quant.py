"""The fused quantisation kernels: append to the cache, quantise queries, fetch back.

Rounding, for a row c (512 content values) and r (64 RoPE values):
``scale = max(max|c| / 448, max|r| * 2^-40, 2^-80)``, ``nope = e4m3(c / scale)``,
``rope = bf16(r / scale)``; a row with NaN or Inf is stored as NaN (bytes, scale and RoPE).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from dsl_kernels.spec import KV_LORA_RANK, QK_ROPE_HEAD_DIM, VariantSpec
from snapmla import checks, runtime
from snapmla.cache import PagedKVCache

GRANULARITIES = ("token_head", "token")
_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_INDEX = {torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True, eq=False)
class QuantizedQuery:
    """A quantised query: q_nope is ``nope * scale``, q_rope is ``rope * scale``.

    Attributes:
        nope: float8_e4m3fn (b, s_q, h, 512), contiguous.
        rope: bfloat16 (b, s_q, h, 64), contiguous, divided by the scale.
        scale: float32 (b, s_q, h) for granularity ``token_head``, (b, s_q) for ``token``.
        nope_u8: ``nope`` as bytes.
        row_scale: ``scale`` as (b, s_q, h), stride 0 over heads for granularity ``token``.

    Raises:
        TypeError, ValueError: see ``snapmla.checks.query``.
    """

    nope: torch.Tensor
    rope: torch.Tensor
    scale: torch.Tensor
    nope_u8: torch.Tensor = field(init=False, repr=False)
    row_scale: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        checks.query(self.nope, self.rope, self.scale)
        scale = self.scale
        if scale.ndim == 2:
            scale = scale.unsqueeze(-1).expand(self.nope.shape[:3])
        object.__setattr__(self, "nope_u8", self.nope.view(torch.uint8))
        object.__setattr__(self, "row_scale", scale)

    @property
    def granularity(self) -> str:
        return "token_head" if self.scale.ndim == 3 else "token"

    @property
    def batch(self) -> int:
        return self.nope.shape[0]

    @property
    def s_q(self) -> int:
        return self.nope.shape[1]

    @property
    def num_heads(self) -> int:
        return self.nope.shape[2]

    @property
    def device(self) -> torch.device:
        return self.nope.device


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
    """
    _expect_cache(cache)
    checks.tensor("c_kv", c_kv, checks.FLOATS, ("n", KV_LORA_RANK), cache.device)
    n = c_kv.shape[0]
    checks.tensor("k_rope", k_rope, (c_kv.dtype,), (n, QK_ROPE_HEAD_DIM), cache.device)
    checks.tensor("slot_mapping", slot_mapping, tuple(_INDEX), (n,), cache.device)
    checks.contiguous("slot_mapping", slot_mapping)
    if n == 0:
        return
    checks.aligned_rows("c_kv", c_kv)
    checks.aligned_rows("k_rope", k_rope)
    kernel = _kernel(
        cache.device,
        "append_kv",
        in_dtype=_SHORT[c_kv.dtype],
        index_dtype=_INDEX[slot_mapping.dtype],
    )
    kernel(cache.content_u8, cache.rope, cache.scale, c_kv, k_rope, slot_mapping)


def quantize_q(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    granularity: str = "token_head",
    out: QuantizedQuery | None = None,
) -> QuantizedQuery:
    """Quantises queries (SnapMLA's fused Q-quant).

    Args:
        q_nope: bfloat16, float16 or float32 (b, s_q, h, 512), absorbed into the latent space;
            1 <= h <= 128, 1 <= s_q <= 8; may be strided with 16-byte aligned rows.
        q_rope: same dtype, (b, s_q, h, 64), RoPE already applied.
        granularity: ``token_head``: a scale per token and head; ``token``: per token.
        out: tensors to write into; None allocates.

    Returns:
        The quantised query (``out`` itself if given).

    Raises:
        TypeError, ValueError: naming the argument.
    """
    checks.choice("granularity", granularity, GRANULARITIES)
    checks.tensor("q_nope", q_nope, checks.FLOATS, ("b", "s_q", "num_heads", KV_LORA_RANK))
    b, s_q, heads, _ = q_nope.shape
    checks.s_q(s_q)
    checks.num_heads(heads)
    rope_shape = (b, s_q, heads, QK_ROPE_HEAD_DIM)
    checks.tensor("q_rope", q_rope, (q_nope.dtype,), rope_shape, q_nope.device)
    scale_shape = (b, s_q, heads) if granularity == "token_head" else (b, s_q)
    device = q_nope.device
    if out is None:
        out = QuantizedQuery(
            torch.empty(q_nope.shape, dtype=torch.uint8, device=device).view(checks.FP8),
            torch.empty(rope_shape, dtype=torch.bfloat16, device=device),
            torch.empty(scale_shape, dtype=torch.float32, device=device),
        )
    else:
        _expect_query("out", out)
        checks.tensor("out.nope", out.nope, (checks.FP8,), tuple(q_nope.shape), device)
        checks.output("out.scale", out.scale, (torch.float32,), scale_shape, device, align=4)
    if b == 0:
        return out
    checks.aligned_rows("q_nope", q_nope)
    checks.aligned_rows("q_rope", q_rope)
    kernel = _kernel(device, "quantize_q", in_dtype=_SHORT[q_nope.dtype], mode=granularity)
    kernel(q_nope, q_rope, out.nope_u8, out.rope, out.scale)
    return out


Fetched = tuple[torch.Tensor, torch.Tensor]


def fetch_dequant(
    cache: PagedKVCache,
    where: torch.Tensor,
    cache_seqlens: torch.Tensor | None = None,
    *,
    out: torch.Tensor | Fetched | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Fetched:
    """Reads tokens back: c_kv = content * scale, k_rope = rope * scale (SnapMLA's fetch-dequant).

    Args:
        where: int32 block table (b, width), or int32 flat token indices (n,)
            (``page * page_size + offset``); an index outside the pool gives zeros.
        cache_seqlens: int32 (b,), needed with a block table.
        out: where to write: a pair (c_kv, k_rope), or one joint (..., 576) tensor.  With a block
            table its second extent bounds the tokens fetched per sequence, and rows past a
            sequence's length are left as they are.  None allocates zeros for width * page_size
            tokens per sequence, or for n tokens.
        dtype: of the result if ``out`` is None: bfloat16, float16 or float32.

    Returns:
        (c_kv, k_rope): (b, tokens, 512) and (b, tokens, 64) for a block table, (n, 512) and (n, 64)
        for indices.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _expect_cache(cache)
    device = cache.device
    if not isinstance(where, torch.Tensor) or where.ndim not in (1, 2):
        got = tuple(where.shape) if isinstance(where, torch.Tensor) else type(where).__name__
        checks.value_error("where", "a block table (b, width) or indices (n,)", got)
    by_pages = where.ndim == 2
    if by_pages:
        checks.block_table(where, where.shape[0], device)
        if cache_seqlens is None:
            checks.value_error("cache_seqlens", "int32 (b,) beside a block table", None)
        checks.lengths(cache_seqlens, where.shape[0], device)
        rows: tuple[int, ...] = (where.shape[0], where.shape[1] * cache.page_size)
    else:
        checks.tensor("indices", where, (torch.int32,), ("n",), device)
        checks.contiguous("indices", where)
        if cache_seqlens is not None:
            checks.value_error("cache_seqlens", "None beside flat indices", "a tensor")
        rows = (where.shape[0],)
    c_kv, k_rope = _fetch_outputs(out, rows, by_pages, dtype, device)
    if c_kv.numel() == 0:
        return c_kv, k_rope
    mode = "pages" if by_pages else "indices"
    kernel = _kernel(device, "fetch_dequant", in_dtype=_SHORT[c_kv.dtype], mode=mode)
    selector = (where, cache_seqlens) if by_pages else (where,)
    kernel(cache.content_u8, cache.rope, cache.scale, *selector, c_kv, k_rope)
    return c_kv, k_rope


def _fetch_outputs(
    out: torch.Tensor | Fetched | None,
    rows: tuple[int, ...],
    by_pages: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Fetched:
    """The two tensors to write, allocated or checked."""
    if out is None:
        if dtype not in _SHORT:
            names = " or ".join(checks.dtype_name(d) for d in _SHORT)
            checks.type_error("dtype", names, dtype)
        make = torch.zeros if by_pages else torch.empty
        return (
            make((*rows, KV_LORA_RANK), dtype=dtype, device=device),
            make((*rows, QK_ROPE_HEAD_DIM), dtype=dtype, device=device),
        )
    shape: tuple[int | str, ...] = (rows[0], "tokens") if by_pages else rows
    if isinstance(out, torch.Tensor):
        width = KV_LORA_RANK + QK_ROPE_HEAD_DIM
        checks.tensor("out", out, checks.FLOATS, (*shape, width), device)
        c_kv, k_rope = out[..., :KV_LORA_RANK], out[..., KV_LORA_RANK:]
    elif isinstance(out, (tuple, list)) and len(out) == 2:
        c_kv, k_rope = out
        checks.tensor("out[0]", c_kv, checks.FLOATS, (*shape, KV_LORA_RANK), device)
        rope_shape = (*c_kv.shape[:-1], QK_ROPE_HEAD_DIM)
        checks.tensor("out[1]", k_rope, (c_kv.dtype,), rope_shape, device)
    else:
        checks.type_error("out", "a (..., 576) tensor or a pair of tensors", type(out).__name__)
    checks.aligned_rows("out", c_kv)
    checks.aligned_rows("out", k_rope)
    return c_kv, k_rope


def _expect_cache(value: object) -> None:
    if not isinstance(value, PagedKVCache):
        checks.type_error(
            "cache",
            "a snapmla.PagedKVCache",
            type(value).__name__,
            "PagedKVCache.from_tensors wraps existing memory",
        )


def _expect_query(name: str, value: object) -> None:
    if not isinstance(value, QuantizedQuery):
        hint = "call snapmla.quantize_q(q_nope, q_rope) first"
        got = type(value).__name__
        if isinstance(value, torch.Tensor):
            got = f"a {checks.dtype_name(value.dtype)} tensor"
        checks.type_error(name, "a snapmla.QuantizedQuery", got, hint)

"""One launch for what engines do before attention: (RMS norm) + RoPE + quantise (+ append).

Each step computes in fp32 from what the one before rounded to the input's dtype, as separate
kernels do: results are those of the separate steps bit for bit (``snapmla.reference``:
``rms_norm_rows``, ``rotate_rows``, ``quantize_rows``; docs/numerics.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsl_kernels.formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.format import Format
from dsl_kernels.formats.registered import DEFAULT, FORMATS
from snapmla import checks
from snapmla.cache import quant
from snapmla.cache.paged import PagedKVCache, expect_cache, expect_fp8
from snapmla.cache.quant import QuantizedQuery
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.runtime import variants

LEAST_EPS, MOST_EPS = 1e-12, 1.0


def rope_append_kv(
    cache: PagedKVCache,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    is_neox: bool = False,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> None:
    """Rotates new tokens, normalises them if asked to, and appends them in place, as ``append_kv``.

    One launch for norm, RoPE, quantisation and append.  Built by default for bfloat16 tokens, int64
    slots and positions, of ``fp8_ds_mla`` with the norm and ``is_neox`` off; others are compiled
    when they are first asked for.

    Args:
        cache: FP8 or ``fp8_ds_mla``, written at the slots.
        c_kv: bfloat16, float16 or float32 (n, 512); rows may be strided, 16-byte aligned.
        k_rope: same dtype, (n, 64), RoPE not yet applied; rows may be strided.
        slot_mapping: int32 or int64 (n,), ``page * page_size + offset``; negative slots and slots
            past the pool are skipped.
        positions: int32 or int64 (n,): the tokens' rows of ``cos_sin_cache``.  A token whose
            position has no row there is stored as NaN.
        cos_sin_cache: (max_position, 64) float32 or the tokens' dtype: 32 cosines, 32 sines of a
            position, as vLLM and SGLang keep them; rows may be strided.
        is_neox: channels i and i + 32 make a pair; else 2 i and 2 i + 1, as in DeepSeek's models.
        norm_weight: same dtype as c_kv, (512,), of ``kv_a_layernorm``, which is then done here;
            None: c_kv is normalised.
        norm_eps: of the norm, 1e-12 to 1.

    Raises:
        TypeError, ValueError: naming the argument.

    Example:
        cache = snapmla.PagedKVCache.allocate(2, page_size=64, device="cpu")
        kv, table = torch.randn(3, 576).bfloat16(), torch.randn(8, 64)  # 32 cosines, 32 sines
        slots, positions = torch.arange(64, 67), torch.arange(3)
        snapmla.rope_append_kv(cache, kv[:, :512], kv[:, 512:], slots, positions, table)

    Source: vLLM's ``concat_and_cache_mla_rope_fused``, with SnapMLA's quantisation (paper, section
    3.3.1) and ``DeepseekV3RMSNorm``.
    """
    if k_rope is None and isinstance(c_kv, torch.Tensor):
        k_rope = c_kv[..., :0]  # whose shape is then refused, with what the format takes
    calls.run(
        _APPEND, _APPEND,
        Append(
            cache, c_kv, k_rope, slot_mapping, positions, cos_sin_cache, is_neox, norm_weight,
            norm_eps,
        ),
    )  # fmt: skip


class Append(NamedTuple):
    """A call of ``rope_append_kv``."""

    cache: PagedKVCache
    c_kv: torch.Tensor
    k_rope: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    is_neox: bool
    norm_weight: torch.Tensor | None
    norm_eps: float


def _append_parts(call: Append) -> calls.Parts:
    cache, *tokens, is_neox, norm_weight, norm_eps = call
    tensors = tuple(tokens) if norm_weight is None else (*tokens, norm_weight)
    content, rope, scale = cache.asks
    options = (
        cache.format, is_neox.__class__, is_neox, norm_weight is None, norm_eps.__class__, norm_eps,
    )  # fmt: skip
    begin = [tensor.data_ptr() for tensor in tensors]
    return tensors, options, (*begin, cache.place, content(), rope(), scale())


def _append_places(call: Append, _: object) -> calls.Groups | None:
    weight = () if call.norm_weight is None else (call.norm_weight,)
    return quant.cache_places(call.cache, (*call[1:6], *weight))


def _check_append(call: Append) -> Append:
    cache, c_kv, k_rope, slot_mapping, positions, cos_sin_cache, is_neox, norm_weight, eps = call
    expect_cache(cache)
    _expect_quantised(cache)
    eps = check_eps(eps)
    check_rotated(FORMATS[cache.format], norm_weight)
    quant.check_append(cache, c_kv, k_rope, slot_mapping)
    check_angles(c_kv.dtype, c_kv.shape[:1], positions, cos_sin_cache, cache.device)
    check_weight(norm_weight, c_kv)
    checks.flag("is_neox", is_neox)
    read = {"positions": positions, "cos_sin_cache": cos_sin_cache}
    if norm_weight is not None:
        read["norm_weight"] = norm_weight
    quant.check_apart(cache, read)
    return call


def _expect_quantised(cache: PagedKVCache) -> None:
    if FORMATS[cache.format].rows:
        expect_fp8(cache, "rotate and normalise the tokens, then snapmla.append_kv")


def _launch_append(call: Append, _: object) -> tuple[None, bool]:
    cache = call.cache
    launch_append(cache.arguments, *call[1:], cache.format, cache.append_options)
    return None, True


def _traced_append(call: Append) -> None:
    """``rope_append_kv`` as an operator, for tracers."""
    cache, c_kv, k_rope, slot_mapping, positions, cos_sin_cache, is_neox, norm_weight, eps = call
    expect_cache(cache)
    _expect_quantised(cache)
    eps = check_eps(eps)
    quant.expect_traceable(cache)
    check_rotated(FORMATS[cache.format], norm_weight)
    if not tracing.by_dynamo():
        quant.check_tokens(c_kv, k_rope, slot_mapping, cache.device, fmt=cache.format)
        check_angles(c_kv.dtype, c_kv.shape[:1], positions, cos_sin_cache, cache.device)
        check_weight(norm_weight, c_kv)
    memory = cache.memory_now()
    given = (
        c_kv, k_rope, slot_mapping, positions, cos_sin_cache,
        bool(checks.flag("is_neox", is_neox)), norm_weight, eps,
    )  # fmt: skip
    if FORMATS[cache.format].named:
        told = cache.format, cache.scale_fmt
        torch.ops.snapmla.rope_append_bytes(memory[0], *told, *given)
    else:
        torch.ops.snapmla.rope_append_kv(*memory, *given)


_APPEND = calls.Op(
    "rope_append_kv", _check_append, _launch_append, _traced_append, _append_parts, _append_places
)


def check_angles(
    dtype: torch.dtype,
    tokens: tuple[int, ...],
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    device: torch.device,
) -> None:
    """Checks what rotates ``tokens``, (n,) or (b, s_q), of this dtype; (b, s_q) may be flat."""
    if len(tokens) == 2 and isinstance(positions, torch.Tensor) and positions.ndim == 1:
        tokens = (tokens[0] * tokens[1],)
    checks.tensor("positions", positions, tuple(quant.INDEX_NAMES), tokens, device)
    checks.contiguous("positions", positions)
    dtypes = (torch.float32,) if dtype == torch.float32 else (torch.float32, dtype)
    table = ("max_position", QK_ROPE_HEAD_DIM)
    checks.tensor("cos_sin_cache", cos_sin_cache, dtypes, table, device)
    if cos_sin_cache.shape[0] < 1:
        checks.value_error("cos_sin_cache", "1 position or more", 0)
    checks.aligned_rows("cos_sin_cache", cos_sin_cache)


def check_rotated(record: Format, norm_weight: torch.Tensor | None) -> None:
    """Checks that tokens of a format may be rotated, and normalised, on their way."""
    if record.rope is None:
        hint = "rotate the tokens, then snapmla.append_kv"
        checks.value_error("cache", "a format that keeps RoPE apart", record.about, hint)
    if norm_weight is not None and record.content.count != KV_LORA_RANK:
        hint = "normalise the tokens before"
        wanted = f"None beside {record.about}, whose content is {record.content.count} channels"
        checks.value_error("norm_weight", wanted, f"a {type(norm_weight).__name__}", hint)


def check_weight(norm_weight: torch.Tensor | None, c_kv: torch.Tensor) -> None:
    """Checks the weight of the norm of ``c_kv``."""
    if norm_weight is not None:
        checks.tensor("norm_weight", norm_weight, (c_kv.dtype,), (KV_LORA_RANK,), c_kv.device)
        checks.aligned_rows("norm_weight", norm_weight)


def check_eps(norm_eps: float, name: str = "norm_eps") -> float:
    """Checks a norm's epsilon and returns it."""
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, (int, float)):
        checks.type_error(name, "a Python float", checks.class_name(norm_eps))
    if not LEAST_EPS <= norm_eps <= MOST_EPS:
        checks.value_error(name, f"{LEAST_EPS:g} to {MOST_EPS:g}", norm_eps)
    return float(norm_eps)


def launch_append(
    cache: tuple[torch.Tensor, ...],
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    fmt: str = DEFAULT,
    options: tuple[int, ...] = (),
) -> None:
    """The launch of ``rope_append_kv`` on checked arguments; cache, format and options as those of
    ``quant.launch_append``."""
    if c_kv.shape[0] == 0:
        return
    kernel = quant.variant_kernel(
        c_kv.device,
        "append_kv",
        in_dtype=quant.FLOAT_NAMES[c_kv.dtype],
        index_dtype=quant.INDEX_NAMES[slot_mapping.dtype],
        norm="given" if norm_weight is None else "rms",
        cache_dtype=fmt,
        **_rotation(positions, cos_sin_cache, is_neox),
    )
    given = (*cache, c_kv, k_rope, slot_mapping, positions, cos_sin_cache)
    if norm_weight is None:
        kernel(*given, *options)
    else:
        kernel(*given, norm_weight, norm_eps, *options)


def _rotation(
    positions: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox: bool
) -> dict[str, str]:
    """The axes of a variant that these arguments decide."""
    return {
        "rope_style": "neox" if is_neox else "interleaved",
        "cos_sin_dtype": quant.FLOAT_NAMES[cos_sin_cache.dtype],
        "position_dtype": quant.INDEX_NAMES[positions.dtype],
    }


def rope_quantize_q(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    is_neox: bool = False,
    granularity: str = "token_head",
    out: QuantizedQuery | None = None,
) -> QuantizedQuery:
    """Rotates queries and quantises them as ``quantize_q`` does, in one launch.

    Built by default for bfloat16 queries, int64 positions and granularity ``token_head``; others
    are compiled when they are first asked for.

    Args:
        q_nope: bfloat16, float16 or float32 (b, s_q, h, 512), absorbed into the latent space;
            1 <= h <= 128, s_q >= 1; may be strided with 16-byte aligned rows.  Ragged queries are
            packed: (total_q, h, 512).
        q_rope: same dtype, (b, s_q, h, 64) or (total_q, h, 64), RoPE not yet applied.
        positions: int32 or int64 (b, s_q), or flat (b * s_q,); (total_q,) of ragged queries: the
            tokens' rows of ``cos_sin_cache``.  A token whose position has no row there is NaN.
        cos_sin_cache: (max_position, 64) float32 or the queries' dtype: 32 cosines, 32 sines of a
            position; rows may be strided.
        is_neox: channels i and i + 32 make a pair; else 2 i and 2 i + 1, as in DeepSeek's models.
        granularity: ``token_head``: a scale per token and head; ``token``: per token.
        out: tensors to write into; None allocates.

    Returns:
        The quantised query (``out`` itself if given).

    Raises:
        TypeError, ValueError: naming the argument.

    Example:
        q, table = torch.randn(2, 1, 16, 576).bfloat16(), torch.randn(8, 64)  # 32 cosines, 32 sines
        positions = torch.tensor([5, 7])
        query = snapmla.rope_quantize_q(q[..., :512], q[..., 512:], positions, table)

    Source: SnapMLA paper, section 3.3.1 (fused Q-quant), behind the rotary embedding of an engine.
    """
    return calls.run(
        _QUANTIZE, _QUANTIZE,
        Quantize(q_nope, q_rope, positions, cos_sin_cache, is_neox, granularity, out),
    )  # fmt: skip


class Quantize(NamedTuple):
    """A call of ``rope_quantize_q``."""

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    is_neox: bool
    granularity: str
    out: QuantizedQuery | None


def _quantize_parts(call: Quantize) -> calls.Parts:
    q_nope, q_rope, positions, cos_sin_cache, is_neox, granularity, out = call
    tensors = q_nope, q_rope, positions, cos_sin_cache
    options = (is_neox.__class__, is_neox, granularity, out is None)
    if out is None:
        return tensors, options, None
    begin = [tensor.data_ptr() for tensor in tensors]
    return tensors, options, (*begin, out.place, out.nope_u8.data_ptr())


def _quantize_places(call: Quantize, _: object) -> calls.Groups | None:
    return quant.query_places(call.out, call.q_nope, call.granularity, call[:4])


def _check_quantize(call: Quantize) -> Quantize:
    q_nope, q_rope, positions, cos_sin_cache, is_neox, granularity, out = call
    quant.check_quantize(q_nope, q_rope, granularity, out)
    checks.flag("is_neox", is_neox)
    tokens = tuple(q_nope.shape[:-2])
    check_angles(q_nope.dtype, tokens, positions, cos_sin_cache, q_nope.device)
    if out is not None:
        read = {"positions": positions, "cos_sin_cache": cos_sin_cache}
        for name, value in quant.named("out", out).items():
            checks.apart(name, value, read)
    return call


def _run_quantize(
    call: Quantize, kernel: variants.Kernel | None
) -> tuple[QuantizedQuery, variants.Kernel | None]:
    q_nope, q_rope, positions, cos_sin_cache, is_neox, granularity, out = call
    device = q_nope.device
    if out is None:
        out = quant.empty_query(q_nope.shape, granularity, device)
    if not q_nope.shape[0]:
        return out, None
    if kernel is None:
        kernel = quant.variant_kernel(
            device,
            "quantize_q",
            in_dtype=quant.FLOAT_NAMES[q_nope.dtype],
            mode=granularity,
            **_rotation(positions, cos_sin_cache, is_neox),
        )
    q_nope, q_rope, scale = quant.as_batch(q_nope, q_rope, out.scale)
    kernel(q_nope, q_rope, positions.view(-1), cos_sin_cache, *out.arguments[:2], scale)
    return out, kernel


def _traced_quantize(call: Quantize) -> QuantizedQuery:
    """``rope_quantize_q`` as an operator, for tracers."""
    *given, is_neox, granularity, out = call
    rotation = (bool(checks.flag("is_neox", is_neox)), granularity)
    if out is None:
        nope, rope, scale = torch.ops.snapmla.rope_quantize_q(*given, *rotation)
        return QuantizedQuery(nope.view(checks.FP8), rope, scale)
    nope = out.nope.view(torch.uint8)  # made here, as in ``PagedKVCache.memory_now``
    torch.ops.snapmla.rope_quantize_q_out(*given, *rotation, nope, out.rope, out.scale)
    return out


_QUANTIZE = calls.Op(
    "rope_quantize_q", _check_quantize, _run_quantize, _traced_quantize, _quantize_parts,
    _quantize_places,
)  # fmt: skip
variants.on_forget(_QUANTIZE.memo.forget)  # kernels


def quantize_now(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    granularity: str,
    out: QuantizedQuery | None,
) -> QuantizedQuery:
    """``rope_quantize_q`` on tensors with memory, whoever traces."""
    call = Quantize(q_nope, q_rope, positions, cos_sin_cache, is_neox, granularity, out)
    made, _ = _run_quantize(_check_quantize(call), None)
    return made

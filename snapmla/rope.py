"""One launch for what engines do before attention: (RMS norm) + RoPE + quantise (+ append).

Each step computes in fp32 from what the one before rounded to the input's dtype, as separate
kernels do: results are those of the separate steps bit for bit (``snapmla.reference``:
``rms_norm_rows``, ``rotate_rows``, ``quantize_rows``; docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsl_kernels.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla import checks, overlap, quant, tracing
from snapmla.cache import PagedKVCache, expect_cache, expect_fp8
from snapmla.quant import QuantizedQuery, Triple

LEAST_EPS, MOST_EPS = 1e-12, 1.0
_APART = overlap.Apart()


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
    slots and positions; other dtypes are compiled when they are first asked for.

    Args:
        cache: FP8, written at the slots.
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

    Source: vLLM's ``concat_and_cache_mla_rope_fused``, with SnapMLA's quantisation (paper, section
    3.3.1) and ``DeepseekV3RMSNorm``.
    """
    expect_cache(cache)
    expect_fp8(cache, "rotate and normalise the tokens, then snapmla.append_kv")
    norm_eps = check_eps(norm_eps)
    given = (c_kv, k_rope, slot_mapping, positions, cos_sin_cache)
    if tracing.wanted(cache, *given, norm_weight):
        quant.expect_traceable(cache)
        if not tracing.by_dynamo():
            quant.check_tokens(c_kv, k_rope, slot_mapping, cache.device)
            check_angles(c_kv.dtype, c_kv.shape[:1], positions, cos_sin_cache, cache.device)
            check_weight(norm_weight, c_kv)
        rotation = (bool(checks.flag("is_neox", is_neox)), norm_weight, norm_eps)
        torch.ops.snapmla.rope_append_kv(*cache.memory_now(), *given, *rotation)
        return
    quant.check_append(cache, c_kv, k_rope, slot_mapping)
    check_angles(c_kv.dtype, c_kv.shape[:1], positions, cos_sin_cache, cache.device)
    check_weight(norm_weight, c_kv)
    checks.flag("is_neox", is_neox)
    read = {"positions": positions, "cos_sin_cache": cos_sin_cache}
    if norm_weight is not None:
        read["norm_weight"] = norm_weight
    if not _apart(cache, read):
        for name, value in read.items():
            checks.apart(name, value, quant.named("cache", cache))
    launch_append(cache.arguments, *given, is_neox, norm_weight, norm_eps)


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


def check_weight(norm_weight: torch.Tensor | None, c_kv: torch.Tensor) -> None:
    """Checks the weight of the norm of ``c_kv``."""
    if norm_weight is not None:
        checks.tensor("norm_weight", norm_weight, (c_kv.dtype,), (KV_LORA_RANK,), c_kv.device)
        checks.aligned_rows("norm_weight", norm_weight)


def check_eps(norm_eps: float) -> float:
    """Checks a norm's epsilon and returns it."""
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, (int, float)):
        checks.type_error("norm_eps", "a Python float", checks.class_name(norm_eps))
    if not LEAST_EPS <= norm_eps <= MOST_EPS:
        checks.value_error("norm_eps", f"{LEAST_EPS:g} to {MOST_EPS:g}", norm_eps)
    return float(norm_eps)


def _apart(written: PagedKVCache | QuantizedQuery, read: Mapping[str, torch.Tensor]) -> bool:
    """Whether what is written lies apart from what turns its rows; if so it is remembered."""
    places = ((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in read.values())
    key = (written.place, *places)
    return key in _APART or _APART.see(key, written.spans, tuple(map(overlap.span, read.values())))


def launch_append(
    cache: Triple,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
) -> None:
    """The launch of ``rope_append_kv`` on checked arguments; cache = (bytes, rope, scale)."""
    if c_kv.shape[0] == 0:
        return
    kernel = quant.variant_kernel(
        c_kv.device,
        "append_kv",
        in_dtype=quant.FLOAT_NAMES[c_kv.dtype],
        index_dtype=quant.INDEX_NAMES[slot_mapping.dtype],
        norm="given" if norm_weight is None else "rms",
        **_rotation(positions, cos_sin_cache, is_neox),
    )
    given = (*cache, c_kv, k_rope, slot_mapping, positions, cos_sin_cache)
    if norm_weight is None:
        kernel(*given)
    else:
        kernel(*given, norm_weight, norm_eps)


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

    Source: SnapMLA paper, section 3.3.1 (fused Q-quant), behind the rotary embedding of an engine.
    """
    given = (q_nope, q_rope, positions, cos_sin_cache)
    if tracing.wanted(*given, out):
        rotation = (bool(checks.flag("is_neox", is_neox)), granularity)
        if out is None:
            nope, rope, scale = torch.ops.snapmla.rope_quantize_q(*given, *rotation)
            return QuantizedQuery(nope.view(checks.FP8), rope, scale)
        nope = out.nope.view(torch.uint8)  # made here, as in ``PagedKVCache.memory_now``
        torch.ops.snapmla.rope_quantize_q_out(*given, *rotation, nope, out.rope, out.scale)
        return out
    return quantize_now(*given, is_neox, granularity, out)


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
    quant.check_quantize(q_nope, q_rope, granularity, out)
    checks.flag("is_neox", is_neox)
    device, shape = q_nope.device, q_nope.shape
    check_angles(q_nope.dtype, tuple(shape[:-2]), positions, cos_sin_cache, device)
    read = {"positions": positions, "cos_sin_cache": cos_sin_cache}
    if out is None:
        out = quant.empty_query(shape, granularity, device)
    elif not _apart(out, read):
        for name, value in quant.named("out", out).items():
            checks.apart(name, value, read)
    if not shape[0]:
        return out
    kernel = quant.variant_kernel(
        device,
        "quantize_q",
        in_dtype=quant.FLOAT_NAMES[q_nope.dtype],
        mode=granularity,
        **_rotation(positions, cos_sin_cache, is_neox),
    )
    q_nope, q_rope, scale = quant.as_batch(q_nope, q_rope, out.scale)
    kernel(q_nope, q_rope, positions.view(-1), cos_sin_cache, *out.arguments[:2], scale)
    return out

"""What of FlashMLA's names is not built: arguments that are refused, and prefill."""

from __future__ import annotations

from typing import NoReturn

import torch

from dsl_kernels.dims import KV_LORA_RANK
from snapmla import checks

Tensor = torch.Tensor

_FP8 = "FlashMLA's dense FP8 cache is not built yet"
_SECOND, _DENSE = "a second cache is not built yet", "dense decode has neither"
_LEAVE = "keep FlashMLA for layers that need it"
OWN_FP8 = "snapmla.flash_mla_fp8 decodes an FP8 cache with a scale a token"
_NO_PREFILL = (
    "dense prefill is not built yet; FlashMLA's own, and FlashAttention's flash_attn_varlen_func, "
    "on sm_100 that of flash_attn.cute, serve today"
)
_NOT_BUILT = {
    "topk_length": ("None without indices", _DENSE), "attn_sink": ("None without indices", _DENSE),
    "extra_k_cache": (f"None: {_SECOND}", _LEAVE),
    "extra_indices_in_kvcache": (f"None: {_SECOND}", _LEAVE),
    "extra_topk_length": (f"None: {_SECOND}", _LEAVE),
    "is_fp8_kvcache": (f"False: {_FP8}", OWN_FP8), "descale_q": (f"None: {_FP8}", OWN_FP8),
    "descale_k": (f"None: {_FP8}", OWN_FP8),
}  # fmt: skip


def refuse(**given: object) -> None:
    """Raises ValueError for the first argument that asks for what is not built."""
    for name, value in given.items():
        if value is not None and value is not False:
            expected, hint = _NOT_BUILT[name]
            got = "a tensor" if isinstance(value, torch.Tensor) else value
            checks.value_error(name, expected, got, hint)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = KV_LORA_RANK,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
    indexer_topk: int = 0,
) -> NoReturn:
    """Sparse prefill: not built yet.

    Args:
        q: bfloat16 (s_q, num_heads_q, 576).
        kv: bfloat16 (s_kv, 1, 576).
        indices: int32 (s_q, 1, topk).
        sm_scale: factor of the logits.
        d_v: 512.
        attn_sink: float32 (num_heads_q,).
        topk_length: int32 (s_q,).
        out: bfloat16 (s_q, num_heads_q, 512).
        indexer_topk: how many indices, the first ones, have an LSE of their own; 0: none.

    Returns:
        Nothing yet.

    Raises:
        NotImplementedError: always.

    Source: FlashMLA, ``flash_mla_sparse_fwd``.
    """
    raise NotImplementedError("flash_mla_sparse_fwd: sparse prefill is not built yet")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> NoReturn:
    """Attention of separate heads (prefill, training): not built yet.

    Args:
        q: bfloat16 (total_q, num_heads, 192).
        k: bfloat16 (total_kv, num_heads_k, 192).
        v: bfloat16 (total_kv, num_heads_k, 128).
        cu_seqlens_qo, cu_seqlens_kv: int32 (b + 1,).
        max_seqlen_qo, max_seqlen_kv: of all sequences.
        dropout_p, softmax_scale, causal, deterministic, is_varlen: as FlashMLA's.

    Returns:
        Nothing yet.

    Raises:
        NotImplementedError: always.

    Source: FlashMLA, ``flash_attn_varlen_func``.
    """
    raise NotImplementedError(f"flash_attn_varlen_func: {_NO_PREFILL}")


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> NoReturn:
    """As ``flash_attn_varlen_func``: not built yet.

    Args:
        qkv: bfloat16 (total, num_heads, 512), q, k and v side by side.
        cu_seqlens: int32 (b + 1,).
        max_seqlen: of all sequences.
        head_dim_qk: channels of q and k.
        dropout_p, softmax_scale, causal, deterministic, is_varlen: as FlashMLA's.

    Returns:
        Nothing yet.

    Raises:
        NotImplementedError: always.

    Source: FlashMLA, ``flash_attn_varlen_qkvpacked_func``.
    """
    raise NotImplementedError(f"flash_attn_varlen_qkvpacked_func: {_NO_PREFILL}")


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> NoReturn:
    """As ``flash_attn_varlen_func``: not built yet.

    Args:
        q: bfloat16 (total_q, num_heads, 192).
        kv: bfloat16 (total_kv, num_heads_k, 320), k and v side by side.
        cu_seqlens_qo, cu_seqlens_kv: int32 (b + 1,).
        max_seqlen_qo, max_seqlen_kv: of all sequences.
        head_dim_qk: channels of q and k.
        dropout_p, softmax_scale, causal, deterministic, is_varlen: as FlashMLA's.

    Returns:
        Nothing yet.

    Raises:
        NotImplementedError: always.

    Source: FlashMLA, ``flash_attn_varlen_kvpacked_func``.
    """
    raise NotImplementedError(f"flash_attn_varlen_kvpacked_func: {_NO_PREFILL}")

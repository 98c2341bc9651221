"""FlashMLA's three names for attention of separate heads, over ``mha_prefill``.

As there: gradients by autograd, both results are returned, the LSE has shape (total_q, h) over
memory (h, total_q), and without ``softmax_scale`` it is d_qk ** -0.5.  Other than there: the LSE
has a gradient, too, ``deterministic`` may be True, float16 and, without gradients, heads of 256
channels, rows of V and K behind a sequence's end do not reach it, and nothing but the results and a
list of work is allocated.

Source: FlashMLA, ``flash_mla/flash_mla_interface.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from dsl_kernels.formats.mha_list import VALUES
from snapmla import checks
from snapmla.mha.checking import D_QK
from snapmla.mha.prefill import Results, mha_prefill

Tensor = torch.Tensor

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]
_OUTER = {
    "k_nope": "k", "cu_seqlens_q": "cu_seqlens_qo", "cu_seqlens_k": "cu_seqlens_kv",
    "max_seqlen_q": "max_seqlen_qo", "max_seqlen_k": "max_seqlen_kv",
}  # fmt: skip


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
) -> Results:
    """Attention of separate heads over ragged sequences.

    Args:
        q: bfloat16 or float16 (total_q, h, d_qk), last stride 1; d_qk 192, 128 or 256.
        k: same dtype as q (total_kv, h_k, d_qk).
        v: same dtype as q (total_kv, h_k, d_v); d_v is 128, beside d_qk 256 it is 256.
        cu_seqlens_qo, cu_seqlens_kv: int32 (b + 1,); read whatever ``is_varlen`` says.
        max_seqlen_qo, max_seqlen_kv: of all sequences.
        dropout_p: 0.
        softmax_scale: None: d_qk ** -0.5.
        causal: bottom right.
        deterministic: results and gradients are the same bits either way.
        is_varlen: False says that all sequences are as long as the longest.

    Returns:
        (out (total_q, h, d_v), lse (total_q, h)), natural logarithm, -inf of rows without keys.

    Raises:
        TypeError, ValueError: naming the argument; where dropout is wanted.

    Source: FlashMLA, ``flash_attn_varlen_func``.
    """
    _refuse(dropout_p, deterministic, is_varlen)
    call = q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv
    return _attend(call, _OUTER, softmax_scale=softmax_scale, causal=causal)


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
) -> Results:
    """Like ``flash_attn_varlen_func``, of one tensor.

    Args:
        qkv: bfloat16 or float16 (total, h, 2 * head_dim_qk + d_v): q, k and v side by side.
        cu_seqlens: int32 (b + 1,).
        max_seqlen: of all sequences.
        head_dim_qk: 192 or 128 (d_v is 128), or 256 (256).
        dropout_p, softmax_scale, causal, deterministic, is_varlen: as there.

    Returns:
        As there.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: FlashMLA, ``flash_attn_varlen_qkvpacked_func``.
    """
    _refuse(dropout_p, deterministic, is_varlen)
    _packed("qkv", qkv, head_dim_qk, 2)
    d = head_dim_qk
    call = (
        qkv[..., :d], qkv[..., d : 2 * d], qkv[..., 2 * d :], cu_seqlens, cu_seqlens, max_seqlen,
        max_seqlen,
    )  # fmt: skip
    outer = dict.fromkeys(("q", "k_nope", "v"), "qkv")
    outer |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens")
    outer |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")
    return _attend(call, outer, softmax_scale=softmax_scale, causal=causal)


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
) -> Results:
    """Like ``flash_attn_varlen_func``, k and v in one tensor.

    Args:
        q: bfloat16 or float16 (total_q, h, head_dim_qk).
        kv: same dtype as q (total_kv, h_k, head_dim_qk + d_v): k and v side by side.
        cu_seqlens_qo, cu_seqlens_kv: int32 (b + 1,).
        max_seqlen_qo, max_seqlen_kv: of all sequences.
        head_dim_qk: 192 or 128 (d_v is 128), or 256 (256).
        dropout_p, softmax_scale, causal, deterministic, is_varlen: as there.

    Returns:
        As there.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: FlashMLA, ``flash_attn_varlen_kvpacked_func``.
    """
    _refuse(dropout_p, deterministic, is_varlen)
    _packed("kv", kv, head_dim_qk, 1)
    call = (
        q, kv[..., :head_dim_qk], kv[..., head_dim_qk:], cu_seqlens_qo, cu_seqlens_kv,
        max_seqlen_qo, max_seqlen_kv,
    )  # fmt: skip
    outer = {**_OUTER, "k_nope": "kv", "v": "kv"}
    return _attend(call, outer, softmax_scale=softmax_scale, causal=causal)


def _refuse(dropout_p: Any, deterministic: Any, is_varlen: Any) -> None:
    checks.no_dropout(dropout_p)
    checks.flag("deterministic", deterministic)
    checks.flag("is_varlen", is_varlen)


def _packed(name: str, value: Any, head_dim_qk: Any, rows: int) -> None:
    """Checks a tensor of ``rows`` rows of Q or K and one of V, side by side."""
    checks.choice("head_dim_qk", head_dim_qk, D_QK)
    checks.not_nested(name, value)
    if not isinstance(value, torch.Tensor):
        checks.type_error(name, "a torch.Tensor", type(value).__name__)
    width = rows * head_dim_qk + VALUES[head_dim_qk]
    if value.ndim != 3 or value.shape[-1] != width:
        wanted = f"shape (tokens, heads, {width})"
        checks.value_error(name, wanted, tuple(value.shape), f"head_dim_qk is {head_dim_qk}")


def _attend(call: tuple[Any, ...], outer: dict[str, str], **options: Any) -> Results:
    """``mha_prefill``; errors name the arguments as the caller knows them."""
    try:
        out, lse = mha_prefill(*call, **options)
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, outer) from None
    return out, lse.T

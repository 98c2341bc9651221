"""FlashAttention's varlen attention in keywords, as vLLM and SGLang call it, over ``mha_prefill``.

Source: FlashAttention, ``flash_attn_varlen_func`` (hopper/flash_attn_interface.py).
"""

from __future__ import annotations

from typing import Any

import torch

from snapmla import checks
from snapmla.mha.prefill import Results, mha_prefill

Tensor = torch.Tensor

__all__ = ["flash_attn_varlen_func"]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    dropout_p: float = 0.0,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | Results:
    """Attention of separate heads over ragged sequences; gradients as of ``mha_prefill``.

    Args:
        q: bfloat16 or float16 (total_q, h, d_qk); (d_qk, d_v) as ``mha_prefill`` takes them.
        k: same dtype as q (total_k, h_k, d_qk).
        v: same dtype as q (total_k, h_k, d_v), which may be a strided view.
        cu_seqlens_q, cu_seqlens_k: int32 (b + 1,).
        max_seqlen_q, max_seqlen_k: of all sequences.
        softmax_scale: None: d_qk ** -0.5.
        causal: bottom right.
        return_softmax_lse: also returns the LSE.
        out: same dtype as q (total_q, h, d_v), to write into; None allocates, and is what it must
            be where a gradient is wanted.
        dropout_p, window_size, softcap, return_attn_probs: taken where they change nothing: 0,
            (-1, -1) or None, 0, False.
        alibi_slopes: None; float32 (h,) or (b, h) is refused.
        deterministic: gradients, too, are the same bits either way.

    Returns:
        out, or (out, lse) with lse float32 (h, total_q), natural logarithm, -inf without keys.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: FlashAttention, ``flash_attn_varlen_func``.
    """
    checks.flag("return_softmax_lse", return_softmax_lse)
    checks.flag("deterministic", deterministic)
    checks.flag("return_attn_probs", return_attn_probs)
    if return_attn_probs:
        hint = "return_softmax_lse=True also returns the LSE"
        checks.value_error("return_attn_probs", "False", True, hint)
    checks.no_dropout(dropout_p)
    if window_size is not None and tuple(window_size) != (-1, -1):
        checks.value_error("window_size", "(-1, -1)", window_size, "there is no sliding window")
    if softcap != 0:
        checks.value_error("softcap", "0", softcap, "logits are not capped")
    if alibi_slopes is not None:
        checks.value_error("alibi_slopes", "None", "a tensor", "logits have no bias")
    try:
        made = mha_prefill(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            softmax_scale=softmax_scale, causal=causal, out=out,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, {"k_nope": "k"}) from None
    return made if return_softmax_lse else made[0]

"""FlashAttention's varlen forward in keywords, as vLLM and SGLang call it, over ``mha_prefill``.

Source: FlashAttention, ``flash_attn_varlen_func`` (hopper/flash_attn_interface.py).
"""

from __future__ import annotations

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
) -> Tensor | Results:
    """Attention of separate heads over ragged sequences; forward only.

    Args:
        q: bfloat16 or float16 (total_q, h, d_qk); (d_qk, d_v) as ``mha_prefill`` takes them.
        k: same dtype as q (total_k, h_k, d_qk).
        v: same dtype as q (total_k, h_k, d_v), which may be a strided view.
        cu_seqlens_q, cu_seqlens_k: int32 (b + 1,).
        max_seqlen_q, max_seqlen_k: of all sequences.
        softmax_scale: None: d_qk ** -0.5.
        causal: bottom right.
        return_softmax_lse: also returns the LSE.
        out: same dtype as q (total_q, h, d_v), to write into; None allocates.

    Returns:
        out, or (out, lse) with lse float32 (h, total_q), natural logarithm, -inf without keys.

    Raises:
        TypeError, ValueError: naming the argument; where a gradient is wanted.

    Source: FlashAttention, ``flash_attn_varlen_func``.
    """
    checks.flag("return_softmax_lse", return_softmax_lse)
    try:
        made = mha_prefill(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            softmax_scale=softmax_scale, causal=causal, out=out,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, {"k_nope": "k"}) from None
    return made if return_softmax_lse else made[0]

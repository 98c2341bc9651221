"""FlashMLA's name for sparse attention of prompts, over ``sparse_prefill``; forward only.

Other than there: any number of heads from 1 to 128 and any topk, unpadded; a row of kv that lies
behind ``topk_length`` may be NaN and does not reach the result; ``out`` may be given, as in vLLM's
copy.

Source: FlashMLA, ``flash_mla/flash_mla_interface.py``.
"""

from __future__ import annotations

import torch

from snapmla import checks
from snapmla.sparse.prefill import Results, sparse_prefill

Tensor = torch.Tensor

__all__ = ["flash_mla_sparse_fwd"]


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
) -> Results:
    """Attention of each query token to the rows of ``kv`` that it names.

    Args:
        q: bfloat16 (s_q, h_q, 576) or (s_q, h_q, 512).
        kv: bfloat16 (s_kv, 1, d_qk); the first 512 channels are V.
        indices: int32 (s_q, 1, topk); negative, or s_kv and more: none.
        sm_scale: factor of the logits.
        d_v: 512.
        attn_sink: float32 (h_q,): ``out`` is multiplied by 1 / (1 + exp(sink - lse)).
        topk_length: int32 (s_q,): how many of a token's entries count.
        out: bfloat16 (s_q, h_q, 512) to be written.

    Returns:
        (out, max_logits, lse): (s_q, h_q, 512) bfloat16, twice (s_q, h_q) float32; natural
        logarithms.  Rows that see nothing have out 0, max_logits -inf, lse +inf.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: FlashMLA.
    """
    try:
        return sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out)
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, {"softmax_scale": "sm_scale"}) from None

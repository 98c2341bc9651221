"""FlashMLA's name for sparse attention of prompts, over ``sparse_prefill``; forward only.

Other than there: any number of heads from 1 to 128 and any topk, unpadded; a row of kv that lies
behind ``topk_length`` may be NaN and does not reach the result; ``out`` may be given, as in vLLM's
copy.

Source: FlashMLA, ``flash_mla/flash_mla_interface.py``.
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from snapmla import checks
from snapmla.sparse.prefill import FourResults, Results, sparse_prefill

Tensor = torch.Tensor

__all__ = ["flash_mla_sparse_fwd"]


@overload
def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = ...,
    attn_sink: Tensor | None = ..., topk_length: Tensor | None = ..., out: Tensor | None = ...,
    indexer_topk: Literal[0] = ...,
) -> Results: ...  # fmt: skip


@overload
def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = ...,
    attn_sink: Tensor | None = ..., topk_length: Tensor | None = ..., out: Tensor | None = ...,
    *, indexer_topk: int,
) -> Results | FourResults: ...  # fmt: skip


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
    indexer_topk: int = 0,
) -> Results | FourResults:
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
        indexer_topk: a multiple of 64: of a list's first entries, which the indexer chose, the LSE
            is a fourth result; 0: none.  FlashMLA's branch nv_dev takes 512, 1024 and 2048.

    Returns:
        (out, max_logits, lse), with ``indexer_topk`` also lse_indexer: (s_q, h_q, 512) bfloat16,
        the others (s_q, h_q) float32; natural logarithms.  Rows that see nothing have out 0,
        max_logits -inf, and LSEs of +inf.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: FlashMLA.
    """
    try:
        return sparse_prefill(
            q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out, indexer_topk=indexer_topk
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, {"softmax_scale": "sm_scale"}) from None

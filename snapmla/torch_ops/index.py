"""``append_index_k`` and ``index_logits`` over an index cache."""

from __future__ import annotations

import torch
from torch import Tensor

from snapmla import checks
from snapmla.dsa import append_index_k as append
from snapmla.dsa import index_logits as logits
from snapmla.torch_ops.operator import Operator


def _append_index_k(
    cache: Tensor,
    k: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: str,
    hadamard: bool,
    is_neox: bool,
    norm_eps: float,
) -> None:
    tensors = cache, k, slot_mapping, positions, cos_sin_cache, norm_weight, norm_bias
    append.now(append.Append(*tensors, scale, hadamard, is_neox, norm_eps))


def _index_logits_out(
    q: Tensor,
    w: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None,
    out: Tensor,
    unit_rows: int,
) -> None:
    checks.tensor("q", q, (torch.uint8,), (*q.shape,))
    tensors = q.view(checks.FP8), w, cache, block_table, cache_seqlens, cu_seqlens_q, out
    logits.now(logits.Call(*tensors, max_tokens=None, unit_rows=unit_rows or None))


OPERATORS = (
    Operator(
        "append_index_k(Tensor(a!) cache, Tensor k, Tensor slot_mapping, Tensor? positions, "
        "Tensor? cos_sin_cache, Tensor? norm_weight, Tensor? norm_bias, str scale, bool hadamard, "
        "bool is_neox, float norm_eps) -> ()",
        _append_index_k,
    ),
    Operator(
        "index_logits_out(Tensor q, Tensor w, Tensor cache, Tensor block_table, "
        "Tensor cache_seqlens, Tensor? cu_seqlens_q, Tensor(a!) out, int unit_rows) -> ()",
        _index_logits_out,
    ),
)

"""``append_index_k`` and ``index_logits`` over an index cache."""

from __future__ import annotations

from torch import Tensor

from snapmla.dsa import append_index_k as append
from snapmla.dsa import index_logits as logits
from snapmla.torch_ops.operator import Operator


def _append_index_k(
    cache: Tensor, k: Tensor, slot_mapping: Tensor, scale: str, hadamard: bool
) -> None:
    append.now(append.Append(cache, k, slot_mapping, scale, hadamard))


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
    tensors = q, w, cache, block_table, cache_seqlens, cu_seqlens_q, out
    logits.now(logits.Call(*tensors, max_tokens=None, unit_rows=unit_rows or None))


OPERATORS = (
    Operator(
        "append_index_k(Tensor(a!) cache, Tensor k, Tensor slot_mapping, str scale, "
        "bool hadamard) -> ()",
        _append_index_k,
    ),
    Operator(
        "index_logits_out(Tensor q, Tensor w, Tensor cache, Tensor block_table, "
        "Tensor cache_seqlens, Tensor? cu_seqlens_q, Tensor(a!) out, int unit_rows) -> ()",
        _index_logits_out,
    ),
)

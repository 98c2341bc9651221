"""``sparse_prefill``: attention of each query token to the rows that it names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from snapmla.sparse import prefill
from snapmla.torch_ops.operator import Operator

RESULTS_AT = 7  # of a call's fields: out, max_logits, lse
_ARGUMENTS = (
    "Tensor q, Tensor kv, Tensor indices, float softmax_scale, int d_v, Tensor? attn_sink, "
    "Tensor? topk_length"
)


def _call(*arguments: Any) -> prefill.Call:
    """Arguments as schemas have them, without results of what allocates."""
    given = (*arguments, None, None, None)
    return prefill.Call(*given[: RESULTS_AT + 3])


def _sparse_prefill(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    made: tuple[Tensor, Tensor, Tensor] = prefill.prefill_now(_call(*arguments))
    return made


def _sparse_prefill_out(*arguments: Any) -> None:
    prefill.prefill_now(_call(*arguments))


def _fake_sparse_prefill(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(*arguments)
    prefill.check_shapes(call)
    return prefill.new_results(call.q)


OPERATORS = (
    Operator(
        f"sparse_prefill({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
        _sparse_prefill, _fake_sparse_prefill,
    ),
    Operator(
        f"sparse_prefill_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) max_logits, Tensor(c!) lse) "
        "-> ()",
        _sparse_prefill_out,
    ),
)  # fmt: skip

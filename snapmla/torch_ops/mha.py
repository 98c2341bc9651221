"""``mha_prefill``: dense attention of ragged prompts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from snapmla.mha.checking import Mha, check_shapes
from snapmla.mha.prefill import new_results, prefill_now
from snapmla.torch_ops.operator import Operator

_ARGUMENTS = (
    "Tensor q, Tensor k_nope, Tensor? k_rope, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, "
    "bool split_keys"
)


def _call(*arguments: Any) -> Mha:
    """As schemas have them; without results and workspace of what allocates."""
    given = (*arguments, None, None, None)
    return Mha(*given[: len(Mha._fields)])


def _mha_prefill(*arguments: Any) -> tuple[Tensor, Tensor]:
    return prefill_now(_call(*arguments))


def _mha_prefill_out(*arguments: Any) -> None:
    prefill_now(_call(*arguments))


def _fake_mha_prefill(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = _call(*arguments)
    check_shapes(call)
    return new_results(call.q)


OPERATORS = (
    Operator(f"mha_prefill({_ARGUMENTS}) -> (Tensor, Tensor)", _mha_prefill, _fake_mha_prefill),
    Operator(
        f"mha_prefill_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? workspace) "
        "-> ()",
        _mha_prefill_out,
    ),
)

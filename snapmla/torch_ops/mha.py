"""``mha_prefill``: dense attention of ragged prompts, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snapmla.call import tracing
from snapmla.mha.backward import Backward, backward_now, check_extents, new_grads, no_rope
from snapmla.mha.checking import Mha, check_shapes, wants_gradients
from snapmla.mha.gradients import Gradients, attend
from snapmla.mha.prefill import new_results, prefill_now, run
from snapmla.torch_ops.operator import Operator

_LENGTHS = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float softmax_scale, bool causal"
)
_KEYS = "Tensor q, Tensor k_nope, Tensor? k_rope, Tensor v"
_ARGUMENTS = f"{_KEYS}, {_LENGTHS}, bool split_keys"
_GRADIENTS = (
    f"Tensor dout, Tensor? dlse, {_KEYS}, Tensor out, Tensor lse, {_LENGTHS}, bool zero_rest"
)


def _call(*arguments: Any) -> Mha:
    """Makes the call from a schema's arguments; without results and workspace of what allocates."""
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


def _above_prefill(*given: Any) -> tuple[Tensor, Tensor]:
    """``mha_prefill`` where autograd may record."""
    call = _call(*given)
    if torch.is_grad_enabled() and wants_gradients(call.q, call.k_nope, call.v, call.k_rope):
        return attend(call, run)
    with tracing.below_autograd():
        made: tuple[Tensor, Tensor] = torch.ops.snapmla.mha_prefill(*given)
        return made


def _backward(*arguments: Any) -> Backward:
    """Makes the call from a schema's arguments, likewise."""
    given = (*arguments, *(None,) * 5)
    return Backward(*given[: len(Backward._fields)])


def _mha_prefill_backward(*arguments: Any) -> tuple[Tensor, ...]:
    call = _backward(*arguments)
    dq, dk, rope, dv = backward_now(call)
    return dq, dk, no_rope(call.q) if rope is None else rope, dv


def _mha_prefill_backward_out(*arguments: Any) -> None:
    backward_now(_backward(*arguments))


def _fake_mha_prefill_backward(*arguments: Any) -> tuple[Tensor, ...]:
    call = _backward(*arguments)
    check_extents(call)
    return new_grads(call)


def _above_backward(*given: Any) -> tuple[Tensor, ...]:
    """``mha_prefill_backward`` where autograd may record: a derivative of it is refused."""
    if torch.is_grad_enabled() and wants_gradients(*given):
        dq, dk, rope, dv = Gradients.apply(*given)  # type: ignore[no-untyped-call]
        return dq, dk, no_rope(dq) if rope is None else rope, dv
    with tracing.below_autograd():
        grads: tuple[Tensor, ...] = torch.ops.snapmla.mha_prefill_backward(*given)
        return grads


OPERATORS = (
    Operator(
        f"mha_prefill({_ARGUMENTS}) -> (Tensor, Tensor)", _mha_prefill, _fake_mha_prefill,
        _above_prefill,
    ),
    Operator(
        f"mha_prefill_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? workspace) "
        "-> ()",
        _mha_prefill_out,
    ),
    Operator(
        f"mha_prefill_backward({_GRADIENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
        _mha_prefill_backward, _fake_mha_prefill_backward, _above_backward,
    ),
    Operator(
        f"mha_prefill_backward_out({_GRADIENTS}, Tensor(a!) dq, Tensor(b!) dk_nope, "
        "Tensor(c!)? dk_rope, Tensor(d!) dv, Tensor(e!)? workspace) -> ()",
        _mha_prefill_backward_out,
    ),
)  # fmt: skip

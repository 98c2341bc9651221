"""Gradients of ``mha_prefill`` by autograd: ``attend`` is the call that has them.

Eager calls, the operators of ``torch.ops.snapmla`` and transforms of ``torch.func`` go through the
same two functions.  ``_Attend`` keeps what was given, out and LSE; its backward is ``Gradients``,
which has none of its own.  Rows of no sequence get gradients of 0: whoever sums over all tokens,
as a projection's weight does, would else sum what memory held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from snapmla import checks
from snapmla.call import tracing
from snapmla.mha import backward
from snapmla.mha.checking import Mha, check_shapes

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor]
Run = Callable[[Mha], Results]
_GIVEN = 11  # arguments of mha_prefill, without what it writes
_ONCE = "its gradients have none of their own: leave create_graph out"


def attend(call: Mha, run: Run) -> Results:
    """``mha_prefill`` of tensors of which some require a gradient.

    Args:
        run: the call without gradients.

    Raises:
        TypeError, ValueError: naming the argument; of 256 channels, and of memory for results.
        VariantError: as ``mha_prefill``; the backward's variants are asked for by the backward.
    """
    check_shapes(call)
    backward.check_channels(int(call.q.shape[-1]))
    for name in ("out", "lse", "workspace"):
        if getattr(call, name) is not None:
            hint = "autograd keeps results: leave it out, or call it under torch.no_grad()"
            checks.value_error(name, "None where gradients are wanted", "a tensor", hint)
    if tracing.by_dynamo():
        return run(call)  # an operator, which AOTAutograd differentiates
    made: Results = _Attend.apply(run, *call[:_GIVEN])  # type: ignore[no-untyped-call]
    return made


class _Attend(torch.autograd.Function):
    """``mha_prefill``; arguments are what runs it, and the first of ``Mha``."""

    @staticmethod
    def forward(run: Run, *given: Any) -> Results:
        return run(Mha._make((*given, None, None, None)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        _, q, k_nope, k_rope, v, cu_q, cu_k, *options = inputs
        ctx.save_for_backward(q, k_nope, k_rope, v, *output, cu_q, cu_k)
        ctx.options = options
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        none = (None,) * (1 + _GIVEN)
        if dout is None and dlse is None:
            return none
        q, k_nope, k_rope, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else _rows(dout)
        longest_q, longest_k, scale, causal, _ = ctx.options
        given = (
            dout, dlse, q, k_nope, k_rope, v, out, lse, cu_q, cu_k, longest_q, longest_k, scale,
            causal, True,
        )  # fmt: skip
        if torch.is_grad_enabled():
            dq, dk, rope, dv = Gradients.apply(*given)  # type: ignore[no-untyped-call]
        else:
            dq, dk, rope, dv = _gradients(*given)
        return None, dq, dk, rope, dv, *none[5:]

    @staticmethod
    def vmap(*_: Any) -> Any:
        tracing.refuse_vmap()


class Gradients(torch.autograd.Function):
    """``mha_prefill_backward``; arguments are the first of ``Backward``."""

    @staticmethod
    def forward(*given: Any) -> backward.Grads:
        return _gradients(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        checks.value_error("mha_prefill", "a first derivative", "a second one", _ONCE)

    @staticmethod
    def vmap(*_: Any) -> Any:
        tracing.refuse_vmap()


def _gradients(*given: Any) -> backward.Grads:
    return backward.run(backward.Backward._make((*given, *(None,) * 5)))


def _rows(dout: Tensor) -> Tensor:
    """A gradient as kernels take it: whoever sums all of ``out`` gives one element, expanded."""
    *outer, inner = dout.stride()
    step = checks.ALIGN // dout.element_size()
    sound = inner == 1 and all(n <= 1 or (s and not s % step) for n, s in zip(dout.shape, outer))
    if sound and not (checks.address_of(dout) or 0) % checks.ALIGN:
        return dout
    return dout.clone(memory_format=torch.contiguous_format)

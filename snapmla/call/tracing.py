"""Choice of a call: to be recorded, as operators of ``torch.ops.snapmla``, or to launch now.

Kernels take addresses.  What a tracer hands over (FakeTensors, proxies, wrapper subclasses) has
none, and what a dispatch mode watches would be invisible to it.  So every public call asks here:
``wanted`` says that it must go through the operators, which PyTorch's dispatcher brings to whoever
listens, and on to the kernels where there is memory.  Transforms of ``torch.func`` are refused: but
for ``mha_prefill``, which ``torch.func.grad`` takes, operators have no gradients, and their batch
is an argument's dimension.

The private names of PyTorch that the switch needs are all in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import _symbolic_trace
from torch.utils import _python_dispatch

from snapmla import checks

_Result = TypeVar("_Result")
_BATCH = "sequences are dimension b of every argument: call it once outside of vmap"
_NO_GRADIENTS = "there are no gradients: call it outside of the transform, on plain tensors"

by_dynamo = torch.compiler.is_dynamo_compiling
# Dispatch modes of this thread (user modes, fake, proxy, functional); those being run are off it.
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", None) or (
    lambda: len(_python_dispatch._get_current_dispatch_mode_stack())
)
_transforms: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", None) or (
    lambda: torch._C._functorch.maybe_current_level() is not None
)
# Holds while an operator's autograd kernel calls the operator itself.
below_autograd: Any = torch._C._AutoDispatchBelowAutograd
_fx: Any = _symbolic_trace
# Whether torch.fx has its flag in the module; a thread has its own since torch 2.14.
_FX_FLAG = hasattr(_fx, "_is_fx_tracing_flag")


def active() -> bool:
    """True if anything records calls now.  On every call: about 0.1 us.

    The flag of torch.fx stands for ``make_fx(pre_dispatch=True)``, whose mode is on a stack of its
    own that takes longer to ask.

    Raises:
        ValueError: inside a transform of ``torch.func``.
    """
    if by_dynamo():
        return True
    if _transforms():
        refuse_transforms()
    return _modes() > 0 or (_fx._is_fx_tracing_flag if _FX_FLAG else _fx._get_is_fx_tracing())


def plain(*values: Any) -> bool:
    """True if kernels may take the addresses of all tensors among ``values``.

    Subclasses of torch.Tensor may have none; of the package's own classes, of tuples and lists the
    tensors in them count, anything else does not.
    """
    for value in values:
        if value is None or value.__class__ in checks.PLAIN:  # quicker than isinstance
            continue
        if isinstance(value, torch.Tensor):
            checks.not_nested("snapmla", value)
            return False
        if isinstance(value, (tuple, list)):
            if not plain(*value):
                return False
        elif not getattr(value, "plain", True):
            return False
    return True


def wanted(*values: Any) -> bool:
    """True if a call with these arguments must be recorded.

    Raises:
        ValueError: as ``active``.
    """
    return active() or not plain(*values)


def functionalises() -> bool:
    """True if the tracer replaces writes by new values, for which it must know what is aliased."""
    if torch.compiler.is_compiling():
        return True
    keys = torch._C._TorchDispatchModeKey
    return torch._C._get_dispatch_mode(keys.FUNCTIONAL) is not None


def storage_of(value: torch.Tensor) -> int | None:
    """Number that tells a tensor's memory from another's; None for a stand-in that has none.

    A FakeTensor has no address, but shares a storage wherever the tensor it stands for does.  None
    under torch.compile and torch.export, which make new values of what is written and would lose
    what lies beside the view that they know.
    """
    if torch.compiler.is_compiling():
        return None
    if isinstance(value, FakeTensor):
        return value.untyped_storage()._cdata
    return value.untyped_storage().data_ptr() if plain(value) else None


def between_graphs(function: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
    """Calls ``function`` eagerly between two graphs of Dynamo: it plans, which is for the host."""
    from snapmla.call import graph_break

    return graph_break.call(function, *arguments, **options)


def refuse_vmap() -> NoReturn:
    """Raises ValueError: a call under ``torch.vmap``, of a function that has gradients."""
    checks.value_error("snapmla", "a call outside of torch.func", "one inside of vmap", _BATCH)


def refuse_transforms() -> None:
    """Raises ValueError inside a transform of ``torch.func``: says which and what to do instead."""
    if not _transforms():
        return
    interpreter = torch._C._functorch.peek_interpreter_stack()
    kind = "a transform" if interpreter is None else interpreter.key().name.lower()
    hint = _BATCH if kind == "vmap" else _NO_GRADIENTS
    checks.value_error("snapmla", "a call outside of torch.func", f"one inside of {kind}", hint)

"""Operators: their parts, and their definition in a library of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

NAMESPACE = "snapmla"


def nothing(*_: Any, **__: Any) -> None:
    """Fake of an operator that returns nothing."""


class Operator(NamedTuple):
    """One operator.

    Attributes:
        schema: in torch's language; programs that were saved hold it.
        real: on tensors with memory.
        fake: on shapes alone.
        autograd: what runs above it if it has gradients.  The others are for inference: they fall
            through, and their results never require grad, as those of eager calls.
    """

    schema: str
    real: Callable[..., Any]
    fake: Callable[..., Any] = nothing
    autograd: Callable[..., Any] | None = None


def define(
    library: torch.library.Library,
    schema: str,
    real: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
) -> None:
    """Defines one operator.

    Args:
        real: on tensors with memory. fake: on shapes alone.
        autograd: what runs above ``real`` where gradients may be wanted, such as ``apply`` of a
            ``torch.autograd.Function``; None for inference.
    """
    name = schema.split("(")[0]
    # tensors must arrive with the strides that the caller gave them
    library.define(schema, tags=(torch.Tag.needs_exact_strides,))
    for key in ("CUDA", "CPU"):
        library.impl(name, real, key)
    library.impl(name, autograd or torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)

"""Absorbed queries by token, where vLLM's layers leave them by head.

A layer multiplies queries by ``W_UK_T`` a head at a time, so its product (h, n, 512) lies by head
(0.26, and the layer of DeepSeek-V3.2 that CUDA builds use, in 0.33 too), and what it hands on,
(n, h, 512), has no even distance between rows.  Kernels copy rows by one: such queries had to be
concatenated with their RoPE channels, a launch a layer.  ``keep`` puts a parameter in the place of
``W_UK_T`` that has the product written by token, which a matrix product does at no cost.  Values
are the same numbers, and all else is done with the parameter's memory as before.

Not in batch-invariant mode: vLLM's product of that mode is another function, which takes no result
to write into.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

NAME = "W_UK_T"


class ByToken(torch.nn.Parameter):
    """(h, channels, 512), whose product with (h, n, channels) is written as (n, h, 512)."""

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, given: Any = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        told = dict(named or {})
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.bmm and len(given) == 2 and isinstance(given[1], cls):
                told["out"] = _by_token(given[0], given[1], told.get("out"))
            return function(*given, **told)


def _by_token(q: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """(h, n, 512) over memory (n, h, 512): new, or that of ``out``, whose strides are changed."""
    heads, tokens, _ = q.shape
    width = weight.shape[-1]
    if out is None:
        return q.new_empty(tokens, heads, width).transpose(0, 1)
    if out.is_contiguous() and out.shape == (heads, tokens, width):
        out.as_strided_(out.shape, (width, heads * width, 1))
    return out


def keep(layer: Any) -> None:
    """Keeps the layer's absorbed queries by token from its next step on.  May be called again."""
    weight = getattr(layer, NAME, None)
    if isinstance(weight, torch.Tensor) and weight.ndim == 3 and not isinstance(weight, ByToken):
        setattr(layer, NAME, ByToken(weight.data, requires_grad=False))

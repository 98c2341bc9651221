"""Batch invariance of vLLM beside attention: a norm that sums a row in one order.

vLLM's kernel that adds a residual and norms (``fused_add_rms_norm``) sums a row with up to 1024
threads in steps of fewer than 256 tokens, and with 256 threads in larger steps, even with
``VLLM_BATCH_INVARIANT`` (vLLM 0.26; pull request 48391 of vllm-project/vllm mended it later).  So a
short prompt has other bits alone than within a step of other prompts.  If the kernel does so, the
residual is added first and the sum goes through vLLM's own batch-invariant norm, which runs one
program a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

FEW, MANY, WIDTH = 128, 1024, 512  # rows on both sides of 256; channels of a row
NAME = "rms_norm_batch_invariant"

Norm = Callable[..., Any]


def serve(device: torch.device) -> bool:
    """Makes vLLM's batch-invariant norm one, in this process; says whether that was needed.

    May be called again.  Norms are looked up at each call, so models that exist get it, too.
    """
    if device.type != "cuda":
        return False
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import layernorm

    theirs = getattr(layernorm, NAME)
    if isinstance(theirs, RowByRow):
        return True
    needed = depends_on_rows(ops.fused_add_rms_norm, device)
    if needed:
        setattr(layernorm, NAME, RowByRow(theirs))
    return needed


def depends_on_rows(fused: Norm, device: torch.device) -> bool:
    """True if rows come out otherwise within ``MANY`` than within ``FEW``.

    Args:
        fused: (input, residual, weight, epsilon), both of the first in place.
    """
    generator = torch.Generator().manual_seed(0)
    # float32, where all bits of a row's factor are seen; vLLM may have set other defaults
    rows = torch.randn(MANY, WIDTH, generator=generator, dtype=torch.float32, device="cpu")
    rows, weight = rows.to(device), torch.ones(WIDTH, dtype=torch.float32, device=device)
    whole, parts = rows.clone(), rows.clone()
    fused(whole, torch.zeros_like(whole), weight, 1e-6)
    for part in parts.split(FEW):
        fused(part, torch.zeros_like(part), weight, 1e-6)
    return not torch.equal(whole, parts)


class RowByRow:
    """vLLM's batch-invariant norm, whose residual is added before.

    Attributes:
        theirs: (input, weight, eps, residual=).
    """

    def __init__(self, theirs: Norm) -> None:
        self.theirs = theirs
        functools.update_wrapper(self, theirs)

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float = 1e-6,
        residual: torch.Tensor | None = None,
    ) -> Any:
        if residual is None:
            return self.theirs(input, weight, eps)
        residual.add_(input)  # in place, as the kernel does it
        return self.theirs(residual, weight, eps), residual

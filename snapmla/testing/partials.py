"""Partial rows of split sequences in torch, bit for bit as the kernels keep them.

The format is ``dsl_kernels/combine/partials.py``'s: fp16 channels, an exponent byte for each 16.
"""

from __future__ import annotations

import torch

from dsl_kernels.formats.dims import EXPONENT_CHANNELS, KV_LORA_RANK

LEAST, MOST = 15, 254


def encode(rows: torch.Tensor, channels: int = EXPONENT_CHANNELS) -> torch.Tensor:
    """fp32 rows (..., 512) as partial rows, fp16 (..., 528).

    Args:
        channels: that share an exponent, a multiple of 16.
    """
    groups = rows.float().unflatten(-1, (-1, channels))
    # what is larger is larger as bits too; NaN, which kernels skip, only where nothing else is
    largest = groups.abs().nan_to_num(0.0, torch.inf).amax(-1, keepdim=True)
    largest = torch.where(groups.isnan().all(-1, keepdim=True), torch.nan, largest)
    exponents = (largest.view(torch.int32) >> 23).clamp(LEAST, MOST)
    stored = (groups * ((268 - exponents) << 23).view(torch.float32)).half().flatten(-2)
    repeated = exponents.expand(*exponents.shape[:-1], channels // EXPONENT_CHANNELS)
    return torch.cat([stored, repeated.flatten(-2).to(torch.uint8).view(torch.float16)], -1)


def decode(partials: torch.Tensor) -> torch.Tensor:
    """Partial rows, fp16 (..., 528), as fp32 (..., 512)."""
    stored, exponents = partials.split((KV_LORA_RANK, partials.shape[-1] - KV_LORA_RANK), -1)
    exponents = exponents.contiguous().view(torch.uint8).int()
    factor = ((exponents - 14) << 23).view(torch.float32)
    return (stored.float().unflatten(-1, (-1, EXPONENT_CHANNELS)) * factor[..., None]).flatten(-2)

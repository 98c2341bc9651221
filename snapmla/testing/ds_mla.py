"""Rows of format ``fp8_ds_mla`` in plain torch: what ``append_kv`` writes and ``fetch_dequant``
reads, byte for byte."""

from __future__ import annotations

import torch
from torch import Tensor

from dsl_kernels.dims import E4M3_MAX
from dsl_kernels.cache_records.ds_mla import GROUPS, LEAST_SCALE, ROPE_AT, SCALES_AT
from snapmla.testing.rounding import FP8, to_e4m3

FRACTION = 0x7FFFFF  # of an fp32 number
NAN_CONTENT, NAN_SCALE, NAN_ROPE = 0x7F, 0x7FC00000, 0x7FFF  # bits in a row of NaN


def quantize_ds_mla_rows(c: Tensor, rope: Tensor, *, power_of_two: bool = False) -> Tensor:
    """The bytes of tokens: 512 of e4m3 content, four fp32 scales, 64 bf16 RoPE channels.

    Args:
        c: (..., 512) floating point.
        rope: (..., 64) floating point.
        power_of_two: rounds scales up to powers of two.

    Returns:
        uint8 (..., 656).  A scale is max(max|c| / 448, 2^-126) of its 128 channels, in fp32 with
        IEEE's quotient; content is e4m3(c / scale), to nearest even, saturating; RoPE is rounded
        to bf16.  A token with a NaN or infinity is NaN in content, scales and RoPE.

    Raises:
        RuntimeError: from torch, if shapes do not go together.

    Source: vLLM's ``concat_and_cache_ds_mla_kernel``; that such a token is NaN is our own.
    """
    good = torch.isfinite(c).all(-1) & torch.isfinite(rope).all(-1)
    groups = c.float().unflatten(-1, (GROUPS, -1))
    scale = (groups.abs().amax(-1) / E4M3_MAX).clamp_min(LEAST_SCALE)
    if power_of_two:
        bits = scale.view(torch.int32)
        scale = ((bits + FRACTION) & ~FRACTION).view(torch.float32)
    content = to_e4m3(groups / scale[..., None]).flatten(-2).view(torch.uint8)
    fields = (
        torch.where(good[..., None], content, NAN_CONTENT),
        torch.where(good[..., None], scale.view(torch.int32), NAN_SCALE),
        torch.where(good[..., None], rope.bfloat16().view(torch.int16), NAN_ROPE),
    )
    return torch.cat([field.contiguous().view(torch.uint8) for field in fields], -1)


def dequantize_ds_mla_rows(
    rows: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """What ``fetch_dequant`` computes: content * scale in fp32, rounded to ``dtype``, and RoPE.

    Args:
        rows: uint8 (..., 656), contiguous rows.
        dtype: of the result.

    Returns:
        (c_kv (..., 512), k_rope (..., 64)).  A group whose scale is 0 is zeros, whatever its
        content is.

    Raises:
        RuntimeError: from torch, if ``rows`` has another width.

    Source: vLLM's ``cp_gather_and_upconvert_fp8_kv_cache``; groups of scale 0 are our own.
    """
    rows = rows.contiguous()
    content = rows[..., :SCALES_AT].contiguous().view(FP8).float().unflatten(-1, (GROUPS, -1))
    scale = rows[..., SCALES_AT:ROPE_AT].contiguous().view(torch.float32)[..., None]
    rope = rows[..., ROPE_AT:].contiguous().view(torch.bfloat16)
    c_kv = torch.where(scale == 0, 0.0, content * scale).flatten(-2)
    return c_kv.to(dtype), rope.to(dtype)

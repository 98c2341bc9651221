"""Tokens of records that are bytes in plain torch: what ``append_kv`` writes and ``fetch_dequant``
reads, byte for byte, as the record (``dsl_kernels.cache_records``) says."""

from __future__ import annotations

import torch
from torch import Tensor

from dsl_kernels.cache_records.record import ZEROS, Record
from dsl_kernels.dims import E4M3_MAX
from snapmla.byte_cache import DTYPES, Fields
from snapmla.testing.rounding import FP8, to_e4m3

FRACTION, EXPONENT_AT = 0x7FFFFF, 23  # of an fp32 number
NAN_CONTENT, NAN_SCALE, NAN_ROPE = 0x7F, 0x7FC00000, 0x7FFF  # bits in a token of NaN


def quantize_tokens(record: Record, c: Tensor, rope: Tensor, power_of_two: bool) -> Fields:
    """Content, RoPE and scales as ``append_kv`` stores tokens.

    Args:
        c: (..., content channels) floating point.
        rope: (..., RoPE channels) floating point.
        power_of_two: rounds fp32 scales up to powers of two; those of ``ue8m0`` cannot but be.
    """
    assert record.scale is not None
    good = (torch.isfinite(c).all(-1) & torch.isfinite(rope).all(-1))[..., None]
    groups = c.float().unflatten(-1, (-1, record.group))
    scale = (groups.abs().amax(-1) / E4M3_MAX).clamp_min(record.least_scale)
    if power_of_two or record.powers:
        bits = scale.view(torch.int32)
        scale = ((bits + FRACTION) & ~FRACTION).view(torch.float32)
    content = to_e4m3(groups / scale[..., None]).flatten(-2).view(torch.uint8)
    bits = torch.where(good, scale.view(torch.int32), NAN_SCALE)
    if record.powers:
        bits = (bits >> EXPONENT_AT).to(torch.uint8)
    return (
        torch.where(good, content, NAN_CONTENT).view(FP8),
        torch.where(good, rope.bfloat16().view(torch.int16), NAN_ROPE).view(torch.bfloat16),
        bits.view(DTYPES[record.scale.dtype]),
    )


def dequantize_tokens(record: Record, fields: Fields, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(c_kv, k_rope) as ``fetch_dequant`` gives them: content * scale in fp32, rounded to
    ``dtype``, and RoPE."""
    content, rope, scale = fields
    if record.powers:  # torch makes 2^-127 of byte 0 and NaN of 255, too
        scale = scale.float()
    groups, scale = content.float().unflatten(-1, (-1, record.group)), scale[..., None]
    values = groups * scale
    if record.zero_scale == ZEROS:
        values = torch.where(scale == 0, 0.0, values)
    return values.flatten(-2).to(dtype), rope.to(dtype)

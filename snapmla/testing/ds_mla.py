"""Rows of format ``fp8_ds_mla`` in plain torch: what ``append_kv`` writes and ``fetch_dequant``
reads, byte for byte."""

from __future__ import annotations

import torch
from torch import Tensor

from dsl_kernels.formats.ds_mla import FORMAT, ROPE_AT, SCALES_AT
from snapmla.testing.byte_records import dequantize_tokens, quantize_tokens
from snapmla.testing.rounding import FP8


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
    content, rope, scale = quantize_tokens(FORMAT, c, rope, power_of_two)
    return torch.cat([x.contiguous().view(torch.uint8) for x in (content, scale, rope)], -1)


def dequantize_ds_mla_rows(
    rows: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Dequantises rows as ``fetch_dequant`` does: content * scale in fp32, rounded to ``dtype``.

    Args:
        rows: uint8 (..., 656); another width is not checked for.
        dtype: of the result.

    Returns:
        (c_kv (..., 512), k_rope (..., 64)), both of ``dtype``.  A group whose scale is 0 is zeros,
        whatever its content is.

    Raises:
        RuntimeError: from torch, if bytes behind the scales are no whole BF16 channels.

    Source: vLLM's ``cp_gather_and_upconvert_fp8_kv_cache``; groups of scale 0 are our own.
    """
    rows = rows.contiguous()
    fields = (
        rows[..., :SCALES_AT].contiguous().view(FP8),
        rows[..., ROPE_AT:].contiguous().view(torch.bfloat16),
        rows[..., SCALES_AT:ROPE_AT].contiguous().view(torch.float32),
    )
    return dequantize_tokens(FORMAT, fields, dtype)

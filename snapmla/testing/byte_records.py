"""Tokens of records that are bytes in plain torch: what ``append_kv`` writes and ``fetch_dequant``
reads, byte for byte, as the record (``dsl_kernels.formats``) says."""

from __future__ import annotations

import torch
from torch import Tensor

from dsl_kernels.formats.dims import E4M3_MAX
from dsl_kernels.formats.format import ZEROS, Format
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache.byte_cache import DTYPES, Fields, fields_of
from snapmla.testing.rounding import FP8, to_e4m3

FRACTION, EXPONENT_AT = 0x7FFFFF, 23  # of an fp32 number
NAN_CONTENT, NAN_SCALE, NAN_ROPE = 0x7F, 0x7FC00000, 0x7FFF  # bits in a token of NaN


def quantize_tokens(record: Format, c: Tensor, rope: Tensor, power_of_two: bool) -> Fields:
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


def dequantize_tokens(record: Format, fields: Fields, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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


def quantize_pages(
    fmt: str, c_kv: Tensor, k_rope: Tensor | None, page_size: int, *, scale_fmt: str | None = None
) -> Tensor:
    """Pages of a format of bytes that hold tokens one after another.

    Args:
        fmt: name of the format, such as ``fp8_ds_mla``.
        c_kv: (n, content channels of the format) floating point.
        k_rope: (n, RoPE channels of the format) floating point; None of a format without.
        page_size: tokens of a page.
        scale_fmt: as of ``PagedKVCache``: None for the format's scales, ``ue8m0`` for powers of
            two.

    Returns:
        uint8 (pages, page_size, 1, bytes of a token): what ``append_kv`` writes into zeros.  Where
        a page has several planes, the last dimensions are such in name only.

    Raises:
        ValueError: ``fmt`` is no format of bytes.
        RuntimeError: from torch, if shapes do not go together.

    Source: the rules are the engines' (docs/formats.md); that a token with NaN or infinity is NaN
    everywhere is our own.
    """
    record, n = _record(fmt), len(c_kv)
    k_rope = c_kv[:, :0] if k_rope is None else k_rope
    fields = quantize_tokens(record, c_kv, k_rope, scale_fmt is not None)
    pages = torch.zeros(-(-n // page_size), page_size, 1, record.token_bytes, dtype=torch.uint8)
    slots = torch.arange(n)
    at = slots // page_size, slots % page_size
    for place, field in zip(fields_of(record, pages), fields, strict=True):
        if field.dtype.itemsize == 1:
            place, field = place.view(torch.uint8), field.view(torch.uint8)
        place[at] = field
    return pages


def dequantize_pages(
    fmt: str, pages: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Dequantises pages of a byte format, as ``fetch_dequant`` reads them.

    Args:
        fmt: name of the format.
        pages: uint8 (pages, page_size, 1, bytes of a token).
        dtype: of the result.

    Returns:
        (c_kv (pages * page_size, content channels), k_rope (pages * page_size, RoPE channels)).

    Raises:
        ValueError: ``fmt`` is no format of bytes.
        RuntimeError: from torch, if ``pages`` has another width.

    Source: the rules are the engines' (docs/formats.md).
    """
    record = _record(fmt)
    c_kv, k_rope = dequantize_tokens(record, fields_of(record, pages), dtype)
    return c_kv.flatten(0, 1), k_rope.flatten(0, 1)


def _record(fmt: str) -> Format:
    """The record of a format of bytes."""
    checks.choice("fmt", fmt, [name for name, each in FORMATS.items() if each.named])
    return FORMATS[fmt]

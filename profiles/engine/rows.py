"""Random rows in the caches of a DSA model, in the place of prompts that were read."""

from __future__ import annotations

import torch
from torch import Tensor

LATENTS, TILE, ROPE = 512, 128, 64  # channels of a row: FP8 by tiles that share a scale, and BF16
KEYS = 128  # channels of an index key
KV_BYTES = LATENTS + LATENTS // TILE * 4 + ROPE * 2
INDEX_BYTES = KEYS + 4
SPREAD = 100.0  # standard deviation of stored FP8 values, whose largest is 448
PAGES = 1024  # that are made at once


def fill(cache: Tensor, generator: torch.Generator | None = None) -> None:
    """Fill each page with rows of standard normal channels, in place.

    Args:
        cache: uint8 (pages, tokens, 656), vLLM's ``fp8_ds_mla``, or (pages, tokens, 132), its index
            keys: a page's keys, then its scales.  Pages may lie apart.

    Raises:
        ValueError: another shape or dtype.
    """
    if cache.dtype != torch.uint8 or cache.ndim != 3:
        raise ValueError(f"a cache of bytes in pages is wanted, got {cache.dtype} {cache.shape}")
    makers = {KV_BYTES: _kv, INDEX_BYTES: _index}
    make = makers.get(cache.shape[-1])
    if make is None:
        raise ValueError(f"rows of {cache.shape[-1]} bytes; known are {sorted(makers)}")
    for part in cache.split(PAGES):
        pages, tokens, _ = part.shape
        part.copy_(make(pages, tokens, part.device, generator).view_as(part))


def _normal(
    pages: int, values: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    return torch.randn(pages, values, device=device, generator=generator)


def _fp8(values: Tensor) -> Tensor:
    """Bytes of values times ``SPREAD``."""
    stored = (values * SPREAD).clamp_(-448.0, 448.0)
    return stored.to(torch.float8_e4m3fn).view(torch.uint8)


def _scales(pages: int, count: int, device: torch.device) -> Tensor:
    return torch.full((pages, count), 1 / SPREAD, device=device).view(torch.uint8)


def _kv(pages: int, tokens: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """uint8 (pages * tokens, 656)."""
    rows = pages * tokens
    latents = _fp8(_normal(rows, LATENTS, device, generator))
    rope = _normal(rows, ROPE, device, generator).bfloat16().view(torch.uint8)
    return torch.cat((latents, _scales(rows, LATENTS // TILE, device), rope), 1)


def _index(
    pages: int, tokens: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """uint8 (pages, tokens * 132)."""
    keys = _fp8(_normal(pages, tokens * KEYS, device, generator))
    return torch.cat((keys, _scales(pages, tokens, device)), 1)

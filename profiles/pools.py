"""Caches of benchmark size, filled in bulk on the device.

All pools of a run hold the same tokens: a chunk of bf16 latents is drawn once and every pool stores
it in its own format.  Data must be alike, because a tensor core's clock depends on what it
multiplies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from profiles.roofline import CONTENT_DIM, FORMATS, HEAD_DIM_QK, CacheFormat
from snapmla.testing.rounding import quantize_rows

CHUNK_TOKENS = 1 << 17


@dataclasses.dataclass(frozen=True)
class Latents:
    """Distribution of the cached tokens: N(mean, 1) channels, times exp(amplitude * N(0, 1))."""

    mean: float = 0.0
    amplitude: float = 0.0
    seed: int = 1

    def chunk(self, index: int, tokens: int, device: torch.device) -> torch.Tensor:
        """(tokens, 576) bf16; the same for the same ``index``."""
        rng = torch.Generator(device=device).manual_seed(self.seed * 1_000_003 + index)
        x = torch.randn(tokens, HEAD_DIM_QK, generator=rng, device=device)
        x[:, :CONTENT_DIM] += self.mean
        if self.amplitude:
            x *= torch.exp(self.amplitude * torch.randn(tokens, 1, generator=rng, device=device))
        return x.bfloat16()


class Pool:
    """Tokens in one cache format."""

    fmt: CacheFormat
    page_size: int

    def __init__(self, tokens: int, device: torch.device) -> None:
        raise NotImplementedError

    def store(self, first: int, x: torch.Tensor) -> None:
        """Stores ``x`` (n, 576) bf16 as tokens first..first+n; both multiples of the page size."""
        raise NotImplementedError

    def load(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(n, 576) float64: what the stored bytes of those tokens mean."""
        raise NotImplementedError


class RowsPool(Pool):
    """(pages, page_size, 1, 576) as they are; bf16 in pages of 64 is FlashMLA's."""

    fmt = FORMATS["bf16"]

    def __init__(
        self, tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16,
        page_size: int = 64,
    ) -> None:  # fmt: skip
        self.dtype, self.page_size = dtype, page_size
        pages = -(-tokens // self.page_size)
        shape = (pages, self.page_size, 1, HEAD_DIM_QK)
        self.cache = torch.empty(shape, dtype=self.dtype, device=device)

    def store(self, first: int, x: torch.Tensor) -> None:
        self._rows()[first : first + x.shape[0]] = x.to(self.dtype)

    def load(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._rows()[token_ids].double()

    def _rows(self) -> torch.Tensor:
        return self.cache.view(-1, HEAD_DIM_QK)


class Fp8TensorPool(RowsPool):
    """(pages, 64, 1, 576) e4m3 under one scale of 1 for the whole tensor, RoPE included."""

    fmt = FORMATS["fp8_tensor"]

    def __init__(self, tokens: int, device: torch.device) -> None:
        super().__init__(tokens, device, torch.float8_e4m3fn)

    def load(self, token_ids: torch.Tensor) -> torch.Tensor:
        # float8 has no gather kernel on every backend; its bytes do.
        rows = self._rows().view(torch.uint8)[token_ids]
        return rows.view(self.dtype).double()


class SnapPool(Pool):
    """A ``snapmla.PagedKVCache``: e4m3 content, RoPE divided by the token's scale, the scale."""

    fmt = FORMATS["snapmla"]

    def __init__(
        self, tokens: int, device: torch.device, page_size: int = 64, layout: str = "split"
    ) -> None:
        import snapmla

        self.page_size = page_size
        pages = -(-tokens // page_size)
        self.cache: Any = snapmla.PagedKVCache.allocate(
            pages, page_size=page_size, layout=layout, device=device
        )

    def store(self, first: int, x: torch.Tensor) -> None:
        slots = first + torch.arange(x.shape[0], device=x.device)
        content, rope, scale = quantize_rows(x[:, :CONTENT_DIM], x[:, CONTENT_DIM:], slots=slots)
        pages = slice(first // self.page_size, (first + x.shape[0]) // self.page_size)
        count = pages.stop - pages.start
        bytes_ = content.view(torch.uint8).view(count, self.page_size, CONTENT_DIM)
        self.cache.content_u8[pages] = bytes_
        self.cache.rope[pages] = rope.view(count, self.page_size, -1)
        self.cache.scale[pages] = scale.view(count, self.page_size)

    def load(self, token_ids: torch.Tensor) -> torch.Tensor:
        page, offset = token_ids // self.page_size, token_ids % self.page_size
        content = self.cache.content_u8[page, offset].view(torch.float8_e4m3fn)
        scale = self.cache.scale[page, offset].double()[:, None]
        return torch.cat([content.double(), self.cache.rope[page, offset].double()], 1) * scale


def fill(pools: Iterable[Pool], tokens: int, latents: Latents, device: torch.device) -> None:
    """Stores the same ``tokens`` tokens in all pools, whose sizes are multiples of 128 tokens."""
    pools = list(pools)
    for index, first in enumerate(range(0, tokens, CHUNK_TOKENS)):
        x = latents.chunk(index, min(CHUNK_TOKENS, tokens - first), device)
        for pool in pools:
            pool.store(first, x)

"""Angles, norm weights and the separate steps that a fused one must equal bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from snapmla import reference

MAX_POSITION = 200
DIAGONAL = (
    1.1  # of RoPE channels: rows of it cancel at the first two positions, with FMA they do not
)
EPS = 1e-6


@dataclass(frozen=True)
class Rotation:
    """Operands that rotate (and normalise) tokens, on the CPU.

    Attributes:
        positions: (n,); the first two of more than three have angles whose cosine is the sine or
            its opposite, the last two of more than two are outside of the table.
        cos_sin_cache: (MAX_POSITION, 64), a slice of a wider tensor.
        is_neox: which channels make a pair.
        weight: (512,) of the norm, None without one.
    """

    positions: Tensor
    cos_sin_cache: Tensor
    is_neox: bool
    weight: Tensor | None

    def steps(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """(c_kv, k_rope) as an engine's own kernels hand them over, rounded to their dtype."""
        if self.weight is not None:
            c = reference.rms_norm_rows(c, self.weight, EPS)
        positions = self.positions.view(r.shape[: max(1, r.ndim - 2)])
        return c, reference.rotate_rows(r, positions, self.cos_sin_cache, self.is_neox)


def rotation(
    n: int, in_dtype: torch.dtype, *, table: torch.dtype, index: torch.dtype, is_neox: bool,
    norm: bool = False, seed: int = 0,
) -> Rotation:  # fmt: skip
    """Angles of n tokens; positions in any order, frequencies as DeepSeek's models have them."""
    g = torch.Generator().manual_seed(seed)
    angle = torch.arange(MAX_POSITION)[:, None] * 10000.0 ** -(torch.arange(32) / 32)
    wide = torch.cat([angle.cos(), angle.sin(), torch.full_like(angle, torch.nan)], -1).to(table)
    wide[:2, :64] = 0.5**0.5
    wide[1, 32:64] *= -1
    positions = torch.randint(0, MAX_POSITION, (n,), generator=g)
    if n > 3:
        positions[:2] = torch.arange(2)
    if n > 2:
        positions[-2:] = torch.tensor([-1, MAX_POSITION])
    if n > 9:
        positions[3], positions[9] = torch.iinfo(index).max, torch.iinfo(index).min
    weight = (1 + 0.3 * torch.randn(512, generator=g)).to(in_dtype) if norm else None
    return Rotation(positions.to(index), wide[:, :64], is_neox, weight)

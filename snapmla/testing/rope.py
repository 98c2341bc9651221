"""RMS norm and rotary embedding as the fused kernels round them, in plain torch.

What ``snapmla.rope_append_kv`` and ``rope_quantize_q`` do is these, then ``quantize_rows``, bit for
bit, on CPU and on CUDA tensors: sums, products and quotients of fp32 are IEEE's on both; the square
root, which neither ``torch.rsqrt`` on a GPU nor ``torch.sqrt`` on a CPU with MKL rounds correctly,
is taken in fp64 and rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

WARP = 32
LOAD_BYTES = 16  # of a lane


def rms_norm_rows(c: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm of latents: x / sqrt(mean(x^2) + eps), rounded, times the weight, rounded.

    Args:
        c: (..., 512) bfloat16, float16 or float32.
        weight: (512,) of the same dtype.
        eps: added to the mean square.

    Returns:
        (..., 512) of the input's dtype.  fp32 in between: squares are added as a warp holds them,
        each lane its channels of one 16-byte load in order, then its loads, then lane l and l ^ 16,
        l ^ 8, ... l ^ 1.

    Raises:
        RuntimeError: from torch, if shapes do not go together.

    Source: ``DeepseekV3RMSNorm`` of Hugging Face transformers, which rounds at the same two points.
    """
    x = c.float()
    vector = LOAD_BYTES // c.element_size()
    squares = (x * x).unflatten(-1, (-1, WARP, vector))
    lanes = squares[..., 0]
    for i in range(1, vector):
        lanes = lanes + squares[..., i]
    total = lanes[..., 0, :]
    for i in range(1, lanes.shape[-2]):
        total = total + lanes[..., i, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    mean = total * (1.0 / x.shape[-1])
    mean = mean + torch.tensor(eps, dtype=torch.float32, device=c.device)
    inverse = 1.0 / mean.double().sqrt().float()
    return (x * inverse).to(c.dtype) * weight


def rotate_rows(
    x: Tensor, positions: Tensor, cos_sin_cache: Tensor, is_neox: bool = False
) -> Tensor:
    """Rotary embedding: a' = a cos - b sin, b' = b cos + a sin of each pair, rounded once.

    Args:
        x: (..., 64) bfloat16, float16 or float32.
        positions: int32 or int64, (n,) or (b, s_q): the first dimensions of x; others, as heads,
            share them.
        cos_sin_cache: (max_position, 64) float32 or x's dtype: 32 cosines, 32 sines.
        is_neox: pairs are (i, i + 32); else (2 i, 2 i + 1).

    Returns:
        (..., 64) of x's dtype.  In fp32 each product is rounded, then the sum.  NaN where the table
        has no row for the position.

    Raises:
        RuntimeError: from torch, if shapes do not go together.

    Source: RoFormer (Su et al., 2021); the table's layout and the two styles are vLLM's.
    """
    known = (positions >= 0) & (positions < len(cos_sin_cache))
    rows = cos_sin_cache[torch.where(known, positions, 0).long()].float()
    rows = torch.where(known[..., None], rows, torch.nan)
    rows = rows[(...,) + (None,) * (x.ndim - rows.ndim) + (slice(None),)]
    cos, sin = rows.chunk(2, -1)
    pairs = x.float().unflatten(-1, (2, -1) if is_neox else (-1, 2))
    axis = -2 if is_neox else -1
    a, b = pairs.unbind(axis)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), axis)
    return turned.flatten(-2).to(x.dtype)

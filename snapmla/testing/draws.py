"""Random tokens and queries that look like a real cache's, for the checks of every cache format.

Log-normal token amplitudes, optional channel bias, RoPE outliers; fp32, to be rounded to what is
stored.  What is drawn depends on the generator and the shapes alone, not on the options, so that
distributions can be compared draw by draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK as D_V
from dsl_kernels.formats.dims import QK_ROPE_HEAD_DIM as D_ROPE

SOFTMAX_SCALE = 192**-0.5
AMPLITUDE_STD = 0.3
SINK_CHANNEL = 63  # of RoPE, for sinks: elsewhere 0 in tokens, and 1 / softmax_scale in queries
OUTLIER_CHANNELS = 4


def draw_tokens(
    length: int, generator: torch.Generator, device: torch.device, *, mean: float = 0.0,
    amplitude_std: float = AMPLITUDE_STD, rope_outlier: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(c_kv (length, 512), k_rope (length, 64)) of a sequence.

    Args:
        mean: of the latent channels, in units of their standard deviation.
        amplitude_std: of the logarithm of the token amplitudes.
        rope_outlier: magnitude that some RoPE channels reach (1e3 in real caches); 0: none.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    amplitude = torch.exp(amplitude_std * normal(length, 1))
    c = (normal(length, D_V) + mean) * amplitude
    rope = normal(length, D_ROPE)
    if rope_outlier:
        rope[:, :OUTLIER_CHANNELS] *= rope_outlier / 3
        rope.clamp_(-rope_outlier, rope_outlier)
    rope[:, SINK_CHANNEL] = 0
    return c, rope


def draw_queries(
    shape: Sequence[int], generator: torch.Generator, device: torch.device, *,
    logit_std: float = 1.0, rope_logit_std: float | None = None,
    amplitude_std: float = AMPLITUDE_STD, rope_outlier: float = 0.0,
    softmax_scale: float = SOFTMAX_SCALE,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(q_nope (*shape, 512), q_rope (*shape, 64)) that give the logits the wanted spread.

    Channel means are removed, so that a biased latent does not shift every logit.

    Args:
        logit_std, rope_logit_std: standard deviations of the content's and of RoPE's logits,
            natural units; the second is the first's where it is None.
        amplitude_std, rope_outlier: the tokens'.
        softmax_scale: by which the logits will be multiplied.
    """
    nope = torch.randn(*shape, D_V, generator=generator, device=device)
    rope = torch.randn(*shape, D_ROPE, generator=generator, device=device)
    nope -= nope.mean(-1, keepdim=True)
    spread = math.sqrt(D_V) * math.exp(amplitude_std**2)
    nope *= logit_std / (softmax_scale * spread)
    rope_std = logit_std if rope_logit_std is None else rope_logit_std
    if rope_outlier:
        rope[..., :OUTLIER_CHANNELS] /= rope_outlier / 3
    rope *= rope_std / (softmax_scale * math.sqrt(D_ROPE - 1))
    rope[..., SINK_CHANNEL] = 1 / softmax_scale
    return nope, rope

"""Outliers put into a trained model: some leave its function as it is, some change it and say so.

A small model does not grow the spread of a large one (SnapMLA, Figure 3).  The function-preserving
dials move scale between a layer's weights: what a key gains, its query loses.  All their factors
are powers of two, so that a bf16 model keeps its bits, not only its function.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profiles.model.model import Latents, Layer, MlaModel

LOUD_PAIRS = 8  # of the 32 rotary pairs: those that turn slowest, as in large models
LOUD_CHANNELS = 16  # of the 512
CHANNEL_GAINS = (4.0, 16.0, 64.0)


def power_of_two(x: float) -> float:
    """The nearest power of two, by ratio."""
    return 2.0 ** round(math.log2(x))


# ------------------------------------------------------------------------ function-preserving


@torch.no_grad()
def scale_rope(layer: Layer, gains: Tensor) -> None:
    """Keys of rotary pair j times ``gains[j]``, queries divided by it.

    A gain of a pair commutes with its rotation; pair j is channels 2j and 2j + 1.
    """
    attention = layer.self_attn
    config = attention.config
    channels = gains.repeat_interleave(2)[:, None]
    keys = attention.kv_a_proj_with_mqa.weight
    keys[config.kv_lora_rank :] *= channels.to(keys)
    queries = attention.q_proj.weight.unflatten(0, (config.num_attention_heads, -1))
    queries[:, config.qk_nope_head_dim :] /= channels.to(queries)


@torch.no_grad()
def scale_latent(layer: Layer, gains: Tensor) -> None:
    """Latent channels times ``gains`` (512,) at their norm, divided by it where they are read."""
    attention = layer.self_attn
    norm, read = attention.kv_a_layernorm.weight, attention.kv_b_proj.weight
    norm.mul_(gains.to(norm))
    read.div_(gains.to(read))


def with_rope_to(model: MlaModel, latents: list[Latents], reach: float) -> MlaModel:
    """A copy whose slowest rotary pairs reach about ``reach``, within a factor of sqrt(2).

    Args:
        latents: of each layer on typical text; they say how far the pairs reach now.
    """
    made = copy.deepcopy(model)
    for layer, seen in zip(made.layers, latents, strict=True):
        pairs = seen.k_rope.float().unflatten(-1, (-1, 2)).abs().amax((0, 1, 3))
        gains = torch.ones_like(pairs)
        for j in range(len(pairs) - LOUD_PAIRS, len(pairs)):
            gains[j] = power_of_two(max(reach / float(pairs[j]), 1.0))
        scale_rope(layer, gains)
    return made


def with_latent_gain(model: MlaModel, gain: float) -> MlaModel:
    """A copy whose whole latent is ``gain`` times as large; a power of two."""
    made = copy.deepcopy(model)
    for layer in made.layers:
        scale_latent(layer, torch.full((model.config.kv_lora_rank,), gain))
    return made


def with_loud_channels(model: MlaModel, gain: float, seed: int = 0) -> MlaModel:
    """A copy with a few channels of each layer's latent ``gain`` times as large."""
    made = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for layer in made.layers:
        gains = torch.ones(model.config.kv_lora_rank)
        gains[torch.randperm(len(gains), generator=generator)[:LOUD_CHANNELS]] = gain
        scale_latent(layer, gains)
    return made


@dataclass(frozen=True)
class Dial:
    """A function-preserving dial: ``turn(model, latents on typical text)`` gives a copy."""

    name: str
    kind: str
    value: float
    turn: Callable[[MlaModel, list[Latents]], MlaModel]


def _rope(reach: float) -> Dial:
    return Dial(f"rope {reach:g}", "rope", reach, lambda m, seen: with_rope_to(m, seen, reach))


def _gain(decade: int) -> Dial:
    # outward, so that 1e-2 and 1e3 are reached
    exponent = decade * math.log2(10)
    gain = 2.0 ** (math.floor(exponent) if decade < 0 else math.ceil(exponent))
    name = f"gain 1e{decade}"
    return Dial(name, "gain", gain, lambda m, seen: with_latent_gain(m, gain))


def _channels(gain: float) -> Dial:
    name = f"channels {gain:g}"
    return Dial(name, "channels", gain, lambda m, seen: with_loud_channels(m, gain))


NATURAL = Dial("natural", "natural", 1.0, lambda m, seen: m)
DIALS = (
    NATURAL,
    *(_rope(reach) for reach in (30.0, 100.0, 300.0, 1000.0)),
    *(_gain(decade) for decade in (-3, -2, -1, 1, 2, 3)),
    *(_channels(gain) for gain in CHANNEL_GAINS),
)


# -------------------------------------------------------------------------- function-changing


@dataclass(frozen=True)
class Recorded:
    """What one layer's attention was given: a batch of one, queries of the last n tokens.

    q_nope (1, n, h, 512), q_rope (1, n, h, 64), c_kv (1, L, 512), k_rope (1, L, 64).
    """

    q_nope: Tensor
    q_rope: Tensor
    c_kv: Tensor
    k_rope: Tensor
    softmax_scale: float

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        return self.q_nope, self.q_rope, self.c_kv, self.k_rope, self.softmax_scale

    def newest(self, tokens: int) -> Recorded:
        """The same queries over the last ``tokens`` tokens."""
        return replace(self, c_kv=self.c_kv[:, -tokens:], k_rope=self.k_rope[:, -tokens:])


def with_amplitudes(recorded: Recorded, deviation: float, seed: int) -> Recorded:
    """Each token's latent times exp(deviation * N(0, 1)): another function, said so."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*recorded.c_kv.shape[:2], 1)
    factor = torch.exp(deviation * torch.randn(shape, generator=generator))
    c_kv = (recorded.c_kv.float() * factor.to(recorded.c_kv.device)).to(recorded.c_kv.dtype)
    return replace(recorded, c_kv=c_kv)


def with_constant(recorded: Recorded, deviations: float) -> Recorded:
    """A constant of so many standard deviations on every channel: another function, said so."""
    wide = recorded.c_kv.float()
    return replace(recorded, c_kv=(wide + deviations * wide.std()).to(recorded.c_kv.dtype))


AMPLITUDES = (0.0, 1.0, 2.0, 3.0)
CONSTANTS = (0.0, 0.5, 2.0)


def by_kind(kind: str, dials: Iterable[Dial] = DIALS) -> list[Dial]:
    return [dial for dial in dials if dial.kind == kind]

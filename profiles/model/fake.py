"""Fake-quantised attention over whole sequences: what ``QuantConfig`` rounds, all rows at once.

``snapmla.testing.reference`` is the definition; this is the same algebra for many query tokens and
heads in few large operations, in fp32 by default, with exact accumulation.  A test compares both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from snapmla.testing.rounding import (
    MIMIC,
    SNAPMLA,
    TABLE_2,
    QuantConfig,
    quantise_cache,
    quantise_query,
    to_e4m3,
)

LOG2E = math.log2(math.e)
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it fill an interval evenly
SCALES = ("exact", "powers", "phased")
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}  # logits held at once

# A quantised operand: values (..., 512) and (..., 64) under scales (...)
Stored = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """One way to quantise.

    Attributes:
        config: what is rounded.
        text: what a legend says.
        scales: ``exact`` as the configuration has them; ``powers``: of tokens and query rows,
            rounded up to powers of two; ``phased``: of tokens, times 1 to 2 by position, so that
            equal latents do not round alike.

    Raises:
        ValueError: no such scales, or scales that are not those of a token.
    """

    config: QuantConfig
    text: str
    scales: str = "exact"

    def __post_init__(self) -> None:
        if self.scales not in SCALES:
            raise ValueError(f"scales: expected {', '.join(SCALES)}; got {self.scales!r}")
        if self.scales != "exact" and self.config.granularity != "token":
            raise ValueError(f"scales: {self.scales} are for granularity token alone")

    def cache(self, c_kv: Tensor, k_rope: Tensor) -> Stored:
        """Of one sequence, c_kv (L, 512), k_rope (L, 64)."""
        stored = quantise_cache(c_kv, k_rope, self.config)
        if self.scales == "exact":
            return stored
        if self.scales == "powers":
            return _rescaled(c_kv, k_rope, _next_power(stored[2]))
        positions = torch.arange(len(c_kv), device=c_kv.device)
        return _rescaled(
            c_kv, k_rope, stored[2] * torch.exp2(positions.double() * GOLDEN % 1).float()
        )

    def query(self, nope: Tensor, rope: Tensor) -> Stored:
        """Of one sequence's query tokens, nope (n, h, 512), rope (n, h, 64)."""
        stored = quantise_query(nope, rope, self.config)
        return _rescaled(nope, rope, _next_power(stored[2])) if self.scales == "powers" else stored


def _next_power(scale: Tensor) -> Tensor:
    """The least power of two that is not smaller."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


def _rescaled(content: Tensor, rope: Tensor, scale: Tensor) -> Stored:
    """Rows as the kernels store them, under other scales."""
    return (
        to_e4m3(content.float() / scale[..., None]),
        (rope.float() / scale[..., None]).bfloat16(),
        scale,
    )


# Configuration A rounds K and Q over all 576 channels; B to D keep RoPE in bf16.  B to D see a
# whole sequence when they choose a scale, tokens to come included: kinder than a decode could be.
PLAIN = replace(MIMIC, top="fixed")
SETTINGS = {
    "ours": Setting(MIMIC, "snapmla, one term of P"),
    "ours2": Setting(replace(MIMIC, p_terms=2), "snapmla, two terms of P"),
    "high": Setting(replace(MIMIC, p_dtype="f16"), "snapmla, accuracy high"),
    "paper": Setting(SNAPMLA, "SnapMLA's paper (P to 448)"),
    "A": Setting(TABLE_2["A"], "A: per token, RoPE too"),
    "B": Setting(TABLE_2["B"], "B: per tensor, static 1.0"),
    "C": Setting(TABLE_2["C"], "C: per tensor, dynamic"),
    "D": Setting(TABLE_2["D"], "D: 64 x 64 blocks"),
    "plain": Setting(PLAIN, "every token's largest element at 448"),
    "pow2": Setting(PLAIN, "power-of-two scales", "powers"),
    "phased": Setting(PLAIN, "scales of many phases", "phased"),
    "c128": Setting(
        replace(PLAIN, granularity="block", block=(1, 128)), "a scale per 128 channels"
    ),
    "exact_p": Setting(replace(MIMIC, p_scale="none"), "P not quantised"),
}
PAPER = ("A", "B", "C", "D")


def attend_quantised(
    q_nope: Tensor,
    q_rope: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    softmax_scale: float,
    setting: Setting,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Attention of the last n tokens over a sequence, quantised here.

    Args:
        q_nope, q_rope: (n, h, 512), (n, h, 64), absorbed and rotated; causal: query token s sees
            the first L - (n - 1 - s).
        c_kv, k_rope: (L, 512), (L, 64).
        softmax_scale: factor of the logits.
        setting: what is rounded.
        dtype: of the arithmetic between the rounding points.

    Returns:
        (n, h, 512), fp32 or ``dtype``.

    Raises:
        ValueError: the configuration models accumulators or the inverted order.
    """
    config = setting.config
    if "hopper" in (config.qk_accumulation, config.pv_accumulation) or config.order != "monotone":
        raise ValueError("setting: expected exact accumulation in the monotone order")
    n, heads, length = q_nope.shape[0], q_nope.shape[1], c_kv.shape[0]
    content, rope, sigma = (x.to(dtype) for x in setting.cache(c_kv, k_rope))
    query = [x.to(dtype).flatten(0, 1) for x in setting.query(q_nope, q_rope)]
    limits = torch.arange(length - n + 1, length + 1, device=c_kv.device).repeat_interleave(heads)
    rows = max(1, CHUNK_ELEMENTS[c_kv.device.type] // length)
    out = []
    for begin in range(0, n * heads, rows):
        part = slice(begin, begin + rows)
        limit = limits[part]
        seen = int(limit[-1])  # limits rise: the last row sees most
        out.append(
            _rows(
                [x[part] for x in query], (content[:seen], rope[:seen], sigma[:seen]), limit,
                softmax_scale, float(sigma.max()), config,
            )
        )  # fmt: skip
    return torch.cat(out).unflatten(0, (n, heads))


def _rows(
    query: list[Tensor],
    cache: Stored,
    limit: Tensor,
    softmax_scale: float,
    sigma_max: float,
    config: QuantConfig,
) -> Tensor:
    """(R, 512) of query rows, each over its first ``limit`` tokens."""
    content, rope, sigma = cache
    nope, turned, scale = query
    positions = torch.arange(len(sigma), device=sigma.device)
    hidden = positions >= limit[:, None]
    s2 = (nope @ content.T).addmm_(turned, rope.T)
    s2 *= (scale * (softmax_scale * LOG2E))[:, None] * sigma
    s2.masked_fill_(hidden, -torch.inf)
    pad = (0, -len(sigma) % config.p_block)
    s2 = functional.pad(s2, pad, value=-torch.inf).unflatten(1, (-1, config.p_block))
    t = s2 + functional.pad(torch.log2(sigma), pad).unflatten(0, (-1, config.p_block))
    top = _frames(s2, t, sigma_max, config)
    dead = torch.isneginf(top)  # blocks that the row does not see
    p = torch.exp2(t - top.masked_fill(dead, 0.0)[..., None] + math.log2(config.p_max))
    weight = torch.exp2(top - top.amax(-1, keepdim=True))
    rounded = _rounded(p, config)
    mass = p if config.normaliser == "unquantised" else rounded
    inverse = functional.pad(1.0 / sigma, pad).unflatten(0, (-1, config.p_block))
    total = (torch.einsum("rbk,bk->rb", mass, inverse) * weight).sum(-1)
    flat = (rounded * weight[..., None]).flatten(1)[:, : len(sigma)]
    return flat @ content / total[:, None]


def _frames(s2: Tensor, t: Tensor, sigma_max: float, config: QuantConfig) -> Tensor:
    """The log2 of what P' of a block is relative to (R, blocks), -inf where nothing is seen."""
    if config.p_scale in ("none", "tile"):
        return t.amax(-1)
    top = t.amax(-1) if config.p_scale == "running" else s2.amax(-1) + math.log2(sigma_max)
    return top.cummax(-1).values


def _rounded(p: Tensor, config: QuantConfig) -> Tensor:
    """The sum of P's terms."""
    if config.p_scale == "none":
        return p
    if config.p_dtype == "f16":
        return p.half().to(p.dtype)
    first = to_e4m3(p).to(p.dtype)
    if config.p_terms == 1:
        return first
    return first + to_e4m3(p - first).to(p.dtype)

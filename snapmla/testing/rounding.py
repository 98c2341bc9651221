"""Roundings of a decode in plain torch: the points (``QuantConfig``), and rows as they are stored.

``quantize_rows`` and ``dequantize_rows`` are the kernels' bit for bit; ``quantise_cache`` and
``quantise_query`` give the paper's variants.  ``snapmla.testing.reference`` attends over them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsl_kernels.formats.dims import CACHE_TOPS, E4M3_MAX
from dsl_kernels.formats.dims import KV_LORA_RANK as D_V

FP8 = torch.float8_e4m3fn
ROPE_FLOOR = 2.0**-40  # scale >= max|rope| * ROPE_FLOOR
SCALE_FLOOR = 2.0**-80

CHOICES: dict[str, tuple[str, ...]] = {
    "top": ("fixed", "spread"),
    "granularity": ("none", "tensor", "token", "channel", "block"),
    "q_granularity": ("none", "token_head", "token"),
    "scaling": ("dynamic", "static"),
    "rope_quantised": ("none", "own", "joint"),
    "p_scale": ("none", "tile", "running", "static"),
    "order": ("monotone", "inverted"),
    "normaliser": ("unquantised", "quantised"),
    "p_dtype": ("e4m3", "f16"),
    "qk_accumulation": ("exact", "hopper", "blackwell", "f16"),
    "pv_accumulation": ("exact", "hopper", "blackwell"),
    "arithmetic": ("fp64", "fp32", "fused"),
}


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Points at which a decode rounds, and the accumulation of its matrix products.

    Attributes:
        granularity: of the cache's content scale; used by ``reference_from_unquantised`` only.
        scaling: ``dynamic`` (max / 448) or ``static`` (``static_scale``).
        top: where dynamic scales of tokens put the largest channel: ``fixed``, 448; ``spread``, as
            append_kv: one of eight e4m3 values by position.
        static_scale: the scale if static.
        block: (tokens, channels) of one scale if ``granularity`` is ``block``.
        rope_quantised: ``none`` keeps RoPE in bf16; ``own`` quantises it to e4m3 with a scale of
            its own at the same granularity; ``joint`` shares the content's scale, taken over all
            576 channels (a RoPE-unaware cache).
        q_granularity: of the query's scale; likewise only for unquantised inputs.
        p_scale: how P is quantised to e4m3: ``tile``: one dynamic scale per row and block of
            tokens; ``running``: the running maximum's scale; ``static``: a scale fixed before the
            sequence is seen, relative to the running softmax maximum; ``none``: not quantised.
        p_dtype: what P is rounded to, ``e4m3`` or ``f16``.
        p_max: the largest P' of a block: 2^8 in the kernels, 448 in the paper.
        p_terms: 2 adds an e4m3 term for what the first leaves, of the same scale; summed before
            it.
        p_block: tokens that share a scale of P.
        promote_tokens: tokens whose P.V shares one tensor-core accumulator before it is added to
            the fp32 one; 0: never promoted.  Matters for modelled P.V accumulation only.
        order: ``inverted`` is the double-buffered order that the paper abandons: the right half of
            d_v meets the odd block first and P of the even one is requantised to its scale.
        normaliser: whether the row sum is taken of P before or after quantisation.
        qk_accumulation, pv_accumulation: ``exact``, or modelled: ``hopper``, ``blackwell``; of Q.K
            also ``f16``, both operands in 16 bits.
        qk_promote_channels: content channels per accumulator in modelled Q.K; the partial sums
            are added in fp32.
        rope_first: RoPE before, not after, the content of the first modelled Q.K chain.
        arithmetic: of the softmax: ``fp64``; ``fp32`` in the order of the kernels' operations;
            ``fused``, likewise, with t' in one FMA and the LSE rounded as it is written: log2 of
            the row sum plus the m_ref, then that times ln 2.

    Raises:
        ValueError: naming the attribute.

    Source: SnapMLA paper, Table 2 (configurations A to D), Figure 4 and section 3.2.
    """

    granularity: str = "token"
    scaling: str = "dynamic"
    top: str = "fixed"
    static_scale: float = 1.0
    block: tuple[int, int] = (64, 64)
    rope_quantised: str = "none"
    q_granularity: str = "token_head"
    p_scale: str = "tile"
    p_dtype: str = "e4m3"
    p_max: float = 256.0
    p_terms: int = 1
    p_block: int = 64
    promote_tokens: int = 64
    order: str = "monotone"
    normaliser: str = "unquantised"
    qk_accumulation: str = "exact"
    pv_accumulation: str = "exact"
    qk_promote_channels: int = D_V
    rope_first: bool = False
    arithmetic: str = "fp64"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, got {getattr(self, name)!r}")
        if self.p_terms not in (1, 2):
            raise ValueError(f"p_terms: expected 1 or 2, got {self.p_terms!r}")
        if not 0 < self.p_max <= E4M3_MAX:
            raise ValueError(f"p_max: expected 0 < p_max <= 448, got {self.p_max!r}")
        if self.p_block < 32 or self.p_block % 32:
            raise ValueError(f"p_block: expected a multiple of 32, got {self.p_block!r}")
        if self.promote_tokens % 32 or (
            self.promote_tokens and max(self.group, self.p_block) % min(self.group, self.p_block)
        ):
            raise ValueError(
                f"promote_tokens: expected 0 or a multiple of 32 that divides p_block"
                f" ({self.p_block}) or is a multiple of it, got {self.promote_tokens!r}"
            )
        if D_V % self.qk_promote_channels or self.qk_promote_channels % 32:
            raise ValueError(
                f"qk_promote_channels: expected a divisor of 512, a multiple of 32,"
                f" got {self.qk_promote_channels!r}"
            )

    @property
    def group(self) -> int:
        """``promote_tokens``, or ``p_block`` where it is 0."""
        return self.promote_tokens or self.p_block


FP64 = QuantConfig(granularity="none", q_granularity="none", p_scale="none")
MIMIC = QuantConfig(top="spread", qk_promote_channels=256)
MIMIC_HW = replace(MIMIC, qk_accumulation="hopper", arithmetic="fp32")
MIMIC_HW_FULL = replace(MIMIC_HW, pv_accumulation="hopper")
# Pipeline f16: sums of P.V, which keep 25 bits, are taken for exact.
MIMIC_F16 = QuantConfig(top="spread", p_dtype="f16", qk_accumulation="f16", arithmetic="fp32")
MIMIC_BLACKWELL = QuantConfig(
    top="spread", qk_accumulation="blackwell", pv_accumulation="blackwell", arithmetic="fused"
)  # one chain of Q.K

# The paper's Table 2.  Its P is scaled to 448; its accumulators are never promoted, which shows
# with pv_accumulation="hopper" only.
SNAPMLA = QuantConfig(p_max=E4M3_MAX, promote_tokens=0)
CONFIG_A = replace(SNAPMLA, rope_quantised="joint")
CONFIG_B = replace(SNAPMLA, granularity="tensor", scaling="static")
CONFIG_C = replace(SNAPMLA, granularity="tensor")
CONFIG_D = replace(SNAPMLA, granularity="block")
TABLE_2 = {"SnapMLA": SNAPMLA, "A": CONFIG_A, "B": CONFIG_B, "C": CONFIG_C, "D": CONFIG_D}


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 (ties to even), saturating; NaN stays NaN."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(FP8)


def quantize_rows(
    c: Tensor, rope: Tensor, *, shared: int = 0, slots: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels' quantisation of a token (append_kv) or query row (quantize_q), bit for bit.

    Args:
        c: (..., 512) floating point.
        rope: (..., 64) floating point.
        shared: trailing leading-dimensions that share one scale: 1 for quantize_q's ``token``
            granularity, where the last dimension before the channels is the heads.
        slots: int32 or int64 (n,) for c (n, 512): where in the cache each token goes (append_kv),
            or its offset in the page; None for query rows.

    Returns:
        (nope (..., 512) float8_e4m3fn, rope (..., 64) bfloat16 divided by the scale, scale (...)
        float32 without the shared dimensions).  scale = max(max|c| / top, max|rope| * 2^-40,
        2^-80), where top is 448 or, for slot s, CACHE_TOPS[s % 8]: so that the largest channel is
        exact and tokens that are alike do not round alike; a row with a NaN or infinity has NaN
        content, RoPE and scale.

    Raises:
        RuntimeError: from torch, if shapes do not go together.

    Source: SnapMLA paper, section 3.1; the floors and the tops are our own.
    """
    c, rope = c.float(), rope.float()
    dims = tuple(range(-1 - shared, 0))
    amax_c, amax_r = c.abs().amax(dims), rope.abs().amax(dims)
    factor = torch.tensor([1.0 / E4M3_MAX], device=c.device)
    if slots is not None:
        factor = torch.tensor([1.0 / top for top in CACHE_TOPS], device=c.device)
        factor = factor[slots.to(c.device).long() % len(CACHE_TOPS)]
    scale = torch.maximum(amax_c * factor, amax_r * ROPE_FLOOR).clamp_min(SCALE_FLOOR)
    good = torch.isfinite(c).all(-1) & torch.isfinite(rope).all(-1)
    for _ in range(shared):
        good = good.all(-1)
    scale = torch.where(good, scale, torch.nan)
    inverse = (1.0 / scale)[(...,) + (None,) * (1 + shared)]
    return to_e4m3(c * inverse), (rope * inverse).bfloat16(), scale


def dequantize_rows(
    nope: Tensor, rope: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Dequantises rows as ``fetch_dequant``: nope * scale, rope * scale, rounded once to ``dtype``.

    Args:
        nope: (..., 512) float8_e4m3fn.
        rope: (..., 64) bfloat16, divided by the scale.
        scale: (...,) float32.
        dtype: of the result.

    Returns:
        (c_kv (..., 512), k_rope (..., 64)).

    Raises:
        RuntimeError: from torch, if shapes do not go together.

    Source: SnapMLA paper, section 3.3.1 (fused fetch-dequant).
    """
    factor = scale.float()[..., None]
    return (nope.float() * factor).to(dtype), (rope.float() * factor).to(dtype)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """x rounded to e4m3 under a scale, and multiplied back (fp64)."""
    return to_e4m3(x / scale).double() * scale.double()


def _content_scale(x: Tensor, config: QuantConfig) -> Tensor:
    """Scales of (L, C) at the configured granularity, broadcastable against it."""
    if config.scaling == "static":
        return torch.full((1, 1), config.static_scale, dtype=torch.float32, device=x.device)
    size = x.float().abs()
    if config.granularity == "tensor":
        top = size.amax().view(1, 1)
    elif config.granularity == "token":
        top = size.amax(-1, keepdim=True)
    elif config.granularity == "channel":
        top = size.amax(0, keepdim=True)
    else:
        tokens, channels = min(config.block[0], len(x)), min(config.block[1], x.shape[1])
        pad = (0, -x.shape[1] % channels, 0, -len(x) % tokens)
        size = torch.nn.functional.pad(size, pad)
        size = size.unflatten(1, (-1, channels)).unflatten(0, (-1, tokens)).amax((1, 3))
        top = size.repeat_interleave(tokens, 0).repeat_interleave(channels, 1)
        top = top[: len(x), : x.shape[1]]
    return (top * (1.0 / E4M3_MAX)).clamp_min(SCALE_FLOOR)


def quantise_cache(c: Tensor, rope: Tensor, config: QuantConfig) -> tuple[Tensor, Tensor, Tensor]:
    """(k8, rope', sigma (L,)) of an unquantised sequence c (L, 512), rope (L, 64).

    Scales that are not per token are multiplied back into k8, and sigma is 1.
    """
    ones = torch.ones(len(c), dtype=torch.float32, device=c.device)
    if config.granularity == "none":
        return c.double(), rope.double(), ones
    if config.rope_quantised == "joint":
        whole = torch.cat((c.float(), rope.float()), -1)
        back = _scaled(whole, _content_scale(whole, config))
        return back[:, :D_V], back[:, D_V:], ones
    if config.granularity == "token" and config.scaling == "dynamic":
        positions = torch.arange(len(c)) if config.top == "spread" else None
        k8, rope_in_domain, sigma = quantize_rows(c, rope, slots=positions)
    else:
        scale = _content_scale(c, config)
        if scale.numel() == 1:
            k8, sigma = to_e4m3(c.float() / scale), scale.view(1).expand(len(c))
        else:
            k8, sigma = _scaled(c.float(), scale), ones
        rope_in_domain = (rope.float() / sigma[:, None]).bfloat16()
    if config.rope_quantised == "own":
        back = _scaled(rope.float(), _content_scale(rope, config))
        return k8, back / sigma[:, None].double(), sigma
    return k8, rope_in_domain, sigma


def quantise_query(
    nope: Tensor, rope: Tensor, config: QuantConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """(nope, rope', scale (s_q, h)) of one sequence's nope (s_q, h, 512), rope (s_q, h, 64)."""
    if config.q_granularity == "none":
        ones = torch.ones(nope.shape[:2], dtype=torch.float32, device=nope.device)
        return nope.double(), rope.double(), ones
    q8, rope_in_domain, scale = quantize_rows(
        nope, rope, shared=int(config.q_granularity == "token")
    )
    scale = scale.view(len(scale), -1).expand(nope.shape[:2])
    if config.rope_quantised == "none":
        return q8, rope_in_domain, scale
    # A RoPE-unaware kernel multiplies in e4m3 on both sides.
    whole = (
        torch.cat((nope, rope), -1).float() if config.rope_quantised == "joint" else rope.float()
    )
    own = (whole.abs().amax(-1, keepdim=True) * (1.0 / E4M3_MAX)).clamp_min(SCALE_FLOOR)
    factor = scale[..., None].double()
    if config.rope_quantised == "joint":
        q8 = _scaled(nope.float(), own) / factor
    return q8, _scaled(rope.float(), own) / factor, scale

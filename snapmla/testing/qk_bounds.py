"""Bounds of the distance of a row's logits and LSE on Hopper's tensor core from exact ones.

The rules of one step are those of ``softgpu.tensor_core``: 32 products and the accumulator are cut
toward zero to multiples of one unit, u = 2^(e - 13), where e is the largest exponent among them;
the sum is cut toward zero to 13 fraction bits.  So in one step

* an addend that is a multiple of u loses nothing (so the accumulator does while u is not above its
  own last unit); another loses less than u, and less than itself;
* the sum loses nothing, or less than 2^-13 of its own power of two;
* what positive addends lose lowers the sum, what negative ones lose raises it.

Q.K has two chains of 256 content channels, 8 steps each; RoPE's four steps follow the first one in
its accumulator, at 2^-25.  Adding up the steps bounds the error of a dot product from both sides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapmla.testing.accumulate import (
    FP8_FRACTION_BITS,
    FP8_STEP,
    HALF_FRACTION_BITS,
    HALF_STEP,
)
from snapmla.testing.reference import visible_tokens

CHAIN = 256  # content channels of an accumulator
FP32_BITS = 23
# Roundings to fp32 of a logit and of t' = logit + log sigma on their way, in halves of an ulp.
FP32_ROUNDINGS = 8
SOFTMAX_SLACK = 2e-5  # of exp2, log2 and the row's fp32 sum, absolute, as ``comparison.FP32_SLACK``
_SMALLEST = 2.0**-6  # the smallest normal e4m3 number: subnormal ones keep its exponent


class Interval:
    """A sum on the tensor core, (R, n) fp64: the exact value, and how far below and above the
    computed one may be (``low`` <= computed - exact <= ``high``), which is a multiple of ``grain``.
    """

    def __init__(self, zeros: Tensor) -> None:
        self.exact = self.low = self.high = self.grain = zeros

    @property
    def most(self) -> Tensor:
        """The largest magnitude that the computed sum can have."""
        return torch.maximum((self.exact + self.low).abs(), (self.exact + self.high).abs())

    @property
    def least(self) -> Tensor:
        """The smallest one: 0 where its sign is open."""
        return torch.maximum(self.exact + self.low, -self.exact - self.high).clamp_min(0)

    def _lose(self, from_positive: Tensor, from_negative: Tensor) -> None:
        """Cuts toward zero: of addends above 0, and of those below."""
        self.low = self.low - from_positive
        self.high = self.high + from_negative

    def _lose_of_itself(self, unit: Tensor, grain: Tensor) -> None:
        """A cut of the sum to multiples of ``unit``, if it is one of ``grain``."""
        loss = torch.where(unit > grain, torch.minimum(unit, self.most), 0.0)
        self._lose(loss * (self.exact + self.high > 0), loss * (self.exact + self.low < 0))

    def add(self, products: Tensor, top: tuple[Tensor, Tensor], fraction: int, kept: int) -> None:
        """One step.

        Args:
            products: (R, n, k) fp64, exact.
            top: (R, n) powers of two, between which 2^e of the products is.
            fraction: bits that addends keep below 2^e.  kept: those that the sum keeps.
        """
        surely = torch.maximum(top[0], power_of_two(self.least)) * 2.0**-fraction
        unit = torch.maximum(top[1], power_of_two(self.most)) * 2.0**-fraction
        size = unit[..., None]
        whole = torch.remainder(products, size) == 0
        loss = torch.where(whole, 0.0, torch.minimum(products.abs(), size))
        self._lose_of_itself(unit, self.grain)
        self._lose((loss * (products > 0)).sum(-1), (loss * (products < 0)).sum(-1))
        self.exact = self.exact + products.sum(-1)
        self._lose_of_itself(power_of_two(self.most) * 2.0**-kept, surely)
        self.grain = surely


def power_of_two(x: Tensor) -> Tensor:
    """2^exponent(|x|); 0 where x is 0."""
    _, exponent = torch.frexp(x)
    return torch.where(x == 0, 0.0, torch.ldexp(torch.ones_like(x), exponent - 1))


def content_bounds(total: Interval, q: Tensor, k: Tensor) -> None:
    """Adds one chain of e4m3 products to ``total``.

    Args:
        q, k: (R, C), (n, C) fp64 that hold e4m3 values; C a multiple of 32.
    """
    power_q, power_k = (
        torch.where(x == 0, 0.0, power_of_two(x).clamp_min(_SMALLEST)) for x in (q, k)
    )
    for start in range(0, q.shape[1], FP8_STEP):
        part = slice(start, start + FP8_STEP)
        # a product counts with the sum of its factors' exponents, though it may be 4 times 2^e
        top = (power_q[:, None, part] * power_k[None, :, part]).amax(-1)
        products = q[:, None, part] * k[None, :, part]
        total.add(products, (top, top), FP8_FRACTION_BITS, FP8_FRACTION_BITS)


def rope_bounds(total: Interval, q: Tensor, k: Tensor) -> None:
    """Adds bf16 products (R, 64), (n, 64) to ``total``: 16 a step, the sum cut to fp32."""
    for start in range(0, q.shape[1], HALF_STEP):
        part = slice(start, start + HALF_STEP)
        products = q[:, None, part] * k[None, :, part]
        top = power_of_two(products.abs().amax(-1))
        total.add(products, (top / 2, top), HALF_FRACTION_BITS, FP32_BITS)


def dot_bounds(
    q: Tensor, k: Tensor, q_rope: Tensor, k_rope: Tensor, chain: int = CHAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """(exact dot products, low, high), all (R, n) fp64, of q (R, 512), k (n, 512) and RoPE's 64."""
    parts: list[Interval] = []
    for start in range(0, q.shape[1], chain):
        part = Interval(q.new_zeros(len(q), len(k)))
        content_bounds(part, q[:, start : start + chain], k[:, start : start + chain])
        if not parts:
            rope_bounds(part, q_rope, k_rope)
        parts.append(part)
    exact, low, high = (
        torch.stack([getattr(p, name) for p in parts]).sum(0) for name in ("exact", "low", "high")
    )
    rounding = 2.0 ** -(FP32_BITS + 1) * (len(parts) - 1) * sum(p.most for p in parts)
    return exact, low - rounding, high + rounding


def lse_bounds(
    q_nope: Tensor,
    q_rope: Tensor,
    q_scale: Tensor,
    content: Tensor,
    rope: Tensor,
    scale: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    *,
    causal: bool = True,
    row_seqlens: Tensor | None = None,
    chain: int = CHAIN,
) -> tuple[Tensor, Tensor]:
    """Bounds below and above the exact LSE of the kernels' on Hopper, for each query row.

    With l the exact logits of a row and [low, high] the bounds of their errors, the LSE's error is
    between ln sum exp(l + low) - ln sum exp(l) and the same with high.  Rounding to fp32 is in it.

    Args:
        q_nope: (b, s_q, h, 512) float8_e4m3fn.
        q_rope: (b, s_q, h, 64) bfloat16, divided by q_scale.
        q_scale: (b, s_q, h) float32, or (b, s_q) for one scale per token.
        content: (pages, P, 512) float8_e4m3fn.
        rope: (pages, P, 64) bfloat16, divided by ``scale``.
        scale: (pages, P) float32.
        block_table: (b, width) int32 or int64 page ids.
        cache_seqlens: (b,) int32 or int64, tokens of each sequence.
        softmax_scale: factor of the logits.
        causal: query s sees the first cache_seqlens - (s_q - 1 - s) tokens.
        row_seqlens: (b, s_q) int32 or int64: how many tokens each query token sees, instead.
        chain: content channels that share an accumulator.

    Returns:
        (low, high): (b, h, s_q) fp64, natural logarithm, low <= 0 <= high; 0, 0 for a row that sees
        no token; NaN for one that sees a NaN.

    Raises:
        RuntimeError, IndexError: from torch, if shapes or page ids do not go together.

    Source: the step's rules, recorded on an H200 (``softgpu.tensor_core``).
    """
    batch, s_q, heads = q_nope.shape[:3]
    if q_scale.ndim == 2:
        q_scale = q_scale[..., None].expand(batch, s_q, heads)
    page_size, capacity = content.shape[1], block_table.shape[1] * content.shape[1]
    raw, results = content.view(torch.uint8), []  # indexing float8 is not implemented everywhere
    for i in range(batch):
        length = min(max(int(cache_seqlens[i]), 0), capacity)
        table = block_table[i, : -(-length // page_size)].long()
        rows = [x[i].double().flatten(0, 1) for x in (q_nope, q_rope)]
        factor = q_scale[i].double().flatten()[:, None] * softmax_scale
        limit = visible_tokens(
            length, s_q, heads, causal, content.device,
            None if row_seqlens is None else row_seqlens[i],
        )  # fmt: skip
        logits: list[tuple[Tensor, Tensor, Tensor]] = []
        size = max(1, (1 << (24 if content.is_cuda else 19)) // max(1, len(limit) * FP8_STEP))
        for pages in table.split(-(-size // page_size)):
            k = raw[pages].view(content.dtype).double().flatten(0, 1)
            k_rope, sigma = rope[pages].double().flatten(0, 1), scale[pages].double().flatten()
            exact, low, high = dot_bounds(rows[0], k, rows[1], k_rope, chain)
            each = factor * sigma
            rounding = (exact * each).abs() + torch.log(sigma).abs()
            rounding = FP32_ROUNDINGS * 2.0 ** -(FP32_BITS + 1) * rounding
            logits.append((exact * each, low * each - rounding, high * each + rounding))
        results.append(_lse_of_rows(logits, limit))
    low, high = (torch.stack(x).unflatten(1, (s_q, heads)).mT for x in zip(*results, strict=True))
    return low, high


def _lse_of_rows(
    logits: list[tuple[Tensor, Tensor, Tensor]], limit: Tensor
) -> tuple[Tensor, Tensor]:
    """(low, high) (R,) of the LSE from (logit, low, high), (R, n) each; row r sees limit[r]."""
    if not logits:
        return torch.zeros_like(limit, dtype=torch.float64), torch.zeros_like(limit).double()
    exact, low, high = (torch.cat(x, 1) for x in zip(*logits, strict=True))
    hidden = torch.arange(exact.shape[1], device=limit.device) >= limit[:, None]

    def lse(x: Tensor) -> Tensor:
        return torch.logsumexp(x.masked_fill(hidden, -torch.inf), 1)

    empty, middle = limit == 0, lse(exact)
    return (
        torch.where(empty, 0.0, lse(exact + low) - middle - SOFTMAX_SLACK),
        torch.where(empty, 0.0, lse(exact + high) - middle + SOFTMAX_SLACK),
    )

"""A query as pipeline ``mix8`` rounds it, and bounds of how far Hopper's tensor core can put its
logits, LSE and output from exact ones of the rounded query.

The kernel rounds content of the query to e4m3, a row times a power of two (``rounded``), and sums

    S = ((K_0 Q_0 s_0 / s_1 + K_1 Q_1) s_1 + RoPE) + (K_2 Q_2 s_2 / s_3 + K_3 Q_3) s_3

K_g, Q_g: 128 channels; s_g: the token's scales.  ``qk_bounds`` has the rules of a step.  So with
d = S - exact in [low, high], token by token, and w the exact softmax weights of a row,

    ln sum w e^low <= LSE - exact <= ln sum w e^high
    |out - exact|  <= sum w max(e^high - 1, 1 - e^low) |v - exact| / sum w e^low

the second because adding one vector to all v moves both outputs alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK
from dsl_kernels.formats.ds_mla import GROUPS
from snapmla.testing.qk_bounds import (
    FP32_BITS,
    FP32_ROUNDINGS,
    SOFTMAX_SLACK,
    Interval,
    content_bounds,
    rope_bounds,
)
from snapmla.testing.record_reference import RecordCall

TERM_TOP, ROPE_ABOVE = 7, 30  # dsl_kernels/sm90/bytes16/mix8.py, mix16_parts.py
LEAST_EXPONENT = 42 - 127  # of a row
LEAST_RATIO, LEAST_SCALE = 2.0**-40, 2.0**-100  # of a token's largest scale; of any
GROUP = KV_LORA_RANK // GROUPS
RATIO_ROUNDING = 2.0**-21  # of an approximate reciprocal and two products, relative


def _exponent(x: Tensor) -> Tensor:
    """Floor of log2 of the largest magnitude of each row, very low for zeros."""
    largest = x.double().abs().amax(-1)
    return torch.where(largest > 0, torch.frexp(largest).exponent - 1, -(10**4))


def power_of(q: Tensor) -> Tensor:
    """p of rows (..., 576) bf16: content times 2^p is what is rounded to e4m3."""
    content, rope = q[..., :KV_LORA_RANK], q[..., KV_LORA_RANK:]
    least = (_exponent(rope) - ROPE_ABOVE).clamp_min(LEAST_EXPONENT)
    return TERM_TOP - torch.maximum(_exponent(content), least)


def rounded(q: Tensor) -> Tensor:
    """(..., 576) fp64: content as the kernel rounds it, RoPE as it is."""
    scale = torch.exp2(power_of(q).double())[..., None]
    content = (q[..., :KV_LORA_RANK].double() * scale).float().to(torch.float8_e4m3fn)
    return torch.cat((content.double() / scale, q[..., KV_LORA_RANK:].double()), -1)


class QkBounds(NamedTuple):
    """Bounds of a call, for each query token and head.

    Attributes:
        low, high: of the LSE, (h, tokens); 0 of a row without tokens.
        out: of the output's distance in L2, relative to the query token's output, (tokens,).
    """

    low: Tensor
    high: Tensor
    out: Tensor

    def hold(self, lse: Tensor, exact: Tensor) -> Tensor:
        """LSEs (h, tokens) that are inside; infinite and NaN ones, if they are the same."""
        same = (lse == exact) | (lse.isnan() & exact.isnan())
        off = lse.double() - exact
        return torch.where(torch.isfinite(exact), (self.low <= off) & (off <= self.high), same)


def bounds(call: RecordCall) -> QkBounds:
    """Bounds of what Q.K's sums do to a call, against exact sums of the query after ``rounded``.

    ``call.q`` is the query before that rounding.
    """
    fields = call.fields()
    rows = []
    for i, q in enumerate(call.q):
        row, named = call.named(i)
        rows.append(_of_row(call, q, [x[row[named]] for x in fields]))
    low, high, out = zip(*rows, strict=True)
    return QkBounds(torch.stack(low, 1), torch.stack(high, 1), torch.stack(out))


def _of_row(call: RecordCall, q: Tensor, fields: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(low (h,), high (h,) of the LSE, relative L2 of the output) for a query token ``q`` (h, 576).

    ``fields``: content, scales and RoPE of the tokens that it sees.
    """
    content, scales, rope = fields
    nothing = q.new_zeros(len(q), dtype=torch.float64)
    if not len(content):
        return nothing, nothing, nothing.sum()
    exact, low, high = logits(q, content, scales, rope, call.softmax_scale)
    middle = torch.logsumexp(exact, 1)
    below, above = (torch.logsumexp(exact + x, 1) - middle for x in (low, high))
    weights = torch.exp(exact - middle[:, None])
    moved = weights * torch.maximum(torch.expm1(high), -torch.expm1(low))
    values = content * scales.repeat_interleave(GROUP, 1)
    out = weights @ values
    # |v - out| of each head and token
    square = (values * values).sum(1) - 2 * out @ values.T + (out * out).sum(1)[:, None]
    off = (moved * square.clamp_min(0).sqrt()).sum(1) / torch.exp(below)
    size = out.norm(dim=1)
    if call.attn_sink is not None:  # whose share goes by the LSE
        kept = torch.sigmoid(middle - call.attn_sink.double())
        off = kept * (off + size * torch.expm1(torch.maximum(-below, above)))
        size = kept * size
    slack = SOFTMAX_SLACK + FP32_ROUNDINGS * 2.0 ** -(FP32_BITS + 1) * middle.abs()
    return below - slack, above + slack, off.norm() / size.norm().clamp_min(1e-300)


def logits(
    q: Tensor, content: Tensor, scales: Tensor, rope: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(exact logits of the rounded query, low, high) (h, n), natural.

    Args:
        q: (h, 576) bf16.
        content, scales, rope: (n, 512) e4m3 values, (n, 4), (n, 64), fp64.
    """
    factor = torch.exp2(power_of(q).double())[:, None]
    q8, q_rope = (rounded(q) * factor).split((KV_LORA_RANK, q.shape[1] - KV_LORA_RANK), 1)
    least = (scales.amax(1, keepdim=True) * LEAST_RATIO).clamp_min(LEAST_SCALE)
    s, total = torch.maximum(scales, least), []
    for first in range(0, GROUPS, 2):
        chain = Interval(q8.new_zeros(len(q8), len(content)))
        for g in (first, first + 1):
            part = slice(g * GROUP, (g + 1) * GROUP)
            content_bounds(chain, q8[:, part], content[:, part])
            _scale(chain, s[:, first] / s[:, first + 1] if g == first else s[:, g])
        if not first:
            rope_bounds(chain, q_rope, rope)
        total.append(chain)
    exact, low, high = (sum(getattr(x, y) for x in total) for y in ("exact", "low", "high"))
    each = softmax_scale / factor
    sigma = scales.amax(1).clamp_min(LEAST_SCALE)
    rounding = (exact * each).abs() + torch.log(sigma).abs()
    rounding = FP32_ROUNDINGS * 2.0 ** -(FP32_BITS + 1) * rounding
    rounding = rounding + each * 2.0**-FP32_BITS * sum(x.most for x in total)
    more = content.abs() * (s - scales).repeat_interleave(GROUP, 1)  # of scales that are raised
    rounding = rounding + each * (q8.abs() @ more.T)
    return exact * each, low * each - rounding, high * each + rounding


def _scale(sum_: Interval, by: Tensor) -> None:
    """Multiplies a sum in fp32 by the tokens' factors: what it is a multiple of is lost."""
    for name in ("exact", "low", "high"):
        setattr(sum_, name, getattr(sum_, name) * by)
    rounding = RATIO_ROUNDING * sum_.most
    sum_.low, sum_.high = sum_.low - rounding, sum_.high + rounding
    sum_.grain = torch.zeros_like(sum_.exact)

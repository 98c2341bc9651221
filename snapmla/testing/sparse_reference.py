"""Sparse decode in plain torch: what ``sparse_decode`` computes, exactly or with its rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from snapmla.testing.attend import Chunk, Rows, attend
from snapmla.testing.reference import Move
from snapmla.testing.rounding import FP64, QuantConfig


def sparse_decode_reference(
    q_nope: Tensor,
    q_rope: Tensor,
    q_scale: Tensor,
    content: Tensor,
    rope: Tensor,
    scale: Tensor,
    indices: Tensor,
    counts: Tensor,
    softmax_scale: float,
    *,
    attn_sink: Tensor | None = None,
    config: QuantConfig = FP64,
    lse_base: str = "e",
    empty_lse: float | str = "-inf",
    moves: list[Move] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query token to the cached tokens that its row of ``indices`` names.

    Args:
        q_nope: (tokens, h, 512) float8_e4m3fn.
        q_rope: (tokens, h, 64) bfloat16, divided by ``q_scale``.
        q_scale: (tokens, h) float32.
        content: (pages, P, 512) float8_e4m3fn, any strides.
        rope: (pages, P, 64) bfloat16, divided by ``scale``.
        scale: (pages, P) float32.
        indices: (tokens, topk) int32, page * P + offset; what is negative or behind the pool is no
            token.
        counts: (tokens,) how many entries of its row count; clamped to 0..topk.
        softmax_scale: factor of the logits.
        attn_sink: (h,) logits that weigh in ``out`` and have no value; None: there are none.
        config: rounding points and accumulation.
        lse_base: ``e`` or ``2``.
        empty_lse: LSE of a row that sees no token.
        moves: as of ``reference.mla_decode_reference``.

    Returns:
        (out (tokens, h, 512), lse (h, tokens)), fp64.

    Raises:
        ValueError: an unknown ``lse_base``, or a ``config`` that cannot be modelled.

    Source: as ``reference.mla_decode_reference``; what is no token is hidden.
    """
    if lse_base not in ("e", "2"):
        raise ValueError(f"lse_base: expected 'e' or '2', got {lse_base!r}")
    heads, natural = q_nope.shape[1], math.log(2.0)
    outs, lses = [], []
    for i, row in enumerate(indices.long()):
        count = min(max(int(counts[i]), 0), len(row))
        limit = torch.full((heads,), count, device=q_nope.device)
        rows = Rows(q_nope[i], q_rope[i], q_scale[i], limit)
        steps: list[tuple[int, Tensor]] = []
        chunk, top = _chunk(content, rope, scale, row[:count], config)
        wanted = None if moves is None else steps
        out, lse = attend(rows, iter([chunk]), softmax_scale, top, config, wanted)
        kept = torch.ones_like(lse)
        if attn_sink is not None:
            kept = torch.sigmoid(lse * natural - attn_sink.double())
            kept = torch.where(torch.isneginf(lse), 1.0, kept)
        if moves is not None:
            moves += [Move((i, head), step * kept[head]) for head, step in steps]
        outs.append((out * kept[:, None]).view(heads, -1))
        scaled = lse * (natural if lse_base == "e" else 1.0)
        lses.append(torch.where(torch.isneginf(lse), float(empty_lse), scaled))
    return torch.stack(outs), torch.stack(lses, 1)


def _chunk(
    content: Tensor, rope: Tensor, scale: Tensor, row: Tensor, config: QuantConfig
) -> tuple[Chunk, float]:
    """(the places of a row of the table as one chunk, the largest scale among them); what holds no
    token is absent, and so are the places that make the blocks whole."""
    page_size, pool = content.shape[1], content.shape[0] * content.shape[1]
    unit = math.lcm(2 * config.p_block, config.group)
    places = row.new_full((max(-(-len(row) // unit), 1) * unit,), -1)
    places[: len(row)] = row
    named = (places >= 0) & (places < pool)
    slot = torch.where(named, places, 0)
    at = slot // page_size, slot % page_size
    k8 = torch.where(named[:, None], content.view(torch.uint8)[at], 0).view(content.dtype)
    k_rope = torch.where(named[:, None], rope[at], 0.0)
    sigma = torch.where(named, scale[at], 1.0)
    seen = sigma[named].nan_to_num(0.0)
    return Chunk(0, k8, k_rope, sigma, absent=~named), float(seen.max()) if len(seen) else 1.0

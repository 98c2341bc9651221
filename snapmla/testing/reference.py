"""MLA decode in plain torch: the fp64 truth, the kernels' rounding mimic and the paper's variants.

One function computes all of them; a ``QuantConfig`` says which rounding points it has and whether
the two matrix products accumulate exactly or as a tensor core does (``snapmla.testing.attend``).
Runs on CPU and CUDA tensors, in chunks of tokens, so that 1M tokens of one sequence fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapmla.testing.attend import Chunk, Rows, attend, check_modelled
from snapmla.testing.rounding import FP8, FP64, QuantConfig, quantise_cache, quantise_query


@dataclass(frozen=True)
class Move:
    """A P so near the middle of two e4m3 values that a kernel may round it to the other one.

    Attributes:
        row: index of the row in ``mla_decode_reference``'s out.
        step: (512,) fp64, what that adds to the row.
    """

    row: tuple[int, ...]
    step: Tensor


def _chunk_tokens(config: QuantConfig, device: torch.device) -> int:
    """Tokens handled at once: a multiple of every block in use (and of any page size)."""
    unit = math.lcm(2 * config.p_block, config.group, 128)
    return max(1, (65536 if device.type == "cuda" else 1024) // unit) * unit


def _pad(x: Tensor, to: int, value: float = 0.0) -> Tensor:
    if len(x) == to:
        return x
    filler = torch.full((to - len(x), *x.shape[1:]), value, device=x.device)
    return torch.cat((x, filler.to(x.dtype)))


def visible_tokens(
    length: int,
    s_q: int,
    heads: int,
    causal: bool,
    device: torch.device,
    row_seqlens: Tensor | None = None,
) -> Tensor:
    """Visible tokens of row s * heads + h (R,), by the causal rule or as ``row_seqlens`` (s_q,)."""
    if row_seqlens is not None:
        return row_seqlens.long().clamp(0, length).repeat_interleave(heads)
    behind = (s_q - 1 - torch.arange(s_q, device=device)) * int(causal)
    return (length - behind).clamp_min(0).repeat_interleave(heads)


def _to_shape(
    out: Tensor,
    lse: Tensor,
    s_q: int,
    heads: int,
    lse_base: str,
    empty_lse: float | str,
    config: QuantConfig,
) -> tuple[Tensor, Tensor]:
    """(s_q, h, 512), (h, s_q) of one sequence from rows (R, 512) and log2 LSE (R,)."""
    factor = torch.tensor(math.log(2.0) if lse_base == "e" else 1.0, dtype=torch.float64)
    scaled = lse * factor
    if config.arithmetic == "fused":
        scaled = (lse * factor.float().double()).float().double()
    scaled = torch.where(torch.isneginf(lse), float(empty_lse), scaled)
    return out.unflatten(0, (s_q, heads)), scaled.unflatten(0, (s_q, heads)).T


def mla_decode_reference(
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
    cu_seqlens_q: Tensor | None = None,
    row_seqlens: Tensor | None = None,
    config: QuantConfig = FP64,
    batches: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    lse_base: str = "e",
    empty_lse: float | str = "-inf",
    moves: list[Move] | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode over a paged cache of *stored* (quantised) tensors.

    Args:
        q_nope: (b, s_q, h, 512) float8_e4m3fn; ragged queries (total_q, h, 512).
        q_rope: (b, s_q, h, 64) bfloat16, divided by q_scale; (total_q, h, 64).
        q_scale: (b, s_q, h) float32, or (b, s_q) for one scale per token; (total_q, h), (total_q,).
        content: (pages, P, 512) float8_e4m3fn, any strides.
        rope: (pages, P, 64) bfloat16, divided by ``scale``.
        scale: (pages, P) float32.
        block_table: (b, width) int32 or int64 page ids; entries past a sequence's end are not read.
        cache_seqlens: (b,) int32 or int64, tokens of each sequence.
        softmax_scale: factor of the logits.
        causal: query s sees the first cache_seqlens - (s_q - 1 - s) tokens.
        cu_seqlens_q: (b + 1,) int32 or int64, beside ragged queries: where each sequence's query
            tokens begin.
        row_seqlens: (b, s_q) or (total_q,) int32 or int64: how many tokens each query token sees,
            instead.
        config: rounding points and accumulation.
        batches, heads: indices to compute, in that order; None: all.
        lse_base: ``e`` or ``2``.
        empty_lse: LSE of a row that sees no token.
        moves: a list that gets a ``Move`` of each P, of P in one term, whose rounding to e4m3 the
            last places of logarithms and powers decide; None: they are not looked for.

    Returns:
        (out (len(batches), s_q, len(heads), 512), lse (len(batches), len(heads), s_q)), fp64; of
        ragged queries (tokens, len(heads), 512), (len(heads), tokens), the query tokens of those
        sequences one after another.

    Raises:
        ValueError: naming the argument.

    Source: SnapMLA paper, Eq. 6 and Algorithm 1, with the rounding of docs/numerics.md.
    """
    if lse_base not in ("e", "2"):
        raise ValueError(f"lse_base: expected 'e' or '2', got {lse_base!r}")
    num_heads, page_size = q_nope.shape[-2], content.shape[1]
    if q_scale.ndim == q_nope.ndim - 2:
        q_scale = q_scale[..., None].expand(q_nope.shape[:-1])
    check_modelled(config, content)
    pick = list(range(num_heads)) if heads is None else list(heads)
    capacity = block_table.shape[1] * page_size
    results: list[tuple[Tensor, Tensor]] = []
    for i in range(block_table.shape[0]) if batches is None else batches:
        length = min(max(int(cache_seqlens[i]), 0), capacity)
        table = block_table[i, : -(-length // page_size)].long().clamp(0, content.shape[0] - 1)
        own: int | slice = i
        if cu_seqlens_q is not None:
            own = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        limits = None if row_seqlens is None else row_seqlens[own]
        rows = _query_rows(
            q_nope[own][:, pick],
            q_rope[own][:, pick],
            q_scale[own][:, pick],
            length,
            causal,
            limits,
        )
        sigma = scale[table].flatten()[:length].nan_to_num(0.0)
        chunks = _paged_chunks(content, rope, scale, table, length, config)
        top = float(sigma.max()) if length else 1.0
        steps: list[tuple[int, Tensor]] = []
        result = attend(rows, chunks, softmax_scale, top, config, None if moves is None else steps)
        tokens = len(rows.limit) // len(pick)
        if moves is not None:
            before = sum(len(out) for out, _ in results)
            for row, step in steps:
                token, head = divmod(row, len(pick))
                place = (len(results), token) if cu_seqlens_q is None else (before + token,)
                moves.append(Move((*place, head), step))
        results.append(_to_shape(*result, tokens, len(pick), lse_base, empty_lse, config))
    outs, lses = zip(*results)
    if cu_seqlens_q is not None:
        return torch.cat(outs), torch.cat(lses, 1)
    return torch.stack(outs), torch.stack(lses)


def _query_rows(
    nope: Tensor, rope: Tensor, scale: Tensor, length: int, causal: bool,
    row_seqlens: Tensor | None = None,
) -> Rows:  # fmt: skip
    """Rows of one sequence from nope (s_q, h, 512), rope (s_q, h, 64), scale (s_q, h)."""
    s_q, heads = nope.shape[:2]
    limit = visible_tokens(length, s_q, heads, causal, nope.device, row_seqlens)
    return Rows(nope.flatten(0, 1), rope.flatten(0, 1), scale.flatten(), limit)


def _paged_chunks(
    content: Tensor, rope: Tensor, scale: Tensor, table: Tensor, length: int, config: QuantConfig
) -> Iterator[Chunk]:
    """The tokens of one sequence; the last chunk is padded with zeros under scale 1."""
    page_size = content.shape[1]
    size = _chunk_tokens(config, content.device)
    unit = math.lcm(2 * config.p_block, config.group)
    raw = content.view(torch.uint8)  # indexing float8 is not implemented everywhere
    for start in range(0, length, size):
        pages = table[start // page_size : -(-min(start + size, length) // page_size)]
        n = min(size, length - start)
        padded = -(-n // unit) * unit
        yield Chunk(
            start,
            _pad(raw[pages].flatten(0, 1)[:n], padded).view(content.dtype),
            _pad(rope[pages].flatten(0, 1)[:n], padded),
            _pad(scale[pages].flatten()[:n], padded, 1.0),
        )


def reference_from_unquantised(
    q_nope: Tensor,
    q_rope: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    softmax_scale: float,
    *,
    lengths: Sequence[int] | None = None,
    causal: bool = True,
    config: QuantConfig = FP64,
    lse_base: str = "e",
    empty_lse: float | str = "-inf",
) -> tuple[Tensor, Tensor]:
    """Decode of unquantised inputs, quantised here as ``config`` says (the paper's Table 2).

    Args:
        q_nope, q_rope: (b, s_q, h, 512), (b, s_q, h, 64) floating point.
        c_kv, k_rope: (b, L, 512), (b, L, 64) floating point.
        softmax_scale, causal, lse_base, empty_lse: as in ``mla_decode_reference``.
        lengths: tokens of each sequence; None: L.
        config: rounding points, granularity of scales, accumulation.

    Returns:
        (out (b, s_q, h, 512), lse (b, h, s_q)), fp64.

    Raises:
        ValueError: naming the argument.

    Source: SnapMLA paper, Table 2 and Figure 4.
    """
    s_q, heads = q_nope.shape[1:3]
    results = []
    for i in range(q_nope.shape[0]):
        length = c_kv.shape[1] if lengths is None else lengths[i]
        k8, rope, sigma = quantise_cache(c_kv[i, :length], k_rope[i, :length], config)
        check_modelled(config, k8)
        rows = _query_rows(*quantise_query(q_nope[i], q_rope[i], config), length, causal)
        chunks = _plain_chunks(k8, rope, sigma, config)
        result = attend(rows, chunks, softmax_scale, float(sigma.max()) if length else 1.0, config)
        results.append(_to_shape(*result, s_q, heads, lse_base, empty_lse, config))
    return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


def _plain_chunks(k8: Tensor, rope: Tensor, sigma: Tensor, config: QuantConfig) -> Iterator[Chunk]:
    size = _chunk_tokens(config, k8.device)
    unit = math.lcm(2 * config.p_block, config.group)
    raw = k8.view(torch.uint8) if k8.dtype == FP8 else k8
    for start in range(0, len(sigma), size):
        part = slice(start, start + size)
        n = len(sigma[part])
        padded = -(-n // unit) * unit
        yield Chunk(
            start,
            _pad(raw[part], padded).view(k8.dtype),
            _pad(rope[part], padded),
            _pad(sigma[part], padded, 1.0),
        )


def merge_states_reference(
    outs: Tensor, lses: Tensor, *, lse_base: str = "e"
) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint sets of tokens, as ``snapmla.merge_states``, in fp64.

    Args:
        outs: (n, ..., tokens, h, d_v) floating point, partial results over disjoint sets of tokens.
        lses: (n, ..., h, tokens), to base ``lse_base``; infinite, of either sign, where a part has
            seen no token.
        lse_base: ``e`` or ``2``.

    Returns:
        (out (..., tokens, h, d_v), lse (..., h, tokens)), fp64; 0 and the first part's LSE where
        all parts are empty.
    """
    factor = math.log(2.0) if lse_base == "e" else 1.0
    logs, empty = lses.double(), torch.isinf(lses)
    seen = torch.where(empty | torch.isnan(logs), -torch.inf, logs)
    top = seen.amax(0).nan_to_num(0.0, neginf=0.0)
    weight = torch.where(empty, 0.0, torch.exp2((logs - top) / factor))
    total = weight.sum(0)
    values = torch.where(empty.mT[..., None], 0.0, outs.double())
    out = (weight.mT[..., None] * values).sum(0) / torch.where(total == 0, 1.0, total).mT[..., None]
    lse = top + torch.log2(total) * factor
    return out, torch.where(empty.all(0), lses[0].double(), lse)

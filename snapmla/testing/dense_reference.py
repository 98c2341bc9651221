"""MLA decode over a 16-bit cache in plain torch, fp64: the definition, term by term.

Streams over tokens, so that 1M of one sequence fit.  NaN and infinity of tokens and queries go
where the sums take them; a token that a row does not see has no part in it, whatever it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapmla.testing.reference import visible_tokens
from snapmla.testing.rounding import D_V

CHUNK = 16384  # tokens


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a batch.

    Attributes:
        q: (s_q, h, 576).
        table: (pages,) int64, of the tokens that it has.
        length: tokens.
        limit: (s_q,) how many of them each query token sees.
    """

    q: Tensor
    table: Tensor
    length: int
    limit: Tensor

    def rows(self, head: int, group: int) -> Tensor:
        """Query rows (s_q * group, 576) of a KV head, fp64."""
        return self.q[:, head * group : (head + 1) * group].flatten(0, 1).double()


def _sequences(
    q: Tensor, kv: Tensor, block_table: Tensor, cache_seqlens: Tensor, causal: bool,
    cu_seqlens_q: Tensor | None, row_seqlens: Tensor | None, batches: Sequence[int] | None,
) -> Iterator[_Sequence]:  # fmt: skip
    """Arguments as of ``dense_decode_reference``."""
    page_size, width = kv.shape[1], block_table.shape[1]
    for i in range(block_table.shape[0]) if batches is None else batches:
        length = min(max(int(cache_seqlens[i]), 0), width * page_size)
        table = block_table[i, : -(-length // page_size)].long().clamp(0, kv.shape[0] - 1)
        own: int | slice = i
        if cu_seqlens_q is not None:
            own = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        limits = None if row_seqlens is None else row_seqlens[own]
        limit = visible_tokens(length, q[own].shape[0], 1, causal, q.device, limits)
        yield _Sequence(q[own], table, length, limit)


def dense_decode_reference(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    *,
    causal: bool = True,
    cu_seqlens_q: Tensor | None = None,
    row_seqlens: Tensor | None = None,
    batches: Sequence[int] | None = None,
    lse_base: str = "e",
    empty_lse: float | str = "-inf",
) -> tuple[Tensor, Tensor]:
    """softmax(softmax_scale * Q K^T) V, where K is a row of 576 channels and V its first 512.

    Args:
        q: (b, s_q, h, 576) floating point; ragged queries (total_q, h, 576).
        kv: (pages, P, h_kv, 576) floating point, any strides; query heads j * g to (j + 1) * g - 1
            read KV head j, where g = h / h_kv.
        block_table: (b, width) int32 or int64 page ids; entries past a sequence's end are not read.
        cache_seqlens: (b,) int32 or int64, tokens of each sequence; clamped to the table.
        softmax_scale: factor of the logits.
        causal: query s sees the first cache_seqlens - (s_q - 1 - s) tokens.
        cu_seqlens_q: (b + 1,) int32 or int64, beside ragged queries: where each sequence's query
            tokens begin.
        row_seqlens: (b, s_q) or (total_q,) int32 or int64: how many tokens each query token sees,
            instead.
        batches: sequences to compute, in that order; None: all.
        lse_base: ``e`` or ``2``.
        empty_lse: LSE of a row that sees no token; its output is 0.

    Returns:
        (out (len(batches), s_q, h, 512), lse (len(batches), h, s_q)), fp64; of ragged queries
        (tokens, h, 512), (h, tokens), the query tokens of those sequences one after another.

    Raises:
        ValueError: naming the argument.

    Source: DeepSeek-V2 paper, Eq. 9 to 19 with W_UK and W_UV absorbed; what FlashMLA computes.
    """
    if lse_base not in ("e", "2"):
        raise ValueError(f"lse_base: expected 'e' or '2', got {lse_base!r}")
    heads, kv_heads = q.shape[-2], kv.shape[2]
    if heads % kv_heads:
        raise ValueError(f"q: expected a multiple of {kv_heads} heads, got {heads}")
    outs, lses, group = [], [], heads // kv_heads
    for each in _sequences(
        q, kv, block_table, cache_seqlens, causal, cu_seqlens_q, row_seqlens, batches
    ):
        tokens, limit, results = len(each.q), each.limit.repeat_interleave(group), []
        for j in range(kv_heads):
            chunks = _chunks(kv[:, :, j], each.table, each.length)
            results.append(_attend(each.rows(j, group) * softmax_scale, limit, chunks))
        out, lse = (torch.stack(part, 0).unflatten(1, (tokens, group)) for part in zip(*results))
        outs.append(out.permute(1, 0, 2, 3).flatten(1, 2))  # (tokens, h, 512)
        lses.append(lse.permute(0, 2, 1).flatten(0, 1))  # (h, tokens)
    ragged = cu_seqlens_q is not None
    out = torch.cat(outs) if ragged else torch.stack(outs)
    lse = torch.cat(lses, 1) if ragged else torch.stack(lses)
    factor = 1.0 if lse_base == "e" else math.log2(math.e)
    return out, torch.where(torch.isneginf(lse), float(empty_lse), lse * factor)


def logit_magnitudes(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    of: Tensor,
    *,
    causal: bool = True,
    cu_seqlens_q: Tensor | None = None,
    row_seqlens: Tensor | None = None,
    batches: Sequence[int] | None = None,
) -> Tensor:
    """The largest |softmax_scale| * sum_c |q_c k_c| of the tokens that a row sees.

    Times the rounding of an addition it is what the sum of products of a logit may be off by, and
    as P weighs logits by 1 in all, what their LSE may be.

    Args:
        of: bool in the shape of the LSE that ``dense_decode_reference`` returns for the other
            arguments: which rows to look at.

    Returns:
        fp64 in the shape of ``of``: 0 where it is False and where a row sees no token; NaN or
        infinite where a query or a token that is seen is.
    """
    kv_heads, group = kv.shape[2], q.shape[-2] // kv.shape[2]
    found, end = torch.zeros(of.shape, dtype=torch.float64, device=of.device), 0
    for number, each in enumerate(
        _sequences(q, kv, block_table, cache_seqlens, causal, cu_seqlens_q, row_seqlens, batches)
    ):
        begin, end = end, end + len(each.q)
        at = number if cu_seqlens_q is None else (slice(None), slice(begin, end))
        asked, largest = of[at].T, found[at].T  # (s_q, h)
        for j in range(kv_heads):
            own = slice(j * group, (j + 1) * group)
            token, head = asked[:, own].nonzero(as_tuple=True)
            if not len(token):
                continue
            rows = each.q[token, j * group + head].double().abs() * abs(softmax_scale)
            chunks = _chunks(kv[:, :, j], each.table, each.length)
            largest[token, j * group + head] = _largest(rows, each.limit[token], chunks)
    return found


def _largest(rows: Tensor, limit: Tensor, chunks: Iterator[Tensor]) -> Tensor:
    """max over the first ``limit`` (R,) tokens of rows (R, 576) . |token|; (R,), 0 of none."""
    top, start = rows.new_zeros(len(rows)), 0
    for keys in chunks:
        seen = start + torch.arange(len(keys), device=rows.device) < limit[:, None]
        start += len(keys)
        top = torch.maximum(top, torch.where(seen, rows @ keys.abs().T, 0.0).amax(1))
    return top


def _chunks(pool: Tensor, table: Tensor, length: int) -> Iterator[Tensor]:
    """Rows (n, 576) of a sequence in fp64, ``CHUNK`` tokens or less at a time."""
    page_size = pool.shape[1]
    size = max(1, CHUNK // page_size)
    for first in range(0, len(table), size):
        rows = pool[table[first : first + size]].flatten(0, 1)
        yield rows[: length - first * page_size].double()


def _attend(q: Tensor, limit: Tensor, chunks: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """(out (R, 512), natural LSE (R,)) of scaled rows q (R, 576) that see ``limit`` (R,) tokens."""
    top = torch.full((len(q),), -math.inf, dtype=torch.float64, device=q.device)
    mass, out = torch.zeros_like(top), q.new_zeros(len(q), D_V)
    start = 0
    for rows in chunks:
        seen = start + torch.arange(len(rows), device=q.device) < limit[:, None]
        start += len(rows)
        logits = torch.where(seen, q @ rows.T, -math.inf)
        new = torch.maximum(top, logits.amax(1))
        m_ref = torch.where(torch.isneginf(new), 0.0, new)
        p, kept = torch.where(seen, torch.exp(logits - m_ref[:, None]), 0.0), torch.exp(top - m_ref)
        mass = mass * kept + p.sum(1)
        out = out * kept[:, None] + _product(p, seen, rows[:, :D_V])
        top = new
    empty = mass == 0
    out = torch.where(empty[:, None], 0.0, out / mass[:, None])
    return out, torch.where(empty, -math.inf, top + torch.log(mass))


def _product(p: Tensor, seen: Tensor, v: Tensor) -> Tensor:
    """P V, to which tokens add nothing where a row does not see them, NaN or not."""
    finite = torch.isfinite(v)
    total = p @ torch.where(finite, v, 0.0)
    for t in (~finite).any(1).nonzero()[:, 0].tolist():
        only = torch.where(finite[t], 0.0, v[t])
        total += torch.where(seen[:, t, None], p[:, t, None] * only, 0.0)
    return total

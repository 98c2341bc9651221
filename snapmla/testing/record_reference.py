"""Sparse decode over caches of bytes (``dsl_kernels.formats``: rows of 656 bytes, V4's pages)
in plain torch: the truth, and the rounding of 16-bit products.

A query token's list becomes a sequence of dense decode's reference, whose pool is the cache in
fp64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dsl_kernels.formats import ds_mla
from dsl_kernels.formats.dims import TOKEN_TILE
from dsl_kernels.formats.format import ZEROS, Format
from snapmla.cache import byte_cache
from snapmla.testing.dense_reference import dense_decode_reference, logit_magnitudes

LOG2E = math.log2(math.e)
P_LOG2_MAX, HEADROOM = 8.0, 15.0  # of the kernels' m_ref (dsl_kernels/sm90/online_softmax.py)
APART = 2.0**-40  # dsl_kernels/sm90/bytes16/mix16_parts.py


Fields = tuple[Tensor, Tensor, Tensor]


def fields_of(cache: Tensor, record: Format = ds_mla.FORMAT) -> Fields:
    """(e4m3 content (N, channels), scales (N, groups), RoPE (N, 64)) of all tokens of a cache
    (pages, P, bytes of a token) u8, in fp64.

    Where a scale of 0 says so, a group that has it has content 0, whatever its bytes are.
    """
    content, rope, scales = (
        x.flatten(0, 1).float().double() for x in byte_cache.fields_of(record, cache[:, :, None])
    )
    if record.zero_scale == ZEROS:
        of_none = (scales == 0).repeat_interleave(record.group, -1)
        content = torch.where(of_none, 0.0, content)
    return content, scales, rope


class RecordCall(NamedTuple):
    """Inputs of a sparse decode over a cache of bytes.

    Attributes:
        q: (tokens, h, channels of K) floating point.
        cache: (pages, P, bytes of a token) u8, any strides that the record has.
        indices: (tokens, topk) int32, page * P + offset; what is negative or behind the pool is no
            token.
        counts: (tokens,) how many entries of each row count.
        softmax_scale: factor of the logits.
        attn_sink: (h,) logits that weigh in ``out`` and have no value; None: there are none.
        record: of the cache.
        extra: a second list, over a second cache: (cache, indices, counts), as those of the first.
    """

    q: Tensor
    cache: Tensor
    indices: Tensor
    counts: Tensor
    softmax_scale: float
    attn_sink: Tensor | None = None
    record: Format = ds_mla.FORMAT
    extra: tuple[Tensor, Tensor, Tensor] | None = None

    def named(self, i: int) -> tuple[Tensor, Tensor]:
        """(the entries of row i that count, int64; which of them name a token).

        With a second list its entries follow the first one's whole tiles, and name tokens behind
        those of the first cache.
        """
        row, named = _named(self.cache, self.indices[i], int(self.counts[i]))
        if self.extra is None:
            return row, named
        cache, indices, counts = self.extra
        other, other_named = _named(cache, indices[i], int(counts[i]))
        idle = -(-self.indices.shape[1] // TOKEN_TILE) * TOKEN_TILE - len(row)
        behind = other + self.cache.shape[0] * self.cache.shape[1]
        none = torch.zeros(idle, dtype=torch.bool)
        return torch.cat((row, none.long(), behind)), torch.cat((named, none, other_named))

    def fields(self) -> Fields:
        """``fields_of`` of both caches."""
        caches = [self.cache, *(self.extra or ())[:1]]
        found = [fields_of(cache, self.record) for cache in caches]
        content, scales, rope = (torch.cat(each) for each in zip(*found, strict=True))
        return content, scales, rope

    def sequences(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, kv, block_table, cache_seqlens) of the dense reference: pages of one token."""
        lists = [row[named] for row, named in map(self.named, range(len(self.q)))]
        lengths = torch.tensor([len(x) for x in lists])
        table = torch.zeros(len(lists), max(int(lengths.max()), 1), dtype=torch.long)
        for i, tokens in enumerate(lists):
            table[i, : len(tokens)] = tokens
        content, scales, rope = self.fields()
        kv = torch.cat((content * scales.repeat_interleave(self.record.group, -1), rope), -1)
        kv = kv[:, None, None]
        return self.q[:, None].double(), kv, table, lengths


def _named(cache: Tensor, row: Tensor, count: int) -> tuple[Tensor, Tensor]:
    own = row[: max(count, 0)].long()
    return own, (own >= 0) & (own < cache.shape[0] * cache.shape[1])


def record_decode_reference(call: RecordCall) -> tuple[Tensor, Tensor]:
    """(out (tokens, h, 512), natural lse (h, tokens)), fp64; empty rows have out 0, lse -inf."""
    out, lse = dense_decode_reference(*call.sequences(), call.softmax_scale, causal=False)
    return _with_sink(call, out[:, 0], lse[..., 0].T)


def magnitudes_of(call: RecordCall, of: Tensor) -> Tensor:
    """(h, tokens) the largest softmax_scale * sum |q k| among a row's tokens, where ``of`` asks."""
    found = logit_magnitudes(*call.sequences(), call.softmax_scale, of.T[..., None], causal=False)
    return found[..., 0].T


def record_decode_mimic(call: RecordCall, group_sums: bool) -> tuple[Tensor, Tensor]:
    """The same with the rounding of pipeline ``mix16``, one item a query token.

    Args:
        group_sums: whether Q.K sums groups by themselves, K exact (32 rows and fewer); else K is
            rounded as V is.
    """
    outs, lses, fields = [], [], call.fields()
    for i, q in enumerate(call.q.double()):
        row, named = call.named(i)
        out, lse = _attend(q * call.softmax_scale, call.record, fields, row, named, group_sums)
        outs.append(out)
        lses.append(lse)
    return _with_sink(call, torch.stack(outs), torch.stack(lses, 1))


def _with_sink(call: RecordCall, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    if call.attn_sink is None:
        return out, lse
    kept = torch.sigmoid(lse - call.attn_sink.double()[:, None])
    return torch.where(torch.isneginf(lse), 1.0, kept).T[..., None] * out, lse


def _attend(
    q: Tensor, record: Format, fields: Fields, row: Tensor, named: Tensor, group_sums: bool
) -> tuple[Tensor, Tensor]:
    """(out (h, 512), lse (h,)) of scaled rows ``q`` (h, channels of K)."""
    heads, channels = len(q), record.channels if record.rope_in_v else record.content.count
    m_ref, mass = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
    out, largest, fresh = torch.zeros(heads, channels, dtype=torch.float64), 0.0, True
    for first in range(0, len(row), TOKEN_TILE):
        ids = row[first : first + TOKEN_TILE][named[first : first + TOKEN_TILE]]
        if not len(ids):
            continue
        content, scales, rope = (x[ids] for x in fields)
        largest = max(largest, float(scales.max()))
        sigma = scales.amax(1).clamp_min(max(largest * APART, 2.0**-126))
        ratio = (scales / sigma[:, None]).half()
        value = (content.half() * ratio.repeat_interleave(record.group, 1)).double()
        exact = content * scales.repeat_interleave(record.group, 1)
        key = torch.cat((exact if group_sums else value * sigma[:, None], rope), 1)
        t = (q @ key.T) * LOG2E + torch.log2(sigma)
        m = t.amax(1)
        moved = torch.where((m > m_ref + HEADROOM) | fresh, m - P_LOG2_MAX, m_ref)
        kept = torch.zeros_like(mass) if fresh else torch.exp2(m_ref - moved)
        m_ref, fresh = moved, False
        p = torch.exp2(t - m_ref[:, None])
        mass = mass * kept + (p / sigma).sum(1)
        added = p.half().double() @ value
        if record.rope_in_v:  # whose products are BF16's
            added = torch.cat((added, (p / sigma).bfloat16().double() @ rope), 1)
        out = out * kept[:, None] + added
    if fresh:
        return out, torch.full((heads,), -math.inf, dtype=torch.float64)
    return out / mass[:, None], (torch.log2(mass) + m_ref) / LOG2E

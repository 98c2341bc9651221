"""Calls on a 16-bit cache that kernels see otherwise: several KV heads, one page a sequence.

A kernel's sequence has one KV head, and the query heads that share it: (sequence, KV head) is its
sequence number sequence * num_kv_heads + KV head.  Its pages have at most 128 tokens; larger ones
are several of 64 (``layouts.small_pages``).  What follows from that are tables, and where rows must
be moved copies, made on the device by a few small launches a call, with no synchronisation: graphs
capture them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from snapmla.cache import layouts

if TYPE_CHECKING:
    from snapmla.dense import DecodePlan
    from snapmla.dense.witness import Witness

Lengths = tuple[Tensor, Tensor | None, Tensor | None]


class Regrouped(NamedTuple):
    """A call as kernels take it; ``b`` counts (sequence, KV head) and ``g`` heads that share one.

    Attributes:
        q: (b, s_q, g, 576); ragged queries (1, tokens, g, 576), each sequence's tokens for its
            first KV head, then for the next.
        block_table, cache_seqlens: (b, width), (b,).
        out: (b, s_q, g, 512), the caller's memory where ``moved`` is False.
        lse: (b, g, s_q).
        order: of ragged queries with several KV heads: where row t of theirs is among the caller's,
            numbered token * num_kv_heads + KV head.
        moved: whether ``back`` has something to do.
    """

    q: Tensor
    block_table: Tensor
    cache_seqlens: Tensor
    out: Tensor
    lse: Tensor
    order: Tensor | None = None
    moved: bool = False


def _each(table: Tensor, heads: int) -> Tensor:
    """Rows of a table, each ``heads`` times."""
    rows = table.unsqueeze(1).expand(-1, heads, *table.shape[1:]).flatten(0, 1)
    return rows.contiguous()  # a single one is not copied yet


def lengths(
    plan: DecodePlan,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None,
    row_seqlens: Tensor | None,
) -> Lengths:
    """Converts ``plan.update_``'s tables to the form that the planning kernel takes.

    Each KV head becomes a sequence of its own, and ``row_seqlens`` becomes flat.
    """
    heads = plan.num_kv_heads
    own = _each(cache_seqlens, heads)
    if cu_seqlens_q is None:
        return own, None, None if row_seqlens is None else _each(row_seqlens, heads).view(-1)
    begin = cu_seqlens_q.clamp(0, plan.total_q)
    count = (begin[1:] - begin[:-1]).clamp_min(0)
    first = begin[:-1, None] * heads + count[:, None] * _numbers(heads, begin)
    begins = torch.cat([first.flatten(), begin[-1:] * heads])
    if row_seqlens is not None:
        order = _order(first.flatten(), _each(count, heads), heads, plan.total_q)
        row_seqlens = row_seqlens[order // heads]
    return own, begins, row_seqlens


def _numbers(count: int, like: Tensor) -> Tensor:
    """0, 1, ..., as ``like`` makes them, which may be a tracer's stand-in."""
    return like.new_ones(count).cumsum(0, dtype=like.dtype) - 1


def _order(first: Tensor, count: Tensor, heads: int, total_q: int) -> Tensor:
    """``Regrouped.order``, int64 (total_q * heads,).

    Args:
        first, count: begin and number of each (sequence, KV head)'s rows among the kernel's; those
            that belong to none stay where they are.
    """
    row = _numbers(total_q * heads, first)
    owner = (torch.searchsorted(first, row, right=True) - 1).clamp_min(0)
    offset = row - first[owner]
    token = first[owner - owner % heads] // heads + offset
    moved = (offset >= 0) & (offset < count[owner])
    return torch.where(moved, token * heads + owner % heads, row).clamp(0, total_q * heads - 1)


def _order_of(plan: DecodePlan) -> Tensor:
    """``_order`` of a plan's units, which know the rows of each sequence that has any."""
    begin, rows = plan.unit_begin.long(), plan.units.long() // plan.group
    at = begin[:-1].clamp_max(max(len(rows) - 1, 0))
    some = begin[1:] > begin[:-1]
    end = (rows[at, 1] * some).cummax(0).values
    before = torch.cat([torch.zeros_like(end[:1]), end[:-1]])
    first = torch.where(some, rows[at, 0], before)
    count = (rows[at, 1] - first) * some
    return _order(first, count, plan.num_kv_heads, plan.total_q)


def regroup(
    plan: DecodePlan,
    q: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
) -> Regrouped:
    """A checked call of a plan that ``regroups``; ``back`` brings home what it wrote."""
    heads, group = plan.num_kv_heads, plan.group
    share = plan.page_size // layouts.kernel_page_size(plan.page_size)
    if share > 1:
        block_table = block_table.unsqueeze(2) * share + _numbers(share, block_table)
        block_table = block_table.flatten(1)
    if heads == 1:
        if plan.s_q is None:
            q, out, lse = q.unsqueeze(0), out.unsqueeze(0), lse.unsqueeze(0)
        return Regrouped(q, block_table, cache_seqlens, out, lse)
    tables = (_each(block_table, heads), _each(cache_seqlens, heads))
    if plan.s_q is None:
        order = _order_of(plan)
        # rows of no sequence keep what they hold, so results are brought along
        q, out = (_rows(x, group).index_select(0, order).unsqueeze(0) for x in (q, out))
        lse = _columns(lse, plan).flatten(1).index_select(1, order).unsqueeze(0)
        return Regrouped(q, *tables, out, lse, order, moved=True)
    # of one sequence the reshaped query would still be a view with strides of its own
    q = _by_head(q, plan).reshape(plan.sequences, plan.s_q, group, -1).contiguous()
    lse = lse.view(plan.sequences, group, plan.s_q)
    shape = (plan.sequences, plan.s_q, group, out.shape[-1])
    if plan.s_q == 1:
        return Regrouped(q, *tables, out.view(shape), lse)
    return Regrouped(q, *tables, out.new_empty(shape), lse, moved=True)


def _by_head(rows: Tensor, plan: DecodePlan) -> Tensor:
    """(b, s_q, h, d) as (b, num_kv_heads, s_q, g, d), a view."""
    return rows.unflatten(2, (plan.num_kv_heads, plan.group)).transpose(1, 2)


def _rows(rows: Tensor, group: int) -> Tensor:
    """(total_q, h, d) as (total_q * num_kv_heads, g, d), a view."""
    return rows.view(-1, group, rows.shape[-1])


def _columns(lse: Tensor, plan: DecodePlan) -> Tensor:
    """(h, total_q) as (g, total_q, num_kv_heads), a view."""
    return lse.view(plan.num_kv_heads, plan.group, plan.total_q).permute(1, 2, 0)


def witness(plan: DecodePlan, own: Witness | None) -> Witness | None:
    """A call's witness as kernels see sequences.

    With several KV heads ``cu_seqlens_q`` is left to ``void_moved``: an item's rows are those of a
    head, whose places follow from all of a sequence's offsets and not from its own alone.
    """
    if own is None or plan.num_kv_heads == 1:
        return own
    offsets, limits = own
    if limits is not None:
        _, _, limits = lengths(plan, limits.new_zeros(plan.batch), offsets, limits)
    return own._replace(cu_seqlens_q=None, row_seqlens=limits)


def void_moved(plan: DecodePlan, own: Witness | None, out: Tensor, lse: Tensor) -> None:
    """NaN in query tokens of sequences that ``cu_seqlens_q`` has elsewhere than the plan; of
    several KV heads."""
    if own is None or own.cu_seqlens_q is None or plan.num_kv_heads == 1:
        return
    begin, rows = plan.unit_begin[:: plan.num_kv_heads].long(), plan.units.long() // plan.group
    after = plan.unit_begin[1 :: plan.num_kv_heads].long()
    at, some = begin[: plan.batch].clamp_max(max(len(rows) - 1, 0)), after > begin[: plan.batch]
    planned = rows[at, 0] // plan.num_kv_heads
    count = (rows[at, 1] - rows[at, 0]) * some
    offsets = own.cu_seqlens_q.long().clamp(0, plan.total_q)
    first, end = offsets[:-1], torch.maximum(offsets[1:], offsets[:-1])
    moved = (count != end - first) | (some & (planned != first))
    token = _numbers(plan.total_q, offsets)
    owner = (torch.searchsorted(offsets, token, right=True) - 1).clamp(0, plan.batch - 1)
    mine = (token >= offsets[0]) & (token < offsets[-1]) & moved[owner]
    out.masked_fill_(mine[:, None, None], math.nan)
    lse.masked_fill_(mine, math.nan)


def back(plan: DecodePlan, call: Regrouped, out: Tensor, lse: Tensor) -> None:
    """Writes a call's results to where the caller has them."""
    if not call.moved:
        return
    if call.order is None:
        heads, s_q = plan.num_kv_heads, call.out.shape[1]
        _by_head(out, plan).copy_(call.out.view(plan.batch, heads, s_q, plan.group, -1))
        return
    _rows(out, plan.group).index_copy_(0, call.order, call.out[0])
    columns = _columns(lse, plan)
    moved = torch.empty_like(call.lse[0]).index_copy_(1, call.order, call.lse[0])
    columns.copy_(moved.view(columns.shape))

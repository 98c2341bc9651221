"""The work list of a decode kernel, whatever its arch, cache format or MMA.

A *part* (one CTA, or one cluster) walks its work tiles; a work tile is (sequence, first tile, end
tile, split) and the *unit* of query rows that sees those tokens: a whole sequence's row blocks, or
some of them.  Its result goes to ``out`` (split -1) or to a split of partial results.  Lengths and
tables live on the device and are clamped here.

Query rows are numbered over all sequences, in the memory order of the queries: row
token * num_heads + head, where the tokens of a sequence are neighbours.  So ragged batches look
like even ones, and only the plan knows where a sequence's rows begin.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..blocks import compat
from ..formats.dims import ITEM_WORDS

LOG2E = math.log2(math.e)
NOWHERE = 2**31 - 1  # split of a work tile whose results are not stored


class Work(NamedTuple):
    """The plan's tables, and those that say where a sequence's tokens are."""

    block_table: cute.Tensor  # (b, width)
    cache_seqlens: cute.Tensor  # (b,)
    work_items: cute.Tensor  # (n_items, ITEM_WORDS), see ``work_tile_at`` and ``rows_at``
    part_begin: cute.Tensor  # (parts + 1,)
    row_limits: cute.Tensor  # (tokens,): how many cached tokens a query token sees; or (0,)
    cu_seqlens_q: Any = None  # (b + 1,): the call's own, a witness of the plan's; or (0,)


class PagedWork(NamedTuple):
    """``Work`` of pages whose size a call says."""

    block_table: cute.Tensor  # i32 (b, width)
    cache_seqlens: cute.Tensor  # i32 (b,)
    work_items: cute.Tensor
    part_begin: cute.Tensor
    row_limits: cute.Tensor
    cu_seqlens_q: cute.Tensor  # as ``Work``'s
    by_page: compat.FastDivisor  # by tokens of a page


class TwoWork(NamedTuple):
    """``Work`` with a second list."""

    block_table: cute.Tensor  # i32 (b_q, s_q, topk)
    cache_seqlens: cute.Tensor  # i32 (b,): topk_length
    work_items: cute.Tensor
    part_begin: cute.Tensor
    row_limits: cute.Tensor
    cu_seqlens_q: cute.Tensor  # as ``Work``'s
    extra_indices: cute.Tensor  # i32 (b_q, s_q, extra_topk)
    extra_length: cute.Tensor  # i32 (b,)


class Call(NamedTuple):
    """Scalars of a call."""

    by_heads: compat.FastDivisor  # a query row by it is (token, head)
    by_tokens: compat.FastDivisor  # a token by it is its place on the first two axes of ``out``
    rows: Int32  # of all queries
    rows_each: Int32  # of every sequence, if each is one unit; 0: work tiles say whose they take
    softmax_scale: Float32
    causal: Int32
    lse_factor: Float32
    empty_lse: Float32
    witness: Any = 0  # Int32; not 0: work tiles are compared with what the call says (``compared``)


def rows_of_each(units: cute.Tensor, rows: Any) -> Any:
    """``Call.rows_each`` of a plan with these ``units``; ``rows``: of one sequence, if all have as
    many."""
    return Int32(cutlass.select_(Int32(units.shape[0]) > 0, Int32(0), Int32(rows)))


class Rows(NamedTuple):
    """The query rows of a work tile that this CTA takes.

    Attributes:
        first: the first one.
        end: behind the sequence's last one; rows from here on are another's.
        of_split: place of the first one in a split of partial results.
        hidden_from: no row of the work tile sees less than this many tokens, if ``row_limits``
            tell.
        stands: 0 if the call's witness contradicts the work tile, whose results are then NaN.
    """

    first: Any
    end: Any
    of_split: Any
    hidden_from: Any
    stands: Any = None


class WorkList:
    """Reads ``Work`` on the device, for pages of ``page_size`` and tiles of ``tile`` tokens.

    A tile is loaded in ``boxes`` boxes of ``box`` tokens, each within one page.
    """

    def __init__(self, page_size: int, tile: int):
        self.page_size, self.tile = page_size, tile
        self.box = min(page_size, tile)
        self.boxes = tile // self.box
        self.tiles_of_page = max(page_size // tile, 1)

    @cute.jit
    def work_tiles_of(self, work, part):
        """(first, end) of a part's work tiles; inside the work list whatever ``part_begin``
        holds."""
        work_tiles = work.work_items.shape[0]
        first, end = work.part_begin[part], work.part_begin[part + 1]
        return compat.at_most(first, work_tiles), compat.at_most(end, work_tiles)

    @cute.jit
    def work_tile_at(self, work, i):
        """(sequence, first tile, end tile, split) of work tile ``i``, safe whatever the work list
        holds.

        Every role reads work tiles here, and so they agree about tiles, which are those of the
        block table: behind its end there are none.  A work tile of a sequence that is not there, or
        that begins before the first tile, has none and goes nowhere; nor does one whose split does
        not exist (``epilogue.write_rows``).
        """
        words = compat.load_words(work.work_items.iterator + i * ITEM_WORDS, 4)
        batch, first, last, split = (Int32(word) for word in words)
        last = compat.at_most(last, self.tiles_of(work))
        there = compat.unsigned(batch) < compat.unsigned(work.cache_seqlens.shape[0])
        if not (there & (first >= 0)):
            batch, last, split = Int32(0), first, Int32(NOWHERE)
        return batch, first, last, split

    def room(self, work):
        """Tokens that a row of the table can name."""
        return work.block_table.shape[1] * self.page_size

    def tiles_of(self, work):
        """Tiles that a row of the table can name."""
        return cute.ceil_div(self.room(work), self.tile)

    @cute.jit
    def rows_at(self, work, call, i, batch, rows_cta: cutlass.Constexpr):
        """``Rows`` of work tile ``i`` of sequence ``batch`` for this CTA, which takes ``rows_cta``.

        Where a sequence is one unit its rows follow from the queries' shape, and what the work tile
        says of them is not used: a work list that was made for another number of rows would name
        another sequence's.  Else ``end`` is a row of the queries whatever the work list holds, and
        ``first`` may be anything: compare it unsigned.
        """
        words = compat.load_words(work.work_items.iterator + (i * ITEM_WORDS + 4), 4)
        of_split = cute.arch.block_idx()[0] * rows_cta
        first, end, hidden_from = (Int32(word) for word in words[:3])
        each = call.rows_each
        first = Int32(cutlass.select_(each > 0, batch * each, first))
        end = Int32(cutlass.select_(each > 0, first + each, compat.at_most(end, call.rows)))
        return Rows(first + of_split, end, of_split, hidden_from)

    @cute.jit
    def witnessed_rows_at(self, work, call, i, batch, rows_cta: cutlass.Constexpr):
        """``rows_at``, and whether the work tile stands and what its rows see by the call's
        witness.

        The role asks that masks tokens and finishes rows.  Others do not: to them work tiles are
        what the plan says, and each instruction in front of a work tile's first load would cost all
        calls.
        """
        rows = self.rows_at(work, call, i, batch, rows_cta)
        stands, hidden_from = Int32(1), rows.hidden_from
        if const_expr(work.cu_seqlens_q is not None):  # noqa: SIM102 (only this is at compile time)
            if call.witness != 0:
                stands, hidden_from = self.compared(work, call, i, batch, rows, rows_cta)
        return Rows(rows.first, rows.end, rows.of_split, hidden_from, stands)

    @cute.jit
    def compared(self, work, call, i, batch, rows, rows_cta: cutlass.Constexpr):
        """(``Rows.stands``, ``Rows.hidden_from``) of a work tile, by what the call says itself.

        A work tile stands if its sequence's rows end where ``cu_seqlens_q`` has it and none lies in
        front of them, and if its tiles hold every token that the CTA's rows see.
        """
        words = compat.load_words(work.work_items.iterator + (i * ITEM_WORDS + 4), 4)
        end_of_sequence, hidden_from, most = (Int32(word) for word in words[1:])
        first, end = rows.first, rows.end
        heads, stands = call.by_heads.divisor, Int32(1)
        if work.cu_seqlens_q.shape[0] > 0:
            tokens = call.by_tokens.divisor  # ragged queries are one row of tokens
            begin = cutlass.min(cutlass.max(work.cu_seqlens_q[batch], 0), tokens)
            behind = cutlass.min(cutlass.max(work.cu_seqlens_q[batch + 1], begin), tokens)
            if (end_of_sequence != behind * heads) | (first < begin * heads):
                stands = Int32(0)
        last = cutlass.min(first + rows_cta, end) - 1
        seqlen = self.seqlen_of(work, batch)
        needed = seqlen
        if last < first:  # none of the work tile's rows is this CTA's
            needed = Int32(0)
        elif work.row_limits.shape[0] > 0:
            needed, lowest = Int32(0), Int32(NOWHERE)
            token, _ = divmod(cutlass.max(first, 0), call.by_heads)
            token_of_last, _ = divmod(compat.at_most(last, call.rows - 1), call.by_heads)
            for t in cutlass.range(token, token_of_last + 1, unroll=1):
                limit = cutlass.min(work.row_limits[t], seqlen)
                needed, lowest = cutlass.max(needed, limit), cutlass.min(lowest, limit)
            hidden_from = lowest
        elif call.causal != 0:
            after, _ = divmod(end - 1 - last, call.by_heads)
            needed = seqlen - after
        if needed > cute.ceil_div(most, self.tile) * self.tile:
            stands = Int32(0)
        return stands, hidden_from

    @cute.jit
    def page_of(self, row, tile, lane, num_pages):
        """Page id of this lane's box of ``tile`` (lanes repeat), from the sequence's ``row`` of the
        block table.  Clamped: ids past the sequence's end may be anything, and their tokens are
        masked later."""
        if const_expr(self.page_size > self.tile):
            index = tile // self.tiles_of_page
        else:
            index = tile * self.boxes + lane % self.boxes
        last = row.shape[0] - 1
        page = row[compat.at_most(index, last)]
        page = page if page > 0 else Int32(0)
        return page if page < num_pages else num_pages - 1

    @cute.jit
    def seqlen_of(self, work, batch):
        """Tokens of a sequence, no more than its row of the block table can name."""
        seqlen = work.cache_seqlens[batch]
        most = self.room(work)
        return seqlen if seqlen < most else most

    @cute.jit
    def row_facts(self, work, call, batch, row, end, scale_of=None):
        """(factor of the logits in log2 units, number of visible tokens) of one query row.

        ``end``: of the sequence's rows.  ``scale_of(b, s, head)`` is the row's scale, a Float32,
        at its place in the queries' shape; None: queries have none.
        """
        seqlen = self.seqlen_of(work, batch)
        factor, limit = Float32(0.0), seqlen
        if compat.unsigned(row) < compat.unsigned(end):
            token, head = divmod(row, call.by_heads)
            factor = call.softmax_scale * LOG2E
            if const_expr(scale_of is not None):
                b, s = divmod(token, call.by_tokens)
                factor = scale_of(b, s, head) * factor
            if work.row_limits.shape[0] > 0:
                limit = cutlass.min(work.row_limits[token], seqlen)
            elif call.causal != 0:
                behind, _ = divmod(end - 1 - row, call.by_heads)
                limit = seqlen - behind
        return factor, limit

    @cute.jit
    def ragged_from(self, work, call, batch, rows):
        """First token that some row of the CTA must not see."""
        seqlen = self.seqlen_of(work, batch)
        hidden = Int32(0)
        if (call.causal != 0) & (work.row_limits.shape[0] == 0):
            hidden, _ = divmod(cutlass.max(rows.end - 1 - rows.first, 0), call.by_heads)
        return cutlass.min(seqlen - hidden, rows.hidden_from)

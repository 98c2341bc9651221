"""The work list of a decode kernel, whatever its arch, cache format or MMA.

A *part* (one CTA, or one cluster) walks its items; an item is (sequence, first tile, end tile,
slot): the token tiles of one sequence, whose result goes to ``out`` (slot -1) or to a slot of
partial results.  Lengths and tables live on the device and are clamped here.

Query rows of a sequence are numbered r = s * num_heads + head, the memory order of (s_q, h).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .. import compat

LOG2E = math.log2(math.e)
NOWHERE = 2**31 - 1  # slot of an item whose results are not stored


class Work(NamedTuple):
    """The plan's tables, and those that say where a sequence's tokens are."""

    block_table: cute.Tensor  # (b, width)
    cache_seqlens: cute.Tensor  # (b,)
    work_items: cute.Tensor  # (n_items, 4): batch, first tile, end tile, slot
    part_begin: cute.Tensor  # (parts + 1,)


class Call(NamedTuple):
    """Scalars of a call."""

    num_heads: Int32
    rows: Int32  # num_heads * s_q
    softmax_scale: Float32
    causal: Int32
    lse_factor: Float32
    empty_lse: Float32


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
    def items_of(self, work, part):
        """(first, end) of a part's items; inside the work list whatever ``part_begin`` holds."""
        items = work.work_items.shape[0]
        first, end = work.part_begin[part], work.part_begin[part + 1]
        return compat.at_most(first, items), compat.at_most(end, items)

    @cute.jit
    def item_at(self, work, i):
        """(sequence, first tile, end tile, slot) of item ``i``, safe whatever the work list holds.

        Every role reads items here, and so they agree about tiles, which are those of the block
        table: behind its end there are none.  An item of a sequence that is not there, or that
        begins before the first tile, has none and goes nowhere; nor does one whose slot does not
        exist (``epilogue.rows_written``).
        """
        batch, first, last, slot = (work.work_items[i, x] for x in range(4))
        tiles = cute.ceil_div(work.block_table.shape[1] * self.page_size, self.tile)
        last = compat.at_most(last, tiles)
        there = compat.unsigned(batch) < compat.unsigned(work.cache_seqlens.shape[0])
        if not (there & (first >= 0)):
            batch, last, slot = Int32(0), first, Int32(NOWHERE)
        return batch, first, last, slot

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
        most = work.block_table.shape[1] * self.page_size
        return seqlen if seqlen < most else most

    @cute.jit
    def row_facts(self, work, call, batch, row, scale_of=None):
        """(factor of the logits in log2 units, number of visible tokens) of one query row.

        ``scale_of(batch, s, head)`` is the row's scale, a Float32; None: queries have none.
        """
        seqlen = self.seqlen_of(work, batch)
        factor, limit = Float32(0.0), seqlen
        if row < call.rows:
            s = row // call.num_heads
            factor = call.softmax_scale * LOG2E
            if const_expr(scale_of is not None):
                factor = scale_of(batch, s, row - s * call.num_heads) * factor
            if call.causal != 0:
                limit = seqlen - (call.rows // call.num_heads - 1 - s)
        return factor, limit

    @cute.jit
    def ragged_from(self, work, call, batch):
        """First token that some row of the sequence must not see."""
        hidden = call.rows // call.num_heads - 1 if call.causal != 0 else Int32(0)
        return self.seqlen_of(work, batch) - hidden

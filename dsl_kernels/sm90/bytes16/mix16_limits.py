"""Limits of a work tile's rows, in pipeline ``mix16`` over pages (mix16_pages.py says the rule).

Rows of several query tokens see more or less of a sequence: each row's limit, a number of tokens,
lies in field ``limits``, and what a row must not see is -inf before its exponentials.

A work tile's first tile with a token gives the rows their m_refs: it has one that a row sees if any
tile has, since rows see what comes first.

Shared memory: 4 bytes a row.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...blocks.smem import array
from ...formats.dims import TOKEN_TILE as TILE
from ..fragments import mask, pad_layout, padded_size, row_position
from ..roles import WARPGROUP


class RowLimits:
    """The limits of a CTA's rows.

    Attributes:
        rows: of a CTA.
    """

    def __init__(self, rows: int):
        self.rows = rows

    @property
    def fields(self) -> dict:
        """Storage."""
        return dict(limits=array(Int32, padded_size(self.rows), 128))

    def facts(self, cta, work_list, batch, rows):
        """The rows' limits to shared memory, by the softmax warpgroup; returns the first token that
        some row must not see."""
        work, call = cta.gmem.work, cta.call
        self._note(cta.st, work_list, work, call, batch, rows)
        return cute.arch.make_warp_uniform(work_list.ragged_from(work, call, batch, rows))

    @cute.jit
    def _note(self, st, work_list, work, call, batch, rows):
        tidx, _, _ = cute.arch.thread_idx()
        row, size = tidx % WARPGROUP, const_expr(padded_size(self.rows))
        _, limit = work_list.row_facts(work, call, batch, rows.first + row, rows.end)
        if row < self.rows:
            st.limits.get_tensor(cute.make_layout(size))[row_position(row, self.rows)] = limit

    @cute.jit
    def hide(self, st, t, fragment, tile, ragged_from, wwarp, lane):
        """-inf for what a row must not see of a tile."""
        if (tile + 1) * TILE > ragged_from:
            limit = cute.make_rmem_tensor((fragment.rows,), Int32)
            limits = cute.make_tensor(st.limits.data_ptr(), pad_layout(self.rows))
            cute.autovec_copy(limits[None, lane % 4], limit)
            mask(t, fragment, tile * TILE, limit, wwarp, lane)

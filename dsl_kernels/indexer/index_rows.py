"""index_rows: how many tokens each query token sees, and its sequence's row of the block table.

    lengths[r] = max(0, min(L, most) - n + 1 + j)     tables[r, :] = block_table[i, :]

of row r, the j-th of the n query tokens of sequence i, which has L tokens: what ``index_logits``
scores, in the form that ``select_topk`` reads.  Without ``cu_seqlens_q`` every sequence has ``s_q``
rows, and top-k finds table rows by a division, so that ``tables`` has no rows.

Roles        a warp takes ROWS rows: all lanes look up where sequences begin and copy table rows
             (``packed_rows.py``); no barrier
Memory       registers only
Timeline     wait for the previous grid | sequences of the rows | lengths | table rows
Bytes moved  4 a row written; a warp reads 4 a sequence; with tables 8 a row and column

Rows that no sequence has get length 0, and some table row.  Whatever the tables
hold, nothing outside of the arguments is read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Int32, cute

from ..blocks import compat, quant
from .packed_rows import EACH, ROWS, request_of

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS = 4


@cute.jit
def index_rows(
    cache_seqlens: cute.Tensor,  # i32 (b,)
    cu_seqlens_q: cute.Tensor,  # i32 (b + 1,), or (0,)
    block_table: cute.Tensor,  # i32 (b, width)
    lengths: cute.Tensor,  # i32 (rows,)
    tables: cute.Tensor,  # i32 (rows, columns), columns at most the width; or no rows
    s_q: Int32,
    most: Int32,  # tokens that a sequence can have
    stream: Any,
) -> None:
    """Host half: WARPS * ROWS rows a CTA."""
    rows = lengths.shape[0]
    if rows > 0:  # an empty grid is a launch error
        by = compat.fast_divisor(s_q)
        given = (cache_seqlens, cu_seqlens_q, block_table)
        _rows(given, lengths, tables, s_q, most, by).launch(
            grid=((rows + (WARPS * ROWS - 1)) // (WARPS * ROWS), 1, 1),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )


@cute.kernel
def _rows(
    given: Any,
    lengths: cute.Tensor,
    tables: cute.Tensor,
    s_q: Int32,
    most: Int32,
    by: compat.FastDivisor,
) -> None:
    cache_seqlens, cu_seqlens_q, block_table = given
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = tidx % quant.WARP
    first = (block * WARPS + tidx // quant.WARP) * ROWS
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    rows, b = lengths.shape[0], cache_seqlens.shape[0]
    if first < rows:
        row = first + lane // EACH
        sequence, _ = divmod(row, by)
        begin, end = sequence * s_q, sequence * s_q + s_q
        if cu_seqlens_q.shape[0] > 0:
            found = request_of(cu_seqlens_q, first, lane)
            sequence = cutlass.max(cutlass.min(found, b - 1), 0)
            # as index_logits bounds them
            begin = cutlass.min(cutlass.max(cu_seqlens_q[sequence], 0), rows)
            end = cutlass.min(cutlass.max(cu_seqlens_q[sequence + 1], begin), rows)
            if found != sequence:
                end = begin
        sequence = cutlass.min(sequence, b - 1)
        if (lane % EACH == 0) & (row < rows):
            length = cutlass.min(cutlass.max(cache_seqlens[sequence], 0), most)
            seen = cutlass.max(length - end + row + 1, 0)
            if (row < begin) | (row >= end):
                seen = Int32(0)
            lengths[row] = seen
        if tables.shape[0] > 0:
            for i in cutlass.range_constexpr(ROWS):
                of = cute.arch.shuffle_sync(sequence, i * EACH)
                if first + i < rows:
                    for x in cutlass.range(lane, tables.shape[1], quant.WARP, unroll=1):
                        tables[first + i, x] = block_table[of, x]


def feasible(spec: VariantSpec) -> str | None:
    """Why a variant cannot be built, or None."""
    return None


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    i32 = compat.DTYPES["i32"]
    rows, b = compat.sym(name="rows"), compat.sym(name="b")

    def table(rows_name: str, columns: str, rows: Any = None) -> Any:
        shape = (compat.sym(name=rows_name) if rows is None else rows, compat.sym(name=columns))
        return compat.strided(i32, shape, (compat.sym64(), 1), 4)

    fakes = {
        "cache_seqlens": compat.vector(i32, b),
        "cu_seqlens_q": compat.vector(i32, compat.sym(name="b_plus_1_or_0")),
        "block_table": table("", "width", b),
        "lengths": compat.vector(i32, rows),
        "tables": table("rows_or_0", "columns"),
        "s_q": Int32(1),
        "most": Int32(1),
    }
    return index_rows, fakes

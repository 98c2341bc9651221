"""mha_merge: rows of dense MHA prefill whose keys were split, from their partial rows.

``mha_items`` notes which row tiles are split, into how many pieces, and where their partial rows
begin (mha_list.py); ``mha_fwd`` of split keys leaves a row and its LSE for every piece.

Roles        one warp owns a query row of one head; CTAs stay and take rows by stride.
Memory       registers only: up to PIECES 16-byte loads a lane in flight, its 4 sums; twice as many
             of rows of 256 channels.
Timeline     wait for the previous grid | (for each row) LSEs and channels of all pieces | weights,
             FMA | normalise, store
Bytes moved  516 a row, head and piece read, 260 a row and head written (1028 and 516).

Where nothing was split a CTA reads the header and leaves.  Pieces are added in their order, so that
bits do not depend on timing.  ``merge_states`` has the arithmetic: LSEs are natural, -inf of a row
that saw no key there; without any, out is 0 and the LSE -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from ..blocks import compat, quant
from ..formats.mha_list import ENTRY_WORDS, HEADER, PIECES, ROWS, SPLITS
from ..schedule.mha_items import length
from .merge_states import Loads, Share, Sum, load_part

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS = 8
LN2 = 0.6931471805599453


@cute.jit
def mha_merge(
    cu_seqlens_q: cute.Tensor,  # i32 (b + 1,)
    work: cute.Tensor,  # i32 (words,), as mha_items leaves it where keys are split
    partial_out: cute.Tensor,  # f32 (rows, h, d_v)
    partial_lse: cute.Tensor,  # f32 (rows, h), natural
    out: cute.Tensor,  # bf16 | f16 (total_q, h, d_v)
    lse: cute.Tensor,  # f32 (h, total_q), natural
    ctas: Int32,
    stream: Any,
) -> None:
    """Host half: ``ctas`` CTAs, whatever there is to merge."""
    by = compat.fast_divisor(out.shape[1])
    parts = (partial_out, partial_lse)
    _merge(cu_seqlens_q, work, parts, (out, lse), by).launch(
        grid=(ctas, 1, 1), block=(WARPS * quant.WARP, 1, 1), stream=stream, use_pdl=True
    )


@cute.kernel
def _merge(cu_seqlens_q: cute.Tensor, work: cute.Tensor, parts: Any, results: Any, by: Any) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    heads = results[0].shape[1]
    tile_rows = ROWS * heads
    for i in cutlass.range(work[SPLITS], unroll=1):
        at = HEADER + ENTRY_WORDS * i
        sequence, m, pieces, first = work[at], work[at + 1], work[at + 2], work[at + 3]
        s_q = length(cu_seqlens_q, sequence)
        begin = block * WARPS + tidx // quant.WARP
        # consecutive row tiles begin with other warps, as those of few rows leave many idle
        begin = (begin + i * (tile_rows // 2 + 1)) % (grid * WARPS)
        there = cutlass.min(s_q - m * ROWS, ROWS) * heads
        if pieces == 0:
            there = Int32(0)
        for x in cutlass.range(begin, there, grid * WARPS, unroll=1):
            row, head = divmod(x, by)
            row = m * ROWS + row
            where = (first + row, s_q, pieces, head)
            _row(parts, results, where, cu_seqlens_q[sequence] + row)


@cute.jit
def _row(parts: Any, results: Any, where: Any, token: Int32) -> None:
    """One row of a head: ``where`` = (its first partial row, how far they are apart, pieces)."""
    tidx, _, _ = cute.arch.thread_idx()
    lane = tidx % quant.WARP
    partial_out, partial_lse = parts
    out, lse = results
    partial, apart, pieces, head = where
    d_v, dt = partial_out.shape[-1], partial_out.element_type
    share = Share(d_v, dt)
    loads = Loads(PIECES, dt, share.chunks)
    words, logs = loads.words, loads.lses
    wide = share.channels // share.chunks  # channels of a load: a lane's own lie that far apart
    for j in cutlass.range_constexpr(PIECES):
        if j < pieces:
            row = partial + j * apart
            at = partial_out.iterator + cute.crd2idx((row, head, lane * wide), partial_out.layout)
            log = partial_lse.iterator + cute.crd2idx((row, head), partial_lse.layout)
            load_part(words, logs, j, (at, log), d_v)
    total = Sum((Float32(1.0 / LN2), Float32(LN2)), share.channels)
    loads.add_to(total)
    empty, value, channels = total.finish()
    at = out.iterator + cute.crd2idx((token, head, lane * wide), out.layout)
    for k in cutlass.range_constexpr(share.chunks):
        mine = channels[k * wide : (k + 1) * wide]
        compat.store_words(at + k * (d_v // share.chunks), quant.pack(mine, out.element_type))
    if lane == 0:
        if empty:
            value = -Float32.inf
        log_at = lse.iterator + cute.crd2idx((head, token), lse.layout)
        compat.store_words(log_at, [value.bitcast(Uint32)])


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    i32, f32 = compat.DTYPES["i32"], compat.DTYPES["f32"]
    names = ("b_plus_1", "words", "rows", "h", "total_q")
    sequences, words, rows, h, total = (compat.sym(name=name) for name in names)
    fakes = {
        "cu_seqlens_q": compat.vector(i32, sequences),
        "work": compat.vector(i32, words),
        "partial_out": compat.rows(f32, (rows, h, spec.d_v)),
        "partial_lse": compat.strided(f32, (rows, h), (compat.sym64(), 1), 4),
        "out": compat.rows(compat.dtype(spec.dtype), (total, h, spec.d_v)),
        "lse": compat.strided(f32, (h, total), (compat.sym64(), compat.sym64()), 4),
        "ctas": Int32(1),
    }
    return mha_merge, fakes

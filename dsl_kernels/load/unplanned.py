"""NaN in rows that a call's ``cu_seqlens_q`` names and that no work tile of the work list has.

A work list writes the rows that its plan knows.  If a call says by ``cu_seqlens_q`` that there are
more, in front of the plan's first row or behind its last one, these would keep what the memory
held.  One warp of each CTA writes them when its own role is done; where plan and call agree there
are none, and it reads two offsets and two work tiles.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int64, Uint32, const_expr, cute

from ..blocks import compat
from ..formats.dims import KV_LORA_RANK

WARP = 32
NAN = {16: 0x7FC07FC0, 32: 0x7FC00000}  # a word of values, by their bits


@cute.jit
def void_unplanned(work: Any, call: Any, results: Any, part: Any):
    """The rows of this CTA's share; by all lanes of one warp."""
    if const_expr(work.cu_seqlens_q is not None):  # noqa: SIM102 (only this is at compile time)
        if (call.witness != 0) & (work.cu_seqlens_q.shape[0] > 0):
            heads, tokens = call.by_heads.divisor, call.by_tokens.divisor
            sequences, parts = work.cu_seqlens_q.shape[0] - 1, work.part_begin.shape[0] - 1
            begin = cutlass.min(cutlass.max(work.cu_seqlens_q[0], 0), tokens) * heads
            end = cutlass.min(cutlass.max(work.cu_seqlens_q[sequences], 0), tokens) * heads
            work_tiles = compat.at_most(work.part_begin[parts], work.work_items.shape[0])
            planned, behind = begin, begin
            if work_tiles > 0:
                planned = compat.at_most(work.work_items[0, 4], call.rows)
                behind = compat.at_most(work.work_items[work_tiles - 1, 5], call.rows)
            blocks, _, _ = cute.arch.grid_dim()
            own, step = part * blocks + cute.arch.block_idx()[0], parts * blocks
            for row in cutlass.range(begin + own, cutlass.min(planned, end), step, unroll=1):
                void_row(call, results, row)
            behind = cutlass.max(behind, begin)
            for row in cutlass.range(behind + own, end, step, unroll=1):
                void_row(call, results, row)


@cute.jit
def void_row(call: Any, results: Any, row: Any):
    """NaN in one row of ``out`` and its LSE; by all lanes of a warp."""
    lane = cute.arch.lane_idx()
    bits = const_expr(results.out.element_type.width)
    step = const_expr(128 // bits)  # channels of a store
    target = results.out.iterator + Int64(row) * KV_LORA_RANK
    for x in cutlass.range_constexpr(KV_LORA_RANK // step // WARP):
        at = cute.assume((x * WARP + lane) * step, divby=step)
        compat.store_words(target + at, [Uint32(NAN[bits])] * 4)
    if lane == 0:
        token, head = divmod(row, call.by_heads)
        b, s = divmod(token, call.by_tokens)
        results.lse[b, head, s] = Float32(float("nan"))

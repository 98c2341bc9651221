"""How finished query rows reach memory: ``out`` and ``lse``, or a slot of partial results."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..dims import KV_LORA_RANK as D


class Results(NamedTuple):
    """What a decode kernel writes."""

    out: cute.Tensor  # (b, s_q, h, 512)
    lse: cute.Tensor  # (b, h, s_q)
    o_accum: cute.Tensor  # (slots, rows_pad, 512)
    lse_accum: cute.Tensor  # (slots, rows_pad)


def rows_written(results, call, slot):
    """Query rows below which results are stored: all, or none if the slot does not exist."""
    return cutlass.select_(slot < results.o_accum.shape[0], call.rows, Int32(0))


@cute.jit
def finish_row(results, call, batch, slot, row, row_sum, frame):
    """LSE of row ``row`` of the sequence to memory, final or (log2) into the split's slot.

    Returns 1/row_sum, by which the row's values are multiplied; 0 for a row that saw no token.
    """
    empty = row_sum == 0.0
    value = cute.math.log2(row_sum, fastmath=True) + frame
    if slot < 0:
        if row < call.rows:
            s = row // call.num_heads
            final = value * call.lse_factor
            results.lse[batch, row - s * call.num_heads, s] = call.empty_lse if empty else final
    elif slot < results.o_accum.shape[0]:
        results.lse_accum[slot, row] = -Float32.inf if empty else value
    inverse = 1.0 / row_sum
    return Float32(0.0) if empty else inverse


@cute.jit
def write_pair(results, call, batch, slot, row, channel, pair):
    """Two neighbouring normalised channels of a row: into ``out``, or the split's slot."""
    if slot < 0:
        store_pair(results.out, (Int64(batch) * call.rows + row) * D + channel, pair)
    else:
        slot_begin = Int64(slot) * results.o_accum.stride[0]
        store_pair(results.o_accum, slot_begin + row * D + channel, pair)


def store_pair(t, offset, pair):
    """Two neighbouring fp32 values, converted to the element type of ``t``."""
    ptr = (t.iterator + cute.assume(offset, divby=2)).align(2 * t.element_type.width // 8)
    value = cute.make_rmem_tensor((2,), t.element_type)
    value.store(pair.load().to(t.element_type))
    cute.autovec_copy(value, cute.make_tensor(ptr, cute.make_layout(2)))

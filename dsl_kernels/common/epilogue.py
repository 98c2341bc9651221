"""How finished query rows reach memory: ``out`` and ``lse``, or a slot of partial results."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..dims import KV_LORA_RANK as D
from ..dims import PARTIAL_ROW
from . import partials


class Results(NamedTuple):
    """What a decode kernel writes."""

    out: cute.Tensor  # (b, s_q, h, 512)
    lse: cute.Tensor  # (b, h, s_q)
    o_accum: cute.Tensor  # (slots, rows_pad, PARTIAL_ROW) fp16, see partials.py
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
def write_run(results, call, batch, row, channel, values):
    """Neighbouring normalised channels of a row of an unsplit sequence into ``out``.

    ``values``: n fp32 channels from ``channel`` on, a multiple of n, which is a power of two.
    """
    store_run(results.out, (Int64(batch) * call.rows + row) * D + channel, values)


@cute.jit
def write_partial_run(results, slot, row, channel, values, exponent):
    """The same of a split's row, into its slot; who holds the channels' maximum also writes their
    ``exponent`` (``partials.store_exponents``)."""
    factor = partials.factor_to_stored(exponent)
    stored = cute.make_rmem_tensor((cute.size(values),), Float32)
    for i in cutlass.range_constexpr(cute.size(values)):
        stored[i] = values[i] * factor
    slot_begin = Int64(slot) * results.o_accum.stride[0]
    store_run(results.o_accum, slot_begin + row * PARTIAL_ROW + channel, stored)


def store_run(t, offset, values):
    """Neighbouring fp32 values, converted to the element type of ``t``; 16 bytes a store at most.

    ``offset``: of the first, in elements, a multiple of their number.
    """
    n = min(cute.size(values), 16 * 8 // t.element_type.width)
    for first in range(0, cute.size(values), n):
        ptr = t.iterator + cute.assume(offset, divby=n) + first
        part = cute.make_rmem_tensor((n,), t.element_type)
        source = cute.make_tensor(values.iterator + first, cute.make_layout(n))
        part.store(source.load().to(t.element_type))
        target = ptr.align(n * t.element_type.width // 8)
        cute.autovec_copy(part, cute.make_tensor(target, cute.make_layout(n)))

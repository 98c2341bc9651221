"""How finished query rows reach memory: ``out`` and ``lse``, or a slot of partial results."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Shared(NamedTuple):
    """Who shares the exponent of a thread's channels in a split's partial row (partials.py).

    Attributes:
        lane_bits: lanes that differ from this one in these bits of their numbers alone hold the
            other channels of the row; together, whole groups of 16.
        channel, groups: this lane writes the exponents of so many groups from this channel on.
        writes: whether it writes any.
    """

    lane_bits: tuple[int, ...]
    channel: Any
    groups: int
    writes: Any = True


@cute.jit
def write_runs(results, call, batch, slot, row, runs, shared):
    """A thread's normalised channels of a row: into ``out``, or the split's slot.

    With ``shared.lane_bits`` all lanes of a warp call this, each with its row.

    Args:
        runs: (channel, values) of each run of neighbouring channels: n fp32 values from a multiple
            of n on, n a power of two.
        shared: a ``Shared``.
    """
    rows = rows_written(results, call, slot)
    if slot < 0:
        if row < rows:
            row_begin = (Int64(batch) * call.rows + row) * D
            for x in cutlass.range_constexpr(len(runs)):
                store_run(results.out, row_begin + runs[x][0], runs[x][1])
    else:
        mine = [values[i] for _, values in runs for i in range(cute.size(values))]
        exponent = partials.exponent_of(mine, shared.lane_bits)
        if row < rows:
            slot_row = Int64(slot) * results.o_accum.stride[0] + row * PARTIAL_ROW
            for x in cutlass.range_constexpr(len(runs)):
                stored = partials.stored(runs[x][1], exponent)
                store_run(results.o_accum, slot_row + runs[x][0], stored)
            if shared.writes:
                partials.store_exponents(
                    results.o_accum.iterator + slot_row, shared.channel, exponent, shared.groups
                )


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

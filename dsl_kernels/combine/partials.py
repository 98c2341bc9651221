"""Partial results of split sequences: fp16 channels that share exponents, or fp32 ones.

fp16 results of a 16-bit cache keep fp32 rows, tensor (splits, rows_pad, 512): they have 11 bits
themselves, and partial rows of no more would add up to a third to their error.

Else a row of a split is 1056 bytes, half of fp32's, in a tensor (splits, rows_pad, PARTIAL_ROW) of
fp16:

    [0, 1024)     512 channels, x * 2^(141 - e) rounded to fp16
    [1024, 1056)  32 exponents e, a byte for each 16 neighbouring channels

e is the biased fp32 exponent of the largest |x| that shares it, held within 15 and 254; whole
groups of 16 may share one, which is then written for each.  What is stored is at most 2^15 whatever
the row's magnitude, and what is up to 2^28 times smaller than the largest keeps fp16's 11 bits.
Both factors, 2^(141 - e) and 2^(e - 141), are normal fp32 numbers.  NaN and infinity stay what they
are; beside an infinity finite values of its group are lost (e is 254: 0 below 2^88).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from ..blocks import compat
from ..blocks.types import F16, U8
from ..formats.dims import EXPONENT_CHANNELS, PARTIAL_ROW
from ..formats.dims import KV_LORA_RANK as D

FRACTION_BITS = 23  # of fp32
LEAST, MOST = 15, 254  # of an exponent
TOP = 14  # log2 of the binade where the largest value is stored
EVERY_BYTE = 0x01010101


def fake(splits: Any, unit_rows: Any, out_dtype: Any = None) -> cute.Tensor:
    """Fake ``o_accum`` of a kernel whose results are ``out_dtype``: fp32 rows if that is fp16;
    otherwise, and for None, fp16 rows with exponents."""
    if out_dtype is F16:
        return compat.contiguous(Float32, (splits, unit_rows, D))
    return compat.contiguous(F16, (splits, unit_rows, PARTIAL_ROW))


def is_exact(o_accum: cute.Tensor) -> bool:
    """Return True if partial rows are fp32, without exponents."""
    return o_accum.element_type is Float32


def exponent_of(values: list[Any], lane_bits: tuple[int, ...] = ()) -> Any:
    """Exponent (Uint32) that fp32 ``values`` share, with those of the lanes whose numbers differ
    from this one's in ``lane_bits`` alone; with lane bits, for whole warps."""
    top = abs(values[0])
    for x in values[1:]:
        top = cute.arch.fmax(top, abs(x))
    for bit in lane_bits:
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, bit))
    field = top.bitcast(Uint32) >> FRACTION_BITS  # no sign
    return cutlass.min(cutlass.max(field, Uint32(LEAST)), Uint32(MOST))


def stored(values: Any, exponent: Any) -> Any:
    """fp32 values (a register tensor) times 2^(141 - e), to be rounded to fp16."""
    factor = ((Uint32(TOP + 254) - exponent) << FRACTION_BITS).bitcast(Float32)
    scaled = cute.make_rmem_tensor(values.layout.shape, Float32)
    for i in range(cute.size(values)):
        scaled[i] = values[i] * factor
    return scaled


def factor_from_stored(exponent: Any) -> Any:
    """2^(e - 141); some finite number for a byte that no kernel writes."""
    return ((exponent - Uint32(TOP)) << FRACTION_BITS).bitcast(Float32)


def exponents_at(row: Any, channel: Any) -> Any:
    """Points at the exponent of ``channel`` in the partial row at ``row``."""
    return cute.recast_ptr(row, dtype=U8) + (2 * D + channel // EXPONENT_CHANNELS)


def store_exponents(first: Any, exponent: Any, groups: int) -> None:
    """The exponent of ``groups`` (1, or a multiple of 4) groups into their bytes.

    Args:
        first: ``exponents_at`` the first group; of the channel 0 of 64 for 4 groups or more.
    """
    if groups == 1:
        cute.arch.store(first, exponent.to(U8))
        return
    for i in range(0, groups, 4):
        compat.store_words(first + i, [exponent * Uint32(EVERY_BYTE)])


def load_exponent(at: Any, **hint: str) -> Any:
    """The exponent (Uint32) that ``at``, a place of ``exponents_at``, points at; ``hint``: of the
    load."""
    return Uint32(cute.arch.load(at, U8, **hint))

"""P as a sum of e4m3 terms: P' ~ p8, or p8 + r8 with r8 the e4m3 of what p8 leaves.

P' is at most 2^8 relative to its block's reference, so r8 is at most 2^3 and needs no scale of its
own: what of it falls among e4m3's subnormals (steps of 2^-9) is 2^-18 of the block's largest P' or
less.  Both terms then share one chain of WGMMAs and one product tile, and the promotion to fp32 is
what it was. r8 goes first: Hopper's FP8 accumulator keeps 13 bits below the largest addend, and
products of r8 on top of those of p8 would be cut at p8's (docs/numerics.md has both orders).

A buffer of P holds its terms one behind the other, p8 first.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from ..blocks.types import F8


def quantised(values, terms: int) -> list:
    """fp32 ``values`` (a register tensor, compact) as e4m3 register tensors, one a term.

    ``values`` is used up: it holds what the last but one of the terms left.
    """
    found = []
    for term in range(terms):
        p8 = cute.make_rmem_tensor((cute.size(values),), F8)
        narrow = cute.make_tensor(p8.iterator, values.layout)
        narrow.store(values.load().to(F8))
        if term + 1 < terms:
            values.store(values.load() - narrow.load().to(Float32))
        found.append(p8)
    return found


def stage_of(buf, term: int, terms: int):
    """Stage of P's shared memory that holds ``term`` of buffer ``buf``."""
    return buf if terms == 1 else buf * terms + term


def order(terms: int) -> range:
    """Terms in the order in which their products are summed."""
    return range(terms - 1, -1, -1)

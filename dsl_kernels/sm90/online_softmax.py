"""Exponent frame of an online softmax whose P is 16 bits wide (log2 units throughout).

P' = 2^(t - frame); O and the row sum live in the same frame, so that products need no factor of
their own.  The frame is lazy: it moves only when a block would exceed it by 2^15, the largest power
of two of fp16, and then so that the block's largest P' is 2^8.
"""

from __future__ import annotations

import cutlass.cute as cute

from ..combine.frames import P_LOG2_MAX

HEADROOM = 15.0

__all__ = ["HEADROOM", "P_LOG2_MAX", "move_frame"]


@cute.jit
def move_frame(m, old):
    """The frame after a block with maximum ``m``: (new frame, gamma, by which O is multiplied)."""
    new = m - P_LOG2_MAX if m > old + HEADROOM else old
    gamma = cute.math.exp2(old - new, fastmath=True)
    return new, gamma

"""Online softmax whose P is 16 bits wide: reference of exponents (log2 units throughout).

P' = 2^(t - m_ref); O and the row sum are relative to the same m_ref, so that products need no
factor of their own.  ``m_ref`` is lazy: it rises only when a block would exceed it by 2^15, the
largest power of two of fp16, and then so that the block's largest P' is 2^8.
"""

from __future__ import annotations

import cutlass.cute as cute

from ..combine.online_softmax import P_LOG2_MAX

HEADROOM = 15.0

__all__ = ["HEADROOM", "P_LOG2_MAX", "raise_m_ref"]


@cute.jit
def raise_m_ref(m, old):
    """Raise ``m_ref`` for a block with maximum ``m``: (new m_ref, gamma, by which O is
    multiplied)."""
    new = m - P_LOG2_MAX if m > old + HEADROOM else old
    gamma = cute.math.exp2(old - new, fastmath=True)
    return new, gamma

"""Online softmax whose P is narrow: references of exponents (log2 units throughout).

A block of tokens has its own reference m'_b, its maximum, so that its largest P' is 2^8 whatever
the row's running maximum is.  The fp32 accumulator and the row sum are relative to ``m_ref``, which
is *lazy*: it rises only when a block would exceed it by 2^20, so the usual step is one FFMA an
element, O += beta * tmp with beta = 2^(m'_b - 8 - m_ref), and no rescale; nothing overflows however
block maxima rise and fall.
"""

from __future__ import annotations

import cutlass.cute as cute

P_LOG2_MAX = 8.0  # the largest P' of a block is 2^8
NEVER = -1.0e30  # m_ref of a row that has seen no token; finite, so that differences are defined
# log2 headroom before m_ref is raised.  The row sum holds 2^(s2 - m_ref), and s2 exceeds t'
# by up to 80 (append_kv's floor): 2^(20 + 80) times 2^20 tokens is finite.
LAZY = 20.0


@cute.jit
def raise_m_ref(m, old):
    """Raise ``m_ref`` for a block with maximum ``m``: (new m_ref, beta, gamma)."""
    new = m if m > old + LAZY else old
    beta = cute.math.exp2(m - P_LOG2_MAX - new, fastmath=True)
    gamma = cute.math.exp2(old - new, fastmath=True)
    return new, beta, gamma

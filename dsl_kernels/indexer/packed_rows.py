"""The request that a packed row belongs to, for warps that take ROWS rows side by side.

Lanes look all of ``cu_seqlens`` over, 32 entries a load, and votes count those that are not behind
a row: the loads wait for nothing, so that hundreds of requests take one memory latency, where a
search would take one a step.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute

from ..blocks import quant

ROWS = 4  # of a warp
EACH = quant.WARP // ROWS  # lanes of a row


@cute.jit
def request_of(cu_seqlens: cute.Tensor, first: Int32, lane: Int32) -> Int32:
    """Last request that begins at this lane's row, ``first + lane // EACH``, or before it.

    -1 if none does; b if the row is behind the last request.  If the entries do not ascend it is
    any number from -1 to b.

    The whole warp calls it.
    """
    n = cu_seqlens.shape[0]
    begun = cute.make_rmem_tensor((ROWS,), Int32)
    begun.fill(0)
    for base in cutlass.range(0, n, quant.WARP, unroll=4):
        at = base + lane
        entry = cu_seqlens[cutlass.min(at, n - 1)]
        for i in cutlass.range_constexpr(ROWS):
            votes = cute.arch.vote_ballot_sync(Boolean(at < n) & Boolean(entry <= first + i))
            begun[i] += Int32(cute.arch.popc(votes))
    mine = begun[0]
    for i in cutlass.range_constexpr(1, ROWS):
        mine = Int32(cutlass.select_(lane // EACH == i, begun[i], mine))
    return mine - 1

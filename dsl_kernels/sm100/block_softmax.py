"""Softmax of one block when a thread holds a share of one row: S as tensor memory has it (umma.py).

Thread t of the warpgroup has row t % M of S and the tokens of lane group t // M, one register each,
so a warp's lanes differ in the row and share the tokens.  With M = 64 rows a CTA warps w and w + 2
hold the same rows and meet at a barrier of 64 threads.  Logits are in log2 units throughout.
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from ..common.epilogue import finish_row
from ..common.fp8_per_token import TokenScales, safe_reciprocal
from ..common.frames import NEVER, P_LOG2_MAX
from ..common.smem import array
from ..common.types import F8
from . import umma

WARPS = 4
WARPGROUP = 128
LANES = 32  # of a warp
RUN = 32  # tokens of a thread in registers at a time
BUFFERS = 2  # of what warp pairs exchange: one barrier a block is enough


class WarpTriples:
    """sigma, log2 sigma, 1/sigma of a warp's tokens, field ``triple``: a lane makes one token's.

    Attributes:
        scales: of the KV ring.
        form: of the MMA.
        tokens: of a warp, a multiple of its lanes.
    """

    def __init__(self, scales: TokenScales, form: umma.Form):
        self.scales, self.form, self.tokens = scales, form, form.share(scales.tile)

    @property
    def fields(self) -> dict:
        """Storage."""
        return dict(triple=array(Float32, 3 * self.tokens * WARPS, 128))

    @cute.jit
    def make(self, st, stage, wwarp, lane):
        """By a whole warp, which must have read those of the block before; a ``sync_warp`` later
        its lanes may ``read``."""
        first = self.tokens * group_of(self.form, wwarp)
        out = self._of_warps(st)
        for x in cutlass.range_constexpr(0, self.tokens, LANES):
            s = self.scales.of_stages(st)[first + lane + x, stage]
            out[lane + x, 0, wwarp] = s
            out[lane + x, 1, wwarp] = cute.math.log2(s, fastmath=True)
            out[lane + x, 2, wwarp] = safe_reciprocal(s)

    def read(self, st, wwarp, which: int, into, run=0) -> None:
        """One of the three of the warp's tokens of ``run``: the lanes read the same words."""
        words = self._of_warps(st)[None, which, wwarp]
        if self.runs > 1:
            words = cute.local_tile(words, (RUN,), (run,))
        cute.autovec_copy(words, into)

    @property
    def runs(self) -> int:
        """How many of ``RUN`` tokens."""
        return self.tokens // RUN

    def _of_warps(self, st):
        """(token, which, warp)"""
        return st.triple.get_tensor(cute.make_layout((self.tokens, 3, WARPS)))


def group_of(form: umma.Form, wwarp):
    """Lane group of a warp: which of the tokens it holds."""
    return wwarp // (WARPS // form.groups)


def exchange_fields() -> dict:
    """Storage of what the shares of a row tell each other: maxima, sums."""
    count = BUFFERS * umma.LANES
    return dict(maxima=array(Float32, count, 128), sums=array(Float32, count, 128))


@cute.jit
def exchange(field, form: cutlass.Constexpr, buffer, row, wwarp, value, barrier_id):
    """What every share of a row has to say of it, in the order of their tokens.

    ``buffer`` alternates.  The warps of the same rows meet at barrier ``barrier_id`` or one of the
    next, of which there are WARPS / groups.
    """
    sets = const_expr(WARPS // form.groups)
    shares = field.get_tensor(cute.make_layout((form.rows, form.groups, BUFFERS)))
    shares[row, wwarp // sets, buffer] = value
    cute.arch.barrier(barrier_id=barrier_id + wwarp % sets, number_of_threads=32 * form.groups)
    return [shares[row, g, buffer] for g in range(form.groups)]


@cute.jit
def finish_item(
    form: cutlass.Constexpr, inv: cutlass.Constexpr, same_rows: cutlass.Constexpr, cta, slot, rows,
    inv_phase, running,
):  # fmt: skip
    """Row sums of an item -> 1/l for the warps that write its rows, LSE to memory.

    ``inv``: their ring; ``same_rows``: ``exchange``'s barrier; ``running``: frame, and this
    thread's share of the row sum.
    """
    tidx, _, _ = cute.arch.thread_idx()
    lane, row = tidx % LANES, tidx % form.rows
    wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // LANES)
    st = cta.st
    sums = exchange(st.sums, form, inv_phase, row, wwarp, running[1], same_rows)
    inverses = st.inv.get_tensor(cute.make_layout(form.rows))
    if group_of(form, wwarp) == 0:
        inv.wait_empty(st, 0, inv_phase)
        inverses[row] = finish_row(
            cta.gmem.results, cta.call, slot, rows, row, sum(sums[1:], sums[0]), running[0]
        )
        cute.arch.sync_warp()
        if lane == 0:
            inv.arrive_full(st, 0)


@cute.jit
def logits(
    s, t, triples: cutlass.Constexpr, st, wwarp, factor, first_token, limit, ragged,
    run=0,
):  # fmt: skip
    """t' = s2 + log2 sigma of a run of a thread's tokens, of which the first is ``first_token``,
    into ``t``; -inf for what its row must not see."""
    column = cute.make_rmem_tensor((RUN,), Float32)
    triples.read(st, wwarp, 0, column, run)
    for v in cutlass.range_constexpr(RUN):
        t[v] = s[v] * column[v]
    triples.read(st, wwarp, 1, column, run)
    for v in cutlass.range_constexpr(RUN):
        t[v] = t[v] * factor + column[v]
    if ragged:
        for v in cutlass.range_constexpr(RUN):
            if first_token + v >= limit:
                t[v] = -Float32.inf


def maximum(t):
    """Of a thread's values, in four chains; NaN loses."""
    tops = [t[v] for v in range(4)]
    for v in range(4, cute.size(t)):
        tops[v % 4] = cute.arch.fmax(tops[v % 4], t[v])
    return cute.arch.fmax(cute.arch.fmax(tops[0], tops[1]), cute.arch.fmax(tops[2], tops[3]))


@cute.jit
def weights(t, m, triples: cutlass.Constexpr, st, wwarp, run=0):
    """P' = exp2(t' - m + 8) of a run in place; returns the sum of its P' / sigma."""
    column = cute.make_rmem_tensor((RUN,), Float32)
    triples.read(st, wwarp, 2, column, run)
    part = [Float32(0.0) for _ in range(4)]
    base = P_LOG2_MAX - m
    for v in cutlass.range_constexpr(RUN):
        t[v] = cute.math.exp2(t[v] + base, fastmath=True)
        part[v % 4] = part[v % 4] + t[v] * column[v]
    return (part[0] + part[1]) + (part[2] + part[3])


def of_row(maxima) -> Float32:
    """Maximum of a row from its shares', finite also where it saw no token."""
    return functools.reduce(cute.arch.fmax, maxima, Float32(NEVER))


def store_p(t, tile, form: umma.Form, row, wwarp, tokens: int, first=0) -> None:
    """P8 of a thread's P' into the tile at pointer ``tile``: rows of a byte a token, 64 or 128 of
    them, swizzled by as much.  ``tokens``: of the thread, of which those of ``t`` begin at
    ``first``.

    Eight lanes write 16 bytes each at a time: the swizzle spreads their rows over all banks.
    """
    n = cute.size(t)
    row_bytes = tokens * form.groups
    p8 = cute.make_rmem_tensor((n,), F8)
    p8.store(t.load().to(F8))
    words = cute.recast_tensor(p8, Uint32)
    for chunk in range(n // 16):
        at = row * row_bytes + group_of(form, wwarp) * tokens + (first + 16 * chunk)
        at = at ^ (((at >> 7) & (row_bytes // 16 - 1)) << 4)
        target = cute.recast_ptr((tile + at).align(16), dtype=Uint32)
        source = cute.make_tensor(words.iterator + 4 * chunk, cute.make_layout(4))
        cute.autovec_copy(source, cute.make_tensor(target, cute.make_layout(4)))

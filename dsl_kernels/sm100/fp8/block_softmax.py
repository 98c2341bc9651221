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

from ...blocks.smem import array
from ...blocks.types import F8
from ...combine.epilogue import finish_row
from ...combine.online_softmax import NEVER, P_LOG2_MAX
from ...load.fp8_per_token import TokenScales, safe_reciprocal
from .. import umma

WARPS = 4
WARPGROUP = 128
LANES = 32  # of a warp
RUN = 32  # tokens of a thread in registers at a time
SIGMA, INVERSE, LOG2 = range(3)  # columns of ``WarpScales``
BUFFERS = 2  # of what warp pairs exchange: one barrier a block is enough


class WarpScales:
    """sigma, 1/sigma, log2 sigma of a warp's tokens, field ``sigmas``: a lane makes one token's.

    All lanes read all of them, and a word that goes to every lane takes the port of shared memory
    as long as a word for each.  So whoever needs log2 sigma once makes it of the sigma that it has
    in a register: 32 special functions a thread beside its 32 exponentials.  (1/sigma would stay in
    registers until P' is summed, and spills.)

    Attributes:
        scales: of the KV ring.
        form: of the MMA.
        tokens: of a warp, a multiple of its lanes.
        logs: whether log2 sigma is there: for who reads S twice.
    """

    def __init__(self, scales: TokenScales, form: umma.Form, *, logs: bool):
        self.scales, self.form, self.tokens = scales, form, form.share(scales.tile)
        self.logs = logs

    @property
    def fields(self) -> dict:
        """Storage."""
        return dict(sigmas=array(Float32, self.columns * self.tokens * WARPS, 128))

    @cute.jit
    def make(self, st, stage, wwarp, lane):
        """Write sigma, 1/sigma and, with ``logs``, log2 sigma of the warp's tokens of ring stage
        ``stage``.  A whole warp calls this once it has read those of the block before; after a
        ``sync_warp`` its lanes may ``read``."""
        first = self.tokens * group_of(self.form, wwarp)
        out = self._of_warps(st)
        for x in cutlass.range_constexpr(0, self.tokens, LANES):
            s = self.scales.of_stages(st)[first + lane + x, stage]
            out[lane + x, SIGMA, wwarp] = s
            out[lane + x, INVERSE, wwarp] = safe_reciprocal(s)
            if const_expr(self.logs):
                out[lane + x, LOG2, wwarp] = cute.math.log2(s, fastmath=True)

    def read(self, st, wwarp, which: int, into, run=0) -> None:
        """Read column ``which`` (``SIGMA``, ``INVERSE`` or ``LOG2``) of the warp's tokens of
        ``run`` into ``into``; all lanes read the same words."""
        words = self._of_warps(st)[None, which, wwarp]
        if self.runs > 1:
            words = cute.local_tile(words, (RUN,), (run,))
        cute.autovec_copy(words, into)

    @property
    def runs(self) -> int:
        """Number of runs of ``RUN`` tokens among the warp's tokens."""
        return self.tokens // RUN

    @property
    def columns(self) -> int:
        """Words of a token: sigma, 1/sigma and, with ``logs``, log2 sigma."""
        return LOG2 + 1 if self.logs else LOG2

    def _of_warps(self, st):
        """(token, which, warp)"""
        return st.sigmas.get_tensor(cute.make_layout((self.tokens, self.columns, WARPS)))


def group_of(form: umma.Form, wwarp):
    """Lane group of a warp: which of the tokens it holds."""
    return wwarp // (WARPS // form.groups)


def exchange_fields() -> dict:
    """Storage of ``exchange``, for maxima and sums of the shares of a row."""
    count = BUFFERS * umma.LANES
    return dict(maxima=array(Float32, count, 128), sums=array(Float32, count, 128))


@cute.jit
def exchange(field, form: cutlass.Constexpr, buffer, row, wwarp, value, barrier_id):
    """Return the ``value`` of every share of a row, in the order of the shares' tokens.

    ``buffer`` alternates from call to call.  Warps that share rows meet at one of the
    WARPS / groups barriers from ``barrier_id`` on.
    """
    sets = const_expr(WARPS // form.groups)
    shares = field.get_tensor(cute.make_layout((form.rows, form.groups, BUFFERS)))
    shares[row, wwarp // sets, buffer] = value
    cute.arch.barrier(barrier_id=barrier_id + wwarp % sets, number_of_threads=32 * form.groups)
    return [shares[row, g, buffer] for g in range(form.groups)]


@cute.jit
def finish_work_tile(
    form: cutlass.Constexpr, inv: cutlass.Constexpr, same_rows: cutlass.Constexpr, cta, split, rows,
    inv_phase, running,
):  # fmt: skip
    """Row sums of a work tile -> 1/l for the warps that write its rows, LSE to memory.

    ``inv``: their ring; ``same_rows``: ``exchange``'s barrier; ``running``: m_ref, and this
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
            cta.gmem.results, cta.call, split, rows, row, sum(sums[1:], sums[0]), running[0]
        )
        cute.arch.sync_warp()
        if lane == 0:
            inv.arrive_full(st, 0)


@cute.jit
def logits(
    s, t, scales: cutlass.Constexpr, st, wwarp, factor, first_token, limit, ragged,
    run=0, stored: cutlass.Constexpr = False,
):  # fmt: skip
    """t' = s2 + log2 sigma of a run of a thread's tokens, of which the first is ``first_token``,
    into ``t``; -inf for what its row must not see.  ``stored``: log2 sigma is read, not made."""
    column = cute.make_rmem_tensor((RUN,), Float32)
    scales.read(st, wwarp, SIGMA, column, run)
    for v in cutlass.range_constexpr(RUN):
        t[v] = s[v] * column[v]
        if const_expr(not stored):
            column[v] = cute.math.log2(column[v], fastmath=True)
    if const_expr(stored):
        scales.read(st, wwarp, LOG2, column, run)
    for v in cutlass.range_constexpr(RUN):
        t[v] = t[v] * factor + column[v]
    if ragged:
        for v in cutlass.range_constexpr(RUN):
            if first_token + v >= limit:
                t[v] = -Float32.inf


def maximum(t):
    """Maximum of a thread's values, in four chains; a NaN loses to any number."""
    tops = [t[v] for v in range(4)]
    for v in range(4, cute.size(t)):
        tops[v % 4] = cute.arch.fmax(tops[v % 4], t[v])
    return cute.arch.fmax(cute.arch.fmax(tops[0], tops[1]), cute.arch.fmax(tops[2], tops[3]))


@cute.jit
def weights(t, m, scales: cutlass.Constexpr, st, wwarp, run=0):
    """P' = exp2(t' - m + 8) of a run in place; returns the sum of its P' / sigma."""
    column = cute.make_rmem_tensor((RUN,), Float32)
    scales.read(st, wwarp, INVERSE, column, run)
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

"""References (``m_ref``) and sums of rows in ``mix16``, whose S^T has tokens on M: over lanes and
warps.

A row runs over the lanes of a quad position and over the four warps of the softmax warpgroup.  What
is here a work tile does once or twice, and finds cold: its time goes by instructions, so that a
lane combines what is its share and a thread works out one row, which all read.
"""

from __future__ import annotations

import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...blocks.barriers import warps_meet
from ...blocks.smem import array
from ...combine.epilogue import finish_row
from ...combine.online_softmax import NEVER, P_LOG2_MAX
from ...load.work_list import LOG2E
from ..fragments import TokensOnM, pad_layout, padded_size, row_position
from ..online_softmax import HEADROOM
from ..roles import INV_RING, SOFTMAX_WARPS, WARPGROUP, Barrier
from .mix16_parts import SUM_LOG2

SQRT_HALF = 0x3F3504F3  # bits of sqrt(1/2) in fp32
NORMAL, INFINITE = 2.0**-126, float("inf")  # fp32's least and more than its largest


@cute.jit
def new_m_ref(largest, first, least: cutlass.Constexpr):
    """(distance by which a row's m_ref moves in log2 units, factor of its O and sum).

    Args:
        largest: the row's largest value of a tile, relative to the m_ref of before.
        first: not 0 if this is the work tile's first tile with a token.
        least: a bound that every token's value is above.
    """
    shift = Float32(0.0)
    if (largest > Float32(least)) & ((first != 0) | (largest > HEADROOM)):
        shift = largest - P_LOG2_MAX
    # of the work tile's first m_ref whatever is finite will do: O and sum are 0
    gamma = cute.math.exp2(cute.arch.fmin(-shift, Float32(0.0)), fastmath=True)
    return shift, gamma


@cute.jit
def log2_in(total, m_ref):
    """log2 of ``total`` times 2^``m_ref``, as exact as fp32 can have it: total's exponent joins the
    m_ref, which is as large but for its sign, before the logarithm of the rest, m in
    [sqrt(1/2), sqrt(2)), is added: with x = (m - 1) / (m + 1) that is 2 log2(e) times
    x + x^3 / 3 + x^5 / 5 + ..."""
    bits = total.bitcast(Int32)
    exponent = (bits - Int32(SQRT_HALF)) >> 23
    m = (bits - (exponent << 23)).bitcast(Float32)
    x = (m - 1.0) / (m + 1.0)
    square = x * x
    terms = Float32(2 * LOG2E / 9)
    for n in (7, 5, 3):
        terms = terms * square + 2 * LOG2E / n
    log = x * (terms * square) + x * (2 * LOG2E)
    exact = log + (Float32(exponent) + m_ref)
    plain = cute.math.log2(total, fastmath=True) + m_ref  # of what is no number, above all
    return Float32(cutlass.select_((total >= NORMAL) & (total < INFINITE), exact, plain))


class RowReferences:
    """Mixin of the softmax role: the m_refs of its rows and their sums.

    Attributes:
        rows_cta: query rows of the CTA.
        fragment: which rows and tokens a thread holds.
        log2_in: of ``finish_row``.
        sum_log2: log2 of what row sums lack.
        least: what a token's value is more than.
    """

    rows_cta: int
    fragment: TokensOnM
    log2_in: Any = staticmethod(log2_in)
    sum_log2 = SUM_LOG2
    least = 0.5 * NEVER

    def m_ref_fields(self) -> dict:
        """Storage: a value a row and warp; the rows' m_refs, and by how much they moved last."""
        rows = padded_size(self.rows_cta)
        return dict(
            across=array(Float32, SOFTMAX_WARPS * self.rows_cta, 128),
            m_refs=array(Float32, rows, 128),
            shifts=array(Float32, rows, 128),
        )

    def m_refs_of(self, st):
        """This thread's rows."""
        m_refs = cute.make_tensor(st.m_refs.data_ptr(), pad_layout(self.rows_cta))
        return m_refs[None, cute.arch.lane_idx() % 4]

    @cute.jit
    def begin_m_refs(self, st):
        """Set the m_refs of a work tile's rows to 0."""
        tidx, _, _ = cute.arch.thread_idx()
        size = const_expr(padded_size(self.rows_cta))
        m_refs = st.m_refs.get_tensor(cute.make_layout(size))
        if tidx % WARPGROUP < size:
            m_refs[tidx % WARPGROUP] = Float32(0.0)

    @cute.jit
    def move_m_refs(self, st, t, buf, first, l_run, wwarp, lane):
        """Rows that pass 2^15, and all of the work tile's first tile with a token, get an m_ref by
        which their largest value is 2^8."""
        tidx, _, _ = cute.arch.thread_idx()
        own = tidx % WARPGROUP
        self.note_maxima(st, t, wwarp, lane)
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)
        layout, size = pad_layout(self.rows_cta), const_expr(padded_size(self.rows_cta))
        gammas = cute.make_tensor(st.gamma.data_ptr() + buf * size, layout)
        shifts = cute.make_tensor(st.shifts.data_ptr(), layout)
        if own < self.rows_cta:
            of_warps = st.across.get_tensor(cute.make_layout((self.rows_cta, SOFTMAX_WARPS)))
            top = of_warps[own, 0]
            for w in cutlass.range_constexpr(1, SOFTMAX_WARPS):
                top = cute.arch.fmax(top, of_warps[own, w])
            at = row_position(own, self.rows_cta)
            shift, gamma = new_m_ref(top, first, self.least)
            m_refs = st.m_refs.get_tensor(cute.make_layout(size))
            m_refs[at] = m_refs[at] + shift
            (gammas.iterator + at)[0], (shifts.iterator + at)[0] = gamma, shift
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)  # all read the rows' m_refs, of other threads
        gamma = cute.make_rmem_tensor((self.fragment.rows,), Float32)
        shift = cute.make_rmem_tensor((self.fragment.rows,), Float32)
        cute.autovec_copy(gammas[None, lane % 4], gamma)
        cute.autovec_copy(shifts[None, lane % 4], shift)
        for x in cutlass.range_constexpr(self.fragment.rows):
            v = 4 * (x // 2) + x % 2
            l_run[x] = l_run[x] * gamma[x]
            t[v], t[v + 2] = t[v] - shift[x], t[v + 2] - shift[x]

    def note_maxima(self, st, t, wwarp, lane) -> None:
        """Row maxima over the warp's 16 tokens to ``across``."""
        pairs = [(t[v], t[v + 2]) for v in range(self.fragment.values) if v % 4 < 2]
        self.note_rows(st, [cute.arch.fmax(*pair) for pair in pairs], cute.arch.fmax, wwarp, lane)

    def note_rows(self, st, values, combined, wwarp, lane) -> None:
        """A value a row, of all the warp's tokens, to ``across``, (row, warp).

        Of eight lanes with the same rows each keeps half of what it has and gives half away, at
        each of three steps while there is more than one row.

        Args:
            values: of the thread's rows.
            combined: of a thread's and another's.
        """
        across, x = st.across.get_tensor(cute.make_layout((self.rows_cta, SOFTMAX_WARPS))), 0
        for bit in (4, 8, 16):
            upper, half = (lane & bit) != 0, len(values) // 2
            pairs = [(values[half + i], values[i]) for i in range(half)] or [(values[0],) * 2]
            values = [
                combined(
                    Float32(cutlass.select_(upper, a, b)),
                    cute.arch.shuffle_sync_bfly(Float32(cutlass.select_(upper, b, a)), bit),
                )
                for a, b in pairs
            ]
            x = x + cutlass.select_(upper, Int32(half), Int32(0))  # of the thread's rows
        first = self.fragment.row_at(wwarp, lane, x)
        for e, value in enumerate(values):
            across[first + e, wwarp] = value

    @cute.jit
    def finish_rows(self, cta, inv_phase, l_run, split, rows):
        """Row sums of a work tile -> 1/l for the P.V warps, LSE to memory.

        The warps meet once: ``across`` has been read when they met in ``move_m_refs``, and they
        meet again before the next work tile's first tile.
        """
        tidx, _, _ = cute.arch.thread_idx()
        st, own, lane = cta.st, tidx % WARPGROUP, tidx % 32
        wwarp = cute.arch.make_warp_uniform(own // 32)
        at, size = row_position(own, self.rows_cta), const_expr(padded_size(self.rows_cta))
        m_ref = Float32(self.sum_log2)
        if own < self.rows_cta:  # which the next work tile begins anew
            m_ref = m_ref + st.m_refs.get_tensor(cute.make_layout(size))[at]
        INV_RING.wait_empty(st, 0, inv_phase)
        sums = [l_run[x] for x in range(self.fragment.rows)]
        self.note_rows(st, sums, operator.add, wwarp, lane)
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)
        if own < self.rows_cta:
            of_warps = st.across.get_tensor(cute.make_layout((self.rows_cta, SOFTMAX_WARPS)))
            four = [of_warps[own, w] for w in range(SOFTMAX_WARPS)]
            total = (four[0] + four[1]) + (four[2] + four[3])
            st.inv.get_tensor(cute.make_layout(size))[at] = finish_row(
                cta.gmem.results, cta.call, split, rows, own, total, m_ref, self.log2_in
            )
        cute.arch.sync_warp()
        if lane == 0:
            INV_RING.arrive_full(st, 0)

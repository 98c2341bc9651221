"""The softmax warpgroup of ``f16``: mix16's (mix16_softmax.py) over a cache of one scale a token.

S^T = K Q^T with tokens on M for any number of rows; a thread has two tokens and makes their log2
and reciprocals itself.

    64 rows     one chain: content, then RoPE on top
    fewer       the content in one chain, RoPE in another, which runs while K is converted

RoPE never comes before content in a chain: where its logits are large, the sums of content behind
them would be cut at their last places.

Rows are masked, where tables name pages, in the tiles that not all rows see whole; what lists do
not name has scale 0, whose log2 is -inf.  A work tile's first tile with a token gives the rows
their
m_refs: it has one that a row sees if any tile has, since rows see what comes first.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...blocks.barriers import warps_meet
from ...blocks.compat import wgmma_fence
from ...blocks.types import F16
from ...combine.online_softmax import NEVER
from ...formats.dims import TOKEN_TILE as TILE
from ...load.fp8_per_token import safe_reciprocal
from ..fragments import mask, pad_layout
from ..online_softmax import HEADROOM
from ..roles import SOFTMAX_WARPS, WARPGROUP, Barrier
from ..wgmma import issue
from .f16_parts import Parts, content_layout
from .mix16_softmax import MixSoftmax


class F16Softmax(MixSoftmax):
    """The role."""

    parts: Parts
    log2_in, sum_log2 = None, 0
    least = 0.99 * NEVER  # the largest softmax_scale makes logits of 0.52 NEVER

    def begin_work_tile(self, cta, qst, batch, rows, l_run, wwarp):
        """Q to f16 and the rows' limits, by these warps; returns the first token that some row must
        not see, None where lists name tokens."""
        work, gmem, call, facts = self.parts.work, cta.gmem, cta.call, None
        cta.q_pipe.consumer_wait(qst)
        self.parts.queries.convert(cta.st, qst.index, call, wwarp)
        self.parts.queries.note_facts(cta.st, work, gmem, call, batch, rows)
        if not self.parts.gathers:
            facts = cute.arch.make_warp_uniform(work.ragged_from(gmem.work, call, batch, rows))
        self.begin_m_refs(cta.st)
        l_run.fill(0.0)
        cute.arch.fence_proxy("async.shared", space="cta")
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)
        return facts

    def free_first_half(self, st, wanted) -> None:
        """Nothing: they are free behind the work tile's tiles."""

    def free_queries(self, cta, qst, wanted) -> None:
        """Nothing, too."""

    def end_queries(self, cta, qst) -> None:
        cta.q_pipe.consumer_release(qst)

    def content_of_q(self, st, layouts):
        """Q's content in f16."""
        layout = content_layout(self.rows_cta, self.parts.q_stages)
        content = cute.recast_ptr(st.qc.data_ptr(), layout.inner, dtype=F16)
        return cute.make_tensor(content, layout.outer)

    # ---------------------------------------------------------------- S^T

    def scales_of(self, st, stage):
        """(sigma, log2 sigma, 1 / sigma) of the thread's two tokens."""
        tidx, _, _ = cute.arch.thread_idx()
        token = tidx % WARPGROUP // 32 * 16 + tidx % 32 // 4
        scales = self.parts.scales.of_stages(st)
        sigma = [scales[token + 8 * e, stage] for e in range(2)]
        logs = [cute.math.log2(s, fastmath=True) for s in sigma]
        return sigma, logs, [safe_reciprocal(s) for s in sigma]

    @cute.jit
    def products(self, st, tools, q_stage, stage, wwarp, lane):
        """S^T without scales."""
        rQ, rKr, rQr = self.operands(tools, q_stage, stage)
        units = const_expr(len(self.units))
        t, r = self.accumulator(), self.accumulator() if const_expr(self.few_rows) else None
        raws = self.load_k(st, stage, wwarp, lane, 0)
        if const_expr(self.few_rows):
            wgmma_fence()
            issue(self.rope_mma(), r, rKr, rQr, accumulate=False)
            warpgroup.commit_group()
        held = [self.to_k(raws, None), None]
        raws = self.load_k(st, stage, wwarp, lane, 1)
        for u in cutlass.range_constexpr(units):
            self.issue_unit(t, held[u % 2], rQ, u, u > 0)
            if const_expr(u + 1 < units):
                if const_expr(u > 0):
                    warpgroup.wait_group(1)
                held[(u + 1) % 2] = self.to_k(raws, None)
                if const_expr(u + 2 < units):
                    raws = self.load_k(st, stage, wwarp, lane, u + 2)
        if const_expr(not self.few_rows):
            wgmma_fence()
            issue(self.rope_mma(), t, rKr, rQr, accumulate=True)
            warpgroup.commit_group()
        warpgroup.wait_group(0)
        if const_expr(self.few_rows):
            for v in cutlass.range_constexpr(self.fragment.values):
                t[v] = t[v] + r[v]
        return t

    # ---------------------------------------------------------------- P^T

    @cute.jit
    def block(self, cta, tools, qst, kst, blocks, fresh, l_run, tile, facts):
        """S^T -> P^T of one tile; returns the next ``fresh``."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, wwarp = tidx % 32, cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        row, token, buf = self.fragment.row, self.fragment.token, blocks & 1
        st = cta.st
        sigma, log, inverse = self.scales_of(st, kst.index)
        t = self.products(st, tools, qst.index, kst.index, wwarp, lane)
        self.free_stage(cta, kst)
        factor = cute.make_rmem_tensor((self.fragment.rows,), Float32)
        factors = cute.make_tensor(st.factors.data_ptr(), pad_layout(self.rows_cta))
        cute.autovec_copy(factors[None, lane % 4], factor)
        m_ref = cute.make_rmem_tensor((self.fragment.rows,), Float32)
        cute.autovec_copy(self.m_refs_of(st), m_ref)
        for v in cutlass.range_constexpr(self.fragment.values):
            size = factor[row(v)] * sigma[token(v)]
            t[v] = t[v] * size + (log[token(v)] - m_ref[row(v)])
        if const_expr(facts is not None):  # noqa: SIM102 (only this is at compile time)
            if (tile + 1) * TILE > facts:
                limit = cute.make_rmem_tensor((self.fragment.rows,), Int32)
                limits = cute.make_tensor(st.limits.data_ptr(), pad_layout(self.rows_cta))
                cute.autovec_copy(limits[None, lane % 4], limit)
                mask(t, self.fragment, tile * TILE, limit, wwarp, lane)
        top = Float32(NEVER)
        for v in cutlass.range_constexpr(self.fragment.values):
            top = cute.arch.fmax(top, t[v])
        least = Float32(cutlass.select_(fresh != 0, Float32(self.least), Float32(HEADROOM)))
        moves = self.vote(st, top > least, buf, wwarp, lane)
        self.hand_over(st, t, inverse, moves, fresh, blocks, l_run)
        return Int32(cutlass.select_(moves != 0, Int32(0), fresh))

"""The softmax warpgroup of SM100's 16-bit decode (dense_parts.py): S -> P, gamma, row sums.

A thread holds half of a block of one row, 32 or 64 tokens (block_softmax.py).  ``m_ref`` is SM90's
of a 16-bit cache (sm90/online_softmax.py): lazy, P' = 2^(t - m_ref) in the cache's type.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from ...blocks.smem import array
from ...blocks.types import U32
from ...combine.online_softmax import NEVER
from ...sm90.online_softmax import raise_m_ref
from .. import umma
from ..fp8 import block_softmax as shares
from .dense_parts import S_STAGES, WARPGROUP, Barrier, Cta, Parts, tmem_of, work_tiles_of

CONSUMER = pipeline.PipelineUserType.Consumer


class Softmax:
    """Loop of the warpgroup."""

    def __init__(self, parts: Parts):
        self.parts, self.form, self.rings = parts, parts.form, parts.rings
        self.work, self.tile, self.p_stages = parts.work, parts.tile, parts.p_stages
        self.tokens = parts.form.share(parts.tile)  # of a thread

    @property
    def fields(self) -> dict:
        """Storage: what its warps tell each other and the correction's."""
        rows = self.form.rows
        return dict(
            gamma=array(Float32, self.p_stages * rows, 128),
            inv=array(Float32, rows, 128),  # 1 / row sum
            **shares.exchange_fields(),
        )

    @cute.jit
    def run(self, cta: Cta):
        tidx, _, _ = cute.arch.thread_idx()
        gmem, call = cta.gmem, cta.call
        span = work_tiles_of(self.parts, cta)
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        s_at = umma.lanes_of(tmem_of(cta), wwarp) + self.parts.columns.s
        row = tidx % self.form.rows
        pst = pipeline.make_pipeline_state(CONSUMER, self.p_stages)
        sst = pipeline.make_pipeline_state(CONSUMER, S_STAGES)
        running = cute.make_rmem_tensor((2,), Float32)  # m_ref, row sum of this thread's tokens
        inv_phase = Int32(1)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, split = self.work.work_tile_at(gmem.work, i)
            rows = self.work.witnessed_rows_at(gmem.work, call, i, batch, self.form.rows)
            factor, limit = self.work.row_facts(gmem.work, call, batch, rows.first + row, rows.end)
            ragged_from = self.work.ragged_from(gmem.work, call, batch, rows)
            running[0], running[1] = Float32(NEVER), Float32(0.0)
            for tile in cutlass.range(first, last, unroll=1):
                self.block(cta, tile, s_at, pst, sst, (factor, limit, ragged_from), running)
                pst.advance()
                sst.advance()
            shares.finish_work_tile(
                self.form, self.rings.inv, Barrier.SAME_ROWS, cta, split, rows, inv_phase, running
            )
            inv_phase = inv_phase ^ 1

    @cute.jit
    def block(self, cta: Cta, tile, s_at, pst, sst, facts, running):
        """One block: S -> P, gamma, this thread's share of the sum."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, row = tidx % 32, tidx % self.form.rows
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        st, (factor, limit, ragged_from) = cta.st, facts
        self.rings.s.wait_full(st, sst.index, sst.phase)
        umma.after_sync()
        s = umma.load(s_at + sst.index * self.tokens, self.tokens)
        umma.wait_loads()
        umma.before_sync()
        cute.arch.sync_warp()  # one lane frees S for all
        if lane == 0:
            self.rings.s.arrive_empty(st, sst.index)
        t = cute.make_rmem_tensor((self.tokens,), Float32)
        for v in cutlass.range_constexpr(self.tokens):
            t[v] = s[v] * factor
        if (tile + 1) * self.tile > ragged_from:
            first_token = tile * self.tile + shares.group_of(self.form, wwarp) * self.tokens
            for v in cutlass.range_constexpr(self.tokens):
                if first_token + v >= limit:
                    t[v] = -Float32.inf
        maxima = shares.exchange(
            st.maxima, self.form, sst.index, row, wwarp, shares.maximum(t), Barrier.SAME_ROWS
        )
        running[0], gamma = raise_m_ref(shares.of_row(maxima), running[0])
        part = [Float32(0.0) for _ in range(4)]
        for v in cutlass.range_constexpr(self.tokens):
            t[v] = cute.math.exp2(t[v] - running[0], fastmath=True)
            part[v % 4] = part[v % 4] + t[v]
        running[1] = running[1] * gamma + ((part[0] + part[1]) + (part[2] + part[3]))
        if cutlass.const_expr(self.rings.p.empty is not None):
            self.rings.p.wait_empty(st, pst.index, pst.phase ^ 1)
        self.store_p(t, st, pst.index, row, wwarp)
        if shares.group_of(self.form, wwarp) == 0:  # every share knows it
            factors = cute.make_layout((self.form.rows, self.p_stages))
            st.gamma.get_tensor(factors)[row, pst.index] = gamma
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            self.rings.p.arrive_full(st, pst.index)

    def store_p(self, t, st, stage, row, wwarp) -> None:
        """P of a thread's tokens: rows of 128 bytes, 128-byte swizzle; half of a row, or all of it.

        Eight lanes write 16 bytes each at a time: the swizzle spreads their rows over all banks.
        """
        p = cute.make_rmem_tensor((self.tokens,), self.parts.dtype)
        p.store(t.load().to(self.parts.dtype))
        words = cute.recast_tensor(p, U32)
        chunks, of_line = 2 * self.tokens // 16, umma.LINE // 16
        group, block = shares.group_of(self.form, wwarp), self.form.rows * umma.LINE
        line = self.parts.p_address(st, stage) + group * (chunks // of_line * block)
        line = line + row * umma.LINE
        for x in range(chunks):
            chunk = (group * (chunks % of_line) + x) ^ (row % 8)
            at = line + chunk * 16
            target = cute.make_ptr(U32, at, cute.AddressSpace.smem, assumed_align=16)
            source = cute.make_tensor(words.iterator + 4 * x, cute.make_layout(4))
            cute.autovec_copy(source, cute.make_tensor(target, cute.make_layout(4)))

"""The correction warpgroup of SM100's 16-bit decode (dense_parts.py): O in tensor memory.

A thread has one row and 256 of its channels, 128 of each half: columns o ... o + 255 of its lane.
Before P.V of a tile it sees to V that must not meet P = 0 and, where a row's m_ref moved,
multiplies O by gamma; behind a work tile's last tile it writes the rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from ...blocks.budget import Budget
from ...blocks.registers import claim_registers
from ...combine.epilogue import Held, Shared, write_rows
from ...formats.dims import EXPONENT_CHANNELS
from ...formats.dims import KV_LORA_RANK as D
from .. import umma
from .dense_parts import HALF, WARPGROUP, Cta, Parts, store, tmem_of, wait_stores, work_tiles_of
from .dense_softmax import Softmax

SCALED, WRITTEN = 64, 32  # columns of O in registers at a time
RUN = 8  # channels that a thread stores at a time


class Correction:
    """Loop of the warpgroup."""

    def __init__(self, parts: Parts):
        self.parts, self.form, self.rings = parts, parts.form, parts.rings
        self.work, self.p_stages = parts.work, parts.p_stages
        self.channels = parts.form.share(D)  # of a thread

    @cute.jit
    def run(self, cta: Cta):
        tidx, _, _ = cute.arch.thread_idx()
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        gmem, call = cta.gmem, cta.call
        span = work_tiles_of(self.parts, cta)
        o_at = umma.lanes_of(tmem_of(cta), wwarp) + self.parts.columns.o
        pst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.p_stages)
        inv_phase = Int32(0)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, split = self.work.work_tile_at(gmem.work, i)
            rows = self.work.rows_at(gmem.work, call, i, batch, self.form.rows)
            ragged_from = self.work.ragged_from(gmem.work, call, batch, rows)
            seqlen = self.work.seqlen_of(gmem.work, batch)
            for tile in cutlass.range(first, last, unroll=1):
                self.rings.p.wait_full(cta.st, pst.index, pst.phase)
                self.parts.prepare_values(cta, pst, tile, ragged_from, seqlen)
                self.correct(cta.st, o_at, pst, tile > first)
                pst.advance()
            if first < last:
                self.parts.wait_products(cta.st, pst)
            self.write(cta, o_at, split, rows, first < last, inv_phase)
            inv_phase = inv_phase ^ 1

    @cute.jit
    def correct(self, st, o_at, pst, adds):
        """O *= gamma where an m_ref of the warp's rows moved; ``adds``: O has a value."""
        tidx, _, _ = cute.arch.thread_idx()
        factors = cute.make_layout((self.form.rows, self.p_stages))
        gamma = st.gamma.get_tensor(factors)[tidx % self.form.rows, pst.index]
        if adds & cute.arch.vote_any_sync(gamma != 1.0):
            if cutlass.const_expr(self.p_stages > 1):  # of one, a full P says that
                self.parts.wait_products(st, pst)
            umma.after_sync()
            for c in cutlass.range_constexpr(0, self.channels, SCALED):
                x = umma.load(o_at + c, SCALED)
                scaled = []
                for v in cutlass.range_constexpr(0, SCALED, 2):
                    scaled += cute.arch.mul_packed_f32x2((x[v], x[v + 1]), (gamma, gamma))
                store(o_at + c, scaled)
            wait_stores()
        umma.before_sync()
        cute.arch.sync_warp()  # one lane tells for all
        if tidx % 32 == 0:
            self.rings.corrected.arrive_full(st, pst.index)

    @cute.jit
    def write(self, cta: Cta, o_at, split, rows, there, inv_phase):
        """A thread's channels of its row, normalised, to memory; zeros unless ``there``."""
        tidx, _, _ = cute.arch.thread_idx()
        st, results, row = cta.st, cta.gmem.results, tidx % self.form.rows
        channel = tidx % WARPGROUP // self.form.rows * self.form.share(HALF)
        umma.after_sync()
        self.rings.inv.wait_full(st, 0, inv_phase)
        inverse = st.inv.get_tensor(cute.make_layout(self.form.rows))[row]
        o = cute.make_rmem_tensor((WRITTEN,), Float32)
        for c in cutlass.range_constexpr(0, self.channels, WRITTEN):
            o.fill(0.0)
            if there:
                x = umma.load(o_at + c, WRITTEN)
                for v in cutlass.range_constexpr(WRITTEN):
                    o[v] = x[v] * inverse
            half = c // self.form.share(HALF)
            first = half * HALF + c % self.form.share(HALF)
            for g in cutlass.range_constexpr(0, WRITTEN, EXPONENT_CHANNELS):
                runs = {
                    first + g + v: cute.make_tensor(o.iterator + g + v, cute.make_layout(RUN))
                    for v in range(0, EXPONENT_CHANNELS, RUN)
                }
                shared = Shared((), channel + first + g, 1)
                write_rows(results, split, rows, (row, channel), [Held(0, runs)], shared)
        umma.wait_loads()  # of all: a product waits for its own registers by itself
        umma.before_sync()
        cute.arch.sync_warp()
        if tidx % 32 == 0:
            self.rings.inv.arrive_empty(st, 0)


class RowRoles:
    """The warpgroups behind the first, which have rows: softmax, then correction."""

    def __init__(self, parts: Parts, budget: Budget):
        self.softmax, self.correction, self.budget = Softmax(parts), Correction(parts), budget

    @cute.jit
    def run(self, cta: Cta, wg):
        if wg == 1:
            claim_registers(self.budget, self.budget.groups[1].registers)
            self.softmax.run(cta)
        else:
            claim_registers(self.budget, self.budget.groups[2].registers)
            self.correction.run(cta)

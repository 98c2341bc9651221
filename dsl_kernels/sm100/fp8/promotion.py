"""The promotion warpgroups of SM100's decode: O = gamma O + beta X, block product by block product.

A warpgroup owns a half of the channels, a thread 128 of one row (umma.py: its lane of tensor
memory).  O stays in registers; a half of X is free as soon as it has been read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from ...combine.epilogue import Held, Shared, write_rows
from ...formats.dims import EXPONENT_CHANNELS
from ...formats.dims import KV_LORA_RANK as D
from ...load.work_list import WorkList
from .. import umma
from ..rings import part_of_cta

if TYPE_CHECKING:
    from ..rings import Rings

WARPGROUP = 128
HALVES, HALF_WARPS = 2, 4  # a promotion warpgroup owns a half of the channels
HALF = D // HALVES
RUN = 8  # channels that a thread stores at a time


class Promotion:
    """The role.

    Attributes:
        form: of the MMA; its rows are a CTA's.
        rings: ``p`` (beta, gamma), ``x``, ``inv``.
        work: the work list.
        p_stages: of ``p``.
        x: first column of X.
        chunk: columns of X in registers at a time.
    """

    def __init__(
        self, form: umma.Form, rings: Rings, work: WorkList, *, p_stages: int, x: int, chunk: int
    ):
        self.form, self.rings, self.work = form, rings, work
        self.p_stages, self.x, self.chunk = p_stages, x, chunk

    @cute.jit
    def run(self, cta: Any, half):
        """Run the role for all work tiles of the CTA; ``half``: which half of the channels this
        warpgroup owns."""
        tidx, _, _ = cute.arch.thread_idx()
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        st, gmem, tmem = cta.st, cta.gmem, cta.tmem
        span = self.work.work_tiles_of(gmem.work, part_of_cta())
        o = cute.make_rmem_tensor((self.form.share(HALF),), Float32)
        x_at = umma.lanes_of(tmem, wwarp) + self.x + half * self.form.share(HALF)
        pst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.p_stages)
        x_phase, inv_phase = Int32(0), Int32(0)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, split = self.work.work_tile_at(gmem.work, i)
            o.fill(0.0)
            for _ in cutlass.range(first, last, unroll=1):
                self.block(st, o, x_at, half, pst, x_phase)
                x_phase = x_phase ^ 1
                pst.advance()
            rows = self.work.rows_at(gmem.work, cta.call, i, batch, self.form.rows)
            self.write_rows(cta, o, split, rows, half, inv_phase)
            inv_phase = inv_phase ^ 1

    @cute.jit
    def block(self, st, o, x_at, half, pst, x_phase):
        """O = gamma O + beta X of one block: a thread has one row, so one beta and one gamma."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, row = tidx % 32, tidx % self.form.rows
        factors = cute.make_layout((self.form.rows, self.p_stages))
        self.rings.p.wait_full(st, pst.index, pst.phase)
        beta = st.beta.get_tensor(factors)[row, pst.index]
        gamma = st.gamma.get_tensor(factors)[row, pst.index]
        if cute.arch.vote_any_sync(gamma != 1.0):
            for c in cutlass.range_constexpr(cute.size(o)):
                o[c] = o[c] * gamma
        self.rings.x.wait_full(st, half, x_phase)
        umma.after_sync()
        chunks = cute.size(o) // self.chunk
        for c in cutlass.range_constexpr(chunks):
            x = umma.load(x_at + c * self.chunk, self.chunk)
            if cutlass.const_expr(c == chunks - 1):
                umma.wait_loads()  # of every chunk; a sum waits for its own registers by itself
                umma.before_sync()
                cute.arch.sync_warp()  # one lane frees the half, and the factors, for all
                if lane == 0:
                    self.rings.x.arrive_empty(st, half)
                    self.rings.p.arrive_empty(st, pst.index)
            for v in cutlass.range_constexpr(0, self.chunk, 2):
                at = c * self.chunk + v
                o[at], o[at + 1] = cute.arch.fma_packed_f32x2(
                    (x[v], x[v + 1]), (beta, beta), (o[at], o[at + 1])
                )

    @cute.jit
    def write_rows(self, cta: Any, o, split, rows, half, inv_phase):
        """A thread's 128 channels of its row, normalised, to memory."""
        tidx, _, _ = cute.arch.thread_idx()
        st, results = cta.st, cta.gmem.results
        group = tidx % WARPGROUP // self.form.rows
        self.rings.inv.wait_full(st, 0, inv_phase)
        inverse = st.inv.get_tensor(cute.make_layout(self.form.rows))[tidx % self.form.rows]
        channel = half * HALF + group * cute.size(o)
        row = tidx % self.form.rows
        for first in cutlass.range_constexpr(0, cute.size(o), EXPONENT_CHANNELS):
            runs = {}
            for c in cutlass.range_constexpr(first, first + EXPONENT_CHANNELS, RUN):
                values = cute.make_rmem_tensor((RUN,), Float32)
                for v in cutlass.range_constexpr(RUN):
                    values[v] = o[c + v] * inverse
                runs[c] = values
            # an exponent for more channels would keep their products alive beside O: spills
            shared = Shared((), channel + first, 1)
            write_rows(results, split, rows, (row, channel), [Held(0, runs)], shared)
        cute.arch.sync_warp()
        if tidx % 32 == 0:
            self.rings.inv.arrive_empty(st, 0)

"""Decode over a 16-bit latent cache for SM100, pipeline ``ws``: tcgen05.mma.ws, O in tensor memory.

Idea: weight-stationary MMAs give 64 query rows all lanes of tensor memory (umma.py), so that O of
512 channels takes 256 columns and stays there for a work tile; S of 64 tokens takes 32, two thirds
of Q the rest.  V is the K tile through a second descriptor (MN-major B).  BF16 and fp16 are one
source. Numerics are SM90's of the same cache (sm90/b16/dense_decode.py): one *lazy* m_ref a row for
P, O and the row sum, which moves when a block's maximum is 2^15 above it; then its warp multiplies
O by gamma, in tensor memory.

Executed on the software GPU (softgpu); no Blackwell GPU has run it.

Roles (3 warpgroups of 128 threads)
    wg 0  warp 0  KV producer     TMA: 64-token tiles of 576 channels, in nine chunks
          warp 1  Q producer      TMA: the row tile of each work tile
          warp 2  Q.K issuer      384 channels of Q -> tensor memory; S = Q K^T, chunk by chunk
          warp 3  P.V issuer      O += P V in two halves of 256 channels; owns tensor memory
    wg 1          softmax         S -> registers, m_refs, P -> smem, gamma        (dense_softmax.py)
    wg 2          correction      clears V, O *= gamma, rows to memory            (dense_correct.py)

Timeline of tile i (one of two stages of the KV ring)
    KV producer   |TMA i+1, first half of V as soon as P.V i-1 has read its own ...
    Q.K issuer    | Q.K i+1, as chunks land |
    softmax       | S i -> registers | max, exp2, 16 bits -> P i | S i+1 ...
    correction    |                         wait P i | O *= gamma if an m_ref moved | ...
    P.V issuer    |                                   wait corrected i | lower, upper half | ...

Barriers (Ring: full, empty; "commit" is one arrival when the issued MMAs are complete)
    q          TMA bytes          | Q.K commit of a work tile              1
    k          TMA bytes          | P.V commit                         2, chunks 1 to 8 of their own
    k_early    P.V commit: chunks 0 to 3 may be loaded again           2
    s          Q.K commit         | softmax warps, S is in registers   2
    p          softmax warps      | (k)                                2  (P, gamma)
    corrected  correction warps   | (k)                                2  (O, V, and so P)
    o          P.V commit         | (k)                                2
    inv        softmax warps 0, 1 | correction warps                   1  (1/l of a work tile)

Tensor memory (columns of 512)
    0    O               256    lane m + 64 g, column 128 h + c: row m, channel 256 h + 128 g + c
    256  S               2 x 32 lane m + 64 g, column c: row m, token 32 g + c
    320  Q, 384 channels 192    A operand, 2 elements a cell, in both halves of the lanes

Shared memory (bytes)
    KV ring 2 x 73728 | Q 73728 | gamma, 1/l, maxima, sums, barriers
    P of a tile lies where its RoPE columns were (8192), which Q.K alone reads.

Registers: 136 producers and issuers, 184, 184.  With pages of 16 tokens a tile is 36 copies, whose
coordinates would be spilled with 88.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ...blocks import budget as bud
from ...blocks.registers import claim_registers
from ...blocks.smem import array, struct_of
from ...entry.entries import DenseEntry, DenseGmem
from ...entry.launch import Tma
from ...formats.dims import HEAD_DIM_QK
from ...formats.dims import TOKEN_TILE as TILE
from ...load.loader import Cache, Feed
from ...load.unplanned import void_unplanned
from ...load.work_list import Call
from .dense_correct import RowRoles
from .dense_issue import Issuers
from .dense_parts import HALF, WARPGROUP, Cta
from .dense_ws_parts import STAGES, Layouts, Pipes, WsParts

if TYPE_CHECKING:
    from ...spec import VariantSpec

ROW_TILES = (64,)
HALF_NAMES = ("lower", "upper")
SMALL_BYTES = 6144  # factors, exchange, barriers, alignment: an upper bound
KV_PRODUCER, Q_PRODUCER, SCORES, PRODUCTS = range(4)  # warps of the first warpgroup


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.row_tile not in ROW_TILES:
        return f"ws puts {' or '.join(map(str, ROW_TILES))} rows on M; no other row tile so far"
    if spec.stamps:
        return "ws records no stamps so far"
    if spec.cluster > 1:
        return f"ws: row_tile {spec.row_tile} needs one CTA, not a cluster"
    if spec.stages not in (0, STAGES):
        return f"ws has {STAGES} stages, got {spec.stages}"
    reason = bud.check(budget(spec))
    return None if reason is None else f"ws: {reason}"


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared and tensor memory of a CTA."""
    parts = WsParts(spec)
    rows = parts.form.rows
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers and issuers", 136),
            bud.WarpGroup("softmax", 184),
            bud.WarpGroup("correction", 184),
        ),
        smem=parts.smem_bytes + SMALL_BYTES,
        barriers=(
            *parts.q_tiles.barriers(), *parts.loads.barriers(),
            *(barrier for ring in parts.all_rings for barrier in ring.budget()),
        ),
        mmas=(
            bud.Mma("Q.K", rows, TILE, HEAD_DIM_QK, spec.dtype),
            *(bud.Mma(f"P.V, {x} half", rows, HALF, TILE, spec.dtype) for x in HALF_NAMES),
        ),
        tmem_columns=parts.columns.allocated,
        arch=spec.arch,
    )  # fmt: skip


def build(spec: VariantSpec):
    return DenseEntry.exported(DenseWs(spec))


class DenseWs:
    """The kernel: one CTA of 12 warps."""

    def __init__(self, spec: VariantSpec):
        self.spec, self.parts, self.budget = spec, WsParts(spec), budget(spec)
        self.q_tiles, self.loads = self.parts.q_tiles, self.parts.loads
        self.layouts, self.threads = self.parts.layouts, self.budget.threads
        self.issuers = Issuers(self.parts)
        self.rows = RowRoles(self.parts, self.budget)

    def storage(self, layouts: Layouts):
        rings = dict(pair for ring in self.parts.all_rings for pair in ring.field.items())
        return struct_of(
            **self.q_tiles.fields,
            **self.loads.fields,
            **rings,
            tmem=array(Int32, 4, 16),
            **self.rows.softmax.fields,
            **self.parts.tile_fields(layouts),
        )

    @cute.kernel
    def kernel(self, tma: Tma, gmem: DenseGmem, call: Call):
        tidx, _, _ = cute.arch.thread_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts = self.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.storage(layouts))
        if warp_id == KV_PRODUCER:
            for atom in (*self.q_tiles.descriptors(tma.q), *self.loads.descriptors(tma.kv)):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                self.loads.init(st)  # fenced with the pipes' own, below
                for ring in self.parts.all_rings:
                    ring.init(st)
        if warp_id == PRODUCTS:
            self.parts.form.allocate(st.tmem.data_ptr(), self.parts.columns.allocated)
        q_pipe = self.q_tiles.pipe(st)
        k_pipe = self.loads.pipe(st)  # its barrier also publishes the address

        cute.arch.griddepcontrol_wait()  # q, the cache and the plan come from the kernels before
        cta = Cta(st, gmem, call, Pipes(q_pipe, k_pipe))
        if wg == 0:
            claim_registers(self.budget, self.budget.groups[0].registers)
            if warp_id == SCORES:
                self.issuers.issue_scores(cta)
            elif warp_id == PRODUCTS:
                self.issuers.issue_products(cta)
            else:
                self.load(cta, tma, layouts, warp_id)
        else:
            self.rows.run(cta, wg)
        cute.arch.sync_threads()  # behind the fences and commits of each role's last access
        if warp_id == PRODUCTS:
            self.parts.form.free(st.tmem.data_ptr(), self.parts.columns.allocated)

    @cute.jit
    def load(self, cta: Cta, tma: Tma, layouts: Layouts, warp_id):
        """The loader's warps."""
        st, gmem, call, (q_pipe, k_pipe) = cta
        _, part, _ = cute.arch.block_idx()
        cache = Cache(tma.kv, gmem.num_pages, kv_heads=gmem.kv_heads)
        self.loads.run(
            warp_id, Feed(st, layouts.k, k_pipe, cache, gmem.work, call, part),
            self.q_tiles.issuer(st, q_pipe, layouts.q, tma.q, gmem.work, call), None,
        )  # fmt: skip
        if warp_id == KV_PRODUCER:
            void_unplanned(gmem.work, call, gmem.results, part)

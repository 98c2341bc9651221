"""Decode over a 16-bit latent cache for SM100, pipeline ``pair``: 128 rows as M = 128 of two CTAs.

Idea: one MMA of a pair reads each CTA's half of the tokens (Q.K) and of the channels (P.V) for the
rows of both, so shared memory is read half as often as by two CTAs of their own (dense_ws.py).  A
tile is 128 tokens.  O of a CTA's 64 rows takes 256 columns of tensor memory, as there, and stays
for a work tile; softmax and correction, and so numerics, are the same with blocks of 128.  V is a
region of its own (dense_pair_loads.py).  BF16 and fp16 are one source.

Executed on the software GPU (softgpu); no Blackwell GPU has run it.

Roles (3 warpgroups of 128 threads in each CTA; its 64 rows in softmax and correction)
    wg 0  warp 0  KV producer     TMA: Q of each work tile, K of its 64 tokens of each tile, in
                                  chunks
          warp 1  Q.K issuer      of the leader: 256 channels of Q -> tensor memory; S = Q K^T
          warp 2  P.V issuer      of the leader: O += P V, 64 tokens at a time
          warp 3  V producer      TMA: its 256 channels of each tile; owns tensor memory
    wg 1          softmax         S -> registers, m_refs, P -> smem, gamma        (dense_softmax.py)
    wg 2          correction      clears V, O *= gamma, rows to memory            (dense_correct.py)

Timeline of tile i
    KV producer   |TMA K i+1, K i+2 ... as chunks are multiplied
    V producer    | V i+1, its first 64 tokens while P.V i multiplies the others
    Q.K issuer    | Q.K i+1, as chunks land |
    softmax       | S i -> registers | max, exp2 | P.V i-1 is done: P i | S i+1 ...
    correction    |                         wait P i, V i | O *= gamma if an m_ref moved | ...
    P.V issuer    |                             wait corrected i of both CTAs | P.V i | ...

Barriers (Ring: full, empty; commits arrive at both CTAs', "leader": at its only)
    k          TMA bytes of both CTAs (leader) | Q.K commit                 12 (a square each)
    q          TMA bytes of both CTAs (leader) | Q.K commit of a work tile      1
    v          TMA bytes                       | P.V commit                 2
    s          Q.K commit                      | softmax warps of both CTAs (leader)   2
    p          softmax warps                   | P.V commit                 1  (P, gamma)
    corrected  correction warps of both CTAs (leader): O, P and V are there            1
    inv        softmax warps 0, 1              | correction warps           1  (1/l of a work tile)

Tensor memory (columns of 512), of each CTA
    0    O               256    lane m + 64 g, column 128 h + c: row m, channel 256 h + 128 g + c
    256  S               2 x 64 lane m + 64 g, column c: row m, token 64 g + c
    384  Q, 256 channels 128    A operand, 2 elements a cell, in both halves of the lanes

Shared memory of each CTA (bytes), in squares of 64 rows of 128 bytes
    K 12 x 8192 | Q, 320 channels 40960 | V 2 x 32768 | P 16384
    gamma, 1/l, maxima, sums, barriers                                             = 225280
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
from ...load.unplanned import void_unplanned
from ...load.work_list import Call
from ..rings import LEADER, part_of_cta
from .dense_correct import RowRoles
from .dense_pair_issue import PairIssuers
from .dense_pair_loads import CTAS, ROWS, TILE, Layouts
from .dense_pair_parts import PairParts
from .dense_parts import HALF, WARPGROUP, Cta

if TYPE_CHECKING:
    from ...spec import VariantSpec

HALF_NAMES = ("lower", "upper")
SMALL_BYTES = 6144  # factors, exchange, barriers, alignment: an upper bound
KV_PRODUCER, SCORES, PRODUCTS, V_PRODUCER = range(4)  # warps of the first warpgroup


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.row_tile != CTAS * ROWS:
        return f"pair puts {CTAS * ROWS} rows on M of two CTAs; ws takes 64"
    if spec.cluster != CTAS:
        return f"pair needs a cluster of {CTAS}, got {spec.cluster}"
    if spec.stamps:
        return "pair records no stamps so far"
    if spec.stages:
        return (
            f"pair has a ring of parts of tiles: no number of stages to choose, got {spec.stages}"
        )
    reason = bud.check(budget(spec))
    return None if reason is None else f"pair: {reason}"


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared and tensor memory of a CTA; MMAs of the pair."""
    parts, rows = PairParts(spec), CTAS * ROWS
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers and issuers", 104),
            bud.WarpGroup("softmax", 208),
            bud.WarpGroup("correction", 184),
        ),
        smem=parts.smem_bytes + SMALL_BYTES,
        barriers=tuple(barrier for ring in parts.all_rings for barrier in ring.budget()),
        mmas=(
            bud.Mma("Q.K", rows, TILE, HEAD_DIM_QK, spec.dtype),
            *(bud.Mma(f"P.V, {half} half", rows, HALF, TILE, spec.dtype) for half in HALF_NAMES),
        ),
        tmem_columns=parts.columns.allocated,
        arch=spec.arch,
    )


def build(spec: VariantSpec):
    return DenseEntry.exported(DensePair(spec))


class DensePair:
    """The kernel: two CTAs of 12 warps."""

    def __init__(self, spec: VariantSpec):
        self.spec, self.parts, self.budget = spec, PairParts(spec), budget(spec)
        self.q_tiles, self.loads = self.parts.q_tiles, self.parts.loads
        self.layouts, self.threads = self.loads.layouts, self.budget.threads
        self.issuers = PairIssuers(self.parts)
        self.rows = RowRoles(self.parts, self.budget)

    def storage(self, layouts: Layouts):
        rings = dict(pair for ring in self.parts.all_rings for pair in ring.field.items())
        return struct_of(
            **rings,
            tmem=array(Int32, 4, 16),
            **self.rows.softmax.fields,
            **self.parts.tile_fields(layouts),
        )

    @cute.kernel
    def kernel(self, tma: Tma, gmem: DenseGmem, call: Call):
        tidx, _, _ = cute.arch.thread_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts, columns = self.layouts(), self.parts.columns.allocated
        st = cutlass.memory.SmemAllocator().allocate(self.storage(layouts))
        if warp_id == KV_PRODUCER:
            for atom in (*self.q_tiles.descriptors(tma.q), *self.loads.descriptors(tma.kv)):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for ring in self.parts.all_rings:
                    ring.init(st)
            cute.arch.mbarrier_init_fence()
        if warp_id == V_PRODUCER:
            self.parts.form.allocate(st.tmem.data_ptr(), columns)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()  # both CTAs' barriers are there, and the address is published

        cute.arch.griddepcontrol_wait()  # q, the cache and the plan come from the kernels before
        cta = Cta(st, gmem, call, layouts)
        if wg == 0:
            claim_registers(self.budget, self.budget.groups[0].registers)
            self.produce_and_issue(cta, tma, warp_id, rank)
        else:
            self.rows.run(cta, wg)
        cute.arch.cluster_arrive()  # behind the fences and commits of each role's last access
        cute.arch.cluster_wait()
        if warp_id == V_PRODUCER:
            self.parts.form.free(st.tmem.data_ptr(), columns)

    @cute.jit
    def produce_and_issue(self, cta: Cta, tma: Tma, warp_id, rank):
        """The first warpgroup's warps; those that issue have nothing to do but in the leader."""
        if warp_id == KV_PRODUCER:
            self.loads.run_k(cta, tma.kv, self.q_tiles.bound(tma.q), rank)
            cute.arch.griddepcontrol_launch_dependents()
            void_unplanned(cta.gmem.work, cta.call, cta.gmem.results, part_of_cta())
        elif warp_id == V_PRODUCER:
            self.loads.run_v(cta, tma.kv, rank)
        elif rank == LEADER:
            if warp_id == SCORES:
                self.issuers.issue_scores(cta)
            else:
                self.issuers.issue_products(cta)

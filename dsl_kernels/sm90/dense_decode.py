"""Decode over a 16-bit latent cache for SM90, pipeline ``split``: entry, producers and budget.

One warpgroup computes S and P, two others O.

A part (one CTA, or one cluster when ``row_tile`` is 128) walks its items of the work list
(common/work_list.py).  64 and 128 rows lie on M (dense_many.py: S = Q K^T with Q in registers,
O = P V), 32 and fewer on N (dense_few.py: S^T = K Q^T, O^T = V^T P^T).  BF16 and fp16 are one
source: the type is the spec's.  V is the first 512 channels of the K tile, read by MN-major
descriptors of the same bytes: nothing is transposed.

Roles (4 warpgroups)
    wg 0  warp 0  KV producer     TMA: a 64-token tile of 576 channels into a free stage; with 64
                                  rows Q's tile as well, an item's first in the ring
          warp 1  Q producer      TMA: the row tile of each item (32 rows and fewer)
    wg 1          softmax         Q.K, softmax, P to shared memory
    wg 2, 3       P.V             O of half of d_v each, in fp32 registers

Frames (log2 units).  P' = 2^(t - m_ref) in 16 bits; O and the row sum live in the same frame.  It
is *lazy*: a block whose maximum is up to 2^15 above it leaves it where it is, so that O is hardly
ever rescaled; when it moves, the block's largest P' is 2^8.  fp16 holds 2^15, and what is 2^22
below the frame's first maximum is still a normal number.

Shared memory: ring 2 x 73728 bytes | Q 73728 (64 rows), 36864 (32), 2 x 18432 (16) | factors,
barriers.  P of a tile lies where the tile's RoPE columns were (64 tokens x 128 bytes), which Q.K
alone reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute
import cutlass.memory
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from ..common import budget as bud
from ..common.paged_tma import chunk_ring, early_ring, pipe_barriers
from ..common.registers import claim_registers
from ..common.work_list import Call
from ..dims import HEAD_DIM_QK, KV_LORA_RANK
from ..dims import TOKEN_TILE as TILE
from ..smxx.dense_entry import DenseEntry, Gmem, Tma, fake_args
from ..stamp import Stamp
from .dense_few import FewRows
from .dense_many import ManyRows
from .dense_parts import (
    CHUNKS,
    INV_RING,
    PV_WARPS,
    ROWS_OF_CTA,
    SOFTMAX_WARPS,
    TOKEN_BYTES,
    WARPGROUP,
    Cta,
    Layouts,
    Parts,
    early_of,
    is_few,
    p_ring,
    q_stages_of,
    stages_of,
)

if TYPE_CHECKING:
    from ..spec import VariantSpec

SMALL_BYTES = 3072  # factors, barriers, alignment: an upper bound


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.cluster * ROWS_OF_CTA < spec.row_tile:
        return f"split: a CTA holds {ROWS_OF_CTA} rows, row_tile {spec.row_tile} needs a cluster"
    if spec.cluster > 1 and spec.row_tile <= ROWS_OF_CTA:
        return f"split: row_tile {spec.row_tile} needs one CTA, not a cluster"
    if stages_of(spec) < 2:
        return f"split needs at least 2 stages, got {spec.stages}"
    reason = bud.check(budget(spec))
    return None if reason is None else f"split: {reason}"


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    form = FewRows if is_few(spec) else ManyRows
    few, rows = is_few(spec), min(spec.row_tile, ROWS_OF_CTA)
    stages, q_stages = stages_of(spec), q_stages_of(spec)
    producer, softmax, pv = form.registers
    tiles = (stages * TILE + q_stages * rows) * TOKEN_BYTES
    readers = {"softmax": SOFTMAX_WARPS}, {"softmax": SOFTMAX_WARPS, "P.V": PV_WARPS}
    half, early = KV_LORA_RANK // 2, early_of(spec)
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", producer),
            bud.WarpGroup("softmax", softmax),
            bud.WarpGroup("P.V", pv, count=2),
        ),
        smem=tiles + SMALL_BYTES,
        barriers=(
            *pipe_barriers(q_stages, readers[0], stages, readers[1], spec.cluster),
            *chunk_ring(stages, CHUNKS).budget(),
            *(early_ring(stages, early).budget() if early else ()),
            *p_ring(stages).budget(),
            *INV_RING.budget(),
        ),
        mmas=(
            bud.Mma("Q.K", TILE if few else rows, rows if few else TILE, HEAD_DIM_QK, spec.dtype),
            bud.Mma("P.V", 64, rows if few else half // 2, TILE, spec.dtype),
        ),
    )


def build(spec: VariantSpec):
    parts = Parts(spec)
    form = FewRows(parts) if is_few(spec) else ManyRows(parts)
    return DenseDecode(spec, form), fake_args(spec)


class DenseDecode(DenseEntry):
    """The exported function of one form."""

    threads = 512

    def __init__(self, spec: VariantSpec, form):
        super().__init__(spec, form.parts.loads, self.threads)
        self.form, self.parts = form, form.parts

    def layouts(self) -> Layouts:
        return self.form.layouts()

    def storage(self, layouts: Layouts):
        return self.form.storage(layouts)

    @cute.kernel
    def kernel(self, tma: Tma, gmem: Gmem, call: Call):
        entered = self.parts.stamps.now()
        tidx, _, _ = cute.arch.thread_idx()
        _, part, _ = cute.arch.block_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts = self.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.Storage)
        if warp_id == 0:
            for loaded in (*tma.q, *tma.kv):
                cpasync.prefetch_descriptor(loaded.atom)
            with cute.arch.elect_one():
                self.form.init_barriers(st)  # fenced with the pipes' own, below
        q_pipe, k_pipe = self.parts.loads.pipes(st)

        cute.arch.griddepcontrol_wait()  # q, the cache and the plan come from the kernels before
        waited = self.parts.stamps.now()
        if wg == 0:
            claim_registers(budget(self.spec), self.form.registers[0])
            if warp_id == 0:
                self.parts.stamps.put(gmem.results, Stamp.ENTRY, value=entered)
                self.parts.stamps.put(gmem.results, Stamp.WAITED, value=waited)
                span = self.parts.work.items_of(gmem.work, part)
                self.parts.loads.produce_kv(
                    st, (layouts.k,), k_pipe, tma.kv, gmem.work, span, tma.num_pages,
                    call.rows, None, kv_heads=tma.kv_heads,
                    mark=self.parts.stamps.marker(gmem.results, Stamp.FIRST_TMA),
                )  # fmt: skip
                cute.arch.griddepcontrol_launch_dependents()
            elif warp_id == 1:
                span = self.parts.work.items_of(gmem.work, part)
                self.parts.loads.produce_q(st, (layouts.q,), q_pipe, tma.q, gmem.work, call, span)
        else:
            cta = Cta(st, layouts, q_pipe, k_pipe, gmem, call, part)
            if wg == 1:
                claim_registers(budget(self.spec), self.form.registers[1])
                self.form.softmax_loop(cta)
            else:
                claim_registers(budget(self.spec), self.form.registers[2])
                self.form.pv_loop(cta, wg - 2)
        if const_expr(self.spec.cluster > 1):
            # the peer signals barriers in this CTA's shared memory: leave together
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

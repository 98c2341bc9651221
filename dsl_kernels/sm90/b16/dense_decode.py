"""Decode over a 16-bit latent cache for SM90, pipeline ``split``: roles and budget.

One warpgroup computes S and P, two others O.

A part (one CTA, or one cluster when ``row_tile`` is 128) walks its work tiles of the work list
(load/work_list.py).  64 and 128 rows lie on M (b16/dense_rows_on_m.py: S = Q K^T with two thirds of
Q in registers, O = P V), 32 and fewer on N (b16/dense_swap_ab.py: S^T = K Q^T, O^T = V^T P^T).
BF16 and fp16 are one source: the type is the spec's.  V is the first 512 channels of the K tile,
read by MN-major descriptors of the same bytes: nothing is transposed.

Roles (4 warpgroups)
    wg 0  warp 0  KV producer     TMA: a 64-token tile of 576 channels into a free stage
          warp 1  Q producer      TMA: the row tile of each work tile into Q's own ring
    wg 1          softmax         Q.K, softmax, P to shared memory
    wg 2, 3       P.V             O of half of d_v each, in fp32 registers

m_ref (log2 units).  P' = 2^(t - m_ref) in 16 bits; O and the row sum are relative to the same
m_ref.  It is *lazy*: a block whose maximum is up to 2^15 above it leaves it where it is, so that O
is hardly ever rescaled; when it moves, the block's largest P' is 2^8.  fp16 holds 2^15, and a P'
2^22 times smaller than the largest of the block that set m_ref is still a normal number.

Shared memory: ring 2 x 73728 bytes | Q 73728 (64 rows), 36864 (32), 2 x 18432 (16) | factors,
barriers.  P of a tile lies where the tile's RoPE columns were (64 tokens x 128 bytes), which Q.K
alone reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute

from ...blocks import budget as bud
from ...blocks.registers import claim_registers
from ...entry.entries import DenseEntry
from ...formats.dims import HEAD_DIM_QK, KV_LORA_RANK
from ...formats.dims import TOKEN_TILE as TILE
from ..decode import Decode, infeasible
from ..roles import INV_RING, ROWS_OF_CTA, Cta
from .dense_parts import TOKEN_BYTES, Parts, swaps_ab
from .dense_rows_on_m import RowsOnM
from .dense_swap_ab import SwapAb

if TYPE_CHECKING:
    from ...spec import VariantSpec

SMALL_BYTES = 3072  # factors, barriers, alignment: an upper bound


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return infeasible(spec, 2, budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    form = SwapAb if swaps_ab(spec) else RowsOnM
    swap_ab, rows = swaps_ab(spec), min(spec.row_tile, ROWS_OF_CTA)
    producer, softmax, pv = form.registers
    parts, half = Parts(spec), KV_LORA_RANK // 2
    tiles = (parts.stages * TILE + parts.q_stages * rows) * TOKEN_BYTES
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", producer),
            bud.WarpGroup("softmax", softmax),
            bud.WarpGroup("P.V", pv, count=2),
        ),
        smem=tiles + SMALL_BYTES,
        barriers=(
            *parts.q_tiles.barriers(), *parts.loads.barriers(), *parts.p_ring.budget(),
            *INV_RING.budget(),
        ),
        mmas=(
            bud.Mma("Q.K", *((TILE, rows) if swap_ab else (rows, TILE)), HEAD_DIM_QK, spec.dtype),
            bud.Mma("P.V", 64, rows if swap_ab else half // 2, TILE, spec.dtype),
        ),
    )  # fmt: skip


def build(spec: VariantSpec):
    return DenseEntry.exported(Decode(spec, Split(spec)))


class Split:
    """The pipeline (``decode.Pipeline``): one form's roles, with their registers."""

    def __init__(self, spec: VariantSpec):
        self.parts, self.budget = Parts(spec), budget(spec)
        self.form = SwapAb(self.parts) if swaps_ab(spec) else RowsOnM(self.parts)
        self.layouts, self.storage = self.form.layouts, self.form.storage
        self.init_barriers = self.form.init_barriers

    @cute.jit
    def math_roles(self, cta: Cta, wg):
        if wg == 0:
            claim_registers(self.budget, self.form.registers[1])
            self.form.softmax_loop(cta)
        else:
            claim_registers(self.budget, self.form.registers[2])
            self.form.pv_loop(cta, wg - 1)

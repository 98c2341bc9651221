"""FP8 MLA decode for SM90, pipeline ``f16``: products in f16 over the cache of one scale a token.

``etap``'s Q.K keeps 13 bits below its largest product (docs/numerics.md); this pipeline is for who
needs exact logits.  The e4m3 bytes of cache and queries (formats/fp8.py) become f16 without
loss, so that Q.K is as exact as fp32 sums are, and P has the 11 bits of f16.

The arithmetic is ``mix16``'s (mix16.py), whose fragments, m_refs and P.V these are: K and V are
*register* operands, converted from the ring's bytes, four values in two instructions.  One scale a
token makes it simpler: no ratios.  Scales multiply the logit and go into P's exponent.

    S^T = K Q^T     ldmatrix, e4m3 -> f16; content and RoPE on one scale (RoPE is divided by the
                    token's scale)
    O^T = V^T P^T   ldmatrix.trans, one prmt, e4m3 -> f16

Roles (4 warpgroups of 128 threads)
    wg 0            the loader: pages by TMA (load/paged_tma.py), or, of ``sparse_decode``,
                    tokens of lists (load/gather.py); Q's tiles
    wg 1            Q -> f16 as a work tile begins (f16_parts.py); S^T, softmax, P^T to shared
                    memory (f16_softmax.py)
    wg 2, 3         P.V: O^T of half of d_v each, summed in the tensor core (mix16_pv.py)

Timeline of tile i (one stage of the K ring)
    loader        | i+2 ...
    softmax       | Q.K i: 8 x (convert 64 channels, 4 WGMMAs) | RoPE i | vote, exp2 of i | P i ->
    P.V           | V^T of 16 channels | wait P i | 8 x (2 WGMMAs, convert the next) | free i

m_ref (log2 units).  P' = 2^(t + log2 sigma - m_ref) in f16, sigma the token's scale, as in
mix16.py, but the row sum adds P' / sigma as it is: append_kv's scales are 2^-80 and more.

Shared memory, 64 rows and 3 stages (bytes)
    Q 73728 | K ring 3 x (32768 content + 8192 RoPE + 256 scales) | P 2 x 8192
    exchange, gamma, factors, limits, 1/l, flags, barriers                         = 219136
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import const_expr

from ...blocks import budget as bud
from ...blocks.smem import struct_of
from ...entry.entries import Fp8Entry, SparseEntry
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import QK_ROPE_HEAD_DIM as R
from ...formats.dims import TOKEN_TILE as TILE
from ..decode import Decode, infeasible
from ..fp8.fp8_parts import STAGE_BYTES
from ..fp8.softmax_role import P_RING, P_STAGES, hand_over_fields
from ..roles import INV_RING, Barrier
from .f16_parts import Parts
from .f16_softmax import F16Softmax
from .mix16 import SMALL_BYTES, Mix16, q_stages, stages_of

if TYPE_CHECKING:
    from ...spec import VariantSpec

# Of producers, softmax, P.V, by rows; with 32 the gathering warps of few rows spill
REGISTERS = {16: (40, 152, 160), 32: (40, 152, 160), 64: (32, 112, 184)}


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.p_terms > 1:
        return "f16 has a P of 16 bits: one term"
    if spec.row_tile not in REGISTERS:
        return f"f16 has row tiles up to {max(REGISTERS)}: more rows are several blocks"
    return infeasible(spec, 2, budget(spec))


def parts_of(spec: VariantSpec) -> Parts:
    """Make the pipeline's components."""
    return Parts(spec, stages=stages_of(spec), q_stages=q_stages(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    rows = spec.row_tile
    producer, softmax, pv = REGISTERS[rows]
    tiles = stages_of(spec) * STAGE_BYTES + rows * 2 * (q_stages(spec) * (D + R) + P_STAGES * TILE)
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", producer),
            bud.WarpGroup("softmax", softmax),
            bud.WarpGroup("P.V", pv, count=2),
        ),
        smem=tiles + SMALL_BYTES,
        barriers=(*parts_of(spec).barriers(), *P_RING.budget(), *INV_RING.budget()),
        mmas=(
            bud.Mma("Q.K content", TILE, rows, D, "f16"),
            bud.Mma("Q.K RoPE", TILE, rows, R, "bf16"),
            bud.Mma("P.V", 64, rows, TILE, "f16"),
        ),
    )


def build(spec: VariantSpec):
    entry = SparseEntry if spec.op == "sparse_decode" else Fp8Entry
    parts = parts_of(spec)
    pipeline = F16(parts, F16Softmax(parts), budget(spec))
    return entry.exported(Decode(spec, pipeline))


class F16(Mix16):
    """The pipeline: softmax and P.V roles (``decode.Pipeline``)."""

    sum_factor, converts = 1.0, False

    # ---------------------------------------------------------------- host half

    def storage(self, layouts):
        return struct_of(
            **self.parts.barrier_fields,
            **hand_over_fields(self.rows_cta),
            **self.softmax.fields(),
            **self.parts.tile_fields(layouts),
        )

    # ---------------------------------------------------------------- roles

    @cute.jit
    def init_barriers(self, st):
        P_RING.init(st)
        self.parts.triples.ready.init(st)
        INV_RING.init(st)

    # ---------------------------------------------------------------- P.V warpgroups

    def first_turn(self, span):
        """The first work tile's."""
        return span[0]

    def work_tile_of(self, work, turn, span):
        """(work tile, its sequence, first and last tile) of a turn."""
        batch, first, last, _ = self.parts.work.work_tile_at(work, turn)
        return turn, batch, first, last

    @cute.jit
    def ends_of(self, gmem, call, i, batch):
        """(tokens of the sequence, first token that some row of the work tile must not see);
        nothing where lists name tokens, as what they do not name is zeros."""
        if const_expr(self.parts.gathers):
            return None
        rows = self.parts.work.rows_at(gmem.work, call, i, batch, self.rows_cta)
        seqlen = self.parts.work.seqlen_of(gmem.work, batch)
        return seqlen, self.parts.work.ragged_from(gmem.work, call, batch, rows)

    @cute.jit
    def clear(self, st, tile, ends, half, kst, pst):
        """Whatever lies past the end, or under a NaN scale, must not meet P = 0; P being there
        means that Q.K has read the rows."""
        if const_expr(not self.parts.gathers):
            seqlen, ragged_from = ends
            if (tile + 1) * TILE > ragged_from:
                P_RING.wait_full(st, pst.index, pst.phase)
                self.parts.scales.zero_values(
                    st, kst.index, seqlen - tile * TILE, 2 * half, 2, Barrier.PV + half
                )

    @staticmethod
    def load_ratio(st, stage, group, half: int):
        """None: a token's channels have one scale, which is in P."""

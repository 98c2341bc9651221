"""Pipeline ``mix16`` over formats that are content alone: NoPE (mix16_nope.py) and DeepSeek V4.1
(mix16_v41.py), whose RoPE channels are quantised as the others.

As mix16.py, whose roles these are; K and V are the same 512 e4m3 channels, nothing is BF16 but the
queries as they come, 512 channels.

    S^T = K Q^T     mix16.py's without the steps of RoPE
    O^T = V^T P^T   mix16.py's

Timeline of tile i (one stage of the K ring)
    gather        | i+2 ...
    announcer     |  scales i+1 |
    softmax       | Q.K i: 8 x (convert 64 channels, 4 WGMMAs) | vote, exp2 of i | P i ->
    P.V           | V^T of 16 channels | wait P i | 8 x (2 WGMMAs, convert the next) | free i

Registers as mix16.py's.

Shared memory, 64 rows and 3 stages (bytes)
    Q 65536 | K ring 3 x (32768 content + what the format has of scales) | P 2 x 8192
    exchange, gamma, factors, 1/l, flags, barriers
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90

from ...blocks import budget as bud
from ...blocks.smem import array
from ...blocks.types import BF16, F8, F16, ROW_MAJOR
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import TOKEN_TILE as TILE
from ...load.planes import CacheFormat, Plane
from ..decode import infeasible
from ..fp8.softmax_role import P_RING, P_STAGES
from ..roles import INV_RING, WARPGROUP, Layouts
from ..wgmma import tiled_mma
from . import mix16
from .mix16_parts import Parts, QueryRows
from .mix16_softmax import MixSoftmax

if TYPE_CHECKING:
    from ...spec import VariantSpec

Q_FORMAT = CacheFormat((Plane("c", BF16, D),))


class ContentParts(Parts):
    """``Parts`` without RoPE."""

    q_format = Q_FORMAT

    def __init__(self, spec: VariantSpec, **members: Any):
        super().__init__(spec, **{"queries": functools.partial(QueryRows, rope=False), **members})

    def layouts(self) -> Layouts:
        """Shared-memory layouts: Q in 16 bits, the ring in 8, P."""
        a, b, shape = sm90.make_smem_layout_a, sm90.make_smem_layout_b, (TILE, self.rows)
        return Layouts(
            (b(ROW_MAJOR, (*shape, D), BF16, self.q_stages),),
            (a(ROW_MAJOR, (*shape, D), F8, self.stages),),
            b(ROW_MAJOR, (*shape, TILE), F16, P_STAGES),
        )

    def tile_fields(self, layouts: Layouts) -> dict:
        """Scales, Q, K ring; the tiles start at multiples of the 1024-byte swizzle period."""
        return dict(
            **self.fields_of_rows(),
            qc=array(BF16, cute.cosize(layouts.q[0]), 1024),
            kc=array(F8, cute.cosize(layouts.k[0]), 1024),
        )


class ContentSoftmax(MixSoftmax):
    """The softmax warpgroup."""

    rope = False

    def tools(self, st, layouts):
        """Descriptors of Q."""
        tidx, _, _ = cute.arch.thread_idx()
        mma = tiled_mma(F16, self.rows_cta, a_in_registers=True)
        q = mma.get_slice(tidx % WARPGROUP).partition_B(self.content_of_q(st, layouts))
        return (mma.make_fragment_B(q),)

    @staticmethod
    def operands(tools, q_stage, stage):
        """Q of its stage; no RoPE of K and of Q."""
        return [tools[0][None, None, None, q_stage], None, None]


def budget_of(
    spec: VariantSpec, parts: ContentParts, registers: dict, made_bytes: int, k_step: int = D
) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA.

    Args:
        registers: of producers, softmax, P.V, by rows.
        made_bytes: of what is made of a token's scales, in shared memory.
        k_step: channels of K that one sum has.
    """
    rows = spec.row_tile
    producer, softmax, pv = registers[rows]
    token = D + spec.format.scale_bytes + made_bytes
    tiles = parts.stages * TILE * token + rows * 2 * (parts.q_stages * D + P_STAGES * TILE)
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", producer),
            bud.WarpGroup("softmax", softmax),
            bud.WarpGroup("P.V", pv, count=2),
        ),
        smem=tiles + mix16.SMALL_BYTES,
        barriers=(*parts.barriers(), *P_RING.budget(), *INV_RING.budget()),
        mmas=(
            bud.Mma("Q.K", TILE, rows, k_step, "f16"),
            bud.Mma("P.V", 64, rows, TILE, "f16"),
        ),
    )


def infeasible_because(spec: VariantSpec, budget: bud.Budget) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.p_terms > 1:
        return "mix16 has a P of 16 bits: one term"
    return infeasible(spec, 2, budget)

"""Sparse MLA decode for SM90 over DeepSeek V4's pages of 584 bytes a token, pipeline ``mix16``.

As mix16.py, whose roles these are, P.V's in mix16_v4_pv.py; a token (formats/v4.py) is 448
e4m3 channels with a power-of-two scale for each 64, and 64 BF16 RoPE channels.  K and V are the
same 512 channels.

    S^T = K Q^T     ldmatrix, e4m3 -> f16 times scale / largest scale, both exact; a group of 64
                    channels at a time, one chain for any number of rows; RoPE in BF16 on top
    O^T = V^T P^T   of content as mix16.py; of RoPE in BF16, both operands out of shared memory:
                    16-bit types may lie MN-major there, nothing is converted

Why P is there twice, in f16 and in BF16.  An MMA has one dtype.  e4m3 times a ratio is exact in
f16, and P keeps 11 bits there; BF16 for all of V would cost a conversion more (there is none from
e4m3) and leave P 8 bits.  RoPE in f16 would want sigma to bound it, which takes a maximum over 64
channels a token and moves the ratios of content.  In BF16 it needs no bound.  For the 64 RoPE
channels P is rounded to 2^-9, as FlashMLA rounds it for all 512.  Counted: the rounding of results
makes 1 - cosine of out 1.4e-6; RoPE channels have 1.4e-6 more, an eighth of which counts, so it is
1.6e-6 in all, where 5e-6 is allowed.
P in BF16 is P' / sigma * 2^-40, what the row sums add, so that its O^T needs no factor of its own.

Timeline of tile i (one stage of the K ring)
    gather        | i+2 ...
    announcer     |  scales i+1 |
    softmax       | Q.K i: 7 x (convert 64 channels, 4 WGMMAs) | RoPE i | vote, exp2 | P i twice ->
                    (of fewer rows 128 channels at once)
    P.V           | V^T of 16 channels | wait P i | (RoPE, 4 WGMMAs) | 2 WGMMAs, convert .. | free i

With 64 rows over lists P i is announced when Q.K i + 1 has been issued (mix16_overlap.py).

Registers as mix16.py's.

Shared memory, 64 rows and 3 stages (bytes)
    Q 65536 | K ring 3 x (28672 content + 8192 RoPE + 512 scales + 3968 facts and ratios made of
    the scales) | P 2 x 2 x 8192 | exchange, gamma, factors, 1/l, flags, barriers         = 226944
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...blocks import budget as bud
from ...entry.entries import TwoListEntry
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import QK_ROPE_HEAD_DIM as R
from ...formats.dims import TOKEN_TILE as TILE
from ..decode import Decode, infeasible
from ..fp8.softmax_role import P_STAGES
from ..roles import FEW_ROWS
from . import mix16
from .mix16_overlap import softmax_of
from .mix16_v4_parts import STAGE_BYTES, C, V4Parts, V4Softmax
from .mix16_v4_pv import BLOCK, ProductsOfV4

if TYPE_CHECKING:
    from ...spec import VariantSpec

# Of producers, softmax, P.V, by rows
REGISTERS = {16: (40, 152, 160), 32: (40, 152, 160), 64: mix16.REGISTERS[64]}


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.p_terms > 1:
        return "mix16 has a P of 16 bits: one term"
    if spec.out_dtype != "bf16" and spec.row_tile > FEW_ROWS:
        return "mix16 over V4's pages with 64 rows writes BF16: a lane stores one block's channels"
    return infeasible(spec, 2, budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    rows, stages = spec.row_tile, mix16.stages_of(spec)
    producer, softmax, pv = REGISTERS[rows]
    tiles = stages * STAGE_BYTES + rows * 2 * (mix16.q_stages(spec) * D + 2 * P_STAGES * TILE)
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", producer),
            bud.WarpGroup("softmax", softmax),
            bud.WarpGroup("P.V", pv, count=2),
        ),
        smem=tiles + mix16.SMALL_BYTES,
        barriers=mix16.barriers_of(spec, mix16.parts_of(spec, V4Parts)),
        mmas=(
            bud.Mma("Q.K content", TILE, rows, C, "f16"),
            bud.Mma("Q.K RoPE", TILE, rows, R, "bf16"),
            bud.Mma("P.V content", BLOCK, rows, TILE, "f16"),
            bud.Mma("P.V RoPE", BLOCK, rows, TILE, "bf16"),
        ),
    )


def build(spec: VariantSpec):
    parts = mix16.parts_of(spec, V4Parts)
    pipeline = ProductsOfV4(parts, softmax_of(spec, V4Softmax)(parts), budget(spec))
    return TwoListEntry.exported(Decode(spec, pipeline))

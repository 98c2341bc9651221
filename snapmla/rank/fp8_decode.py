"""Decode over the FP8 cache: what its pipelines can do, and what a token costs."""

from __future__ import annotations

from dsl_kernels.families.fp8_decode import FAMILY, PAGE_SIZES, ROW_TILES, TILES_OF, TWO_TERMS
from dsl_kernels.formats.fp8 import FORMAT
from dsl_kernels.formats.rows16 import F16
from dsl_kernels.spec import VariantSpec
from snapmla.rank.cards import Card
from snapmla.rank.decode import DecodeOp, Features

BF16_TILES, FP8_TILES = 1, 16  # of the 17 64-channel tiles a token costs (SnapMLA, Eq. 7)
# Tensor-core cycles of one 64-token tile and 64 rows: Q.K 16 x 32 FP8 + 4 x 32 BF16; P.V, a term.
QK_CYCLES, PV_CYCLES = 640, 512
F16_CYCLES = 2 * QK_CYCLES - 128 + 2 * PV_CYCLES  # of 16-bit products; RoPE's are already

ONE_TERM = "it sums one, and nothing there has 16-bit products of this cache"


def tensor_cycles(spec: VariantSpec) -> float:
    """Tensor-core cycles that a CTA spends on one KV tile.

    With 128 query rows each CTA of the cluster has 64.
    """
    cycles = QK_CYCLES + spec.p_terms * PV_CYCLES
    if spec.pipeline == "f16":
        cycles = F16_CYCLES
    return cycles * (min(spec.row_tile, 64) / 64) * (spec.token_tile / 64)


def effective_tflops(card: Card) -> float:
    """Attainable MLA rate: 16 FP8 tiles and 1 BF16 tile, each at its own ceiling."""
    tiles = FP8_TILES + BF16_TILES
    return tiles / (FP8_TILES / card.fp8_tflops + BF16_TILES / card.bf16_tflops)


FP8_DECODE = DecodeOp(
    FAMILY,
    features={
        "etap": Features(
            ROW_TILES, "any row tile", "V^T as register operand; up to 32 rows as S^T = K Q^T",
            PAGE_SIZES, two_terms=TWO_TERMS["sm_90a", "etap"],
            why_two_terms="the softmax of 64 rows has no registers for them",
        ),
        "dual_wg": Features(
            (64, 128), "it puts rows on the MMA's M = 64", "Algorithm 1 of the SnapMLA paper",
            PAGE_SIZES, asked=True,
        ),
        "f16": Features(  # its sums of P.V grow in the tensor core over a whole item
            TILES_OF["f16"], "more rows are several blocks",
            "16-bit products, the cache in registers", PAGE_SIZES,
            why_two_terms="its P has 16 bits", asked=True, longest_item=F16.longest_item,
        ),
        "ws": Features(
            (64,), "it puts rows on the MMA's M = 64",
            "tcgen05.mma.ws, so far on the software GPU only", PAGE_SIZES,
            why_two_terms=ONE_TERM,
        ),
        "pair": Features(
            (128,), "it puts rows on M = 128 of two CTAs",
            "cta_group::2, so far on the software GPU only", PAGE_SIZES,
            why_two_terms=ONE_TERM,
        ),
    },
    token_bytes=FORMAT.token_bytes,
    tensor_cycles=tensor_cycles,
    effective_tflops=effective_tflops,
    exact={"sm_90a": "f16"},
    # H200, 6 to 32 sequences of 64 to 1536 tokens: what a tile more takes; of f16 these by the
    # ratio of both pipelines' times of a tile in data/decode_costs.json
    tile_ns={
        ("etap", 16): 870, ("etap", 32): 870, ("etap", 64): 1270, ("etap", 128): 1270,
        ("f16", 16): 920, ("f16", 32): 970, ("f16", 64): 1780,
    },
)  # fmt: skip

"""Decode over a 16-bit cache: what its pipelines can do, and what a token costs."""

from __future__ import annotations

from dsl_kernels.families.dense_decode import DTYPES, FAMILY, PAGE_SIZES, ROW_TILES
from dsl_kernels.formats.rows16 import BF16
from dsl_kernels.spec import VariantSpec
from snapmla.rank.cards import card_named
from snapmla.rank.costs import Costs, Tile, costs_of
from snapmla.rank.decode import DecodeOp, Features
from snapmla.rank.fp8_decode import FP8_DECODE

# Tensor-core cycles of one 64-token tile and 64 rows: Q.K 36 x 32, P.V 8 x 4 x 32, all 16-bit.
TILE_CYCLES = 1152 + 1024
# Microseconds of a tile on an H200: 32 x 16384 tokens with 16, 32 and 64 heads, beside FP8's fixed
# times; of a pair 1.03 times that of 64 rows, as at 128 heads, where two row blocks side by side,
# the second served by L2, beat the pair of CTAs that shares its tiles (docs/lab-book.md).
TILE_US = {16: 2.24, 32: 2.26, 64: 2.51, 128: 2.585}
STANDS_IN = "etap"  # whose row tiles ``split`` shares: up to 32 rows transposed, 64, 128 as pairs
# Of SM100's pipelines nothing was measured.  Predicted: clocks of the busiest unit beside DRAM, the
# shared-memory port, for a tile at 128 bytes a clock; the share of the card's read rate that others
# have measured on a B200, 7.48 of 8 TB/s; and an H200's fixed time.
# ws, 64 tokens: TMA's fill 576; Q.K 576 of K and 192 of Q, V 512; P 64 stored, 128 read; 60 others
WS_TILE_CYCLES = 576 + 576 + 192 + 512 + 64 + 128 + 60
# pair, 128 tokens, in each CTA: TMA's fill 576 of K and 512 of V; Q.K 576 of K and 320 of Q, V 512;
# P 128 stored, 256 read; 80 others.  Two blocks of ws take 2 x 2108 for as many tokens.
PAIR_TILE_CYCLES = 576 + 512 + 576 + 320 + 512 + 128 + 256 + 80
BLACKWELL_READ_FRACTION = 7.48 / 8.0


def tensor_cycles(spec: VariantSpec) -> float:
    """Tensor-core cycles of one tile; a CTA of a cluster has 64 rows of it."""
    return TILE_CYCLES * (min(spec.row_tile, 64) / 64) * (spec.token_tile / 64)


def assumed(arch: str) -> Costs | None:
    """FP8's fixed times and the tiles' that were measured, until a table has this op's own; on
    SM100, where nothing ran, predictions."""
    if arch == "sm_100a":
        return _predicted()
    fp8 = costs_of(FP8_DECODE.family.op, arch)
    if fp8 is None:
        return None
    tiles = {
        ("split", row_tile): Tile(tile.fixed_us, TILE_US[row_tile])
        for (pipeline, row_tile), tile in fp8.tiles.items()
        if pipeline == STANDS_IN
    }
    return Costs(fp8.card, fp8.read_fraction, tiles, points={})


def _predicted() -> Costs | None:
    """Costs of a B200's pipelines, from counted clocks and its datasheet."""
    card, fp8 = card_named("B200"), costs_of(FP8_DECODE.family.op, "sm_90a")
    if card is None or fp8 is None:
        return None
    fixed = fp8.tiles[STANDS_IN, 64].fixed_us
    cycles = {("ws", 64): WS_TILE_CYCLES, ("pair", 128): PAIR_TILE_CYCLES}
    tiles = {kernel: Tile(fixed, clocks / card.mhz) for kernel, clocks in cycles.items()}
    return Costs(card, BLACKWELL_READ_FRACTION, tiles, points={})


DENSE_DECODE = DecodeOp(
    FAMILY,
    features={
        "split": Features(
            ROW_TILES, "any row tile",
            "Q mostly in registers; up to 32 rows transposed as S^T = K Q^T", PAGE_SIZES, DTYPES,
            why_two_terms="P has 16 bits with a 16-bit cache",
        ),
        "ws": Features(
            (64,), "it puts rows on the MMA's M = 64",
            "tcgen05.mma.ws, O in tensor memory; so far on the software GPU only", PAGE_SIZES,
            DTYPES, why_two_terms="P has 16 bits with a 16-bit cache",
        ),
        "pair": Features(
            (128,), "it puts rows on M = 128 of two CTAs",
            "cta_group::2, O in tensor memory; so far on the software GPU only", PAGE_SIZES,
            DTYPES, why_two_terms="P has 16 bits with a 16-bit cache",
        ),
    },
    token_bytes=BF16.token_bytes,
    tensor_cycles=tensor_cycles,
    effective_tflops=lambda card: card.bf16_tflops,
    about="a 16-bit cache",
    reference="snapmla.testing.dense_reference.dense_decode_reference",
    kernels="decode kernel for a 16-bit cache",
    assumed=assumed,
    # H200, 6 to 32 sequences of 64 to 1536 tokens: what a tile more takes
    tile_ns={("split", 16): 1190, ("split", 32): 1190, ("split", 64): 1660, ("split", 128): 1660},
)  # fmt: skip

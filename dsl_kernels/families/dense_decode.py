"""``dense_decode``: attention of a few query tokens over a paged 16-bit cache."""

from __future__ import annotations

from collections.abc import Iterator

from ..formats.dims import TOKEN_TILE
from .family import DECODE, Axis, Family, Values
from .fp8_decode import PAGE_SIZES, ROW_TILES, cluster_of

PIPELINES = ("split", "ws", "pair")
DTYPES = ("bf16", "f16")

AXES = (
    Axis("pipeline", "", PIPELINES),
    Axis("row_tile", "r", ROW_TILES, 64),
    Axis("page_size", "p", PAGE_SIZES, 64),
    Axis("dtype", "d", DTYPES, "bf16"),  # of queries, cache and results
    Axis("stages", "st", tuple(range(5)), 0, named=False),  # of the KV ring; 0: the pipeline's own
    Axis("stamps", "stamps", (0, 1), 0, named=False),  # 1: a CTA records its events (stamp.py)
    Axis("cluster", "c", (1, 2), lambda values: cluster_of(values["row_tile"]), named=False),
)
MODULES = {
    ("sm_90a", "split"): "dsl_kernels.sm90.b16.dense_decode",
    ("sm_100a", "ws"): "dsl_kernels.sm100.b16.dense_ws",
    ("sm_100a", "pair"): "dsl_kernels.sm100.b16.dense_pair",
}
# Tokens of a KV tile: what a kernel walks, so what its plans are made of.
TOKEN_TILES = {**dict.fromkeys(MODULES, TOKEN_TILE), ("sm_100a", "pair"): 2 * TOKEN_TILE}


def points(arch: str) -> Iterator[Values]:
    """The default matrix: every row tile, page and dtype."""
    for pipeline in PIPELINES:
        if (arch, pipeline) not in MODULES:
            continue
        for row_tile in ROW_TILES:
            for page_size in PAGE_SIZES:
                for dtype in DTYPES:
                    yield {
                        "pipeline": pipeline, "row_tile": row_tile, "page_size": page_size,
                        "dtype": dtype,
                    }  # fmt: skip


FAMILY = Family(
    "dense_decode",
    AXES,
    module=lambda arch, values: MODULES.get((arch, values["pipeline"])),
    points=points,
    kind=DECODE,
    formats=DTYPES,
    token_tile=lambda arch, values: TOKEN_TILES[arch, values["pipeline"]],
    # both forms and dtypes of SM90, one kernel of SM100; the rest is of the same sources and runs
    # with the whole matrix
    everyday=(
        {"pipeline": "split", "row_tile": 16, "page_size": 16, "dtype": "f16"},
        {"pipeline": "split", "row_tile": 64, "page_size": 64, "dtype": "bf16"},
        {"pipeline": "ws", "row_tile": 64, "page_size": 64, "dtype": "bf16"},
    ),
    result_axis="dtype",
    shown=("q", "cache", "block_table"),
    results=("out", "lse"),
    reference="snapmla.tools.repro:against_dense_reference",
)

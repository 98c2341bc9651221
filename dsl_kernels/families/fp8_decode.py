"""``decode``: attention of a few query tokens over the paged FP8 cache."""

from __future__ import annotations

from collections.abc import Iterator

from ..formats.dims import TOKEN_TILE
from .family import DECODE, OUT_DTYPE, Axis, Family, Values

PIPELINES = ("etap", "dual_wg", "f16", "ws", "pair")
ROW_TILES = (16, 32, 64, 128)  # query rows, num_heads * s_q, that a CTA or a cluster owns
PAGE_SIZES = (16, 32, 64, 128)


def cluster_of(row_tile: int) -> int:
    """CTAs that share KV by multicast, unless a spec says otherwise: one holds 64 rows at most."""
    return 2 if row_tile == 128 else 1


AXES = (
    Axis("pipeline", "", PIPELINES),
    Axis("row_tile", "r", ROW_TILES, 64),
    Axis("page_size", "p", PAGE_SIZES, 64),
    OUT_DTYPE,
    Axis("stages", "st", tuple(range(9)), 0, named=False),  # of the KV ring; 0: the pipeline's own
    Axis("stamps", "stamps", (0, 1), 0, named=False),  # 1: a CTA records its events (stamp.py)
    Axis("cluster", "c", (1, 2), lambda values: cluster_of(values["row_tile"]), named=False),
    Axis("p_terms", "pt", (1, 2), 1, named=False),  # e4m3 terms of P
)
MODULES = {
    ("sm_90a", "etap"): "dsl_kernels.sm90.fp8.transposed",
    ("sm_90a", "dual_wg"): "dsl_kernels.sm90.fp8.dual_wg",
    ("sm_90a", "f16"): "dsl_kernels.sm90.bytes16.f16",
    ("sm_100a", "ws"): "dsl_kernels.sm100.fp8.ws",
    ("sm_100a", "pair"): "dsl_kernels.sm100.fp8.pair",
}
# Tokens of a KV tile: what a kernel walks, so what its plans are made of.
TOKEN_TILES = {**dict.fromkeys(MODULES, TOKEN_TILE), ("sm_100a", "pair"): 2 * TOKEN_TILE}
# In no default matrix: the paper's form, kept to be compared: slower everywhere
# (docs/lab-book.md).
ON_REQUEST = ("dual_wg",)
# f16 is an accuracy setting, whose other pages are built when they are asked for
DEFAULT_PAGES = {"etap": PAGE_SIZES, "f16": (64,), "ws": PAGE_SIZES, "pair": PAGE_SIZES}
# Pipelines without every row tile; more rows are several blocks.
TILES_OF = {"f16": (16, 32, 64)}
# (arch, pipeline) -> row tiles that are there with two terms of P, built when they are asked for
TWO_TERMS = {("sm_90a", "etap"): (16, 32)}


def pipelines_of(arch: str) -> tuple[str, ...]:
    """Pipelines that an architecture has; none is for two."""
    return tuple(pipeline for pipeline in PIPELINES if (arch, pipeline) in MODULES)


def points(arch: str) -> Iterator[Values]:
    """The default matrix: every row tile and result dtype, pages as ``DEFAULT_PAGES`` says.  Not
    ``ON_REQUEST``."""
    for pipeline in (p for p in pipelines_of(arch) if p not in ON_REQUEST):
        for row_tile in TILES_OF.get(pipeline, ROW_TILES):
            for page_size in DEFAULT_PAGES[pipeline]:
                for out_dtype in OUT_DTYPE.values:
                    yield {
                        "pipeline": pipeline, "row_tile": row_tile, "page_size": page_size,
                        "out_dtype": out_dtype,
                    }  # fmt: skip


FAMILY = Family(
    "decode",
    AXES,
    module=lambda arch, values: MODULES.get((arch, values["pipeline"])),
    points=points,
    kind=DECODE,
    formats=("fp8",),
    token_tile=lambda arch, values: TOKEN_TILES[arch, values["pipeline"]],
    rarely=tuple({"pipeline": "f16", "row_tile": tile} for tile in (32, 64)),
    counted_by=("pipeline",),
    shown=("q_nope", "content", "block_table"),
    results=("out", "lse"),
    reference="snapmla.tools.repro:against_reference",
    relies_on="combine/coverage.py",  # rows of tables that do not fit become NaN
)

"""``record_decode``: attention of a few query tokens over a paged cache of bytes."""

from __future__ import annotations

from collections.abc import Iterator

from ..formats.dims import TOKEN_TILE
from ..formats.format import Format
from ..formats.registered import FORMATS as ALL
from ..formats.registered import ROWS_OF_BYTES, Names
from .family import DECODE, Axis, Family, Values
from .sparse_decode import FAMILY as SPARSE
from .sparse_decode import ROW_TILES

PIPELINE = "mix16"  # several scales a token, 16-bit products
FORMATS = Names(lambda each: each.named and each.sparse)

SHARED = ("stages", "stamps", "cluster", "halves", "p_terms")

# As of ``sparse_decode``, whose kernels these are but for the loader.
AXES = (
    Axis("pipeline", "", (PIPELINE,)),
    Axis("row_tile", "r", ROW_TILES[PIPELINE], 64),
    Axis("out_dtype", "o", ("bf16",), "bf16"),
    *(axis for axis in SPARSE.axes if axis.name in SHARED),
    # 1: a copy takes a line of four rows, not a row, for which few rows' loader has no registers
    Axis("lines", "ln", (1,), 1, named=False),
    Axis("cache_dtype", "kv", FORMATS, ROWS_OF_BYTES, named=False),
)
MODULES = {  # by ``Format.arrangement``
    ("sm_90a", ("f32", 128, "own")): "dsl_kernels.sm90.bytes16.mix16_pages",
    ("sm_90a", ("ue8m0", 64, "in v")): "dsl_kernels.sm90.bytes16.mix16_v4_pages",
    ("sm_90a", ("ue8m0", 32, "none")): "dsl_kernels.sm90.bytes16.mix16_v41_pages",
    ("sm_90a", ("f32", 128, "none")): "dsl_kernels.sm90.bytes16.mix16_nope_pages",
}


def module_of(arch: str, format: Format) -> str | None:
    """The kernel module that reads a cache of bytes, None if there is none."""
    return MODULES.get((arch, format.arrangement))


def points(_arch: str) -> Iterator[Values]:
    """None: they are built when they are asked for."""
    return iter(())


FAMILY = Family(
    "record_decode",
    AXES,
    module=lambda arch, values: module_of(arch, ALL[values["cache_dtype"]]),
    points=points,
    kind=DECODE,
    formats=FORMATS,
    token_tile=lambda _arch, _values: TOKEN_TILE,
    everyday=(),
    shown=("q", "cache", "block_table"),
    results=("out", "lse"),
)

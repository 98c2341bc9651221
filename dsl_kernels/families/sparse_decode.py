"""``sparse_decode``: attention of a query token to tokens of its own choice, over the paged FP8
cache."""

from __future__ import annotations

from collections.abc import Iterator

from ..formats.dims import TOKEN_TILE
from ..formats.format import Format
from ..formats.registered import BYTES, DEFAULT, FORMATS, ROWS_OF_BYTES, SPARSE
from .family import DECODE, OUT_DTYPE, Axis, Family, Values

PIPELINES = (
    "etap",  # a scale a token (cache "fp8"), FP8 products
    "mix16",  # bytes with several scales a token, 16-bit products: by cache_dtype
    "mix8",  # mix16 with FP8 products of content and a rounded query, built when asked for
    "f16",  # a scale a token (cache "fp8"), 16-bit products
    "ws",  # as etap, of SM100
)
OVER_BYTES = ("mix16", "mix8")
# The cache that a pipeline reads unless another one is named.
CACHES = {**dict.fromkeys(PIPELINES, DEFAULT), **dict.fromkeys(OVER_BYTES, ROWS_OF_BYTES)}
# Query heads that a CTA owns.
ROW_TILES = {**dict.fromkeys(PIPELINES, (16, 32, 64)), "mix8": (64,), "ws": (64,)}
ON_REQUEST = ("mix8",)  # in no default matrix
TWO_TERMS = (16, 32)  # row tiles of ``etap`` with two terms of P, built when they are asked for

AXES = (
    Axis("pipeline", "", PIPELINES),
    Axis("row_tile", "r", ROW_TILES["etap"], 64),
    OUT_DTYPE,
    Axis("stages", "st", tuple(range(9)), 0, named=False),  # of the KV ring; 0: the pipeline's own
    Axis("stamps", "stamps", (0, 1), 0, named=False),  # 1: a CTA records its events (stamp.py)
    Axis("cluster", "c", (1,), 1, named=False),
    # 1: a copy takes a line of four rows, not a row
    Axis(
        "lines",
        "ln",
        (0, 1),
        lambda values: int(values["pipeline"] in ("etap", "ws") or values["row_tile"] == 64),
        named=False,
    ),
    # 1: mix16's tiles are freed by halves
    Axis("halves", "hv", (0, 1), lambda values: int(values["row_tile"] == 64), named=False),
    Axis("p_terms", "pt", (1, 2), 1, named=False),  # e4m3 terms of P
    Axis(
        "cache_dtype",
        "kv",
        SPARSE,
        lambda values: CACHES[values["pipeline"]],
        named=False,
    ),
    # by what tokens of ws are gathered: TMA's gather4 is built when it is asked for
    Axis("loads", "", ("cp_async", "gather4"), "cp_async", named=False),
)
MODULES = {  # over the FP8 cache
    ("sm_100a", "ws"): "dsl_kernels.sm100.fp8.sparse_ws",
    ("sm_90a", "etap"): "dsl_kernels.sm90.fp8.sparse_transposed",
    ("sm_90a", "f16"): "dsl_kernels.sm90.bytes16.f16",
}
BYTE_MODULES = {  # over bytes, by ``Format.arrangement``
    ("sm_90a", "mix16", ("f32", 128, "own")): "dsl_kernels.sm90.bytes16.mix16",
    ("sm_90a", "mix8", ("f32", 128, "own")): "dsl_kernels.sm90.bytes16.mix8",
    ("sm_90a", "mix16", ("ue8m0", 64, "in v")): "dsl_kernels.sm90.bytes16.mix16_v4",
    ("sm_90a", "mix16", ("ue8m0", 32, "none")): "dsl_kernels.sm90.bytes16.mix16_v41",
    ("sm_90a", "mix16", ("f32", 128, "none")): "dsl_kernels.sm90.bytes16.mix16_nope",
}


def module_of(arch: str, pipeline: str, format: Format) -> str | None:
    """The kernel module of a pipeline over a cache, None if there is none."""
    if format.named:
        return BYTE_MODULES.get((arch, pipeline, format.arrangement)) if format.sparse else None
    return MODULES.get((arch, pipeline)) if format.one_scale else None


def _module(arch: str, values: Values) -> str | None:
    found = module_of(arch, values["pipeline"], FORMATS[values["cache_dtype"]])
    if values["loads"] == "cp_async":
        return found
    return "dsl_kernels.sm100.fp8.sparse_gather4" if values["pipeline"] == "ws" and found else None


def points(arch: str) -> Iterator[Values]:
    """Every row tile; of the FP8 cache also with fp32 results; of bytes the formats that
    say so.  Not ``ON_REQUEST``."""
    modules = {p: module_of(arch, p, FORMATS[CACHES[p]]) for p in PIPELINES if p not in ON_REQUEST}
    own = [p for p, module in modules.items() if module]
    for pipeline, row_tile in ((p, tile) for p in own for tile in ROW_TILES[p]):
        values = {"pipeline": pipeline, "row_tile": row_tile}
        if pipeline not in OVER_BYTES:
            yield from ({**values, "out_dtype": dtype} for dtype in ("bf16", "f32"))
            continue
        shipped = (name for name in BYTES if FORMATS[name].shipped)
        yield from ({**values, "out_dtype": "bf16", "cache_dtype": name} for name in shipped)


FAMILY = Family(
    "sparse_decode",
    AXES,
    module=_module,
    points=points,
    kind=DECODE,
    formats=(DEFAULT,),
    token_tile=lambda _arch, _values: TOKEN_TILE,
    everyday=(
        {"pipeline": "etap", "row_tile": 16, "out_dtype": "bf16", "p_terms": 1},
        {"pipeline": "etap", "row_tile": 64, "out_dtype": "bf16", "p_terms": 1},
        {"pipeline": "ws", "out_dtype": "bf16"},
        {"pipeline": "mix16", "row_tile": 16, "cache_dtype": ROWS_OF_BYTES},
        {"pipeline": "mix16", "row_tile": 64, "cache_dtype": ROWS_OF_BYTES},
    ),
    counted_by=("pipeline",),
    shown=("q_nope", "content", "indices"),
    results=("out", "lse"),
)

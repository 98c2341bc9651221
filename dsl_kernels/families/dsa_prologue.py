"""``dsa_prologue``: norms, RoPE, quantisation and appends of a DSA layer, in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..formats.dims import KV_LORA_RANK
from ..formats.registered import FORMATS, ROWS_OF_BYTES
from .family import CACHE_DTYPE, COS_SIN_DTYPE, IN_DTYPE, Axis, Values, helper

STYLES = ("interleaved", "neox")


def points(arch: str) -> Iterator[Values]:
    """Projections and slots as engines have them, into the cache that engines keep and into FP8;
    the rest is built when it is asked for."""
    own = {"in_dtype": "bf16", "index_dtype": "i64"}
    yield own
    if arch == "sm_90a":
        yield {**own, "cache_dtype": ROWS_OF_BYTES}


def _module(_arch: str, values: Values) -> str | None:
    format = FORMATS[values["cache_dtype"]]
    apart = format.rope is not None and format.content.count == KV_LORA_RANK
    return "dsl_kernels.indexer.dsa_prologue" if apart else None


_HELPER = helper(
    "dsa_prologue", "indexer",
    IN_DTYPE,
    Axis("index_dtype", "i", ("i32", "i64"), "i32"),  # of both slot mappings
    Axis("hadamard", "hd", (0, 1), 0, named=False),  # 1: index keys and queries are rotated by it
    Axis("rope_style", "", STYLES, "interleaved", named=False),  # of latents, attention's queries
    Axis("index_style", "idx", STYLES, "neox", named=False),  # of index keys and queries
    COS_SIN_DTYPE,
    Axis(
        "position_dtype", "pos", ("i32", "i64"), lambda values: values["index_dtype"], named=False
    ),
    Axis(
        "weights_dtype", "w", ("f32", "bf16", "f16"), lambda values: values["in_dtype"],
        named=False,
    ),
    CACHE_DTYPE,
    points=points,
    shown=("index_q", "content", "kv"),
    results=(
        "content", "rope", "scale", "kv", "index_cache", "out_q", "out_weights", "out_rope",
    ),
)  # fmt: skip
FAMILY = replace(_HELPER, module=_module)

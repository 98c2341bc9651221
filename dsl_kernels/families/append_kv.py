"""``append_kv``: writes tokens into the cache, as they are or after RMS norm and RoPE."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..formats.registered import FORMATS
from .family import (
    CACHE_DTYPE,
    COS_SIN_DTYPE,
    IN_DTYPE,
    ROPE_STYLE,
    Axis,
    Values,
    every,
    helper,
)

INDEX_DTYPE = Axis("index_dtype", "i", ("i32", "i64"), "i32")  # of slot_mapping
# Of positions: engines keep both in one dtype.
POSITION_DTYPE = Axis(
    "position_dtype", "pos", ("i32", "i64"), lambda values: values["index_dtype"], named=False
)
NORM = Axis("norm", "", ("given", "rms"), "given", named=False)  # whether c_kv comes normalised
AXES = (IN_DTYPE, INDEX_DTYPE, ROPE_STYLE, NORM, COS_SIN_DTYPE, POSITION_DTYPE, CACHE_DTYPE)


def points(arch: str) -> Iterator[Values]:
    """Every dtype of tokens as they are; of what rotates them too, what engines call it with; into
    other caches, what their formats say."""
    yield from every(AXES)(arch)
    for style, norm, table in itertools.product(
        ("interleaved", "neox"), NORM.values, ("f32", "bf16")
    ):
        yield {
            "in_dtype": "bf16", "index_dtype": "i64", "rope_style": style, "norm": norm,
            "cos_sin_dtype": table,
        }  # fmt: skip
    for format in FORMATS.values():
        yield from ({**values, "cache_dtype": format.name} for values in format.appends)


FAMILY = helper(
    "append_kv",
    "cache",
    *AXES,
    points=points,
    shown=("c_kv", "content", "kv"),
    results=("content", "rope", "scale", "kv"),
)

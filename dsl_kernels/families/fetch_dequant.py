"""``fetch_dequant``: reads tokens back; ``in_dtype`` is the dtype of its result."""

from __future__ import annotations

from collections.abc import Iterator

from ..formats.registered import FORMATS
from .family import CACHE_DTYPE, IN_DTYPE, Axis, Values, every, helper

# How tokens are named: block table and lengths, flat indices, or block table and packed chunks.
MODE = Axis("mode", "", ("pages", "indices", "ragged"))
INDEX_DTYPE = Axis("index_dtype", "i", ("i32", "i64"), "i32", named=False)  # of mode ``indices``

AXES = (IN_DTYPE, MODE, INDEX_DTYPE, CACHE_DTYPE)


def points(arch: str) -> Iterator[Values]:
    """All modes with int32 indices; int64 ones too where there are any; of other caches, what their
    formats say."""
    yield from every(AXES)(arch)
    for dtype in IN_DTYPE.values:
        yield {IN_DTYPE.name: dtype, MODE.name: "indices", INDEX_DTYPE.name: "i64"}
    for format in FORMATS.values():
        yield from ({**values, CACHE_DTYPE.name: format.name} for values in format.fetches)


FAMILY = helper(
    "fetch_dequant",
    "cache",
    *AXES,
    points=points,
    shown=("content", "kv", "block_table", "indices", "out_nope"),
    results=("out_nope", "out_rope"),
)

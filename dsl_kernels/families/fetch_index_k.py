"""``fetch_index_k``: reads index keys back from the paged FP8 index cache."""

from __future__ import annotations

from collections.abc import Iterator

from .family import Axis, Values, helper

# of the result: keys as they are stored, with their scales beside them; or multiplied out
KEY_DTYPE = Axis("key_dtype", "x", ("fp8", "bf16", "f16", "f32"))
MODE = Axis("mode", "", ("indices", "ragged"))  # flat slots; block table and packed chunks
INDEX_DTYPE = Axis("index_dtype", "i", ("i32", "i64"), "i32", named=False)  # of mode ``indices``


def points(arch: str) -> Iterator[Values]:
    """Yield, on Blackwell, the variant by which engines gather the keys of prompts' prefixes as
    they are stored.  Other variants are built when they are asked for."""
    if arch == "sm_100a":
        yield {"key_dtype": "fp8", "mode": "ragged"}


FAMILY = helper(
    "fetch_index_k",
    "indexer",
    KEY_DTYPE,
    MODE,
    INDEX_DTYPE,
    points=points,
    everyday=(),
    shown=("cache", "indices", "block_table", "keys"),
    results=("keys", "scales"),
)

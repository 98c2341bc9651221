"""``append_index_k``: writes index keys into the paged FP8 index cache."""

from __future__ import annotations

from collections.abc import Iterator

from .family import COS_SIN_DTYPE, IN_DTYPE, ROPE_STYLE, Axis, Values, helper


def points(_arch: str) -> Iterator[Values]:
    """Keys and slots as engines have them; the rest is built when it is asked for."""
    yield {"in_dtype": "bf16", "index_dtype": "i64"}


FAMILY = helper(
    "append_index_k",
    "indexer",
    IN_DTYPE,
    Axis("index_dtype", "i", ("i32", "i64"), "i32"),  # of slot_mapping
    Axis("hadamard", "hd", (0, 1), 0, named=False),  # 1: keys are rotated by that matrix
    ROPE_STYLE,  # of keys that are given; "applied": their RoPE is
    Axis("norm", "", ("given", "layer", "rms"), "given", named=False),  # given: k is normalised
    Axis("turned", "", ("first", "last"), "first", named=False),  # which 64 channels RoPE turns
    COS_SIN_DTYPE,
    Axis(
        "position_dtype", "pos", ("i32", "i64"), lambda values: values["index_dtype"], named=False
    ),
    points=points,
    shown=("k", "cache"),
    results=("cache",),
)

"""``append_index_k``: writes index keys into the paged FP8 index cache."""

from __future__ import annotations

from collections.abc import Iterator

from .family import IN_DTYPE, Axis, Values, helper


def points(_arch: str) -> Iterator[Values]:
    """None by default, as long as no GPU has run them."""
    yield from ()


FAMILY = helper(
    "append_index_k",
    IN_DTYPE,
    Axis("index_dtype", "i", ("i32", "i64"), "i32"),  # of slot_mapping
    Axis("hadamard", "hd", (0, 1), 0, named=False),  # 1: keys are rotated first
    points=points,
    everyday=(),
    shown=("k", "cache"),
    results=("cache",),
)

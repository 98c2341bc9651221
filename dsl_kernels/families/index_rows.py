"""``index_rows``: what top-k asks of each query token, made of a step's tables."""

from __future__ import annotations

from collections.abc import Iterator

from .family import Values, helper


def points(_arch: str) -> Iterator[Values]:
    """None by default, as long as no GPU has run it."""
    yield from ()


FAMILY = helper(
    "index_rows",
    points=points,
    everyday=(),
    shown=("cache_seqlens", "block_table", "lengths"),
    results=("lengths", "tables"),
)

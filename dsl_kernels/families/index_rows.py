"""``index_rows``: what top-k asks of each query token, made of a step's tables."""

from __future__ import annotations

from collections.abc import Iterator

from .family import Values, helper


def points(arch: str) -> Iterator[Values]:
    """On Hopper, where the rest of an indexer's step is."""
    if arch == "sm_90a":
        yield {}


FAMILY = helper(
    "index_rows",
    points=points,
    shown=("cache_seqlens", "block_table", "lengths"),
    results=("lengths", "tables"),
)

"""``index_rows``: what top-k asks of each query token, made of a step's tables."""

from __future__ import annotations

from .family import helper

FAMILY = helper(
    "index_rows",
    "indexer",
    shown=("cache_seqlens", "block_table", "lengths"),
    results=("lengths", "tables"),
)

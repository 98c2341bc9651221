"""``sparse_prefill``: attention of each query token to the rows of BF16 KV that it names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .family import PREFILL, Axis, Family, Values

ROW_TILES = (16, 32, 64)
SPLIT_ROW_TILES = (16, 64)  # that pieces are built for: two CTAs of 16 heads share rows in L2

AXES = (
    Axis("row_tile", "r", ROW_TILES[::-1]),  # heads of a CTA
    Axis("d_qk", "d", (576, 512)),  # channels of q and kv; the first 512 of kv are V
    Axis("dtype", "d", ("bf16",), "bf16", named=False),  # of q, kv and out
    # indexer: also the LSE of the first entries of a list, which the indexer chose
    Axis("figures", "", ("whole", "indexer"), "whole", named=False),
    # split: of few query tokens, as of decode; with the merge behind
    Axis("lists", "", ("one", "split"), "one", named=False),
    # two: content and RoPE of queries are a tensor each, as decode may be given them
    Axis("query", "q", ("one", "two"), "one", named=False),
)

EVERYDAY = (
    {"row_tile": 64, "d_qk": 576, "figures": "whole", "lists": "one"},
    {"row_tile": 16, "d_qk": 512, "lists": "one"},
)


def row_tile_of(heads: int) -> int:
    """Heads of a CTA, for so many of a call: the fewest that hold them, or 64."""
    return next((rows for rows in ROW_TILES if rows >= heads), ROW_TILES[-1])


def split_row_tile_of(heads: int) -> int:
    """The same where lists are split."""
    found = row_tile_of(heads)
    return found if found in SPLIT_ROW_TILES else SPLIT_ROW_TILES[0]


def _module(arch: str, values: Values) -> str | None:
    if arch != "sm_90a":
        return None
    indexer, split = values["figures"] == "indexer", values["lists"] == "split"
    if indexer and split:
        return None
    if values["query"] == "two":
        apart = values["d_qk"] == 576 and not indexer
        return "dsl_kernels.sm90.b16.sparse_prefill_pair" if apart else None
    more = "_indexer" * indexer + "_split" * split
    return f"dsl_kernels.sm90.b16.sparse_prefill{more}"


def points(arch: str) -> Iterator[Values]:
    """All heads a CTA on Hopper, for prompts; split lists, which are decode's.  The indexer's LSE,
    for training, and queries of two tensors are built when they are asked for."""
    if arch != "sm_90a":
        return
    for row_tile, d_qk in itertools.product(ROW_TILES[::-1], (576, 512)):
        yield {"row_tile": row_tile, "d_qk": d_qk}
    for row_tile in SPLIT_ROW_TILES[::-1]:
        yield {"row_tile": row_tile, "d_qk": 576, "lists": "split"}


FAMILY = Family(
    "sparse_prefill",
    AXES,
    module=_module,
    points=points,
    kind=PREFILL,
    everyday=EVERYDAY,
    result_axis="dtype",
    counted_by=("row_tile",),
    shown=("q", "kv", "indices"),
    results=("out", "max_logits", "lse", "lse_indexer"),
)

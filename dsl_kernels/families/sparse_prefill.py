"""``sparse_prefill``: attention of each query token to the rows of BF16 KV that it names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .family import PREFILL, Axis, Family, Values

AXES = (
    Axis("row_tile", "r", (64, 32, 16)),  # heads of a CTA
    Axis("d_qk", "d", (576, 512)),  # channels of q and kv; the first 512 of kv are V
    Axis("dtype", "d", ("bf16",), "bf16", named=False),  # of q, kv and out
    # indexer: also the LSE of the first entries of a list, which the indexer chose
    Axis("figures", "", ("whole", "indexer"), "whole", named=False),
    # split: of few query tokens, as of decode; with the merge behind
    Axis("lists", "", ("one", "split"), "one", named=False),
)

EVERYDAY = {"row_tile": 64, "d_qk": 576, "figures": "whole"}, {"row_tile": 16, "d_qk": 512}


def _module(arch: str, values: Values) -> str | None:
    if arch != "sm_90a":
        return None
    indexer, split = values["figures"] == "indexer", values["lists"] == "split"
    if indexer and split:
        return None
    more = "_indexer" * indexer + "_split" * split
    return f"dsl_kernels.sm90.sparse_prefill{more}"


def points(arch: str) -> Iterator[Values]:
    """All heads a CTA on Hopper; with the indexer's LSE those of 64 and more heads."""
    for row_tile, d_qk in itertools.product((64, 32, 16), (576, 512)):
        if arch == "sm_90a":
            yield {"row_tile": row_tile, "d_qk": d_qk}
    for d_qk in (576, 512) if arch == "sm_90a" else ():
        yield {"row_tile": 64, "d_qk": d_qk, "figures": "indexer"}


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

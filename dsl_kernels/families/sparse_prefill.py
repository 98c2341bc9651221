"""``sparse_prefill``: attention of each query token to the rows of BF16 KV that it names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .family import PREFILL, Axis, Family, Values

AXES = (
    Axis("row_tile", "r", (64, 32, 16)),  # heads of a CTA
    Axis("d_qk", "d", (576, 512)),  # channels of q and kv; the first 512 of kv are V
    Axis("dtype", "d", ("bf16",), "bf16", named=False),  # of q, kv and out
)


def points(arch: str) -> Iterator[Values]:
    """All of them, on Hopper."""
    for row_tile, d_qk in itertools.product((64, 32, 16), (576, 512)):
        if arch == "sm_90a":
            yield {"row_tile": row_tile, "d_qk": d_qk}


FAMILY = Family(
    "sparse_prefill",
    AXES,
    module=lambda arch, _values: "dsl_kernels.sm90.sparse_prefill" if arch == "sm_90a" else None,
    points=points,
    kind=PREFILL,
    everyday=({"row_tile": 64, "d_qk": 576}, {"row_tile": 16, "d_qk": 512}),
    result_axis="dtype",
    counted_by=("row_tile",),
    shown=("q", "kv", "indices"),
    results=("out", "max_logits", "lse"),
)

"""``index_logits``: scores of all cached tokens for each query token, by which sparse attention
chooses what it attends to."""

from __future__ import annotations

from collections.abc import Iterator

from ..index_cache import HEADS, UNIT_ROWS
from .family import Axis, Family, Values


def points(_arch: str) -> Iterator[Values]:
    """None by default, as long as no GPU has run them."""
    yield from ()


FAMILY = Family(
    "index_logits",
    (
        Axis("heads", "h", HEADS),
        Axis("unit_rows", "u", UNIT_ROWS),  # query tokens that share a page in shared memory
    ),
    module=lambda arch, _values: "dsl_kernels.sm90.index_logits" if arch == "sm_90a" else None,
    points=points,
    everyday=(),
    shown=("q", "block_table", "out"),
    results=("out",),
)

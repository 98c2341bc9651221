"""``index_logits``: scores of all cached tokens for each query token, by which sparse attention
chooses what it attends to."""

from __future__ import annotations

from collections.abc import Iterator

from ..formats.index_cache import HEADS, UNIT_ROWS
from .family import Axis, Family, Values


def points(_arch: str) -> Iterator[Values]:
    """Yield every (heads, unit_rows) that calls may use: their product is 256 at most."""
    for heads in HEADS:
        for unit_rows in UNIT_ROWS:
            if heads * unit_rows <= 256:
                yield {"heads": heads, "unit_rows": unit_rows}


MODULES = {
    "sm_90a": "dsl_kernels.sm90.indexer.index_logits",
    "sm_100a": "dsl_kernels.sm100.indexer.index_logits",
}
FAMILY = Family(
    "index_logits",
    (
        Axis("heads", "h", HEADS),
        Axis("unit_rows", "u", UNIT_ROWS),  # query tokens that share a page in shared memory
    ),
    module=lambda arch, _values: MODULES.get(arch),
    points=points,
    everyday=({"heads": 64, "unit_rows": 2}, {"heads": 32, "unit_rows": 8}),
    shown=("q", "block_table", "out"),
    results=("out",),
)

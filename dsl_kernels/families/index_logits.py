"""``index_logits``: scores of all cached tokens for each query token, by which sparse attention
chooses what it attends to."""

from __future__ import annotations

from collections.abc import Iterator

from ..index_cache import HEADS, UNIT_ROWS
from .family import Axis, Family, Values


def points(arch: str) -> Iterator[Values]:
    """What calls take on Hopper: a unit's rows times its heads are 256 at most."""
    for heads in HEADS if arch == "sm_90a" else ():
        for unit_rows in UNIT_ROWS:
            if heads * unit_rows <= 256:
                yield {"heads": heads, "unit_rows": unit_rows}


FAMILY = Family(
    "index_logits",
    (
        Axis("heads", "h", HEADS),
        Axis("unit_rows", "u", UNIT_ROWS),  # query tokens that share a page in shared memory
    ),
    module=lambda arch, _values: "dsl_kernels.sm90.index_logits" if arch == "sm_90a" else None,
    points=points,
    everyday=({"heads": 64, "unit_rows": 2}, {"heads": 32, "unit_rows": 8}),
    shown=("q", "block_table", "out"),
    results=("out",),
)

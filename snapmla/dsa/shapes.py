"""Which variant of ``select_topk`` serves a shape.

Shapes alone decide, so a graph keeps its kernel whatever lengths it is replayed with; results have
the same bits whatever is chosen.
"""

from __future__ import annotations

from typing import NamedTuple

from dsl_kernels.families.select_topk import share
from dsl_kernels.index_cache import PAGE


class TopkShape(NamedTuple):
    """Axes of a variant: threads of a CTA, keys of a thread (0: none are kept), CTAs of a row."""

    threads: int
    keys: int
    cluster: int

    @property
    def columns(self) -> int:
        """The longest rows that it takes."""
        return share(self.threads, self.keys) * self.cluster


# Few rows leave SMs idle, so a row is spread over more CTAs; many rows want few barriers.  Turning
# points are those of a prototype's times on an H200 with the same partition of rows.
SMALL = TopkShape(1024, 8, 1)
WIDE, TALL = TopkShape(1024, 16, 2), TopkShape(1024, 32, 1)
LONG, LONG_TALL = TopkShape(1024, 16, 8), TopkShape(1024, 32, 4)
LONGER = TopkShape(1024, 32, 8)
STREAMED = TopkShape(1024, 0, 8)
ALL = (SMALL, WIDE, TALL, LONG, LONG_TALL, LONGER, STREAMED)
MAX_COLUMNS = (1 << 20) + 64 * PAGE  # drafts beside a context of 1048576 tokens
MOST_SHIFT = 3  # columns that kernels count besides, where a row begins between 16 bytes
MAX_ROWS = (2**31 - 1) // STREAMED.cluster  # of a grid
TALL_ROWS, LONG_TALL_ROWS = 96, 16  # more rows than these want the wider CTAs


def choose(rows: int, columns: int) -> TopkShape:
    """The variant for that many rows and columns, of at most ``MAX_COLUMNS + MOST_SHIFT``."""
    if columns <= SMALL.columns:
        return SMALL
    if columns <= WIDE.columns:
        return TALL if rows > TALL_ROWS else WIDE
    if columns <= LONG.columns:
        return LONG_TALL if rows > LONG_TALL_ROWS else LONG
    return LONGER if columns <= LONGER.columns else STREAMED

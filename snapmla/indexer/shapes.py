"""Choice of the variant of ``select_topk`` that serves a shape.

Shapes alone decide, so a graph keeps its kernel whatever lengths it is replayed with; results have
the same bits whatever is chosen.
"""

from __future__ import annotations

from typing import NamedTuple

from dsl_kernels.formats.index_cache import PAGE
from dsl_kernels.formats.topk_share import share


class TopkShape(NamedTuple):
    """Axes of a variant: threads of a CTA, keys of a thread (0: none are kept), CTAs of a row."""

    threads: int
    keys: int
    cluster: int

    @property
    def columns(self) -> int:
        """The longest rows that it takes."""
        return share(*self) * self.cluster


# Few rows leave SMs idle, so a row is spread over more CTAs; many rows want few barriers.  Lengths
# are not known here, and logits are as wide as an engine's longest context: where rows are wide,
# their number alone decides, and kernels take a short row as one CTA does that keeps its keys.
SMALL = TopkShape(1024, 8, 1)
WIDE, TALL = TopkShape(1024, 16, 2), TopkShape(1024, 32, 1)
LONG = TopkShape(1024, 16, 8)
ROW, PAIR, FOUR, EIGHT = (TopkShape(1024, 0, cluster) for cluster in (1, 2, 4, 8))
ALL = (SMALL, WIDE, TALL, LONG, ROW, PAIR, FOUR, EIGHT)
MAX_COLUMNS = (1 << 20) + 64 * PAGE  # drafts beside a context of 1048576 tokens
MOST_SHIFT = 3  # columns that kernels count besides, where a row begins between 16 bytes
MAX_ROWS = (2**31 - 1) // EIGHT.cluster  # of a grid
TALL_ROWS = 96  # more rows than these want the wider CTAs
# the most rows for that many CTAs each, turning points of an H200's times
BY_ROWS = ((8, EIGHT), (24, FOUR), (64, PAIR), (MAX_ROWS, ROW))


def choose(rows: int, columns: int) -> TopkShape:
    """The variant for that many rows and columns, of at most ``MAX_COLUMNS + MOST_SHIFT``."""
    if columns <= SMALL.columns:
        return SMALL
    if columns <= WIDE.columns:
        return TALL if rows > TALL_ROWS else WIDE
    if columns <= LONG.columns and rows <= BY_ROWS[0][0]:
        return LONG
    wanted = next(shape for most, shape in BY_ROWS if rows <= most)
    return next(x for x in (wanted, PAIR, FOUR, EIGHT) if columns <= x.columns)

"""The ring of KV tiles, gathered from DeepSeek V4's pages by a block table: a loader (loader.py).

As gather_v4.py's, of one cache without lists: gather_pages.py says what names tokens instead.
Roles, shared memory and timeline are theirs.
"""

from __future__ import annotations

from cutlass import Int64, Uint32

from ..cache_records.v4 import RECORD
from .gather import Plane
from .gather_pages import FromPages
from .gather_v4 import GatherV4


class GatherPagesV4(FromPages, GatherV4):
    """``GatherV4`` whose tokens come from pages."""

    @staticmethod
    def _planes_of(pool, second, of_line):
        """``Plane`` of data and of scales."""
        data, scales = RECORD.planes
        first, page = Int64(pool.rows.iterator.toint()), Uint32(pool.rows.stride[0])
        return (
            Plane(first + of_line, page, Uint32(data)),
            Plane(first + Int64(pool.rows.shape[1]) * RECORD.begins(1), page, Uint32(scales)),
        )

"""The ring of KV tiles, gathered from DeepSeek V4.1's pages by a block table: a loader (loader.py).

As gather_v41.py's, of one cache without lists: gather_pages.py says what names tokens instead.
Roles, shared memory and timeline are theirs.
"""

from __future__ import annotations

from cutlass import Int32, Int64, Uint32

from .gather import Plane
from .gather_pages import FromPages
from .gather_v41 import GatherV41


class GatherPagesV41(FromPages, GatherV41):
    """``GatherV41`` whose tokens come from pages."""

    def _planes_of(self, pool, second, of_line):
        """``Plane`` of content and of scales, which are in a plane of their own or behind it."""
        planes, first = self.record.planes, Int64(pool.rows.iterator.toint())
        page, p = Uint32(pool.rows.stride[0]), Int32(pool.rows.shape[1])
        data, scales = Uint32(planes[0]), Uint32(planes[self.record.scale.plane])
        return (
            Plane(first + of_line, page, data),
            Plane(self._first_scale(first, p), page, scales),
        )

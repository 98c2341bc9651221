"""The ring of KV tiles, gathered from DeepSeek V4's and V4.1's pages by a block table: loaders
(loader.py).

As gather_v4.py's and gather_v41.py's, of one cache without lists: gather_pages.py says what names
tokens instead.  Roles, shared memory and timeline are theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutlass import Int32, Int64, Uint32

from .gather import Plane
from .gather_pages import FromPages

if TYPE_CHECKING:
    from .gather_v4 import GatherTwo


class OnePool(FromPages):
    """``FromPages`` in front of a ``GatherTwo``."""

    format: Any

    def _planes_of(self, pool, second, of_line):
        """``Plane`` of data and of scales, which are in a plane of their own or behind content."""
        planes, first = self.format.planes, Int64(pool.rows.iterator.toint())
        page, p = Uint32(pool.rows.stride[0]), Int32(pool.rows.shape[1])
        data, scales = Uint32(planes[0]), Uint32(planes[self.format.scale.plane])
        return (
            Plane(first + of_line, page, data),
            Plane(self._first_scale(first, p), page, scales),
        )


def of_pages(loader: type[GatherTwo]) -> type[GatherTwo]:
    """The loader whose tokens come from pages."""
    return type(f"Paged{loader.__name__}", (OnePool, loader), {})

"""The ring of KV tiles, gathered from DeepSeek V4.1's caches (v41.py): a loader (loader.py).

As gather_v4.py's, of two lists, but a token is 512 bytes of content, whose lines lie as those of
656-byte rows do, and 16 of scales; there is no RoPE beside it.  Its scales are in a plane of their
own or behind its content: two byte orders, which differ in where the planes begin.
"""

from __future__ import annotations

from cutlass import Int32

from .gather_bytes import GatherBytes
from .gather_v4 import SECOND, GatherTwo


class GatherV41(GatherTwo):
    """``GatherTwo`` of V4.1's tokens."""

    def _copy(self, to, planes, stage, page, offset, groups, lane):
        """A warp's rows of a tile: the lanes hold (page, offset) of theirs, all of one cache."""
        pools, of_line = planes
        data, scales = self._planes_of(pools, offset >= SECOND, of_line)
        own = offset & Int32(SECOND - 1)
        GatherBytes._copy(self, to, (data, data, scales), stage, page, own, groups, lane)

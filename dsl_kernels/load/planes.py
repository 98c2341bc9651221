"""The planes of a paged cache, for kernels that load it by TMA.

A format is a list of *planes*, tensors (pages, P, width), each of which becomes one swizzled tile
of a stage, and whether an fp32 scale a token comes along.  What the bytes mean is the business of
the format's own file (``fp8_per_token.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

# Words of createpolicy for all of an access.  A step reads a tile of the cache once: it is evicted
# first, so that tiles push out tiles, not what is read again (tables, partial rows, the weights of
# the next layer).  If a sequence has many row blocks, each reads the tiles again, and queries and
# results would push out tiles that are evicted first: tiles have normal priority then.
EVICT_FIRST, EVICT_NORMAL = 0x12F0000000000000, 0x1000000000000000
MANY_BLOCKS = 32


@dataclass(frozen=True)
class Plane:
    """One tensor of a cache.

    Attributes:
        name: of the storage field of its tiles.
        dtype: element type in shared memory.
        width: elements of a token.
    """

    name: str
    dtype: Any
    width: int

    @property
    def token_bytes(self) -> int:
        return self.width * self.dtype.width // 8


@dataclass(frozen=True)
class CacheFormat:
    """The planes of a token, in the order in which they are loaded, and its scale.

    Attributes:
        planes: loaded by TMA.
        scales: field of the stages' fp32 scales, copied in bulk; None without.
    """

    planes: tuple[Plane, ...]
    scales: str | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of a cached token."""
        return sum(p.token_bytes for p in self.planes) + (4 if self.scales else 0)


class Loaded(NamedTuple):
    """A plane as TMA sees it: Q (rows, k), cache (tokens of a page, k, page)."""

    atom: Any
    coords: Any


def atoms(source: tuple[Loaded, ...]) -> tuple:
    """Copy atoms of the planes, whose tensor maps are prefetched."""
    return tuple(loaded.atom for loaded in source)

"""Tensor memory: PTX ISA 9.7.18.1 (addresses), 9.7.18.7 (allocation).

128 lanes x 512 columns of 32 bits a CTA.  An address is ``lane << 16 | column``.  tcgen05.alloc
hands out whole columns, to a CTA or to the two CTAs of a pair at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import TensorMemoryError

if TYPE_CHECKING:
    from .cluster import Block

LANES, COLUMNS = 128, 512
LANE_SHIFT, COLUMN_MASK = 16, 0xFFFF
LEAST, MOST = 32, 512  # columns of an allocation, a power of two
POISON = np.uint32(0xFFFFFFFF)  # NaN in every format, packed or not


class Cells(NamedTuple):
    """A rectangle of cells of CTA ``rank``: ``lanes``, from column ``first`` on."""

    rank: int
    lanes: NDArray[np.int64]
    first: int
    columns: int

    def overlaps(self, other: Cells) -> bool:
        """True if the two have a cell in common."""
        if self.rank != other.rank or self.first >= other.first + other.columns:
            return False
        if other.first >= self.first + self.columns:
            return False
        return bool(np.isin(self.lanes, other.lanes).any())


def columns_text(first: int, columns: int) -> str:
    """A range of columns in an error message."""
    return f"columns {first} to {first + columns - 1}"


class TensorMemory:
    """The cells of one CTA, who owns which columns, and whether it may still allocate.

    Attributes:
        cells: (128, 512) uint32; NaN in every format until they are written.
        sizes: columns of every allocation, by its first column.
        permit: no tcgen05.relinquish_alloc_permit so far.
    """

    def __init__(self) -> None:
        self.cells: NDArray[np.uint32] = np.full((LANES, COLUMNS), POISON, np.uint32)
        self.sizes: dict[int, int] = {}
        self.permit = True
        self._owned = np.zeros(COLUMNS, bool)
        self._last = MOST

    def check_request(self, columns: int) -> None:
        """Raises an error if an allocation breaks a rule that does not depend on room.

        Raises:
            TensorMemoryError: number of columns, order of the sizes, permit.
        """
        if columns & (columns - 1) or not LEAST <= columns <= MOST:
            raise TensorMemoryError(
                f"tcgen05.alloc of {columns} columns: expected a power of two from 32 to 512"
            )
        if not self.permit:
            raise TensorMemoryError("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        if columns > self._last:
            raise TensorMemoryError(
                f"tcgen05.alloc of {columns} columns after one of {self._last}: sizes must not grow"
            )

    def free_at(self, columns: int) -> list[int]:
        """Columns from which so many could be allocated, ascending."""
        starts = range(0, COLUMNS - columns + 1, columns)
        return [s for s in starts if not self._owned[s : s + columns].any()]

    def take(self, first: int, columns: int) -> None:
        """Allocates columns that ``free_at`` named; what they hold is undefined."""
        self._owned[first : first + columns] = True
        self.sizes[first] = self._last = columns
        self.cells[:, first : first + columns] = POISON

    def free(self, first: int, columns: int) -> None:
        """Raises TensorMemoryError if there is no such allocation."""
        if self.sizes.get(first) != columns:
            raise TensorMemoryError(
                f"tcgen05.dealloc of {columns} columns at {first}: allocated are {self.owned}"
            )
        del self.sizes[first]
        self._owned[first : first + columns] = False

    @property
    def owned(self) -> str:
        """The allocations in words."""
        found = [columns_text(s, n) for s, n in sorted(self.sizes.items())]
        return ", ".join(found) or "no columns"

    def check(self, first: int, columns: int, what: str) -> None:
        """Raises TensorMemoryError if not all these columns are allocated."""
        if first + columns > COLUMNS or not self._owned[first : first + columns].all():
            raise TensorMemoryError(
                f"{what}: {columns_text(first, columns)} of tensor memory, allocated are "
                f"{self.owned}"
            )


@dataclass
class Request:
    """A tcgen05.alloc or .dealloc of one CTA of a pair, which waits for the other CTA's.

    Attributes:
        kind: "alloc" or "dealloc".
        first: column to free; None for an allocation.
        ticket: what its warp stands for, if the hazard checker is on.
        place: first column, as soon as both CTAs have been served.
    """

    kind: str
    rank: int
    columns: int
    first: int | None = None
    ticket: Any = None
    place: int | None = None

    @property
    def meets(self) -> tuple[str, int | None]:
        """Values that the peer's request must have in common with it: kind, first column."""
        return self.kind, self.first


# Where the two CTAs of a pair meet: requests that wait for the peer's, by ``Request.meets``.
PairRequests = dict[tuple[str, int | None], Request]


def peer(block: Block) -> Block:
    """The other CTA of a block's pair.  Raises TensorMemoryError if the cluster has none."""
    rank = block.rank ^ 1
    if rank >= block.cluster.size:
        raise TensorMemoryError(
            f".cta_group::2 in CTA {block.rank} of a cluster of {block.cluster.size}: there is no "
            "pair"
        )
    return block.cluster.blocks[rank]


def blocks_of(block: Any, group: int) -> list[Any]:
    """The CTAs an instruction of this ``.cta_group`` works on, the even one first."""
    if group == 1:
        return [block]
    other = peer(block)
    return [block, other] if block.rank < other.rank else [other, block]

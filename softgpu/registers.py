"""A warp's registers, and the views of them that its program's code names.

Thousands of views are most of what a warp costs to begin, so the file of a warp that is gone goes
to the next one of its program, with zeros in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .decode import Program

WORDS = {0: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64, 128: np.uint64}  # by width


class RegisterFile:
    """Storage by register width, (registers, 32) or, of 128 bits, (registers, 64), all zeros.

    ``views`` is what becomes ``warp.v``: the rows of registers are there, the rest is the warp's.
    """

    __slots__ = ("store", "views")

    def __init__(self, program: Program) -> None:
        self.store: dict[int, NDArray[Any]] = {
            width: np.zeros((program.counts[width], 64 if width == 128 else 32), dtype)
            for width, dtype in WORDS.items()
        }
        self.views: list[Any] = [None] * len(program.views)
        for (width, dtype, part), places in program.register_views.items():
            words = self.store[width].view(dtype)
            lanes = words[:, part :: words.shape[1] // 32] if width else words
            # all rows at once are quicker than one by one, where most of them are asked for
            rows = list(lanes) if 2 * len(places) > len(lanes) else lanes
            for index, slot in places:
                self.views[index] = rows[slot]

    def clear(self) -> None:
        """Zeros, as a warp finds them."""
        for words in self.store.values():
            words.fill(0)


class RegisterFiles:
    """A program's files that no warp has."""

    KEPT = 32  # a CTA's or two: some 20 MB of the largest kernels

    def __init__(self, program: Program) -> None:
        self.program = program
        self._free: list[RegisterFile] = []

    def take(self) -> RegisterFile:
        """Zeros."""
        try:
            file = self._free.pop()
        except IndexError:
            return RegisterFile(self.program)
        file.clear()
        return file

    def give_back(self, files: Iterable[RegisterFile]) -> None:
        """Takes back files of warps whose last effects are done: nothing writes to them again."""
        self._free += itertools.islice(files, max(0, self.KEPT - len(self._free)))


LANES = np.arange(32, dtype=np.uint64)
ONE = np.uint64(1)


def of_warp(name: str, index: int, block: tuple[int, int, int]) -> NDArray[np.uint64]:
    """A register of ``decode.OF_WARP`` by lane, in warp ``index`` of a CTA of extents ``block``."""
    thread = LANES + np.uint64(32 * index)
    x, y = np.uint64(block[0]), np.uint64(block[1])
    values: dict[str, Callable[[], NDArray[np.uint64]]] = {
        "%tid.x": lambda: thread % x,
        "%tid.y": lambda: thread // x % y,
        "%tid.z": lambda: thread // (x * y),
        "%laneid": lambda: LANES,
        "%warpid": lambda: np.full(32, index, np.uint64),
        "%lanemask_eq": lambda: ONE << LANES,
        "%lanemask_lt": lambda: (ONE << LANES) - ONE,
        "%lanemask_le": lambda: (np.uint64(2) << LANES) - ONE,
        "%lanemask_gt": lambda: ~((np.uint64(2) << LANES) - ONE),
        "%lanemask_ge": lambda: ~((ONE << LANES) - ONE),
    }
    return values[name]()

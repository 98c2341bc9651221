"""fp32 rows from accumulators with rows on M, stored as whole lines of 128 bytes.

A lane has pairs of channels, a quad of lanes 8 neighbours of a row and a warp 8 rows of them: pairs
as they are would be 32 bytes of each of 8 rows an instruction.  Here a warp puts lines of 8 rows
into shared memory of its own and takes them out again, so that an instruction stores lines of 4
rows.

A *line group* is 8 rows of 128 bytes.  Chunk c of 16 bytes of row r lies at c ^ 2 (r % 4), so that
pairs, half a warp a wavefront, and whole lines meet each bank once.  A ``sync_warp`` orders what
lanes do; the memory is nobody else's, and no fence is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..blocks.types import U32

CHUNK, LINE = 16, 128  # bytes
GROUP_ROWS = 8
GROUP_BYTES = GROUP_ROWS * LINE
LINE_CHANNELS = LINE // 4
NEXT_ROWS = GROUP_ROWS // 2  # from the first row that a lane stores of a group to the second


class LineGroup:
    """A warp's line group, by one of its lanes.

    Attributes:
        base: its shared address, a multiple of its size.
        lane: number of the lane.
        row: the first of the rows that the lane stores.
        channel: the first channel of a line that it stores.
    """

    def __init__(self, base: Any, lane: Any):
        self.base, self.lane = base, lane
        self.row = lane // GROUP_ROWS
        self.channel = lane % GROUP_ROWS * (CHUNK // 4)

    @staticmethod
    def at(row: Any, chunk: Any) -> Any:
        """Place of a chunk in the group, bytes."""
        return row * LINE + (chunk ^ (row % 4 * 2)) * CHUNK

    def stored(self, channels: int, pair: Callable[[int], Any]) -> Iterator[Any]:
        """Yield (row, channel, words) of each 16-byte chunk that this lane stores of 8 rows; row
        and channel count from the lane's own ``row`` and ``channel``.  All lanes of a warp call
        this.

        Args:
            channels: of a row, whole lines.
            pair: pair(j) is the lane's fp32 channels 8 j + 2 (lane % 4) and the next, of row
                lane / 4.
        """
        for first in range(0, channels, LINE_CHANNELS):
            cute.arch.sync_warp()  # the lines before these have been read
            to = self.base + self.at(self.lane // 4, self.lane % 4 // 2) + self.lane % 2 * 8
            for x in range(LINE_CHANNELS // 8):
                self._put(to ^ (2 * CHUNK * x), pair(first // 8 + x))
            cute.arch.sync_warp()
            start = self.base + self.at(self.row, self.lane % GROUP_ROWS)
            words = [self._chunk(start + NEXT_ROWS * LINE * k) for k in range(2)]
            for k in range(2):
                yield NEXT_ROWS * k, first, words[k]

    @staticmethod
    def _put(at: Any, values: Any) -> None:
        """Two fp32 values to shared memory."""
        pair = cute.make_rmem_tensor((2,), Float32)
        pair[0], pair[1] = values
        place = cute.make_ptr(Float32, Int32(at), cute.AddressSpace.smem, assumed_align=8)
        cute.autovec_copy(pair, cute.make_tensor(place, cute.make_layout(2)))

    @staticmethod
    def _chunk(at: Any) -> list[Any]:
        """16 bytes of shared memory, as words."""
        words = cute.make_rmem_tensor((4,), U32)
        place = cute.make_ptr(U32, Int32(at), cute.AddressSpace.smem, assumed_align=CHUNK)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(4)), words)
        return [words[i] for i in range(4)]

"""The ring of KV tiles, gathered from DeepSeek V4's pages (cache_records/v4.py): a loader (loader.py).

As gather_records.py's, but a page has two planes, data and scales, and a token has 448 channels of
content: three lines and a half of 128 bytes.  The half lines of a tile lie behind its lines, as
rows of 64 bytes with a swizzle of their own: chunk c of token t at c ^ (t / 2 % 4), so that eight
tokens' chunks are in eight places of the 32 banks.

Shared memory, a stage of ``kc``: 3 x (64 x 128) lines | 64 x 64 half lines.  Roles and timeline are
gather_records.py's.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int64, Uint32, const_expr

from ..cache_records.v4 import RECORD, ROPE, SCALE_BYTES
from ..dims import QK_ROPE_HEAD_DIM as R
from .gather import CHUNK, GROUP, HALF, LINE, Plane, copy
from .gather_records import GatherRecords

LINES = RECORD.content.count // LINE  # whole ones of a token


class GatherV4(GatherRecords):
    """``GatherRecords`` of V4's pages."""

    scale_bytes = SCALE_BYTES

    def _planes(self, cache, lane):
        """``Plane`` of data and of scales: tokens of a page lie apart as their planes say."""
        tokens, of_line = cache.source.rows, lane % 8 * CHUNK
        data, scales = RECORD.planes
        first, page = Int64(tokens.iterator.toint()), Uint32(tokens.stride[0])
        behind = Int64(tokens.shape[1]) * RECORD.begins(1)
        return (
            Plane(first + of_line, page, Uint32(data)),
            Plane(first + behind, page, Uint32(scales)),
        )

    def _targets(self, st, first, lane):
        """The base class' and, last, where the half line of the first of four rows goes."""
        line, chunk = lane // 8, lane % 4
        rows = LINES * self.work.tile * LINE + first * (GROUP * HALF) + line * HALF
        to_half = st.kc.data_ptr().toint() + rows + (chunk ^ (line // 2)) * CHUNK
        return [*super()._targets(st, first, lane), to_half]

    @cute.jit
    def _copy(self, to, planes, stage, page, offset, groups, lane):
        """A warp's rows of a tile: the lanes hold (page, offset) of theirs."""
        tile = const_expr(self.work.tile)
        of_stage = stage * const_expr(tile * RECORD.content.nbytes)
        at_c, at_r, at_half = to[0] + of_stage, to[1] + stage * (tile * R * 2), to[3] + of_stage
        for g in cutlass.range(0, groups, unroll=1):
            self._token_lines(
                planes, (at_c, at_r, at_half), page, offset, GROUP * g + lane // 8, lane % 8 < 4
            )
            at_c += GROUP * LINE
            at_r += GROUP * LINE
            at_half += GROUP * HALF
        if lane < groups * GROUP:
            n = const_expr(self.scale_bytes)
            source, size = self._source(planes[1], page, offset, n)
            copy(to[2] + stage * (tile * n), source, size, n=n)

    @cute.jit
    def _token_lines(self, planes, at, page, offset, first, has_half):
        """Eight rows, a line of four an instruction; ``has_half``: whether this lane copies some of
        half a line."""
        at_c, at_r, at_half = at
        for k in cutlass.range_constexpr(2):
            of = self._held(page, offset, first + 4 * k)
            source, size = self._source(planes[0], *of, CHUNK)
            for block in cutlass.range_constexpr(LINES):
                to = const_expr(k * 4 * LINE + block * (self.work.tile * LINE))
                copy(at_c ^ (k * HALF), source, size, to=to, ahead=block * LINE)
            if has_half:
                to = const_expr(k * 4 * HALF)
                copy(at_half ^ (k * 2 * CHUNK), source, size, to=to, ahead=LINES * LINE)
            copy(at_r ^ (k * HALF), source, size, to=k * 4 * LINE, ahead=ROPE.at)

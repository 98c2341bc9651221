"""Components of pipeline ``f16`` (f16.py): queries, loaders, conversion of Q.

Queries are those of every decode over the FP8 cache, 512 e4m3 channels and 64 of RoPE in BF16 a
row.  Content comes by TMA into the upper half of the room that it takes in f16:

    a stage of Q     8 blocks of 64 channels, f16, rows of 128 bytes   [0 1 | 2 3 | 4 5 | 6 7]
    as it comes      4 blocks of 128 channels, e4m3                    [         0  1  2  3 ]

The softmax warps spread it as a work tile begins, block by block: what a block of bytes becomes
lies where bytes have been read, or in front of them.  The channels of 16 take the places that K's
fragments have for them (``mix16_parts.CHANNEL``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, const_expr

from ...blocks.smem import array
from ...blocks.types import BF16, F8, F16, ROW_MAJOR, U32
from ...entry.entries import row_facts
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import QK_ROPE_HEAD_DIM as R
from ...formats.dims import TOKEN_TILE as TILE
from ...load.fp8_per_token import FORMAT
from ...load.q_tiles import QTiles
from ..fp8 import fp8_parts
from ..fp8.softmax_role import P_STAGES
from ..fragments import padded_size, row_position
from ..roles import K_READERS, Q_READERS, WARPGROUP, Layouts
from .mix16_parts import QueryRows, unpack

if TYPE_CHECKING:
    from ...spec import VariantSpec

BYTE_BLOCKS = 4  # of 128 channels: of a row of Q as it comes


def content_layout(rows: int, q_stages: int):
    """Shared-memory layout of Q's content in f16, over all bytes of field ``qc``."""
    return sm90.make_smem_layout_b(ROW_MAJOR, (TILE, rows, D), F16, q_stages)


class UpperHalves(QTiles):
    """Queries whose content lands in the upper half of a stage."""

    def _copy(self, planes, rows, stage, bar):
        content, rope = planes
        super()._copy([content], rows, 2 * stage + 1, bar)
        super()._copy([rope], rows, stage, bar)


class ByteQueryRows(QueryRows):
    """Row tiles of Q: e4m3 content -> f16; the rows' factors and limits.

    Attributes:
        rows: of a CTA.
        warps: that convert them.
    """

    def __init__(self, rows: int, warps: int):
        super().__init__(rows)
        self.warps = warps

    @property
    def fields(self) -> dict:
        """Storage."""
        return dict(**super().fields, limits=array(Int32, padded_size(self.rows), 128))

    @cute.jit
    def note_facts(self, st, work, gmem, call, batch, rows):
        """Store in shared memory each row's factor of the logits (log2 units) and how many tokens
        the row sees.  The softmax warpgroup calls this, a thread a row."""
        tidx, _, _ = cute.arch.thread_idx()
        row, size = tidx % WARPGROUP, const_expr(padded_size(self.rows))
        if row < self.rows:
            factor, limit = row_facts(work, gmem, call, batch, rows, row)
            at = row_position(row, self.rows)
            st.factors.get_tensor(cute.make_layout(size))[at] = factor
            st.limits.get_tensor(cute.make_layout(size))[at] = limit

    @cute.jit
    def convert(self, st, stage, call, wwarp):
        """In place, by ``warps`` warps, which then have a proxy fence and a meeting to make: eight
        rows a warp and turn."""
        lane = cute.arch.lane_idx()
        for group in cutlass.range(wwarp, self.rows // 8, self.warps, unroll=1):
            self._eight_rows(st, stage, call, group, lane)

    @cute.jit
    def _eight_rows(self, st, stage, call, group, lane):
        """A block of bytes at a time; lane 8 i + r of row r has chunks 2 i and 2 i + 1 of 16."""
        row, part = group * 8 + lane % 8, lane // 8
        block = const_expr(self.rows * 128)
        at = st.qc.data_ptr().toint() + stage * (self.rows * D * 2) + row * 128
        for j in cutlass.range_constexpr(BYTE_BLOCKS):
            raws = self._words(at + (BYTE_BLOCKS + j) * block, lane, 2, 2 * part)
            cute.arch.sync_warp()  # the last blocks' results lie where bytes were read
            line = at + (2 * j + part // 2) * block
            for x in cutlass.range_constexpr(2):
                halves = [unpack(raws[x][w]) for w in range(4)]
                for e in cutlass.range_constexpr(2):
                    four = cute.make_rmem_tensor((4,), U32)
                    for w in cutlass.range_constexpr(4):
                        four[w] = halves[w][e]
                    chunk = 2 * (part % 2 * 2 + x) + e
                    cute.autovec_copy(four, self._chunk(line, lane, chunk))


class Parts(fp8_parts.Parts):
    """Components that the roles share (``decode.Parts``).

    Attributes:
        queries: rows of Q in 16 bits.
    """

    limits = None  # those of rows are beside their factors

    def __init__(self, spec: VariantSpec, *, stages: int, q_stages: int):
        super().__init__(
            spec, stages=stages, q_stages=q_stages, q_readers=Q_READERS, k_readers=K_READERS,
            swap_ab=True, scale_warp=False, gathers=spec.op == "sparse_decode",
        )  # fmt: skip
        self.q_tiles = UpperHalves(
            FORMAT, self.work, rows=self.rows, stages=q_stages, readers=Q_READERS
        )
        self.queries = ByteQueryRows(self.rows, sum(Q_READERS.values()))

    def free_first_half(self, st, stage) -> None:
        """A stage is freed whole, by one lane for its warp, whose reads come first."""
        cute.arch.sync_warp()

    def layouts(self) -> Layouts:
        """Shared-memory layouts: Q as it comes (two of its tiles a stage), K, P."""
        a, b, shape = sm90.make_smem_layout_a, sm90.make_smem_layout_b, (TILE, self.rows)
        return Layouts(
            (
                b(ROW_MAJOR, (*shape, D), F8, 2 * self.q_stages),
                b(ROW_MAJOR, (*shape, R), BF16, self.q_stages),
            ),
            (
                a(ROW_MAJOR, (*shape, D), F8, self.stages),
                a(ROW_MAJOR, (*shape, R), BF16, self.stages),
            ),
            b(ROW_MAJOR, (*shape, TILE), F16, P_STAGES),
        )

    def tile_fields(self, layouts: Layouts) -> dict:
        """Fields like ``fp8_parts``' and those of ``queries``, but P has 16 bits.  ``layouts`` hold
        two e4m3 tiles of Q's content a stage: the room that it takes in f16."""
        fields = {**super().tile_fields(layouts), **self.queries.fields}
        return {**fields, "p": array(F16, cute.cosize(layouts.p), 1024)}

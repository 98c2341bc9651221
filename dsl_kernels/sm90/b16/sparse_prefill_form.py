"""The two math roles of sparse prefill, as loops over work tiles and tiles; a form says what a tile
is.

    rows on M    b16/sparse_prefill_rows_on_m.py   64 heads: S = Q K^T, O = P V
    tokens on M  b16/sparse_prefill_swap_ab.py    32 heads or fewer: S^T = K Q^T, O^T = V^T P^T

Hand-over of a tile, as in 16-bit decode (dense_form.py): P over the tile's RoPE columns, factor
gamma of its rows, and whether an m_ref moved.  Hand-over of a work tile: by what O is multiplied.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...blocks.barriers import Ring
from ...blocks.smem import array
from ...blocks.types import BF16
from ...combine.online_softmax import NEVER
from ..attention_parts import release
from ..fragments import padded_size
from ..roles import INV_RING, ROWS_OF_CTA, SOFTMAX_WARPS
from .dense_form import Form
from .dense_parts import Parts as DenseParts
from .sparse_prefill_parts import EARLY, LATE, STAGES, GatheredTiles, Turn, Work


def p_ring(rows: int) -> Ring:
    """P of a tile lies in its stage of the ring, whose release frees it; with 64 rows the first and
    the second 32 tokens are handed over apart, slots 2 stage and the next."""
    halves = 2 if rows == ROWS_OF_CTA else 1
    return Ring("p", halves * STAGES, {"softmax": SOFTMAX_WARPS})


class Parts(DenseParts):
    """Components of 16-bit decode for gathered tiles: only those that its forms read."""

    def __init__(self, loads: GatheredTiles):
        self.dtype, self.rows = BF16, loads.rows
        self.stages, self.q_stages = STAGES, loads.q_stages
        self.loads, self.p_ring = loads, p_ring(loads.rows)


class GatheredForm(Form):
    """A form of 16-bit decode (dense_form.py) over gathered tiles.

    Attributes:
        loads: the producers' tiles.
        lines_bytes: of shared memory in which rows become lines.
    """

    loads: GatheredTiles
    lines_bytes = 0

    # ---------------------------------------------------------------- what a form adds

    def begin(self, st, operands, work_tiles) -> None:
        """Wait for the ``work_tiles``-th row tile of Q; a form that keeps Q in registers loads it,
        too."""
        raise NotImplementedError

    def tile(self, st, operands, state, turn, work_tiles, ends) -> None:
        """S -> P of a tile, handed over; ``ends``: whether it is the first, and the last one, of
        the work tile."""
        raise NotImplementedError

    def product(self, st, acc_O, operands, turn) -> None:
        """O = gamma O + P V of a tile, when P is there: that means that all of K is, and that Q.K
        has read it."""
        raise NotImplementedError

    def finish(self, st, gmem, work_tile, state, work_tiles) -> None:
        """Row sums -> factors of O for the P.V warps; LSE and maxima to memory."""
        raise NotImplementedError

    def note_first(self, st, gmem, work_tile, state) -> None:
        """LSE of the tiles so far to memory: of the entries that the indexer chose."""
        raise NotImplementedError

    def write(self, st, gmem, acc_O, work_tile, half) -> None:
        """Normalised O -> rows, their factors being there."""
        raise NotImplementedError

    # ---------------------------------------------------------------- shared memory

    def all_fields(self) -> dict:
        """Shared memory beside the tiles."""
        padded = padded_size(self.rows_cta)
        return dict(
            **self.loads.fields,
            **self.parts.p_ring.field,
            **INV_RING.field,
            flag=array(Int32, SOFTMAX_WARPS * STAGES, 16),  # did an m_ref of warp w's rows move?
            gamma=array(Float32, padded * STAGES, 16),
            inv=array(Float32, padded, 16),  # by what O is multiplied
            **self.fields(),
        )

    def half_read(self, st, stage):
        """The first half of a P.V warpgroup's WGMMAs has been waited for."""
        release(self.loads.kv, st, 2 * stage + EARLY)

    # ---------------------------------------------------------------- loops

    @cute.jit
    def softmax(self, st, layouts, gmem, cta):
        """Work tiles and tiles of the softmax warpgroup."""
        operands, rows = self.score_operands(st, layouts), self.fragment.rows
        m_ref, sums, most = (cute.make_rmem_tensor((rows,), Float32) for _ in range(3))
        total, tiles, work_tiles = Work.total(gmem), Int32(0), Int32(0)  # behind us
        query, _ = Work.place(gmem, cta)
        count = Work.count(gmem, query)
        for j in cutlass.range(cta, total, gmem.ctas, unroll=1):
            work_tile = Work.work_tile(gmem, j, count)
            query, _ = Work.place(gmem, j + gmem.ctas)
            count = Work.count(gmem, query)
            m_ref.fill(NEVER)
            sums.fill(0.0)
            most.fill(-Float32.inf)
            self.begin(st, operands, work_tiles)
            state = (m_ref, sums, most, gmem.scale)
            for tile in cutlass.range(0, work_tile.tiles, unroll=1):
                ends = tile == 0, tile + 1 == work_tile.tiles
                self.tile(st, operands, state, Turn.of(tiles), work_tiles, ends)
                if const_expr(gmem.lse_indexer is not None):  # noqa: SIM102 (only this is static)
                    if tile + 1 == cutlass.min(gmem.indexer_tiles, work_tile.tiles):
                        self.note_first(st, gmem, work_tile, state)
                tiles += 1
            self.finish(st, gmem, work_tile, state, work_tiles)
            work_tiles += 1

    def places(self, st, stage):
        """Bits of a tile's 64 places, two words: which of them hold a token."""
        bits = st.named.get_tensor(cute.make_layout((2, STAGES)))
        return [cute.arch.make_warp_uniform(Int32(bits[x, stage])) for x in range(2)]

    @cute.jit
    def products(self, st, layouts, gmem, cta, half):
        """Work tiles and tiles of a P.V warpgroup."""
        operands, acc_O = self.pv_operands(st, layouts, half), self.accumulators()
        total, tiles, work_tiles = Work.total(gmem), Int32(0), Int32(0)  # behind us
        query, _ = Work.place(gmem, cta)
        count = Work.count(gmem, query)
        for j in cutlass.range(cta, total, gmem.ctas, unroll=1):
            work_tile = Work.work_tile(gmem, j, count)
            query, _ = Work.place(gmem, j + gmem.ctas)
            count = Work.count(gmem, query)
            for x in cutlass.range_constexpr(len(acc_O)):
                acc_O[x].fill(0.0)
            for _ in cutlass.range(0, work_tile.tiles, unroll=1):
                turn = Turn.of(tiles)
                self.product(st, acc_O, operands, turn)
                release(self.loads.kv, st, turn.slot(LATE))
                tiles += 1
            INV_RING.wait_full(st, 0, work_tiles & 1)
            self.write(st, gmem, acc_O, work_tile, half)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                INV_RING.arrive_empty(st, 0)
            work_tiles += 1

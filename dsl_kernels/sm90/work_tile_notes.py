"""Notes in shared memory of where a work tile's results go, read at its end.

Held across the work tile's tiles, split and rows would take registers that there are not; to read
the work list again would be a way to L2 before every work tile's last rows.  The softmax warps note
them when a work tile begins, for P.V, which finds them behind the row sums, and for themselves if
they have no registers either.  There is room for two work tiles, as softmax begins the next work
tile while P.V ends the last.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..blocks.smem import array
from ..load.work_list import Rows

SOFTMAX_WARPS = 4
WORK_TILES, WORDS = (
    2,
    4,
)  # split, first row, end of the sequence's rows, whether it stands: read at once


def note_fields() -> dict:
    """Storage of the notes."""
    return dict(notes=array(Int32, WORK_TILES * SOFTMAX_WARPS * WORDS, 16))


def _of(st, work_tile, wwarp):
    notes = st.notes.get_tensor(cute.make_layout((WORDS, SOFTMAX_WARPS, WORK_TILES)))
    return notes[None, wwarp, work_tile % WORK_TILES]


@cute.jit
def note(st, work_tile, wwarp, split, rows):
    """Note split and rows of work tile number ``work_tile``; softmax warp ``wwarp`` calls this as
    the work tile begins."""
    mine = _of(st, work_tile, wwarp)
    if cute.arch.lane_idx() == 0:
        mine[0], mine[1], mine[2], mine[3] = split, rows.first, rows.end, rows.stands
    cute.arch.sync_warp()


@cute.jit
def noted(st, work_tile, wwarp, rows_cta: cutlass.Constexpr):
    """(split, ``Rows``) of work tile number ``work_tile``; ``hidden_from`` is not among them."""
    mine = _of(st, work_tile, wwarp)
    of_split = cute.arch.block_idx()[0] * rows_cta
    return mine[0], Rows(mine[1], mine[2], of_split, None, mine[3])

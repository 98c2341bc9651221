"""select_topk: positions of the k highest scores of each row, exact and deterministic.

A row's scores are columns [start, start + length).  What is selected is what a stable descending
sort would put first: ties go to the lowest position, -0 equals +0, NaN is above all.  It is written
in ascending order of position, as positions behind ``start`` or as cache slots, -1 behind.

Roles        a cluster takes a row: each CTA a run of it, each warp a run of that, in chunks of 128.
             All warps sweep; warp 0 of every CTA looks the threshold up.  Variants that keep no
             keys leave a row of up to 16 keys a thread to the first CTA, which keeps those; the
             others of its cluster end.
Memory       registers: ``keys`` ordered scores a thread (``topk_keys``); without, a window of 16
             that every sweep loads again.  Shared: three histograms with their group sums 25 KB;
             the list, 48 KB: scores that may be selected with their columns; two bitmaps, a bit for
             a column of the CTA each.
Timeline     wait for the previous grid
             | scores -> keys; histogram of the upper 11 bits; cluster barrier; its threshold bin
             | keys in that bin or above -> list, in any order
             | list: histogram of the middle 11 bits in that bin; cluster barrier; bin
             | list: the lower 10 bits likewise; both not where a bin is taken whole, this one not
             where all keys of the bin are its lowest, as zeros are
             | list -> bits of the columns above the threshold, and at it
             | prefix sums of both; cluster barrier; the first ties are kept
             | list: an entry's place is the sum before its word and the bits before its own
             | -> slots -> out
             Where the list overflows, its CTA makes the later sweeps over keys instead, and bits
             become positions in shared memory, in order, before they become slots.
Bytes moved  4 a column read (without registers up to five times); 4 a k written.

Histogram counts are sums of integers, and what a list or a bitmap holds does not depend on who came
first: results depend on the row alone, not on the grid, the cluster or timing.

What no host has read is bounded here: start to the columns, length to those behind it.  A page
outside the block table's width, or below 0 in it, gives slot -1.  Scores that are written while
sweeps read them are counted as others than are marked: what is selected is nobody's claim then, but
bins, places and positions stay in their bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Int32, cute

from ..blocks import compat
from . import topk_emit, topk_keys, topk_threshold
from .topk_keys import Row, Shape

if TYPE_CHECKING:
    from ..spec import VariantSpec


class Select:
    """The kernel of one variant."""

    def __init__(self, spec: VariantSpec) -> None:
        self.shape = Shape(spec.threads, spec.keys, spec.cluster)

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,  # f32 (rows, columns), rows any number of words apart
        lengths: cute.Tensor,  # i32 (rows,)
        row_starts: cute.Tensor,  # i32 (rows,), or none: all 0
        block_table: cute.Tensor,  # i32 (sequences, width), or without rows: positions are wanted
        out: cute.Tensor,  # i32 (rows, k)
        counts: cute.Tensor,  # i32 (rows,)
        page_size: Int32,
        next_n: Int32,  # rows that share a row of the block table
        stream: Any,
    ) -> None:
        """Host half: a cluster a row."""
        rows = logits.shape[0]
        if rows > 0:  # an empty grid is a launch error
            by = (compat.fast_divisor(page_size), compat.fast_divisor(next_n))
            given = (logits, lengths, row_starts, block_table)
            self._select(given, (out, counts), by).launch(
                grid=(rows * self.shape.cluster, 1, 1),
                block=(self.shape.threads, 1, 1),
                cluster=(self.shape.cluster, 1, 1),
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def _select(self, given: Any, results: Any, by: Any) -> None:
        logits, lengths, row_starts, block_table = given
        out, counts = results
        shape = self.shape
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, rank = block // shape.cluster, block % shape.cluster
        sm = topk_threshold.allocate(shape)
        compat.pdl_wait()
        start = Int32(0)
        if row_starts.shape[0] > 0:
            start = row_starts[row]
        columns = Int32(logits.shape[1])
        start = cutlass.min(cutlass.max(start, 0), columns)
        length = cutlass.min(cutlass.max(lengths[row], 0), columns - start)
        k = Int32(out.shape[1])
        where = topk_emit.Where(block_table, out, row, length, *by)
        if length <= k:
            compat.pdl_launch_dependents()
            topk_emit.all_of(shape, where, length, rank * shape.threads + tidx)
        else:
            what = row, start, length, rank
            if cutlass.const_expr(shape.streams):
                short = topk_keys.row_of(shape.alone, logits, (row, start, length, 0))
                if short.run > shape.alone.window:
                    _longer(shape, sm, where, topk_keys.row_of(shape, logits, what), k)
                elif rank == 0:
                    _longer(shape.alone, sm, where, short, k)
                else:
                    compat.pdl_launch_dependents()
            else:
                _longer(shape, sm, where, topk_keys.row_of(shape, logits, what), k)
        if (rank == 0) & (tidx == 0):
            counts[row] = cutlass.min(length, k)


@cute.jit
def _longer(shape: cutlass.Constexpr, sm: Any, where: Any, row: Row, k: Int32) -> None:
    """Selects k of a row that has more."""
    keys = topk_keys.window(shape)
    if cutlass.const_expr(not shape.streams):  # on their way while shared memory is cleared
        topk_keys.load(shape, keys, row, 0)
    topk_threshold.clear(shape, sm, row)
    compat.pdl_launch_dependents()
    cute.arch.sync_threads()
    topk_keys.count_upper(shape, sm, keys, row)
    found, above, inside, _ = topk_threshold.find(shape, sm, 0, k)
    left = k - above
    topk_keys.collect(shape, sm, keys, row, found << 21)
    cute.arch.sync_threads()
    listed = sm.sums[topk_keys.LISTED]
    # all at ``least`` or above are wanted, and the first ``left`` of those one below it that tie
    prefix, least, ties = found, found << 21, Int32(0)
    if inside != left:
        topk_keys.count_in(shape, sm, keys, row, (1, prefix, listed))
        found, above, inside, one_key = topk_threshold.find(shape, sm, 1, left)
        left -= above
        prefix = (prefix << 11) | found
        least = prefix << 10
        if inside != left:
            if one_key == 0:
                topk_keys.count_in(shape, sm, keys, row, (2, prefix, listed))
                found, above, inside, _ = topk_threshold.find(shape, sm, 2, left)
                left -= above
                least = (prefix << 10) | found
            if inside != left:
                ties = Int32(1)
    topk_keys.mark(shape, sm, keys, row, (least, ties, listed))
    cute.arch.sync_threads()
    topk_emit.emit(shape, sm, where, row, (left, listed))


def feasible(spec: VariantSpec) -> str | None:
    """Why a variant cannot be built, or None."""
    return None


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    i32, f32 = compat.DTYPES["i32"], compat.DTYPES["f32"]
    rows = compat.sym(name="rows")
    table = (compat.sym(name="sequences_or_0"), compat.sym(name="width"))
    fakes = {
        "logits": compat.rows(f32, (rows, compat.sym(name="columns")), 4),
        "lengths": compat.vector(i32, rows),
        "row_starts": compat.vector(i32, compat.sym(name="rows_or_0")),
        "block_table": compat.strided(i32, table, (compat.sym64(), 1), 4),
        "out": compat.strided(i32, (rows, compat.sym(name="k")), (compat.sym64(), 1), 4),
        "counts": compat.vector(i32, rows),
        "page_size": Int32(64),
        "next_n": Int32(1),
    }
    return Select(spec), fakes

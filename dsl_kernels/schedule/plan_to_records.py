"""plan_to_records: FlashMLA's scheduler metadata and split counts from a plan's tables.

Row p of ``records`` is what part p does: [first request, the block in it with which the part
begins, last request, the block in it before which the part ends, piece of the first request,
whether the first is split, whether the last is, 0].  A part without work begins behind the last
request.  ``num_splits`` is cumulative: the pieces of all requests before each.  An unsplit request
has one piece.  FlashMLA's meaning throughout (its blocks are our tiles).

Roles        one CTA, a thread a part, then a thread a request.
Memory       shared: sums of warps.
Timeline     wait for the previous grid | parts | requests: prefix sum of pieces
Bytes moved  read: 8 a part, 24 of its first and last work tile, 4 more if the first is split, 4 a
             request; written: 32 a part, 4 a request.

Its source is a plan of ``plan_decode`` in which a sequence is a unit; the rule in Python is
``snapmla.testing.reference_plan.records_of``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.memory
from cutlass import Int32, cute

from ..blocks import compat
from ..blocks.prefix_sum import SUMS, THREADS, scan
from ..formats.dims import ITEM_WORDS
from ..formats.sched_meta import META_WORDS

if TYPE_CHECKING:
    from ..spec import VariantSpec


@cute.jit
def plan_to_records(
    work_items: cute.Tensor,  # i32 (n_items, ITEM_WORDS)
    part_begin: cute.Tensor,  # i32 (parts + 1,)
    split_begin: cute.Tensor,  # i32 (b + 1,)
    records: cute.Tensor,  # i32 (parts, META_WORDS)
    num_splits: cute.Tensor,  # i32 (b + 1,)
    stream: Any,
) -> None:
    """Host half: one CTA."""
    _write(work_items, part_begin, split_begin, records, num_splits).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
    )


@cute.kernel
def _write(
    work_items: cute.Tensor,
    part_begin: cute.Tensor,
    split_begin: cute.Tensor,
    sched_meta: cute.Tensor,
    num_splits: cute.Tensor,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    sums = smem.allocate_tensor(Int32, cute.make_layout(SUMS), 16)
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    b, total = split_begin.shape[0] - 1, Int32(0)
    for part in cutlass.range(tidx, sched_meta.shape[0], THREADS, unroll=1):
        first, end = part_begin[part], part_begin[part + 1]
        words = (Int32(b), Int32(0), Int32(b), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))
        if first < end:
            request, last = work_items[first, 0], work_items[end - 1, 0]
            split, first_split, last_split = work_items[first, 3], Int32(0), Int32(0)
            piece = Int32(0)
            if split >= 0:
                piece, first_split = split - split_begin[request], Int32(1)
            if work_items[end - 1, 3] >= 0:
                last_split = Int32(1)
            words = (
                request, work_items[first, 1], last, work_items[end - 1, 2], piece, first_split,
                last_split, Int32(0),
            )  # fmt: skip
        for k in cutlass.range_constexpr(META_WORDS):
            sched_meta[part, k] = words[k]
    for chunk in cutlass.range(0, b, THREADS, unroll=1):
        request, mine = chunk + tidx, Int32(0)
        if request < b:
            mine = cutlass.max(split_begin[request + 1] - split_begin[request], 1)
        upto, _, pieces, _ = scan(sums, mine, Int32(0))
        if request < b:
            num_splits[request + 1] = total + upto
        total += pieces
    if tidx == 0:
        num_splits[0] = Int32(0)


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    i32 = compat.DTYPES["i32"]
    sequences = compat.sym(name="b_plus_1")
    fakes = {
        "work_items": compat.contiguous(i32, (compat.sym(name="n_items"), ITEM_WORDS)),
        "part_begin": compat.vector(i32, compat.sym(name="parts_plus_1")),
        "split_begin": compat.vector(i32, sequences),
        "records": compat.strided(
            i32, (compat.sym(name="parts"), META_WORDS), (compat.sym64(1), 1), 4
        ),
        "num_splits": compat.vector(i32, sequences),
    }
    return plan_to_records, fakes

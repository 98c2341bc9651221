"""Times of a CTA's items, from builds of ``mix16`` over V4's pages that record them (``stamps1``).

common/stamps.py has a word an event, which leaves the last item's time.  Here an event has a word
for each of its first ``KEPT`` times, and there are more events: where an item's time goes is what
short lists ask.  profiles/item_stamps.py reads them.

Records lie at the beginning of the last ``SLOTS`` slots of ``o_accum``, CTA (x, part) at x + part *
CTAs of a part, as (EVENTS, KEPT) words; word i of an event is its i-th time.  How often it has
happened is counted in shared memory, by the one thread that records it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..common.gather_v4 import GatherV4
from ..common.smem import array
from ..common.stamps import WARPGROUP, Stamps
from ..item_stamp import EVENTS, KEPT, SLOTS, Event
from ..stamp import Stamp
from .mix16_parts import RecordQueries
from .mix16_v4_parts import V4Parts, V4Scales, V4Softmax

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARP = 32
# What common code records anyway -> here
KNOWN = {
    Stamp.ENTRY: Event.ENTRY,
    Stamp.WAITED: Event.WAITED,
    Stamp.PRODUCTS_END: Event.PRODUCTS_END,
}


class ItemStamps(Stamps):
    """Recorder of a kernel; ``on`` decides when it is compiled.

    Attributes:
        st, results: of the role that is being compiled, for ``mark``.
    """

    st: Any = None
    results: Any = None

    @property
    def fields(self) -> dict:
        """Storage of the counts."""
        return dict(stamp_counts=array(Int32, EVENTS, 16)) if self.on else {}

    def begin(self, st) -> None:
        """By one thread, before the fence that publishes barriers."""
        if self.on:
            counts = st.stamp_counts.get_tensor(cute.make_layout(EVENTS))
            for i in range(EVENTS):
                counts[i] = Int32(0)

    def of(self, st=None, results=None) -> None:
        """What the code compiled from here on records with."""
        self.st = self.st if st is None else st
        self.results = self.results if results is None else results

    def put(self, results, word, when=True, value=None) -> None:
        """What common code records, where it is known here."""
        if not self.on:
            return
        if isinstance(word, Stamp) and word in KNOWN:
            tidx, _, _ = cute.arch.thread_idx()
            self._put(results, int(KNOWN[word]), (tidx % WARPGROUP == 0) & when, value)

    def marker(self, results, word) -> None:
        """Nothing: no function goes through the announcer's loops."""

    def mark(self, event: Event, threads: int = WARPGROUP) -> None:
        """The time, by the first of so many threads that stand together."""
        if self.on:
            tidx, _, _ = cute.arch.thread_idx()
            self._put(self.results, int(event), tidx % threads == 0)

    def mark_if(self, event: Event, wanted) -> None:
        """``mark``, where ``wanted``."""
        if self.on:
            tidx, _, _ = cute.arch.thread_idx()
            self._put(self.results, int(event), (tidx % WARPGROUP == 0) & wanted)

    @cute.jit
    def _put(self, results, event: cutlass.Constexpr, mine, value=None):
        if mine:
            x, part, _ = cute.arch.block_idx()
            ctas, _, _ = cute.arch.grid_dim()
            t = results.o_accum
            slot = t.iterator + Int64(t.shape[0] - SLOTS) * t.stride[0]
            words = cute.make_tensor(
                cute.recast_ptr(slot, dtype=Int32),
                cute.make_layout(
                    (KEPT, EVENTS, ctas * (part + 1)), stride=(1, KEPT, KEPT * EVENTS)
                ),
            )
            counts = self.st.stamp_counts.get_tensor(cute.make_layout(EVENTS))
            n = counts[event]
            counts[event] = n + 1
            time = cute.arch.globaltimer_lo() if const_expr(value is None) else value
            if n < KEPT:
                words[n, event, part * ctas + x] = time


class StampedGather(GatherV4):
    """``GatherV4`` that records.

    Attributes:
        stamps: the recorder.
    """

    stamps: ItemStamps

    def init(self, st) -> None:
        super().init(st)
        self.stamps.begin(st)

    def pipe(self, st):
        self.stamps.of(st)
        return super().pipe(st)

    def _wait_free(self, st, k_pipe, kst, first):
        self.stamps.mark(Event.STAGE_WANTED)
        super()._wait_free(st, k_pipe, kst, first)
        self.stamps.mark(Event.STAGE_FREE)

    def _copy(self, *args):
        super()._copy(*args)
        self.stamps.mark(Event.COPIES_ISSUED)


class StampedQueries(RecordQueries):
    """``RecordQueries`` that records."""

    stamps: ItemStamps

    def _claimed(self, st, pipe, stage):
        self.stamps.mark(Event.Q_WANTED, WARP)
        bar = super()._claimed(st, pipe, stage)
        self.stamps.mark(Event.Q_ASKED, WARP)
        return bar


class StampedScales(V4Scales):
    """``V4Scales`` that records."""

    stamps: ItemStamps

    def _make(self, st, stage, named, top):
        self.stamps.mark(Event.LANDED, WARP)
        top = super()._make(st, stage, named, top)
        self.stamps.mark(Event.SCALES_MADE, WARP)
        return top


class StampedParts(V4Parts):
    """``V4Parts`` that record."""

    loader, queries_of, scales_of = StampedGather, StampedQueries, StampedScales

    def __init__(self, spec: VariantSpec, **options: Any):
        super().__init__(spec, **options)
        self.stamps = ItemStamps(True)
        self.loads.stamps = self.q_tiles.stamps = self.scales.stamps = self.stamps

    def cache(self, tma, gmem):
        self.stamps.of(results=gmem.results)
        return super().cache(tma, gmem)

    def tile_fields(self, layouts) -> dict:
        """And the counts."""
        return {**self.stamps.fields, **super().tile_fields(layouts)}


class StampedSoftmax(V4Softmax):
    """``V4Softmax`` that records."""

    def loop(self, cta):
        self.parts.stamps.of(cta.st, cta.gmem.results)
        super().loop(cta)

    def begin_item(self, *args):
        self.parts.stamps.mark(Event.Q_WAITED)
        super().begin_item(*args)
        self.parts.stamps.mark(Event.Q_CONVERTED)

    def block(self, *args):
        self.parts.stamps.mark(Event.TILE_THERE)
        fresh = super().block(*args)
        self.parts.stamps.mark(Event.P_GIVEN)
        return fresh

    def free_stage(self, cta, kst) -> None:
        self.parts.stamps.mark(Event.SCORES)
        super().free_stage(cta, kst)

    def finish_rows(self, *args):
        super().finish_rows(*args)
        self.parts.stamps.mark(Event.SUMS_GIVEN)


class StampedProducts:
    """What makes a pipeline record: in front of it among a class' bases."""

    parts: Any
    parts_class, softmax_class = StampedParts, StampedSoftmax

    def pv_loop(self, cta, half):
        self.parts.stamps.of(cta.st, cta.gmem.results)
        super().pv_loop(cta, half)

    def products(self, st, acc_O, operands, kst, pst, tile, first):
        if tile.half == 0:
            self.parts.stamps.mark(Event.P_TAKEN)
        super().products(st, acc_O, operands, kst, pst, tile, first)

    def write_rows(self, st, results, acc_O, slot, rows, half, frees=None):
        super().write_rows(st, results, acc_O, slot, rows, half, frees)
        self.parts.stamps.mark_if(Event.ROWS_WRITTEN, half == 0)

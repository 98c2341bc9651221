"""%globaltimer at the events of ``Stamp``, in builds that ask for it; in others, nothing.

Records lie at the beginning of the last split of ``o_accum``, CTA (x, part) at x + part * CTAs of a
part, so that the ABI is the ordinary one.  A caller gives the workspace a split more than its plan
uses.  Words are written by the first thread of the calling warpgroup.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..formats.stamp import WORDS

WARPGROUP = 128


class Stamps:
    """Recorder of a kernel; ``on`` decides when it is compiled."""

    def __init__(self, on: bool):
        self.on = on

    def now(self):
        """Nanoseconds, to be put later; None if off."""
        return cute.arch.globaltimer_lo() if self.on else None

    def marker(self, results, word):
        """``put`` of one word for code that does not know ``results``; None if off."""
        if not self.on:
            return None
        return lambda when: self.put(results, word, when)

    @cute.jit
    def put(self, results, word, when=True, value=None):
        """``value``, or the time, into ``word`` of this CTA's record if ``when``."""
        if const_expr(self.on):
            tidx, _, _ = cute.arch.thread_idx()
            x, part, _ = cute.arch.block_idx()
            ctas, _, _ = cute.arch.grid_dim()
            if (tidx % WARPGROUP == 0) & when:
                t = results.o_accum
                split = t.iterator + Int64(t.shape[0] - 1) * t.stride[0]
                records = cute.make_tensor(
                    cute.recast_ptr(split, dtype=Int32),
                    cute.make_layout((WORDS, ctas * (part + 1)), stride=(1, WORDS)),
                )
                time = cute.arch.globaltimer_lo() if const_expr(value is None) else value
                records[word, part * ctas + x] = time

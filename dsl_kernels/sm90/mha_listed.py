"""Dense MHA prefill for SM90 whose list says how many heads are worked on side by side.

``mha_fwd`` in all but one place: of which head and row tile work tile j is.  There every section
has eight heads, whose K and V of 8192 tokens and more are no longer in L2 when the next CTAs read
them; here the list's header says how many heads a section has, and how many the last one, which
evens out when CTAs end (mha_list.py).

Roles, shared memory and the timeline are those of mha_fwd.py.  Results are the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..mha_list import BESIDE, LAST
from .mha_fwd import MhaFwd, OneKey, TwoKeys, budget, feasible
from .mha_parts import Loads

if TYPE_CHECKING:
    from ..spec import VariantSpec

__all__ = ["budget", "build", "feasible"]


def build(spec: VariantSpec):
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    kernel = MhaListed(spec)
    entry = TwoKeys(kernel) if len(kernel.loads.widths) == 2 else OneKey(kernel)
    return entry, kernel.fakes()


class MhaListed(MhaFwd):
    """The kernel of one head size and dtype."""

    def __init__(self, spec: VariantSpec):
        super().__init__(spec)
        self.loads = ListedLoads(spec)


class ListedLoads(Loads):
    """The producer's warp, which takes sections as the list has them."""

    @cute.jit
    def _work_tile(self, work, j, tiles, heads):
        """(place in the list, head) of work tile ``j``: mha_list.py."""
        beside = cutlass.max(work[BESIDE], Int32(1))
        # heads before the last section
        body = cutlass.max(heads - work[LAST], 0) // beside * beside
        section = j // (beside * tiles)
        first = section * beside
        if first >= body:
            first, beside = body, heads - body
        rest = j - first * tiles
        tile = rest // beside
        return tile, first + (rest - tile * beside)

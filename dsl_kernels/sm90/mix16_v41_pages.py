"""Dense MLA decode for SM90 over DeepSeek V4.1's tokens of 528 bytes in both byte orders (v41.py),
by block table, pipeline ``mix16``.

As mix16_v41.py, whose roles and shared memory these are, behind the loader of pages
(common/gather_pages_v41.py); mix16_pages.py says what rows of several query tokens do not see.

Tokens that are not finite, of which some rows see nothing.  A token with a scale of byte 255 is NaN
by its log2 (mix16_powers.py).  Of such a group content is cleared: 32 channels, a quarter of a
line, whose swizzle keeps its two chunks of 16 bytes side by side.

Shared memory beside mix16_v41.py's: a limit a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from ..cache_records import v41
from ..cache_records.v41 import GROUP
from ..common.gather_pages import AnyPages
from ..common.gather_pages_v41 import GatherPagesV41
from ..common.types import U32
from ..dims import KV_LORA_RANK as D
from ..dims import TOKEN_TILE as TILE
from ..smxx.entry import PagedRecordEntry, bytes_of_pages
from .decode import Decode
from .mix16_content import ContentRows, budget_of, infeasible_because
from .mix16_pages import REGISTERS, LimitedRows, PagedSoftmax, Quiet
from .mix16_parts import LINE
from .mix16_powers import no_numbers
from .mix16_v41 import QUADS, UNIT_STEPS, Mix16V41, V41Parts, V41Scales, V41Softmax

if TYPE_CHECKING:
    from ..common import budget as bud
    from ..spec import VariantSpec

LINE_GROUPS = LINE // GROUP


class LimitedV41Rows(LimitedRows, ContentRows):
    """``LimitedRows`` of content alone."""


class PagedV41Scales(Quiet, V41Scales):
    """``V41Scales`` of tokens that not all rows see."""

    @cute.jit
    def _quiet(self, st, stage):
        """Zeros for V of the groups of the lane's tokens whose scale is of byte 255.

        Nobody reads content but by ldmatrix, so that no proxy fence is missing.
        """
        words = self.words_of_lane(st, stage)
        for e in cutlass.range_constexpr(2):
            some = Uint32(0)
            for q in cutlass.range_constexpr(QUADS):
                some = some | no_numbers(words[QUADS * e + q])
            if some != 0:
                for q in cutlass.range(QUADS, unroll=1):
                    found = no_numbers(self.words_at(st, stage, q)[e])
                    for x in cutlass.range_constexpr(4):
                        if (found & Uint32(0x80 << (8 * x))) != 0:
                            self._clear_group(st, stage, e, q, x)

    def _clear_group(self, st, stage, e: int, q, x: int) -> None:
        """Zeros for content of group 4 ``q`` + ``x`` of the lane's token ``e``."""
        lane = cute.arch.lane_idx()
        at = stage * (TILE * D) + q * (TILE * LINE) + (2 * lane + e) * LINE
        at = at + (x ^ (lane % LINE_GROUPS)) * GROUP  # of chunks' numbers ^ (token % 8), halved
        line = cute.recast_ptr((st.kc.data_ptr() + at).align(GROUP), dtype=U32)
        zero = cute.make_rmem_tensor((GROUP // 4,), U32)
        zero.fill(0)
        cute.autovec_copy(zero, cute.make_tensor(line, cute.make_layout(GROUP // 4)))


class PagedV41Parts(V41Parts):
    """``V41Parts`` of pages."""

    lists, loader = AnyPages, GatherPagesV41
    scales_of, rows_of_q = PagedV41Scales, LimitedV41Rows
    queries: LimitedV41Rows


class PagedV41Softmax(PagedSoftmax, V41Softmax):
    """``V41Softmax`` of rows that see more or less of a sequence."""

    unit_steps: ClassVar[dict[int, int]] = {**UNIT_STEPS, 16: 4}  # more spill 12 bytes


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    return budget_of(spec, PagedV41Parts(spec), REGISTERS)


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return infeasible_because(spec, budget(spec))


def build(spec: VariantSpec):
    parts = PagedV41Parts(spec)
    decode = Decode(spec, Mix16V41(spec, parts, PagedV41Softmax(parts), REGISTERS))
    return PagedRecordEntry(decode), PagedRecordEntry.fake_args(
        spec, bytes_of_pages(v41.ROWS), v41.ROWS.channels
    )

"""Dense MLA decode for SM90 over DeepSeek V4.1's tokens of 528 bytes in both byte orders (v41.py),
by block table, pipeline ``mix16``.

As mix16_v41.py, whose roles and shared memory these are, behind the loader of pages
(load/gather_pages.py); mix16_pages.py says what rows of several query tokens do not see.

Tokens that are not finite, of which some rows see nothing.  A token with a scale of byte 255 is NaN
by its log2 (mix16_powers.py).  Of such a group content is cleared: 32 channels, a quarter of a
line, whose swizzle keeps its two chunks of 16 bytes side by side.

Shared memory beside mix16_v41.py's: a limit a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from ...blocks.types import U32
from ...entry.entries import PagedBytesEntry
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.v41 import GROUP
from ...load.gather_pages import AnyPages
from ..decode import Decode
from . import mix16_v41
from .mix16_content import ContentParts, budget_of, infeasible_because
from .mix16_limits import RowLimits
from .mix16_pages import REGISTERS
from .mix16_parts import LINE
from .mix16_powers import no_numbers
from .mix16_v41 import QUADS, Mix16V41, V41Softmax

if TYPE_CHECKING:
    from ...blocks import budget as bud
    from ...spec import VariantSpec

LINE_GROUPS = LINE // GROUP


class QuietV41:
    """``quiet`` of V4.1's scales: clears V of groups whose scale is NaN, so that rows that do not
    see the token stay finite."""

    def __init__(self, scales: Any):
        self.scales = scales

    @cute.jit
    def clear(self, st, stage):
        """Zeros for V of the groups of the lane's tokens whose scale is of byte 255.

        Nobody reads content but by ldmatrix, so that no proxy fence is missing.
        """
        words = self.scales.words_of_lane(st, stage)
        for e in cutlass.range_constexpr(2):
            some = Uint32(0)
            for q in cutlass.range_constexpr(QUADS):
                some = some | no_numbers(words[QUADS * e + q])
            if some != 0:
                for q in cutlass.range(QUADS, unroll=1):
                    found = no_numbers(self.scales.words_at(st, stage, q)[e])
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


UNIT_STEPS = {**mix16_v41.UNIT_STEPS, 16: 4}  # more spill 12 bytes


def parts_of(spec: VariantSpec) -> ContentParts:
    """Make the pipeline's components: mix16_v41.py's, but of pages, with limits of rows."""
    return mix16_v41.parts_of(
        spec,
        work=AnyPages,
        quiet=QuietV41,
        limits=RowLimits(spec.row_tile),
    )


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    return budget_of(spec, parts_of(spec), REGISTERS, mix16_v41.MADE_BYTES)


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return infeasible_because(spec, budget(spec))


def build(spec: VariantSpec):
    parts = parts_of(spec)
    softmax = V41Softmax(parts, UNIT_STEPS)
    decode = Decode(spec, Mix16V41(parts, softmax, budget(spec)))
    return PagedBytesEntry.exported(decode)

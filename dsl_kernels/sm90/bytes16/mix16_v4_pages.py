"""Dense MLA decode for SM90 over DeepSeek V4's pages of 584 bytes a token, pipeline ``mix16``.

As mix16_v4.py, whose roles and shared memory these are, behind the loader of pages
(load/gather_pages.py); mix16_pages.py says what rows of several query tokens do not see.

Tokens that are not finite, of which some rows see nothing.  A token with a scale of byte 255 is NaN
by its log2 (mix16_powers.py).  Of such a group content is cleared, and the token's RoPE channels,
which are V, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from ...blocks.types import U32
from ...entry.entries import PagedBytesEntry
from ...formats.dims import QK_ROPE_HEAD_DIM as R
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.v4 import GROUPS
from ...load.gather_pages import AnyPages
from ...load.gather_v4 import LINES
from ..decode import Decode, infeasible
from . import mix16, mix16_v4
from .mix16_limits import RowLimits
from .mix16_pages import claiming
from .mix16_powers import no_numbers
from .mix16_v4_parts import LINE, C, V4Parts, V4Softmax
from .mix16_v4_pv import ProductsOfV4

if TYPE_CHECKING:
    from ...blocks import budget as bud
    from ...spec import VariantSpec


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return mix16_v4.feasible(spec) or infeasible(spec, 2, budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    return claiming(mix16_v4.budget(spec), spec.row_tile)


def build(spec: VariantSpec):
    parts = mix16.parts_of(
        spec, V4Parts, work=AnyPages, quiet=QuietV4, limits=RowLimits(spec.row_tile)
    )
    decode = Decode(spec, ProductsOfV4(parts, V4Softmax(parts), budget(spec)))
    return PagedBytesEntry.exported(decode)


class QuietV4:
    """``quiet`` of ``V4Scales``: clears V of groups whose scale is NaN, and RoPE of their tokens,
    so that rows that do not see the token stay finite."""

    def __init__(self, scales: Any):
        self.scales = scales

    @cute.jit
    def clear(self, st, stage):
        """Zeros for V of the lane's tokens that have a scale of byte 255.

        Content is read by ldmatrix alone; RoPE by WGMMA, so a proxy fence follows.
        """
        words = self.scales.words_of_lane(st, stage)
        for e in cutlass.range_constexpr(2):
            own = words[2 * e : 2 * e + 2]
            if (no_numbers(own[0]) | no_numbers(own[1])) != 0:
                for g in cutlass.range_constexpr(GROUPS):
                    if (no_numbers(own[g // 4]) & Uint32(0x80 << (8 * (g % 4)))) != 0:
                        self._clear_group(st, stage, e, g)
                self._clear_rope(st, stage, e)
                cute.arch.fence_proxy("async.shared", space="cta")

    def _clear_group(self, st, stage, e: int, g: int) -> None:
        """Zeros for content of the lane's token ``e``: half a line, which its swizzle leaves
        whole."""
        token = 2 * cute.arch.lane_idx() + e
        at = stage * (TILE * C) + g // 2 * (TILE * LINE)
        if g // 2 < LINES:
            at = at + token * LINE + (((token // 4) ^ g) % 2) * (LINE // 2)
        else:
            at = at + token * (LINE // 2)
        self._zero((st.kc.data_ptr() + at).align(LINE // 2), LINE // 2)

    def _clear_rope(self, st, stage, e: int) -> None:
        at = stage * (TILE * R) + (2 * cute.arch.lane_idx() + e) * R
        self._zero((st.kr.data_ptr() + at).align(LINE), LINE)

    @staticmethod
    def _zero(pointer, n: int) -> None:
        """``n`` bytes of zeros."""
        zero = cute.make_rmem_tensor((n // 4,), U32)
        zero.fill(0)
        line = cute.make_tensor(cute.recast_ptr(pointer, dtype=U32), cute.make_layout(n // 4))
        cute.autovec_copy(zero, line)

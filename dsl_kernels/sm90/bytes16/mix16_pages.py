"""Dense MLA decode for SM90 over 656-byte rows, pipeline ``mix16``: pages of a block table, 16-bit
products.

As mix16.py, whose roles and shared memory these are; sequences have pages
(load/gather_pages.py, which says why they are gathered), and a unit may have rows of several
query tokens, which see more or less of the sequence.

What rows do not see.  Places behind a sequence's end, and of pages that the pool does not have, are
no tokens, as of a list.  Tokens that only some rows of a work tile see are masked in the tiles that
not all rows see whole: a row's values of them become -inf, P = 0.  V of them must be finite then:
content and ratio of V are cleared of groups whose scale is NaN, as append writes them for what is
not finite.  K is NaN by its own ratio, so that the rows that see the token are NaN.

A later token counts among "the largest scale that the work tile has seen so far" (mix16_parts.py):
a row that does not see it may feel it where it is 2^40 times as large as what the row sees.

Shared memory beside mix16.py's: a limit a row.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from ...blocks.types import U32
from ...entry.entries import PagedBytesEntry
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.ds_mla import GROUPS
from ...load.gather_pages import AnyPages, GatherPages
from ..decode import Decode, infeasible
from . import mix16
from .mix16_limits import RowLimits
from .mix16_parts import LINE
from .mix16_softmax import MixSoftmax

if TYPE_CHECKING:
    from ...blocks import budget as bud
    from ...spec import VariantSpec

# Of producers, softmax, P.V, by rows.  Few rows' O is small: their producers have more than in
# mix16.py, where they copy whole rows.
REGISTERS = {16: (48, 176, 144), 32: (48, 176, 144), 64: mix16.REGISTERS[64]}
ABSOLUTE, INFINITE = 0x7FFFFFFF, 0x7F800000  # of an fp32's bits


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return mix16.feasible(spec) or infeasible(spec, 2, budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    return claiming(mix16.budget(spec), spec.row_tile)


def claiming(declared: bud.Budget, rows: int) -> bud.Budget:
    """A budget with ``REGISTERS`` in the place of its own."""
    groups = zip(declared.groups, REGISTERS[rows], strict=True)
    own = tuple(dataclasses.replace(group, registers=n) for group, n in groups)
    return dataclasses.replace(declared, groups=own)


def build(spec: VariantSpec):
    parts = mix16.parts_of(
        spec, work=AnyPages, loader=GatherPages, quiet=QuietGroups,
        limits=RowLimits(spec.row_tile),
    )  # fmt: skip
    decode = Decode(spec, mix16.Mix16(parts, MixSoftmax(parts), budget(spec)))
    return PagedBytesEntry.exported(decode)


class QuietGroups:
    """``quiet`` of ``GroupScales``: clears V of groups whose scale is NaN, so that rows that do
    not see the token stay finite."""

    def __init__(self, scales: Any):
        self.scales = scales

    @cute.jit
    def clear(self, st, stage):
        """Zeros for V of the lane's tokens in groups whose scale is NaN.

        Nobody reads content but by ldmatrix, so that no proxy fence is missing.
        """
        most = Uint32(0)
        for e in cutlass.range_constexpr(2):
            for g in cutlass.range_constexpr(GROUPS):
                most = cutlass.max(most, self._bits(st, stage, e)[g])
        if most > Uint32(INFINITE):
            for e in cutlass.range_constexpr(2):
                bits = self._bits(st, stage, e)
                for g in cutlass.range_constexpr(GROUPS):
                    if bits[g] > Uint32(INFINITE):
                        self._clear_group(st, stage, e, g)

    def _bits(self, st, stage, e: int):
        """Bits of the scales of the lane's token ``e``, without signs; read anew wherever they are
        wanted, as the warp has no registers for them."""
        four = cute.make_rmem_tensor((GROUPS,), Float32)
        cute.autovec_copy(
            self.scales.of_tokens(st)[None, 2 * cute.arch.lane_idx() + e, stage], four
        )
        return [four[g].bitcast(Uint32) & Uint32(ABSOLUTE) for g in range(GROUPS)]

    def _clear_group(self, st, stage, e: int, g: int) -> None:
        """Zeros for content and ratio of V of the lane's token ``e``."""
        lane, ratios = cute.arch.lane_idx(), self.scales.ratios(st)
        at = stage * (TILE * D) + g * (TILE * LINE) + (2 * lane + e) * LINE
        line = cute.recast_ptr((st.kc.data_ptr() + at).align(LINE), dtype=U32)
        zero = cute.make_rmem_tensor((LINE // 4,), U32)
        zero.fill(0)
        cute.autovec_copy(zero, cute.make_tensor(line, cute.make_layout(LINE // 4)))
        other = Uint32(0xFFFF << (16 * (1 - e)))
        word = (lane // 4, lane % 4, g, stage)
        ratios[word] = ratios[word] & other

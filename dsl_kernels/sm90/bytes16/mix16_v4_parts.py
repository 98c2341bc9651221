"""Components of ``mix16`` over DeepSeek V4's pages (mix16_v4.py): queries, scales, softmax.

Scales are powers of two (mix16_powers.py), of seven groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Uint32
from cutlass.cute.nvgpu import warp

from ...blocks.smem import array
from ...blocks.types import BF16, U16, U32
from ...formats.dims import QK_ROPE_HEAD_DIM as R
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.v4 import CONTENT, GROUPS, SCALE_BYTES
from ...load.gather_v4 import LINES, GatherV4, TwoLists
from ...load.planes import CacheFormat, Plane
from ..roles import Layouts
from .mix16_parts import Parts, QueryRows
from .mix16_powers import PowerScales
from .mix16_softmax import MixSoftmax

if TYPE_CHECKING:
    from ...spec import VariantSpec

C = CONTENT.count
Q_FORMAT = CacheFormat((Plane("c", BF16, C), Plane("r", BF16, R)))
BLOCKS = C // 64  # column blocks of a row of Q
WORDS = 8  # of a token's ratios for K, one of them unused: two stores of 16 bytes
# Of a tile: content, RoPE, scales, facts, ratios of K and of V.
STAGE_BYTES = TILE * (C + 2 * R + SCALE_BYTES + 4 * (4 + WORDS) + 2 * GROUPS)
STEPS = 4  # k steps of a group
UNIT_STEPS = {16: 8, 32: 8, 64: 4}  # that are converted at once, by rows
LINE = 128


class V4QueryRows(QueryRows):
    """``QueryRows`` of seven column blocks: the last lanes have one block, not two."""

    channels = C

    def _line(self, at, x, part, block):
        """Address of a lane's column block of turn ``x``; where there is none, of the first."""
        there = part + 4 * x < BLOCKS
        return cutlass.select_(there, at + x * (4 * block), at)

    @cute.jit
    def _convert(self, line, x, part, half, lane, power):
        """Half of a lane's column block of turn ``x`` to f16, if there is one."""
        if part + 4 * x < BLOCKS:
            self._to_f16(line, half, lane, power)


class V4Scales(PowerScales):
    """``PowerScales`` of seven groups: a token's eighth byte is any; ``own`` has a word more."""

    def __init__(self, stages: int, quiet: Any = None):
        super().__init__(stages, quiet, groups=GROUPS, words=WORDS, quads=SCALE_BYTES // 4)

    def scales_alone(self, word, q: int):
        """Without the byte that is no scale."""
        return word & Uint32(0x00FFFFFF) if q == self.quads - 1 else word


class V4Parts(Parts):
    """``Parts`` of V4's pages."""

    content, q_format, whole_lines = C, Q_FORMAT, True

    def __init__(self, spec: VariantSpec, **members: Any):
        """``members``: what is not as over lists."""
        own = {"work": TwoLists, "loader": GatherV4, "scales": V4Scales, "queries": V4QueryRows}
        super().__init__(spec, **{**own, **members})

    def tile_fields(self, layouts: Layouts) -> dict:
        """And P in BF16."""
        return dict(**super().tile_fields(layouts), pr=array(BF16, cute.cosize(layouts.p), 1024))


class V4Softmax(MixSoftmax):
    """The softmax warpgroup: one chain over the content for any number of rows, one or two groups a
    unit; P^T also in BF16, over sigma, for the RoPE channels of V."""

    def __init__(self, parts: V4Parts):
        super().__init__(parts)
        self.few_rows, end, steps = False, STEPS * GROUPS, UNIT_STEPS[parts.rows]
        self.units = [range(k, min(k + steps, end)) for k in range(0, end, steps)]

    def groups_of(self, unit: int) -> range:
        """The groups of a unit's channels."""
        return range(self.units[unit][0] // STEPS, self.units[unit][-1] // STEPS + 1)

    def load_ratio(self, own, stage, token, unit: int, held=None):
        """Words by which the thread's two tokens are multiplied, of each group of a unit."""
        return [[own[g, token + 8 * e, stage] for e in range(2)] for g in self.groups_of(unit)]

    def ratio_of(self, ratio, x: int):
        """Words of ``ratio`` for a unit's 32 channels from 32 ``x`` on, which are half a group."""
        return ratio[2 * x // STEPS]

    def load_k(self, st, stage, wwarp, lane, unit: int, ahead=0):
        """Bytes of a unit's channels of the warp's 16 tokens, as ldmatrix deals them out.

        A chunk's place is an XOR away from the first one's: an address for each would be kept in a
        register for all tiles, and there is none.
        """
        ldsm = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), U16)
        row, half, raws = wwarp * 16 + lane % 16, lane // 16, []
        for group in self.groups_of(unit):
            base = st.kc.data_ptr().toint() + stage * (TILE * C) + group // 2 * (TILE * LINE)
            if group // 2 < LINES:
                line, first = base + row * LINE + (half ^ (row % 8)) * 16, group % 2 * 4
            else:
                line, first = base + row * (LINE // 2) + (half ^ (row // 2 % 4)) * 16, 0
            for chunk in (first, first + 2):  # of 16 channels
                at = line ^ (chunk * 16)
                source = cute.make_ptr(U16, at, cute.AddressSpace.smem, assumed_align=16)
                loaded = cute.make_rmem_tensor((8,), U16)
                cute.copy(ldsm, cute.make_tensor(source, cute.make_layout(8)), loaded)
                raws.append(cute.recast_tensor(loaded, U32))
        return raws

    def store_more(self, st, t, inverse, buf, wwarp, lane) -> None:
        """P' / sigma in BF16; ``t`` is it then."""
        for v in range(self.fragment.values):
            t[v] = t[v] * inverse[self.fragment.token(v)]
        base = st.pr.data_ptr().toint() + buf * (self.rows_cta * TILE * 2)
        self.store_p(base, t, wwarp, lane, BF16)

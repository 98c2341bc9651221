"""Sparse MLA decode for SM90 over DeepSeek V4.1's tokens of 528 bytes in both byte orders (v41.py),
pipeline ``mix16``.

A token is 512 e4m3 channels with a power-of-two scale for each 32; roles and timeline are
mix16_content.py's.  Two groups share the 64 channels of a unit of Q.K and of a P.V warp, so a
product has two ratios; of fewer rows a unit of Q.K is 128 channels, and has four.

Scales are mix16_powers.py's, of sixteen groups.

Registers as mix16_v4.py's, whose announcer has as much to do.

Shared memory, 64 rows and 3 stages (bytes)
    Q 65536 | K ring 3 x (32768 content + 1024 scales + 8192 of theirs) | P 2 x 8192
    exchange, gamma, factors, 1/l, flags, barriers                                         = 212992
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from ...blocks.types import U16, U32
from ...entry.entries import TwoListEntry
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.v41 import GROUP, SCALES
from ...load.gather import CHUNK
from ...load.gather_v4 import TwoLists
from ...load.gather_v41 import GatherV41
from ..decode import Decode
from . import mix16
from .mix16_content import ContentParts, ContentSoftmax, budget_of, infeasible_because
from .mix16_parts import LINE
from .mix16_powers import PowerScales
from .mix16_pv import VTile

if TYPE_CHECKING:
    from ...blocks import budget as bud
    from ...spec import VariantSpec

# Of producers, softmax, P.V, by rows
REGISTERS = {16: (40, 152, 160), 32: (40, 152, 160), 64: mix16.REGISTERS[64]}
QUADS = SCALES // 4  # words of a token's scales
WORDS = SCALES + 4  # from a token's ratios for K to the next one's: eight tokens, all 32 banks
V41_SCALES = functools.partial(PowerScales, groups=SCALES, words=WORDS, quads=QUADS)
MADE_BYTES = 4 * (4 + WORDS + SCALES // 2)  # of what is made of a token's scales
UNIT_STEPS = {16: 8, 32: 8, 64: 4}  # k steps of Q.K that are converted at once, by rows
WARP_GROUPS = 64 // GROUP  # of a P.V warp's channels


class V41Softmax(ContentSoftmax):
    """The softmax warpgroup: one chain for any number of rows, two or four groups a unit."""

    def __init__(self, parts: ContentParts, unit_steps: dict[int, int] = UNIT_STEPS):
        super().__init__(parts)
        self.few_rows, steps = False, unit_steps[parts.rows]
        self.units = [range(k, k + steps) for k in range(0, 2 * SCALES, steps)]

    def load_ratio(self, own, stage, token, unit: int, held=None):
        """Words by which the thread's two tokens are multiplied, one for each of a unit's
        groups."""
        found, groups = [], len(self.units[unit]) * 16 // GROUP
        for e in range(2):
            at = own[None, token + 8 * e, stage].iterator + groups * unit
            words = cute.make_rmem_tensor((groups,), U32)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(groups)), words)
            found.append(words)
        return found

    def ratio_of(self, ratio, x: int):
        """Words of ``ratio`` for group ``x`` of a unit: its 32 channels from 32 ``x`` on."""
        return [words[x] for words in ratio]

    def load_k(self, st, stage, wwarp, lane, unit: int, ahead=0):
        """Load K like the base class, but get a chunk's address by an XOR from the first one's:
        an address for each would be kept in a register for all tiles, and none is free."""
        ldsm = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), U16)
        row, raws = wwarp * 16 + lane % 16, []
        line = st.kc.data_ptr().toint() + stage * (TILE * D) + ahead + row * LINE
        first = line + ((lane // 16) ^ (row % 8)) * CHUNK
        for chunk in self.units[unit][::2]:  # of 16 channels
            at = (first ^ (chunk % 8 * CHUNK)) + chunk // 8 * (TILE * LINE)
            source = cute.make_ptr(U16, at, cute.AddressSpace.smem, assumed_align=16)
            loaded = cute.make_rmem_tensor((8,), U16)
            cute.copy(ldsm, cute.make_tensor(source, cute.make_layout(8)), loaded)
            raws.append(cute.recast_tensor(loaded, U32))
        return raws


class Mix16V41(mix16.Mix16):
    """The pipeline: softmax and P.V roles (``decode.Pipeline``)."""

    units_a_ratio = GROUP // 16  # units of P.V, of 16 channels

    def tile(self, st, stage, half, wwarp, offset) -> VTile:
        """The warpgroup's half of a stage."""
        tile = super().tile(st, stage, half, wwarp, offset)
        return tile._replace(group=SCALES // 2 * half + WARP_GROUPS * wwarp)


def parts_of(spec: VariantSpec, **members: Any) -> ContentParts:
    """Make the pipeline's components; ``members`` replace the defaults, which are for lists."""
    own = {"work": TwoLists, "loader": GatherV41, "scales": V41_SCALES}
    return mix16.parts_of(spec, ContentParts, **{**own, **members})


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    return budget_of(spec, parts_of(spec), REGISTERS, MADE_BYTES)


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return infeasible_because(spec, budget(spec))


def build(spec: VariantSpec):
    parts = parts_of(spec)
    return TwoListEntry.exported(Decode(spec, Mix16V41(parts, V41Softmax(parts), budget(spec))))

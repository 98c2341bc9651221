"""Sparse MLA decode for SM90 over DeepSeek V4.1's tokens of 528 bytes in both byte orders (v41.py),
pipeline ``mix16``.

A token is 512 e4m3 channels with a power-of-two scale for each 32; roles and timeline are
mix16_content.py's.  Two groups share the 64 channels of a unit of Q.K and of a P.V warp, so a
product has two ratios.

Scales (announcer warp).  sigma, ratios and facts are mix16_v4_parts.py's, of sixteen groups; one
ratio serves K and V, as K's sigma is V's.

Registers as mix16_v4.py's, whose announcer has as much to do.

Shared memory, 64 rows and 3 stages (bytes)
    Q 65536 | K ring 3 x (32768 content + 1024 scales + 8192 of theirs) | P 2 x 8192
    exchange, gamma, factors, 1/l, flags, barriers                                         = 212992
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from ..cache_records import v41
from ..cache_records.v41 import GROUP, SCALES
from ..common.gather_v4 import TwoLists
from ..common.gather_v41 import GatherV41
from ..common.smem import array
from ..common.types import U32
from ..dims import TOKEN_TILE as TILE
from ..smxx.two_list_entry import TwoListEntry, fake_args
from . import mix16
from .decode import Decode
from .mix16_content import (
    ContentParts,
    ContentSoftmax,
    Mix16Content,
    budget_of,
    infeasible_because,
)
from .mix16_parts import SUM_FACTOR, RecordScales, larger_halves, pack_f16
from .mix16_pv import VTile
from .mix16_v4_parts import EXPONENT_AT, log2_of_power, of_tile

if TYPE_CHECKING:
    from ..common import budget as bud
    from ..spec import VariantSpec

# Of producers, softmax, P.V, by rows
REGISTERS = {16: (40, 152, 160), 32: (40, 152, 160), 64: mix16.REGISTERS[64]}
RECORDS = {record.name: record for record in (v41.PLANAR, v41.ROWS)}
QUADS = SCALES // 4  # words of a token's scales
WORDS = SCALES + 4  # from a token's ratios for K to the next one's: eight tokens, all 32 banks
STEPS = 4  # k steps that are converted at once
UNIT_GROUPS = 16 * STEPS // GROUP  # of them, and of a P.V warp
EXPONENT = 255 << EXPONENT_AT


class V41Scales(RecordScales):
    """``RecordScales`` of sixteen powers of two, field ``ks``, four a word."""

    groups, words = SCALES, WORDS

    @property
    def fields(self) -> dict:
        """Storage."""
        return {**super().fields, "ks": array(U32, QUADS * TILE * self.stages, 128)}

    def of_tokens(self, st):
        """(word, token, stage) of the scales."""
        return st.ks.get_tensor(cute.make_layout((QUADS, TILE, self.stages)))

    @staticmethod
    def _largest(words):
        """fp32: the largest scale of a token, whose bytes are ``words``."""
        pairs = [w & Uint32(0x00FF00FF) for w in words]
        pairs += [(w >> Uint32(8)) & Uint32(0x00FF00FF) for w in words]
        while len(pairs) > 1:
            pairs = [larger_halves(*two) for two in zip(pairs[::2], pairs[1::2], strict=True)]
        most = cutlass.max(pairs[0] & Uint32(0xFFFF), pairs[0] >> Uint32(16))
        return (most << Uint32(EXPONENT_AT)).bitcast(Float32)

    @staticmethod
    def _scale(word, g: int):
        """fp32: scale ``g`` of a word."""
        up = EXPONENT_AT - 8 * g
        bits = word << Uint32(up) if up > 0 else word >> Uint32(-up)
        return (bits & Uint32(EXPONENT)).bitcast(Float32)

    @cute.jit
    def _make(self, st, stage, named, top):
        lane = cute.arch.lane_idx()
        scales, facts, largest = self.of_tokens(st), self.facts(st), []
        for e in cutlass.range_constexpr(2):
            words = cute.make_rmem_tensor((QUADS,), U32)
            cute.autovec_copy(scales[None, 2 * lane + e, stage], words)
            largest.append(self._largest([words[i] for i in range(QUADS)]))
        top, least, some = of_tile(largest, named, top)
        inverse = []
        for e in cutlass.range_constexpr(2):
            sigma = cute.arch.fmax(largest[e], least)
            inverse.append(cute.arch.rcp_approx(sigma))
            log = log2_of_power(sigma)
            four = cute.make_rmem_tensor((4,), Float32)
            four[0] = Float32(cutlass.select_(named[e], log, -Float32.inf))
            four[1], four[2], four[3] = inverse[e] * SUM_FACTOR, sigma, some
            cute.autovec_copy(four, facts[None, 2 * lane + e, stage])
        self._make_ratios(st, stage, lane, inverse)
        return top

    @cute.jit
    def _make_ratios(self, st, stage, lane, inverse):
        """Of both tokens, a word of scales at a time: all of them are more registers than there
        are."""
        scales, own, ratios = self.of_tokens(st), self.own(st), self.ratios(st)
        for q in cutlass.range(QUADS, unroll=1):
            token = [scales[q, 2 * lane + e, stage] for e in range(2)]
            for e in cutlass.range_constexpr(2):
                twice = cute.make_rmem_tensor((4,), U32)
                for g in cutlass.range_constexpr(4):
                    ratio = self._scale(token[e], g) * inverse[e]
                    twice[g] = pack_f16(ratio, ratio)
                words = own[None, 2 * lane + e, stage].iterator
                at = words + cute.assume(4 * q, divby=4)
                cute.autovec_copy(twice, cute.make_tensor(at, cute.make_layout(4)))
            for g in cutlass.range_constexpr(4):
                both = pack_f16(*(self._scale(token[e], g) * inverse[e] for e in range(2)))
                ratios[lane // 4, lane % 4, 4 * q + g, stage] = both


class V41Softmax(ContentSoftmax):
    """The softmax warpgroup: one chain for any number of rows, two groups a unit."""

    def __init__(self, parts: V41Parts):
        super().__init__(parts)
        self.few_rows = False
        self.units = [range(k, k + STEPS) for k in range(0, 2 * SCALES, STEPS)]

    def load_ratio(self, own, stage, token, unit: int, held=None):
        """Words by which the thread's two tokens are multiplied, of a unit's two groups each."""
        found = []
        for e in range(2):
            at = own[None, token + 8 * e, stage].iterator + UNIT_GROUPS * unit
            words = cute.make_rmem_tensor((UNIT_GROUPS,), U32)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(UNIT_GROUPS)), words)
            found.append(words)
        return found

    def ratio_of(self, ratio, x: int):
        """Those of a unit's 32 channels from 32 ``x`` on."""
        return [words[x] for words in ratio]


class V41Parts(ContentParts):
    """``ContentParts`` of V4.1's tokens."""

    lists, loader, scales_of = TwoLists, GatherV41, V41Scales
    stage_bytes = TILE * (v41.ROWS.token_bytes + 4 * (4 + WORDS + SCALES // 2))

    def __init__(self, spec: VariantSpec):
        super().__init__(spec, RECORDS[spec.cache_dtype])


class Mix16V41(Mix16Content):
    """The pipeline: softmax and P.V roles (``decode.Pipeline``)."""

    units_a_ratio = GROUP // 16  # units of P.V, of 16 channels

    def tile(self, st, stage, half, wwarp, offset) -> VTile:
        """The warpgroup's half of a stage."""
        tile = super().tile(st, stage, half, wwarp, offset)
        return tile._replace(group=SCALES // 2 * half + UNIT_GROUPS * wwarp)


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    return budget_of(spec, V41Parts(spec), REGISTERS)


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return infeasible_because(spec, budget(spec))


def build(spec: VariantSpec):
    parts = V41Parts(spec)
    pipeline = Mix16V41(spec, parts, V41Softmax(parts), REGISTERS)
    return TwoListEntry(Decode(spec, pipeline)), fake_args(spec, RECORDS[spec.cache_dtype])

"""What ``mix16`` over DeepSeek V4's pages (mix16_v4.py) is composed of: queries, scales, softmax.

Scales are powers of two, a byte each.  sigma, ratios and facts are mix16_parts.py's: the ratios of
a token's seven groups are exact in f16 down to 2^-24.  Byte 0 (2^-127) counts as 0, byte 255 makes
the rows that see the token NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp

from .. import compat
from ..cache_records.ds_mla import LEAST_SCALE
from ..cache_records.v4 import CONTENT, GROUPS, SCALE_BYTES
from ..common.cache_format import CacheFormat, Plane
from ..common.gather_v4 import LINES, GatherV4, TwoLists
from ..common.smem import array
from ..common.stamps import Stamps
from ..common.types import BF16, F8, F16, ROW_MAJOR, U16, U32
from ..dims import QK_ROPE_HEAD_DIM as R
from ..dims import TOKEN_TILE as TILE
from .mix16_parts import (
    APART,
    LEAST_KEY_SIGMA,
    SUM_FACTOR,
    Parts,
    QueryRows,
    RecordQueries,
    RecordScales,
    pack_f16,
)
from .mix16_softmax import MixSoftmax
from .roles import K_READERS, Q_READERS, Layouts

if TYPE_CHECKING:
    from ..spec import VariantSpec

C = CONTENT.count
Q_FORMAT = CacheFormat((Plane("c", BF16, C), Plane("r", BF16, R)))
BLOCKS = C // 64  # column blocks of a row of Q
WORDS = 8  # of a token's ratios for K, one of them unused: two stores of 16 bytes
# Of a tile: content, RoPE, scales, facts, ratios of K and of V.
STAGE_BYTES = TILE * (C + 2 * R + SCALE_BYTES + 4 * (4 + WORDS) + 2 * GROUPS)
STEPS = 4  # k steps of a group, which are converted at once
LINE = 128
EXPONENT_AT, EXPONENT_BIAS = 23, 127  # of an fp32 number


def layouts_of(rows: int, stages: int, q_stages: int, p_stages: int) -> Layouts:
    """Shared-memory layouts: Q and K in 16 bits, the ring's content in 8, P."""
    a, b, shape = sm90.make_smem_layout_a, sm90.make_smem_layout_b, (TILE, rows)
    return Layouts(
        tuple(b(ROW_MAJOR, (*shape, width), BF16, q_stages) for width in (C, R)),
        (a(ROW_MAJOR, (*shape, C), F8, stages), a(ROW_MAJOR, (*shape, R), BF16, stages)),
        b(ROW_MAJOR, (*shape, TILE), F16, p_stages),
    )


def of_tile(largest, named, top):
    """(``top`` with this tile, the least sigma, whether the tile has a token: 1 or 0), by all lanes
    of the announcer.

    Args:
        largest: scales of the lane's two tokens.
        named: which of them are there.
        top: the largest scale of the item's tiles before.
    """
    here = cute.arch.fmax(largest[0], largest[1])
    for bit in range(5):
        here = cute.arch.fmax(here, cute.arch.shuffle_sync_bfly(here, 1 << bit))
    top = cute.arch.fmax(top, here)
    least = cute.arch.fmax(top * APART, Float32(LEAST_SCALE))
    some = cute.arch.vote_any_sync(named[0] | named[1])
    some = Float32(cutlass.select_(some, Float32(1.0), Float32(0.0)))
    return top, least, some


def log2_of_power(x):
    """log2 of a power of two, a normal fp32 number, or of infinity: its exponent, as ``lg2.approx``
    is off by up to 2^-20 there, which LSE would have; 128 of infinity."""
    return Float32((x.bitcast(Int32) >> EXPONENT_AT) - EXPONENT_BIAS)


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


class V4Scales(RecordScales):
    """``RecordScales`` of seven powers of two; ``own`` has a word more than groups."""

    groups, words = GROUPS, WORDS

    @property
    def fields(self) -> dict:
        """Storage."""
        return {**super().fields, "ks": array(U32, SCALE_BYTES // 4 * TILE * self.stages, 128)}

    def _words_of_lane(self, st, stage):
        """Scales of the lane's two tokens, as bytes; to be read anew wherever they are wanted, as
        fp32 they would take all registers of the warp."""
        words = st.ks.get_tensor(cute.make_layout((4, TILE // 2, self.stages)))
        four = cute.make_rmem_tensor((4,), U32)
        cute.autovec_copy(words[None, cute.arch.lane_idx(), stage], four)
        return [compat.opaque(four[i]) for i in range(4)]

    @staticmethod
    def _scale(words, e: int, g: int):
        """fp32 scale of group ``g`` of the lane's token ``e``."""
        word, up = words[2 * e + g // 4], EXPONENT_AT - 8 * (g % 4)
        bits = word << Uint32(up) if up > 0 else word >> Uint32(-up)
        return (bits & Uint32(255 << EXPONENT_AT)).bitcast(Float32)

    @cute.jit
    def _make(self, st, stage, named, top):
        lane = cute.arch.lane_idx()
        facts, own, ratios = self.facts(st), self.own(st), self.ratios(st)
        words, largest = self._words_of_lane(st, stage), []
        for e in cutlass.range_constexpr(2):
            most = self._scale(words, e, 0)
            for g in cutlass.range_constexpr(1, GROUPS):
                most = cute.arch.fmax(most, self._scale(words, e, g))
            largest.append(most)
        top, least, some = of_tile(largest, named, top)
        inverse = []
        for e in cutlass.range_constexpr(2):
            sigma = cute.arch.fmax(largest[e], least)
            inverse.append(cute.arch.rcp_approx(sigma))
            log = log2_of_power(sigma)
            four = cute.make_rmem_tensor((4,), Float32)
            four[0] = Float32(cutlass.select_(named[e], log, -Float32.inf))
            key_sigma = cute.arch.fmax(sigma, Float32(LEAST_KEY_SIGMA))
            four[1], four[2], four[3] = inverse[e] * SUM_FACTOR, key_sigma, some
            cute.autovec_copy(four, facts[None, 2 * lane + e, stage])
            words, twice = self._words_of_lane(st, stage), cute.make_rmem_tensor((WORDS,), U32)
            key_inverse = cute.arch.rcp_approx(key_sigma)
            for g in cutlass.range_constexpr(GROUPS):
                ratio = self._scale(words, e, g) * key_inverse
                twice[g] = pack_f16(ratio, ratio)
            twice[GROUPS] = Uint32(0)
            cute.autovec_copy(twice, own[None, 2 * lane + e, stage])
        words = self._words_of_lane(st, stage)
        for g in cutlass.range_constexpr(GROUPS):
            both = pack_f16(*(self._scale(words, e, g) * inverse[e] for e in range(2)))
            ratios[lane // 4, lane % 4, g, stage] = both
        return top


class V4Parts(Parts):
    """``Parts`` of V4's pages.

    Attributes:
        lists, loader, queries_of, scales_of, rows_of_q: classes of its members.
    """

    lists: Any = TwoLists
    loader: Any = GatherV4
    queries_of, scales_of, rows_of_q = RecordQueries, V4Scales, V4QueryRows

    def __init__(self, spec: VariantSpec, *, stages: int, q_stages: int):
        self.rows, self.stages, self.q_stages = spec.row_tile, stages, q_stages
        self.work = self.lists(TILE)
        self.q_tiles = self.queries_of(
            Q_FORMAT, self.work, rows=self.rows, stages=q_stages, readers=Q_READERS
        )
        self.loads = self.loader(
            self.work, stages=stages, q_stages=q_stages, readers=K_READERS, by_lines=True,
            halves=bool(spec.halves),
        )  # fmt: skip
        self.scales = self.scales_of(stages)
        self.queries = self.rows_of_q(self.rows)
        self.stamps = Stamps(bool(spec.stamps))

    def tile_fields(self, layouts: Layouts) -> dict:
        """And P in BF16."""
        return dict(**super().tile_fields(layouts), pr=array(BF16, cute.cosize(layouts.p), 1024))


class V4Softmax(MixSoftmax):
    """The softmax warpgroup: one chain over the content for any number of rows, a unit a group;
    P^T also in BF16, over sigma, for the RoPE channels of V."""

    def __init__(self, parts: V4Parts):
        super().__init__(parts)
        self.few_rows = False
        self.units = [range(STEPS * g, STEPS * (g + 1)) for g in range(GROUPS)]

    def group_of(self, unit: int) -> int:
        """The group of a unit's channels."""
        return unit

    def load_k(self, st, stage, wwarp, lane, unit: int, ahead=0):
        """Bytes of a group's channels of the warp's 16 tokens, as ldmatrix deals them out.

        A chunk's place is an XOR away from the first one's: an address for each would be kept in a
        register for all tiles, and there is none.
        """
        ldsm = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), U16)
        row, half = wwarp * 16 + lane % 16, lane // 16
        base, raws = st.kc.data_ptr().toint() + stage * (TILE * C) + unit // 2 * (TILE * LINE), []
        if unit // 2 < LINES:
            line, first = base + row * LINE + (half ^ (row % 8)) * 16, unit % 2 * 4
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

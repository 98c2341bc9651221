"""Scales that are powers of two, a byte each (V4's, V4.1's), in ``mix16``: what the announcer makes
of a tile's.

A byte b is 2^(b - 127), 255 no number.  All is done with the bytes themselves, two of them a word,
16 bits each: the announcer is one warp, which every tile waits for.  A token's sigma is its largest
byte, at least 2^-40 of the largest that the work tile has seen so far.  The ratio of a byte to it
is exact in f16 down to 2^-24; what is less is 0.

A token with a byte of 255 is NaN by its log2, so that the rows that see it are; it has no part in
"the largest scale that the work tile has seen so far".
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ...blocks import compat
from ...blocks.smem import array
from ...blocks.types import U32
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.ds_mla import LEAST_SCALE
from .mix16_parts import APART, SUM_FACTOR, GroupScales, larger_halves

EXPONENT_AT, EXPONENT_BIAS = 23, 127  # of an fp32 number
NO_NUMBER = 255
BYTES = 0x00FF00FF  # of a word, every other one
TWICE = 0x00010001
BINADES = -int(math.log2(APART))
LEAST_BYTE = EXPONENT_BIAS + int(math.log2(LEAST_SCALE))
# An f16 of exponent field x, bits x << 10, is 2^(x - 15); times 2^-10 it is the ratio of a byte
# that is 25 - x less than sigma, also where f16 has no more exponents.
F16_MANTISSA, RATIO_ONE = 10, 25


@compat.dsl_user_op
def select_bytes(a, b, which: int, *, loc=None, ip=None):
    """A word of bytes of ``a`` (0 to 3) and ``b`` (4 to 7), lowest first in ``which``."""
    return compat.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {which};",
        write_only_types=[Uint32], read_only_args=[a, b], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def small(fields, *, loc=None, ip=None):
    """Two f16 times 2^-10, exactly down to 2^-24."""
    return compat.inline_ptx(
        "{\n.reg .b32 small;\nmov.b32 small, 0x14001400;\nmul.rn.f16x2 {$w0}, {$r0}, small;\n}",
        write_only_types=[Uint32], read_only_args=[fields], loc=loc, ip=ip,
    )  # fmt: skip


def halves(word):
    """Bytes 0 and 2, 1 and 3 of a word, 16 bits each."""
    return word & Uint32(BYTES), (word >> Uint32(8)) & Uint32(BYTES)


def largest_byte(words):
    """Largest byte of ``words``, as a number."""
    pairs = [pair for word in words for pair in halves(word)]
    while len(pairs) > 1:
        pairs = [larger_halves(*two) for two in zip(pairs[::2], pairs[1::2], strict=True)]
    return cutlass.max(pairs[0] & Uint32(0xFFFF), pairs[0] >> Uint32(16))


def no_numbers(word):
    """The upper bits of a word's bytes of 255: of x + 1 in seven bits there, and of x."""
    seven = (word & Uint32(0x7F7F7F7F)) + Uint32(0x01010101)
    return seven & word & Uint32(0x80808080)


class PowerScales(GroupScales):
    """``GroupScales`` of powers of two, field ``ks``, four a word; one ratio of each serves K and
    V.

    Attributes:
        quads: words of a token's scales.
    """

    def __init__(self, stages: int, quiet: Any = None, *, groups: int, words: int, quads: int):
        super().__init__(stages, quiet)
        self.groups, self.words, self.quads = groups, words, quads

    @property
    def fields(self) -> dict:
        """Storage."""
        return {**super().fields, "ks": array(U32, self.quads * TILE * self.stages, 128)}

    def words_of_lane(self, st, stage):
        """Scales of the lane's two tokens, one behind the other."""
        layout = cute.make_layout((2 * self.quads, TILE // 2, self.stages))
        words = cute.make_rmem_tensor((2 * self.quads,), U32)
        own = st.ks.get_tensor(layout)[None, cute.arch.lane_idx(), stage]
        cute.autovec_copy(own, words)
        return [self.scales_alone(words[i], i % self.quads) for i in range(2 * self.quads)]

    def words_at(self, st, stage, q):
        """The ``q``-th word of each of the lane's two tokens."""
        layout = cute.make_layout((self.quads, 2, TILE // 2, self.stages))
        words = st.ks.get_tensor(layout)[q, None, cute.arch.lane_idx(), stage]
        return [self.scales_alone(words[e], q) for e in range(2)]

    def scales_alone(self, word, _q: int):
        """A token's ``_q``-th word without bytes that are no scale: all are."""
        return word

    @cute.jit
    def _make(self, st, stage, named, top):
        lane, facts = cute.arch.lane_idx(), self.facts(st)
        words = self.words_of_lane(st, stage)
        largest = [largest_byte(words[: self.quads]), largest_byte(words[self.quads :])]
        numbers = [cutlass.select_(x == NO_NUMBER, Uint32(0), x) for x in largest]
        here = cute.arch.warp_redux_sync(cutlass.max(*map(Uint32, numbers)), "umax")
        top = cute.arch.fmax(top, (here << Uint32(EXPONENT_AT)).bitcast(Float32))
        least = (top.bitcast(Int32) >> EXPONENT_AT) - BINADES
        least = Uint32(cutlass.max(least, Int32(LEAST_BYTE)))
        some = cute.arch.vote_any_sync(named[0] | named[1])
        some = Float32(cutlass.select_(some, Float32(1.0), Float32(0.0)))
        sigma = [cutlass.max(x, least) for x in largest]
        for e in cutlass.range_constexpr(2):
            four = cute.make_rmem_tensor((4,), Float32)
            four[0], four[1], four[2] = self._facts_of(sigma[e], named[e])
            four[3] = some
            cute.autovec_copy(four, facts[None, 2 * lane + e, stage])
        self._make_ratios(st, stage, lane, sigma)
        return top

    @staticmethod
    def _facts_of(sigma, named):
        """(log2 sigma, 2^-40 / sigma, sigma) of a token whose sigma is byte ``sigma``."""
        log = Float32(Int32(sigma) - EXPONENT_BIAS)
        log = Float32(cutlass.select_(sigma == NO_NUMBER, Float32(math.nan), log))
        log = Float32(cutlass.select_(named, log, -Float32.inf))
        back = Uint32(2 * EXPONENT_BIAS) - cutlass.min(sigma, Uint32(2 * EXPONENT_BIAS))
        inverse = (back << Uint32(EXPONENT_AT)).bitcast(Float32)
        return log, inverse * SUM_FACTOR, (sigma << Uint32(EXPONENT_AT)).bitcast(Float32)

    def _make_ratios(self, st, stage, lane, sigma) -> None:
        """Store the ratios of the lane's two tokens, for K and for V, a word of scales at a time.
        Each word is read anew: there are not enough registers for all words."""
        own, ratios = self.own(st), self.ratios(st)
        limits = [self._limits(x) for x in sigma]
        following = self.words_at(st, stage, 0)
        for q in range(self.quads):
            words, pairs = following, []  # of each token: ratios 0 and 2, 1 and 3
            if q + 1 < self.quads:
                following = self.words_at(st, stage, q + 1)
            for e in range(2):
                pairs.append([self._ratios_of(pair, *limits[e]) for pair in halves(words[e])])
                four = cute.make_rmem_tensor((4,), U32)
                for g in range(4):
                    pair = pairs[e][g % 2]
                    four[g] = select_bytes(pair, pair, 0x3232 if g > 1 else 0x1010)
                words_of_k = own[None, 2 * lane + e, stage].iterator
                at = words_of_k + cute.assume(4 * q, divby=4)
                cute.autovec_copy(four, cute.make_tensor(at, cute.make_layout(4)))
            for g in range(min(4, self.groups - 4 * q)):
                two = (pairs[e][g % 2] for e in range(2))
                both = select_bytes(*two, 0x7632 if g > 1 else 0x5410)
                ratios[lane // 4, lane % 4, 4 * q + g, stage] = both

    @staticmethod
    def _limits(sigma):
        """(the least byte whose ratio is not 0, less one; what takes a byte's ratio to
        ``RATIO_ONE``), each twice."""
        below = Int32(sigma) - RATIO_ONE
        least = Uint32(cutlass.max(below, Int32(0))) * Uint32(TWICE)
        return least, Uint32(below) * Uint32(TWICE)

    @staticmethod
    def _ratios_of(pair, least, below):
        """Two f16 of two bytes."""
        fields = larger_halves(pair, least) - below
        return small(fields << Uint32(F16_MANTISSA))

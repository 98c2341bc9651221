"""The special function unit of an H200: ex2, lg2 and rcp ``.approx.ftz.f32``, bit for bit.

PTX ISA 9.7.3.  The unit has the structure of Oberman and Siu, "A High-Performance Area-Efficient
Multifunction Interpolator" (ARITH-17, 2005): the leading bits i of a 23-bit argument select an
interval and its coefficients, the others are f, and

    y = floor(C0[i] + C1[i] f + C2[i] S(f))

with a squarer S that drops all partial products below a column and a constant in C0 that rounds.

How this is known: the coefficients, the dropped columns (below 19; 17 for rcp) and the widths (16
bits of C1, 10 of C2, C0 in steps of 2^-25 (ex2, rcp) or 2^-26 (lg2) plus one constant a function)
were solved for from all 2^23 mantissas of a binade of each function recorded on an H200 (lg2: two
binades, which show up to 36 fraction bits).  One pair (C1, C2) alone fits each interval.  The
result was then compared with the H200 for all 2^32 arguments of each function, subnormal numbers,
infinities, NaNs and both signs included: no bit differs (``python -m profiles.record_softgpu replay
mufu --all``, from hashes of whole binades).  Other GPUs may differ; that a B200's
unit is the same is a hypothesis, on which modules for sm_100a run.

Coefficients are in units of 2^-38 (C1: a step of f, 2^-23; C2: the lowest column kept).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
NAN = 0x7FFFFFFF  # what the unit returns for every NaN, as bits
MANTISSA = 0x7FFFFF
ONE = 0x3F800000

# One entry an interval: C0 / 2^step in hexadecimal, C1, C2.
_EX2 = """
    3,22713,494 5934a,22960,501 b361e,23210,506 10e8a5,23463,511 16ab12,23718,518 1c7d89,23977,521
    22603c,24238,527 285359,24502,532 2e570c,24768,541 346b81,25038,546 3a90e8,25311,551
    40c775,25586,559 470f51,25865,564 4d68b0,26147,568 53d3c3,26431,577 5a50b9,26719,583
    60dfc5,27010,589 67811a,27304,596 6e34e9,27602,600 74fb6a,27902,609 7bd4cc,28206,615
    82c148,28513,622 89c10e,28824,627 90d459,29138,633 97fb5d,29455,641 9f3651,29776,647
    a6856d,30100,655 ade8ea,30428,661 b560fe,30759,670 bcede5,31094,677 c48fda,31432,686
    cc4713,31775,691 d413cf,32121,699 dbf64b,32471,705 e3eec1,32824,715 ebfd6d,33182,721
    f42291,33543,730 fc5e6a,33908,739 104b137,34277,748 10d1b36,34651,753 1159cab,35028,763
    11e35d6,35409,773 126e6fa,35795,779 12fb057,36185,787 1389233,36579,796 1418cd2,36977,806
    14aa079,37380,813 153cd6d,37787,822 15d13f7,38198,833 166745a,38614,842 16feee1,39035,849
    17983d6,39460,858 1833380,39889,870 18cfe2a,40324,877 196e41f,40763,887 1a0e5ad,41207,896
    1ab0320,41655,909 1b53cc4,42109,917 1bf92ea,42568,925 1ca05e0,43031,938 1d495f8,43500,946
    1df4382,43973,959 1ea0ecf,44452,969 1f4f834,44936,980
"""
_LG2 = """
    7,47272,-1454 16e79a,46545,-1410 2d75b0,45840,-1370 43acea,45156,-1330 598fe5,44492,-1292
    6f2112,43847,-1254 8462cc,43221,-1220 995753,42612,-1184 ae00db,42020,-1152 c26165,41444,-1118
    d67af8,40884,-1088 ea4f79,40339,-1060 fde0bc,39809,-1036 111307f,39292,-1008
    124407f,38788,-982 1371254,38297,-958 149a789,37818,-932 15c01ab,37351,-910 16e2225,36896,-890
    1800a5c,36451,-866 191bbaf,36018,-850 1a33763,35594,-828 1b47ec1,35180,-808 1c592fe,34776,-792
    1d67542,34380,-770 1e726ad,33994,-754 1f7a85a,33616,-736 207fb55,33247,-722 21820a2,32886,-708
    2281945,32532,-692 237e62a,32186,-678 247883e,31847,-662 257006d,31516,-652 2664f90,31191,-638
    2757685,30872,-622 2847617,30561,-614 2934f10,30255,-600 2a20236,29955,-586 2b0904d,29662,-578
    2befa03,29374,-566 2cd4014,29091,-552 2db6331,28814,-542 2e96400,28542,-532 2f74320,28276,-524
    305013d,28014,-514 3129ef1,27757,-506 3201cc9,27505,-498 32d7b60,27257,-488 33abb44,27013,-476
    347dd03,26774,-468 354e124,26540,-464 361c826,26309,-454 36e9296,26082,-446 37b40e7,25859,-438
    387d39b,25640,-432 3944b21,25424,-422 3a0a7ef,25213,-418 3acea7d,25004,-408 3b9133a,24799,-402
    3c52288,24598,-398 3d118dd,24399,-390 3dcf693,24204,-384 3e8bc15,24012,-378 3f469c4,23823,-372
"""
_RCP = """
    2000000,-65534,1013 1f80fe2,-64522,989 1f03f06,-63533,966 1e88cb5,-62567,945
    1e0f83e,-61622,923 1d980f8,-60699,902 1d22638,-59797,883 1cae75a,-58914,863 1c3c3c4,-58051,845
    1bcbade,-57207,827 1b5cc11,-56381,809 1aef6cb,-55572,791 1a83a85,-54781,774 1a196b4,-54007,758
    19b0ad3,-53249,742 1949662,-52507,727 18e38e5,-51780,711 187f1e2,-51068,696 181c0e2,-50371,682
    17ba572,-49688,669 1759f23,-49019,656 16fad89,-48363,642 169d037,-47721,631 16406ca,-47091,618
    15e50d9,-46473,605 158ae06,-45868,594 1531dee,-45274,582 14da036,-44692,572 1483486,-44121,561
    142da81,-43560,549 13d91d5,-43011,540 1385a2b,-42471,529 1333335,-41942,519 12e1ca1,-41423,510
    1291620,-40913,501 1241f6b,-40412,490 11f3833,-39921,482 11a6034,-39439,474 1159724,-38965,465
    110dcc1,-38500,457 10c30c5,-38043,449 10792f1,-37594,441 1030305,-37153,433 fe80c2,-36720,426
    fa0bea,-36294,418 f5a443,-35876,412 f14992,-35464,403 ecfb9e,-35060,397 e8ba31,-34663,390
    e48511,-34272,383 e05c0c,-33888,377 dc3ef0,-33511,371 d82d85,-33140,366 d4279c,-32774,358
    d02d04,-32415,353 cc3d8e,-32062,348 c8590d,-31714,341 c47f52,-31373,337 c0b02e,-31036,331
    bceb78,-30705,326 b93107,-30379,320 b580b0,-30059,316 b1da49,-29743,310 ae3da9,-29432,305
    aaaaac,-29127,302 a7212c,-28826,297 a3a100,-28529,291 a02a04,-28237,287 9cbc17,-27950,283
    995712,-27667,279 95fad6,-27388,274 92a73f,-27114,271 8f5c2b,-26843,266 8c197b,-26577,263
    88df0e,-26314,258 85acc6,-26056,256 828285,-25801,251 7f602a,-25550,248 7c459a,-25302,243
    7932b6,-25058,240 762764,-24818,237 732388,-24581,233 702705,-24348,231 6d31c1,-24117,226
    6a43a1,-23890,223 675c8d,-23667,222 647c6b,-23446,218 61a322,-23228,214 5ed09a,-23014,212
    5c04bb,-22802,208 593f6b,-22593,205 568098,-22388,204 53c827,-22184,199 511604,-21984,197
    4e6a19,-21787,196 4bc450,-21592,193 492494,-21399,189 468ad1,-21209,186 43f6f3,-21022,184
    4168e3,-20837,182 3ee092,-20655,180 3c5de9,-20475,178 39e0d7,-20297,175 37694a,-20122,173
    34f72e,-19949,171 328a71,-19778,169 302304,-19609,166 2dc0d3,-19443,165 2b63ce,-19278,161
    290be4,-19116,160 26b904,-18956,159 246b1f,-18797,155 222224,-18641,154 1fde04,-18487,153
    1d9eaf,-18334,150 1b6418,-18184,149 192e2c,-18035,147 16fcdf,-17888,145 14d024,-17743,143
    12a7e8,-17600,143 108423,-17458,140 e64c4,-17318,138 c49bd,-17180,137 a3301,-17043,135
    82084,-16908,133 61239,-16775,132 40811,-16643,131 20203,-16513,130
"""


class _Interpolator:
    """Coefficient tables of one function.

    Args:
        text: the entries above.
        low: bits of f.
        column: lowest column of f^2 that the squarer keeps.
        step, rounding: C0 = entry * 2^step + rounding.
    """

    def __init__(self, text: str, low: int, column: int, step: int, rounding: int) -> None:
        rows = [entry.split(",") for entry in text.split()]
        self.low, self.mask = low, (1 << low) - 1
        self.c0 = np.array([(int(r[0], 16) << step) + rounding for r in rows], np.int64)
        self.c1 = np.array([int(r[1]) for r in rows], np.int64)
        self.c2 = np.array([int(r[2]) for r in rows], np.int64)
        self.square = _truncated_square(low, column)

    def __call__(self, fraction: I64) -> I64:
        """Values in units of 2^-38 for 23-bit fractions."""
        i, f = fraction >> self.low, fraction & self.mask
        value: I64 = self.c0[i] + self.c1[i] * f + self.c2[i] * self.square[f]
        return value

    def interval(self, i: int) -> I64:
        """Values for all fractions of an interval."""
        value: I64 = self.c0[i] + self.c1[i] * np.arange(1 << self.low) + self.c2[i] * self.square
        return value


def _truncated_square(bits: int, column: int) -> I64:
    """Squares of 0 .. 2^bits - 1 from the partial products of weight 2^column and above."""
    f = np.arange(1 << bits)
    total = np.zeros(1 << bits, np.int64)
    for i in range(bits):
        bit = f >> i & 1
        if 2 * i >= column:
            total += bit << (2 * i - column)
        for j in range(max(i + 1, column - i - 1), bits):
            total += (bit & f >> j) << (i + j + 1 - column)
    return total


@lru_cache(maxsize=1)
def _ex2_table() -> NDArray[np.int32]:
    """2^(i 2^-23) - 1 in units of 2^-23, plus the bits of 1.0; a table because ex2 is hot."""
    unit = _Interpolator(_EX2, 17, 19, 13, 6114)
    table = np.empty((len(unit.c0), 1 << unit.low), np.int32)
    for i, row in enumerate(table):  # an interval fits a cache: 7 times quicker than all at once
        row[:] = (unit.interval(i) >> 15) + ONE
    return table.reshape(-1)


@lru_cache(maxsize=1)
def _lg2() -> _Interpolator:
    return _Interpolator(_LG2, 17, 19, 12, 837)


@lru_cache(maxsize=1)
def _rcp() -> _Interpolator:
    return _Interpolator(_RCP, 16, 17, 13, 2023)


def _with_nan(x: F32, bits: NDArray[Any]) -> F32:
    """uint32 results, NaN where x is NaN."""
    out = bits.astype(np.uint32)
    nan = x != x
    if nan.any():
        out[nan] = NAN
    return out.view(np.float32)


def ex2(x: F32) -> F32:
    """ex2.approx.ftz.f32.

    |x| is cut to 23 fraction bits and a negative one complemented (its integer values excepted).
    """
    with np.errstate(invalid="ignore"):
        wide = np.where(x < -126, -127.0, np.fmin(x, 128.0)) * 2.0**23
        fixed = wide.astype(np.int64)
        fixed -= (fixed < 0) & ((fixed & MANTISSA) != 0)
        bits = _ex2_table()[fixed & MANTISSA] + (fixed & ~MANTISSA)
        return _with_nan(x, bits)


def lg2(x: F32) -> F32:
    """lg2.approx.ftz.f32: exponent + log2(mantissa) with 36 fraction bits, cut to 24 bits.

    A negative sum is complemented, not negated: lg2(0.25) is one step above -2.  1 gives 0.
    """
    u = x.view(np.uint32).astype(np.int64)
    total = (_lg2()(u & MANTISSA) >> 2) + ((u >> 23) - 127 << 36)
    magnitude = np.where(total < 0, ~total, total).astype(np.float64) * 2.0**-36
    cut = (magnitude.view(np.uint64) & np.uint64(0xFFFFFFFFE0000000)).view(np.float64)
    y = np.where(total < 0, -cut, cut).astype(np.float32)
    if ((u - 0x00800000) >> 23 >= 254).any() or (u < 0x00800000).any() or (u == ONE).any():
        y[u == ONE] = 0.0
        y[u & 0x7F800000 == 0] = -np.inf  # zeros and subnormals of both signs
        y[u == 0x7F800000] = np.inf
        y[(u >> 31 == 1) & (u & 0x7F800000 != 0)] = np.nan
        y[u & 0x7FFFFFFF > 0x7F800000] = np.nan
        return np.where(np.isnan(y), np.uint32(NAN), y.view(np.uint32)).view(np.float32)
    return y


def rcp(x: F32) -> F32:
    """rcp.approx.ftz.f32: a subnormal result is zero."""
    u = x.view(np.uint32).astype(np.int64)
    biased = u & 0x7F800000
    bits = (_rcp()(u & MANTISSA) >> 15) + (0x7E800000 - biased)
    bits = np.where(bits < 0x00800000, 0, bits)
    bits = np.where(biased == 0, 0x7F800000, np.where(biased == 0x7F800000, 0, bits))
    return _with_nan(x, bits | (u & 0x80000000))


FUNCTIONS = {"ex2": ex2, "lg2": lg2, "rcp": rcp}

"""Sparse MLA decode for SM90 over 656-byte rows, pipeline ``mix8``: as ``mix16``, but content Q.K
is an FP8 product of K's bytes as they lie in the ring, and of a query that is rounded to e4m3.

    S^T = ((K_0 Q_0^T s_0 / s_1 + K_1 Q_1^T) s_1 + RoPE) + (K_2 Q_2^T s_2 / s_3 + K_3 Q_3^T) s_3

K_g, Q_g are 128 channels, s_g the token's scales.  Both operands of a content WGMMA are in shared
memory: no ldmatrix, no conversion, no ratio in 16 bits.  Two chains, so that the tensor core has
one while the other's accumulator is multiplied.  RoPE is BF16, as in ``mix16``; so is all behind
S^T: softmax, votes, P.V (mix16.py, mix16_overlap.py).

A row of the query times 2^p, p such that its largest content channel is in [2^7, 2^8), is rounded
to e4m3, RoPE times the same: what that and FP8 sums cost is in docs/numerics.md.

Roles as mix16.py's: wg 0 gathers; wg 1 S^T, softmax; wg 2, 3 Q -> e4m3, P.V.

Timeline of tile i (one stage of the K ring)
    softmax       | Q.K, groups 0, 2 | times ratios, groups 1, 3 | RoPE i: P i-1 announced | exp2 ..
    P.V           | V^T of i-1 | wait P i-1 | 8 x (2 WGMMAs, convert the next) | free i-1

Shared memory as mix16.py's: Q comes in BF16, and its e4m3 take the first half of each 128 channels'
place.  Registers as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...blocks import budget as bud
from ...blocks import compat
from ...blocks.compat import wgmma_fence
from ...blocks.types import BF16, F8, U32
from ...entry.entries import BytesEntry
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.ds_mla import GROUPS
from ...load.work_list import LOG2E
from ..decode import Decode, infeasible
from ..fragments import padded_size, row_position
from ..wgmma import issue_words, low_word
from . import mix16
from .mix16_overlap import softmax_of
from .mix16_parts import (
    EXPONENT_BIAS,
    HALF,
    LINE,
    GroupScales,
    QueryRows,
    larger_halves,
    times_bf16,
)
from .mix16_softmax import MixSoftmax

if TYPE_CHECKING:
    from ...spec import VariantSpec

TERM_TOP = 7  # log2 of the binade of a row's largest content channel: e4m3 has at most 448
NO_NUMBER = 255  # exponent field of infinities and NaN
LEAST_RATIO, LEAST_SCALE = 2.0**-40, 2.0**-100  # of a token's largest scale; of any
CHAIN = D // 2  # content channels of an accumulator


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.p_terms > 1:
        return "mix8 has a P of 16 bits: one term"
    return infeasible(spec, 2, budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Budget of ``mix16``, but with FP8 products of content."""
    same = mix16.budget(spec)
    mmas = (bud.Mma("Q.K content", TILE, spec.row_tile, CHAIN, "e4m3"), *same.mmas[1:])
    return replace(same, mmas=mmas if same.mmas else ())


def build(spec: VariantSpec):
    parts = mix16.parts_of(spec, queries=QueryE4m3, scales=FencedScales)
    pipeline = mix16.Mix16(parts, softmax_of(spec, Fp8Scores)(parts), budget(spec))
    return BytesEntry.exported(Decode(spec, pipeline))


@compat.dsl_user_op
def e4m3_word(a0, a1, a2, a3, *, loc=None, ip=None):
    """Four fp32 -> a word of their e4m3."""
    return compat.inline_ptx(
        "{\n.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, {$r1}, {$r0};\n"
        "cvt.rn.satfinite.e4m3x2.f32 hi, {$r3}, {$r2};\nmov.b32 {$w0}, {lo, hi};\n}",
        write_only_types=[Uint32], read_only_args=[a0, a1, a2, a3], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def larger(a, b, *, loc=None, ip=None):
    """The larger of two fp32; NaN if one is: a scale that is no number makes its readers none."""
    return compat.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32], read_only_args=[a, b], loc=loc, ip=ip,
    )  # fmt: skip


class QueryE4m3(QueryRows):
    """Row tiles of Q: BF16 as they come -> e4m3 content, in the first of the two column blocks that
    128 channels had, BF16 RoPE, and the rows' factors."""

    @cute.jit
    def convert(self, st, stage, call, group):
        """Convert the eight rows from 8 ``group`` on of a Q tile in place, as the base class does,
        but to e4m3.  A row's four lanes share each 128 channels, so they store only once all of
        them have read."""
        lane = cute.arch.lane_idx()
        row, part = group * 8 + lane % 8, lane // 8
        block = const_expr(self.rows * 128)
        line0 = st.qc.data_ptr().toint() + stage * (self.rows * self.channels * 2) + row * 128
        at = line0 + part * block
        largest = Uint32(compat.opaque(Int32(0)))
        for x in cutlass.range(4, unroll=1):
            line = self._line(at, x // 2, part, block)
            largest = larger_halves(largest, self._largest(self._half(line, x % 2, lane)))
        at_r, rope = self._rope_words(st, stage, row, part, lane)
        field = self._exponent(largest, self._largest(rope))
        power = (Uint32(2 * EXPONENT_BIAS + TERM_TOP) - field) << Uint32(7)  # of bf16
        power = power | (power << Uint32(16))
        self._store_rope(at_r, lane, rope, 2 * part, power)
        if part == 0:
            factors = st.factors.get_tensor(cute.make_layout(padded_size(self.rows)))
            back = ((field - Uint32(TERM_TOP)) << Uint32(23)).bitcast(Float32)  # 2^-p
            # of an infinity, which e4m3 has not, the row is NaN
            back = Float32(cutlass.select_(field == Uint32(NO_NUMBER), Float32.nan, back))
            factors[row_position(row, self.rows)] = call.softmax_scale * LOG2E * back
        for g in cutlass.range(GROUPS, unroll=1):
            base = line0 + g * (2 * block)
            source, first = base + part // 2 * block, part % 2 * HALF
            words = [
                times_bf16(four[w], power)
                for four in self._words(source, lane, HALF, first)
                for w in range(4)
            ]
            cute.arch.sync_warp()  # the row's other lanes have read theirs
            for c in cutlass.range_constexpr(HALF // 2):
                four = cute.make_rmem_tensor((4,), U32)
                for w in cutlass.range_constexpr(4):
                    pair = words[8 * c + 2 * w], words[8 * c + 2 * w + 1]
                    four[w] = e4m3_word(*(x for word in pair for x in self._halves(word)))
                cute.autovec_copy(four, self._chunk(base, lane, HALF // 2 * part + c))

    @staticmethod
    def _halves(word):
        """Two bf16 in fp32."""
        return (word << Uint32(16)).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)


class FencedScales(GroupScales):
    """``GroupScales`` beside content that WGMMAs read."""

    @cute.jit
    def _clear(self, st, stage, s):
        GroupScales._clear(self, st, stage, s)
        cute.arch.fence_proxy("async.shared", space="cta")


class Fp8Scores(MixSoftmax):
    """The softmax role, with content Q.K in FP8."""

    def tools(self, st, layouts):
        """Low words of the descriptors of content and RoPE of K, of Q."""
        return tuple(low_word(field) for field in (st.kc, st.kr, st.qc, st.qr))

    def issue_group(self, acc, words, stage, group: int, accumulate: bool) -> None:
        """Products of a group's channels, committed."""
        wgmma_fence()
        key = words[0] + stage * (TILE * D // 16) + group * (TILE * LINE // 16)
        query = words[2] + 2 * group * (self.rows_cta * LINE // 16)
        for x in range(4):
            issue_words(acc, key + 2 * x, query + 2 * x, F8, accumulate=accumulate or x > 0)
        warpgroup.commit_group()

    def issue_rope_words(self, acc, words, stage) -> None:
        """RoPE's products on top of a sum, committed."""
        wgmma_fence()
        key, query = words[1] + stage * (TILE * LINE // 16), words[3]
        for x in range(4):
            issue_words(acc, key + 2 * x, query + 2 * x, BF16, accumulate=True)
        warpgroup.commit_group()

    def scales_of_chains(self, st, stage):
        """Factors of the chains for each of the thread's two tokens: (s_0 / s_1, s_1, s_2 / s_3,
        s_3)."""
        out = []
        for four in self.scales_of(st, stage):
            top = cute.arch.fmax(cute.arch.fmax(four[0], four[1]), cute.arch.fmax(four[2], four[3]))
            least = cute.arch.fmax(top * LEAST_RATIO, Float32(LEAST_SCALE))
            s = [larger(four[g], least) for g in range(GROUPS)]
            first, second = (s[g] * cute.arch.rcp_approx(s[g + 1]) for g in (0, 2))
            out.append((first, s[1], second, s[3]))
        return out

    def multiply(self, acc, own, which: int) -> None:
        """A chain's sum times a factor of its tokens."""
        for v in range(self.fragment.values):
            acc[v] = acc[v] * own[self.fragment.token(v)][which]

    @cute.jit
    def scores(self, st, tools, q_stage, stage, wwarp, lane, sigma):
        """S^T of 64 rows."""
        a = cute.make_rmem_tensor((self.fragment.values,), Float32)
        b = cute.make_rmem_tensor((self.fragment.values,), Float32)
        self.issue_group(a, tools, stage, 0, False)
        self.issue_group(b, tools, stage, 2, False)
        own = self.scales_of_chains(st, stage)
        warpgroup.wait_group(1)
        self.multiply(a, own, 0)
        self.issue_group(a, tools, stage, 1, True)
        warpgroup.wait_group(1)
        self.multiply(b, own, 2)
        self.issue_group(b, tools, stage, 3, True)
        warpgroup.wait_group(1)
        self.free_first_half(st, self.ending[1])
        self.multiply(a, own, 1)
        self.issue_rope_words(a, tools, stage)
        self.scores_issued(st)
        warpgroup.wait_group(1)
        self.multiply(b, own, 3)
        warpgroup.wait_group(0)
        for v in cutlass.range_constexpr(self.fragment.values):
            b[v] = b[v] + a[v]
        return b

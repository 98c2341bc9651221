"""Rows of 656 bytes (``dsl_kernels.ds_mla``) as append writes them and fetch reads them.

A warp owns a token, whose channels lie in it as ``quant.load_row`` leaves them: of chunk j a lane
holds V consecutive channels from (j * 32 + lane) * V on (V = 8 of 16 bits, 4 of fp32), all of one
group of 128.  So lanes 0 to 15 and 16 to 31 have a group of each of two 16-bit chunks, and all 32
have one of each of four fp32 chunks; a lane needs the scale of its own group alone.

The rule of append, in fp32 with IEEE quotients (vLLM's, byte for byte; powers of two are rounded
up to):

    scale = max(amax / 448, 2^-126)        content = e4m3(c / scale)        RoPE as it is

c * (1 / scale) would do for all but ties of e4m3, where an error in the last bit decides.  A token
with a NaN or an infinity becomes NaN everywhere, scales and RoPE too, as in the other FP8 format.

Fetch multiplies.  A scale of 0, which other writers leave for a group of zeros, says that all of
its group is 0, whatever the content's bytes are: 0 / 0 made them NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute

from .. import compat
from ..dims import E4M3_MAX, QK_ROPE_HEAD_DIM
from ..ds_mla import GROUP, GROUPS, LEAST_SCALE, ROPE_AT, ROW_BYTES, SCALES_AT
from . import quant
from .stored import Stores, Words

ROPE_BYTES = 2 * QK_ROPE_HEAD_DIM // quant.WARP  # of a lane: one word
FRACTION = 0x7FFFFF  # bits of an fp32 number below its exponent
NAN_ROPE = 0x7FFF7FFF  # two bf16
# Residuals of a quotient by a scale below this would be subnormal: both sides are scaled up.
SMALL, LIFT = 2.0**-64, 2.0**64


class Rows656(NamedTuple):
    """A cache to read: see ``stored``."""

    kv: cute.Tensor  # u8 (pages, P, 1, 656)

    heads = False  # whether rows have a dimension of heads
    shares_pages = False  # whether the tokens that a warp fetches lie in one page: P may be odd

    @property
    def shape(self) -> Any:
        """(pages, P, ...)"""
        return self.kv.shape

    def row(self, page: Any, offset: Any, head: Any, lane: Any, dt: Any) -> tuple[Any, Any, Any]:
        """Where this lane reads a token's content, RoPE and scales; ``dt``: what it becomes."""
        row = _row(self.kv, page, offset)
        content = row + lane * quant.lane_channels(dt)
        return content, row + (ROPE_AT + lane * ROPE_BYTES), row + SCALES_AT

    def load(self, at: tuple[Any, Any, Any], dt: Any) -> Words:
        """Issues the loads of a token's content and RoPE."""
        vec = quant.lane_channels(dt)
        chunks = [
            compat.load_words(at[0] + j * quant.WARP * vec, vec // 4, **compat.STRONG)
            for j in range(quant.content_chunks(dt))
        ]
        return chunks, compat.load_words(at[1], 1, **compat.STRONG)[0]

    def load_scales(self, at: tuple[Any, Any, Any], n: int) -> list[Any]:
        """Issues the load of a token's scales, as words; the same in all lanes."""
        assert n == 1  # of the next token they lie 656 bytes further
        return [compat.load_words(at[2], GROUPS, **compat.STRONG)]

    def scale_of(self, words: list[Any], lane: Any, dt: Any) -> list[Any]:
        """The scale of each chunk's channels in this lane."""
        if _lanes_of_group(dt) == quant.WARP:
            return [w.bitcast(Float32) for w in words]
        upper = lane >= _lanes_of_group(dt)
        pairs = zip(words[::2], words[1::2], strict=True)
        return [Uint32(cutlass.select_(upper, b, a)).bitcast(Float32) for a, b in pairs]

    def content_words(self, words: list[Any], scale: list[Any], chunk: int, dt: Any) -> list[Any]:
        """Loaded content of a chunk as words of ``dt``."""
        own = scale[chunk]
        words = [Uint32(cutlass.select_(own != Float32(0.0), w, Uint32(0))) for w in words]
        return quant.pack([v * own for v in quant.unpack_e4m3(words)], dt)

    def rope_words(self, word: Any, scale: list[Any], dt: Any) -> list[Any]:
        """Loaded RoPE as words of ``dt``."""
        return [word] if dt is BFloat16 else quant.pack(quant.to_f32([word], BFloat16), dt)


class Target656(NamedTuple):
    """A cache to write: see ``stored``."""

    kv: cute.Tensor  # u8 (pages, P, 1, 656)
    power_of_two: Int32  # 1: scales are rounded up to powers of two; 0: they are not

    @property
    def shape(self) -> Any:
        """(pages, P, ...)"""
        return self.kv.shape

    def quantised(
        self, chunks: list[list[Any]], rope_words: list[Any], dt: Any, _slot: Any, lane: Any
    ) -> Stores:
        """Quantises a token of ``dt``, in which all lanes of the warp take part."""
        amax = _group_amax(chunks, dt)
        widest = _largest([*amax, *quant.to_f32(rope_words, dt)])
        bad = cute.arch.vote_any_sync(widest >= Uint32(quant.INF_BITS))
        scales = [_scale(a, self.power_of_two, bad) for a in amax]
        content = [
            quant.pack_e4m3(_quotients(words, scale, dt))
            for words, scale in zip(chunks, scales, strict=True)
        ]
        if dt is not BFloat16:
            rope_words = quant.pack(quant.to_f32(rope_words, dt), BFloat16)
        rope = Uint32(cutlass.select_(bad, Uint32(NAN_ROPE), rope_words[0]))
        vec, lanes = quant.lane_channels(dt), _lanes_of_group(dt)

        def store(at: Any) -> None:
            row = _row(self.kv, *at)
            for j, words in enumerate(content):
                compat.store_words(row + (lane * vec + j * quant.WARP * vec), words)
            compat.store_words(row + (ROPE_AT + lane * ROPE_BYTES), [rope])

        def store_scales(at: Any) -> None:
            to, words = _row(self.kv, *at) + SCALES_AT, [s.bitcast(Uint32) for s in scales]
            if lanes == quant.WARP:
                compat.store_words(to, words)
                return
            for j, word in enumerate(words):
                compat.store_words(to + 4 * (j * (quant.WARP // lanes) + lane // lanes), [word])

        # the first lane of each group
        return Stores(store, lambda: lane % lanes == 0, store_scales)


def fakes() -> dict[str, Any]:
    """Fake of a cache by argument name: pages lie a multiple of 16 bytes apart, rows side by
    side."""
    shape = (compat.sym(name="pages"), compat.sym(name="P"), 1, ROW_BYTES)
    stride = (compat.sym64(compat.VECTOR_BYTES), ROW_BYTES, ROW_BYTES, 1)
    return {"kv": compat.strided(compat.DTYPES["u8"], shape, stride)}


def _row(kv: cute.Tensor, page: Any, offset: Any) -> Any:
    """Where a token's row begins."""
    return kv.iterator + (Int64(page) * kv.stride[0] + Int64(offset) * ROW_BYTES)


def _lanes_of_group(dt: Any) -> int:
    return GROUP // quant.lane_channels(dt)


def _largest(values: list[Any]) -> Any:
    """The largest absolute value as bits; NaN and Inf win."""
    top = values[0].bitcast(Uint32) & Uint32(0x7FFFFFFF)
    for v in values[1:]:
        top = cutlass.max(top, v.bitcast(Uint32) & Uint32(0x7FFFFFFF))
    return top


def _group_amax(chunks: list[list[Any]], dt: Any) -> list[Any]:
    """The largest absolute value in the group of each chunk's channels in this lane, as fp32.

    Of 16 bits two chunks share a word on their way through the lanes of a group.
    """
    if dt.width == 32:
        tops = [_largest([w.bitcast(Float32) for w in words]) for words in chunks]
        return [quant.warp_max(top).bitcast(Float32) for top in tops]
    low, high = (_max_pairs([w & Uint32(0x7FFF7FFF) for w in words]) for words in chunks)
    both = _max_pairs(
        [(low & Uint32(0xFFFF)) | (high << 16), (low >> 16) | (high & Uint32(0xFFFF0000))]
    )
    step = _lanes_of_group(dt) // 2
    while step:
        both = _max_pairs([both, cute.arch.shuffle_sync_bfly(both, step)])
        step //= 2
    return quant.to_f32([both], dt)


def _max_pairs(words: list[Any]) -> Any:
    """Maxima of the two 16-bit halves."""
    top = words[0]
    for w in words[1:]:
        top = compat.inline_ptx(
            "max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[top, w]
        )
    return top


def _scale(amax: Any, power_of_two: Any, bad: Any) -> Any:
    """The scale of a group; NaN where ``bad``."""
    quotient = _ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", amax, Float32(E4M3_MAX))
    bits = cutlass.max(quotient.bitcast(Uint32), Float32(LEAST_SCALE).bitcast(Uint32))
    below = Uint32(power_of_two) * Uint32(FRACTION)
    bits = (bits + below) & ~below
    return Uint32(cutlass.select_(bad, Uint32(quant.NAN_BITS), bits)).bitcast(Float32)


def _quotients(words: list[Any], scale: Any, dt: Any) -> list[Any]:
    """Values / scale, each the fp32 number nearest to it.

    From 16 bits by way of the reciprocal and the residual: nearest for each pair of such numbers
    (tests/kernels/test_ds_mla.py tries them all) as long as the residual is exact.
    """
    values = quant.to_f32(words, dt)
    if dt.width == 32:
        return [_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", v, scale) for v in values]
    if dt is BFloat16:  # scales of f16 are 2^-126 or above 2^-33
        lift = Float32(cutlass.select_(scale < Float32(SMALL), Float32(LIFT), Float32(1.0)))
        values, scale = [v * lift for v in values], scale * lift
    inv = Float32(1.0) / scale
    minus, found = -inv, []
    for v in values:
        near = _ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", v, inv)
        beyond = _fma(near, scale, -v)  # in this order zeros keep their sign
        found.append(_fma(beyond, minus, near))
    return found


def _fma(x: Any, y: Any, z: Any) -> Any:
    return _ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", x, y, z)


def _ptx(text: str, *values: Any) -> Any:
    """An fp32 instruction whose rounding is written down."""
    return compat.inline_ptx(text, write_only_types=[Float32], read_only_args=list(values))

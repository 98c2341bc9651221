"""Formats that are bytes (``formats``) as append writes them; ``byte_formats.py`` says how a
token lies in a warp, and how fetch reads it.

The rule, in fp32 with IEEE quotients (vLLM's, byte for byte; powers of two are rounded up to):

    scale = max(amax / 448, least)         content = e4m3(c / scale)        RoPE as it is

A token with a NaN or an infinity becomes NaN everywhere, scales and RoPE too, as in format ``fp8``.
Bytes behind a token's scales are 0.

No quotient is an IEEE division: that branches, for exponents at both ends, and of a decode step's
few tokens a warp has nothing else to do meanwhile.  Instead

    amax / 448     the product by 1 / 448 and its residual: nearest, because 1 / 448 is rounded to
                   nearest (Markstein); subnormal ones may be off, but are below ``least``
    c / scale      c * h * (1 + e) with h the reciprocal cut off and e = 1 - scale * h >= 0, two
                   products and one FMA: nearest for each pair of 16-bit numbers
                   (tests/kernels/test_ds_mla.py tries them all), and no intermediate result is
                   subnormal where the quotient is not.  e < 0 would lose the sign of zeros.

c * (1 / scale) would do for all but ties of e4m3, where an error in the last bit decides; where
scales cannot but be powers of two (``ue8m0``) it is the quotient.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Uint32, cute

from ..blocks import compat, quant
from ..blocks.rounding import fma
from ..formats.dims import E4M3_MAX
from ..formats.format import Format
from .byte_formats import EXPONENT_AT, OfFormat, lanes_of_group, source_of, store_where
from .stored import Stores

FRACTION = 0x7FFFFF  # bits of an fp32 number below its exponent
LARGEST_POWER = 254 << EXPONENT_AT  # minus bits of 2^n: bits of 2^-n
NAN_ROPE = 0x7FFF7FFF  # two bf16
ONE_BY_MAX = 1.0 / E4M3_MAX  # rounded to fp32 where it is used


class _Writes(NamedTuple):
    kv: cute.Tensor  # u8 (pages, P, 1, bytes of a token)
    power_of_two: Int32  # 1: fp32 scales are rounded up to powers of two; 0: they are not


class Target(_Writes, OfFormat):
    """A cache to write: see ``stored``.  ``target_of`` makes the class of a format."""

    def quantised(
        self, chunks: list[list[Any]], rope_words: list[Any], dt: Any, _slot: Any, lane: Any
    ) -> Stores:
        """Quantises a token of ``dt``, in which all lanes of the warp take part."""
        own, lanes = self.own, lanes_of_group(self.own, dt)
        tops = [_top(words, dt) for words in chunks]
        # asked of a lane's own channels: the answer comes while groups look for their largest
        seen = [*tops, _top(rope_words, dt)] if rope_words else tops
        bad = cute.arch.vote_any_sync(_has_nonfinite(seen, dt))
        powers = Int32(1) if own.powers else self.power_of_two
        amax = _group_amax(tops, dt, lanes)
        scales = [_scale(a, own.least_scale, powers, bad) for a in amax]
        divided = _by_powers if own.powers else _quotients
        content = [
            quant.pack_e4m3(divided(words, scale, dt))
            for words, scale in zip(chunks, scales, strict=True)
        ]
        rope = None
        if own.rope is not None:
            if dt is not BFloat16:
                rope_words = quant.pack(quant.to_f32(rope_words, dt), BFloat16)
            rope = Uint32(cutlass.select_(bad, Uint32(NAN_ROPE), rope_words[0]))
        packed = _packed_powers(own, scales, lane, dt) if own.powers else None

        def fields(at: Any) -> tuple[Any, Any, Any]:
            return source_of(own)(self.kv).row(*at, None, lane, dt)

        def store(at: Any) -> None:
            to, to_rope, _ = fields(at)
            for j, words in enumerate(content):
                chunk = to + j * quant.WARP * quant.lane_channels(dt) if j else to
                left = quant.lanes_in(dt, j, own.content.count)
                if left == quant.WARP:
                    compat.store_words(chunk, words)
                else:
                    store_where(lane < left, chunk, words)
            if rope is not None:
                compat.store_words(to_rope, [rope])

        def store_scales(at: Any) -> None:
            to = fields(at)[2]
            if packed is not None:
                compat.store_words(to, packed)
                return
            words = [s.bitcast(Uint32) for s in scales]
            if lanes == quant.WARP:
                compat.store_words(to, words)
                return
            for j, word in enumerate(words):
                compat.store_words(to + 4 * (j * (quant.WARP // lanes) + lane // lanes), [word])

        if packed is not None:
            return Stores(store, lambda: lane == 0, store_scales)
        # the first lane of each group
        return Stores(store, lambda: lane % lanes == 0, store_scales)


@functools.cache
def target_of(format: Format) -> type[Target]:
    """The class of caches to write."""
    return type("Target", (Target,), {"own": format})


def _packed_powers(own: Format, scales: list[Any], lane: Any, dt: Any) -> list[Any]:
    """The words of a token's scales in every lane, the bytes behind them 0."""
    lanes, words = lanes_of_group(own, dt), [Uint32(0)] * (own.scale_bytes // 4)
    each = quant.WARP // lanes  # groups of a chunk
    for j, scale in enumerate(scales):
        byte = scale.bitcast(Uint32) >> Uint32(EXPONENT_AT)
        left = quant.lanes_in(dt, j, own.content.count)
        if left < quant.WARP:
            byte = Uint32(cutlass.select_(lane < left, byte, Uint32(0)))
        group = lane // lanes + j * each % 4
        for w in range(-(-(j * each % 4 + each) // 4)):
            mine = byte << Uint32(8 * (group % 4))
            if each > 4:
                mine = Uint32(cutlass.select_(group // 4 == w, mine, Uint32(0)))
            words[j * each // 4 + w] = words[j * each // 4 + w] | mine
    return [cute.arch.warp_redux_sync(word, "or") for word in words]


def _top(words: list[Any], dt: Any) -> Any:
    """A lane's largest absolute values as bits, NaN and Inf above all: of 16 bits one of the lower
    halves of words and one of the upper."""
    mask, larger = (0x7FFFFFFF, cutlass.max) if dt.width == 32 else (0x7FFF7FFF, _max_pairs)
    return functools.reduce(larger, [w & Uint32(mask) for w in words])


def _max_pairs(x: Any, y: Any) -> Any:
    """Maxima of the two 16-bit halves."""
    return compat.inline_ptx(
        "max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[x, y]
    )


def _has_nonfinite(tops: list[Any], dt: Any) -> Any:
    """True if a NaN or an infinity is among ``tops``, a lane's results of ``_top``."""
    if dt.width == 32:
        return functools.reduce(cutlass.max, tops) >= Uint32(quant.INF_BITS)
    both = functools.reduce(_max_pairs, tops)
    infinity = quant.INF_BITS if dt is BFloat16 else 0x7C000000
    return cutlass.max(both, both << 16) >= Uint32(infinity)


def _group_amax(tops: list[Any], dt: Any, lanes: int) -> list[Any]:
    """The largest absolute value in the group of each chunk's channels in this lane, as fp32;
    ``lanes``: that have a group's.

    Of 16 bits two chunks share a word on their way through the lanes of a group.
    """
    if dt.width == 32:
        if lanes == quant.WARP:
            return [quant.warp_max(top).bitcast(Float32) for top in tops]
        for step in _halvings(lanes):
            tops = [cutlass.max(t, cute.arch.shuffle_sync_bfly(t, step)) for t in tops]
        return [top.bitcast(Float32) for top in tops]
    low, high = tops
    both = _max_pairs(
        (low & Uint32(0xFFFF)) | (high << 16), (low >> 16) | (high & Uint32(0xFFFF0000))
    )
    for step in _halvings(lanes):
        both = _max_pairs(both, cute.arch.shuffle_sync_bfly(both, step))
    return quant.to_f32([both], dt)


def _halvings(lanes: int) -> list[int]:
    """lanes / 2, lanes / 4, ..., 1."""
    return [lanes >> n for n in range(1, lanes.bit_length())]


def _scale(amax: Any, least: float, power_of_two: Any, bad: Any) -> Any:
    """The scale of a group; NaN where ``bad``."""
    near = _rn("mul", amax, Float32(ONE_BY_MAX))
    quotient = fma(fma(near, Float32(-E4M3_MAX), amax), Float32(ONE_BY_MAX), near)
    bits = cutlass.max(quotient.bitcast(Uint32), Float32(least).bitcast(Uint32))
    below = Uint32(power_of_two) * Uint32(FRACTION)
    bits = (bits + below) & ~below
    return Uint32(cutlass.select_(bad, Uint32(quant.NAN_BITS), bits)).bitcast(Float32)


def _quotients(words: list[Any], scale: Any, dt: Any) -> list[Any]:
    """Values / scale, each the fp32 number nearest to it."""
    values = quant.to_f32(words, dt)
    if dt.width == 32:
        return [_rn("div", v, scale) for v in values]
    inv, left = _reciprocal(scale)
    found = []
    for v in values:
        near = _rn("mul", v, inv)
        found.append(fma(v, inv, _rn("mul", near, left)))
    return found


def _reciprocal(scale: Any) -> tuple[Any, Any]:
    """(h, e): 1 / scale cut off, of a normal number whose reciprocal is one, and 1 - scale * h."""
    minus = -scale
    near = cute.arch.rcp_approx(scale)
    near = fma(near, fma(minus, near, Float32(1.0)), near)
    above = fma(minus, near, Float32(1.0)).bitcast(Int32) >> 31  # -1 where it is too large
    cut = Int32(near.bitcast(Int32) + above).bitcast(Float32)
    return cut, fma(minus, cut, Float32(1.0))


def _by_powers(words: list[Any], scale: Any, dt: Any) -> list[Any]:
    """Values / scale, a power of two or NaN; at least 2^-22, so its reciprocal is one, too."""
    bits = Uint32(LARGEST_POWER) - scale.bitcast(Uint32)
    inv = Uint32(cutlass.select_(scale == scale, bits, Uint32(quant.NAN_BITS))).bitcast(Float32)
    return [v * inv for v in quant.to_f32(words, dt)]


def _rn(name: str, x: Any, y: Any) -> Any:
    """mul or div of fp32 whose rounding is written down: ptxas makes no FMA of it."""
    return compat.inline_ptx(
        f"{name}.rn.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Float32],
        read_only_args=[x, y],
    )

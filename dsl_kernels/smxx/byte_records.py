"""Records that are bytes (``cache_records``) as append writes them and fetch reads them.

A warp owns a token, whose channels lie in it as ``quant.load_row`` leaves them: of chunk j a lane
holds V consecutive channels from (j * 32 + lane) * V on (V = 8 of 16 bits, 4 of fp32), all of one
group that shares a scale.  So of groups of 128 lanes 0 to 15 and 16 to 31 have one of each of two
16-bit chunks, and all 32 have one of each of four fp32 chunks; a lane needs the scale of its own
group alone.  Where a record's content ends within a chunk, lanes behind it have what nobody stores.

The rule of append, in fp32 with IEEE quotients (vLLM's, byte for byte; powers of two are rounded
up to):

    scale = max(amax / 448, least)         content = e4m3(c / scale)        RoPE as it is

c * (1 / scale) would do for all but ties of e4m3, where an error in the last bit decides; where
scales cannot but be powers of two (``ue8m0``) it is the quotient.  A token with a NaN or an
infinity becomes NaN everywhere, scales and RoPE too, as in format ``fp8``.  Bytes behind a token's
scales are 0.

Fetch multiplies.  Where a record says so (``ZEROS``), a scale of 0 makes all of its group 0,
whatever the content's bytes are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute

from .. import compat
from ..cache_records.record import ZEROS, Field, Record
from ..common.rounding import fma
from ..dims import E4M3_MAX
from . import quant
from .stored import Stores, Words

FRACTION, EXPONENT_AT = 0x7FFFFF, 23  # bits of an fp32 number below its exponent; how many
LARGEST_POWER = 254 << EXPONENT_AT  # minus bits of 2^n: bits of 2^-n
HALF_LEAST = 0x400000  # bits of 2^-127, which byte 0 of ``ue8m0`` is
NAN_ROPE = 0x7FFF7FFF  # two bf16
# Residuals of a quotient by a scale below this would be subnormal: both sides are scaled up.
SMALL, LIFT = 2.0**-64, 2.0**64


class _Reads(NamedTuple):
    kv: cute.Tensor  # u8 (pages, P, 1, bytes of a token)


class _Writes(NamedTuple):
    kv: cute.Tensor  # u8 (pages, P, 1, bytes of a token)
    power_of_two: Int32  # 1: fp32 scales are rounded up to powers of two; 0: they are not


class Source(_Reads):
    """A cache to read: see ``stored``.  ``source_of`` makes the class of a record."""

    own: Record
    heads = False  # whether rows have a dimension of heads
    shares_pages = False  # whether the tokens that a warp fetches lie in one page: P may be odd

    @property
    def shape(self) -> Any:
        """(pages, P, ...)"""
        return self.kv.shape

    @property
    def channels(self) -> tuple[int, int]:
        """Of content, of RoPE."""
        return self.own.content.count, self.own.rope_channels

    def row(self, page: Any, offset: Any, head: Any, lane: Any, dt: Any) -> tuple[Any, Any, Any]:
        """Where this lane reads a token's content, RoPE (None without) and scales; ``dt``: what it
        becomes."""
        own, place = self.own, _Place(self.own, self.kv, page, offset)
        content = place.of(own.content) + lane * quant.lane_channels(dt)
        rope = None if own.rope is None else place.of(own.rope, lane * _rope_bytes(own.rope))
        return content, rope, place.of(own.scale)

    def load(self, at: tuple[Any, Any, Any], dt: Any) -> Words:
        """Issues the loads of a token's content and RoPE."""
        vec, (channels, _) = quant.lane_channels(dt), self.channels
        chunks = [
            compat.load_words(at[0] + j * quant.WARP * vec, vec // 4, **compat.STRONG)
            for j in range(quant.content_chunks(dt, channels))
        ]
        if at[1] is None:
            return chunks, None
        return chunks, compat.load_words(at[1], 1, **compat.STRONG)[0]

    def load_scales(self, at: tuple[Any, Any, Any], n: int) -> list[Any]:
        """Issues the load of a token's scales, as words; the same in all lanes."""
        assert n == 1  # of the next token they lie elsewhere
        return [compat.load_words(at[2], self.own.scale_bytes // 4, **compat.STRONG)]

    def scale_of(self, words: list[Any], lane: Any, dt: Any) -> list[Any]:
        """The scale of each chunk's channels in this lane."""
        lanes = _lanes_of_group(self.own, dt)
        if self.own.powers:
            chunks = range(quant.content_chunks(dt, self.channels[0]))
            return [_power_of(words, j * (quant.WARP // lanes), lane // lanes, dt) for j in chunks]
        if lanes == quant.WARP:
            return [w.bitcast(Float32) for w in words]
        upper = lane >= lanes
        pairs = zip(words[::2], words[1::2], strict=True)
        return [Uint32(cutlass.select_(upper, b, a)).bitcast(Float32) for a, b in pairs]

    def content_words(self, words: list[Any], scale: list[Any], chunk: int, dt: Any) -> list[Any]:
        """Loaded content of a chunk as words of ``dt``."""
        own = scale[chunk]
        if self.own.zero_scale == ZEROS:
            words = [Uint32(cutlass.select_(own != Float32(0.0), w, Uint32(0))) for w in words]
        return quant.pack([v * own for v in quant.unpack_e4m3(words)], dt)

    def rope_words(self, word: Any, scale: list[Any], dt: Any) -> list[Any]:
        """Loaded RoPE as words of ``dt``."""
        return [word] if dt is BFloat16 else quant.pack(quant.to_f32([word], BFloat16), dt)


class Target(_Writes):
    """A cache to write: see ``stored``.  ``target_of`` makes the class of a record."""

    own: Record

    @property
    def shape(self) -> Any:
        """(pages, P, ...)"""
        return self.kv.shape

    @property
    def channels(self) -> tuple[int, int]:
        """Of content, of RoPE."""
        return self.own.content.count, self.own.rope_channels

    def quantised(
        self, chunks: list[list[Any]], rope_words: list[Any], dt: Any, _slot: Any, lane: Any
    ) -> Stores:
        """Quantises a token of ``dt``, in which all lanes of the warp take part."""
        own, lanes = self.own, _lanes_of_group(self.own, dt)
        amax = _group_amax(chunks, dt, lanes)
        widest = _largest([*amax, *(quant.to_f32(rope_words, dt) if rope_words else [])])
        bad = cute.arch.vote_any_sync(widest >= Uint32(quant.INF_BITS))
        powers = Int32(1) if own.powers else self.power_of_two
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
        vec = quant.lane_channels(dt)

        def store(at: Any) -> None:
            place = _Place(own, self.kv, *at)
            row = place.of(own.content)
            for j, words in enumerate(content):
                to = row + (lane * vec + j * quant.WARP * vec)
                left = quant.lanes_in(dt, j, own.content.count)
                if left == quant.WARP:
                    compat.store_words(to, words)
                else:
                    store_where(lane < left, to, words)
            if rope is not None:
                compat.store_words(place.of(own.rope, lane * _rope_bytes(own.rope)), [rope])

        def store_scales(at: Any) -> None:
            to = _Place(own, self.kv, *at).of(own.scale)
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
def source_of(record: Record) -> type[Source]:
    """The class of caches to read."""
    return type("Source", (Source,), {"own": record})


@functools.cache
def target_of(record: Record) -> type[Target]:
    """The class of caches to write."""
    return type("Target", (Target,), {"own": record})


def fakes(record: Record) -> dict[str, Any]:
    """Fake of a cache by argument name: pages lie a multiple of 16 bytes apart; where a record has
    several planes, tokens are strides in name only."""
    token = record.token_bytes
    shape = (compat.sym(name="pages"), compat.sym(name="P"), 1, token)
    stride = (compat.sym64(compat.VECTOR_BYTES), token, token, 1)
    return {"kv": compat.strided(compat.DTYPES["u8"], shape, stride)}


class _Place:
    """Where the fields of the token at ``offset`` of ``page`` are."""

    def __init__(self, own: Record, kv: cute.Tensor, page: Any, offset: Any) -> None:
        self.own, self.kv, self.page, self.offset = own, kv, page, offset
        self.rows: dict[int, Any] = {}  # by plane

    def _row(self, plane: int) -> Any:
        if plane not in self.rows:
            at = Int64(self.page) * self.kv.stride[0]
            at = at + Int64(self.offset) * self.own.planes[plane]
            if plane:
                at = at + Int64(self.kv.shape[1]) * self.own.begins(plane)
            self.rows[plane] = self.kv.iterator + at
        return self.rows[plane]

    def of(self, field: Field | None, ahead: Any = 0) -> Any:
        """Pointer to a field, ``ahead`` bytes behind its first."""
        assert field is not None
        row = self._row(field.plane)
        ahead = field.at + ahead
        return row if isinstance(ahead, int) and not ahead else row + ahead


@cute.jit
def store_where(here: Any, to: Any, words: list[Any]) -> None:
    """Stores words where ``here``."""
    if here:
        compat.store_words(to, words)


def _rope_bytes(field: Field) -> int:
    """Of a token's RoPE in a lane."""
    return field.nbytes // quant.WARP


def _lanes_of_group(own: Record, dt: Any) -> int:
    return own.group // quant.lane_channels(dt)


def _power_of(words: list[Any], first: int, ahead: Any, dt: Any) -> Any:
    """2^(b - 127) of byte ``first`` + ``ahead`` of words, NaN of 255; ``ahead`` is below 8, and
    below 4 unless ``first`` is a multiple of 8."""
    word = words[first // 4]
    if first % 8 == 0 and first // 4 + 1 < len(words):
        word = Uint32(cutlass.select_(ahead >= 4, words[first // 4 + 1], word))
    byte = (word >> Uint32(8 * (first % 4) + 8 * (ahead % 4))) & Uint32(0xFF)
    bits = cutlass.max(byte << Uint32(EXPONENT_AT), Uint32(HALF_LEAST))
    nan = byte == Uint32(0xFF)
    return Uint32(cutlass.select_(nan, Uint32(quant.NAN_BITS), bits)).bitcast(Float32)


def _packed_powers(own: Record, scales: list[Any], lane: Any, dt: Any) -> list[Any]:
    """The words of a token's scales in every lane, the bytes behind them 0."""
    lanes, words = _lanes_of_group(own, dt), [Uint32(0)] * (own.scale_bytes // 4)
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


def _largest(values: list[Any]) -> Any:
    """The largest absolute value as bits; NaN and Inf win."""
    top = values[0].bitcast(Uint32) & Uint32(0x7FFFFFFF)
    for v in values[1:]:
        top = cutlass.max(top, v.bitcast(Uint32) & Uint32(0x7FFFFFFF))
    return top


def _group_amax(chunks: list[list[Any]], dt: Any, lanes: int) -> list[Any]:
    """The largest absolute value in the group of each chunk's channels in this lane, as fp32;
    ``lanes``: that have a group's.

    Of 16 bits two chunks share a word on their way through the lanes of a group.
    """
    if dt.width == 32:
        tops = [_largest([w.bitcast(Float32) for w in words]) for words in chunks]
        if lanes == quant.WARP:
            return [quant.warp_max(top).bitcast(Float32) for top in tops]
        for step in _halvings(lanes):
            tops = [cutlass.max(t, cute.arch.shuffle_sync_bfly(t, step)) for t in tops]
        return [top.bitcast(Float32) for top in tops]
    low, high = (_max_pairs([w & Uint32(0x7FFF7FFF) for w in words]) for words in chunks)
    both = _max_pairs(
        [(low & Uint32(0xFFFF)) | (high << 16), (low >> 16) | (high & Uint32(0xFFFF0000))]
    )
    for step in _halvings(lanes):
        both = _max_pairs([both, cute.arch.shuffle_sync_bfly(both, step)])
    return quant.to_f32([both], dt)


def _halvings(lanes: int) -> list[int]:
    """lanes / 2, lanes / 4, ..., 1."""
    return [lanes >> n for n in range(1, lanes.bit_length())]


def _max_pairs(words: list[Any]) -> Any:
    """Maxima of the two 16-bit halves."""
    top = words[0]
    for w in words[1:]:
        top = compat.inline_ptx(
            "max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[top, w]
        )
    return top


def _scale(amax: Any, least: float, power_of_two: Any, bad: Any) -> Any:
    """The scale of a group; NaN where ``bad``."""
    quotient = _ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", amax, Float32(E4M3_MAX))
    bits = cutlass.max(quotient.bitcast(Uint32), Float32(least).bitcast(Uint32))
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
        beyond = fma(near, scale, -v)  # in this order zeros keep their sign
        found.append(fma(beyond, minus, near))
    return found


def _by_powers(words: list[Any], scale: Any, dt: Any) -> list[Any]:
    """Values / scale, a power of two or NaN; at least 2^-22, so its reciprocal is one, too."""
    bits = Uint32(LARGEST_POWER) - scale.bitcast(Uint32)
    inv = Uint32(cutlass.select_(scale == scale, bits, Uint32(quant.NAN_BITS))).bitcast(Float32)
    return [v * inv for v in quant.to_f32(words, dt)]


def _ptx(text: str, *values: Any) -> Any:
    """An fp32 instruction whose rounding is written down."""
    return compat.inline_ptx(text, write_only_types=[Float32], read_only_args=list(values))

"""Formats that are bytes (``formats``): where their fields are, and how fetch reads them.

A warp owns a token, whose channels lie in it as ``quant.load_row`` leaves them: of chunk j a lane
holds V consecutive channels from (j * 32 + lane) * V on (V = 8 of 16 bits, 4 of fp32), all of one
group that shares a scale.  So of groups of 128 lanes 0 to 15 and 16 to 31 have one of each of two
16-bit chunks, and all 32 have one of each of four fp32 chunks; a lane needs the scale of its own
group alone.  Where a format's content ends within a chunk, lanes behind it have what nobody stores.

Fetch multiplies.  Where a format says so (``ZEROS``), a scale of 0 makes all of its group 0,
whatever the content's bytes are.  Append is in ``append_bytes.py``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int64, Uint32, cute

from ..blocks import compat, quant
from ..formats.format import ZEROS, Field, Format
from .stored import Words

EXPONENT_AT = 23  # bits of an fp32 number below its exponent
HALF_LEAST = 0x400000  # bits of 2^-127, which byte 0 of ``ue8m0`` is


class _Reads(NamedTuple):
    kv: cute.Tensor  # u8 (pages, P, 1, bytes of a token)


class OfFormat:
    """Base of ``Source`` (reads) and ``Target`` (writes), which bring the tensor ``kv``.

    Attributes:
        own: how a token lies.
    """

    own: Format
    kv: cute.Tensor

    @property
    def shape(self) -> Any:
        """(pages, P, ...)"""
        return self.kv.shape

    @property
    def channels(self) -> tuple[int, int]:
        """(content channels, RoPE channels) of a token."""
        return self.own.content.count, self.own.rope_channels


class Source(_Reads, OfFormat):
    """A cache to read: see ``stored``.  ``source_of`` makes the class of a format."""

    heads = False  # whether rows have a dimension of heads
    shares_pages = False  # whether the tokens that a warp fetches lie in one page: P may be odd

    def row(self, page: Any, offset: Any, head: Any, lane: Any, dt: Any) -> tuple[Any, Any, Any]:
        """Pointers (content, RoPE, scales) to a token, the first two to this lane's channels.

        RoPE is None if the format has none.  ``dt``: the content's dtype in registers, which sets
        how many channels a lane has.
        """
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
        lanes = lanes_of_group(self.own, dt)
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


@functools.cache
def source_of(format: Format) -> type[Source]:
    """The class of caches to read."""
    return type("Source", (Source,), {"own": format})


def fakes(format: Format) -> dict[str, Any]:
    """Fake of a cache by argument name: pages lie a multiple of 16 bytes apart; where a format has
    several planes, tokens are strides in name only."""
    token = format.token_bytes
    shape = (compat.sym(name="pages"), compat.sym(name="P"), 1, token)
    stride = (compat.sym64(compat.VECTOR_BYTES), token, token, 1)
    return {"kv": compat.strided(compat.DTYPES["u8"], shape, stride)}


class _Place:
    """Addresses of the fields of the token at ``offset`` of ``page``."""

    def __init__(self, own: Format, kv: cute.Tensor, page: Any, offset: Any) -> None:
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
    """Bytes of a token's RoPE that one lane holds."""
    return field.nbytes // quant.WARP


def lanes_of_group(own: Format, dt: Any) -> int:
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

"""A cached token as append and fetch see it: a class a format, one interface for reading.

    Fp8Cache   e4m3 content, RoPE in bf16 divided by the token's scale, the scale; one head
    Rows16     rows of 576 16-bit channels as they are, content before RoPE; any number of heads
    Source     formats of bytes, e4m3 content with scales, RoPE as it is or none; one head
               (``byte_formats.py``)

All are the arguments of a kernel, in their order.  A warp owns a row (``quant.py``): what follows
are a lane's addresses, loads and conversions.  Offsets are 64-bit: pools may exceed 4 GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cutlass import BFloat16, Float32, Int64, Uint32, cute

from ..blocks import compat, quant
from ..formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from ..formats.format import Format

CHANNELS = KV_LORA_RANK, QK_ROPE_HEAD_DIM
ROPE_PER_LANE = QK_ROPE_HEAD_DIM // quant.WARP
Words = tuple[list[list[Any]], Any]  # of a lane: content by chunk, RoPE


class Stores(NamedTuple):
    """A lane's stores of a quantised token; each is called with the place (page, offset)."""

    store: Callable[[Any], None]  # content and RoPE
    writes_scales: Callable[[], Any] | None  # whether this lane stores scales; None: there are none
    store_scales: Callable[[Any], None] | None


class Fp8Cache(NamedTuple):
    """Content and RoPE in units of a scale."""

    content: cute.Tensor  # u8 (pages, P, 512)
    rope: cute.Tensor  # bf16 (pages, P, 64)
    scale: cute.Tensor  # f32 (pages, P)

    heads = False  # whether rows have a dimension of heads
    shares_pages = True  # whether the tokens that a warp fetches lie in one page
    channels = CHANNELS  # of content, of RoPE

    @property
    def shape(self) -> Any:
        """(pages, P, ...)"""
        return self.content.shape

    def row(self, page: Any, offset: Any, head: Any, lane: Any, dt: Any) -> tuple[Any, Any, Any]:
        """Pointers (content, RoPE, scale) from which this lane reads a token.

        ``dt``: dtype that its channels are converted to.
        """
        content, rope, scale = self
        page, offset = Int64(page), Int64(offset)
        nope_at = (
            page * content.stride[0] + offset * content.stride[1] + lane * quant.lane_channels(dt)
        )
        rope_at = page * rope.stride[0] + offset * rope.stride[1] + lane * ROPE_PER_LANE
        scale_at = page * scale.stride[0] + offset
        return content.iterator + nope_at, rope.iterator + rope_at, scale.iterator + scale_at

    def behind(self, at: tuple[Any, Any, Any], i: int) -> tuple[Any, Any, Any]:
        """The same of the token ``i`` further in the page, but for the scale."""
        return at[0] + i * self.content.stride[1], at[1] + i * self.rope.stride[1], at[2]

    def load(self, at: tuple[Any, Any, Any], dt: Any) -> Words:
        """Issues the loads of a token's content and RoPE."""
        vec = quant.lane_channels(dt)
        chunks = [
            compat.load_words(at[0] + j * quant.WARP * vec, vec // 4, **compat.STRONG)
            for j in range(quant.content_chunks(dt))
        ]
        return chunks, compat.load_words(at[1], 1, **compat.STRONG)[0]

    def load_scales(self, at: tuple[Any, Any, Any], n: int) -> list[Any]:
        """Issues the load of the scales of ``n`` tokens side by side; as words."""
        return compat.load_words(at[2], n, **compat.STRONG)

    def scale_of(self, word: Any, _lane: Any, _dt: Any) -> Any:
        """A scale from its word."""
        return word.bitcast(Float32)

    def content_words(self, words: list[Any], scale: Any, _chunk: int, dt: Any) -> list[Any]:
        """Loaded content as words of ``dt``."""
        return quant.pack([v * scale for v in quant.unpack_e4m3(words)], dt)

    def rope_words(self, word: Any, scale: Any, dt: Any) -> list[Any]:
        """Loaded RoPE as words of ``dt``."""
        return quant.pack([v * scale for v in quant.to_f32([word], BFloat16)], dt)

    def quantised(
        self, chunks: list[list[Any]], rope_words: list[Any], dt: Any, slot: Any, lane: Any
    ) -> Stores:
        """Quantises a token of ``dt``, in which all lanes of the warp take part."""
        factor = quant.amax_to_scale(slot)
        bits = quant.warp_max(quant.scale_bits(chunks, rope_words, dt, factor))
        sigma, inv = quant.finish_scale(bits)
        content, rope, scale = self

        def store(at: Any) -> None:
            quant.store_row(
                chunks,
                rope_words,
                dt,
                inv,
                lane,
                content.iterator + (at[0] * content.stride[0] + at[1] * content.stride[1]),
                rope.iterator + (at[0] * rope.stride[0] + at[1] * rope.stride[1]),
            )

        def store_scale(at: Any) -> None:
            place = scale.iterator + (at[0] * scale.stride[0] + at[1])
            compat.store_words(place, [sigma.bitcast(Uint32)])

        return Stores(store, lambda: lane == 0, store_scale)


class Rows16(NamedTuple):
    """Rows of 576 channels, bf16 or f16."""

    kv: cute.Tensor  # (pages, P, h_kv, 576)

    heads = True
    shares_pages = True
    channels = CHANNELS

    @property
    def shape(self) -> Any:
        """(pages, P, ...)"""
        return self.kv.shape

    def row(self, page: Any, offset: Any, head: Any, lane: Any, dt: Any) -> tuple[Any, Any]:
        """Pointers (content, RoPE) from which this lane reads a row.

        ``dt``: dtype that its channels are converted to.
        """
        stride = self.kv.stride
        at = Int64(page) * stride[0] + Int64(offset) * stride[1] + Int64(head) * stride[2]
        row = self.kv.iterator + at
        return row + lane * quant.lane_channels(dt), row + (KV_LORA_RANK + lane * ROPE_PER_LANE)

    def behind(self, at: tuple[Any, Any], i: int) -> tuple[Any, Any]:
        """The same of the token ``i`` further in the page."""
        return at[0] + i * self.kv.stride[1], at[1] + i * self.kv.stride[1]

    def load(self, at: tuple[Any, Any], dt: Any) -> Words:
        """Issues the loads of a row."""
        vec = quant.lane_channels(dt)
        chunks = [
            compat.load_words(at[0] + j * quant.WARP * vec, vec // 2, **compat.STRONG)
            for j in range(quant.content_chunks(dt))
        ]
        return chunks, compat.load_words(at[1], 1, **compat.STRONG)[0]

    def load_scales(self, at: tuple[Any, Any], n: int) -> list[Any]:
        """Stand-ins, which nothing reads."""
        return [Uint32(0)] * n

    def scale_of(self, word: Any, _lane: Any, _dt: Any) -> Any:
        """A stand-in."""
        return word

    def content_words(self, words: list[Any], scale: Any, _chunk: int, dt: Any) -> list[Any]:
        """Loaded content as words of ``dt``."""
        return converted(words, self.kv.element_type, dt)

    def rope_words(self, word: Any, scale: Any, dt: Any) -> list[Any]:
        """Loaded RoPE as words of ``dt``."""
        return converted([word], self.kv.element_type, dt)

    def store(self, row: tuple[list[list[Any]], list[Any]], dt: Any, at: tuple[Any, ...],
              lane: Any) -> None:  # fmt: skip
        """Stores one row of ``dt``, as ``quant.load_row`` leaves it, at (page, offset, head)."""
        chunks, rope_words = row
        own, vec = self.kv.element_type, quant.lane_channels(dt)
        to = self.kv.iterator + sum(n * s for n, s in zip(at, self.kv.stride))
        for j, words in enumerate(chunks):
            ptr = to + (lane * vec + j * quant.WARP * vec)
            compat.store_words(ptr, converted(words, dt, own))
        ptr = to + (KV_LORA_RANK + lane * ROPE_PER_LANE)
        compat.store_words(ptr, converted(rope_words, dt, own))

    def quantised(
        self, chunks: list[list[Any]], rope_words: list[Any], dt: Any, _slot: Any, lane: Any
    ) -> Stores:
        """A token of one head as it is: the interface of caches that quantise."""
        row = chunks, rope_words
        return Stores(lambda at: self.store(row, dt, (*at, Int64(0)), lane), None, None)


def converted(words: list[Any], dt: Any, to: Any) -> list[Any]:
    """Words of ``dt`` as words of ``to``, rounded to nearest even; of one dtype as they are."""
    return words if dt is to else quant.pack(quant.to_f32(words, dt), to)


def fakes(format: Format, page_size: Any = None) -> dict[str, Any]:
    """Fakes of an ``Fp8Cache`` or of a cache of 16-bit rows, by argument name.

    Strides of pages, tokens and heads are free 64-bit symbols that keep 16-byte alignment.
    """
    if format.one_scale:
        return compat.cache_fakes(page_size=page_size)
    page_size = compat.sym(name="P") if page_size is None else page_size
    shape = (compat.sym(name="pages"), page_size, compat.sym(name="h_kv"), HEAD_DIM_QK)
    return {"kv": compat.rows(compat.dtype(format.content.dtype), shape)}

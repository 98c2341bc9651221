"""Vocabulary of the kernels that read and write whole latent rows: loads, amax, scale, packing.

A *row* is 512 content channels and 64 RoPE channels of one token or one query head.  One warp owns
a row; lane ``l`` holds, of every 32 * V consecutive channels, the V that make one 16-byte load
(V = 8 for 16-bit inputs, 4 for fp32), so that every load and store of the warp is one contiguous
run of bytes.  All functions are plain Python: they unroll at trace time.

The quantisation rule (per token, or per query row; all fp32):

    scale = max(amax_c / top, amax_r * 2^-40, 2^-80)    inv = 1 / scale
    nope8 = e4m3(c * inv)                               rope' = bf16(rope * inv)

where top is 448 for queries and, for a token that goes into slot s, CACHE_TOPS[s % 8].
The second term keeps rope' finite where the content is (nearly) zero, the third keeps inv finite.
The maximum is taken on the bit patterns: unsigned integers order like absolute values, and NaN and
Inf come out on top, so one reduction finds both the scale and the rows that must become NaN.
Multiplying by a positive constant is monotone after rounding, hence max and scaling commute and the
content and RoPE maxima share a single warp reduction.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from ..formats.dims import CACHE_TOPS, E4M3_MAX, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from . import compat
from .packing import pack

WARP = 32
AMAX_TO_SCALE = 1.0 / E4M3_MAX  # rounded to fp32 where it is used, as those of CACHE_TOPS
ROPE_FLOOR = 2.0**-40  # scale >= amax_rope * ROPE_FLOOR: |rope'| <= 2^40
SCALE_FLOOR = 2.0**-80
INF_BITS = 0x7F800000
NAN_BITS = 0x7FC00000


def lane_channels(dt: Any) -> int:
    """Channels of ``dt`` in one 16-byte load."""
    return compat.VECTOR_BYTES * 8 // dt.width


def content_chunks(dt: Any, channels: int = KV_LORA_RANK) -> int:
    """16-byte loads a lane needs for its share of the content channels."""
    return -(-channels // (WARP * lane_channels(dt)))


def lanes_in(dt: Any, chunk: int, channels: int) -> int:
    """Lanes whose channels of a chunk are content; those behind have none."""
    return min(WARP, channels // lane_channels(dt) - chunk * WARP)


def load_row(
    content: Any, rope: Any, lane: Any, dt: Any, channels: int = KV_LORA_RANK
) -> tuple[list[list[Any]], list[Any]]:
    """Issues all loads of one row; ``content`` and ``rope`` point at its first channels.

    Args:
        rope: None of a row without.
        channels: of content; a lane that has none of the last chunk's loads another lane's.

    Returns (content words by chunk, RoPE words): lists of Uint32.
    """
    vec = lane_channels(dt)
    hint = {"level1_eviction_priority": "evict_no_allocate"}
    chunks = []
    for j in range(content_chunks(dt, channels)):
        own, left = lane, lanes_in(dt, j, channels)
        if left < WARP:
            own = cutlass.min(lane, left - 1)
        chunks.append(compat.load_words(content + (own * vec + j * WARP * vec), 4, **hint))
    if rope is None:
        return chunks, []
    per_lane = QK_ROPE_HEAD_DIM // WARP
    rope_words = compat.load_words(rope + lane * per_lane, per_lane * dt.width // 32, **hint)
    return chunks, rope_words


def to_f32(words: list[Any], dt: Any) -> list[Any]:
    """Unpacks 32-bit words of ``dt`` into Float32 values, in memory order."""
    if dt.width == 32:
        return [w.bitcast(Float32) for w in words]
    if dt is cutlass.BFloat16:
        halves = [(w << 16, w & Uint32(0xFFFF0000)) for w in words]
        return [h.bitcast(Float32) for pair in halves for h in pair]
    return _unpack(words, dt)


def _amax(words: list[Any], dt: Any) -> Any:
    """Largest absolute value in this lane's words as fp32 (NaN and Inf win)."""
    if dt.width == 32:
        top = words[0] & Uint32(0x7FFFFFFF)
        for w in words[1:]:
            top = cutlass.max(top, w & Uint32(0x7FFFFFFF))
        return top.bitcast(Float32)
    pair = words[0] & Uint32(0x7FFF7FFF)
    for w in words[1:]:
        pair = compat.inline_ptx(
            "max.u16x2 {$w0}, {$r0}, {$r1};",
            write_only_types=[Uint32],
            read_only_args=[pair, w & Uint32(0x7FFF7FFF)],
        )
    top = cutlass.max(pair & Uint32(0xFFFF), pair >> 16)
    return to_f32([top], dt)[0] if dt is not cutlass.BFloat16 else (top << 16).bitcast(Float32)


def amax_to_scale(slot: Any) -> Any:
    """1 / top of a token that goes into ``slot`` (an integer of any sign)."""
    low, left = Int32(slot) & 7, [Float32(1.0 / top) for top in CACHE_TOPS]
    for bit in range(3):
        odd = (low >> bit) & 1
        pairs = zip(left[::2], left[1::2], strict=True)
        left = [cutlass.select_(odd != 0, b, a) for a, b in pairs]
    return left[0]


def scale_bits(
    chunks: list[list[Any]], rope_words: list[Any], dt: Any, factor: Any = AMAX_TO_SCALE
) -> Any:
    """This lane's candidate for the row's scale, as bits: reduce with an unsigned maximum.

    ``factor``: 1 / top.
    """
    amax_c = _amax([w for chunk in chunks for w in chunk], dt)
    amax_r = _amax(rope_words, dt)
    from_content = (amax_c * Float32(factor)).bitcast(Uint32)
    return cutlass.max(from_content, (amax_r * Float32(ROPE_FLOOR)).bitcast(Uint32))


def warp_max(bits: Any) -> Any:
    """Unsigned maximum over the warp (one redux instruction)."""
    return cute.arch.warp_redux_sync(bits, "max")


def finish_scale(bits: Any) -> tuple[Any, Any]:
    """(scale, 1 / scale) from the reduced candidate; both NaN for a row with NaN or Inf."""
    floor = Float32(SCALE_FLOOR).bitcast(Uint32)
    bits = cutlass.max(bits, floor)
    nonfinite = bits >= Uint32(INF_BITS)
    scale = Uint32(cutlass.select_(nonfinite, Uint32(NAN_BITS), bits)).bitcast(Float32)
    return scale, Float32(1.0) / scale


def pack_e4m3(values: list[Any]) -> list[Any]:
    """fp32 values (a multiple of 4) to e4m3, round to nearest, saturating; as Uint32 words."""
    return pack(values, cutlass.Float8E4M3FN)


def unpack_e4m3(words: list[Any]) -> list[Any]:
    """Uint32 words of e4m3 to Float32 values (exact), in memory order."""
    return _unpack(words, cutlass.Float8E4M3FN)


def _unpack(words: list[Any], dt: Any) -> list[Any]:
    # the register tensor has dt's shape: recasting a one-word tensor the other way would keep its
    # stride of 0 and repeat the first value
    narrow = cute.make_rmem_tensor((len(words) * 32 // dt.width,), dt)
    packed = cute.recast_tensor(narrow, Uint32)
    for i, w in enumerate(words):
        packed[i] = w
    values = narrow.load().to(Float32)
    return [values[i] for i in range(cute.size(narrow))]


def store_row(
    chunks: list[list[Any]],
    rope_words: list[Any],
    dt: Any,
    inv: Any,
    lane: Any,
    content: Any,
    rope: Any,
) -> None:
    """Quantises one row and stores it at ``content`` (u8 pointer) and ``rope`` (bf16 pointer)."""
    vec = lane_channels(dt)
    for j, words in enumerate(chunks):
        quantised = pack_e4m3([v * inv for v in to_f32(words, dt)])
        compat.store_words(content + (lane * vec + j * WARP * vec), quantised)
    per_lane = QK_ROPE_HEAD_DIM // WARP
    aligned = pack([v * inv for v in to_f32(rope_words, dt)], cutlass.BFloat16)
    compat.store_words(rope + lane * per_lane, aligned)

"""fetch_dequant: gather cached tokens and turn them back into 16- or 32-bit latents.

Roles        one warp owns TOKENS tokens, no barrier.
             mode ``pages``: token t of request i is found through the block table; grid
             (ceil(max_len / tokens a CTA), b); rows past the request's length are not touched.
             mode ``indices``: flat slots page * P + offset; an index out of range writes zeros.
Memory       registers only: TOKENS * 6 words a lane; no shared memory.
Timeline     wait for the previous grid | page id(s) | load TOKENS rows | convert, scale | store
Bytes moved  per token 644 read + 1152 written (16-bit output; 2304 for fp32).

content = e4m3 -> f16 -> fp32 (both exact) * scale, rounded once to the output dtype; RoPE is
multiplied back by the scale it was divided by.  A token with NaN scale gives NaN.  Page ids are
clamped on the device, so ids behind the last valid page are harmless.  Row strides of the outputs
are free: they may be two slices of one (..., 576) tensor.  SnapMLA paper section 3.3
(Fused-Fetch-Dequant).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from .. import compat
from ..dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from . import quant

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS = 4
TOKENS = 4  # tokens in flight in one warp; divides every page size
MIN_PAGE = 16
ROPE_PER_LANE = QK_ROPE_HEAD_DIM // quant.WARP


@cute.jit
def fetch_pages(
    content: cute.Tensor,  # u8 (pages, P, 512)
    rope: cute.Tensor,  # bf16 (pages, P, 64)
    scale: cute.Tensor,  # f32 (pages, P)
    block_table: cute.Tensor,  # i32 (b, width)
    cache_seqlens: cute.Tensor,  # i32 (b,)
    out_nope: cute.Tensor,  # out dtype (b, max_len, 512)
    out_rope: cute.Tensor,  # out dtype (b, max_len, 64)
    stream: Any,
) -> None:
    """Host half: one CTA for WARPS * TOKENS consecutive tokens of a request."""
    b, max_len, _ = out_nope.shape
    by_page = compat.fast_divisor(content.shape[1])
    if b * max_len > 0:  # an empty grid is a launch error
        _pages(
            content, rope, scale, block_table, cache_seqlens, out_nope, out_rope, by_page
        ).launch(
            grid=((max_len + (WARPS * TOKENS - 1)) // (WARPS * TOKENS), b, 1),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )


@cute.jit
def fetch_indices(
    content: cute.Tensor,  # u8 (pages, P, 512)
    rope: cute.Tensor,  # bf16 (pages, P, 64)
    scale: cute.Tensor,  # f32 (pages, P)
    indices: cute.Tensor,  # i32 (n,)
    out_nope: cute.Tensor,  # out dtype (n, 512)
    out_rope: cute.Tensor,  # out dtype (n, 64)
    stream: Any,
) -> None:
    """Host half: one CTA for WARPS * TOKENS indices."""
    n = indices.shape[0]
    by_page = compat.fast_divisor(content.shape[1])
    if n > 0:
        _indices(content, rope, scale, indices, out_nope, out_rope, by_page).launch(
            grid=((n + (WARPS * TOKENS - 1)) // (WARPS * TOKENS), 1, 1),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )


def _row_pointers(cache: tuple[Any, Any, Any], page: Any, offset: Any, lane: Any, dt: Any) -> Any:
    """Where this lane reads a cached token: pointers into (content, rope, scale)."""
    content, rope, scale = cache
    page, offset = Int64(page), Int64(offset)
    nope_at = page * content.stride[0] + offset * content.stride[1] + lane * quant.lane_channels(dt)
    rope_at = page * rope.stride[0] + offset * rope.stride[1] + lane * ROPE_PER_LANE
    scale_at = page * scale.stride[0] + offset
    return content.iterator + nope_at, rope.iterator + rope_at, scale.iterator + scale_at


def _load_token(at: Any, dt: Any) -> tuple[list[list[Any]], Any]:
    """Issues the loads of one cached token: (content words by chunk, RoPE word)."""
    vec = quant.lane_channels(dt)
    chunks = [
        compat.load_words(at[0] + j * quant.WARP * vec, vec // 4, **compat.STRONG)
        for j in range(quant.content_chunks(dt))
    ]
    return chunks, compat.load_words(at[1], 1, **compat.STRONG)[0]


def _store_token(
    loaded: tuple[list[list[Any]], Any], sigma: Any, to: tuple[Any, Any], dt: Any, valid: Any
) -> None:
    """Converts and stores one token at the pointers; zeros where ``valid`` (or None) is false."""
    chunks, rope_word = loaded

    def put(ptr: Any, values: list[Any]) -> None:
        words = quant.pack([v * sigma for v in values], dt)
        if valid is not None:
            words = [Uint32(cutlass.select_(valid, w, Uint32(0))) for w in words]
        compat.store_words(ptr, words)

    vec = quant.lane_channels(dt)
    for j, words in enumerate(chunks):
        put(to[0] + j * quant.WARP * vec, quant.unpack_e4m3(words))
    put(to[1], quant.to_f32([rope_word], cutlass.BFloat16))


@cute.kernel
def _pages(
    content: cute.Tensor,
    rope: cute.Tensor,
    scale: cute.Tensor,
    block_table: cute.Tensor,
    cache_seqlens: cute.Tensor,
    out_nope: cute.Tensor,
    out_rope: cute.Tensor,
    by_page: compat.FastDivisor,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    block, batch, _ = cute.arch.block_idx()
    lane = tidx % quant.WARP
    first = (block * WARPS + tidx // quant.WARP) * TOKENS
    dt = out_nope.element_type
    pages, page_size, _ = content.shape
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    length = cutlass.min(cache_seqlens[batch], out_nope.shape[1])
    length = cutlass.min(length, block_table.shape[1] * page_size)
    if first < length:
        # TOKENS divides the page size, so the tokens of a warp share one page
        index, offset = divmod(first, by_page)
        page = block_table[batch, index]
        page = cutlass.max(cutlass.min(page, pages - 1), 0)
        nope_at, rope_at, scale_at = _row_pointers((content, rope, scale), page, offset, lane, dt)
        loaded = []
        for i in cutlass.range_constexpr(TOKENS):
            # tokens past the length lie in the same page: read, never stored
            row = (nope_at + i * content.stride[1], rope_at + i * rope.stride[1])
            loaded.append(_load_token(row, dt))
        sigma = compat.load_words(scale_at, TOKENS, **compat.STRONG)
        nope_to = out_nope.iterator + (
            batch * out_nope.stride[0] + first * out_nope.stride[1] + lane * quant.lane_channels(dt)
        )
        rope_to = out_rope.iterator + (
            batch * out_rope.stride[0] + first * out_rope.stride[1] + lane * ROPE_PER_LANE
        )
        for i in cutlass.range_constexpr(TOKENS):
            if first + i < length:
                to = (nope_to + i * out_nope.stride[1], rope_to + i * out_rope.stride[1])
                _store_token(loaded[i], sigma[i].bitcast(Float32), to, dt, None)


@cute.kernel
def _indices(
    content: cute.Tensor,
    rope: cute.Tensor,
    scale: cute.Tensor,
    indices: cute.Tensor,
    out_nope: cute.Tensor,
    out_rope: cute.Tensor,
    by_page: compat.FastDivisor,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = tidx % quant.WARP
    first = (block * WARPS + tidx // quant.WARP) * TOKENS
    dt = out_nope.element_type
    n = indices.shape[0]
    slots = Int64(content.shape[0]) * content.shape[1]
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    if first < n:
        index = [indices[cutlass.min(first + i, n - 1)] for i in range(TOKENS)]
        valid, loaded, sigma = [], [], []
        for i in cutlass.range_constexpr(TOKENS):
            ok = index[i] >= 0 and Int64(index[i]) < slots
            # an invalid index reads slot 0, whose page exists, and stores zeros
            page, offset = divmod(index[i] if ok else Int32(0), by_page)
            valid.append(ok)
            row = _row_pointers((content, rope, scale), page, offset, lane, dt)
            loaded.append(_load_token(row, dt))
            sigma.append(compat.load_words(row[2], 1, **compat.STRONG)[0])
        nope_to = out_nope.iterator + (
            Int64(first) * out_nope.stride[0] + lane * quant.lane_channels(dt)
        )
        rope_to = out_rope.iterator + (Int64(first) * out_rope.stride[0] + lane * ROPE_PER_LANE)
        for i in cutlass.range_constexpr(TOKENS):
            if first + i < n:
                to = (nope_to + i * out_nope.stride[0], rope_to + i * out_rope.stride[0])
                _store_token(loaded[i], sigma[i].bitcast(Float32), to, dt, valid[i])


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    dt, i32 = compat.dtype(spec.in_dtype), compat.DTYPES["i32"]
    cache = compat.cache_fakes(page_size=compat.sym(MIN_PAGE, name="P"))
    widths = {"out_nope": KV_LORA_RANK, "out_rope": QK_ROPE_HEAD_DIM}
    n = compat.sym(name="n")
    if spec.mode == "indices":
        outs = {name: compat.rows(dt, (n, d)) for name, d in widths.items()}
        return fetch_indices, {**cache, "indices": compat.vector(i32, n), **outs}
    b, max_len = compat.sym(name="b"), compat.sym(name="max_len")
    table = compat.strided(i32, (b, compat.sym(name="width")), (compat.sym64(), 1), align=4)
    outs = {name: compat.rows(dt, (b, max_len, d)) for name, d in widths.items()}
    lengths = compat.vector(i32, b)
    return fetch_pages, {**cache, "block_table": table, "cache_seqlens": lengths, **outs}

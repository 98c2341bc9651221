"""fetch_dequant: gather cached tokens and turn them back into 16- or 32-bit latents.

One source for all formats of a cache (``stored.py``); of rows of 16 bits the grid's z is the head.

Roles        one warp owns TOKENS tokens, no barrier.
             mode ``pages``: token t of request i is found through the block table; grid
             (ceil(max_len / tokens a CTA), b); rows past the request's length are not touched.
             mode ``indices``: flat slots page * P + offset; an index out of range writes zeros.
             mode ``ragged``: packed rows, row cu_seqlens[r] + t is token seq_starts[r] + t of
             request r; grid ceil(rows / rows a CTA). SEARCHERS lanes find a row's request.
Memory       registers only: TOKENS * 6 words a lane; no shared memory.
Timeline     wait for the previous grid | page id(s) | load TOKENS rows | convert, scale | store
             ragged: wait | search, a load a round | begin, start | page ids | load, and so on
Bytes moved  per token 644 read + 1152 written (16-bit output; 2304 for fp32).
             ragged: 4 more a request and a page.  From rows of 16 bits 1152 read a row, no scale.
             Of formats of bytes those, and in mode ``pages`` an entry of the table a token: their
             pages have any number of tokens.

Ragged rows are dealt to warps evenly and search for their request: a grid (request, tile) would
launch the tiles of the whole capacity for every request, since only the device knows the longest.
A search of SEARCHERS + 1 ways is one load for up to 8 entries of cu_seqlens, two for 80, three for
728, each from L1 or L2 while other warps wait for DRAM.

content = e4m3 -> f16 -> fp32 (both exact) * scale, rounded once to the output dtype; RoPE is
multiplied back by the scale it was divided by; formats of bytes (``byte_formats.py``) have it
as it is, or none.
A token with NaN scale gives NaN.  Mode ``pages`` clamps page ids on the device, so ids behind the
last valid page are harmless; mode ``ragged`` writes zeros for ids outside the pool and for tokens
outside the block table.  Whatever ``cu_seqlens`` and ``seq_starts`` hold, nothing outside of the
arguments is read or written.  Row strides of the outputs are free: they may be two slices of one
(..., 576) tensor.  Rows of 16 bits are copied; to another dtype they are rounded once.  SnapMLA
paper section 3.3 (Fused-Fetch-Dequant); packed chunks of cached prefixes are what vLLM's and
SGLang's chunked prefill reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from ..blocks import compat, quant
from . import byte_formats, stored

if TYPE_CHECKING:
    from ..formats.format import Format
    from ..spec import VariantSpec

WARPS = 4
TOKENS = 4  # tokens in flight in one warp; divides every page size but those of bytes
MIN_PAGE = 16
SEARCHERS = quant.WARP // TOKENS  # lanes that find one row of a ragged batch
ZEROS, NO_ROW = -1, -2  # in the place of a page id: a row of zeros; one that is not written


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
    """Host half of mode ``pages``."""
    cache = stored.Fp8Cache(content, rope, scale)
    _launch_pages(cache, block_table, cache_seqlens, (out_nope, out_rope), 1, stream)


@cute.jit
def fetch_indices(
    content: cute.Tensor,  # u8 (pages, P, 512)
    rope: cute.Tensor,  # bf16 (pages, P, 64)
    scale: cute.Tensor,  # f32 (pages, P)
    indices: cute.Tensor,  # i32|i64 (n,)
    out_nope: cute.Tensor,  # out dtype (n, 512)
    out_rope: cute.Tensor,  # out dtype (n, 64)
    stream: Any,
) -> None:
    """Host half of mode ``indices``."""
    cache = stored.Fp8Cache(content, rope, scale)
    _launch_indices(cache, indices, (out_nope, out_rope), 1, stream)


@cute.jit
def fetch_ragged(
    content: cute.Tensor,  # u8 (pages, P, 512)
    rope: cute.Tensor,  # bf16 (pages, P, 64)
    scale: cute.Tensor,  # f32 (pages, P)
    block_table: cute.Tensor,  # i32 (b, width)
    cu_seqlens: cute.Tensor,  # i32 (b + 1,)
    seq_starts: cute.Tensor,  # i32 (b,), or (0,): all 0
    out_nope: cute.Tensor,  # out dtype (total, 512)
    out_rope: cute.Tensor,  # out dtype (total, 64)
    stream: Any,
) -> None:
    """Host half of mode ``ragged``."""
    cache = stored.Fp8Cache(content, rope, scale)
    tables = (block_table, cu_seqlens, seq_starts)
    _launch_ragged(cache, tables, (out_nope, out_rope), 1, stream)


@cute.jit
def fetch_rows_pages(
    kv: cute.Tensor,  # bf16|f16 (pages, P, h_kv, 576)
    block_table: cute.Tensor,  # i32 (b, width)
    cache_seqlens: cute.Tensor,  # i32 (b,)
    out_nope: cute.Tensor,  # out dtype (b, max_len, h_kv, 512)
    out_rope: cute.Tensor,  # out dtype (b, max_len, h_kv, 64)
    stream: Any,
) -> None:
    """``fetch_pages`` from rows of 16 bits."""
    outs = (out_nope, out_rope)
    _launch_pages(stored.Rows16(kv), block_table, cache_seqlens, outs, kv.shape[2], stream)


@cute.jit
def fetch_rows_indices(
    kv: cute.Tensor,  # bf16|f16 (pages, P, h_kv, 576)
    indices: cute.Tensor,  # i32|i64 (n,)
    out_nope: cute.Tensor,  # out dtype (n, h_kv, 512)
    out_rope: cute.Tensor,  # out dtype (n, h_kv, 64)
    stream: Any,
) -> None:
    """``fetch_indices`` from rows of 16 bits."""
    _launch_indices(stored.Rows16(kv), indices, (out_nope, out_rope), kv.shape[2], stream)


@cute.jit
def fetch_rows_ragged(
    kv: cute.Tensor,  # bf16|f16 (pages, P, h_kv, 576)
    block_table: cute.Tensor,  # i32 (b, width)
    cu_seqlens: cute.Tensor,  # i32 (b + 1,)
    seq_starts: cute.Tensor,  # i32 (b,), or (0,): all 0
    out_nope: cute.Tensor,  # out dtype (total, h_kv, 512)
    out_rope: cute.Tensor,  # out dtype (total, h_kv, 64)
    stream: Any,
) -> None:
    """``fetch_ragged`` from rows of 16 bits."""
    tables = (block_table, cu_seqlens, seq_starts)
    _launch_ragged(stored.Rows16(kv), tables, (out_nope, out_rope), kv.shape[2], stream)


class FromBytes:
    """Host halves for a format of bytes, with its field of RoPE or (``content_...``) without.

    Attributes:
        source: class of its caches (``byte_formats.source_of``).
    """

    def __init__(self, format: Format) -> None:
        self.source = byte_formats.source_of(format)
        first = "" if format.rope is not None else "content_"
        self.modes = {mode: getattr(self, first + mode) for mode in OF_FP8}

    @cute.jit
    def pages(
        self,
        kv: cute.Tensor,  # u8 (pages, P, 1, bytes of a token)
        block_table: cute.Tensor,  # i32 (b, width)
        cache_seqlens: cute.Tensor,  # i32 (b,)
        out_nope: cute.Tensor,  # out dtype (b, max_len, content channels)
        out_rope: cute.Tensor,  # out dtype (b, max_len, 64)
        stream: Any,
    ) -> None:
        """``fetch_pages``."""
        outs = (out_nope, out_rope)
        _launch_pages(self.source(kv), block_table, cache_seqlens, outs, 1, stream)

    @cute.jit
    def indices(
        self,
        kv: cute.Tensor,  # u8 (pages, P, 1, bytes of a token)
        indices: cute.Tensor,  # i32|i64 (n,)
        out_nope: cute.Tensor,  # out dtype (n, content channels)
        out_rope: cute.Tensor,  # out dtype (n, 64)
        stream: Any,
    ) -> None:
        """``fetch_indices``."""
        _launch_indices(self.source(kv), indices, (out_nope, out_rope), 1, stream)

    @cute.jit
    def ragged(
        self,
        kv: cute.Tensor,  # u8 (pages, P, 1, bytes of a token)
        block_table: cute.Tensor,  # i32 (b, width)
        cu_seqlens: cute.Tensor,  # i32 (b + 1,)
        seq_starts: cute.Tensor,  # i32 (b,), or (0,): all 0
        out_nope: cute.Tensor,  # out dtype (total, content channels)
        out_rope: cute.Tensor,  # out dtype (total, 64)
        stream: Any,
    ) -> None:
        """``fetch_ragged``."""
        tables = (block_table, cu_seqlens, seq_starts)
        _launch_ragged(self.source(kv), tables, (out_nope, out_rope), 1, stream)

    @cute.jit
    def content_pages(
        self,
        kv: cute.Tensor,  # u8 (pages, P, 1, bytes of a token)
        block_table: cute.Tensor,  # i32 (b, width)
        cache_seqlens: cute.Tensor,  # i32 (b,)
        out_nope: cute.Tensor,  # out dtype (b, max_len, content channels)
        stream: Any,
    ) -> None:
        """``fetch_pages``."""
        outs = (out_nope, None)
        _launch_pages(self.source(kv), block_table, cache_seqlens, outs, 1, stream)

    @cute.jit
    def content_indices(
        self,
        kv: cute.Tensor,  # u8 (pages, P, 1, bytes of a token)
        indices: cute.Tensor,  # i32|i64 (n,)
        out_nope: cute.Tensor,  # out dtype (n, content channels)
        stream: Any,
    ) -> None:
        """``fetch_indices``."""
        _launch_indices(self.source(kv), indices, (out_nope, None), 1, stream)

    @cute.jit
    def content_ragged(
        self,
        kv: cute.Tensor,  # u8 (pages, P, 1, bytes of a token)
        block_table: cute.Tensor,  # i32 (b, width)
        cu_seqlens: cute.Tensor,  # i32 (b + 1,)
        seq_starts: cute.Tensor,  # i32 (b,), or (0,): all 0
        out_nope: cute.Tensor,  # out dtype (total, content channels)
        stream: Any,
    ) -> None:
        """``fetch_ragged``."""
        tables = (block_table, cu_seqlens, seq_starts)
        _launch_ragged(self.source(kv), tables, (out_nope, None), 1, stream)


@cute.jit
def _launch_pages(
    cache: Any, block_table: Any, cache_seqlens: Any, outs: Any, heads: Any, stream: Any
) -> None:
    """One CTA for WARPS * TOKENS consecutive tokens of a request and head."""
    b, max_len = outs[0].shape[0], outs[0].shape[1]
    by_page = compat.fast_divisor(cache.shape[1])
    if b * max_len > 0:  # an empty grid is a launch error
        _pages(cache, block_table, cache_seqlens, *outs, by_page).launch(
            grid=((max_len + (WARPS * TOKENS - 1)) // (WARPS * TOKENS), b, heads),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )


@cute.jit
def _launch_indices(cache: Any, indices: Any, outs: Any, heads: Any, stream: Any) -> None:
    """One CTA for WARPS * TOKENS indices and a head."""
    n = indices.shape[0]
    by_page = compat.fast_divisor(cache.shape[1])
    if n > 0:
        _indices(cache, indices, *outs, by_page).launch(
            grid=((n + (WARPS * TOKENS - 1)) // (WARPS * TOKENS), 1, heads),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )


@cute.jit
def _launch_ragged(cache: Any, tables: Any, outs: Any, heads: Any, stream: Any) -> None:
    """One CTA for WARPS * TOKENS rows of the capacity and a head."""
    total, b = outs[0].shape[0], tables[0].shape[0]
    by_page = compat.fast_divisor(cache.shape[1])
    if cutlass.min(total, b) > 0:  # an empty grid is a launch error
        _ragged(cache, *tables, *outs, by_page).launch(
            grid=((total - 1) // (WARPS * TOKENS) + 1, 1, heads),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )


def _store_token(
    cache: Any, loaded: Any, sigma: Any, to: tuple[Any, Any], lane: Any, dt: Any, valid: Any
) -> None:
    """Converts and stores one token at the pointers; zeros where ``valid`` (or None) is false."""
    chunks, rope_word = loaded

    def put(ptr: Any, words: list[Any], lane: Any, left: int) -> None:
        """Store ``words``, zeros if ``valid`` is false; lanes from ``left`` on store nothing."""
        if valid is not None:
            words = [Uint32(cutlass.select_(valid, w, Uint32(0))) for w in words]
        if left == quant.WARP:
            compat.store_words(ptr, words)
        else:
            byte_formats.store_where(lane < left, ptr, words)

    vec, (channels, rope_channels) = quant.lane_channels(dt), cache.channels
    for j, words in enumerate(chunks):
        left = quant.lanes_in(dt, j, channels)
        put(to[0] + j * quant.WARP * vec, cache.content_words(words, sigma, j, dt), lane, left)
    if rope_channels:
        put(to[1], cache.rope_words(rope_word, sigma, dt), lane, quant.WARP)


def _load_at(cache: Any, page: Any, offset: Any, head: Any, lane: Any, dt: Any) -> Any:
    """Issues the loads of the token at ``offset`` of ``page``: (its words, sigma)."""
    at = cache.row(page, offset, head, lane, dt)
    token = cache.load(at, dt)
    return token, cache.scale_of(cache.load_scales(at, 1)[0], lane, dt)


def _load_run(
    cache: Any, table: Any, first: Any, length: Any, by_page: Any, head: Any, lane: Any, dt: Any
) -> list[Any]:
    """Issues the loads of TOKENS tokens of a request from ``first`` on: of each (its words, sigma).

    ``table``: block_table and the request's row.  Tokens past the length are read too, where they
    lie in the page of the first, or as the last: they are never stored.
    """
    block_table, batch = table

    def place(token: Any) -> tuple[Any, Any]:
        index, offset = divmod(token, by_page)
        page = block_table[batch, index]
        return cutlass.max(cutlass.min(page, cache.shape[0] - 1), 0), offset

    if not cache.shares_pages:
        tokens = [cutlass.min(first + i, length - 1) for i in range(TOKENS)]
        return [_load_at(cache, *place(token), head, lane, dt) for token in tokens]
    page, offset = place(first)
    at = cache.row(page, offset, head, lane, dt)
    loaded = [cache.load(cache.behind(at, i), dt) for i in range(TOKENS)]
    sigma = [cache.scale_of(word, lane, dt) for word in cache.load_scales(at, TOKENS)]
    return list(zip(loaded, sigma, strict=True))


def _output_pointers(cache: Any, outs: tuple[Any, Any], row: Any, head: Any, lane: Any) -> Any:
    """Pointers (content, RoPE or None) at which this lane writes ``row`` of outputs (rows, ...)."""
    nope, rope = outs
    vec = quant.lane_channels(nope.element_type)
    nope_to = nope.iterator + (Int64(row) * nope.stride[0] + lane * vec)
    if rope is None:
        return nope_to, None
    rope_to = rope.iterator + (Int64(row) * rope.stride[0] + lane * stored.ROPE_PER_LANE)
    return _of_head(cache, (nope_to, rope_to), outs, head)


def _behind(to: tuple[Any, Any], outs: tuple[Any, Any], i: int, axis: int) -> tuple[Any, Any]:
    """Pointers into the row ``i`` further, where rows lie along ``axis``."""
    nope = to[0] + i * outs[0].stride[axis]
    return nope, None if outs[1] is None else to[1] + i * outs[1].stride[axis]


def _padded_pointers(
    cache: Any, outs: tuple[Any, Any], batch: Any, row: Any, head: Any, lane: Any
) -> Any:
    """Pointers (content, RoPE or None) at which this lane writes token ``row`` of a sequence, in
    outputs (b, max_len, ...)."""
    nope, rope = outs
    vec = quant.lane_channels(nope.element_type)
    nope_to = nope.iterator + (batch * nope.stride[0] + row * nope.stride[1] + lane * vec)
    if rope is None:
        return nope_to, None
    per_lane = stored.ROPE_PER_LANE
    rope_to = rope.iterator + (batch * rope.stride[0] + row * rope.stride[1] + lane * per_lane)
    return _of_head(cache, (nope_to, rope_to), outs, head)


def _of_head(cache: Any, to: tuple[Any, Any], outs: tuple[Any, Any], head: Any) -> Any:
    """Pointers into a head's rows; results of a one-headed cache have no such dimension."""
    if not cache.heads:
        return to
    return tuple(ptr + Int64(head) * out.stride[-2] for ptr, out in zip(to, outs))


@cute.kernel
def _pages(
    cache: Any,
    block_table: cute.Tensor,
    cache_seqlens: cute.Tensor,
    out_nope: cute.Tensor,
    out_rope: Any,  # None of a format without
    by_page: compat.FastDivisor,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    block, batch, head = cute.arch.block_idx()
    lane = tidx % quant.WARP
    first = (block * WARPS + tidx // quant.WARP) * TOKENS
    dt = out_nope.element_type
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    length = cutlass.min(cache_seqlens[batch], out_nope.shape[1])
    length = cutlass.min(length, block_table.shape[1] * cache.shape[1])
    if first < length:
        loaded = _load_run(cache, (block_table, batch), first, length, by_page, head, lane, dt)
        outs = (out_nope, out_rope)
        to = _padded_pointers(cache, outs, batch, first, head, lane)
        for i in cutlass.range_constexpr(TOKENS):
            if first + i < length:
                row = _behind(to, outs, i, 1)
                _store_token(cache, *loaded[i], row, lane, dt, None)


@cute.kernel
def _indices(
    cache: Any,
    indices: cute.Tensor,
    out_nope: cute.Tensor,
    out_rope: Any,  # None of a format without
    by_page: compat.FastDivisor,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    block, _, head = cute.arch.block_idx()
    lane = tidx % quant.WARP
    first = (block * WARPS + tidx // quant.WARP) * TOKENS
    dt = out_nope.element_type
    n = indices.shape[0]
    slots = Int64(cache.shape[0]) * cache.shape[1]
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    if first < n:
        index = [indices[cutlass.min(first + i, n - 1)] for i in range(TOKENS)]
        valid, loaded = [], []
        for i in cutlass.range_constexpr(TOKENS):
            ok = index[i] >= 0 and Int64(index[i]) < slots
            # an invalid index reads slot 0, whose page exists, and stores zeros; of valid ones 32
            # bits are enough: 2^31 tokens would be a pool of more than 1 TB
            page, offset = divmod(Int32(index[i]) if ok else Int32(0), by_page)
            valid.append(ok)
            loaded.append(_load_at(cache, page, offset, head, lane, dt))
        outs = (out_nope, out_rope)
        to = _output_pointers(cache, outs, first, head, lane)
        for i in cutlass.range_constexpr(TOKENS):
            if first + i < n:
                row = _behind(to, outs, i, 0)
                _store_token(cache, *loaded[i], row, lane, dt, valid[i])


@cute.kernel
def _ragged(
    cache: Any,
    block_table: cute.Tensor,
    cu_seqlens: cute.Tensor,
    seq_starts: cute.Tensor,
    out_nope: cute.Tensor,
    out_rope: Any,  # None of a format without
    by_page: compat.FastDivisor,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    block, _, head = cute.arch.block_idx()
    lane = tidx % quant.WARP
    first = (block * WARPS + tidx // quant.WARP) * TOKENS
    dt = out_nope.element_type
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    if first < out_nope.shape[0]:
        # each lane looks up one row, SEARCHERS lanes the same
        mine = first + lane // SEARCHERS
        request = _request_of(cu_seqlens, mine, lane)
        page, offset = _place(
            (block_table, cu_seqlens, seq_starts), request, mine, cache.shape, by_page
        )
        if mine >= out_nope.shape[0]:
            page = Int32(NO_ROW)
        if cute.arch.vote_any_sync(page != NO_ROW):
            loaded = []
            for i in cutlass.range_constexpr(TOKENS):
                # zeros read page 0, which exists
                real = cutlass.max(cute.arch.shuffle_sync(page, i * SEARCHERS), 0)
                at = cute.arch.shuffle_sync(offset, i * SEARCHERS)
                loaded.append(_load_at(cache, real, at, head, lane, dt))
            outs = (out_nope, out_rope)
            to = _output_pointers(cache, outs, first, head, lane)
            for i in cutlass.range_constexpr(TOKENS):
                # again: a page id of each row, kept, would be registers that fp32 rows lack
                found = cute.arch.shuffle_sync(page, i * SEARCHERS)
                if found != NO_ROW:
                    row = _behind(to, outs, i, 0)
                    _store_token(cache, *loaded[i], row, lane, dt, found >= 0)


@cute.jit
def _request_of(cu_seqlens: cute.Tensor, row: Int32, lane: Int32) -> Int32:
    """The last request that begins at ``row`` or before: -1 if none does, b behind the last.

    SEARCHERS lanes probe as many entries, which leaves one of SEARCHERS + 1 ranges between them;
    every warp takes as many rounds.  Of entries that do not ascend: some number of that range.
    """
    last = cu_seqlens.shape[0] - 1
    group, turn = lane // SEARCHERS, lane % SEARCHERS
    begun, left = Int32(0), last + 1  # entries known to be at most ``row``; not known of
    while left > 0:
        step = left // (SEARCHERS + 1) + 1  # ranges of step - 1 entries between the probes
        probe = begun + (turn + 1) * step - 1
        entry = cu_seqlens[cutlass.min(probe, last)]
        votes = Uint32(cute.arch.vote_ballot_sync(Boolean(probe <= last) & Boolean(entry <= row)))
        votes = (votes >> Uint32(group * SEARCHERS)) & Uint32((1 << SEARCHERS) - 1)
        begun += Int32(cute.arch.popc(votes)) * step
        left = step - 1
    return begun - 1


@cute.jit
def _place(tables: Any, request: Int32, row: Int32, shape: Any, by_page: Any) -> Any:
    """(page or ZEROS or NO_ROW, offset in it) of ``row``, whatever the tables hold.

    ``tables``: block_table, cu_seqlens, seq_starts; ``shape``: the cache's, (pages, P, ...).
    """
    block_table, cu_seqlens, seq_starts = tables
    b, width = block_table.shape
    known = cutlass.max(cutlass.min(request, b - 1), 0)
    token = Int64(row) - cu_seqlens[known]  # 64 bits: sums of any two entries
    if seq_starts.shape[0] > 0:
        token += seq_starts[known]
    held = cutlass.min(Int64(width) * shape[1], Int64(1 << 31))  # a table's tokens, in 32 bits
    cached = token >= 0 and token < held
    index, offset = divmod(Int32(token) if cached else Int32(0), by_page)
    page = block_table[known, index]
    if (page < 0) | (page >= shape[0]) | (not cached):
        page = Int32(ZEROS)
    if known != request:
        page = Int32(NO_ROW)
    return page, offset


# Host halves by format of the cache and mode.
OF_FP8 = {"pages": fetch_pages, "indices": fetch_indices, "ragged": fetch_ragged}
OF_ROWS = {
    "pages": fetch_rows_pages, "indices": fetch_rows_indices, "ragged": fetch_rows_ragged
}  # fmt: skip


def feasible(spec: VariantSpec) -> str | None:
    """Why this variant cannot be built, or None."""
    if spec.mode != "indices" and spec.index_dtype != "i32":
        return f"mode {spec.mode} reads no indices"
    return None


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    dt, i32 = compat.dtype(spec.in_dtype), compat.DTYPES["i32"]
    format = spec.format
    entries = OF_ROWS if format.rows else FromBytes(format).modes if format.named else OF_FP8
    page_size = compat.sym(MIN_PAGE, name="P")
    cache = byte_formats.fakes(format) if format.named else stored.fakes(format, page_size)
    heads = (cache["kv"].shape[2],) if format.rows else ()
    widths = {
        "out_nope": (*heads, format.content.count),
        "out_rope": (*heads, format.rope_channels),
    }
    if format.rope is None:
        del widths["out_rope"]
    n = compat.sym(name="n")
    flat = {name: compat.rows(dt, (n, *d)) for name, d in widths.items()}
    if spec.mode == "indices":
        indices = compat.vector(compat.dtype(spec.index_dtype), n)
        return entries[spec.mode], {**cache, "indices": indices, **flat}
    b, max_len = compat.sym(name="b"), compat.sym(name="max_len")
    table = compat.strided(i32, (b, compat.sym(name="width")), (compat.sym64(), 1), align=4)
    if spec.mode == "ragged":
        begins = compat.vector(i32, compat.sym(name="b_plus_1"))
        starts = compat.vector(i32, compat.sym(name="b_or_0"))
        return entries[spec.mode], {
            **cache, "block_table": table, "cu_seqlens": begins, "seq_starts": starts, **flat
        }  # fmt: skip
    outs = {name: compat.rows(dt, (b, max_len, *d)) for name, d in widths.items()}
    lengths = compat.vector(i32, b)
    return entries[spec.mode], {**cache, "block_table": table, "cache_seqlens": lengths, **outs}

"""fetch_index_k: gather index keys out of the paged index cache, as stored or multiplied out.

Roles        a warp takes ROWS keys, eight lanes each with 16 channels; no barrier.
             mode ``indices``: flat slots page * 64 + offset.
             mode ``ragged``: packed rows, row cu_seqlens[r] + t is key seq_starts[r] + t of request
             r, which the warp looks up (``packed_rows.py``).
Memory       registers only
Timeline     wait for the previous grid | slot, or request and page id | load 16 bytes and the scale
             | unpack, multiply, round | store
Bytes moved  132 a key read; 132 written as stored, 256 or 512 multiplied out

A slot outside the pool, and a row whose token is outside the block table or whose page id is
outside the pool, gives zeros, scale 0.  Rows behind the last request's are left as they are.
key = e4m3 -> fp32 (exact) * scale, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..blocks import compat, quant
from ..formats.index_cache import INDEX_DIM, PAGE, SCALES_AT
from .packed_rows import EACH, ROWS, request_of

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS = 4
CHANNELS = INDEX_DIM // EACH  # of a lane: 16 bytes of e4m3
ZEROS, NO_ROW = -1, -2  # in the place of a page id: a row of zeros; one that is not written


class FetchIndexK:
    """One variant; its host half is the method that takes what the variant takes."""

    def __init__(self, spec: VariantSpec) -> None:
        self.stored, self.mode = spec.key_dtype == "fp8", spec.mode

    @cute.jit
    def indices(
        self,
        cache: cute.Tensor,  # u8 (pages, bytes)
        indices: cute.Tensor,  # i32|i64 (n,)
        keys: cute.Tensor,  # u8 or a float (n, 128)
        scales: cute.Tensor,  # f32 (n,), or (0,) beside floats
        stream: Any,
    ) -> None:
        """Host half of mode ``indices``."""
        self._launch(cache, (indices,), keys, scales, stream)

    @cute.jit
    def ragged(
        self,
        cache: cute.Tensor,  # u8 (pages, bytes)
        block_table: cute.Tensor,  # i32 (b, width)
        cu_seqlens: cute.Tensor,  # i32 (b + 1,)
        seq_starts: cute.Tensor,  # i32 (b,), or (0,): all 0
        keys: cute.Tensor,  # u8 or a float (total, 128)
        scales: cute.Tensor,  # f32 (total,), or (0,) beside floats
        stream: Any,
    ) -> None:
        """Host half of mode ``ragged``."""
        if block_table.shape[0] > 0:
            self._launch(cache, (block_table, cu_seqlens, seq_starts), keys, scales, stream)

    @cute.jit
    def _launch(self, cache: Any, where: Any, keys: Any, scales: Any, stream: Any) -> None:
        n = keys.shape[0]
        if n > 0:  # an empty grid is a launch error
            self.kernel(cache, where, keys, scales).launch(
                grid=((n - 1) // (WARPS * ROWS) + 1, 1, 1),
                block=(WARPS * quant.WARP, 1, 1),
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(
        self, cache: cute.Tensor, where: Any, keys: cute.Tensor, scales: cute.Tensor
    ) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = tidx % quant.WARP
        first = (block * WARPS + tidx // quant.WARP) * ROWS
        row = first + lane // EACH
        compat.pdl_wait()
        compat.pdl_launch_dependents()
        n = keys.shape[0]
        if cutlass.const_expr(self.mode == "indices"):
            slot = Int64(where[0][cutlass.min(row, n - 1)])
            page, offset = Int32(ZEROS), Int32(0)
            if slot >= 0 and slot < Int64(cache.shape[0]) * PAGE:
                page, offset = Int32(slot >> 6), Int32(slot) & (PAGE - 1)
        else:
            request = request_of(where[1], first, lane)
            page, offset = _place(where, request, row, cache.shape[0])
        if row < n and page != NO_ROW:
            self._copy(cache, keys, scales, (row, page, offset, lane % EACH))

    @cute.jit
    def _copy(self, cache: Any, keys: Any, scales: Any, at: Any) -> None:
        """One lane's share of a key."""
        row, page, offset, part = at
        real = page >= 0
        begin = cache.iterator + Int64(cutlass.max(page, 0)) * cache.stride[0]
        words = compat.load_words(begin + (offset * INDEX_DIM + part * CHANNELS), CHANNELS // 4)
        scale = compat.load_words(begin + (SCALES_AT + 4 * offset), 1)[0]
        words, scale = (
            [Uint32(cutlass.select_(real, w, Uint32(0))) for w in some] for some in (words, [scale])
        )
        to = keys.iterator + (Int64(row) * keys.stride[0] + part * CHANNELS)
        if cutlass.const_expr(self.stored):
            compat.store_words(to, words)
            if part == 0:
                compat.store_words(scales.iterator + row, scale)
        else:
            dt = keys.element_type
            factor = scale[0].bitcast(Float32)
            made = quant.pack([v * factor for v in quant.unpack_e4m3(words)], dt)
            vector = compat.VECTOR_BYTES // 4
            for i in cutlass.range_constexpr(len(made) // vector):
                moved = to + i * (compat.VECTOR_BYTES * 8 // dt.width)
                compat.store_words(moved, made[i * vector : (i + 1) * vector])


@cute.jit
def _place(tables: Any, request: Int32, row: Int32, pages: Int32) -> Any:
    """(page or ZEROS or NO_ROW, offset in it) of ``row``, whatever the tables hold.

    ``tables``: block_table, cu_seqlens, seq_starts.
    """
    block_table, cu_seqlens, seq_starts = tables
    b, width = block_table.shape
    known = cutlass.max(cutlass.min(request, b - 1), 0)
    token = Int64(row) - cu_seqlens[known]  # 64 bits: sums of any two entries
    if seq_starts.shape[0] > 0:
        token += seq_starts[known]
    held = cutlass.min(Int64(width) * PAGE, Int64(1 << 31))  # a table's tokens, in 32 bits
    cached = token >= 0 and token < held
    at = Int32(token) if cached else Int32(0)
    page = block_table[known, at // PAGE]
    if (page < 0) | (page >= pages) | (not cached):
        page = Int32(ZEROS)
    if known != request:
        page = Int32(NO_ROW)
    return page, at % PAGE


def feasible(spec: VariantSpec) -> str | None:
    """Why this variant cannot be built, or None; see ``registry``."""
    if spec.mode != "indices" and spec.index_dtype != "i32":
        return f"mode {spec.mode} reads no indices"
    return None


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    i32, u8 = compat.DTYPES["i32"], compat.DTYPES["u8"]
    n = compat.sym(name="n")
    own = u8 if spec.key_dtype == "fp8" else compat.dtype(spec.key_dtype)
    fakes = {"cache": compat.rows(u8, (compat.sym(name="pages"), compat.sym(name="bytes")))}
    results = {
        "keys": compat.rows(own, (n, INDEX_DIM)),
        "scales": compat.vector(Float32, compat.sym(name="n_or_0")),
    }
    variant = FetchIndexK(spec)
    if spec.mode == "indices":
        fakes["indices"] = compat.vector(compat.dtype(spec.index_dtype), n)
        return variant.indices, fakes | results
    b = compat.sym(name="b")
    fakes |= {
        "block_table": compat.strided(i32, (b, compat.sym(name="width")), (compat.sym64(), 1), 4),
        "cu_seqlens": compat.vector(i32, compat.sym(name="b_plus_1")),
        "seq_starts": compat.vector(i32, compat.sym(name="b_or_0")),
    }
    return variant.ragged, fakes | results

"""The exported functions of decode: their arguments, one order for every arch.

The order is written down here alone, in ``__call__`` and in ``fake_args`` of each entry; entries
differ in their queries, their cache and where tokens are:

    Fp8Entry           planes of 8 bits, pages          SparseEntry    planes of 8 bits, a list
    DenseEntry         rows of 16 bits, pages           BytesEntry    rows of bytes, a list
    PagedBytesEntry   rows of bytes, pages             TwoListEntry   rows of bytes, two lists

Queries are (b_q, s_q, h, ...): b_q = b, or 1 for ragged ones, whose tokens then are all of s_q.
Entries of lists are (b_q, s_q, topk).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..blocks import compat
from ..blocks.types import BF16, U8
from ..combine.epilogue import Results
from ..formats.dims import HEAD_DIM_QK
from ..formats.dims import KV_LORA_RANK as D
from ..formats.dims import QK_ROPE_HEAD_DIM as R
from ..load.work_list import PagedWork, TwoWork, Work
from .launch import (
    Entry,
    Extents,
    Fakes,
    asks,
    call_of,
    entries,
    launch,
    lengths,
    paged,
    plan_and_results,
    scalars,
    sink,
)

if TYPE_CHECKING:
    from ..formats.format import Format
    from ..spec import VariantSpec


class Gmem(NamedTuple):
    """Tensors that are read and written without TMA."""

    work: Any  # ``Work``, ``PagedWork`` or ``TwoWork``
    results: Results


class Fp8Gmem(NamedTuple):
    """The same where queries and cache have scales."""

    q_scale: cute.Tensor  # (b, s_q, h)
    scale: cute.Tensor  # (pages, P)
    work: Work
    results: Results


class DenseGmem(NamedTuple):
    """The same of 16-bit decode, with pages of the cache and the divisor by its KV heads."""

    num_pages: Int32
    kv_heads: compat.FastDivisor
    work: Work
    results: Results


class Fp8Entry(Entry):
    """FP8 decode: planes of Q and of the cache, content and RoPE."""

    @cute.jit
    def __call__(
        self,
        q_nope: cute.Tensor, q_rope: cute.Tensor, q_scale: cute.Tensor, content: cute.Tensor,
        rope: cute.Tensor, scale: cute.Tensor, block_table: cute.Tensor,
        cache_seqlens: cute.Tensor, work_items: cute.Tensor, part_begin: cute.Tensor,
        split_begin: cute.Tensor, units: cute.Tensor, row_limits: cute.Tensor,
        cu_seqlens_q: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, o_accum: cute.Tensor,
        lse_accum: cute.Tensor, softmax_scale: Float32, causal: Int32, lse_factor: Float32,
        empty_lse: Float32, may_split: Int32, witness: Int32, stream,
    ):  # fmt: skip
        work = Work(block_table, cache_seqlens, work_items, part_begin, row_limits, cu_seqlens_q)
        gmem = Fp8Gmem(q_scale, scale, work, Results(out, lse, o_accum, lse_accum))
        tma = self.tensor_maps((q_nope, q_rope), (content, rope))
        call = call_of(q_nope, units, softmax_scale, causal, lse_factor, empty_lse, witness)
        pages = self.decode.loads.work
        tiles = cute.ceil_div(block_table.shape[1] * pages.page_size, pages.tile)
        listed = self.listed(work, tiles, pages.tile, asks(call, may_split))
        launch(self.decode, tma, gmem, call, listed, split_begin, units, may_split, stream)

    @staticmethod
    def fake_args(spec: VariantSpec) -> Fakes:
        """Symbolic arguments by name, in the order of ``__call__``."""
        at, pages = Extents.fake(), compat.sym(name="pages")
        return {
            **_quantised_q(at), **compat.cache_fakes(pages, spec.page_size), **paged(at),
            **plan_and_results(at, compat.dtype(spec.out_dtype)), **scalars(causal=True),
        }  # fmt: skip


@cute.jit
def row_facts(work_list, gmem, call, batch, rows, row):
    """(factor of the logits in log2 units, number of visible tokens) of the CTA's row ``row``, of
    FP8 decode."""
    scale_of = lambda b, s, head: gmem.q_scale[b, s, head]
    return work_list.row_facts(gmem.work, call, batch, rows.first + row, rows.end, scale_of)


class DenseEntry(Entry):
    """16-bit decode: one plane of Q and of the cache.

    With several KV heads a sequence of the work list is a (sequence, KV head) of the caller's,
    number sequence * heads + head, and has the query heads of one KV head.
    """

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, cache: cute.Tensor, block_table: cute.Tensor, cache_seqlens: cute.Tensor,
        work_items: cute.Tensor, part_begin: cute.Tensor, split_begin: cute.Tensor,
        units: cute.Tensor, row_limits: cute.Tensor, cu_seqlens_q: cute.Tensor, out: cute.Tensor,
        lse: cute.Tensor, o_accum: cute.Tensor, lse_accum: cute.Tensor, softmax_scale: Float32,
        causal: Int32, lse_factor: Float32, empty_lse: Float32, may_split: Int32, witness: Int32,
        stream,
    ):  # fmt: skip
        pages, _, kv_heads, _ = cache.shape
        gmem = DenseGmem(
            pages, compat.fast_divisor(kv_heads),
            Work(block_table, cache_seqlens, work_items, part_begin, row_limits, cu_seqlens_q),
            Results(out, lse, o_accum, lse_accum),
        )  # fmt: skip
        tma = self.tensor_maps((q,), (cache,))
        call = call_of(q, units, softmax_scale, causal, lse_factor, empty_lse, witness)
        launch(self.decode, tma, gmem, call, None, split_begin, units, may_split, stream)

    @staticmethod
    def fake_args(spec: VariantSpec) -> Fakes:
        """Symbolic arguments by name, in the order of ``__call__``."""
        at, dtype = Extents.fake(), compat.dtype(spec.dtype)
        shape = compat.sym(name="pages"), spec.page_size, compat.sym(name="h_kv"), HEAD_DIM_QK
        return {
            "q": compat.contiguous(dtype, (*at.rows, HEAD_DIM_QK)),
            "cache": compat.rows(dtype, shape),
            **paged(at), **plan_and_results(at, dtype, dtype), **scalars(causal=True),
        }  # fmt: skip


class SparseEntry(Entry):
    """Sparse FP8 decode: a query token has a row of ``indices`` where a sequence has one of the
    block table, and ``topk_length`` is what ``cache_seqlens`` is there.  No causal rule holds."""

    @cute.jit
    def __call__(
        self,
        q_nope: cute.Tensor, q_rope: cute.Tensor, q_scale: cute.Tensor, content: cute.Tensor,
        rope: cute.Tensor, scale: cute.Tensor, indices: cute.Tensor, topk_length: cute.Tensor,
        attn_sink: cute.Tensor, work_items: cute.Tensor, part_begin: cute.Tensor,
        split_begin: cute.Tensor, units: cute.Tensor, row_limits: cute.Tensor,
        cu_seqlens_q: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, o_accum: cute.Tensor,
        lse_accum: cute.Tensor, softmax_scale: Float32, lse_factor: Float32, empty_lse: Float32,
        may_split: Int32, witness: Int32, stream,
    ):  # fmt: skip
        work = Work(indices, topk_length, work_items, part_begin, row_limits, cu_seqlens_q)
        gmem = Fp8Gmem(q_scale, scale, work, Results(out, lse, o_accum, lse_accum, attn_sink))
        tma = self.tensor_maps((q_nope, q_rope), (content, rope))
        call = call_of(q_nope, units, softmax_scale, Int32(0), lse_factor, empty_lse, witness)
        listed = self.listed_once(work, indices, asks(call, may_split))
        launch(self.decode, tma, gmem, call, listed, split_begin, units, may_split, stream)

    @staticmethod
    def fake_args(spec: VariantSpec) -> Fakes:
        """Symbolic arguments by name, in the order of ``__call__``; ``indices``: (b_q, s_q,
        topk)."""
        at, free = Extents.fake(), compat.sym64
        pages, page_size = compat.sym(name="pages"), compat.sym(name="P")
        return {
            **_quantised_q(at),
            "content": compat.rows(U8, (pages, page_size, D)),
            "rope": compat.rows(BF16, (pages, page_size, R)),
            "scale": compat.strided(Float32, (pages, page_size), (free(), free()), 4),
            **entries(at, "indices", "topk"), **lengths(at), **sink(),
            **plan_and_results(at, compat.dtype(spec.out_dtype)), **scalars(causal=False),
        }  # fmt: skip


class BytesEntry(Entry):
    """Sparse decode over rows of bytes (ds_mla.py, nope.py): the cache is one tensor of bytes, and
    queries are 16 bits as they are.

    Their content is the first channels of ``q``, their RoPE the last ones of ``q_rope``: one tensor
    twice, or two, whose rows lie ``q_stride`` and ``q_rope_stride`` elements apart.
    """

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, q_rope: cute.Tensor, cache: cute.Tensor, indices: cute.Tensor,
        topk_length: cute.Tensor,
        attn_sink: cute.Tensor, work_items: cute.Tensor, part_begin: cute.Tensor,
        split_begin: cute.Tensor, units: cute.Tensor, row_limits: cute.Tensor,
        cu_seqlens_q: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, o_accum: cute.Tensor,
        lse_accum: cute.Tensor, softmax_scale: Float32, lse_factor: Float32, empty_lse: Float32,
        may_split: Int32, witness: Int32, q_stride: Int64, q_rope_stride: Int64, stream,
    ):  # fmt: skip
        work = Work(indices, topk_length, work_items, part_begin, row_limits, cu_seqlens_q)
        gmem = Gmem(work, Results(out, lse, o_accum, lse_accum, attn_sink))
        tma = self.tensor_maps((q, q_rope, q_stride, q_rope_stride), (cache,))
        call = call_of(q, units, softmax_scale, Int32(0), lse_factor, empty_lse, witness)
        listed = self.listed_once(work, indices, asks(call, may_split))
        launch(self.decode, tma, gmem, call, listed, split_begin, units, may_split, stream)

    @staticmethod
    def fake_args(spec: VariantSpec) -> Fakes:
        """Symbolic arguments by name, in the order of ``__call__``; ``indices``: (b_q, s_q,
        topk)."""
        at, format = Extents.fake(), spec.format
        return {
            **_two_queries(at), "cache": _bytes(format),
            **entries(at, "indices", "topk"), **lengths(at), **sink(),
            **plan_and_results(at, compat.dtype(spec.out_dtype)), **scalars(causal=False),
            **_query_strides(format),
        }  # fmt: skip


class TwoListEntry(Entry):
    """Sparse decode over DeepSeek V4's and V4.1's caches (v4.py, v41.py): as ``BytesEntry``, but a
    query token may have a second list, over a second cache."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, q_rope: cute.Tensor, cache: cute.Tensor, indices: cute.Tensor,
        topk_length: cute.Tensor,
        extra_cache: cute.Tensor, extra_indices: cute.Tensor, extra_length: cute.Tensor,
        attn_sink: cute.Tensor, work_items: cute.Tensor, part_begin: cute.Tensor,
        split_begin: cute.Tensor, units: cute.Tensor, row_limits: cute.Tensor,
        cu_seqlens_q: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, o_accum: cute.Tensor,
        lse_accum: cute.Tensor, softmax_scale: Float32, lse_factor: Float32, empty_lse: Float32,
        may_split: Int32, witness: Int32, q_stride: Int64, q_rope_stride: Int64, stream,
    ):  # fmt: skip
        work = TwoWork(
            indices, topk_length, work_items, part_begin, row_limits, cu_seqlens_q, extra_indices,
            extra_length,
        )  # fmt: skip
        gmem = Gmem(work, Results(out, lse, o_accum, lse_accum, attn_sink))
        tma = self.tensor_maps((q, q_rope, q_stride, q_rope_stride), (cache, extra_cache))
        call = call_of(q, units, softmax_scale, Int32(0), lse_factor, empty_lse, witness)
        tile = self.decode.loads.work.tile
        tiles = cute.ceil_div(indices.shape[2], tile) + cute.ceil_div(extra_indices.shape[2], tile)
        # no coverage check: ``topk_length`` describes only the first list
        listed = self.listed(work, tiles, tile, Int32(0))
        launch(self.decode, tma, gmem, call, listed, split_begin, units, may_split, stream)

    @staticmethod
    def fake_args(spec: VariantSpec) -> Fakes:
        """Symbolic arguments by name, in the order of ``__call__``.

        Lists are (b_q, s_q, topk); without a second cache ``extra_indices`` is (b_q, s_q, 0),
        ``extra_length`` (0,) and ``extra_cache`` the first cache.
        """
        at, format = Extents.fake(), spec.format
        return {
            **_two_queries(at), "cache": _bytes(format),
            **entries(at, "indices", "topk"), **lengths(at),
            "extra_cache": _bytes(format, "extra_"),
            **entries(at, "extra_indices", "extra_topk"),
            "extra_length": compat.vector(Int32, compat.sym(name="b_or_0")), **sink(),
            **plan_and_results(at, compat.dtype(spec.out_dtype)), **scalars(causal=False),
            **_query_strides(format),
        }  # fmt: skip


class PagedBytesEntry(Entry):
    """Dense decode over caches of bytes: a sequence has a row of the block table, and the size of a
    page is the cache's second extent."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, cache: cute.Tensor, block_table: cute.Tensor, cache_seqlens: cute.Tensor,
        work_items: cute.Tensor, part_begin: cute.Tensor, split_begin: cute.Tensor,
        units: cute.Tensor, row_limits: cute.Tensor, cu_seqlens_q: cute.Tensor, out: cute.Tensor,
        lse: cute.Tensor, o_accum: cute.Tensor, lse_accum: cute.Tensor, softmax_scale: Float32,
        causal: Int32, lse_factor: Float32, empty_lse: Float32, may_split: Int32, witness: Int32,
        stream,
    ):  # fmt: skip
        work = PagedWork(
            block_table, cache_seqlens, work_items, part_begin, row_limits, cu_seqlens_q,
            compat.fast_divisor(cache.shape[1]),
        )  # fmt: skip
        gmem = Gmem(work, Results(out, lse, o_accum, lse_accum))
        tma = self.tensor_maps((q,), (cache,))
        call = call_of(q, units, softmax_scale, causal, lse_factor, empty_lse, witness)
        launch(self.decode, tma, gmem, call, None, split_begin, units, may_split, stream)

    @staticmethod
    def fake_args(spec: VariantSpec) -> Fakes:
        """Symbolic arguments by name, in the order of ``__call__``."""
        at, format = Extents.fake(), spec.format
        return {
            "q": compat.contiguous(BF16, (*at.rows, format.channels)),
            "cache": _bytes(format), **paged(at),
            **plan_and_results(at, compat.dtype(spec.out_dtype)), **scalars(causal=True),
        }  # fmt: skip


def _quantised_q(at: Extents) -> Fakes:
    free = compat.sym64
    return {
        "q_nope": compat.contiguous(U8, (*at.rows, D)),
        "q_rope": compat.contiguous(BF16, (*at.rows, R)),
        "q_scale": compat.strided(Float32, at.rows, (free(), free(), free()), 4),
    }


def _two_queries(at: Extents) -> Fakes:
    """Both query tensors; strides are told apart from them."""
    free = compat.sym64
    return {
        name: compat.strided(
            BF16, (*at.rows, compat.sym(R, f"{name}_channels")), (free(), free(), free(), 1)
        )
        for name in ("q", "q_rope")
    }


def _query_strides(format: Format) -> Fakes:
    """Elements from row to row of either query tensor, multiples of 8."""
    return {name: Int64(format.channels) for name in ("q_stride", "q_rope_stride")}


def _bytes(format: Format, prefix: str = "") -> Any:
    """Fake of a cache, bytes (pages, P, those of a token).

    Rows lie anywhere; formats of two lists have whole pages, which lie at multiples of 16 bytes.
    """
    shape = (compat.sym(name=f"{prefix}pages"), compat.sym(name=f"{prefix}P"), format.token_bytes)
    if not format.two_lists:
        return compat.rows(U8, shape)
    return compat.strided(U8, shape, (compat.sym64(compat.VECTOR_BYTES), format.token_bytes, 1))

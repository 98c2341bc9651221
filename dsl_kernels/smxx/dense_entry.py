"""The exported function of 16-bit decode: its arguments and its host half.

The order of arguments is written down here alone, in ``__call__`` and in ``fake_args``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import compat
from ..common import partials
from ..common.epilogue import Results
from ..common.paged_tma import PagedTma
from ..common.work_list import Call, Work, rows_of_each
from ..dims import HEAD_DIM_QK, ITEM_WORDS
from ..dims import KV_LORA_RANK as D
from . import merge

if TYPE_CHECKING:
    from ..spec import VariantSpec


class Tma(NamedTuple):
    """The one plane of Q and of the cache, pages of the cache, divisor by its KV heads."""

    q: tuple
    kv: tuple
    num_pages: Int32
    kv_heads: compat.FastDivisor


class Gmem(NamedTuple):
    """Tensors that are read and written without TMA."""

    work: Work
    results: Results


class DenseEntry:
    """TMA descriptors, the launch, and the merge behind it.

    A subclass has ``layouts()`` with the shared-memory layouts ``q`` and ``k``,
    ``storage(layouts)`` and the kernel, ``kernel(tma, gmem, call)``.

    With several KV heads a sequence of the work list is a (sequence, KV head) of the caller's,
    number sequence * heads + head, and has the query heads of one KV head.

    Attributes:
        spec: the variant; a CTA, or a cluster of ``spec.cluster``, owns ``spec.row_tile`` rows.
        loads: its producers.
        threads: of a CTA.
    """

    def __init__(self, spec: VariantSpec, loads: PagedTma, threads: int):
        self.spec, self.loads, self.threads = spec, loads, threads

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, cache: cute.Tensor, block_table: cute.Tensor, cache_seqlens: cute.Tensor,
        work_items: cute.Tensor, part_begin: cute.Tensor, split_begin: cute.Tensor,
        units: cute.Tensor, row_limits: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
        o_accum: cute.Tensor, lse_accum: cute.Tensor, softmax_scale: Float32, causal: Int32,
        lse_factor: Float32, empty_lse: Float32, may_split: Int32, stream,
    ):  # fmt: skip
        layouts, loads = self.layouts(), self.loads
        self.Storage = self.storage(layouts)
        pages, _, kv_heads, _ = cache.shape
        tma = Tma(
            loads.load_q((q,), (layouts.q,)), loads.load_kv((cache,), (layouts.k,)), pages,
            compat.fast_divisor(kv_heads),
        )  # fmt: skip
        gmem = Gmem(
            Work(block_table, cache_seqlens, work_items, part_begin, row_limits),
            Results(out, lse, o_accum, lse_accum),
        )
        b, s_q, h, _ = q.shape
        call = Call(
            compat.fast_divisor(h), compat.fast_divisor(s_q), b * s_q * h,
            rows_of_each(units, s_q * h), softmax_scale, causal, lse_factor, empty_lse,
        )  # fmt: skip
        cluster = self.spec.cluster
        self.kernel(tma, gmem, call).launch(
            grid=(cute.ceil_div(o_accum.shape[1], self.spec.row_tile) * cluster,
                  cute.size(part_begin) - 1, 1),
            block=(self.threads, 1, 1), cluster=(cluster, 1, 1),
            stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )  # fmt: skip
        if may_split != 0:  # on the host: the caller knows when no plan could cut a sequence
            merge.launch(
                merge.Decode(None), o_accum, lse_accum, split_begin, units, out, lse, lse_factor,
                empty_lse, stream,
            )  # fmt: skip


def fake_args(spec: VariantSpec) -> dict[str, Any]:
    """Symbolic arguments of the exported function by name, in the order of ``__call__``.

    Queries are (b_q, s_q, h, 576): b_q = b, or 1 for ragged ones, whose tokens then are all of s_q.
    """
    names = ["b_q", "s_q", "h", "b", "pages", "h_kv", "width", "n_items", "parts_plus_1", "slots"]
    b_q, s_q, h, b, pages, h_kv, width, items, parts1, slots = (compat.sym(name=x) for x in names)
    unit_rows, dtype = compat.sym(name="unit_rows"), compat.dtype(spec.dtype)
    return {
        "q": compat.contiguous(dtype, (b_q, s_q, h, HEAD_DIM_QK)),
        "cache": compat.rows(dtype, (pages, spec.page_size, h_kv, HEAD_DIM_QK)),
        "block_table": compat.strided(Int32, (b, width), (compat.sym64(), 1), 4),
        "cache_seqlens": compat.vector(Int32, b),
        "work_items": compat.contiguous(Int32, (items, ITEM_WORDS)),
        "part_begin": compat.vector(Int32, parts1),
        "split_begin": compat.vector(Int32, compat.sym(name="n_units_plus_1")),
        "units": compat.units_fake(Int32),
        "row_limits": compat.vector(Int32, compat.sym(name="tokens_or_0")),
        "out": compat.contiguous(dtype, (b_q, s_q, h, D)),
        "lse": compat.contiguous(Float32, (b_q, h, s_q), 4),
        "o_accum": partials.fake(slots, unit_rows, dtype),
        "lse_accum": compat.contiguous(Float32, (slots, unit_rows), 4),
        "softmax_scale": Float32(1.0),
        "causal": Int32(1),
        "lse_factor": Float32(1.0),
        "empty_lse": Float32(0.0),
        "may_split": Int32(1),
    }

"""The exported function of 16-bit decode: its arguments.

The order of arguments is written down here alone, in ``__call__`` and in ``fake_args``; what comes
behind the cache is every decode's (decode_entry.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import compat
from ..common.epilogue import Results
from ..common.work_list import Work
from ..dims import HEAD_DIM_QK
from .decode_entry import call_of, fakes_behind_cache, launch, tensor_maps

if TYPE_CHECKING:
    from ..spec import VariantSpec


class Gmem(NamedTuple):
    """Pages of the cache, divisor by its KV heads, and tensors that are no TMA's."""

    num_pages: Int32
    kv_heads: compat.FastDivisor
    work: Work
    results: Results


class DenseEntry:
    """One plane of Q and of the cache.

    With several KV heads a sequence of the work list is a (sequence, KV head) of the caller's,
    number sequence * heads + head, and has the query heads of one KV head.

    Attributes:
        decode: the kernel (decode_entry.py).
    """

    def __init__(self, decode: Any):
        self.decode = decode

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
        gmem = Gmem(
            pages, compat.fast_divisor(kv_heads),
            Work(block_table, cache_seqlens, work_items, part_begin, row_limits, cu_seqlens_q),
            Results(out, lse, o_accum, lse_accum),
        )  # fmt: skip
        tma = tensor_maps(self.decode, (q,), (cache,))
        call = call_of(q.shape, units, softmax_scale, causal, lse_factor, empty_lse, witness)
        launch(self.decode, tma, gmem, call, None, split_begin, units, may_split, stream)


def fake_args(spec: VariantSpec) -> dict[str, Any]:
    """Symbolic arguments of the exported function by name, in the order of ``__call__``.

    Queries are (b_q, s_q, h, 576): b_q = b, or 1 for ragged ones, whose tokens then are all of s_q.
    """
    b_q, s_q, h, b, pages, h_kv = (
        compat.sym(name=x) for x in ("b_q", "s_q", "h", "b", "pages", "h_kv")
    )
    dtype = compat.dtype(spec.dtype)
    return {
        "q": compat.contiguous(dtype, (b_q, s_q, h, HEAD_DIM_QK)),
        "cache": compat.rows(dtype, (pages, spec.page_size, h_kv, HEAD_DIM_QK)),
        **fakes_behind_cache((b_q, s_q, h), b, dtype, dtype),
    }

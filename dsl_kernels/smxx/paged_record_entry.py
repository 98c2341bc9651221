"""The exported function of dense decode over caches of bytes: its arguments.

As record_entry.py's, but a sequence has a row of the block table where a query token has one of
``indices``; the size of a page is the cache's second extent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import compat
from ..common.epilogue import Results
from ..common.gather_pages import PagedWork
from ..common.types import BF16
from .decode_entry import call_of, fakes_behind_cache, launch, tensor_maps
from .record_entry import Gmem

if TYPE_CHECKING:
    from ..spec import VariantSpec


class PagedRecordEntry:
    """Queries and the cache, a tensor each.

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
        work = PagedWork(
            block_table, cache_seqlens, work_items, part_begin, row_limits, cu_seqlens_q,
            compat.fast_divisor(cache.shape[1]),
        )  # fmt: skip
        gmem = Gmem(work, Results(out, lse, o_accum, lse_accum))
        tma = tensor_maps(self.decode, (q,), (cache,))
        call = call_of(q.shape, units, softmax_scale, causal, lse_factor, empty_lse, witness)
        launch(self.decode, tma, gmem, call, None, split_begin, units, may_split, stream)


def fake_args(spec: VariantSpec, cache: Any, channels: int) -> dict[str, Any]:
    """Symbolic arguments of the exported function by name, in the order of ``__call__``.

    Queries are (b_q, s_q, h, channels): b_q = b, or 1 for ragged ones, whose tokens then are all of
    s_q.  ``cache`` is the fake of its bytes (pages, P, bytes of a token).
    """
    b_q, s_q, h, b = (compat.sym(name=x) for x in ("b_q", "s_q", "h", "b"))
    return {
        "q": compat.contiguous(BF16, (b_q, s_q, h, channels)),
        "cache": cache,
        **fakes_behind_cache((b_q, s_q, h), b, compat.dtype(spec.out_dtype)),
    }

"""The exported function of sparse decode over DeepSeek V4's and V4.1's caches (v4.py, v41.py): its
arguments.

As record_entry.py's, but a query token may have a second list, over a second cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import compat
from ..cache_records.record import Record
from ..cache_records.v4 import RECORD
from ..common.epilogue import Results
from ..common.gather_v4 import TwoWork
from ..common.types import U8
from .coverage import Listed
from .decode_entry import call_of, fakes_behind_cache, launch, tensor_maps
from .record_entry import Gmem, query_fakes, query_strides

if TYPE_CHECKING:
    from ..spec import VariantSpec


class TwoListEntry:
    """Queries, two caches, a list over each.

    Attributes:
        decode: the kernel (decode_entry.py).
    """

    def __init__(self, decode: Any):
        self.decode = decode

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
        tma = tensor_maps(self.decode, (q, q_rope, q_stride, q_rope_stride), (cache, extra_cache))
        causal = Int32(0)
        call = call_of(q.shape, units, softmax_scale, causal, lse_factor, empty_lse, witness)
        tile = self.decode.loads.work.tile
        tiles = cute.ceil_div(indices.shape[2], tile) + cute.ceil_div(extra_indices.shape[2], tile)
        # lengths of one list say nothing of both: whoever has tables from outside is not asked
        listed = Listed(
            work_items, part_begin, topk_length, tiles, compat.fast_divisor(tile), Int32(0)
        )
        launch(self.decode, tma, gmem, call, listed, split_begin, units, may_split, stream)


def fake_args(spec: VariantSpec, record: Record = RECORD) -> dict[str, Any]:
    """Symbolic arguments of the exported function by name, in the order of ``__call__``.

    Queries are (b_q, s_q, h, channels): b_q = b, or 1 for ragged ones, whose tokens then are all of
    s_q.
    Lists are (b_q, s_q, topk); without a second cache ``extra_indices`` is (b_q, s_q, 0),
    ``extra_length`` (0,) and ``extra_cache`` the first cache.  Of pages tokens are strides in name
    only.
    """
    b_q, s_q, h, b = (compat.sym(name=x) for x in ("b_q", "s_q", "h", "b"))
    behind = fakes_behind_cache((b_q, s_q, h), b, compat.dtype(spec.out_dtype))
    for name in ("block_table", "causal"):
        del behind[name]
    return {
        **query_fakes((b_q, s_q, h)),
        "cache": _pages("pages", "P", record),
        "indices": _list(b_q, s_q, "topk"),
        "topk_length": behind.pop("cache_seqlens"),
        "extra_cache": _pages("extra_pages", "extra_P", record),
        "extra_indices": _list(b_q, s_q, "extra_topk"),
        "extra_length": compat.vector(Int32, compat.sym(name="b_or_0")),
        "attn_sink": compat.vector(Float32, compat.sym(name="h_or_0")),
        **behind,
        **query_strides(record),
    }


def _list(b_q: Any, s_q: Any, width: str) -> Any:
    """Fake of a list of entries, whose query tokens lie anywhere."""
    free = compat.sym64
    return compat.strided(Int32, (b_q, s_q, compat.sym(name=width)), (free(), free(), 1), 4)


def _pages(pages: str, page_size: str, record: Record) -> Any:
    """Fake of a cache, bytes (pages, P, those of a token) whose pages lie at multiples of 16."""
    token = record.token_bytes
    shape = (compat.sym(name=pages), compat.sym(name=page_size), token)
    return compat.strided(U8, shape, (compat.sym64(compat.VECTOR_BYTES), token, 1))

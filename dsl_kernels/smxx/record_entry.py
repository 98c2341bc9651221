"""The exported function of sparse decode over rows of bytes (ds_mla.py, nope.py): its arguments.

As sparse_entry.py's, but the cache is one tensor of bytes, and queries are 16 bits as they are.
Their content is the first channels of ``q``, their RoPE the last ones of ``q_rope``: one tensor
twice, or two, whose rows lie ``q_stride`` and ``q_rope_stride`` elements apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import compat
from ..cache_records.ds_mla import RECORD
from ..cache_records.record import Record
from ..common.epilogue import Results
from ..common.types import BF16, U8
from ..common.work_list import Work
from ..dims import MERGE, QK_ROPE_HEAD_DIM
from .coverage import Listed
from .decode_entry import call_of, fakes_behind_cache, launch, tensor_maps

if TYPE_CHECKING:
    from ..spec import VariantSpec


class Gmem(NamedTuple):
    """Tensors that are read and written without TMA."""

    work: Work
    results: Results


class RecordEntry:
    """Queries and the cache, a tensor each.

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
        attn_sink: cute.Tensor, work_items: cute.Tensor, part_begin: cute.Tensor,
        split_begin: cute.Tensor, units: cute.Tensor, row_limits: cute.Tensor,
        cu_seqlens_q: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, o_accum: cute.Tensor,
        lse_accum: cute.Tensor, softmax_scale: Float32, lse_factor: Float32, empty_lse: Float32,
        may_split: Int32, witness: Int32, q_stride: Int64, q_rope_stride: Int64, stream,
    ):  # fmt: skip
        gmem = Gmem(
            Work(indices, topk_length, work_items, part_begin, row_limits, cu_seqlens_q),
            Results(out, lse, o_accum, lse_accum, attn_sink),
        )
        tma = tensor_maps(self.decode, (q, q_rope, q_stride, q_rope_stride), (cache,))
        causal = Int32(0)
        call = call_of(q.shape, units, softmax_scale, causal, lse_factor, empty_lse, witness)
        tile = self.decode.loads.work.tile
        tiles = cute.ceil_div(indices.shape[2], tile)
        listed = Listed(
            work_items, part_begin, topk_length, tiles, compat.fast_divisor(tile),
            Int32(cutlass.select_(call.rows_each > 0, may_split - MERGE, Int32(0))),
        )  # fmt: skip
        launch(self.decode, tma, gmem, call, listed, split_begin, units, may_split, stream)


def fake_args(spec: VariantSpec, record: Record = RECORD) -> dict[str, Any]:
    """Symbolic arguments of the exported function by name, in the order of ``__call__``.

    Queries are (b_q, s_q, h, channels): b_q = b, or 1 for ragged ones, whose tokens then are all of
    s_q.
    ``indices`` are (b_q, s_q, topk).
    """
    names = ["b_q", "s_q", "h", "b", "pages", "P", "topk"]
    b_q, s_q, h, b, pages, page_size, topk = (compat.sym(name=x) for x in names)
    behind = fakes_behind_cache((b_q, s_q, h), b, compat.dtype(spec.out_dtype))
    for name in ("block_table", "causal"):
        del behind[name]
    return {
        **query_fakes((b_q, s_q, h)),
        "cache": compat.rows(U8, (pages, page_size, record.token_bytes)),
        "indices": compat.strided(Int32, (b_q, s_q, topk), (compat.sym64(), compat.sym64(), 1), 4),
        "topk_length": behind.pop("cache_seqlens"),
        "attn_sink": compat.vector(Float32, compat.sym(name="h_or_0")),
        **behind,
        **query_strides(record),
    }


def query_fakes(rows: tuple[Any, Any, Any]) -> dict[str, Any]:
    """Fakes of both query tensors; ``rows``: (b_q, s_q, h).  Strides are told apart from them."""
    free = compat.sym64
    return {
        name: compat.strided(
            BF16, (*rows, compat.sym(QK_ROPE_HEAD_DIM, f"{name}_channels")),
            (free(), free(), free(), 1),
        )
        for name in ("q", "q_rope")
    }  # fmt: skip


def query_strides(record: Record) -> dict[str, Any]:
    """The last arguments: elements from row to row of either tensor, multiples of 8."""
    return {name: Int64(record.channels) for name in ("q_stride", "q_rope_stride")}

"""The exported function of sparse FP8 decode: its arguments.

As FP8 decode's (fp8_entry.py), but a query token has a row of ``indices`` where a sequence has one
of the block table, and ``topk_length`` is what ``cache_seqlens`` is there.  No causal rule holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import compat
from ..common.epilogue import Results
from ..common.types import BF16, U8
from ..common.work_list import Work
from ..dims import KV_LORA_RANK as D
from ..dims import MERGE
from ..dims import QK_ROPE_HEAD_DIM as R
from .coverage import Listed
from .decode_entry import call_of, fakes_behind_cache, launch, tensor_maps
from .fp8_entry import Gmem

if TYPE_CHECKING:
    from ..spec import VariantSpec


class SparseEntry:
    """Planes of Q and of the cache: content, RoPE.

    Attributes:
        decode: the kernel (decode_entry.py).
    """

    def __init__(self, decode: Any):
        self.decode = decode

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
        gmem = Gmem(
            q_scale, scale,
            Work(indices, topk_length, work_items, part_begin, row_limits, cu_seqlens_q),
            Results(out, lse, o_accum, lse_accum, attn_sink),
        )  # fmt: skip
        tma = tensor_maps(self.decode, (q_nope, q_rope), (content, rope))
        causal = Int32(0)
        call = call_of(q_nope.shape, units, softmax_scale, causal, lse_factor, empty_lse, witness)
        tile = self.decode.loads.work.tile
        tiles = cute.ceil_div(indices.shape[2], tile)
        listed = Listed(
            work_items, part_begin, topk_length, tiles, compat.fast_divisor(tile),
            Int32(cutlass.select_(call.rows_each > 0, may_split - MERGE, Int32(0))),
        )  # fmt: skip
        launch(self.decode, tma, gmem, call, listed, split_begin, units, may_split, stream)


def fake_args(spec: VariantSpec) -> dict[str, Any]:
    """Symbolic arguments of the exported function by name, in the order of ``__call__``.

    Queries are (b_q, s_q, h, ...): b_q = b, or 1 for ragged ones, whose tokens then are all of s_q.
    ``indices`` are (b_q, s_q, topk).
    """
    names = ["b_q", "s_q", "h", "b", "pages", "P", "topk"]
    b_q, s_q, h, b, pages, page_size, topk = (compat.sym(name=x) for x in names)
    free = compat.sym64
    behind = fakes_behind_cache((b_q, s_q, h), b, compat.dtype(spec.out_dtype))
    for name in ("block_table", "causal"):
        del behind[name]
    return {
        "q_nope": compat.contiguous(U8, (b_q, s_q, h, D)),
        "q_rope": compat.contiguous(BF16, (b_q, s_q, h, R)),
        "q_scale": compat.strided(Float32, (b_q, s_q, h), (free(), free(), free()), 4),
        "content": compat.rows(U8, (pages, page_size, D)),
        "rope": compat.rows(BF16, (pages, page_size, R)),
        "scale": compat.strided(Float32, (pages, page_size), (free(), free()), 4),
        "indices": compat.strided(Int32, (b_q, s_q, topk), (free(), free(), 1), 4),
        "topk_length": behind.pop("cache_seqlens"),
        "attn_sink": compat.vector(Float32, compat.sym(name="h_or_0")),
        **behind,
    }

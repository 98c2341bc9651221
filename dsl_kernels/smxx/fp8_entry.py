"""The exported function of FP8 decode: its arguments, one for every arch.

The order of arguments is written down here alone, in ``__call__`` and in ``fake_args``; what comes
behind the cache is every decode's (decode_entry.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:
    from ..spec import VariantSpec


class Gmem(NamedTuple):
    """Tensors that are read and written without TMA."""

    q_scale: cute.Tensor  # (b, s_q, h)
    scale: cute.Tensor  # (pages, P)
    work: Work
    results: Results


class Fp8Entry:
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
        rope: cute.Tensor, scale: cute.Tensor, block_table: cute.Tensor,
        cache_seqlens: cute.Tensor, work_items: cute.Tensor, part_begin: cute.Tensor,
        split_begin: cute.Tensor, units: cute.Tensor, row_limits: cute.Tensor,
        cu_seqlens_q: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, o_accum: cute.Tensor,
        lse_accum: cute.Tensor, softmax_scale: Float32, causal: Int32, lse_factor: Float32,
        empty_lse: Float32, may_split: Int32, witness: Int32, stream,
    ):  # fmt: skip
        gmem = Gmem(
            q_scale, scale,
            Work(block_table, cache_seqlens, work_items, part_begin, row_limits, cu_seqlens_q),
            Results(out, lse, o_accum, lse_accum),
        )  # fmt: skip
        tma = tensor_maps(self.decode, (q_nope, q_rope), (content, rope))
        call = call_of(q_nope.shape, units, softmax_scale, causal, lse_factor, empty_lse, witness)
        pages = self.decode.loads.work
        tiles = cute.ceil_div(block_table.shape[1] * pages.page_size, pages.tile)
        listed = Listed(
            work_items, part_begin, cache_seqlens, tiles, compat.fast_divisor(pages.tile),
            Int32(cutlass.select_(call.rows_each > 0, may_split - MERGE, Int32(0))),
        )  # fmt: skip
        launch(self.decode, tma, gmem, call, listed, split_begin, units, may_split, stream)


def fake_args(spec: VariantSpec) -> dict[str, Any]:
    """Symbolic arguments of the exported function by name, in the order of ``__call__``.

    Queries are (b_q, s_q, h, ...): b_q = b, or 1 for ragged ones, whose tokens then are all of s_q.
    """
    names = ["b_q", "s_q", "h", "b", "pages"]
    b_q, s_q, h, b, pages = (compat.sym(name=x) for x in names)
    free = compat.sym64
    return {
        "q_nope": compat.contiguous(U8, (b_q, s_q, h, D)),
        "q_rope": compat.contiguous(BF16, (b_q, s_q, h, R)),
        "q_scale": compat.strided(Float32, (b_q, s_q, h), (free(), free(), free()), 4),
        **compat.cache_fakes(pages, spec.page_size),
        **fakes_behind_cache((b_q, s_q, h), b, compat.dtype(spec.out_dtype)),
    }


@cute.jit
def row_facts(work_list, gmem, call, batch, rows, row):
    """(factor of the logits in log2 units, number of visible tokens) of the CTA's row ``row``."""
    scale_of = lambda b, s, head: gmem.q_scale[b, s, head]
    return work_list.row_facts(gmem.work, call, batch, rows.first + row, rows.end, scale_of)

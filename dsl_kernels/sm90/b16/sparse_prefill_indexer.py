"""Sparse prefill for SM90 that also says the LSE of what the indexer chose: for training with
DeepSeek's sparse attention, whose backward pass wants it.

``sparse_prefill`` (sparse_prefill.py) in all but one thing: behind the last tile of a list's first
``indexer_topk`` entries the softmax warpgroup writes the LSE of the tiles so far.  What precedes is
the same, and so are the bits of out, max_logits and lse.  A variant of its own, as two live sums
and a branch a tile are not for calls that do not ask.

Roles, shared memory and the timeline are those of sparse_prefill.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...blocks import compat
from ...load.work_list import LOG2E
from . import sparse_prefill
from .sparse_prefill import SparsePrefill, budget, feasible
from .sparse_prefill_parts import Gmem

if TYPE_CHECKING:
    from ...spec import VariantSpec

__all__ = ["budget", "build", "feasible"]


def build(spec: VariantSpec):
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    made = sparse_prefill.fake_args(spec)
    ctas, lse = made.pop("ctas"), made["lse"]
    scale = made.pop("softmax_scale")
    figures = compat.strided(Float32, lse.shape, (compat.sym64(), compat.sym64()), 4)
    return WithIndexer(spec), {
        **made, "lse_indexer": figures, "softmax_scale": scale, "indexer_tiles": Int32(1),
        "ctas": ctas,
    }  # fmt: skip


class WithIndexer(SparsePrefill):
    """The kernel of one head size and row tile."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # bf16 (s_q, h, d_qk)
        kv: cute.Tensor,  # bf16 (s_kv, 1, d_qk)
        indices: cute.Tensor,  # i32 (s_q, 1, topk), rows of kv
        topk_length: cute.Tensor,  # i32 (s_q,) or (0,)
        attn_sink: cute.Tensor,  # f32 (h,) or (0,)
        out: cute.Tensor,  # bf16 (s_q, h, 512)
        max_logits: cute.Tensor,  # f32 (s_q, h), natural
        lse: cute.Tensor,  # f32 (s_q, h), natural
        lse_indexer: cute.Tensor,  # f32 (s_q, h), natural
        softmax_scale: Float32,
        indexer_tiles: Int32,  # 64 entries each
        ctas: Int32,
        stream,
    ):
        heads, rows = Int32(q.shape[1]), self.loads.rows
        blocks = compat.fast_divisor((heads + (rows - 1)) // rows)
        gmem = Gmem(
            kv, indices, topk_length, attn_sink, out, max_logits, lse, heads, blocks,
            softmax_scale * LOG2E, ctas, lse_indexer, indexer_tiles,
        )  # fmt: skip
        self.launch((q,), gmem, stream)

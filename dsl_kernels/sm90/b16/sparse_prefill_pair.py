"""Sparse attention over BF16 rows for SM90 where content and RoPE of queries are a tensor each.

``sparse_prefill`` and its split lists (sparse_prefill_split.py) in all but the copies of Q: column
blocks of content come by one tensor map, the block of RoPE by another, so that each tensor has
strides of its own.  Decode over a BF16 cache is given queries so (``snapmla/sparse/rows.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...blocks import compat
from ...formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from . import sparse_prefill, sparse_prefill_split
from .sparse_prefill import SparsePrefill, budget, feasible
from .sparse_prefill_split import Lists, Merged, Split

if TYPE_CHECKING:
    from ...spec import VariantSpec

__all__ = ["budget", "build", "feasible"]


def build(spec: VariantSpec):
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    split = spec.lists == "split"
    fakes = (sparse_prefill_split if split else sparse_prefill).fake_args(spec)
    s_q, h, _ = fakes.pop("q").shape
    bf16 = compat.dtype("bf16")
    queries = {
        "q": compat.rows(bf16, (s_q, h, KV_LORA_RANK)),
        "q_rope": compat.rows(bf16, (s_q, h, QK_ROPE_HEAD_DIM)),
    }
    return (SplitPair if split else Pair)(spec), {**queries, **fakes}


class Pair(SparsePrefill):
    """Whole lists."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, q_rope: cute.Tensor, kv: cute.Tensor, indices: cute.Tensor,
        topk_length: cute.Tensor, attn_sink: cute.Tensor, out: cute.Tensor,
        max_logits: cute.Tensor, lse: cute.Tensor, softmax_scale: Float32, ctas: Int32, stream,
    ):  # fmt: skip
        lists = kv, indices, topk_length, attn_sink
        results, numbers = (out, max_logits, lse), (softmax_scale, ctas)
        self.launch_whole((q, q_rope), lists, results, numbers, stream)


class SplitPair(Split):
    """Split lists, and the merge behind."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, q_rope: cute.Tensor, kv: cute.Tensor, indices: cute.Tensor,
        topk_length: cute.Tensor, attn_sink: cute.Tensor, split_begin: cute.Tensor,
        units: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, o_accum: cute.Tensor,
        lse_accum: cute.Tensor, softmax_scale: Float32, lse_factor: Float32, empty_lse: Float32,
        width: Int32, ctas: Int32, stream,
    ):  # fmt: skip
        lists = Lists(kv, indices, topk_length, attn_sink)
        merged = Merged(split_begin, units, out, lse, lse_factor, empty_lse)
        numbers = softmax_scale, width, ctas
        self.launch_split((q, q_rope), lists, o_accum, lse_accum, merged, numbers, stream)

"""Sparse attention over BF16 rows for SM90 where lists are split: few query tokens, as of decode.

``sparse_prefill`` (sparse_prefill.py) in all but these: a work tile is a row block of a *piece* of
a query token's list, ``width`` entries of it; a piece counts as a query whose rows go to fp32
partial rows, with the LSE in log2 units.  Merge (combine/merge.py), launched behind, makes the rows
of ``out`` of them, and knows the sinks.  Pieces are added in their order, so that bits depend on
``width`` and not on timing.

Roles, shared memory and the timeline are those of sparse_prefill.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...blocks import compat
from ...combine import merge
from ...formats.dims import KV_LORA_RANK
from ...load.work_list import LOG2E
from . import sparse_prefill
from .sparse_prefill import SparsePrefill, budget, feasible
from .sparse_prefill_parts import Gmem

if TYPE_CHECKING:
    from ...spec import VariantSpec

__all__ = ["budget", "build", "feasible"]


def build(spec: VariantSpec):
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    return Split(spec), fake_args(spec)


def fake_args(spec: VariantSpec):
    """Symbolic arguments of the exported function by name, in the order of ``__call__``."""
    made = sparse_prefill.fake_args(spec)
    h = made["q"].shape[1]
    names = ("b", "tokens", "slots", "units_plus_1")
    b, tokens, splits, units1 = (compat.sym(name=name) for name in names)
    read = ("q", "kv", "indices", "topk_length", "attn_sink")
    return {
        **{name: made[name] for name in read},
        "split_begin": compat.vector(Int32, units1),
        "units": compat.units_fake(Int32),
        "out": compat.contiguous(compat.dtype("bf16"), (b, tokens, h, KV_LORA_RANK)),
        "lse": compat.contiguous(Float32, (b, h, tokens), 4),
        "o_accum": compat.contiguous(Float32, (splits, h, KV_LORA_RANK)),
        "lse_accum": compat.contiguous(Float32, (splits, h), 4),
        "softmax_scale": Float32(1.0),
        "lse_factor": Float32(1.0),
        "empty_lse": Float32(0.0),
        "width": Int32(64),
        "ctas": Int32(1),
    }


class Lists(NamedTuple):
    """Rows of KV, and which of them each query token sees."""

    kv: cute.Tensor
    indices: cute.Tensor
    topk_length: cute.Tensor
    attn_sink: cute.Tensor


class Merged(NamedTuple):
    """Arguments of merge beside partial rows."""

    split_begin: cute.Tensor
    units: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    lse_factor: Float32
    empty_lse: Float32


class Split(SparsePrefill):
    """The kernel of one head size and row tile, and the merge behind it."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # bf16 (s_q, h, d_qk)
        kv: cute.Tensor,  # bf16 (s_kv, 1, d_qk)
        indices: cute.Tensor,  # i32 (s_q, 1, topk), rows of kv
        topk_length: cute.Tensor,  # i32 (s_q,) or (0,)
        attn_sink: cute.Tensor,  # f32 (h,) or (0,)
        split_begin: cute.Tensor,  # i32 (s_q + 1,): i * pieces
        units: cute.Tensor,  # i32 (s_q, 2), their rows of ``out``; (0, 2): its b is s_q
        out: cute.Tensor,  # bf16 (b, tokens, h, 512), s_q tokens in all
        lse: cute.Tensor,  # f32 (b, h, tokens)
        o_accum: cute.Tensor,  # f32 (s_q * pieces, h, 512)
        lse_accum: cute.Tensor,  # f32 (s_q * pieces, h), log2
        softmax_scale: Float32,
        lse_factor: Float32,
        empty_lse: Float32,
        width: Int32,  # entries of a piece, a multiple of 64
        ctas: Int32,
        stream,
    ):
        lists = Lists(kv, indices, topk_length, attn_sink)
        merged = Merged(split_begin, units, out, lse, lse_factor, empty_lse)
        self.launch_split(
            (q,), lists, o_accum, lse_accum, merged, (softmax_scale, width, ctas), stream
        )

    def launch_split(self, queries, lists, o_accum, lse_accum, merged, numbers, stream):
        """The kernel and the merge; ``queries``: a tensor, or content and RoPE."""
        softmax_scale, width, ctas = numbers
        s_q, heads, _ = queries[0].shape
        heads, rows = Int32(heads), self.loads.rows
        blocks = compat.fast_divisor((heads + (rows - 1)) // rows)
        pieces = compat.fast_divisor(o_accum.shape[0] // s_q)
        gmem = Gmem(
            *lists, o_accum, None, lse_accum, heads, blocks, softmax_scale * LOG2E, ctas, None,
            None, pieces, width,
        )  # fmt: skip
        self.launch(queries, gmem, stream)
        split_begin, units, out, lse, lse_factor, empty_lse = merged
        merge.launch(
            merge.Decode(None, lists.attn_sink), o_accum, lse_accum, split_begin, units, out, lse,
            lse_factor, empty_lse, stream,
        )  # fmt: skip

"""``sparse_decode``: attention to named tokens of an FP8 cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsl_kernels.dims import KV_LORA_RANK
from snapmla import checks, layouts, quant
from snapmla.decode_plan.choices import OUT_NAMES
from snapmla.sparse.plan import SparsePlan, variant_of
from snapmla.torch_ops.decode import check_query
from snapmla.torch_ops.decode_arguments import check_tables_of, new_results
from snapmla.torch_ops.operator import Operator
from snapmla.torch_ops.plan import register_plan

_ARGUMENTS = (
    "Tensor q_nope, Tensor q_rope, Tensor q_scale, Tensor content, Tensor? rope, Tensor? scale, "
    "Tensor indices, Tensor topk_length, Tensor? attn_sink, Tensor work_items, Tensor part_begin, "
    "Tensor split_begin, Tensor units, Tensor row_limits, Tensor(a!) o_accum, "
    "Tensor(b!) lse_accum, str pipeline, int row_tile, bool may_split, float softmax_scale, "
    "float lse_factor, float empty_lse"
)
_OPTIONS = "int p_terms=1"


def _sparse_decode(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    *common, out_dtype = arguments
    out, lse = new_results(common[0], out_dtype)
    given: Any = (*common, out, lse)
    _sparse_decode_out(*given, **options)
    return out, lse


def _sparse_decode_out(
    q_nope: Tensor,
    q_rope: Tensor,
    q_scale: Tensor,
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    indices: Tensor,
    topk_length: Tensor,
    attn_sink: Tensor | None,
    work_items: Tensor,
    part_begin: Tensor,
    split_begin: Tensor,
    units: Tensor,
    row_limits: Tensor,
    o_accum: Tensor,
    lse_accum: Tensor,
    pipeline: str,
    row_tile: int,
    may_split: bool,
    softmax_scale: float,
    lse_factor: float,
    empty_lse: float,
    out: Tensor,
    lse: Tensor,
    *,
    p_terms: int = 1,
) -> None:
    b_q, s_q, heads, _ = q_nope.shape
    b, device = topk_length.shape[0], q_nope.device
    if b_q * s_q * b == 0:
        return
    check_query(q_nope, q_rope)
    tables = (work_items, part_begin, split_begin, units, row_limits, o_accum, lse_accum)
    check_tables_of(tables, "q_nope", q_nope, b, row_tile, rows=heads)
    views = layouts.views_of(content, rope, scale)
    checks.tensor("indices", indices, (torch.int32,), (b_q * s_q, "topk"), device)
    checks.vector("topk_length", topk_length, (b,), device)
    sink = out.new_empty(0, dtype=torch.float32) if attn_sink is None else attn_sink
    if attn_sink is not None:
        checks.tensor("attn_sink", attn_sink, (torch.float32,), (heads,), device)
        checks.contiguous("attn_sink", attn_sink)
    checks.output("out", out, tuple(OUT_NAMES), (b_q, s_q, heads, KV_LORA_RANK), device)
    checks.output("lse", lse, (torch.float32,), (b_q, heads, s_q), device, align=4)
    kernel = variant_of(device, row_tile, p_terms).kernel(out.dtype)
    kernel(
        q_nope, q_rope, quant.per_row(q_scale, q_nope.shape[:3]), *views, indices, topk_length,
        sink, *tables[:-2], out, lse, *tables[-2:], checks.softmax_scale(softmax_scale),
        lse_factor, empty_lse, int(may_split),
    )  # fmt: skip


def _fake(*arguments: Any, **_options: Any) -> tuple[Tensor, Tensor]:
    q_nope, indices = arguments[0], arguments[6]
    content = layouts.views_of(*arguments[3:6])[0]
    checks.tensor("q_nope", q_nope, (torch.uint8,), ("b", "s_q", "num_heads", KV_LORA_RANK))
    checks.tensor("content", content, (torch.uint8,), ("num_pages", "page_size", KV_LORA_RANK))
    checks.tensor("indices", indices, (torch.int32,), ("tokens", "topk"))
    return new_results(q_nope, arguments[-1])


OPERATORS = (
    Operator(
        f"sparse_decode({_ARGUMENTS}, ScalarType out_dtype, *, {_OPTIONS}) -> (Tensor, Tensor)",
        _sparse_decode,
        _fake,
    ),
    Operator(
        f"sparse_decode_out({_ARGUMENTS}, Tensor(c!) out, Tensor(d!) lse, *, {_OPTIONS}) -> ()",
        _sparse_decode_out,
    ),
)

register_plan(SparsePlan)

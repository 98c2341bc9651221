"""``decode``: attention over an FP8 cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK, MERGE_CHECKED, QK_ROPE_HEAD_DIM
from snapmla import checks
from snapmla.cache import layouts, quant
from snapmla.dense import PlanVariant, decode
from snapmla.dense.choices import OUT_NAMES
from snapmla.torch_ops.decode_arguments import (
    ARGUMENTS,
    WITNESS,
    check_tables_of,
    new_results,
    witness_of,
)
from snapmla.torch_ops.operator import Operator

_ARGUMENTS = (
    "Tensor q_nope, Tensor q_rope, Tensor q_scale, Tensor content, Tensor? rope, Tensor? scale, "
    + ARGUMENTS
)
_OPTIONS = f"int p_terms=1, bool check_tables=False, {WITNESS}"


def _decode(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    *common, out_dtype = arguments
    out, lse = new_results(common[0], out_dtype)
    given: Any = (*common, out, lse)
    _decode_out(*given, **options)
    return out, lse


def _decode_out(
    q_nope: Tensor,
    q_rope: Tensor,
    q_scale: Tensor,
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    block_table: Tensor,
    cache_seqlens: Tensor,
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
    causal: bool,
    lse_factor: float,
    empty_lse: float,
    out: Tensor,
    lse: Tensor,
    *,
    p_terms: int = 1,
    check_tables: bool = False,
    cu_seqlens_q: Tensor | None = None,
    row_seqlens: Tensor | None = None,
) -> None:
    b_q, s_q, heads, _ = q_nope.shape
    b = cache_seqlens.shape[0] if units.shape[0] else b_q
    if b_q * s_q * b == 0:
        return
    check_query(q_nope, q_rope)
    tables = (work_items, part_begin, split_begin, units, row_limits, o_accum, lse_accum)
    check_tables_of(tables, "q_nope", q_nope, b, row_tile)
    checks.lengths(cache_seqlens, b, q_nope.device)
    views = layouts.views_of(content, rope, scale)
    checks.block_table(block_table, b, q_nope.device)
    checks.output("out", out, tuple(OUT_NAMES), tuple(q_nope.shape), q_nope.device)
    checks.output("lse", lse, (torch.float32,), (b_q, heads, s_q), q_nope.device, align=4)
    decode.launch_decode(
        (q_nope, q_rope, quant.per_row(q_scale, q_nope.shape[:3])),
        views,
        block_table,
        cache_seqlens,
        PlanVariant.of(q_nope.device, pipeline, row_tile, views[0].shape[1], p_terms),
        tables,
        MERGE_CHECKED if check_tables and not units.shape[0] else int(may_split),
        (out, lse),
        (checks.softmax_scale(softmax_scale), int(causal), lse_factor, empty_lse),
        witness_of(cu_seqlens_q, row_seqlens, row_limits, b),
    )


def check_query(q_nope: Tensor, q_rope: Tensor) -> None:
    """Checks a query's bytes and RoPE, as ``QuantizedQuery`` does outside of tracers.

    If rows had gaps between them, kernels would read wrong channels without an error.
    """
    rows, device = tuple(q_nope.shape[:3]), q_nope.device
    checks.query_rows(rows)
    parts = ((q_nope, torch.uint8, KV_LORA_RANK), (q_rope, torch.bfloat16, QK_ROPE_HEAD_DIM))
    for name, (value, dtype, width) in zip(("q_nope", "q_rope"), parts):
        checks.tensor(name, value, (dtype,), (*rows, width), device)
        checks.contiguous(name, value)


def _fake_decode(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    q_nope, block_table = arguments[0], arguments[6]
    content, _, _ = layouts.views_of(*arguments[3:6])
    checks.tensor("q_nope", q_nope, (torch.uint8,), ("b", "s_q", "num_heads", KV_LORA_RANK))
    checks.tensor("content", content, (torch.uint8,), ("num_pages", "page_size", KV_LORA_RANK))
    checks.tensor("block_table", block_table, (torch.int32,), ("b", "width"))
    return new_results(q_nope, arguments[-1])


OPERATORS = (
    Operator(
        f"decode({_ARGUMENTS}, ScalarType out_dtype, *, {_OPTIONS}) -> (Tensor, Tensor)",
        _decode,
        _fake_decode,
    ),
    Operator(
        f"decode_out({_ARGUMENTS}, Tensor(c!) out, Tensor(d!) lse, *, {_OPTIONS}) -> ()",
        _decode_out,
    ),
)

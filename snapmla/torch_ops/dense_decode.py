"""``dense_decode``: attention over a cache of 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsl_kernels.dims import HEAD_DIM_QK, KV_LORA_RANK
from snapmla import attention, checks, dispatch, layouts
from snapmla.decode_plan import PlanVariant
from snapmla.torch_ops.decode_arguments import ARGUMENTS, check_tables_of, new_results
from snapmla.torch_ops.operator import Operator

_ARGUMENTS = "Tensor q, Tensor kv, " + ARGUMENTS


def _dense_decode(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = new_results(arguments[0], arguments[0].dtype)
    given: Any = (*arguments, out, lse)
    _dense_decode_out(*given)
    return out, lse


def _dense_decode_out(
    q: Tensor,
    kv: Tensor,
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
) -> None:
    b_q, s_q, heads, _ = q.shape
    b = cache_seqlens.shape[0] if units.shape[0] else b_q
    if b_q * s_q * b == 0:
        return
    checks.cache_rows(kv)
    kv = layouts.with_heads(kv)
    checks.page_size(kv.shape[1])
    checks.query_of_rows(q, kv.dtype, 1)
    if b % kv.shape[2]:
        checks.value_error("kv", f"a divisor of {b} sequences as KV heads", kv.shape[2])
    tables = (work_items, part_begin, split_begin, units, row_limits, o_accum, lse_accum)
    name = dispatch.cache_name(kv.dtype)
    check_tables_of(tables, "q", q, b, row_tile, name)
    checks.lengths(cache_seqlens, b, q.device)
    checks.block_table(block_table, b, q.device)
    checks.output("out", out, (q.dtype,), (*q.shape[:3], KV_LORA_RANK), q.device)
    checks.output("lse", lse, (torch.float32,), (b_q, heads, s_q), q.device, align=4)
    attention.launch_decode(
        (q,),
        (kv,),
        block_table,
        cache_seqlens,
        PlanVariant.of(q.device, pipeline, row_tile, kv.shape[1], cache_dtype=name),
        tables,
        int(may_split),
        (out, lse),
        (checks.softmax_scale(softmax_scale), int(causal), lse_factor, empty_lse),
    )


def _fake_dense_decode(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, kv, block_table = arguments[:3]
    checks.tensor("q", q, checks.ROWS, ("b", "s_q", "num_heads", HEAD_DIM_QK))
    checks.tensor(
        "kv",
        layouts.with_heads(kv),
        (q.dtype,),
        ("num_pages", "page_size", "num_kv_heads", HEAD_DIM_QK),
    )
    checks.tensor("block_table", block_table, (torch.int32,), ("b", "width"))
    return new_results(q, q.dtype)


OPERATORS = (
    Operator(
        f"dense_decode({_ARGUMENTS}) -> (Tensor, Tensor)",
        _dense_decode,
        _fake_dense_decode,
    ),
    Operator(
        f"dense_decode_out({_ARGUMENTS}, Tensor(c!) out, Tensor(d!) lse) -> ()",
        _dense_decode_out,
    ),
)

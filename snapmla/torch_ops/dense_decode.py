"""``dense_decode``: attention over a cache of one tensor, of 16 bits or of bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsl_kernels.families.record_decode import FORMATS as DECODED_BYTES
from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks, rank
from snapmla.cache import byte_cache, layouts
from snapmla.dense import PlanVariant, decode
from snapmla.torch_ops.decode_arguments import (
    ARGUMENTS,
    WITNESS,
    check_tables_of,
    new_results,
    witness_of,
)
from snapmla.torch_ops.operator import Operator

_ARGUMENTS = "Tensor q, Tensor kv, " + ARGUMENTS
_OPTIONS = f"str cache_dtype='', {WITNESS}"  # of bytes their format


def _dense_decode(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = new_results(arguments[0], arguments[0].dtype)
    given: Any = (*arguments, out, lse)
    _dense_decode_out(*given, **options)
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
    cache_dtype: str = "",
    *,
    cu_seqlens_q: Tensor | None = None,
    row_seqlens: Tensor | None = None,
) -> None:
    b_q, s_q, heads, _ = q.shape
    b = cache_seqlens.shape[0] if units.shape[0] else b_q
    if b_q * s_q * b == 0:
        return
    if cache_dtype:
        name, kv = cache_dtype, _bytes_of(cache_dtype, kv)
        checks.query_of_rows(q, torch.bfloat16, 1, FORMATS[name].channels)
    else:
        checks.cache_rows(kv)
        kv = layouts.with_heads(kv)
        checks.page_size(kv.shape[1])
        checks.query_of_rows(q, kv.dtype, 1)
        if b % kv.shape[2]:
            checks.value_error("kv", f"a divisor of {b} sequences as KV heads", kv.shape[2])
        name = rank.cache_name(kv.dtype)
    tables = (work_items, part_begin, split_begin, units, row_limits, o_accum, lse_accum)
    check_tables_of(tables, "q", q, b, row_tile, name)
    checks.lengths(cache_seqlens, b, q.device)
    checks.block_table(block_table, b, q.device)
    checks.output("out", out, (q.dtype,), (*q.shape[:3], KV_LORA_RANK), q.device)
    checks.output("lse", lse, (torch.float32,), (b_q, heads, s_q), q.device, align=4)
    decode.launch_decode(
        (q,),
        (kv,),
        block_table,
        cache_seqlens,
        PlanVariant.of(q.device, pipeline, row_tile, kv.shape[1], format=name),
        tables,
        int(may_split),
        (out, lse),
        (checks.softmax_scale(softmax_scale), int(causal), lse_factor, empty_lse),
        witness_of(cu_seqlens_q, row_seqlens, row_limits, b),
    )


def _bytes_of(cache_dtype: str, kv: Tensor) -> Tensor:
    """(pages, P, bytes of a token) of a cache of bytes, checked."""
    checks.choice("cache_dtype", cache_dtype, DECODED_BYTES)
    record = FORMATS[cache_dtype]
    checks.tensor("kv", kv, (torch.uint8,), ("num_pages", "page_size", 1, record.token_bytes))
    byte_cache.check(record, kv)
    return kv.squeeze(2)


def _fake_dense_decode(
    *arguments: Any, cache_dtype: str = "", **_witness: Any
) -> tuple[Tensor, Tensor]:
    q, kv, block_table = arguments[:3]
    channels = FORMATS[cache_dtype].channels if cache_dtype else HEAD_DIM_QK
    checks.tensor("q", q, checks.ROWS, ("b", "s_q", "num_heads", channels))
    if not cache_dtype:
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
        f"dense_decode({_ARGUMENTS}, *, {_OPTIONS}) -> (Tensor, Tensor)",
        _dense_decode,
        _fake_dense_decode,
    ),
    Operator(
        f"dense_decode_out({_ARGUMENTS}, Tensor(c!) out, Tensor(d!) lse, *, {_OPTIONS}) -> ()",
        _dense_decode_out,
    ),
)

"""Arguments, tables of a plan and results that ``decode`` and ``dense_decode`` share."""

from __future__ import annotations

import torch
from torch import Tensor

from dsl_kernels.formats.dims import ITEM_WORDS, KV_LORA_RANK
from snapmla import checks
from snapmla.dense import FP8, partial_rows
from snapmla.dense.witness import Witness

ARGUMENTS = (
    "Tensor block_table, Tensor cache_seqlens, Tensor work_items, Tensor part_begin, "
    "Tensor split_begin, Tensor units, Tensor row_limits, Tensor(a!) o_accum, "
    "Tensor(b!) lse_accum, str pipeline, int row_tile, bool may_split, float softmax_scale, "
    "bool causal, float lse_factor, float empty_lse"
)
# behind them, by name: a call's witness (snapmla/dense/witness.py)
WITNESS = "Tensor? cu_seqlens_q=None, Tensor? row_seqlens=None"


def witness_of(
    cu_seqlens_q: Tensor | None, row_seqlens: Tensor | None, row_limits: Tensor, b: int
) -> Witness | None:
    """A call's witness, checked against the plan's tables."""
    if cu_seqlens_q is not None:
        checks.vector("cu_seqlens_q", cu_seqlens_q, (b + 1,), row_limits.device)
    if row_seqlens is not None:
        row_seqlens = row_seqlens.reshape(-1)
        checks.vector("row_seqlens", row_seqlens, tuple(row_limits.shape), row_limits.device)
    return Witness.of(cu_seqlens_q, row_seqlens)


def new_results(q_nope: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse), uninitialised."""
    b, s_q, heads, _ = q_nope.shape
    out = q_nope.new_empty((b, s_q, heads, KV_LORA_RANK), dtype=out_dtype)
    return out, q_nope.new_empty((b, heads, s_q), dtype=torch.float32)


def check_tables_of(
    tables: tuple[Tensor, ...],
    query: str,
    q: Tensor,
    b: int,
    row_tile: int,
    cache_dtype: str = FP8,
    rows: int = 0,
) -> None:
    """Checks that a plan is for ``b`` sequences, and has room for a row tile of partial results.

    Without ``units`` every sequence is one unit.  There are ``b`` items and one part at least; what
    else the tables hold is the kernels' to survive.

    Args:
        rows: of a unit, where they need not be whole row tiles.
    """
    work_items, part_begin, split_begin, units, row_limits, o_accum, lse_accum = tables
    b_q, s_q, heads, _ = q.shape
    unit_rows, count = -(-s_q * heads // row_tile) * row_tile, b
    if units.shape[0]:
        blocks = o_accum.shape[1] // row_tile if o_accum.ndim == 3 else 1
        unit_rows, count = max(blocks, 1) * row_tile, units.shape[0]
    unit_rows = rows or unit_rows
    hint = "the plan is for another batch, head count or s_q: make one with snapmla.plan_decode"
    for name, value, least, rest in (("work_items", work_items, b, (ITEM_WORDS,)),
                                     ("part_begin", part_begin, 2, ())):  # fmt: skip
        if value.ndim == 0 or value.shape[0] < least or value.shape[1:] != rest:
            wanted = f"shape ({', '.join(map(str, (f'at least {least}', *rest)))})"
            checks.value_error(name, wanted, tuple(value.shape), hint)
    limits = row_limits.shape[0] if row_limits.ndim else -1
    _, row_elements = partial_rows(cache_dtype)
    for name, value, shape in (
        ("split_begin", split_begin, (count + 1,)),
        ("units", units, (units.shape[0], 2)),
        ("row_limits", row_limits, (b_q * s_q if limits else 0,)),
        ("o_accum", o_accum, (o_accum.shape[0], unit_rows, row_elements)),
        ("lse_accum", lse_accum, (o_accum.shape[0], unit_rows)),
    ):
        if value.shape != shape:
            checks.value_error(name, f"shape {shape}", tuple(value.shape), hint)
    if b_q not in (1, b):
        checks.value_error(query, f"{b} sequences, or ragged ones as 1", b_q, hint)

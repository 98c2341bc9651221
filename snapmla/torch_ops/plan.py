"""``plan_update``; plans as pytrees."""

from __future__ import annotations

import torch
from torch import Tensor

from snapmla import checks
from snapmla.dense import STATIC, TENSORS, DecodePlan, launch_plan
from snapmla.torch_ops import pytrees
from snapmla.torch_ops.operator import Operator


def _plan_update(
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None,
    row_seqlens: Tensor | None,
    work_items: Tensor,
    part_begin: Tensor,
    split_begin: Tensor,
    planned_seqlens: Tensor,
    units: Tensor,
    unit_begin: Tensor,
    row_limits: Tensor,
    *numbers: int,
) -> None:
    b, device = planned_seqlens.shape[0], work_items.device
    checks.lengths(cache_seqlens, b, device)
    for name, given, table in (("cu_seqlens_q", cu_seqlens_q, unit_begin),
                               ("row_seqlens", row_seqlens, row_limits)):  # fmt: skip
        if given is not None or table.shape[0]:
            checks.vector(name, given, tuple(table.shape), device)
    for name, value in zip(("token_tile", "num_heads", "unit_rows"), (numbers[1], *numbers[8::2])):
        checks.integer(name, value, 1)
    if b and numbers[9]:
        tables = (work_items, part_begin, split_begin, planned_seqlens, units, unit_begin)
        launch_plan(cache_seqlens, cu_seqlens_q, row_seqlens, *tables, row_limits, *numbers)


OPERATORS = (
    Operator(
        "plan_update(Tensor cache_seqlens, Tensor? cu_seqlens_q, Tensor? row_seqlens, "
        "Tensor(a!) work_items, Tensor(b!) part_begin, Tensor(c!) split_begin, "
        "Tensor(d!) planned_seqlens, Tensor(e!) units, Tensor(f!) unit_begin, "
        "Tensor(g!) row_limits, int max_tokens, int token_tile, int fixed_overhead, "
        "int split_tiles, int longest_item, int max_stretches, int tile_ns, int read_ns, "
        "int num_heads, int s_q, int unit_rows, bool causal) -> ()",
        _plan_update,
    ),
)


def register_plan(cls: type[DecodePlan]) -> None:
    """Makes a class of plans a pytree of its tables."""
    pytrees.register(
        cls,
        lambda _: TENSORS,
        lambda leaves, static: cls(**dict(zip(TENSORS, leaves)), **dict(zip(STATIC, static))),
        STATIC,
    )


register_plan(DecodePlan)
torch.serialization.add_safe_globals(
    [(DecodePlan, "snapmla.dense.DecodePlan")]  # of programs that older versions saved
)

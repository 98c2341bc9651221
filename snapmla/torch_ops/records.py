"""``plan_to_records`` and ``records_to_plan``: FlashMLA's scheduling records."""

from __future__ import annotations

from torch import Tensor

from snapmla import checks
from snapmla.compat import sched_meta as scheduling
from snapmla.torch_ops.operator import Operator


def _plan_to_records(*tables: Tensor) -> None:
    _, part_begin, split_begin, records, num_splits = tables
    for name, value, n in (("part_begin", part_begin, len(records) + 1),
                           ("num_splits", num_splits, len(split_begin))):  # fmt: skip
        checks.vector(name, value, (n,), records.device)
    if len(split_begin) > 1:
        scheduling.launch_records(*tables)


def _records_to_plan(
    records: Tensor,
    cache_seqlens: Tensor,
    tile_begin: Tensor,
    work_items: Tensor,
    part_begin: Tensor,
    split_begin: Tensor,
    planned_seqlens: Tensor,
    *numbers: int,
) -> None:
    b, device, heads = cache_seqlens.shape[0], work_items.device, numbers[-1]
    scheduling.check_records(records, device)
    checks.lengths(cache_seqlens, b, device)
    for name, value in zip(("token_tile", "rows", "num_kv_heads"), numbers[1:]):
        checks.integer(name, value, 1)
    for name, table, n in (
        ("tile_begin", tile_begin, b + 1),
        ("part_begin", part_begin, len(records) * heads + 1),
        ("split_begin", split_begin, b * heads + 1),
        ("planned_seqlens", planned_seqlens, b * heads),
    ):
        checks.vector(name, table, (n,), device)
    if b:
        tables = (tile_begin, work_items, part_begin, split_begin, planned_seqlens)
        scheduling.launch_plan_of(records, cache_seqlens, *tables, *numbers)


OPERATORS = (
    Operator(
        "plan_to_records(Tensor work_items, Tensor part_begin, Tensor split_begin, "
        "Tensor(a!) records, Tensor(b!) num_splits) -> ()",
        _plan_to_records,
    ),
    Operator(
        "records_to_plan(Tensor records, Tensor cache_seqlens, Tensor(a!) tile_begin, "
        "Tensor(b!) work_items, Tensor(c!) part_begin, Tensor(d!) split_begin, "
        "Tensor(e!) planned_seqlens, int max_tokens, int token_tile, int rows, "
        "int num_kv_heads) -> ()",
        _records_to_plan,
    ),
)

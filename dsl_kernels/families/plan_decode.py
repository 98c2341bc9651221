"""``plan_decode``: the work list of a decode step; one variant an arch."""

from __future__ import annotations

from .family import helper

FAMILY = helper(
    "plan_decode", "schedule",
    shown=("cache_seqlens",),
    results=(
        "work_items", "part_begin", "split_begin", "planned_seqlens", "units", "unit_begin",
        "row_limits",
    ),
)  # fmt: skip

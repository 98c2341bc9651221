"""``plan_decode``: the work list of a decode step; one variant an arch."""

from __future__ import annotations

from .family import CHECKS, helper

FAMILY = helper(
    "plan_decode",
    shown=("cache_seqlens",),
    results=(
        "work_items", "part_begin", "split_begin", "planned_seqlens", "units", "unit_begin",
        "row_limits",
    ),
    selfcheck=f"{CHECKS}:check_plan",
)  # fmt: skip

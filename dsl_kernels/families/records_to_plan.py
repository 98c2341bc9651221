"""``records_to_plan``: a work list from FlashMLA's scheduler metadata; one variant an arch."""

from __future__ import annotations

from .family import helper

FAMILY = helper(
    "records_to_plan",
    "schedule",
    shown=("records", "cache_seqlens"),
    results=("tile_begin", "work_items", "part_begin", "split_begin", "planned_seqlens"),
)

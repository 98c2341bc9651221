"""``plan_to_records``: FlashMLA's scheduler metadata of a work list; one variant an arch."""

from __future__ import annotations

from .family import helper

FAMILY = helper(
    "plan_to_records",
    "schedule",
    shown=("records",),
    results=("records", "num_splits"),
)

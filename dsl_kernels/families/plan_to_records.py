"""``plan_to_records``: FlashMLA's scheduling records of a work list; one variant an arch."""

from __future__ import annotations

from .family import CHECKS, helper

FAMILY = helper(
    "plan_to_records",
    shown=("records",),
    results=("records", "num_splits"),
    selfcheck=f"{CHECKS}:check_plan_to_records",
)

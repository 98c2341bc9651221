"""``merge``: combines the partial results of split sequences."""

from __future__ import annotations

from .family import CHECKS, OUT_DTYPE, helper

FAMILY = helper("merge", OUT_DTYPE, selfcheck=f"{CHECKS}:check_merge")

"""``merge``: combines the partial results of split sequences."""

from __future__ import annotations

from .family import OUT_DTYPE, helper

FAMILY = helper("merge", "combine", OUT_DTYPE)

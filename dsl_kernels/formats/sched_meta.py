"""Sizes of FlashMLA's scheduler metadata, for kernels and host."""

from __future__ import annotations

META_WORDS = 8
MOST_PARTS = 1024  # rows of a call, one a part

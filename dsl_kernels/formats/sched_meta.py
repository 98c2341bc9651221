"""Sizes of FlashMLA's scheduling records, for kernels and host."""

from __future__ import annotations

RECORD_WORDS = 8
MOST_PARTS = 1024  # records of a call, one a part

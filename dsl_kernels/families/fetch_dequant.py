"""``fetch_dequant``: reads tokens back; ``in_dtype`` is the dtype of its result."""

from __future__ import annotations

from .family import IN_DTYPE, Axis, helper

MODE = Axis("mode", "", ("pages", "indices"))  # how tokens are named: block table or flat indices

FAMILY = helper("fetch_dequant", IN_DTYPE, MODE)

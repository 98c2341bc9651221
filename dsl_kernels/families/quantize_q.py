"""``quantize_q``: quantises queries."""

from __future__ import annotations

from .family import IN_DTYPE, Axis, helper

MODE = Axis("mode", "", ("token_head", "token"))  # what has a scale of its own

FAMILY = helper("quantize_q", IN_DTYPE, MODE)

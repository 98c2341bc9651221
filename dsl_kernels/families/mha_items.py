"""``mha_items``: the list of work of dense MHA prefill, longest row tiles first."""

from __future__ import annotations

from collections.abc import Iterator

from .family import MHA, Axis, Values, helper
from .mha_fwd import sections

KEYS = Axis("keys", "", ("whole", "split"), "whole", named=False)  # split: lists may have pieces
SECTIONS = Axis("sections", "", ("fixed", "listed"), sections, named=False)  # listed: by sequences


def points(arch: str) -> Iterator[Values]:
    """Lists without pieces, on Hopper."""
    if arch == "sm_90a":
        yield {}


FAMILY = helper(
    "mha_items",
    KEYS,
    SECTIONS,
    points=points,
    kind=MHA,
    shown=("cu_seqlens_q", "work"),
    results=("work",),
)

"""``mha_items``: the list of work of dense MHA prefill, the longest sequence first."""

from __future__ import annotations

from collections.abc import Iterator

from .family import MHA, Axis, Values, helper

KEYS = Axis("keys", "", ("whole", "split"), "whole", named=False)  # split: lists may have pieces


def points(_arch: str) -> Iterator[Values]:
    """Lists without pieces."""
    yield {}


FAMILY = helper(
    "mha_items",
    KEYS,
    points=points,
    kind=MHA,
    shown=("cu_seqlens_q", "work"),
    results=("work",),
)

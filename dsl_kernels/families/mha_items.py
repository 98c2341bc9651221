"""``mha_items``: the list of work of dense MHA prefill, the longest sequence first."""

from __future__ import annotations

from collections.abc import Iterator

from .family import MHA, Axis, Values, helper

KEYS = Axis("keys", "", ("whole", "split"), "whole", named=False)  # split: lists may have pieces
LISTS = Axis("lists", "", ("forward", "backward"), "forward", named=False)  # backward: two


def points(_arch: str) -> Iterator[Values]:
    """A list without pieces; those of the backward are built when they are asked for."""
    yield {}


FAMILY = helper(
    "mha_items",
    "schedule",
    KEYS,
    LISTS,
    points=points,
    kind=MHA,
    shown=("cu_seqlens_q", "work", "key_work"),
    results=("work", "key_work"),
)

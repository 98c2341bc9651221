"""``mha_items``: the list of work of dense MHA prefill, longest row tiles first."""

from __future__ import annotations

from .family import MHA, Axis, helper

KEYS = Axis("keys", "", ("whole", "split"), "whole", named=False)  # split: lists may have pieces

FAMILY = helper(
    "mha_items",
    KEYS,
    points=lambda _arch: iter(()),  # built when it is asked for, until it was measured
    kind=MHA,
    shown=("cu_seqlens_q", "work"),
    results=("work",),
)

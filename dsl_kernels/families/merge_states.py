"""``merge_states``: attention results over disjoint sets of tokens become one."""

from __future__ import annotations

from .family import CHECKS, OUT_DTYPE, Axis, helper

IN_DTYPE = Axis("in_dtype", "x", ("bf16", "f32"), "bf16")
MODE = Axis("mode", "", ("pair", "list", "stack"))  # two tensors, up to eight, or one of n parts

FAMILY = helper(
    "merge_states",
    IN_DTYPE,
    OUT_DTYPE,
    MODE,
    shown=("o", "o_0", "out"),
    results=("out", "lse"),
    selfcheck=f"{CHECKS}:check_merge_states",
)

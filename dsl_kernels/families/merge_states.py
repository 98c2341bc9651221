"""``merge_states``: attention results over disjoint sets of tokens become one."""

from __future__ import annotations

from .family import OUT_DTYPE, Axis, helper

IN_DTYPE = Axis("in_dtype", "x", ("bf16", "f32"), "bf16")
MODE = Axis("mode", "", ("pair", "list", "stack"))  # two tensors, up to eight, or one of n parts
D_V = Axis("d_v", "v", (512, 256, 128), 512, named=False)  # channels of a row

FAMILY = helper(
    "merge_states",
    IN_DTYPE,
    OUT_DTYPE,
    MODE,
    D_V,
    shown=("o", "o_0", "out"),
    results=("out", "lse"),
)

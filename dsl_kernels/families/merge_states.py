"""``merge_states``: attention results over disjoint sets of tokens become one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .family import OUT_DTYPE, Axis, Values, helper

IN_DTYPE = Axis("in_dtype", "x", ("bf16", "f32"), "bf16")
MODE = Axis("mode", "", ("pair", "list", "stack"))  # two tensors, up to eight, or one of n parts
D_V = Axis("d_v", "v", (512, 256, 128), 512, named=False)  # channels of a row


def points(_arch: str) -> Iterator[Values]:
    """Rows of 512 channels, and those of dense prefill's chunks."""
    axes = IN_DTYPE, OUT_DTYPE, MODE
    for values in itertools.product(*(axis.values for axis in axes)):
        yield {axis.name: value for axis, value in zip(axes, values, strict=True)}
    yield {"in_dtype": "bf16", "out_dtype": "bf16", "mode": "pair", "d_v": 128}


FAMILY = helper(
    "merge_states",
    "combine",
    IN_DTYPE,
    OUT_DTYPE,
    MODE,
    D_V,
    points=points,
    shown=("o", "o_0", "out"),
    results=("out", "lse"),
)

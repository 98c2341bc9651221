"""``quantize_q``: quantises queries, as they are or after RoPE."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .family import COS_SIN_DTYPE, IN_DTYPE, ROPE_STYLE, Axis, Values, every, helper

MODE = Axis("mode", "", ("token_head", "token"))  # what has a scale of its own
POSITION_DTYPE = Axis("position_dtype", "pos", ("i32", "i64"), "i64", named=False)
AXES = (IN_DTYPE, MODE, ROPE_STYLE, COS_SIN_DTYPE, POSITION_DTYPE)


def points(arch: str) -> Iterator[Values]:
    """Every dtype and mode of queries as they are; of what rotates them too, what engines call."""
    yield from every(AXES)(arch)
    for style, table in itertools.product(("interleaved", "neox"), ("f32", "bf16")):
        yield {
            "in_dtype": "bf16", "mode": "token_head", "rope_style": style, "cos_sin_dtype": table,
        }  # fmt: skip


FAMILY = helper(
    "quantize_q",
    "cache",
    *AXES,
    points=points,
    shown=("q_nope",),
    results=("out_nope", "out_rope", "out_scale"),
)

"""``mha_fwd``: dense attention of prompts, keys and values of every head in 16 bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..mha_list import WHOLE
from .family import MHA, Axis, Family, Values


def sections(values: Values) -> str:
    """What is built by default."""
    return WHOLE if values["keys"] == "whole" else "fixed"


AXES = (
    Axis("d_qk", "d", (192, 128)),  # channels of q and k: 192 are 128 and 64 of RoPE
    Axis("dtype", "d", ("bf16", "f16"), "bf16"),  # of q, k, v and out
    Axis("d_v", "v", (128,), 128, named=False),
    Axis("keys", "", ("whole", "split"), "whole", named=False),  # of few rows against long keys
    Axis("sections", "", ("fixed", "listed"), sections, named=False),  # of heads: 8, or as listed
)


def _module(arch: str, values: Values) -> str | None:
    if arch != "sm_90a":
        return None
    if values["keys"] == "split":
        return "dsl_kernels.sm90.mha_split" if values["sections"] == "fixed" else None
    return "dsl_kernels.sm90." + ("mha_listed" if values["sections"] == "listed" else "mha_fwd")


def points(arch: str) -> Iterator[Values]:
    """Keys that are not split: where pieces are the faster call has not been measured."""
    for d_qk, dtype in itertools.product((192, 128), ("bf16", "f16")):
        if arch == "sm_90a":
            yield {"d_qk": d_qk, "dtype": dtype}


FAMILY = Family(
    "mha_fwd",
    AXES,
    module=_module,
    points=points,
    kind=MHA,
    everyday=({"d_qk": 192, "dtype": "bf16"},),
    result_axis="dtype",
    counted_by=("d_qk",),
    shown=("q", "k_nope", "cu_seqlens_k"),
    results=("out", "lse"),
)

"""``mha_fwd``: dense attention of prompts, keys and values of every head in 16 bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from ..formats.mha_list import KEY_TILE, VALUES
from .family import MHA, Axis, Family, Values


def _of_head(table: dict[int, int]) -> Callable[[Values], int]:
    """Return the default of an axis that follows from ``d_qk``, the channels of q and k."""
    return lambda values: table[values["d_qk"]]


def _q_steps(values: Values) -> int:
    """Return the default of ``q_steps``: 4 for 256 channels and whole keys, where shared memory's
    port is the tighter bound (gain on an H200: 0 to 2 %)."""
    return 4 if values["d_qk"] == 256 and values["keys"] == "whole" else 0


AXES = (
    Axis("d_qk", "d", (192, 128, 256)),  # channels of q and k: 192 are 128, 256 are 192 and 64 RoPE
    Axis("dtype", "d", ("bf16", "f16"), "bf16"),  # of q, k, v and out
    Axis("d_v", "v", (128, 256), _of_head(VALUES), named=False),
    Axis("keys", "", ("whole", "split"), "whole", named=False),  # of few rows against long keys
    Axis("key_tile", "t", (128, 80), _of_head(KEY_TILE), named=False),  # keys at a time
    Axis("q_steps", "q", (0, 4), _q_steps, named=False),  # 16-channel steps of Q in registers
    # of which rows or tiles a softmax warpgroup is: 64 rows of a row tile; tiles of keys in turn,
    # of SM100 and built when it is asked for
    Axis("softmax", "", ("rows", "turns"), "rows", named=False),
)


def _module(arch: str, values: Values) -> str | None:
    if values["softmax"] == "turns":
        there = arch == "sm_100a" and values["keys"] == "whole"
        return "dsl_kernels.sm100.mha.mha_fwd" if there else None
    if arch != "sm_90a":
        return None
    return "dsl_kernels.sm90.mha." + ("mha_split" if values["keys"] == "split" else "mha_fwd")


def points(arch: str) -> Iterator[Values]:
    """Yield the default matrix, on SM90 only, with whole keys: it has not been measured at which
    lengths split keys are faster."""
    for d_qk, dtype in itertools.product((192, 128, 256), ("bf16", "f16")):
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

"""``mha_merge``: rows of dense MHA prefill whose keys were split, from their partial rows."""

from __future__ import annotations

from .family import MHA, Axis, helper

DTYPE = Axis("dtype", "o", ("bf16", "f16"), "bf16")  # of out
D_V = Axis("d_v", "v", (128, 256), 128, named=False)

FAMILY = helper(
    "mha_merge",
    "combine",
    DTYPE,
    D_V,
    points=lambda _arch: iter(()),  # built when it is asked for, until it was measured
    kind=MHA,
    result_axis="dtype",
    shown=("partial_out", "out"),
    results=("out", "lse"),
)

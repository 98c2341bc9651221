"""``mha_fwd``: dense attention of prompts, keys and values of every head in 16 bits."""

from __future__ import annotations

from .family import MHA, Axis, Family, Values

AXES = (
    Axis("d_qk", "d", (192, 128)),  # channels of q and k: 192 are 128 and 64 of RoPE
    Axis("dtype", "d", ("bf16", "f16"), "bf16"),  # of q, k, v and out
    Axis("d_v", "v", (128,), 128, named=False),
    Axis("keys", "", ("whole", "split"), "whole", named=False),  # of few rows against long keys
)


def _module(arch: str, values: Values) -> str | None:
    if arch != "sm_90a":
        return None
    return "dsl_kernels.sm90." + ("mha_split" if values["keys"] == "split" else "mha_fwd")


FAMILY = Family(
    "mha_fwd",
    AXES,
    module=_module,
    points=lambda _arch: iter(()),  # built when it is asked for, until it was measured
    kind=MHA,
    result_axis="dtype",
    counted_by=("d_qk",),
    shown=("q", "k_nope", "cu_seqlens_k"),
    results=("out", "lse"),
)

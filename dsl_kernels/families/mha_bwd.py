"""``mha_delta``, ``mha_dq``, ``mha_dkv``, ``mha_rope_sum``: the backward of ``mha_fwd``.

Built when they are asked for, by ``snapmla.mha_prefill_backward`` and autograd of ``mha_prefill``.
"""

from __future__ import annotations

from collections.abc import Iterator

from .family import MHA, Axis, Family, Values, helper

DTYPE = Axis("dtype", "d", ("bf16", "f16"), "bf16")  # of q, k, v, out and of gradients
D_QK = Axis("d_qk", "d", (192, 128))  # channels of q and k: 192 are 128 and 64 RoPE


def _none(_arch: str) -> Iterator[Values]:
    return iter(())


def _of_sm90(op: str, results: tuple[str, ...]) -> Family:
    module = f"dsl_kernels.sm90.mha.{op}"
    return Family(
        op,
        (D_QK, DTYPE),
        module=lambda arch, _values: module if arch == "sm_90a" else None,
        points=_none,
        kind=MHA,
        result_axis="dtype",
        counted_by=("d_qk",),
        shown=("q", "k_nope", "cu_seqlens_k"),
        results=results,
    )


DELTA = helper(
    "mha_delta", "sm90.mha", DTYPE, points=_none, kind=MHA, result_axis="dtype", shown=("out",
    "stats"), results=("stats",),
)  # fmt: skip
ROPE_SUM = helper(
    "mha_rope_sum", "sm90.mha", DTYPE, points=_none, kind=MHA, result_axis="dtype", shown=("parts",
    "dk_rope"), results=("dk_rope",),
)  # fmt: skip
DQ = _of_sm90("mha_dq", ("dq",))
DKV = _of_sm90("mha_dkv", ("dk_nope", "parts", "dv"))

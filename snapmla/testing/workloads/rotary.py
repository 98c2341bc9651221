"""RMS norm and RoPE in front of append_kv and quantize_q: arguments, truth, bytes moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.spec import VariantSpec
from snapmla.testing import rope
from snapmla.testing.workloads.call import DTYPES, INDEX
from snapmla.testing.workloads.draw import Draw

EPS = 1e-6


def _norm(spec: VariantSpec) -> bool:
    return dict(spec.values).get("norm") == "rms"


def arguments(spec: VariantSpec, tokens: int, draw: Draw) -> dict[str, Any]:
    """Arguments for that many tokens: their positions, the table, the norm where there is one."""
    if spec.rope_style == "applied":
        return {}
    given: dict[str, Any] = {"cos_sin": draw.cos_sin(DTYPES[spec.cos_sin_dtype])}
    given["positions"] = draw.positions(tokens, INDEX[spec.position_dtype])
    if _norm(spec):
        weight = draw.gain(KV_LORA_RANK, DTYPES[spec.in_dtype])
        given |= {"norm_weight": weight, "norm_eps": EPS}
    return given


def truth(
    spec: VariantSpec, given: Mapping[str, Any], content: Tensor, rope_channels: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows as they are after norm and RoPE, where the variant does either."""
    if spec.rope_style != "applied":
        at, table = given["positions"], given["cos_sin"]
        if len(at) != len(rope_channels):  # of queries, (b, s_q, h, 64): one a token
            at = at.view(rope_channels.shape[:2])
        rope_channels = rope.rotate_rows(rope_channels, at, table, spec.rope_style == "neox")
    if _norm(spec):
        content = rope.rms_norm_rows(content, given["norm_weight"], given["norm_eps"])
    return content, rope_channels


def moved(spec: VariantSpec, tokens: int) -> float:
    """Bytes of what rotates tokens: a position and 64 cosines and sines each."""
    if spec.rope_style == "applied":
        return 0.0
    angle = DTYPES[spec.cos_sin_dtype].itemsize * QK_ROPE_HEAD_DIM
    return float(tokens) * (INDEX[spec.position_dtype].itemsize + angle)


def options(
    spec: VariantSpec, given: Mapping[str, Any]
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """((positions, table), keywords) for the library's rope functions, from a call's arguments."""
    told: dict[str, Any] = {"is_neox": spec.rope_style == "neox"}
    if _norm(spec):
        told |= {"norm_weight": given["norm_weight"], "norm_eps": given["norm_eps"]}
    return (given["positions"], given["cos_sin"]), told

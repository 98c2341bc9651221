"""What append_kv and quantize_q share: RMS norm and RoPE in front of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.spec import VariantSpec
from snapmla.testing import rope
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, INDEX
from snapmla.testing.workloads.exact import Case, Runner
from snapmla.testing.workloads.samples import Source

EPS = 1e-6
MAX_POSITION = 163840  # of DeepSeek-V3's rotary embedding


def _norm(spec: VariantSpec) -> bool:
    return dict(spec.values).get("norm") == "rms"


def small(spec: VariantSpec, n: int) -> dict[str, Any]:
    """Arguments for ``n`` tokens: a table of 50 positions, of which the last token's is past."""
    if spec.rope_style == "applied":
        return {}
    frequency = 10000.0 ** -(torch.arange(32) / 32)
    angle = torch.arange(50.0)[:, None] * frequency
    at = torch.randint(0, 50, (n,))
    at[-1] = 50
    given: dict[str, Any] = {
        "positions": at.to(INDEX[spec.position_dtype]),
        "cos_sin": torch.cat([angle.cos(), angle.sin()], -1).to(DTYPES[spec.cos_sin_dtype]),
    }
    if _norm(spec):
        weight = (1 + 0.2 * torch.randn(KV_LORA_RANK)).to(DTYPES[spec.in_dtype])
        given |= {"norm_weight": weight, "norm_eps": EPS}
    return given


def recorded(case: Case, tokens: int, run: Runner) -> dict[str, Any]:
    """Arguments; numbers of [-1, 1] stand for cosines and sines."""
    spec = case.spec
    if spec.rope_style == "applied":
        return {}
    bits = case.bits(".rope")
    unit = (bits.below(1 << 24, (40, QK_ROPE_HEAD_DIM)) * 2.0**-23 - 1).astype(np.float32)
    ends = np.iinfo(exact.WIDTH[spec.position_dtype])
    positions = bits.below(40, (tokens,)).astype(ends.dtype)
    outside = (-1, 40, ends.min, ends.max)[: tokens // 2]
    positions[: len(outside)] = outside
    given: dict[str, Any] = {
        "positions": run.there(positions),
        "cos_sin": exact.as_tensor(unit, DTYPES[spec.cos_sin_dtype], run.device),
    }
    if _norm(spec):
        weight = (bits.below(1 << 16, (KV_LORA_RANK,)) * 2.0**-15).astype(np.float32)
        there = exact.as_tensor(weight, DTYPES[spec.in_dtype], run.device)
        given |= {"norm_weight": there, "norm_eps": EPS}
    return given


def sized(spec: VariantSpec, n: int, source: Source) -> dict[str, Any]:
    """Arguments for ``n`` tokens at random positions of a table as long as a model's."""
    if spec.rope_style == "applied":
        return {}
    steps = torch.arange(QK_ROPE_HEAD_DIM // 2, device=source.device) * 2 / QK_ROPE_HEAD_DIM
    angle = torch.arange(MAX_POSITION, device=source.device)[:, None] * 10000.0**-steps
    table = torch.cat([angle.cos(), angle.sin()], -1)
    given: dict[str, Any] = {
        "positions": source.below(MAX_POSITION, n).to(INDEX[spec.position_dtype]),
        "cos_sin": table.to(DTYPES[spec.cos_sin_dtype]),
    }
    if _norm(spec):
        weight = 1 + 0.2 * source.normal(KV_LORA_RANK, dtype=torch.float32)
        given |= {"norm_weight": weight.to(DTYPES[spec.in_dtype]), "norm_eps": EPS}
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
    """What the library's rope functions take of it: (positions, table), by keyword."""
    told: dict[str, Any] = {"is_neox": spec.rope_style == "neox"}
    if _norm(spec):
        told |= {"norm_weight": given["norm_weight"], "norm_eps": given["norm_eps"]}
    return (given["positions"], given["cos_sin"]), told

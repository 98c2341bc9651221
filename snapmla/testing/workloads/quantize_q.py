"""``quantize_q``: queries to e4m3 with a scale a row or a token, as they are or behind RoPE."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import snapmla
from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.spec import VariantSpec
from snapmla.testing import rounding
from snapmla.testing.workloads import exact, rotary
from snapmla.testing.workloads.call import DTYPES, Sizes, bit_for_bit
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.problem import Problem, workload

RESULTS = {"nope": "out_nope", "rope": "out_rope", "scale": "out_scale"}


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The quantised rows: bytes, RoPE, scales."""
    rows = rotary.truth(spec, given, given["q_nope"], given["q_rope"])
    nope, rope, scale = rounding.quantize_rows(*rows, shared=int(spec.mode == "token"))
    return {"out_nope": nope.view(torch.uint8), "out_rope": rope, "out_scale": scale}


def _outputs(spec: VariantSpec, shape: Sequence[int], device: str) -> dict[str, Tensor]:
    """Results of (b, s_q, h) rows, zeros."""
    return {
        "out_nope": torch.zeros((*shape, KV_LORA_RANK), dtype=torch.uint8, device=device),
        "out_rope": torch.zeros((*shape, QK_ROPE_HEAD_DIM), dtype=torch.bfloat16, device=device),
        "out_scale": torch.zeros(
            tuple(shape[: 3 if spec.mode == "token_head" else 2]), device=device
        ),
    }


@dataclass(frozen=True, kw_only=True)
class Queries(Problem):
    """Rows of 576.

    Attributes:
        batch, s_q, heads: extents.
        apart: the kernel takes copies, not slices of one tensor.
    """

    batch: int
    s_q: int
    heads: int
    apart: bool = False


def arguments(spec: VariantSpec, problem: Queries, draw: Draw) -> dict[str, Any]:
    """Arguments by name."""
    shape = problem.batch, problem.s_q, problem.heads
    joint = draw.joint(math.prod(shape), DTYPES[spec.in_dtype])
    halves = joint[:, :KV_LORA_RANK], joint[:, KV_LORA_RANK:]
    draw.identify_by(bits=halves)
    joint = draw.there(joint).view(*shape, HEAD_DIM_QK)
    halves = joint[..., :KV_LORA_RANK], joint[..., KV_LORA_RANK:]
    nope, rope = (x.contiguous() for x in halves) if problem.apart else halves
    turning = rotary.arguments(spec, problem.batch * problem.s_q, draw)
    return {"q_nope": nope, "q_rope": rope, **turning, **_outputs(spec, shape, draw.device)}


SMALL = Queries(batch=2, s_q=2, heads=5)
RECORDED = (Queries(batch=2, s_q=1, heads=61, apart=True), Queries(batch=3, s_q=2, heads=17))


def sized(_spec: VariantSpec, sizes: Sizes) -> Queries:
    """Slices of joint rows, as a projection leaves them."""
    return Queries(batch=sizes.batch, s_q=sizes.s_q, heads=sizes.heads)


def _rows(_spec: VariantSpec, given: Mapping[str, Any]) -> exact.Rows:
    """Quantised rows and scales."""
    widths = {"nope": KV_LORA_RANK, "rope": QK_ROPE_HEAD_DIM, "scale": 1}
    return {name: exact.bits_of(given[RESULTS[name]]).reshape(-1, n) for name, n in widths.items()}


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.quantize_q`` or ``rope_quantize_q``."""
    nope = given["out_nope"].view(torch.float8_e4m3fn)
    out = snapmla.QuantizedQuery(nope, given["out_rope"], given["out_scale"])
    rows = given["q_nope"], given["q_rope"]
    told: dict[str, Any] = {"granularity": spec.mode, "out": out}
    if spec.rope_style == "applied":
        return lambda: snapmla.quantize_q(*rows, **told)
    where, how = rotary.options(spec, given)
    told |= how
    return lambda: snapmla.rope_quantize_q(*rows, *where, **told)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads rows of 576, writes them quantised and their scales."""
    tokens = sizes.batch * sizes.s_q
    rows = tokens * sizes.heads
    scales = rows if spec.mode == "token_head" else tokens
    each = HEAD_DIM_QK * DTYPES[spec.in_dtype].itemsize + KV_LORA_RANK + 2 * QK_ROPE_HEAD_DIM
    return float(rows) * each + 4.0 * scales + rotary.moved(spec, tokens)


WORKLOAD = workload(
    bit_for_bit, truth, arguments, small=lambda _: (SMALL,),
    recorded=lambda draw: [RECORDED[draw.odd]], sized=sized, results=lambda *_: RESULTS, rows=_rows,
    public=public, moved=moved,
    bench={
        "quantize_q": {mode: {"mode": mode} for mode in ("token_head", "token")},
        "rope_quantize_q": {"token_head": {"mode": "token_head", "rope_style": "interleaved"}},
    },
)  # fmt: skip

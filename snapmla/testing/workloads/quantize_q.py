"""``quantize_q``: queries to e4m3 with a scale a row or a token, as they are or behind RoPE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import snapmla
from dsl_kernels.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.spec import VariantSpec
from snapmla.testing import rounding
from snapmla.testing.workloads import exact, rotary
from snapmla.testing.workloads.call import DTYPES, Call, Sizes, Workload, bit_for_bit
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import Source

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


def _given(
    spec: VariantSpec, joint: Tensor, turning: dict[str, Any], *, apart: bool = False
) -> dict[str, Any]:
    """Arguments for rows (b, s_q, h, 576), slices of which the kernel takes; ``apart``: copies."""
    halves = joint[..., :KV_LORA_RANK], joint[..., KV_LORA_RANK:]
    nope, rope = (x.contiguous() for x in halves) if apart else halves
    out = _outputs(spec, joint.shape[:3], joint.device.type)
    return {"q_nope": nope, "q_rope": rope, **turning, **out}


def small(spec: VariantSpec) -> Iterator[Call]:
    """Two sequences of two tokens with five heads."""
    joint = torch.randn(2, 2, 5, HEAD_DIM_QK).to(DTYPES[spec.in_dtype])
    given = _given(spec, joint, rotary.small(spec, 4))
    yield Call(given, RESULTS, truth(spec, given))


def recorded(case: Case, run: Runner) -> Recorded:
    """Rows of every awkward kind, joint or apart."""
    spec, shape = case.spec, (3, 2, 17) if case.index % 2 else (2, 1, 61)
    c, r = exact.latents(case, shape[0] * shape[1] * shape[2], spec.in_dtype)
    check = exact.digest([exact.bits_of(c), exact.bits_of(r)])
    joint = torch.cat([c, r], -1).to(run.device).reshape(*shape, HEAD_DIM_QK)
    turning = rotary.recorded(case, shape[0] * shape[1], run)
    given = _given(spec, joint, turning, apart=not case.index % 2)
    run.call(case.variant, **given)
    widths = {"nope": KV_LORA_RANK, "rope": QK_ROPE_HEAD_DIM, "scale": 1}
    found = {name: exact.bits_of(given[RESULTS[name]]).reshape(-1, n) for name, n in widths.items()}
    return Recorded(check, found)


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Slices of joint rows, as a projection leaves them."""
    source = Source(device, seed)
    shape = (sizes.batch, sizes.s_q, sizes.heads, HEAD_DIM_QK)
    joint = source.normal(*shape, dtype=DTYPES[spec.in_dtype])
    return _given(spec, joint, rotary.sized(spec, sizes.batch * sizes.s_q, source))


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


WORKLOAD = Workload(
    small, bit_for_bit, recorded, sized, truth, public, moved,
    bench={
        "quantize_q": {mode: {"mode": mode} for mode in ("token_head", "token")},
        "rope_quantize_q": {"token_head": {"mode": "token_head", "rope_style": "interleaved"}},
    },
)  # fmt: skip

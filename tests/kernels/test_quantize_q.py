"""``quantize_q`` against the quantisation rule in torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.bits import assert_same
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import DTYPES, device_of, joint, kernel, latents, quantised

pytestmark = needs_kernels


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", ["token_head", "token"])
@pytest.mark.parametrize(
    ("in_dtype", "shape", "strided"),
    [
        ("bf16", (2, 1, 16), False),
        ("bf16", (3, 2, 7), True),
        ("f16", (1, 3, 5), True),
        ("f32", (2, 1, 11), False),
        ("bf16", (1, 1, 1), False),
    ],
)
def test_quantize_q(
    target: str, mode: str, in_dtype: str, shape: tuple[int, ...], strided: bool
) -> None:
    device = device_of(target)
    c, r = latents(shape, DTYPES[in_dtype], seed=1)
    if strided:  # heads outermost, as a transposed projection leaves them
        inputs = tuple(x.transpose(0, 2).contiguous().transpose(0, 2) for x in joint(c, r))
    else:
        inputs = (c, r)
    out_nope = torch.empty((*shape, 512), dtype=torch.uint8, device=device)
    out_rope = torch.empty((*shape, 64), dtype=torch.bfloat16, device=device)
    out_scale = torch.empty(shape if mode == "token_head" else shape[:2], device=device)
    run = kernel(target, op="quantize_q", in_dtype=in_dtype, mode=mode)
    run(*(x.to(device) for x in inputs), out_nope, out_rope, out_scale)
    q8, rope, scale = quantised(c, r, 1 if mode == "token_head" else 2)
    assert_same(out_nope, q8)
    assert_same(out_rope, rope)
    assert_same(out_scale, scale)


def test_empty_calls_launch_nothing() -> None:
    q = [torch.empty(0, 1, 4, d).bfloat16() for d in (512, 64)]
    o = [torch.empty(0, 1, 4, 512, dtype=torch.uint8), torch.empty(0, 1, 4, 64).bfloat16()]
    for mode, scale in (("token_head", (0, 1, 4)), ("token", (0, 1))):
        run = kernel("sm_90a", op="quantize_q", mode=mode)
        run(*q, *o, torch.empty(scale))
        assert not run.launches  # type: ignore[attr-defined]

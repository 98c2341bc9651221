"""``record_qk``: what a rounded query is, and that FP8's sums stay inside of what it allows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from snapmla.testing import record_qk
from snapmla.testing.accumulate import bf16_dot, hopper_fp8_dot
from snapmla.testing.rounding import to_e4m3

SCALE = 576**-0.5
REACHED = {"any": 0.3, "aligned": 0.4, "loud": 0.2}  # of its bound, by the nearest logit


def tokens(kind: str, n: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Content as e4m3 values, scales, RoPE of n tokens, fp64."""
    x = torch.randn(n, 512, generator=random)
    if kind == "loud":
        x = x * 50.0 ** (torch.rand(x.shape, generator=random) < 0.03)
    scales = torch.rand(n, 4, generator=random) * 2.0 ** torch.randint(
        -6, 3, (n, 4), generator=random
    )
    content = to_e4m3((60 * x).clamp(-448, 448)).double()
    return content, scales.double(), torch.randn(n, 64, generator=random).bfloat16().double()


def summed(q8: Tensor, rope_q: Tensor, content: Tensor, s: Tensor, rope: Tensor) -> Tensor:
    """S of the kernel (dsl_kernels/sm90/bytes16/mix8.py) by the tensor core's model, fp32."""
    parts = [
        (q8[:, g : g + 128].float(), content[:, g : g + 128].float()) for g in range(0, 512, 128)
    ]
    s32 = s.float()
    chains = []
    for g in (0, 2):
        a = hopper_fp8_dot(*parts[g]) * (s32[:, g] / s32[:, g + 1])
        chains.append(hopper_fp8_dot(*parts[g + 1], acc=a) * s32[:, g + 1])
    first = bf16_dot(chains[0], rope_q.bfloat16(), rope.bfloat16())
    return first + chains[1]


@pytest.mark.parametrize("kind", REACHED)
def test_the_tensor_cores_sums_are_inside(kind: str) -> None:
    random = torch.Generator().manual_seed(1)
    content, scales, rope = tokens(kind, 24, random)
    q = torch.randn(8, 576, generator=random)
    if kind == "aligned":
        q = torch.cat((content * scales.repeat_interleave(128, 1), rope), 1)[:8].float()
    q16 = q.bfloat16()
    factor = torch.exp2(record_qk.power_of(q16).double())[:, None]
    q8, rope_q = (record_qk.rounded(q16) * factor).split((512, 64), 1)
    exact, low, high = record_qk.logits(q16, content, scales, rope, SCALE)
    truth = (
        record_qk.rounded(q16)
        @ torch.cat((content * scales.repeat_interleave(128, 1), rope), 1).T
        * SCALE
    )
    torch.testing.assert_close(exact, truth, rtol=1e-9, atol=1e-9)
    got = summed(q8, rope_q, content, scales, rope).double() * SCALE / factor
    error = got - exact
    assert (low <= error).all() and (error <= high).all()
    share = torch.where(error < 0, error / low, error / high)
    assert share.max() > REACHED[kind]


def test_rounding_keeps_a_rows_largest_and_its_rope() -> None:
    """Four bits of each channel, down to 2^-13 of the largest; RoPE as it is; no row feels its
    size, unless RoPE is 2^30 times content."""
    random = torch.Generator().manual_seed(2)
    q = torch.randn(6, 576, generator=random).bfloat16()
    q[1] *= 2.0**-60
    q[2] *= 2.0**60
    q[3, :512] = 0.0
    q[4, :512] *= 2.0**-40
    got = record_qk.rounded(q)
    assert torch.equal(got[:, 512:], q[:, 512:].double())
    off = (got - q.double()).abs()[:, :512]
    top = q[:, :512].double().abs().amax(1, keepdim=True)
    assert (off <= torch.maximum(q[:, :512].double().abs() * 2.0**-4, top * 2.0**-16))[:4].all()
    assert off[0].max() > 0 and not got[3, :512].any()
    scaled = record_qk.rounded(q[:1] * 2.0**60)
    assert torch.equal(scaled, got[:1] * 2.0**60)

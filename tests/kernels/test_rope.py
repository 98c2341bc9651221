"""RMS norm and RoPE inside ``append_kv`` and ``quantize_q``: the separate steps' bits.

The truth of a case is torch's norm and rotation, rounded to the input's dtype, then the kernel that
takes them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from snapmla import reference
from softgpu import Options, using
from tests.support.bits import assert_same
from tests.support.cases import allocate_pool
from tests.support.needs import needs_kernels
from tests.support.rotation import DIAGONAL, EPS, rotation
from tests.support.rows import DTYPES, INDEX, device_of, joint, kernel, latents

pytestmark = needs_kernels
# variants that ``make test`` builds anyway
PLAIN: dict[str, Any] = {"index_dtype": "i64", "rope_style": "interleaved"}
NORMED: dict[str, Any] = {
    "index_dtype": "i64", "rope_style": "neox", "norm": "rms", "cos_sin_dtype": "bf16"
}  # fmt: skip
OTHERS = [
    {"in_dtype": "f16", "rope_style": "interleaved", "norm": "rms", "cos_sin_dtype": "f16"},
    {"in_dtype": "f16", "rope_style": "neox", "position_dtype": "i64"},
    {"in_dtype": "f32", "index_dtype": "i64", "rope_style": "interleaved", "norm": "rms"},
    {"in_dtype": "f32", "rope_style": "neox", "norm": "rms", "position_dtype": "i64"},
    {"index_dtype": "i64", "rope_style": "interleaved", "norm": "rms"},
    {"index_dtype": "i64", "rope_style": "neox", "position_dtype": "i32"},
    {"index_dtype": "i64", "rope_style": "interleaved", "norm": "rms", "cos_sin_dtype": "bf16"},
]
whole = pytest.mark.whole_matrix


@pytest.mark.parametrize(
    ("target", "axes", "n", "layout", "strided"),
    [
        ("sm_90a", PLAIN, 300, "paged", True),
        ("sm_90a", NORMED, 300, "split", True),
        ("sm_90a", PLAIN, 1, "row640", False),
        ("sm_90a", NORMED, 1, "paged", False),
        pytest.param("sm_100a", PLAIN, 41, "row640", False, marks=whole),
        pytest.param("sm_100a", NORMED, 41, "split", False, marks=whole),
        ("sm_90a", OTHERS[0], 41, "split", True),
        *(pytest.param("sm_90a", axes, 41, "split", True, marks=whole) for axes in OTHERS[1:]),
        *(
            pytest.param("cuda", axes, 300, "paged", True, marks=pytest.mark.gpu)
            for axes in (PLAIN, NORMED)
        ),
    ],
)
def test_append_is_the_steps(
    target: str, axes: dict[str, Any], n: int, layout: str, strided: bool
) -> None:
    device, in_dtype = device_of(target), DTYPES[axes.get("in_dtype", "bf16")]
    index = axes.get("index_dtype", "i32")
    how = rotation(
        n, in_dtype, table=DTYPES[axes.get("cos_sin_dtype", "f32")],
        index=INDEX[axes.get("position_dtype", index)], is_neox=axes["rope_style"] == "neox",
        norm="norm" in axes,
    )  # fmt: skip
    c, r = latents((n,), in_dtype)
    r[:2] = DIAGONAL
    pages = n // 64 + 2
    slots = torch.randperm(pages * 64)[:n].to(INDEX[index])
    slots[n // 2 :: 7] = -1
    given = joint(c, r) if strided else (c, r)
    more = [how.positions, how.cos_sin_cache, *([] if how.weight is None else [how.weight])]
    pool, want = (
        allocate_pool(pages, 64, at, torch.device(device), 255) for at in (layout, "split")
    )
    run = kernel(target, op="append_kv", **axes)
    separate = {k: axes[k] for k in ("in_dtype", "index_dtype") if k in axes}
    with using(Options(hazards="raise")):
        run(
            pool[0].view(torch.uint8), *pool[1:], *(x.to(device) for x in (*given, slots, *more)),
            *([] if how.weight is None else [EPS]),
        )  # fmt: skip
        kernel(target, op="append_kv", **separate)(
            want[0].view(torch.uint8), *want[1:],
            *(x.to(device) for x in (*how.steps(c, r), slots)),
        )  # fmt: skip
    assert_same(pool[0].view(torch.uint8).contiguous(), want[0].view(torch.uint8))
    assert_same(pool[1].contiguous(), want[1])
    assert_same(pool[2].contiguous(), want[2])
    kept = slots >= 0
    sigma = want[2].view(-1)[slots[kept].to(device)].cpu()
    bad = ~torch.isfinite(torch.cat(how.steps(c, r), -1)).all(-1)[kept]
    assert torch.equal(sigma.isnan(), bad) and (n < 41 or 5 <= bad.sum() < n // 4)


@pytest.mark.parametrize(
    ("target", "mode", "axes", "shape", "strided"),
    [
        ("sm_90a", "token_head", {"rope_style": "interleaved"}, (2, 2, 75), True),
        ("sm_90a", "token_head", {"rope_style": "neox", "cos_sin_dtype": "bf16"}, (5, 3, 7), True),
        ("sm_90a", "token_head", {"rope_style": "interleaved"}, (1, 1, 1), False),
        pytest.param(
            "sm_100a", "token_head", {"rope_style": "interleaved"}, (1, 5, 7), False, marks=whole
        ),
        pytest.param(
            "sm_100a", "token_head", {"rope_style": "neox", "cos_sin_dtype": "bf16"}, (3, 1, 7),
            True, marks=whole,
        ),
        *(
            pytest.param("sm_90a", mode, axes, (3, 1, 7), True, marks=whole)
            for mode, axes in (
                ("token", {"rope_style": "neox", "position_dtype": "i32"}),
                ("token", {"rope_style": "interleaved", "in_dtype": "f32"}),
                ("token_head", {"rope_style": "interleaved", "in_dtype": "f32"}),
                ("token_head", {"rope_style": "neox", "in_dtype": "f16", "cos_sin_dtype": "f16"}),
            )
        ),
        *(
            pytest.param("cuda", "token_head", axes, (5, 3, 7), True, marks=pytest.mark.gpu)
            for axes in (
                {"rope_style": "interleaved"}, {"rope_style": "neox", "cos_sin_dtype": "bf16"},
            )
        ),
    ],
)  # fmt: skip
def test_quantize_is_the_steps(
    target: str, mode: str, axes: dict[str, Any], shape: tuple[int, ...], strided: bool
) -> None:
    device, in_dtype = device_of(target), DTYPES[axes.get("in_dtype", "bf16")]
    b, s_q, _ = shape
    how = rotation(
        b * s_q, in_dtype, table=DTYPES[axes.get("cos_sin_dtype", "f32")],
        index=INDEX[axes.get("position_dtype", "i64")], is_neox=axes["rope_style"] == "neox",
    )  # fmt: skip
    c, r = latents(shape, in_dtype, seed=1)
    r.flatten(0, 1)[:2] = DIAGONAL
    _, turned = how.steps(c.flatten(0, 1), r.flatten(0, 1))
    assert b * s_q < 4 or (turned[:2] == 0).sum() == turned[:2].numel() / 2
    given: tuple[torch.Tensor, ...] = (c, r)
    if strided:  # heads outermost, as a transposed projection leaves them
        given = tuple(x.transpose(0, 2).contiguous().transpose(0, 2) for x in joint(c, r))
    scales = shape if mode == "token_head" else shape[:2]
    got, want = (
        [
            torch.zeros((*shape, 512), dtype=torch.uint8, device=device),
            torch.zeros((*shape, 64), dtype=torch.bfloat16, device=device),
            torch.zeros(scales, device=device),
        ]
        for _ in range(2)
    )
    with using(Options(hazards="raise")):
        kernel(target, op="quantize_q", mode=mode, **axes)(
            *(x.to(device) for x in (*given, how.positions, how.cos_sin_cache)), *got
        )
        separate = {k: axes[k] for k in ("in_dtype",) if k in axes}
        kernel(target, op="quantize_q", mode=mode, **separate)(
            c.to(device), turned.view_as(r).to(device), *want
        )
    for a, e in zip(got, want, strict=True):
        assert_same(a, e)
    unknown = (how.positions < 0) | (how.positions >= len(how.cos_sin_cache))
    lost = got[2].view(b * s_q, -1).isnan().all(1).cpu()
    assert lost[unknown].all() and (b * s_q < 3 or unknown.sum() >= 2)


def lanes_in_turn(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares by neighbouring lanes first."""
    total = sum_of_lanes(rows.square().unflatten(-1, (2, 32, 8)).unbind(1))
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    return total[..., 0]


def loads_in_turn(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares by channels of both loads first."""
    total = sum_of_lanes([rows.square().unflatten(-1, (2, 32, 8)).sum(1)])
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def sum_of_lanes(loads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums (rows, 32) of loads (rows, 32, 8), channel by channel, then load by load."""
    return sum(sum(x.unbind(-1)[1:], x[..., 0]) for x in loads)  # type: ignore[return-value]


def test_the_order_of_squares() -> None:
    """Rows, few in a hundred thousand, whose largest value another order rounds the other way."""
    seeds = {lanes_in_turn: (36639, 44608), loads_in_turn: (6729, 44608)}
    used = sorted({seed for some in seeds.values() for seed in some})
    c = torch.stack(
        [torch.randn(512, generator=torch.Generator().manual_seed(seed)) for seed in used]
    ).half()
    ones = torch.ones(512).half()
    want = reference.rms_norm_rows(c, ones, EPS)
    for order, rows in seeds.items():
        mean = order(c.float()) * (1 / 512) + torch.tensor(EPS)
        inverse = 1.0 / mean.double().sqrt().float()
        other = (c.float() * inverse[:, None]).half()
        differ = other.abs().amax(1) != want.abs().amax(1)
        assert all(differ[used.index(seed)] for seed in rows), order.__name__
    n = len(used)
    pool = allocate_pool(1, 64, "split", torch.device("cpu"), 255)
    zero = torch.zeros(n, dtype=torch.int32)
    kernel("sm_90a", op="append_kv", **OTHERS[0])(
        pool[0].view(torch.uint8), *pool[1:], c, torch.zeros(n, 64).half(),
        torch.arange(n, dtype=torch.int32), zero, torch.zeros(1, 64).half(), ones, EPS,
    )  # fmt: skip
    assert_same(
        pool[2][0, :n], reference.quantize_rows(want, torch.zeros(n, 64), slots=torch.arange(n))[2]
    )


@pytest.mark.parametrize("is_neox", [False, True])
def test_rotation_is_the_complex_product(is_neox: bool) -> None:
    """The reference against complex numbers, within the rounding to bf16."""
    how = rotation(
        40, torch.bfloat16, table=torch.float32, index=torch.int64, is_neox=is_neox, seed=3
    )
    x = torch.randn(40, 5, 64).bfloat16()
    got = reference.rotate_rows(x, how.positions, how.cos_sin_cache, is_neox)
    known = (how.positions >= 0) & (how.positions < len(how.cos_sin_cache))
    assert got[~known].isnan().all() and 2 <= (~known).sum() < 40
    cos, sin = how.cos_sin_cache[how.positions[known]].double().chunk(2, -1)
    pairs = x[known].double()
    a, b = pairs.chunk(2, -1) if is_neox else (pairs[..., ::2], pairs[..., 1::2])
    product = torch.complex(a, b) * torch.complex(cos, sin)[:, None]
    parts = (product.real, product.imag)
    want = torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)
    torch.testing.assert_close(got[known].double(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_norm_is_deepseeks(dtype: torch.dtype) -> None:
    """Against transformers' ``DeepseekV3RMSNorm``, whose mean is summed in another order."""
    x, weight = torch.randn(400, 512).mul(3).to(dtype), torch.randn(512).to(dtype)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    want = weight * scaled.to(dtype)
    got = reference.rms_norm_rows(x, weight, EPS)
    assert got.dtype == dtype
    differ = (got != want).float().mean()
    assert differ < (0.7 if dtype == torch.float32 else 1e-3)
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)

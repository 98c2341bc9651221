"""``merge_states`` against weighted sums in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from snapmla.dense import merge
from snapmla.testing import metrics
from snapmla.testing.reference import merge_states_reference
from softgpu import Options, using
from tests.support.bits import assert_same_bits
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import DTYPES, device_of, kernel

pytestmark = needs_kernels
FACTOR = {"e": math.log(2.0), "2": 1.0}
HEAD_ROWS = (256, 128)  # channels, of heads of dense prefill
# fp32 sums of at most 40 products, a weight's exponential and a reciprocal: some ulp
ULPS = 16 * 2.0**-24


def run(
    target: str, mode: str, parts: tuple[Any, Any], results: tuple[Tensor, Tensor], base: str = "e"
) -> None:
    """One call; parts = (outs, lses), each with the parts first or a list of them."""
    outs, lses = parts
    fields = {"in_dtype": outs[0].dtype, "out_dtype": results[0].dtype}
    short = {dtype: name for name, dtype in DTYPES.items()}
    dtypes = {k: short[v] for k, v in fields.items()}
    call = kernel(target, op="merge_states", mode=mode, d_v=outs[0].shape[-1], **dtypes)
    if mode == "stack":
        call(outs, lses, *results, FACTOR[base])
    elif mode == "pair":
        call(*outs, *lses, *results, FACTOR[base])
    else:
        unused = (torch.full_like(outs[0], math.nan), torch.full_like(lses[0], math.nan))
        fill = merge.MAX_LIST - len(outs)
        call(
            *outs, *[unused[0]] * fill, *lses, *[unused[1]] * fill, *results, len(outs),
            FACTOR[base],
        )  # fmt: skip


def assert_near(results: tuple[Tensor, Tensor], outs: Tensor, lses: Tensor, base: str) -> None:
    """Within some ulp of what was summed, and the rounding to the result's dtype."""
    out, lse = (t.cpu().double() for t in results)
    want, want_lse = merge_states_reference(outs, lses, lse_base=base)
    size, _ = merge_states_reference(outs.double().abs(), lses, lse_base=base)
    step = 2.0**-8 if results[0].dtype == torch.bfloat16 else 0.0
    allowed = ULPS * size + (step * want.abs()).clamp_min(2.0**-133)
    assert torch.equal(out.isnan(), want.isnan())
    assert ((out - want).abs().nan_to_num(0) <= allowed.nan_to_num(0)).all()
    assert torch.equal(lse.isnan(), want_lse.isnan()) and torch.equal(lse.isinf(), want_lse.isinf())
    error = metrics.lse_error(lse.nan_to_num(nan=0.0, posinf=1, neginf=-1),
                              want_lse.nan_to_num(nan=0.0, posinf=1, neginf=-1))  # fmt: skip
    assert error <= 2.0**-23 * (4 + want_lse[want_lse.isfinite()].abs().max())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("in_dtype", ["bf16", "f32"])
@pytest.mark.parametrize("out_dtype", ["bf16", "f32"])
@pytest.mark.parametrize(
    ("mode", "n", "shape", "base"),
    [
        ("pair", 2, (2, 2, 3), "e"),
        ("pair", 2, (1, 1, 1), "2"),
        ("list", 3, (1, 5, 2), "2"),
        ("list", 8, (2, 1, 3), "e"),
        ("stack", 1, (1, 1, 5), "e"),
        ("stack", 3, (3, 1, 2), "2"),
        ("stack", 8, (1, 2, 3), "e"),
        ("stack", 37, (1, 2, 3), "2"),
    ],
)
def test_merge_states(
    target: str, in_dtype: str, out_dtype: str, mode: str, n: int, shape: tuple[int, int, int],
    base: str,
) -> None:  # fmt: skip
    """Empty parts of both signs, under which values are NaN; a NaN LSE; LSE far apart."""
    device, (b, s_q, h) = device_of(target), shape
    torch.manual_seed(n)
    outs = torch.randn(n, b, s_q, h, 512).to(DTYPES[in_dtype])
    lses = torch.randn(n, b, h, s_q) * 8
    empty = torch.rand(n, b, h, s_q) < 0.3
    empty[n - 1, 0, 0, 0] = False
    lses[empty] = torch.where(torch.rand(n, b, h, s_q) < 0.5, math.inf, -math.inf)[empty]
    outs[empty.mT] = math.nan
    lses[n - 1, 0, 0, 0] = 300.0
    if b * s_q * h > 1:
        lses[:, -1, -1, -1], outs[:, -1, -1, -1] = -math.inf, math.nan
        lses[0, -1, -1, -1] = math.inf
        lses[n // 2, 0, 1, 0] = math.nan
    results = (
        torch.full((b, s_q, h, 512), 7.0, dtype=DTYPES[out_dtype], device=device),
        torch.full((b, h, s_q), 7.0, device=device),
    )
    run(target, mode, (outs.to(device), lses.to(device)), results, base)
    assert_near(results, outs, lses, base)
    if b * s_q * h > 1:
        assert not results[0][-1, -1, -1].any() and results[1][-1, -1, -1] == math.inf


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize(("mode", "n", "kept"), [("pair", 2, 0), ("list", 7, 6), ("stack", 19, 17)])
def test_one_part_alone_keeps_its_bits(
    target: str, dtype: str, base: str, mode: str, n: int, kept: int
) -> None:
    """Values and LSE: nothing is converted to another base and back."""
    device = device_of(target)
    outs = torch.randn(n, 1, 2, 3, 512).to(DTYPES[dtype]) * 1e3
    lses = torch.randn(n, 1, 3, 2) * 50
    outs[kept, 0, 0, 0, :4] = torch.tensor([3e38, -3e38, 1e-38, math.inf])
    for i in range(n):
        if i != kept:
            lses[i], outs[i] = (math.inf, -math.inf)[i % 2], math.nan
    results = torch.zeros_like(outs[0]).to(device), torch.zeros_like(lses[0]).to(device)
    run(target, mode, (outs.to(device), lses.to(device)), results, base)
    assert_same_bits([t.cpu() for t in results], [outs[kept], lses[kept]])


@pytest.mark.parametrize(
    ("d_v", "dtype", "mode", "n"),
    [
        (128, "bf16", "pair", 2),
        *(
            pytest.param(d_v, dtype, mode, n, marks=pytest.mark.whole_matrix)
            for d_v in HEAD_ROWS
            for dtype in ("bf16", "f32")
            for mode, n in (("pair", 2), ("list", 5), ("stack", 11))
            if (d_v, dtype, mode) != (128, "bf16", "pair")
        ),
    ],
)
def test_rows_of_heads(d_v: int, dtype: str, mode: str, n: int) -> None:
    """256 and 128 channels, packed, an odd number of rows: of 128 channels of 16 bits two share a
    warp.  Into memory of their own and over a part, where no lane may write before it was read."""
    shape = (1, 5, 3)
    torch.manual_seed(d_v + n)
    outs = torch.randn(n, *shape, d_v).to(DTYPES[dtype])
    lses = torch.randn(n, 1, 3, 5) * 8
    lses[0, 0, 0, 0], outs[0, 0, 0, 0] = -math.inf, math.nan
    lses[:, 0, 2, 4], outs[:, 0, 4, 2] = math.inf, math.nan
    lses[1, 0, 1, 1] = math.nan
    memory = torch.full((1, 5, 4, d_v), 7.0).to(DTYPES[dtype])
    results = memory[:, :, :3], torch.full((1, 4, 5), 7.0)[:, :3]
    with using(Options(hazards="raise", seed=1)):
        run("sm_90a", mode, (outs, lses), results)
        assert_near(results, outs, lses, "e")
        assert (memory[:, :, 3] == 7).all()
        given = outs.clone(), lses.clone()
        run("sm_90a", mode, given, (given[0][1], given[1][1]))
    assert_same_bits((given[0][1], given[1][1]), results)


@pytest.mark.parametrize("target", TARGETS)
def test_modes_agree(target: str) -> None:
    """The same sums in the same order: the same bits."""
    device = device_of(target)
    outs, lses = torch.randn(2, 2, 1, 7, 512, device=device), torch.randn(2, 2, 7, 1, device=device)
    found = []
    for mode in ("pair", "list", "stack"):
        results = torch.zeros_like(outs[0]), torch.zeros_like(lses[0])
        run(target, mode, (outs, lses), results)
        found.append(results)
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(("mode", "n", "over"), [("pair", 2, 1), ("list", 5, 0), ("stack", 9, 8)])
def test_in_place(target: str, dtype: str, mode: str, n: int, over: int) -> None:
    """Over a part and over its LSE, which all lanes of a warp read and one writes."""
    device = device_of(target)
    outs = torch.randn(n, 2, 2, 3, 512, device=device).to(DTYPES[dtype])
    lses = torch.randn(n, 2, 3, 2, device=device)
    lses[over, 0, 0, 0] = -math.inf
    lses[:, 1, 0, 0] = math.inf
    wanted = torch.zeros_like(outs[0]), torch.zeros_like(lses[0])
    run(target, mode, (outs, lses), wanted)
    others = [i for i in range(n) if i != over]
    before = outs[others].clone(), lses[others].clone()
    for seed in range(3):
        given = outs.clone(), lses.clone()
        with using(Options(hazards="raise", seed=seed)):
            run(target, mode, given, (given[0][over], given[1][over]))
        assert_same_bits((given[0][over], given[1][over]), wanted)
        assert_same_bits((given[0][others], given[1][others]), before)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_strides(target: str, dtype: str) -> None:
    """Rows with gaps, heads outermost, an expanded part, LSE with tokens first, slices of results;
    dimensions of one element with strides that make no sense."""
    device, b, s_q, h = device_of(target), 2, 3, 5
    wide = torch.randn(b, s_q, h, 520, device=device).to(DTYPES[dtype])[..., 8:]
    outer = torch.randn(h, s_q, b, 512, device=device).to(DTYPES[dtype]).transpose(0, 2)
    same = torch.randn(1, 1, h, 512, device=device).to(DTYPES[dtype]).expand(b, s_q, h, 512)
    lses = [
        torch.randn(b, s_q, h, device=device).mT,
        torch.randn(b, 2 * h, s_q, device=device)[:, ::2],
        torch.randn(1, h, 1, device=device).expand(b, h, s_q),
    ]
    outs = [wide, outer, same]
    out = torch.full((b, h, s_q, 576), 7.0, device=device).to(DTYPES[dtype])
    lse = torch.full((s_q, h, b, 2), 7.0, device=device)
    results = out[..., :512].transpose(1, 2), lse[..., 1].permute(2, 1, 0)
    run(target, "list", (outs, lses), results)
    stacked = torch.stack(outs).cpu(), torch.stack(lses).cpu()
    assert_near(results, *stacked, "e")
    assert (out[..., 512:] == 7).all() and (lse[..., 0] == 7).all()
    one = [o[:1, :1].as_strided((1, 1, h, 512), (3, 5, o.stride(2), 1)) for o in outs[:2]]
    logs = [x[:1, :, :1].as_strided((1, h, 1), (7, x.stride(1), 9)) for x in lses[:2]]
    results = torch.zeros(1, 1, h, 512, device=device), torch.zeros(1, h, 1, device=device)
    run(target, "pair", (one, logs), results)
    stacked = torch.stack(one).cpu(), torch.stack(logs).cpu()
    assert_near(results, *stacked, "e")


@pytest.mark.parametrize("mode", ["pair", "stack"])
def test_offsets_beyond_32_bits(mode: str) -> None:
    """Sequences of a part, or parts of a stack, more than 4 GiB and 2^31 elements apart.

    Only the touched parts of the allocation become resident.
    """
    far = 2**31 + 64
    try:
        memory = torch.empty(far + 1024, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no address space for it: {error}")
    strides = (512, far) if mode == "pair" else (far, 512)
    outs = memory.as_strided((2, 2, 1, 1, 512), (*strides, 512, 512, 1))
    outs.copy_(torch.randn(2, 2, 1, 1, 512))
    lses = torch.randn(2, 2, 1, 1)
    results = torch.zeros(2, 1, 1, 512), torch.zeros(2, 1, 1)
    run("sm_90a", mode, (outs, lses), results)
    assert_near(results, outs.clone(), lses, "e")


def test_empty_calls_launch_nothing() -> None:
    for mode, n in (("pair", 2), ("list", 4), ("stack", 4)):
        for b, s_q, h in ((0, 1, 4), (2, 0, 4), (2, 1, 0)):
            outs, lses = torch.zeros(n, b, s_q, h, 512).bfloat16(), torch.zeros(n, b, h, s_q)
            run("sm_90a", mode, (outs, lses), (outs[0].clone(), lses[0].clone()))
            used = kernel("sm_90a", op="merge_states", mode=mode)
            assert not used.launches  # type: ignore[attr-defined]

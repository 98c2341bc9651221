"""Partial rows: the format, what writes it, and the merge of rows of every kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import softgpu
from snapmla.testing import partials
from softgpu import Options
from tests.support.needs import needs_compiler
from tests.support.planting import Source
from tests.support.rows import kernel

STEP = 2.0**-11  # of a value, at most, is lost
SHARED = (16, 64, 128)  # channels under one exponent, by program


def oracle(row: np.ndarray, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """(fp16 channels, exponents) of an fp32 row, from the definition, group by group."""
    stored, exponents = [], []
    with np.errstate(invalid="ignore"):  # signalling NaN
        groups = row.reshape(-1, channels).astype(np.float64)
    for group in groups:
        known = np.abs(group[~np.isnan(group)])
        if len(known) == 0 or np.isinf(known).any():
            e = 254
        else:
            e = min(max(int(np.frexp(known.max())[1]) + 126 if known.max() else 0, 15), 254)
        with np.errstate(over="ignore", under="ignore"):
            stored.append(np.ldexp(group, 141 - e).astype(np.float16))
        exponents += [e] * (channels // 16)
    return np.concatenate(stored), np.array(exponents, np.uint8)


def same(got: Tensor, want: tuple[np.ndarray, np.ndarray]) -> bool:
    """A partial row's bits; NaN is NaN."""
    channels, exponents = got[:512].numpy(), got[512:].view(torch.uint8).numpy()
    nan = np.isnan(want[0])
    return (
        np.array_equal(np.isnan(channels), nan)
        and np.array_equal(channels.view(np.int16)[~nan], want[0].view(np.int16)[~nan])
        and np.array_equal(exponents, want[1])
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(-149, 127), st.integers(0, 60),
    st.sampled_from([16, 64, 128, 256]),
)  # fmt: skip
def test_round_trip(seed: int, top: int, spread: int, channels: int) -> None:
    """Any magnitude, groups up to 2^60 apart: the bits of the definition, and values that are off
    by half a step or by a 2^-39th of the largest that shares the exponent."""
    pick = np.random.default_rng(seed)
    powers = np.repeat(top - pick.integers(0, spread + 1, 32), 16)
    with np.errstate(over="ignore", under="ignore"):
        row = np.ldexp(pick.uniform(-1.0, 1.0, 512), powers).astype(np.float32)
    x = torch.from_numpy(row)
    encoded = partials.encode(x, channels)
    assert encoded.shape == (528,) and same(encoded, oracle(row, channels))
    decoded = partials.decode(encoded).double()
    largest = x.double().abs().view(-1, channels).amax(1).repeat_interleave(channels)
    # below exponent 15 the smallest fp16, 2^-24 of 2^-126, is what remains: 2^-150, half of fp32's
    allowed = torch.maximum(STEP * x.double().abs(), largest * 2.0**-39).clamp(min=2.0**-149)
    assert ((decoded - x).abs() <= allowed).all()


def every_kind(slots: int, rows: int) -> Tensor:
    """Rows (slots, rows, 512): 2^20 apart among slots, rows and groups, then the awkward ones."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(slots, rows, 512, generator=generator)
    x *= torch.exp2(torch.tensor([0.0, 20.0, -20.0, 3.0])).repeat(rows)[:rows, None]
    x[:, 1] *= torch.exp2(20.0 * (torch.arange(512) // 16 % 2))
    x[:, 2] *= torch.exp2(-20.0 * (torch.arange(512) // 64 % 2))
    x[:, 3] = 0.0
    x[:, 4] *= 2.0**-110  # exponents around the least
    x[:, 5] *= 2.0**-140  # denormal
    x[:, 6] = x[:, 6].abs().clamp(0.5, 1.0) * 2.0**127
    x[0, 7] = math.nan
    x[:, 8, 100] = math.inf
    x[:, 9, 300] = -math.inf
    x[0, 10, 17] = math.nan
    x[1, 11] = -0.0
    return x


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> softgpu.LoadedKernel:
    source = Source("partial_rows")
    loaded = source.build(tmp_path_factory.mktemp(source.name))
    loaded.options = Options(hazards="raise")
    return loaded


def written(program: softgpu.LoadedKernel, x: Tensor) -> dict[int, Tensor]:
    """The partial rows of ``x``, by channels under one exponent."""
    results = {n: torch.full((*x.shape[:2], 528), math.nan).half() for n in SHARED}
    program(x, *results.values())
    return results


@needs_compiler
def test_kernels_write_the_format(program: softgpu.LoadedKernel) -> None:
    x = every_kind(2, 12)
    bits = torch.randint(-(2**31), 2**31, (1, 6, 512), generator=torch.Generator().manual_seed(1))
    for rows in (x, bits.int().view(torch.float32)):
        for channels, got in written(program, rows).items():
            for slot in range(rows.shape[0]):
                for row in range(rows.shape[1]):
                    want = oracle(rows[slot, row].numpy(), channels)
                    assert same(got[slot, row], want), (channels, slot, row)
                    encoded = partials.encode(rows[slot, row], channels)
                    assert same(encoded, want), (channels, slot, row)


@needs_compiler
@pytest.mark.parametrize("slots", [2, 4, 7, 19])
def test_rows_of_every_kind_merge(program: softgpu.LoadedKernel, slots: int) -> None:
    """Merged rows are off by half a step of each partial value, and fp32's own rounding; NaN and
    infinity come through, and finite channels beside an infinity lose what is below 2^88."""
    x, heads = every_kind(slots, 12), 12
    generator = torch.Generator().manual_seed(slots)
    lse = 4.0 * torch.randn(slots, heads, generator=generator)
    lse[1, 0] = -math.inf
    x[1, 0] = 0.0
    weight = torch.exp2(lse.double() - lse.double().amax(0))
    weight = (weight / weight.sum(0))[..., None]
    want = (weight * x.double()).sum(0)
    begin = torch.tensor([0, slots], dtype=torch.int32)
    alone = torch.zeros((0, 2), dtype=torch.int32)  # a unit is a sequence
    for channels, o_accum in written(program, x).items():
        known = x.abs().double().nan_to_num(0.0, math.inf)
        largest = known.unflatten(-1, (-1, channels)).amax(-1, keepdim=True)
        floor = largest.expand(-1, -1, -1, channels).flatten(-2) * 2.0**-39
        allowed = (weight * torch.maximum(STEP * x.double().abs(), floor)).sum(0)
        allowed += 1e-6 * (weight * x.double().abs()).sum(0) + 2.0**-134
        out, out_lse = torch.zeros(1, 1, heads, 512), torch.zeros(1, heads, 1)
        kernel("sm_100a", op="merge", out_dtype="f32")(
            o_accum, lse, begin, alone, out, out_lse, 1.0, -math.inf
        )
        got = out[0, 0].double()
        finite = want.isfinite()
        assert torch.equal(got[~finite].isnan(), want[~finite].isnan())
        infinite = want.isinf()
        assert torch.equal(got[infinite], want[infinite])
        beside = infinite.unflatten(-1, (-1, channels)).any(-1, keepdim=True)
        beside = finite & beside.expand(-1, -1, channels).flatten(-2)
        assert (got[beside] - want[beside]).abs().max() < 2.0**88
        rest = finite & ~beside
        assert ((got - want).abs() <= allowed)[rest].all() and rest[10].sum() == 511
        assert (got[3] == 0).all()

"""The models of the tensor cores' accumulators against recorded hardware and each other."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapmla.testing import accumulate
from snapmla.testing.rounding import FP8
from softgpu import tensor_core
from softgpu.accumulate import blackwell
from tests.support import ROOT

quick = settings(max_examples=25, deadline=None)


def load_recorder():
    """``profiles/record_wgmma.py`` as a module."""
    spec = importlib.util.spec_from_file_location(
        "record_wgmma", ROOT / "profiles" / "record_wgmma.py"
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recorder = load_recorder()
RECORDED = {case.name: case for case in recorder.cases()}


@pytest.fixture(scope="module")
def record() -> dict[str, np.ndarray]:
    with np.load(recorder.SAMPLE) as data:
        return {name: data[name] for name in data.files}


@pytest.mark.parametrize("kind", sorted({case.kind for case in RECORDED.values()}))
def test_numpy_model_equals_recorded_hardware(kind: str, record: dict[str, np.ndarray]) -> None:
    for name, case in RECORDED.items():
        if case.kind == kind:
            got = recorder.model(case, tiles=1, rows=recorder.SAMPLE_ROWS)[0]
            assert (got == record[name]).all(), name


@pytest.mark.parametrize("kind", ["fp8x1", "bf16x1", "f16x1", "qk"])
def test_torch_model_equals_recorded_hardware(kind: str, record: dict[str, np.ndarray]) -> None:
    half = torch.float16 if kind == "f16x1" else torch.bfloat16
    rows = recorder.SAMPLE_ROWS
    for name, case in RECORDED.items():
        if case.kind != kind:
            continue
        pairs, acc = case.build()
        out = torch.from_numpy(acc[0, :rows].copy())
        for (fmt, _), (a, b) in zip(case.segments, pairs, strict=True):
            x, y = torch.from_numpy(a[0, :rows].copy()), torch.from_numpy(b[0].copy())
            if fmt.name == "fp8":
                out = accumulate.hopper_fp8_dot(x.view(FP8), y.view(FP8), out)
            else:
                out = accumulate.bf16_dot(out, x.view(half), y.view(half))
        assert (out.view(torch.int32).numpy().view(np.uint32) == record[name]).all(), name


def random_operands(seed: int, size: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b (8, 64) of any e4m3, an accumulator (8, 8) of about ``size``."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (16, 64), generator=generator, dtype=torch.uint8)
    a, b = codes[:8].view(FP8), codes[8:].view(FP8)
    acc = torch.randn(8, 8, generator=generator) * size
    return a, b, acc


@quick
@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]))
def test_torch_and_numpy_models_agree(seed: int, size: float) -> None:
    a, b, acc = random_operands(seed, size)
    want = tensor_core.chain_numpy(
        acc.numpy(), a.float().numpy(), b.float().numpy(), fp8=True
    ).view(np.uint32)
    got = accumulate.hopper_fp8_dot(a, b, acc).view(torch.int32).numpy().view(np.uint32)
    assert (want == got).all()


@quick
@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]))
def test_torch_and_numpy_models_of_blackwell_agree(seed: int, size: float) -> None:
    a, b, acc = random_operands(seed, size)
    want = acc.numpy()
    for k in (slice(0, 32), slice(32, 64)):
        want = blackwell(want, a[:, k].float().numpy(), b[:, k].float().numpy(), "e4m3")
    got = accumulate.blackwell_fp8_dot(a, b, acc).numpy()
    assert (want.view(np.uint32) == got.view(np.uint32)).all()


def test_batched_dot_equals_single_ones() -> None:
    a = torch.randn(3, 5, 64).mul(100).to(FP8)
    b = torch.randn(3, 7, 64).mul(100).to(FP8)
    together = accumulate.hopper_fp8_dot(a, b)
    for i in range(3):
        assert torch.equal(together[i], accumulate.hopper_fp8_dot(a[i], b[i]))
    with pytest.raises(ValueError, match="multiple of 32"):
        accumulate.hopper_fp8_dot(a[..., :40], b[..., :40])

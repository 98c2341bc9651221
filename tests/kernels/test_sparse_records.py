"""Sparse decode over rows of 656 bytes: edges of lists and numbers, at the ABI."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.formats.ds_mla import LEAST_SCALE, ROPE_AT, ROW_BYTES, SCALES_AT
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import record_job, selfcheck
from snapmla.testing.dense_job import COSINE_GATE
from snapmla.testing.record_job import RecordJob, RecordShape
from snapmla.testing.workloads import sparse_records as work
from softgpu import Options, using
from tests.support import byte_lists
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
CHECKED = Options(hazards="raise", seed=5)
FEW = "sparse_decode_mix16_r16_obf16_sm90a"


def some(values: Iterable[Any], everyday: Any) -> list[Any]:
    """Parameters, all but one of them of the whole matrix."""
    whole = pytest.mark.whole_matrix
    return [v if v is everyday or v == everyday else pytest.param(v, marks=whole) for v in values]


BUILT = ("r32_obf16", "r64_obf16")
EVERY = some([FEW, *(f"sparse_decode_mix16_{name}_sm90a" for name in BUILT)], FEW)
STYLES = some([s for s in record_job.STYLES if s not in ("plain", "scales")], "swings")
PADDING = some([math.nan, 0.0, 1e30, -math.inf], math.nan)


def kernel_of(name: str) -> tuple[VariantSpec, Any]:
    spec = VariantSpec.from_name(name)
    directory: Path = variants.find_or_build(spec, need_library=False).directory
    return spec, selfcheck.load(spec, directory)


@pytest.mark.parametrize("name", EVERY)
def test_clean_and_right(name: str) -> None:
    """Every path under the hazard check: splits, sinks, ragged queries, idle rows, odd pages."""
    spec, kernel = kernel_of(name)
    assert tuple(kernel.names.arguments) == record_job.ARGUMENTS
    for shape in work.shapes(spec):
        with using(CHECKED):
            errors = (job := RecordJob(spec, shape)).errors(job.run(kernel))
        assert errors.right, f"{shape}: {errors}"


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", EVERY)
def test_items_without_tiles(name: str) -> None:
    byte_lists.assert_items_without_tiles(*kernel_of(name))


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", EVERY)
def test_rows_of_one_token(name: str) -> None:
    byte_lists.assert_lone_tokens(*kernel_of(name))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", EVERY)
def test_numbers_that_move_maxima(name: str, style: str) -> None:
    """Peaked rows, swings of 200 nats between tiles, queries that equal a token, RoPE of 1e3,
    groups 2^20 apart; whole and split."""
    spec, kernel = kernel_of(name)
    shape = RecordShape(5, 330, (330, 66), 1, parts=1, style=style)
    for each in (shape, replace(shape, powers=True, parts=3)):
        errors = (job := RecordJob(spec, each)).errors(job.run(kernel))
        assert errors.right, f"{each}: {errors}"


def assert_unmoved(job: RecordJob, kernel: Any, paddings: Iterable[float]) -> tuple[Tensor, Tensor]:
    """Asserts that no bit of real heads depends on what padded ones hold.

    Fills the first head and the last three with each of ``paddings``; gives (out, lse) as is.
    """
    out, lse = job.run(kernel)
    padded = torch.zeros(job.shape.heads, dtype=torch.bool)
    padded[0], padded[-3:] = True, True
    for padding in paddings:
        q = job.q16.clone()
        q[:, :, padded] = padding
        other, other_lse = job.run(kernel, q=q)
        assert torch.equal(other[:, :, ~padded], out[:, :, ~padded])
        assert torch.equal(other_lse[:, ~padded], lse[:, ~padded])
    return out, lse


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", EVERY)
def test_rows_do_not_feel_each_other(name: str, padding: float) -> None:
    """The bits of real heads, whatever padded ones hold; row 0 among those."""
    spec, kernel = kernel_of(name)
    heads = spec.row_tile
    for style in ("swings", "plain"):
        job = RecordJob(spec, RecordShape(heads, 200, (200, 66), 1, parts=2, style=style))
        assert job.errors(assert_unmoved(job, kernel, [padding])).right


@pytest.mark.parametrize("name", EVERY)
def test_queries_of_any_size(name: str) -> None:
    """Rows of Q that are tiny, huge, RoPE alone, one channel, zeros, of channels 2^30 apart."""
    spec, kernel = kernel_of(name)
    job = RecordJob(spec, RecordShape(9, 100, (100,), 1, parts=1))
    q = job.q16[0, 0]
    q[0] *= 2.0**-100
    q[1] = 0.0
    q[2, :512] = 0.0
    q[3, 512:] = 0.0
    q[4, :512] *= 2.0**-40
    q[5, 1:] = 0.0
    q[6, :512] *= torch.exp2(-torch.arange(512).fmod(30)).bfloat16()
    q[7] *= 64.0
    errors = job.errors(job.run(kernel))
    assert errors.right, str(errors)


@pytest.mark.parametrize("name", EVERY)
def test_scale_zero_is_a_token(name: str) -> None:
    """Tokens of zeros, NaN bytes under scales of 0: each weighs e^0 and adds nothing."""
    spec, kernel = kernel_of(name)
    job = RecordJob(spec, RecordShape(8, 64, (64,), 1, parts=1, dense=True))
    rows = job.cache.view(-1, ROW_BYTES)
    nothing = job.indices[0, :32].long()
    rows[nothing] = 0
    rows[nothing, :SCALES_AT] = 0x7F
    result = job.run(kernel)
    errors = job.errors(result)
    assert errors.right, str(errors)
    named = torch.where(torch.arange(64) < 32, -1, job.indices)
    without = job.run(kernel, indices=named)
    gain = torch.exp(result[1]) - torch.exp(without[1])
    assert torch.allclose(gain, torch.full_like(gain, 32.0), rtol=1e-3)


@pytest.mark.parametrize("name", EVERY)
def test_scales_anywhere(name: str) -> None:
    """All of a list's scales down to 2^-126, where logits are RoPE's alone, or up to 2^20."""
    spec, kernel = kernel_of(name)
    for power in (-113, 20):
        job = RecordJob(spec, RecordShape(8, 100, (100,), 1, parts=1, dense=True, powers=True))
        rows = job.cache.view(-1, ROW_BYTES)
        slots = job.indices[0].long()
        scales = rows[slots, SCALES_AT:ROPE_AT].contiguous().view(torch.float32)
        rows[slots, SCALES_AT:ROPE_AT] = (scales * 2.0**power).view(torch.uint8)
        assert float(scales.min() * 2.0**power) >= LEAST_SCALE
        job.q16[..., :512] *= 2.0 ** -max(power, 0)
        errors = job.errors(job.run(kernel))
        assert errors.error <= errors.allowed and errors.cosine <= COSINE_GATE, str(errors)
        assert errors.lse_error < 1e-5

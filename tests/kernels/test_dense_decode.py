"""Decode over a 16-bit cache at the edges of its numbers and of its arguments, at the ABI."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from dsl_kernels.families.fp8_decode import ROW_TILES
from dsl_kernels.spec import VariantSpec
from snapmla import runtime
from snapmla.testing import dense_job, selfcheck
from snapmla.testing.dense_job import DenseJob
from softgpu import LoadedKernel, Options, mutate, using
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
FEW, MANY = "dense_decode_split_r16_p16_df16_sm90a", "dense_decode_split_r64_p64_dbf16_sm90a"
CHECKED = Options(hazards="raise", seed=3)


def kernel_of(name: str) -> tuple[VariantSpec, runtime.Kernel]:
    spec = VariantSpec.from_name(name)
    directory: Path = runtime.find_or_build(spec, need_library=False).directory
    return spec, selfcheck.load(spec, directory)


@pytest.mark.parametrize("name", [FEW, pytest.param(MANY, marks=pytest.mark.whole_matrix)])
def test_frames_that_move(name: str) -> None:
    """Peaked rows: each tile's maximum is far from the last one's, in fp16 too."""
    spec, kernel = kernel_of(name)
    assert tuple(kernel.names.arguments) == dense_job.ARGUMENTS  # type: ignore[attr-defined]
    torch.manual_seed(1)
    job = DenseJob(spec, (200, 65), s_q=1, heads=4, amplitude=200.0)
    with using(CHECKED):
        errors = job.errors(job.run(kernel))
    assert errors.right, str(errors)


@pytest.mark.parametrize("name", [FEW, pytest.param(MANY, marks=pytest.mark.whole_matrix)])
def test_kv_heads(name: str) -> None:
    """Each (sequence, KV head) is a sequence of the plan and reads its own head of the cache."""
    spec, kernel = kernel_of(name)
    torch.manual_seed(2)
    job = DenseJob(spec, (70, 3), s_q=1, heads=3, kv_heads=2)
    with using(CHECKED):
        errors = job.errors(job.run(kernel))
    assert errors.right, str(errors)


@pytest.mark.parametrize("name", [FEW, MANY])
def test_a_nan_is_its_readers_alone(name: str) -> None:
    """NaN in the last token: the row that sees it is NaN, LSE included, and no other row is."""
    spec, kernel = kernel_of(name)
    torch.manual_seed(3)
    job = DenseJob(spec, (70,), parts=1, s_q=3, heads=2)
    page, offset = int(job.table[0, 69 // spec.page_size]), 69 % spec.page_size
    job.cache[page, offset, 0, 5] = math.nan
    with using(CHECKED):
        out, lse = job.run(kernel)
    assert torch.isnan(out[0, 2]).all() and torch.isnan(lse[0, :, 2]).all()
    assert torch.isfinite(out[0, :2]).all() and torch.isfinite(lse[0, :, :2]).all()


@pytest.mark.whole_matrix
@pytest.mark.parametrize("row_tile", ROW_TILES)
def test_both_dtypes_are_ordered_alike(row_tile: int) -> None:
    """Synchronisation and accesses to shared memory, in program order: what schedules and mutants
    of one dtype show (profiles/prove.py) holds for the other."""
    ordered = []
    for dtype in dense_job.DTYPES:
        spec = VariantSpec(op="dense_decode", pipeline="split", row_tile=row_tile, dtype=dtype)
        _, kernel = kernel_of(spec.name)
        assert isinstance(kernel, LoadedKernel)
        program = kernel.program(kernel.entry)
        waits = {site.pc for site in mutate.sites(program)}
        ordered.append(
            [
                (ins.opcode.replace("bf16", "f16"), program.kernel.source_of(ins))
                for ins in program.kernel.code
                if ins.pc in waits or ".shared" in ins.opcode or ins.opcode.startswith("wgmma")
            ]
        )
    assert ordered[0] == ordered[1] and len(ordered[0]) > 100


def test_the_gates_can_fail() -> None:
    """An element outside of both bounds, a NaN that is not the reference's."""
    truth = torch.tensor([1.0, 0.0, math.nan, math.inf], dtype=torch.float64)
    gate = dense_job.OUT_GATE
    assert dense_job.gate_violations(truth.clone(), truth, gate) == 0
    assert dense_job.gate_violations(truth + torch.tensor([0.015, 7e-4, 0, 0]), truth, gate) == 0
    assert dense_job.gate_violations(truth + torch.tensor([0.017, 9e-4, 0, 0]), truth, gate) == 2
    assert dense_job.gate_violations(torch.zeros(4), truth, gate) == 3

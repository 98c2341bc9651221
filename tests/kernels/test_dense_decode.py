"""Decode over a 16-bit cache at the edges of its numbers and of its arguments, at the ABI."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dsl_kernels.families.fp8_decode import ROW_TILES
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import dense_job, selfcheck
from snapmla.testing.dense_job import DenseJob
from snapmla.testing.dense_reference import dense_decode_reference
from softgpu import LoadedKernel, Options, mutate, using
from softgpu.tensor_core import half_step_numpy
from tests.support.dense_steps import SCALE, DenseStep
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
FEW, MANY = "dense_decode_split_r16_p16_df16_sm90a", "dense_decode_split_r64_p64_dbf16_sm90a"
CHECKED = Options(hazards="raise", seed=3)


def kernel_of(name: str) -> tuple[VariantSpec, variants.Kernel]:
    spec = VariantSpec.from_name(name)
    directory: Path = variants.find_or_build(spec, need_library=False).directory
    return spec, selfcheck.load(spec, directory)


@pytest.mark.parametrize("name", [FEW, pytest.param(MANY, marks=pytest.mark.whole_matrix)])
def test_maxima_that_move(name: str) -> None:
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


@pytest.mark.parametrize(
    "name", [FEW, pytest.param(MANY.replace("dbf16", "df16"), marks=pytest.mark.whole_matrix)]
)
def test_splits_cost_fp16_nothing(name: str) -> None:
    """In pieces as near to the truth as whole: fp16 partial rows would show 1.1 times the error."""
    spec, kernel = kernel_of(name)
    errors = []
    for parts in (4, 1):
        torch.manual_seed(4)
        job = DenseJob(spec, (512, 300), parts, s_q=1, heads=4)
        assert (job.plan.split_begin[-1] > 0) == (parts > 1)
        errors.append(job.errors(job.run(kernel)))
    assert all(e.right for e in errors)
    assert errors[0].error <= 1.01 * errors[1].error, f"{errors[0]}, whole {errors[1]}"


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


def test_lse_of_one_token_is_the_tensor_cores() -> None:
    """m_ref, exp2 and log2 add less than a fifth of what the sum of Q.K cuts off; so much that an
    LSE near 0 misses FlashMLA's gate is the sum's."""
    step = DenseStep.make((1,), 16, 1, 64, torch.float16)
    assert step.cache.kv is not None
    k = step.cache.kv[step.block_table[0, 0], 0].float().numpy()
    q = step.q[0, 0].float().numpy()
    acc = np.zeros((16, 1), np.float32)
    chunks = (0, 1, 4, 5, 2, 3, 6, 7, 8)  # 64 channels each, in the order in which they come
    for x in (64 * chunk + k16 for chunk in chunks for k16 in range(0, 64, 16)):
        acc = half_step_numpy(acc, q[:, x : x + 16], k[:, x : x + 16], 2.0**-14)
    summed = torch.from_numpy(acc)[:, 0].double() * SCALE
    truth = torch.from_numpy(q.astype(np.float64) @ k[0].astype(np.float64)) * SCALE
    _, lse = step.decode(step.plan())
    cut, added = summed - truth, lse[0, :, 0].double() - summed
    assert 5e-7 < float(cut.abs().max()) < 5e-6
    assert float(added.norm()) < 0.2 * float(cut.norm()) and float(added.abs().max()) < 5e-7


@pytest.mark.parametrize("tokens", [None, (2, 0, 1)], ids=["even", "ragged"])
def test_elements_outside_are_named(tokens: tuple[int, ...] | None) -> None:
    """Errors name elements outside the gates by their place in the result."""
    step = DenseStep.make((3, 0, 66), 2, 2, tokens=tokens)
    out = torch.zeros(*step.q.shape[:-1], 512)
    lse = torch.zeros(*step.q.shape[:-1]).mT.contiguous()
    truth, truth_lse = dense_decode_reference(
        step.q, step.cache.kv, step.block_table, step.cache_seqlens, SCALE,
        cu_seqlens_q=step.begin,
    )  # fmt: skip
    used = len(truth) if tokens else None  # rows of no sequence follow
    out[:used], lse[..., :used] = truth, truth_lse
    assert step.errors(out, lse).where == ()
    place, seen = ((2, 1, 511), (0, 2)) if tokens else ((2, 1, 0, 511), (2, 0, 1))
    out[place] += 1
    lse[seen] = math.nan
    errors = step.errors(out, lse)
    assert errors.outside == 2 and [w.split(" is ")[0] for w in errors.where] == [
        f"out{list(place)}", f"lse{list(seen)}"
    ]  # fmt: skip
    assert "is nan for" in str(errors)


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

"""Sparse decode on a real GPU, at the ABI: right beside the reference, the same bits every time.

Variants may come from elsewhere, no compiler is needed.
"""

from __future__ import annotations

import pytest
import torch

from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing.sparse_job import SparseJob, SparseShape

pytestmark = pytest.mark.gpu
JOBS = {
    "one-head": SparseShape(1, 100, (100, 3), 1, s_q=2, layout="paged"),
    "few": SparseShape(16, 2048, (2048, 1500, 0), 64, s_q=2, parts=20, sink=True),
    "few-odd": SparseShape(7, 512, (512, 17), 53, s_q=5, layout="packed", parts=4),
    "thirty-two": SparseShape(32, 300, (300, 64), 2, layout="row640", parts=3, sink=True),
    "many": SparseShape(64, 2048, (2048, 777), 64, layout="paged", parts=40),
    "many-swings": SparseShape(50, 700, (700, 700), 53, layout="packed", style="swings", parts=5),
    "many-equal": SparseShape(64, 384, (384,), 1, style="equal", parts=2),
    "two-blocks": SparseShape(128, 1024, (1024, 1000), 64, s_q=2, parts=33, sink=True),
    "ragged": SparseShape(
        100, 200, (200, 64, 130), 61, s_q=7, begins=(0, 3, 3, 6), layout="packed", parts=9,
        own_lengths=(200, 1, 65, 0, 100, 130, 5),
    ),
    "fixed-splits": SparseShape(128, 1000, (1000, 300), 576, split_tiles=2, parts=11),
    "queries": SparseShape(16, 64, (64,), 64, s_q=300, parts=132),
}  # fmt: skip


def assert_right_twice(pipeline: str, name: str, out_dtype: str) -> None:
    """A job of ``JOBS`` by a pipeline: within its bounds, and the same bits again."""
    shape = JOBS[name]
    tile = next((t for t in (16, 32, 64) if t >= shape.heads), 64)
    spec = VariantSpec(op="sparse_decode", pipeline=pipeline, row_tile=tile, out_dtype=out_dtype)
    torch.manual_seed(0)
    planner = variants.kernel(VariantSpec(op="plan_decode"), "cuda")
    job = SparseJob(spec, shape, planner=planner, device="cuda")
    kernel = variants.kernel(spec, "cuda")
    first = job.run(kernel)
    errors = job.errors(first)
    assert errors.right, str(errors)
    for got, want in zip(job.run(kernel), first, strict=True):
        assert torch.equal(got.nan_to_num(-7.0), want.nan_to_num(-7.0)), "not the same bits"


@pytest.mark.parametrize("out_dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", JOBS)
def test_right(name: str, out_dtype: str) -> None:
    assert_right_twice("etap", name, out_dtype)

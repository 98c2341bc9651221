"""Decode over a 16-bit cache on a real GPU, at the ABI: FlashMLA's gates and fp64's error.

Variants may come from elsewhere, no compiler is needed.
"""

from __future__ import annotations

import pytest
import torch

from dsl_kernels.families.dense_decode import DTYPES, PAGE_SIZES
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing.dense_job import DenseJob

pytestmark = pytest.mark.gpu
# row tile, lengths, parts, heads, s_q, KV heads, amplitude of the queries
JOBS = {
    "few": (16, (64, 0, 130, 1, 3000), 4, 16, 1, 1, 10.0),
    "few-odd": (16, (700, 20, 1400), 3, 3, 5, 1, 10.0),
    "few-kv-heads": (16, (700, 0, 140), 3, 8, 1, 3, 10.0),
    "thirty-two": (32, (5000, 17), 8, 16, 2, 1, 10.0),
    "many": (64, (64, 0, 130, 1, 3000), 4, 64, 1, 1, 10.0),
    "many-odd": (64, (4096, 200), 5, 20, 7, 1, 10.0),
    "many-peaked": (64, (4096, 200), 5, 40, 2, 1, 200.0),
    "pair": (128, (64, 0, 130, 1, 3000), 4, 128, 1, 1, 10.0),
    "pair-queries": (128, (9000, 333), 6, 96, 4, 1, 10.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", JOBS)
def test_right(name: str, page_size: int, dtype: str) -> None:
    row_tile, lengths, parts, heads, s_q, kv_heads, amplitude = JOBS[name]
    spec = VariantSpec(
        op="dense_decode", pipeline="split", row_tile=row_tile, page_size=page_size, dtype=dtype
    )
    torch.manual_seed(0)
    job = DenseJob(
        spec, lengths, parts, heads=heads, s_q=s_q, kv_heads=kv_heads, amplitude=amplitude,
        device="cuda",
    )  # fmt: skip
    kernel = variants.kernel(spec, "cuda")
    first = job.run(kernel)
    errors = job.errors(first)
    assert errors.right, str(errors)
    for got, want in zip(job.run(kernel), first, strict=True):
        assert torch.equal(got.nan_to_num(-7.0), want.nan_to_num(-7.0)), "not the same bits"

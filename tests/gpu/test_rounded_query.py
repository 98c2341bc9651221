"""``accuracy="fast"`` on a real GPU: pipeline ``mix8`` within what the tensor core's sums may do to
the rounded query.

    python -m pytest -s tests/gpu/test_rounded_query.py -m gpu

prints shares of the bound.  Before a pack: ``python -m codegen build
sparse_decode_mix8_r64_obf16_sm90a``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import snapmla
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import record_job
from snapmla.testing.record_job import RecordJob, RecordShape
from snapmla.testing.sparse_job import HEAD_SCALE
from tests.kernels.test_sparse_records import assert_unmoved
from tests.support import byte_lists
from tests.support.rounded_query import LOGITS, NAME, equal_to_tokens, share_of_bound

pytestmark = pytest.mark.gpu
LENGTHS = (1, 2, 64, 700)


@pytest.fixture(scope="module")
def built() -> tuple[VariantSpec, Any]:
    spec = VariantSpec.from_name(NAME)
    if variants.jit_refusal() and variants.find(spec) is None:
        pytest.skip(f"{NAME} is not built, and nothing compiles here")
    return spec, variants.kernel(spec, "cuda")


@pytest.mark.parametrize("logit", LOGITS)
def test_queries_that_equal_a_token(built: tuple[VariantSpec, Any], logit: float) -> None:
    spec, kernel = built
    torch.manual_seed(int(logit))  # or all logits, apart by powers of two, would round alike
    shares = []
    for n in LENGTHS:
        job = equal_to_tokens(spec, 64, n, logit, "cuda")
        result = job.run(kernel)
        byte_lists.assert_right(job, result)
        shares.append(share_of_bound(job, result[1].cpu()))
    print(f"\nlogit {logit}: of the bound {', '.join(f'{share:.2f}' for share in shares)}")
    assert 0.5 < max(shares) <= 1


@pytest.mark.parametrize("style", record_job.STYLES)
def test_numbers_that_move_maxima(built: tuple[VariantSpec, Any], style: str) -> None:
    """Swings of 200 nats, RoPE of 1e3, far groups, scales of 0; whole and split."""
    spec, kernel = built
    for parts in (1, 4):
        shape = RecordShape(61, 700, (700, 130), 64, parts=parts, style=style)
        torch.manual_seed(parts)
        byte_lists.assert_right(job := RecordJob(spec, shape, device="cuda"), job.run(kernel))


def test_rows_and_lists_do_not_feel_each_other(built: tuple[VariantSpec, Any]) -> None:
    spec, kernel = built
    shape = RecordShape(64, 200, (200, 66), 1, parts=2, style="swings")
    job = RecordJob(spec, shape, device="cuda")
    byte_lists.assert_right(job, assert_unmoved(job, kernel, (math.nan, 1e30, -math.inf)))
    shape = RecordShape(8, 200, (200, 66), 1, parts=1, dense=True)
    byte_lists.assert_nan_is_its_readers_alone(RecordJob(spec, shape, device="cuda"), kernel)


def test_by_a_plan(built: tuple[VariantSpec, Any]) -> None:
    """In service, over as many parts as the card has SMs: the same bits every time, and right."""
    job = RecordJob(built[0], RecordShape(128, 1024, (1024,) * 5, 64, parts=1, dense=True))
    cache = snapmla.PagedKVCache.from_tensors(job.cache[:, :, None].cuda(), format="fp8_ds_mla")
    plan = snapmla.plan_sparse_decode(
        128,
        1,
        topk=1024,
        batch=5,
        device="cuda",
        cache_dtype="fp8_ds_mla",
        accuracy="fast",
        row_tile=64,
    )
    assert (plan.pipeline, plan.row_tile) == ("mix8", 64)
    given: dict[str, Any] = {"indices": job.indices[:, None].cuda(), "softmax_scale": HEAD_SCALE}
    results = [snapmla.decode(job.q16.cuda(), cache, plan=plan, **given) for _ in range(3)]
    for out, lse in results:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    byte_lists.assert_right(job, (results[0][0].cpu(), results[0][1].cpu()))

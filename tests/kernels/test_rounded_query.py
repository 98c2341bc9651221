"""``accuracy="fast"``, pipeline ``mix8``: sparse decode over 656-byte rows with FP8 products of
content and a rounded query, held to what the tensor core's sums may do (``record_qk``)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import snapmla
from dsl_kernels.formats import dims
from dsl_kernels.formats.ds_mla import ROW_BYTES, SCALES_AT
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import record_job, selfcheck
from snapmla.testing.record_job import RecordJob, RecordShape
from snapmla.testing.sparse_job import HEAD_SCALE
from snapmla.testing.workloads import sparse_records as work
from softgpu import Hazard, Options, mutate, using
from tests.kernels.test_sparse_records import assert_unmoved
from tests.support import byte_lists
from tests.support.needs import needs_compiler
from tests.support.planting import error_of, line_of
from tests.support.rounded_query import LOGITS, NAME, equal_to_tokens, share_of_bound

pytestmark = [needs_compiler, pytest.mark.whole_matrix]  # built when it is asked for
SCHEDULES = [
    Options(hazards="raise", asynchronous=how, seed=seed)
    for how, seed in (("random", 5), ("late", 3), ("early", 8))
]
MIX8 = Path(dims.__file__).parents[1] / "sm90" / "bytes16" / "mix8.py"
LENGTHS = (1, 2, 64)
REACHED = 0.5  # of its bound, by the worst LSE of queries that equal a token


@pytest.fixture(scope="module")
def built() -> tuple[VariantSpec, Any]:
    spec = VariantSpec.from_name(NAME)
    directory = variants.find_or_build(spec, need_library=False).directory
    return spec, selfcheck.load(spec, directory)


def assert_right(built: tuple[VariantSpec, Any], shape: RecordShape, options: Options) -> None:
    spec, kernel = built
    with using(options):
        errors = (job := RecordJob(spec, shape)).errors(job.run(kernel))
    assert errors.right, f"{shape}: {errors}"


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o.asynchronous)
def test_clean_and_right(built: tuple[VariantSpec, Any], options: Options) -> None:
    """Splits, sinks, ragged queries, idle rows, odd pages, entries of -1 and beyond the pool."""
    for shape in work.shapes(built[0]):
        assert_right(built, shape, options)


@pytest.mark.parametrize("style", [s for s in record_job.STYLES if s != "plain"])
def test_numbers_that_move_maxima(built: tuple[VariantSpec, Any], style: str) -> None:
    """Peaked rows, swings of 200 nats between tiles, queries that equal a token, RoPE of 1e3,
    groups 2^20 apart, scales of 0; whole and split."""
    shape = RecordShape(5, 330, (330, 66), 1, parts=1, style=style)
    for each in (shape, replace(shape, powers=True, parts=3)):
        assert_right(built, each, SCHEDULES[0])


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o.asynchronous)
def test_cleared_content_is_fenced(built: tuple[VariantSpec, Any], options: Options) -> None:
    """Without its proxy fence the clearing of groups with scale 0 is a hazard of that name."""
    spec, kernel = built
    place = line_of(MIX8, "fence_proxy", "class FencedScales")
    found = mutate.matching(kernel.program(kernel.entry), "fence.proxy.async", place)
    assert found, f"no fence at {place}"
    job = RecordJob(spec, RecordShape(5, 66, (66,), 1, parts=1, style="scales"))
    with using(options):
        error = error_of(kernel, kernel.entry, {i.pc: "" for i in found}, lambda: job.run(kernel))
    assert isinstance(error, Hazard) and error.kind == "missing-proxy-fence", str(error)


@pytest.mark.parametrize("logit", LOGITS)
def test_queries_that_equal_a_token(built: tuple[VariantSpec, Any], logit: float) -> None:
    """Lists of 1, 2 and 64 tokens.  The bound is no loose one: some row reaches ``REACHED`` of
    it."""
    spec, kernel = built
    torch.manual_seed(int(logit))  # or all logits, apart by powers of two, would round alike
    shares = []
    for n in LENGTHS:
        job = equal_to_tokens(spec, 16, n, logit)
        with using(SCHEDULES[0]):
            result = job.run(kernel)
        errors = job.errors(result)
        assert errors.right, f"{n} tokens: {errors}"
        shares.append(share_of_bound(job, result[1]))
    print(f"logit {logit}: of the bound {', '.join(f'{share:.2f}' for share in shares)}")
    assert REACHED < max(shares) <= 1


def test_queries_of_any_size(built: tuple[VariantSpec, Any]) -> None:
    """Rows of Q that are tiny, huge, RoPE alone, one channel, zeros, of channels 2^30 apart; of an
    infinity or a NaN the row is NaN, and no other."""
    spec, kernel = built
    job = RecordJob(spec, RecordShape(11, 100, (100,), 1, parts=1))
    q = job.q16[0, 0]
    q[0] *= 2.0**-100
    q[1] = 0.0
    q[2, :512] = 0.0
    q[3, 512:] = 0.0
    q[4, :512] *= 2.0**-40
    q[5, 1:] = 0.0
    q[6, :512] *= torch.exp2(-torch.arange(512).fmod(30)).bfloat16()
    q[7] *= 64.0
    result = job.run(kernel)
    errors = job.errors(result)
    assert errors.right, str(errors)
    for value in (math.inf, -math.inf, math.nan):
        q[8, 77] = value
        out, lse = job.run(kernel)
        assert out[0, 0, 8].isnan().all() and lse[0, 8].isnan().all()
        others = torch.arange(11) != 8
        assert torch.equal(out[:, :, others], result[0][:, :, others])
        assert torch.equal(lse[:, others], result[1][:, others])


def test_rows_do_not_feel_each_other(built: tuple[VariantSpec, Any]) -> None:
    spec, kernel = built
    job = RecordJob(spec, RecordShape(64, 200, (200, 66), 1, parts=2, style="swings"))
    assert job.errors(assert_unmoved(job, kernel, (math.nan, 1e30))).right


def test_scales_that_are_none(built: tuple[VariantSpec, Any]) -> None:
    """A scale of 0 over NaN bytes is a token of zeros; a scale of NaN is its readers' alone."""
    spec, kernel = built
    job = RecordJob(spec, RecordShape(8, 64, (64,), 1, parts=1, dense=True))
    rows = job.cache.view(-1, ROW_BYTES)
    nothing = job.indices[0, :32].long()
    rows[nothing] = 0
    rows[nothing, :SCALES_AT] = 0x7F
    errors = job.errors(job.run(kernel))
    assert errors.right, str(errors)
    job = RecordJob(spec, RecordShape(8, 200, (200, 66), 1, parts=1, dense=True))
    byte_lists.assert_nan_is_its_readers_alone(job, kernel)


def test_items_without_tiles(built: tuple[VariantSpec, Any]) -> None:
    byte_lists.assert_items_without_tiles(*built)


def test_by_a_plan(built: tuple[VariantSpec, Any]) -> None:
    """Through the public call: the ABI's bits; with few heads it is the standard's kernel."""
    job = RecordJob(built[0], RecordShape(64, 130, (130,), 64, parts=1))
    rows = job.cache[:, :, None]
    cache = snapmla.PagedKVCache.from_tensors(rows, format="fp8_ds_mla")

    def planned(heads: int, accuracy: str) -> snapmla.SparsePlan:
        return snapmla.plan_sparse_decode(
            heads, 1, topk=130, batch=1, device="cpu", cache_dtype="fp8_ds_mla", num_parts=1,
            accuracy=accuracy, row_tile=64 if heads == 64 else None,
        )  # fmt: skip

    plan = planned(64, "fast")
    assert (plan.pipeline, plan.row_tile) == ("mix8", 64)
    assert planned(16, "fast").pipeline == planned(64, "standard").pipeline == "mix16"
    given: dict[str, Any] = {"indices": job.indices[None], "softmax_scale": HEAD_SCALE}
    out, lse = snapmla.decode(job.q16, cache, plan=plan, **given)
    want: tuple[Tensor, Tensor] = job.run(built[1])
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])

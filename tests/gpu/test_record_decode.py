"""Dense decode over caches of bytes on a real GPU: fp64 on stored scales, the bits of sparse decode
of the same tokens, inputs that move the maxima, graphs.

Variants may come from elsewhere, no compiler is needed; those that are not there are skipped.
Before a pack: ``python -m codegen build`` of ``record_decode_mix16_rR_obf16_sm90a``,
``record_decode_mix16_rR_obf16_kvF_sm90a`` and the same of ``sparse_decode``, R of 16, 32, 64, F of
fp8_v4, fp8_v41_planar, fp8_v41_rows, fp8_nope.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import snapmla
from snapmla.testing import record_job
from snapmla.testing.paged_record_job import PagedRecordJob, PagedShape
from snapmla.testing.sparse_job import HEAD_SCALE, placed
from snapmla.testing.workloads import record_decode as work
from tests.kernels.test_sparse_records import assert_unmoved
from tests.support import byte_lists
from tests.support.paged_records import (
    CACHES,
    TILES,
    assert_bits_of_lists,
    kernel_of,
    nan_cases,
)

pytestmark = pytest.mark.gpu
HEADS = ((8, 16), (16, 16), (20, 32), (64, 64), (128, 64))  # with the row tile that takes them
LENGTHS = (0, 1, 63, 64, 65, 321, 4097)
PAGES = (2, 64, 256)
EVERY = pytest.mark.parametrize(("cache", "rows"), [*itertools.product(CACHES, TILES)])


def assert_right(job: PagedRecordJob, result: tuple[torch.Tensor, torch.Tensor]) -> None:
    errors = job.errors(result)
    assert errors.right, f"{job.shape}: {errors}"


@EVERY
def test_small_calls(cache: str, rows: int) -> None:
    """Splits, ragged queries, pages of one token, a page that is not there, scales of any kind."""
    spec, kernel = kernel_of(rows, "cuda", cache=cache)
    for seed, shape in enumerate(work.shapes(spec)):
        torch.manual_seed(seed)
        assert_right(job := PagedRecordJob(spec, shape, device="cuda"), job.run(kernel))


@pytest.mark.parametrize("style", ["std3", "swings"])
@pytest.mark.parametrize("page_size", PAGES)
@EVERY
def test_the_bits_of_sparse_decode(cache: str, rows: int, page_size: int, style: str) -> None:
    """Of the same tokens by lists; one query token or several, whole and in pieces."""
    assert_bits_of_lists(rows, page_size, LENGTHS, "cuda", style, cache)


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize(("heads", "rows"), HEADS)
@pytest.mark.parametrize("cache", CACHES)
def test_sequences(cache: str, heads: int, rows: int, page_size: int) -> None:
    """Split and whole, one query token and three, pages side by side and apart."""
    spec, kernel = kernel_of(rows, "cuda", cache=cache)
    width = -(-2050 // page_size)
    for s_q, parts, layout in ((1, 7, "split"), (3, 1, "padded"), (2, 5, "packed")):
        shape = PagedShape(
            heads, width * page_size, (2050, 0, 129, 700), page_size, s_q, layout=layout,
            parts=parts, row_tile=rows,
        )  # fmt: skip
        torch.manual_seed(heads + page_size + s_q)
        assert_right(job := PagedRecordJob(spec, shape, device="cuda"), job.run(kernel))


@pytest.mark.parametrize("style", record_job.STYLES)
@EVERY
def test_numbers_that_move_maxima(cache: str, rows: int, style: str) -> None:
    """Peaked rows, swings of 200 nats, queries that equal a token, RoPE of 1e3, far groups, odd
    scales; whole and split."""
    spec, kernel = kernel_of(rows, "cuda", cache=cache)
    for parts, powers in ((1, False), (4, True)):
        shape = PagedShape(
            rows // 2 - 1, 704, (700, 130), 64, 2, style=style, parts=parts, powers=powers,
            row_tile=rows,
        )  # fmt: skip
        torch.manual_seed(parts)
        assert_right(job := PagedRecordJob(spec, shape, device="cuda"), job.run(kernel))


@EVERY
def test_padded_heads(cache: str, rows: int) -> None:
    """The bits of real heads, whatever padded ones hold."""
    spec, kernel = kernel_of(rows, "cuda", cache=cache)
    shape = PagedShape(rows // 2, 256, (200, 66), 64, 2, style="swings", row_tile=rows)
    job = PagedRecordJob(spec, shape, device="cuda")
    assert_unmoved(job, kernel, (0.0, 1e30, math.nan, -math.inf))


@EVERY
def test_bytes_of_nobody(cache: str, rows: int) -> None:
    """Behind sequences' ends, between pages or rows, V4's eighth byte of a token's scales: any."""
    spec, kernel = kernel_of(rows, "cuda", cache=cache)
    for page_size in PAGES:
        shape = PagedShape(
            rows // 2, 768, (700, 130), page_size, 2, layout="padded", parts=3, row_tile=rows
        )
        job = PagedRecordJob(spec, shape, device="cuda")
        byte_lists.assert_bytes_of_nobody(job, kernel)


@EVERY
def test_a_nan_is_its_readers_alone(cache: str, rows: int) -> None:
    """The last token as append writes what is not finite, or some of its groups: the rows that see
    it, no others."""
    spec, kernel = kernel_of(rows, "cuda", cache=cache)
    for n, groups in nan_cases(cache):
        shape = PagedShape(4, 128, (n,), 64, 3, parts=1, row_tile=rows)
        job = PagedRecordJob(spec, shape, device="cuda")
        before = job.run(kernel)
        job.make_nan(int(job.indices[0, n - 1]), groups)
        out, lse = job.run(kernel)
        assert torch.isnan(out[0, 2]).all() and torch.isnan(lse[0, :, 2]).all()
        assert torch.equal(out[0, :2], before[0][0, :2])
        assert torch.equal(lse[0, :, :2], before[1][0, :, :2])


@pytest.mark.parametrize(("heads", "rows"), HEADS)
@pytest.mark.parametrize("cache", CACHES)
def test_decode_in_a_graph(cache: str, heads: int, rows: int) -> None:
    """``snapmla.decode`` by a plan of its own, replayed over other lengths: as eager; and right."""
    spec, _ = kernel_of(rows, "cuda", cache=cache)
    shape = PagedShape(heads, 1024, (1000, 300), 64, 2, layout="packed", row_tile=rows)
    job = PagedRecordJob(spec, shape)
    q, kv, table, lengths = (
        placed(x, "cuda") for x in (job.q16, job.cache, job.table, job.lengths)
    )
    pool = snapmla.PagedKVCache.from_tensors(kv, format=cache)
    plan = snapmla.plan_decode(
        lengths, heads, 2, page_size=64, max_pages=table.shape[1], cache_dtype=cache,
        row_tile=rows,
    )  # fmt: skip
    out = torch.empty(*plan.out_shape, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(*plan.lse_shape, device="cuda")

    def call() -> None:
        snapmla.decode(
            q, pool, table, lengths, softmax_scale=HEAD_SCALE, plan=plan, out=out, lse=lse
        )

    call()
    assert_right(job, (out.cpu(), lse.cpu()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update_(lengths)
        call()
    lengths.copy_(lengths.flip(0).clamp_max(300))
    plan.update_(lengths)
    call()
    want = out.clone(), lse.clone()
    out.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])

"""Dense decode over caches of bytes: pages, lengths, masks, and the bits of sparse decode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import snapmla
from dsl_kernels.formats.registered import FORMATS
from snapmla.testing import record_job
from snapmla.testing.dense_job import DenseErrors
from snapmla.testing.paged_record_job import ARGUMENTS, PagedRecordJob, PagedShape
from snapmla.testing.workloads import record_decode as work
from softgpu import Options, using
from tests.kernels.test_sparse_records import assert_unmoved
from tests.support import byte_lists
from tests.support.needs import needs_compiler
from tests.support.paged_records import (
    CACHES,
    TILES,
    assert_bits_of_lists,
    kernel_of,
    nan_cases,
)

pytestmark = needs_compiler
WHOLE = pytest.mark.whole_matrix  # for all but one variant, which are built for nothing else
CHECKED = Options(hazards="raise", seed=5)
LENGTHS = (0, 1, 63, 64, 65, 321)
PAGES = (2, 64, 256)


def every(test: Callable[..., None]) -> Callable[..., None]:
    """A test of each cache's variants, over the whole matrix."""
    pairs = [*itertools.product(CACHES, TILES)]
    return WHOLE(pytest.mark.parametrize(("cache", "rows"), pairs)(test))


STYLES = [s for s in record_job.STYLES if s not in ("plain", "scales")]
# Of 64 rows K times a ratio is rounded to f16, where scales are no powers of two: with logits of
# standard deviation 30 plain torch that rounds so is as far from fp64 (``record_decode_mimic``).
# Of twelve seeds of this shape three exceed FlashMLA's 5e-6 over 656 bytes, and three here, the
# tests' own among these.  Sparse decode of these tokens has the same bits.
ROUNDED_K = pytest.mark.xfail(
    raises=AssertionError, strict=True, reason="1 - cosine is 2.3e-5, as its mimic's"
)


def errors_of(cache: str, rows: int, shape: PagedShape) -> DenseErrors:
    spec, kernel = kernel_of(rows, cache=cache)
    job = PagedRecordJob(spec, replace(shape, row_tile=rows))
    with using(CHECKED):
        return job.errors(job.run(kernel))


def test_a_batch() -> None:
    """Everyday batch: ragged lengths, several query tokens, swings, splits."""
    errors = errors_of(
        "fp8_ds_mla", 16, PagedShape(3, 333, (330, 66, 0), 3, 2, style="swings", parts=3)
    )
    assert errors.right, errors


@every
def test_clean_and_right(cache: str, rows: int) -> None:
    """Every path under the hazard check: splits, ragged queries, odd pages, pages that are not
    there."""
    spec, kernel = kernel_of(rows, cache=cache)
    assert tuple(kernel.names.arguments) == ARGUMENTS
    for shape in work.shapes(spec):
        errors = errors_of(cache, rows, shape)
        assert errors.right, f"{shape}: {errors}"


@pytest.mark.parametrize("page_size", PAGES)
@every
def test_the_bits_of_sparse_decode(cache: str, rows: int, page_size: int) -> None:
    """Equal bits of the same tokens by lists, page * P + offset of each, whatever length and page;
    one query token or several, whole and in pieces of the same tiles."""
    assert_bits_of_lists(rows, page_size, LENGTHS, "cpu", cache=cache)


@pytest.mark.parametrize("style", STYLES)
@every
def test_numbers_that_move_maxima(
    cache: str, rows: int, style: str, request: pytest.FixtureRequest
) -> None:
    """Peaked rows, swings of 200 nats between tiles, queries that equal a token, RoPE of 1e3,
    groups 2^20 apart; whole and split."""
    if (cache, rows, style) == ("fp8_nope", 64, "std30"):
        request.applymarker(ROUNDED_K)
    for parts, powers in ((1, False), (3, True)):
        shape = PagedShape(3, 333, (330, 66), 3, 2, style=style, parts=parts, powers=powers)
        errors = errors_of(cache, rows, shape)
        assert errors.right, f"{shape}: {errors}"


@every
def test_rows_do_not_feel_each_other(cache: str, rows: int) -> None:
    """The bits of real heads, whatever padded ones hold."""
    spec, kernel = kernel_of(rows, cache=cache)
    for style in ("swings", "plain"):
        shape = PagedShape(rows // 2, 256, (200, 66), 64, 2, style=style, row_tile=rows)
        job = PagedRecordJob(spec, shape)
        assert job.errors(assert_unmoved(job, kernel, (math.nan, 1e30))).right


@every
def test_a_nan_is_its_readers_alone(cache: str, rows: int) -> None:
    """The last token as append writes what is not finite: the row that sees it is NaN, LSE
    included, and no other row is; also of a token with some scales that are NaN, wherever a
    swizzle puts their channels."""
    spec, kernel = kernel_of(rows, cache=cache)
    for n, groups in nan_cases(cache):
        shape = PagedShape(2, 128, (n,), 64, 3, parts=1, row_tile=rows)
        job = PagedRecordJob(spec, shape)
        before = job.run(kernel)
        job.make_nan(int(job.indices[0, n - 1]), groups)
        with using(CHECKED):
            out, lse = job.run(kernel)
        assert torch.isnan(out[0, 2]).any() and torch.isnan(lse[0, :, 2]).all()
        assert torch.equal(out[0, :2], before[0][0, :2])
        assert torch.equal(lse[0, :, :2], before[1][0, :, :2])


@every
def test_bytes_of_nobody(cache: str, rows: int) -> None:
    """Behind sequences' ends, between pages or rows, V4's eighth byte of a token's scales: any."""
    spec, kernel = kernel_of(rows, cache=cache)
    shape = PagedShape(3, 192, (130, 40), 64, 2, layout="padded", parts=2, row_tile=rows)
    byte_lists.assert_bytes_of_nobody(PagedRecordJob(spec, shape), kernel)


@every
def test_what_a_table_does_not_name_is_not_read(cache: str, rows: int) -> None:
    """A page that the pool does not have, lengths that the table cannot name and negative ones."""
    spec, kernel = kernel_of(rows, cache=cache)
    shape = PagedShape(
        3, 5 * 53, (1000, -3, 200), 53, 2, layout="packed", parts=2, row_tile=rows,
        holes=((0, 0), (0, 3), (2, 1)),
    )  # fmt: skip
    errors = errors_of(cache, rows, shape)
    assert errors.right, str(errors)
    job = PagedRecordJob(spec, replace(shape, holes=((0, 0), (0, 1), (0, 2), (0, 3), (0, 4))))
    out, lse = job.run(kernel)
    assert bool((out[0] == 0).all()) and bool((lse[0] == -math.inf).all())


@every
def test_what_rows_see(cache: str, rows: int) -> None:
    """The causal rule over the edge of a tile, not at all, and lengths of each query token."""
    for causal, own in ((True, None), (False, None), (True, (64, 1, 129, 0, 66, 65))):
        shape = PagedShape(
            5, 192, (130, 66), 64, 3, causal=causal, own_lengths=own, parts=2, style="equal"
        )
        errors = errors_of(cache, rows, shape)
        assert errors.right, f"{shape}: {errors}"


# ---------------------------------------------------------------------------- the library's call


def appended(
    page_size: int, lengths: tuple[int, ...], fmt: str = "fp8_ds_mla"
) -> tuple[snapmla.PagedKVCache, torch.Tensor]:
    """A cache with tokens of sequences, and their block table; shuffled pages."""
    width = max(-(-n // page_size) for n in lengths) + 1
    pages = torch.randperm(len(lengths) * width).int().view(-1, width)
    cache = snapmla.PagedKVCache.allocate(pages.numel(), page_size, device="cpu", dtype=fmt)
    record = FORMATS[fmt]
    for i, n in enumerate(lengths):
        at = torch.arange(n)
        slots = (pages[i, at // page_size].long() * page_size + at % page_size).int()
        latent = torch.randn(n, record.channels).bfloat16()
        rope = latent[:, record.content.count :] if record.rope else None
        snapmla.append_kv(cache, latent[:, : record.content.count], rope, slots)
    return cache, pages


@WHOLE
@pytest.mark.parametrize(
    ("page_size", "fmt"), [(3, CACHES[0]), *((p, fmt) for fmt in CACHES for p in (64, 320))]
)
def test_decode_as_with_indices(page_size: int, fmt: str) -> None:
    """``decode`` by table and by the indices of the same tokens: the same bits, in fixed pieces;
    without a plan, and as an operator."""
    lengths = (70, 0, 319)
    cache, table = appended(page_size, lengths, fmt)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    q = torch.randn(3, 1, 9, FORMATS[fmt].channels).bfloat16()
    at = torch.arange(320)
    indices = table[:, at // page_size] * page_size + at % page_size
    given = {"softmax_scale": 0.1}
    by_lists = snapmla.plan_sparse_decode(
        9, 1, topk=320, topk_length=seqlens, fixed_split_tokens=128, cache_dtype=fmt
    )
    want = snapmla.decode(q, cache, indices=indices[:, None].int(), plan=by_lists, **given)
    plan = snapmla.plan_decode(
        seqlens, 9, 1, page_size=page_size, max_pages=table.shape[1], fixed_split_tokens=128,
        cache_dtype=fmt,
    )  # fmt: skip
    for _ in range(2):  # a call that is known already
        found = snapmla.decode(q, cache, table, seqlens, plan=plan, **given)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    made = torch.ops.snapmla.dense_decode(
        q, cache.kv, table, seqlens, plan.work_items, plan.part_begin, plan.split_begin,
        plan.units, plan.row_limits, plan.o_accum, plan.lse_accum, plan.pipeline, plan.row_tile,
        plan.can_split(), 0.1, True, 1.0, -math.inf, cache_dtype=fmt,
    )  # fmt: skip
    assert torch.equal(made[0], want[0])
    alone = snapmla.decode(q, cache, table, seqlens, **given)[0]
    assert torch.allclose(alone.float(), want[0].float(), atol=2e-2)


@WHOLE
def test_ragged_queries() -> None:
    """Packed rows of sequences with none, one and three query tokens: as each by itself."""
    lengths, tokens = (70, 5, 66), (1, 0, 3)
    cache, table = appended(64, lengths)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    begin = torch.tensor([0, 1, 1, 4], dtype=torch.int32)
    q = torch.randn(6, 5, 576).bfloat16()
    plan = snapmla.plan_decode(
        seqlens, 5, page_size=64, max_pages=table.shape[1], cu_seqlens_q=begin, total_q=6,
        cache_dtype="fp8_ds_mla", row_tile=16, fixed_split_tokens=64,
    )  # fmt: skip
    out, lse = snapmla.decode(q, cache, table, seqlens, softmax_scale=0.1, plan=plan)
    for i in (0, 2):
        own = slice(int(begin[i]), int(begin[i + 1]))
        one = snapmla.plan_decode(
            seqlens[i : i + 1], 5, tokens[i], page_size=64, max_pages=table.shape[1],
            cache_dtype="fp8_ds_mla", row_tile=16, fixed_split_tokens=64,
        )  # fmt: skip
        want, want_lse = snapmla.decode(
            q[own][None], cache, table[i : i + 1], seqlens[i : i + 1], softmax_scale=0.1, plan=one
        )
        assert torch.equal(out[own], want[0]) and torch.equal(lse[:, own], want_lse[0])

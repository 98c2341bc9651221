"""Sparse decode over DeepSeek V4's pages of 584 bytes a token, V4.1's and NoPE's of 528: bytes,
edges of lists and numbers, two caches, at the ABI.

The truth is fp64 on e4m3 times the stored scale; what no entry names is 0xff.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from snapmla import byte_cache
from snapmla.testing import record_job
from snapmla.testing.record_job import RecordJob, RecordShape
from snapmla.testing.workloads import sparse_records as work
from softgpu import Options, using
from tests.kernels.test_sparse_records import assert_unmoved, kernel_of
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
CHECKED = Options(hazards="raise", seed=5)
WHOLE = pytest.mark.whole_matrix
TWO = ("fp8_v4", "fp8_v41_planar", "fp8_v41_rows")  # whose kernels take two lists
EVERY = (*TWO, "fp8_nope")
ROWS = (16, 32, 64)
OF_528 = ("fp8_v41_rows", "fp8_nope")  # which everyday tests run, with 16 rows


def names(formats: Iterable[str], rows: Iterable[int] = ROWS) -> list[str]:
    return [f"sparse_decode_mix16_r{r}_obf16_kv{f}_sm90a" for f in formats for r in rows]


def assert_right(job: RecordJob, result: tuple[torch.Tensor, torch.Tensor]) -> None:
    errors = job.errors(result)
    assert errors.right, f"{job.shape}: {errors}"


def scales_of(job: RecordJob) -> torch.Tensor:
    """Their bytes (pages, P, 7), a view."""
    return byte_cache.fields_of(job.record, job.cache[:, :, None])[2].view(torch.uint8)


def of(formats: Iterable[str], rows: Iterable[int] = (16, 64)) -> Any:
    """A test of these formats' variants, over the whole matrix."""
    return lambda test: WHOLE(pytest.mark.parametrize("name", names(formats, rows))(test))


@pytest.mark.parametrize("name", names(OF_528, [16]))
def test_a_job(name: str) -> None:
    """What everyday tests run of the formats of 528 bytes: swings, splits, a sink, two lists."""
    spec, kernel = kernel_of(name)
    two = {"extra_topk": 17, "extra_lengths": (17, 9, 5)} if spec.cache_dtype in TWO else {}
    shape = RecordShape(
        9, 130, (130, 0, 70), 2, layout="padded", sink=True, parts=2, style="swings", dense=True,
        **two,
    )  # fmt: skip
    with using(CHECKED):
        result = (job := RecordJob(spec, shape)).run(kernel)
    assert_right(job, result)
    if job.extra is not None:  # lengths below 0 are 0, in a plan that has more
        none, less = (torch.tensor([17, n, 5], dtype=torch.int32) for n in (0, -1))
        want, got = (job.run(kernel, extra_length=x) for x in (none, less))
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert not torch.equal(want[0][1], result[0][1])


@of(EVERY, ROWS)
def test_clean_and_right(name: str) -> None:
    """Every path under the hazard check: splits, sinks, ragged queries, idle rows, odd pages."""
    spec, kernel = kernel_of(name)
    two = spec.cache_dtype in TWO
    wanted = record_job.TWO_LISTS if two else record_job.ARGUMENTS
    assert tuple(kernel.names.arguments) == wanted
    for shape in work.shapes(spec):
        with using(CHECKED):
            result = (job := RecordJob(spec, shape)).run(kernel)
        assert_right(job, result)


@WHOLE
@pytest.mark.parametrize("fmt", EVERY)
@pytest.mark.parametrize(
    ("rows", "heads", "page_size", "layout"),
    [
        (16, 8, 2, "padded"), (16, 16, 256, "split"), (64, 64, 64, "packed"), (64, 128, 2, "split"),
        (64, 8, 256, "padded"),
    ],
)  # fmt: skip
def test_v4s_lists(rows: int, heads: int, page_size: int, layout: str, fmt: str) -> None:
    """topk 128, as sliding windows have it; pages of any size; real heads fewer than the tile's.

    No list of one token: its LSE may be all but 0, and off by more than 1e-6
    (test_sparse_tables.py).
    """
    spec, kernel = kernel_of(*names([fmt], [rows]))
    shape = RecordShape(heads, 128, (128, 77, 17, 0), page_size, layout=layout, sink=True, parts=3)
    with using(CHECKED):
        result = (job := RecordJob(spec, shape)).run(kernel)
    assert_right(job, result)


@of(["fp8_v4"], ROWS)
def test_items_without_tiles(name: str) -> None:
    """Lists of no token one behind another between others, in one part, where Q may have two
    stages: P.V's warps must not convert the next Q before softmax has heard of the last one."""
    spec, kernel = kernel_of(name)
    shape = RecordShape(5, 130, (70, 0, 0, 0, 130, 0), 64, parts=1)
    for seed in range(3):
        with using(Options(hazards="raise", seed=seed)):
            result = (job := RecordJob(spec, shape)).run(kernel)
        assert_right(job, result)


@pytest.mark.parametrize("style", [s for s in record_job.STYLES if s != "plain"])
@of(EVERY, ROWS)
def test_numbers_that_move_frames(name: str, style: str) -> None:
    """Peaked rows, swings of 200 nats between tiles, queries that equal a token, RoPE of 1e3,
    groups 2^20 apart, the least scales; whole and split."""
    spec, kernel = kernel_of(name)
    shape = RecordShape(5, 330, (330, 66), 1, parts=1, style=style)
    for each in (shape, replace(shape, page_size=64, parts=3)):
        assert_right(job := RecordJob(spec, each), job.run(kernel))


@pytest.mark.parametrize("padding", [math.nan, 0.0, 1e30, -math.inf])
@of(EVERY)
def test_rows_do_not_feel_each_other(name: str, padding: float) -> None:
    """The bits of real heads, whatever padded ones hold; row 0 among those."""
    spec, kernel = kernel_of(name)
    heads = spec.row_tile
    job = RecordJob(spec, RecordShape(heads, 200, (200, 66), 64, parts=2, style="swings"))
    assert_right(job, assert_unmoved(job, kernel, [padding]))


@of(EVERY)
def test_queries_of_any_size(name: str) -> None:
    """Rows of Q that are tiny, huge, RoPE alone or content, one channel of each block, zeros."""
    spec, kernel = kernel_of(name)
    job = RecordJob(spec, RecordShape(16, 100, (100,), 64, parts=1))
    q = job.q16[0, 0]
    q[0] *= 2.0**-100
    q[1] = 0.0
    n = job.record.content.count
    q[2, :448] = 0.0
    q[3, 448:] = 0.0
    q[4, :n] *= 2.0**-40
    for block in range(8):
        q[5 + block] = 0.0
        q[5 + block, 64 * block + 7 * block] = 3.0
    q[13, :n] *= torch.exp2(-torch.arange(n).fmod(30)).bfloat16()
    q[14] *= 64.0
    assert_right(job, job.run(kernel))


@of(EVERY)
def test_bytes_that_are_nobodys(name: str) -> None:
    """V4's eighth byte behind a token's scales, and what lies between pages, or between rows: any,
    the same bits."""
    spec, kernel = kernel_of(name)
    job = RecordJob(spec, RecordShape(7, 100, (100, 40), 3, layout="padded", parts=2))
    out, lse = job.run(kernel)
    pages, p, _ = job.cache.shape
    whole = job.cache.as_strided((pages, job.cache.stride(0)), (job.cache.stride(0), 1))
    own = torch.zeros_like(whole, dtype=torch.bool)
    own.as_strided(job.cache.shape, job.cache.stride())[:] = True
    if spec.cache_dtype == "fp8_v4":
        own[:, 576 * p : 584 * p].unflatten(1, (p, 8))[..., 7] = False
    assert not own.all()
    for byte in (0, 0x7F, 0xFE, 0xFF):
        whole[~own] = byte
        other, other_lse = job.run(kernel)
        assert torch.equal(other, out) and torch.equal(other_lse, lse)
    assert_right(job, (out, lse))


@of(EVERY)
def test_the_least_scale_is_a_token(name: str) -> None:
    """Tokens of byte 0, 2^-127, or of scale 0, and of RoPE 0: each weighs e^0 and adds nothing."""
    spec, kernel = kernel_of(name)
    job = RecordJob(spec, RecordShape(8, 64, (64,), 1, parts=1, dense=True))
    nothing = job.indices[0, :32].long()
    rope = byte_cache.fields_of(job.record, job.cache[:, :, None])[1]
    scales_of(job)[nothing], rope[nothing] = 0, 0.0
    result = job.run(kernel)
    assert_right(job, result)
    named = torch.where(torch.arange(64) < 32, -1, job.indices)
    without = job.run(kernel, indices=named)
    gain = torch.exp(result[1]) - torch.exp(without[1])
    assert torch.allclose(gain, torch.full_like(gain, 32.0), rtol=1e-3)


@of(EVERY)
def test_a_token_of_nan(name: str) -> None:
    """Scale 255, or NaN: all of a query token that names it, nothing of others."""
    spec, kernel = kernel_of(name)
    job = RecordJob(spec, RecordShape(8, 100, (100, 90), 64, parts=1, dense=True))
    out, lse = job.run(kernel)
    at = int(job.indices[0, 70])
    if job.record.powers:
        scales_of(job)[at // 64, at % 64, 2] = 255
    else:
        scales_of(job)[at // 64, at % 64].view(torch.float32)[2] = math.nan
    other, other_lse = job.run(kernel)
    assert other[0].isnan().all() and other_lse[0].isnan().all()
    assert torch.equal(other[1], out[1]) and torch.equal(other_lse[1], lse[1])


@pytest.mark.parametrize("style", ["plain", "swings", "equal", "scales"])
@of(TWO, ROWS)
def test_two_lists(name: str, style: str) -> None:
    """Attention over the union of two caches: lists of any length, none in one of them, less than
    none, whole and split; sinks weigh once."""
    spec, kernel = kernel_of(name)
    for topk, extra, parts in ((128, 200, 3), (70, 17, 1), (17, 130, 2)):
        shape = RecordShape(
            9, topk, (topk, topk // 2, 0), 256, s_q=2, layout="packed", sink=True, parts=parts,
            style=style, extra_topk=extra, extra_lengths=(extra, -3, 3 * extra), extra_page_size=2,
        )  # fmt: skip
        with using(CHECKED):
            result = (job := RecordJob(spec, shape)).run(kernel)
        assert_right(job, result)


@of(TWO)
def test_one_list_is_two(name: str) -> None:
    """The second half of a list as a list of its own over the same cache: the same bits."""
    spec, kernel = kernel_of(name)
    job = RecordJob(spec, RecordShape(9, 256, (256, 200), 64, parts=1, style="swings"))
    out, lse = job.run(kernel)
    length, more = job.lengths.clamp(max=128), (job.lengths - 128).clamp(min=0)
    other, other_lse = job.run(
        kernel, indices=job.indices[:, :128], topk_length=length, extra_cache=job.cache,
        extra_indices=job.indices[:, 128:], extra_length=more,
    )  # fmt: skip
    assert torch.equal(other, out) and torch.equal(other_lse, lse)

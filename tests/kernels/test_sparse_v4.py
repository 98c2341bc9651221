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

from dsl_kernels import registry
from dsl_kernels.spec import VariantSpec
from snapmla.testing import record_job
from snapmla.testing.record_job import RecordJob, RecordShape
from snapmla.testing.workloads import sparse_records as work
from softgpu import Options, using
from tests.kernels.test_sparse_records import assert_unmoved, kernel_of
from tests.support import byte_lists
from tests.support.byte_lists import FORMATS as EVERY
from tests.support.byte_lists import TWO, WINDOWS, assert_right
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
CHECKED = Options(hazards="raise", seed=5)
WHOLE = pytest.mark.whole_matrix
ROWS = (16, 32, 64)
EVERYDAY = ("fp8_v4", "fp8_v41_rows", "fp8_nope")  # which everyday tests run, with 16 rows


def names(formats: Iterable[str], rows: Iterable[int] = ROWS) -> list[str]:
    return [f"sparse_decode_mix16_r{r}_obf16_kv{f}_sm90a" for f in formats for r in rows]


def of(formats: Iterable[str], rows: Iterable[int] = (16, 64)) -> Any:
    """A test of these formats' variants, over the whole matrix."""
    return lambda test: WHOLE(pytest.mark.parametrize("name", names(formats, rows))(test))


@pytest.mark.parametrize("name", names(EVERYDAY, [16]))
def test_a_job(name: str) -> None:
    """Everyday job of the formats: swings, splits, a sink, two lists."""
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
    """topk 128, as sliding windows have it; pages of any size; real heads fewer than the tile's."""
    spec, kernel = kernel_of(*names([fmt], [rows]))
    shape = RecordShape(heads, 128, (128, 77, 17, 0), page_size, layout=layout, sink=True, parts=3)
    with using(CHECKED):
        result = (job := RecordJob(spec, shape)).run(kernel)
    assert_right(job, result)


@of(EVERY, ROWS)
def test_items_without_tiles(name: str) -> None:
    byte_lists.assert_items_without_tiles(*kernel_of(name))


@pytest.mark.parametrize("style", [s for s in record_job.STYLES if s != "plain"])
@of(EVERY, ROWS)
def test_numbers_that_move_maxima(name: str, style: str) -> None:
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
    """V4's eighth byte behind a token's scales, what lies between pages or rows, tokens that no
    list names: any bytes, the same bits; of two caches where there may be two."""
    spec, kernel = kernel_of(name)
    shape = RecordShape(7, 100, (100, 40), 3, layout="padded", parts=2)
    two = replace(shape, extra_topk=17, extra_lengths=(17, 9))
    for each in (shape, two)[: 1 + (spec.cache_dtype in TWO)]:
        byte_lists.assert_bytes_of_nobody(RecordJob(spec, each), kernel)


@of(EVERY)
def test_the_least_scale_is_a_token(name: str) -> None:
    """Tokens of byte 0, 2^-127, or of scale 0, and of RoPE 0: each weighs e^0 and adds nothing."""
    spec, kernel = kernel_of(name)
    job = RecordJob(spec, RecordShape(8, 64, (64,), 1, parts=1, dense=True))
    byte_lists.assert_least_scale_is_a_token(job, kernel)


@of(EVERY)
def test_a_token_of_nan(name: str) -> None:
    """Scale 255, or NaN: all of a query token that names it, nothing of others."""
    spec, kernel = kernel_of(name)
    job = RecordJob(spec, RecordShape(8, 100, (100, 90), 64, parts=1, dense=True))
    byte_lists.assert_nan_is_its_readers_alone(job, kernel)


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
    job = RecordJob(spec, RecordShape(9, 256, (256, 200), 64, parts=1))
    byte_lists.assert_one_list_is_two(job, kernel)


@WHOLE
@pytest.mark.parametrize("fmt", TWO)
@pytest.mark.parametrize(("rows", "heads", "page_size", "extra", "extra_page"), WINDOWS)
def test_windows_beside_a_second_list(
    rows: int, heads: int, page_size: int, extra: int, extra_page: int, fmt: str
) -> None:
    """topk 128 and 512 or 1024 of another cache, as FlashMLA's tests have it, whole and split."""
    spec, kernel = kernel_of(*names([fmt], [rows]))
    for parts in (1, 5):
        job = RecordJob(spec, byte_lists.window(heads, page_size, extra, extra_page, parts))
        with using(CHECKED):
            result = job.run(kernel)
        assert_right(job, result)


@of(EVERY, ROWS)
def test_padded_heads_over_two_lists(name: str) -> None:
    """The bits of real heads, whatever padded ones hold: split, and with a second list."""
    spec, kernel = kernel_of(name)
    two = {"extra_topk": 130, "extra_lengths": (130, 0)} if spec.cache_dtype in TWO else {}
    shape = RecordShape(spec.row_tile, 70, (70, 66), 2, parts=2, style="equal", sink=True, **two)
    assert_right(job := RecordJob(spec, shape), assert_unmoved(job, kernel, (math.nan, 1e30)))


@of(EVERY, ROWS)
def test_rows_of_one_token(name: str) -> None:
    byte_lists.assert_lone_tokens(*kernel_of(name))


@pytest.mark.parametrize(("rows", "refused"), [(16, False), (64, True)])
def test_which_results_v4_has(rows: int, refused: bool) -> None:
    """With 64 rows a lane stores 16 bytes of BF16; fp32 would need RoPE's channels elsewhere."""
    values = {"row_tile": rows, "out_dtype": "f32", "cache_dtype": "fp8_v4"}
    spec = VariantSpec(op="sparse_decode", pipeline="mix16", **values)  # type: ignore[arg-type]
    assert ("writes BF16" in str(registry.feasible(spec))) == refused

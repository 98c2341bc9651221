"""Sparse decode over DeepSeek V4's pages, V4.1's tokens in both byte orders and NoPE's rows on a
real GPU: fp64 on stored scales, FlashMLA's gates, two caches where the format has them, inputs that
move the maxima, graphs.

Variants may come from elsewhere, no compiler is needed; those that are not there are skipped.
Before a pack: ``python -m codegen build sparse_decode_mix16_rR_obf16_kvF_sm90a``, R of 16, 32, 64,
F of fp8_v4, fp8_v41_planar, fp8_v41_rows, fp8_nope.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_kernels.spec import VariantSpec
from snapmla.compat import flash_mla
from snapmla.runtime import variants
from snapmla.testing import record_job
from snapmla.testing.record_job import RecordJob, RecordShape
from snapmla.testing.sparse_job import HEAD_SCALE, placed
from tests.kernels.test_sparse_records import assert_unmoved
from tests.support import byte_lists
from tests.support.byte_lists import FORMATS, TWO, WINDOWS, assert_right

pytestmark = pytest.mark.gpu
TILES = (16, 32, 64)
HEADS = ((8, 16), (16, 16), (20, 32), (64, 64), (128, 64))  # with the row tile that takes them
PAGES = (2, 64, 256)
EVERY = (*FORMATS, "fp8_ds_mla")


def kernel_of(rows: int, fmt: str) -> tuple[VariantSpec, Any]:
    spec = VariantSpec(
        op="sparse_decode", pipeline="mix16", row_tile=rows, out_dtype="bf16", cache_dtype=fmt
    )
    if variants.jit_refusal() and variants.find(spec) is None:
        pytest.skip(f"{spec.name} is not built, and nothing compiles here")
    return spec, variants.kernel(spec, "cuda")


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize(("heads", "rows"), HEADS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_flashmlas_lists(fmt: str, heads: int, rows: int, page_size: int) -> None:
    """topk 128 and a second list of 512 or 1024, or none; split and whole; sinks; pages apart."""
    spec, kernel = kernel_of(rows, fmt)
    for more, parts, layout in ((0, 1, "split"), (512, 5, "padded"), (1024, 3, "packed")):
        extra = more if fmt in TWO else 0
        shape = RecordShape(
            heads, 128, (128, 77, 0), page_size, s_q=2, layout=layout, sink=True, parts=parts,
            extra_topk=extra, extra_lengths=(extra, 0, extra // 3) if extra else (),
            extra_page_size=PAGES[extra // 512],
        )  # fmt: skip
        torch.manual_seed(heads + page_size + extra)
        assert_right(job := RecordJob(spec, shape, device="cuda"), job.run(kernel))


@pytest.mark.parametrize("style", record_job.STYLES)
@pytest.mark.parametrize("rows", TILES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_numbers_that_move_maxima(fmt: str, rows: int, style: str) -> None:
    """Peaked rows, swings of 200 nats, queries that equal a token, RoPE of 1e3, far groups, the
    least scales; whole and split, one list and two."""
    spec, kernel = kernel_of(rows, fmt)
    for parts, extra in ((1, 0), (4, 0), (3, 200))[: 3 if fmt in TWO else 2]:
        shape = RecordShape(
            rows - 3, 700, (700, 130), 64, parts=parts, style=style, extra_topk=extra,
            extra_lengths=(extra, 17) if extra else (), extra_page_size=2,
        )  # fmt: skip
        torch.manual_seed(parts)
        assert_right(job := RecordJob(spec, shape, device="cuda"), job.run(kernel))


@pytest.mark.parametrize(("rows", "heads", "page_size", "extra", "extra_page"), WINDOWS)
@pytest.mark.parametrize("fmt", TWO)
def test_windows_beside_a_second_list(
    fmt: str, rows: int, heads: int, page_size: int, extra: int, extra_page: int
) -> None:
    """The pages of both caches of every size, also 2 in the second; whole and split."""
    spec, kernel = kernel_of(rows, fmt)
    for seed, parts in enumerate((1, 5)):
        torch.manual_seed(seed)
        shape = byte_lists.window(heads, page_size, extra, extra_page, parts)
        assert_right(job := RecordJob(spec, shape, device="cuda"), job.run(kernel))


@pytest.mark.parametrize("rows", TILES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_padded_heads(fmt: str, rows: int) -> None:
    """The bits of real heads, whatever padded ones hold; split, and with a second list."""
    spec, kernel = kernel_of(rows, fmt)
    one = RecordShape(rows, 200, (200, 66), 64, style="swings")
    two = replace(one, parts=3, sink=True, extra_topk=130, extra_lengths=(130, 0))
    for shape in (one, two)[: 1 + (fmt in TWO)]:
        job = RecordJob(spec, shape, device="cuda")
        assert_unmoved(job, kernel, (0.0, 1e30, math.nan, -math.inf))


@pytest.mark.parametrize("rows", TILES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_bytes_of_nobody(fmt: str, rows: int) -> None:
    """Between pages, behind a token's scales, of tokens that no list names: any, the same bits."""
    spec, kernel = kernel_of(rows, fmt)
    one = RecordShape(7, 300, (300, 40), 3, layout="padded", parts=2)
    two = replace(one, extra_topk=130, extra_lengths=(130, 9))
    for shape in (one, two)[: 1 + (fmt in TWO)]:
        byte_lists.assert_bytes_of_nobody(RecordJob(spec, shape, device="cuda"), kernel)


@pytest.mark.parametrize("rows", TILES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_least_scales_and_nan(fmt: str, rows: int) -> None:
    """Tokens of the least scale weigh e^0; one whose scale is NaN is its readers' alone."""
    spec, kernel = kernel_of(rows, fmt)
    shape = RecordShape(8, 64, (64,), 1, parts=1, dense=True)
    byte_lists.assert_least_scale_is_a_token(RecordJob(spec, shape, device="cuda"), kernel)
    shape = RecordShape(8, 100, (100, 90), 64, parts=1, dense=True)
    byte_lists.assert_nan_is_its_readers_alone(RecordJob(spec, shape, device="cuda"), kernel)


@pytest.mark.parametrize("rows", TILES)
@pytest.mark.parametrize("fmt", TWO)
def test_one_list_is_two(fmt: str, rows: int) -> None:
    """The second half of a list as a list of its own over the same cache: the same bits."""
    spec, kernel = kernel_of(rows, fmt)
    for style in ("swings", "plain"):  # one tile weighs all, or every token
        shape = RecordShape(rows - 3, 1000, (1000, 200, 64), 64, parts=1, style=style)
        byte_lists.assert_one_list_is_two(RecordJob(spec, shape, device="cuda"), kernel)


@pytest.mark.parametrize("rows", TILES)
@pytest.mark.parametrize("fmt", EVERY)
def test_rows_of_one_token(fmt: str, rows: int) -> None:
    """Their LSE is a logit, within FlashMLA's gate, 1e-6 where it is near 0 (docs/numerics.md);
    ``-s`` shows the largest error."""
    spec, kernel = kernel_of(rows, fmt)
    shape = RecordShape(rows, 1, (1,) * 256, 64, parts=32, dense=True, powers=True)
    job = RecordJob(spec, shape, device="cuda")
    found = byte_lists.lone_tokens(job, job.run(kernel)[1])
    print(f"\n{spec.name}: {found}")
    assert found.rows == 256 * rows and not found.outside, found


@pytest.mark.parametrize(("heads", "rows"), HEADS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_names_in_a_graph(fmt: str, heads: int, rows: int) -> None:
    """FlashMLA's call over two caches, captured and replayed over other lists: as eager."""
    spec, _ = kernel_of(rows, fmt)
    shape = RecordShape(
        heads, 128, (128, 128), 256, s_q=2, extra_topk=512 if fmt in TWO else 0,
        extra_lengths=(512, 512), extra_page_size=64,
    )  # fmt: skip
    job = RecordJob(spec, shape)
    q, cache = (placed(x, "cuda") for x in (job.q16, job.cache))
    lists, second = [placed(job.indices, "cuda").view(2, 2, -1)], {}
    if job.extra is not None:
        lists.append(placed(job.extra[1], "cuda").view(2, 2, -1))
        second = {
            "extra_k_cache": placed(job.extra[0], "cuda")[:, :, None],
            "extra_indices_in_kvcache": lists[1],
        }
    metadata, _ = flash_mla.get_mla_metadata()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return flash_mla.flash_mla_with_kvcache(
            q, cache[:, :, None], None, None, 512, metadata, softmax_scale=HEAD_SCALE,
            is_fp8_kvcache=True, indices=lists[0], kv_format=fmt, **second,
        )  # fmt: skip

    out, lse = call()
    torch.cuda.synchronize()
    assert_right(job, (out.cpu(), torch.where(lse.cpu() == math.inf, -math.inf, lse.cpu())))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    for each in lists:
        each.copy_(each.flip(1))
    want = call()
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(made, want, strict=True):
        assert torch.equal(a, b)

"""Decode at the edges of its number range and of its arguments, through the public API."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import snapmla
from dsl_kernels.spec import decode_spec
from snapmla import checks, metrics
from snapmla.reference import FP64, MIMIC_HW_FULL, QuantConfig, mla_decode_reference
from snapmla.testing.comparison import FP32_SLACK, MIMIC_FACTOR
from tests.support.needs import DEVICES, needs_kernels
from tests.support.rows import skip_unbuilt

pytestmark = needs_kernels
# (pipeline, heads): few rows (S^T), many rows (S), Algorithm 1
KERNELS = [("etap", 16), ("etap", 64), ("dual_wg", 64)]
# 16-bit products, of which what a large block leaves of a small one in front of it is 0
WIDE = [pytest.param("f16", heads, marks=pytest.mark.whole_matrix) for heads in (16, 64)]


def stored_cache(c_kv: Tensor, k_rope: Tensor, page_size: int = 64) -> snapmla.PagedKVCache:
    pages, device = -(-len(c_kv) // page_size), c_kv.device
    cache = snapmla.PagedKVCache.allocate(pages, page_size=page_size, device=device)
    cache.content_u8.fill_(0x7F)
    cache.scale.fill_(math.nan)
    slots = torch.arange(len(c_kv), dtype=torch.int32, device=device)
    snapmla.append_kv(cache, c_kv, k_rope, slots)
    return cache


def run(
    q: snapmla.QuantizedQuery, cache: snapmla.PagedKVCache, length: int, pipeline: str, parts: int,
    softmax_scale: float = 1.0, out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (pages, page_size), device = cache.content.shape[:2], cache.content.device
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    heads = q.nope.shape[2]
    plan = snapmla.plan_decode(
        lengths, heads, q.nope.shape[1], page_size=page_size, max_pages=pages, num_parts=parts,
        pipeline=pipeline,
    )  # fmt: skip
    out = "f32" if out_dtype == torch.float32 else "bf16"
    skip_unbuilt(decode_spec(pipeline, plan.row_tile, page_size, out), device)
    return snapmla.decode(
        q, cache, table, lengths, softmax_scale=softmax_scale, plan=plan, out_dtype=out_dtype
    )


def reference(
    q: snapmla.QuantizedQuery, cache: snapmla.PagedKVCache, length: int, config: QuantConfig
) -> tuple[Tensor, Tensor]:
    device = cache.content.device
    table = torch.arange(cache.content.shape[0], dtype=torch.int32, device=device)[None]
    return mla_decode_reference(
        q.nope, q.rope, q.row_scale, cache.content, cache.rope, cache.scale, table,
        torch.tensor([length], dtype=torch.int32, device=device), 1.0, config=config,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("pipeline", "heads"), KERNELS)
@pytest.mark.parametrize(
    "logits",
    [
        (-86.0, 0.0, 5.0),
        (0.0, 60.0),
        pytest.param((-86.0, 0.0), marks=pytest.mark.whole_matrix),
        pytest.param((0.0, -86.0), marks=pytest.mark.whole_matrix),
    ],
)
def test_rows_of_zeros_neither_overflow_nor_vanish(
    device: str, pipeline: str, heads: int, logits: tuple[float, ...]
) -> None:
    """A zero latent has sigma 2^-80, and still counts in the row sum: maxima must leave it room.

    Blocks of 64 tokens at the given logits along one RoPE channel; latents of the blocks at logit 0
    are zero.
    """
    g = torch.Generator().manual_seed(0)
    c_kv = torch.cat([torch.randn(64, 512, generator=g) * (logit != 0) for logit in logits])
    k_rope = torch.zeros(len(c_kv), 64)
    k_rope[:, 0] = torch.tensor(logits).repeat_interleave(64)
    q_nope, q_rope = torch.zeros(1, 1, heads, 512), torch.zeros(1, 1, heads, 64)
    q_rope[..., 0] = 1.0
    c_kv, k_rope, q_nope, q_rope = (t.bfloat16().to(device) for t in (c_kv, k_rope, q_nope, q_rope))
    cache, q = stored_cache(c_kv, k_rope), snapmla.quantize_q(q_nope, q_rope)
    expected, expected_lse = reference(q, cache, len(c_kv), FP64)
    mimic, _ = reference(q, cache, len(c_kv), MIMIC_HW_FULL)
    out, lse = run(q, cache, len(c_kv), pipeline, parts=1, out_dtype=torch.float32)
    assert metrics.lse_error(lse, expected_lse) <= FP32_SLACK  # 5e-6 as measured
    # where a row of zeros has the top logit, the output is 1e-38 of the others; its digits count
    error = metrics.relative_l2(out, expected)
    assert error <= MIMIC_FACTOR * metrics.relative_l2(mimic, expected)


# small pages with the first kernel; with the others over the whole matrix
TABLES = [
    pytest.param(*kernel, *table, marks=pytest.mark.whole_matrix if i and table[0] < 64 else ())
    for i, kernel in enumerate(KERNELS)
    for table in ((16, 3), (32, 1), (16, 5), (64, 1))
]
TABLES += [
    pytest.param("f16", *case, marks=pytest.mark.whole_matrix)
    for case in ((16, 16, 5), (64, 32, 3), (16, 64, 1), (64, 128, 1))
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("pipeline", "heads", "page_size", "width"), TABLES)
def test_lengths_beyond_the_block_table_end_with_it(
    device: str, pipeline: str, heads: int, page_size: int, width: int
) -> None:
    g = torch.Generator().manual_seed(1)
    tokens = page_size * width
    c_kv, k_rope = torch.randn(tokens, 512, generator=g), torch.randn(tokens, 64, generator=g)
    cache = stored_cache(c_kv.bfloat16().to(device), k_rope.bfloat16().to(device), page_size)
    q = snapmla.quantize_q(
        (torch.randn(1, 2, heads // 2, 512, generator=g) * 0.05).bfloat16().to(device),
        (torch.randn(1, 2, heads // 2, 64, generator=g) * 0.05).bfloat16().to(device),
    )
    at_end = run(q, cache, tokens, pipeline, parts=1)
    beyond = run(q, cache, tokens + 1000, pipeline, parts=1)
    assert torch.equal(at_end[0], beyond[0]) and torch.equal(at_end[1], beyond[1])
    negative = run(q, cache, -5, pipeline, parts=1)
    assert (negative[0] == 0).all() and torch.isneginf(negative[1]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("pipeline", "heads"), [*KERNELS, *WIDE])
@pytest.mark.parametrize("content", [True, False])
def test_the_largest_softmax_scale(device: str, pipeline: str, heads: int, content: bool) -> None:
    """Every channel at float16's end: one row's logits are the largest, another's the smallest.

    Without content, RoPE is all that the logits are made of, and stored as large as it can be.
    """
    end = 65504.0
    c_kv = torch.full((70, 512), end if content else 0.0, dtype=torch.float16, device=device)
    k_rope = torch.full((70, 64), end, dtype=torch.float16, device=device)
    signs = torch.ones(1, 1, heads, 1, dtype=torch.float16, device=device)
    signs[:, :, 1::2] = -1.0
    q = snapmla.quantize_q((signs * c_kv[0]).contiguous(), (signs * k_rope[0]).contiguous())
    cache, scale = stored_cache(c_kv, k_rope), checks.MAX_SOFTMAX_SCALE
    # tops of 448, as other writers have them: sums of 448 * 448 are exact in the tensor core
    k8, rope, sigma = snapmla.reference.quantize_rows(c_kv, k_rope)
    at = torch.arange(len(c_kv), device=device)
    at = (at // cache.page_size, at % cache.page_size)
    cache.content_u8[at], cache.rope[at], cache.scale[at] = k8.view(torch.uint8), rope, sigma
    fp32 = torch.float32
    out, lse = run(q, cache, len(c_kv), pipeline, 1, softmax_scale=scale, out_dtype=fp32)
    logits = scale * end**2 * (512 * content + 64) * signs.double()[0, 0, :, 0]
    torch.testing.assert_close(lse[0, :, 0].double(), logits, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(out, c_kv[0].float().expand_as(out), rtol=1e-5, atol=0.0)
    if content and device == "cpu":  # and 8 times that is too much: the check above can fail
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checks, "MAX_SOFTMAX_SCALE", 8 * scale)
            out, lse = run(q, cache, len(c_kv), pipeline, parts=1, softmax_scale=8 * scale)
        assert not torch.isfinite(lse).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("pipeline", "heads"), [*KERNELS, *WIDE])
def test_scales_that_are_none(device: str, pipeline: str, heads: int) -> None:
    """Written by hand: a token of scale 0 has no weight, one of a negative scale makes NaN."""
    g = torch.Generator().manual_seed(2)
    c_kv, k_rope = (torch.randn(80, n, generator=g).half().to(device) for n in (512, 64))
    q_nope, q_rope = (torch.randn(1, 1, heads, n, generator=g).half() * 0.05 for n in (512, 64))
    q = snapmla.quantize_q(q_nope.to(device), q_rope.to(device))
    cache = stored_cache(c_kv, k_rope)
    cache.scale[1, 6:16] = 0.0
    out, lse = run(q, cache, 80, pipeline, parts=1)
    short, short_lse = run(q, cache, 70, pipeline, parts=1)
    assert torch.equal(out, short) and torch.equal(lse, short_lse)
    cache.scale[1, 15] = -1.0
    out, lse = run(q, cache, 80, pipeline, parts=1)
    assert out.isnan().all() and lse.isnan().all()
    cache.scale.zero_()
    out, lse = run(q, cache, 80, pipeline, parts=1)
    assert (out == 0).all() and torch.isneginf(lse).all()

"""``append_kv`` against the quantisation rule in torch, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.bits import assert_same
from tests.support.cases import allocate_pool
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import (
    DTYPES,
    FP8,
    INDEX,
    TOPS,
    device_of,
    joint,
    kernel,
    latents,
    outputs,
    quantised,
)

pytestmark = needs_kernels


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("in_dtype", "index_dtype", "layout", "page_size", "strided"),
    [
        ("bf16", "i32", "split", 64, False),
        ("bf16", "i64", "paged", 16, True),
        ("bf16", "i64", "row640", 64, True),
        ("f16", "i32", "paged", 64, False),
        ("f16", "i64", "split", 16, True),
        ("f32", "i32", "row640", 16, True),
        ("f32", "i64", "paged", 128, False),
    ],
)
def test_append_kv(
    target: str,
    in_dtype: str,
    index_dtype: str,
    layout: str,
    page_size: int,
    strided: bool,
) -> None:
    device = device_of(target)
    n, pages = 41, 128 // page_size + 2
    c, r = latents((n,), DTYPES[in_dtype])
    slots = torch.randperm(pages * page_size)[:n]
    slots[5], slots[17], slots[40] = -1, pages * page_size, torch.iinfo(INDEX[index_dtype]).max
    slots[22] = torch.iinfo(INDEX[index_dtype]).min
    inputs = joint(c, r) if strided else (c, r)
    pool = allocate_pool(pages, page_size, layout, torch.device(device), 255)
    run = kernel(target, op="append_kv", in_dtype=in_dtype, index_dtype=index_dtype)
    run(
        pool[0].view(torch.uint8),
        *pool[1:],
        *(x.to(device) for x in inputs),
        slots.to(INDEX[index_dtype]).to(device),
    )

    content, rope, scale = (x.clone() for x in allocate_pool(pages, page_size, "split", "cpu", 255))
    kept = (slots >= 0) & (slots < pages * page_size)
    q8, rope_q, sigma = quantised(c, r, slots=slots)
    content.view(torch.uint8).view(-1, 512)[slots[kept]] = q8[kept]
    rope.view(-1, 64)[slots[kept]] = rope_q[kept]
    scale.view(-1)[slots[kept]] = sigma[kept]
    assert_same(pool[0].view(torch.uint8).contiguous(), content.view(torch.uint8))
    assert_same(pool[1].contiguous(), rope)
    assert_same(pool[2].contiguous(), scale)
    bad = c[kept].float().isfinite().all(1).logical_not() | r[kept].isfinite().all(1).logical_not()
    assert bad.sum() >= 3 and torch.equal(sigma[kept].isnan(), bad)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("in_dtype", "cache_dtype", "index_dtype", "page_size", "heads", "strided"),
    [
        ("bf16", "bf16", "i32", 16, 1, False),
        ("f16", "f16", "i32", 192, 3, True),
        ("f32", "bf16", "i32", 64, 2, True),
    ],
)
def test_append_rows(
    target: str,
    in_dtype: str,
    cache_dtype: str,
    index_dtype: str,
    page_size: int,
    heads: int,
    strided: bool,
) -> None:
    """Values as they are, NaN's and infinity's bits too; nothing else of the pool is written."""
    device, dtype = device_of(target), DTYPES[cache_dtype]
    n, pages = 41, 128 // page_size + 2
    c, r = latents((n * heads,), DTYPES[in_dtype])
    slots = torch.randperm(pages * page_size)[:n]
    slots[5], slots[17], slots[40] = -1, pages * page_size, torch.iinfo(INDEX[index_dtype]).max
    kept = (slots >= 0) & (slots < pages * page_size)
    memory = torch.full((pages, heads, page_size + 1, 584), 7.0, dtype=dtype, device=device)
    kv = memory[:, :, 1:, 8:].transpose(1, 2)
    run = kernel(
        target, op="append_kv", in_dtype=in_dtype, index_dtype=index_dtype, cache_dtype=cache_dtype
    )
    inputs = joint(c, r) if strided else (c, r)
    slot_mapping = slots.to(INDEX[index_dtype]).to(device)
    run(kv, *(x.to(device) for x in inputs), slot_mapping)
    want = torch.full(memory.shape, 7.0, dtype=dtype)
    rows = torch.cat([c, r], 1).view(n, heads, 576)[kept].to(dtype)
    at = slots[kept] // page_size, slots[kept] % page_size
    want[:, :, 1:, 8:].transpose(1, 2)[at] = rows
    assert rows.isnan().any() and rows.isinf().any()
    if in_dtype == cache_dtype:
        assert torch.equal(memory.cpu().view(torch.int16), want.view(torch.int16))
    assert_same(memory.cpu(), want)


@pytest.mark.parametrize("n", [0, 1])
def test_append_kv_few(n: int) -> None:
    pool = allocate_pool(2, 16, "split", torch.device("cpu"), 0)
    c, r = torch.ones(n, 512).bfloat16(), torch.ones(n, 64).bfloat16()
    slots = torch.full((n,), 19, dtype=torch.int32)
    kernel("sm_90a", op="append_kv")(pool[0].view(torch.uint8), *pool[1:], c, r, slots)
    assert pool[2].count_nonzero() == n
    if n:
        assert pool[2][1, 3] == torch.tensor(1 / 256) and (pool[0][1, 3].float() == 256).all()


@pytest.mark.parametrize("in_dtype", ["bf16", "f32"])
def test_alike_tokens_do_not_round_alike(in_dtype: str) -> None:
    """Eight scales for eight neighbours, each with its largest channel exact."""
    pool = allocate_pool(2, 16, "split", torch.device("cpu"), 255)
    c = torch.randn(1, 512).to(DTYPES[in_dtype]).expand(8, -1).contiguous()
    slots = torch.arange(20, 28, dtype=torch.int32)
    run = kernel("sm_90a", op="append_kv", in_dtype=in_dtype)
    run(pool[0].view(torch.uint8), *pool[1:], c, torch.zeros(8, 64).to(c.dtype), slots)
    content, scale = pool[0][1, 4:12].float(), pool[2][1, 4:12]
    assert set(content.abs().amax(1).tolist()) == set(TOPS) and len(set(scale.tolist())) == 8
    where = c[0].abs().argmax()
    back = content[:, where] * scale
    assert torch.allclose(back, c[:, where].float(), rtol=2.0**-22, atol=0)
    other = (content * scale[:, None])[:, torch.arange(512) != where]
    assert len(other.unique(dim=0)) == 8


def far_apart(dtype: torch.dtype, *row: int) -> Tensor:
    """(2, 16, *row) whose second page lies more than 4 GiB (and 2^31 elements) behind the first.

    Only the touched parts of the allocation become resident.
    """
    page = max(2**31, 2**32 // dtype.itemsize) + 64
    try:
        memory = torch.empty(page + 16 * math.prod(row), dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"no address space for it: {error}")
    inner = (row[0], 1) if row else (1,)
    return memory.as_strided((2, 16, *row), (page, *inner))


def test_pool_beyond_4_gib() -> None:
    cache = (far_apart(torch.uint8, 512), far_apart(torch.bfloat16, 64), far_apart(torch.float32))
    c, r = latents((5,), torch.bfloat16)
    slots = torch.tensor([31, 16, 0, 17, 5], dtype=torch.int32)
    kernel("sm_90a", op="append_kv")(*cache, c, r, slots)
    expected = quantised(c, r, slots=slots)
    for got, want in zip(cache, expected, strict=True):
        assert_same(torch.stack([got[s // 16, s % 16] for s in slots.tolist()]), want)
    sigma = expected[2][:, None]
    content, rope = expected[0].view(FP8).float() * sigma, expected[1].float() * sigma
    out = outputs((5,), torch.bfloat16, "cpu", False)
    kernel("sm_90a", op="fetch_dequant", mode="indices")(*cache, slots, *out)
    assert_same(out[0], content.bfloat16())
    assert_same(out[1], rope.bfloat16())
    table, length = torch.tensor([[1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    out = outputs((1, 2), torch.bfloat16, "cpu", False)
    kernel("sm_90a", op="fetch_dequant", mode="pages")(*cache, table, length, *out)
    assert_same(out[0][0], content[[1, 3]].bfloat16())
    assert_same(out[1][0], rope[[1, 3]].bfloat16())


def test_rows_beyond_4_gib() -> None:
    kv = far_apart(torch.bfloat16, 576).unsqueeze(2)
    c, r = latents((5,), torch.bfloat16)
    slots = torch.tensor([31, 16, 0, 17, 5], dtype=torch.int32)
    kernel("sm_90a", op="append_kv", cache_dtype="bf16")(kv, c, r, slots)
    rows = torch.cat([c, r], 1)
    assert_same(torch.stack([kv[s // 16, s % 16, 0] for s in slots.tolist()]), rows)
    table, begins = torch.tensor([[1]], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    out = outputs((2, 1), torch.bfloat16, "cpu", True)
    fetch = kernel("sm_90a", op="fetch_dequant", mode="ragged", cache_dtype="bf16")
    fetch(kv, table, begins, torch.zeros(0, dtype=torch.int32), *out)
    assert_same(torch.cat(out, -1)[:, 0], rows[[1, 3]])

"""``fetch_dequant`` by pages and by indices against a few lines of torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.bits import assert_same
from tests.support.cases import allocate_pool
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import DTYPES, device_of, kernel, outputs, random_cache

pytestmark = needs_kernels


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "layout", "page_size", "slices"),
    [
        ("bf16", "split", 64, True),
        ("bf16", "paged", 16, False),
        ("f16", "row640", 16, True),
        ("f32", "paged", 64, False),
    ],
)
def test_fetch_pages(target: str, dtype: str, layout: str, page_size: int, slices: bool) -> None:
    device = device_of(target)
    pages, max_len = 160 // page_size + 4, 80
    pool, nope32, rope32 = random_cache(pages, page_size, layout, device)
    lengths = torch.tensor([0, 1, page_size, page_size + 1, 75, 90, -4], dtype=torch.int32)
    width = -(-max_len // page_size)
    table = torch.stack([torch.randperm(pages)[:width] for _ in lengths]).int()
    table[3, 1] = pages + 1000  # clamped to the last page
    expected = outputs((len(lengths), max_len), DTYPES[dtype], "cpu", False)
    for i, length in enumerate(lengths.tolist()):
        for t in range(min(length, max_len)):
            page = min(int(table[i, t // page_size]), pages - 1)
            expected[0][i, t] = nope32[page, t % page_size].to(DTYPES[dtype])
            expected[1][i, t] = rope32[page, t % page_size].to(DTYPES[dtype])
    for i, length in enumerate(lengths.tolist()):  # the tail of the table must not be read
        table[i, -(-max(length, 0) // page_size) :] = 2147480000
    out = outputs((len(lengths), max_len), DTYPES[dtype], device, slices)
    run = kernel(target, op="fetch_dequant", in_dtype=dtype, mode="pages")
    run(pool[0].view(torch.uint8), *pool[1:], table.to(device), lengths.to(device), *out)
    assert_same(out[0], expected[0])
    assert_same(out[1], expected[1])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "layout", "page_size", "slices"),
    [
        ("bf16", "paged", 64, True),
        ("bf16", "row640", 16, False),
        ("f16", "split", 16, False),
        ("f32", "split", 64, True),
    ],
)
def test_fetch_indices(target: str, dtype: str, layout: str, page_size: int, slices: bool) -> None:
    device = device_of(target)
    pages = 160 // page_size + 1
    pool, nope32, rope32 = random_cache(pages, page_size, layout, device)
    slots = pages * page_size
    index = torch.randint(0, slots, (45,), dtype=torch.int32)
    index[3], index[11], index[44], index[12] = -1, slots, 2147480000, 1  # 1 has a NaN scale
    valid = (index >= 0) & (index < slots)
    out = outputs((len(index),), DTYPES[dtype], device, slices)
    run = kernel(target, op="fetch_dequant", in_dtype=dtype, mode="indices")
    run(pool[0].view(torch.uint8), *pool[1:], index.to(device), *out)
    for got, values in zip(out, (nope32, rope32), strict=True):
        rows = values.flatten(0, 1)[torch.where(valid, index, 0).long()]
        assert_same(got, torch.where(valid[:, None], rows, 0).to(DTYPES[dtype]))
    assert out[0][12].isnan().all() and (out[0][3] == 0).all()


def test_empty_calls_launch_nothing() -> None:
    pool = allocate_pool(1, 16, "split", torch.device("cpu"), 0)
    cache = (pool[0].view(torch.uint8), *pool[1:])
    i32 = torch.int32
    run = kernel("sm_90a", op="fetch_dequant", mode="indices")
    run(*cache, torch.empty(0, dtype=i32), *(torch.empty(0, d).bfloat16() for d in (512, 64)))
    assert not run.launches  # type: ignore[attr-defined]
    run = kernel("sm_90a", op="fetch_dequant", mode="pages")
    table, lengths = torch.zeros(2, 1, dtype=i32), torch.zeros(2, dtype=i32)
    run(*cache, table, lengths, *(torch.empty(2, 0, d).bfloat16() for d in (512, 64)))
    assert not run.launches  # type: ignore[attr-defined]

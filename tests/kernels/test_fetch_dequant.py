"""``fetch_dequant`` by pages, by indices and by chunks against plain torch, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapmla import PagedKVCache
from snapmla.testing import fetched, selfcheck
from tests.support.bits import assert_same
from tests.support.cases import allocate_pool
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import DTYPES, INDEX, device_of, kernel, outputs, random_cache

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
    ("dtype", "index_dtype", "layout", "page_size", "slices"),
    [
        ("bf16", "i32", "paged", 64, True),
        ("bf16", "i64", "row640", 16, False),
        ("f16", "i32", "split", 16, False),
        ("f32", "i32", "split", 64, True),
    ],
)
def test_fetch_indices(
    target: str, dtype: str, index_dtype: str, layout: str, page_size: int, slices: bool
) -> None:
    device = device_of(target)
    pages = 160 // page_size + 1
    pool, nope32, rope32 = random_cache(pages, page_size, layout, device)
    slots = pages * page_size
    index = torch.randint(0, slots, (45,), dtype=INDEX[index_dtype])
    index[3], index[11], index[44], index[12] = -1, slots, 2147480000, 1  # 1 has a NaN scale
    if index_dtype == "i64":  # tokens, were they cut to 32 bits
        index[20:24] = torch.tensor([2**32, 2**32 + 2, 5 - 2**32, -(2**63)])
    valid = (index >= 0) & (index < slots)
    out = outputs((len(index),), DTYPES[dtype], device, slices)
    run = kernel(
        target, op="fetch_dequant", in_dtype=dtype, mode="indices", index_dtype=index_dtype
    )
    run(pool[0].view(torch.uint8), *pool[1:], index.to(device), *out)
    for got, values in zip(out, (nope32, rope32), strict=True):
        rows = values.flatten(0, 1)[torch.where(valid, index, 0).long()]
        assert_same(got, torch.where(valid[:, None], rows, 0).to(DTYPES[dtype]))
    assert out[0][12].isnan().all() and (out[0][3] == 0).all()


def packed(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "layout", "page_size", "slices"),
    [
        ("bf16", "split", 16, True),
        ("bf16", "row640", 32, False),
        ("bf16", "paged", 128, True),
        ("f32", "paged", 64, False),
    ],
)
def test_fetch_ragged(target: str, dtype: str, layout: str, page_size: int, slices: bool) -> None:
    """Starts in mid-page and before the first token, ends behind the table, garbage in it."""
    device, pages, width = device_of(target), 5, 3
    pool, _, _ = random_cache(pages, page_size, layout, device)
    table = torch.stack([torch.randperm(pages)[:width] for _ in range(11)]).int()
    table[2, 1], table[3, 0], table[3, 1] = -1, pages, 2147480000
    end = width * page_size
    chunks = [(0, 0), (5, 7), (page_size - 1, 3), (page_size - 2, page_size - 1), (0, 0),
              (1, end - 1), (3, end - 2), (2, 2**31 - 1), (2, -(2**31)), (0, 3),
              (6, -3)]  # fmt: skip
    begins = packed([n for n, _ in chunks])
    starts = torch.tensor([start for _, start in chunks], dtype=torch.int32)
    # of whole pages only those are read that hold a token
    table[9], table[1, -(-12 // page_size) :] = 2147480000, 2147480000
    total = int(begins[-1]) + 21  # a CTA and more behind the last row
    out = outputs((total,), DTYPES[dtype], device, slices)
    run = kernel(target, op="fetch_dequant", in_dtype=dtype, mode="ragged")
    tables = (t.to(device) for t in (table, begins, starts))
    run(pool[0].view(torch.uint8), *pool[1:], *tables, *out)
    cache = PagedKVCache.from_tensors(*(t.cpu() for t in pool))
    slots = fetched.packed_slots(table, begins, starts, cache, total)
    assert (slots == fetched.ZEROS).sum() > 5 and (slots >= 0).sum() > page_size
    want = fetched.rows_at(cache, slots, DTYPES[dtype], 7.0)
    assert_same(out[0], want[0])
    assert_same(out[1], want[1])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("mode", "dtype", "cache_dtype", "page_size", "heads", "slices"),
    [
        ("pages", "f16", "f16", 192, 2, True),
        ("ragged", "bf16", "bf16", 16, 1, True),
        ("indices", "f32", "f16", 64, 3, False),
    ],
)
def test_fetch_rows(
    target: str, mode: str, dtype: str, cache_dtype: str, page_size: int, heads: int, slices: bool
) -> None:
    """16-bit rows whose heads lie before tokens; pages that nobody asks for are NaN."""
    device, own = device_of(target), DTYPES[cache_dtype]
    cache, table, lengths = selfcheck.filled_rows((75, 0, 33), page_size, own, heads, strided=True)
    assert cache.kv is not None
    tables: tuple[torch.Tensor, ...] = (table, lengths)
    if mode == "pages":
        slots = fetched.padded_slots(table, lengths, page_size, 80)
    elif mode == "ragged":
        begins, starts = packed([30, 0, 19]), torch.tensor([45, 0, 14], dtype=torch.int32)
        tables = (table, begins, starts)
        slots = fetched.packed_slots(table, begins, starts, cache, 53)
        assert (slots >= 0).sum() == 30 + 19
    else:
        slots = fetched.padded_slots(table, lengths, page_size, 75).flatten()[::3]
        slots = torch.where(slots < 0, fetched.ZEROS, slots)
        tables = (slots.int(),)
    out = outputs((*slots.shape, heads), DTYPES[dtype], device, slices)
    run = kernel(target, op="fetch_dequant", in_dtype=dtype, mode=mode, cache_dtype=cache_dtype)
    run(cache.kv.to(device), *(t.to(device) for t in tables), *out)
    for got, want in zip(out, fetched.rows_at(cache, slots, DTYPES[dtype], 7.0), strict=True):
        assert_same(got, want)
        assert not want.isnan().any()


@functools.cache
def small_pool() -> tuple[PagedKVCache, Callable[..., None]]:
    pool, _, _ = random_cache(4, 16, "split", "cpu")
    return PagedKVCache.from_tensors(*pool), kernel("sm_90a", op="fetch_dequant", mode="ragged")


def fetch_chunks(
    begins: list[int], starts: list[int], total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, block table); the rows lie in a larger memory, which is not written."""
    cache, run = small_pool()
    b = len(begins) - 1
    table = (torch.arange(b * 2).view(b, 2) * 7 % 5).int()  # 4 is no page
    tables = torch.tensor(begins).int(), torch.tensor(starts).int()
    memory = torch.full((total + 24, 576), 7.0).bfloat16()
    out = memory[12 : 12 + total]
    run(cache.content_u8, cache.rope, cache.scale, table, *tables, out[:, :512], out[:, 512:])
    assert (memory[:12] == 7.0).all() and (memory[12 + total :] == 7.0).all()
    return out, table


@given(
    st.lists(st.one_of(st.just(0), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(0, 90),
    st.integers(0, 90),
    st.data(),
)
@example([3], 0, 0, None)
@example([1] * 8, 90, 0, None)
@settings(max_examples=30, deadline=None)
def test_any_lengths(head: list[int], empty: int, behind: int, data: st.DataObject | None) -> None:
    """Up to 188 sequences, most of them empty: searches of one, two and three rounds."""
    lengths = [*[0] * empty, *head, *[0] * behind]
    count = len(lengths)
    start = 5 if data is None else data.draw(st.integers(-2, 33))
    begins, starts = packed(lengths), torch.full((count,), start)
    cache, _ = small_pool()
    total = int(begins[-1]) + 3
    out, table = fetch_chunks(begins.tolist(), starts.tolist(), total)
    slots = fetched.packed_slots(table, begins, starts, cache, total)
    assert_same(out, torch.cat(fetched.rows_at(cache, slots, torch.bfloat16, 7.0), 1))


EDGES = st.one_of(st.integers(-3, 20), st.sampled_from([2**31 - 1, -(2**31), 2**30]))


@given(st.lists(EDGES, min_size=2, max_size=30), EDGES)
@example([0, 2**31 - 1, -(2**31), 5], 2**31 - 1)
@example([-(2**31), 5, 5], -(2**31))
@settings(max_examples=30, deadline=None)
def test_begins_that_do_not_ascend(begins: list[int], start: int) -> None:
    """Nothing is written or read out of bounds; a row is a token's, zeros, or as it was."""
    cache, _ = small_pool()
    out, _ = fetch_chunks(begins, [start] * (len(begins) - 1), 18)
    some = torch.cat([fetched.rows_at(cache, torch.tensor([slot]), torch.bfloat16, 7.0)[0]
                      for slot in (*range(64), fetched.ZEROS, fetched.UNTOUCHED)])  # fmt: skip
    for row in out[:, :512]:
        same = (row == some) | (row.isnan() & some.isnan())
        assert same.all(1).any()


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
    run = kernel("sm_90a", op="fetch_dequant", mode="ragged")
    for b, total in ((0, 3), (2, 0)):
        begins, none = torch.zeros(b + 1, dtype=i32), torch.zeros(0, dtype=i32)
        rows = (torch.empty(total, d).bfloat16() for d in (512, 64))
        run(*cache, table[:b], begins, none, *rows)
    assert not run.launches  # type: ignore[attr-defined]

"""PagedKVCache: made, checked, copied, saved."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsl_kernels.families.fp8_decode import PAGE_SIZES
from dsl_kernels.formats.registered import FORMATS
from snapmla import PagedKVCache
from snapmla.cache import layouts
from tests.support.bits import same_bits
from tests.support.cases import LAYOUTS
from tests.support.copies import COPIES


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_allocate(layout: str, page_size: int) -> None:
    cache = PagedKVCache.allocate(3, page_size, layout, "cpu")
    assert cache.layout == layout and cache.format == "fp8"
    assert (cache.num_pages, cache.page_size, cache.num_slots) == (3, page_size, 3 * page_size)
    assert tuple(cache.content.shape) == (3, page_size, 512)
    assert cache.content.dtype == torch.float8_e4m3fn
    assert tuple(cache.rope.shape) == (3, page_size, 64) and cache.rope.dtype == torch.bfloat16
    assert tuple(cache.scale.shape) == (3, page_size) and cache.scale.dtype == torch.float32
    assert cache.content_u8.data_ptr() == cache.content.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_do_not_overlap(layout: str) -> None:
    cache = PagedKVCache.allocate(5, 32, layout, "cpu")
    cache.content_u8.fill_(7)
    cache.rope.fill_(3.0)
    cache.scale.fill_(0.5)
    assert (cache.content_u8 == 7).all()
    assert (cache.rope == 3.0).all()
    assert (cache.scale == 0.5).all()


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 192, 4096])
@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, 1), (torch.float16, 3)])
def test_allocate_rows(dtype: torch.dtype, heads: int, page_size: int) -> None:
    cache = PagedKVCache.allocate(3, page_size, device="cpu", dtype=dtype, num_kv_heads=heads)
    assert cache.layout == "rows" and cache.scale is None and cache.kv is not None
    assert (cache.num_pages, cache.page_size, cache.num_slots) == (3, page_size, 3 * page_size)
    assert cache.dtype == dtype and cache.num_kv_heads == heads
    assert cache.format == {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    assert cache.named_tensors.keys() == set(FORMATS[cache.format].parts)
    assert tuple(cache.kv.shape) == (3, page_size, heads, 576)
    cache.content.fill_(2.0)
    cache.rope.fill_(3.0)
    assert (cache.kv[..., :512] == 2.0).all() and (cache.kv[..., 512:] == 3.0).all()
    assert cache.content_u8.data_ptr() == cache.kv.data_ptr()


def test_rows_of_an_engine() -> None:
    """Layers side by side, heads before tokens, no dimension of heads, one of an odd stride."""
    pool = torch.zeros((4, 2, 3, 64, 584), dtype=torch.bfloat16)
    some = PagedKVCache.from_tensors(pool[:, 1, :, :, 8:].transpose(1, 2))
    assert some.layout == "strided" and some.num_kv_heads == 3 and some.kv is not None
    assert some.kv.stride() == (2 * 3 * 64 * 584, 584, 64 * 584, 1)
    flat = PagedKVCache.from_tensors(pool[:, 0, 0, :, :576])
    odd = pool[:, 0, 0, :, :576].as_strided((4, 64, 1, 576), (2 * 3 * 64 * 584, 584, 7, 1))
    for cache in (flat, PagedKVCache.from_tensors(odd)):
        assert cache.kv is not None and cache.num_kv_heads == 1
        assert cache.kv.shape == (4, 64, 1, 576) and cache.kv.stride(2) % 8 == 0


F16 = torch.float16
ROWS = torch.zeros(4, 64, 576, dtype=F16)
ONE_HEAD = ROWS.view(4, 64, 1, 576)


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (ROWS.float(), TypeError, "content: expected dtype bfloat16 or float16, got float32"),
        (ROWS[..., :512], ValueError, r"content: .*\(num_pages, page_size, 576\), got"),
        (ROWS[:, :48], ValueError, "page_size: .* 16, 32 or a multiple of 64, got 48 .*is 32"),
        (ROWS[:0], ValueError, "content: expected 1 page or more, got 0"),
        (ONE_HEAD[:, :, :0], ValueError, "num_kv_heads: expected 1 to 128, got 0"),
        (ROWS[:1].expand(4, 64, 576), ValueError, "content: expected strides of distinct tokens"),
        (ONE_HEAD.expand(4, 64, 2, 576), ValueError, "content: .*distinct tokens"),
        (torch.zeros(4, 576, 64).half().mT, ValueError, "content: expected innermost stride 1"),
        (torch.zeros(4, 64, 580).half()[..., :576], ValueError, "content: .*16 bytes"),
        (torch.zeros(4, 64, 584).half()[..., 4:580], ValueError, "content: .*bytes, got address"),
        (torch.zeros(4, 64, 512).byte(), ValueError, "rope: expected a tensor beside FP8"),
        ([1], TypeError, "content: expected a torch.Tensor, got list"),
    ],
)  # fmt: skip
def test_wrong_rows(rows: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        PagedKVCache.from_tensors(rows)


def test_slices_of_other_rows_are_no_cache() -> None:
    with pytest.raises(ValueError, match="rope: expected the 64 channels behind content's"):
        PagedKVCache(ONE_HEAD[..., :512], ONE_HEAD.clone()[..., 512:])


def test_from_tensors_takes_bytes_and_slices() -> None:
    pool = torch.zeros((8, 64, 512), dtype=torch.uint8)
    rope = torch.zeros((8, 64, 64), dtype=torch.bfloat16)
    scale = torch.zeros((8, 64))
    cache = PagedKVCache.from_tensors(pool[::2], rope[::2], scale[::2])
    assert cache.num_pages == 4 and cache.layout == "strided"


def good() -> dict[str, torch.Tensor]:
    return {
        "content": torch.zeros((4, 64, 512), dtype=torch.uint8).view(torch.float8_e4m3fn),
        "rope": torch.zeros((4, 64, 64), dtype=torch.bfloat16),
        "scale": torch.zeros((4, 64)),
    }


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("content", torch.zeros(4, 64, 512), TypeError, "float8_e4m3fn.*float32"),
        ("content", torch.zeros(4, 64, 576, dtype=torch.uint8), ValueError, "512.*576"),
        ("content", torch.zeros(4, 48, 512, dtype=torch.uint8), ValueError, "page_size.*got 48"),
        ("content", torch.zeros(4, 512, 64, dtype=torch.uint8).mT, ValueError, "innermost stride"),
        ("rope", torch.zeros(4, 64, 64, dtype=torch.float16), TypeError, "bfloat16.*float16"),
        ("rope", torch.zeros(3, 64, 64, dtype=torch.bfloat16), ValueError, "rope.*4, 64, 64"),
        ("rope", torch.zeros(4, 64, 68, dtype=torch.bfloat16)[..., 4:], ValueError, "16 bytes"),
        ("scale", torch.zeros(4, 64, dtype=torch.bfloat16), TypeError, "float32"),
        ("scale", torch.zeros(4, 64, 1), ValueError, "scale.*shape"),
        ("scale", torch.zeros(4, 66)[:, 1:65], ValueError, "16 bytes"),
        ("scale", torch.zeros(1, 64).expand(4, 64), ValueError, "distinct"),
        ("rope", torch.empty(4, 64, 64, dtype=torch.bfloat16, device="meta"), ValueError, "meta"),
    ],
)
def test_wrong_memory(name: str, value: torch.Tensor, error: type, words: str) -> None:
    with pytest.raises(error, match=f"(?s){words}"):
        PagedKVCache.from_tensors(**{**good(), name: value})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_pages": 0}, ValueError, "num_pages: expected 1 or more, got 0"),
        ({"num_pages": 2.0}, TypeError, "num_pages: expected an int"),
        ({"page_size": 48}, ValueError, "page_size.*got 48.*nearest is"),
        ({"layout": "interleaved"}, ValueError, "layout.*'split'.*got 'interleaved'"),
        ({"dtype": "bf16"}, ValueError, "dtype: expected one of 'fp8', torch.bfloat16, torch.fl"),
        ({"dtype": torch.float32}, ValueError, "dtype: .*got torch.float32"),
        ({"num_kv_heads": 2}, ValueError, "num_kv_heads: expected 1, got 2 .*one KV head"),
        (
            {"dtype": torch.float16, "num_kv_heads": 0},
            ValueError,
            "num_kv_heads: .*1 to 128, got 0",
        ),
        ({"dtype": torch.float16, "layout": "paged"}, ValueError, "layout: expected None beside"),
        ({"dtype": torch.float16, "page_size": 96}, ValueError, "page_size: .*got 96 .*is 128"),
        ({"dtype": torch.float16, "page_size": "64"}, TypeError, "page_size: expected an int"),
    ],
)
def test_wrong_allocation(arguments: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        PagedKVCache.allocate(**{"num_pages": 2, "device": "cpu", **arguments})


def test_cache_is_frozen() -> None:
    cache = PagedKVCache.allocate(1, 64, "split", "cpu")
    with pytest.raises(AttributeError):
        cache.scale = torch.zeros(1, 64)  # type: ignore[misc]


@pytest.mark.parametrize("shift", [(64, 0), (0, 64)])
def test_other_shared_memory_is_no_block(shift: tuple[int, int]) -> None:
    """The strides of ``paged``, but RoPE or scale elsewhere in the page."""
    p = 32
    pages = torch.zeros((2, p * 644 + 64), dtype=torch.uint8)
    at = (p * 512 + shift[0], p * 640 + shift[0] + shift[1])
    cache = PagedKVCache.from_tensors(
        pages[:, : p * 512].unflatten(1, (p, 512)),
        pages[:, at[0] : at[0] + p * 128].view(torch.bfloat16).unflatten(1, (p, 64)),
        pages[:, at[1] : at[1] + p * 4].view(torch.float32),
    )
    assert not cache.traceable
    assert all(a is b for a, b in zip(cache.memory, (cache.content_u8, cache.rope, cache.scale)))


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("layout", [*LAYOUTS, "strided"])
def test_copies(layout: str, again: Callable[[Any], Any]) -> None:
    """Bytes, strides, layout and what shares memory stay; the memory is another."""
    if layout == "strided":  # two layers in one pool
        pool = torch.zeros((4, 2, 32 * 644), dtype=torch.uint8)
        cache = PagedKVCache.from_tensors(*layouts.paged_views(pool[:, 1], 32))
    else:
        cache = PagedKVCache.allocate(4, 32, layout, "cpu")
    cache.content_u8.copy_(torch.randint(0, 255, cache.content.shape, dtype=torch.uint8))
    cache.rope.normal_()
    cache.scale.uniform_()
    assert cache.arguments and cache.place
    twin = again(cache)
    assert type(twin) is PagedKVCache and twin.layout == cache.layout
    for name in ("content", "rope", "scale"):
        a, b = getattr(cache, name), getattr(twin, name)
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert same_bits(a, b)
    assert [t is None for t in twin.memory] == [t is None for t in cache.memory]
    assert twin.traceable and twin.place != cache.place
    twin.content_u8.zero_()
    assert not twin.content.view(torch.uint8).any() and cache.content_u8.any()
    assert same_bits(twin.rope, cache.rope), "views of a copy overlap"


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("heads", [1, 2])
def test_copies_of_rows(heads: int, again: Callable[[Any], Any]) -> None:
    """Two layers in one pool: the copy has the memory of both."""
    pool = torch.randn(4, 2, 32, heads, 576).half()
    cache = PagedKVCache.from_tensors(pool[:, 1])
    twin = again(cache)
    assert type(twin) is PagedKVCache and twin.kv is not None and cache.kv is not None
    assert twin.kv.stride() == cache.kv.stride() and twin.num_kv_heads == heads
    assert torch.equal(twin.kv, cache.kv) and twin.place != cache.place
    assert twin.content.data_ptr() == twin.kv.data_ptr() and twin.memory[0] is twin.kv
    assert "float16(4, 32" in repr(twin)


@pytest.mark.parametrize("layout", [*LAYOUTS, "rows"])
def test_memory_is_saved_once(layout: str) -> None:
    if layout == "rows":
        cache, size_of = PagedKVCache.allocate(8, device="cpu", dtype=torch.bfloat16), 1152
    else:
        cache, size_of = PagedKVCache.allocate(8, 64, layout, "cpu"), 644
    for size in (len(pickle.dumps(cache)), _size_saved(cache)):
        assert cache.num_slots * size_of <= size < cache.num_slots * size_of * 1.1


def _size_saved(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def test_a_shallow_copy_is_over_the_same_memory() -> None:
    cache = PagedKVCache.allocate(2, 32, "paged", "cpu")
    twin = copy.copy(cache)
    assert twin.place == cache.place and twin.memory[0].data_ptr() == cache.memory[0].data_ptr()


def test_a_place_is_of_one_shape() -> None:
    """Calls are remembered by it: the same memory in other pages, of other heads, or of another
    dtype, is another."""
    rows = torch.zeros((2, 64, 2, 576), dtype=torch.bfloat16)
    shapes = (2, 64, 2, 576), (2, 128, 1, 576), (4, 32, 2, 576), (1, 128, 2, 576), (4, 64, 1, 576)
    places = [PagedKVCache.from_tensors(rows.view(shape)).place for shape in shapes]
    places.append(PagedKVCache.from_tensors(rows.view(torch.float16)).place)
    assert len(set(places)) == len(shapes) + 1
    assert PagedKVCache.from_tensors(rows).place == places[0]


@pytest.mark.parametrize("dtype", ["fp8", torch.float16])
def test_where_a_cache_begins(dtype: str | torch.dtype) -> None:
    """What the caller holds is asked; of 16 bits slices of what kernels take."""
    for part in ("content", "rope", "scale", "kv"):
        cache = PagedKVCache.allocate(2, 64, device="cpu", dtype=dtype)
        held = getattr(cache, part)
        if held is None:
            continue
        moved = held.data.clone()
        assert (moved.data_ptr() != held.data_ptr()) and cache.stays
        there, held.data = held.data, moved
        assert not cache.stays, part
        held.data = there
        assert cache.stays, part
        held.untyped_storage().resize_(0)
        assert not cache.stays, part

"""PagedKVCache: layouts are byte-exact views, wrong memory is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsl_kernels.families.fp8_decode import PAGE_SIZES
from snapmla import PagedKVCache, QuantizedQuery, layouts, selfcheck

LAYOUTS = ("split", "paged", "row640")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_allocate(layout: str, page_size: int) -> None:
    cache = PagedKVCache.allocate(3, page_size, layout, "cpu")
    assert cache.layout == layout
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


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_paged_is_page_planar(page_size: int) -> None:
    block = torch.zeros((2, page_size * 644), dtype=torch.uint8)
    content, rope, scale = layouts.paged_views(block, page_size)
    content.view(torch.uint8)[1, 2, 3] = 9
    rope[1, 2, 3] = 1.0  # 0x3f80
    scale[1, 2] = 1.0  # 0x3f800000
    page = block[1]
    assert page[2 * 512 + 3] == 9
    assert page[512 * page_size + (2 * 64 + 3) * 2 + 1] == 0x3F
    assert page[640 * page_size + 2 * 4 + 3] == 0x3F
    assert int((block != 0).sum()) == 1 + 2 + 2


def test_row640_rows() -> None:
    rows = torch.zeros((2, 16, 640), dtype=torch.uint8)
    content, rope, _ = layouts.rows640_views(rows, torch.zeros(2, 16))
    content.view(torch.uint8)[1, 4, 511] = 9
    rope[1, 4, 0] = 1.0
    assert rows[1, 4, 511] == 9 and rows[1, 4, 513] == 0x3F


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
    ],
)
def test_wrong_allocation(arguments: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        PagedKVCache.allocate(**{"num_pages": 2, "device": "cpu", **arguments})


def test_cache_is_frozen() -> None:
    cache = PagedKVCache.allocate(1, 64, "split", "cpu")
    with pytest.raises(AttributeError):
        cache.scale = torch.zeros(1, 64)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("block", "page_size", "words"),
    [
        (torch.zeros((4, 32 * 644 + 64), dtype=torch.uint8), 32, r"block: .*\(num_pages, 20608\)"),
        (torch.zeros((4, 32 * 644), dtype=torch.uint8), 64, r"block: .*\(num_pages, 41216\)"),
        (torch.zeros((4, 64 * 644), dtype=torch.uint8)[:, ::2], 32, "block: .*innermost stride 1"),
        (torch.zeros((4, 32 * 161)), 32, r"block: expected dtype uint8, .*\.view\(torch\.uint8\)"),
        (torch.zeros((4, 48 * 644), dtype=torch.uint8), 48, "page_size: expected one of"),
    ],
)
def test_blocks_that_are_not_pages(block: torch.Tensor, page_size: int, words: str) -> None:
    """A wider block would be cut into pages that are not its rows."""
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        layouts.paged_views(block, page_size)


@pytest.mark.parametrize(
    ("rows", "scale", "words"),
    [
        (torch.zeros((4, 32, 644), dtype=torch.uint8), torch.zeros(4, 32), "rows: expected shape"),
        (torch.zeros((4, 32, 320), dtype=torch.bfloat16), torch.zeros(4, 32), "rows: .*uint8"),
        (
            torch.zeros((4, 32, 648), dtype=torch.uint8)[..., :640],
            torch.zeros(4, 32),
            "rows: .*multiples of 16",
        ),
        (torch.zeros((4, 32, 640), dtype=torch.uint8), torch.zeros(4, 64), "scale: expected shape"),
    ],
)
def test_rows_of_another_kind(rows: torch.Tensor, scale: torch.Tensor, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        layouts.rows640_views(rows, scale)


def test_pages_and_rows_that_lie_apart() -> None:
    """Layers side by side in one pool, page by page."""
    pool = torch.zeros((4, 3, 32 * 644), dtype=torch.uint8)
    cache = PagedKVCache.from_tensors(*layouts.paged_views(pool[:, 1], 32))
    cache.content_u8.fill_(7)
    cache.rope.fill_(3.0)
    cache.scale.fill_(0.5)
    own = layouts.paged_views(pool[:, 1].contiguous(), 32)
    assert (own[0].view(torch.uint8) == 7).all() and (own[1] == 3).all() and (own[2] == 0.5).all()
    assert not pool[:, ::2].any()
    rows = torch.zeros((4, 3, 32, 640), dtype=torch.uint8)
    cache = PagedKVCache.from_tensors(*layouts.rows640_views(rows[:, 1], torch.zeros(4, 32)))
    cache.content_u8.fill_(7)
    cache.rope.fill_(3.0)
    assert (rows[:, 1, :, :512] == 7).all()
    assert (rows[:, 1].view(torch.bfloat16)[..., 256:] == 3).all()
    assert not rows[:, ::2].any()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("layout", "tensors"), [("split", 3), ("paged", 1), ("row640", 2)])
def test_memory_behind_the_views(layout: str, tensors: int, page_size: int) -> None:
    """Operators get memory that no two of their arguments share, and take it apart again."""
    cache = PagedKVCache.allocate(3, page_size, layout, "cpu")
    places = {t.untyped_storage().data_ptr() for t in cache.memory if t is not None}
    assert len(places) == tensors == sum(t is not None for t in cache.memory)
    assert cache.traceable
    again = layouts.views_of(*cache.memory)
    for view, want in zip(again, (cache.content_u8, cache.rope, cache.scale), strict=True):
        assert (view.data_ptr(), view.shape, view.stride()) == (
            want.data_ptr(), want.shape, want.stride(),
        )  # fmt: skip


def test_memory_of_layers_in_one_pool() -> None:
    """Pages of several layers side by side: the block of a page is followed, its neighbours not."""
    pool = torch.zeros((4, 3, 32 * 644), dtype=torch.uint8)
    cache = PagedKVCache.from_tensors(*layouts.views_of(pool[:, 2], None, None))
    block, rope, scale = cache.memory
    assert cache.layout == "strided" and rope is scale is None
    assert block.data_ptr() == pool[:, 2].data_ptr() and block.stride() == pool[:, 2].stride()
    block.fill_(1)
    assert pool[:, 2].all() and not pool[:, :2].any()


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


def test_pages_that_reach_into_one_another_are_no_block() -> None:
    """The strides of ``paged``, but a page's scales are the next one's content."""
    p, memory = 32, torch.zeros(3 * 32 * 644, dtype=torch.uint8)
    for page, found in ((p * 644, True), (p * 640, False)):
        views = (
            memory.as_strided((2, p, 512), (page, 512, 1)),
            memory.view(torch.bfloat16).as_strided((2, p, 64), (page // 2, 64, 1), p * 256),
            memory.view(torch.float32).as_strided((2, p), (page // 4, 1), p * 160),
        )
        assert (layouts.memory_of(*views) is not None) == found


def test_rows_that_reach_into_one_another_are_no_rows() -> None:
    """The places of ``row640``, but a row's RoPE is the next one's content."""
    p, memory = 32, torch.zeros(3 * 32 * 640, dtype=torch.uint8)
    for row, found in ((640, True), (576, False)):
        views = (
            memory.as_strided((2, p, 512), (p * row, row, 1)),
            memory.view(torch.bfloat16).as_strided((2, p, 64), (p * row // 2, row // 2, 1), 256),
            torch.zeros(2, p),
        )
        assert (layouts.memory_of(*views) is not None) == found


@pytest.mark.parametrize("shape", [(4, 100), (4, 32, 512), (4, 32, 640, 1)])
def test_memory_of_no_layout(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="^content: expected content beside rope and scale"):
        layouts.views_of(torch.zeros(shape, dtype=torch.uint8), None, None)


def saved(value: Any) -> Any:
    """Through ``torch.save`` and back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: list[Callable[[Any], Any]] = [
    saved, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))
]  # fmt: skip


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("again", COPIES, ids=["save", "deepcopy", "pickle"])
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
        assert same_bytes(a, b)
    assert [t is None for t in twin.memory] == [t is None for t in cache.memory]
    assert twin.traceable and twin.place != cache.place
    twin.content_u8.zero_()
    assert not twin.content.view(torch.uint8).any() and cache.content_u8.any()
    assert same_bytes(twin.rope, cache.rope), "views of a copy overlap"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_saved_once(layout: str) -> None:
    cache = PagedKVCache.allocate(8, 64, layout, "cpu")
    for size in (len(pickle.dumps(cache)), _size_saved(cache)):
        assert cache.num_slots * 644 <= size < cache.num_slots * 644 * 1.1


def _size_saved(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def test_a_shallow_copy_is_over_the_same_memory() -> None:
    cache = PagedKVCache.allocate(2, 32, "paged", "cpu")
    twin = copy.copy(cache)
    assert twin.place == cache.place and twin.memory[0].data_ptr() == cache.memory[0].data_ptr()


@pytest.mark.parametrize("again", COPIES, ids=["save", "deepcopy", "pickle"])
@pytest.mark.parametrize("scale_dims", [2, 3])
def test_copies_of_a_query(again: Callable[[Any], Any], scale_dims: int) -> None:
    q = selfcheck.sample_query(2, 1, 4)
    if scale_dims == 2:
        q = QuantizedQuery(q.nope, q.rope, q.scale[..., 0].contiguous())
    twin = again(q)
    assert type(twin) is QuantizedQuery and twin.granularity == q.granularity
    for name in ("nope", "rope", "scale", "nope_u8", "row_scale"):
        a, b = getattr(q, name), getattr(twin, name)
        assert (a.dtype, a.stride()) == (b.dtype, b.stride()) and same_bytes(a, b)
        assert a.data_ptr() != b.data_ptr()
    assert twin.nope_u8.data_ptr() == twin.nope.data_ptr()

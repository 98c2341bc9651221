"""Layouts: byte-exact views of memory, and the memory behind views."""

from __future__ import annotations

import pytest
import torch

from dsl_kernels.families.fp8_decode import PAGE_SIZES
from snapmla import PagedKVCache
from snapmla.cache import layouts


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
    assert cache.layout == layout, "known by its strides"
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


def test_the_stride_of_a_single_head() -> None:
    """Aligned ones stay, tensor and all; others become a row's."""
    rows = torch.zeros((4, 64, 1, 576), dtype=torch.bfloat16)
    assert layouts.with_heads(rows) is rows
    for stride in (7, 0):
        odd = rows.as_strided(rows.shape, (64 * 576, 576, stride, 1))
        assert layouts.with_heads(odd).stride() == (64 * 576, 576, 576, 1)
    assert layouts.with_heads(rows[:, :, 0]).shape == rows.shape


@pytest.mark.parametrize(("tokens", "size"), [(16, 16), (128, 128), (192, 64), (256, 64)])
def test_large_pages_are_several(tokens: int, size: int) -> None:
    """The same slots, in pages that kernels know."""
    kv = torch.arange(3 * tokens * 2 * 8, dtype=torch.float32).view(3, tokens, 2, 8)
    small = layouts.small_pages(kv)
    assert layouts.kernel_page_size(tokens) == size
    assert small.shape == (3 * tokens // size, size, 2, 8) and small.data_ptr() == kv.data_ptr()
    assert torch.equal(small.flatten(0, 1), kv.flatten(0, 1))


def test_large_pages_have_no_gaps_between_them() -> None:
    pool = torch.zeros(3, 2, 192, 1, 576)
    assert layouts.small_pages(pool[:1, 0]).shape == (3, 64, 1, 576)
    with pytest.raises(ValueError, match="^cache: expected pages without gaps between them, got"):
        layouts.small_pages(pool[:, 0])

"""Cache layouts as data: where content, RoPE and scale of a token lie.

One compiled kernel serves all of them, because it only sees three strided tensors

    content u8   (pages, P, 512)     e4m3 bytes of c_kv / scale
    rope    bf16 (pages, P, 64)      k_rope / scale
    scale   f32  (pages, P)          max|c_kv| / top, by offset

    split    three tensors
    paged    one byte block per page, page-planar: content [0, 512 P), rope [512 P, 640 P),
             scale [640 P, 644 P)
    row640   rows of 512 content + 128 RoPE bytes; scale is a tensor of its own

A cache of 16 bits is one tensor, rows bf16|f16 (pages, P, h_kv, 576).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsl_kernels.families.fp8_decode import PAGE_SIZES
from dsl_kernels.formats import fp8
from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.format import ELEMENT_BYTES
from dsl_kernels.formats.fp8 import FORMAT
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.call import tracing

FP8 = torch.float8_e4m3fn
ROPE_BYTES = 2 * QK_ROPE_HEAD_DIM
ROW_BYTES = KV_LORA_RANK + ROPE_BYTES  # 640
TOKEN_BYTES = FORMAT.token_bytes  # with the scale
FIELDS = {"content": fp8.CONTENT, "rope": fp8.ROPE, "scale": fp8.SCALE}

Views = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Strides = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Memory = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Layout:
    """A way to place one cache in memory.

    Attributes:
        name: as users say it.
        strides: page size -> element strides of (content, rope, scale).
        allocate: (pages, page size, device) -> the three views of fresh, uninitialised memory.
    """

    name: str
    strides: Callable[[int], Strides]
    allocate: Callable[[int, int, torch.device], Views]


def _strides(name: str, p: int) -> Strides:
    """Element strides of content, RoPE, scale where pages lie side by side: a tensor's planes make
    up its pages, fields of a plane a token's row."""
    found = {}
    for tensor in FORMAT.layouts[name]:
        rows = [sum(FIELDS[field].nbytes for field in plane) for plane in tensor]
        for plane, row in zip(tensor, rows, strict=True):
            for field in plane:
                size = ELEMENT_BYTES[FIELDS[field].dtype]
                found[field] = (p * sum(rows) // size, row // size, 1)
    return found["content"], found["rope"], found["scale"][:2]


def _split(pages: int, p: int, device: torch.device) -> Views:
    return (
        torch.empty((pages, p, KV_LORA_RANK), dtype=torch.uint8, device=device).view(FP8),
        torch.empty((pages, p, QK_ROPE_HEAD_DIM), dtype=torch.bfloat16, device=device),
        torch.empty((pages, p), dtype=torch.float32, device=device),
    )


def _paged(pages: int, p: int, device: torch.device) -> Views:
    return paged_views(torch.empty((pages, p * TOKEN_BYTES), dtype=torch.uint8, device=device), p)


def paged_views(block: torch.Tensor, page_size: int) -> Views:
    """The three views of page-planar memory, for ``PagedKVCache.from_tensors``.

    Args:
        block: uint8 (pages, page_size * 644); pages may lie apart, a multiple of 16 bytes.
        page_size: tokens in a page: 16, 32, 64 or 128.

    Returns:
        (content float8_e4m3fn (pages, P, 512), rope bfloat16 (pages, P, 64), scale float32
        (pages, P)) of ``block``'s memory.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: our own (docs/formats.md, ``paged``).
    """
    p = checks.page_size(page_size)
    checks.tensor("block", block, (torch.uint8,), ("num_pages", p * TOKEN_BYTES))
    checks.aligned_rows("block", block)
    content, rope, scale = views_of(block, None, None)
    return content.view(FP8), rope, scale


def _row640(pages: int, p: int, device: torch.device) -> Views:
    rows = torch.empty((pages, p, ROW_BYTES), dtype=torch.uint8, device=device)
    scale = torch.empty((pages, p), dtype=torch.float32, device=device)
    return rows640_views(rows, scale)


def rows640_views(rows: torch.Tensor, scale: torch.Tensor) -> Views:
    """The three views of 640-byte rows and their scales, for ``PagedKVCache.from_tensors``.

    Args:
        rows: uint8 (pages, P, 640): 512 content bytes, then 64 bf16 RoPE channels; rows may lie
            apart, a multiple of 16 bytes.
        scale: float32 (pages, P).

    Returns:
        (content float8_e4m3fn (pages, P, 512), rope bfloat16 (pages, P, 64), scale).

    Raises:
        TypeError, ValueError: naming the argument.

    Source: Modular's SM100 kernel reads such rows.
    """
    checks.tensor("rows", rows, (torch.uint8,), ("num_pages", "page_size", ROW_BYTES))
    checks.aligned_rows("rows", rows)
    checks.tensor("scale", scale, (torch.float32,), tuple(rows.shape[:2]), rows.device)
    content, rope, scale = views_of(rows, None, scale)
    return content.view(FP8), rope, scale


def memory_of(content: torch.Tensor, rope: torch.Tensor, scale: torch.Tensor) -> Memory | None:
    """The memory behind three views, as tensors that share none among them.

    Tracers cannot follow writes to one memory through views of several dtypes, so operators are
    given the memory itself; ``views_of`` takes it apart again.

    Args:
        content: uint8 (pages, P, 512); rope: bfloat16 (pages, P, 64); scale: float32 (pages, P).

    Returns:
        The three views if they lie apart; (block uint8 (pages, 644 P), None, None) if every page is
        one page-planar block; (rows uint8 (pages, P, 640), None, scale) if RoPE follows content in
        rows of 640 bytes; None for anything else.
    """
    places = [tracing.storage_of(t) for t in (content, rope, scale)]
    if None in places:
        return None
    if len(set(places)) == 3:
        return content, rope, scale
    pages, p, _ = content.shape
    page, token, _ = content.stride()
    start = content.storage_offset()
    rope_at, scale_at = (t.storage_offset() * t.element_size() - start for t in (rope, scale))
    rope_strides = [2 * n for n in rope.stride()[:2]]
    planar = (
        (token, *rope_strides, 4 * scale.stride(0)) == (KV_LORA_RANK, page, ROPE_BYTES, page)
        and (rope_at, scale_at) == (p * KV_LORA_RANK, p * ROW_BYTES)
        and page >= p * TOKEN_BYTES
    )
    if planar and len(set(places)) == 1:
        return content.as_strided((pages, p * TOKEN_BYTES), (page, 1)), None, None
    in_rows = rope_at == KV_LORA_RANK and rope_strides == [page, token] and token >= ROW_BYTES
    if in_rows and places[0] == places[1] != places[2]:
        return content.as_strided((pages, p, ROW_BYTES), (page, token, 1)), None, scale
    return None


def views_of(memory: torch.Tensor, rope: torch.Tensor | None, scale: torch.Tensor | None) -> Views:
    """Views (content, rope, scale) of memory that ``memory_of`` returned.

    Raises:
        ValueError: ``memory`` has another shape.
    """
    if rope is not None and scale is not None:
        return memory, rope, scale
    if rope is None and scale is None and memory.ndim == 2 and memory.shape[1] % TOKEN_BYTES == 0:
        p = memory.shape[1] // TOKEN_BYTES
        content, rope, scale = memory.split((p * KV_LORA_RANK, p * ROPE_BYTES, 4 * p), 1)
        return (
            content.unflatten(1, (p, KV_LORA_RANK)),
            rope.view(torch.bfloat16).unflatten(1, (p, QK_ROPE_HEAD_DIM)),
            scale.view(torch.float32),
        )
    if rope is None and scale is not None and memory.ndim == 3 and memory.shape[2] == ROW_BYTES:
        content, rope = memory.split((KV_LORA_RANK, ROPE_BYTES), 2)
        return content, rope.view(torch.bfloat16), scale
    checks.value_error(
        "content", "content beside rope and scale, pages (n, 644 P), or rows (n, P, 640) and scale",
        tuple(memory.shape),
    )  # fmt: skip


def kernel_page_size(page_size: int) -> int:
    """Tokens of a page as kernels see it: larger ones are several of 64."""
    return page_size if page_size in PAGE_SIZES else checks.ROWS_TILE


def page_size_seen(fmt: str, page_size: int) -> int:
    """Tokens of a page of a cache of a format as kernels see it."""
    return page_size if FORMATS[fmt].any_page else kernel_page_size(page_size)


def small_pages(kv: torch.Tensor) -> torch.Tensor:
    """16-bit rows in pages as kernels see them.  ValueError where larger ones have gaps."""
    pages, tokens, heads, width = kv.shape
    size = kernel_page_size(tokens)
    if size == tokens:
        return kv
    if pages > 1 and kv.stride(0) != tokens * kv.stride(1):
        hint = "pages of more than 128 tokens are read as several"
        checks.value_error("cache", "pages without gaps between them", kv.stride(), hint)
    return kv.view(pages * (tokens // size), size, heads, width)


def with_heads(rows: torch.Tensor) -> torch.Tensor:
    """16-bit rows with their dimension of heads; the same tensor where nothing need be changed.

    Whoever made a single head may have given it any stride: one that is not aligned becomes a
    row's.
    """
    if rows.ndim == 4 and rows.shape[2] == 1 and (rows.stride(2) < 1 or rows.stride(2) % 8):
        rows = rows[:, :, 0]
    return rows.unsqueeze(2) if rows.ndim == 3 else rows


def joined(content: torch.Tensor) -> torch.Tensor:
    """Whole 16-bit rows from their first 512 channels."""
    return content.as_strided((*content.shape[:-1], HEAD_DIM_QK), content.stride())


LAYOUTS: dict[str, Layout] = {
    name: Layout(name, functools.partial(_strides, name), allocate)
    for name, allocate in (("split", _split), ("paged", _paged), ("row640", _row640))
}


def name_of(content: torch.Tensor, rope: torch.Tensor, scale: torch.Tensor) -> str:
    """Name of the layout these views have, ``strided`` if it is none of the named ones."""
    actual = (content.stride(), rope.stride(), scale.stride())
    for layout in LAYOUTS.values():
        if layout.strides(content.shape[1]) == actual:
            return layout.name
    return "strided"

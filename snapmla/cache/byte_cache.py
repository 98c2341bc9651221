"""Memory of a cache that is bytes: checks, and the fields in it, as the format's record says
(``dsl_kernels.formats``).

One tensor of bytes, which FlashMLA and vLLM shape (pages, P, 1, bytes of a token), vLLM also
(pages, P, bytes of a token).  Where a page has several planes, as of DeepSeek V4, that is its shape
in name only: a page's bytes are its planes one behind another, and its tokens are not rows.
"""

from __future__ import annotations

from typing import Any

import torch

from dsl_kernels.formats.format import Field, Format
from snapmla import checks

BYTES = (torch.uint8, torch.int8, checks.FP8)  # dtypes that engines give the memory
SCALE_FORMATS = (None, "ue8m0")  # of appended tokens; the second is DeepSeek's name for 2^n
DTYPES = {
    "e4m3": checks.FP8, "ue8m0": torch.float8_e8m0fnu, "bf16": torch.bfloat16,
    "f16": torch.float16, "f32": torch.float32,
}  # fmt: skip
Fields = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def check(record: Format, value: Any) -> None:
    """Checks bytes of a pool, (pages, P, bytes of a token) or (pages, P, 1, bytes of a token)."""
    row = record.token_bytes
    head = (1,) if isinstance(value, torch.Tensor) and value.ndim == 4 else ()
    checks.tensor("content", value, BYTES, ("num_pages", "page_size", *head, row))
    pages, tokens = value.shape[:2]
    if pages < 1:
        checks.value_error("content", "1 page or more", pages, "allocate at least one page")
    checks.page_size_of(record.name, tokens)
    flat = value.view(torch.uint8).squeeze(2) if head else value.view(torch.uint8)
    if flat.stride(2) != 1:
        hint = checks.TRANSPOSED
        checks.value_error("content", "innermost stride 1", f"strides {value.stride()}", hint)
    if tokens > 1 and flat.stride(1) != row:
        hint = "rows of a page lie side by side; pages may lie apart"
        checks.value_error("content", f"rows {row} bytes apart", f"strides {value.stride()}", hint)
    _check_alignment(record, flat)
    if pages > 1 and flat.stride(0) < tokens * row:
        hint = "expanded views share memory between pages: allocate them"
        checks.value_error(
            "content", "strides of distinct tokens", f"strides {value.stride()}", hint
        )


def _check_alignment(record: Format, flat: torch.Tensor) -> None:
    """Checks that fields lie at multiples of 16 bytes: those of rows of whole tokens, or, where a
    page has several planes, those of pages."""
    if len(record.planes) == 1:
        checks.aligned_rows("content", flat)
        return
    pages, tokens, row = flat.shape
    page = flat.stride(0) if pages > 1 else 0
    checks.aligned_rows("content", flat.as_strided((pages, tokens * row), (page, 1)))


def rows_of(record: Format, value: torch.Tensor) -> torch.Tensor:
    """Checked bytes as kernels take them, uint8 (pages, P, 1, bytes of a token): the same tensor
    where it is so.

    Strides over extents of 1 may be anything; here they are those of rows side by side.
    """
    kv = value if value.dtype is torch.uint8 else value.view(torch.uint8)
    pages, tokens = kv.shape[:2]
    shape, stride = _whole(record, pages, tokens, kv.stride(0))
    if kv.ndim == 3 and (kv.stride(0), kv.stride(1)) == stride[:2]:
        return kv.unsqueeze(2)
    return kv if kv.shape == shape and kv.stride() == stride else kv.as_strided(shape, stride)


def _whole(record: Format, pages: int, tokens: int, page: int) -> Any:
    """(shape, strides) of ``rows_of``'s tensor, whose pages lie ``page`` bytes apart."""
    row = record.token_bytes
    if pages == 1:  # pages of planes end where a multiple of 16 bytes does
        page = tokens * row if len(record.planes) == 1 else -(-tokens * row // 16) * 16
    return (pages, tokens, 1, row), (page, row, row, 1)


def fields_of(record: Format, kv: torch.Tensor) -> Fields:
    """Content, RoPE and scales of ``rows_of``'s tensor, as views; RoPE of no channels, bfloat16, of
    a record without."""
    rope = record.rope or Field("bf16", 0, plane=record.content.plane)
    assert record.scale is not None
    content, rope_view, scale = (
        field_of(record, kv, f) for f in (record.content, rope, record.scale)
    )
    return content, rope_view, scale


def field_of(record: Format, kv: torch.Tensor, field: Field) -> torch.Tensor:
    """A field of every token of ``rows_of``'s tensor, (pages, P, elements)."""
    own = slice(field.at, field.at + field.nbytes)
    if len(record.planes) == 1:
        return kv[:, :, 0, own].view(DTYPES[field.dtype])
    pages, tokens = kv.shape[:2]
    pages_of_bytes = kv.as_strided((pages, tokens * record.token_bytes), (kv.stride(0), 1))
    first, width = tokens * record.begins(field.plane), record.planes[field.plane]
    plane = pages_of_bytes[:, first : first + tokens * width].unflatten(1, (tokens, width))
    return plane[..., own].view(DTYPES[field.dtype])


def joined(record: Format, content: torch.Tensor) -> torch.Tensor:
    """Whole rows from their content, as ``rows_of`` has them."""
    pages, tokens, _ = content.shape
    return _from_first(record, content, *_whole(record, pages, tokens, content.stride(0)))


def _from_first(record: Format, content: torch.Tensor, shape: Any, strides: Any) -> torch.Tensor:
    """Bytes of ``content``'s memory, from the first one of its first token on.

    Raises RuntimeError where the storage begins behind it or ends before.
    """
    own, ahead = content.view(torch.uint8), record.content.at
    if not ahead:
        return own.as_strided(shape, strides)
    return own.as_strided(shape, strides, own.storage_offset() - ahead)


def allocated(record: Format, pages: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Fresh memory, whose pages are multiples of what engines have."""
    size = tokens * record.token_bytes
    page = -(-size // record.page_multiple) * record.page_multiple
    memory = torch.empty((pages, page), dtype=torch.uint8, device=device)
    return memory[:, :size].unflatten(1, (tokens, 1, record.token_bytes))


def check_fields(record: Format, content: Any, rope: Any, scale: Any) -> None:
    """Checks that three views are the fields of one pool's bytes."""
    width = record.content.count
    checks.tensor("content", content, (checks.FP8,), ("num_pages", "page_size", width))
    whole = f"PagedKVCache.from_tensors(rows, format={record.name!r}) takes "
    whole += f"rows of {record.token_bytes} bytes whole"
    shape = (*content.shape[:2], record.token_bytes)
    token = record.token_bytes
    if len(record.planes) == 1:
        token = content.stride(1)
    strides = (content.stride(0), token, content.stride(2))
    try:
        check(record, _from_first(record, content, shape, strides))
        _, *own = fields_of(record, joined(record, content))
    except RuntimeError:  # its storage ends before
        wanted = f"bytes of rows of {record.token_bytes}"
        checks.value_error("content", wanted, f"strides {strides}", whole)
    declared = record.rope, record.scale
    for name, view, want, field in zip(("rope", "scale"), (rope, scale), own, declared):
        checks.tensor(name, view, (want.dtype,), tuple(want.shape), content.device)
        steps = zip(view.stride(), want.stride(), view.shape)
        together = not want.numel() or checks.address_of(view) == checks.address_of(want)
        if not together or (want.numel() and any(a != b for a, b, n in steps if n > 1)):
            assert field is not None
            wanted = f"the bytes from {field.at} on of content's rows"
            if field.plane:
                wanted = f"the bytes from {record.begins(field.plane)} P on of content's pages"
            checks.value_error(name, wanted, "others", whole)


def check_scale_format(value: Any, record: Format) -> None:
    """Checks how scales of appended tokens are rounded."""
    checks.choice("scale_fmt", value, SCALE_FORMATS)
    if value is not None and not record.named:
        hint = "scales of the other formats are no powers of two"
        checks.value_error("scale_fmt", f"None beside format {record.name!r}", repr(value), hint)


def scale_format(value: str | None, record: Format) -> str | None:
    """Scale format in effect: ``ue8m0`` if the cache's format has no other, else ``value``."""
    return "ue8m0" if record.powers else value

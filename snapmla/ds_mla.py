"""Memory of a cache of format ``fp8_ds_mla``: rows of 656 bytes, and the fields in them.

    content  e4m3 (pages, P, 512)    bytes [0, 512) of a row
    scale    f32  (pages, P, 4)      bytes [512, 528): c_kv of channels [128 g, 128 g + 128) is
                                     content * scale[g]
    rope     bf16 (pages, P, 64)     bytes [528, 656): k_rope

One tensor of bytes, which FlashMLA and vLLM shape (pages, P, 1, 656), vLLM also (pages, P, 656).
"""

from __future__ import annotations

from typing import Any

import torch

from dsl_kernels.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.cache_records.ds_mla import GROUPS, ROPE_AT, ROW_BYTES, SCALES_AT
from snapmla import checks

FORMAT = "fp8_ds_mla"
BYTES = (torch.uint8, torch.int8, checks.FP8)  # dtypes that engines give the memory
SCALE_FORMATS = (None, "ue8m0")  # of appended tokens; the second is DeepSeek's name for 2^n
_FIELDS = {  # name: dtype, elements, first byte
    "content": (checks.FP8, KV_LORA_RANK, 0),
    "rope": (torch.bfloat16, QK_ROPE_HEAD_DIM, ROPE_AT),
    "scale": (torch.float32, GROUPS, SCALES_AT),
}
_WHOLE = "PagedKVCache.from_tensors(rows, format='fp8_ds_mla') takes rows of 656 bytes whole"


def check(value: Any) -> None:
    """Checks bytes of a pool, (pages, P, 656) or (pages, P, 1, 656)."""
    head = (1,) if isinstance(value, torch.Tensor) and value.ndim == 4 else ()
    checks.tensor("content", value, BYTES, ("num_pages", "page_size", *head, ROW_BYTES))
    pages, tokens = value.shape[:2]
    if pages < 1:
        checks.value_error("content", "1 page or more", pages, "allocate at least one page")
    checks.page_size_of(FORMAT, tokens)
    flat = value.view(torch.uint8).squeeze(2) if head else value.view(torch.uint8)
    if flat.stride(2) != 1:
        hint = checks.TRANSPOSED
        checks.value_error("content", "innermost stride 1", f"strides {value.stride()}", hint)
    if tokens > 1 and flat.stride(1) != ROW_BYTES:
        hint = "rows of a page lie side by side; pages may lie apart"
        wanted = f"rows {ROW_BYTES} bytes apart"
        checks.value_error("content", wanted, f"strides {value.stride()}", hint)
    checks.aligned_rows("content", flat)
    if pages > 1 and flat.stride(0) < tokens * ROW_BYTES:
        hint = "expanded views share memory between pages: allocate them"
        checks.value_error(
            "content", "strides of distinct tokens", f"strides {value.stride()}", hint
        )


def rows_of(value: torch.Tensor) -> torch.Tensor:
    """Checked bytes as kernels take them, uint8 (pages, P, 1, 656): the same tensor where it is so.

    Strides over extents of 1 may be anything; here they are those of rows side by side.
    """
    kv = value if value.dtype is torch.uint8 else value.view(torch.uint8)
    pages, tokens = kv.shape[:2]
    page = kv.stride(0) if pages > 1 else tokens * ROW_BYTES
    shape, stride = (pages, tokens, 1, ROW_BYTES), (page, ROW_BYTES, ROW_BYTES, 1)
    if kv.ndim == 3 and (kv.stride(0), kv.stride(1)) == stride[:2]:
        return kv.unsqueeze(2)
    return kv if kv.shape == shape and kv.stride() == stride else kv.as_strided(shape, stride)


def fields_of(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Content, RoPE and scales of ``rows_of``'s tensor, as views."""
    content, rope, scale = (
        kv[:, :, 0, first : first + width * dtype.itemsize].view(dtype)
        for dtype, width, first in _FIELDS.values()
    )
    return content, rope, scale


def joined(content: torch.Tensor) -> torch.Tensor:
    """Whole rows from their first 512 bytes, as ``rows_of`` has them."""
    pages, tokens, _ = content.shape
    page = content.stride(0) if pages > 1 else tokens * ROW_BYTES
    shape, stride = (pages, tokens, 1, ROW_BYTES), (page, ROW_BYTES, ROW_BYTES, 1)
    return content.view(torch.uint8).as_strided(shape, stride)


def check_fields(content: Any, rope: Any, scale: Any) -> None:
    """Checks that three views are the fields of one pool's rows."""
    checks.tensor("content", content, (checks.FP8,), ("num_pages", "page_size", KV_LORA_RANK))
    shape, strides = (*content.shape[:2], ROW_BYTES), (*content.stride()[:2], content.stride(2))
    try:
        check(content.view(torch.uint8).as_strided(shape, strides))
        _, *own = fields_of(joined(content))
    except RuntimeError:  # its storage ends before
        checks.value_error("content", f"bytes of rows of {ROW_BYTES}", f"strides {strides}", _WHOLE)
    for name, view, want in zip(("rope", "scale"), (rope, scale), own, strict=True):
        checks.tensor(name, view, (want.dtype,), tuple(want.shape), content.device)
        steps = zip(view.stride(), want.stride(), view.shape)
        together = checks.address_of(view) == checks.address_of(want)
        if not together or any(a != b for a, b, n in steps if n > 1):
            wanted = f"the bytes from {_FIELDS[name][2]} on of content's rows"
            checks.value_error(name, wanted, "others", _WHOLE)


def check_scale_format(value: Any, fmt: str) -> None:
    """Checks how scales of appended tokens are rounded."""
    checks.choice("scale_fmt", value, SCALE_FORMATS)
    if value is not None and fmt != FORMAT:
        hint = "scales of the other formats are no powers of two"
        checks.value_error("scale_fmt", f"None beside format {fmt!r}", repr(value), hint)

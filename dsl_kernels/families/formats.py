"""How a paged cache may store a token: one entry a format, as hosts know it.

Its name is ``PagedKVCache.format``, a plan's ``cache_dtype`` and the value of axis ``cache_dtype``.
Which attention takes a format is its family's to say (``Family.formats``).  What kernels make of
the bytes stands beside them (``common/fp8_per_token.py``, ``common/latent16.py``,
``smxx/stored.py``, ``smxx/ds_mla.py``).  Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from ..ds_mla import ROW_BYTES


@dataclass(frozen=True)
class Format:
    """One way to store the 512 content and 64 RoPE channels of a token, and what follows from it.

    Attributes:
        name: of the format.
        element: torch's name of ``PagedKVCache.dtype``: of ``content``, which tells those formats
            apart that are not ``named``, or uint8.
        token_bytes: of a token and KV head.
        about: a cache of it, in messages.
        parts: tensors that make up a cache, attributes of ``PagedKVCache``.
        arguments: the same as kernels take them.
        rows: whether a token is a row of channels as they are, in a 16-bit dtype.
        quantized_query: whether the query of attention is quantised, too, by ``quantize_q``.
        results: dtypes that attention may write, the usual one first.
        most_kv_heads: of a cache.
        large_pages: whether a page may have any multiple of 64 tokens; kernels see several of 64.
        any_page: whether it may have any number of tokens.
        named: whether a cache is of this format only where its name is given: its memory is bytes,
            as that of others, and never told by its width.
        longest_item: tokens of a sequence that attention sums in one go, about, because results
            show what longer sums lose; 0: any number.
        partial: dtype of partial rows of split sequences.  ``f16``: with an exponent for each 16
            channels, 528 elements a row.
    """

    name: str
    element: str
    token_bytes: int
    about: str
    parts: tuple[str, ...]
    arguments: tuple[str, ...]
    rows: bool
    quantized_query: bool
    results: tuple[str, ...]
    most_kv_heads: int
    large_pages: bool
    any_page: bool = False
    named: bool = False
    longest_item: int = 0
    partial: str = "f16"

    def result(self, wish: str) -> str:
        """The dtype of results where ``wish`` is asked for: that, unless there is but one."""
        return self.results[0] if len(self.results) == 1 else wish


def _rows(name: str, element: str, **more: object) -> Format:
    """Rows of 16 bits as they are."""
    return Format(
        name, element, 2 * HEAD_DIM_QK, "a 16-bit cache", parts=("kv",), arguments=("kv",),
        rows=True, quantized_query=False, results=(name,), most_kv_heads=128, large_pages=True,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


_FORMATS = (
    Format(  # e4m3 content, RoPE in bf16 divided by the token's scale, the scale in fp32
        "fp8", "float8_e4m3fn", KV_LORA_RANK + 2 * QK_ROPE_HEAD_DIM + 4, "an FP8 cache",
        parts=("content", "rope", "scale"), arguments=("content_u8", "rope", "scale"),
        rows=False, quantized_query=True, results=("bf16", "f32"), most_kv_heads=1,
        large_pages=False,
    ),
    _rows("bf16", "bfloat16"),
    # WGMMA cuts every sum toward zero, which 32K tokens of latent mean 2 show as 2e-4 beside an
    # error of 2.4e-4, 16K as 1e-4 (docs/numerics.md); BF16's own rounding hides it.
    _rows("f16", "float16", longest_item=16384, partial="f32"),
    Format(  # DeepSeek-V3.2's rows (dsl_kernels/ds_mla.py), named as vLLM does: sparse_decode's
        "fp8_ds_mla", "uint8", ROW_BYTES, "a cache of format 'fp8_ds_mla'",
        parts=("kv",), arguments=("kv",), rows=False, quantized_query=False, results=("bf16",),
        most_kv_heads=1, large_pages=False, any_page=True, named=True,
    ),
)  # fmt: skip
FORMATS: dict[str, Format] = {each.name: each for each in _FORMATS}
DEFAULT = "fp8"  # what calls mean that name no format

"""How a paged cache may store a token: one entry a format, as hosts know it.

Its name is ``PagedKVCache.format``, a plan's ``cache_dtype`` and the value of axis ``cache_dtype``.
Which ops take a format is their family's to say (``Family.formats``).  What kernels make of the
bytes stands beside them (``common/fp8_per_token.py``, ``common/latent16.py``, ``smxx/stored.py``).
Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM


@dataclass(frozen=True)
class Format:
    """One way to store the 512 content and 64 RoPE channels of a token.

    Attributes:
        name: of the format.
        element: torch's name of the dtype of ``PagedKVCache.content``, which tells the formats that
            there are apart.
        token_bytes: of a token and KV head.
        about: a cache of it, in messages.
        parts: tensors that make up a cache, attributes of ``PagedKVCache``.
    """

    name: str
    element: str
    token_bytes: int
    about: str
    parts: tuple[str, ...]


def _rows(name: str, element: str) -> Format:
    """Rows of 16 bits as they are."""
    return Format(name, element, 2 * HEAD_DIM_QK, "a 16-bit cache", parts=("kv",))


_FORMATS = (
    Format(  # e4m3 content, RoPE in bf16 divided by the token's scale, the scale in fp32
        "fp8", "float8_e4m3fn", KV_LORA_RANK + 2 * QK_ROPE_HEAD_DIM + 4, "an FP8 cache",
        parts=("content", "rope", "scale"),
    ),
    _rows("bf16", "bfloat16"),
    _rows("f16", "float16"),
)  # fmt: skip
FORMATS: dict[str, Format] = {each.name: each for each in _FORMATS}
DEFAULT = "fp8"  # what calls mean that name no format

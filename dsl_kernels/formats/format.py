"""The declaration of a cache format: ``Format`` and its ``Field``s.  Standard library only: hosts
without the compiler read it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# dtype of a field: bytes of an element.  ``ue8m0``: a power of two, byte b is 2^(b - 127), 255 NaN.
ELEMENT_BYTES = {"e4m3": 1, "ue8m0": 1, "bf16": 2, "f16": 2, "f32": 4}
Values = Mapping[str, Any]  # of a variant: axis -> value; what it leaves out is the default
NOTHING, ZEROS, NO_TOKEN = "", "zeros", "no token"  # what a scale of 0 says
# Layout: one tuple a tensor, of planes, of names of fields that lie side by side in a token.
Layout = tuple[tuple[tuple[str, ...], ...], ...]


@dataclass(frozen=True)
class Field:
    """One field of a token.

    Attributes:
        dtype: of ``ELEMENT_BYTES``.
        count: elements.
        at: bytes from the token's first byte in its plane.
        plane: of the page, see ``Format.planes``.
    """

    dtype: str
    count: int
    at: int = 0
    plane: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a token."""
        return self.count * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, eq=False)
class Format:
    """One way to store a token and KV head, and what follows from it.

    A page of P tokens is its planes one behind another: a token of plane k, which has
    ``planes[k]`` bytes, begins at P * sum(planes[:k]) + offset * planes[k].  With one plane tokens
    are rows.

    Bytes:
        name: of the format: ``PagedKVCache.format``, ``cache_dtype`` of plans and of variants.
        module: which declares it, whose source is a source of kernels that read it.
        planes: bytes of a token in each.
        content: channels that scales multiply, all where there are none.
        rope: channels as they are, or divided by the token's scale (``rope_scaled``); None: the
            format has none, or its RoPE channels are the last of ``content``.
        scale: None without; ``scale_bytes`` are those that a token has room for.
        group: channels that share a scale.
        least_scale: what append writes at least.
        zero_scale: meaning of a scale of 0: ``NO_TOKEN``, no token lies there; ``ZEROS``, its
            channels are 0 whatever their bytes are; ``NOTHING``, no scale is 0.
        page_multiple: bytes to whose multiple ``allocate`` rounds a page up.
        layouts: where planes may also be tensors of their own: name -> ``Layout``.

    Attention:
        rope_in_v: whether V has the RoPE channels, too: else V is ``content``.
        sparse: pipeline of sparse decode that reads it, empty if none does.
        elsewhere: what attends to named tokens of it on SM100 today, for messages.
        timed: whether the times on file of its pipelines are its own.
        shipped: whether its kernels of sparse decode are in the default matrix.
        two_lists: whether a query token may have a second list there, over a second cache.
        overlaps: whether P.V of 64 rows runs under the next tile's softmax there: it was faster.
        lists_of_rows: whether sparse prefill's kernel serves sparse decode of it, too.

    Hosts:
        element: torch's name of ``PagedKVCache.dtype``: of ``content``, which tells those formats
            apart that are not ``named``, or uint8.
        about: a cache of it, in messages.
        parts: tensors that make up a cache, attributes of ``PagedKVCache``.
        arguments: the same as kernels take them.
        rows: whether a token is a row of channels as they are, in a 16-bit dtype.
        quantized_query: whether the query of attention is quantised, too, by ``quantize_q``.
        results: dtypes that attention may write, the usual one first.
        most_kv_heads: of a cache.
        large_pages: whether a page may have any multiple of 64 tokens; kernels see several of 64.
        any_page: whether it may have any number of tokens.
        named: whether callers must name the format: its caches are tensors of bytes, as other
            formats' are, and their width does not tell which.
        longest_item: tokens of a sequence that attention sums in one accumulator, about: longer
            sums lose bits that results show; 0: no limit.
        partial: dtype of partial rows of split sequences.  ``f16``: with an exponent for each 16
            channels, 528 elements a row.

    Helpers:
        appends: variants of ``append_kv`` in the default matrix.
        fetches: of ``fetch_dequant``.
    """

    name: str
    module: str
    planes: tuple[int, ...]
    content: Field
    rope: Field | None
    element: str
    about: str
    parts: tuple[str, ...]
    arguments: tuple[str, ...]
    scale: Field | None = None
    scale_bytes: int = 0
    group: int = 0
    least_scale: float = 0.0
    zero_scale: str = NOTHING
    page_multiple: int = 1
    layouts: Mapping[str, Layout] = field(default_factory=lambda: MappingProxyType({}))
    rope_scaled: bool = False
    rope_in_v: bool = False
    sparse: str = ""
    elsewhere: str = ""
    timed: bool = False
    shipped: bool = False
    two_lists: bool = False
    overlaps: bool = False
    lists_of_rows: bool = False
    rows: bool = False
    quantized_query: bool = False
    results: tuple[str, ...] = ("bf16",)
    most_kv_heads: int = 1
    large_pages: bool = False
    any_page: bool = False
    named: bool = False
    longest_item: int = 0
    partial: str = "f16"
    appends: tuple[Values, ...] = ()
    fetches: tuple[Values, ...] = ()

    @functools.cached_property
    def token_bytes(self) -> int:
        """Bytes of a token for one KV head, in all planes together."""
        return sum(self.planes)

    @property
    def channels(self) -> int:
        """Channels of a token's K: content, then RoPE."""
        return self.content.count + self.rope_channels

    @property
    def rope_channels(self) -> int:
        """Channels of field ``rope``; 0 if the format has none."""
        return 0 if self.rope is None else self.rope.count

    @property
    def powers(self) -> bool:
        """True if scales are stored as powers of two (``ue8m0``)."""
        return self.scale is not None and self.scale.dtype == "ue8m0"

    @property
    def one_scale(self) -> bool:
        """True if a token has a single scale, for all of its channels."""
        return self.scale is not None and self.scale.count == 1

    @property
    def arrangement(self) -> tuple[str, int, str]:
        """(dtype of scales, channels that share one, place of RoPE), by which kernels of attention
        over bytes are chosen.  RoPE is ``own`` if it has a field that V does not contain, ``in v``
        if V contains its field, and ``none`` if the format has no such field."""
        rope = "none" if self.rope is None else "in v" if self.rope_in_v else "own"
        return "" if self.scale is None else self.scale.dtype, self.group, rope

    def begins(self, plane: int) -> int:
        """Bytes of a token in the planes before one: times P, where that begins in its page."""
        return sum(self.planes[:plane])

    def result(self, wish: str) -> str:
        """The dtype of results where ``wish`` is asked for: that, unless there is but one."""
        return self.results[0] if len(self.results) == 1 else wish

"""``PagedKVCache``: the latent cache of one layer as strided views, in FP8 or in 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dsl_kernels.families.record_decode import FORMATS as DECODED_BYTES
from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK
from dsl_kernels.formats.registered import BYTES, DEFAULT, FORMATS
from snapmla import checks
from snapmla.cache import byte_cache, layouts
from snapmla.call import tracing
from snapmla.checks import overlap
from snapmla.runtime import launch


@dataclass(frozen=True, eq=False, repr=False)
class PagedKVCache(launch.OverTensors):
    """Paged MLA cache: FP8 with one scale per token, or rows of 16 bits.

    FP8 (SnapMLA, section 3: RoPE-aware per-token scales): c_kv of a token is ``content * scale``
    and its k_rope is ``rope * scale``: RoPE channels stay in bf16 and are stored *divided by the
    content's scale*, so that one factor serves both parts of the logit.

    16 bits: a row of 576 channels, 512 of c_kv and 64 of k_rope, as they are, for each token and KV
    head; ``scale`` is None.  Made by ``allocate`` or ``from_tensors``.

    ``fp8_ds_mla``: DeepSeek-V3.2's rows of 656 bytes, 512 of e4m3 content, four float32 scales, one
    for each 128 channels, and 64 of k_rope as they are; in pages of any size.  ``append_kv``,
    ``rope_append_kv``, ``fetch_dequant`` and ``decode``, with ``indices`` or without, take them.

    ``fp8_v4``, ``fp8_v41_planar``, ``fp8_v41_rows``, ``fp8_nope``: the bytes of other models, with
    scales of groups of channels (docs/formats.md); ``append_kv``, ``fetch_dequant`` and
    ``convert_cache`` take them, and ``decode``, with ``indices`` or without.

    Attributes:
        content: float8_e4m3fn (num_pages, page_size, 512); bfloat16 or float16 (num_pages,
            page_size, num_kv_heads, 512); of bytes as many channels as the format has.
        rope: bfloat16 (num_pages, page_size, 64); as ``content`` (num_pages, page_size,
            num_kv_heads, 64), the channels behind it; no channels of a format without.
        scale: float32 (num_pages, page_size), max|c_kv| / top with a floor; of ``fp8_ds_mla``
            (num_pages, page_size, 4); of other bytes float32 or float8_e8m0fnu (num_pages,
            page_size, scales); None.
        content_u8: ``content`` as bytes, the form kernels take of an FP8 cache.
        kv: of 16 bits the whole rows (num_pages, page_size, num_kv_heads, 576), of ``fp8_ds_mla``
            uint8 (num_pages, page_size, 1, 656), of other bytes as many as a token has, the form
            kernels take; None of an FP8 cache.
        format: how a token is stored: ``fp8``, ``bf16`` or ``f16``, as ``cache_dtype`` of plans, or
            ``fp8_ds_mla`` (``dsl_kernels.formats.registered`` has what follows from it).
        scale_fmt: of bytes, which scales tokens are appended with: None for float32 ones,
            ``ue8m0`` for powers of two.
        dtype: float8_e4m3fn, bfloat16 or float16; uint8 of ``fp8_ds_mla``.
        num_kv_heads: 1 of an FP8 cache.
        layout: ``split``, ``paged``, ``row640``, of one tensor ``rows``, or ``paged`` where a page
            has planes; or ``strided`` for any other legal strides.
        memory: what operators of ``torch.ops.snapmla`` take: content_u8, rope, scale, or the memory
            that they are views of (``snapmla.layouts.memory_of``); of one tensor kv, None, None.
        traceable: whether ``memory`` may be written under ``torch.compile``.

    Raises:
        TypeError, ValueError: see ``snapmla.checks.cache``.

    Source: SnapMLA paper, section 3.1 (per-token scales, RoPE in the pre-scaled domain); layout
    ``row640`` is Modular's, ``paged`` our own, ``rows`` FlashMLA's, ``fp8_ds_mla`` FlashMLA's and
    vLLM's.
    """

    content: torch.Tensor
    rope: torch.Tensor
    scale: torch.Tensor | None = None
    format: str = field(default="", repr=False, kw_only=True)
    scale_fmt: str | None = field(default=None, repr=False, kw_only=True)
    content_u8: torch.Tensor = field(init=False, repr=False)
    kv: torch.Tensor | None = field(init=False, repr=False)
    dtype: torch.dtype = field(init=False, repr=False)
    num_kv_heads: int = field(init=False, repr=False)
    layout: str = field(init=False)
    memory: layouts.Memory = field(init=False, repr=False)
    traceable: bool = field(init=False, repr=False)

    @functools.cached_property
    def begins(self) -> tuple[launch.Begin, ...]:
        """Begins of the caller's tensors: of the content, which kernels take as bytes, and of the
        slices of a 16-bit cache."""
        return tuple(launch.begin_of(*part) for part in _kept(self.format).begins(self))

    @functools.cached_property
    def asks(self) -> tuple[Callable[[], int], ...]:
        """Functions that say where its three tensors begin now."""
        return tuple(ask for ask, _ in self.begins)

    @functools.cached_property
    def place(self) -> int:
        """A number for the tensors' spans and for what a plan must have in common with them."""
        return overlap.place((*self.spans, self.format, self.page_size, self.num_kv_heads))

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():  # a tracer's tensors have no address to check
            tracing.refuse_transforms()
            _check(self)
        object.__setattr__(self, "content_u8", self.content.view(torch.uint8))
        object.__setattr__(self, "format", self.format or checks.format_of(self.content))
        record = FORMATS[self.format]
        object.__setattr__(self, "dtype", getattr(torch, record.element))
        scale_fmt = byte_cache.scale_format(self.scale_fmt, record)
        object.__setattr__(self, "scale_fmt", scale_fmt)
        self._set(_kept(self.format).derived(self))

    def _set(self, derived: _Derived) -> None:
        """Takes over what follows from its tensors."""
        object.__setattr__(self, "kv", derived.kv)
        object.__setattr__(self, "num_kv_heads", derived.num_kv_heads)
        object.__setattr__(self, "layout", derived.layout)
        object.__setattr__(self, "memory", derived.memory)
        object.__setattr__(self, "traceable", derived.traceable)

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        page_size: int = 64,
        layout: str | None = None,
        device: torch.device | str | int = "cuda",
        *,
        dtype: str | torch.dtype = "fp8",
        num_kv_heads: int = 1,
        scale_fmt: str | None = None,
    ) -> PagedKVCache:
        """A cache of uninitialised memory (unused slots may hold NaN; no kernel minds).

        Args:
            num_pages: pages in the pool, 1 or more.
            page_size: tokens in a page: 16, 32, 64 or 128; of 16 bits also any multiple of 64, one
                page a sequence; of bytes 1 or more.
            layout: of an FP8 cache ``split`` (None), ``paged`` or ``row640`` (see
                ``snapmla.layouts``); rows of 16 bits and bytes lie in one way only.
            device: where; a ``cpu`` cache is the software GPU's, which needs no GPU.
            dtype: ``fp8`` or torch.float8_e4m3fn, torch.bfloat16, torch.float16, or the name of a
                format of bytes, such as ``fp8_ds_mla``.
            num_kv_heads: KV heads of a 16-bit cache, 1 to 128; an FP8 cache has one.
            scale_fmt: of bytes, see ``from_tensors``.

        Raises:
            TypeError, ValueError: naming the argument.

        Example:
            cache = snapmla.PagedKVCache.allocate(8, page_size=64, device="cpu", dtype="fp8")
        """
        checks.integer("num_pages", num_pages, 1)
        dtype = checks.cache_dtype(dtype, "dtype", BYTES)
        where, name = checks.device("device", device), checks.format_named(dtype)
        checks.page_size_of(name, page_size)
        checks.cache_heads(name, num_kv_heads)
        byte_cache.check_scale_format(scale_fmt, FORMATS[name])
        wanted = _Wanted(name, num_pages, page_size, num_kv_heads, layout, where)
        memory = _kept(name).allocate(wanted)
        if FORMATS[name].named:
            return cls.from_tensors(memory[0], format=name, scale_fmt=scale_fmt)
        return cls.from_tensors(*memory)

    @classmethod
    def from_tensors(
        cls,
        content: torch.Tensor,
        rope: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        *,
        format: str | None = None,
        scale_fmt: str | None = None,
    ) -> PagedKVCache:
        """A cache over existing memory; any strides whose rows are 16-byte aligned.

        A stride over a single page, or head, counts for nothing.

        Three tensors are an FP8 cache, one is a cache of 16 bits, or of the format that is named.

        Args:
            content: float8_e4m3fn or uint8 (num_pages, page_size, 512); or alone, bfloat16 or
                float16 rows (num_pages, page_size, num_kv_heads, 576), where one KV head may be
                left out; or beside ``format``, uint8, int8 or float8_e4m3fn rows of 656 bytes,
                (num_pages, page_size, 1, 656) or (num_pages, page_size, 656), side by side in a
                page, whose pages may lie apart; of other formats as many bytes as a token has.
            rope: bfloat16 (num_pages, page_size, 64).
            scale: float32 (num_pages, page_size).
            format: ``fp8_ds_mla`` for rows of 656 bytes, or another name of bytes, which nothing
                else tells; None for others.
            scale_fmt: beside ``fp8_ds_mla`` and ``fp8_nope``: None appends tokens with vLLM's
                scales, the larger of max|c_kv| / 448 and 2**-126; ``ue8m0`` (DeepSeek's name)
                rounds these up to powers of two.  Which ones are in the memory does not matter.
                Of formats whose scales cannot but be powers of two it is ``ue8m0``.
        """
        if format is not None:
            return cls._from_named(content, rope, scale, format, scale_fmt)
        byte_cache.check_scale_format(scale_fmt, FORMATS[DEFAULT])
        if rope is None and scale is None:
            if not torch.compiler.is_compiling():
                checks.cache_rows(content)
                content = launch.regular(content)
            kv = layouts.with_heads(content)
            made = cls(kv[..., :KV_LORA_RANK], kv[..., KV_LORA_RANK:])
            made._set(_one_derived(kv))  # a tracer knows this tensor, not others over its memory
            return made
        is_tensor = isinstance(content, torch.Tensor)
        if is_tensor and content.dtype == torch.uint8 and not checks.negative(content):
            content = content.view(layouts.FP8)
        if not torch.compiler.is_compiling():
            content, rope, scale = map(_regular, (content, rope, scale))
        return cls(content, rope, scale)  # type: ignore[arg-type]  # which refuses None

    @classmethod
    def _from_named(
        cls, content: Any, rope: Any, scale: Any, fmt: str, scale_fmt: str | None
    ) -> PagedKVCache:
        """``from_tensors`` of a format that is given by name."""
        options, record = (None, *BYTES), FORMATS.get(fmt) if isinstance(fmt, str) else None
        if record is not None and not record.named:  # by its dtype
            checks.value_error("format", "one of " + ", ".join(map(repr, options)), repr(fmt))
        checks.choice("format", fmt, options)
        record = FORMATS[fmt]
        byte_cache.check_scale_format(scale_fmt, record)
        for name, value in (("rope", rope), ("scale", scale)):
            if value is not None:
                hint = f"rows of {record.token_bytes} bytes are one tensor"
                got = type(value).__name__
                checks.value_error(name, f"None beside format={fmt!r}", got, hint)
        if not torch.compiler.is_compiling():
            byte_cache.check(record, content)
        kv = byte_cache.rows_of(record, content)
        made = cls(*byte_cache.fields_of(record, kv), format=fmt, scale_fmt=scale_fmt)
        made._set(_one_derived(kv, len(record.planes)))  # as of 16 bits
        return made

    @functools.cached_property
    def plain(self) -> bool:
        """True if kernels may take the addresses of its tensors."""
        return tracing.plain(*self.named_tensors.values())

    @functools.cached_property
    def arguments(self) -> tuple[Any, ...]:
        """content_u8, rope, scale, or kv of one tensor, as kernels take them."""
        return launch.prepared(*(getattr(self, name) for name in FORMATS[self.format].arguments))

    @functools.cached_property
    def append_options(self) -> tuple[int, ...]:
        """Last arguments of kernels that append."""
        return (int(self.scale_fmt is not None),) if FORMATS[self.format].named else ()

    @functools.cached_property
    def decode_arguments(self) -> tuple[Any, ...]:
        """``gather_arguments``, of 16 bits in pages of 128 tokens or less."""
        if self.page_size == layouts.page_size_seen(self.format, self.page_size):
            return self.gather_arguments
        return launch.prepared(*map(layouts.small_pages, self.named_tensors.values()))

    @functools.cached_property
    def gather_arguments(self) -> tuple[Any, ...]:
        """``arguments``, of bytes (num_pages, page_size, bytes of a token)."""
        if not FORMATS[self.format].named:
            return self.arguments
        assert self.kv is not None
        return launch.prepared(self.kv.squeeze(2))

    @functools.cached_property
    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that make it up, as messages call them."""
        return {name: getattr(self, name) for name in FORMATS[self.format].parts}

    def memory_now(self) -> layouts.Memory:
        """``memory`` as views made here: a tracer takes those made before it began for constants.

        Dynamo follows the stored ones to the cache, and cannot ask for storages.
        """
        if tracing.by_dynamo():
            return self.memory
        return _kept(self.format).memory(self)

    @property
    def num_pages(self) -> int:
        return self.content.shape[0]

    @functools.cached_property
    def page_size(self) -> int:
        return self.content.shape[1]

    @property
    def device(self) -> torch.device:
        return self.content.device

    @property
    def num_slots(self) -> int:
        """Tokens the pool holds."""
        return self.num_pages * self.page_size


def _regular(value: Any) -> Any:
    """``launch.regular`` of what may be no tensor."""
    strided = isinstance(value, torch.Tensor) and not value.is_nested
    return launch.regular(value) if strided and value.layout is torch.strided else value


def expect_cache(value: object) -> None:
    """TypeError for what is no ``PagedKVCache``, ValueError for one whose memory was freed or moved
    in place."""
    if not isinstance(value, PagedKVCache):
        checks.type_error(
            "cache",
            "a snapmla.PagedKVCache",
            type(value).__name__,
            "PagedKVCache.from_tensors wraps existing memory",
        )
    if tracing.by_dynamo() or not value.plain or value.stays:
        return  # a tracer's tensors have no memory
    checks.in_place("cache", value.begins, "keep the storage, or make another cache")


def expect_fp8(cache: PagedKVCache, hint: str) -> None:
    """ValueError for a cache of another format, where FP8 alone is taken; says what to do."""
    form = FORMATS[cache.format]
    if not form.one_scale:
        got = f"one of {checks.dtype_name(cache.dtype)} rows" if form.rows else form.about
        checks.value_error("cache", FORMATS[DEFAULT].about, got, hint)


def expect_decoded(cache: object) -> None:
    """ValueError for a cache of a format that attention does not read."""
    record = FORMATS[cache.format] if isinstance(cache, PagedKVCache) else None
    if record is not None and record.named and not record.sparse:
        hint = "snapmla.convert_cache makes an FP8 cache of it"
        wanted = f"an FP8 or a 16-bit cache, or one of {' or '.join(map(repr, DECODED_BYTES))}"
        checks.value_error("cache", wanted, record.about, hint)


# -------------------------------------------------------------------------- by format


def _check(cache: PagedKVCache) -> None:
    """Checks what a cache is made of."""
    fmt = cache.format
    record = FORMATS[fmt or DEFAULT]
    byte_cache.check_scale_format(cache.scale_fmt, record)
    if record.named:
        byte_cache.check_fields(record, cache.content, cache.rope, cache.scale)
        return
    checks.cache(cache.content, cache.rope, cache.scale)
    own = checks.format_of(cache.content)
    if fmt and fmt != own:
        checks.value_error("format", f"{own!r}, by content's dtype, or ''", repr(fmt))


class _Derived(NamedTuple):
    """Attributes of a cache that follow from its tensors."""

    kv: torch.Tensor | None
    num_kv_heads: int
    layout: str
    memory: layouts.Memory
    traceable: bool


class _Wanted(NamedTuple):
    """Arguments of ``allocate``, checked but for the layout."""

    format: str
    num_pages: int
    page_size: int
    num_kv_heads: int
    layout: str | None
    device: torch.device


_Pairs = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class _Kept(NamedTuple):
    """Storage of a format's tokens.

    Attributes:
        derived: what follows from a cache's tensors.
        begins: three pairs for ``PagedKVCache.begins``: what kernels take, what is asked for it.
        memory: ``PagedKVCache.memory_now``.
        allocate: what ``from_tensors`` takes, of fresh memory.
    """

    derived: Callable[[PagedKVCache], _Derived]
    begins: Callable[[PagedKVCache], _Pairs]
    memory: Callable[[PagedKVCache], layouts.Memory]
    allocate: Callable[[_Wanted], tuple[torch.Tensor, ...]]


def _planes(cache: PagedKVCache, content: torch.Tensor) -> layouts.Views:
    """Content, RoPE and scale: tensors that may be views of one memory."""
    assert cache.scale is not None
    return content, cache.rope, cache.scale


def _planes_derived(cache: PagedKVCache) -> _Derived:
    views = _planes(cache, cache.content_u8)
    layout = layouts.name_of(*_planes(cache, cache.content))
    memory = layouts.memory_of(*views)
    if memory is None and tracing.storage_of(cache.content) is None and layout == "split":
        memory = views  # made by a tracer: nothing but strides to go by
    return _Derived(None, 1, layout, views if memory is None else memory, memory is not None)


def _planes_memory(cache: PagedKVCache) -> layouts.Memory:
    views = _planes(cache, cache.content.view(torch.uint8))
    return layouts.memory_of(*views) or views


def _planes_begins(cache: PagedKVCache) -> _Pairs:
    taken, asked = _planes(cache, cache.content_u8), _planes(cache, cache.content)
    return tuple(zip(taken, asked, strict=True))


def _new_planes(wanted: _Wanted) -> layouts.Views:
    layout = "split" if wanted.layout is None else wanted.layout
    checks.choice("layout", layout, layouts.LAYOUTS)
    return layouts.LAYOUTS[layout].allocate(wanted.num_pages, wanted.page_size, wanted.device)


def _one_derived(kv: torch.Tensor, planes: int = 1) -> _Derived:
    """Derives attributes of a cache in one tensor: whole rows, or pages of ``planes`` planes."""
    layout = "paged" if planes > 1 else "rows" if kv.is_contiguous() else "strided"
    return _Derived(kv, kv.shape[2], layout, (kv, None, None), True)


def _rows_begins(cache: PagedKVCache) -> _Pairs:
    (kv,) = cache.named_tensors.values()
    return (kv, kv), (kv, cache.content), (kv[..., KV_LORA_RANK:], cache.rope)


def _new_rows(wanted: _Wanted) -> tuple[torch.Tensor]:
    dtype = checks.DTYPES[wanted.format]
    if wanted.layout is not None:
        hint = "rows of 16 bits lie in one way only"
        checks.value_error("layout", f"None beside dtype={dtype}", repr(wanted.layout), hint)
    shape = (wanted.num_pages, wanted.page_size, wanted.num_kv_heads, HEAD_DIM_QK)
    return (torch.empty(shape, dtype=dtype, device=wanted.device),)


def _bytes_derived(cache: PagedKVCache) -> _Derived:
    record = FORMATS[cache.format]
    return _one_derived(byte_cache.joined(record, cache.content), len(record.planes))


def _bytes_begins(cache: PagedKVCache) -> _Pairs:
    """Its scales lie between what is asked for, or behind."""
    (kv,) = cache.named_tensors.values()
    content, rope, _ = byte_cache.fields_of(FORMATS[cache.format], kv)
    return (kv, kv), (content, cache.content), (rope, cache.rope)


def _new_bytes(wanted: _Wanted) -> tuple[torch.Tensor]:
    record = FORMATS[wanted.format]
    if wanted.layout is not None:
        hint = f"rows of {record.token_bytes} bytes lie in one way only"
        expected = f"None beside dtype={wanted.format!r}"
        checks.value_error("layout", expected, repr(wanted.layout), hint)
    return (byte_cache.allocated(record, wanted.num_pages, wanted.page_size, wanted.device),)


_PLANES = _Kept(_planes_derived, _planes_begins, _planes_memory, _new_planes)
_ROWS = _Kept(
    lambda cache: _one_derived(layouts.joined(cache.content)),
    _rows_begins,
    lambda cache: cache.memory,
    _new_rows,
)
_BYTES = _Kept(_bytes_derived, _bytes_begins, lambda cache: cache.memory, _new_bytes)


def _kept(name: str) -> _Kept:
    """The way in which a cache of a format keeps its memory."""
    record = FORMATS[name]
    return _BYTES if record.named else _ROWS if record.rows else _PLANES

"""``PagedKVCache``: the FP8 latent cache of one layer, as three strided views."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from snapmla import checks, launch, layouts, tracing


@dataclass(frozen=True, eq=False, repr=False)
class PagedKVCache(launch.OverTensors):
    """Paged MLA cache with one scale per token (SnapMLA, section 3: RoPE-aware per-token scales).

    c_kv of a token is ``content * scale`` and its k_rope is ``rope * scale``: RoPE channels stay in
    bf16 and are stored *divided by the content's scale*, so that one factor serves both parts of
    the logit.

    Attributes:
        content: float8_e4m3fn (num_pages, page_size, 512).
        rope: bfloat16 (num_pages, page_size, 64).
        scale: float32 (num_pages, page_size), max|c_kv| / 448 with a floor.
        content_u8: ``content`` as bytes, the form kernels take.
        layout: ``split``, ``paged``, ``row640``, or ``strided`` for any other legal strides.
        memory: what operators of ``torch.ops.snapmla`` take: content_u8, rope, scale, or the memory
            that they are views of (``snapmla.layouts.memory_of``).
        traceable: whether ``memory`` may be written under ``torch.compile``.

    Raises:
        TypeError, ValueError: see ``snapmla.checks.cache``.

    Source: SnapMLA paper, section 3.1 (per-token scales, RoPE in the pre-scaled domain); layout
    ``row640`` is Modular's, ``paged`` our own.
    """

    content: torch.Tensor
    rope: torch.Tensor
    scale: torch.Tensor
    content_u8: torch.Tensor = field(init=False, repr=False)
    layout: str = field(init=False)
    memory: layouts.Memory = field(init=False, repr=False)
    traceable: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():  # a tracer's tensors have no address to check
            tracing.refuse_transforms()
            checks.cache(self.content, self.rope, self.scale)
        object.__setattr__(self, "content_u8", self.content.view(torch.uint8))
        object.__setattr__(self, "layout", layouts.name_of(self.content, self.rope, self.scale))
        views = (self.content_u8, self.rope, self.scale)
        memory = layouts.memory_of(*views)
        stand_in = tracing.storage_of(self.content) is None
        if memory is None and stand_in and self.layout == "split":
            memory = views  # made by a tracer: nothing but strides to go by
        object.__setattr__(self, "memory", views if memory is None else memory)
        object.__setattr__(self, "traceable", memory is not None)

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        page_size: int = 64,
        layout: str = "split",
        device: torch.device | str | int = "cuda",
    ) -> PagedKVCache:
        """A cache of uninitialised memory (unused slots may hold NaN; no kernel minds).

        Args:
            num_pages: pages in the pool, 1 or more.
            page_size: tokens in a page: 16, 32, 64 or 128.
            layout: ``split``, ``paged`` or ``row640`` (see ``snapmla.layouts``).
            device: where; a ``cpu`` cache is the software GPU's, which needs no GPU.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        checks.integer("num_pages", num_pages, 1)
        checks.page_size(page_size)
        checks.choice("layout", layout, layouts.LAYOUTS)
        where = checks.device("device", device)
        return cls(*layouts.LAYOUTS[layout].allocate(num_pages, page_size, where))

    @classmethod
    def from_tensors(
        cls, content: torch.Tensor, rope: torch.Tensor, scale: torch.Tensor
    ) -> PagedKVCache:
        """A cache over existing memory; any strides whose rows are 16-byte aligned.

        Args:
            content: float8_e4m3fn or uint8 (num_pages, page_size, 512).
            rope: bfloat16 (num_pages, page_size, 64).
            scale: float32 (num_pages, page_size).
        """
        is_tensor = isinstance(content, torch.Tensor)
        if is_tensor and content.dtype == torch.uint8 and not checks.negative(content):
            content = content.view(layouts.FP8)
        return cls(content, rope, scale)

    @functools.cached_property
    def plain(self) -> bool:
        """Whether kernels may take the addresses of its tensors."""
        return tracing.plain(self.content, self.rope, self.scale)

    @functools.cached_property
    def arguments(self) -> tuple[Any, ...]:
        """content_u8, rope, scale as kernels take them."""
        return launch.prepared(self.content_u8, self.rope, self.scale)

    def memory_now(self) -> layouts.Memory:
        """``memory`` as views made here: a tracer takes those made before it began for constants.

        Dynamo follows the stored ones to the cache, and cannot ask for storages.
        """
        if tracing.by_dynamo():
            return self.memory
        views = (self.content.view(torch.uint8), self.rope, self.scale)
        return layouts.memory_of(*views) or views

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


def expect_cache(value: object) -> None:
    """TypeError for what is no ``PagedKVCache``, ValueError for one whose memory was freed."""
    if not isinstance(value, PagedKVCache):
        checks.type_error(
            "cache",
            "a snapmla.PagedKVCache",
            type(value).__name__,
            "PagedKVCache.from_tensors wraps existing memory",
        )
    if tracing.by_dynamo() or not value.plain:
        return  # a tracer's tensors have no memory
    content = value.content_u8
    if not content.data_ptr() and not content.untyped_storage().nbytes():
        hint = "keep the storage, or make another cache"
        checks.value_error("cache", "memory", "a storage that was freed", hint)

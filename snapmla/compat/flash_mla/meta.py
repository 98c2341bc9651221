"""FlashMLA's scheduling object, and what it answers where two tensors were expected."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from snapmla import checks
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.compat import sched_meta
from snapmla.compat.flash_mla.config import Config
from snapmla.compat.flash_mla.unbuilt import refuse

Tensor = torch.Tensor
Asked = tuple[Any, Any, Any, Any, Any, Any]  # arguments of ``get_mla_metadata_tensors``, by place
_OLD = (
    "get_mla_metadata gives (FlashMLASchedMeta, None) with arguments too, as FlashMLA does since "
    "2026: take two tensors from snapmla.flash_mla.get_mla_metadata_tensors (num_splits is None "
    "here, and in snapmla's next minor version the object will not stand in for the other one)"
)


@dataclass
class FlashMLASchedMeta:
    """FlashMLA's scheduling object, one for all layers of a step that share lengths.

    The first ``flash_mla_with_kvcache`` plans (inside of a graph, if one is captured: its replays
    plan anew), later ones reuse the plan, on other streams with a workspace of theirs.  Values of
    lengths are not compared: make a new object when they change.  Keep it as long as graphs that
    hold its plan.

    Attributes:
        have_initialized: whether a call has planned it.
        config: a ``Config`` then.
        tile_scheduler_metadata: None, or int32 (num_sm_parts, 8) records that the caller assigns,
            which are used instead.
        num_splits: None, or int32 (b + 1,); not read.

    Raises:
        ValueError: from the call that it does not fit, naming ``tile_scheduler_metadata``.

    Source: FlashMLA, ``FlashMLASchedMeta``.
    """

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None

    def __post_init__(self) -> None:
        # by ``_key``; the first one is what was planned, others are the same over other workspaces
        self._plans: dict[tuple[object, ...], Any] = {}  # plans of decode
        self.memo = calls.Memo()  # kinds of calls with these plans that are known

    def __getstate__(self) -> dict[str, Any]:
        # its own dict of plans; what is known of the original's memory is left behind
        return {**self.__dict__, "_plans": dict(self._plans), "memo": calls.Memo()}

    def _planned(self) -> bool:
        """True if its plans are a step's; a caller may set ``have_initialized`` back."""
        return self.have_initialized and self.config is not None


class AnsweringMeta(FlashMLASchedMeta):
    """The object of ``get_mla_metadata`` with arguments, which is equal to one without.

    It also answers as the int32 (num_sm_parts, 8) tensor that older callers expect (its attributes
    and methods, slices, torch's functions), with a DeprecationWarning.  A class of its own, as one
    with ``__getattr__`` takes 0.05 us longer for each attribute, found or not, 0.3 us a call.
    """

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self._asked = asked
        self._records: Tensor | None = None  # of these arguments, once somebody looked

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlashMLASchedMeta) and _values(self) == _values(other)

    def _as_tensor(self, stack: int) -> Tensor:
        """The records of its arguments.

        Args:
            stack: frames between the caller's line and here.
        """
        warnings.warn(_OLD, DeprecationWarning, stacklevel=stack)
        if self._records is None:
            self._records = get_mla_metadata_tensors(*self._asked)[0]
        return self._records

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._as_tensor(3), name)

    def __getitem__(self, key: Any) -> Tensor:
        return self._as_tensor(3)[key]

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, given: Any = (), named: Any = None
    ) -> Any:
        """A function of torch's, ``static.copy_(metadata)`` first, on the records instead."""
        named = named or {}
        found, _ = tree_flatten((given, named))
        objects = [value for value in found if isinstance(value, cls)]
        tensors: dict[int, Tensor] = {}
        for value in objects:
            tensors[id(value)] = value._as_tensor(3)
        given, named = tree_map_only(cls, lambda value: tensors[id(value)], (given, named))
        return function(*given, **named)


def _values(value: FlashMLASchedMeta) -> tuple[Any, ...]:
    """Its fields' values."""
    return tuple([getattr(value, field.name) for field in fields(value)])


def get_mla_metadata(
    cache_seqlens: Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_heads_per_head_k: int | None = None,
) -> tuple[FlashMLASchedMeta, None]:
    """Metadata of a step: an object that its first call plans, whatever the arguments.

    FlashMLA gives it so since January 2026, and ignores what it is asked with.  Two tensors, as
    before, come from ``get_mla_metadata_tensors``.

    Args:
        cache_seqlens: int32 (b,); accepted, not needed.
        num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache: accepted, not needed.
        topk: accepted, not needed; the width of ``indices``.
        num_heads_per_head_k: ``num_q_tokens_per_head_k`` as it was first called.

    Returns:
        (FlashMLASchedMeta, None).  One of a call with arguments also answers as the int32
        (num_sm_parts, 8) tensor that older callers expect (its attributes and methods, slices,
        torch's functions), with a DeprecationWarning.

    Raises:
        TypeError, ValueError: ``topk`` is no width.

    Source: FlashMLA, ``get_mla_metadata``.
    """
    if topk is not None:
        checks.integer("topk", topk, 1, None, "the width of indices")
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    rows = num_q_tokens_per_head_k if num_heads_per_head_k is None else num_heads_per_head_k
    asked = cache_seqlens, rows, num_heads_k, num_heads_q, is_fp8_kvcache, topk
    return AnsweringMeta(asked), None


def get_mla_metadata_tensors(
    cache_seqlens: Tensor,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_heads_per_head_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Metadata of a step in two tensors, as FlashMLA's ``get_mla_metadata`` gave it until 2026.

    They may be copied into static buffers and sliced; ``flash_mla_with_kvcache`` takes them.

    Args:
        cache_seqlens: int32 (b,), tokens per sequence, the new ones included.
        num_q_tokens_per_head_k: query rows of a sequence that read one KV head,
            s_q * num_heads_q // num_heads_k.
        num_heads_k: KV heads, 1 for MLA.
        num_heads_q: accepted, not needed.
        is_fp8_kvcache, topk: False and None for dense decode over 16 bits; with the width of
            ``indices`` for sparse decode, which does not read what the tensors then hold.
        num_heads_per_head_k: ``num_q_tokens_per_head_k`` as it was first called.

    Returns:
        (int32 (num_sm_parts, 8), int32 (b + 1,)) in FlashMLA's meaning, two launches, where
        num_sm_parts does not depend on the batch.

    Raises:
        TypeError, ValueError: naming the argument.
        VariantError: a planning kernel is not there, or the device has no 16-bit decode kernel.

    Source: FlashMLA, ``get_mla_metadata``; the schedule is ours
    (``snapmla.testing.reference_plan``).
    """
    if topk is not None:
        checks.integer("topk", topk, 1, None, "the width of indices")
    else:
        refuse(is_fp8_kvcache=is_fp8_kvcache)
    if tracing.by_dynamo():
        return tracing.between_graphs(
            get_mla_metadata_tensors, cache_seqlens, num_q_tokens_per_head_k, num_heads_k,
            num_heads_q, is_fp8_kvcache, topk, num_heads_per_head_k=num_heads_per_head_k,
        )  # fmt: skip
    checks.lengths(cache_seqlens, "b")
    rows = num_q_tokens_per_head_k if num_heads_per_head_k is None else num_heads_per_head_k
    hint = "s_q * num_heads_q // num_heads_k of one sequence"
    rows = checks.integer("num_q_tokens_per_head_k", rows, 1, checks.MAX_ROWS, hint)
    heads = checks.integer("num_heads_k", num_heads_k, 1, checks.MAX_HEADS, "KV heads, 1 for MLA")
    checks.rows("num_q_tokens_per_head_k", cache_seqlens.shape[0] * heads, rows)
    return sched_meta.made(cache_seqlens, rows, heads)


def get_either(
    cache_seqlens: Tensor | None = None, *given: Any, **named: Any
) -> tuple[FlashMLASchedMeta | Tensor, Tensor | None]:
    """``get_mla_metadata`` as it was until 2026: two tensors with arguments, an object without."""
    if cache_seqlens is None:
        return get_mla_metadata(None, *given, **named)
    return get_mla_metadata_tensors(cache_seqlens, *given, **named)

"""FlashMLA's names inside of an engine: ours computes what it serves, the engine's the rest.

An engine calls FlashMLA through functions of one module.  An object of ``Decode`` or ``Prefill``
stands for one of them: it calls ours, or theirs where ours does not serve the call, and says so
once a cause.  Causes are what ``Name.reason`` knows before the call, and what our own checks
refuse before anything is launched.  The first call of a layer's method and format is logged.

How the objects get in the place of the engine's functions is up to its plug-in
(``vllm/flashmla.py``, ``sglang/flashmla.py``).
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from dsl_kernels.formats import ds_mla, v4
from snapmla import checks
from snapmla.compat import flash_mla
from snapmla.errors import SnapMLAError
from snapmla.runtime import variants

SCHEDULE = "of_snapmla"  # attribute of the engine's metadata
SERVED = "sm_90a"
MOST_SAID = 64  # lines of a name, as causes have shapes in them
NVFP4, FP4 = 352, 288  # bytes of rows that FlashMLA reads on SM100 alone
FORMATS = {ds_mla.FORMAT.token_bytes: ds_mla.NAME, v4.FORMAT.token_bytes: v4.FORMAT.name}
INVARIANT = "batch-invariant mode: how ours cuts lists and sequences depends on the batch"
Told = Mapping[str, Any]


class Name:
    """One of FlashMLA's functions.

    Attributes:
        engine: as sentences name it. log: where they go.
        through: modules whose frames lie between a layer and a call.
        ours_is: our function's name in ``snapmla.flash_mla``.
        names: the function's parameters by place; FlashMLA's where the engine's function, of which
            a library may be missing, does not name them.
        calls: how many calls ours has computed.
    """

    engine: ClassVar[str]
    log: ClassVar[logging.Logger]
    through: ClassVar[tuple[str, ...]] = ()
    ours_is: ClassVar[str]

    def __init__(self, theirs: Callable[..., Any], invariant: bool = False) -> None:
        self.theirs, self.invariant = theirs, invariant
        self.names = self.parameters()
        self.calls = 0
        self._said: set[Any] = set()
        functools.update_wrapper(self, theirs)

    def parameters(self) -> tuple[str, ...]:
        """Names of what is given by place."""
        return tuple(inspect.signature(getattr(flash_mla, self.ours_is)).parameters)

    def __call__(self, *given: Any, **named: Any) -> Any:
        told = dict(zip(self.names, given), **named)
        reason = self.reason(told)
        if reason is None:
            try:
                result = self.ours(dict(told))
            except (TypeError, ValueError, SnapMLAError) as error:  # nothing was launched
                reason = str(error)
            else:
                self.calls += 1
                self._first(told, sys._getframe(1))
                return result
        if reason not in self._said and len(self._said) < MOST_SAID:
            self._said.add(reason)
            self.log.warning(
                "snapmla: %s's own %s runs, not snapmla's: %s",
                self.engine, self.theirs.__name__, reason,
            )  # fmt: skip
        return self.passed_on(*given, **named)

    def passed_on(self, *given: Any, **named: Any) -> Any:
        """Passes a call that ours does not serve to the engine's function; returns its result."""
        return self.theirs(*given, **named)

    def _first(self, told: Told, caller: Any) -> None:
        """Logs the first call of a layer's method and format."""
        while caller.f_back is not None and caller.f_globals.get("__name__") in self.through:
            caller = caller.f_back
        kind = self.kind(told)
        if (caller.f_code, kind) in self._said:
            return
        self._said.add((caller.f_code, kind))
        layer = caller.f_locals.get("self")
        who = caller.f_globals.get("__name__") if layer is None else type(layer).__qualname__
        name = getattr(layer, "prefix", None) or getattr(layer, "layer_name", None)
        if name is None:
            number = getattr(caller.f_locals.get("layer"), "layer_id", None)
            name = None if number is None else f"layer {number}"
        where = f" ({name})" if name else ""
        self.log.info("snapmla: %s%s: %s", who, where, self.what(*kind))

    def reason(self, told: Told) -> str | None:
        """Reason why the engine's kernel runs, of what can be told before a call."""
        if self.invariant or told.get("enable_batch_invariant"):
            return INVARIANT
        return _reason(told)

    def ours(self, told: dict[str, Any]) -> Any:
        """Calls our function with a call's arguments by name and returns its result.

        It may change ``told``, which is a copy.
        """
        raise NotImplementedError

    def kind(self, told: Told) -> tuple[Any, ...]:
        """A call's kind, as ``what`` takes it: two calls of one kind are the same to the log."""
        raise NotImplementedError

    def what(self, *kind: Any) -> str:
        """The log's text of a kind."""
        raise NotImplementedError


def _reason(told: Told) -> str | None:
    q = told.get("q")
    if not isinstance(q, torch.Tensor):
        return "q is no tensor"
    try:
        arch = variants.arch_of(q.device)
    except SnapMLAError as error:
        return str(error)
    if arch != SERVED:
        return f"its kernels for these calls are Hopper's, this device is {arch}"
    for name, width, what in (
        ("k_cache", NVFP4, "rows of NVFP4"), ("extra_k_cache", FP4, "a second cache of FP4"),
    ):  # fmt: skip
        cache = told.get(name)
        if isinstance(cache, torch.Tensor) and cache.ndim and cache.shape[-1] == width:
            return f"{what} ({width} bytes a token) are not read"
    return None


class Decode(Name):
    """``flash_mla_with_kvcache``; ``tile_scheduler_metadata`` is an object of the engine's."""

    ours_is = "flash_mla_with_kvcache"

    def ours(self, told: dict[str, Any]) -> Any:
        told["tile_scheduler_metadata"] = schedule_of(told["tile_scheduler_metadata"])
        told.pop("enable_batch_invariant", None)
        return flash_mla.flash_mla_with_kvcache(**told)

    def kind(self, told: Told) -> tuple[Any, ...]:
        q, second = told["q"], told.get("extra_k_cache")
        if told.get("indices") is None:
            return q.shape[2], q.dtype
        page = None if second is None else second.shape[1]
        return q.shape[2], self.rows(told), page, told.get("attn_sink") is not None

    def rows(self, told: Told) -> str | int:
        """The format of a sparse call's cache, or how many bytes a token has."""
        width = told["k_cache"].shape[-1]
        return FORMATS.get(width, width)

    def what(self, *kind: Any) -> str:
        heads, rows, *sparse = kind
        if not sparse:
            return f"dense decode, {str(rows).removeprefix('torch.')}, {heads} heads"
        page, sinks = sparse
        known = rows if isinstance(rows, str) else f"{rows} bytes a token"
        second = "" if page is None else f", a second cache of pages of {page} tokens"
        return f"sparse decode, {known}, {heads} heads{second}{', sinks' if sinks else ''}"


def schedule_of(theirs: Any) -> Any:
    """Our schedule for an object of the engine's metadata: an attribute of it, made once.

    Raises:
        TypeError: it is none of FlashMLA's scheduling objects, one of which serves a step alone.
    """
    schedule = getattr(theirs, SCHEDULE, None)
    if schedule is None:
        if isinstance(theirs, torch.Tensor) or not hasattr(theirs, "have_initialized"):
            wanted = "an object of get_mla_metadata, which has have_initialized"
            checks.type_error("tile_scheduler_metadata", wanted, type(theirs).__name__)
        schedule, _ = flash_mla.get_mla_metadata()
        setattr(theirs, SCHEDULE, schedule)
    return schedule


class Prefill(Name):
    """``flash_mla_sparse_fwd``."""

    ours_is = "flash_mla_sparse_fwd"

    def ours(self, told: dict[str, Any]) -> Any:
        return flash_mla.flash_mla_sparse_fwd(**told)

    def kind(self, told: Told) -> tuple[Any, ...]:
        return tuple(told["q"].shape[1:])

    def what(self, *kind: Any) -> str:
        heads, channels = kind
        return f"sparse attention of prompts, rows of {channels} channels, {heads} heads"

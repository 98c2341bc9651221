"""FlashMLA's names inside of vLLM on our kernels: ``SNAPMLA_VLLM_FLASHMLA=1``.

vLLM calls FlashMLA through two names of one module, ``vllm.v1.attention.ops.flashmla``: sparse
decode of V3.2, GLM-5, V4, V4.1 (in V4's bytes on Hopper) and HY-V4, dense decode of 16 bits, and
sparse attention of prompts.  ``install`` puts ours in their place, there and in modules that have
bound them before (``surface.BINDING``, of each release in ``surface.json``).  Bytes, pages, lists
and backends stay vLLM's, so nothing else of an installation changes; V4's layers, which no backend
of a plugin reaches, have no other way in, and so this one is for all models.

``get_mla_metadata`` and ``FlashMLASchedMeta`` stay vLLM's own, too: our schedule is an attribute of
their object, made by the first call and with it inside of a graph where that is captured.

Ours computes what it serves.  Anything else goes to vLLM's kernel, whose cause is logged once: what
``_reason`` knows, and what our own checks refuse before anything is launched.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsl_kernels.cache_records import ds_mla, v4
from snapmla import env, flash_mla, runtime
from snapmla.errors import SnapMLAError
from snapmla.integrations.vllm import surface

MODULE = surface.FLASHMLA
LOGGER = "vllm.snapmla"  # below vLLM's own, whose handlers and level it has
SCHEDULE = "of_snapmla"  # attribute of vLLM's metadata
SERVED = "sm_90a"
MOST_SAID = 64  # lines of a name, as causes have shapes in them
NVFP4, FP4 = 352, 288  # bytes of rows that FlashMLA reads on SM100 alone
_FORMATS = {ds_mla.RECORD.token_bytes: ds_mla.FORMAT, v4.RECORD.token_bytes: v4.RECORD.name}
_log = logging.getLogger(LOGGER)
_lock = threading.Lock()
Told = Mapping[str, Any]


def install() -> bool:
    """Puts ours in the place of FlashMLA's names, in this process.  May be called again.

    Returns:
        False, and a line in the log, if this is a release that nobody has looked at.
    """
    release = surface.known_release()
    if release is None:
        known = " and ".join(sorted(surface.recorded()))
        _log.warning(
            "snapmla: %s=1 is for vllm %s: FlashMLA's names stay vLLM's own",
            env.VLLM_FLASHMLA.name, known,
        )  # fmt: skip
        return False
    from vllm import envs

    module = importlib.import_module(MODULE)
    invariant = bool(envs.VLLM_BATCH_INVARIANT)
    with _lock:
        for name, kind in _KINDS.items():
            there = getattr(module, name)
            ours = there if isinstance(there, _Name) else kind(there, invariant)
            setattr(module, name, ours)
            for other in surface.BINDING:
                bound = sys.modules.get(other)
                if bound is not None and getattr(bound, name, ours) is ours.theirs:
                    setattr(bound, name, ours)
    return True


def installed() -> bool:
    """Whether FlashMLA's names are ours in this process."""
    module = sys.modules.get(MODULE)
    return any(isinstance(getattr(module, name, None), _Name) for name in _KINDS)


def calls() -> int:
    """How many calls ours has computed in this process."""
    module = sys.modules.get(MODULE)
    found = [getattr(module, name, None) for name in _KINDS]
    return sum(each.calls for each in found if isinstance(each, _Name))


class _Name:
    """One of FlashMLA's functions: ours, and vLLM's for what that does not serve."""

    def __init__(self, theirs: Callable[..., Any], invariant: bool = False) -> None:
        self.theirs, self.invariant = theirs, invariant
        self.names = _NAMES[type(self)]
        self.calls = 0
        self._said: set[Any] = set()
        functools.update_wrapper(self, theirs)

    def __call__(self, *given: Any, **named: Any) -> Any:
        told = dict(zip(self.names, given), **named)
        reason = self.reason(told)
        if reason is None:
            try:
                result = self.ours(told)
            except (TypeError, ValueError, SnapMLAError) as error:  # nothing was launched
                reason = str(error)
            else:
                self.calls += 1
                self._first(told, sys._getframe(1))
                return result
        if reason not in self._said and len(self._said) < MOST_SAID:
            self._said.add(reason)
            name = self.theirs.__name__
            _log.warning("snapmla: vLLM's own %s runs, not snapmla's: %s", name, reason)
        return self.theirs(*given, **named)

    def _first(self, told: Told, caller: Any) -> None:
        """Logs the first call of a layer's class and format."""
        layer, module = caller.f_locals.get("self"), caller.f_globals.get("__name__", "")
        what = self.what(told)
        key = type(layer), module, what
        if key in self._said:
            return
        self._said.add(key)
        kind = module if layer is None else type(layer).__qualname__
        name = getattr(layer, "prefix", None) or getattr(layer, "layer_name", None)
        _log.info("snapmla: %s%s: %s", kind, f" ({name})" if name else "", what)

    def reason(self, told: Told) -> str | None:
        """Why vLLM's kernel runs, of what can be told before a call."""
        if self.invariant or told.get("enable_batch_invariant"):
            return "batch-invariant mode: how ours cuts lists and sequences depends on the batch"
        return _reason(told)

    def ours(self, told: dict[str, Any]) -> Any:
        raise NotImplementedError

    def what(self, told: Told) -> str:
        raise NotImplementedError


def _reason(told: Told) -> str | None:
    q = told.get("q")
    if not isinstance(q, torch.Tensor):
        return "q is no tensor"
    try:
        arch = runtime.arch_of(q.device)
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


class _Decode(_Name):
    """``flash_mla_with_kvcache``."""

    def ours(self, told: dict[str, Any]) -> Any:
        theirs = told["tile_scheduler_metadata"]
        schedule = getattr(theirs, SCHEDULE, None)
        if schedule is None:
            schedule, _ = flash_mla.get_mla_metadata()
            setattr(theirs, SCHEDULE, schedule)
        told["tile_scheduler_metadata"] = schedule
        told.pop("enable_batch_invariant", None)
        return flash_mla.flash_mla_with_kvcache(**told)

    def what(self, told: Told) -> str:
        q, cache, second = told["q"], told["k_cache"], told.get("extra_k_cache")
        if told.get("indices") is None:
            return f"dense decode, {str(q.dtype).removeprefix('torch.')}, {q.shape[2]} heads"
        known = _FORMATS.get(cache.shape[-1], f"{cache.shape[-1]} bytes a token")
        pages = "" if second is None else f", a second cache of pages of {second.shape[1]} tokens"
        sinks = "" if told.get("attn_sink") is None else ", sinks"
        return f"sparse decode, {known}, {q.shape[2]} heads{pages}{sinks}"


class _Prefill(_Name):
    """``flash_mla_sparse_fwd``."""

    def ours(self, told: dict[str, Any]) -> Any:
        return flash_mla.flash_mla_sparse_fwd(**told)

    def what(self, told: Told) -> str:
        q = told["q"]
        return f"sparse attention of prompts, rows of {q.shape[2]} channels, {q.shape[1]} heads"


_KINDS: dict[str, type[_Name]] = dict(zip(surface.FLASHMLA_NAMES, (_Decode, _Prefill), strict=True))
# parameters by place, which are FlashMLA's; where a library is missing, vLLM's functions name none
_NAMES = {
    kind: tuple(inspect.signature(getattr(flash_mla, name)).parameters)
    for name, kind in _KINDS.items()
}

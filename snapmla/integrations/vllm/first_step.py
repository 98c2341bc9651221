"""Warnings behind a process's first step of settings that had no effect, each once.

A step begins where vLLM makes the context of a forward pass that has attention's metadata; graphs
that are captured count, memory that is profiled does not.  Of a step in microbatches vLLM makes
several before it runs the first: what is made while one of a step's contexts lives belongs to that
step.  At the second step the first is over, and vLLM's function is in its place again.  Processes
that run no step say nothing.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from snapmla.integrations.vllm import flashmla
from snapmla.runtime import env

NAME = "create_forward_context"
MICROBATCHES = 16  # of a step, more than anyone asks for: contexts that a graph keeps are no step's
_log = logging.getLogger(flashmla.LOGGER)
_lock = threading.Lock()
_over: set[Any] = set()  # functions of vLLM whose first step was told


def watch() -> None:
    """Looks at this process's first step.  May be called again, also behind it."""
    from vllm import forward_context

    there = getattr(forward_context, NAME)
    if not isinstance(there, _Watched) and there not in _over:
        setattr(forward_context, NAME, _Watched(there, forward_context))


class _Watched:
    """vLLM's function, which counts those of its calls that are a step."""

    def __init__(self, theirs: Callable[..., Any], module: Any) -> None:
        self.theirs, self.module = theirs, module
        self.first: tuple[Any, Any] | None = None  # metadata and configuration of the first step
        self.made: list[Callable[[], Any]] = []  # its contexts, or None of those that are gone
        self.done = False
        self.here = threading.local()  # ``making``: this thread is inside of vLLM's function
        functools.update_wrapper(self, theirs)

    def __call__(self, attn_metadata: Any, vllm_config: Any, *given: Any, **named: Any) -> Any:
        # contexts inside of another are parts of its step
        inside = getattr(self.here, "making", False) or self.module.is_forward_context_available()
        if self.done or not attn_metadata or inside:
            return self.theirs(attn_metadata, vllm_config, *given, **named)
        self.here.making = True
        try:  # without the lock: what vLLM does in there may wait for another thread
            context = self.theirs(attn_metadata, vllm_config, *given, **named)
        finally:
            self.here.making = False
        first = None
        with _lock:  # engines in threads of one process share this
            if self.first is not None and not self.done and self._over():
                first, self.done = self.first, True
            if not self.done:
                self.first = self.first or (attn_metadata, vllm_config)
                self.made.append(_reference(context))
        if first is not None:
            self._told(*first)
        return context

    def _over(self) -> bool:
        gone = all(context() is None for context in self.made)
        return gone or len(self.made) >= MICROBATCHES

    def _told(self, attn_metadata: Any, vllm_config: Any) -> None:
        self.first = None
        self.made.clear()
        _over.add(self.theirs)
        if getattr(self.module, NAME) is self:  # else another one stands around it
            setattr(self.module, NAME, self.theirs)
        for sentence in sentences(attn_metadata, vllm_config, flashmla.calls()):
            _log.warning("snapmla: %s", sentence)


def _reference(context: Any) -> Callable[[], Any]:
    """A weak reference; of what takes none, one to nothing."""
    try:
        return weakref.ref(context)
    except TypeError:
        return lambda: None


def sentences(attn_metadata: Any, vllm_config: Any, calls: int) -> Iterator[str]:
    """Sentences to say after a step.

    Args:
        attn_metadata: by layer, or a list of such.
        calls: of FlashMLA's names that ours computed.
    """
    if env.VLLM_FLASHMLA.enabled() and not calls and flashmla.installed():
        yield (
            f"{env.VLLM_FLASHMLA.name}=1, and this process's first step had no call of FlashMLA's "
            "names that snapmla computed: its layers have another attention, it was a step of "
            "prompts alone, or vLLM's own kernel ran, and a line before this one says why"
        )
    backend: Any = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    if not _is_ours(backend):
        return
    parts = attn_metadata if isinstance(attn_metadata, list) else [attn_metadata]
    built = [each for part in parts if isinstance(part, dict) for each in part.values()]
    if built and not any(type(each).__module__.startswith("snapmla.") for each in built):
        advice = (
            f"; {env.VLLM_FLASHMLA.name}=1 puts snapmla's into their place where that is FlashMLA's"
        )
        yield (
            f"--attention-backend {backend.name} is snapmla's, and no layer of this model takes "
            "it, so vLLM's kernels run: layers choose their own attention (DeepSeek-V4, V4.1), or "
            "are of a kind that the backend does not serve"
            f"{'' if env.VLLM_FLASHMLA.enabled() else advice}"
        )


def _is_ours(backend: Any) -> bool:
    """Says if a member of vLLM's enumeration stands for one of our backends."""
    if backend is None:
        return False
    try:
        return str(backend.get_path()).startswith("snapmla.")
    except ValueError:  # one that nobody registered
        return False

"""FlashMLA's names inside of SGLang on our kernels: ``SNAPMLA_SGLANG_FLASHMLA=1``.

SGLang calls FlashMLA through functions of one module,
``sglang.kernels.ops.attention.flash_mla_interface``: decode of V3.2 and GLM-5 (DSA by
``flashmla_kv``), of V4, of V4.1 (in V4's bytes on Hopper), dense decode by ``flashmla``, and sparse
attention over 16 bits (``flashmla_sparse``, prompts of V4).  ``register`` gives ours to SGLang's
hook registry, which calls it with the function that it stands before, and which finds modules that
have bound that function already.  Bytes, pages, lists and backends stay SGLang's, so prefix
caching, disaggregation and HiCache are as before.

``get_mla_metadata`` has no hook: what it makes stays SGLang's own, for its kernels where ours do
not serve.  Beside an object of it our schedule is an attribute, made by the first call, and with it
inside of a graph where that is captured.  Two tensors go to ours as they are: of dense decode they
say where each part begins; lists without lengths want a plan of their shape alone, which
``snapmla.flash_mla`` keeps.

Ours computes what it serves.  Anything else goes to SGLang's kernel, whose cause is logged once
(``flashmla_switch.py``).
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, cast

import torch

from dsl_kernels.formats import nope, v41
from dsl_kernels.formats.dims import KV_LORA_RANK
from snapmla.compat import flash_mla
from snapmla.integrations import flashmla_switch
from snapmla.integrations.flashmla_switch import Told
from snapmla.integrations.sglang import surface
from snapmla.runtime import env
from snapmla.sparse.prefill import sparse_prefill

MODULE, REGISTRY = surface.FLASHMLA, surface.HOOKS
LOGGER = "sglang.snapmla"
WHEEL = "flash_mla"  # of SGLang's distribution sgl-flash-mla, which its module imports
STEP = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
CALLING = ("flashmla_kv", "flashmla_sparse", "flashmla_auto")  # values of dsa_decode_backend
DENSE, FP8 = "flashmla", ("fp8_e4m3", "fp8_e5m2")
_log = logging.getLogger(LOGGER)
# by use_legacy: V4.1's two byte orders, of one width
_V41 = {True: v41.PLANAR.name, False: v41.ROWS.name}


def register() -> bool:
    """Gives SGLang's registry of hooks ours, once in a process.

    Returns:
        False, and a line in the log, if this is a release that nobody has looked at, or has no
        FlashMLA.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if _registered:
        return True
    why = refused()
    if why is not None:
        _log.warning("snapmla: %s: FlashMLA's names stay SGLang's own", why)
        return False
    for name, kind in _KINDS.items():
        hook = _registered[name] = Hook(kind)
        HookRegistry.register(f"{MODULE}.{name}", hook, HookType.AROUND)
    HookRegistry.register(STEP, FirstStep(), HookType.AFTER)
    return True


def refused() -> str | None:
    """Reason why the names stay SGLang's, if they do."""
    name = env.SGLANG_FLASHMLA.name
    if surface.known_release() is None:
        return f"{name}=1 is for sglang {' and '.join(sorted(surface.recorded()))}"
    if find_spec(WHEEL) is None:
        return f"{name}=1 wants sgl-flash-mla to be installed, whose functions it stands before"
    return None


def calls() -> int:
    """Number of calls that ours has computed in this process."""
    return sum(hook.calls for hook in _registered.values())


class Hook:
    """Stands in for one of FlashMLA's functions; SGLang's registry passes the original first."""

    def __init__(self, kind: type[_OfSGLang]) -> None:
        self.kind = kind
        self.name: _OfSGLang | None = None

    @property
    def calls(self) -> int:
        """Number of calls of ours, as of ``flashmla_switch.Name``."""
        return 0 if self.name is None else self.name.calls

    def __call__(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self.name is None or self.name.theirs is not original:
            self.name = self.kind(original, deterministic())
        return self.name(*given, **named)


def deterministic() -> bool:
    """True if this process's server was asked for results that do not depend on the batch."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


class _OfSGLang(flashmla_switch.Name):
    """One of FlashMLA's functions: ours, and SGLang's for what that does not serve."""

    engine, log, through = "SGLang", _log, (__name__, REGISTRY)

    def parameters(self) -> tuple[str, ...]:
        """SGLang's own, whose order is not FlashMLA's."""
        return tuple(inspect.signature(self.theirs).parameters)


class _Decode(_OfSGLang, flashmla_switch.Decode):
    """``flash_mla_with_kvcache``."""

    def reason(self, told: Told) -> str | None:
        why = super().reason(told)
        if why is None and not told.get("use_legacy", True) and _width(told) != _ROW:
            return "use_legacy=False is for V4.1's rows of 528 bytes"
        return why

    def ours(self, told: dict[str, Any]) -> Any:
        told["kv_format"] = _format(told)
        told.pop("use_legacy", None)
        metadata = told["tile_scheduler_metadata"]
        if not isinstance(metadata, torch.Tensor):
            told["tile_scheduler_metadata"] = flashmla_switch.schedule_of(metadata)
        return flash_mla.flash_mla_with_kvcache(**told)

    def rows(self, told: Told) -> str | int:
        named = _format(told) if _width(told) == _ROW else None
        return super().rows(told) if named is None else named


_ROW = nope.FORMAT.token_bytes


def _width(told: Told) -> int:
    """Bytes of a token, or channels of a row."""
    cache = told.get("k_cache")
    return cache.shape[-1] if isinstance(cache, torch.Tensor) and cache.ndim else 0


def _format(told: Told) -> str | None:
    """``kv_format`` as ours wants it: three formats have 528 bytes a token.

    SGLang's function reads such rows as V3.2's without RoPE beside two tensors of metadata, else as
    V4.1's, in the byte order that ``use_legacy`` says.
    """
    named = cast("str | None", told.get("kv_format"))
    if named not in (None, "V41") or told.get("indices") is None or _width(told) != _ROW:
        return named
    if named is None and isinstance(told["tile_scheduler_metadata"], torch.Tensor):
        return nope.FORMAT.name if told["q"].shape[-1] == KV_LORA_RANK else None
    return _V41[bool(told.get("use_legacy", True))]


class _Prefill(_OfSGLang, flashmla_switch.Prefill):
    """``flash_mla_sparse_fwd``."""

    def ours(self, told: dict[str, Any]) -> Any:
        legacy, q = told.pop("use_legacy", True), told["q"]
        sums = torch.empty((2, *q.shape[:2]), dtype=torch.float32, device=q.device)
        scale = told.pop("sm_scale")
        found = sparse_prefill(softmax_scale=scale, max_logits=sums[0], lse=sums[1], **told)
        if legacy:  # whose largest logits and LSEs are to base 2
            sums.mul_(math.log2(math.e))
        return found


_KINDS: dict[str, type[_OfSGLang]] = dict(
    zip(surface.FLASHMLA_NAMES, (_Decode, _Prefill), strict=True)
)
_registered: dict[str, Hook] = {}


# ------------------------------------------------------------------------- settings without effect


def settings(view: Any) -> Iterator[str]:
    """Yields a sentence for each setting of a server that keeps calls from FlashMLA.

    Args:
        view: its settings, as SGLang resolved them.
    """
    decode, dtype = view.dsa_decode_backend, view.kv_cache_dtype
    if decode is not None and decode not in CALLING:
        yield (
            f"decode of sparse attention (DSA) by {decode}, with --kv-cache-dtype {dtype}, does "
            "not call FlashMLA: set --kv-cache-dtype fp8_e4m3, and no --dsa-decode-backend"
        )
    if DENSE in (view.attention_backend, view.decode_attention_backend) and dtype in FP8:
        yield (
            f"--attention-backend {DENSE} with --kv-cache-dtype {dtype} is FlashMLA's dense FP8 "
            "cache, which is not built: set --kv-cache-dtype bfloat16, or --attention-backend "
            "snapmla"
        )


def tell(view: Any) -> None:
    """Logs ``settings``."""
    for sentence in settings(view):
        _log.warning("snapmla: %s=1: %s", env.SGLANG_FLASHMLA.name, sentence)


class FirstStep:
    """A hook after a runner's steps: the first one that decodes shows whether ours is called.

    Graphs are captured before, and count.
    """

    def __init__(self) -> None:
        self.done = False

    def __call__(self, result: Any, runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
        if self.done or runner.is_draft_worker:
            return
        mode = forward_batch.forward_mode
        if not (mode.is_decode() or mode.is_target_verify()):
            return
        self.done = True
        if not calls():
            _log.warning(
                "snapmla: %s=1, and this process's first step of decode had no call of FlashMLA's "
                "names that snapmla computed: its attention is another backend's (DSA models want "
                "--kv-cache-dtype fp8_e4m3, dense ones --attention-backend flashmla), or SGLang's "
                "own kernel ran, and a line before this one says why",
                env.SGLANG_FLASHMLA.name,
            )  # fmt: skip

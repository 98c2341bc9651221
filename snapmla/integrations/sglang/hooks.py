"""Hooks of the plugin in SGLang; all but the last change nothing if another backend is named.

===========================  ======================================================================
choices                      the name, also where prefixes are cached, and for deterministic runs
attention_registry           name -> backend
attention_backend_handler    which form of attention a batch takes
deepseek_common.utils        Q and K are handed over in two parts each, not concatenated
validation_hook              what is not served stops a server before it loads weights
overrides                    pages of 64 tokens
KVCacheConfigurator          our pool; bytes of a token in it
DraftBackendFactory          attention of draft models
flash_mla_interface          ``flashmla.py``, if ``SNAPMLA_SGLANG_FLASHMLA`` asks for it
===========================  ======================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)
from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
from sglang.srt.models.deepseek_common import utils
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import attention_backends, get_exec

from dsl_kernels.formats.dims import HEAD_DIM_QK
from snapmla.cache import layouts
from snapmla.integrations.sglang import flashmla, refuse
from snapmla.integrations.sglang.refuse import BACKEND
from snapmla.runtime import env

_ARGUMENTS = "sglang.srt.arg_groups"
_CACHE = "sglang.srt.mem_cache.kv_cache_configurator"


def register() -> None:
    """Registers all of it, once in a process."""
    if env.SGLANG_FLASHMLA.enabled():
        flashmla.register()
    if BACKEND in ATTENTION_BACKENDS:
        return
    register_attention_backend(BACKEND)(make_backend)
    choices.add_attention_backend_choices([BACKEND])
    choices.add_chunked_prefix_cache_attention_backend(BACKEND)
    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])
    for target, hook, kind in (
        (f"{_ARGUMENTS}.validation_hook.check_server_args", check, HookType.AFTER),
        (f"{_ARGUMENTS}.overrides._mla_backend_page_constraints", page_size, HookType.AROUND),
        (f"{_CACHE}.calculate_mla_kv_cache_dim", token_bytes, HookType.AROUND),
        (f"{_CACHE}.KVCacheConfigurator._resolve_kv_pool_class", pool_class, HookType.AROUND),
        (
            "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
            draft_backend, HookType.AROUND,
        ),
    ):  # fmt: skip
        HookRegistry.register(target, hook, kind)
    # Without a handler of its own a name gets triton's.
    handlers.AttentionBackendRegistry.register(BACKEND, forward_method)
    handlers.MHA_ONE_SHOT_SUPPORTED_BACKENDS.append(BACKEND)
    utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(BACKEND)


def make_backend(model_runner: Any) -> Any:
    """A runner's backend."""
    from snapmla.integrations.sglang.backend import SnapMLABackend

    return SnapMLABackend(model_runner)


def forward_method(attention: Any, forward_batch: Any) -> Any:
    """Absorbed attention for decode, verify and deterministic inference; else as SGLang chooses."""
    if get_exec().deterministic.enable_deterministic_inference:
        return handlers._dispatch_mla_subtype(attention, forward_batch)
    return handlers._handle_attention_backend(attention, forward_batch, BACKEND)


def check(result: None, server_args: Any) -> None:
    """After SGLang's own checks of settings; what keeps FlashMLA's names from a call is logged.

    Raises:
        ValueError: as ``refuse.settings``.
    """
    view = resolved_view(server_args)
    if refuse.asked_for(view):
        refuse.settings(view)
    if env.SGLANG_FLASHMLA.enabled():
        flashmla.tell(view)


def page_size(original: Any, view: Any) -> dict[str, Any]:
    """Pages of 64 tokens where nobody named a size, as SGLang does for FlashMLA."""
    chosen = dict(original(view))
    if refuse.asked_for(view) and chosen.get("page_size", view.page_size) in (None, 1):
        chosen["page_size"] = refuse.PAGE
    return chosen


def _asked_for() -> bool:
    """True if this process's server asks for the backend."""
    return BACKEND in attention_backends()


def token_bytes(original: Any, *, model_config: Any, kv_cache_dtype: torch.dtype) -> int:
    """Bytes of a token and layer: 644 in our pool, where SGLang counts 576 of e4m3."""
    plain = original(model_config=model_config, kv_cache_dtype=kv_cache_dtype)
    ours = kv_cache_dtype == torch.float8_e4m3fn and plain == HEAD_DIM_QK and _asked_for()
    return layouts.TOKEN_BYTES if ours else plain


def pool_class(original: Any, configurator: Any, *, kind: str, default: type) -> type:
    """Our pool for models of MLA; others, of draft models too, have their own."""
    found = original(configurator, kind=kind, default=default)
    if kind != "mla" or not configurator.use_mla_backend or not _asked_for():
        return found
    from snapmla.integrations.sglang.pool import SnapMLATokenToKVPool

    refuse.settings(resolved_view(configurator.server_args))
    refuse.model(
        configurator.model_config,
        sparse=is_deepseek_dsa(configurator.model_config.hf_config),
        hybrid=configurator.mambaish_config is not None or configurator.is_hybrid_swa,
    )
    return SnapMLATokenToKVPool


def draft_backend(
    original: Any, factory: Any, backend_name: str, backend_map: Any, *rest: Any, **named: Any
) -> Any:
    """Adds ours to the backends of a draft model's steps, or of its extend."""
    from snapmla.integrations.sglang import backend

    def steps() -> Any:
        return backend.SnapMLAMultiStepBackend(
            factory.draft_model_runner, factory.topk, factory.speculative_num_steps
        )

    def extend() -> Any:
        return backend.SnapMLABackend(factory.draft_model_runner)

    make = steps if named.get("stamps_children") else extend
    backend_map = {**backend_map, BACKEND: lambda: (BACKEND, make())}
    return original(factory, backend_name, backend_map, *rest, **named)

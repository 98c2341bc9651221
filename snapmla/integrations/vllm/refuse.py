"""What the backend would compute wrong: it stops the engine with a sentence instead.

Imports nothing of vLLM: configuration and layers are handed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# Methods of vLLM's MLA layer that write the cache, or lead to it; older releases lack the last.
WRITERS = ("forward", "forward_impl", "update_kv_cache")
INSTEAD = (
    "start vLLM without --attention-backend and --kv-cache-dtype, and it takes a backend of its own"
)
SPARSE = (
    "snapmla: sparse attention (DSA: DeepSeek-V3.2, GLM-5) is not served, as this backend reads "
    f"every cached token: {INSTEAD}"
)


def settings(vllm_config: Any) -> None:
    """Stops at a compile pass that writes the cache, and at models of sparse attention.

    Raises:
        ValueError: saying which setting to change.
    """
    passes = vllm_config.compilation_config.pass_config
    if getattr(passes, "fuse_rope_kvcache_cat_mla", False):
        raise ValueError(
            "snapmla: the compile pass fuse_rope_kvcache_cat_mla writes the cache in vLLM's own "
            "format, past this backend: set compilation_config.pass_config."
            "fuse_rope_kvcache_cat_mla = False"
        )
    model(vllm_config)


def model(vllm_config: Any) -> None:
    """Stops at a model whose configuration has ``index_topk``: its indexer chooses tokens.

    Raises:
        ValueError: saying what to use instead.
    """
    of_model = getattr(vllm_config, "model_config", None)
    for part in ("hf_text_config", "hf_config"):  # of a model with images they differ
        topk = getattr(getattr(of_model, part, None), "index_topk", None)
        if topk is not None:
            raise ValueError(f"{SPARSE} (the model's configuration has index_topk = {topk})")


def prefill(dtype: torch.dtype) -> None:
    """Stops at a prefill of quantised queries.

    Raises:
        ValueError: saying which setting to change.
    """
    if dtype != torch.bfloat16:
        raise ValueError(
            f"snapmla: prefill in {dtype} would read a cached prefix as it is stored: set "
            "attention_config.use_prefill_query_quantization = False"
        )


def layers(found: Iterable[tuple[str, Any]], known: type) -> None:
    """Stops at a layer that may write the cache past the backend.

    Some models bring an MLA layer of their own, whose fused operators write the cache in a format
    that they choose by its dtype.  Of ours they know nothing: they write another, without an error.
    So all layers are refused but vLLM's, with its own methods.

    Args:
        found: (name, layer) of those that share a cache group.
        known: vLLM's ``MLAAttention``.

    Raises:
        ValueError: naming the first such layer, its class, and what to use instead.
    """
    for name, each in found:
        layer(name, each, known)


def layer(name: str, found: Any, known: type) -> None:
    """``layers`` for one of them."""
    wrong = _unknown(found, known)
    if wrong is not None:
        kind = type(found)
        raise ValueError(
            f"snapmla: layer {name} ({kind.__module__}.{kind.__qualname__}) {wrong}, so it may "
            f"write the cache in vLLM's own format, past this backend: {INSTEAD}"
        )
    if getattr(found, "use_sparse", False):
        raise ValueError(f"{SPARSE} (layer {name} is sparse)")


def _unknown(found: Any, known: type) -> str | None:
    """Why nobody knows how the layer writes its cache, or None."""
    if not isinstance(found, known):
        return f"is no {known.__name__}"
    for method in WRITERS:
        own = method in vars(found)  # somebody replaced it on this layer alone
        if own or getattr(type(found), method, None) is not getattr(known, method, None):
            return f"replaces {known.__name__}.{method}"
    return None

"""Settings, models and layers that the backend refuses: each stops the engine with a sentence.

The backend would compute wrong results for them.  Nothing of vLLM is imported: configuration and
layers are passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

# Methods of vLLM's MLA layer that write the cache, or lead to it; older releases lack the last.
WRITERS = ("forward", "forward_impl", "update_kv_cache")
INSTEAD = (
    "start vLLM without --attention-backend and --kv-cache-dtype, and it takes a backend of its own"
)
SPARSE = (
    "snapmla: sparse attention (DSA: DeepSeek-V3.2, GLM-5) is not served by this backend, which "
    "reads every cached token: start vLLM with --attention-backend SNAPMLA_SPARSE (0.26: "
    "FLASHMLA_SPARSE, and SNAPMLA_VLLM_SPARSE=1) --kv-cache-dtype fp8_ds_mla"
)
MOST_CHOSEN = 2048  # tokens that a query token's indexer chooses
INDEX_HEADS, INDEX_DIM = (32, 64), 128


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


def cache_dtype(given: str | None, served: Sequence[str]) -> str | None:
    """Reason why a cache dtype is not served, a sentence with the right one; None if it is.

    Args:
        given: ``--kv-cache-dtype``; None: nobody said which.
    """
    if given is None or given in served:
        return None
    return (
        f"snapmla: a cache of {given!r} is not read by this backend: start vLLM with "
        f"--kv-cache-dtype {served[0]}"
    )


def draft(vllm_config: Any) -> None:
    """Stops at a model's own draft layer (MTP) that has no backend which reads the cache.

    vLLM hands the target's backend to no draft, and chooses among its own.

    Raises:
        ValueError: saying which setting to add.
    """
    if drafts_on_vllms(vllm_config) and vllm_config.speculative_config.kv_cache_dtype is None:
        raise ValueError(
            "snapmla: vLLM does not hand --attention-backend to the model's draft layer (MTP), and "
            f"none of its own reads this cache: add {_named(vllm_config)} to --speculative-config"
        )


def drafts_on_vllms(vllm_config: Any) -> bool:
    """True if a model's own draft layer has the attention backend that vLLM chooses."""
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    return getattr(speculative, "method", None) == "mtp" and speculative.attention_backend is None


def draft_elsewhere(vllm_config: Any) -> str:
    """The sentence of a draft layer that runs on vLLM's backend over the same cache."""
    return (
        "snapmla: vLLM does not hand --attention-backend to the model's draft layer (MTP), which "
        f"runs on one of vLLM's own: add {_named(vllm_config)} to --speculative-config"
    )


def _named(vllm_config: Any) -> str:
    """The setting of the target's backend for a draft, as JSON has it."""
    return f'"attention_backend": "{vllm_config.attention_config.backend.name}"'


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
    """Reason why nobody knows how the layer writes its cache, or None."""
    if not isinstance(found, known):
        return f"is no {known.__name__}"
    for method in WRITERS:
        own = method in vars(found)  # somebody replaced it on this layer alone
        if own or getattr(type(found), method, None) is not getattr(known, method, None):
            return f"replaces {known.__name__}.{method}"
    return None


# ------------------------------------------------------------------------------- sparse attention


def sparse_settings(vllm_config: Any, newer: bool) -> None:
    """Stops at what the sparse backend and its indexer do not serve.

    Args:
        newer: whether the release gives a sparse backend's LSE to context parallelism.

    Raises:
        ValueError: saying which setting to change.
    """
    attention, parallel = vllm_config.attention_config, vllm_config.parallel_config
    if getattr(attention, "hisparse_config", None) is not None:
        raise ValueError(
            "snapmla: HiSparse moves tokens of the cache to the host in rows that this backend "
            "would not see: leave attention_config.hisparse_config unset"
        )
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ValueError(
            "snapmla: prefill context parallelism is not served with sparse attention: leave "
            "--prefill-context-parallel-size at 1"
        )
    if not newer and getattr(parallel, "decode_context_parallel_size", 1) > 1:
        raise ValueError(
            "snapmla: this vLLM merges no partial results of sparse attention: leave "
            "--decode-context-parallel-size at 1, or use vLLM 0.33"
        )
    fp4 = getattr(attention, "use_fp4_indexer_cache", False)
    if fp4 or getattr(attention, "indexer_kv_dtype", None) == "mxfp4":
        raise ValueError(
            "snapmla: an index cache of FP4 is not read: leave use_fp4_indexer_cache and "
            "indexer_kv_dtype of the attention configuration unset"
        )


def sparse_layer(
    head_size: int, kv_cache_dtype: str, row_bytes: tuple[int, str] = (576, "fp8_ds_mla")
) -> None:
    """Stops at rows of the cache that are not DeepSeek-V3.2's.

    Raises:
        ValueError: saying what of the layer is otherwise.
    """
    channels, dtype = row_bytes
    if kv_cache_dtype != dtype:
        raise ValueError(
            f"snapmla: sparse attention reads rows of 656 bytes, this layer's cache is "
            f"{kv_cache_dtype!r}: start vLLM with --kv-cache-dtype {dtype}"
        )
    if head_size != channels:
        raise ValueError(
            f"snapmla: sparse attention reads rows of 512 + 64 channels, this layer's have "
            f"{head_size} in all: {INSTEAD}"
        )


def sinks(found: torch.Tensor | None, heads: int, vllm_config: Any) -> None:
    """Stops at sinks of another kind, or where something else than our kernels would leave them
    out.

    Args:
        found: float32 (heads,), or None.

    Raises:
        ValueError: saying which setting to change.
    """
    if found is None:
        return
    if found.dtype != torch.float32 or tuple(found.shape) != (heads,):
        raise ValueError(
            f"snapmla: sinks are float32 ({heads},), a logit a head; this layer's are "
            f"{str(found.dtype).removeprefix('torch.')} {tuple(found.shape)}"
        )
    if vllm_config is None:
        return
    if getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) > 1:
        raise ValueError(
            "snapmla: each rank of context parallelism would count a sink: leave "
            "--decode-context-parallel-size at 1"
        )
    if not getattr(vllm_config.attention_config, "sparse_mla_force_mqa", False):
        raise ValueError(
            "snapmla: vLLM's dense attention of short prompts knows no sinks: set "
            "attention_config.sparse_mla_force_mqa = True"
        )


def indexer(found: Any) -> None:
    """Stops at a layer's indexer whose keys or choices ours does not know.

    Args:
        found: with ``n_head``, ``head_dim``, ``topk_tokens``, ``quant_block_size``, ``k_cache``.

    Raises:
        ValueError: saying what of it is otherwise.
    """
    told = {
        "heads": (getattr(found, "n_head", None), INDEX_HEADS),
        "channels of a key": (getattr(found, "head_dim", None), (INDEX_DIM,)),
        "channels of a scale": (getattr(found, "quant_block_size", None), (INDEX_DIM,)),
    }
    for what, (got, wanted) in told.items():
        if got not in wanted:
            expected = " or ".join(map(str, wanted))
            raise ValueError(
                f"snapmla: the indexer of {type(found).__qualname__} has {got} {what}, ours knows "
                f"{expected}: {INSTEAD}"
            )
    if not 1 <= found.topk_tokens <= MOST_CHOSEN:
        raise ValueError(
            f"snapmla: an indexer that chooses {found.topk_tokens} tokens is not served, 1 to "
            f"{MOST_CHOSEN} are: {INSTEAD}"
        )
    if not hasattr(getattr(found, "k_cache", None), "prefix"):
        raise ValueError(
            f"snapmla: the indexer of {type(found).__qualname__} names no cache of its keys: "
            f"{INSTEAD}"
        )

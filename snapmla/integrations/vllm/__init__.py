"""vLLM's multi-head latent attention on snapmla's kernels, as a plugin.

``register`` is the entry point (group ``vllm.general_plugins``), which vLLM calls in each of its
processes; nothing of vLLM is imported before.  Then::

    vllm serve MODEL --attention-backend CUSTOM --kv-cache-dtype fp8_ds_mla  # 0.26
    vllm serve MODEL --attention-backend SNAPMLA --kv-cache-dtype snapmla    # 0.33

DSA models (DeepSeek-V3.2, GLM-5) have a backend of their own (``sparse.py``), with our indexer::

    SNAPMLA_VLLM_SPARSE=1 vllm serve MODEL --attention-backend FLASHMLA_SPARSE ...     # 0.26
    vllm serve MODEL --attention-backend SNAPMLA_SPARSE --kv-cache-dtype fp8_ds_mla    # 0.33

0.26 has no name left for it, so there it takes the one of vLLM's own, where that is asked for.

Models whose layers choose their own attention (DeepSeek-V4, V4.1) are reached another way, which
serves V3.2, HY-V4 and dense decode of 16 bits, too, and changes nothing but kernels
(``flashmla.py``)::

    SNAPMLA_VLLM_FLASHMLA=1 vllm serve MODEL                                           # both

Prompts are computed by vLLM's own prefill backend, or by ours where it is asked for, which was not
run on a GPU yet (``prefill.py`` says how).

``python -m snapmla.integrations.vllm check`` says whether this installation will work.
"""

from __future__ import annotations

from snapmla.runtime import env

__all__ = ["BACKEND", "CACHE_DTYPE", "SPARSE_BACKEND", "register"]

BACKEND = "SNAPMLA"  # its name where a release lets a plugin choose one, else CUSTOM
CACHE_DTYPE = "snapmla"  # where a release lets a plugin add one, else fp8_ds_mla
SPARSE_BACKEND = f"{BACKEND}_SPARSE"  # likewise, for models of sparse attention
OVERRIDDEN = "FLASHMLA_SPARSE"  # else the name of vLLM's own, if ``env.VLLM_SPARSE`` asks for it
_CLASS = "snapmla.integrations.vllm.backend.SnapMLABackend"
_SPARSE = "snapmla.integrations.vllm.sparse.SnapMLASparseBackend"
_PREFILL = "snapmla.integrations.vllm.prefill.SnapMLAPrefillBackend"


def register() -> None:
    """Makes the backend known to vLLM; may be called again.

    ``CUSTOM`` is given to it in every release.  Releases that take new names get ``SNAPMLA`` and
    the cache dtype ``snapmla``, whose tokens take 644 bytes, and ``SPARSE_BACKEND``; others give
    ``FLASHMLA_SPARSE`` away if ``SNAPMLA_VLLM_SPARSE`` says so.  The prefill backend has the names
    of the first; vLLM does not choose it by itself.  With ``SNAPMLA_VLLM_FLASHMLA`` FlashMLA's
    names inside of vLLM are ours, in releases that are known.
    """
    from snapmla.integrations.vllm import first_step, flashmla

    _register_backends()
    if env.VLLM_FLASHMLA.enabled():
        flashmla.install()
    first_step.watch()


def _register_backends() -> None:
    from vllm.v1.attention.backends.mla.prefill.registry import (
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, _CLASS)
    register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, _PREFILL)
    try:
        from vllm.config.cache import KV_CACHE_DTYPES, register_kv_cache_dtype
    except ImportError:  # a release of fixed names
        if env.VLLM_SPARSE.enabled():
            register_backend(AttentionBackendEnum[OVERRIDDEN], _SPARSE)
        return
    if BACKEND not in AttentionBackendEnum.__members__:
        register_backend(BACKEND, _CLASS)
    if SPARSE_BACKEND not in AttentionBackendEnum.__members__:
        register_backend(SPARSE_BACKEND, _SPARSE)
    if BACKEND not in MLAPrefillBackendEnum.__members__:
        register_mla_prefill_backend(BACKEND, _PREFILL)
    if CACHE_DTYPE not in KV_CACHE_DTYPES:
        register_kv_cache_dtype(CACHE_DTYPE)(_CacheDtype)


class _CacheDtype:
    """Cache dtype as vLLM reads it: bytes (uint8), in a format that only the backend knows."""

    name = CACHE_DTYPE

    def torch_dtype(self):  # type: ignore[no-untyped-def]
        import torch

        return torch.uint8

    def quant_mode(self):  # type: ignore[no-untyped-def]
        from vllm.v1.kv_cache_interface import KVQuantMode

        return KVQuantMode.CUSTOM

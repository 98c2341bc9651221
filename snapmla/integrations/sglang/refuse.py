"""Settings and models that the backend refuses: each stops the engine with a sentence.

The backend cannot serve them, or would compute wrong results.  Nothing of SGLang is imported:
settings and configurations are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla.runtime import env

BACKEND = "snapmla"
PAGE = 64
CACHE_DTYPE = "fp8_e4m3"
# SGLang's backends of multi-head prefill, by target, and what they import.
MULTI_HEAD = {"sm_90a": ("fa3", "sgl_kernel"), "sm_100a": ("fa4", "cutlass")}
MOVES = "moves cached rows without their scales, which lie apart"
TREES = (
    "drafts are verified as a chain: each query token sees all that come before it, "
    "which is wrong for a tree"
)


class Setting(NamedTuple):
    """A setting of SGLang's that is not served."""

    name: str
    unserved: Callable[[Any], bool]
    why: str
    instead: str

    def sentence(self, value: Any) -> str:
        return f"snapmla: {self.name} = {value!r} is not served: {self.why}: {self.instead}"


def _off(option: str) -> str:
    return f"leave out --{option}"


SETTINGS = (
    Setting(
        "kv_cache_dtype", lambda v: v != CACHE_DTYPE,
        "the cache is 8-bit with a scale for each token", f"set --kv-cache-dtype {CACHE_DTYPE}",
    ),
    Setting(
        "page_size", lambda v: v not in (None, PAGE),  # None: SGLang has not chosen one yet
        f"the backend reads pages of {PAGE} tokens", f"set --page-size {PAGE}",
    ),
    Setting(
        "disaggregation_mode", lambda v: v not in (None, "null"), f"it {MOVES}",
        _off("disaggregation-mode"),
    ),
    Setting(
        "enable_pdmux", bool, "its two streams would share the tables of one step",
        _off("enable-pdmux"),
    ),
    Setting(
        "enable_hierarchical_cache", bool, f"HiCache {MOVES}", _off("enable-hierarchical-cache")
    ),
    Setting("enable_hisparse", bool, f"it {MOVES}", _off("enable-hisparse")),
    Setting("enable_lmcache", bool, f"LMCache {MOVES}", _off("enable-lmcache")),
    Setting("enable_flexkv", bool, f"FlexKV {MOVES}", _off("enable-flexkv")),
    Setting(
        "enable_unified_cache_external_linker", bool, f"it {MOVES}",
        _off("enable-unified-cache-external-linker"),
    ),
    Setting(
        "enable_unified_memory", bool, "its pools have a row format of their own",
        _off("enable-unified-memory"),
    ),
    Setting(
        "enable_kv_cache_sharding", bool, "its pools have a row format of their own",
        _off("enable-kv-cache-sharding"),
    ),
    Setting(
        "kv_canary", lambda v: v not in (None, "none"), "it reads rows in SGLang's own format",
        _off("kv-canary"),
    ),
    Setting(
        "dcp_size", lambda v: v not in (None, 1), "a rank would see tokens of its own only",
        "set --dcp-size 1",
    ),
    Setting(
        "attn_cp_size", lambda v: v not in (None, 1),
        "a rank would see query tokens of its own only", "set --attn-cp-size 1",
    ),
    Setting(
        "speculative_eagle_topk", lambda v: v not in (None, 1), TREES,
        "set --speculative-eagle-topk 1",
    ),
    Setting("speculative_algorithm", lambda v: v == "NGRAM", TREES, "choose another algorithm"),
    Setting(
        "speculative_draft_attention_backend", lambda v: v not in (None, BACKEND),
        "the draft model's cache has this backend's format too",
        _off("speculative-draft-attention-backend"),
    ),
    Setting(
        "speculative_draft_kv_cache_dtype", lambda v: v not in (None, "auto", CACHE_DTYPE),
        "the draft model's cache has this backend's format too",
        _off("speculative-draft-kv-cache-dtype"),
    ),
)  # fmt: skip


def asked_for(view: Any) -> bool:
    """True if a server's settings name the backend."""
    return BACKEND in (
        view.attention_backend, view.prefill_attention_backend, view.decode_attention_backend
    )  # fmt: skip


def settings(view: Any) -> None:
    """Stops at settings that are not served.

    Args:
        view: of a server that asks for the backend: its settings, as attributes.

    Raises:
        ValueError: naming each such setting, why, and what to change.
    """
    wrong = list(_wrong(view))
    if wrong:
        raise ValueError("\n".join(wrong))


def _wrong(view: Any) -> Iterator[str]:
    prefill = view.prefill_attention_backend or view.attention_backend
    decode = view.decode_attention_backend or view.attention_backend
    if {prefill, decode} != {BACKEND}:
        yield (
            f"snapmla: attention backends {prefill!r} for prefill and {decode!r} for decode are "
            "not served: no other backend reads the cache, and this one hands multi-head prefill "
            f"to fa3 or fa4 itself: set --attention-backend {BACKEND} alone"
        )
    for setting in SETTINGS:
        value = getattr(view, setting.name, None)  # other releases may lack one
        if setting.unserved(value):
            yield setting.sentence(value)


def model(config: Any, *, sparse: bool, hybrid: bool) -> None:
    """Stops at models that are not plain MLA of 512 latent and 64 RoPE channels.

    Args:
        config: SGLang's model configuration.
        sparse: whether the model has sparse attention (DSA).
        hybrid: whether some of its layers are not MLA over all tokens.

    Raises:
        ValueError: saying what to use instead.
    """
    why, instead = None, _off("attention-backend")
    ranks = config.kv_lora_rank, config.qk_rope_head_dim
    of_model = getattr(config, "hf_text_config", None) or config.hf_config
    if sparse:
        why = "sparse attention (DSA) chooses tokens, and this backend reads every cached token"
        instead += f"; {env.SGLANG_FLASHMLA.name}=1 puts these kernels under FlashMLA's names"
    elif hybrid:
        why = "layers of linear or sliding-window attention are mixed with those of MLA"
    elif ranks != (KV_LORA_RANK, QK_ROPE_HEAD_DIM):
        why = (
            f"kv_lora_rank and qk_rope_head_dim are {ranks[0]} and {ranks[1]}, and the kernels' "
            f"are {KV_LORA_RANK} and {QK_ROPE_HEAD_DIM}"
        )
    elif getattr(of_model, "llama_4_scaling", None) is not None:
        why = "queries are scaled by position (llama_4_scaling), which SGLang leaves to the backend"
    if why is not None:
        raise ValueError(f"snapmla: this model is not served: {why}: {instead}")


def queries(dtype: torch.dtype) -> None:
    """Stops at a model whose activations are not bfloat16.

    Raises:
        ValueError: saying which setting to change.
    """
    if dtype != torch.bfloat16:
        raise ValueError(f"snapmla: dtype {dtype} is not served: set --dtype bfloat16")


def layer(found: Any) -> None:
    """Stops at a layer that is no plain decoder attention.

    Raises:
        ValueError: naming the layer's index and what it asks for.
    """
    wanted = {
        "logit_cap": found.logit_cap or None,
        "sliding_window_size": found.sliding_window_size if found.sliding_window_size > 0 else None,
        "is_cross_attention": found.is_cross_attention or None,
    }
    asked = [f"{name} = {value}" for name, value in wanted.items() if value is not None]
    if asked:
        raise ValueError(
            f"snapmla: layer {found.layer_id} asks for {', '.join(asked)}, which is not served: "
            f"{_off('attention-backend')}"
        )


def arguments(more: dict[str, Any]) -> None:
    """Stops at arguments of a call that would change the result.

    Raises:
        ValueError: naming them.
    """
    asked = sorted(name for name, value in more.items() if value is not None)
    if asked:
        raise ValueError(
            f"snapmla: attention with {', '.join(asked)} is not served: {_off('attention-backend')}"
        )

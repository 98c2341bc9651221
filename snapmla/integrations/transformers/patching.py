"""``patch`` and ``unpatch``: how a model of transformers meets the cache and the kernels.

pre-hook of the decoder     a forward begins: the cache makes room for its tokens
``expand_kv`` of a layer    latents of our cache pass through it; others are expanded as before
``AttentionInterface``      our attention function, under the name ``snapmla``
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from dsl_kernels.formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla.integrations.transformers.attention import TAG, attention
from snapmla.integrations.transformers.cache import SnapMLACache

NAME = "snapmla"
SERVED = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
MAX_HEADS = 128
_STATE = "_snapmla_patch"


class Patch:
    """Changes of a patched model, which ``undo`` takes back."""

    def __init__(self, model: Any, decoder: Any, layers: list[Any]) -> None:
        self.decoder, self.layers = decoder, layers
        self.before = model.config._attn_implementation
        for layer in layers:
            layer.expand_kv = types.MethodType(_expand_kv, layer)
        self.handles = [
            decoder.register_forward_pre_hook(_begin, with_kwargs=True),
            decoder.register_forward_hook(_end, with_kwargs=True),
        ]
        model.set_attn_implementation(NAME)

    def undo(self, model: Any) -> None:
        for handle in self.handles:
            handle.remove()
        for layer in self.layers:
            del layer.expand_kv
        model.set_attn_implementation(self.before)


def patch(model: Any) -> Any:
    """Lets a model of transformers attend over a ``SnapMLACache``.

    From now on each forward wants one, as ``past_key_values`` (``cache`` from 5.24 on), under
    ``torch.no_grad()`` or ``torch.inference_mode()``; ``generate`` does the latter by itself.
    The model's weights stay as they are, and are read where they are.

    Args:
        model: of type ``deepseek_v2``, ``deepseek_v3``, ``deepseek_v32``, ``glm4_moe_lite`` or
            ``glm_moe_dsa``, with latents of 512 + 64 channels; ``...ForCausalLM`` or the decoder.

    Returns:
        The model.  One that is patched already stays as it is.

    Raises:
        ValueError: saying what of the model is not served; it is not changed then.

    Source: transformers' ``AttentionInterface`` and ``Cache``.
    """
    if hasattr(model, _STATE):
        return model
    layers = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    _check(model, layers)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _mask)
    setattr(model, _STATE, Patch(model, _decoder(model), layers))
    return model


def unpatch(model: Any) -> Any:
    """Takes back what ``patch`` did; a model that is not patched stays as it is.

    Args:
        model: that ``patch`` was called on.

    Returns:
        The model, with the attention implementation that it had before.

    Source: our own.
    """
    state = getattr(model, _STATE, None)
    if state is not None:
        state.undo(model)
        delattr(model, _STATE)
    return model


def _decoder(model: Any) -> Any:
    """The module that owns the layers."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else model
    return found if hasattr(found, "layers") else model.base_model


def _check(model: Any, layers: list[Any]) -> None:
    """Raises ValueError for a model that is not served."""
    config = model.config.get_text_config(decoder=True)
    kind = config.model_type
    if kind not in SERVED:
        raise ValueError(f"snapmla: models of type {kind} are not served: {', '.join(SERVED)} are")
    if config.num_attention_heads > MAX_HEADS:
        raise ValueError(f"snapmla: {config.num_attention_heads} heads are more than {MAX_HEADS}")
    numbers = sorted(layer.layer_idx for layer in layers)
    if numbers != list(range(config.num_hidden_layers)):
        raise ValueError(
            f"snapmla: {len(layers)} of the model's {config.num_hidden_layers} layers have latents "
            "of their own (expand_kv): the release of transformers is older than 5.17, or the "
            "model is not of one piece"
        )
    want = KV_LORA_RANK, QK_ROPE_HEAD_DIM
    for layer in layers:
        got = layer.kv_lora_rank, layer.qk_rope_head_dim
        if got != want:
            raise ValueError(f"snapmla: latents of {got} channels; {want} are served")
        projection = layer.kv_b_proj
        if type(projection) is not torch.nn.Linear or projection.bias is not None:
            raise ValueError(
                f"snapmla: kv_b_proj of layer {layer.layer_idx} is a {type(projection).__name__}; "
                "a torch.nn.Linear without bias is wanted, whose weight is read as it is (no "
                "quantised weights, no adapters)"
            )


# -------------------------------------------------------------------------- what transformers calls


def _expand_kv(self: Any, kv_nope: Any, k_rot: Any) -> Any:
    """Latents of our cache stay latents: the attention function takes them."""
    if hasattr(kv_nope, TAG):
        return kv_nope, k_rot
    return type(self).expand_kv(self, kv_nope, k_rot)


def _mask(*args: Any, allow_is_causal_skip: bool = True, **kwargs: Any) -> Any:
    """A mask only where an indexer reads it: attention knows pads and positions by the cache."""
    if allow_is_causal_skip:
        return None
    return eager_mask(*args, allow_is_causal_skip=False, **kwargs)


def _given(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments of a decoder's forward by name."""
    if not args:
        return kwargs
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args)), **kwargs}


def _cache_of(given: Mapping[str, Any]) -> Any:
    found = given.get("cache")
    return given.get("past_key_values") if found is None else found


def _begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a forward: everything that is refused is refused here, before anything is written."""
    given = _given(module, args, kwargs)
    cache = _cache_of(given)
    if not isinstance(cache, SnapMLACache):
        raise ValueError(
            f"snapmla: a patched model wants past_key_values=SnapMLACache(...), and got "
            f"{type(cache).__name__}; unpatch(model) gives it back its own attention"
        )
    if torch.is_grad_enabled():
        raise ValueError("snapmla: there are no gradients: call under torch.no_grad()")
    if given.get("output_attentions"):
        raise ValueError("snapmla: attention weights are never made: output_attentions=False")
    ids = given.get("input_ids")
    tokens = given.get("inputs_embeds") if ids is None else ids
    if tokens is None:
        raise ValueError("snapmla: input_ids or inputs_embeds is wanted")
    pool = cache.pool
    if tokens.shape[0] != pool.batch:
        raise ValueError(
            f"snapmla: {tokens.shape[0]} sequences, over a SnapMLACache with batch_size="
            f"{pool.batch}"
        )
    mask = given.get("attention_mask")
    if pool.fixed:  # a graph brings a mask of its own
        mask = None
    elif mask is not None and getattr(mask, "ndim", 0) != 2:
        raise ValueError("snapmla: attention_mask is wanted as (sequences, positions), or None")
    pool.begin(tokens.shape[1], mask)


def _end(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    _cache_of(_given(module, args, kwargs)).pool.end()

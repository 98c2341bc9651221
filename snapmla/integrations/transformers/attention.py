"""The attention function that transformers calls in each layer: decode, or ``prefill``.

A layer projects queries as transformers' own code does, and meets the latents that ``Cache.update``
gave back.
"""

from __future__ import annotations

from typing import Any

import torch

import snapmla
from snapmla.integrations.transformers import absorbed, prefill
from snapmla.integrations.transformers.pool import MOST

Tensor = torch.Tensor
TAG = "snapmla_layer"  # the attribute by which latents know their cache layer
Result = tuple[Tensor, None]


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    **_: Any,
) -> Result:
    """Attends for a layer: the function under our name in ``AttentionInterface``.

    Args:
        module: the layer.
        query: (b, h, n, d_nope + 64), RoPE applied.
        key: latents of the new tokens, (b, 1, n, 512), tagged by our cache layer.
        value: their RoPE parts, (b, 1, n, 64).
        attention_mask: ignored: the cache knows pads and positions.
        scaling: of logits, YaRN's factor in it.
        indices: int32 (b, n, topk), positions that a DSA model's indexer chose.

    Returns:
        (b, n, h, d_v), and None for weights.

    Raises:
        ValueError: the latents are not a ``SnapMLACache``'s, or dropout is asked for.
    """
    layer = getattr(key, TAG, None)
    if layer is None:
        raise ValueError("snapmla: this layer was called without a SnapMLACache; unpatch(model)")
    if dropout:
        raise ValueError(f"snapmla: dropout {dropout} of attention is for training: model.eval()")
    pool = layer.pool
    if indices is not None and indices.shape[-1] >= pool.extent:
        indices = None  # every position is chosen
    if pool.new > MOST:
        return prefill.attention(module, query, (key, value), layer, scaling, indices), None
    up, down = absorbed.weights(module, query)
    q_nope, q_rope = absorbed.queries(module, query, up)
    q = snapmla.quantize_q(q_nope, q_rope)
    if indices is None:
        found = snapmla.decode(
            q, layer.cache, pool.block_table, pool.lengths, softmax_scale=scaling,
            plan=pool.plan(), row_seqlens=pool.limits(),
        )  # fmt: skip
    else:
        found = snapmla.decode(
            q, layer.cache, indices=pool.chosen_slots(indices), softmax_scale=scaling,
            plan=pool.sparse_plan(indices.shape[-1]),
        )  # fmt: skip
    return absorbed.results(found[0].to(query.dtype), down), None

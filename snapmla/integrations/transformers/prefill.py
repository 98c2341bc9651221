"""Attention of prompts: more query tokens than decode takes, over what is cached and what is new.

New tokens are attended to as the layer computed them; older ones come back out of the FP8 cache.
Two ways, by ``SnapMLACache(prefill=)``:

    kernels  of dense attention ``mha_prefill``: new tokens among each other, then chunks of what is
             cached, merged by LSE; pads are left out.  Heads of 128 + 64 and 128 channels.  Of
             sparse attention ``sparse_prefill`` over the latents of all tokens, in bfloat16.
    torch    ``scaled_dot_product_attention`` over K and V of all positions, with the mask.

``auto`` takes the kernels on a GPU that has them, for heads that they serve, if they are built or
can be compiled.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

import snapmla
from dsl_kernels.formats.dims import HEAD_DIM_QK
from dsl_kernels.spec import VariantSpec
from snapmla.errors import SnapMLAError
from snapmla.integrations.transformers import absorbed
from snapmla.mha import mha_prefill
from snapmla.mha.prefill import kernels as mha_kernels
from snapmla.runtime import variants
from snapmla.sparse.prefill import sparse_prefill
from snapmla.sparse.rows_kernel import row_tile_of

Tensor = torch.Tensor
Latents = tuple[Tensor, Tensor]  # (b, 1, n, 512), (b, 1, n, 64)
WAYS = ("auto", "kernels", "torch")
CONTEXT = 16384  # cached tokens of all sequences whose K and V are expanded at a time
NOPE, D_V = 128, 128  # channels of a head that mha_prefill has kernels for
_log = logging.getLogger(__name__)
_there: dict[tuple[torch.device, torch.dtype, bool], bool] = {}  # sparse or not


def attention(
    module: Any, query: Tensor, new: Latents, layer: Any, scaling: float, indices: Tensor | None
) -> Tensor:
    """query (b, h, n, d) -> (b, n, h, d_v); ``indices`` where not every position is chosen."""
    sparse = indices is not None
    if layer.prefill == "torch" or (layer.prefill == "auto" and not serves(module, query, sparse)):
        return by_torch(module, query, new, layer, scaling, indices)
    if indices is not None:
        return by_sparse_kernel(module, query, new, layer, scaling, indices)
    return by_dense_kernels(module, query, new, layer, scaling)


def dense_heads(of: Any) -> bool:
    """True if ``mha_prefill`` has kernels for the heads of a layer or a configuration."""
    return (of.qk_nope_head_dim, of.v_head_dim) == (NOPE, D_V)


def serves(module: Any, query: Tensor, sparse: bool) -> bool:
    """True if the kernels are there for a prompt; if they should be and are not, says so once."""
    if not query.is_cuda or not (sparse or dense_heads(module)):
        return False
    if query.dtype not in ((torch.bfloat16,) if sparse else (torch.bfloat16, torch.float16)):
        return False
    key = query.device, query.dtype, sparse
    if key not in _there:
        try:
            if sparse:
                arch, tile = variants.arch_of(query.device), row_tile_of(query.shape[1])
                spec = VariantSpec(op="sparse_prefill", arch=arch, row_tile=tile, d_qk=HEAD_DIM_QK)
                variants.kernel(spec, query.device.type)
            else:
                mha_kernels(query.device, query.shape[-1], query.dtype, "whole")
            _there[key] = True
        except SnapMLAError as error:
            _there[key] = False
            _log.warning("snapmla: prompts go through torch's attention: %s", error)
    return _there[key]


# ------------------------------------------------------------------------------------------ torch


def by_torch(
    module: Any, query: Tensor, new: Latents, layer: Any, scaling: float, indices: Tensor | None
) -> Tensor:
    """``scaled_dot_product_attention`` over all positions."""
    pool, n = layer.pool, query.shape[2]
    latent, rope = all_positions(layer, new)
    k, v = type(module).expand_kv(module, latent, rope)
    mask = None
    if indices is not None or pool.seen > n or pool.has_pads():
        may = pool.allowed()
        if indices is not None:
            may &= torch.zeros_like(may).scatter_(-1, indices.long(), True)
        # the smallest number, not -inf: a pad that sees nothing is no NaN, whoever reads it
        mask = torch.zeros(may.shape, dtype=query.dtype, device=query.device)
        mask = mask.masked_fill_(~may, torch.finfo(query.dtype).min)[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, k, v, attn_mask=mask, scale=scaling, is_causal=mask is None
    )
    return out.transpose(1, 2)


def all_positions(layer: Any, new: Latents) -> Latents:
    """(b, 1, seen, 512), (b, 1, seen, 64): old tokens out of the cache, zeros at pads."""
    pool, (latent, rope) = layer.pool, new
    old = pool.seen - pool.new
    if not old:
        return new
    slots = pool.slot_of[:, :old].flatten()
    c, r = snapmla.fetch_dequant(layer.cache, slots, dtype=latent.dtype)
    shape = pool.batch, 1, old, -1
    return torch.cat([c.view(shape), latent], 2), torch.cat([r.view(shape), rope], 2)


# ---------------------------------------------------------------------------------------- kernels


def by_dense_kernels(
    module: Any, query: Tensor, new: Latents, layer: Any, scaling: float
) -> Tensor:
    """``mha_prefill`` of new tokens, then of chunks of what is cached."""
    pool, (b, h, n, _) = layer.pool, query.shape
    rows, begin = pool.packed()
    q = query.transpose(1, 2).reshape(b * n, h, -1)
    latent, rope = (part.reshape(b * n, -1) for part in new)
    if rows is not None:
        q, latent, rope = q[rows], latent[rows], rope[rows]
    heads = lambda c: module.kv_b_proj(c).view(len(c), h, -1).split([NOPE, D_V], -1)
    k, v = heads(latent)
    out, lse = mha_prefill(
        q, k, v, begin, begin, n, n, softmax_scale=scaling, k_rope=rope.unsqueeze(1)
    )
    old, room = pool.seen - n, max(CONTEXT // b, 1)
    for first in range(0, old, room):
        most = min(room, old - first)
        counts = (pool.before - first).clamp(0, most).cumsum(0, dtype=torch.int32)
        keys = torch.nn.functional.pad(counts, (1, 0))
        starts = torch.full_like(pool.before, first)
        c, r = snapmla.fetch_dequant(
            layer.cache, pool.block_table, cu_seqlens=keys, seq_starts=starts, total=b * most,
            dtype=q.dtype,
        )  # fmt: skip
        k, v = heads(c)
        part, part_lse = mha_prefill(
            q, k, v, begin, keys, n, most, softmax_scale=scaling, causal=False,
            k_rope=r.unsqueeze(1),
        )  # fmt: skip
        snapmla.merge_state(out, lse, part, part_lse, out=out, lse=lse)
    if rows is not None:
        out = out.new_zeros(b * n, h, D_V).index_copy_(0, rows, out)
    return out.view(b, n, h, D_V)


def by_sparse_kernel(
    module: Any, query: Tensor, new: Latents, layer: Any, scaling: float, indices: Tensor
) -> Tensor:
    """``sparse_prefill`` of absorbed queries over the latents of all positions."""
    pool, (b, h, n, _) = layer.pool, query.shape
    up, down = absorbed.weights(module, query)
    q = torch.cat(absorbed.queries(module, query, up), -1).view(b * n, h, -1)
    kv = torch.cat(all_positions(layer, new), -1).view(b * pool.seen, 1, -1)
    first = torch.arange(b, dtype=torch.int32, device=q.device)[:, None, None] * pool.seen
    seen = pool.chosen_slots(indices) >= 0
    rows = torch.where(seen, indices + first, -1).view(b * n, 1, -1)
    out, _, _ = sparse_prefill(q, kv, rows, scaling)
    return absorbed.results(out.view(b, n, h, -1), down)

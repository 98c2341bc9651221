"""Some lines of PyTorch that say what a call computes; ``api_page.py`` prints them in its entry.

They compute with the stored bytes, in float32.  Tests run what the page shows beside the kernels
(``tests/docs/test_equivalents.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor, einsum

from snapmla import PagedKVCache, QuantizedQuery


def decode(
    query: QuantizedQuery, cache: PagedKVCache, block_table: Tensor, lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attends to the tokens of each sequence; format ``fp8``, causal, ``lens`` cache_seqlens."""
    q = torch.cat([query.nope.float(), query.rope.float()], -1) * query.scale[..., None]
    kv = torch.cat([cache.content.float(), cache.rope.float()], -1) * cache.scale[..., None]
    s_q, out, lse = q.shape[1], torch.zeros_like(q[..., :512]), torch.zeros_like(q[..., 0]).mT
    for i, length in enumerate(lens.tolist()):
        k = kv[block_table[i, : -(-length // cache.page_size)]].flatten(0, 1)[:length]
        visible = length - (s_q - 1 - torch.arange(s_q, device=q.device))  # tokens a query sees
        hidden = torch.arange(length, device=q.device) >= visible[:, None]
        logits = scale * einsum("shd,td->hst", q[i], k).masked_fill(hidden, -torch.inf)
        lse[i] = logits.logsumexp(-1)
        out[i] = einsum("hst,td->shd", logits.softmax(-1).nan_to_num(), k[:, :512])
    return out, lse  # a row that sees no token: 0 and -inf


def sparse_decode(
    query: QuantizedQuery, cache: PagedKVCache, indices: Tensor, counts: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attends to the tokens that ``indices`` names; format ``fp8``, ``counts`` topk_length."""
    q = torch.cat([query.nope.float(), query.rope.float()], -1) * query.scale[..., None]
    kv = torch.cat([cache.content.float(), cache.rope.float()], -1) * cache.scale[..., None]
    rows = kv.flatten(0, 1)  # row page * page_size + offset
    place = torch.arange(indices.shape[-1], device=q.device)
    token = (indices >= 0) & (indices < len(rows)) & (place < counts[:, None, None])
    k = rows[indices.where(token, 0)].where(token[..., None], 0.0)  # (b, s_q, topk, 576)
    logits = scale * einsum("bshd,bstd->bsht", q, k)
    logits = logits.masked_fill(~token[:, :, None], -torch.inf)
    out = einsum("bsht,bstd->bshd", logits.softmax(-1).nan_to_num(), k[..., :512])
    return out, logits.logsumexp(-1).mT


def scores(q: Tensor, w: Tensor, cache: Tensor, block_table: Tensor, lens: Tensor) -> Tensor:
    """Scores each cached token for each query token; -inf where the query token does not see it."""
    pages = cache.flatten(1)  # (pages, 64 * 132): the keys of 64 tokens, then their scales
    keys = pages[:, : 64 * 128].view(torch.float8_e4m3fn).float().view(-1, 64, 128)
    scale = pages[:, 64 * 128 :].view(torch.float32)
    (b, s_q, _, _), tokens = q.shape, 64 * block_table.shape[1]
    out = torch.full((b, s_q, tokens), -torch.inf, device=q.device)
    for i, length in enumerate(lens.tolist()):
        used = block_table[i, : -(-length // 64)]  # entries behind them may be anything
        k, k_scale = keys[used].flatten(0, 1), scale[used].flatten()
        found = einsum("sh,sht->st", w[i], einsum("shd,td->sht", q[i].float(), k).relu()) * k_scale
        for j, seen in enumerate(range(length - s_q + 1, length + 1)):
            out[i, j, : max(seen, 0)] = found[j, : max(seen, 0)]
    return out.flatten(0, 1)  # rows of all query tokens


# (module, name) of a public call -> what it computes
EQUIVALENTS = {
    ("snapmla", "decode"): (decode, sparse_decode),
    ("snapmla.dsa", "index_logits"): (scores,),
}

"""Sequences whose tokens are dealt to ranks in turns: shards, the same tokens in one cache, and
queries; drawn alike in every process."""

from __future__ import annotations

import torch
from torch import Tensor

import snapmla
from snapmla.testing import selfcheck

PAGE, SCALE = 64, 192**-0.5
Shard = tuple[snapmla.PagedKVCache, Tensor, Tensor]  # cache, block_table, cache_seqlens


def own_tokens(count: int, rank: int, ranks: int, interleave: int) -> int:
    """Number of the first ``count`` tokens that are a rank's (docs/integration.md)."""
    turns, rest = divmod(max(count, 0), interleave * ranks)
    return turns * interleave + min(max(rest - rank * interleave, 0), interleave)


def shard(
    lengths: tuple[int, ...], rank: int, ranks: int, interleave: int, device: str = "cpu"
) -> Shard:
    """A rank's tokens of sequences of these lengths."""
    torch.manual_seed(3)
    width = -(-max(lengths) // PAGE)
    cache = snapmla.PagedKVCache.allocate(width * len(lengths), PAGE, device=device)
    table = torch.arange(width * len(lengths), dtype=torch.int32).view(len(lengths), width)
    found = []
    for i, length in enumerate(lengths):
        mine = torch.arange(length) // interleave % ranks == rank
        c, r = (t.bfloat16()[mine].to(device) for t in selfcheck.sample_tokens(length))
        found.append(len(c))
        snapmla.append_kv(cache, c, r, width * PAGE * i + torch.arange(len(c), device=device))
    assert found == [own_tokens(n, rank, ranks, interleave) for n in lengths]
    return cache, table.to(device), torch.tensor(found, dtype=torch.int32, device=device)


def whole(lengths: tuple[int, ...], shards: list[Shard], interleave: int) -> Shard:
    """The shards' stored bytes in one cache: scales are those of tokens' places in the shards."""
    ranks, (cache, table, _) = len(shards), shards[0]
    joined = snapmla.PagedKVCache.allocate(cache.num_pages, PAGE, device=cache.device)
    for named in joined.named_tensors.values():
        named.view(torch.uint8).zero_()
    room = table.shape[1] * PAGE
    for rank, (part, _, counts) in enumerate(shards):
        for i, length in enumerate(lengths):
            place = torch.arange(length, device=cache.device)
            to = room * i + place[place // interleave % ranks == rank]
            at = room * i + torch.arange(int(counts[i]), device=cache.device)
            for name in ("content_u8", "rope", "scale"):
                target, source = getattr(joined, name), getattr(part, name)
                target[to // PAGE, to % PAGE] = source[at // PAGE, at % PAGE]
    return joined, table, torch.tensor(lengths, dtype=torch.int32, device=cache.device)


def plain_queries(tokens: tuple[int, ...], heads: int) -> Tensor:
    """Queries bfloat16 (*tokens, heads, 576), as an engine has them."""
    torch.manual_seed(4)
    return torch.randn(*tokens, heads, 576).bfloat16()

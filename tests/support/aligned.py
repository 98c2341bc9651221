"""Queries that equal a key: all products of Q.K have one sign, the tensor core's cuts add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import snapmla
from snapmla import PagedKVCache, QuantizedQuery
from snapmla.reference import mla_decode_reference, quantize_rows

SCALE = 192**-0.5
PAGE = 64
TOKENS = 60
KINDS = ("key", "loud channel", "448 among 3.75")


@dataclass
class Aligned:
    """One sequence in one page, and a query token of it."""

    q: QuantizedQuery
    cache: PagedKVCache
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, queries: torch.Tensor) -> Aligned:
        """Stores keys (n, 576) and a query token of queries (h, 576), without a kernel."""
        n, device = len(keys), keys.device
        nope, rope, scale = quantize_rows(
            keys[:, :512], keys[:, 512:], slots=torch.arange(n, device=device)
        )
        cache = PagedKVCache.allocate(2, PAGE, device=device)
        cache.content_u8[1, :n] = nope.view(torch.uint8)
        cache.rope[1, :n], cache.named_tensors["scale"][1, :n] = rope, scale
        q = QuantizedQuery(
            *quantize_rows(queries[None, None, :, :512], queries[None, None, :, 512:])
        )
        table = torch.ones(1, 1, dtype=torch.int32, device=device)
        return cls(q, cache, table, torch.tensor([n], dtype=torch.int32, device=device))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of ``decode_errors``, behind the results."""
        return self.q, self.cache, self.block_table, self.cache_seqlens, SCALE

    @property
    def stored(self) -> tuple[Any, ...]:
        """Of ``mla_decode_reference`` and ``lse_bounds``."""
        q, cache = self.q, self.cache
        return (
            q.nope, q.rope, q.scale, cache.content, cache.rope, cache.named_tensors["scale"],
            self.block_table, self.cache_seqlens, SCALE,
        )  # fmt: skip

    def logits(self) -> torch.Tensor:
        """(h, n) fp64, exact on the stored bytes."""
        q, k = self.q, self.cache
        n = int(self.cache_seqlens[0])
        scale = k.named_tensors["scale"][1, :n]
        dot = q.nope[0, 0].double() @ k.content[1, :n].double().T
        dot = dot + q.rope[0, 0].double() @ k.rope[1, :n].double().T
        return dot * q.scale[0, 0].double()[:, None] * scale.double() * SCALE

    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) in fp64."""
        return mla_decode_reference(*self.stored)

    def plan(self, **options: Any) -> snapmla.DecodePlan:
        heads = self.q.nope.shape[2]
        return snapmla.plan_decode(
            self.cache_seqlens, heads, 1, page_size=PAGE, max_pages=1, num_parts=1, **options
        )

    def decoded(
        self, plan: snapmla.DecodePlan, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return snapmla.decode(
            self.q, self.cache, self.block_table, self.cache_seqlens, softmax_scale=SCALE,
            plan=plan, out_dtype=dtype,
        )  # fmt: skip


def each_its_key(
    kind: str, heads: int, logit: float, device: torch.device | str = "cpu"
) -> Aligned:
    """Head h's query is the key of token h mod 60, with that logit; each key has its own loud
    channel where the kind has one."""
    random = torch.Generator().manual_seed(0)
    keys = torch.randn(TOKENS, 576, generator=random)
    token = torch.arange(TOKENS)
    loud = 256 * (token % 2) + token // 2  # in the first step of either chain
    if kind == "loud channel":
        keys[token, loud] *= 100
    if kind == "448 among 3.75":
        keys[:, :512] = 3.75 * keys[:, :512].sign()
        keys[:, 512:] = 0
        keys[token, loud] = 448
    heads_token = torch.arange(heads) % TOKENS
    keys = keys.bfloat16().float().to(device)
    made = Aligned.of(keys, keys[heads_token.to(device)])
    own = made.logits()[torch.arange(heads), heads_token]
    made.q.scale.mul_((logit / own).float())
    return made


def two_of_one_logit(logit: float, heads: int = 16) -> Aligned:
    """Two tokens that weigh 1/2 each: the query itself, and one whose logit is in one channel."""
    key = torch.randn(576, generator=torch.Generator().manual_seed(0))
    key[512:] = 0
    single, at = torch.zeros(576), int(key.abs().argmax())
    single[at] = key @ key / key[at]
    made = Aligned.of(torch.stack([key, single]).bfloat16().float(), key.expand(heads, 576))
    scale = made.cache.named_tensors["scale"]
    own, other = made.logits()[0]
    scale[1, 1] *= float(own / other)
    made.q.scale.mul_(float(logit / own))
    return made

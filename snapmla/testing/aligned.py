"""Queries that equal a key: all products of Q.K have one sign, the tensor core's cuts add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from snapmla.api import decode
from snapmla.cache.paged import PagedKVCache
from snapmla.cache.quant import QuantizedQuery
from snapmla.dense import DecodePlan
from snapmla.dense.plan_decode import plan_decode
from snapmla.testing.reference import mla_decode_reference
from snapmla.testing.rounding import quantize_rows

SCALE = 192**-0.5
PAGE = 64
TOKENS = 60
KINDS = ("key", "heavy tails", "loud channel", "448 among 3.75")


@dataclass
class Aligned:
    """One sequence, in pages 1, 2, ... of its cache, and a query token of it."""

    q: QuantizedQuery
    cache: PagedKVCache
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor

    @classmethod
    def stored_as(cls, q: QuantizedQuery, tokens: tuple[torch.Tensor, ...]) -> Aligned:
        """A cache of tokens that are quantised: content (n, 512), rope (n, 64), scale (n,)."""
        content, rope, scale = tokens
        n, device = len(scale), scale.device
        pages = -(-n // PAGE)
        cache = PagedKVCache.allocate(pages + 1, PAGE, device=device)
        position = torch.arange(n, device=device)
        at = (1 + position // PAGE, position % PAGE)
        cache.content_u8[at] = content.view(torch.uint8)
        cache.rope[at], cache.named_tensors["scale"][at] = rope, scale
        table = torch.arange(1, pages + 1, dtype=torch.int32, device=device)[None]
        return cls(q, cache, table, torch.tensor([n], dtype=torch.int32, device=device))

    @classmethod
    def of(cls, keys: torch.Tensor, queries: torch.Tensor) -> Aligned:
        """Keys (n, 576) and one query token (h, 576), quantised without a kernel."""
        rows = queries[None, None]
        slots = torch.arange(len(keys), device=keys.device)
        tokens = quantize_rows(keys[:, :512], keys[:, 512:], slots=slots)
        return cls.stored_as(
            QuantizedQuery(*quantize_rows(rows[..., :512], rows[..., 512:])), tokens
        )

    def only(self, token: int) -> Aligned:
        """The same query, and a cache of that token's bytes."""
        return Aligned.stored_as(self.q, tuple(x[token : token + 1] for x in self.tokens))

    @property
    def tokens(self) -> tuple[torch.Tensor, ...]:
        """(content, rope, scale) as they are stored, one token after another."""
        n, cache = int(self.cache_seqlens[0]), self.cache
        content = cache.content_u8[1:].flatten(0, 1)[:n].view(torch.float8_e4m3fn)
        scale = cache.named_tensors["scale"][1:].flatten()[:n]
        return content, cache.rope[1:].flatten(0, 1)[:n], scale

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of ``decode_errors`` that follow the results."""
        return self.q, self.cache, self.block_table, self.cache_seqlens, SCALE

    @property
    def stored(self) -> tuple[Any, ...]:
        """Leading arguments of ``mla_decode_reference`` and ``lse_bounds``."""
        q, cache = self.q, self.cache
        return (
            q.nope, q.rope, q.scale, cache.content, cache.rope, cache.named_tensors["scale"],
            self.block_table, self.cache_seqlens, SCALE,
        )  # fmt: skip

    def logits(self) -> torch.Tensor:
        """(h, n) fp64, exact on the stored bytes."""
        content, rope, scale = (x.double() for x in self.tokens)
        q = self.q
        dot = q.nope[0, 0].double() @ content.T + q.rope[0, 0].double() @ rope.T
        return dot * q.scale[0, 0].double()[:, None] * scale * SCALE

    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) in fp64."""
        return mla_decode_reference(*self.stored)

    def plan(self, **options: Any) -> DecodePlan:
        """A plan with one part, so that nothing is split or combined."""
        heads, width = self.q.nope.shape[2], self.block_table.shape[1]
        return plan_decode(
            self.cache_seqlens, heads, 1, page_size=PAGE, max_pages=width, num_parts=1, **options
        )

    def decoded(
        self, plan: DecodePlan, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the kernel."""
        return decode(
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
    if kind == "heavy tails":  # Student's t with 3 degrees of freedom
        keys *= (3 / torch.randn(3, TOKENS, 576, generator=random).square().sum(0)).sqrt()
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


def two_of_one_logit(logit: float, heads: int = 16, device: torch.device | str = "cpu") -> Aligned:
    """Two tokens that weigh 1/2 each: the query itself, and one whose logit is in one channel."""
    key = torch.randn(576, generator=torch.Generator().manual_seed(0))
    key[512:] = 0
    single, at = torch.zeros(576), int(key.abs().argmax())
    single[at] = key @ key / key[at]
    keys = torch.stack([key, single]).bfloat16().float().to(device)
    made = Aligned.of(keys, keys[:1].expand(heads, 576))
    scale = made.cache.named_tensors["scale"]
    own, other = made.logits()[0]
    scale[1, 1] *= float(own / other)
    made.q.scale.mul_(float(logit / own))
    return made

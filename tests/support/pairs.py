"""Calls by SnapMLA's names: a pool as an engine holds it, and steps over it."""

from __future__ import annotations

import math

import torch

import snapmla
import snapmla.dense.plan_decode
from snapmla.compat import flash_mla_fp8 as names

SCALE = 192**-0.5
SLOTS, PAGE, WIDTH = 16 * 64, 64, 10


class Pool:
    """A layer's pool as the host framework allocates it: flat slots, NaN in every unused byte."""

    def __init__(self) -> None:
        self.lora = torch.full((SLOTS, 1, 512), 0x7F, dtype=torch.uint8)
        self.scale = torch.full((SLOTS, 1, 1), math.nan)
        self.rope = torch.full((SLOTS, 1, 64), math.nan, dtype=torch.bfloat16)

    def append(self, key: torch.Tensor, slots: torch.Tensor) -> None:
        names.quantize_and_cache_k(
            key=key, k_lora_cache=self.lora, k_lora_scale_cache=self.scale,
            k_rope_cache=self.rope, indices=slots, head_dim_v=512,
        )  # fmt: skip

    def primary(self, page_size: int = PAGE) -> snapmla.PagedKVCache:
        """The same memory for the primary API."""
        return snapmla.PagedKVCache.from_tensors(
            self.lora.view(-1, page_size, 512), self.rope.view(-1, page_size, 64),
            self.scale.view(-1, page_size),
        )  # fmt: skip


class Step:
    """One decode step of sequences with these lengths over a freshly filled pool."""

    def __init__(self, lengths: tuple[int, ...], heads: int, s_q: int) -> None:
        self.pool, self.heads, self.s_q = Pool(), heads, s_q
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.table = torch.full((len(lengths), WIDTH), -1, dtype=torch.int32)
        order, slots = torch.randperm(SLOTS // PAGE).tolist(), []
        for i, n in enumerate(lengths):
            pages = [order.pop() for _ in range(-(-n // PAGE))]
            self.table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            slots += [pages[t // PAGE] * PAGE + t % PAGE for t in range(n)]
        self.keys = torch.randn(len(slots), 1, 576).bfloat16()
        self.slots = torch.tensor(slots, dtype=torch.int32)
        self.pool.append(self.keys, self.slots)
        self.q = torch.randn(len(lengths), s_q, heads, 576).bfloat16()

    def decode(self, pair: names.Pair, **extra: object) -> names.Pair:
        """Call as the framework makes it: keywords, views of the pool."""
        q_nope, q_scale, q_rope = names.quantize_ckv_per_token_head(self.q, 512)
        arguments = {
            "q_nope": q_nope, "q_rope": q_rope,
            "k_cache_lora": self.pool.lora.view(torch.float8_e4m3fn).view(-1, PAGE, 1, 512),
            "k_cache_rope": self.pool.rope.view(-1, PAGE, 1, 64),
            "q_scale": q_scale, "k_scale": self.pool.scale.view(-1, PAGE, 1, 1),
            "block_table": self.table, "cache_seqlens": self.lengths, "head_dim_v": 512,
            "tile_scheduler_metadata": pair[0], "num_splits": pair[1],
            "softmax_scale": SCALE, "causal": True,
        }  # fmt: skip
        return names.flash_mla_ckv_fp8_per_token(**{**arguments, **extra})  # type: ignore[arg-type]

    def metadata(self, **extra: object) -> names.Pair:
        rows = self.heads * self.s_q
        return names.get_mla_metadata(self.lengths, rows, 1, **extra)  # type: ignore[arg-type]

    def primary(self, **extra: object) -> names.Pair:
        q = snapmla.quantize_q(self.q[..., :512], self.q[..., 512:])
        return snapmla.decode(
            q, self.pool.primary(), self.table, self.lengths, softmax_scale=SCALE,
            empty_lse="+inf", **extra,  # type: ignore[arg-type]
        )  # fmt: skip

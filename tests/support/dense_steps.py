"""Decode steps over a 16-bit cache through the public API, on any device, and whether they are
right: FlashMLA's gates to fp64.

Every cache starts as NaN, tables end in absurd ids.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import snapmla
from snapmla.testing import dense_job

SCALE = 576**-0.5
ABSURD_PAGES = (2147480000, -1)


@dataclass
class DenseStep:
    """One step's inputs.

    Attributes:
        q: (b, s_q, h, 576), or ragged (total_q, h, 576) with ``begin``, int32 (b + 1,).
    """

    cache: snapmla.PagedKVCache
    q: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    begin: torch.Tensor | None = None

    @staticmethod
    def make(
        lengths: Sequence[int], heads: int, s_q: int = 1, page_size: int = 64,
        dtype: torch.dtype = torch.bfloat16, kv_heads: int = 1, *,
        tokens: Sequence[int] | None = None, device: str = "cpu", seed: int = 0,
    ) -> DenseStep:  # fmt: skip
        """Query tokens of a sequence: ``s_q``, or ragged ``tokens`` and room for three more."""
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-n // page_size) for n in lengths]
        order = torch.randperm(sum(counts) + 1, generator=generator).tolist()
        kv = torch.full((len(order), page_size, kv_heads, 576), math.nan)
        table = torch.empty(len(lengths), max(counts) + 2, dtype=torch.int32)
        table[:, ::2], table[:, 1::2] = ABSURD_PAGES
        for i, (n, count) in enumerate(zip(lengths, counts, strict=True)):
            for j in range(count):
                table[i, j] = page = order.pop()
                rows = min(page_size, n - j * page_size)
                kv[page, :rows] = 0.1 * (
                    torch.randn(rows, kv_heads, 576, generator=generator) + 0.5
                )
        begin, shape = None, (len(lengths), s_q)
        if tokens is not None:
            begin = torch.tensor([0, *itertools.accumulate(tokens)], dtype=torch.int32)
            begin, shape = begin.to(device), (sum(tokens) + 3,)  # type: ignore[assignment]
        q = 10 * torch.randn(*shape, heads, 576, generator=generator)
        return DenseStep(
            snapmla.PagedKVCache.from_tensors(kv.to(device, dtype)), q.to(device, dtype),
            table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), begin,
        )  # fmt: skip

    def plan(self, **options: Any) -> snapmla.DecodePlan:
        *_, heads, _ = self.q.shape
        given: dict[str, Any] = {"s_q": self.q.shape[1]}
        if self.begin is not None:
            given = {"cu_seqlens_q": self.begin, "total_q": self.q.shape[0]}
        return snapmla.plan_decode(
            self.cache_seqlens, heads, page_size=self.cache.page_size,
            max_pages=self.block_table.shape[1], cache_dtype=self.cache.dtype,
            num_kv_heads=self.cache.num_kv_heads, **{**given, **options},
        )  # fmt: skip

    def decode(
        self, plan: snapmla.DecodePlan | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"softmax_scale": SCALE, "plan": plan, **options}
        return snapmla.decode(self.q, self.cache, self.block_table, self.cache_seqlens, **given)

    def errors(self, out: torch.Tensor, lse: torch.Tensor, **rule: Any) -> dense_job.DenseErrors:
        assert self.cache.kv is not None
        return dense_job.decode_errors(
            out, lse, self.q, self.cache.kv, self.block_table, self.cache_seqlens, SCALE,
            cu_seqlens_q=self.begin, **rule,
        )  # fmt: skip

    def assert_right(self, out: torch.Tensor, lse: torch.Tensor, **rule: Any) -> None:
        errors = self.errors(out, lse, **rule)
        assert errors.right, str(errors)


def results(step: DenseStep, fill: float = 7.0) -> dict[str, torch.Tensor]:
    """``out`` and ``lse`` of a step."""
    *batch, tokens, heads, _ = step.q.shape
    out = step.q.new_full((*batch, tokens, heads, 512), fill)
    return {"out": out, "lse": out.new_full((*batch, heads, tokens), fill, dtype=torch.float32)}

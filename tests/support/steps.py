"""A decode step's inputs through the public API, and whether what came out is right.

Every cache starts as NaN bytes in all three tensors, tables end in absurd ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import snapmla
from snapmla import PagedKVCache, QuantizedQuery
from snapmla.testing import selfcheck
from snapmla.testing.rounding import QuantConfig

SCALE = 192**-0.5


@dataclass
class Step:
    """One decode step's inputs, made through the public API."""

    cache: PagedKVCache
    q: QuantizedQuery
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor


def make_step(
    lengths: tuple[int, ...],
    num_heads: int,
    s_q: int,
    page_size: int = 64,
    layout: str = "split",
    granularity: str = "token_head",
) -> Step:
    """Appends every token through ``append_kv`` (one call, shuffled order, some skipped slots)."""
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + 1).tolist()
    cache = selfcheck.poisoned_cache(len(order), page_size, layout)
    table = torch.full((len(lengths), max(counts) + 2), selfcheck.ABSURD_PAGE, dtype=torch.int32)
    slots: list[int] = []
    for i, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = [order.pop() for _ in range(count)]
        table[i, :count] = torch.tensor(pages, dtype=torch.int32)
        table[i, count] = -1
        slots += [pages[t // page_size] * page_size + t % page_size for t in range(n)]
    slots += [-1, -1]
    joint = torch.cat(selfcheck.sample_tokens(len(slots)), -1).bfloat16()
    mapping = torch.tensor(slots)[torch.randperm(len(slots))]
    snapmla.append_kv(cache, joint[:, :512], joint[:, 512:], mapping.int())
    q = torch.randn(len(lengths), s_q, num_heads, 576).bfloat16()
    query = snapmla.quantize_q(q[..., :512], q[..., 512:], granularity)
    return Step(cache, query, table, torch.tensor(lengths, dtype=torch.int32))


def assert_right(
    step: Step,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = True,
    row_seqlens: torch.Tensor | None = None,
    config: QuantConfig | None = None,
) -> None:
    errors = selfcheck.decode_errors(
        out, lse, step.q, step.cache, step.block_table, step.cache_seqlens, SCALE, causal=causal,
        row_seqlens=row_seqlens, config=config,
    )  # fmt: skip
    assert errors.right, str(errors)


def plan_for(step: Step, **options: object) -> snapmla.DecodePlan:
    return snapmla.plan_decode(
        step.cache_seqlens,
        step.q.num_heads,
        step.q.s_q,
        page_size=step.cache.page_size,
        max_pages=step.block_table.shape[1],
        **options,  # type: ignore[arg-type]
    )

"""Any number of query tokens, ragged queries and limits of query tokens, on a real GPU.

Lengths at the edges of tiles and none, every count of query tokens that an engine has, one head to
all of them; each result within the gates of ``snapmla.selfcheck`` to float64.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

import snapmla
from snapmla.testing import selfcheck
from tests.support.bits import same_bits

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SCALE = 192**-0.5
PAGE = 64
LENGTHS = (0, 1, 63, 64, 65, 4097)
HEADS = (1, 16, 20, 64, 128)
QUERY_TOKENS = (1, 2, 4, 8, 9, 33, 128)
RAGGED = ((0, 1, 0, 5, 2, 9), (3, 0, 33, 1, 64, 2), (0, 0, 128, 0, 0, 1))

Pool = tuple[snapmla.PagedKVCache, torch.Tensor, torch.Tensor]


@functools.cache
def pool() -> Pool:
    """(cache, block_table, cache_seqlens); NaN wherever no token is."""
    torch.manual_seed(1)
    cache, table, lengths = selfcheck.filled_cache(LENGTHS, PAGE)
    planes = (cache.content.to(DEVICE), cache.rope.to(DEVICE), cache.scale.to(DEVICE))
    return snapmla.PagedKVCache.from_tensors(*planes), table.to(DEVICE), lengths.to(DEVICE)


def query(*rows: int) -> snapmla.QuantizedQuery:
    torch.manual_seed(sum(rows))
    q = torch.randn(*rows, 576, device=DEVICE).bfloat16()
    return snapmla.quantize_q(q[..., :512], q[..., 512:])


def plan(heads: int, s_q: int | None = None, **options: Any) -> snapmla.DecodePlan:
    _, table, lengths = pool()
    return snapmla.plan_decode(
        lengths, heads, s_q, page_size=PAGE, max_pages=table.shape[1], **options
    )


def decode(
    q: snapmla.QuantizedQuery, made: snapmla.DecodePlan, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return snapmla.decode(q, *pool(), softmax_scale=SCALE, plan=made, **options)


def assert_right(
    found: tuple[torch.Tensor, torch.Tensor], q: snapmla.QuantizedQuery, what: str, **rule: Any
) -> None:
    """Of a few heads: row blocks hold all tokens of each, so all are looked at."""
    heads = sorted({0, q.num_heads // 2, q.num_heads - 1})
    errors = selfcheck.decode_errors(*found, q, *pool(), SCALE, heads=heads, **rule)
    assert errors.right, f"{what}: {errors}"


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("s_q", QUERY_TOKENS)
def test_even_queries(s_q: int, heads: int) -> None:
    """By the choice of the planner and by both orders of row blocks, causal and not."""
    q = query(len(LENGTHS), s_q, heads)
    for row_blocks in (None, "in_step", "balanced"):
        found = decode(q, plan(heads, s_q, row_blocks=row_blocks))
        assert (found[0][0] == 0).all() and torch.isneginf(found[1][0]).all()
        assert_right(found, q, f"row blocks {row_blocks}")
        if s_q * heads <= 16:  # there is one row block
            break
    found = decode(q, plan(heads, s_q, causal=False), causal=False)
    assert_right(found, q, "not causal", causal=False)


def begins(tokens: tuple[int, ...]) -> torch.Tensor:
    offsets = [0, *itertools.accumulate(tokens)]
    return torch.tensor(offsets, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", RAGGED, ids=str)
def test_ragged_queries(tokens: tuple[int, ...], heads: int) -> None:
    """Causal, and as ``row_seqlens`` says; rows of no sequence stay as they are."""
    used, room = sum(tokens), sum(tokens) + 5
    q, begin = query(room, heads), begins(tokens)
    out = torch.empty(room, heads, 512, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty(heads, room, device=DEVICE)
    rows = torch.randint(-5, 4200, (room,), dtype=torch.int32, device=DEVICE)
    for rule in ({}, {"row_seqlens": rows}):
        for row_blocks in ("in_step", "balanced"):
            made = plan(heads, cu_seqlens_q=begin, total_q=room, row_blocks=row_blocks, **rule)
            out.fill_(7.0), lse.fill_(7.0)
            decode(q, made, out=out, lse=lse)
            assert (out[used:] == 7).all() and (lse[:, used:] == 7).all()
            assert_right((out, lse), q, f"row blocks {row_blocks}", cu_seqlens_q=begin, **rule)


@pytest.mark.parametrize("heads", [16, 128])
def test_ragged_queries_are_each_requests_own(heads: int) -> None:
    """With fixed splits the same bits alone."""
    tokens, (cache, table, lengths) = RAGGED[1], pool()
    options: dict[str, Any] = {"fixed_split_tokens": 256, "page_size": PAGE}
    options["max_pages"] = table.shape[1]
    begin, q = begins(tokens), query(sum(tokens), heads)
    made = snapmla.plan_decode(lengths, heads, cu_seqlens_q=begin, total_q=sum(tokens), **options)
    out, lse = decode(q, made)
    for i, (first, n) in enumerate(zip(begin.tolist(), tokens)):
        if not n:
            continue
        at, own = slice(first, first + n), slice(i, i + 1)
        one = snapmla.QuantizedQuery(q.nope[at], q.rope[at], q.scale[at])
        made = snapmla.plan_decode(
            lengths[own], heads, cu_seqlens_q=begins((n,)), total_q=n, **options
        )
        alone, alone_lse = snapmla.decode(
            one, cache, table[own], lengths[own], softmax_scale=SCALE, plan=made
        )
        assert same_bits(alone, out[at]) and same_bits(alone_lse, lse[:, at]), f"request {i}"


def test_a_captured_graph_serves_other_offsets_and_lengths() -> None:
    """Captured once for a room of query tokens; replanned in place, also by a captured plan."""
    heads, room = 16, 150
    cache, table, full = pool()
    lengths, begin = full.clone(), begins(RAGGED[0])
    rows = torch.zeros(room, dtype=torch.int32, device=DEVICE)
    q = query(room, heads)
    made = snapmla.plan_decode(
        lengths, heads, cu_seqlens_q=begin, total_q=room, row_seqlens=rows, page_size=PAGE,
        max_pages=table.shape[1],
    )  # fmt: skip
    out = torch.empty(room, heads, 512, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty(heads, room, device=DEVICE)

    def step() -> None:
        made.update_(lengths, begin, rows)
        snapmla.decode(q, cache, table, lengths, softmax_scale=SCALE, plan=made, out=out, lse=lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for tokens in (*RAGGED, (0,) * len(LENGTHS), RAGGED[0]):
        used = sum(tokens)
        begin.copy_(begins(tokens))
        lengths.copy_((full * 0.7).int() if used % 2 else full)
        rows.copy_(torch.randint(-5, 4200, (room,), device=DEVICE))
        out.fill_(7.0), lse.fill_(7.0)
        graph.replay()
        assert (out[used:] == 7).all() and (lse[:, used:] == 7).all()
        if used:
            errors = selfcheck.decode_errors(
                out, lse, q, cache, table, lengths, SCALE, cu_seqlens_q=begin, row_seqlens=rows
            )
            assert errors.right, f"{tokens}: {errors}"

"""``snapmla.dsa`` on SM100, on the software GPU: index keys, scores, top-k and decode of a step.

Kernels of all but scores are SM90's sources, which its own tests study; what is tried here is that
the public calls find SM100's objects and hand over to one another.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import snapmla
from snapmla import PagedKVCache
from snapmla.dsa import append_index_k, index_topk
from snapmla.indexer import shapes
from snapmla.testing import index_reference as reference
from snapmla.testing import topk_reference
from snapmla.testing.index_tables import rows_tables
from snapmla.testing.workloads.index_logits import poisoned_pages
from softgpu import Options, mutate, using
from tests.support.needs import needs_compiler
from tests.support.on_blackwell import blackwell

pytestmark = [needs_compiler, pytest.mark.whole_matrix]
scoring: Any = importlib.import_module("snapmla.indexer.index_logits")  # a function has its name
E4M3, HEADS, K, S_Q = torch.float8_e4m3fn, 64, 20, 2
SCALE = 576**-0.5
LENGTHS = (150, 0, 70)


@pytest.fixture
def small() -> Iterator[None]:
    """A software B200; top-k by few threads, scores by few CTAs."""
    with blackwell() as patch:
        patch.setattr(shapes, "choose", lambda *_: shapes.TopkShape(64, 8, 2))
        patch.setattr(scoring, "sm_count", lambda _: 3)
        yield


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(12))
def test_a_step(seed: int) -> None:
    """Keys appended into pages of poison in random order; of the bits that Blackwell's model gives
    the scores a stable sort chooses the same slots; attention reads these and no others.  In every
    schedule, wherever copies land."""
    torch.manual_seed(5)
    wanted = [-(-n // 64) for n in LENGTHS]
    cache, order = poisoned_pages(sum(wanted) + 2, gap=64), torch.randperm(sum(wanted) + 1)
    table = torch.full((len(LENGTHS), max(wanted) + 1), 2**31 - 1, dtype=torch.int32)
    slots, at = [], 0
    for i, n in enumerate(LENGTHS):
        own = order[at : at + wanted[i]]
        table[i, : len(own)], at = own, at + len(own)
        position = torch.arange(n)
        slots.append(64 * own[position // 64] + position % 64)
    keys, lengths = torch.randn(sum(LENGTHS), 128).bfloat16(), torch.tensor(LENGTHS).int()
    q, w = torch.randn(len(LENGTHS), S_Q, HEADS, 128).to(E4M3), torch.randn(3, S_Q, HEADS)
    schedule = mutate.schedule(seed)
    with using(schedule):
        append_index_k(cache, keys, torch.cat(slots))
        found = index_topk(q, w, cache, table, lengths, K)
    call = {
        "q": q.view(torch.uint8).view(-1, HEADS, 128), "w": w.view(-1, HEADS), "cache": cache,
        "block_table": table, "cache_seqlens": lengths, "s_q": S_Q,
        "cu_seqlens_q": torch.empty(0), "out": torch.full((3 * S_Q, 64 * table.shape[1]), 0.0),
    }  # fmt: skip
    logits = call["out"]
    for row, values in zip(logits, reference.bits_on_blackwell(call), strict=True):
        row[: len(values)] = values
    rows = rows_tables(lengths, None, table, logits.shape[1], len(logits), S_Q)
    want = topk_reference.select_topk_reference(logits, rows[0], K, block_table=rows[1])
    for mine, right in zip(found, want, strict=True):
        assert mine.dtype == torch.int32 and torch.equal(mine, right)
    assert found[1].tolist() == [K, K, 0, 0, K, K]
    attend(found[0].view(len(LENGTHS), S_Q, K), cache.shape[0], torch.cat(slots), schedule)


def attend(indices: torch.Tensor, pages: int, slots: torch.Tensor, schedule: Options) -> None:
    """Sparse decode over the slots that top-k chose, of a cache whose other tokens are NaN."""
    latents, n = PagedKVCache.allocate(pages, 64, device="cpu"), len(slots)
    content, rope = torch.randn(n, 512).bfloat16(), torch.randn(n, 64).bfloat16()
    q = torch.randn(len(LENGTHS), S_Q, 5, 576).bfloat16()
    with using(schedule):
        snapmla.append_kv(latents, content, rope, slots)
        chosen = torch.zeros(64 * pages, dtype=torch.bool)
        chosen[indices[indices >= 0].long()] = True
        latents.scale.view(-1)[~chosen] = math.nan
        query = snapmla.quantize_q(q[..., :512], q[..., 512:])
        out, lse = snapmla.decode(query, latents, indices=indices, softmax_scale=SCALE)
    tokens = torch.cat(snapmla.fetch_dequant(latents, torch.arange(64 * pages).int()), -1).double()
    for b, s in itertools.product(range(len(LENGTHS)), range(S_Q)):
        own = tokens[indices[b, s][indices[b, s] >= 0].long()]
        if not len(own):
            assert bool((out[b, s] == 0).all()) and bool(lse[b, :, s].isneginf().all())
            continue
        logits = SCALE * q[b, s].double() @ own.T
        want = logits.softmax(-1) @ own[:, :512]
        # e4m3 has 3 bits behind the point: Q's, and those of P
        assert float((out[b, s].double() - want).norm() / want.norm()) <= 0.05
        assert bool((lse[b, :, s].double() - logits.logsumexp(-1)).abs().max() <= 0.05)

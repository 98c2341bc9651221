"""Context parallelism with several query tokens: two gloo processes, tokens dealt in turns.

Each rank decodes over its own tokens; ``row_seqlens`` says how many of them a query token sees.
What ``snapmla.merge_states`` makes of both is attention over all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

import snapmla
from snapmla.testing import metrics, selfcheck
from snapmla.testing.reference import mla_decode_reference
from snapmla.testing.rounding import FP64, MIMIC_HW_FULL
from tests.support.bits import assert_same_bits
from tests.support.needs import needs_compiler
from tests.support.shards import PAGE, SCALE, Shard, own_tokens, shard, whole

pytestmark = needs_compiler

# of one token rank 1 has none; in turns of 16 it has one of the last sequence
LENGTHS, HEADS, RANKS = (80, 1, 17), 4, 2
CASES = [(1, 1), (16, 4)]  # interleave, s_q


def queries(s_q: int) -> snapmla.QuantizedQuery:
    torch.manual_seed(4)
    return selfcheck.sample_query(len(LENGTHS), s_q, HEADS)


def attention(
    stored: Shard, rank: int, ranks: int, interleave: int, s_q: int
) -> tuple[Tensor, Tensor]:
    """One rank's result, in fp32 so that merging rounds nothing."""
    cache, table, lengths = stored
    seen = [
        [own_tokens(n - (s_q - 1 - s), rank, ranks, interleave) for s in range(s_q)]
        for n in LENGTHS
    ]
    plan = snapmla.plan_decode(
        lengths, HEADS, s_q, page_size=PAGE, max_pages=table.shape[1],
        row_seqlens=torch.tensor(seen, dtype=torch.int32),
    )  # fmt: skip
    return snapmla.decode(
        queries(s_q), cache, table, lengths, softmax_scale=SCALE, plan=plan,
        out_dtype=torch.float32,
    )  # fmt: skip


def decode_shards(rank: int, store: str) -> None:
    """One process: its part of every case, merged with the other's."""
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    results = []
    try:
        for case in CASES:
            parts = []
            for result in attention(shard(LENGTHS, rank, RANKS, case[0]), rank, RANKS, *case):
                found = [torch.empty_like(result) for _ in range(RANKS)]
                distributed.all_gather(found, result)
                parts.append(found)
            outs, lses = parts
            merged = snapmla.merge_states(outs, lses)
            results.append((*merged, lses[1].clone()))
            snapmla.merge_state(outs[0], lses[0], outs[1], lses[1], out=outs[rank], lse=lses[rank])
            assert_same_bits((outs[rank], lses[rank]), merged)
        torch.save(results, f"{store}.{rank}")
    finally:
        distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed")
def test_two_ranks_share_tokens_in_turns(tmp_path: Path) -> None:
    """Within decode's gates to fp64; from one process no farther than two roundings of P are."""
    torch.multiprocessing.spawn(decode_shards, (str(tmp_path / "store"),), nprocs=RANKS)
    found, again = (torch.load(tmp_path / f"store.{rank}") for rank in range(RANKS))
    for (interleave, s_q), (out, lse, lse_1), other in zip(CASES, found, again, strict=True):
        assert torch.equal(out, other[0]) and torch.equal(lse, other[1])
        assert torch.isneginf(lse_1[1]).all(), "rank 1 has no token of it"
        seen = torch.isfinite(lse_1[2, 0]).tolist()  # of the last sequence, by query token
        assert seen == ([True] * s_q if interleave == 1 else [False] * (s_q - 1) + [True])
        shards = [shard(LENGTHS, rank, RANKS, interleave) for rank in range(RANKS)]
        q, (cache, table, lengths) = queries(s_q), whole(LENGTHS, shards, interleave)
        errors = selfcheck.decode_errors(out, lse, q, cache, table, lengths, SCALE)
        assert errors.error <= errors.allowed and errors.lse_error <= errors.lse_allowed, errors
        run = (q.nope, q.rope, q.scale, cache.content, cache.rope, cache.scale, table, lengths)
        truth, _ = mla_decode_reference(*run, SCALE, config=FP64)
        mimic, _ = mla_decode_reference(*run, SCALE, config=MIMIC_HW_FULL)
        one, one_lse = attention((cache, table, lengths), 0, 1, 1, s_q)
        assert metrics.relative_l2(out, one) <= 1.6 * metrics.relative_l2(mimic, truth)
        seen = torch.isfinite(one_lse)
        assert torch.equal(seen, torch.isfinite(lse))
        apart = (lse - one_lse)[seen].abs() / one_lse[seen].abs().clamp_min(1.0)
        assert apart.max() <= 1e-5

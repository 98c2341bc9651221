"""A step of DeepSeek Sparse Attention: append, the top-k of given scores, sparse decode.

    python examples/sparse_step.py

Runs on a GPU if there is one, else on the software GPU.  Scores stand for an indexer's: here they
are the logits themselves, so that the tokens that are taken are those that weigh most.  The result
is compared with dense decode of the same cache twice: with all tokens named, in the table's order,
where it must have the same bits; and with the top-k, where the difference is what was left out: its
share of the softmax is told by the two LSEs.
"""

from __future__ import annotations

import sys

import torch

import snapmla

HEADS, PAGE, LENGTHS, TOPK = 16, 64, (150, 40), 96
SCALE = 192**-0.5  # DeepSeek-V3.2; times mscale**2 with YaRN


def slots_of(block_table: torch.Tensor) -> torch.Tensor:
    """(b, width * PAGE) int64: where the tokens of each sequence lie, page * PAGE + offset."""
    position = torch.arange(block_table.shape[1] * PAGE, device=block_table.device)
    return block_table.long()[:, position // PAGE] * PAGE + position % PAGE


def main() -> int:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the software GPU
    b, width = len(LENGTHS), -(-max(LENGTHS) // PAGE)
    cache = snapmla.PagedKVCache.allocate(8, PAGE, device=device)
    block_table = torch.randperm(8, device=device)[: b * width].int().view(b, width)
    cache_seqlens = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    slots = slots_of(block_table)
    there = torch.arange(width * PAGE, device=device) < cache_seqlens[:, None]

    tokens = torch.randn(int(there.sum()), 576, device=device).bfloat16()
    snapmla.append_kv(cache, tokens[:, :512], tokens[:, 512:], slots[there])
    q = torch.randn(b, 1, HEADS, 576, device=device).bfloat16() * 0.5  # absorbed: q @ W_UK
    query = snapmla.quantize_q(q[..., :512], q[..., 512:])

    dense_plan = snapmla.plan_decode(
        cache_seqlens, HEADS, 1, page_size=PAGE, max_pages=width, num_parts=1
    )
    dense, dense_lse = snapmla.decode(
        query, cache, block_table, cache_seqlens, softmax_scale=SCALE, plan=dense_plan
    )

    # all tokens, in the table's order: -1 is no token
    indices = torch.where(there, slots, -1).int().unsqueeze(1)
    plan = snapmla.plan_sparse_decode(
        HEADS, 1, topk=width * PAGE, topk_length=cache_seqlens, num_parts=1
    )
    every, _ = snapmla.decode(
        query, cache, indices=indices, topk_length=cache_seqlens, softmax_scale=SCALE, plan=plan
    )

    # the top-k of given scores; a row with fewer tokens ends in -1
    rows = torch.zeros(b, width * PAGE, 576, device=device)
    rows[there] = tokens.float()
    scores = (q.float() @ rows.mT[:, None]).amax(2).masked_fill(~there[:, None], -torch.inf)
    best = scores.topk(TOPK, dim=-1)
    chosen = slots[:, None].gather(-1, best.indices).masked_fill(torch.isneginf(best.values), -1)
    step_plan = snapmla.plan_sparse_decode(HEADS, 1, topk=TOPK, batch=b, device=device)  # for ever
    few, lse = snapmla.decode(
        query, cache, indices=chosen.int(), softmax_scale=SCALE, plan=step_plan
    )

    same = torch.equal(every, dense)
    apart = (few - dense).float().flatten(1).norm(dim=1) / dense.float().flatten(1).norm(dim=1)
    left_out, order = apart.tolist()  # of the second sequence nothing: its sums have another order
    print(f"all tokens named, on {device}: {'the bits of dense decode' if same else 'OTHER BITS'}")
    kept = torch.exp(lse[0] - dense_lse[0])  # the share of the softmax that the chosen tokens have
    print(
        f"top {TOPK} of {LENGTHS[0]} tokens: relative L2 {left_out:.2e} to dense, with "
        f"{100 * float(kept.min()):.0f} to {100 * float(kept.max()):.0f} % of a head's weights"
    )
    print(f"all of {LENGTHS[1]} tokens in the order of their scores: {order:.2e}")
    right = same and order < 3e-2 and bool((kept < 1.001).all())
    print("right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

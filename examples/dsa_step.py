"""A step of DeepSeek Sparse Attention, all of it: append, index, select, sparse decode.

    python examples/dsa_step.py

Runs on a GPU if there is one, else on the software GPU.  New tokens go into the KV cache and their
index keys into the index cache, at the same slots of the same block table.  ``index_topk`` then
chooses the tokens that each query token attends to, drafts too, and sparse decode attends to those.
Checked: the choice, beside scores in float64; attention over what was chosen, beside dense
attention in float64 over the same tokens; and the sequence that is shorter than the top-k, which
must have the bits of dense decode, as what is chosen comes in the table's order.
"""

from __future__ import annotations

import sys

import torch

import snapmla
from snapmla import dsa

HEADS, INDEX_HEADS, PAGE, TOPK = 8, 64, 64, 96
LENGTHS, S_Q = (150, 40), 2  # with the step's own tokens, of which one is a draft
SCALE = 192**-0.5  # DeepSeek-V3.2; times mscale**2 with YaRN


def quantise_index_q(q: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries as e4m3, a scale for each token and head, which goes into the weights."""
    scale = q.float().abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    factor = q.shape[-1] ** -0.5 * q.shape[-2] ** -0.5
    return (q.float() / scale).to(torch.float8_e4m3fn), w.float() * scale.squeeze(-1) * factor


def index_scores(q: torch.Tensor, w: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(tokens,) scores in float64: sum over heads of weight * relu(q . k)."""
    return w.double() @ torch.relu(q.double() @ keys.double().T)


def attention(q: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """Dense attention in float64 over tokens that lie side by side: (heads, 512)."""
    keys = torch.cat([c_kv, k_rope], -1).double()
    return torch.softmax(q.double() @ keys.T * SCALE, -1) @ c_kv.double()


def main() -> int:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the software GPU
    b, width = len(LENGTHS), -(-max(LENGTHS) // PAGE)
    cache = snapmla.PagedKVCache.allocate(8, PAGE, device=device)
    index_cache = torch.zeros(8, PAGE, 132, dtype=torch.uint8, device=device)
    block_table = torch.randperm(8, device=device)[: b * width].int().view(b, width)
    cache_seqlens = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    position = torch.arange(width * PAGE, device=device)
    slots = block_table.long()[:, position // PAGE] * PAGE + position % PAGE
    there = position < cache_seqlens[:, None]

    # a layer's new tokens: latents, and the indexer's keys behind LayerNorm and RoPE
    n = int(there.sum())
    latent = torch.randn(n, 576, device=device).bfloat16()
    snapmla.append_kv(cache, latent[:, :512], latent[:, 512:], slots[there])
    dsa.append_index_k(index_cache, torch.randn(n, 128, device=device).bfloat16(), slots[there])

    # the indexer: what each query token attends to, as slots
    index_q, index_w = quantise_index_q(
        torch.randn(b, S_Q, INDEX_HEADS, 128, device=device),
        torch.randn(b, S_Q, INDEX_HEADS, device=device),
    )
    room = dsa.index_topk_workspace(b * S_Q, width * PAGE)
    workspace = torch.empty(room, dtype=torch.uint8, device=device)  # layers share it
    chosen, counts = dsa.index_topk(
        index_q, index_w, index_cache, block_table, cache_seqlens, TOPK, workspace=workspace
    )

    # attention over it: -1 is no token; the plan depends on shapes alone
    q = torch.randn(b, S_Q, HEADS, 576, device=device).bfloat16() * 0.5  # absorbed: q @ W_UK
    query = snapmla.quantize_q(q[..., :512], q[..., 512:])
    plan = snapmla.plan_sparse_decode(HEADS, S_Q, topk=TOPK, batch=b, device=device, num_parts=1)
    out, _ = snapmla.decode(
        query, cache, indices=chosen.view(b, S_Q, TOPK), softmax_scale=SCALE, plan=plan
    )

    begins = [0, LENGTHS[0]]  # the index keys of all sequences, side by side
    at = torch.tensor([*begins, n], dtype=torch.int32, device=device)
    stored, scales = dsa.fetch_index_k(index_cache, block_table, cu_seqlens=at, total=n)
    keys = stored.double() * scales.double()[:, None]
    right = True
    for row in range(b * S_Q):
        i, j = divmod(row, S_Q)
        length = LENGTHS[i] - S_Q + 1 + j  # tokens that it sees
        count = min(length, TOPK)
        mine = chosen[row, :count]
        scores = index_scores(index_q[i, j], index_w[i, j], keys[begins[i] :][:length])
        least = scores.topk(count).values[-1] - 1e-4 * scores.abs().max()  # an FP8 chain's cuts
        at = torch.isin(slots[i, :length], mine.long())
        best = bool((scores[at] >= least).all()) and int(at.sum()) == count == int(counts[row])
        in_order = torch.equal(slots[i, :length][at], mine.long())
        tokens = snapmla.fetch_dequant(cache, mine, dtype=torch.float32)
        want = attention(q[i, j], *tokens)
        error = float((out[i, j].double() - want).norm() / want.norm())
        right &= best and in_order and error < 5e-2
        print(
            f"{count} of {length} tokens on {device}: {'the best' if best else 'NOT THE BEST'}, "
            f"{'in order' if in_order else 'NOT IN ORDER'}; relative L2 {error:.1e} to dense "
            "attention over them"
        )
    dense_plan = snapmla.plan_decode(
        cache_seqlens, HEADS, S_Q, page_size=PAGE, max_pages=width, num_parts=1
    )
    dense, _ = snapmla.decode(
        query, cache, block_table, cache_seqlens, softmax_scale=SCALE, plan=dense_plan
    )
    same = torch.equal(out[1], dense[1])
    print(f"the short sequence: {'the bits of dense decode' if same else 'OTHER BITS'}")
    print("right" if right and same else "WRONG")
    return 0 if right and same else 1


if __name__ == "__main__":
    sys.exit(main())

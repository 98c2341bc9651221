"""A prompt that goes on over an FP8 cache: fetch, kv_b_proj, dense attention, merge in place.

    python examples/chunked_prefill.py

Runs on a GPU if there is one, else on the software GPU.  Two requests: the tokens of the first are
partly cached, the second is new and has no key in any chunk of context.  New tokens see each other
causally, by K and V of their own latents; what is cached comes in chunks of CONTEXT tokens, which
bounds the memory that K and V of all heads take.  K stays two tensors, kv_b_proj's output and one
RoPE head: nothing is concatenated.  The result is compared with attention in float64 over the whole
sequence, of the latents as the cache holds them and as they were.
"""

from __future__ import annotations

import sys

import torch

import snapmla
from snapmla.mha import mha_prefill

HEADS, NOPE, ROPE, V, LATENT, PAGE = 2, 128, 64, 128, 512, 64
CACHED, NEW, CONTEXT = (150, 0), (20, 9), 96  # tokens of the requests; of a chunk of context
SCALE = (NOPE + ROPE) ** -0.5
Tensor = torch.Tensor


def offsets(lengths: list[int], device: str) -> Tensor:
    """cu_seqlens (b + 1,) int32."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def expand(latent: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """kv_b_proj: latents (tokens, 512) -> k_nope, v (tokens, h, 128), views of one tensor."""
    kv = (latent @ weight).view(-1, HEADS, NOPE + V)
    return kv[..., :NOPE], kv[..., NOPE:]


def prefill(
    q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, cache: snapmla.PagedKVCache,
    block_table: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of all requests' new tokens: (out (tokens, h, 128), lse (h, tokens)).

    The scheduler knows how many tokens are new and cached, so nothing is read from the device.
    """
    cu_q, longest = offsets(list(NEW), q.device.type), max(NEW)
    k_nope, v = expand(latent, weight)
    out, lse = mha_prefill(
        q, k_nope, v, cu_q, cu_q, longest, longest, softmax_scale=SCALE, k_rope=rope.unsqueeze(1)
    )
    for first in range(0, max(CACHED), CONTEXT):
        lengths = [min(max(n - first, 0), CONTEXT) for n in CACHED]
        cu_k = offsets(lengths, q.device.type)
        starts = torch.full((len(lengths),), first, dtype=torch.int32, device=q.device)
        old, old_rope = snapmla.fetch_dequant(
            cache, block_table, cu_seqlens=cu_k, seq_starts=starts, total=sum(lengths)
        )
        k_nope, v = expand(old, weight)
        part, part_lse = mha_prefill(
            q, k_nope, v, cu_q, cu_k, longest, CONTEXT, softmax_scale=SCALE, causal=False,
            k_rope=old_rope.unsqueeze(1),
        )  # fmt: skip
        snapmla.merge_state(out, lse, part, part_lse, out=out, lse=lse)
    return out, lse


def whole(q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """float64 causal attention of a request's last ``len(q)`` tokens over all of its tokens."""
    kv = (latent.double() @ weight.double()).view(-1, HEADS, NOPE + V)
    k = torch.cat([kv[..., :NOPE], rope.double()[:, None].expand(-1, HEADS, -1)], -1)
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    hidden = torch.ones_like(logits, dtype=torch.bool).triu(len(k) - len(q) + 1)
    logits = logits.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", logits.softmax(-1), kv[..., NOPE:])
    return out, logits.logsumexp(-1)


def main() -> int:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the software GPU
    lengths = [a + b for a, b in zip(CACHED, NEW)]
    width = -(-max(lengths) // PAGE)
    cache = snapmla.PagedKVCache.allocate(2 * width, PAGE, device=device)
    block_table = torch.randperm(2 * width, device=device).int().view(2, width)
    weight = (torch.randn(LATENT, HEADS * (NOPE + V), device=device) * LATENT**-0.5).bfloat16()
    tokens = [torch.randn(n, LATENT + ROPE, device=device).bfloat16() for n in lengths]
    for i, rows in enumerate(tokens):  # new tokens too: they are in the cache from now on
        t = torch.arange(len(rows), device=device)
        slots = block_table[i, t // PAGE].long() * PAGE + t % PAGE
        snapmla.append_kv(cache, rows[:, :LATENT], rows[:, LATENT:], slots)

    new = torch.cat([rows[n:] for rows, n in zip(tokens, CACHED)])
    q = torch.randn(sum(NEW), HEADS, NOPE + ROPE, device=device).bfloat16()
    out, lse = prefill(q, new[:, :LATENT], new[:, LATENT:], weight, cache, block_table)

    right, begin = True, 0
    for i, (cached, count) in enumerate(zip(CACHED, NEW)):
        rows, mine = tokens[i], slice(begin, begin + count)
        begin += count
        kept = rows.clone()
        if cached:
            kept[:cached] = torch.cat([part[0] for part in snapmla.fetch_dequant(
                cache, block_table[i : i + 1], torch.full((1,), cached, dtype=torch.int32,
                                                          device=device)
            )], -1)[:cached]  # fmt: skip
        found = []
        for seen in (kept, rows):
            want, want_lse = whole(q[mine], seen[:, :LATENT], seen[:, LATENT:], weight)
            found.append(float((out[mine] - want).norm() / want.norm()))
            if seen is kept:
                off = float((lse[:, mine] - want_lse).abs().max())
        print(
            f"request {i} on {device}, {count} new tokens over {cached} cached: relative L2 "
            f"{found[0]:.2e}, LSE {off:.0e} to float64 over the cache's tokens, {found[1]:.2e} to "
            "those before they were quantised"
        )
        right &= found[0] < 6e-3 and found[1] < (4.5e-2 if cached else 6e-3) and off < 6e-3
    print("right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

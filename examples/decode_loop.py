"""A decode loop as an engine runs it: pages on demand, one plan a step, two layers.

    python examples/decode_loop.py

Runs on a GPU if there is one, else on the software GPU (the same compiled kernels, interpreted).
The last step's results are compared with attention in fp64 on what the caches hold; the tolerance
is derived from a model of the kernels' rounding, not chosen.
"""

from __future__ import annotations

import sys

import torch

import snapmla
from snapmla import selfcheck

LAYERS, HEADS, PAGE, POOL, WIDTH = 2, 16, 64, 12, 3  # WIDTH: pages that a sequence may have
PROMPTS = (63, 100, 1)  # tokens already there; the first sequence soon needs a second page
STEPS = 3
SCALE = 192**-0.5  # DeepSeek-V2/V3; times mscale**2 with YaRN


class Pages:
    """Who owns which page: the host side of a paged cache."""

    def __init__(self, device: str) -> None:
        self.free = list(range(POOL))
        self.owned: list[list[int]] = [[] for _ in PROMPTS]
        self.block_table = torch.zeros((len(PROMPTS), WIDTH), dtype=torch.int32, device=device)

    def slots(self, sequence: int, first: int, end: int) -> list[int]:
        """Flat slots of tokens [first, end) of a sequence; takes pages from the pool as needed."""
        mine = self.owned[sequence]
        while len(mine) * PAGE < end:
            self.block_table[sequence, len(mine)] = self.free[-1]
            mine.append(self.free.pop())
        return [mine[t // PAGE] * PAGE + t % PAGE for t in range(first, end)]


def main() -> int:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the software GPU
    batch, pages, lengths = len(PROMPTS), Pages(device), list(PROMPTS)
    caches = [snapmla.PagedKVCache.allocate(POOL, PAGE, device=device) for _ in range(LAYERS)]

    def latents(n: int) -> torch.Tensor:  # stands for kv_a_proj with RoPE applied
        return torch.randn(n, 576, device=device).bfloat16()

    # prefill: the prompts' tokens into every layer's cache
    slots = [slot for i, n in enumerate(lengths) for slot in pages.slots(i, 0, n)]
    slot_mapping = torch.tensor(slots, dtype=torch.int32, device=device)
    for cache in caches:
        joint = latents(len(slots))
        snapmla.append_kv(cache, joint[:, :512], joint[:, 512:], slot_mapping)

    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan = snapmla.plan_decode(cache_seqlens, HEADS, 1, page_size=PAGE, max_pages=WIDTH)
    out = torch.empty(batch, 1, HEADS, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(batch, HEADS, 1, device=device)
    for step in range(STEPS):
        # the scheduler: one new token a sequence, and where it goes
        slots = [s for i, n in enumerate(lengths) for s in pages.slots(i, n, n + 1)]
        lengths = [n + 1 for n in lengths]
        slot_mapping = torch.tensor(slots, dtype=torch.int32, device=device)
        cache_seqlens.add_(1)
        plan.update_(cache_seqlens)  # once a step, for all layers
        for cache in caches:
            joint = latents(batch)
            snapmla.append_kv(cache, joint[:, :512], joint[:, 512:], slot_mapping)
            q = torch.randn(batch, 1, HEADS, 576, device=device).bfloat16()  # absorbed: q @ W_UK
            query = snapmla.quantize_q(q[..., :512], q[..., 512:])
            snapmla.decode(
                query, cache, pages.block_table, cache_seqlens, softmax_scale=SCALE, plan=plan,
                out=out, lse=lse,
            )  # fmt: skip
        print(f"step {step}: lengths {lengths}, pages {[len(p) for p in pages.owned]}")

    errors = selfcheck.decode_errors(
        out, lse, query, caches[-1], pages.block_table, cache_seqlens, SCALE, plan=plan
    )
    print(f"last layer of the last step on {device}: {errors}")
    print("right" if errors.right else "WRONG")
    return 0 if errors.right else 1


if __name__ == "__main__":
    sys.exit(main())

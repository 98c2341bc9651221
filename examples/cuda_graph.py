"""One CUDA graph for a batch of 4, replayed for steps of 3, 4 and 1 sequences.

    python examples/cuda_graph.py

What changes from step to step (lengths, pages, slots, latents, queries) lies in static buffers; a
slot of the batch that no sequence uses has length 0 and slot -1.  ``plan.update_`` replans in place
before each replay: one launch, nothing decided on the host, so it could be the graph's first node
as well.  Every replay is compared with fp64 as in ``decode_loop.py``.  Without a GPU there is no
graph: the same steps run eagerly on the software GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

import snapmla
from snapmla import selfcheck

BATCH, HEADS, PAGE, WIDTH = 4, 16, 64, 2
SCALE = 192**-0.5
STEPS = ((70, 3, 128), (71, 4, 1, 65), (72,))  # lengths of the running sequences


class Step:
    """The static buffers of a step, and the work on them."""

    def __init__(self, device: str) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def halves(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16, device=device)

        pool = BATCH * WIDTH
        self.cache = snapmla.PagedKVCache.allocate(pool, PAGE, device=device)
        self.block_table = torch.randperm(pool).int().view(BATCH, WIDTH).to(device)
        self.lengths, self.slots = ints(BATCH), ints(BATCH)
        self.latents, self.q = halves(BATCH, 576), halves(BATCH, 1, HEADS, 576)
        self.out, self.lse = halves(BATCH, 1, HEADS, 512), torch.zeros(BATCH, HEADS, 1).to(device)
        self.query = snapmla.quantize_q(self.q[..., :512], self.q[..., 512:])
        self.plan = snapmla.plan_decode(self.lengths, HEADS, 1, page_size=PAGE, max_pages=WIDTH)
        tokens = torch.randn(self.cache.num_slots, 576).bfloat16().to(device)  # all prompts
        every = torch.arange(self.cache.num_slots, device=device)
        snapmla.append_kv(self.cache, tokens[:, :512], tokens[:, 512:], every)

    def run(self) -> None:
        """What is captured: launches only, on buffers that stay where they are."""
        snapmla.append_kv(self.cache, self.latents[:, :512], self.latents[:, 512:], self.slots)
        snapmla.quantize_q(self.q[..., :512], self.q[..., 512:], out=self.query)
        snapmla.decode(
            self.query, self.cache, self.block_table, self.lengths, softmax_scale=SCALE,
            plan=self.plan, out=self.out, lse=self.lse,
        )  # fmt: skip

    def prepare(self, lengths: tuple[int, ...]) -> None:
        """The scheduler's part of a step; the last token of each sequence is the new one."""
        table, slots = self.block_table.tolist(), []
        for i, n in enumerate(lengths):
            slots.append(table[i][(n - 1) // PAGE] * PAGE + (n - 1) % PAGE)
        unused = BATCH - len(lengths)
        self.lengths.copy_(torch.tensor([*lengths, *[0] * unused], dtype=torch.int32))
        self.slots.copy_(torch.tensor([*slots, *[-1] * unused], dtype=torch.int32))
        self.latents.copy_(torch.randn(BATCH, 576))
        self.q.copy_(torch.randn(BATCH, 1, HEADS, 576))

    def right(self, running: int) -> bool:
        """Prints the errors; padded slots must be 0 and -inf."""
        errors = selfcheck.decode_errors(
            self.out, self.lse, self.query, self.cache, self.block_table, self.lengths, SCALE,
            plan=self.plan,
        )  # fmt: skip
        padded = self.out[running:].any() or not self.lse[running:].isneginf().all()
        print(f"  {errors}, padded slots {'WRONG' if padded else 'empty'}")
        return errors.right and not padded


def captured(step: Step) -> Callable[[], None]:
    """The step as a graph."""
    step.run()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return graph.replay


def main() -> int:
    torch.manual_seed(0)
    if torch.cuda.is_available():
        step = Step("cuda")
        replay = captured(step)
    else:
        print("no CUDA device, so no graph: the steps run eagerly on the software GPU")
        step = Step("cpu")
        replay = step.run
    good = True
    for lengths in STEPS:
        print(f"{len(lengths)} of {BATCH} slots in use, lengths {list(lengths)}")
        step.prepare(lengths)
        step.plan.update_(step.lengths)
        replay()
        good = step.right(len(lengths)) and good
    print("right" if good else "WRONG")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

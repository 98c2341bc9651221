"""FlashMLA's names inside of vLLM, ours, where their first call of a step is captured.

As vLLM's layers of DeepSeek-V4 do it: a fresh object of metadata a step, planned inside of the
graph, whose replays have other lists and lengths.  Results by FlashMLA's gates to float64.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from snapmla.integrations.vllm import flashmla
from tests.support import flashmla_calls as calls

pytestmark = pytest.mark.gpu
TOKENS, HEADS, WINDOW, MORE, PAGE = 5, 64, 128, 192, 2


class TheirMeta:
    """vLLM's dataclass: what its own kernel fills."""

    have_initialized, config, tile_scheduler_metadata, num_splits = False, None, None, None


def theirs(*given: Any, **named: Any) -> Any:
    raise AssertionError("vLLM's kernel was called")


class Step:
    """Static tensors of V4's decode, and layers that share what is planned."""

    def __init__(self) -> None:
        r = torch.Generator().manual_seed(0)
        self.window, self.more = calls.pages_584(8, 64, 1), calls.pages_584(200, PAGE, 2)
        self.sink = torch.randn(HEADS, generator=r)
        self.q = torch.randn(TOKENS, HEADS, 512, generator=r).bfloat16().cuda()
        self.out = self.q.new_full((2, TOKENS, HEADS, 512), torch.nan)
        self.lists = torch.zeros(TOKENS, WINDOW, dtype=torch.int32, device="cuda")
        self.others = torch.zeros(TOKENS, MORE, dtype=torch.int32, device="cuda")
        self.lengths, self.other_lengths = (torch.zeros(TOKENS).int().cuda() for _ in range(2))
        self.pools = [pages.raw.cuda() for pages in (self.window, self.more)]
        for made, (count, size) in zip(self.pools, ((8, 64), (200, PAGE))):
            assert made.shape == (count, size, 584)

    def fill(self, seed: int) -> None:
        """Lists and lengths of another step."""
        r = torch.Generator().manual_seed(seed)
        self.lists.copy_(calls.lists_of(TOKENS, WINDOW, 512, seed))
        self.others.copy_(calls.lists_of(TOKENS, MORE, 400, seed + 1))
        self.lists[:, 0] = 3
        for lengths, most in ((self.lengths, WINDOW), (self.other_lengths, MORE)):
            lengths.copy_(torch.randint(1, most + 1, (TOKENS,), generator=r))
        self.out.fill_(torch.nan)

    def run(self, name: Any, sink: torch.Tensor) -> None:
        """Two layers."""
        meta = TheirMeta()
        window, more = (pool.unsqueeze(-2) for pool in self.pools)
        for out in self.out:
            name(
                q=self.q.unsqueeze(1), k_cache=window, block_table=None, head_dim_v=512,
                tile_scheduler_metadata=meta, cache_seqlens=None, is_fp8_kvcache=True,
                indices=self.lists.unsqueeze(1), topk_length=self.lengths, softmax_scale=512**-0.5,
                attn_sink=sink, extra_k_cache=more, out=out.unsqueeze(1),
                extra_indices_in_kvcache=self.others.unsqueeze(1),
                extra_topk_length=self.other_lengths,
            )  # fmt: skip

    def check(self) -> None:
        listed: list[Any] = [
            (self.window.values, self.lists.cpu(), self.lengths.cpu()),
            (self.more.values, self.others.cpu(), self.other_lengths.cpu()),
        ]
        want, _ = calls.truth(self.q.cpu(), listed, 512**-0.5, self.sink)
        for out in self.out:
            calls.check(out.cpu(), want)


def outside_of_pools() -> int:
    """Bytes of segments that no graph's pool has."""
    found = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in found if s["segment_pool_id"] == (0, 0))


def capture_nothing() -> torch.cuda.CUDAGraph:
    """A graph of one fill.  A process's first capture allocates what all have: the state of the
    random generator, on the stream of captures, outside of pools and while the graph lives."""
    graph, filled = torch.cuda.CUDAGraph(), torch.empty(1, device="cuda")
    with torch.cuda.graph(graph):
        filled.zero_()
    return graph


def test_the_first_call_of_a_step_is_captured() -> None:
    step, name = Step(), flashmla._Decode(theirs)
    sink = step.sink.cuda()
    with torch.inference_mode():
        step.fill(1)
        step.run(name, sink)  # as vLLM warms up: with an object of its own
        step.check()
        another = capture_nothing()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # as a capture begins: what is left then is what counts
        before, graph = outside_of_pools(), torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                step.run(name, sink)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert outside_of_pools() <= before and another is not None
        for seed in (5, 9):
            step.fill(seed)
            graph.replay()
            step.check()
    assert name.calls == 4

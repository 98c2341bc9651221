"""The sparse backend's layer on a real GPU, over stand-ins for vLLM's modules: eager calls against
the reference, graphs replayed for other steps, the same bits in any batch where lists are cut."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from snapmla.testing.ds_mla import quantize_ds_mla_rows
from snapmla.testing.record_reference import RecordCall, record_decode_reference
from tests.host.test_vllm_sparse import HEADS, SCALE, new_impl, ours  # noqa: F401 (a fixture)

pytestmark = pytest.mark.gpu
TOPK, PAGES = 2048, 96


class Step:
    """Query tokens of a step, lists of different lengths, in tensors that keep their place."""

    def __init__(self, backend: Any, tokens: int, invariant: bool) -> None:
        torch.manual_seed(0)
        self.impl = new_impl(backend)
        x = torch.randn(PAGES, 64, 576)
        rows = quantize_ds_mla_rows(x[..., :512], x[..., 512:])
        pool = torch.full((PAGES, 2, 64, 656), 0xFF, dtype=torch.uint8)
        pool[:, 1] = rows
        self.kv = pool.cuda()[:, 1]
        self.newer = backend.ASKS_FOR_KERNEL
        self.rows = torch.full((tokens, TOPK), -1, dtype=torch.int32, device="cuda")
        self.counts = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        self.impl.topk_indices_buffer = self.rows
        self.parts = tuple(torch.randn(tokens, HEADS, n).bfloat16().cuda() for n in (512, 64))
        plans = backend.Plans(HEADS, TOPK, torch.device("cuda"), invariant)
        self.told = types.SimpleNamespace(
            rows=self.rows, counts=self.counts, block_table=None, block_size=64, plans=plans,
            req_id_per_token=torch.zeros(tokens, device="cuda"), chosen=None,
        )  # fmt: skip
        self.fill(0)

    def fill(self, seed: int) -> None:
        """Other lists; some have nothing."""
        made = torch.Generator().manual_seed(seed)
        for i in range(len(self.rows)):
            count = int(torch.randint(1, TOPK + 1, (1,), generator=made)) if i % 5 != 4 else 0
            at = torch.randperm(PAGES * 64, generator=made)[:count].sort().values
            row = torch.full((TOPK,), -1, dtype=torch.int32)
            apart = 128 if self.newer else 64  # rows of the pool, or slots of pages
            row[:count] = (at // 64 * apart + at % 64).int()
            self.rows[i].copy_(row)
            self.counts[i] = count

    def run(self, part: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        told = types.SimpleNamespace(**vars(self.told))
        told.rows, told.counts = self.rows[part], self.counts[part]
        told.req_id_per_token = told.req_id_per_token[part]
        self.impl.topk_indices_buffer = self.rows[part]
        return self.impl.forward_mqa(tuple(p[part] for p in self.parts), self.kv, told, None)

    def check(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        rows = self.rows.cpu()
        slots = torch.where(rows < 0, rows, rows // 128 * 64 + rows % 128) if self.newer else rows
        q = torch.cat(self.parts, -1).cpu()
        call = RecordCall(q, self.kv.cpu(), slots, self.counts.cpu(), SCALE)
        want, want_lse = record_decode_reference(call)
        error = (out.cpu().double() - want).norm() / want.norm()
        assert float(error) < 4e-3
        assert torch.allclose(lse.cpu().double(), want_lse.T, atol=2e-3)


@pytest.mark.parametrize("tokens", [1, 37, 150])
def test_eager(ours: Any, tokens: int) -> None:  # noqa: F811
    step = Step(ours, tokens, False)
    step.check(*step.run())


def test_graphs(ours: Any) -> None:  # noqa: F811
    """The plan is pinned before; replays read other lists, some empty, and other queries."""
    step = Step(ours, 24, False)
    step.told.plans.pin(24)
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step.run()
    for seed in (1, 2):
        step.fill(seed)
        for part in step.parts:
            part.normal_()
        graph.replay()
        step.check(out, lse)


def test_the_same_bits_in_any_batch(ours: Any) -> None:  # noqa: F811
    step = Step(ours, 300, True)
    out, lse = step.run()
    for part in (slice(0, 1), slice(7, 8), slice(100, 260)):
        alone = step.run(part)
        assert torch.equal(alone[0], out[part]) and torch.equal(alone[1], lse[part])

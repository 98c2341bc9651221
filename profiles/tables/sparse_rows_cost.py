"""Sparse decode over a BF16 cache beside what vLLM calls for it, on one GPU:
``python -m profiles.bench sparse_rows_cost --peers DIR``.

A query token a sequence.  The peers read the same rows by the same lists:

* FlashAttention-3, as vLLM's backend FLASH_ATTN_MLA_SPARSE calls it: a token of the cache is a
  page, so the list is the block table; RoPE is K, content is V, and its queries come apart.  It
  takes any number of heads.
* FlashMLA's prefill kernel, as vLLM's FLASHMLA_SPARSE calls it: 64 or 128 heads, others are padded.

What vLLM does before either call (indices of a request to slots, lengths) is not timed.  Results of
each are compared with fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import snapmla
from profiles import table
from profiles.peer_libraries import FlashAttention3
from profiles.table import Run, Table
from profiles.tables import sparse_prefill_cost
from profiles.tables.mha_cost import CONFIG, gemm
from profiles.tables.sparse_cost import PEER
from profiles.tables.sparse_prefill_cost import SPAN, SPEEDS, TILE, Problem, Shape
from profiles.timing import Call

PAGE = 64
CONTENT = 512
BATCHES = (128, 2)
GATES = {8: (1.0, None), 16: (1.0, None), 64: (None, 1.0), 128: (None, 1.1)}  # FA3, FlashMLA


@dataclass(frozen=True)
class Decode(table.Problem):
    """A step of decode over BF16 rows.

    Attributes:
        problem: its tensors, a query token a sequence.
        cache: the same rows in pages.
        plan, unsplit: of ``snapmla.decode``; the second cuts no list into pieces.
    """

    problem: Problem
    cache: snapmla.PagedKVCache
    plan: Any
    unsplit: Any

    @classmethod
    def draw(cls, shape: Shape, device: torch.device) -> Decode:
        problem = Problem.draw(shape, device)
        cache = snapmla.PagedKVCache.from_tensors(problem.kv.view(-1, PAGE, 1, 576))
        plans = (
            snapmla.plan_sparse_decode(
                shape.heads, 1, topk=shape.topk, batch=shape.s_q, device=device,
                cache_dtype="bf16", fixed_split_tokens=width,
            )
            for width in (None, -(-shape.topk // TILE) * TILE)
        )  # fmt: skip
        return cls(problem, cache, *plans)

    def ours(self, plan: Any) -> Call:
        """``snapmla.decode`` by one of the plans."""
        problem = self.problem
        q, indices, scale = problem.q[:, None], problem.indices, problem.scale
        return lambda: snapmla.decode(
            q, self.cache, indices=indices, softmax_scale=scale, plan=plan
        )

    def fa3(self) -> Call:
        """FlashAttention-3's operator on pages of one token: (out (b, h, 512), LSE (h, b), ...)."""
        problem, topk = self.problem, self.problem.shape.topk
        b, device = problem.shape.s_q, problem.q.device
        rope, content = (
            problem.kv.view(-1, 1, 1, 576)[..., some]
            for some in (slice(CONTENT, None), slice(CONTENT))
        )
        q_rope, q_content = (
            problem.q[..., some].contiguous() for some in (slice(CONTENT, None), slice(CONTENT))
        )
        table = problem.indices[:, 0]
        starts = torch.arange(b + 1, dtype=torch.int32, device=device)
        lengths = torch.full((b,), topk, dtype=torch.int32, device=device)
        nothing = [None] * 8  # of a batch's slots, padding, RoPE, scales of FP8
        return lambda: torch.ops._vllm_fa3_C.fwd(
            q_rope, rope, content, None, None, q_content, None, starts, None, None, None, lengths,
            1, topk, table, *nothing, problem.scale, True, -1, -1, 0.0, True, None, 0, None, 0,
            None, 1, 0, None,
        )  # fmt: skip

    def contenders(self) -> dict[str, list[Call]]:
        calls = {"ours": [self.ours(self.plan)], "FA3": [self.fa3()], PEER: [self.problem.flashmla]}
        if self.plan.pieces > 1:
            calls["unsplit"] = [self.ours(self.unsplit)]
        return calls

    def check(self, name: str, calls: Sequence[Call]) -> float:
        out, lse, *more = calls[0]()
        if name == PEER:
            return self.problem.error((out, lse, *more))
        if name == "FA3":
            return self.problem.error((out, None, lse.T))
        return self.problem.error((out[:, 0], None, lse[..., 0]))

    def facts(self) -> dict[str, Any]:
        shape, (to_fa3, to_flashmla) = self.problem.shape, GATES[self.problem.shape.heads]
        return {
            "shape": f"{shape.s_q}, {shape.heads}", "sizes": [shape.s_q, shape.heads, shape.topk],
            "pieces": self.plan.pieces, "gate": to_fa3, "flashmla_gate": to_flashmla,
        }  # fmt: skip


def shape_of(b: int, heads: int) -> Shape:
    """Rows of each sequence lie apart, as in DRAM."""
    return Shape(b, b * SPAN, heads, 2048, GATES[heads][1] or 0.0, span=SPAN)


def load(run: Run) -> torch.device:
    """Loads the peers' libraries."""
    FlashAttention3("fa3", run.peers).load()
    return sparse_prefill_cost.load(run)


TABLES = (
    Table(
        "sparse_rows_cost", "Sparse decode over BF16 rows",
        lambda device, shape: Decode.draw(shape, device),
        [shape_of(b, heads) for b in BATCHES for heads in reversed(GATES)],
        (
            *sparse_prefill_cost.sizes("sequences", "heads", "topk"),
            table.fact("pieces", "pieces"), table.spread("ours", "snapmla µs"),
            table.us("unsplit", "unsplit µs"), table.spread("FA3"), table.speed("FA3", "ours"),
            table.met("FA3", "ours"), table.spread(PEER), table.speed(PEER, "ours"),
            table.met(PEER, "ours", aim="flashmla_gate"), table.error("ours"),
            table.error("FA3", "FA3's error"), table.error(PEER, "FlashMLA's error"),
        ),
        CONFIG,
        notes=lambda run, _: (
            gemm(run.device),
            SPEEDS.format("the other"),
            "FA3: FlashAttention-3 on pages of one token; FlashMLA: its prefill kernel, heads "
            "padded",
            "error: relative L2 to fp64",
        ),
        setup=load, takes=("peers",),
    ),
)  # fmt: skip

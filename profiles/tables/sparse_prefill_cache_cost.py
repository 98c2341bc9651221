"""Sparse prefill straight from the FP8 cache beside FlashMLA's kernel over BF16 rows, on one GPU:
``python -m profiles.bench sparse_prefill_cache_cost --peers DIR``.

What FlashMLA's callers pay before their call, rows out of an FP8 cache, is timed beside and is in
no ratio.  Results are compared with fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import snapmla
from profiles import table
from profiles.table import Table
from profiles.tables.mha_cost import CONFIG, gemm, tflops
from profiles.tables.sparse_cost import PEER
from profiles.tables.sparse_prefill_cost import SPEEDS, Problem, Shape, load, sizes
from profiles.timing import Call
from snapmla.sparse.prefill import sparse_prefill
from snapmla.sparse.prefill_fp8 import plan_sparse_prefill
from snapmla.testing import metrics

PAGE = 64
# relative L2 to fp64 on the quantised inputs: e4m3 P over latents without a mean costs up to 2.7e-2
FP8_GATE = 3e-2
FETCH_GATE = 5e-2  # of rows that were quantised, to themselves
SHAPES = tuple(
    Shape(4096, s_kv, heads, 2048, gate)
    for s_kv, heads, gate in (
        (8192, 128, 1.15), (32768, 128, 1.15), (32768, 64, 1.10), (32768, 16, 1.6),
    )
)  # fmt: skip


@dataclass(frozen=True)
class FromFP8(table.Problem):
    """The same rows and queries, quantised."""

    problem: Problem
    cache: snapmla.PagedKVCache
    query: snapmla.QuantizedQuery
    plan: Any

    @classmethod
    def of(cls, problem: Problem) -> FromFP8:
        shape, device, kv = problem.shape, problem.q.device, problem.kv[:, 0]
        pages = -(-shape.s_kv // PAGE)
        cache = snapmla.PagedKVCache.allocate(pages, PAGE, device=device)
        slots = torch.arange(shape.s_kv, device=device, dtype=torch.int32)
        snapmla.append_kv(cache, kv[:, :512], kv[:, 512:], slots)
        query = snapmla.quantize_q(problem.q[..., :512], problem.q[..., 512:])
        plan = plan_sparse_prefill(shape.heads, shape.s_q, topk=shape.topk, device=device)
        return cls(problem, cache, query, plan)

    def ours(self) -> Any:
        out, _, lse = self.problem.results
        return sparse_prefill(
            self.query, self.cache, self.problem.indices, self.problem.scale, out=out, lse=lse,
            plan=self.plan,
        )  # fmt: skip

    def fetch(self) -> Any:
        """Rows of BF16 out of the whole cache, which FlashMLA's callers make first."""
        pages = self.cache.content.shape[0]
        table = torch.arange(pages, device=self.problem.q.device, dtype=torch.int32)[None]
        lengths = torch.full_like(table[0, :1], self.problem.shape.s_kv)
        return lambda: snapmla.fetch_dequant(self.cache, table, lengths)

    def error(self, results: Any, allowed: float = FP8_GATE) -> float:
        """Largest relative L2 of a few query tokens to fp64 on the quantised inputs.

        Raises:
            ValueError: it is above what is ``allowed``, or the LSE is off.
        """
        out, _, lse = results
        cache, query, shape = self.cache, self.query, self.problem.shape
        assert cache.scale is not None
        worst = 0.0
        for i in (0, 1, shape.s_q // 2, shape.s_q - 1):
            at = self.problem.indices[i, 0].long()
            content, rope, scale = (
                x.flatten(0, 1)[at].double() for x in (cache.content, cache.rope, cache.scale)
            )
            kv = torch.cat((content, rope), -1) * scale[:, None]
            q = torch.cat((query.nope[i].double(), query.rope[i].double()), -1)
            logits = q * query.row_scale[i].double()[:, None] @ kv.T * self.problem.scale
            want = logits.softmax(-1) @ kv[:, :512]
            error = float((out[i].double() - want).norm() / want.norm())
            of_lse = float((lse[i] - logits.logsumexp(-1)).abs().max())
            if not (error < allowed and of_lse < 2e-3):
                raise ValueError(f"{shape}, token {i}: {error}, LSE {of_lse}")
            worst = max(worst, error)
        return worst

    def facts(self) -> dict[str, Any]:
        return self.problem.facts()

    def contenders(self) -> dict[str, list[Call]]:
        problem = self.problem
        calls = {"fp8": self.ours, "rows": problem.ours, PEER: problem.flashmla}
        return {name: [call] for name, call in [*calls.items(), ("fetch", self.fetch())]}

    def check(self, name: str, calls: Sequence[Call]) -> float:
        """Its error to fp64 on its own inputs; of fetched rows to those that were appended."""
        found = calls[0]()
        if name != "fetch":
            return self.error(found) if name == "fp8" else self.problem.error(found)
        rows = torch.cat([x.flatten(0, -2) for x in found], -1)
        error = metrics.relative_l2(rows, self.problem.kv[:, 0].double())
        if not error < FETCH_GATE:
            raise ValueError(f"fetched rows are {error:.1e} off")
        return error


TABLES = (
    Table(
        "sparse_prefill_cache_cost", "Sparse prefill from the FP8 cache",
        lambda device, shape: FromFP8.of(Problem.draw(shape, device)), SHAPES,
        (
            *sizes("query tokens", "rows of KV", "heads", "topk"),
            table.spread("fp8", "snapmla FP8 µs"), tflops("fp8"),
            table.spread(PEER, "FlashMLA BF16 µs"), table.speed(PEER, "fp8"),
            table.met(PEER, "fp8"), table.spread("rows", "snapmla BF16 µs"),
            table.speed("rows", "fp8", "ratio to it"), table.us("fetch", "fetch_dequant µs"),
            table.error("fp8"),
        ),
        CONFIG,
        notes=lambda run, _: (
            gemm(run.device),
            SPEEDS.format("the other"),
            "fetch_dequant: the whole cache to rows of BF16; error: relative L2 on each one's "
            "inputs",
        ),
        setup=load, takes=("peers",),
    ),
)  # fmt: skip

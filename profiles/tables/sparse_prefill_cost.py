"""Sparse prefill beside FlashMLA's, on one GPU:
``python -m profiles.bench sparse_prefill_cost --peers DIR``.

Both read the same BF16 rows by the same random indices.  FlashMLA takes 64 or 128 heads, so other
queries are padded as its callers pad them.  A card sits at its power limit here, whose memory is
some 20 ms long: every round takes the contenders in another order, each warms up before it is
timed, and only ratios of one table hold.  ``sparse_prefill_alone`` times them alone.  Results of
some query tokens are compared with fp64.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from profiles import table
from profiles.table import Run, Table
from profiles.tables.mha_cost import CONFIG, gemm, tflops
from profiles.tables.sparse_cost import PEER, load_flashmla
from profiles.timing import Call
from snapmla.runtime.launch import sm_count
from snapmla.sparse.prefill import sparse_prefill
from snapmla.testing import metrics

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor, Tensor]
OUT_GATE, LSE_GATE = 4e-3, 1e-4  # relative L2, absolute: P of 16 bits
SPAN = 32768  # rows of a sequence of decode
CHUNK = 256  # query tokens whose indices are drawn at a time
TILE, CLOCK_MHZ = 64, 1700  # tokens of a tile; for cycles of a tile


@dataclass(frozen=True)
class Shape:
    """Extents of a call.

    Attributes:
        gate: the speed ratio to FlashMLA that is aimed at.
        span: rows of KV that a query token chooses from, its own; 0: all, which all share.
    """

    s_q: int
    s_kv: int
    heads: int
    topk: int
    gate: float
    d_qk: int = 576
    span: int = 0

    @property
    def flop(self) -> float:
        """FLOP of both products."""
        return 2.0 * self.s_q * self.heads * self.topk * (self.d_qk + 512)

    def cycles(self, us: float, sms: int) -> float:
        """Cycles at 1.7 GHz that a CTA takes for a tile of 64 rows and 64 tokens."""
        work = self.s_q * -(-self.heads // 64)
        return us * CLOCK_MHZ / (-(-work // sms) * -(-self.topk // TILE))


SHAPES = (
    Shape(4096, 8192, 128, 2048, 1.05), Shape(4096, 32768, 128, 2048, 1.08),
    Shape(4096, 131072, 128, 2048, 1.08), Shape(4096, 32768, 64, 2048, 1.05),
    Shape(4096, 32768, 16, 2048, 1.25), Shape(4096, 8192, 64, 512, 1.05, 512),
    Shape(4096, 8192, 128, 1024, 1.05, 512), Shape(62, 32768, 128, 2048, 1.0),
)  # fmt: skip
ALONE = SHAPES[0], SHAPES[3], SHAPES[4]  # also by themselves
# Decode over a BF16 cache, as vLLM calls it: 128 query tokens, a sequence each.
DECODE = tuple(
    Shape(128, 128 * SPAN, heads, 2048, gate, span=SPAN)
    for heads, gate in ((128, 1.1), (64, 1.0), (16, 1.0), (8, 1.0))
)


@dataclass(frozen=True)
class Problem(table.Problem):
    """Tensors of a shape, results of ours and of FlashMLA."""

    shape: Shape
    q: Tensor
    padded: Tensor
    kv: Tensor
    indices: Tensor
    results: Results

    @classmethod
    def draw(cls, shape: Shape, device: torch.device) -> Problem:
        """Normal numbers; distinct random rows of each query token, in random order."""
        s_q, heads, d = shape.s_q, shape.heads, shape.d_qk
        q = torch.randn(s_q, heads, d, device=device).bfloat16()
        padded = q.new_zeros(s_q, 64 if heads <= 64 else 128, d)
        padded[:, :heads] = q
        kv = torch.randn(shape.s_kv, 1, d, device=device).bfloat16()
        indices = torch.empty(s_q, 1, shape.topk, dtype=torch.int32, device=device)
        for begin in range(0, s_q, CHUNK):
            some = indices[begin : begin + CHUNK, 0]
            drawn = torch.rand(len(some), shape.span or shape.s_kv, device=device).argsort(-1)
            own = torch.arange(begin, begin + len(some), device=device)[:, None] * shape.span
            some.copy_(drawn[:, : shape.topk] + own)
        results = (
            torch.full((s_q, heads, 512), torch.nan, dtype=torch.bfloat16, device=device),
            *(torch.full((s_q, heads), torch.nan, device=device) for _ in range(2)),
        )
        return cls(shape, q, padded, kv, indices, results)

    @property
    def scale(self) -> float:
        return float(self.shape.d_qk**-0.5)

    def ours(self) -> Results:
        out, most, lse = self.results
        return sparse_prefill(
            self.q, self.kv, self.indices, self.scale, out=out, max_logits=most, lse=lse
        )

    def flashmla(self) -> Any:
        op = torch.ops._flashmla_C.sparse_prefill_fwd
        return op(self.padded, self.kv, self.indices, self.scale, 512, None, None, None)

    def error(self, results: Any, seed: int = 0) -> float:
        """Largest relative L2 of a few query tokens to fp64 of (out, largest logits or None, LSE).

        Raises:
            ValueError: it, or the LSE's or the largest logits' error, is above its gate.
        """
        out, most, lse = results[:3]
        worst, pick = 0.0, random.Random(seed)
        for i in (0, self.shape.s_q - 1, *(pick.randrange(self.shape.s_q) for _ in range(4))):
            kv = self.kv[self.indices[i, 0].long(), 0].double()
            logits = self.q[i].double() @ kv.T * self.scale
            top = torch.logsumexp(logits, -1)
            want = torch.exp(logits - top[:, None]) @ kv[:, :512]
            heads = self.shape.heads
            error = metrics.relative_l2(out[i, :heads], want)
            of_lse = float((lse[i, :heads] - top).abs().max())
            of_most = 0.0
            if most is not None:
                of_most = float((most[i, :heads] - logits.amax(-1)).abs().max())
            if not (error < OUT_GATE and of_lse < LSE_GATE and of_most < LSE_GATE):
                raise ValueError(f"{self.shape}, token {i}: {error}, {of_lse}, {of_most}")
            worst = max(worst, error)
        return worst

    def facts(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "shape": f"{shape.s_q} x {shape.s_kv}, {shape.heads} heads, topk {shape.topk}",
            "sizes": [shape.s_q, shape.s_kv, shape.heads, shape.topk, shape.d_qk],
            "cycles_a_us": shape.cycles(1.0, sm_count(self.q.device)), "flop": shape.flop,
            "units": shape.s_q * -(-shape.heads // 64) * -(-shape.topk // TILE),
            "gate": shape.gate,
        }  # fmt: skip

    def contenders(self) -> dict[str, list[Call]]:
        return {PEER: [self.flashmla], "snapmla": [self.ours]}

    def check(self, name: str, calls: Sequence[Call]) -> float:
        return self.error(calls[0]())


SPEEDS = "median of the rounds, and their middle half; ratio: {}'s time / ours by rounds"


def sizes(*heads: str) -> list[table.Column]:
    """Columns of the extents of a call."""
    return [(head, lambda row, n=n: str(row["sizes"][n])) for n, head in enumerate(heads)]


def load(run: Run) -> torch.device:
    """Loads FlashMLA's library."""
    load_flashmla(run)
    return run.device


COST = Table(
    "sparse_prefill_cost", "Sparse prefill beside FlashMLA",
    lambda device, shape: Problem.draw(shape, device), (*SHAPES, *DECODE),
    (
        *sizes("query tokens", "rows of KV", "heads", "topk", "channels"), table.spread("snapmla"),
        tflops("snapmla"),
        ("cycles a tile",
         lambda row: f"{median(row['rounds']['snapmla']) * row['cycles_a_us']:.0f}"),
        table.spread(PEER), table.speed(PEER, "snapmla"), table.met(PEER, "snapmla"),
        table.error("snapmla"), table.error(PEER, "FlashMLA's error"),
    ),
    CONFIG,
    notes=lambda run, _: (
        gemm(run.device),
        SPEEDS.format(PEER),
        f"cycles of a CTA for 64 rows x {TILE} tokens, at {CLOCK_MHZ} MHz; error: relative L2",
    ),
    setup=load, takes=("peers",),
)  # fmt: skip
SOLO = replace(
    COST, name="sparse_prefill_alone", title="Sparse prefill, each contender alone", notes=(),
    shapes=ALONE, columns=(), alone=ALONE, peer=PEER,
)  # fmt: skip
TABLES = (COST, SOLO)

"""Index logits on one GPU, beside DeepGEMM where it can be imported:
``DEEP_GEMM=DIR python -m profiles.bench index_cost``.

Both read the same pages, queries and weights.  Decode: DeepGEMM takes one or two query tokens of a
sequence; more are given to it as vLLM does on Hopper, a sequence each, whose table row is repeated.
Prompts: DeepGEMM reads keys that lie side by side, so the copy out of the pages, which vLLM makes
first, is timed beside it (by torch: an upper bound).  Calls rotate over several block tables, whose
pages exceed L2 where the pool does.  Four rows of each contender are compared with float64, and all
(of a prompt 64 and more) with the first contender's: of ours bit by bit.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dsl_kernels.formats.index_cache import INDEX_DIM, PAGE_BYTES
from profiles import index_step, table
from profiles.index_step import CALLS, PAGE, PROMPT, Step, Timed
from profiles.table import Row, Run, Table
from profiles.tables.dsa_cost import CONFIG, others
from profiles.timing import Call
from snapmla.indexer.index_logits import index_logits, unit_choices

PAGES = 1 << 16  # of the pool
HEADS, DRAFTS = (64, 32), (1, 2, 3, 4)
DECODES = [
    (b, tokens)
    for tokens in (8192, 32768, 131072)
    for b in (1, 8, 32, 64, 128, 256)
    if b * tokens <= 1 << 22
]
PROMPTS = ((2048, 32768), (4096, 65536), (2048, 131072), (8192, 8192))  # query tokens, tokens
SHAPES = [  # heads, sequences, query tokens of each, tokens
    *((h, b, s_q, tokens) for h in HEADS for s_q in DRAFTS for b, tokens in DECODES),
    *((h, 1, n, tokens) for h in HEADS for n, tokens in PROMPTS),
]


def pool_of(run: Run) -> tuple[torch.Tensor, Any]:
    """Pages of random keys, and DeepGEMM."""
    return index_step.pool_of(PAGES, run.device), index_step.peer_of(
        os.environ.get("DEEP_GEMM", "")
    )


class Logits(table.Problem):
    """A row: the scores of a step, by each size of a unit of ours and by the peer."""

    def __init__(self, shared: tuple[torch.Tensor, Any], shape: tuple[int, int, int, int]) -> None:
        self.pool, self.peer = shared
        heads, b, self.s_q, tokens = shape
        self.prompt = self.s_q > PROMPT
        self.step = Step(self.pool, heads, b, self.s_q, tokens, count=1 if self.prompt else CALLS)
        self.out = torch.empty(b * self.s_q, tokens, device=self.pool.device)
        self.first: torch.Tensor | None = None  # scores of the first contender

    def facts(self) -> dict[str, Any]:
        step, b, n = self.step, len(self.step.lengths), self.s_q
        if self.prompt:
            seen = n * step.tokens - n * (n - 1) / 2
            work, shape = 2.0 * seen * step.heads * INDEX_DIM, f"prompt {n} × {step.tokens}"
        else:
            work = b * step.tokens * (PAGE_BYTES / PAGE + 4.0 * n)
            shape = f"{b} × {n} × {step.tokens}"
        unit = "TF/s" if self.prompt else "TB/s"
        return {"shape": f"{step.heads}, {shape}", "work": work, "unit": unit}

    def unit(self, unit: int, i: int) -> torch.Tensor:
        """Ours by units of so many query tokens."""
        step, shaped = self.step, (-1, self.s_q, self.step.heads)
        return index_logits(
            step.q.view(*shaped, INDEX_DIM), step.w.view(shaped), self.pool, step.tables[i],
            step.lengths, out=self.out, unit_rows=unit,
        )  # fmt: skip

    def contenders(self) -> dict[str, list[Call]]:
        choices, step = unit_choices(self.step.heads), self.step
        units = choices[1:] if self.prompt else [n for n in choices if n <= max(1, self.s_q)]
        calls: dict[str, Timed] = {
            f"unit {n}": functools.partial(self.unit, n) for n in (*units, *[4] * (self.s_q == 3))
        }
        if self.peer is not None and not self.prompt:
            calls["DeepGEMM"] = step.logits(self.peer)
        elif self.peer is not None:
            score, gather = index_step.prompt_peer(
                self.pool, step.tables[0], step.q, step.w, step.tokens, self.peer
            )
            calls |= {"DeepGEMM": lambda _: score(), "gather": lambda _: gather()}
        return {name: step.each(call) for name, call in calls.items()}

    def check(self, name: str, calls: Sequence[Call]) -> float:
        if name == "gather":
            return 0.0
        result = calls[-1]()
        error = index_step.scored(self.step, lambda _: result).passed()
        rows = result[:: max(1, self.s_q // 64) if self.prompt else 1]
        if self.first is None:
            self.first = rows.clone()  # ours all write to one tensor
        gate = 0.0 if name.startswith("unit") else index_step.AGREE
        index_step.agree(self.step, rows, self.first, gate)
        return error


def best(row: Row) -> str:
    """The fastest of ours."""
    us = row["us"]
    return min((name for name in us if name.startswith("unit")), key=us.__getitem__)


TABLES = (
    Table(
        "index_cost", "Index logits", Logits, SHAPES,
        (
            table.fact("heads, rows × tokens", "shape"),
            ("ours", lambda row: f"{row['us'][best(row)]:.1f} ({best(row)})"),
            ("rate", lambda row: f"{1e-6 * row['work'] / row['us'][best(row)]:.2f} {row['unit']}"),
            table.us("DeepGEMM"), ("ratio", lambda row: table.ratio("DeepGEMM", best(row))[1](row)),
            ("others", lambda row: others(best(row))[1](row)),
        ),
        replace(CONFIG, warm=True),
        notes=lambda run, shared: (
            f"DeepGEMM: {getattr(shared[1], '__version__', 'there') if shared[1] else 'not there'}",
            "µs a call; the best of ours, then DeepGEMM, its time by ours, and the others",
        ),
        setup=pool_of,
    ),
)  # fmt: skip

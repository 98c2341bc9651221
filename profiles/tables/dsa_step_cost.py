"""The tokens of a step are chosen, ``index_topk``, on one GPU, beside DeepGEMM and vLLM:
``DEEP_GEMM=DIR python -m profiles.bench dsa_step_cost --peers DIR``.

Ours: scores and top-k, to cache slots, in one call.  Theirs: DeepGEMM's logits (its metadata made
before) and the faster of vLLM's top-k ops, to positions; turning those into slots is timed beside
it, by torch, an upper bound.  Scores are as wide as an engine's longest context, whatever the
lengths, or as wide as the sequences are long; ``dsa_step_cost-wide`` has these alone.  Drafts
beyond two are given to DeepGEMM as vLLM does on Hopper, a sequence each.  Calls rotate over several
block tables.  Tokens of some rows are held against float64: none may be below the best by more than
rounding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from profiles import index_step, table
from profiles.index_step import PAGE, Step
from profiles.peer_ops import vllm_ops
from profiles.table import Row, Run, Table
from profiles.tables.dsa_cost import CONFIG, LENGTHS, WIDE, K, others
from profiles.tables.index_cost import DECODES, HEADS, PAGES
from profiles.timing import Call

DRAFTS = (1, 2, 4)
BESIDE = [  # heads, sequences, query tokens of each, tokens, columns
    (64, b, 1, tokens, columns)
    for tokens in LENGTHS
    for b in (1, 8, 32, 128)
    for columns in (WIDE, tokens)
    if b * tokens <= PAGE * PAGES
]
SHAPES = [
    *BESIDE, *((h, b, s_q, n, n) for h in HEADS for s_q in DRAFTS for b, n in DECODES),
]  # fmt: skip
Shared = tuple[Any, Any, Any]  # the pool, DeepGEMM, vLLM's operators


def setup(run: Run) -> Shared:
    """Pages of random keys; the peers."""
    peer = index_step.peer_of(os.environ.get("DEEP_GEMM", ""))
    return index_step.pool_of(PAGES, run.device), peer, vllm_ops(run.peers)


class Chosen(table.Problem):
    """A row: a step, and the peers beside it."""

    def __init__(self, shared: Shared, shape: tuple[int, int, int, int, int]) -> None:
        pool, *self.peers = shared
        self.step = Step(pool, *shape[:4], columns=shape[4])

    def facts(self) -> dict[str, Any]:
        step, wide = self.step, self.step.columns
        shape = f"{step.heads}, {len(step.lengths)} × {step.s_q} × {step.tokens}"
        return {"shape": shape + (f" of {wide}" if wide > step.tokens else "")}

    def contenders(self) -> dict[str, list[Call]]:
        calls = {"ours": self.step.ours(True), "positions": self.step.ours(False)}
        if None not in self.peers:
            calls |= self.step.theirs(*self.peers)
        calls["slots by torch"] = self.step.converted()
        return {name: self.step.each(call) for name, call in calls.items()}

    def check(self, name: str, calls: Sequence[Call]) -> float:
        if name == "slots by torch":
            return 0.0
        return index_step.chosen(self.step, lambda i: calls[i](), name == "ours").passed()


def theirs(row: Row) -> float | None:
    """The faster of the peers'."""
    return min((us for name, us in row["us"].items() if name.startswith("DeepGEMM")), default=None)


def by_ours(row: Row) -> str:
    """The peers' time by ours."""
    peer = theirs(row)
    return table.told(peer and peer / row["us"]["ours"], ".2f")


COST = Table(
    "dsa_step_cost", "Scores and top-k of a step", Chosen, SHAPES,
    (
        table.fact("heads, sequences × query tokens × tokens of columns", "shape"),
        table.us("ours"), ("theirs", lambda row: table.told(theirs(row), ".1f")),
        ("ratio", by_ours), others("ours"),
    ),
    replace(CONFIG, warm=True),
    notes=(
        f"µs a call in a CUDA graph, k {K}, contenders in turn; pages of {PAGE}",
        "ours: to slots; then the faster of theirs, to positions, its time by ours, the others",
    ),
    setup=setup, ours=("ours", "positions", "slots by torch"), takes=("peers",),
)  # fmt: skip
TABLES = (COST, replace(COST, name="dsa_step_cost-wide", shapes=BESIDE))

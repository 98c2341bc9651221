"""What chooses the tokens of a step, ``index_topk``, on one GPU, beside DeepGEMM and vLLM.

    DEEP_GEMM=DIR python -m profiles.dsa_step_cost --peers DIR --out profiles/results

Ours: scores and top-k, to cache slots, in one call.  Theirs: DeepGEMM's logits (its metadata made
before) and the faster of vLLM's top-k ops, to positions; turning those into slots is timed beside
it, by torch, an upper bound.  Scores are as wide as an engine's longest context, whatever the
lengths, or as wide as the sequences are long.  Drafts beyond two are given to DeepGEMM as vLLM does
on Hopper, a sequence each.  Calls are captured in CUDA graphs over several block tables, which take
turns.  Before that the tokens that theirs select are compared with ours: the same but for scores
that tie within rounding.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

from codegen.artifacts import write_atomic
from dsl_kernels.index_cache import INDEX_DIM, PAGE, PAGE_BYTES
from profiles import page, timing
from profiles.dsa_cost import COOPERATIVE_ROWS, LENGTHS, WIDE, WORKSPACE, K, vllm_ops
from profiles.index_cost import CALLS, DECODES, Timed, in_turn, peer_of, pool_of, queries, tables
from profiles.machine import machine
from snapmla.dsa import index_topk, index_topk_workspace
from snapmla.plan import sm_count

SHARED = 0.995  # of the tokens that ours and theirs select: the rest tie within rounding


class Step:
    """A step's tensors on the card; scores have ``columns``, as many as ``tokens`` if 0."""

    def __init__(
        self, pool: torch.Tensor, heads: int, b: int, s_q: int, tokens: int, k: int = K,
        count: int = CALLS, columns: int = 0,
    ) -> None:  # fmt: skip
        self.pool, self.tokens, self.s_q, self.heads, self.k = pool, tokens, s_q, heads, k
        self.q, self.w = queries(b * s_q, heads, pool.device)
        self.columns, self.tables = columns or tokens, tables(pool, b, tokens, count)
        more = -(-self.columns // PAGE) - self.tables[0].shape[1]
        if more:
            self.tables = [torch.nn.functional.pad(table, (0, more)) for table in self.tables]
        self.lengths = torch.full((b,), tokens, dtype=torch.int32, device=pool.device)
        behind = torch.arange(1 - s_q, 1, device=pool.device, dtype=torch.int32)
        self.seen = (self.lengths[:, None] + behind).contiguous()

    def result(self) -> torch.Tensor:
        size = (len(self.q), self.k)
        return torch.full(size, -1, dtype=torch.int32, device=self.q.device)

    def ours(self, slots: bool) -> Any:
        """``index_topk`` with everything given."""
        b, out = len(self.lengths), self.result()
        counts = torch.empty(len(out), dtype=torch.int32, device=out.device)
        held = PAGE * self.tables[0].shape[1]  # columns of the scores
        size = index_topk_workspace(len(out), held)
        workspace = torch.empty(size, dtype=torch.uint8, device=out.device)
        rows = (b, self.s_q, self.heads)
        given = self.q.view(*rows, INDEX_DIM), self.w.view(rows), self.pool
        return lambda i: index_topk(
            *given, self.tables[i], self.lengths, self.k, slots=slots, out=out, counts=counts,
            workspace=workspace,
        )[0]  # fmt: skip

    def logits(self, peer: Any) -> Any:
        """DeepGEMM's call."""
        each = self.s_q if self.s_q <= 2 else 1
        seen = self.seen.view(-1, each)
        wide = [t.repeat_interleave(self.s_q // each, 0).contiguous() for t in self.tables]
        planned = peer.get_paged_mqa_logits_metadata(seen, PAGE, sm_count(self.q.device))
        shaped = self.q.view(-1, each, self.heads, INDEX_DIM)
        cache = self.pool.view(-1, PAGE, 1, PAGE_BYTES // PAGE)
        newer = getattr(peer, "fp8_fp4_paged_mqa_logits", None)
        first = shaped if newer is None else (shaped, None)
        score = newer or peer.fp8_paged_mqa_logits
        return lambda i: score(
            first, cache, self.w, seen, wide[i], planned, self.columns, clean_logits=False
        )

    def theirs(self, peer: Any, ops: Any) -> Timed:
        """DeepGEMM's logits and vLLM's top-k, by the op of each."""
        logits, workspace = self.logits(peer), torch.zeros(WORKSPACE, dtype=torch.uint8).cuda()
        lengths = self.seen.view(-1, 1)
        names = ["persistent_topk"]
        if len(self.q) <= COOPERATIVE_ROWS and hasattr(ops, "cooperative_topk"):
            names.append("cooperative_topk")

        def call_of(name: str) -> Any:
            out, op = self.result(), getattr(ops, name)

            def call(i: int) -> torch.Tensor:
                op(logits(i), lengths, out, workspace, self.k, self.columns)
                return out

            return call

        return {f"DeepGEMM + {name}": call_of(name) for name in names}

    def converted(self) -> Any:
        """Positions to slots, by torch."""
        at = self.result().random_(0, self.tokens).long()
        rows = [t.repeat_interleave(self.s_q, 0) for t in self.tables]
        return lambda i: rows[i].gather(1, at // PAGE) * PAGE + at % PAGE


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Raises ValueError unless both select the same tokens, but for ties within rounding."""
    for mine, other in zip(ours[:4].tolist(), theirs[:4].tolist()):
        if len(set(mine) & set(other)) < SHARED * len(mine):
            raise ValueError(f"{len(set(mine) & set(other))} of {len(mine)} tokens are the same")


def row(step: Step, peer: Any, ops: Any, shape: str) -> str:
    """One line of the table."""
    calls: Timed = {"ours": step.ours(True), "positions": step.ours(False)}
    if peer is not None and ops is not None:
        others = step.theirs(peer, ops)
        for call in others.values():
            agree(calls["positions"](0), call(0))
        calls |= others
    calls["slots by torch"] = step.converted()
    us = in_turn(calls)
    theirs = [time for name, time in us.items() if name.startswith("DeepGEMM")]
    ratio = f"{min(theirs):.1f} | {min(theirs) / us['ours']:.2f}" if theirs else "– | –"
    rest = ", ".join(f"{name} {time:.1f}" for name, time in us.items() if name != "ours")
    return f"| {shape} | {us['ours']:.1f} | {ratio} | {rest} |"


def main(
    peers: Annotated[Path | None, typer.Option(help="Folder of peers' libraries.")] = None,
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    pages: Annotated[int, typer.Option(help="Of the pool.")] = 1 << 16,
    drafts: Annotated[str, typer.Option(help="Query tokens of a sequence, by commas.")] = "1,2,4",
    first: Annotated[int, typer.Option(help="Shapes to time, the first ones.")] = 99,
    beside: Annotated[
        bool, typer.Option(help="Only scores of an engine's width, and exact ones beside them.")
    ] = False,
) -> None:
    """Times the shapes and writes ``dsa_step_cost.md``."""
    peer, ops = peer_of(os.environ.get("DEEP_GEMM", "")), vllm_ops(peers)
    facts = machine(torch.device("cuda"), timing.Nvml())
    lines = page.head(
        "Scores and top-k of a step", "profiles.dsa_step_cost",
        page.told(facts, ("gpu", "driver", "cuda", "torch")),
        f"µs a call in a CUDA graph, k {K}, contenders in turn; pages of {PAGE}",
        "ours: to slots; then the faster of theirs, to positions, its time by ours, the others",
    )  # fmt: skip
    titles = ("heads, sequences × query tokens × tokens of columns", "ours", "theirs", "ratio",
              "others")  # fmt: skip
    lines += page.table(titles, [])
    torch.manual_seed(0)
    with torch.inference_mode():
        pool = pool_of(pages)
        for heads, b, s_q, tokens, columns in wanted(beside, drafts, first):
            if b * tokens > PAGE * len(pool):
                continue
            step = Step(pool, heads, b, s_q, tokens, columns=columns)
            shape = f"{heads}, {b} × {s_q} × {tokens}"
            shape += f" of {columns}" if columns > tokens else ""
            lines.append(row(step, peer, ops, shape))
            typer.echo(lines[-1])
            write_atomic(out / "dsa_step_cost.md", "\n".join(lines) + "\n")


def wanted(beside: bool, drafts: str, first: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Heads, sequences, query tokens of each, tokens and columns of the rows."""
    for tokens in LENGTHS:
        for b in (1, 8, 32, 128):
            for columns in (WIDE, tokens):
                yield 64, b, 1, tokens, columns
    if beside:
        return
    for heads in (64, 32):
        for s_q in (int(n) for n in drafts.split(",")):
            for b, tokens in DECODES[:first]:
                yield heads, b, s_q, tokens, tokens


if __name__ == "__main__":
    typer.run(main)

"""Sparse decode over a BF16 cache beside what vLLM calls for it, on one GPU.

    python -m profiles.sparse_rows_cost --peers DIR --out profiles/results

A query token a sequence.  The peers read the same rows by the same lists:

* FlashAttention-3, as vLLM's backend FLASH_ATTN_MLA_SPARSE calls it: a token of the cache is a
  page, so the list is the block table; RoPE is K, content is V, and its queries come apart.  It
  takes any number of heads.
* FlashMLA's prefill kernel, as vLLM's FLASHMLA_SPARSE calls it: 64 or 128 heads, others are padded.

What vLLM does before either call (indices of a request to slots, lengths) is not timed.  Results of
each are compared with fp64 before anything is timed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

import snapmla
from codegen.artifacts import write_atomic
from profiles import page, timing
from profiles.machine import machine
from profiles.mha_cost import Call, gemm, in_turn, ratio, spread
from profiles.peer_libraries import FlashAttention3
from profiles.sparse_prefill_cost import SPAN, TILE, Problem, Results, Shape, verdict

PAGE = 64
CONTENT = 512
BATCHES = (128, 2)
GATES = {8: (1.0, None), 16: (1.0, None), 64: (None, 1.0), 128: (None, 1.1)}  # FA3, FlashMLA
COLUMNS = (
    "sequences", "heads", "topk", "pieces", "snapmla µs", "unsplit µs", "FA3 µs", "ratio", "gate",
    "FlashMLA µs", "ratio", "gate", "error", "FA3's error", "FlashMLA's error",
)  # fmt: skip


@dataclass(frozen=True)
class Decode:
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

    def results(self, largest: torch.Tensor) -> dict[str, Results]:
        """Of ours and FlashAttention-3 as ``Problem.error`` wants them, which compares the largest
        logits of each head, too: neither gives them, so they are ``largest``."""
        found = {}
        for name, plan in (("ours", self.plan), ("unsplit", self.unsplit)):
            out, lse = self.ours(plan)()
            found[name] = out[:, 0], largest, lse[..., 0]
        out, lse = self.fa3()()[:2]
        found["fa3"] = out, largest, lse.T
        return found


def shape_of(b: int, heads: int) -> Shape:
    """Rows of each sequence lie apart, as in DRAM."""
    return Shape(b, b * SPAN, heads, 2048, GATES[heads][1] or 0.0, span=SPAN)


def against(ours: list[float], theirs: list[float], gate: float | None) -> str:
    """Cells of a peer: its time, the ratio to ours, what is aimed at."""
    relative = ratio(ours, theirs)
    return f"{spread(theirs)} | {relative:.3f} | {verdict(relative, gate) if gate else '–'}"


def row(shape: Shape, device: torch.device, seed: int) -> str:
    """A line of the table.

    Raises:
        ValueError: some contender's results are wrong.
    """
    made = Decode.draw(shape, device)
    problem = made.problem
    theirs = problem.flashmla()
    errors = {"flashmla": problem.error(theirs)}
    errors |= {name: problem.error(one) for name, one in made.results(theirs[1]).items()}
    calls = {"ours": made.ours(made.plan), "fa3": made.fa3(), "flashmla": problem.flashmla}
    if made.plan.pieces > 1:
        calls["unsplit"] = made.ours(made.unsplit)
    found = in_turn(calls, seed)
    unsplit = f"{median(found['unsplit']):.1f}" if "unsplit" in found else "–"
    to_fa3, to_flashmla = GATES[shape.heads]
    cells = (
        shape.s_q, shape.heads, shape.topk, made.plan.pieces, spread(found["ours"]), unsplit,
        against(found["ours"], found["fa3"], to_fa3),
        against(found["ours"], found["flashmla"], to_flashmla),
        *(f"{errors[name]:.1e}" for name in ("ours", "fa3", "flashmla")),
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main(
    peers: Annotated[Path, typer.Option(help="Folder of peers: FlashMLA, FlashAttention-3.")],
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    first: Annotated[int, typer.Option(help="Rows to time, the first ones.")] = 99,
) -> None:
    """Times the rows and writes ``sparse_rows_cost.md``."""
    torch.ops.load_library(str(peers / "vllm_flashmla" / "_flashmla_C.abi3.so"))
    FlashAttention3("fa3", peers).load()
    device = torch.device("cuda")
    facts = page.told(machine(device, timing.Nvml()), ("gpu", "driver", "cuda", "torch"))
    torch.manual_seed(0)
    lines = page.head(
        "Sparse decode over BF16 rows", "profiles.sparse_rows_cost", facts, gemm(device),
        "median of the rounds, and their middle half; ratio: the other's time / ours by rounds",
        "FA3: FlashAttention-3 on pages of one token; FlashMLA: its prefill kernel, heads padded",
        "error: relative L2 to fp64",
    )  # fmt: skip
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    shapes = [shape_of(b, heads) for b in BATCHES for heads in reversed(GATES)]
    with torch.inference_mode():
        for seed, shape in enumerate(shapes[:first]):
            lines.append(row(shape, device, seed))
            typer.echo(lines[-1])
            write_atomic(out / "sparse_rows_cost.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)

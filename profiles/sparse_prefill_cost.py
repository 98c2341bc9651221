"""Sparse prefill beside FlashMLA's, on one GPU.

    python -m profiles.sparse_prefill_cost --peers DIR --out profiles/results

Both read the same BF16 rows by the same random indices.  FlashMLA takes 64 or 128 heads, so other
queries are padded as its callers pad them.  A card sits at its power limit here, whose memory is
some 20 ms long: every round takes the contenders in another order, each warms up before it is
timed, and only ratios of one table hold.  Results of some query tokens are compared with fp64
before anything is timed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

from codegen.artifacts import write_atomic
from profiles import alone, page, power, timing
from profiles.machine import machine
from profiles.mha_cost import gemm, in_turn, ratio, spread
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
        """Of both products."""
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
class Problem:
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
        """Largest relative L2 of a few query tokens to fp64.

        Raises:
            ValueError: it, or the LSE's or the largest logits' error, is above its gate.
        """
        out, most, lse = results
        worst, pick = 0.0, random.Random(seed)
        for i in (0, self.shape.s_q - 1, *(pick.randrange(self.shape.s_q) for _ in range(4))):
            kv = self.kv[self.indices[i, 0].long(), 0].double()
            logits = self.q[i].double() @ kv.T * self.scale
            top = torch.logsumexp(logits, -1)
            want = torch.exp(logits - top[:, None]) @ kv[:, :512]
            heads = self.shape.heads
            error = metrics.relative_l2(out[i, :heads], want)
            of_lse = float((lse[i, :heads] - top).abs().max())
            of_most = float((most[i, :heads] - logits.amax(-1)).abs().max())
            if not (error < OUT_GATE and of_lse < LSE_GATE and of_most < LSE_GATE):
                raise ValueError(f"{self.shape}, token {i}: {error}, {of_lse}, {of_most}")
            worst = max(worst, error)
        return worst


def verdict(relative: float, gate: float) -> str:
    """Less than 2 % below a gate counts as met."""
    return f"{gate} {'met' if relative >= 0.98 * gate else 'missed'}"


def row(shape: Shape, device: torch.device, seed: int) -> str:
    """One line of the table."""
    problem = Problem.draw(shape, device)
    error, theirs = problem.error(problem.ours()), problem.error(problem.flashmla())
    found = in_turn({"ours": problem.ours, "flashmla": problem.flashmla}, seed)
    us, relative = median(found["ours"]), ratio(found["ours"], found["flashmla"])
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return (
        f"| {shape.s_q} | {shape.s_kv} | {shape.heads} | {shape.topk} | {shape.d_qk} | "
        f"{spread(found['ours'])} | {shape.flop / us * 1e-6:.0f} | {shape.cycles(us, sms):.0f} | "
        f"{spread(found['flashmla'])} | {relative:.3f} | {verdict(relative, shape.gate)} | "
        f"{error:.1e} | {theirs:.1e} |"
    )


def alone_rows(device: torch.device, meter: power.Meter) -> Iterator[dict[str, Any]]:
    """Contenders of some shapes in turn and each by itself, as ``profiles.alone`` tells them."""
    for shape in ALONE:
        problem = Problem.draw(shape, device)
        problem.error(problem.ours())
        problem.error(problem.flashmla())
        calls = {"FlashMLA": problem.flashmla, "snapmla": problem.ours}
        found = in_turn(calls)
        yield {
            "shape": f"{shape.s_q} x {shape.s_kv}, {shape.heads} heads, topk {shape.topk}",
            "units": shape.s_q * -(-shape.heads // 64) * -(-shape.topk // TILE),
            "us": {name: median(times) for name, times in found.items()},
            "alone": alone.measure({name: [call] for name, call in calls.items()}, meter),
        }


def alone_body(rows: Sequence[Any]) -> list[str]:
    """The table of a record."""
    return alone.lines(rows, "FlashMLA", "tile")


def alone_only(out: Path, device: torch.device) -> None:
    """Writes ``sparse_prefill_alone.md`` and ``.json``."""
    nvml, rows = timing.Nvml(), []
    told = page.told(machine(device, nvml), page.FACTS)
    head = page.head("Sparse prefill, each contender alone", "profiles.sparse_prefill_cost", told)
    with torch.inference_mode(), alone.meter_of(nvml) as meter:
        for row in alone_rows(device, meter):
            rows.append(row)
            page.write_record(out / "sparse_prefill_alone.json", head, rows, alone_body)
            torch.cuda.empty_cache()


def main(
    peers: Annotated[Path, typer.Option(help="Folder of peers, with FlashMLA's library.")],
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    first: Annotated[int, typer.Option(help="Shapes to time, the first ones.")] = 99,
    solo: Annotated[
        bool, typer.Option("--alone", help="Each contender by itself: sparse_prefill_alone.md.")
    ] = False,
) -> None:
    """Times the shapes and writes ``sparse_prefill_cost.md``."""
    torch.ops.load_library(str(peers / "vllm_flashmla" / "_flashmla_C.abi3.so"))
    device = torch.device("cuda")
    if solo:
        alone_only(out, device)
        return
    facts = page.told(machine(device, timing.Nvml()), ("gpu", "driver", "cuda", "torch"))
    columns = (
        "query tokens", "rows of KV", "heads", "topk", "channels", "snapmla µs", "TFLOP/s",
        "cycles a tile", "FlashMLA µs", "ratio", "gate", "error", "FlashMLA's error",
    )  # fmt: skip
    torch.manual_seed(0)
    head = page.head(
        "Sparse prefill beside FlashMLA", "profiles.sparse_prefill_cost", facts, gemm(device),
        "median of the rounds, and their middle half; ratio: FlashMLA's time / ours by rounds",
        f"cycles of a CTA for 64 rows x {TILE} tokens, at {CLOCK_MHZ} MHz; error: relative L2",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    with torch.inference_mode():
        for seed, shape in enumerate((*SHAPES, *DECODE)[:first]):
            lines.append(row(shape, device, seed))
            typer.echo(lines[-1])
            write_atomic(out / "sparse_prefill_cost.md", "\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    typer.run(main)

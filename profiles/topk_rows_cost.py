"""``select_topk`` by rows, width of the logits and lengths: all variants that could serve, in turn.

    python -m profiles.topk_rows_cost --out profiles/results

An engine's logits are as wide as its longest context, whatever the lengths, and hosts know no
length.  So each variant is timed over wide tensors with short rows, and over tensors as wide as the
rows; those that are built for this GPU.  Kernels are called by themselves, each call of a graph on
the other one of two tensors; graphs are replayed in an order that changes each round.

Each result is first compared: entry for entry with the first variant's, whose scores are
``torch.topk``'s, ascending; of a few rows also with a stable sort.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

from codegen.artifacts import write_atomic
from dsl_kernels.spec import VariantSpec
from dsl_kernels.topk_share import share
from profiles import page, timing
from profiles.dsa_cost import timed
from profiles.machine import machine
from snapmla import runtime
from snapmla.decode_plan import nothing
from snapmla.dsa import select, shapes
from snapmla.testing import topk_reference

K = 2048
WIDE = 163840
LENGTHS = (4096, 8192, 16384, 33000, 65536, 131072)
ROWS = (1, 8, 16, 32, 48, 64, 128, 256)
HARD = ("zeros", "rising")  # scores of which sweeps list too many
CALLS, ROUNDS, ROUND_MS = 8, 5, 1.0
# threads, keys of a thread, CTAs a row
CANDIDATES = (
    *shapes.ALL, (1024, 16, 1), (1024, 32, 4), (1024, 32, 8), (512, 0, 1), (512, 0, 2), (512, 0, 4),
)  # fmt: skip
Call = Callable[[int], None]  # on one of the tensors


@dataclass(frozen=True)
class Cell:
    """A shape that is timed."""

    rows: int
    width: int
    length: int
    scores: str = "normal"


def cells(quick: bool) -> Iterator[Cell]:
    """Wide, then exact; lengths together."""
    for length in LENGTHS:
        for rows in ROWS:
            yield Cell(rows, WIDE, length)
            if not quick:
                yield Cell(rows, length, length)
    for scores in HARD:
        for length in (16384, 33000, 131072):
            for rows in (8, 128):
                yield Cell(rows, WIDE, length, scores)


def built(width: int, device: torch.device) -> dict[str, VariantSpec]:
    """Variants that take rows of this width, by their axes."""
    found = {}
    for threads, keys, cluster in CANDIDATES:
        spec = VariantSpec(
            op="select_topk", arch=runtime.arch_of(device), threads=threads, keys=keys,
            cluster=cluster,
        )  # fmt: skip
        enough = share(threads, keys, cluster) * cluster >= width
        if enough and (runtime.find(spec) is not None or not runtime.jit_refusal()):
            found[spec.name.removeprefix("select_topk_").rpartition("_")[0]] = spec
    return found


class Problem:
    """Scores of a cell, and room for results; ``pool``: memory of two wide tensors."""

    def __init__(self, cell: Cell, pool: list[torch.Tensor]) -> None:
        device, size = pool[0].device, cell.rows * cell.width
        self.cell = cell
        self.logits = [flat[:size].view(cell.rows, cell.width) for flat in pool]
        if cell.scores != "normal":
            draw = topk_reference.DISTRIBUTIONS[cell.scores]
            self.logits = [draw(x, torch.rand_like(x)).to(device) for x in self.logits]
        self.lengths = torch.full((cell.rows,), cell.length, dtype=torch.int32, device=device)
        table = (cell.rows, -(-cell.width // 64))
        self.table = torch.randint(1 << 20, table, dtype=torch.int32, device=device)
        self.out = torch.empty(cell.rows, K, dtype=torch.int32, device=device)
        self.counts = torch.empty_like(self.lengths)

    def call(self, spec: VariantSpec, slots: bool = True) -> Call:
        """A launch of the variant, to slots or positions."""
        device = self.out.device
        kernel = runtime.kernel(spec, device.type)
        starts, table = nothing(device), self.table if slots else select.no_table(device)
        rest = self.lengths, starts, table, self.out, self.counts, 64, 1
        return lambda index: kernel(self.logits[index % 2], *rest)

    def check(self, call: Call, first: torch.Tensor | None) -> tuple[torch.Tensor, str]:
        """(positions, what is wrong with them or nothing) of a call to positions."""
        self.out.fill_(-7)
        call(1)
        got, scores = self.out.clone(), self.logits[1][:, : self.cell.length]
        if first is not None:
            return got, "" if torch.equal(got, first) else "differs"
        if not bool((got[:, 1:] > got[:, :-1]).all()) or int(got[:, -1].max()) >= self.cell.length:
            return got, "is not ascending"
        taken = scores.gather(1, got.long()).sort(1).values
        if not torch.equal(taken, scores.topk(K, dim=1).values.sort(1).values):
            return got, "is not what torch.topk selects"
        want, _ = topk_reference.select_topk_reference(scores[:2], self.lengths[:2].cpu(), K)
        return got, "" if torch.equal(got[:2].cpu(), want) else "is not what a stable sort selects"


def graph_of(call: Call, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """``CALLS`` calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(CALLS):
            call(index)
    return graph


def measure(cell: Cell, pool: list[torch.Tensor], only: str) -> dict[str, float | str]:
    """Microseconds a call by variant, the median of the rounds; or what is wrong."""
    problem, stream = Problem(cell, pool), torch.cuda.Stream()
    torch.cuda.synchronize()  # what another stream reads is there
    result: dict[str, float | str] = {}
    graphs, first = {}, None
    for name, spec in built(cell.width, problem.out.device).items():
        if only and not any(part in name for part in only.split("+")):
            continue
        got, wrong = problem.check(problem.call(spec, slots=False), first)
        first = got if first is None else first
        if wrong:
            result[name] = wrong
            continue
        problem.call(spec)(0)
        torch.cuda.synchronize()
        graphs[name] = graph_of(problem.call(spec), stream)
    replays = {name: max(1, int(ROUND_MS / timed(graph, 2))) for name, graph in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    pick = random.Random(0)
    for _ in range(ROUNDS):
        for name in pick.sample(list(graphs), len(graphs)):
            times[name].append(timed(graphs[name], replays[name]))
    return result | {name: 1e3 * median(ms) / CALLS for name, ms in times.items()}


def line(cell: Cell, chosen: str, us: dict[str, float | str]) -> str:
    """A row of the table: what is chosen, the fastest, and all, fastest first."""
    numbers = sorted((t, name) for name, t in us.items() if not isinstance(t, str))
    texts = [f"{name} {t:.1f}" for t, name in numbers]
    texts += [f"**{name} {t}**" for name, t in us.items() if isinstance(t, str)]
    mine = us.get(chosen, "-")
    shown = mine if isinstance(mine, str) else f"{mine:.1f}"
    width = "exact" if cell.width == cell.length else str(cell.width)
    cells_ = (cell.scores, width, cell.length, cell.rows, chosen, shown, ", ".join(texts))
    return f"| {' | '.join(map(str, cells_))} |"


def chosen(cell: Cell, device: torch.device) -> str:
    """The variant that ``select_topk`` takes."""
    shape = shapes.choose(cell.rows, cell.width)
    spec = VariantSpec(op="select_topk", arch=runtime.arch_of(device), **shape._asdict())
    return spec.name.removeprefix("select_topk_").rpartition("_")[0]


def main(
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    quick: Annotated[bool, typer.Option(help="Wide tensors alone.")] = False,
    only: Annotated[
        str, typer.Option(help="Variants with one of these, by +, in their names.")
    ] = "",
    limit: Annotated[float, typer.Option(help="Seconds after which no shape is begun.")] = 85,
) -> None:
    """Times the shapes and writes ``topk_rows_cost.md`` and ``.json``."""
    begin, device = time.monotonic(), torch.device("cuda")
    torch.manual_seed(0)
    pool = [torch.randn(max(ROWS) * WIDE, device=device) for _ in range(2)]
    torch.cuda.synchronize()
    facts = machine(device, timing.Nvml())
    lines = page.head(
        "Top-k by rows", "profiles.topk_rows_cost", page.told(facts, page.FACTS),
        f"µs a call in a CUDA graph of {CALLS}, k {K}, slots of pages of 64; variants in turn",
    )  # fmt: skip
    titles = "scores", "width", "tokens", "rows", "chosen", "µs", "all, fastest first"
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    records, wrong = [], 0
    with torch.inference_mode():
        for cell in cells(quick):
            if time.monotonic() - begin > limit:
                typer.echo(f"time is up before {cell}")
                break
            us = measure(cell, pool, only)
            wrong += sum(isinstance(t, str) for t in us.values())
            lines.append(line(cell, chosen(cell, device), us))
            typer.echo(lines[-1])
            records.append({**asdict(cell), "us": us})
            torch.cuda.empty_cache()
    write_atomic(out / "topk_rows_cost.md", "\n".join(lines) + "\n")
    write_atomic(out / "topk_rows_cost.json", json.dumps({"machine": facts, "cells": records}))
    typer.echo(f"{len(records)} shapes in {time.monotonic() - begin:.0f} s, {wrong} wrong")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)

"""``select_topk`` beside other top-k kernels, on one GPU.

    python -m profiles.dsa_cost --peers DIR --out profiles/results

Contenders, those that are there: torch.topk, vLLM's ``persistent_topk``, ``cooperative_topk`` and
``top_k_per_row_prefill`` (out of the wheel's library in DIR/vllm, or an installed vLLM's), and
FlashInfer's ``top_k_page_table_transform`` (its module in DIR/flashinfer, or installed), as it is
and deterministic with ties to the lowest position.  Ours is timed with and
without a block table; of the others only FlashInfer's looks slots up.  Each row is first compared
with a stable sort: ours entry for entry, of a peer the scores that it selects.

Calls are captured in CUDA graphs, and these are replayed in an order that changes each round.
"""

from __future__ import annotations

import importlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import tvm_ffi
import typer

from codegen.artifacts import write_atomic
from profiles import page, timing
from profiles.machine import machine
from snapmla.dsa import select_topk, shapes
from snapmla.testing import topk_reference

K, PAGE = 2048, 64
ROUNDS, ROUND_MS = 9, 4.0
CALLS = 20  # in a graph; fewer of calls that take long
SHAPES = tuple((rows, columns) for columns in (8192, 32768, 131072)
               for rows in (1, 8, 32, 64, 128, 256))  # fmt: skip
MORE = ((64, 16384), (2048, 32768), (1, 300000))
# Rows of fewer tokens in logits that are as wide as an engine's longest context.
ENGINE = tuple((rows, 163840, tokens) for tokens in (8192, 33000, 131072)
               for rows in (1, 8, 32, 64, 128, 256))  # fmt: skip
WIDE = 163840
# Lengths that are no power of two, at the ends of no variant: as wide as an engine's, and exact.
LENGTHS = (5000, 12000, 33000, 100000)
BESIDE = tuple((rows, columns, tokens) for tokens in LENGTHS for rows in (1, 8, 32, 128, 256)
               for columns in (WIDE, tokens))  # fmt: skip
ZEROS = ((64, 16384), (64, 131072), (256, 32768))  # also with 98 % of the scores 0
WORKSPACE = 1 << 20  # bytes that vLLM's ops want
COOPERATIVE_ROWS = 32  # the most that vLLM gives cooperative_topk
DETERMINISTIC = "FlashInfer det."


@dataclass
class Problem:
    """One row of the table, on the card.

    Attributes:
        want: positions by a stable sort, (rows, k), of the first few rows.
    """

    logits: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    want: torch.Tensor
    workspace: torch.Tensor

    @classmethod
    def of(
        cls,
        rows: int,
        columns: int,
        name: str,
        k: int = K,
        device: torch.device | str = "cuda",
        tokens: int = 0,
    ) -> Problem:
        """Of rows of so many scores, ``tokens`` of which count, all if 0."""
        torch.manual_seed(columns)
        normal, uniform = (make(rows, columns, device=device) for make in (torch.randn, torch.rand))
        logits = topk_reference.DISTRIBUTIONS[name](normal, uniform)
        lengths = torch.full((rows,), tokens or columns, dtype=torch.int32, device=device)
        width = -(-columns // PAGE)
        table = torch.randperm(rows * width, device=device).int().view(rows, width)
        want, _ = topk_reference.select_topk_reference(logits[:4], lengths[:4].cpu(), k)
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        return cls(logits, lengths, table, want, workspace)

    @property
    def k(self) -> int:
        return self.want.shape[1]

    @cached_property
    def tokens(self) -> torch.Tensor:
        """A block table of pages of one token, so that a slot is a position."""
        positions = torch.arange(self.logits.shape[1], device=self.logits.device).int()
        return positions.expand(len(self.logits), -1).contiguous()

    def results(self, value: int = 0) -> torch.Tensor:
        """Room for the positions or slots of all rows."""
        size = (len(self.logits), self.k)
        return torch.full(size, value, dtype=torch.int32, device=self.logits.device)

    @property
    def calls(self) -> int:
        """Calls of a graph."""
        return CALLS if self.logits.numel() < 1 << 25 else 4


Call = Callable[[], torch.Tensor]  # returns (rows, k)


def ours(problem: Problem, table: bool) -> Call:
    """``select_topk``, to slots or positions; results given."""
    out, counts = problem.results(), torch.empty_like(problem.lengths)
    pages = problem.table if table else None
    return lambda: select_topk(
        problem.logits, problem.lengths, problem.k, block_table=pages, out=out, counts=counts
    )[0]


def vllm_ops(peers: Path | None) -> Any:
    """vLLM's operators, None where there are none."""
    for library in sorted(peers.glob("vllm/_C*.so")) if peers else ():
        torch.ops.load_library(str(library))
    if not hasattr(torch.ops._C, "persistent_topk"):
        try:
            importlib.import_module("vllm._custom_ops")
        except Exception as error:  # of any kind: a peer that cannot be imported is left out
            typer.echo(f"vLLM: {type(error).__name__}: {error}")
    return torch.ops._C if hasattr(torch.ops._C, "persistent_topk") else None


def vllm(ops: Any, problem: Problem) -> Iterator[tuple[str, Call]]:
    """vLLM's, each into an output of its own."""
    rows, columns = problem.logits.shape
    lengths, zeros = problem.lengths.view(-1, 1), torch.zeros_like(problem.lengths)

    def made(run: Callable[[torch.Tensor], Any]) -> Call:
        out = problem.results(-1)

        def call() -> torch.Tensor:
            run(out)
            return out

        return call

    given = problem.logits, lengths
    rest = problem.workspace, problem.k, columns
    yield "vLLM persistent", made(lambda out: ops.persistent_topk(*given, out, *rest))
    if rows <= COOPERATIVE_ROWS and hasattr(ops, "cooperative_topk"):
        yield "vLLM cooperative", made(lambda out: ops.cooperative_topk(*given, out, *rest))
    if hasattr(ops, "top_k_per_row_prefill"):
        last = rows, problem.logits.stride(0), 1, problem.k
        yield "vLLM prefill", made(lambda out: ops.top_k_per_row_prefill(
            problem.logits, zeros, problem.lengths, out, *last
        ))  # fmt: skip


Transform = Callable[[Problem, torch.Tensor, bool], None]


def flashinfer_op(peers: Path | None) -> Transform | None:
    """FlashInfer's ``top_k_page_table_transform`` into an output: installed, or the operators of
    its ``topk`` module, compiled to DIR/flashinfer/topk.so; None where neither is."""
    library = peers / "flashinfer" / "topk.so" if peers else None
    if library is not None and library.is_file():
        states = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
        run = tvm_ffi.load_module(str(library)).radix_topk_page_table_transform

        def alone(problem: Problem, out: torch.Tensor, deterministic: bool) -> None:
            run(
                problem.logits, out, problem.tokens, None, problem.lengths, states, problem.k,
                deterministic, int(deterministic), 1, False, None, None, None,
            )  # fmt: skip

        return alone
    try:
        transform = importlib.import_module("flashinfer").top_k_page_table_transform
    except (ImportError, AttributeError):
        return None

    def installed(problem: Problem, out: torch.Tensor, deterministic: bool) -> None:
        transform(
            problem.logits, problem.tokens, problem.lengths, problem.k, out=out,
            deterministic=deterministic, tie_break=int(deterministic),
        )  # fmt: skip

    return installed


def flashinfer(transform: Transform, problem: Problem) -> Iterator[tuple[str, Call]]:
    """FlashInfer's; deterministic it takes, as ours does, the lowest of tied positions."""

    def made(deterministic: bool) -> Call:
        out = problem.results()

        def call() -> torch.Tensor:
            transform(problem, out, deterministic)
            return out

        return call

    yield "FlashInfer", made(False)
    yield DETERMINISTIC, made(True)


@dataclass(frozen=True)
class Peers:
    """What there is to compare with, each None where it is not."""

    vllm: Any = None
    flashinfer: Transform | None = None

    @classmethod
    def of(cls, folder: Path | None) -> Peers:
        """Of a folder of libraries, or installed."""
        return cls(vllm_ops(folder), flashinfer_op(folder))


def contenders(problem: Problem, peers: Peers) -> dict[str, Call]:
    """All that are there, ours first."""
    found: dict[str, Call] = {"slots": ours(problem, True), "positions": ours(problem, False)}
    if peers.vllm is not None:
        found |= dict(vllm(peers.vllm, problem))
    if peers.flashinfer is not None:
        found |= dict(flashinfer(peers.flashinfer, problem))
    tokens = int(problem.lengths[0])
    if len(problem.logits) * tokens <= 1 << 24:
        scores = problem.logits[:, :tokens]
        found["torch.topk"] = lambda: torch.topk(scores, problem.k, dim=1).indices
    return found


def check(problem: Problem, name: str, call: Call) -> None:
    """Raises ValueError unless the first rows are right: ours entry for entry, others' scores."""
    got, want = call()[: len(problem.want)].cpu().long(), problem.want.long()
    if name == "slots":
        want = torch.stack([
            topk_reference.slots_of(row, table, PAGE)
            for row, table in zip(want, problem.table.cpu())
        ])  # fmt: skip
    if name in ("slots", "positions"):
        right = torch.equal(got, want)
    else:
        scores = problem.logits[: len(want)].cpu()
        taken, best = (scores.gather(1, x.clamp(min=0)).sort(1).values for x in (got, want))
        distinct = all(len(set(row)) == problem.k for row in got.tolist())
        right = distinct and bool((got >= 0).all()) and torch.equal(taken, best)
    if not right:
        raise ValueError(f"{name}: not what a stable sort selects")


def graph_of(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def timed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Milliseconds of a replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / replays


def in_turn(found: dict[str, Call], calls: int) -> dict[str, float]:
    """Microseconds a call, the median of the rounds."""
    graphs = {name: graph_of(call, calls) for name, call in found.items()}
    replays = {name: max(1, int(ROUND_MS / timed(graph, 2))) for name, graph in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    pick = random.Random(0)
    for _ in range(ROUNDS):
        for name in pick.sample(list(graphs), len(graphs)):
            times[name].append(timed(graphs[name], replays[name]))
    return {name: 1e3 * median(ms) / calls for name, ms in times.items()}


def row(rows: int, columns: int, tokens: int, name: str, peers: Peers) -> str:
    """One line of the table; a peer that is wrong, or fails, is said so and not timed."""
    problem = Problem.of(rows, columns, name, tokens=tokens)
    found, said = {}, []
    for who, call in contenders(problem, peers).items():
        try:
            check(problem, who, call)
            found[who] = call
        except (RuntimeError, TypeError, ValueError) as error:
            if who in ("slots", "positions"):
                raise
            said.append(f"{who}: {str(error).splitlines()[0][:80]}")
    us = in_turn(found, problem.calls)
    mine = us.pop("slots"), us.pop("positions")
    best = min((t for who, t in us.items() if who.startswith("vLLM")), default=None)
    ratios = ["-" if t is None else f"{t / mine[0]:.2f}" for t in (best, us.get(DETERMINISTIC))]
    others = ", ".join(f"{who} {t:.1f}" for who, t in us.items())
    shape = "x".join(map(str, shapes.choose(rows, columns)))
    times = [f"{t:.1f}" for t in mine]
    size = f"{rows} x {columns}" if tokens == columns else f"{rows} x {tokens} of {columns}"
    cells = (size, name, shape, *times, *ratios, others)
    return f"| {' | '.join(cells)} |{' '.join(said)}"


def main(
    peers: Annotated[Path | None, typer.Option(help="Folder of peers' libraries.")] = None,
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    some: Annotated[int, typer.Option("--first", help="Rows to time, the first ones.")] = 99,
    variant: Annotated[str, typer.Option(help="Instead of the one that is chosen: 512x16x1.")] = "",
    limit: Annotated[float, typer.Option(help="Seconds after which no row is begun.")] = 600,
) -> None:
    """Times the shapes and writes ``dsa_cost.md``."""
    begin = time.monotonic()
    if variant:
        forced = shapes.TopkShape(*map(int, variant.split("x")))
        shapes.choose = lambda rows, columns: forced
    facts = machine(torch.device("cuda"), timing.Nvml())
    lines = page.head(
        "Top-k of the index scores", "profiles.dsa_cost",
        page.told(facts, ("gpu", "driver", "cuda", "torch")),
        f"µs a call in a CUDA graph, k {K}, contenders in turn; pages of {PAGE}",
        "variant: threads x keys of a thread x CTAs of a row",
        "ratios to slots: vLLM's fastest (positions, in any order), FlashInfer's deterministic "
        "(slots, in any order that repeats)",
    )  # fmt: skip
    titles = (
        "rows x tokens of columns",
        "scores",
        "variant",
        "slots",
        "positions",
        "vLLM",
        "det.",
        "others",
    )
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    found = Peers.of(peers)
    wanted = [(*shape, "normal") for shape in (*BESIDE, *ENGINE)]
    wanted += [(*shape, shape[1], "normal") for shape in (*SHAPES, *MORE)]
    wanted += [(*shape, shape[1], "zeros") for shape in ZEROS]
    with torch.inference_mode():
        for rows, columns, tokens, name in dict.fromkeys(wanted[:some]):
            if columns > shapes.choose(rows, columns).columns:
                continue
            if time.monotonic() - begin > limit:
                typer.echo(f"time is up before {rows} x {tokens} of {columns}")
                break
            lines.append(row(rows, columns, tokens, name, found))
            typer.echo(lines[-1])
            write_atomic(out / "dsa_cost.md", "\n".join(lines) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)

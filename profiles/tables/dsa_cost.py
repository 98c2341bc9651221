"""``select_topk`` beside other top-k kernels, on one GPU:
``python -m profiles.bench dsa_cost --peers DIR``.

Contenders, those that are there: torch.topk, vLLM's ``persistent_topk``, ``cooperative_topk`` and
``top_k_per_row_prefill`` (out of the wheel's library in DIR/vllm, or an installed vLLM's), and
FlashInfer's ``top_k_page_table_transform`` (its module in DIR/flashinfer, or installed), as it is
and deterministic with ties to the lowest position.  Ours is timed with and without a block table;
of the others only FlashInfer's looks slots up.  Each row is compared with a stable sort: ours entry
for entry, of a peer the scores that it selects.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tvm_ffi

from profiles import table
from profiles.peer_ops import COOPERATIVE_ROWS, WORKSPACE, vllm_ops
from profiles.table import Row, Table
from profiles.timing import TimingConfig
from snapmla.dsa import select_topk
from snapmla.indexer import shapes
from snapmla.testing import topk_reference

K, PAGE = 2048, 64
CONFIG = TimingConfig(
    graph_ms=4.0, rounds=9, warmup_rounds=0, cold_iters=0, host_iters=0, shuffled=True
)
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
        """Makes rows of so many scores, ``tokens`` of which count, all if 0."""
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


Call = Callable[[], torch.Tensor]  # returns (rows, k)


def ours(problem: Problem, table: bool) -> Call:
    """``select_topk``, to slots or positions; results given."""
    out, counts = problem.results(), torch.empty_like(problem.lengths)
    pages = problem.table if table else None
    return lambda: select_topk(
        problem.logits, problem.lengths, problem.k, block_table=pages, out=out, counts=counts
    )[0]


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
    """Peers to compare with, each None where it is not."""

    vllm: Any = None
    flashinfer: Transform | None = None

    @classmethod
    def of(cls, folder: Path | None) -> Peers:
        """Finds peers in a folder of libraries, or installed."""
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


# ---------------------------------------------------------------------------- the table


class Shape(NamedTuple):
    """A row of the table: rows of so many columns, of which tokens count; how scores are drawn."""

    rows: int
    columns: int
    tokens: int
    scores: str = "normal"


WANTED = [
    *(Shape(*shape) for shape in (*BESIDE, *ENGINE)),
    *(Shape(*shape, shape[1]) for shape in (*SHAPES, *MORE)),
    *(Shape(*shape, shape[1], "zeros") for shape in ZEROS),
]


class Drawn(table.Problem):
    """A row's tensors, and the peers beside it."""

    def __init__(self, shared: tuple[Peers, torch.device], shape: Shape) -> None:
        (self.peers, device), self.shape = shared, shape
        rows, columns, tokens, scores = shape
        self.problem = Problem.of(rows, columns, scores, K, device, tokens)

    def facts(self) -> dict[str, Any]:
        rows, columns, tokens, scores = self.shape
        size = f"{rows} x {columns}" if tokens == columns else f"{rows} x {tokens} of {columns}"
        variant = "x".join(map(str, shapes.choose(rows, columns)))
        return {"shape": size, "scores": scores, "variant": variant}

    def contenders(self) -> dict[str, list[Call]]:
        return {who: [call] for who, call in contenders(self.problem, self.peers).items()}

    def check(self, name: str, calls: Sequence[Call]) -> None:
        check(self.problem, name, calls[0])


def to_slots(head: str, words: str) -> table.Column:
    """The time of the fastest of those whose names begin with the words by ours to slots."""

    def cell(row: Row) -> str:
        times = [us for who, us in row["us"].items() if who.startswith(words)]
        return f"{min(times) / row['us']['slots']:.2f}" if times else "-"

    return head, cell


def others(*left_out: str) -> table.Column:
    """All but these."""
    return "others", lambda row: ", ".join(
        f"{name} {us:.1f}" for name, us in row["us"].items() if name not in left_out
    )


TABLES = (
    Table(
        "dsa_cost", "Top-k of the index scores", Drawn,
        [s for s in dict.fromkeys(WANTED) if s.columns <= shapes.choose(*s[:2]).columns],
        (
            table.fact("rows x tokens of columns", "shape"), table.fact("scores", "scores"),
            table.fact("variant", "variant"), table.us("slots"), table.us("positions"),
            to_slots("vLLM", "vLLM"), to_slots("det.", DETERMINISTIC), others("slots", "positions"),
        ),
        CONFIG,
        notes=(
            f"µs a call in a CUDA graph, k {K}, contenders in turn; pages of {PAGE}",
            "variant: threads x keys of a thread x CTAs of a row",
            "ratios to slots: vLLM's fastest (positions, in any order), FlashInfer's deterministic "
            "(slots, in any order that repeats)",
        ),
        setup=lambda run: (Peers.of(run.peers), run.device), ours=("slots", "positions"),
        takes=("peers",),
    ),
)  # fmt: skip

"""``select_topk`` by rows, width of the logits and lengths: all variants that could serve, in turn:
``python -m profiles.bench topk_rows_cost``, of wide tensors alone with ``--only width=163840``.

An engine's logits are as wide as its longest context, whatever the lengths, and hosts know no
length.  So each variant is timed over wide tensors with short rows, and over tensors as wide as the
rows; those that are built for this GPU.  Kernels are called by themselves, each call of a graph on
the other one of two tensors.  ``--set variants=A+B``: those with one of these in their names.

Each result is compared: entry for entry with the first variant's, whose scores are
``torch.topk``'s, ascending; of a few rows also with a stable sort.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsl_kernels.formats.topk_share import share
from dsl_kernels.spec import VariantSpec
from profiles import table, timing
from profiles.table import Row, Run, Table
from profiles.timing import TimingConfig
from snapmla.indexer import select_topk, shapes
from snapmla.runtime import variants
from snapmla.runtime.launch import nothing
from snapmla.testing import topk_reference

K = 2048
WIDE = 163840
LENGTHS = (4096, 8192, 16384, 33000, 65536, 131072)
ROWS = (1, 8, 16, 32, 48, 64, 128, 256)
HARD = ("zeros", "rising")  # scores of which sweeps list too many
CONFIG = TimingConfig(
    graph_ms=1.0, rounds=5, warmup_rounds=0, cold_iters=0, host_iters=0, shuffled=True
)
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


SHAPES = [  # wide, and exact; lengths together
    *(Cell(rows, width, length) for length in LENGTHS for rows in ROWS for width in (WIDE, length)),
    *(
        Cell(rows, WIDE, length, scores)
        for scores in HARD
        for length in (16384, 33000, 131072)
        for rows in (8, 128)
    ),
]


def built(width: int, device: torch.device) -> dict[str, VariantSpec]:
    """Variants that take rows of this width, by their axes."""
    found = {}
    for threads, keys, cluster in CANDIDATES:
        spec = VariantSpec(
            op="select_topk", arch=variants.arch_of(device), threads=threads, keys=keys,
            cluster=cluster,
        )  # fmt: skip
        enough = share(threads, keys, cluster) * cluster >= width
        if enough and (variants.find(spec) is not None or not variants.jit_refusal()):
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
        kernel = variants.kernel(spec, device.type)
        starts, table = nothing(device), self.table if slots else select_topk.no_table(device)
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


def chosen(cell: Cell, device: torch.device) -> str:
    """The variant that ``select_topk`` takes."""
    shape = shapes.choose(cell.rows, cell.width)
    spec = VariantSpec(op="select_topk", arch=variants.arch_of(device), **shape._asdict())
    return spec.name.removeprefix("select_topk_").rpartition("_")[0]


def pool_of(run: Run) -> tuple[list[torch.Tensor], list[str]]:
    """Memory of two wide tensors; the names that are asked for."""
    pool = [torch.randn(max(ROWS) * WIDE, device=run.device) for _ in range(2)]
    return pool, run.options.get("variants", "").split("+")


class Variants(table.Problem):
    """A row: the cell by all variants that are built, of names that are asked for."""

    def __init__(self, shared: tuple[list[torch.Tensor], list[str]], cell: Cell) -> None:
        self.problem = Problem(cell, shared[0])
        self.first: torch.Tensor | None = None
        found = built(cell.width, shared[0][0].device).items()
        self.specs = {n: spec for n, spec in found if any(part in n for part in shared[1])}

    def contenders(self) -> dict[str, list[timing.Call]]:
        """Each on either tensor."""
        calls = {name: self.problem.call(spec) for name, spec in self.specs.items()}
        return {n: [functools.partial(call, i) for i in range(2)] for n, call in calls.items()}

    def check(self, name: str, calls: Sequence[timing.Call]) -> None:
        """Its positions."""
        given = self.problem
        got, wrong = given.check(given.call(self.specs[name], slots=False), self.first)
        self.first = got if self.first is None else self.first
        if wrong:
            raise ValueError(wrong)

    def facts(self) -> dict[str, Any]:
        cell = self.problem.cell
        width = "exact" if cell.width == cell.length else str(cell.width)
        return {
            "shape": f"{cell.rows} x {cell.length} of {cell.width}", "scores": cell.scores,
            "width": width, "tokens": cell.length, "rows_": cell.rows,
            "chosen": chosen(cell, self.problem.out.device),
        }  # fmt: skip


def fastest_first(row: Row) -> str:
    """All that are right."""
    return ", ".join(f"{n} {us:.1f}" for us, n in sorted((us, n) for n, us in row["us"].items()))


def of_chosen(row: Row) -> str:
    """The time of the variant that ``select_topk`` takes."""
    us = row["us"].get(row["chosen"])
    return "-" if us is None else f"{us:.1f}"


TABLES = (
    Table(
        "topk_rows_cost", "Top-k by rows", Variants, SHAPES,
        (
            table.fact("scores", "scores"), table.fact("width", "width"),
            table.fact("tokens", "tokens"), table.fact("rows", "rows_"),
            table.fact("chosen", "chosen"), ("µs", of_chosen),
            ("all, fastest first", fastest_first),
        ),
        CONFIG,
        notes=(f"µs a call in a CUDA graph, k {K}, slots of pages of 64; variants in turn",),
        setup=pool_of, ours=(), takes=("variants",),
    ),
)  # fmt: skip

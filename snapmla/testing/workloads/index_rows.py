"""``index_rows``: tokens that each query token sees, and its row of the block table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.testing.index_tables import rows_tables
from snapmla.testing.workloads.call import Sizes, bit_for_bit
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Problem, hashed, workload
from snapmla.testing.workloads.samples import PAGE

RESULTS = {"lengths": "lengths", "tables": "tables"}


def truth(_spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Row by row."""
    device, columns = given["lengths"].device, given["tables"].shape[1]
    begins = given["cu_seqlens_q"].cpu()
    lengths, tables = rows_tables(
        given["cache_seqlens"].cpu(), begins if len(begins) else None, given["block_table"].cpu(),
        given["most"], len(given["lengths"]), given["s_q"],
    )  # fmt: skip
    if not len(given["tables"]):
        tables = tables[:0]
    return {"lengths": lengths.to(device), "tables": tables[:, :columns].to(device)}


@dataclass(frozen=True, kw_only=True)
class Table(Problem):
    """Sequences and the rows that they are made into.

    Attributes:
        lengths: cached tokens of each sequence.
        width: pages of the block table.
        rows: query tokens, those of no sequence among them.
        begins: of ragged queries, the first row of each sequence, and the end.
        s_q: query tokens of each sequence if they are not ragged.
        most: tokens that a row may see; None: those of the table's pages.
        columns: of the table that is written; None: none is.
        ids: of pages, random and below it; 0: each occurs once.
    """

    lengths: Sequence[int]
    width: int
    rows: int
    begins: Sequence[int] = ()
    s_q: int = 1
    most: int | None = None
    columns: int | None = None
    ids: int = 0


def arguments(_spec: VariantSpec, problem: Table, draw: Draw) -> dict[str, Any]:
    """Arguments by name; results full of -7."""
    begins, lengths = draw.i32(problem.begins), draw.i32(problem.lengths)
    table = draw.page_ids(len(lengths), problem.width, problem.ids)
    draw.identify_by(begins, lengths, table)
    shape = (0, 0) if problem.columns is None else (problem.rows, problem.columns)
    made: dict[str, Any] = {"value": -7, "dtype": torch.int32}
    return {
        "cache_seqlens": lengths, "cu_seqlens_q": begins, "block_table": table,
        "lengths": draw.full(problem.rows, **made), "tables": draw.full(*shape, **made),
        "s_q": problem.s_q,
        "most": problem.width * PAGE if problem.most is None else problem.most,
    }  # fmt: skip


# drafts; ragged prompts with sequences of no query token, rows of no sequence, lengths below the
# query tokens and beyond the table; more sequences than a search's first round
_FEW = (5, 0, 700, 130, -3)
SMALL = (
    Table(note="drafts", lengths=_FEW, width=9, rows=15, s_q=3),
    Table(
        note="ragged", lengths=_FEW, width=9, rows=37, begins=(0, 3, 3, 10, 11, 30), columns=7,
        most=400,
    ),
    Table(
        note="many", lengths=range(0, 90 * 7, 7), width=40, rows=140, columns=40, ids=99,
        begins=[i // 2 * 3 for i in range(91)],
    ),
)  # fmt: skip


def recorded(draw: Exact) -> Iterator[Table]:
    """Ragged queries of 20 sequences."""
    begins = [0, *draw.below(9, 20).cumsum(0).tolist()]
    lengths = draw.below(800, 20).tolist()
    yield Table(
        lengths=lengths, width=11, rows=begins[-1] + 3, begins=begins, columns=11, ids=1 << 20
    )  # fmt: skip


def sized(_spec: VariantSpec, sizes: Sizes) -> Table:
    """A prompt's chunk of each sequence, with tables."""
    rows, width = sizes.batch * sizes.s_q, -(-sizes.tokens // PAGE)
    return Table(
        lengths=[sizes.tokens] * sizes.batch, width=width, rows=rows, columns=width,
        begins=range(0, rows + 1, sizes.s_q),
    )  # fmt: skip


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads and writes a table row a query token, writes a length."""
    return 4.0 * sizes.batch * sizes.s_q * (1 + 2 * -(-sizes.tokens // PAGE))


WORKLOAD = workload(
    bit_for_bit, truth, arguments, small=lambda _: SMALL, recorded=recorded, sized=sized,
    results=lambda *_: RESULTS, rows=hashed("rows", *RESULTS), moved=moved,
)  # fmt: skip

"""``select_topk``: the k highest scores of each row, against a stable sort."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.formats.topk_share import share
from dsl_kernels.spec import VariantSpec
from snapmla.dsa import select_topk
from snapmla.testing import topk_reference
from snapmla.testing.workloads.call import Sizes, bit_for_bit
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Problem, hashed, named, workload
from snapmla.testing.workloads.samples import PAGE

MOST = 2200  # columns of small calls, which overflow the list of the smaller variants
K = 2048  # the largest k


def capacity(spec: VariantSpec) -> int:
    """Columns of the longest rows that a variant takes."""
    return share(spec.threads, spec.keys, spec.cluster) * spec.cluster


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """``out`` and ``counts`` as they should be, by a stable sort."""
    table, starts = given["block_table"], given["row_starts"]
    out, counts = topk_reference.select_topk_reference(
        given["logits"], given["lengths"], given["out"].shape[1],
        block_table=table if len(table) else None, page_size=given["page_size"],
        row_starts=starts if len(starts) else None, next_n=given["next_n"],
    )  # fmt: skip
    return {"out": out, "counts": counts}


def laid_out(
    logits: Tensor,
    lengths: Tensor,
    k: int,
    table: Tensor | None = None,
    starts: Tensor | None = None,
    next_n: int = 1,
    page_size: int = PAGE,
) -> dict[str, Any]:
    """A kernel's arguments of tensors, by name; results full of -7."""
    rows = len(logits)
    made: dict[str, Any] = {"dtype": torch.int32, "device": logits.device}
    return {
        "logits": logits, "lengths": lengths,
        "row_starts": torch.empty(0, **made) if starts is None else starts,
        "block_table": torch.empty((0, 0), **made) if table is None else table,
        "out": torch.full((rows, k), -7, **made), "counts": torch.full((rows,), -7, **made),
        "page_size": page_size, "next_n": next_n,
    }  # fmt: skip


def _widths(spec: VariantSpec) -> tuple[int, ...]:
    """Columns of small calls: of variants that keep no keys, rows that one CTA keeps after all, and
    rows that are streamed."""
    if spec.keys:
        return (min(capacity(spec), MOST),)
    kept = 16 * spec.threads
    return min(kept * 7 // 8, MOST), max(MOST, kept + MOST // 4)


@dataclass(frozen=True, kw_only=True)
class Scores(Problem):
    """Rows of scores.

    Attributes:
        lengths: of the rows, in their order.
        columns, k: extents.
        scores: (rows, columns) on the CPU; None: normal ones.
        starts: first columns of rows that do not all begin at 0.
        table: block table of the rows; None: ``pages`` of each sequence, or without them none.
        next_n, page_size: as the kernel takes them.
    """

    lengths: Sequence[int]
    columns: int
    k: int
    scores: Tensor | None = None
    starts: Tensor | None = None
    table: Tensor | None = None
    pages: int = 0
    next_n: int = 1
    page_size: int = PAGE


def arguments(_spec: VariantSpec, problem: Scores, draw: Draw) -> dict[str, Any]:
    """Arguments by name."""
    rows, scores, table = len(problem.lengths), problem.scores, problem.table
    scores = draw.rows(rows, problem.columns) if scores is None else scores
    lengths = draw.i32(problem.lengths)
    draw.identify_by(scores, lengths)
    if problem.pages:
        table = draw.page_ids(rows // problem.next_n, problem.pages)
    return laid_out(
        draw.there(scores), lengths, problem.k, table, problem.starts, problem.next_n,
        problem.page_size,
    )  # fmt: skip


def small(spec: VariantSpec) -> Iterator[Scores]:
    """Problems of each of ``_widths``."""
    for columns in _widths(spec):
        yield from _problems(columns)


def _problems(columns: int) -> Iterator[Scores]:
    """Numbers, ties that overflow the list, specials; lengths about k; NaN around every row.

    Ties are two numbers that differ in the lowest bits, of which all but one are wanted, in the row
    of k + 1 where ``K`` bounds k: no count may be missing, in no pass.
    """
    starts = torch.tensor([7, 5, 2, 0, 1, columns + 9], dtype=torch.int32)
    table = torch.randperm(3 * (columns // PAGE + 1)).int().view(3, -1)
    table[2, 0] = -1
    cases: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("normal", min(columns // 8 + 1, K), {"table": table, "next_n": 2}),
        ("close", min(columns - 9, K), {"starts": starts}),
        ("special", 100, {"table": table[:, :3], "starts": starts, "next_n": 2, "page_size": 24}),
    )
    for name, k, options in cases:
        lengths = torch.tensor([columns - 8, 0, k - 1, k, k + 1, -3], dtype=torch.int32)
        found = topk_reference.scores(name, len(lengths), columns)
        yield Scores(
            note=name, lengths=lengths.tolist(), columns=columns, k=k, **options,
            scores=topk_reference.padded(found, lengths, options.get("starts"), 8),
        )  # fmt: skip


def recorded(draw: Exact) -> Iterator[Scores]:
    """Rows of four distributions, ragged."""
    rows, columns, bits = 5, min(capacity(draw.case.spec), 5000) // 4 * 4, draw.bits()
    raw = torch.from_numpy(bits.normal((rows, columns)).astype(np.float32))
    lengths = [columns, *draw.below(columns + 1, rows).tolist()[1:]]
    raw[1][draw.below(50, columns) > 0] = 0.0
    raw[2] = torch.where(draw.below(2, columns) > 0, 0.0, -0.0)
    yield Scores(lengths=lengths, columns=columns, k=columns // 7, scores=raw)


def sized(_spec: VariantSpec, sizes: Sizes) -> Scores:
    """Normal scores of all cached tokens, to slots of shuffled pages."""
    return Scores(
        lengths=[sizes.tokens] * (sizes.batch * sizes.s_q), columns=-(-sizes.tokens // 4) * 4, k=K,
        pages=-(-sizes.tokens // PAGE), next_n=sizes.s_q,
    )  # fmt: skip


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.dsa.select_topk``."""
    options = {name: given[name] for name in ("block_table", "next_n", "out", "counts")}
    k = given["out"].shape[1]
    return lambda: select_topk(given["logits"], given["lengths"], k, **options)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads every score and a page id for each that is selected, writes those and a count."""
    return 4.0 * sizes.batch * sizes.s_q * (sizes.tokens + 2 * K + 2)


WORKLOAD = workload(
    bit_for_bit, truth, arguments, small=small, recorded=recorded, sized=sized,
    results=named("out", "counts"), rows=hashed("selected", "out", "counts"),
    public=public, moved=moved,
)  # fmt: skip

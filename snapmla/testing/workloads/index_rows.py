"""``index_rows``: tokens that each query token sees, and its row of the block table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.testing.index_tables import rows_tables
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import Call, Sizes, Workload, bit_for_bit
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import PAGE, Source

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


def arguments(
    cache_seqlens: Tensor, table: Tensor, rows: int, *, begins: Tensor | None = None, s_q: int = 1,
    most: int | None = None, columns: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A kernel's arguments by name; results full of -7.  ``begins``: of ragged queries."""
    made: dict[str, Any] = {"dtype": torch.int32, "device": table.device}
    shape = (0, 0) if columns is None else (rows, columns)
    return {
        "cache_seqlens": cache_seqlens,
        "cu_seqlens_q": torch.empty(0, **made) if begins is None else begins,
        "block_table": table, "lengths": torch.full((rows,), -7, **made),
        "tables": torch.full(shape, -7, **made), "s_q": s_q,
        "most": table.shape[1] * PAGE if most is None else most,
    }  # fmt: skip


def small(spec: VariantSpec) -> Iterator[Call]:
    """Drafts; ragged prompts with sequences of no query token, rows of no sequence, lengths below
    the query tokens and beyond the table; more sequences than a search's first round."""
    lengths = torch.tensor([5, 0, 700, 130, -3], dtype=torch.int32)
    table = torch.arange(5 * 9, dtype=torch.int32).view(5, 9)
    begins = torch.tensor([0, 3, 3, 10, 11, 30], dtype=torch.int32)
    many = torch.arange(90, dtype=torch.int32) * 7
    edges = torch.arange(91, dtype=torch.int32) // 2 * 3
    cases = (
        ("drafts", arguments(lengths, table, 15, s_q=3)),
        ("ragged", arguments(lengths, table, 37, begins=begins, columns=7, most=400)),
        ("many", arguments(many, torch.randint(99, (90, 40)).int(), 140, begins=edges, columns=40)),
    )
    for note, given in cases:
        yield Call(given, RESULTS, truth(spec, given), note=note)


def recorded(case: Case, run: Runner) -> Recorded:
    """Ragged queries of 20 sequences."""
    bits, b, width = case.bits(), 20, 11
    each = bits.below(9, (b,))
    begins = np.concatenate([[0], np.cumsum(each)]).astype(np.int32)
    lengths = bits.below(800, (b,)).astype(np.int32)
    table = bits.below(1 << 20, (b, width)).astype(np.int32)
    given = arguments(
        run.there(lengths), run.there(table), int(begins[-1]) + 3, begins=run.there(begins),
        columns=width,
    )  # fmt: skip
    run.call(case.variant, **given)
    return exact.of_problems([begins, lengths, table], [[given[x] for x in RESULTS]], "rows")


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """A prompt's chunk of each sequence, with tables."""
    source, rows = Source(device, seed), sizes.batch * sizes.s_q
    table, _ = source.paged(sizes, PAGE)
    lengths = source.full(sizes.batch, value=sizes.tokens, dtype=torch.int32)
    begins = source.i32(range(0, rows + 1, sizes.s_q))
    width = table["block_table"].shape[1]
    return arguments(lengths, table["block_table"], rows, begins=begins, columns=width)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads and writes a table row a query token, writes a length."""
    return 4.0 * sizes.batch * sizes.s_q * (1 + 2 * -(-sizes.tokens // PAGE))


WORKLOAD = Workload(small, bit_for_bit, recorded, sized, truth, None, moved)

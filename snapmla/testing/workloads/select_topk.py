"""``select_topk``: the k highest scores of each row, against a stable sort."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from dsl_kernels.topk_share import share
from snapmla.dsa import select_topk
from snapmla.testing import topk_reference
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import Call, Sizes, Workload, bit_for_bit
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import PAGE, Source

MOST = 2200  # columns of small calls, which overflow the list of the smaller variants
RESULTS = {"out": "out", "counts": "counts"}
K = 2048  # the largest k


def capacity(spec: VariantSpec) -> int:
    """Columns of the longest rows that a variant takes."""
    return share(spec.threads, spec.keys, spec.cluster) * spec.cluster


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """By a stable sort."""
    table, starts = given["block_table"], given["row_starts"]
    out, counts = topk_reference.select_topk_reference(
        given["logits"], given["lengths"], given["out"].shape[1],
        block_table=table if len(table) else None, page_size=given["page_size"],
        row_starts=starts if len(starts) else None, next_n=given["next_n"],
    )  # fmt: skip
    return {"out": out, "counts": counts}


def arguments(
    logits: Tensor,
    lengths: Tensor,
    k: int,
    table: Tensor | None = None,
    starts: Tensor | None = None,
    next_n: int = 1,
    page_size: int = PAGE,
) -> dict[str, Any]:
    """A kernel's arguments by name; results full of -7."""
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


def small(spec: VariantSpec) -> Iterator[Call]:
    """Calls of each of ``_widths``."""
    for columns in _widths(spec):
        yield from _calls(spec, columns)


def _calls(spec: VariantSpec, columns: int) -> Iterator[Call]:
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
        logits = topk_reference.padded(found, lengths, options.get("starts"), 8)
        given = arguments(logits, lengths, k, **options)
        yield Call(given, RESULTS, truth(spec, given), note=name)


def recorded(case: Case, run: Runner) -> Recorded:
    """Of four distributions, ragged."""
    bits, rows = case.bits(), 5
    columns = min(capacity(case.spec), 5000) // 4 * 4
    k = columns // 7
    raw = bits.normal((rows, columns)).astype(np.float32)
    lengths = bits.below(columns + 1, (rows,)).astype(np.int32)
    lengths[0] = columns
    raw[1] = np.where(bits.below(50, (columns,)) > 0, np.float32(0), raw[1])
    raw[2] = np.where(bits.below(2, (columns,)) > 0, np.float32(0), np.float32(-0.0))
    given = arguments(run.there(raw), run.there(lengths), k)
    run.call(case.variant, **given)
    return exact.of_problems([raw, lengths], [[given["out"], given["counts"]]], "selected")


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Normal scores of all cached tokens, to slots of shuffled pages."""
    source, rows = Source(device, seed), sizes.batch * sizes.s_q
    columns = -(-sizes.tokens // 4) * 4
    logits = source.normal(rows, columns, dtype=torch.float32)
    lengths = source.full(rows, value=sizes.tokens, dtype=torch.int32)
    table, _ = source.paged(sizes, PAGE)
    return arguments(logits, lengths, K, table["block_table"], next_n=sizes.s_q)


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.dsa.select_topk``."""
    options = {name: given[name] for name in ("block_table", "next_n", "out", "counts")}
    k = given["out"].shape[1]
    return lambda: select_topk(given["logits"], given["lengths"], k, **options)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads every score and a page id for each that is selected, writes those and a count."""
    return 4.0 * sizes.batch * sizes.s_q * (sizes.tokens + 2 * K + 2)


WORKLOAD = Workload(small, bit_for_bit, recorded, sized, truth, public, moved)

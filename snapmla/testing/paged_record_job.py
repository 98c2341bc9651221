"""Dense decodes over caches of bytes at the level of the ABI: inputs, one call, and its errors.

To the judge they are sparse decodes (record_job.py): a query token names the tokens that it sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK, PARTIAL_ROW
from snapmla.cache import byte_cache
from snapmla.testing.byte_records import quantize_tokens
from snapmla.testing.dense_job import DenseErrors
from snapmla.testing.record_job import RecordJob, RecordShape, poisoned_rows
from snapmla.testing.record_reference import RecordCall
from snapmla.testing.reference_plan import Queries
from snapmla.testing.sparse_job import HEAD_SCALE, INT_MAX
from snapmla.testing.workloads.call import DTYPES, NATURAL

# The exported function's, in order (dsl_kernels/entry/entries.py).
ARGUMENTS = (
    "q", "cache", "block_table", "cache_seqlens", "work_items", "part_begin", "split_begin",
    "units", "row_limits", "cu_seqlens_q", "out", "lse", "o_accum", "lse_accum", "softmax_scale",
    "causal", "lse_factor", "empty_lse", "may_split", "witness",
)  # fmt: skip
ABSURD_PAGES = (2147480000, -1)


@dataclass(frozen=True)
class PagedShape(RecordShape):
    """``RecordShape`` of sequences of pages: ``lengths`` are of sequences, ``own_lengths`` what
    each query token sees; ``topk`` is as many tokens as a row of the table names.

    Attributes:
        row_tile: of the variant, whose multiple a unit's rows are.
        causal: whether a query token sees no later one.
        holes: pages, sequence and place of each, that the pool does not have.
        nan_last: sequences whose last token is as append writes what is not finite.  Results are
            infinite then before a call, as rows that see the token must be NaN behind it; a
            partial row of theirs that is missing is NaN, too, and is not noticed.
    """

    row_tile: int = 64
    causal: bool = True
    holes: tuple[tuple[int, int], ...] = ()
    nan_last: tuple[int, ...] = ()

    @property
    def begin(self) -> list[int]:
        """First query token of each sequence."""
        return list(self.begins or range(0, self.tokens + 1, self.s_q))

    @property
    def width(self) -> int:
        """Pages in a row of the block table."""
        return self.topk // self.page_size

    @property
    def counts(self) -> list[int]:
        """Number of tokens that each query token sees; 0 for those of no sequence.  A length is at
        most what the table names, before the causal rule."""
        counts, begin = [0] * self.tokens, self.begin
        for i, length in enumerate(self.lengths):
            n, end = min(length, self.topk), begin[i + 1]
            for t in range(begin[i], end):
                seen = n - (end - 1 - t) * self.causal
                counts[t] = seen if self.own_lengths is None else min(n, self.own_lengths[t])
        return [max(n, 0) for n in counts]

    @property
    def queries(self) -> Queries:
        """A unit is the rows of a sequence, in whole row tiles."""
        begins = None if self.begins is None else list(self.begins)
        own = None if self.own_lengths is None else list(self.own_lengths)
        typical = self.s_q if begins is None else 1
        rows = -(-typical * self.heads // self.row_tile) * self.row_tile
        causal = self.causal and own is None
        return Queries(
            self.heads, self.s_q, rows, begins=begins, row_seqlens=own, causal=causal
        )  # fmt: skip


class PagedRecordJob(RecordJob):
    """One dense decode over a cache of bytes, 0xFF wherever no token is, absurd pages behind a
    sequence's end; ``shape`` is a ``PagedShape``."""

    shape: PagedShape
    table: Tensor

    @property
    def argument_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the exported function's arguments, in order."""
        return ARGUMENTS

    # ---------------------------------------------------------------- inputs

    def _fill(self) -> None:
        shape, size = self.shape, self.shape.page_size
        counts = [-(-min(max(n, 0), shape.topk) // size) for n in shape.lengths]
        pages = sum(counts) + 2
        self.cache = poisoned_rows(pages, size, shape.layout, self.record)
        self.table = torch.empty(len(shape.lengths), shape.width, dtype=torch.int32)
        self.table[:, ::2], self.table[:, 1::2] = ABSURD_PAGES
        self.indices = torch.full((shape.tokens, shape.topk), INT_MAX, dtype=torch.int32)
        order = torch.randperm(pages)
        q = torch.randn(shape.tokens, shape.heads, self.record.channels)
        for i, count in enumerate(counts):
            own = slice(*shape.begin[i : i + 2])
            self.table[i, :count], order = order[:count].int(), order[count:]
            self._fill_sequence(i, q[own])
        b_q = 1 if shape.begins is not None else len(shape.lengths)
        self.q16 = q.bfloat16().view(b_q, shape.s_q, shape.heads, self.record.channels)

    def _fill_sequence(self, i: int, q: Tensor) -> None:
        """Tokens of a sequence; its query tokens as the style wants them, in place."""
        shape, size = self.shape, self.shape.page_size
        n, places = min(max(shape.lengths[i], 0), shape.topk), torch.arange(shape.topk)
        rows, c, r = self._numbers(q.flatten(0, 1), n)
        q.copy_(rows.view(q.shape))
        content, rope, scales = quantize_tokens(self.record, c, r, shape.powers)
        content, scales = content.view(torch.uint8), scales.view(torch.uint8)
        if shape.style == "scales":
            scales = self._odd_scales(content, scales)
        slots = self.table[i, places[:n] // size].long() * size + places[:n] % size
        self._store(slots, content, rope, scales)
        for j in (j for k, j in shape.holes if k == i):
            slots[size * j : size * (j + 1)] = INT_MAX
            self.table[i, j] = (self.cache.shape[0], *ABSURD_PAGES)[j % 3]
        self.indices[slice(*shape.begin[i : i + 2]), :n] = slots.int()
        if i in shape.nan_last:
            self.make_nan(int(slots[-1]))

    def make_nan(self, slot: int, groups: Sequence[int] | None = None) -> None:
        """A token as append writes what is not finite; or some of its groups."""
        content, rope, scale = byte_cache.fields_of(self.record, self.cache[:, :, None])
        page, offset = divmod(slot, self.shape.page_size)
        assert self.record.scale is not None
        for g in range(self.record.scale.count) if groups is None else groups:
            own = slice(self.record.group * g, self.record.group * (g + 1))
            content[page, offset, own].view(torch.uint8).fill_(0x7F)
            if self.record.powers:
                scale[page, offset].view(torch.uint8)[g] = 255
            else:
                scale[page, offset, g] = math.nan
        if groups is None:
            rope[page, offset] = math.nan

    # ---------------------------------------------------------------- calls

    def arguments(self) -> dict[str, Any]:
        """Arguments of one call by name; new results are NaN, or infinity if ``nan_last``."""
        shape, rows = self.shape, self.shape.queries.unit_rows
        b_q, unwritten = self.q16.shape[0], math.inf if shape.nan_last else math.nan
        out = torch.full((b_q, shape.s_q, shape.heads, KV_LORA_RANK), unwritten)
        slots = max(2 * shape.parts, self.plan.split_begin[-1])
        return {
            "q": self.q16, "cache": self.cache, "block_table": self.table,
            "cache_seqlens": self.lengths, "out": out.to(DTYPES[self.spec.out_dtype]),
            "lse": torch.full((b_q, shape.heads, shape.s_q), unwritten),
            "o_accum": torch.full((slots, rows, PARTIAL_ROW), math.nan).half(),
            "lse_accum": torch.full((slots, rows), math.nan),
            **self._planned().arguments(), "softmax_scale": HEAD_SCALE,
            "causal": int(shape.causal), **NATURAL,
            "may_split": int(self.plan.split_begin[-1] > 0), "witness": 0,
        }  # fmt: skip

    # ---------------------------------------------------------------- truth

    def _errors(self, call: RecordCall, out: Tensor, lse: Tensor) -> DenseErrors:
        """Errors as the base class', over query tokens that see what is finite; of the others
        ``out`` and the LSE are NaN, or count as ``outside``."""
        begin, counts = self.shape.begin, call.counts
        sees = torch.zeros(len(counts), dtype=torch.bool)
        for i in self.shape.nan_last:
            own = slice(begin[i], begin[i + 1])
            sees[own] = counts[own] >= min(self.shape.lengths[i], self.shape.topk)
        if not sees.any():
            return super()._errors(call, out, lse)
        kept = {name: getattr(call, name)[~sees] for name in ("q", "indices", "counts")}
        errors = super()._errors(call._replace(**kept), out[~sees], lse[:, ~sees])
        wrong = int((~out[sees].isnan()).sum()) + int((~lse[:, sees].isnan()).sum())
        where = (f"{wrong} numbers where NaN was due",) if wrong else ()
        return replace(errors, outside=errors.outside + wrong, where=(*errors.where, *where))

"""``DecodePlan``: who computes what in one decode step, as device tensors.

The lengths stay on the device: the host only knows capacities, so a plan is made
(``snapmla.dense.plan_decode``) and updated in place without synchronisation, and one plan serves
all layers of a step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from dsl_kernels.formats.dims import ITEM_WORDS, KV_LORA_RANK, MERGE_CHECKED
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache import layouts
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.checks import overlap
from snapmla.dense import kv_heads, plan_text, stale
from snapmla.dense.launching import PlanNumbers, launch_plan
from snapmla.dense.variant import FP8, PlanVariant
from snapmla.dense.workspace import partial_rows, unit_capacity
from snapmla.runtime import launch


@dataclass(frozen=True, eq=False, repr=False)
class DecodePlan(launch.OverTensors):
    """Work list and workspace of one decode step; made by ``plan_decode``.

    A *part* is one CTA (or one cluster, for 128 rows); it walks its items.  An item is a range of
    token tiles of one sequence for a *unit* of its query rows.  A unit cut into several items
    writes normalised partial results to slots, which ``merge`` combines in order.

    Query rows are numbered over all query tokens in memory order: token * num_heads + head.

    With several KV heads each (sequence, KV head) is a sequence of the tables, number sequence *
    num_kv_heads + KV head, of num_heads / num_kv_heads heads: their ``b`` below is then b *
    num_kv_heads.

    Attributes:
        work_items: int32 (max_stretches * parts + n_units, 8) (fixed splits: n_units * pieces):
            sequence, first tile, end tile, slot (-1: not split), first row, end row of the
            sequence, first hidden token (2**31 - 1 without ``row_seqlens``), tokens that some of
            the rows see.
        part_begin: int32 (parts + 1,): items of part p are [part_begin[p], part_begin[p + 1]).
        split_begin: int32 (n_units + 1,): slots of unit u are [split_begin[u], split_begin[u + 1]).
        planned_seqlens: int32 (b,): the lengths that were planned for.
        units: int32 (n_units, 2): first row, end row of the sequence; (0, 2) where every sequence
            is one unit.
        unit_begin: int32 (b + 1,): units of sequence i are [unit_begin[i], unit_begin[i + 1]), with
            ragged queries; else (0,).
        row_limits: int32 (tokens,): copy of ``row_seqlens``, if the plan has it; else (0,).
        o_accum: float16 (2 * max_stretches * parts, unit_rows, 528) (fixed splits: n_units *
            pieces): partial rows of 512 channels and their exponents (docs/formats.md); of an fp16
            cache float32 (.., unit_rows, 512).
        lse_accum: float32 (.., unit_rows), log2.
        batch, num_heads: the step's shape.
        s_q: query tokens of every sequence; None with ragged queries.
        total_q: query tokens of the step, b * s_q; with ragged queries the most there may be.
        page_size, max_pages: of the cache and of the block table; longer sequences are clamped to
            ``max_pages * page_size`` tokens.
        num_parts: CTAs (or clusters) per row block of a unit that share the tokens.
        pipeline, row_tile: which decode kernel the plan is for.
        unit_rows: query rows of a unit, a multiple of the row tile.
        token_tile: tokens of that kernel's KV tile, in which the plan counts.
        fixed_overhead: cost of one item beside its tiles, in tiles.
        causal: whether tiles that the causal rule hides from all rows of a unit are left out.
        split_tiles: tiles of a piece with fixed splits, 0 without.
        check_stale: whether ``decode`` compares lengths, offsets and limits with the planned ones.
        p_terms: e4m3 terms in which that kernel sums P: 2 with ``accuracy="high"`` and pipeline
            ``etap``.
        cache_dtype: of the cache that it reads: ``fp8``, ``bf16``, ``f16``, or a format of bytes,
            such as ``fp8_ds_mla``.
        num_kv_heads: KV heads of that cache.
        longest_item: tiles of an item, about, of an fp16 cache and of pipeline ``f16``, whose
            results show what longer sums lose; 0: any number.
        max_stretches: into how many a part may be cut for that; the workspace has room for them.
        tile_ns, read_ns: time of a tile where memory does not bound it, and of reading one, by
            which cuts are weighed against their merge; 0, 0 weighs nothing.

    Raises:
        TypeError, ValueError: from the methods, naming the argument.

    Source: the work list with a fixed cost per item is FlashMLA's scheduling idea; tables and
    capacity search are our own (``snapmla.testing.reference_plan``).
    """

    # what a stale plan's error calls the argument, and advises
    _STALE: ClassVar[tuple[str, str]] = (
        "plan", "call plan.update_(cache_seqlens) once after the lengths change",
    )  # fmt: skip
    _ROWS: ClassVar[str] = "row_seqlens"  # and the limits of query tokens

    # whether its tables are the caller's memory, so that kernels must ask whether they fit
    _outside: ClassVar[bool] = False

    work_items: torch.Tensor
    part_begin: torch.Tensor
    split_begin: torch.Tensor
    planned_seqlens: torch.Tensor
    units: torch.Tensor
    unit_begin: torch.Tensor
    row_limits: torch.Tensor
    o_accum: torch.Tensor
    lse_accum: torch.Tensor
    batch: int
    num_heads: int
    s_q: int | None
    total_q: int
    page_size: int
    max_pages: int
    num_parts: int
    pipeline: str
    row_tile: int
    unit_rows: int
    token_tile: int
    fixed_overhead: int
    causal: bool = True
    split_tiles: int = 0
    check_stale: bool = False
    p_terms: int = 1
    cache_dtype: str = FP8
    num_kv_heads: int = 1
    longest_item: int = 0
    max_stretches: int = 1
    tile_ns: int = 0
    read_ns: int = 0

    def __post_init__(self) -> None:
        kinds = set(map(type, (*self._tables, self.o_accum, self.lse_accum)))
        if kinds == {torch.Tensor}:  # not a tracer's, nor a stand-in of one
            self._check_sizes()

    def _check_sizes(self) -> None:
        """Raises an error if a table's shape does not fit the plan's numbers.

        ``dataclasses.replace`` can mix tables and numbers of two plans.
        """
        slots, count, batch = self.o_accum.shape[0], self.n_units, self.sequences
        ragged, limits = self.s_q is None, self.row_limits.shape[0]
        alone = not ragged and count == batch
        for name, shape in (
            ("work_items", (self.work_items.shape[0], ITEM_WORDS)),
            ("part_begin", (self.num_parts + 1,)),
            ("split_begin", (count + 1,)),
            ("planned_seqlens", (batch,)),
            ("units", (0 if alone else count, 2)),
            ("unit_begin", (batch + 1 if ragged else 0,)),
            ("row_limits", (self.total_q * self.num_kv_heads if limits else 0,)),
            ("o_accum", (slots, self.unit_rows, partial_rows(self.cache_dtype)[1])),
            ("lse_accum", (slots, self.unit_rows)),
        ):
            got = tuple(getattr(self, name).shape)
            if got != shape:
                hint = "plans come from snapmla.plan_decode; with_workspace changes the workspace"
                checks.value_error(f"plan.{name}", f"shape {shape} beside its numbers", got, hint)

    @property
    def sequences(self) -> int:
        """Sequences of the tables: one for each KV head of each."""
        return self.batch * self.num_kv_heads

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def n_units(self) -> int:
        """Units that there may be."""
        tokens = self.total_q * self.num_kv_heads
        return unit_capacity(self.sequences, self.s_q, tokens, self.group, self.unit_rows)

    @property
    def rows(self) -> int:
        """Query rows of a sequence; with ragged queries the most of all together."""
        return self.num_heads * (self.total_q if self.s_q is None else self.s_q)

    @functools.cached_property
    def memo(self) -> calls.Memo:
        """Kinds of ``decode`` by this plan that are known."""
        return calls.Memo()

    @functools.cached_property
    def place(self) -> int:
        """A number for the tensors' spans, the shape of a call's rows, and of its cache."""
        shape = *self.rows_shape, self.page_size, self.num_kv_heads
        return overlap.place((*self.spans, *((0, extent) for extent in shape)))

    def expect_memory(self) -> None:
        """ValueError if the memory of one of its tensors was freed or moved in place."""
        if not tracing.by_dynamo() and self.plain:
            checks.in_place("plan", self.begins, "keep the storage, or make another plan")

    @functools.cached_property
    def ragged(self) -> bool:
        """True if sequences have different numbers of query tokens, packed (total_q, h, ...)."""
        return self.s_q is None

    @functools.cached_property
    def trims(self) -> bool:
        """True if tiles that the causal rule hides may be missing from the work list."""
        return self.may_trim()

    def may_trim(self) -> bool:
        """``trims`` without remembering it (for tracers)."""
        return self.causal and self.s_q != 1 and not self.row_limits.shape[0]

    @functools.cached_property
    def idle(self) -> bool:
        """True if there is nothing to compute, whatever the lengths."""
        return self.batch == 0 or self.total_q == 0

    @functools.cached_property
    def device(self) -> torch.device:
        """Device that the plan lives on and must be used on."""
        return self.work_items.device

    @functools.cached_property
    def variant(self) -> PlanVariant:
        """Values that choose the decode kernel, all but the dtype of results."""
        page_size = layouts.page_size_seen(self.cache_dtype, self.page_size)
        return PlanVariant.of(
            self.device, self.pipeline, self.row_tile, page_size, self.p_terms, self.cache_dtype
        )

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the cache; if that has 16 bits, of queries and results too."""
        return getattr(torch, FORMATS[self.cache_dtype].element)

    @functools.cached_property
    def as_given(self) -> bool:
        """True if kernels take ``out`` and ``lse``, and all else, in the shapes of the caller."""
        return self.s_q is not None and not self.regroups

    @functools.cached_property
    def regroups(self) -> bool:
        """True if kernels see other sequences or pages than the caller
        (``snapmla.dense.kv_heads``)."""
        return self.must_regroup()

    def must_regroup(self) -> bool:
        """``regroups`` without remembering it (for tracers)."""
        large = self.page_size != layouts.page_size_seen(self.cache_dtype, self.page_size)
        return self.num_kv_heads > 1 or large

    @functools.cached_property
    def rows_shape(self) -> tuple[int, ...]:
        """(b, s_q, h); (total_q, h) with ragged queries"""
        return self._shape_of_rows()

    def _shape_of_rows(self) -> tuple[int, ...]:
        """``rows_shape`` without remembering it (for tracers)."""
        if self.s_q is None:
            return self.total_q, self.num_heads
        return self.batch, self.s_q, self.num_heads

    @functools.cached_property
    def q_shape(self) -> tuple[int, ...]:
        """Shape of a query of 16 bits: (b, s_q, h, 576); (total_q, h, 576)"""
        return *self.rows_shape, FORMATS[self.cache_dtype].channels

    @functools.cached_property
    def table_shape(self) -> tuple[int, int]:
        """Shape of the block table: (b, max_pages)."""
        return self.batch, self.max_pages

    @functools.cached_property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of ``out``: (b, s_q, h, 512); (total_q, h, 512) with ragged queries."""
        return *self.rows_shape, KV_LORA_RANK

    @functools.cached_property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of ``lse``: (b, h, s_q); (h, total_q) with ragged queries."""
        *batch, tokens, heads = self.rows_shape
        return *batch, heads, tokens

    @functools.cached_property
    def _empty(self) -> tuple[launch.Allocator, tuple[int, ...], tuple[int, ...]]:
        """(allocator of results, strides of ``out``, strides of ``lse``)."""
        out, lse = launch.dense_strides(self.out_shape), launch.dense_strides(self.lse_shape)
        return launch.allocator(self.device), out, lse

    def _empty_out(self, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised ``out`` for a call outside of tracers and operators."""
        empty, strides, _ = self._empty
        return empty(self.out_shape, strides, dtype)

    def _empty_lse(self) -> torch.Tensor:
        """Uninitialised ``lse`` for a call outside of tracers and operators."""
        empty, _, strides = self._empty
        return empty(self.lse_shape, strides, torch.float32)

    @functools.cached_property
    def arguments(self) -> tuple[Any, ...]:
        """work_items, part_begin, split_begin, units, row_limits, o_accum, lse_accum as kernels
        take them."""
        return launch.prepared(
            self.work_items, self.part_begin, self.split_begin, self.units, self.row_limits,
            self.o_accum, self.lse_accum,
        )  # fmt: skip

    @property
    def _tables(self) -> tuple[torch.Tensor, ...]:
        """Tables that the planning kernel writes, in its order."""
        return (
            self.work_items, self.part_begin, self.split_begin, self.planned_seqlens, self.units,
            self.unit_begin, self.row_limits,
        )  # fmt: skip

    @functools.cached_property
    def _written(self) -> tuple[Any, ...]:
        """The same as kernels take them."""
        return launch.prepared(*self._tables)

    @functools.cached_property
    def _quick(self) -> bool:
        """True if ``update_`` may give tensors to the planning kernel as they are."""
        return self.plain and not self.idle and self.num_kv_heads == 1

    @property
    def _numbers(self) -> PlanNumbers:
        return PlanNumbers(
            max_tokens=self.max_pages * self.page_size,
            token_tile=self.token_tile,
            fixed_overhead=self.fixed_overhead,
            split_tiles=self.split_tiles,
            longest_item=self.longest_item,
            max_stretches=self.max_stretches,
            tile_ns=self.tile_ns,
            read_ns=self.read_ns,
            num_heads=self.group,
            s_q=self.total_q * self.num_kv_heads if self.s_q is None else self.s_q,
            unit_rows=self.unit_rows,
            causal=self.causal,
        )

    @functools.cached_property
    def _planned(self) -> tuple[Any, ...]:
        """Tables and scalars of the planning kernel."""
        return *self._written, *self._numbers

    @functools.cached_property
    def plain(self) -> bool:
        """True if kernels may take the addresses of its tensors."""
        return tracing.plain(*self._tables, self.o_accum, self.lse_accum)

    @functools.cached_property
    def may_split(self) -> bool:
        """False only if the shapes rule out that any sequence is split."""
        return self.can_split()

    def can_split(self) -> bool:
        """``may_split`` without remembering it (for tracers)."""
        tokens = self.max_pages * self.page_size
        if self.split_tiles:
            return tokens > self.split_tiles * self.token_tile
        return self.num_parts * self.max_stretches > 1 and tokens > self.token_tile

    @functools.cached_property
    def merges(self) -> int:
        """``may_split`` of the exported function: which merge is launched behind decode
        (``dsl_kernels.formats.dims``)."""
        return MERGE_CHECKED if self._outside else int(self.may_split)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of ``o_accum`` and ``lse_accum``."""
        return self.o_accum.nbytes + self.lse_accum.nbytes

    def update_(
        self,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        row_seqlens: torch.Tensor | None = None,
    ) -> DecodePlan:
        """Plans anew for other lengths, in place: one launch, no sync, no allocation.  With several
        KV heads torch repeats each argument once a head before, into memory of its own.

        Args:
            cache_seqlens: int32 (b,), the same b; what lies beyond the block table is clamped.
            cu_seqlens_q: int32 (b + 1,), needed with ragged queries: query tokens of sequence i are
                [cu_seqlens_q[i], cu_seqlens_q[i + 1]).  What does not ascend within 0..total_q is
                clamped.
            row_seqlens: int32 (b, s_q), or (total_q,) with ragged queries: how many cached tokens
                of its sequence each query token sees; needed if the plan was made with it.

        Returns:
            This plan.

        Raises:
            TypeError, ValueError: an argument is not what the plan was made for, is missing, or is
                one that the plan does not take.
        """
        given = (cache_seqlens, cu_seqlens_q, row_seqlens)
        if self.check_stale:  # by reference: who rewrites them without ``update_`` is noticed
            object.__setattr__(self, "_kept", given[1:])
        if not tracing.active() and self._fits(*given):
            try:
                launch_plan(*given, *self._planned)
            except Exception as error:
                checks.explain(error, self._check_lengths, *given)
                raise
            return self
        traced = tracing.wanted(*given, self)
        if not (traced and tracing.by_dynamo()):
            self._check_lengths(*given)
        if self.num_kv_heads > 1:
            given = kv_heads.lengths(self, *given)
        cache_seqlens, cu_seqlens_q, row_seqlens = given
        limits = None if row_seqlens is None else row_seqlens.view(-1)
        if traced:
            torch.ops.snapmla.plan_update(
                cache_seqlens, cu_seqlens_q, limits, *self._tables, *self._numbers
            )
        elif not self.idle:
            launch_plan(cache_seqlens, cu_seqlens_q, limits, *self._planned)
        return self

    def _fits(
        self,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        row_seqlens: torch.Tensor | None,
    ) -> bool:
        """True if the launch may be tried without the full checks: the exported function sees
        dtypes, sizes and strides, and which tables are missing."""
        try:
            return (
                row_seqlens is None  # may have two dimensions
                and cache_seqlens is not None
                and launch.addressable(self.device, cache_seqlens, cu_seqlens_q)
                and self._quick
            )
        except (AttributeError, RuntimeError):
            return False  # something is of another kind

    def _check_lengths(
        self,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        row_seqlens: torch.Tensor | None,
    ) -> None:
        """Checks what ``update_`` is given, and that there is memory to write."""
        self.expect_memory()
        checks.lengths(cache_seqlens, self.batch, self.device)
        if cu_seqlens_q is not None or self.s_q is None:
            if self.s_q is not None:
                hint = "plan_decode(..., cu_seqlens_q=, total_q=) makes one for ragged queries"
                checks.value_error("cu_seqlens_q", f"None: the plan is for s_q = {self.s_q}",
                                   "a tensor", hint)  # fmt: skip
            checks.vector("cu_seqlens_q", cu_seqlens_q, (self.batch + 1,), self.device)
        limited = self.row_limits.shape[0] > 0
        if row_seqlens is not None or limited:
            if not limited and self.total_q:
                hint = "plan_decode(..., row_seqlens=) makes one that takes it"
                checks.value_error("row_seqlens", "None: the plan is without", "a tensor", hint)
            checks.vector("row_seqlens", row_seqlens, self._shape_of_rows()[:-1], self.device)

    def check(
        self,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        row_seqlens: torch.Tensor | None = None,
    ) -> None:
        """Compares a step's tensors with what was planned; waits for the device (a debugging aid).

        ``decode`` calls it if the plan was made with ``check_stale``.  It does nothing while a CUDA
        graph is being captured, where the device cannot be asked.

        Args:
            cache_seqlens: int32 (b,), as given to ``decode``.
            cu_seqlens_q, row_seqlens: as given to ``update_``; None: the tensors of the last
                ``update_``, which a plan with ``check_stale`` keeps, by what they hold now.

        Raises:
            ValueError: they differ; the message names which, and the sequences or query tokens.
        """
        if self.device.type == "cuda" and launch.capturing(self.device):
            return
        offsets, limits = self.__dict__.get("_kept", (None, None))
        self._compare(
            cache_seqlens,
            offsets if cu_seqlens_q is None else cu_seqlens_q,
            limits if row_seqlens is None else row_seqlens,
        )

    def _compare(
        self,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        row_seqlens: torch.Tensor | None,
    ) -> None:
        """``check`` where the device can be asked; None compares nothing."""
        stale.compare(self, cache_seqlens, cu_seqlens_q, row_seqlens)

    def explain(self, limit: int = 16) -> str:
        """Tells as text which CTA computes what; reads the tables back, so it waits for the device.

        Args:
            limit: sequences and parts to list, each; 0 or more.
        """
        return plan_text.explain(self, limit)

    def with_workspace(self, o_accum: torch.Tensor, lse_accum: torch.Tensor) -> DecodePlan:
        """The same plan over another workspace of the same shapes (one per concurrent stream).

        Args:
            o_accum: of the dtype and shape of this plan's ``o_accum``; contiguous.
            lse_accum: float32, shaped like this plan's ``lse_accum``; contiguous.  They lie apart
                from each other and from the plan's tables.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        device, dtype = self.device, self.o_accum.dtype
        shape = tuple(self.o_accum.shape)
        checks.output("o_accum", o_accum, (dtype,), shape, device)
        checks.output("lse_accum", lse_accum, (torch.float32,), shape[:2], device)
        tables = {f"plan.{name}": getattr(self, name) for name in TENSORS[:-2]}
        checks.apart("o_accum", o_accum, {"lse_accum": lse_accum, **tables})
        checks.apart("lse_accum", lse_accum, tables)
        other = replace(self, o_accum=o_accum, lse_accum=lse_accum)
        if "_kept" in self.__dict__:
            object.__setattr__(other, "_kept", self.__dict__["_kept"])
        return other


TENSORS = (
    "work_items", "part_begin", "split_begin", "planned_seqlens", "units", "unit_begin",
    "row_limits", "o_accum", "lse_accum",
)  # fmt: skip
STATIC = tuple(f.name for f in fields(DecodePlan) if f.name not in TENSORS)

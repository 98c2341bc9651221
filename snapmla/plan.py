"""``DecodePlan``: who computes what in one decode step, as device tensors.

The lengths stay on the device: the host only knows capacities, so a plan is made (and updated in
place) without synchronisation, and one plan serves all layers of a step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch

from dsl_kernels.dims import KV_LORA_RANK, PARTIAL_ROW
from dsl_kernels.spec import VariantSpec
from snapmla import checks, dispatch, env, launch, plan_text, runtime, tracing

DEFAULT_FIXED_OVERHEAD = 6  # token tiles that starting an item costs (prologue, epilogue, merge)
STALE_SHOWN = 8  # changed sequences that an error names
# Tiles and overheads of a whole batch: running costs and one part beyond them fit 32 bits.
MAX_COST = 2**30 - 2**18
MAX_SLOTS = 2**23  # products of slots and merge's CTAs fit 32 bits (smxx/merge.py)
SOFTGPU_SMS = 4  # the software GPU counts as this many SMs: enough parts to split and merge


@dataclass(frozen=True, eq=False)
class PlanVariant:
    """What chooses the decode kernel, beside the output's dtype.

    There is one object of each (``of``), which remembers its kernels by that dtype.
    """

    device: torch.device
    pipeline: str
    row_tile: int
    page_size: int
    kernels: dict[torch.dtype, runtime.Kernel] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(device: torch.device, pipeline: str, row_tile: int, page_size: int) -> PlanVariant:
        """The one of these values."""
        values = (device, pipeline, row_tile, page_size)
        return _variants.setdefault(values, PlanVariant(*values))

    @staticmethod
    def forget() -> None:
        """Drops the kernels of all variants."""
        for variant in _variants.values():
            variant.kernels.clear()


_variants: dict[tuple[torch.device, str, int, int], PlanVariant] = {}
runtime.on_forget(PlanVariant.forget)


@dataclass(frozen=True, eq=False, repr=False)
class DecodePlan(launch.OverTensors):
    """Work list and workspace of one decode step; made by ``plan_decode``.

    A *part* is one CTA (or one cluster, for 128 rows); it walks its items.  A sequence cut into
    several items writes normalised partial results to slots, which ``merge`` combines in order.

    Attributes:
        work_items: int32 (parts + b, 4) (fixed splits: b * pieces): sequence, first tile, end
            tile, slot (-1: not split).
        part_begin: int32 (parts + 1,): items of part p are [part_begin[p], part_begin[p + 1]).
        split_begin: int32 (b + 1,): slots of sequence i are [split_begin[i], split_begin[i + 1]).
        planned_seqlens: int32 (b,): the lengths that were planned for.
        o_accum: float16 (2 * parts, rows_pad, 528) (fixed splits: b * pieces): partial rows of 512
            channels and their exponents (docs/formats.md).
        lse_accum: float32 (2 * parts, rows_pad), log2.
        batch, num_heads, s_q: the step's shape.
        page_size, max_pages: of the cache and of the block table; longer sequences are clamped to
            ``max_pages * page_size`` tokens.
        num_parts: CTAs (or clusters) per row block that share the tokens.
        pipeline, row_tile: which decode kernel the plan is for.
        token_tile: tokens of that kernel's KV tile, in which the plan counts.
        fixed_overhead: cost of one item beside its tiles, in tiles.
        split_tiles: tiles of a piece with fixed splits, 0 without.
        check_stale: whether ``decode`` compares its lengths with the planned ones.

    Raises:
        TypeError, ValueError: from the methods, naming the argument.

    Source: the work list with a fixed cost per item is FlashMLA's scheduling idea; tables and
    capacity search are our own (``snapmla.testing.reference_plan``).
    """

    # what a stale plan's error calls the argument, and advises
    _STALE: ClassVar[tuple[str, str]] = (
        "plan", "call plan.update_(cache_seqlens) once after the lengths change",
    )  # fmt: skip

    # block table and lengths of the last call, which need not be looked at again (``attention``)
    _seen: ClassVar[tuple[torch.Tensor | None, torch.Tensor | None]] = (None, None)

    work_items: torch.Tensor
    part_begin: torch.Tensor
    split_begin: torch.Tensor
    planned_seqlens: torch.Tensor
    o_accum: torch.Tensor
    lse_accum: torch.Tensor
    batch: int
    num_heads: int
    s_q: int
    page_size: int
    max_pages: int
    num_parts: int
    pipeline: str
    row_tile: int
    token_tile: int
    fixed_overhead: int
    split_tiles: int = 0
    check_stale: bool = False

    def __post_init__(self) -> None:
        tables = tuple(getattr(self, name) for name in TENSORS)
        if all(type(t) is torch.Tensor for t in tables):  # not a tracer's, nor a stand-in of one
            self._check_sizes()

    def _check_sizes(self) -> None:
        """That tables and numbers are of one plan: ``dataclasses.replace`` can mix two."""
        slots, rows = self.o_accum.shape[0], self.num_heads * self.s_q
        rows_pad = -(-rows // self.row_tile) * self.row_tile
        for name, shape in (
            ("work_items", (self.work_items.shape[0], 4)),
            ("part_begin", (self.num_parts + 1,)),
            ("split_begin", (self.batch + 1,)),
            ("planned_seqlens", (self.batch,)),
            ("o_accum", (slots, rows_pad, PARTIAL_ROW)),
            ("lse_accum", (slots, rows_pad)),
        ):
            got = tuple(getattr(self, name).shape)
            if got != shape:
                hint = "plans come from snapmla.plan_decode; with_workspace changes the workspace"
                checks.value_error(f"plan.{name}", f"shape {shape} beside its numbers", got, hint)

    @property
    def rows(self) -> int:
        """Query rows of a sequence."""
        return self.num_heads * self.s_q

    @functools.cached_property
    def device(self) -> torch.device:
        """Where the plan lives, and must be used."""
        return self.work_items.device

    @functools.cached_property
    def variant(self) -> PlanVariant:
        """What chooses the decode kernel."""
        return PlanVariant.of(self.device, self.pipeline, self.row_tile, self.page_size)

    @functools.cached_property
    def rows_shape(self) -> tuple[int, int, int]:
        """(b, s_q, h)"""
        return self.batch, self.s_q, self.num_heads

    @functools.cached_property
    def table_shape(self) -> tuple[int, int]:
        """Shape of the block table: (b, max_pages)."""
        return self.batch, self.max_pages

    @functools.cached_property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of ``out``: (b, s_q, h, 512)."""
        return *self.rows_shape, KV_LORA_RANK

    @functools.cached_property
    def lse_shape(self) -> tuple[int, int, int]:
        """Shape of ``lse``: (b, h, s_q)."""
        return self.batch, self.num_heads, self.s_q

    @functools.cached_property
    def arguments(self) -> tuple[Any, ...]:
        """work_items, part_begin, o_accum, lse_accum, split_begin as kernels take them."""
        return launch.prepared(
            self.work_items, self.part_begin, self.o_accum, self.lse_accum, self.split_begin
        )

    @functools.cached_property
    def plain(self) -> bool:
        """Whether kernels may take the addresses of its tensors."""
        return tracing.plain(*(getattr(self, name) for name in TENSORS))

    @functools.cached_property
    def may_split(self) -> bool:
        """False only if the shapes rule out that any sequence is split."""
        return self.can_split()

    def can_split(self) -> bool:
        """``may_split`` without remembering it (for tracers)."""
        tokens = self.max_pages * self.page_size
        if self.split_tiles:
            return tokens > self.split_tiles * self.token_tile
        return self.num_parts > 1 and tokens > self.token_tile

    @property
    def workspace_bytes(self) -> int:
        """Bytes of ``o_accum`` and ``lse_accum``."""
        return self.o_accum.nbytes + self.lse_accum.nbytes

    def update_(self, cache_seqlens: torch.Tensor) -> DecodePlan:
        """Plans anew for other lengths, in place: one launch, no sync, no allocation.

        Args:
            cache_seqlens: int32 (b,), the same b; what lies beyond the block table is clamped.

        Returns:
            This plan.

        Raises:
            TypeError, ValueError: ``cache_seqlens`` is not what the plan was made for.
        """
        arguments = (
            cache_seqlens, self.work_items, self.part_begin, self.split_begin,
            self.planned_seqlens, self.max_pages * self.page_size, self.token_tile,
            self.fixed_overhead, self.split_tiles,
        )  # fmt: skip
        if tracing.wanted(cache_seqlens, self):
            if not tracing.by_dynamo():
                checks.lengths(cache_seqlens, self.batch, self.device)
            torch.ops.snapmla.plan_update(*arguments)
            return self
        checks.lengths(cache_seqlens, self.batch, self.device)
        if self.batch:
            launch_plan(*arguments)
        return self

    def check(self, cache_seqlens: torch.Tensor) -> None:
        """Compares lengths with the planned ones; waits for the device (a debugging aid).

        ``decode`` calls it if the plan was made with ``check_stale``.  It does nothing while a CUDA
        graph is being captured, where the device cannot be asked.

        Args:
            cache_seqlens: int32 (b,), as given to ``decode``.

        Raises:
            ValueError: they differ; the message names the sequences.
        """
        if self.device.type != "cuda" or not launch.capturing(self.device):
            self._compare(cache_seqlens)

    def _compare(self, cache_seqlens: torch.Tensor) -> None:
        """``check`` where the device can be asked."""
        changed = (cache_seqlens != self.planned_seqlens).nonzero().flatten().tolist()
        if not changed:
            return
        now, planned = cache_seqlens.tolist(), self.planned_seqlens.tolist()
        shown = [f"{i} ({planned[i]} -> {now[i]})" for i in changed[:STALE_SHOWN]]
        if len(changed) > STALE_SHOWN:
            shown.append(f"{len(changed) - STALE_SHOWN} more")
        name, hint = self._STALE
        checks.value_error(
            name,
            "the lengths it was last updated for",
            f"other tokens (planned -> now) in sequence {', '.join(shown)}",
            hint,
        )

    def explain(self, limit: int = 16) -> str:
        """Who computes what, as text; reads the tables back, so it waits for the device.

        Args:
            limit: sequences and parts to list, each; 0 or more.
        """
        return plan_text.explain(self, limit)

    def with_workspace(self, o_accum: torch.Tensor, lse_accum: torch.Tensor) -> DecodePlan:
        """The same plan over another workspace of the same shapes (one per concurrent stream).

        Args:
            o_accum: float16, shaped like this plan's ``o_accum``; contiguous.
            lse_accum: float32, shaped like this plan's ``lse_accum``; contiguous.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        device = self.device
        shape = tuple(self.o_accum.shape)
        checks.output("o_accum", o_accum, (torch.float16,), shape, device)
        checks.output("lse_accum", lse_accum, (torch.float32,), shape[:2], device)
        return replace(self, o_accum=o_accum, lse_accum=lse_accum)


TENSORS = (
    "work_items", "part_begin", "split_begin", "planned_seqlens", "o_accum", "lse_accum",
)  # fmt: skip
STATIC = tuple(f.name for f in fields(DecodePlan) if f.name not in TENSORS)


def new_workspace(
    like: torch.Tensor, slots: int, rows_pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (o_accum, lse_accum) on the device of ``like``."""
    return (
        like.new_empty((slots, rows_pad, PARTIAL_ROW), dtype=torch.float16),
        like.new_empty((slots, rows_pad), dtype=torch.float32),
    )


def launch_plan(
    cache_seqlens: torch.Tensor,
    work_items: torch.Tensor,
    part_begin: torch.Tensor,
    split_begin: torch.Tensor,
    planned_seqlens: torch.Tensor,
    max_tokens: int,
    token_tile: int,
    fixed_overhead: int,
    split_tiles: int,
) -> None:
    """Launches the planning kernel on checked arguments."""
    _plan_kernel(cache_seqlens.device)(
        cache_seqlens, work_items, part_begin, split_begin, planned_seqlens, max_tokens,
        token_tile, fixed_overhead, split_tiles,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _plan_kernel(device: torch.device) -> runtime.Kernel:
    spec = VariantSpec(op="plan_decode", arch=runtime.arch_of(device))
    return runtime.kernel(spec, device.type)


runtime.on_forget(_plan_kernel.cache_clear)


@functools.lru_cache(maxsize=64)
def _sm_count(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return SOFTGPU_SMS


def default_num_parts(device: torch.device, rows: int, spec: VariantSpec) -> int:
    """Parts that fill the device: SMs / (row blocks * CTAs per block), at least 1."""
    return dispatch.parts_of(_sm_count(device), rows, spec)


def plan_decode(
    cache_seqlens: torch.Tensor,
    num_heads: int,
    s_q: int,
    *,
    page_size: int,
    max_pages: int,
    num_parts: int | None = None,
    pipeline: str | None = None,
    row_tile: int | None = None,
    fixed_overhead: int | None = None,
    fixed_split_tokens: int | None = None,
    check_stale: bool | None = None,
) -> DecodePlan:
    """Plans one decode step on the device of ``cache_seqlens``; share it between layers.

    Args:
        cache_seqlens: int32 (b,), tokens in the cache per sequence, the new ones included.
        num_heads: 1 to 128.
        s_q: query tokens per sequence, 1 to 8.
        page_size: of the cache: 16, 32, 64 or 128.
        max_pages: width of the block table that ``decode`` will get, exactly.
        num_parts: None fills the device.
        pipeline: ``etap`` or ``dual_wg``; None lets the dispatcher choose.
        row_tile: query rows per CTA or cluster (16, 32, 64, 128); None lets the dispatcher choose
            (``snapmla.explain`` lists the candidates).
        fixed_overhead: cost of starting an item, in token tiles (of 64 tokens).
        fixed_split_tokens: batch-invariant mode.  Every sequence is cut after each so many tokens
            (a multiple of the token tile, 64), whatever else is in the batch, and its pieces are
            merged in order: a request's result has the same bits alone and in any batch.  The
            workspace then grows with
            b * ceil(max_pages * page_size / fixed_split_tokens); see ``workspace_bytes``.
            None cuts for balance.
        check_stale: debug switch: ``decode`` compares its lengths with those of the last
            ``update_`` and raises ValueError if they differ (this waits for the device; not while a
            graph is captured or replayed, nor under ``torch.compile``).  None: the environment
            variable SNAPMLA_CHECK_PLAN, read here.

    Returns:
        The plan, updated for ``cache_seqlens``.

    Raises:
        TypeError, ValueError: naming the argument.
        VariantError: the planning kernel is not there.

    Source: as ``DecodePlan``; the kernel is chosen by ``snapmla.dispatch``.
    """
    if tracing.by_dynamo():
        return tracing.between_graphs(
            plan_decode, cache_seqlens, num_heads, s_q, page_size=page_size, max_pages=max_pages,
            num_parts=num_parts, pipeline=pipeline, row_tile=row_tile,
            fixed_overhead=fixed_overhead, fixed_split_tokens=fixed_split_tokens,
            check_stale=check_stale,
        )  # fmt: skip
    checks.lengths(cache_seqlens, "b")
    num_heads, s_q = checks.num_heads(num_heads), checks.s_q(s_q)
    page_size = checks.page_size(page_size)
    if check_stale is not None:
        checks.flag("check_stale", check_stale)
    max_pages = checks.integer("max_pages", max_pages, 1, 2**31 // page_size - 1)
    rows, device, batch = num_heads * s_q, cache_seqlens.device, cache_seqlens.shape[0]
    spec = dispatch.choose(device, num_heads, s_q, page_size, pipeline=pipeline, row_tile=row_tile)
    row_tile, token_tile = spec.row_tile, spec.token_tile
    if num_parts is None:
        num_parts = default_num_parts(device, rows, spec)
    checks.integer("num_parts", num_parts, 1, 65535)
    if fixed_overhead is None:
        fixed_overhead = DEFAULT_FIXED_OVERHEAD
    checks.integer("fixed_overhead", fixed_overhead, 0, 1 << 16)
    max_tiles = -(-max_pages * page_size // token_tile)
    split_tiles = _split_tiles(fixed_split_tokens, token_tile)
    rows_pad = -(-rows // row_tile) * row_tile
    items, slots = num_parts + batch, 2 * num_parts
    pieces = -(-max_tiles // split_tiles) if split_tiles else 1
    cost = batch * (max_tiles + fixed_overhead * pieces)
    if cost > MAX_COST:
        checks.value_error(
            "max_pages",
            f"a batch of at most {MAX_COST} tiles, overheads included",
            f"up to {cost} in {batch} sequences of {max_pages} pages",
            "narrow the block table, or lower fixed_overhead",
        )
    if split_tiles:
        items = max(batch * pieces, 1)
        slots = items if pieces > 1 else 1
    if slots > MAX_SLOTS:
        checks.value_error(
            "fixed_split_tokens",
            f"at most {MAX_SLOTS} pieces in a batch",
            f"{slots}, {pieces} of each of {batch} sequences of {max_pages} pages",
            "cut into longer pieces, or narrow the block table",
        )

    def ints(*shape: int) -> torch.Tensor:
        return cache_seqlens.new_zeros(shape, dtype=torch.int32)

    o_accum, lse_accum = new_workspace(cache_seqlens, slots, rows_pad)
    plan = DecodePlan(
        work_items=ints(items, 4),
        part_begin=ints(num_parts + 1),
        split_begin=ints(batch + 1),
        planned_seqlens=ints(batch),
        o_accum=o_accum,
        lse_accum=lse_accum,
        batch=batch,
        num_heads=num_heads,
        s_q=s_q,
        page_size=page_size,
        max_pages=max_pages,
        num_parts=num_parts,
        pipeline=spec.pipeline,
        row_tile=row_tile,
        token_tile=token_tile,
        fixed_overhead=fixed_overhead,
        split_tiles=split_tiles,
        check_stale=env.CHECK_PLAN.enabled() if check_stale is None else bool(check_stale),
    )
    return plan.update_(cache_seqlens)


def _split_tiles(fixed_split_tokens: int | None, token_tile: int) -> int:
    """Tiles of a fixed piece, 0 without; checks the argument."""
    if fixed_split_tokens is None:
        return 0
    checks.integer("fixed_split_tokens", fixed_split_tokens, token_tile, 1 << 30)
    if fixed_split_tokens % token_tile:
        near = round(fixed_split_tokens / token_tile) * token_tile
        hint = f"the nearest is {near}"
        wanted = f"a multiple of {token_tile}"
        checks.value_error("fixed_split_tokens", wanted, fixed_split_tokens, hint)
    return fixed_split_tokens // token_tile

"""``plan_decode``: makes a ``DecodePlan`` for a step's capacities, and fills it in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsl_kernels.families.record_decode import FORMATS as DECODED_BYTES
from dsl_kernels.formats import rows16
from dsl_kernels.formats.dims import ITEM_WORDS
from dsl_kernels.formats.registered import DEFAULT, FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla import checks, rank
from snapmla.call import tracing
from snapmla.dense import DecodePlan, new_workspace, unit_capacity
from snapmla.runtime import env
from snapmla.runtime.launch import sm_count

# Tiles and overheads of a whole batch: running costs and one part beyond them fit 32 bits.
MAX_COST = 2**30 - 2**18
MAX_SLOTS = 2**23  # products of slots and merge's CTAs fit 32 bits (combine/merge.py)
ROW_FORMATS = (rows16.BF16.name, rows16.F16.name)  # ``format`` takes dtypes and these
MAX_STRETCHES = 4  # of a part whose items must not be too long (``Format.longest_item``)


def default_num_parts(device: torch.device, unit_rows: int, spec: VariantSpec) -> int:
    """Parts that fill the device: SMs / (row blocks of a unit * CTAs per block), at least 1."""
    return rank.parts_of(sm_count(device), unit_rows, spec)


class Queries(NamedTuple):
    """The query tokens of a step, checked."""

    s_q: int | None  # None: ragged
    total_q: int

    def typical(self, batch: int, invariant: bool) -> int:
        """Query tokens of a sequence by which the kernel is chosen.

        Ragged ones by the mean that there is room for; not with fixed splits, where neither the
        batch nor its capacity may decide about bits.
        """
        if self.s_q is not None:
            return self.s_q
        return 1 if invariant or not batch else max(-(-self.total_q // batch), 1)


def checked_queries(
    batch: int,
    num_heads: int,
    s_q: int | None,
    cu_seqlens_q: torch.Tensor | None,
    total_q: int | None,
) -> Queries:
    """Checks which query tokens are meant: the same number for all, or ragged."""
    if (s_q is None) == (cu_seqlens_q is None):
        got = "neither" if s_q is None else "both"
        hint = "s_q for one number of query tokens, cu_seqlens_q and total_q for ragged ones"
        checks.value_error("s_q", "one of s_q and cu_seqlens_q", got, hint)
    if s_q is not None:
        if total_q is not None:
            hint = "it is the room for ragged queries, beside cu_seqlens_q"
            checks.value_error("total_q", "None beside s_q", total_q, hint)
        s_q = checks.s_q(s_q)
        checks.rows("s_q", batch * s_q, num_heads)
        return Queries(s_q, batch * s_q)
    if total_q is None:
        hint = "the first extent of q; lengths stay on the device"
        checks.type_error("total_q", "an int beside cu_seqlens_q", "None", hint)
    total_q = checks.integer("total_q", total_q, 0)
    checks.rows("total_q", total_q, num_heads)
    return Queries(None, total_q)


def plan_decode(
    cache_seqlens: torch.Tensor,
    num_heads: int,
    s_q: int | None = None,
    *,
    page_size: int,
    max_pages: int,
    cu_seqlens_q: torch.Tensor | None = None,
    total_q: int | None = None,
    row_seqlens: torch.Tensor | None = None,
    causal: bool = True,
    num_parts: int | None = None,
    pipeline: str | None = None,
    row_tile: int | None = None,
    row_blocks: str | None = None,
    fixed_overhead: int | None = None,
    fixed_split_tokens: int | None = None,
    check_stale: bool | None = None,
    accuracy: str = "standard",
    cache_dtype: str | torch.dtype = checks.UNSAID,
    num_kv_heads: int = 1,
    format: str | torch.dtype | None = None,
) -> DecodePlan:
    """Plans one decode step on the device of ``cache_seqlens``; share it between layers.

    Sequences are cut to share the work out evenly, or left whole where merging pieces would take
    longer than they save (by measured times, for the batch as a whole, of up to 512 units of query
    rows).  Long sums of 16-bit products would show in results: where a sequence of an fp16 cache,
    or with high accuracy, has more than 16384 tokens, parts with more than that sum them in two to
    four items, and the workspace may be 4 times as large.

    Args:
        cache_seqlens: int32 (b,), tokens in the cache per sequence, the new ones included.
        num_heads: 1 to 128.
        s_q: query tokens of every sequence, 1 or more; None with ``cu_seqlens_q``.
        page_size: of the cache: 16, 32, 64 or 128; of 16 bits also any multiple of 64, one page a
            sequence; of bytes any number.
        max_pages: width of the block table that ``decode`` will get, exactly.
        cu_seqlens_q: ragged queries, int32 (b + 1,): query tokens of sequence i are
            [cu_seqlens_q[i], cu_seqlens_q[i + 1]) of a query (total_q, h, ...); none is fine.
            The host never reads it: what does not ascend within 0..total_q is clamped.
        total_q: room for ragged query tokens: the first extent of ``q`` and ``out``.  Rows from
            cu_seqlens_q[b] on are left as they are.
        row_seqlens: int32 (b, s_q), or (total_q,) with ragged queries: how many cached tokens of
            its sequence each query token sees (at most ``cache_seqlens``; 0 or less: none).  It
            takes the place of the causal rule: context parallelism, trees of tokens.
        causal: leave out tiles that the causal rule hides from all rows of a unit.  Such a plan is
            for ``decode(causal=True)``; one with ``causal=False`` serves both.
        num_parts: None fills the device.
        pipeline: ``etap``, ``dual_wg`` or ``f16``, of a 16-bit cache ``split``, of bytes ``mix16``;
            on SM100 ``ws``, or ``pair`` (128 rows on two CTAs); None lets the dispatcher choose.
        row_tile: query rows per CTA or cluster (16, 32, 64, 128); None lets the dispatcher choose
            (``snapmla.explain`` lists the candidates).
        row_blocks: who takes a sequence's row blocks, if it has several: ``in_step``, CTAs side by
            side that share the tokens through L2, or ``balanced``, whoever is free.  None: in step
            if that keeps 95 % of the SMs busy.
        fixed_overhead: cost of starting an item, in token tiles (of 64 tokens).
        fixed_split_tokens: batch-invariant mode.  Every sequence is cut after each so many tokens
            (a multiple of the token tile, 64), whatever else is in the batch, and its pieces are
            merged in order: a request's result has the same bits alone and in any batch (ragged
            queries: whatever their number, the kernel is that for one token a sequence, or
            ``row_tile``).  The workspace then grows with
            b * ceil(max_pages * page_size / fixed_split_tokens); see ``workspace_bytes``.
            None cuts for balance.
        check_stale: debug switch: ``decode`` compares its lengths, ``cu_seqlens_q`` and
            ``row_seqlens`` with those of the last ``update_`` and raises ValueError if they differ
            (this waits for the device; not while a graph is captured or replayed, nor under
            ``torch.compile``).  Where a call has no ``cu_seqlens_q``, the tensor of the last
            ``update_`` is read again.  None: the environment variable SNAPMLA_CHECK_PLAN, read
            here.
        accuracy: ``standard``, or ``high``: products in 16 bits (pipeline ``f16``), so that LSE is
            within 2e-4 + 2e-5 of the largest content logit of the stored bytes' and results within
            1e-3 relative L2, beside their dtype's own rounding; ``standard`` has 2.6e-2 at worst,
            and logits low by some 1.9e-3 of themselves for a token that equals the query
            (docs/numerics.md).  ``snapmla.explain`` says what it costs.  ``high`` with pipeline
            ``etap`` sums softmax weights as two e4m3 terms instead, which does not mend logits.
            There is ``standard`` alone with a 16-bit cache, whose products have 16 bits, and on
            SM100.
        format: of the cache that ``decode`` will get: ``fp8`` (the default), ``bf16``, ``f16`` (or
            torch's dtype), or a format of bytes, such as ``fp8_ds_mla``, whose kernels are compiled
            when they are asked for.  ``cache.format`` says it.
        cache_dtype: older name of ``format``, which takes 16 bits as torch's dtype alone; give one
            of the two.
        num_kv_heads: of that cache; query heads j * g to (j + 1) * g - 1, g = num_heads /
            num_kv_heads, read KV head j.

    Returns:
        The plan, updated for ``cache_seqlens``.

    Raises:
        TypeError, ValueError: naming the argument.
        VariantError: the planning kernel is not there.

    Example:
        lengths = torch.tensor([1000, 64], dtype=torch.int32)
        plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=32)
        plan.update_(lengths + 1)  # the next step
        print(plan.explain())

    Source: as ``DecodePlan``; the kernel is chosen by ``snapmla.rank``.
    """
    if tracing.by_dynamo():
        return tracing.between_graphs(
            plan_decode, cache_seqlens, num_heads, s_q, page_size=page_size, max_pages=max_pages,
            cu_seqlens_q=cu_seqlens_q, total_q=total_q, row_seqlens=row_seqlens, causal=causal,
            num_parts=num_parts, pipeline=pipeline, row_tile=row_tile, row_blocks=row_blocks,
            fixed_overhead=fixed_overhead, fixed_split_tokens=fixed_split_tokens,
            check_stale=check_stale, accuracy=accuracy, cache_dtype=cache_dtype,
            num_kv_heads=num_kv_heads, format=format,
        )  # fmt: skip
    options = PlanOptions(
        num_heads=num_heads, page_size=page_size, causal=causal, num_parts=num_parts,
        pipeline=pipeline, row_tile=row_tile, row_blocks=row_blocks,
        fixed_overhead=fixed_overhead, fixed_split_tokens=fixed_split_tokens,
        check_stale=check_stale, accuracy=accuracy, num_kv_heads=num_kv_heads,
        format=checked_format(format, cache_dtype),
    )  # fmt: skip
    shape = StepShape(s_q, max_pages, total_q)
    return make_plan(options, new_workspace, cache_seqlens, shape, cu_seqlens_q, row_seqlens)


def checked_format(format: str | torch.dtype | None, cache_dtype: str | torch.dtype) -> str:
    """Name of the cache's format that ``plan_decode`` was given, by either argument; checks it."""
    name, value = checks.given_format(format, cache_dtype)
    known = DECODED_BYTES if format is None else (*ROW_FORMATS, *DECODED_BYTES)
    return checks.format_named(checks.cache_dtype(value, name, known))


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Arguments of ``plan_decode`` that all plans of a model share; checked, but for what needs a
    device.

    Attributes:
        format: name of the cache's format, checked (``checked_format``).
    """

    num_heads: int
    page_size: int
    causal: bool = True
    num_parts: int | None = None
    pipeline: str | None = None
    row_tile: int | None = None
    row_blocks: str | None = None
    fixed_overhead: int | None = None
    fixed_split_tokens: int | None = None
    check_stale: bool | None = None
    accuracy: str = "standard"
    format: str = DEFAULT
    num_kv_heads: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_heads", checks.num_heads(self.num_heads))
        object.__setattr__(self, "page_size", self._checked_page_size())
        checks.kv_heads(self.num_kv_heads, self.num_heads, self.format)
        checks.flag("causal", self.causal)
        if self.check_stale is not None:
            checks.flag("check_stale", self.check_stale)
        if self.row_blocks is not None:
            checks.choice("row_blocks", self.row_blocks, rank.ROW_BLOCKS)
        if self.num_parts is not None:
            checks.integer("num_parts", self.num_parts, 1, 65535)
        if self.fixed_overhead is not None:
            checks.integer("fixed_overhead", self.fixed_overhead, 0, 1 << 16)

    def _checked_page_size(self) -> int:
        """Tokens that an entry of the table names."""
        return checks.page_size_of(self.format, self.page_size)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def kernel(self, device: torch.device, s_q: int, size: rank.Size | None = None) -> VariantSpec:
        """The decode kernel on a device; checks what concerns it.

        Args:
            s_q: query tokens of a typical sequence.
            size: all query tokens, and the tokens that each sees at most; None: not known yet.
        """
        spec = rank.choose(
            device, self.group, s_q, self.page_size, pipeline=self.pipeline,
            row_tile=self.row_tile, accuracy=self.accuracy, cache=self.format,
        )  # fmt: skip
        if self.fixed_split_tokens is not None:
            _split_tiles(self.fixed_split_tokens, spec.token_tile)
        return spec

    def unit_rows(self, device: torch.device, rows: int, spec: VariantSpec) -> int:
        """Query rows that are scheduled together, of a typical sequence's ``rows``."""
        return _unit_rows(device, rows, spec, self.row_blocks)

    def parts(self, device: torch.device, unit_rows: int, units: int, spec: VariantSpec) -> int:
        """Parts where the caller does not say: so many as fill the device, however many ``units``
        there may be."""
        return default_num_parts(device, unit_rows, spec)

    def tile_times(self, device: torch.device, spec: VariantSpec) -> tuple[int, int]:
        """``tile_ns``, ``read_ns`` of a plan."""
        return rank.tile_times(device, spec)


class StepShape(NamedTuple):
    """Extents of a step beside its batch, as ``plan_decode`` takes them; unchecked.

    Attributes:
        full: whether every sequence has ``max_pages`` pages, so that the host knows the plan.
    """

    s_q: int | None
    max_pages: int
    total_q: int | None
    full: bool = False


# (cache_seqlens, slots, unit_rows, format) -> (o_accum, lse_accum)
Workspaces = Callable[[torch.Tensor, int, int, str], tuple[torch.Tensor, torch.Tensor]]


def make_plan(
    options: PlanOptions,
    workspace: Workspaces,
    cache_seqlens: torch.Tensor,
    shape: StepShape,
    cu_seqlens_q: torch.Tensor | None,
    row_seqlens: torch.Tensor | None,
    made: type[DecodePlan] = DecodePlan,
) -> DecodePlan:
    """``plan_decode`` over a workspace that is not of its making.

    Args:
        made: class of the plan.
        workspace: gives one as ``workspace.new_workspace`` does.
        cache_seqlens, cu_seqlens_q, row_seqlens: as in ``plan_decode``.
    """
    checks.lengths(cache_seqlens, "b")
    batch, num_heads, page_size = cache_seqlens.shape[0], options.num_heads, options.page_size
    kv_heads, group = options.num_kv_heads, options.group
    queries = checked_queries(batch, num_heads, shape.s_q, cu_seqlens_q, shape.total_q)
    max_pages = checks.integer("max_pages", shape.max_pages, 1, 2**31 // page_size - 1)
    device = cache_seqlens.device
    typical = queries.typical(batch, options.fixed_split_tokens is not None)
    seen = rank.Size(queries.total_q, max_pages * page_size)
    spec = options.kernel(device, typical, seen)
    unit_rows = options.unit_rows(device, typical * group, spec)
    num_parts, fixed_overhead = options.num_parts, options.fixed_overhead
    if fixed_overhead is None:
        fixed_overhead = spec.family.item_overhead
    token_tile = spec.token_tile
    split_tiles = _split_tiles(options.fixed_split_tokens, token_tile)
    sequences, tokens = batch * kv_heads, queries.total_q * kv_heads
    units = unit_capacity(sequences, queries.s_q, tokens, group, unit_rows)
    if num_parts is None:
        num_parts = options.parts(device, unit_rows, units, spec)
    max_tiles = -(-max_pages * page_size // token_tile)
    longest, stretches = 0, 1
    most = FORMATS[options.format].longest_item or rank.longest_item(spec)
    if most and not split_tiles:
        longest = most // token_tile
        if max_tiles > longest:
            stretches = _stretches(units * (max_tiles + fixed_overhead), num_parts, longest)
    tile_ns, read_ns = options.tile_times(device, spec)
    free = options.num_parts is None and not split_tiles and stretches == 1
    load = rank.Load(units, num_parts, max_tiles)
    # the software GPU has no times, and what is traced for any size has no size
    if free and tile_ns and all(isinstance(extent, int) for extent in load):
        card = rank.card_of(device)
        if shape.full:
            whole = rank.stays_whole(card, spec, load)
        else:
            whole = rank.is_never_cut(card, spec, max_tiles)
        split_tiles = max_tiles if whole else 0
    items, slots = _room(units, max_tiles, num_parts * stretches, fixed_overhead, split_tiles)

    def ints(*shape: int) -> torch.Tensor:
        return cache_seqlens.new_zeros(shape, dtype=torch.int32)

    o_accum, lse_accum = workspace(cache_seqlens, slots, unit_rows, options.format)
    ragged, stale = queries.s_q is None, options.check_stale
    plan = made(
        work_items=ints(items, ITEM_WORDS),
        part_begin=ints(num_parts + 1),
        split_begin=ints(units + 1),
        planned_seqlens=ints(sequences),
        units=ints(units if ragged or units > sequences else 0, 2),
        unit_begin=ints(sequences + 1 if ragged else 0),
        row_limits=ints(0 if row_seqlens is None else tokens),
        o_accum=o_accum,
        lse_accum=lse_accum,
        batch=batch,
        num_heads=num_heads,
        s_q=queries.s_q,
        total_q=queries.total_q,
        page_size=page_size,
        max_pages=max_pages,
        num_parts=num_parts,
        pipeline=spec.pipeline,
        row_tile=spec.row_tile,
        unit_rows=unit_rows,
        token_tile=token_tile,
        fixed_overhead=fixed_overhead,
        causal=bool(options.causal),
        split_tiles=split_tiles,
        check_stale=env.CHECK_PLAN.enabled() if stale is None else bool(stale),
        p_terms=dict(spec.values).get("p_terms", 1),
        cache_dtype=options.format,
        num_kv_heads=kv_heads,
        longest_item=longest,
        max_stretches=stretches,
        tile_ns=tile_ns,
        read_ns=read_ns,
    )
    return plan.update_(cache_seqlens, cu_seqlens_q, row_seqlens)


def _unit_rows(device: torch.device, rows: int, spec: VariantSpec, row_blocks: str | None) -> int:
    """Query rows that are scheduled together."""
    if row_blocks is None:
        return rank.unit_rows(sm_count(device), rows, spec)
    unit_rows = rank.rows_of_unit(rows, spec, in_step=row_blocks == "in_step")
    return checks.unit_rows("row_blocks", unit_rows)


def _stretches(most_tiles: int, num_parts: int, longest: int) -> int:
    """Into how many a part may have to be cut, if there are at most so many tiles and overheads."""
    share = -(-most_tiles // num_parts)
    return max(min(-(-share // longest), MAX_STRETCHES), 1)


def _room(
    units: int, max_tiles: int, num_parts: int, fixed_overhead: int, split_tiles: int
) -> tuple[int, int]:
    """(items, slots) that there may be of units of at most so many tiles; checks their bounds."""
    pieces = -(-max_tiles // split_tiles) if split_tiles else 1
    cost = units * (max_tiles + fixed_overhead * pieces)
    if cost > MAX_COST:
        checks.value_error(
            "max_pages",
            f"a batch of at most {MAX_COST} tiles, overheads included",
            f"up to {cost} in {units} units of query rows of {max_tiles} tiles",
            "narrow the block table, or lower fixed_overhead",
        )
    items, slots = num_parts + units, 2 * num_parts
    if split_tiles:
        items = max(units * pieces, 1)
        slots = items if pieces > 1 else 1
    if slots > MAX_SLOTS:
        checks.value_error(
            "fixed_split_tokens",
            f"at most {MAX_SLOTS} pieces in a batch",
            f"{slots}, {pieces} of each of {units} units of query rows",
            "cut into longer pieces, or narrow the block table",
        )
    return items, slots


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

"""FlashMLA's metadata pair: a plan in two int32 tensors that the caller owns.

``tile_scheduler_metadata`` (num_sm_parts, width) holds the plan's tables, ``num_splits`` (b + 1,)
its slots of partial results.  What a ``DecodePlan`` has beside them is found again at each decode:
plans over a pair are kept while their memory lives, workspaces one a stream.  Shared by all names
that take a pair, so messages name these two arguments and ``get_mla_metadata``.

A pair knows the number of query rows, not the tokens they are of, nor whether the call will be
causal: it is planned in step, a unit a sequence, and leaves no tile out.

It is the caller's memory, so nothing is known of it: kernels take a sequence's query rows from the
call, and rows of a sequence that the tables do not cover become NaN
(``dsl_kernels/combine/coverage.py``; ``covered`` is its rule in Python).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.dims import ITEM_WORDS
from dsl_kernels.spec import VariantSpec
from snapmla import checks, dense, rank
from snapmla.call import tracing
from snapmla.checks import overlap
from snapmla.dense import plan_decode as plans
from snapmla.runtime import env, launch

MAX_BATCH = 2048  # sequences that a metadata tensor holds unless told: 78 KB on an H200
MOST_TOKENS = 1 << 30  # of a sequence in a plan that does not know the block table
USUAL_PAGE = 64  # of every pipeline

Pair = tuple[torch.Tensor, torch.Tensor]


def width_for(parts: int, max_batch: int) -> int:
    """Columns of a (parts, width) tensor that holds the plan's tables: from the front the work
    items, 8 * (parts + b); from the back part_begin, parts + 1, and the planned lengths, b."""
    return -(-(ITEM_WORDS * (parts + max_batch) + max_batch + parts + 1) // parts)


def capacity(metadata: torch.Tensor) -> int:
    """Sequences that a metadata tensor has room for."""
    parts, width = metadata.shape
    return (parts * width - (parts + 1) - ITEM_WORDS * parts) // (ITEM_WORDS + 1)


@functools.lru_cache(maxsize=16)
def _kept_workspace(
    device: torch.device, stream: int, parts: int, unit_rows: int, format: str
) -> Pair:
    """Partial results of one stream."""
    nothing = torch.empty(0, device=device)
    return dense.new_workspace(nothing, 2 * parts, unit_rows, format)


def stream_of(device: torch.device) -> int | None:
    """Handle of the current stream; None while it is being captured."""
    if device.type != "cuda":
        return 0
    if launch.capturing(device):
        return None
    return torch._C._cuda_getCurrentRawStream(device.index)


def workspace(
    metadata: torch.Tensor,
    stream: int | None,
    parts: int,
    unit_rows: int,
    format: str = dense.FP8,
) -> Pair:
    """The stream's workspace; under capture a fresh one, which lives in the graph's memory."""
    if stream is None:
        return dense.new_workspace(metadata, 2 * parts, unit_rows, format)
    return _kept_workspace(metadata.device, stream, parts, unit_rows, format)


def covered(
    items: list[list[int]], part_begin: list[int], split_begin: list[int], tiles: list[int],
    slots: int,
) -> list[bool]:  # fmt: skip
    """Sequences that a pair's tables cover: the rule of ``dsl_kernels/combine/coverage.py``.

    Args:
        items: rows of ``work_items``.
        part_begin, split_begin: as of a ``DecodePlan``.
        tiles: of each sequence, that its tokens fill, no more than the block table can name.
        slots: that there are.
    """
    count = len(tiles)
    if not (
        _ascends(part_begin) and _ascends(split_begin) and part_begin[-1] <= len(items)
        and split_begin[-1] <= slots
    ):  # fmt: skip
        return [False] * count
    items = items[: part_begin[-1]]
    found = []
    for sequence in range(count):
        first_slot, end_slot = split_begin[sequence : sequence + 2]
        own = [i for i, item in enumerate(items) if item[0] == sequence]
        pieces = max(end_slot - first_slot, 1)
        good = len(own) == pieces and own[-1] - own[0] == pieces - 1
        at, slot = 0, first_slot if end_slot > first_slot else -1
        for _, first, last, place, *_ in (items[i] for i in own):
            good = good and first == at <= last and place == slot
            at, slot = last, slot + 1
        taken = any(first_slot <= item[3] < end_slot for item in items if item[0] != sequence)
        found.append(good and at >= tiles[sequence] and not taken)
    return found


def _ascends(begin: list[int]) -> bool:
    return begin[0] == 0 and begin == sorted(begin)


class PairPlan(dense.DecodePlan):
    """A plan over a pair's memory, planned before anyone knew the block table."""

    _outside = True
    _STALE = (
        "tile_scheduler_metadata",
        "call get_mla_metadata(..., out=) after the lengths change",
    )

    def _compare(
        self,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        row_seqlens: torch.Tensor | None = None,
    ) -> None:
        """Compares the batch, the query rows, the lengths, then what the tables cover.

        The pair's memory has room for any batch up to ``max_batch``, so the one that was planned
        cannot be told by shapes; it is that of the last item of the work list.
        """
        last = int(self.part_begin[-1]) - 1
        planned = int(self.work_items[last, 0]) + 1 if 0 <= last < len(self.work_items) else 0
        if planned != self.batch:
            name, _ = self._STALE
            hint = "call get_mla_metadata(..., out=) after the batch changes"
            checks.value_error(name, f"one made for b = {self.batch} sequences", planned, hint)
        rows = int(self.work_items[0, 5]) - int(self.work_items[0, 4])
        if rows != self.rows:
            name, hint = self._STALE[0], "num_heads_per_head_k is s_q * num_heads of the decode"
            wanted = f"one made for s_q * num_heads = {self.rows} query rows a sequence"
            checks.value_error(name, wanted, rows, hint)
        super()._compare(cache_seqlens, cu_seqlens_q, row_seqlens)
        self._check_covered(cache_seqlens.tolist())

    def _check_covered(self, lengths: list[int]) -> None:
        """Raises ValueError if the tables do not cover a sequence: then they are not of one pair.

        Args:
            lengths: of the sequences, as they were planned.
        """
        most = self.max_pages * self.page_size
        tiles = [-(-min(max(n, 0), most) // self.token_tile) for n in lengths]
        found = covered(
            self.work_items.tolist(), self.part_begin.tolist(), self.split_begin.tolist(), tiles,
            self.o_accum.shape[0],
        )  # fmt: skip
        lost = [str(i) for i, good in enumerate(found) if not good][: dense.STALE_SHOWN]
        if lost:
            checks.value_error(
                f"{self._STALE[0]}, num_splits", "both of one pair, as get_mla_metadata made them",
                f"tables that do not cover sequence {', '.join(lost)}",
                "copy or slice both alike; a slice of num_splits begins at its first entry",
            )  # fmt: skip


class Tables(NamedTuple):
    """Places of the plan's tables in a metadata tensor."""

    work_items: torch.Tensor
    part_begin: torch.Tensor
    planned_seqlens: torch.Tensor


def tables_of(metadata: torch.Tensor, batch: int) -> Tables:
    """The tables of a plan for ``batch`` sequences; the work list with all the room there is."""
    flat, parts = metadata.view(-1), metadata.shape[0]
    tail, room = flat.shape[0] - (parts + 1), parts + capacity(metadata)
    items = flat[: ITEM_WORDS * room].view(room, ITEM_WORDS)
    return Tables(items, flat[tail:], flat[tail - batch : tail])


def make_plan(
    metadata: torch.Tensor, num_splits: torch.Tensor, batch: int, num_heads: int, s_q: int,
    page_size: int, max_pages: int, stream: int | None,
) -> dense.DecodePlan:  # fmt: skip
    """A ``DecodePlan`` over the checked pair's memory."""
    num_heads, s_q = checks.num_heads(num_heads), checks.s_q(s_q)
    checks.rows("s_q", batch * s_q, num_heads)
    page_size = checks.page_size(page_size)
    max_pages = checks.integer("max_pages", max_pages, 1)
    parts, rows = metadata.shape[0], num_heads * s_q
    spec = rank.choose(metadata.device, num_heads, s_q, page_size)
    unit_rows = checks.unit_rows("s_q", rank.rows_of_unit(rows, spec, in_step=True))
    o_accum, lse_accum = workspace(metadata, stream, parts, unit_rows)
    units, unit_begin, row_limits = no_tables(metadata)
    return PairPlan(
        **tables_of(metadata, batch)._asdict(),
        split_begin=num_splits,
        units=units,
        unit_begin=unit_begin,
        row_limits=row_limits,
        o_accum=o_accum,
        lse_accum=lse_accum,
        batch=batch,
        num_heads=num_heads,
        s_q=s_q,
        total_q=batch * s_q,
        page_size=page_size,
        max_pages=max_pages,
        num_parts=parts,
        pipeline=spec.pipeline,
        row_tile=spec.row_tile,
        unit_rows=unit_rows,
        token_tile=spec.token_tile,
        fixed_overhead=spec.family.item_overhead,
        causal=False,
        check_stale=env.CHECK_PLAN.enabled(),
    )


def no_tables(metadata: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """units, unit_begin and row_limits of a plan in which a sequence is a unit."""
    if tracing.wanted(metadata):
        return metadata.new_empty((0, 2)), metadata.new_empty(0), metadata.new_empty(0)
    return _kept_no_tables(metadata.device)


@functools.lru_cache(maxsize=16)
def _kept_no_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    units, begin, limits = (torch.empty(0, dtype=torch.int32, device=device) for _ in range(3))
    return units.view(0, 2), begin, limits


_plans: dict[tuple[object, ...], dense.DecodePlan] = {}
KEPT_PLANS = 64  # a few per captured batch size; each holds a metadata tensor


def kept_plan(
    metadata: torch.Tensor, num_splits: torch.Tensor, batch: int, num_heads: int, s_q: int,
    page_size: int, max_pages: int,
) -> dense.DecodePlan:  # fmt: skip
    """The pair's plan, checked and made once for all layers of a step.

    A kept plan holds the pair's memory, so addresses in the key cannot have become other tensors';
    what else could lie there are other views of the same memory.  Under capture plans are not kept:
    their workspace is the graph's.
    """
    stream = stream_of(metadata.device)
    key = (
        metadata.data_ptr(), num_splits.data_ptr(), metadata.shape, batch, num_heads, s_q,
        page_size, max_pages, stream,
    )  # fmt: skip
    plan = _plans.get(key)
    if (
        plan is not None
        and metadata.dtype is num_splits.dtype is torch.int32
        and metadata.is_contiguous()
        and num_splits.is_contiguous()
        and num_splits.shape == (batch + 1,)
    ):
        return plan
    check_pair(metadata, num_splits, batch, metadata.device)
    plan = make_plan(metadata, num_splits, batch, num_heads, s_q, page_size, max_pages, stream)
    if stream is not None:
        if len(_plans) >= KEPT_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def check_pair(
    metadata: torch.Tensor, num_splits: torch.Tensor, batch: int, device: torch.device
) -> None:
    """Checks a pair that is to hold a plan for ``batch`` sequences."""
    name = "tile_scheduler_metadata"
    for label, value in ((name, metadata), ("num_splits", num_splits)):
        if not isinstance(value, torch.Tensor):
            checks.type_error(label, "an int32 tensor of get_mla_metadata", type(value).__name__)
    checks.tensor(name, metadata, (torch.int32,), ("num_sm_parts", "width"), device)
    checks.contiguous(name, metadata)
    checks.tensor("num_splits", num_splits, (torch.int32,), (batch + 1,), device)
    checks.contiguous("num_splits", num_splits)
    room = capacity(metadata) if metadata.shape[0] else -1
    if batch > room:
        checks.value_error(
            name, f"room for {batch} sequences", f"room for {max(room, 0)}",
            "make it by get_mla_metadata(..., max_batch=the largest batch)",
        )  # fmt: skip


def pair_of(name: str, value: Any) -> Pair:
    """``value``, checked to be two of something."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        got = f"{len(value)} values" if isinstance(value, (tuple, list)) else type(value).__name__
        checks.type_error(name, "a pair of tensors", got)
    return value[0], value[1]


@functools.lru_cache(maxsize=64)
def kernel_for(device: torch.device, rows: int) -> VariantSpec:
    """The kernel that a pair is planned for, before anyone knows the page size.

    Row and token tile are those of the kernel that ``make_plan`` finds: pages do not change them.
    """
    return rank.choose(device, rows, 1, USUAL_PAGE)


def planned_pair(cache_seqlens: torch.Tensor, rows: int, max_batch: int, out: Pair | None) -> Pair:
    """Plans one decode step into ``out`` or a new pair; one launch.

    Args:
        cache_seqlens, rows, max_batch: as in ``flash_mla_fp8.get_mla_metadata``; checked.
        out: a pair to write into; unchecked.
    """
    device, batch = cache_seqlens.device, cache_seqlens.shape[0]
    checks.rows("num_heads_per_head_k", batch, rows)
    if out is None:
        parts = plans.default_num_parts(device, rows, kernel_for(device, rows))
        if batch > max_batch:
            checks.value_error(
                "cache_seqlens", f"at most max_batch = {max_batch} sequences", batch,
                "pass a larger max_batch",
            )  # fmt: skip
        shape = (parts, width_for(parts, max_batch))
        out = (
            cache_seqlens.new_zeros(shape, dtype=torch.int32),
            cache_seqlens.new_zeros(batch + 1, dtype=torch.int32),
        )
    metadata, num_splits = pair_of("out", out)
    check_pair(metadata, num_splits, batch, device)
    if batch:
        tables, spec = tables_of(metadata, batch), kernel_for(device, rows)
        unit_rows = rank.rows_of_unit(rows, spec, in_step=True)
        traced = tracing.wanted(cache_seqlens, metadata, num_splits)
        _check_apart(metadata, num_splits, cache_seqlens)
        (torch.ops.snapmla.plan_update if traced else dense.launch_plan)(
            cache_seqlens, None, None, tables.work_items, tables.part_begin, num_splits,
            tables.planned_seqlens, *no_tables(metadata),
            *step_numbers(device, batch, rows, spec, unit_rows),
        )  # fmt: skip
    return metadata, num_splits


_APART = overlap.Apart()


def _check_apart(metadata: torch.Tensor, num_splits: torch.Tensor, lengths: torch.Tensor) -> None:
    """Checks that the two tensors of a checked pair share no memory with one another, nor with the
    lengths that are read."""
    tensors = metadata, num_splits, lengths
    if tracing.plain(*tensors):
        key = (*(t.data_ptr() for t in tensors), metadata.shape, lengths.shape)
        if key in _APART or _APART.see(key, *((overlap.span(t),) for t in tensors)):
            return
    read = {"cache_seqlens": lengths}
    checks.apart("tile_scheduler_metadata", metadata, {"num_splits": num_splits, **read})
    checks.apart("num_splits", num_splits, read)


def step_numbers(
    device: torch.device, batch: int, rows: int, spec: VariantSpec, unit_rows: int
) -> dense.PlanNumbers:
    """Planning numbers for FlashMLA's callers, made before block table and causality are known.

    Args:
        batch: requests, at least one.
        rows: query rows of a request that read one KV head, as if they were tokens of one head.
        spec: the kernel whose token tile, and times, the plan is for.
        unit_rows: of them that are split together.
    """
    overhead = spec.family.item_overhead
    longest = (plans.MAX_COST // batch - overhead) * spec.token_tile  # the sum fits 32 bits
    tile_ns, read_ns = rank.tile_times(device, spec)
    return dense.PlanNumbers(
        max_tokens=min(longest, MOST_TOKENS),
        token_tile=spec.token_tile,
        fixed_overhead=overhead,
        split_tiles=0,
        longest_item=0,
        max_stretches=1,
        tile_ns=tile_ns,
        read_ns=read_ns,
        num_heads=1,
        s_q=rows,
        unit_rows=unit_rows,
        causal=False,
    )

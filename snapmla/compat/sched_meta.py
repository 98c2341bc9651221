"""FlashMLA's scheduling records, (num_sm_parts, 8) in the caller's memory: made, and read as plans.

``made`` writes FlashMLA's meaning (``dsl_kernels/schedule/plan_to_records.py``), so that engines
may copy, slice and edit what they get.  ``read`` takes any table of that width for cut points
(``dsl_kernels/schedule/records_to_plan.py``): one launch before the decode, which gives every tile
of the lengths as they are *then* to some part, whatever the records were made for.  Its tables are
kept by stream, thread and shape: another thread may launch between ``read`` and the decode.
Messages name ``tile_scheduler_metadata`` and ``get_mla_metadata``.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.dims import ITEM_WORDS
from dsl_kernels.formats.sched_meta import META_WORDS, MOST_PARTS
from dsl_kernels.spec import VariantSpec
from snapmla import checks, dense, rank
from snapmla.cache.layouts import kernel_page_size
from snapmla.call import tracing
from snapmla.compat import metadata_pair
from snapmla.dense import plan_decode as plans
from snapmla.runtime import launch, variants

NAME = "tile_scheduler_metadata"
ROW_BLOCK = 64  # query rows of a CTA of FlashMLA, by which it counts parts

Pair = tuple[torch.Tensor, torch.Tensor]


class Shape(NamedTuple):
    """Shape of a decode over records, without the records' number; fields as in ``DecodePlan``."""

    batch: int
    num_heads: int
    s_q: int
    page_size: int
    max_pages: int
    cache_dtype: str
    num_kv_heads: int

    @property
    def rows(self) -> int:
        """Query rows of a request that read one KV head."""
        return self.s_q * self.num_heads // self.num_kv_heads

    def known(self) -> Shape:
        """The same in numbers, where a tracer has symbols."""
        return Shape(
            int(self.batch), int(self.num_heads), int(self.s_q), int(self.page_size),
            int(self.max_pages), self.cache_dtype, int(self.num_kv_heads),
        )  # fmt: skip


def parts_of(device: torch.device, rows: int, num_kv_heads: int) -> int:
    """Records that FlashMLA makes: SMs / KV heads / row blocks, at least 1, whatever the batch."""
    return max(launch.sm_count(device) // num_kv_heads // -(-rows // ROW_BLOCK), 1)


def made(cache_seqlens: torch.Tensor, rows: int, num_kv_heads: int) -> Pair:
    """Plans a step as records; two launches.

    Args:
        cache_seqlens: int32 (b,), checked.
        rows: query rows of a request that read one KV head.

    Returns:
        (int32 (num_sm_parts, 8), int32 (b + 1,)).
    """
    batch, parts = cache_seqlens.shape[0], parts_of(cache_seqlens.device, rows, num_kv_heads)

    def ints(*shape: int) -> torch.Tensor:
        return cache_seqlens.new_zeros(shape)

    records, num_splits = ints(parts, META_WORDS), ints(batch + 1)
    if not batch:
        return records, num_splits
    # pages and the 16-bit dtype do not change what a tile takes
    spec = rank.choose(cache_seqlens.device, rows, 1, metadata_pair.USUAL_PAGE, cache="bf16")
    tables = (ints(parts + batch, ITEM_WORDS), ints(parts + 1), ints(batch + 1))
    traced = tracing.wanted(cache_seqlens)
    (torch.ops.snapmla.plan_update if traced else dense.launch_plan)(
        cache_seqlens, None, None, *tables, ints(batch), *metadata_pair.no_tables(cache_seqlens),
        *metadata_pair.step_numbers(cache_seqlens.device, batch, rows, spec, rows),
    )  # fmt: skip
    (torch.ops.snapmla.plan_to_records if traced else launch_records)(*tables, records, num_splits)
    return records, num_splits


@dataclass(frozen=True, eq=False)
class Reader:
    """Fixed memory in which records become a plan.

    Attributes:
        plan: what ``read`` fills, num_kv_heads parts a record.
        tile_begin: int32 (b + 1,), scratch.
        rows: of a request that read one KV head.
    """

    plan: dense.DecodePlan
    tile_begin: torch.Tensor
    rows: int

    @property
    def _tables(self) -> tuple[torch.Tensor, ...]:
        plan = self.plan
        return (
            self.tile_begin, plan.work_items, plan.part_begin, plan.split_begin,
            plan.planned_seqlens,
        )  # fmt: skip

    @property
    def _numbers(self) -> tuple[int, int, int, int]:
        plan = self.plan
        return plan.max_pages * plan.page_size, plan.token_tile, self.rows, plan.num_kv_heads

    @functools.cached_property
    def _prepared(self) -> tuple[Any, ...]:
        """Tables and numbers as the kernel takes them."""
        return *launch.prepared(*self._tables), *self._numbers

    def read(self, records: torch.Tensor, cache_seqlens: torch.Tensor) -> dense.DecodePlan:
        """Converts; one launch.  Checked: int32 (num_sm_parts, 8) and (b,) on the device."""
        launch_plan_of(records, cache_seqlens, *self._prepared)
        return self.plan

    def traced(self, records: torch.Tensor, cache_seqlens: torch.Tensor) -> dense.DecodePlan:
        """The same as an operator."""
        torch.ops.snapmla.records_to_plan(records, cache_seqlens, *self._tables, *self._numbers)
        return self.plan


def make_reader(like: torch.Tensor, parts: int, shape: Shape, stream: int | None) -> Reader:
    """Tables and workspace for ``parts`` records.

    Args:
        like: records; unchecked but for their number.
        stream: whose workspace is kept; None: one of its own, in a graph's memory.
    """
    batch, group = shape.batch, shape.num_heads // shape.num_kv_heads
    sequences, all_parts = batch * shape.num_kv_heads, parts * shape.num_kv_heads
    spec = rank.choose(
        like.device, group, shape.s_q, kernel_page_size(shape.page_size), cache=shape.cache_dtype
    )
    unit_rows = checks.unit_rows("q", rank.rows_of_unit(shape.rows, spec, in_step=True))
    max_tiles = -(-shape.max_pages * shape.page_size // spec.token_tile)
    if batch * max(max_tiles, 1) > plans.MAX_COST:
        checks.value_error(
            "block_table", f"at most {plans.MAX_COST} tiles of {spec.token_tile} tokens in a batch",
            f"up to {batch * max_tiles}", "narrow the block table",
        )  # fmt: skip
    o_accum, lse_accum = metadata_pair.workspace(
        like, stream, all_parts, unit_rows, shape.cache_dtype
    )
    units, unit_begin, row_limits = metadata_pair.no_tables(like)

    def ints(*extents: int) -> torch.Tensor:
        return like.new_zeros(extents)

    plan = dense.DecodePlan(
        work_items=ints(all_parts + sequences, ITEM_WORDS),
        part_begin=ints(all_parts + 1),
        split_begin=ints(sequences + 1),
        planned_seqlens=ints(sequences),
        units=units,
        unit_begin=unit_begin,
        row_limits=row_limits,
        o_accum=o_accum,
        lse_accum=lse_accum,
        batch=batch,
        num_heads=shape.num_heads,
        s_q=shape.s_q,
        total_q=batch * shape.s_q,
        page_size=shape.page_size,
        max_pages=shape.max_pages,
        num_parts=all_parts,
        pipeline=spec.pipeline,
        row_tile=spec.row_tile,
        unit_rows=unit_rows,
        token_tile=spec.token_tile,
        fixed_overhead=spec.family.item_overhead,
        causal=False,  # no tile is left out: one table serves calls of either kind
        cache_dtype=shape.cache_dtype,
        num_kv_heads=shape.num_kv_heads,
    )
    return Reader(plan, ints(batch + 1), shape.rows)


_readers: dict[tuple[object, ...], Reader] = {}
KEPT_READERS = 64  # tables of some 10 KB each; workspaces are the streams'


def kept_reader(records: torch.Tensor, shape: Shape) -> Reader:
    """The reader of stream and thread for these shapes; a fresh one under capture.

    Args:
        records: (num_sm_parts, 8), checked; only its device and extents count.
    """
    stream = metadata_pair.stream_of(records.device)
    parts = records.shape[0]
    if stream is None:
        return make_reader(records, parts, shape, None)
    key = (records.device, stream, threading.get_ident(), parts, shape)
    reader = _readers.get(key)
    if reader is None:
        reader = make_reader(records, parts, shape, stream)
        if len(_readers) >= KEPT_READERS:
            _readers.clear()
        _readers[key] = reader
    return reader


def check_records(value: Any, device: torch.device) -> None:
    """Checks a table of records; its values are never read here."""
    if not isinstance(value, torch.Tensor):
        hint = "get_mla_metadata makes either"
        checks.type_error(NAME, "a FlashMLASchedMeta or a tensor", type(value).__name__, hint)
    checks.tensor(NAME, value, (torch.int32,), ("num_sm_parts", META_WORDS), device)
    if not 0 < value.shape[0] <= MOST_PARTS:
        checks.value_error(NAME, f"1 to {MOST_PARTS} parts", value.shape[0])
    if value.stride(1) != 1:
        got = f"strides {value.stride()}"
        checks.value_error(NAME, "innermost stride 1", got, checks.TRANSPOSED)


@functools.lru_cache(maxsize=64)
def _kernel(device: torch.device, op: str) -> variants.Kernel:
    return variants.kernel(VariantSpec(op=op, arch=variants.arch_of(device)), device.type)


variants.on_forget(_kernel.cache_clear)


def launch_records(*arguments: torch.Tensor) -> None:
    """Launches ``plan_to_records`` on checked arguments: work_items, part_begin, split_begin,
    records, num_splits."""
    _kernel(arguments[0].device, "plan_to_records")(*arguments)


def launch_plan_of(records: torch.Tensor, cache_seqlens: torch.Tensor, *rest: Any) -> None:
    """Launches ``records_to_plan`` on checked arguments.

    Args:
        rest: tile_begin and the tables that are written; max_tokens, token_tile, rows,
            num_kv_heads.
    """
    _kernel(records.device, "records_to_plan")(records, cache_seqlens, *rest)

"""Dense decode with a plan: its checks, its launches, and the operator that tracers record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.dims import KV_LORA_RANK
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache import layouts
from snapmla.cache.paged import PagedKVCache
from snapmla.cache.quant import as_batch
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.checks import overlap
from snapmla.dense import DecodePlan, PlanVariant, kv_heads
from snapmla.dense.call_checks import (
    check_causal,
    check_outputs,
    check_plan,
    checked,
    lse_shape,
    rows_of,
)
from snapmla.dense.choices import choices
from snapmla.dense.witness import Witness, check_witness, compared
from snapmla.runtime import launch, variants

_Tensor = torch.Tensor  # looked up on every call
Options = tuple[float, bool, str, str]  # softmax_scale, causal, lse_base, empty_lse
# of a decode: q, cache, block_table, cache_seqlens, plan, out, lse, options, out_dtype, pipeline,
# witness.  A NamedTuple would cost a call 0.7 of its 13.5 us (H200): it is made and taken apart.
Call = tuple[
    Any, PagedKVCache, Any, Any, Any, torch.Tensor | None, torch.Tensor | None,
    Options, torch.dtype | None, str | None, Witness | None,
]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)  # quicker to read than a NamedTuple
class Prepared:
    """Checked launch state that calls by one plan with the same options share."""

    place: int  # of the plan
    variant: PlanVariant
    kernels: dict[torch.dtype, variants.Kernel]  # the variant's
    dtype: torch.dtype  # of ``out``
    empty: launch.Allocator
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_strides: tuple[int, ...]
    tables: tuple[Any, ...]  # arguments between lengths and results, of calls without a witness
    rest: tuple[Any, ...]  # arguments behind the results but the last, ``witness``

    @staticmethod
    def of(plan: DecodePlan, options: Options, dtype: torch.dtype) -> Prepared | None:
        """Prepares options that ``run_plan`` accepted; None of plans with more than a launch."""
        if plan.check_stale or plan.idle or not plan.as_given:
            return None
        *tables, o_accum, lse_accum = plan.arguments
        numbers = (checks.softmax_scale(options[0]), *choices(*options[1:]))
        empty, out_strides, lse_strides = plan._empty
        return Prepared(
            plan.place, plan.variant, plan.variant.kernels, dtype, empty, plan.out_shape,
            out_strides, plan.lse_shape, lse_strides, (*tables, launch.nothing(plan.device)),
            (o_accum, lse_accum, *numbers, plan.merges),
        )  # fmt: skip


class Unprepared(NamedTuple):
    """A plan for which ``Prepared.of`` returns None; only a number for its address is cached."""

    place: int


def parts(call: Call) -> calls.Parts:
    q, cache, block_table, cache_seqlens, plan, out, lse, options, out_dtype, _, witness = call
    content, rope, token_scale = cache.asks
    rows = q.__class__ is _Tensor
    query, place = (q, 0) if rows else (q.nope_u8, q.place)
    where: tuple[Any, ...] = (
        content(), rope(), token_scale(), plan.o_accum.data_ptr(), query.data_ptr(), place,
        cache.place, block_table.data_ptr(), cache_seqlens.data_ptr(),
    )  # fmt: skip
    tensors: tuple[Any, ...] = block_table, cache_seqlens
    if out is not None or lse is not None:
        where = where, out is None or out.data_ptr(), lse is None or lse.data_ptr()
        if out is None or lse is None:
            tensors = (*tensors, lse if out is None else out)
        else:
            tensors = block_table, cache_seqlens, out, lse
    there = None
    if witness is not None:
        given = witness.tensors
        tensors, where = (*tensors, *given), (where, *[tensor.data_ptr() for tensor in given])
        there = witness.cu_seqlens_q is None, witness.row_seqlens is None
    return (
        (*tensors, q) if rows else tensors,
        (
            options, options[0].__class__, options[1].__class__, out_dtype, out is None,
            lse is None, rows, there,
        ),
        where,
    )  # fmt: skip


def places(call: Call, _: object) -> calls.Groups | None:
    """Spans in groups: those of each result, then those of all that the kernel reads.

    None if something has no plain memory, if query and cache do not fit the plan, or if the memory
    of the plan, the cache or a quantised query has moved.
    """
    q, cache, block_table, cache_seqlens, plan, out, lse, *_, witness = call
    if not tracing.plain(q, cache, plan):  # what has no memory is never known
        return None
    rows = isinstance(q, torch.Tensor)
    if not (
        rows_of(q) == plan.rows_shape
        and cache.format == plan.cache_dtype
        and cache.page_size == plan.page_size
        and cache.num_kv_heads == plan.num_kv_heads
        and cache.device == q.device == plan.device
        and cache.stays
        and plan.stays
        and (rows or q.stays)
    ):
        return None
    results = [() if result is None else (overlap.span(result),) for result in (out, lse)]
    query = (overlap.span(q),) if rows else q.spans
    own = () if witness is None else witness.tensors
    tables = [overlap.span(table) for table in (block_table, cache_seqlens, *own)]
    return *results, (*query, *cache.spans, *plan.spans, *tables)


def with_plan(call: Call) -> Call:
    q, cache, table, lengths, plan, out, lse, options, out_dtype, pipeline, witness = call
    plan = checked(
        q, cache, table, lengths, plan, out, lse, out_dtype, pipeline, causal=options[1],
        witness=witness,
    )  # fmt: skip
    return q, cache, table, lengths, plan, out, lse, options, out_dtype, pipeline, witness


def launch_checked(
    call: Call, ready: Prepared | Unprepared | None
) -> tuple[Any, Prepared | Unprepared]:
    """Launches a checked call; see ``call.Op``.

    Returns:
        (out, lse); and what calls of its kind launch.
    """
    q, cache, block_table, cache_seqlens, plan, out, lse, options, out_dtype, _, witness = call
    query = (q,) if isinstance(q, _Tensor) else q.arguments
    read = cache.decode_arguments
    if isinstance(ready, Prepared):
        return run_prepared(
            ready, query, read, block_table, cache_seqlens, out, lse, witness
        ), ready  # fmt: skip
    dtype = out_dtype or plan.variant.out_dtypes[0]
    made = run_plan(
        query, read, block_table, cache_seqlens, plan, out, lse, dtype, options, witness
    )
    if ready is None:
        ready = Prepared.of(plan, options, dtype if out is None else out.dtype)
        ready = ready or Unprepared(plan.place)
    return made, ready


def run_prepared(
    prepared: Prepared,
    query: tuple[Any, ...],
    cache: tuple[Any, ...],
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    witness: Witness | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``run_plan`` of a call like one that it ran.

    Args:
        query, cache: as ``launch_decode``.
    """
    if out is None:
        out = prepared.empty(prepared.out_shape, prepared.out_strides, prepared.dtype)
    if lse is None:
        lse = prepared.empty(prepared.lse_shape, prepared.lse_strides, torch.float32)
    kernel = prepared.kernels.get(prepared.dtype) or prepared.variant.kernel(prepared.dtype)
    if witness is None:
        kernel(
            *query, *cache, block_table, cache_seqlens, *prepared.tables, out, lse,
            *prepared.rest, 0,
        )  # fmt: skip
    else:
        tables = compared(prepared.tables, witness)
        kernel(
            *query, *cache, block_table, cache_seqlens, *tables, out, lse, *prepared.rest, 1
        )  # fmt: skip
    return out, lse


def run_plan(
    query: tuple[Any, ...],
    cache: tuple[Any, ...],
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    options: tuple[float, bool, str, str],
    witness: Witness | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates results that are not given and launches.

    Args:
        query, cache: as ``launch_decode``, queries of 16 bits as the caller has them; unchecked but
            for what the exported function checks.
        out_dtype: of an allocated ``out``, bfloat16 if None.
        options: softmax_scale, causal, lse_base, empty_lse as in ``decode``; checked.
        witness: checked.
    """
    softmax_scale, causal, lse_base, empty_lse = options
    if type(softmax_scale) is not float or not 0.0 < softmax_scale <= checks.MAX_SOFTMAX_SCALE:
        softmax_scale = checks.softmax_scale(softmax_scale)
    numbers = (softmax_scale, *choices(causal, lse_base, empty_lse))
    if plan.trims and not causal:
        check_causal(plan, causal)
    if out is None:
        out = plan._empty_out(out_dtype or torch.bfloat16)
    if lse is None:
        lse = plan._empty_lse()
    if plan.idle:
        return out, lse
    if plan.check_stale:
        plan.check(cache_seqlens, *(witness or ()))
    if plan.as_given:
        launch_decode(
            query, cache, block_table, cache_seqlens, plan.variant, plan.arguments, plan.merges,
            (out, lse), numbers, witness,
        )  # fmt: skip
        return out, lse
    moved, own = None, witness
    if plan.regroups:
        moved = kv_heads.regroup(plan, query[0], block_table, cache_seqlens, out, lse)
        query, results = (moved.q,), (moved.out, moved.lse)
        block_table, cache_seqlens = moved.block_table, moved.cache_seqlens
        own = kv_heads.witness(plan, witness)
    else:
        results = out.unsqueeze(0), lse.unsqueeze(0)
        if len(query) == 1:
            query = (query[0].unsqueeze(0),)
    launch_decode(
        query, cache, block_table, cache_seqlens, plan.variant, plan.arguments, plan.merges,
        results, numbers, own,
    )  # fmt: skip
    if moved is not None:
        kv_heads.back(plan, moved, out, lse)
        kv_heads.void_moved(plan, witness, out, lse)
    return out, lse


def launch_decode(
    query: tuple[Any, ...],
    cache: tuple[Any, ...],
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    variant: PlanVariant,
    tables: tuple[Any, ...],
    merges: int,
    results: tuple[torch.Tensor, torch.Tensor],
    numbers: tuple[float, int, float, float],
    witness: Witness | None = None,
) -> None:
    """One call of the exported function, which launches decode and merge, on checked arguments.

    Args:
        query: content bytes, RoPE, one scale per row; (b, s_q, h, ...).  Of 16 bits one tensor.
        cache: content bytes, RoPE, scale.  Of 16 bits one tensor.
        tables: as ``DecodePlan.arguments``.
        merges: as ``DecodePlan.merges``.
        results: out, lse; (b, s_q, h, 512), (b, h, s_q).
        numbers: softmax_scale, causal, lse_factor, empty_lse.
        witness: as the kernel sees sequences.
    """
    out, lse = results
    *lists, o_accum, lse_accum = tables
    given: tuple[Any, ...] = (*lists, launch.nothing(variant.device))
    if witness is not None:
        given = compared(given, witness)
    kernel = variant.kernels.get(out.dtype) or variant.kernel(out.dtype)
    kernel(
        *query, *cache, block_table, cache_seqlens, *given, out, lse, o_accum, lse_accum, *numbers,
        merges, int(witness is not None),
    )  # fmt: skip


def traced(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator that a tracer records for a decode with a plan; the query fits the cache."""
    q, cache, block_table, cache_seqlens, plan, out, lse, options, out_dtype, pipeline, own = call
    rows = rows_of(q)
    check_plan(plan, rows, cache, block_table, pipeline, q.device)
    check_witness(plan, own, "row_seqlens")
    softmax_scale, causal, lse_base, empty_lse = options
    check_causal(plan, causal)
    causal_, lse_factor, empty = choices(causal, lse_base, empty_lse)
    rest = (
        plan.work_items, plan.part_begin, plan.split_begin, plan.units, plan.row_limits,
        plan.o_accum, plan.lse_accum, plan.pipeline, plan.row_tile, plan.can_split(),
        softmax_scale, bool(causal_), lse_factor, empty,
    )  # fmt: skip
    if isinstance(q, torch.Tensor):
        return _traced_rows(
            q, cache, block_table, cache_seqlens, plan, rest, out, lse, out_dtype, own
        )
    common = (
        *as_batch(q.nope.view(torch.uint8), q.rope, q.scale), *cache.memory_now(), block_table,
        cache_seqlens, *rest,
    )  # fmt: skip
    extra: dict[str, Any] = {"p_terms": plan.p_terms, "check_tables": plan._outside}
    if own is not None:
        extra |= own.named
    if out is None and lse is None:
        made = torch.ops.snapmla.decode(*common, out_dtype or torch.bfloat16, **extra)
        return (made[0].squeeze(0), made[1].squeeze(0)) if len(rows) == 2 else made
    if out is None:
        out = q.rope.new_empty((*rows, KV_LORA_RANK), dtype=out_dtype or torch.bfloat16)
    if lse is None:
        lse = q.rope.new_empty(lse_shape(rows), dtype=torch.float32)
    results = (out.unsqueeze(0), lse.unsqueeze(0)) if len(rows) == 2 else (out, lse)
    torch.ops.snapmla.decode_out(*common, *results, **extra)
    return out, lse


def _traced_rows(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    plan: DecodePlan,
    rest: tuple[Any, ...],
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    own: Witness | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_traced`` of a query of 16 bits; what kernels see otherwise is regrouped by operators too.

    Args:
        rest: of the operator's arguments.
        own: the call's witness.
    """
    check_outputs(out, lse, rows_of(q), out_dtype, q.device, (q.dtype,))
    record, kv = FORMATS[cache.format], cache.memory_now()[0]
    more: dict[str, Any] = {"cache_dtype": cache.format} if record.named else {}
    kv = kv if record.named else layouts.small_pages(kv)
    ragged, regroups = q.ndim == 3, plan.must_regroup()
    seen = kv_heads.witness(plan, own) if regroups else own
    if seen is not None:
        more |= seen.named
    if out is None and lse is None and not regroups:
        query = q.unsqueeze(0) if ragged else q
        made = torch.ops.snapmla.dense_decode(query, kv, block_table, cache_seqlens, *rest, **more)
        return (made[0].squeeze(0), made[1].squeeze(0)) if ragged else made
    if out is None:
        out = q.new_empty((*q.shape[:-1], KV_LORA_RANK))
    if lse is None:
        lse = q.new_empty(lse_shape(rows_of(q)), dtype=torch.float32)
    if regroups:
        call = kv_heads.regroup(plan, q, block_table, cache_seqlens, out, lse)
        torch.ops.snapmla.dense_decode_out(
            call.q, kv, call.block_table, call.cache_seqlens, *rest, call.out, call.lse, **more
        )
        kv_heads.back(plan, call, out, lse)
        kv_heads.void_moved(plan, own, out, lse)
        return out, lse
    given = (q, out, lse)
    query, results, sums = (x.unsqueeze(0) for x in given) if ragged else given
    torch.ops.snapmla.dense_decode_out(
        query, kv, block_table, cache_seqlens, *rest, results, sums, **more
    )
    return out, lse

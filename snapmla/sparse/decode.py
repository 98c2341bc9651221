"""``decode`` with ``indices``: attention of each query token to the cached tokens that it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from dsl_kernels.formats.dims import KV_LORA_RANK
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache.paged import PagedKVCache, expect_cache
from snapmla.cache.quant import QuantizedQuery, as_batch, expect_query, named
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.checks import overlap
from snapmla.dense import TENSORS, PlanVariant
from snapmla.dense.call_checks import check_outputs, lse_shape, rows_of
from snapmla.dense.choices import choices
from snapmla.dense.witness import Witness, check_witness, compared
from snapmla.rank import pipeline_of
from snapmla.runtime import launch, variants
from snapmla.sparse import query as queries
from snapmla.sparse import rows as over_rows
from snapmla.sparse import two_lists
from snapmla.sparse.lists import check_indices, check_lengths, check_reach, read
from snapmla.sparse.plan import SparsePlan, plan_sparse_decode
from snapmla.sparse.query import QueryPair
from snapmla.sparse.rows_plan import MAKE_PLAN, SparseRowsPlan
from snapmla.sparse.two_lists import Second

_Tensor = torch.Tensor  # looked up on every call
Options = tuple[float, str, str]  # softmax_scale, lse_base, empty_lse


class Call(NamedTuple):
    """A call of ``decode`` with ``indices`` over a cache of other formats than rows of 16 bits.

    Unpacked whole where it is read on every call: fields by name take twice as long.
    """

    q: Any
    cache: PagedKVCache
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    plan: Any
    out: torch.Tensor | None
    lse: torch.Tensor | None
    options: Options
    out_dtype: torch.dtype | None
    extra: Second | None
    witness: Witness | None


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Checked arguments that calls by one plan with the same options have in common."""

    variant: PlanVariant
    dtype: torch.dtype  # of ``out``
    tables: tuple[Any, ...]  # arguments between lengths and results, of calls without a witness
    rest: tuple[Any, ...]  # arguments behind the results but the last, ``witness``
    lengths: torch.Tensor  # of calls without ``topk_length``
    no_sink: torch.Tensor
    place: int  # a number for the plan's spans


def sparse_decode(
    q: Any,
    cache: PagedKVCache,
    indices: torch.Tensor,
    *,
    softmax_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    plan: Any = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lse_base: str = "e",
    empty_lse: str = "-inf",
    out_dtype: torch.dtype | None = None,
    pipeline: str | None = None,
    extra: Second | None = None,
    witness: Witness | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the results of ``decode(..., indices=)``; arguments and errors as there.

    ``extra``: a second list over a second cache, both of one format of ``two_lists.TAKEN``; a
    ``plan`` is then one of ``two_lists.as_one``.
    """
    options: Options = softmax_scale, lse_base, empty_lse
    if not isinstance(q, _Tensor):
        q = queries.as_given(q)
    if over_rows.is_rows(cache):
        if pipeline is not None:
            checks.value_error("pipeline", "None with a BF16 cache", pipeline, "it has one alone")
        if witness is not None:
            name = next(iter(witness.named))
            hint = "its plan depends on shapes alone: there is nothing to compare"
            checks.value_error(name, "None with a BF16 cache", "a tensor", hint)
        if extra is not None:
            two_lists.expect_format("cache", cache)
        return over_rows.decode_rows(
            over_rows.Call(
                q, cache, indices, topk_length, attn_sink, plan, out, lse, options, out_dtype
            )
        )
    call = Call(
        q, cache, indices, topk_length, attn_sink, plan, out, lse, options, out_dtype, extra,
        witness,
    )  # fmt: skip
    if pipeline is not None and isinstance(cache, PagedKVCache):
        own = pipeline_of(variants.arch_of(cache.device), cache.format)
        checks.choice("pipeline", pipeline, (own,))
    return calls.run(_SPARSE, plan, call)


def _parts(call: Call) -> calls.Parts:
    (
        q, cache, indices, topk_length, attn_sink, plan, out, lse, options, out_dtype, extra,
        witness,
    ) = call  # fmt: skip
    content, rope, token_scale = cache.asks
    own: tuple[_Tensor, ...] = ()
    if q.__class__ is _Tensor:
        own, begins = (q,), (q.data_ptr(), 0)
    elif q.__class__ is QueryPair:
        own, begins = q, (q.nope.data_ptr(), q.rope.data_ptr())
    else:
        begins = q.nope_u8.data_ptr(), q.place
    optional = topk_length, attn_sink, out, lse, *_tensors_of(extra), *(witness or ())
    given = tuple([tensor for tensor in optional if tensor is not None])
    there = tuple([tensor is not None for tensor in optional])
    return (
        (indices, *own, *given),
        (options, options[0].__class__, out_dtype, there, len(own), extra is None),
        (
            content(), rope(), token_scale(), plan.o_accum.data_ptr(), *begins,
            indices.data_ptr(), cache.place,
            *[tensor.data_ptr() for tensor in given],
        ),
    )  # fmt: skip


def _own(q: Any) -> tuple[torch.Tensor, ...]:
    """Tensors of a query of 16 bits; of a quantised one, which keeps its own, none."""
    return (q,) if isinstance(q, torch.Tensor) else q if isinstance(q, QueryPair) else ()


def _tensors_of(extra: Second | None) -> tuple[torch.Tensor | None, ...]:
    """Tensors of a second list: cache, entries, lengths."""
    return () if extra is None else (extra.cache.kv, extra.indices, extra.length)


def _places(call: Call, _: object) -> calls.Groups | None:
    """Spans in groups: those of each result, then those of all that the kernel reads.

    None if something has no plain memory, if the query or a cache does not fit the plan, or if the
    memory of the plan, a cache or a quantised query has moved.  Raises ValueError if the gather's
    32 bits do not reach a cache's tokens.
    """
    q, cache, plan, extra = call.q, call.cache, call.plan, call.extra
    if not tracing.plain(q, cache, plan, *(extra or ())[:1]):
        return None
    check_reach(named("cache", cache))  # another cache than the one that was checked
    if extra is not None:
        check_reach(named("extra_cache", extra.cache))
        if extra.cache.format != cache.format or not extra.cache.stays:
            return None
    own = _own(q)
    if not (
        rows_of(q) == plan.rows_shape
        and cache.format == plan.cache_dtype
        and cache.device == q.device == plan.device
        and cache.stays
        and plan.stays
        and (own or q.stays)
    ):
        return None
    results = [() if t is None else (overlap.span(t),) for t in (call.out, call.lse)]
    lists = call.indices, call.topk_length, call.attn_sink
    read = *lists, *_tensors_of(extra), *(call.witness or ())
    tables = [overlap.span(t) for t in read if t is not None]
    query = tuple(map(overlap.span, own)) if own else q.spans
    return *results, (*query, *cache.spans, *plan.spans, *tables)


def _checked(call: Call) -> Call:
    """Checks all tensors with full messages; plans if no plan is given, launches nothing else."""
    q, cache, indices, plan, extra = call.q, call.cache, call.indices, call.plan, call.extra
    _expect(q, cache, indices, plan)
    check_reach(named("cache", cache))
    device, rows = q.device, rows_of(q)
    if extra is not None:
        extra = two_lists.check(cache, indices, extra, rows, device)
        check_reach(named("extra_cache", extra.cache))
        topk, lengths = two_lists.as_one(indices, extra)
        if plan is None:
            plan = plan_sparse_decode(
                rows[-1], rows[1], topk=topk, topk_length=lengths, batch=rows[0], device=device,
                cache_dtype=cache.format,
            )  # fmt: skip
        elif plan.topk != topk:
            checks.value_error(
                "plan", f"one made for topk {topk}, of both lists", plan.topk, MAKE_PLAN
            )
        elif plan.row_limits.shape[0]:
            wanted = "one without row_lengths beside a second list"
            checks.value_error("plan", wanted, "one with", MAKE_PLAN)
    check_indices(indices, rows, plan.topk if plan is not None and extra is None else None, device)
    if plan is None:
        if len(rows) == 2:
            hint = "only a plan knows where a sequence's query tokens begin"
            wanted = "one made with cu_seqlens_q, beside ragged queries"
            checks.value_error("plan", wanted, None, hint)
        plan = plan_sparse_decode(
            rows[-1], rows[1], topk=indices.shape[-1], batch=rows[0], device=device,
            topk_length=check_lengths(call.topk_length, rows[0], device), cache_dtype=cache.format,
        )  # fmt: skip
    else:
        _check_plan(plan, rows, cache, indices, device)
    _check_witness(plan, call)
    check_lengths(call.topk_length, plan.batch, device)
    if call.attn_sink is not None:
        checks.tensor("attn_sink", call.attn_sink, (torch.float32,), (rows[-1],), device)
        checks.contiguous("attn_sink", call.attn_sink)
    check_outputs(call.out, call.lse, rows, call.out_dtype, device, plan.variant.out_dtypes)
    checks.softmax_scale(call.options[0])
    choices(False, *call.options[1:])
    _check_apart(call, plan)
    return call._replace(plan=plan, extra=extra)


def _check_witness(plan: SparsePlan, call: Call) -> None:
    """Checks that the plan can be compared with the call's witness."""
    witness = call.witness
    if witness is None:
        return
    name = next(iter(witness.named))
    if call.plan is None:
        checks.value_error(name, "None without a plan", "a tensor", "there is nothing to compare")
    if call.extra is not None:
        checks.value_error(name, "None beside a second list", "a tensor")
    check_witness(plan, witness, "row_lengths")


def _expect(q: object, cache: Any, indices: object, plan: object) -> None:
    """Checks that query, cache, lists and plan are of kinds that go together."""
    if isinstance(cache, PagedKVCache) and FORMATS[cache.format].named:
        record = FORMATS[cache.format]
        if not record.sparse:
            hint = "snapmla.convert_cache makes an FP8 cache of it"
            checks.value_error("cache", read(), record.about, hint)
        expect_cache(cache)
        if isinstance(q, QuantizedQuery):
            hint = f"{record.about} takes queries as they are"
            checks.type_error("q", "a bfloat16 tensor", "a snapmla.QuantizedQuery", hint)
        if isinstance(q, QueryPair):
            queries.check_pair(q, record)
        else:
            checks.query_of_rows(q, torch.bfloat16, 1, record.channels, checks.query_of(record))
    else:
        expect_query("q", q)
        expect_cache(cache)
    if isinstance(plan, SparseRowsPlan):
        wanted = f"one made with cache_dtype={cache.format!r}"
        checks.value_error("plan", wanted, f"one of {plan.cache_dtype!r}", MAKE_PLAN)
    if plan is not None and not isinstance(plan, SparsePlan):
        hint = "indices want a plan of snapmla.plan_sparse_decode"
        checks.type_error("plan", "a snapmla.SparsePlan or None", type(plan).__name__, hint)
    if not isinstance(indices, torch.Tensor):
        checks.type_error("indices", "a torch.Tensor", type(indices).__name__)


def _check_plan(
    plan: SparsePlan,
    rows: tuple[int, ...],
    cache: PagedKVCache,
    indices: torch.Tensor,
    device: torch.device,
) -> None:
    plan.expect_memory()
    if plan.device != device:
        checks.value_error("plan", f"a plan on {device}, where q is", plan.device, MAKE_PLAN)
    if plan.cache_dtype != cache.format:
        wanted = f"one made with cache_dtype={cache.format!r}"
        checks.value_error("plan", wanted, repr(plan.cache_dtype), MAKE_PLAN)
    if plan.rows_shape != rows:
        tokens = "b, s_q" if len(rows) == 3 else "total_q"
        wanted = f"one made for ({tokens}, num_heads) = {rows}"
        checks.value_error("plan", wanted, plan.rows_shape, MAKE_PLAN)


def _check_apart(call: Call, plan: SparsePlan) -> None:
    """Checks that given results share no memory with what the call reads, or one another."""
    extra, witness = call.extra, call.witness
    names = ("extra_cache.kv", "extra_indices", "extra_length")
    read = {
        **named_query(call.q),
        **named("cache", call.cache),
        "indices": call.indices,
        "topk_length": call.topk_length,
        "attn_sink": call.attn_sink,
        **dict(zip(names, _tensors_of(extra), strict=extra is not None)),
        **({} if witness is None else witness.named),
        **{f"plan.{name}": getattr(plan, name) for name in TENSORS},
    }
    checks.apart("out", call.out, {**read, "lse": call.lse})
    checks.apart("lse", call.lse, read)


def named_query(q: Any) -> dict[str, torch.Tensor]:
    """The tensors of a query as messages call them."""
    if isinstance(q, QueryPair):
        return q.named
    return {"q": q} if isinstance(q, torch.Tensor) else named("q", q)


def _both_lengths(plan: SparsePlan, indices: torch.Tensor, extra: Second) -> torch.Tensor:
    """Lengths that a plan of both lists is made for."""
    topk, lengths = two_lists.as_one(indices, extra)
    return torch.full_like(plan.planned_seqlens, topk) if lengths is None else lengths


def _launch(call: Call, ready: Prepared | Literal[False] | None) -> tuple[Any, Any]:
    """Launches a checked call; see ``call.Op``."""
    (
        q, cache, indices, topk_length, attn_sink, plan, out, lse, options, out_dtype, extra,
        witness,
    ) = call  # fmt: skip
    if not ready:
        ready = _prepare(plan, options, out_dtype if out is None else out.dtype)
    if out is None:
        out = plan._empty_out(ready.dtype)
    if lse is None:
        lse = plan._empty_lse()
    if plan.idle:
        return (out, lse), False
    lengths = ready.lengths if topk_length is None else topk_length
    if plan.check_stale:
        of_plan = lengths if extra is None else _both_lengths(plan, indices, extra)
        plan.check(of_plan, *(witness or ()))
    ragged = plan.s_q is None
    kernel = ready.variant.kernels.get(ready.dtype) or ready.variant.kernel(ready.dtype)
    query, strides = queries.arguments(q, ragged) if _own(q) else (q.arguments, ())
    entries = indices.unsqueeze(0) if ragged else indices
    lists: tuple[Any, ...] = entries, lengths
    if FORMATS[cache.format].two_lists:
        lists = *lists, *two_lists.arguments(cache, entries, extra, ready.lengths)
    kernel(
        *query, *cache.gather_arguments, *lists,
        ready.no_sink if attn_sink is None else attn_sink,
        *(ready.tables if witness is None else compared(ready.tables, witness)),
        out.unsqueeze(0) if ragged else out, lse.unsqueeze(0) if ragged else lse, *ready.rest,
        0 if witness is None else 1, *strides,
    )  # fmt: skip
    return (out, lse), ready


def _prepare(plan: SparsePlan, options: Options, dtype: torch.dtype | None) -> Prepared:
    *tables, o_accum, lse_accum = plan.arguments
    _, factor, empty = choices(False, *options[1:])
    rest = (o_accum, lse_accum, checks.softmax_scale(options[0]), factor, empty, plan.merges)
    no_sink = torch.empty(0, dtype=torch.float32, device=plan.device)
    chosen = dtype or plan.variant.out_dtypes[0]
    return Prepared(
        plan.variant,
        chosen,
        (*tables, launch.nothing(plan.device)),
        rest,
        plan.planned_seqlens,
        no_sink,
        plan.place,
    )


def _traced(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The call as an operator, for tracers; arguments checked."""
    q, cache, indices, topk_length, attn_sink, plan, out, lse, options, out_dtype, *_ = call
    witness = call.witness
    _expect(q, cache, indices, plan)
    rows = rows_of(q)
    if call.extra is not None:
        hint = "torch.ops.snapmla has one list"
        checks.value_error("extra", "None where a tracer asks for the call", "a second list", hint)
    if plan is None:
        if tracing.by_dynamo():
            return tracing.between_graphs(
                sparse_decode, q, cache, indices, softmax_scale=options[0],
                topk_length=topk_length, attn_sink=attn_sink, plan=plan, out=out, lse=lse,
                lse_base=options[1], empty_lse=options[2], out_dtype=out_dtype, witness=witness,
            )  # fmt: skip
        plan = _checked(call).plan
    _check_plan_shape(plan, rows)
    _check_witness(plan, call)
    _, factor, empty = choices(False, *options[1:])
    ragged, own = len(rows) == 2, _own(q)
    if own:
        own = tuple([part.unsqueeze(0) if ragged else part for part in own])
        read: tuple[Any, ...] = own[0], cache.memory_now()[0]
    else:
        read = *as_batch(q.nope.view(torch.uint8), q.rope, q.scale), *cache.memory_now()
    common = (
        *read, indices.unsqueeze(0) if ragged else indices,
        plan.planned_seqlens if topk_length is None else topk_length, attn_sink, plan.work_items,
        plan.part_begin, plan.split_begin, plan.units, plan.row_limits, plan.o_accum,
        plan.lse_accum, plan.pipeline, plan.row_tile, plan.can_split(),
        checks.softmax_scale(options[0]), factor, empty,
    )  # fmt: skip
    ops = torch.ops.snapmla
    more: dict[str, Any] = {"p_terms": plan.p_terms}
    if own:
        more = {"cache_dtype": cache.format}
        if len(own) > 1:
            more["q_rope"] = own[1]
    if witness is not None:
        more |= witness.named
    make, write = (
        (ops.sparse_decode_rows, ops.sparse_decode_rows_out)
        if own
        else (ops.sparse_decode, ops.sparse_decode_out)
    )
    if out is None and lse is None:
        made = make(*common, out_dtype or torch.bfloat16, **more)
        return (made[0].squeeze(0), made[1].squeeze(0)) if ragged else made
    like = own[0] if own else q.rope
    if out is None:
        out = like.new_empty((*rows, KV_LORA_RANK), dtype=out_dtype or torch.bfloat16)
    if lse is None:
        lse = like.new_empty(lse_shape(rows), dtype=torch.float32)
    results = (out.unsqueeze(0), lse.unsqueeze(0)) if ragged else (out, lse)
    write(*common, *results, **more)
    return out, lse


def _check_plan_shape(plan: SparsePlan, rows: tuple[int, ...]) -> None:
    """Checks that a plan is for this call's rows; remembers nothing on the plan."""
    if plan._shape_of_rows() != rows:
        tokens = "b, s_q" if len(rows) == 3 else "total_q"
        wanted = f"one made for ({tokens}, num_heads) = {rows}"
        checks.value_error("plan", wanted, plan._shape_of_rows(), MAKE_PLAN)


_SPARSE = calls.Op("sparse_decode", _checked, _launch, _traced, _parts, _places)

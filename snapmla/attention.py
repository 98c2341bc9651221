"""``decode``: MLA attention of each sequence's query tokens over a paged cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dsl_kernels.dims import KV_LORA_RANK
from snapmla import call as calls
from snapmla import checks, kv_heads, launch, layouts, overlap, runtime, tracing
from snapmla.cache import PagedKVCache, expect_cache, expect_decoded
from snapmla.decode_plan import DTYPES, FP8, NAMES, TENSORS, DecodePlan, PlanVariant
from snapmla.plan import plan_decode
from snapmla.quant import QuantizedQuery, as_batch, expect_query, named

LSE_FACTOR = {"e": math.log(2.0), "2": 1.0}
EMPTY_LSE = {"-inf": -math.inf, "+inf": math.inf}
_CHOICES = {
    (causal, base, empty): (int(causal), factor, value)
    for causal in (False, True)
    for base, factor in LSE_FACTOR.items()
    for empty, value in EMPTY_LSE.items()
}
OUT_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}  # of an FP8 cache
_Tensor = torch.Tensor  # looked up on every call
Query = QuantizedQuery | torch.Tensor
Options = tuple[float, bool, str, str]  # softmax_scale, causal, lse_base, empty_lse
# of a decode: q, cache, block_table, cache_seqlens, plan, out, lse, options, out_dtype, pipeline
Call = tuple[
    Any, PagedKVCache, torch.Tensor, torch.Tensor, Any, torch.Tensor | None, torch.Tensor | None,
    Options, torch.dtype | None, str | None,
]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)  # quicker to read than a NamedTuple
class Prepared:
    """What calls by one plan with the same options launch, all of it checked."""

    variant: PlanVariant
    kernels: dict[torch.dtype, runtime.Kernel]  # the variant's
    dtype: torch.dtype  # of ``out``
    empty: launch.Allocator
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_strides: tuple[int, ...]
    tables: tuple[Any, ...]  # arguments between lengths and results
    rest: tuple[Any, ...]  # arguments behind the results

    @staticmethod
    def of(plan: DecodePlan, options: Options, dtype: torch.dtype) -> Prepared | None:
        """For options that ``run_plan`` accepted; None of plans that take more than a launch."""
        if plan.check_stale or plan.idle or not plan.as_given:
            return None
        *tables, o_accum, lse_accum = plan.arguments
        numbers = (checks.softmax_scale(options[0]), *_choices(*options[1:]))
        empty, out_strides, lse_strides = plan._empty
        return Prepared(
            plan.variant, plan.variant.kernels, dtype, empty, plan.out_shape, out_strides,
            plan.lse_shape, lse_strides, tuple(tables),
            (o_accum, lse_accum, *numbers, plan.merges),
        )  # fmt: skip


def decode(
    q: QuantizedQuery | torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    softmax_scale: float,
    plan: DecodePlan | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lse_base: str = "e",
    empty_lse: str = "-inf",
    out_dtype: torch.dtype | None = None,
    pipeline: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * Q K^T) V over each sequence's cached tokens, where V is the latent.

    With ``plan``, ``out`` and ``lse`` given, a call is two launches by one exported function (one
    launch if the plan's shapes rule out splits): no synchronisation, no allocation, no copy to the
    device.  Several KV heads, and pages of more than 128 tokens, cost a few small launches and
    allocations more.  Where calls are recorded or watched (``torch.compile``, ``make_fx``,
    FakeTensors, dispatch modes) it is one node, ``torch.ops.snapmla.decode``, or ``dense_decode``
    over 16 bits; without a plan, ``torch.compile`` runs it between two graphs.  Inside
    ``torch.func`` transforms (vmap, grad) it is refused.  Results never require grad: this is
    inference.

    Args:
        q: from ``quantize_q``; (b, s_q, h, ...), or ragged (total_q, h, ...), which needs a plan.
            With a 16-bit cache bfloat16 or float16, as the cache, (b, s_q, h, 576) or ragged,
            contiguous; with several KV heads query heads j * g to (j + 1) * g - 1 read KV head j,
            where g = h / num_kv_heads.
        cache: pages that ``block_table`` points into.
        block_table: int32 (b, width); row i lists the pages of sequence i.  Entries past a
            sequence's end may be anything.
        cache_seqlens: int32 (b,), tokens per sequence, the new ones included; 0 is fine.
        softmax_scale: factor of the logits, positive, at most 2**57.  There is no default:
            DeepSeek's models want ``192**-0.5 * mscale**2``, FlashMLA's default is ``576**-0.5``.
        plan: from ``plan_decode`` for these ``cache_seqlens``; None plans here (and allocates).
        causal: query token s of s_q sees the first ``length - (s_q - 1 - s)`` tokens; False: all,
            with a plan made so.  Of no effect with a plan that has ``row_seqlens``.
        out: bfloat16 or float32 (b, s_q, h, 512) or (total_q, h, 512), contiguous, memory of its
            own; None allocates.  With a 16-bit cache of its dtype.
        lse: float32 (b, h, s_q) or (h, total_q), contiguous, memory of its own; None allocates.
        lse_base: ``e`` for the natural logarithm of the sum of exponentials, ``2`` for base 2.
        empty_lse: LSE of a row that sees no token, ``-inf`` or ``+inf``; its output is 0.
        out_dtype: dtype of an allocated ``out``; None: bfloat16, or that of a 16-bit cache.
        pipeline: decode pipeline of a plan made here; must agree with a given plan.

    Returns:
        (out, lse).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        VariantError: no compiled kernel fits and none can be compiled.

    Source: SnapMLA paper, Eq. 6 (logits in the scaled domain) and Algorithm 1 (``dual_wg``);
    FlashMLA-ETAP (the transposed form of ``etap``); rounding as docs/numerics.md says.
    """
    call: Call = (
        q, cache, block_table, cache_seqlens, plan, out, lse,
        (softmax_scale, causal, lse_base, empty_lse), out_dtype, pipeline,
    )  # fmt: skip
    return calls.run(_DECODE, plan if pipeline is None else None, call)


def _parts(call: Call) -> calls.Parts:
    q, cache, block_table, cache_seqlens, plan, out, lse, options, out_dtype, _ = call
    scale, causal, base, empty = options
    content, rope, token_scale = cache.asks
    tensors: tuple[Any, ...]
    given: tuple[Any, ...] = (out, lse)
    if out is None or lse is None:
        given = tuple([result for result in given if result is not None])
    if q.__class__ is _Tensor:
        tensors, query, place = (block_table, cache_seqlens, q, *given), q, 0
    else:
        tensors, query, place = (block_table, cache_seqlens, *given), q.nope_u8, q.place
    return (
        tensors,
        (
            scale.__class__, scale, causal.__class__, causal, base, empty, out_dtype, cache.dtype,
            out is None, lse is None, place == 0,
        ),
        (
            out is None or out.data_ptr(), lse is None or lse.data_ptr(), query.data_ptr(),
            content(), rope(), token_scale(), plan.o_accum.data_ptr(), block_table.data_ptr(),
            cache_seqlens.data_ptr(), place, cache.place, plan.place,
        ),
    )  # fmt: skip


def _places(call: Call, _: object) -> calls.Groups | None:
    """Of a query and a cache that are the plan's, and with it have the memory that they had."""
    q, cache, block_table, cache_seqlens, plan, out, lse, *_ = call
    if not tracing.plain(q, cache, plan):  # what has no memory is never known
        return None
    rows = isinstance(q, torch.Tensor)
    if not (
        _rows_of(q) == plan.rows_shape
        and cache.dtype is plan.dtype
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
    tables = overlap.span(block_table), overlap.span(cache_seqlens)
    return *results, (*query, *cache.spans, *plan.spans, *tables)


def _checked(call: Call) -> Call:
    q, cache, table, lengths, plan, out, lse, options, out_dtype, pipeline = call
    plan = checked(q, cache, table, lengths, plan, out, lse, out_dtype, pipeline, causal=options[1])
    return q, cache, table, lengths, plan, out, lse, options, out_dtype, pipeline


def launch_checked(
    call: Call, ready: Prepared | Literal[False] | None
) -> tuple[Any, Prepared | Literal[False]]:
    """Launches a checked call; see ``call.Op``.

    Returns:
        (out, lse); and what calls of its kind launch, False if they take more than a launch.
    """
    q, cache, block_table, cache_seqlens, plan, out, lse, options, out_dtype, _ = call
    query = (q,) if isinstance(q, _Tensor) else q.arguments
    read = cache.decode_arguments
    if ready:
        return run_prepared(ready, (*query, *read), block_table, cache_seqlens, out, lse), ready
    dtype = out_dtype or plan.variant.out_dtypes[0]
    made = run_plan(query, read, block_table, cache_seqlens, plan, out, lse, dtype, options)
    if ready is None:
        ready = Prepared.of(plan, options, dtype if out is None else out.dtype) or False
    return made, ready


def run_prepared(
    prepared: Prepared,
    read: tuple[Any, ...],
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``run_plan`` of a call like one that it ran.

    Args:
        read: query and cache, as ``launch_decode`` takes them.
    """
    if out is None:
        out = prepared.empty(prepared.out_shape, prepared.out_strides, prepared.dtype)
    if lse is None:
        lse = prepared.empty(prepared.lse_shape, prepared.lse_strides, torch.float32)
    kernel = prepared.kernels.get(prepared.dtype) or prepared.variant.kernel(prepared.dtype)
    kernel(*read, block_table, cache_seqlens, *prepared.tables, out, lse, *prepared.rest)
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates results that are not given and launches.

    Args:
        query, cache: as ``launch_decode``, queries of 16 bits as the caller has them; unchecked but
            for what the exported function checks.
        out_dtype: of an allocated ``out``, bfloat16 if None.
        options: softmax_scale, causal, lse_base, empty_lse as in ``decode``; checked.
    """
    softmax_scale, causal, lse_base, empty_lse = options
    if type(softmax_scale) is not float or not 0.0 < softmax_scale <= checks.MAX_SOFTMAX_SCALE:
        softmax_scale = checks.softmax_scale(softmax_scale)
    numbers = (softmax_scale, *_choices(causal, lse_base, empty_lse))
    if plan.trims and not causal:
        _check_causal(plan, causal)
    if out is None:
        out = plan._empty_out(out_dtype or torch.bfloat16)
    if lse is None:
        lse = plan._empty_lse()
    if plan.idle:
        return out, lse
    if plan.check_stale:
        plan.check(cache_seqlens)
    if plan.as_given:
        launch_decode(
            query, cache, block_table, cache_seqlens, plan.variant, plan.arguments, plan.merges,
            (out, lse), numbers,
        )  # fmt: skip
        return out, lse
    moved = None
    if plan.regroups:
        moved = kv_heads.regroup(plan, query[0], block_table, cache_seqlens, out, lse)
        query, results = (moved.q,), (moved.out, moved.lse)
        block_table, cache_seqlens = moved.block_table, moved.cache_seqlens
    else:
        results = out.unsqueeze(0), lse.unsqueeze(0)
        if len(query) == 1:
            query = (query[0].unsqueeze(0),)
    launch_decode(
        query, cache, block_table, cache_seqlens, plan.variant, plan.arguments, plan.merges,
        results, numbers,
    )  # fmt: skip
    if moved is not None:
        kv_heads.back(plan, moved, out, lse)
    return out, lse


def _choices(causal: bool, lse_base: str, empty_lse: str) -> tuple[int, float, float]:
    """(causal, lse_factor, empty_lse) as the kernels take them; checks all three."""
    try:
        return _CHOICES[causal, lse_base, empty_lse]
    except (KeyError, TypeError):
        checks.flag("causal", causal)
        checks.choice("lse_base", lse_base, LSE_FACTOR)
        checks.choice("empty_lse", empty_lse, EMPTY_LSE)
        raise


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
) -> None:
    """One call of the exported function, which launches decode and merge, on checked arguments.

    Args:
        query: content bytes, RoPE, one scale per row; (b, s_q, h, ...).  Of 16 bits one tensor.
        cache: content bytes, RoPE, scale.  Of 16 bits one tensor.
        tables: as ``DecodePlan.arguments``.
        merges: as ``DecodePlan.merges``.
        results: out, lse; (b, s_q, h, 512), (b, h, s_q).
        numbers: softmax_scale, causal, lse_factor, empty_lse.
    """
    out, lse = results
    work_items, part_begin, split_begin, units, row_limits, o_accum, lse_accum = tables
    kernel = variant.kernels.get(out.dtype) or variant.kernel(out.dtype)
    kernel(
        *query, *cache, block_table, cache_seqlens, work_items, part_begin, split_begin, units,
        row_limits, out, lse, o_accum, lse_accum, *numbers, merges,
    )  # fmt: skip


def _traced(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """``decode`` as an operator, for tracers; arguments checked."""
    q, cache, block_table, cache_seqlens, plan, out, lse, options, out_dtype, pipeline = call
    _expect_query(q, cache)
    if plan is None:
        if tracing.by_dynamo():
            return tracing.between_graphs(
                decode, q, cache, block_table, cache_seqlens, plan=plan, out=out, lse=lse,
                softmax_scale=options[0], causal=options[1], lse_base=options[2],
                empty_lse=options[3], out_dtype=out_dtype, pipeline=pipeline,
            )  # fmt: skip
        plan = _planned(q, cache, block_table, cache_seqlens, pipeline, options[1])
    rows = _rows_of(q)
    _check_plan(plan, rows, cache, block_table, pipeline, q.device)
    softmax_scale, causal, lse_base, empty_lse = options
    _check_causal(plan, causal)
    causal_, lse_factor, empty = _choices(causal, lse_base, empty_lse)
    rest = (
        plan.work_items, plan.part_begin, plan.split_begin, plan.units, plan.row_limits,
        plan.o_accum, plan.lse_accum, plan.pipeline, plan.row_tile, plan.can_split(),
        softmax_scale, bool(causal_), lse_factor, empty,
    )  # fmt: skip
    if isinstance(q, torch.Tensor):
        return _traced_rows(q, cache, block_table, cache_seqlens, plan, rest, out, lse, out_dtype)
    common = (
        *as_batch(q.nope.view(torch.uint8), q.rope, q.scale), *cache.memory_now(), block_table,
        cache_seqlens, *rest,
    )  # fmt: skip
    extra = {"p_terms": plan.p_terms, "check_tables": plan._outside}
    if out is None and lse is None:
        made = torch.ops.snapmla.decode(*common, out_dtype or torch.bfloat16, **extra)
        return (made[0].squeeze(0), made[1].squeeze(0)) if len(rows) == 2 else made
    if out is None:
        out = q.rope.new_empty((*rows, KV_LORA_RANK), dtype=out_dtype or torch.bfloat16)
    if lse is None:
        lse = q.rope.new_empty(_lse_shape(rows), dtype=torch.float32)
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_traced`` of a query of 16 bits; what kernels see otherwise is regrouped by operators too.

    Args:
        rest: of the operator's arguments.
    """
    _check_outputs(out, lse, _rows_of(q), out_dtype, q.device, (cache.dtype,))
    kv = layouts.small_pages(cache.memory_now()[0])
    ragged, regroups = q.ndim == 3, plan.must_regroup()
    if out is None and lse is None and not regroups:
        query = q.unsqueeze(0) if ragged else q
        made = torch.ops.snapmla.dense_decode(query, kv, block_table, cache_seqlens, *rest)
        return (made[0].squeeze(0), made[1].squeeze(0)) if ragged else made
    if out is None:
        out = q.new_empty((*q.shape[:-1], KV_LORA_RANK))
    if lse is None:
        lse = q.new_empty(_lse_shape(_rows_of(q)), dtype=torch.float32)
    if regroups:
        call = kv_heads.regroup(plan, q, block_table, cache_seqlens, out, lse)
        torch.ops.snapmla.dense_decode_out(
            call.q, kv, call.block_table, call.cache_seqlens, *rest, call.out, call.lse
        )
        kv_heads.back(plan, call, out, lse)
        return out, lse
    given = (q, out, lse)
    query, results, sums = (x.unsqueeze(0) for x in given) if ragged else given
    torch.ops.snapmla.dense_decode_out(query, kv, block_table, cache_seqlens, *rest, results, sums)
    return out, lse


_DECODE = calls.Op("decode", _checked, launch_checked, _traced, _parts, _places)


def _rows_of(q: Query) -> tuple[int, ...]:
    """(b, s_q, h) or (total_q, h) of a query."""
    return tuple((q if isinstance(q, torch.Tensor) else q.rope).shape[:-1])


def _lse_shape(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of ``lse`` for rows (b, s_q, h) or (total_q, h)."""
    *batch, tokens, heads = rows
    return *batch, heads, tokens


def checked(
    q: Query,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    plan: DecodePlan | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    pipeline: str | None,
    *,
    causal: bool = True,
) -> DecodePlan:
    """Checks all tensors with full messages; plans if no plan is given, launches nothing else."""
    _expect_query(q, cache)
    rows, device = _rows_of(q), q.device
    if cache.content.device != device:
        checks.value_error("cache", f"tensors on {device}, where q is", cache.content.device)
    if plan is not None:
        _expect_plan(plan)
        plan.expect_memory()
    b = _batch_of(q, plan)
    checks.block_table(block_table, b, device)
    checks.lengths(cache_seqlens, b, device)
    dtypes = tuple(OUT_NAMES) if cache.kv is None else (cache.dtype,)
    _check_outputs(out, lse, rows, out_dtype, device, dtypes)
    if plan is not None:
        _check_plan(plan, rows, cache, block_table, pipeline, device)
        _check_causal(plan, causal)
    _check_apart(q, cache, block_table, cache_seqlens, plan, out, lse)
    if plan is not None:
        return plan
    return _planned(q, cache, block_table, cache_seqlens, pipeline, causal)


def _expect_query(q: Query, cache: PagedKVCache) -> None:
    """That query and cache are of one kind, and a query of 16 bits what the kernels take."""
    expect_decoded(cache)
    if not isinstance(cache, PagedKVCache) or cache.scale is not None:
        expect_query("q", q)
        expect_cache(cache)
        return
    expect_cache(cache)
    if isinstance(q, QuantizedQuery):
        hint = "a 16-bit cache takes queries as they are"
        wanted = f"a {checks.dtype_name(cache.dtype)} tensor, as the cache's rows"
        checks.type_error("q", wanted, "a snapmla.QuantizedQuery", hint)
    checks.query_of_rows(q, cache.dtype, cache.num_kv_heads)


def _batch_of(q: Query, plan: DecodePlan | None) -> int:
    """Sequences of a call; ragged queries do not tell."""
    rows = _rows_of(q)
    if len(rows) == 3:
        return rows[0]
    if plan is None:
        checks.value_error(
            "plan", "one made with cu_seqlens_q, beside ragged queries", None,
            "only a plan knows where a sequence's query tokens begin",
        )  # fmt: skip
    return plan.batch


def _planned(
    q: Query,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    pipeline: str | None,
    causal: bool,
) -> DecodePlan:
    """A plan for a call that gave none."""
    checks.block_table(block_table, _batch_of(q, None), q.device)
    _, s_q, heads = _rows_of(q)
    return plan_decode(
        cache_seqlens,
        heads,
        s_q,
        page_size=cache.content.shape[1],
        max_pages=max(block_table.shape[1], 1),
        causal=causal,
        pipeline=pipeline,
        cache_dtype="fp8" if cache.scale is not None else cache.dtype,
        num_kv_heads=cache.num_kv_heads,
    )


def _check_outputs(
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    rows: tuple[int, ...],
    out_dtype: torch.dtype | None,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Checks the results that are given, and the dtype of those that are not."""
    if out_dtype is not None and out_dtype not in dtypes:
        wanted = " or ".join(checks.dtype_name(d) for d in dtypes)
        checks.type_error("out_dtype", wanted, out_dtype)
    if out is not None:
        dtypes = dtypes if out_dtype is None else (out_dtype,)
        checks.output("out", out, dtypes, (*rows, KV_LORA_RANK), device)
    if lse is not None:
        checks.output("lse", lse, (torch.float32,), _lse_shape(rows), device, align=4)


def _check_apart(
    q: Query,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    plan: DecodePlan | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Checks that given results share no memory with what the call reads, or one another."""
    read = {
        **({"q": q} if isinstance(q, torch.Tensor) else named("q", q)),
        **named("cache", cache),
        "block_table": block_table,
        "cache_seqlens": cache_seqlens,
        **({} if plan is None else {f"plan.{name}": getattr(plan, name) for name in TENSORS}),
    }
    checks.apart("out", out, {**read, "lse": lse})
    checks.apart("lse", lse, read)


def _expect_plan(plan: object) -> None:
    if not isinstance(plan, DecodePlan):
        checks.type_error("plan", "a snapmla.DecodePlan or None", type(plan).__name__)


def _check_plan(
    plan: DecodePlan,
    rows: tuple[int, ...],
    cache: PagedKVCache,
    block_table: torch.Tensor,
    pipeline: str | None,
    device: torch.device,
) -> None:
    """Checks that ``plan`` was made for this call's shapes; rows = (b, s_q, h) or (total_q, h)."""
    _expect_plan(plan)
    if plan.work_items.device != device:
        checks.value_error("plan", f"a plan on {device}, where q is", plan.work_items.device)
    _check_cache_dtype(plan, cache)
    page_size = cache.content.shape[1]
    got = (*plan._shape_of_rows(), plan.page_size)
    if got != (*rows, page_size):
        tokens = "b, s_q" if len(rows) == 3 else "total_q"
        wanted = f"one made for ({tokens}, num_heads, page_size) = {(*rows, page_size)}"
        checks.value_error("plan", wanted, got)
    _check_width(plan, block_table)
    if pipeline is not None:
        _check_pipeline(plan, pipeline)


def _check_cache_dtype(plan: DecodePlan, cache: PagedKVCache) -> None:
    """That the plan is for the cache's family of kernels."""
    wanted = FP8 if cache.scale is not None else NAMES[cache.dtype]
    if plan.cache_dtype != wanted:
        dtypes = (wanted, plan.cache_dtype)
        want, got = (repr(FP8) if d == FP8 else f"{DTYPES[d]}" for d in dtypes)
        hint = "a plan is for one kind of cache"
        checks.value_error("plan", f"one made with cache_dtype={want}", got, hint)
    if plan.num_kv_heads != cache.num_kv_heads:
        wanted = f"one made with num_kv_heads={cache.num_kv_heads}, as the cache"
        checks.value_error("plan", wanted, plan.num_kv_heads)


def _check_causal(plan: DecodePlan, causal: bool) -> None:
    """That no tile is missing that the call would see."""
    if plan.may_trim() and isinstance(causal, int) and not causal:
        wanted = "True, as planned: tiles that the causal rule hides may be left out"
        checks.value_error("causal", wanted, causal, "plan_decode(..., causal=False) serves both")


def _check_width(plan: DecodePlan, block_table: torch.Tensor) -> None:
    if block_table.shape[1] != plan.max_pages:  # kernels clamp lengths by the table's own width
        hint = "slice the table, or plan with max_pages = its width"
        wanted = f"a width of {plan.max_pages}, the plan's max_pages"
        checks.value_error("block_table", wanted, block_table.shape[1], hint)


def _check_pipeline(plan: DecodePlan, pipeline: str) -> None:
    if pipeline != plan.pipeline:
        checks.value_error("pipeline", f"{plan.pipeline!r}, as planned, or None", repr(pipeline))

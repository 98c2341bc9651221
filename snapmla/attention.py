"""``decode``: MLA attention of each sequence's query tokens over a paged cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from dsl_kernels.dims import KV_LORA_RANK
from snapmla import checks, kv_heads, launch, layouts, overlap, runtime, tracing
from snapmla.cache import PagedKVCache, expect_cache
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
# calls whose results were seen to lie apart from all else, by dtype of ``out``
_APART = {dtype: overlap.Apart() for dtype in NAMES}
_Tensor = torch.Tensor  # looked up on every call
Query = QuantizedQuery | torch.Tensor
Options = tuple[float, bool, str, str]  # softmax_scale, causal, lse_base, empty_lse


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


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """A call of ``decode`` with a plan that ran: what the next like it need not look at again.

    Tables are known by identity, and all tensors by ``launch.alike``, of which addresses are no
    part: a table's memory, and with it its sign, can be another.
    """

    table: torch.Tensor
    lengths: torch.Tensor
    tables_place: int
    options: Options
    out_dtype: torch.dtype | None
    quantized: bool  # the query
    like_read: Callable[..., bool]  # of the tables, and a query that is a tensor
    like_out: Callable[..., bool]  # of those and results that are given
    like_lse: Callable[..., bool]
    like_both: Callable[..., bool]
    allocates: bool  # whether an ``out`` that is not given is of the dtype that ran
    prepared: Prepared
    known: overlap.Apart  # of its dtype
    workspace: Callable[[], int]  # where the plan's begins


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
    options = (softmax_scale, causal, lse_base, empty_lse)
    if tracing.active():
        return _traced(
            q, cache, block_table, cache_seqlens, plan, options, out, lse, out_dtype, pipeline
        )
    if plan is not None and pipeline is None:
        try:
            prepared = _repeated(
                q, cache, block_table, cache_seqlens, plan, options, out, lse, out_dtype
            )
            if prepared is not None:
                query = (q,) if isinstance(q, _Tensor) else q.arguments
                return run_prepared(
                    prepared, (*query, *cache.decode_arguments), block_table, cache_seqlens, out,
                    lse,
                )  # fmt: skip
            seen = plan._seen
            if q.__class__ is _Tensor:
                if _rows_fit_plan(q, cache, block_table, cache_seqlens, plan, out, lse, out_dtype):
                    made = run_plan(
                        (q,), cache.decode_arguments, block_table, cache_seqlens,
                        plan, out, lse, plan.dtype, options,
                    )  # fmt: skip
                    return _remember(q, seen, plan, options, out_dtype, made)
            elif _fits_plan(q, cache, block_table, cache_seqlens, plan, out, lse, out_dtype):
                made = run_plan(
                    q.arguments, cache.arguments, block_table, cache_seqlens,
                    plan, out, lse, out_dtype, options,
                )  # fmt: skip
                return _remember(q, seen, plan, options, out_dtype, made)
        except Exception as error:
            arguments = (q, cache, block_table, cache_seqlens, plan, out, lse, out_dtype, pipeline)
            checks.explain(error, checked, *arguments, causal=causal)
            raise
    if not tracing.plain(q, cache, block_table, cache_seqlens, plan, out, lse):
        return _traced(
            q, cache, block_table, cache_seqlens, plan, options, out, lse, out_dtype, pipeline
        )
    plan = checked(
        q, cache, block_table, cache_seqlens, plan, out, lse, out_dtype, pipeline, causal=causal
    )
    query = (q,) if isinstance(q, torch.Tensor) else q.arguments
    return run_plan(
        query, cache.decode_arguments, block_table, cache_seqlens, plan, out, lse,
        out_dtype or plan.variant.out_dtypes[0], options,
    )  # fmt: skip


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


def _traced(
    q: Query,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    plan: DecodePlan | None,
    options: tuple[float, bool, str, str],
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    pipeline: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``decode`` as an operator, for tracers; arguments as in ``run_plan``, checked."""
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


def _rows_of(q: Query) -> tuple[int, ...]:
    """(b, s_q, h) or (total_q, h) of a query."""
    return tuple((q if isinstance(q, torch.Tensor) else q.rope).shape[:-1])


def _lse_shape(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of ``lse`` for rows (b, s_q, h) or (total_q, h)."""
    *batch, tokens, heads = rows
    return *batch, heads, tokens


def _fits_plan(
    q: Any,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> TypeGuard[QuantizedQuery]:
    """Whether the launches may be tried without the full checks.

    The exported functions check dtypes, ranks, alignment, strides of static extents and that sizes
    agree between their arguments, in less time than it takes from here.  What they do not see is
    checked here: that the plan is for these shapes, that results have no gaps and lie apart from
    what is read, that no tensor waits for its sign to be changed.
    """
    try:
        if not _tables_fit(plan, block_table, cache_seqlens):
            return False
        known = _APART[torch.bfloat16 if out is None else out.dtype]
        content, rope, scale = cache.asks
        key = (
            out is None or out.data_ptr(), lse is None or lse.data_ptr(), q.nope_u8.data_ptr(),
            content(), rope(), scale(), plan.o_accum.data_ptr(),
            q.place, cache.place, plan.place, plan._seen[2],
        )  # fmt: skip
        return (
            (out is None or out.__class__ is _Tensor)  # others need have no memory
            and (lse is None or lse.__class__ is _Tensor)
            and (key in known or _see_apart(known, key, q, cache, plan, plan._seen, out, lse))
            and (out is None or (out.is_contiguous() and not out.is_neg()))
            and (lse is None or (lse.is_contiguous() and not lse.is_neg()))
            and (out_dtype is None or (out is None and out_dtype in OUT_NAMES))
            and (
                not launch.several_gpus()  # the exported functions ask for the kind of device only
                or launch.all_on(
                    plan.device, q.nope, cache.content, block_table, cache_seqlens, out, lse
                )
            )
        )
    except (AttributeError, KeyError, RuntimeError):
        return False  # something is of another kind


def _rows_fit_plan(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> bool:
    """``_fits_plan`` of a query of 16 bits, which comes anew with every call."""
    try:
        if not _tables_fit(plan, block_table, cache_seqlens):
            return False
        known = _APART[plan.dtype if out is None else out.dtype]
        content, rope, scale = cache.asks
        key = (
            out is None or out.data_ptr(), lse is None or lse.data_ptr(), q.data_ptr(),
            content(), rope(), scale(), plan.o_accum.data_ptr(),
            0, cache.place, plan.place, plan._seen[2],
        )  # fmt: skip
        return (
            (out is None or (out.__class__ is _Tensor and out.dtype is plan.dtype))
            and (lse is None or lse.__class__ is _Tensor)
            and q.shape == plan.q_shape
            and (key in known or _see_apart(known, key, q, cache, plan, plan._seen, out, lse))
            and q.is_contiguous()
            and not q.is_neg()
            and (out is None or (out.is_contiguous() and not out.is_neg()))
            and (lse is None or (not lse.is_neg() and lse.is_contiguous()))
            and (out_dtype is None or out_dtype is plan.dtype)
            and (
                not launch.several_gpus()  # the exported functions ask for the kind of device only
                or launch.all_on(
                    plan.device, q, cache.content, block_table, cache_seqlens, out, lse
                )
            )
        )
    except (AttributeError, KeyError, RuntimeError):
        return False  # something is of another kind


def _repeated(
    q: Any,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    plan: DecodePlan,
    options: Options,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> Prepared | None:
    """What to launch, if the call is like the plan's last: ``_fits_plan`` in half the time."""
    try:
        last = plan._repeat
        if (
            last is None
            or block_table is not last.table
            or cache_seqlens is not last.lengths
            or options != last.options
            or options[0].__class__ is not float  # others are equal to one, too
            or out_dtype is not last.out_dtype
            or (launch.several_gpus() and not q.device == cache.device == plan.device)
        ):
            return None
        if last.quantized:
            query, place = q.nope_u8, q.place
            if out is not None and lse is not None:
                like = last.like_both(block_table, cache_seqlens, out, lse)
            elif out is lse is None:
                like = last.allocates and last.like_read(block_table, cache_seqlens)
            else:
                like = _like_one(last, out, lse, block_table, cache_seqlens)
        else:
            query, place = q, 0
            if out is not None and lse is not None:
                like = last.like_both(block_table, cache_seqlens, q, out, lse)
            elif out is lse is None:
                like = last.allocates and last.like_read(block_table, cache_seqlens, q)
            else:
                like = _like_one(last, out, lse, block_table, cache_seqlens, q)
        if not like:
            return None
        content, rope, scale = cache.asks
        key = (
            out is None or out.data_ptr(), lse is None or lse.data_ptr(), query.data_ptr(),
            content(), rope(), scale(), last.workspace(),
            place, cache.place, plan.place, last.tables_place,
        )  # fmt: skip
        if key in last.known or _see_apart(
            last.known, key, q, cache, plan, (block_table, cache_seqlens), out, lse
        ):
            return last.prepared
    except (AttributeError, RuntimeError, TypeError):
        pass  # something is of another kind
    return None


def _like_one(
    last: Repeat, out: torch.Tensor | None, lse: torch.Tensor | None, *read: torch.Tensor
) -> bool:
    """Whether tensors are like the last call's where one of the results is given."""
    if out is None:
        return last.allocates and last.like_lse(*read, lse)
    return last.like_out(*read, out)


def _remember(
    q: Query,
    seen: tuple[torch.Tensor | None, torch.Tensor | None, int],
    plan: DecodePlan,
    options: Options,
    out_dtype: torch.dtype | None,
    made: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Notes a call that ran, for ``_repeated``; returns its results.

    Args:
        seen: the plan's tables before the call.
    """
    table, lengths, place = seen
    unlike = plan._unlike + 1 if plan._seen is seen else 1
    object.__setattr__(plan, "_unlike", unlike)
    if table is None or lengths is None or not launch.worth_a_note(unlike):
        return made
    dtype = made[0].dtype
    prepared = Prepared.of(plan, options, dtype)
    if prepared is not None:
        rows = (q,) if isinstance(q, torch.Tensor) else ()
        results = (), made[:1], made[1:], made
        read, out, lse, both = (launch.alike(table, lengths, *rows, *given) for given in results)
        allocates = dtype is (out_dtype or plan.variant.out_dtypes[0])
        repeat = Repeat(
            table, lengths, place, options, out_dtype, not rows, read, out, lse, both, allocates,
            prepared, _APART[dtype], plan.o_accum.data_ptr,
        )  # fmt: skip
        object.__setattr__(plan, "_repeat", repeat)
    return made


def _tables_fit(plan: DecodePlan, block_table: torch.Tensor, cache_seqlens: torch.Tensor) -> bool:
    """Whether tables are as planned and hold their values; if so they are known by identity."""
    if block_table.shape != plan.table_shape:
        return False
    table, lengths, _ = plan._seen
    tables = block_table, cache_seqlens
    if not launch.none_negative(*tables):  # of known ones, too: their memory can be another
        return False
    if block_table is table and cache_seqlens is lengths:
        return True
    if not tracing.plain(*tables):
        return False
    place = overlap.place((overlap.span(block_table), overlap.span(cache_seqlens)))
    object.__setattr__(plan, "_seen", (*tables, place))
    return True


def _see_apart(
    known: overlap.Apart,
    key: tuple[int, ...],
    q: Query,
    cache: PagedKVCache,
    plan: DecodePlan,
    tables: tuple[Any, ...],
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> bool:
    """Whether plan, query and cache are of one shape and have the memory that they had, and results
    share none with what is read or with one another.

    False also where they lie between pages of a pool: the full checks look closer.  The key has a
    number for all that is asked here, and where what can be freed begins now.
    """
    if not tracing.plain(q, cache, plan):  # what has no memory is never remembered
        return False
    rows, given = _rows_of(q), (out, lse, *((q,) if isinstance(q, torch.Tensor) else ()))
    if not (
        rows == plan.rows_shape
        and cache.page_size == plan.page_size
        and cache.num_kv_heads == plan.num_kv_heads
        and cache.stays
        and plan.stays
        and (isinstance(q, torch.Tensor) or q.stays)
        and all(tensor is None or tensor.data_ptr() for tensor in given)
    ):
        return False
    results = [() if result is None else (overlap.span(result),) for result in (out, lse)]
    query = (overlap.span(q),) if isinstance(q, torch.Tensor) else q.spans
    lengths = map(overlap.span, tables[:2])
    return known.see(key, *results, (*query, *cache.spans, *plan.spans, *lengths))


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

"""``decode``: MLA attention of each sequence's query tokens over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.dims import KV_LORA_RANK
from dsl_kernels.formats.registered import FORMATS
from snapmla import call as calls
from snapmla import checks, kv_heads, launch, layouts, overlap, runtime, tracing
from snapmla.cache import PagedKVCache
from snapmla.checks.decode_call import (
    check_causal,
    check_outputs,
    check_plan,
    checked,
    expect_query_of,
    lse_shape,
    planned,
    rows_of,
)
from snapmla.decode_plan import DecodePlan, PlanVariant
from snapmla.decode_plan.choices import choices
from snapmla.decode_plan.witness import Witness, check_witness, compared, no_offsets
from snapmla.quant import QuantizedQuery, as_batch
from snapmla.sparse.decode import sparse_decode
from snapmla.sparse.rows_plan import SparseRowsPlan

_Tensor = torch.Tensor  # looked up on every call
Options = tuple[float, bool, str, str]  # softmax_scale, causal, lse_base, empty_lse
# of a decode: q, cache, block_table, cache_seqlens, plan, out, lse, options, out_dtype, pipeline,
# witness
Call = tuple[
    Any, PagedKVCache, Any, Any, Any, torch.Tensor | None, torch.Tensor | None,
    Options, torch.dtype | None, str | None, Witness | None,
]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)  # quicker to read than a NamedTuple
class Prepared:
    """Checked launch state that calls by one plan with the same options share."""

    place: int  # of the plan
    variant: PlanVariant
    kernels: dict[torch.dtype, runtime.Kernel]  # the variant's
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
            out_strides, plan.lse_shape, lse_strides, (*tables, no_offsets(plan.device)),
            (o_accum, lse_accum, *numbers, plan.merges),
        )  # fmt: skip


class Unprepared(NamedTuple):
    """A plan for which ``Prepared.of`` returns None; only a number for its address is cached."""

    place: int


def decode(
    q: QuantizedQuery | torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    cache: PagedKVCache,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    *,
    softmax_scale: float,
    plan: DecodePlan | SparseRowsPlan | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lse_base: str = "e",
    empty_lse: str = "-inf",
    out_dtype: torch.dtype | None = None,
    pipeline: str | None = None,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    row_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * Q K^T) V over each sequence's cached tokens, where V is the latent.

    With ``plan``, ``out`` and ``lse`` given, a call is two launches by one exported function (one
    launch if the plan's shapes rule out splits): no synchronisation, no allocation, no copy to the
    device.  Several KV heads, and pages of more than 128 tokens, cost a few small launches and
    allocations more.  Where calls are recorded or watched (``torch.compile``, ``make_fx``,
    FakeTensors, dispatch modes) it is one node, ``torch.ops.snapmla.decode``, or ``dense_decode``
    over 16 bits and bytes; without a plan, ``torch.compile`` runs it between two graphs.  Inside
    ``torch.func`` transforms (vmap, grad) it is refused.  Results never require grad: this is
    inference.

    Args:
        q: from ``quantize_q``; (b, s_q, h, ...), or ragged (total_q, h, ...), which needs a plan.
            With a 16-bit cache bfloat16 or float16, as the cache, (b, s_q, h, 576) or ragged,
            contiguous; with several KV heads query heads j * g to (j + 1) * g - 1 read KV head j,
            where g = h / num_kv_heads.  Over formats of bytes bfloat16 of as many channels as K
            has: 576 of ``fp8_ds_mla``, else 512.  With ``indices`` over ``fp8_ds_mla``, ``fp8_v4``
            and BF16 also (q_nope, q_rope), both bfloat16: content, (b, s_q, h, 512) or 448 of
            ``fp8_v4``, and RoPE, (b, s_q, h, 64), whose rows each lie any multiple of 16 bytes
            apart, evenly over tokens and heads.
        cache: pages that ``block_table`` points into.
        block_table: int32 (b, width); row i lists the pages of sequence i.  Entries past a
            sequence's end may be anything.
        cache_seqlens: int32 (b,), tokens per sequence, the new ones included; 0 is fine.
        softmax_scale: factor of the logits, positive, at most 2**57, with ``indices`` over a BF16
            cache 2**16 (there a row with a logit of 2**31 or more, times log2 e, is NaN in ``out``
            and ``lse``).  There is no default: DeepSeek's models want ``192**-0.5 * mscale**2``,
            FlashMLA's default is ``576**-0.5``.
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
        indices: sparse attention, over a cache of format ``fp8``, ``fp8_ds_mla``, ``fp8_v4``,
            ``fp8_v41_planar``, ``fp8_v41_rows`` or ``fp8_nope``, or a BF16 cache with one KV head
            whose pages follow one another: int32 (b, s_q, topk), or with ragged queries, which BF16
            does not take, (total_q, topk): what each query token attends to, as page * page_size +
            offset, in any order.  What is negative or behind the pool is no token, anywhere in the
            row, and never read; a token that is named twice counts twice.  ``block_table`` and
            ``cache_seqlens`` are then not looked at, there is no causal rule, and ``plan`` comes
            from ``plan_sparse_decode``.
        topk_length: int32 (b,): how many entries of each row of a sequence count, the first ones;
            what is behind them is not read.  None: those that the plan was made for, or all.
        attn_sink: float32 (h,), with ``indices``: a logit a head that weighs in ``out`` and has no
            value, of natural units: out is multiplied by 1 / (1 + exp(sink - lse)).  ``lse`` is
            without it.
        cu_seqlens_q: a witness of a plan for ragged queries: int32 (b + 1,), this step's own
            offsets.  A query token whose request, place in it or length the plan knows otherwise
            gets NaN in ``out`` and ``lse``, never another request's values; so does a token before
            ``cu_seqlens_q[b]`` that the plan does not know.
        row_seqlens: a witness of a plan with ``row_seqlens`` (with ``indices``: with
            ``row_lengths``), int32 (b, s_q) or (total_q,): it is read in place of the plan's copy,
            and tokens that see more than their tiles in the plan get NaN.  Without a plan it is
            planned by.

    Returns:
        (out, lse).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        VariantError: no compiled kernel fits and none can be compiled.

    Example:
        cache = snapmla.PagedKVCache.allocate(2, page_size=64, device="cpu")
        table, lengths = torch.tensor([[1]]).int(), torch.tensor([3]).int()
        kv, slots = torch.randn(3, 576).bfloat16(), torch.arange(64, 67)  # the start of page 1
        snapmla.append_kv(cache, kv[:, :512], kv[:, 512:], slots)
        q = torch.randn(1, 1, 16, 576).bfloat16()
        query = snapmla.quantize_q(q[..., :512], q[..., 512:])
        plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=1)
        out, lse = snapmla.decode(query, cache, table, lengths, softmax_scale=192**-0.5, plan=plan)

    Source: SnapMLA paper, Eq. 6 (logits in the scaled domain) and Algorithm 1 (``dual_wg``);
    FlashMLA-ETAP (the transposed form of ``etap``); rounding as docs/numerics.md says.
    """
    if indices is not None:
        return sparse_decode(
            q, cache, indices, softmax_scale=softmax_scale, topk_length=topk_length,
            attn_sink=attn_sink, plan=plan, out=out, lse=lse, lse_base=lse_base,
            empty_lse=empty_lse, out_dtype=out_dtype, pipeline=pipeline,
            witness=Witness.of(cu_seqlens_q, row_seqlens),
        )  # fmt: skip
    if topk_length is not None or attn_sink is not None:
        _refuse_without_indices(topk_length)
    call: Call = (
        q, cache, block_table, cache_seqlens, plan, out, lse,
        (softmax_scale, causal, lse_base, empty_lse), out_dtype, pipeline,
        None if cu_seqlens_q is row_seqlens is None else Witness(cu_seqlens_q, row_seqlens),
    )  # fmt: skip
    return calls.run(_DECODE, plan if pipeline is None else None, call)


def _refuse_without_indices(topk_length: object) -> None:
    name = "attn_sink" if topk_length is None else "topk_length"
    checks.value_error(name, "None without indices", "a value", "dense decode has neither")


def _parts(call: Call) -> calls.Parts:
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


def _places(call: Call, _: object) -> calls.Groups | None:
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


def _checked(call: Call) -> Call:
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
    given: tuple[Any, ...] = (*lists, no_offsets(variant.device))
    if witness is not None:
        given = compared(given, witness)
    kernel = variant.kernels.get(out.dtype) or variant.kernel(out.dtype)
    kernel(
        *query, *cache, block_table, cache_seqlens, *given, out, lse, o_accum, lse_accum, *numbers,
        merges, int(witness is not None),
    )  # fmt: skip


def _traced(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """``decode`` as an operator, for tracers; arguments checked."""
    q, cache, block_table, cache_seqlens, plan, out, lse, options, out_dtype, pipeline, own = call
    expect_query_of(q, cache)
    if plan is None:
        if tracing.by_dynamo():
            return tracing.between_graphs(
                decode, q, cache, block_table, cache_seqlens, plan=plan, out=out, lse=lse,
                softmax_scale=options[0], causal=options[1], lse_base=options[2],
                empty_lse=options[3], out_dtype=out_dtype, pipeline=pipeline,
                **({} if own is None else own.named),
            )  # fmt: skip
        plan = planned(q, cache, block_table, cache_seqlens, pipeline, options[1], own)
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


_DECODE = calls.Op("decode", _checked, launch_checked, _traced, _parts, _places)

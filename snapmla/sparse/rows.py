"""``decode(..., indices=)`` over a BF16 cache, by the kernels of ``sparse_prefill``.

A plan (rows_plan.py) says whether lists are split.  If so, one exported function launches the
kernel over pieces and the merge behind it.  If not, it is the kernel of prompts, whose LSE is
natural and +inf of rows that see nothing: a small launch or two bring it to the form that is asked
for, beside some 75 us that such a call takes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache.paged import PagedKVCache, expect_cache
from snapmla.cache.quant import QuantizedQuery, named
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.checks import overlap
from snapmla.dense.call_checks import check_outputs, lse_shape, rows_of
from snapmla.dense.choices import choices
from snapmla.runtime import launch
from snapmla.runtime.launch import sm_count
from snapmla.sparse import query as queries
from snapmla.sparse.lists import check_indices, check_lengths, check_reach, read
from snapmla.sparse.query import QueryPair
from snapmla.sparse.rows_kernel import kernel_of
from snapmla.sparse.rows_plan import MAKE_PLAN, SparseRowsPlan, plan_rows

Tensor = torch.Tensor
_BF16 = (torch.bfloat16,)


class Call(NamedTuple):
    """A call of ``decode`` with ``indices`` over a BF16 cache."""

    q: Any
    cache: Any
    indices: Any
    topk_length: Tensor | None
    attn_sink: Tensor | None
    plan: Any
    out: Tensor | None
    lse: Tensor | None
    options: tuple[float, str, str]  # softmax_scale, lse_base, empty_lse
    out_dtype: torch.dtype | None


class Ready(NamedTuple):
    """Arguments of a launch that follow from shapes and options."""

    place: int  # of the plan
    numbers: tuple[float, float, float]  # softmax_scale, lse_factor, empty_lse
    ctas: int
    no_lengths: Tensor
    no_sink: Tensor


def decode_rows(call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call; arguments and errors as of ``decode``."""
    made: tuple[Tensor, Tensor] = calls.run(_ROWS, call.plan, call)
    return made


def _parts(call: Call) -> calls.Parts:
    optional = call.topk_length, call.attn_sink, call.out, call.lse
    q = call.q if call.q.__class__ is QueryPair else (call.q,)
    tensors = (*q, call.indices, *[t for t in optional if t is not None])
    there = tuple([t is not None for t in optional])
    told = (call.options, call.options[0].__class__, call.out_dtype, there, len(q))
    content, rope, _ = call.cache.asks
    where = (content(), rope(), call.cache.place, call.plan.o_accum.data_ptr())
    return tensors, told, (*where, *[t.data_ptr() for t in tensors])


def _places(call: Call, _: object) -> calls.Groups | None:
    """Spans in groups: those of each result, then those of all that the kernels read.

    None if something has no plain memory, if the cache is not one of rows on the plan's device, or
    if the memory of the cache or the plan has moved.  Raises ValueError as ``check_pages``.
    """
    q, cache, plan = call.q, call.cache, call.plan
    if not (
        tracing.plain(q, cache, plan)
        and FORMATS[cache.format].lists_of_rows
        and cache.device == q.device == plan.device
        and cache.stays
        and plan.stays
    ):
        return None
    check_pages(cache)
    results = [() if t is None else (overlap.span(t),) for t in (call.out, call.lse)]
    tables = [t for t in (call.indices, call.topk_length, call.attn_sink) if t is not None]
    query = q if isinstance(q, QueryPair) else (q,)
    read = (*map(overlap.span, (*query, *tables)), *cache.spans, *plan.spans)
    return *results, read


def check_pages(cache: PagedKVCache) -> None:
    """Checks that a cache's tokens are rows of one tensor, which the gather's 32 bits reach."""
    kv = cache.kv
    assert kv is not None  # of all caches of rows
    pages, size = kv.shape[:2]
    if pages > 1 and kv.stride(0) != size * kv.stride(1):
        wanted = f"pages that follow one another, {size * kv.stride(1)} elements apart"
        checks.value_error("cache", wanted, f"strides {kv.stride()}")
    check_reach({"cache.kv": kv})


def _flat_rows(cache: PagedKVCache) -> Tensor:
    """(tokens, 1, 576) of the cache's pages, which were checked."""
    kv = cache.kv
    assert kv is not None
    pages, size = kv.shape[:2]
    return kv.as_strided((pages * size, 1, HEAD_DIM_QK), (kv.stride(1), HEAD_DIM_QK, 1))


def _expect(call: Call) -> None:
    """Checks that query, cache, lists and plan are of kinds that go together."""
    q, cache, plan = call.q, call.cache, call.plan
    expect_cache(cache)
    if cache.num_kv_heads != 1:
        checks.value_error("cache", "one KV head with indices", cache.num_kv_heads)
    if isinstance(q, QuantizedQuery):
        hint = "a 16-bit cache takes queries as they are"
        checks.type_error("q", "a bfloat16 tensor", "a snapmla.QuantizedQuery", hint)
    if isinstance(q, torch.Tensor) and q.ndim == 3:
        hint = "a BF16 cache takes ragged query tokens as sequences of one: q.unsqueeze(1)"
        checks.value_error("q", "shape (b, s_q, num_heads, 576)", tuple(q.shape), hint)
    if isinstance(q, QueryPair):
        queries.check_pair(q, FORMATS[cache.format])
        if q.rope.ndim == 3:
            hint = "a BF16 cache takes ragged query tokens as sequences of one"
            checks.value_error(
                "q_nope", "shape (b, s_q, num_heads, 512)", tuple(q.nope.shape), hint
            )
    else:
        checks.query_of_rows(q, torch.bfloat16, 1)
    if plan is not None and not isinstance(plan, SparseRowsPlan):
        hint = "plan_sparse_decode makes it with cache_dtype='bf16'"
        checks.type_error("plan", "a snapmla.SparseRowsPlan or None", type(plan).__name__, hint)
    if not isinstance(call.indices, torch.Tensor):
        checks.type_error("indices", "a torch.Tensor", type(call.indices).__name__)


def check_options(call: Call, rows: tuple[int, ...], device: torch.device) -> None:
    """Checks what depends on neither cache nor plan."""
    check_lengths(call.topk_length, rows[0], device)
    if call.attn_sink is not None:
        checks.tensor("attn_sink", call.attn_sink, (torch.float32,), (rows[-1],), device)
        checks.contiguous("attn_sink", call.attn_sink)
    check_outputs(call.out, call.lse, rows, call.out_dtype, device, _BF16)
    checks.softmax_scale(call.options[0], checks.MAX_ROWS_SCALE)
    choices(False, *call.options[1:])


def _checked(call: Call) -> Call:
    """Checks all tensors with full messages; plans if no plan is given, launches nothing else."""
    _expect(call)
    rows, device, plan = rows_of(call.q), call.q.device, call.plan
    if call.cache.device != device:
        checks.value_error("cache", f"tensors on {device}, where q is", call.cache.device)
    check_pages(call.cache)
    check_indices(call.indices, rows, None if plan is None else plan.topk, device)
    if plan is None:
        plan = _planned(call, device)
    else:
        plan.expect_memory()
        if plan.device != device:
            checks.value_error("plan", f"a plan on {device}, where q is", plan.device, MAKE_PLAN)
        check_plan_shape(plan, rows)
    check_options(call, rows, device)
    read = {
        **(call.q.named if isinstance(call.q, QueryPair) else {"q": call.q}),
        **named("cache", call.cache), "indices": call.indices,
        "topk_length": call.topk_length, "attn_sink": call.attn_sink,
        "plan.o_accum": plan.o_accum, "plan.lse_accum": plan.lse_accum,
        "plan.split_begin": plan.split_begin, "plan.units": plan.units,
        "plan.lengths": plan.lengths,
    }  # fmt: skip
    checks.apart("out", call.out, {**read, "lse": call.lse})
    checks.apart("lse", call.lse, read)
    return call._replace(plan=plan)


def _planned(call: Call, device: torch.device) -> SparseRowsPlan:
    b, s_q, heads = rows_of(call.q)
    return plan_rows(heads, s_q, topk=call.indices.shape[-1], batch=b, device=device)


def check_plan_shape(plan: SparseRowsPlan, rows: tuple[int, ...]) -> None:
    """Checks that a plan is for this call's rows."""
    if plan.rows_shape != rows:
        wanted = f"one made for (b, s_q, num_heads) = {rows}"
        checks.value_error("plan", wanted, plan.rows_shape, MAKE_PLAN)


def _ready(call: Call) -> Ready:
    plan = call.plan
    _, factor, empty = choices(False, *call.options[1:])
    blocks = -(-plan.num_heads // plan.row_tile)
    work = plan.tokens * plan.pieces * blocks
    with torch.inference_mode(False):
        no_lengths = torch.empty(0, dtype=torch.int32, device=plan.device)
        no_sink = torch.empty(0, dtype=torch.float32, device=plan.device)
    numbers = (checks.softmax_scale(call.options[0]), factor, empty)
    return Ready(plan.place, numbers, min(sm_count(plan.device), work), no_lengths, no_sink)


def _launch(call: Call, ready: Ready | None) -> tuple[tuple[Tensor, Tensor], Any]:
    """Launches a checked call; see ``call.Op``."""
    plan, rows = call.plan, call.plan.rows_shape
    out, lse = call.out, call.lse
    if out is None or lse is None:
        allocate = launch.allocator(plan.device)
        if out is None:
            shape = (*rows, KV_LORA_RANK)
            out = allocate(shape, launch.dense_strides(shape), torch.bfloat16)
        if lse is None:
            shape = lse_shape(rows)
            lse = allocate(shape, launch.dense_strides(shape), torch.float32)
    if not plan.tokens:
        return (out, lse), None
    if ready is None:
        ready = _ready(call)
    kv = _flat_rows(call.cache)
    if not kv.shape[0]:  # nobody sees anything, and there may be no memory at all
        out.zero_()
        lse.fill_(ready.numbers[2])
        return (out, lse), None
    lengths = call.topk_length
    if lengths is None:
        lengths = ready.no_lengths
    elif plan.s_q > 1:
        plan.lengths.view(plan.batch, plan.s_q).copy_(lengths[:, None])
        lengths = plan.lengths
    lists = call.indices
    if plan.s_q > 1:
        lists = lists.flatten(0, 1)[:, None]  # copied where tokens of a sequence lie apart
    sink = ready.no_sink if call.attn_sink is None else call.attn_sink
    query = call.q if isinstance(call.q, QueryPair) else (call.q,)
    read = (*[part.flatten(0, 1) for part in query], kv, lists, lengths, sink)
    count = "two" if len(query) > 1 else "one"
    if plan.pieces == 1:
        _whole(plan, read, (out, lse), ready, count)
    else:
        *tables, o_accum, lse_accum = plan.arguments
        kernel_of(plan.device, plan.row_tile, HEAD_DIM_QK, lists="split", query=count)(
            *read, *tables, out, lse, o_accum, lse_accum, *ready.numbers, plan.width, ready.ctas
        )
    return (out, lse), ready


def _whole(
    plan: SparseRowsPlan,
    read: tuple[Any, ...],
    results: tuple[Tensor, Tensor],
    ready: Ready,
    query: str,
) -> None:
    """Lists that are not split; the LSE in the form that was asked for.  ``query``: an axis."""
    out, lse = results
    scale, factor, empty = ready.numbers
    most, sums = plan.lse_accum.view(2, plan.tokens, plan.num_heads)
    if plan.s_q == 1:
        sums = lse[..., 0]
    kernel_of(plan.device, plan.row_tile, HEAD_DIM_QK, query=query)(
        *read, out.flatten(0, 1), most, sums, scale, ready.ctas
    )
    if plan.s_q > 1:
        lse.copy_(sums.view(plan.rows_shape).transpose(1, 2))
    if factor == 1.0:  # base 2
        lse.mul_(1.0 / math.log(2.0))
    if empty < 0:
        lse.nan_to_num_(nan=math.nan, posinf=empty, neginf=-math.inf)


def _traced(call: Call) -> tuple[Tensor, Tensor]:
    """The call as an operator, for tracers."""
    _expect(call)
    rows, plan, options = rows_of(call.q), call.plan, call.options
    if plan is None:
        if tracing.by_dynamo():
            return tracing.between_graphs(_again, *call)
        plan = _planned(call, call.q.device)
    check_plan_shape(plan, rows)
    check_options(call, rows, call.q.device)
    _, factor, empty = choices(False, *options[1:])
    q, more = call.q, {}
    if isinstance(q, QueryPair):
        q, more["q_rope"] = q
    common = (
        q, call.cache.memory_now()[0], call.indices, call.topk_length, call.attn_sink,
        plan.split_begin, plan.units, plan.lengths, plan.o_accum, plan.lse_accum, plan.topk,
        plan.width, plan.row_tile, checks.softmax_scale(options[0]), factor, empty,
    )  # fmt: skip
    if call.out is None and call.lse is None:
        made: tuple[Tensor, Tensor] = torch.ops.snapmla.sparse_decode_bf16(*common, **more)
        return made
    out = q.new_empty((*rows, KV_LORA_RANK)) if call.out is None else call.out
    lse = call.lse
    if lse is None:
        lse = q.new_empty(lse_shape(rows), dtype=torch.float32)
    torch.ops.snapmla.sparse_decode_bf16_out(*common, out, lse, **more)
    return out, lse


def _again(*arguments: Any) -> tuple[Tensor, Tensor]:
    """A call by its arguments, between two graphs."""
    return decode_rows(Call(*arguments))


def launch_now(call: Call) -> tuple[Tensor, Tensor]:
    """A call on tensors with memory, whoever traces: what the operator does."""
    return _launch(_checked(call), None)[0]


def is_rows(cache: Any) -> bool:
    """True if a cache is one of 16-bit rows.  Raises ValueError for those that no kernel reads."""
    record = FORMATS[cache.format] if isinstance(cache, PagedKVCache) else None
    if record is None or not record.rows:
        return False
    if not record.lists_of_rows:
        checks.value_error("cache", read(), f"one of {checks.dtype_name(cache.dtype)} rows")
    return True


_ROWS = calls.Op("sparse_decode_bf16", _checked, _launch, _traced, _parts, _places)

"""Checks of a decode's tensors and plan, and what follows from their shapes."""

from __future__ import annotations

import torch

from dsl_kernels.formats.dims import KV_LORA_RANK
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache.paged import PagedKVCache, expect_cache, expect_decoded
from snapmla.cache.quant import QuantizedQuery, expect_query, named
from snapmla.dense import DTYPES, TENSORS, DecodePlan
from snapmla.dense.plan_decode import plan_decode
from snapmla.dense.witness import Witness, check_witness

Query = QuantizedQuery | torch.Tensor


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
    witness: Witness | None = None,
) -> DecodePlan:
    """Checks all tensors with full messages; plans if no plan is given, launches nothing else."""
    expect_query_of(q, cache)
    rows, device = rows_of(q), q.device
    if cache.content.device != device:
        checks.value_error("cache", f"tensors on {device}, where q is", cache.content.device)
    if plan is not None:
        _expect_plan(plan)
        plan.expect_memory()
    b = _batch_of(q, plan)
    checks.block_table(block_table, b, device)
    checks.lengths(cache_seqlens, b, device)
    dtypes = tuple(checks.DTYPES[name] for name in FORMATS[cache.format].results)
    check_outputs(out, lse, rows, out_dtype, device, dtypes)
    if plan is not None:
        check_plan(plan, rows, cache, block_table, pipeline, device)
        check_causal(plan, causal)
        check_witness(plan, witness, "row_seqlens")
    _check_apart(q, cache, block_table, cache_seqlens, plan, out, lse, witness)
    if plan is not None:
        return plan
    return planned(q, cache, block_table, cache_seqlens, pipeline, causal, witness)


def rows_of(q: Query) -> tuple[int, ...]:
    """(b, s_q, h) or (total_q, h) of a query."""
    return tuple((q if isinstance(q, torch.Tensor) else q.rope).shape[:-1])


def lse_shape(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of ``lse`` for rows (b, s_q, h) or (total_q, h)."""
    *batch, tokens, heads = rows
    return *batch, heads, tokens


def expect_query_of(q: Query, cache: PagedKVCache) -> None:
    """Raises an error if query and cache are of different kinds.

    Also raises one if a query of 16 bits has a dtype, heads or channels that kernels do not take.
    """
    expect_decoded(cache)
    if not isinstance(cache, PagedKVCache) or FORMATS[cache.format].quantized_query:
        expect_query("q", q)
        expect_cache(cache)
        return
    expect_cache(cache)
    record = FORMATS[cache.format]
    dtype = cache.dtype if record.rows else torch.bfloat16
    if isinstance(q, QuantizedQuery):
        hint = f"{record.about} takes queries as they are"
        whose = ", as the cache's rows" if record.rows else ""
        wanted = f"a {checks.dtype_name(dtype)} tensor{whose}"
        checks.type_error("q", wanted, "a snapmla.QuantizedQuery", hint)
    checks.query_of_rows(q, dtype, cache.num_kv_heads, record.channels, checks.query_of(record))


def _batch_of(q: Query, plan: DecodePlan | None) -> int:
    """Sequences of a call; ragged queries do not tell."""
    rows = rows_of(q)
    if len(rows) == 3:
        return rows[0]
    if plan is None:
        checks.value_error(
            "plan", "one made with cu_seqlens_q, beside ragged queries", None,
            "only a plan knows where a sequence's query tokens begin",
        )  # fmt: skip
    return plan.batch


def planned(
    q: Query,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    pipeline: str | None,
    causal: bool,
    witness: Witness | None = None,
) -> DecodePlan:
    """A plan for a call that gave none."""
    limits = None
    if witness is not None:
        offsets, limits = witness
        if offsets is not None:
            hint = "without a plan every sequence has s_q query tokens"
            checks.value_error("cu_seqlens_q", "None without a plan", "a tensor", hint)
    checks.block_table(block_table, _batch_of(q, None), q.device)
    _, s_q, heads = rows_of(q)
    return plan_decode(
        cache_seqlens,
        heads,
        s_q,
        page_size=cache.content.shape[1],
        max_pages=max(block_table.shape[1], 1),
        row_seqlens=limits,
        causal=causal,
        pipeline=pipeline,
        format=cache.format,
        num_kv_heads=cache.num_kv_heads,
    )


def check_outputs(
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
        checks.output("lse", lse, (torch.float32,), lse_shape(rows), device, align=4)


def _check_apart(
    q: Query,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    plan: DecodePlan | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    witness: Witness | None,
) -> None:
    """Checks that given results share no memory with what the call reads, or one another."""
    read = {
        **({"q": q} if isinstance(q, torch.Tensor) else named("q", q)),
        **named("cache", cache),
        "block_table": block_table,
        "cache_seqlens": cache_seqlens,
        **({} if witness is None else witness.named),
        **({} if plan is None else {f"plan.{name}": getattr(plan, name) for name in TENSORS}),
    }
    checks.apart("out", out, {**read, "lse": lse})
    checks.apart("lse", lse, read)


def _expect_plan(plan: object) -> None:
    if not isinstance(plan, DecodePlan):
        checks.type_error("plan", "a snapmla.DecodePlan or None", type(plan).__name__)


def check_plan(
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
    """Raises an error if the plan is for another format, or for another number of KV heads."""
    if plan.cache_dtype != cache.format:
        dtypes = (cache.format, plan.cache_dtype)
        want, got = (f"{DTYPES[d]}" if FORMATS[d].rows else repr(d) for d in dtypes)
        hint = "a plan is for one kind of cache"
        checks.value_error("plan", f"one made with cache_dtype={want}", got, hint)
    if plan.num_kv_heads != cache.num_kv_heads:
        wanted = f"one made with num_kv_heads={cache.num_kv_heads}, as the cache"
        checks.value_error("plan", wanted, plan.num_kv_heads)


def check_causal(plan: DecodePlan, causal: bool) -> None:
    """Raises an error if ``causal`` is False, but the plan may lack tiles that the rule hides."""
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

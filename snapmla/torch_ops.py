"""``torch.ops.snapmla``: the same kernels as operators over flat tensors and numbers.

For ``torch.compile``, ``torch.export`` and code that wants operators.  Where something traces or
watches, or stands in for tensors (``snapmla.tracing``), the public functions become these operators
(``snapmla.append_kv``, ``rope_append_kv``, ``quantize_q``, ``rope_quantize_q``, ``decode``,
``fetch_dequant``, ``merge_state``, ``merge_states``, ``plan.update_``, and so ``flash_mla_fp8``);
in eager mode they do not go through them.

    append_kv(content!, rope?!, scale?!, c_kv, k_rope, slot_mapping)
    rope_append_kv(content!, rope?!, scale?!, c_kv, k_rope, slot_mapping, positions, cos_sin_cache,
        is_neox, norm_weight?, norm_eps)
    quantize_q(q_nope, q_rope, granularity) -> (nope, rope, scale)
    quantize_q_out(q_nope, q_rope, granularity, nope!, rope!, scale!)
    rope_quantize_q(q_nope, q_rope, positions, cos_sin_cache, is_neox, granularity)
        -> (nope, rope, scale)
    rope_quantize_q_out(q_nope, q_rope, positions, cos_sin_cache, is_neox, granularity, nope!,
        rope!, scale!)
    plan_update(cache_seqlens, cu_seqlens_q?, row_seqlens?, work_items!, part_begin!, split_begin!,
        planned_seqlens!, units!, unit_begin!, row_limits!, max_tokens, token_tile, fixed_overhead,
        split_tiles, longest_item, max_stretches, tile_ns, read_ns, num_heads, s_q, unit_rows,
        causal)
    plan_to_records(work_items, part_begin, split_begin, records!, num_splits!)
    records_to_plan(records, cache_seqlens, tile_begin!, work_items!, part_begin!, split_begin!,
        planned_seqlens!, max_tokens, token_tile, rows, num_kv_heads)
    decode(q_nope, q_rope, q_scale, content, rope?, scale?, block_table, cache_seqlens, work_items,
        part_begin, split_begin, units, row_limits, o_accum!, lse_accum!, pipeline, row_tile,
        may_split, softmax_scale, causal, lse_factor, empty_lse, out_dtype, *, p_terms=1,
        check_tables=False) -> (out, lse)
    decode_out(..., out!, lse!, *, p_terms=1, check_tables=False)
    dense_decode(q, kv, block_table, cache_seqlens, work_items, part_begin, split_begin, units,
        row_limits, o_accum!, lse_accum!, pipeline, row_tile, may_split, softmax_scale, causal,
        lse_factor, empty_lse) -> (out, lse)
    dense_decode_out(..., out!, lse!)
    fetch_dequant(content, rope?, scale?, where, cache_seqlens?, dtype, *, cu_seqlens?=None,
        seq_starts?=None, total?=None) -> (c_kv, k_rope)
    fetch_dequant_out(content, rope?, scale?, where, cache_seqlens?, c_kv!, k_rope!, *,
        cu_seqlens?=None, seq_starts?=None)
    merge_states(outs[], lses[], stacked, lse_factor) -> (out, lse)
    merge_states_out(outs[], lses[], stacked, lse_factor, out!, lse!)

and those of ``snapmla.byte_ops``, over caches of format ``fp8_ds_mla``.

``!`` is written. ``content`` and ``nope`` are the FP8 bytes as uint8, ``q_scale`` is (b, s_q, h) or
(b, s_q). ``decode`` takes ragged queries, and gives their results, as those of one sequence, (1,
total_q, h, ...); ``row_seqlens`` is flat, and ``s_q`` of ``plan_update`` then total_q. Where
content, RoPE and scale are views of one memory, operators take that memory
(``PagedKVCache.memory``): (block, None, None) for layout ``paged``, (rows, None, scale) for
``row640``. A cache of 16 bits is (kv, None, None) to ``append_kv`` and ``fetch_dequant``, and kv,
in pages of 128 tokens at most, to ``dense_decode``, whose sequences read KV head number modulo
num_kv_heads (``snapmla.kv_heads``). ``outs`` and ``lses`` are the parts, or with ``stacked`` one
tensor of them each; ``out!`` and ``lse!`` may be those of a part. The cache, ``plan`` and ``q`` are
pytrees of their tensors, so they may be arguments of compiled functions. Operators have no
gradients, and their results never require any: this is inference.
``check_tables`` says that the tables, without ``units``, are somebody else's memory: rows of a
sequence that they do not cover then become NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsl_kernels.dims import (
    HEAD_DIM_QK,
    ITEM_WORDS,
    KV_LORA_RANK,
    MERGE_CHECKED,
    QK_ROPE_HEAD_DIM,
)
from snapmla import (
    attention,
    byte_ops,
    checks,
    dispatch,
    ds_mla,
    fetch,
    launch,
    layouts,
    merge,
    quant,
)
from snapmla import records as scheduling
from snapmla import rope as rotary
from snapmla.cache import PagedKVCache
from snapmla.decode_plan import (
    FP8,
    STATIC,
    TENSORS,
    DecodePlan,
    PlanVariant,
    launch_plan,
    partial_rows,
)
from snapmla.quant import QuantizedQuery

NAMESPACE = "snapmla"
_DECODE_ARGUMENTS = (
    "Tensor q_nope, Tensor q_rope, Tensor q_scale, Tensor content, Tensor? rope, Tensor? scale, "
    "Tensor block_table, Tensor cache_seqlens, Tensor work_items, Tensor part_begin, "
    "Tensor split_begin, Tensor units, Tensor row_limits, Tensor(a!) o_accum, "
    "Tensor(b!) lse_accum, str pipeline, int row_tile, bool may_split, float softmax_scale, "
    "bool causal, float lse_factor, float empty_lse"
)
_DECODE_OPTIONS = "int p_terms=1, bool check_tables=False"
_DENSE_ARGUMENTS = (
    "Tensor q, Tensor kv, " + _DECODE_ARGUMENTS[_DECODE_ARGUMENTS.index("Tensor bl") :]
)
_FETCH_ARGUMENTS = (
    "Tensor content, Tensor? rope, Tensor? scale, Tensor where, Tensor? cache_seqlens"
)
_FETCH_CHUNKS = "Tensor? cu_seqlens=None, Tensor? seq_starts=None"
_ROTATED_QUERY = (
    "Tensor q_nope, Tensor q_rope, Tensor positions, Tensor cos_sin_cache, bool is_neox, "
    "str granularity"
)
FP8_PARTS, ROWS_PARTS = ("content", "rope", "scale"), ("kv",)  # of a cache as a pytree
TOLD = ("format", "scale_fmt")  # of a cache whose tensor does not tell them
_MERGE_ARGUMENTS = "Tensor[] outs, Tensor[] lses, bool stacked, float lse_factor"
SCHEMAS = (
    "append_kv(Tensor(a!) content, Tensor(b!)? rope, Tensor(c!)? scale, Tensor c_kv, "
    "Tensor k_rope, Tensor slot_mapping) -> ()",
    "rope_append_kv(Tensor(a!) content, Tensor(b!)? rope, Tensor(c!)? scale, Tensor c_kv, "
    "Tensor k_rope, Tensor slot_mapping, Tensor positions, Tensor cos_sin_cache, bool is_neox, "
    "Tensor? norm_weight, float norm_eps) -> ()",
    "quantize_q(Tensor q_nope, Tensor q_rope, str granularity) -> (Tensor, Tensor, Tensor)",
    "quantize_q_out(Tensor q_nope, Tensor q_rope, str granularity, Tensor(a!) nope, "
    "Tensor(b!) rope, Tensor(c!) scale) -> ()",
    f"rope_quantize_q({_ROTATED_QUERY}) -> (Tensor, Tensor, Tensor)",
    f"rope_quantize_q_out({_ROTATED_QUERY}, Tensor(a!) nope, Tensor(b!) rope, Tensor(c!) scale) "
    "-> ()",
    "plan_update(Tensor cache_seqlens, Tensor? cu_seqlens_q, Tensor? row_seqlens, "
    "Tensor(a!) work_items, Tensor(b!) part_begin, Tensor(c!) split_begin, "
    "Tensor(d!) planned_seqlens, Tensor(e!) units, Tensor(f!) unit_begin, Tensor(g!) row_limits, "
    "int max_tokens, int token_tile, int fixed_overhead, int split_tiles, int longest_item, "
    "int max_stretches, int tile_ns, int read_ns, int num_heads, int s_q, "
    "int unit_rows, bool causal) -> ()",
    "plan_to_records(Tensor work_items, Tensor part_begin, Tensor split_begin, Tensor(a!) records, "
    "Tensor(b!) num_splits) -> ()",
    "records_to_plan(Tensor records, Tensor cache_seqlens, Tensor(a!) tile_begin, "
    "Tensor(b!) work_items, Tensor(c!) part_begin, Tensor(d!) split_begin, "
    "Tensor(e!) planned_seqlens, int max_tokens, int token_tile, int rows, int num_kv_heads) -> ()",
    f"decode({_DECODE_ARGUMENTS}, ScalarType out_dtype, *, {_DECODE_OPTIONS}) -> (Tensor, Tensor)",
    f"decode_out({_DECODE_ARGUMENTS}, Tensor(c!) out, Tensor(d!) lse, *, {_DECODE_OPTIONS}) -> ()",
    f"dense_decode({_DENSE_ARGUMENTS}) -> (Tensor, Tensor)",
    f"dense_decode_out({_DENSE_ARGUMENTS}, Tensor(c!) out, Tensor(d!) lse) -> ()",
    f"fetch_dequant({_FETCH_ARGUMENTS}, ScalarType dtype, *, {_FETCH_CHUNKS}, "
    "SymInt? total=None) -> (Tensor, Tensor)",
    f"fetch_dequant_out({_FETCH_ARGUMENTS}, Tensor(a!) c_kv, Tensor(b!) k_rope, *, "
    f"{_FETCH_CHUNKS}) -> ()",
    f"merge_states({_MERGE_ARGUMENTS}) -> (Tensor, Tensor)",
    f"merge_states_out({_MERGE_ARGUMENTS}, Tensor(a!) out, Tensor(b!) lse) -> ()",
    *byte_ops.SCHEMAS,
)


# ------------------------------------------------------------------------------ on real tensors


def _append_kv(
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    c_kv: Tensor,
    k_rope: Tensor,
    slots: Tensor,
) -> None:
    if content.dtype in checks.ROWS:
        checks.cache_rows(content)
        kv = layouts.with_heads(content)
        quant.check_tokens(c_kv, k_rope, slots, kv.device, kv.shape[2])
        quant.launch_append((kv,), c_kv, k_rope, slots, checks.format_of(kv))
        return
    views = layouts.views_of(content, rope, scale)
    checks.tensor("content", views[0], (torch.uint8,), ("num_pages", "page_size", KV_LORA_RANK))
    quant.check_tokens(c_kv, k_rope, slots, content.device)
    quant.launch_append(views, c_kv, k_rope, slots)


def _rope_append_kv(
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    c_kv: Tensor,
    k_rope: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> None:
    views = layouts.views_of(content, rope, scale)
    checks.tensor("content", views[0], (torch.uint8,), ("num_pages", "page_size", KV_LORA_RANK))
    quant.check_tokens(c_kv, k_rope, slots, content.device)
    rotary.check_angles(c_kv.dtype, c_kv.shape[:1], positions, cos_sin_cache, content.device)
    rotary.check_weight(norm_weight, c_kv)
    rotation = (is_neox, norm_weight, rotary.check_eps(norm_eps))
    rotary.launch_append(views, c_kv, k_rope, slots, positions, cos_sin_cache, *rotation)


def _quantize_q(q_nope: Tensor, q_rope: Tensor, granularity: str) -> tuple[Tensor, Tensor, Tensor]:
    q = quant.quantize_now(q_nope, q_rope, granularity, None)
    return q.nope_u8, q.rope, q.scale


def _quantize_q_out(
    q_nope: Tensor, q_rope: Tensor, granularity: str, nope: Tensor, rope: Tensor, scale: Tensor
) -> None:
    out = QuantizedQuery(nope.view(checks.FP8), rope, scale)
    quant.quantize_now(q_nope, q_rope, granularity, out)


def _rope_quantize_q(*query: Any) -> tuple[Tensor, Tensor, Tensor]:
    given: Any = (*query, None)
    q = rotary.quantize_now(*given)
    return q.nope_u8, q.rope, q.scale


def _rope_quantize_q_out(*arguments: Any) -> None:
    *query, nope, rope, scale = arguments
    given: Any = (*query, QuantizedQuery(nope.view(checks.FP8), rope, scale))
    rotary.quantize_now(*given)


def _plan_update(
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None,
    row_seqlens: Tensor | None,
    work_items: Tensor,
    part_begin: Tensor,
    split_begin: Tensor,
    planned_seqlens: Tensor,
    units: Tensor,
    unit_begin: Tensor,
    row_limits: Tensor,
    *numbers: int,
) -> None:
    b, device = planned_seqlens.shape[0], work_items.device
    checks.lengths(cache_seqlens, b, device)
    for name, given, table in (("cu_seqlens_q", cu_seqlens_q, unit_begin),
                               ("row_seqlens", row_seqlens, row_limits)):  # fmt: skip
        if given is not None or table.shape[0]:
            checks.vector(name, given, tuple(table.shape), device)
    for name, value in zip(("token_tile", "num_heads", "unit_rows"), (numbers[1], *numbers[8::2])):
        checks.integer(name, value, 1)
    if b and numbers[9]:
        tables = (work_items, part_begin, split_begin, planned_seqlens, units, unit_begin)
        launch_plan(cache_seqlens, cu_seqlens_q, row_seqlens, *tables, row_limits, *numbers)


def _plan_to_records(*tables: Tensor) -> None:
    _, part_begin, split_begin, records, num_splits = tables
    for name, value, n in (("part_begin", part_begin, len(records) + 1),
                           ("num_splits", num_splits, len(split_begin))):  # fmt: skip
        checks.vector(name, value, (n,), records.device)
    if len(split_begin) > 1:
        scheduling.launch_records(*tables)


def _records_to_plan(
    records: Tensor,
    cache_seqlens: Tensor,
    tile_begin: Tensor,
    work_items: Tensor,
    part_begin: Tensor,
    split_begin: Tensor,
    planned_seqlens: Tensor,
    *numbers: int,
) -> None:
    b, device, heads = cache_seqlens.shape[0], work_items.device, numbers[-1]
    scheduling.check_records(records, device)
    checks.lengths(cache_seqlens, b, device)
    for name, value in zip(("token_tile", "rows", "num_kv_heads"), numbers[1:]):
        checks.integer(name, value, 1)
    for name, table, n in (
        ("tile_begin", tile_begin, b + 1),
        ("part_begin", part_begin, len(records) * heads + 1),
        ("split_begin", split_begin, b * heads + 1),
        ("planned_seqlens", planned_seqlens, b * heads),
    ):
        checks.vector(name, table, (n,), device)
    if b:
        tables = (tile_begin, work_items, part_begin, split_begin, planned_seqlens)
        scheduling.launch_plan_of(records, cache_seqlens, *tables, *numbers)


def _decode(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    *common, out_dtype = arguments
    out, lse = _decode_results(common[0], out_dtype)
    given: Any = (*common, out, lse)
    _decode_out(*given, **options)
    return out, lse


def _decode_out(
    q_nope: Tensor,
    q_rope: Tensor,
    q_scale: Tensor,
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    block_table: Tensor,
    cache_seqlens: Tensor,
    work_items: Tensor,
    part_begin: Tensor,
    split_begin: Tensor,
    units: Tensor,
    row_limits: Tensor,
    o_accum: Tensor,
    lse_accum: Tensor,
    pipeline: str,
    row_tile: int,
    may_split: bool,
    softmax_scale: float,
    causal: bool,
    lse_factor: float,
    empty_lse: float,
    out: Tensor,
    lse: Tensor,
    *,
    p_terms: int = 1,
    check_tables: bool = False,
) -> None:
    b_q, s_q, heads, _ = q_nope.shape
    b = cache_seqlens.shape[0] if units.shape[0] else b_q
    if b_q * s_q * b == 0:
        return
    _check_query(q_nope, q_rope)
    tables = (work_items, part_begin, split_begin, units, row_limits, o_accum, lse_accum)
    _check_tables(tables, "q_nope", q_nope, b, row_tile)
    checks.lengths(cache_seqlens, b, q_nope.device)
    views = layouts.views_of(content, rope, scale)
    checks.block_table(block_table, b, q_nope.device)
    checks.output("out", out, tuple(attention.OUT_NAMES), tuple(q_nope.shape), q_nope.device)
    checks.output("lse", lse, (torch.float32,), (b_q, heads, s_q), q_nope.device, align=4)
    attention.launch_decode(
        (q_nope, q_rope, quant.per_row(q_scale, q_nope.shape[:3])),
        views,
        block_table,
        cache_seqlens,
        PlanVariant.of(q_nope.device, pipeline, row_tile, views[0].shape[1], p_terms),
        tables,
        MERGE_CHECKED if check_tables and not units.shape[0] else int(may_split),
        (out, lse),
        (checks.softmax_scale(softmax_scale), int(causal), lse_factor, empty_lse),
    )


def _dense_decode(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = _decode_results(arguments[0], arguments[0].dtype)
    given: Any = (*arguments, out, lse)
    _dense_decode_out(*given)
    return out, lse


def _dense_decode_out(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    work_items: Tensor,
    part_begin: Tensor,
    split_begin: Tensor,
    units: Tensor,
    row_limits: Tensor,
    o_accum: Tensor,
    lse_accum: Tensor,
    pipeline: str,
    row_tile: int,
    may_split: bool,
    softmax_scale: float,
    causal: bool,
    lse_factor: float,
    empty_lse: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    b_q, s_q, heads, _ = q.shape
    b = cache_seqlens.shape[0] if units.shape[0] else b_q
    if b_q * s_q * b == 0:
        return
    checks.cache_rows(kv)
    kv = layouts.with_heads(kv)
    checks.page_size(kv.shape[1])
    checks.query_of_rows(q, kv.dtype, 1)
    if b % kv.shape[2]:
        checks.value_error("kv", f"a divisor of {b} sequences as KV heads", kv.shape[2])
    tables = (work_items, part_begin, split_begin, units, row_limits, o_accum, lse_accum)
    name = dispatch.cache_name(kv.dtype)
    _check_tables(tables, "q", q, b, row_tile, name)
    checks.lengths(cache_seqlens, b, q.device)
    checks.block_table(block_table, b, q.device)
    checks.output("out", out, (q.dtype,), (*q.shape[:3], KV_LORA_RANK), q.device)
    checks.output("lse", lse, (torch.float32,), (b_q, heads, s_q), q.device, align=4)
    attention.launch_decode(
        (q,),
        (kv,),
        block_table,
        cache_seqlens,
        PlanVariant.of(q.device, pipeline, row_tile, kv.shape[1], cache_dtype=name),
        tables,
        int(may_split),
        (out, lse),
        (checks.softmax_scale(softmax_scale), int(causal), lse_factor, empty_lse),
    )


def _check_query(q_nope: Tensor, q_rope: Tensor) -> None:
    """What ``QuantizedQuery`` checks where nobody traces; gaps would be misread silently."""
    rows, device = tuple(q_nope.shape[:3]), q_nope.device
    checks.query_rows(rows)
    parts = ((q_nope, torch.uint8, KV_LORA_RANK), (q_rope, torch.bfloat16, QK_ROPE_HEAD_DIM))
    for name, (value, dtype, width) in zip(("q_nope", "q_rope"), parts):
        checks.tensor(name, value, (dtype,), (*rows, width), device)
        checks.contiguous(name, value)


def _check_tables(
    tables: tuple[Tensor, ...],
    query: str,
    q: Tensor,
    b: int,
    row_tile: int,
    cache_dtype: str = FP8,
) -> None:
    """That a plan is for this many sequences, and has room for a row tile of partial results.

    Without ``units`` every sequence is one, and an item.  There is one part at least; what else the
    tables hold is the kernels' to survive.
    """
    work_items, part_begin, split_begin, units, row_limits, o_accum, lse_accum = tables
    b_q, s_q, heads, _ = q.shape
    unit_rows, count = -(-s_q * heads // row_tile) * row_tile, b
    if units.shape[0]:
        blocks = o_accum.shape[1] // row_tile if o_accum.ndim == 3 else 1
        unit_rows, count = max(blocks, 1) * row_tile, units.shape[0]
    hint = "the plan is for another batch, head count or s_q: make one with snapmla.plan_decode"
    for name, value, least, rest in (("work_items", work_items, b, (ITEM_WORDS,)),
                                     ("part_begin", part_begin, 2, ())):  # fmt: skip
        if value.ndim == 0 or value.shape[0] < least or value.shape[1:] != rest:
            wanted = f"shape ({', '.join(map(str, (f'at least {least}', *rest)))})"
            checks.value_error(name, wanted, tuple(value.shape), hint)
    limits = row_limits.shape[0] if row_limits.ndim else -1
    _, row_elements = partial_rows(cache_dtype)
    for name, value, shape in (
        ("split_begin", split_begin, (count + 1,)),
        ("units", units, (units.shape[0], 2)),
        ("row_limits", row_limits, (b_q * s_q if limits else 0,)),
        ("o_accum", o_accum, (o_accum.shape[0], unit_rows, row_elements)),
        ("lse_accum", lse_accum, (o_accum.shape[0], unit_rows)),
    ):
        if value.shape != shape:
            checks.value_error(name, f"shape {shape}", tuple(value.shape), hint)
    if b_q not in (1, b):
        checks.value_error(query, f"{b} sequences, or ragged ones as 1", b_q, hint)


def _cache_of(content: Tensor, rope: Tensor | None, scale: Tensor | None) -> PagedKVCache:
    """The cache over what ``PagedKVCache.memory`` is."""
    if content.dtype in checks.ROWS:
        return PagedKVCache.from_tensors(content)
    return PagedKVCache.from_tensors(*layouts.views_of(content, rope, scale))


def _fetch_dequant(
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    where: Tensor,
    cache_seqlens: Tensor | None,
    dtype: torch.dtype,
    **chunks: Any,
) -> tuple[Tensor, Tensor]:
    cache = _cache_of(content, rope, scale)
    return fetch.fetch_now(cache, fetch.Tokens(where, cache_seqlens, **chunks), None, dtype)


def _fetch_dequant_out(
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    where: Tensor,
    cache_seqlens: Tensor | None,
    c_kv: Tensor,
    k_rope: Tensor,
    **chunks: Any,
) -> None:
    cache = _cache_of(content, rope, scale)
    tokens = fetch.Tokens(where, cache_seqlens, **chunks)
    fetch.fetch_now(cache, tokens, (c_kv, k_rope), c_kv.dtype)


def _merge_states(
    outs: list[Tensor], lses: list[Tensor], stacked: bool, lse_factor: float
) -> tuple[Tensor, Tensor]:
    return merge.merge_now(merge.named(outs, lses, stacked), stacked, lse_factor, None, None)


def _merge_states_out(
    outs: list[Tensor],
    lses: list[Tensor],
    stacked: bool,
    lse_factor: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    merge.merge_now(merge.named(outs, lses, stacked), stacked, lse_factor, out, lse)


# ------------------------------------------------------------------------------ shapes alone


def _decode_results(q_nope: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    b, s_q, heads, _ = q_nope.shape
    out = q_nope.new_empty((b, s_q, heads, KV_LORA_RANK), dtype=out_dtype)
    return out, q_nope.new_empty((b, heads, s_q), dtype=torch.float32)


def _fake_quantize_q(
    q_nope: Tensor, q_rope: Tensor, granularity: str
) -> tuple[Tensor, Tensor, Tensor]:
    checks.choice("granularity", granularity, quant.GRANULARITIES)
    tokens = checks.query_tokens("q_nope", q_nope)
    checks.tensor("q_nope", q_nope, checks.FLOATS, (*tokens, "num_heads", KV_LORA_RANK))
    rope_shape: checks.Shape = (*tokens, "num_heads", QK_ROPE_HEAD_DIM)
    checks.tensor("q_rope", q_rope, (q_nope.dtype,), rope_shape)
    rows = q_nope.shape[:-1]
    scales = rows if granularity == "token_head" else rows[:-1]
    return (
        q_nope.new_empty(q_nope.shape, dtype=torch.uint8),
        q_nope.new_empty(q_rope.shape, dtype=torch.bfloat16),
        q_nope.new_empty(scales, dtype=torch.float32),
    )


def _fake_rope_quantize_q(*query: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_quantize_q(query[0], query[1], query[-1])


def _fake_decode(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    q_nope, block_table = arguments[0], arguments[6]
    content, _, _ = layouts.views_of(*arguments[3:6])
    checks.tensor("q_nope", q_nope, (torch.uint8,), ("b", "s_q", "num_heads", KV_LORA_RANK))
    checks.tensor("content", content, (torch.uint8,), ("num_pages", "page_size", KV_LORA_RANK))
    checks.tensor("block_table", block_table, (torch.int32,), ("b", "width"))
    return _decode_results(q_nope, arguments[-1])


def _fake_dense_decode(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, kv, block_table = arguments[:3]
    checks.tensor("q", q, checks.ROWS, ("b", "s_q", "num_heads", HEAD_DIM_QK))
    checks.tensor(
        "kv",
        layouts.with_heads(kv),
        (q.dtype,),
        ("num_pages", "page_size", "num_kv_heads", HEAD_DIM_QK),
    )
    checks.tensor("block_table", block_table, (torch.int32,), ("b", "width"))
    return _decode_results(q, q.dtype)


def _fake_fetch_dequant(
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    where: Tensor,
    cache_seqlens: Tensor | None,
    dtype: torch.dtype,
    **chunks: Any,
) -> tuple[Tensor, Tensor]:
    tokens = fetch.Tokens(where, cache_seqlens, **chunks)
    if content.dtype in checks.ROWS:
        pages = layouts.with_heads(content)
        heads = pages.shape[2]
    else:
        pages, heads = layouts.views_of(content, rope, scale)[0], 1
    rows = fetch.rows(tokens, pages.shape[1], heads, given=False)
    return (
        content.new_empty((*rows, KV_LORA_RANK), dtype=dtype),
        content.new_empty((*rows, QK_ROPE_HEAD_DIM), dtype=dtype),
    )


def _fake_merge_states(
    outs: list[Tensor], lses: list[Tensor], stacked: bool, lse_factor: float
) -> tuple[Tensor, Tensor]:
    shape, lse_shape = merge.check_parts(merge.named(outs, lses, stacked), stacked)
    return outs[0].new_empty(shape), lses[0].new_empty(lse_shape)


def _fake_nothing(*_: Any, **__: Any) -> None:
    return None


# ------------------------------------------------------------------------------ registration

_REAL: dict[str, Callable[..., Any]] = {
    "append_kv": _append_kv,
    "rope_append_kv": _rope_append_kv,
    "quantize_q": _quantize_q,
    "quantize_q_out": _quantize_q_out,
    "rope_quantize_q": _rope_quantize_q,
    "rope_quantize_q_out": _rope_quantize_q_out,
    "plan_update": _plan_update,
    "plan_to_records": _plan_to_records,
    "records_to_plan": _records_to_plan,
    "decode": _decode,
    "decode_out": _decode_out,
    "dense_decode": _dense_decode,
    "dense_decode_out": _dense_decode_out,
    "fetch_dequant": _fetch_dequant,
    "fetch_dequant_out": _fetch_dequant_out,
    "merge_states": _merge_states,
    "merge_states_out": _merge_states_out,
    **byte_ops.REAL,
}
_FAKE: dict[str, Callable[..., Any]] = {
    "quantize_q": _fake_quantize_q,
    "rope_quantize_q": _fake_rope_quantize_q,
    "decode": _fake_decode,
    "dense_decode": _fake_dense_decode,
    "fetch_dequant": _fake_fetch_dequant,
    "merge_states": _fake_merge_states,
    **byte_ops.FAKE,
}


# What runs above an operator that has gradients.  The others are for inference: they fall through,
# and their results never require grad, as those of eager calls.
_AUTOGRAD: dict[str, Callable[..., Any]] = {}


def define(
    library: torch.library.Library,
    schema: str,
    real: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
) -> None:
    """Defines one operator.

    Args:
        real: on tensors with memory. fake: on shapes alone.
        autograd: what runs above ``real`` where gradients may be wanted, such as ``apply`` of a
            ``torch.autograd.Function``; None for inference.
    """
    name = schema.split("(")[0]
    # tensors must arrive with the strides that the caller gave them
    library.define(schema, tags=(torch.Tag.needs_exact_strides,))
    for key in ("CUDA", "CPU"):
        library.impl(name, real, key)
    library.impl(name, autograd or torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)


def _register() -> torch.library.Library:
    """Defines all operators; the library must stay alive as long as they are used."""
    library = torch.library.Library(NAMESPACE, "DEF")
    for schema in SCHEMAS:
        name = schema.split("(")[0]
        define(library, schema, _REAL[name], _FAKE.get(name, _fake_nothing), _AUTOGRAD.get(name))
    return library


# ------------------------------------------------------------------------------ pytrees


def _children(value: Any) -> tuple[str, ...]:
    """Names of the tensors that make up a value."""
    if isinstance(value, PagedKVCache):
        return FP8_PARTS if value.__dict__.get("kv") is None else ROWS_PARTS
    return TENSORS if isinstance(value, DecodePlan) else ("nope", "rope", "scale")


def _flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
    names = _children(value)
    static = STATIC if isinstance(value, DecodePlan) else ()
    if isinstance(value, PagedKVCache) and value.__dict__.get("format") == ds_mla.FORMAT:
        static = TOLD
    return [getattr(value, n) for n in names], tuple(getattr(value, n) for n in static)


def _unflatten(cls: type, leaves: Any, static: tuple[Any, ...]) -> Any:
    """Puts a value together again; leaves may be stand-ins of tensors."""
    leaves = list(leaves)
    if cls is DecodePlan:
        return DecodePlan(**dict(zip(TENSORS, leaves)), **dict(zip(STATIC, static)))
    names: tuple[str, ...] = ("nope", "rope", "scale")
    if cls is PagedKVCache:
        names = FP8_PARTS if len(leaves) == len(FP8_PARTS) else ROWS_PARTS
    fields: dict[str, Any] = dict(zip(names, leaves))
    told: dict[str, Any] = dict(zip(TOLD, static))
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return PagedKVCache.from_tensors(*leaves, **told) if names is ROWS_PARTS else cls(**fields)
    value: Any = object.__new__(cls)
    for name, leaf in (fields | told).items():
        object.__setattr__(value, name, leaf)
    return value


def _register_pytrees() -> None:
    def register(cls: type) -> None:
        pytree.register_pytree_node(
            cls,
            _flatten,
            lambda leaves, static: _unflatten(cls, leaves, static),
            serialized_type_name=f"snapmla.{cls.__name__}",
            # JSON has no tuples: a loaded program would compare its list with a call's tuple
            to_dumpable_context=json.dumps,
            from_dumpable_context=lambda text: tuple(json.loads(text)),
            flatten_with_keys_fn=lambda value: (
                [(pytree.GetAttrKey(n), getattr(value, n)) for n in _children(value)],
                _flatten(value)[1],
            ),
        )

    for cls in (PagedKVCache, QuantizedQuery, DecodePlan):
        register(cls)
    # a saved program holds its example inputs, and torch loads what is known as mere data
    torch.serialization.add_safe_globals(
        [PagedKVCache, QuantizedQuery, DecodePlan, *launch.PICKLED_WITH]
    )


_library = _register()
_register_pytrees()

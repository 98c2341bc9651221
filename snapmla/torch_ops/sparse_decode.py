"""``sparse_decode``, ``sparse_decode_rows``, ``sparse_decode_bf16``: attention to named tokens of
an FP8 cache, of caches of bytes, of a BF16 cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM, TOKEN_TILE
from dsl_kernels.formats.ds_mla import NAME as FORMAT
from dsl_kernels.formats.format import Format
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache import byte_cache, layouts, quant
from snapmla.cache.paged import PagedKVCache
from snapmla.dense import FP8
from snapmla.dense.witness import compared
from snapmla.rank import PIPELINES
from snapmla.runtime import launch
from snapmla.sparse import rows
from snapmla.sparse.lists import check_reach
from snapmla.sparse.plan import SparsePlan, variant_of
from snapmla.sparse.query import QueryPair, arguments, check_pair
from snapmla.sparse.rows_plan import STATIC, TENSORS, SparseRowsPlan
from snapmla.torch_ops import pytrees
from snapmla.torch_ops.decode import check_query
from snapmla.torch_ops.decode_arguments import WITNESS, check_tables_of, new_results, witness_of
from snapmla.torch_ops.operator import Operator
from snapmla.torch_ops.plan import register_plan

_LISTS = (
    "Tensor indices, Tensor topk_length, Tensor? attn_sink, Tensor work_items, Tensor part_begin, "
    "Tensor split_begin, Tensor units, Tensor row_limits, Tensor(a!) o_accum, "
    "Tensor(b!) lse_accum, str pipeline, int row_tile, bool may_split, float softmax_scale, "
    "float lse_factor, float empty_lse"
)
_PLANES = (
    "Tensor q_nope, Tensor q_rope, Tensor q_scale, Tensor content, Tensor? rope, Tensor? scale, "
)
_ROWS = "Tensor q, Tensor kv, "
_PIECES = (
    "Tensor indices, Tensor? topk_length, Tensor? attn_sink, Tensor split_begin, Tensor units, "
    "Tensor(a!) lengths, Tensor(b!) o_accum, Tensor(c!) lse_accum, int topk, int width, "
    "int row_tile, float softmax_scale, float lse_factor, float empty_lse"
)
_BF16_OUT = "Tensor(d!) out, Tensor(e!) lse"
_OUT = "Tensor(c!) out, Tensor(d!) lse"
_OPTIONS = f"int p_terms=1, {WITNESS}"
_Q_ROPE = "Tensor? q_rope=None"
_ROW_OPTIONS = f"str cache_dtype='{FORMAT}', {WITNESS}, {_Q_ROPE}"


def _planes(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    *common, out_dtype = arguments
    out, lse = new_results(common[0], out_dtype)
    given: Any = (*common, out, lse)
    _planes_out(*given, **options)
    return out, lse


def _planes_out(
    q_nope: Tensor,
    q_rope: Tensor,
    q_scale: Tensor,
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    *rest: Any,
    p_terms: int = 1,
    **witness: Any,
) -> None:
    check_query(q_nope, q_rope)
    query = q_nope, q_rope, quant.per_row(q_scale, q_nope.shape[:3])
    _launch(query, layouts.views_of(content, rope, scale), FP8, p_terms, *rest, **witness)


def _rows(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    *common, out_dtype = arguments
    out, lse = new_results(common[0], out_dtype)
    given: Any = (*common, out, lse)
    _rows_out(*given, **options)
    return out, lse


def _record(cache_dtype: str) -> Format:
    """Looks up the format of bytes that sparse decode reads."""
    known = tuple(name for name in PIPELINES if FORMATS[name].named)
    checks.choice("cache_dtype", cache_dtype, known)
    return FORMATS[cache_dtype]


def _rows_out(
    q: Tensor,
    kv: Tensor,
    *rest: Any,
    cache_dtype: str = FORMAT,
    q_rope: Tensor | None = None,
    **witness: Any,
) -> None:
    record = _record(cache_dtype)
    checks.tensor("kv", kv, (torch.uint8,), ("num_pages", "page_size", 1, record.token_bytes))
    query = q if q_rope is None else QueryPair(q, q_rope)
    if isinstance(query, QueryPair):
        check_pair(query, record)
    else:
        checks.query_rows(tuple(q.shape[:3]))
        shape = ("b", "s_q", "num_heads", record.channels)
        checks.tensor("q", q, (torch.bfloat16,), shape, kv.device)
        checks.contiguous("q", q)
    if len(record.planes) > 1 or record.two_lists:  # whose kernels ask no strides of tokens
        byte_cache.check(record, kv)
    tensors, strides = arguments(query, ragged=False)
    _launch(tensors, (kv.squeeze(2),), cache_dtype, 1, *rest, strides=strides, **witness)


def _launch(
    query: tuple[Tensor, ...],
    cache: tuple[Tensor, ...],
    fmt: str,
    p_terms: int,
    indices: Tensor,
    topk_length: Tensor,
    attn_sink: Tensor | None,
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
    lse_factor: float,
    empty_lse: float,
    out: Tensor,
    lse: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    row_seqlens: Tensor | None = None,
    strides: tuple[int, ...] = (),
) -> None:
    """Checks what is common to both, and launches the kernel of a format."""
    q = query[0]
    b_q, s_q, heads, _ = q.shape
    b, device = topk_length.shape[0], q.device
    if b_q * s_q * b == 0:
        return
    tables = (work_items, part_begin, split_begin, units, row_limits, o_accum, lse_accum)
    check_tables_of(tables, "q", q, b, row_tile, fmt, rows=heads)
    indices = _lists(indices, b_q, s_q)
    checks.tensor("indices", indices, (torch.int32,), (b_q, s_q, "topk"), device)
    checks.vector("topk_length", topk_length, (b,), device)
    sink = out.new_empty(0, dtype=torch.float32) if attn_sink is None else attn_sink
    names = ("content", "rope", "scale") if len(cache) == 3 else ("kv",)
    check_reach(dict(zip(names, cache)))
    if attn_sink is not None:
        checks.tensor("attn_sink", attn_sink, (torch.float32,), (heads,), device)
        checks.contiguous("attn_sink", attn_sink)
    variant = variant_of(device, pipeline, row_tile, p_terms, fmt)
    shape = (b_q, s_q, heads, KV_LORA_RANK)
    checks.output("out", out, variant.out_dtypes, shape, device)
    checks.output("lse", lse, (torch.float32,), (b_q, heads, s_q), device, align=4)
    second: tuple[Tensor, ...] = ()
    if FORMATS[fmt].two_lists:  # of no entries
        second = *cache, indices[..., :0], topk_length
    own: tuple[Any, ...] = (*tables[:-2], launch.nothing(device))
    witness = witness_of(cu_seqlens_q, row_seqlens, row_limits, b)
    if witness is not None:
        own = compared(own, witness)
    variant.kernel(out.dtype)(
        *query, *cache, indices, topk_length, *second, sink, *own, out, lse, *tables[-2:],
        checks.softmax_scale(softmax_scale), lse_factor, empty_lse, int(may_split),
        int(witness is not None), *strides,
    )  # fmt: skip


def _lists(indices: Tensor, b_q: int, s_q: int) -> Tensor:
    """(b_q, s_q, topk) of that or of (b_q * s_q, topk)."""
    return indices.unflatten(0, (b_q, s_q)) if indices.ndim == 2 else indices


def _fake_planes(*arguments: Any, **_options: Any) -> tuple[Tensor, Tensor]:
    q_nope, indices = arguments[0], arguments[6]
    content = layouts.views_of(*arguments[3:6])[0]
    checks.tensor("q_nope", q_nope, (torch.uint8,), ("b", "s_q", "num_heads", KV_LORA_RANK))
    checks.tensor("content", content, (torch.uint8,), ("num_pages", "page_size", KV_LORA_RANK))
    _check_lists(indices)
    return new_results(q_nope, arguments[-1])


def _check_lists(indices: Tensor) -> None:
    shape = ("tokens", "topk") if indices.ndim == 2 else ("b", "s_q", "topk")
    checks.tensor("indices", indices, (torch.int32,), shape)


def _fake_rows(
    *given: Any, cache_dtype: str = FORMAT, q_rope: Tensor | None = None, **_witness: Any
) -> tuple[Tensor, Tensor]:
    q, _, indices = given[:3]
    channels = _record(cache_dtype).channels - (0 if q_rope is None else QK_ROPE_HEAD_DIM)
    checks.tensor("q", q, (torch.bfloat16,), ("b", "s_q", "num_heads", channels))
    if q_rope is not None:
        shape = (*q.shape[:3], QK_ROPE_HEAD_DIM)
        checks.tensor("q_rope", q_rope, (torch.bfloat16,), shape)
    _check_lists(indices)
    return new_results(q, given[-1])


def _bf16(*given: Any, q_rope: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return rows.launch_now(_call_of_rows(q_rope, *given))


def _bf16_out(*given: Any, q_rope: Tensor | None = None) -> None:
    rows.launch_now(_call_of_rows(q_rope, *given))


def _call_of_rows(
    q_rope: Tensor | None,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    split_begin: Tensor,
    units: Tensor,
    lengths: Tensor,
    o_accum: Tensor,
    lse_accum: Tensor,
    topk: int,
    width: int,
    row_tile: int,
    softmax_scale: float,
    lse_factor: float,
    empty_lse: float,
    *results: Tensor,
) -> rows.Call:
    """The call, whose plan is what its tables and numbers are of."""
    b, s_q, heads, _ = _check_bf16(q, q_rope)
    checks.integer("width", width, TOKEN_TILE)
    if width % TOKEN_TILE:
        checks.value_error("width", f"a multiple of {TOKEN_TILE}", width)
    plan = SparseRowsPlan(
        split_begin, units, lengths, o_accum, lse_accum, b, s_q, heads, topk, -(-topk // width),
        width, row_tile,
    )  # fmt: skip
    base = "2" if lse_factor == 1.0 else "e"
    options = softmax_scale, base, "+inf" if empty_lse > 0 else "-inf"
    out, lse = results or (None, None)
    cache = PagedKVCache.from_tensors(kv)
    query = q if q_rope is None else QueryPair(q, q_rope)
    return rows.Call(
        query, cache, indices, topk_length, attn_sink, plan, out, lse, options, torch.bfloat16
    )


def _check_bf16(q: Tensor, q_rope: Tensor | None) -> Any:
    """(b, s_q, num_heads, channels) of a query that is checked."""
    channels = HEAD_DIM_QK if q_rope is None else KV_LORA_RANK
    checks.tensor("q", q, (torch.bfloat16,), ("b", "s_q", "num_heads", channels))
    if q_rope is not None:
        shape = (*q.shape[:3], QK_ROPE_HEAD_DIM)
        checks.tensor("q_rope", q_rope, (torch.bfloat16,), shape)
    return q.shape


def _fake_bf16(*arguments: Any, q_rope: Tensor | None = None) -> tuple[Tensor, Tensor]:
    q, kv, indices = arguments[:3]
    _check_bf16(q, q_rope)
    checks.tensor("kv", kv, (torch.bfloat16,), ("num_pages", "page_size", 1, HEAD_DIM_QK))
    checks.tensor("indices", indices, (torch.int32,), (*q.shape[:2], "topk"))
    return new_results(q, torch.bfloat16)


def _register_rows_plan() -> None:
    """``SparseRowsPlan`` as a pytree of its tables."""
    pytrees.register(
        SparseRowsPlan,
        lambda _: TENSORS,
        lambda leaves, static: pytrees.put_together(
            SparseRowsPlan, dict(zip(TENSORS, leaves)) | dict(zip(STATIC, static))
        ),
        STATIC,
    )


OPERATORS = (
    Operator(
        f"sparse_decode({_PLANES}{_LISTS}, ScalarType out_dtype, *, {_OPTIONS})"
        " -> (Tensor, Tensor)",
        _planes,
        _fake_planes,
    ),
    Operator(f"sparse_decode_out({_PLANES}{_LISTS}, {_OUT}, *, {_OPTIONS}) -> ()", _planes_out),
    Operator(
        f"sparse_decode_rows({_ROWS}{_LISTS}, ScalarType out_dtype, *, {_ROW_OPTIONS})"
        " -> (Tensor, Tensor)",
        _rows,
        _fake_rows,
    ),
    Operator(
        f"sparse_decode_rows_out({_ROWS}{_LISTS}, {_OUT}, *, {_ROW_OPTIONS}) -> ()", _rows_out
    ),
    Operator(
        f"sparse_decode_bf16({_ROWS}{_PIECES}, *, {_Q_ROPE}) -> (Tensor, Tensor)",
        _bf16,
        _fake_bf16,
    ),
    Operator(
        f"sparse_decode_bf16_out({_ROWS}{_PIECES}, {_BF16_OUT}, *, {_Q_ROPE}) -> ()", _bf16_out
    ),
)

register_plan(SparsePlan)
_register_rows_plan()

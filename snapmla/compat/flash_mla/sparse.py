"""``flash_mla_with_kvcache`` with ``indices``: sparse decode over DeepSeek-V3.2's rows and V4's
pages, told apart by the width of the cache's last dimension, as in FlashMLA; over the formats of
528 bytes a token, which no width tells apart and ``kv_format`` names; and with
``is_fp8_kvcache=False`` over BF16 rows.

What a call wants of a step is its shape, and ``topk_length`` where that is given.  So a
``FlashMLASchedMeta`` keeps the plan of its first call, and plans anew when that is captured.
Records of the caller, which are for dense decode, are not read: their calls share one plan a shape
and stream, that cuts every query token alike.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dsl_kernels.formats import ds_mla, nope, v4
from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK
from dsl_kernels.formats.format import Format
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache import byte_cache
from snapmla.cache.paged import PagedKVCache
from snapmla.call import tracing
from snapmla.compat.flash_mla.config import Config, check_config
from snapmla.dense import new_workspace
from snapmla.dense.plan_decode import StepShape, make_plan
from snapmla.runtime import launch
from snapmla.sparse import two_lists
from snapmla.sparse.decode import sparse_decode
from snapmla.sparse.plan import SparseOptions, SparsePlan, plan_sparse_decode
from snapmla.sparse.rows_plan import ROWS, SparseRowsPlan, plan_rows
from snapmla.sparse.two_lists import Second

if TYPE_CHECKING:
    from snapmla.compat.flash_mla import FlashMLASchedMeta

Tensor = torch.Tensor
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # with CUDA
KEPT = 64  # plans without lengths that no graph holds
_RECORDS = {record.token_bytes: record for record in (ds_mla.FORMAT, v4.FORMAT)}
_V41 = "V41 has two byte orders: 'fp8_v41_planar', and since 2e5429f 'fp8_v41_rows'"
# Of rows of other widths, what to say of them: beside is_fp8_kvcache=True, and False.
_OTHER_ROWS = {
    nope.FORMAT.token_bytes: "three formats have 528 bytes a token: kv_format= names one",
    HEAD_DIM_QK: "rows of bfloat16 want is_fp8_kvcache=False",
}
_BYTES = {width: f"bytes of {width} want is_fp8_kvcache=True" for width in _RECORDS}
_NAMES = {
    "plan": "tile_scheduler_metadata", "content": "k_cache", "cache": "k_cache",
    "cache.kv": "k_cache", "batch": "q, b", "num_heads": "q, num_heads_q", "s_q": "q, s_q",
    "topk": "indices, topk", "extra_cache": "extra_k_cache", "extra_cache.kv": "extra_k_cache",
    "extra_indices": "extra_indices_in_kvcache", "extra_length": "extra_topk_length",
}  # fmt: skip


class Call(NamedTuple):
    """Arguments of ``flash_mla_with_kvcache`` that sparse decode looks at."""

    q: Tensor
    k_cache: Tensor
    head_dim_v: int
    metadata: FlashMLASchedMeta | Tensor | None
    softmax_scale: float | None
    causal: bool
    is_fp8_kvcache: bool
    indices: Tensor
    topk_length: Tensor | None
    attn_sink: Tensor | None
    out: Tensor | None
    lse: Tensor | None
    kv_format: str | None = None

    @property
    def width(self) -> int:
        """Last extent of the cache; 0 if it is no tensor, or has no dimensions."""
        k = self.k_cache
        return k.shape[-1] if isinstance(k, torch.Tensor) and k.ndim else 0

    @property
    def record(self) -> Format:
        """Format of a cache of bytes: the one that ``kv_format`` names.

        If it names none, V4's for rows of V4's width, else that of rows of 656 bytes; checks refuse
        other widths then.
        """
        if self.kv_format is not None:
            return _named()[self.kv_format]
        return _RECORDS.get(self.width, ds_mla.FORMAT)

    @property
    def cache_dtype(self) -> str:
        """Name of the cache's format."""
        return self.record.name if self.is_fp8_kvcache else ROWS

    @property
    def channels(self) -> int:
        """Channels of a query."""
        return self.record.channels if self.is_fp8_kvcache else HEAD_DIM_QK


def run(call: Call, second: tuple[object, ...]) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call with ``indices``.

    Args:
        second: ``extra_k_cache`` and the two arguments that go with it.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    try:
        _check_format(call)
        cache = _cache_of(call)
        extra = _second(call, *second)
        q = call.q if call.q.is_contiguous() else call.q.contiguous()
        scale = call.softmax_scale
        return sparse_decode(
            q, cache, call.indices,
            softmax_scale=call.channels**-0.5 if scale is None else scale,
            topk_length=call.topk_length, attn_sink=call.attn_sink, plan=_plan(call, q, extra),
            out=call.out, lse=call.lse, empty_lse="+inf", extra=extra,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, _NAMES) from None


def _named() -> dict[str, Format]:
    """Records by ``kv_format``: our names, and those of FlashMLA's copy in SGLang, whose V41 is two
    formats."""
    ours = {name: record for name, record in FORMATS.items() if record.named and record.sparse}
    return {**ours, "V32": ds_mla.FORMAT, "V32_NO_ROPE": nope.FORMAT, "V4": v4.FORMAT}


def _second(call: Call, k_cache: Any, indices: Any, length: Any) -> Second | None:
    """The second list, over V4's or V4.1's pages of any size."""
    if k_cache is indices is length is None:
        return None
    record = call.record
    if call.cache_dtype not in two_lists.TAKEN:
        rows = f"{record.token_bytes} bytes" if call.is_fp8_kvcache else "bfloat16"
        hint = f"a second cache goes with V4's pages of {v4.FORMAT.token_bytes} bytes a token"
        given = "extra_indices_in_kvcache" if k_cache is None else "extra_k_cache"
        checks.value_error(given, f"None beside rows of {rows}", "a tensor", hint)
    for name, value in (("extra_k_cache", k_cache), ("extra_indices_in_kvcache", indices)):
        if value is None:
            checks.value_error(name, "a tensor, as its fellow is given", None)
    shape = ("num_pages", "page_size", 1, record.token_bytes)
    checks.tensor("extra_k_cache", k_cache, byte_cache.BYTES, shape, call.q.device)
    return Second(PagedKVCache.from_tensors(k_cache, format=record.name), indices, length)


def _check_format(call: Call) -> None:
    """Checks ``kv_format``."""
    if call.kv_format is None:
        return
    if call.kv_format == "V41":
        checks.value_error("kv_format", "a name of one format", "'V41'", _V41)
    checks.choice("kv_format", call.kv_format, tuple(_named()))
    if not call.is_fp8_kvcache:
        checks.value_error("kv_format", "None with is_fp8_kvcache=False", call.kv_format)


def _cache_of(call: Call) -> PagedKVCache:
    """The cache as the primary API knows it; checks what is FlashMLA's alone."""
    q, k_cache, record, width = call.q, call.k_cache, call.record, call.width
    checks.integer("head_dim_v", call.head_dim_v, KV_LORA_RANK, KV_LORA_RANK)
    if call.causal:
        hint = "the indices say what a query token sees"
        checks.value_error("causal", "False beside indices", call.causal, hint)
    checks.not_nested("q", q)
    checks.flag("is_fp8_kvcache", call.is_fp8_kvcache)
    last, hints = HEAD_DIM_QK, _BYTES
    if call.is_fp8_kvcache:
        last, hints = record.token_bytes, _OTHER_ROWS
    shape = ("num_pages", "page_size", 1, last)
    if width in hints and width != last:
        wanted = f"shape {checks.shape_text(shape)}"
        checks.value_error("k_cache", wanted, tuple(k_cache.shape), hints[width])
    if call.is_fp8_kvcache and call.kv_format is not None and width not in (0, last):
        wanted = f"shape {checks.shape_text(shape)}, of kv_format={call.kv_format!r}"
        hint = checks.named_by_width(width).replace("format=", "kv_format=")
        checks.value_error("k_cache", wanted, tuple(k_cache.shape), hint)
    said = checks.query_of(record) if call.is_fp8_kvcache else ""
    shape_of_q = ("b", "s_q", "num_heads_q", call.channels)
    checks.tensor("q", q, (torch.bfloat16,), shape_of_q, advice=said)
    _check_lists(call)
    if not call.is_fp8_kvcache:
        checks.tensor("k_cache", k_cache, (torch.bfloat16,), shape, q.device)
        return PagedKVCache.from_tensors(k_cache)
    checks.tensor("k_cache", k_cache, byte_cache.BYTES, shape)
    return PagedKVCache.from_tensors(k_cache, format=record.name)


def _check_lists(call: Call) -> None:
    q = call.q
    checks.tensor("indices", call.indices, (torch.int32,), (*q.shape[:2], "topk"), q.device)
    if call.topk_length is not None:
        checks.vector("topk_length", call.topk_length, (q.shape[0],), q.device)


# ---------------------------------------------------------------------------- plans


class Shape(NamedTuple):
    """Key of a plan that needs no lengths: calls of one key share the plan."""

    stream: int
    device: torch.device
    b: int
    s_q: int
    heads: int
    topk: int
    cache_dtype: str
    extra_topk: int = 0


Plan = SparsePlan | SparseRowsPlan
_kept: dict[Shape, Plan] = {}  # the longest unused first
_pinned: dict[Shape, Plan] = {}  # what graphs hold
# by stream, and the dtype of partial rows
_workspaces: dict[tuple[int, torch.device, str], tuple[Tensor, Tensor]] = {}
_lock = threading.Lock()


def _plan(call: Call, q: Tensor, extra: Second | None) -> Plan | None:
    """The object's, or that of calls of this shape; None of calls that have no rows."""
    indices = call.indices
    if not q.shape[0] or not indices.shape[-1]:
        return None  # decode says what is wrong, or returns nothing
    if extra is not None:
        two_lists.check(_cache_of(call), indices, extra, tuple(q.shape[:3]), q.device)
    if tracing.wanted(q, indices, call.k_cache):
        return _made(call, q, extra)
    metadata = call.metadata
    if isinstance(metadata, Tensor) or metadata is None:
        return _of_shape(_shape(call, q, extra))
    if metadata.tile_scheduler_metadata is not None:
        return _of_shape(_shape(call, q, extra))
    return _of_object(metadata, call, q, extra)


def _shape(call: Call, q: Tensor, extra: Second | None) -> Shape:
    b, s_q, heads, _ = q.shape
    index = q.device.index
    stream = 0 if index is None else int(_raw_stream(index))
    more = 0 if extra is None else extra.indices.shape[-1]
    return Shape(stream, q.device, b, s_q, heads, call.indices.shape[-1], call.cache_dtype, more)


def _of_object(metadata: FlashMLASchedMeta, call: Call, q: Tensor, extra: Second | None) -> Plan:
    """The plan of an object's step: its first call makes it, others must be like that one."""
    shape = _shape(call, q, extra)
    if not metadata.have_initialized or metadata.config is None:
        metadata._plans.clear()
        metadata.memo.forget()
    plan = metadata._plans.get(shape)
    if plan is None:
        page_size = call.k_cache.shape[1]
        config = Config(
            shape.b, shape.s_q, shape.heads, page_size, 1, False, torch.bfloat16,
            bool(call.is_fp8_kvcache), shape.topk,
            None if extra is None else extra.cache.page_size, shape.extra_topk or None,
        )  # fmt: skip
        if metadata._plans and metadata.config is not None:
            check_config(metadata.config, config)
        plan = _made(call, q, extra)
        metadata.have_initialized, metadata.config = True, config
        metadata._plans[shape] = plan
    assert isinstance(plan, SparsePlan | SparseRowsPlan)
    return plan


def _made(call: Call, q: Tensor, extra: Second | None) -> Plan:
    """A plan of its own, for the lengths of a call."""
    b, s_q, heads, _ = q.shape
    topk, lengths = call.indices.shape[-1], call.topk_length
    if extra is not None:
        topk, lengths = two_lists.as_one(call.indices, extra)
    return plan_sparse_decode(
        heads, s_q, topk=topk, topk_length=lengths, batch=b, device=q.device,
        cache_dtype=call.cache_dtype,
    )  # fmt: skip


def _of_shape(shape: Shape) -> Plan:
    """A plan without lengths, kept for others of this shape and stream.

    What is captured takes one that was made before, which then stays, or makes its own.
    """
    capturing = shape.device.type == "cuda" and launch.capturing(shape.device)
    with _lock:
        plan = _pinned.get(shape) or _kept.pop(shape, None)
        if plan is None:
            plan = _new(shape, own=capturing)
            if capturing:
                return plan
        (_pinned if capturing else _kept)[shape] = plan
        while len(_kept) > KEPT:
            del _kept[next(iter(_kept))]
        return plan


def _new(shape: Shape, own: bool) -> Plan:
    """A plan without lengths.

    Args:
        own: whether its workspace is its own, else the stream's.
    """
    if shape.cache_dtype == ROWS:
        return plan_rows(
            shape.heads, shape.s_q, topk=shape.topk, batch=shape.b, device=shape.device,
            partials=None if own else functools.partial(_partials, shape),
        )  # fmt: skip
    topk = shape.topk
    if shape.extra_topk:
        topk = two_lists.whole_tiles(topk) + shape.extra_topk
    lengths = torch.full((shape.b,), topk, dtype=torch.int32, device=shape.device)
    options = SparseOptions(num_heads=shape.heads, format=shape.cache_dtype)
    step = StepShape(shape.s_q, topk, None, full=True)
    workspace = new_workspace if own else functools.partial(_workspace, shape)
    made = make_plan(options, workspace, lengths, step, None, None, made=SparsePlan)
    assert isinstance(made, SparsePlan)
    return made


def _partials(shape: Shape, slots: int, heads: int) -> tuple[Tensor, Tensor]:
    """float32 rows of the stream's workspace."""
    like = torch.empty(0, device=shape.device)
    return _workspace(shape, like, slots, heads, "f16")  # whose partial rows are float32


def _workspace(
    shape: Shape, like: Tensor, slots: int, unit_rows: int, cache_dtype: str
) -> tuple[Tensor, Tensor]:
    """(o_accum, lse_accum) of so many slots, in the stream's workspace.

    The workspace grows if it is too small; older plans keep the memory that they have.
    """
    key, rows = (shape.stream, shape.device, cache_dtype), slots * unit_rows
    there = _workspaces.get(key)
    if there is None or there[1].shape[0] < rows:
        o_accum, lse_accum = new_workspace(like, rows, 1, cache_dtype)
        there = _workspaces[key] = o_accum.flatten(0, 1), lse_accum.flatten()
    o_accum, lse_accum = there
    return (
        o_accum[:rows].view(slots, unit_rows, o_accum.shape[-1]),
        lse_accum[:rows].view(slots, unit_rows),
    )

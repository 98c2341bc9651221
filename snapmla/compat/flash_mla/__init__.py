"""FlashMLA's host names over this package's kernels: replace ``import flash_mla`` by
``from snapmla import flash_mla``.

Decode over a BF16 or fp16 cache, or with ``indices`` over the bytes of DeepSeek-V3.2, V4, V4.1, in
the call forms of all of FlashMLA's versions and of the copies in vLLM and SGLang; sparse prefill
(``snapmla.sparse``), forward only, and dense prefill of separate heads (``snapmla.mha``), with
gradients.

The metadata of decode may be

* a ``FlashMLASchedMeta``, from ``get_mla_metadata``, which the first call plans and the layers
  behind it reuse, or whose field ``tile_scheduler_metadata`` the caller has assigned;
* two int32 tensors, (num_sm_parts, 8) and (b + 1,), from ``get_mla_metadata_tensors``; or copies,
  slices and hand-written tables of that width (vLLM's one part of everything).

Tensors are taken for where each part begins, and for the lengths of the very call: records that are
stale, cut off or wrong cost balance, never a result, and nothing behind a sequence's end is read
for them.  ``num_splits`` is not read.  That costs a small launch a call; an object costs none.

Defaults are FlashMLA's: ``softmax_scale`` 576**-0.5, natural LSE, a row that sees no token gives
out 0 and LSE +inf.  Differences on purpose: a NaN in what a row reads gives NaN (FlashMLA: LSE
+inf); pages of 16, 32, 128 and any multiple of 64 tokens work; ``out=`` and ``lse=`` save the
allocations; what is not built is refused by name.

Under ``torch.compile`` decode and its metadata break the graph; other tracers see operators.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeGuard, cast

import torch

from dsl_kernels.formats.dims import HEAD_DIM_QK
from snapmla import api, checks, dense
from snapmla.cache.paged import PagedKVCache
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.checks import overlap
from snapmla.compat import metadata_pair, sched_meta
from snapmla.compat.flash_mla import sparse
from snapmla.compat.flash_mla.checking import checked_cache
from snapmla.compat.flash_mla.config import Config, check_config
from snapmla.compat.flash_mla.meta import (
    FlashMLASchedMeta,
    get_mla_metadata,
    get_mla_metadata_tensors,
)
from snapmla.compat.flash_mla.mha import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from snapmla.compat.flash_mla.sparse_prefill import flash_mla_sparse_fwd
from snapmla.compat.flash_mla.unbuilt import refuse
from snapmla.dense import decode
from snapmla.dense.plan_decode import plan_decode

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "get_mla_metadata_tensors",
]

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # with CUDA
SCALE = HEAD_DIM_QK**-0.5
NATURAL, EMPTY = "e", "+inf"  # base of the LSE; its value for a row that sees no token


class ObjectPlan(dense.DecodePlan):
    """A plan of a ``FlashMLASchedMeta``."""

    _STALE = ("tile_scheduler_metadata", "make another object by get_mla_metadata()")

    @classmethod
    def of(cls, plan: dense.DecodePlan) -> ObjectPlan:
        """The same plan."""
        return cls(**{field.name: getattr(plan, field.name) for field in fields(plan)})


Metadata = FlashMLASchedMeta | Tensor


class Checked(NamedTuple):
    """Results of a call's checks.

    Attributes:
        cache: the cache as the primary API knows it.
        plan: the plan to decode with.
        reader: fills the plan before the decode; None if the plan is the metadata's own.
    """

    cache: PagedKVCache
    plan: dense.DecodePlan
    reader: sched_meta.Reader | None


class Call(NamedTuple):
    """A call of ``flash_mla_with_kvcache``."""

    q: Tensor
    k_cache: Tensor
    table: Tensor
    lengths: Tensor
    metadata: Metadata
    out: Tensor | None
    lse: Tensor | None
    options: decode.Options
    head_dim_v: int
    num_splits: Tensor | None
    checked: Checked | None


Given = tuple[Any, ...]  # a call whose values need no names yet: making those takes 0.2 us


@dataclass(frozen=True, slots=True, eq=False)  # quicker to read than a NamedTuple
class Ready:
    """Launch state of a checked call, kept for calls like it."""

    plan: dense.DecodePlan
    reader: sched_meta.Reader | None
    prepared: decode.Prepared

    @property
    def place(self) -> int:
        """Place of the plan, which is no part of a call."""
        return self.plan.place


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Metadata,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    out: Tensor | None = None,
    *,
    lse: Tensor | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    kv_format: str | None = None,
) -> tuple[Tensor, Tensor]:
    """MLA decode over a paged cache (``snapmla.decode``): dense over 16 bits, or with ``indices``
    sparse over DeepSeek-V3.2's rows of 656 bytes, V4's pages of 584 bytes a token, V4.1's and
    NoPE's of 528 or rows of bfloat16.

    Args:
        q: bfloat16 or float16 (b, s_q, num_heads_q, 576); a copy is made unless contiguous.  Over
            V4's pages and formats of 528 bytes (b, s_q, num_heads_q, 512).
        k_cache: bfloat16 or float16 as q (num_pages, page_size, num_heads_k, 576), innermost stride
            1; query heads j * g to (j + 1) * g - 1 read KV head j, g = num_heads_q / num_heads_k.
            With ``indices`` uint8, int8 or float8_e4m3fn (num_pages, page_size, 1, 656), any page
            size of 1 or more and any stride between pages; or V4's (num_pages, page_size, 1, 584),
            whose pages have two planes and lie a multiple of 16 bytes apart (docs/formats.md); or
            (num_pages, page_size, 1, 528) of the format that ``kv_format`` names; or with
            ``is_fp8_kvcache=False``, which FlashMLA refuses, bfloat16 rows of 576, one KV head,
            pages that follow one another.
        block_table: int32 (b, width), pages of each sequence; past its end anything.  Beside
            ``indices`` it is not looked at, nor ``cache_seqlens``: None, empty or uninitialised.
        cache_seqlens: int32 (b,), tokens of each sequence, the new ones included; 0 is fine.
        head_dim_v: 512.
        tile_scheduler_metadata: of ``get_mla_metadata`` or ``get_mla_metadata_tensors``, or int32
            (num_sm_parts, 8) of any origin, 1024 parts at most.
        num_splits: int32 or None; not read.
        softmax_scale: factor of the logits; None is 576**-0.5, which DeepSeek's models do not want,
            and 512**-0.5 where queries have 512 channels.
        causal: query token s of s_q sees the first length - (s_q - 1 - s) tokens.
        is_fp8_kvcache: with ``indices`` whether ``k_cache`` has bytes; False
            without: FlashMLA's dense FP8 cache is not built.
        indices: int32 (b, s_q, topk): the tokens that each query token sees, as page * page_size +
            offset; what is negative or behind the pool is no token.  None: dense.
        attn_sink: with ``indices``: float32 (num_heads_q,), logits that weigh in ``out`` alone.
        extra_k_cache: beside V4's or V4.1's pages a second cache of such, uint8, int8 or
            float8_e4m3fn as ``k_cache`` (num_pages, page_size, 1, 584 or 528), pages of its own
            size; None: there is none.
        extra_indices_in_kvcache: int32 (b, s_q, extra_topk), what each query token sees of it:
            attention is over the union; beside ``extra_k_cache``.
        topk_length: with ``indices``: int32 (b,), how many entries of each row count.
        extra_topk_length: int32 (b,), how many entries of each row of the second list count.
        out: bfloat16 or float16 as q (b, s_q, num_heads_q, 512), contiguous; None allocates.
        lse: float32 (b, num_heads_q, s_q), contiguous; None allocates.
        descale_q, descale_k: None; float32 (1,) of FP8 caches with one scale, not built yet.
        kv_format: with ``indices`` over bytes: the format of ``k_cache``, as ``PagedKVCache`` names
            it, or V32, V4, V32_NO_ROPE (FlashMLA's copy in SGLang; its V41 is two formats,
            fp8_v41_planar and fp8_v41_rows).  None: 656 bytes are fp8_ds_mla, 584 fp8_v4, and 528
            are refused, since three formats have them.

    Returns:
        (out, lse): natural logarithm; out 0 and LSE +inf of a row that sees no token.

    Raises:
        TypeError, ValueError: naming the argument; a ``FlashMLASchedMeta`` is for another call.
        VariantError: no compiled kernel fits and none can be compiled.

    Source: FlashMLA, ``flash_mla_with_kvcache``; the kernel is ``snapmla.decode``'s.
    """
    if indices is not None:
        if tracing.by_dynamo():
            return tracing.between_graphs(
                flash_mla_with_kvcache, q, k_cache, block_table, cache_seqlens, head_dim_v,
                tile_scheduler_metadata, num_splits, softmax_scale, causal, is_fp8_kvcache, indices,
                attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length,
                out, lse=lse, descale_q=descale_q, descale_k=descale_k, kv_format=kv_format,
            )  # fmt: skip
        second = extra_k_cache, extra_indices_in_kvcache, extra_topk_length
        refuse(descale_q=descale_q, descale_k=descale_k)
        return sparse.run(
            sparse.Call(
                q, k_cache, head_dim_v, tile_scheduler_metadata, softmax_scale, causal,
                is_fp8_kvcache, indices, topk_length, attn_sink, out, lse, kv_format,
            ),
            second,
        )  # fmt: skip
    if is_fp8_kvcache or not (
        attn_sink is extra_k_cache is extra_indices_in_kvcache is topk_length
        is extra_topk_length is descale_q is descale_k is kv_format is None
    ):  # fmt: skip
        refuse(
            is_fp8_kvcache=is_fp8_kvcache, attn_sink=attn_sink,
            extra_k_cache=extra_k_cache, extra_indices_in_kvcache=extra_indices_in_kvcache,
            topk_length=topk_length, extra_topk_length=extra_topk_length, descale_q=descale_q,
            descale_k=descale_k, kv_format=kv_format,
        )  # fmt: skip
    metadata = tile_scheduler_metadata
    call = (
        q, k_cache, block_table, cache_seqlens, metadata, out, lse,
        (SCALE if softmax_scale is None else softmax_scale, causal, NATURAL, EMPTY), head_dim_v,
        num_splits, None,
    )  # fmt: skip
    # as ``_plans_itself``: calling it takes 0.1 us
    if isinstance(metadata, FlashMLASchedMeta) and metadata.tile_scheduler_metadata is None:
        return calls.run(_DECODE, metadata, call)
    return calls.run(_DECODE, _DECODE, call)


def _parts(call: Given) -> calls.Parts | None:
    """Tensors, options and addresses by which a call is known; None if it cannot be.

    If the metadata are a ``FlashMLASchedMeta``, the stream is one of the options.  If they are a
    table of records, the stream and the thread are, as a reader belongs to both.
    """
    q, k_cache, table, lengths, metadata, out, lse, options, head_dim_v, num_splits, _ = call
    by: object
    tensors: tuple[Any, ...] = q, k_cache, table, lengths
    if isinstance(metadata, FlashMLASchedMeta) and metadata.tile_scheduler_metadata is None:
        if not metadata.have_initialized or metadata.config is None:
            return None
        index = q.get_device()
        by = 0 if index < 0 else _raw_stream(index)
        begin = 0
    else:
        given = _records_of(metadata)
        stream, begin = metadata_pair.stream_of(given.device), given.data_ptr()
        if stream is None:  # captured: the tables are the graph's
            return None
        by, tensors = (stream, threading.get_ident()), (*tensors, given)
    where = None  # nothing is written that was given, and the plan is ours
    if out is not None or lse is not None:
        where = (
            out is None or out.data_ptr(), lse is None or lse.data_ptr(), q.data_ptr(),
            k_cache.data_ptr(), table.data_ptr(), lengths.data_ptr(), begin,
        )  # fmt: skip
        if out is None or lse is None:
            tensors = (*tensors, lse if out is None else out)
        else:
            tensors = (*tensors, out, lse)
    if num_splits is not None:
        tensors = (*tensors, num_splits)
    return (
        tensors,
        (
            options, options[0].__class__, options[1].__class__, head_dim_v, head_dim_v.__class__,
            by, out is None, lse is None, num_splits is None,
        ),
        where,
    )  # fmt: skip


def _places(call: Given, ready: Ready) -> calls.Groups | None:
    q, k_cache, table, lengths, _, out, lse, *_ = call
    if not ready.plan.stays:
        return None
    results = ((overlap.span(t),) for t in (out, lse) if t is not None)
    read = map(overlap.span, (q, k_cache, table, lengths))
    return *results, (*read, *ready.plan.spans)


def _launch(call: Given, ready: Ready | None) -> tuple[Pair, Ready | None]:
    q, k_cache, table, lengths, metadata, out, lse, options, _, _, found = call
    if ready is not None:
        if ready.reader is not None:
            ready.reader.read(_records_of(metadata), lengths)
        return decode.run_prepared(
            ready.prepared, (q,), (k_cache,), table, lengths, out, lse
        ), ready  # fmt: skip
    assert found is not None  # or it is ready
    if found.reader is not None:
        found.reader.read(_records_of(metadata), lengths)
    primary = (q, found.cache, table, lengths, found.plan, out, lse, options, None, None, None)
    made, prepared = decode.launch_checked(primary, None)
    if not isinstance(prepared, decode.Prepared):
        return made, None
    return made, Ready(found.plan, found.reader, prepared)


def _plans_itself(metadata: object) -> TypeGuard[FlashMLASchedMeta]:
    """True if it is an object without records of the caller's."""
    return isinstance(metadata, FlashMLASchedMeta) and metadata.tile_scheduler_metadata is None


def _records_of(metadata: Metadata) -> Tensor:
    """The records of what does not plan itself."""
    given = (
        metadata.tile_scheduler_metadata if isinstance(metadata, FlashMLASchedMeta) else metadata
    )
    return cast(Tensor, given)


def _key(call: Call) -> tuple[object, ...]:
    """Key of the plan of a ``FlashMLASchedMeta`` that a call takes."""
    q, k_cache, table = call.q, call.k_cache, call.table
    causal = bool(call.options[1]) and q.shape[1] > 1
    return q.shape, q.dtype, k_cache.shape[1:3], causal, table.shape, _stream(q.device)


def _stream(device: torch.device) -> int:
    """Handle of the current stream."""
    index = device.index
    return 0 if index is None else int(_raw_stream(index))


def _shape(call: Call) -> sched_meta.Shape:
    """Extents and dtype of a call, for which a plan of records is made."""
    q, k_cache, table, *_ = call
    b, s_q, heads, _ = q.shape
    name = dense.NAMES[q.dtype]
    _, page_size, kv_heads, _ = k_cache.shape
    return sched_meta.Shape(b, heads, s_q, page_size, table.shape[1], name, kv_heads)


_NAMES = {
    "plan": "tile_scheduler_metadata", "content": "k_cache", "rope": "k_cache",
    "cache": "k_cache", "cache.kv": "k_cache", "num_heads": "q, num_heads_q", "s_q": "q, s_q",
    "page_size": "k_cache, page_size", "num_kv_heads": "k_cache, num_heads_k",
    "max_pages": "block_table, width",
    **{f"plan.{name}": "tile_scheduler_metadata" for name in dense.TENSORS},
}  # fmt: skip


def _traced(given: Given) -> Pair:
    """The same call through the primary API, where it is an operator."""
    if tracing.by_dynamo():
        q, k_cache, table, lengths, metadata, out, lse, options, head_dim_v, num_splits, _ = given
        return tracing.between_graphs(
            flash_mla_with_kvcache, q, k_cache, table, lengths, head_dim_v, metadata, num_splits,
            options[0], options[1], out=out, lse=lse,
        )  # fmt: skip
    q, _, table, lengths, _, out, lse, (scale, causal, base, empty), *_ = call = _dense(given)
    try:
        cache = checked_cache(call)
        return api.decode(
            q, cache, table, lengths, softmax_scale=scale,
            plan=_traced_plan(call, cache) if q.shape[0] else None, causal=bool(causal), out=out,
            lse=lse, lse_base=base, empty_lse=empty,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, _NAMES) from None


def _check(given: Given) -> Call:
    """The call with its plan, which an object's first call makes, and what reads its records."""
    q, _, table, lengths, metadata, out, lse, options, *_ = call = _dense(given)
    plan, reader = None, None
    try:
        cache = checked_cache(call)
        if q.shape[0]:
            if _plans_itself(metadata):
                plan = _plan_of(metadata, call, cache)
            else:
                table_of = _records_of(metadata)
                sched_meta.check_records(table_of, q.device)
                reader = sched_meta.kept_reader(table_of, _shape(call))
                plan = reader.plan
        plan = decode.checked(
            q, cache, table, lengths, plan, out, lse, None, None, causal=bool(options[1])
        )
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, _NAMES) from None
    return call._replace(checked=Checked(cache, plan, reader))


def _dense(given: Given) -> Call:
    """The call, its query without gaps: copied once."""
    call = Call(*given)
    checks.not_nested("q", call.q)
    if not isinstance(call.q, torch.Tensor) or call.q.is_contiguous():
        return call
    return call._replace(q=call.q.contiguous())


_DECODE = calls.Op("flash_mla_with_kvcache", _check, _launch, _traced, _parts, _places)


def _traced_plan(call: Call, cache: PagedKVCache) -> dense.DecodePlan:
    """The plan of a call that is recorded: not one to keep, its memory is the tracer's."""
    q, _, _, lengths, metadata, *_ = call
    traced = tracing.wanted(q, cache, lengths, metadata)
    if _plans_itself(metadata):
        return _made(call) if traced else _plan_of(metadata, call, cache)
    given = _records_of(metadata)
    sched_meta.check_records(given, q.device)
    shape = _shape(call).known()
    reader = sched_meta.make_reader(given, int(given.shape[0]), shape, None)
    return reader.traced(given, lengths)


def _plan_of(metadata: FlashMLASchedMeta, call: Call, cache: PagedKVCache) -> dense.DecodePlan:
    """The object's plan; the first call makes it, others must be like that one."""
    q, table = call.q, call.table
    if not metadata._planned():
        metadata._plans.clear()
        metadata.memo.forget()
    key = _key(call)
    plan = metadata._plans.get(key)
    if plan is not None:
        return plan
    b, s_q, heads, _ = q.shape
    causal = bool(key[3])
    config = Config(b, s_q, heads, cache.page_size, cache.num_kv_heads, causal, q.dtype)
    if metadata._plans and metadata.config is not None:
        check_config(metadata.config, config)
    width = table.shape[1]
    # tables that were made for another width may have been cut there
    like = next((p for p in metadata._plans.values() if p.max_pages == width), None)
    if like is not None:
        slots, unit_rows = like.lse_accum.shape
        o_accum, lse_accum = dense.new_workspace(table, slots, unit_rows, like.cache_dtype)
        plan = replace(like, o_accum=o_accum, lse_accum=lse_accum)
    else:
        plan = ObjectPlan.of(_made(call))
        metadata.have_initialized, metadata.config = True, config
    metadata._plans[key] = plan
    return plan


def _made(call: Call) -> dense.DecodePlan:
    """A plan for the lengths of a checked call."""
    q, table, lengths, causal = call.q, call.table, call.lengths, call.options[1]
    shape = _shape(call).known()
    return plan_decode(
        lengths, shape.num_heads, shape.s_q, page_size=shape.page_size, max_pages=table.shape[1],
        causal=bool(causal) and shape.s_q > 1, format=q.dtype,
        num_kv_heads=shape.num_kv_heads,
    )  # fmt: skip

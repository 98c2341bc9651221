"""SnapMLA's host names over this package's kernels: replace ``import flash_mla_fp8`` by
``from snapmla import flash_mla_fp8``.

Names, argument order and results are those that SnapMLA's host framework (SGLang-FluentLLM) calls;
the bits of results are those of the primary API.  What the originals cost per call is gone: queries
and keys may be strided views, ``indices`` may be int32 or int64 for the append, workspaces are kept
per stream, and ``out=`` avoids the last allocations.

The metadata pair is two int32 tensors, as engines expect:

* ``tile_scheduler_metadata`` (num_sm_parts, width): the work list.  Its shape depends on the number
  of query rows and on ``max_batch``, never on the batch, so ``static.copy_(fresh)`` works for every
  batch; better still is ``get_mla_metadata(..., out=(static, num_splits))``, one launch in place.
* ``num_splits`` (b + 1,): slots of partial results, cumulative; a slice of a longer tensor will do.

A pair is made for the lengths that are decoded; shapes cannot tell, ``SNAPMLA_CHECK_PLAN`` does.
Without it every row is right or NaN.  Query rows come from the call, so a pair made for another
number of them costs balance only.  Of a larger batch's pair the first sequences are right.  Rows of
a sequence that the pair does not cover (a smaller batch's, one for fewer tiles of 64 tokens, halves
of two pairs) become NaN in ``out`` and ``lse``.

Both may be captured: replaying a graph reads whatever the pair holds by then.  Under
``torch.compile`` metadata and decode break the graph (``snapmla.decode`` does not); the three
quantisation functions are operators.  Other tracers (``make_fx``, FakeTensors, dispatch modes) see
all five as operators.

Differences on purpose: a row that sees no token gives out 0 and lse +inf (FlashMLA's convention;
``empty_lse=`` changes it), scales have a floor (docs/formats.md), page sizes 16 to 128 work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla import api, checks
from snapmla.cache import fetch, quant
from snapmla.cache.paged import PagedKVCache, expect_cache
from snapmla.cache.quant import QuantizedQuery
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.checks import overlap
from snapmla.compat.metadata_pair import (
    MAX_BATCH,
    Pair,
    check_pair,
    kept_plan,
    make_plan,
    pair_of,
    planned_pair,
    stream_of,
)
from snapmla.dense import DecodePlan, decode

__all__ = [
    "dequantize_ckv_fused_indexed",
    "flash_mla_ckv_fp8_per_token",
    "get_mla_metadata",
    "quantize_and_cache_k",
    "quantize_ckv_per_token_head",
]

_FLAT_PAGES = (128, 64, 32, 16)  # any page size addresses a flat pool


class Checked(NamedTuple):
    """Query, cache and plan of a call as the primary API knows them."""

    q: QuantizedQuery
    cache: PagedKVCache
    plan: DecodePlan


class Call(NamedTuple):
    """A call of ``flash_mla_ckv_fp8_per_token``."""

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    q_scale: torch.Tensor
    lora: torch.Tensor
    rope: torch.Tensor
    k_scale: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    metadata: torch.Tensor
    num_splits: torch.Tensor
    out: torch.Tensor | None
    lse: torch.Tensor | None
    options: decode.Options
    head_dim_v: int
    checked: Checked | None = None


class Ready(NamedTuple):
    """The pair's plan and the launch state of a checked call, kept for calls like it.

    The plan holds the tables and the workspace that launches use.
    """

    plan: DecodePlan
    prepared: decode.Prepared

    @property
    def place(self) -> int:
        """Place of the plan."""
        return self.plan.place


def get_mla_metadata(
    cache_seqlens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    *,
    max_batch: int = MAX_BATCH,
    out: Pair | None = None,
) -> Pair:
    """Plans one decode step: who computes what, for all layers.  One launch, no synchronisation.

    Args:
        cache_seqlens: int32 (b,), tokens per sequence, the new ones included.
        num_heads_per_head_k: query rows of a sequence, s_q * num_heads.
        num_heads_k: 1; MLA shares one latent among all heads.
        max_batch: sequences the metadata tensor has room for; the same for all pairs that are
            copied onto one another.
        out: a pair to write into instead of allocating, int32 (num_sm_parts, width) and (b + 1,);
            memory apart from each other and from ``cache_seqlens``.

    Returns:
        (tile_scheduler_metadata int32 (num_sm_parts, width), num_splits int32 (b + 1,)).

    Raises:
        TypeError, ValueError: naming the argument.
        VariantError: no decode kernel exists for the device.

    Source: FlashMLA's metadata pair, as SnapMLA's host code keeps it; the schedule is ours
    (``snapmla.testing.reference_plan``).
    """
    if tracing.by_dynamo():
        return tracing.between_graphs(
            get_mla_metadata, cache_seqlens, num_heads_per_head_k, num_heads_k,
            max_batch=max_batch, out=out,
        )  # fmt: skip
    checks.lengths(cache_seqlens, "b")
    hint = "s_q * num_heads of one sequence"
    rows = checks.integer("num_heads_per_head_k", num_heads_per_head_k, 1, checks.MAX_ROWS, hint)
    checks.integer("num_heads_k", num_heads_k, 1, 1, "MLA shares one latent among all heads")
    checks.integer("max_batch", max_batch, 1)
    return planned_pair(cache_seqlens, rows, max_batch, out)


_DECODE_NAMES = {
    "plan": "tile_scheduler_metadata",
    "plan.work_items": "tile_scheduler_metadata", "plan.part_begin": "tile_scheduler_metadata",
    "plan.planned_seqlens": "tile_scheduler_metadata", "plan.split_begin": "num_splits",
    "cache.content": "k_cache_lora", "cache.rope": "k_cache_rope", "cache.scale": "k_scale",
    "q": "q_nope", "q.nope": "q_nope", "q.rope": "q_rope", "q.scale": "q_scale",
    "cache": "k_cache_lora", "content": "k_cache_lora", "rope": "k_cache_rope", "scale": "k_scale",
    "num_heads": "q_nope, num_heads", "s_q": "q_nope, s_q", "page_size": "k_cache_lora, page_size",
}  # fmt: skip


def flash_mla_ckv_fp8_per_token(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_cache_lora: torch.Tensor,
    k_cache_rope: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: str = "+inf",
) -> Pair:
    """MLA attention of quantised queries over the paged FP8 cache (``snapmla.decode``).

    Args:
        q_nope: float8_e4m3fn (b, s_q, h, 512), contiguous.
        q_rope: bfloat16 (b, s_q, h, 64), contiguous, divided by the scale.
        q_scale: float32 (b, s_q, h, 1) or (b, s_q, h); all three from
            ``quantize_ckv_per_token_head``.
        k_cache_lora: float8_e4m3fn or uint8 (pages, page_size, 1, 512).
        k_cache_rope: bfloat16 (pages, page_size, 1, 64), divided by the token's scale.
        k_scale: float32 (pages, page_size, 1, 1).
        block_table: int32 (b, width), pages of each sequence.
        cache_seqlens: int32 (b,), tokens of each sequence, the new ones included.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: from ``get_mla_metadata`` for these lengths; rows of a
            sequence that they do not cover become NaN.
        softmax_scale: factor of the logits; None is 576**-0.5, which DeepSeek's models do not want.
        causal: query token s of s_q sees the first length - (s_q - 1 - s) tokens.
        out: bfloat16 or float32 (b, s_q, h, 512); None allocates.
        lse: float32 (b, h, s_q); None allocates.
        empty_lse: LSE of a row that sees no token, ``+inf`` or ``-inf``.

    Returns:
        (out, lse): bfloat16 (b, s_q, h, 512), float32 (b, h, s_q) with the natural logarithm.

    Raises:
        TypeError, ValueError: naming the argument.
        VariantError: no compiled kernel fits and none can be compiled.

    Source: SnapMLA paper, Algorithm 1 (function); the pipeline is the dispatcher's choice.
    """
    if tracing.by_dynamo():
        return tracing.between_graphs(
            flash_mla_ckv_fp8_per_token, q_nope, q_rope, k_cache_lora, k_cache_rope, q_scale,
            k_scale, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
            softmax_scale, causal, out=out, lse=lse, empty_lse=empty_lse,
        )  # fmt: skip
    scale = HEAD_DIM_QK**-0.5 if softmax_scale is None else softmax_scale
    call = Call(
        q_nope, q_rope, q_scale, k_cache_lora, k_cache_rope, k_scale, block_table, cache_seqlens,
        tile_scheduler_metadata, num_splits, out, lse, (scale, causal, "e", empty_lse), head_dim_v,
    )  # fmt: skip
    return calls.run(_DECODE, _DECODE, call)


def _decode_parts(call: Call) -> calls.Parts | None:
    """Tensors, options and addresses by which a call is known; None if it cannot be.

    The stream of the pair's workspace and the pair's addresses are among the options.
    """
    *tensors, out, lse, (scale, causal, _, empty), head_dim_v, _ = call
    metadata, num_splits = call.metadata, call.num_splits
    stream = stream_of(metadata.device)
    if stream is None or call.q_scale.ndim != 4:  # captured: its workspace is the graph's
        return None
    options = (
        scale.__class__, scale, causal.__class__, causal, empty, head_dim_v.__class__, head_dim_v,
        stream, metadata.data_ptr(), num_splits.data_ptr(), out is None, lse is None,
    )  # fmt: skip
    if out is lse is None:
        return tuple(tensors), options, None
    tensors += [result for result in (out, lse) if result is not None]
    return tuple(tensors), options, tuple([tensor.data_ptr() for tensor in tensors])


def _decode_places(call: Call, ready: Ready) -> calls.Groups | None:
    results = ((overlap.span(t),) for t in (call.out, call.lse) if t is not None)
    return *results, (*map(overlap.span, call[:8]), *ready.plan.spans)


def _launch_decode(call: Call, ready: Ready | None) -> tuple[Pair, Ready | None]:
    table, lengths, out, lse = call.block_table, call.cache_seqlens, call.out, call.lse
    if ready is None:
        assert call.checked is not None  # or it is ready
        q, cache, plan = call.checked
        primary = (q, cache, table, lengths, plan, out, lse, call.options, None, None, None)
        made, prepared = decode.launch_checked(primary, None)
        return made, Ready(plan, prepared) if isinstance(prepared, decode.Prepared) else None
    lora, (pages, page_size, _, _) = call.lora, call.k_scale.shape
    query = call.q_nope.view(torch.uint8), call.q_rope, call.q_scale.squeeze(3)
    pool = (
        (lora if lora.dtype is torch.uint8 else lora.view(torch.uint8)).squeeze(2),
        call.rope.squeeze(2), call.k_scale.view(pages, page_size),
    )  # fmt: skip
    return decode.run_prepared(ready.prepared, query, pool, table, lengths, out, lse), ready


def _traced_decode(call: Call) -> Pair:
    """The same call through the primary API, where it is an operator."""
    scale, causal, lse_base, empty_lse = call.options
    causal = bool(checks.flag("causal", causal))
    try:
        q, cache, plan = _primary(call)
        return api.decode(
            q, cache, call.block_table, call.cache_seqlens, softmax_scale=scale, plan=plan,
            causal=causal, out=call.out, lse=call.lse, lse_base=lse_base, empty_lse=empty_lse,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, _DECODE_NAMES) from None


def _check_decode(call: Call) -> Call:
    """The call with what the primary API knows of it."""
    causal = bool(checks.flag("causal", call.options[1]))
    try:
        q, cache, plan = _primary(call)
        plan = decode.checked(
            q, cache, call.block_table, call.cache_seqlens, plan, call.out, call.lse, None, None,
            causal=causal,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, _DECODE_NAMES) from None
    return call._replace(checked=Checked(q, cache, plan))


_DECODE = calls.Op(
    "flash_mla_ckv_fp8_per_token", _check_decode, _launch_decode, _traced_decode, _decode_parts,
    _decode_places,
)  # fmt: skip


def _primary(call: Call) -> tuple[QuantizedQuery, PagedKVCache, DecodePlan | None]:
    """Query, cache and plan (None for an empty batch) as the primary API knows them."""
    q_nope, q_rope, q_scale, lora, rope, k_scale, block_table, *_ = call
    pair = call.metadata, call.num_splits
    checks.integer("head_dim_v", call.head_dim_v, KV_LORA_RANK, KV_LORA_RANK)
    if isinstance(q_nope, torch.Tensor) and q_nope.ndim == 3:
        hint = "ragged queries are for snapmla.decode"
        wanted = "shape (b, s_q, num_heads, 512)"
        checks.value_error("q_nope", wanted, tuple(q_nope.shape), hint)
    _four_d("k_cache_lora", lora, KV_LORA_RANK)
    _four_d("k_cache_rope", rope, QK_ROPE_HEAD_DIM)
    _four_d("k_scale", k_scale, 1)
    if isinstance(q_scale, torch.Tensor):
        checks.not_nested("q_scale", q_scale)
        checks.held("q_scale", q_scale)
        if q_scale.ndim == 4:
            q_scale = q_scale[..., 0] if q_scale.shape[3] == 1 else q_scale
        elif q_scale.ndim != 3:
            wanted = "shape (b, s_q, num_heads, 1)"
            checks.value_error("q_scale", wanted, tuple(q_scale.shape))
    q = QuantizedQuery(q_nope, q_rope, q_scale)
    cache = PagedKVCache.from_tensors(lora[:, :, 0], rope[:, :, 0], k_scale[:, :, 0, 0])
    batch, s_q, heads, _ = q.nope.shape
    check_pair(*pair, batch, q.device)
    checks.block_table(block_table, batch, q.device)
    if not batch:
        return q, cache, None
    shape = (batch, heads, s_q, cache.page_size, block_table.shape[1])
    if tracing.wanted(*pair):  # not one to keep: its memory is the tracer's
        return q, cache, make_plan(*pair, *shape, None)
    return q, cache, kept_plan(*pair, *shape)


def _another_format(shape: tuple[int, ...]) -> str:
    """Formats with tokens of this width, and the calls that read them; empty: none."""
    said = checks.named_by_width(shape[-1]) if shape else ""
    return f"{said}: make a PagedKVCache of it for snapmla.decode" if said else ""


def _four_d(name: str, value: object, last: int) -> None:
    """Checks (pages, page_size, 1, last)."""
    if not isinstance(value, torch.Tensor):
        checks.type_error(name, "a torch.Tensor", type(value).__name__)
    checks.not_nested(name, value)
    shape = tuple(value.shape)
    if len(shape) != 4 or shape[2:] != (1, last):
        hint = _another_format(shape) or f"pass pool.view(-1, page_size, 1, {last})"
        checks.value_error(name, f"shape (pages, page_size, 1, {last})", shape, hint)
    checks.held(name, value)  # before views are made


def quantize_ckv_per_token_head(
    q: torch.Tensor, kv_lora_rank: int, *, out: QuantizedQuery | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantises queries per token and head (``snapmla.quantize_q``); no copy of a strided ``q``.

    Args:
        q: bfloat16, float16 or float32 (b, s_q, h, 576), latent part first, RoPE applied.
        kv_lora_rank: 512.
        out: tensors to write into; None allocates.

    Returns:
        (q_nope float8_e4m3fn (b, s_q, h, 512), q_scale float32 (b, s_q, h, 1), q_rope bfloat16
        (b, s_q, h, 64) divided by the scale): this order, as SnapMLA returns them.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: SnapMLA paper, section 3.1 (RoPE-aware per-token quantisation).
    """
    checks.integer("kv_lora_rank", kv_lora_rank, KV_LORA_RANK, KV_LORA_RANK)
    shape = ("b", "s_q", "num_heads", HEAD_DIM_QK)
    hint = "latent and RoPE channels in one row of 576; snapmla.quantize_q takes them apart"
    if isinstance(q, torch.Tensor) and (q.ndim != 4 or q.shape[3] != HEAD_DIM_QK):
        checks.value_error("q", "shape (b, s_q, num_heads, 576)", tuple(q.shape), hint)
    checks.tensor("q", q, checks.FLOATS, shape)
    try:
        made = quant.quantize_q(q[..., :KV_LORA_RANK], q[..., KV_LORA_RANK:], out=out)
    except (TypeError, ValueError) as error:
        names = {"q_nope": "q", "q_rope": "q", "num_heads": "q, num_heads", "s_q": "q, s_q"}
        raise checks.renamed(error, names) from None
    return made.nope, made.scale.unsqueeze(-1), made.rope


_FLAT_NAMES = {
    "cache.content": "k_lora_cache", "cache.rope": "k_rope_cache",
    "cache.scale": "k_lora_scale_cache",
    "cache": "k_lora_cache", "content": "k_lora_cache", "rope": "k_rope_cache",
    "scale": "k_lora_scale_cache", "c_kv": "key", "k_rope": "key", "slot_mapping": "indices",
    "page_size": "k_lora_cache, page_size",
}  # fmt: skip
_FETCH_NAMES = {
    "cache.content": "k_lora", "cache.rope": "k_rope", "cache.scale": "k_scale", "where": "indices",
    "cache": "k_lora", "content": "k_lora", "rope": "k_rope", "scale": "k_scale",
    "page_size": "k_lora, page_size",
}  # fmt: skip


def _flat_cache(
    names: tuple[str, str, str], lora: torch.Tensor, rope: torch.Tensor, scale: torch.Tensor
) -> PagedKVCache:
    """A cache over a pool: (slots, 1, 512), (slots, 1, 64), (slots, 1, 1), or paged 4-D views."""
    views = []
    extents = (KV_LORA_RANK, QK_ROPE_HEAD_DIM, 1)
    paged = [t.shape[1] for t in (lora, rope, scale) if isinstance(t, torch.Tensor) and t.ndim == 4]
    for name, value, extent in zip(names, (lora, rope, scale), extents):
        if not isinstance(value, torch.Tensor):
            checks.type_error(name, "a torch.Tensor", type(value).__name__)
        shape = tuple(value.shape)
        if len(shape) not in (3, 4) or shape[-2:] != (1, extent):
            hint = f"pool.view(-1, 1, {extent}); the order is {', '.join(names)}"
            hint = _another_format(shape) or hint
            checks.value_error(name, f"shape (slots, 1, {extent})", shape, hint)
        if len(shape) == 3:
            value = value.unflatten(0, (-1, _page_of(name, shape[0], paged)))
        views.append(value[:, :, 0])  # never flattened: that would copy pages that lie apart
    return PagedKVCache.from_tensors(views[0], views[1], views[2][..., 0])


def _page_of(name: str, slots: int, paged: list[int]) -> int:
    """Page size by which a flat pool is addressed: that of a 4-D view beside it, or any."""
    sizes = paged[:1] or _FLAT_PAGES
    page = next((p for p in sizes if slots and p and slots % p == 0), None)
    if page is None:
        hint = "size the pool in whole pages"
        checks.value_error(name, f"a multiple of {min(sizes)} slots", slots, hint)
    return page


def quantize_and_cache_k(
    key: torch.Tensor,
    k_lora_cache: torch.Tensor,
    k_lora_scale_cache: torch.Tensor,
    k_rope_cache: torch.Tensor,
    indices: torch.Tensor,
    head_dim_v: int,
) -> None:
    """Quantises tokens and scatters them to slots of a pool (``snapmla.append_kv``), in place.

    Args:
        key: bfloat16, float16 or float32 (n, 1, 576) or (n, 576), latent part first; rows may be
            strided.  Parts that lie apart need no cat: ``snapmla.append_kv`` takes them.
        k_lora_cache: uint8 or float8_e4m3fn (slots, 1, 512), or (pages, page_size, 1, 512); so
            for the other two.  Pages of 4-D views may lie apart.
        k_lora_scale_cache: float32 (slots, 1, 1).
        k_rope_cache: bfloat16 (slots, 1, 64).
        indices: int32 or int64 (n,), slots; those outside the pool are skipped.
        head_dim_v: 512.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: SnapMLA paper, section 3.3.1 (fused K-append).
    """
    checks.integer("head_dim_v", head_dim_v, KV_LORA_RANK, KV_LORA_RANK)
    calls.run(
        _APPEND, _APPEND, Append(key, k_lora_cache, k_rope_cache, k_lora_scale_cache, indices)
    )


class Append(NamedTuple):
    """A call of ``quantize_and_cache_k``."""

    key: torch.Tensor
    lora: torch.Tensor
    rope: torch.Tensor
    scale: torch.Tensor
    indices: torch.Tensor


def _append_parts(call: Append) -> calls.Parts | None:
    """Tensors and addresses by which an append is known; None if its pool is not flat.

    A flat pool, as engines pass it, has tensors of three dimensions.
    """
    if call.lora.ndim != 3 or call.rope.ndim != 3 or call.scale.ndim != 3:
        return None
    key, lora, rope, scale, indices = call
    where = (
        key.data_ptr(), lora.data_ptr(), rope.data_ptr(), scale.data_ptr(), indices.data_ptr(),
    )  # fmt: skip
    return call, (), where


def _append_places(call: Append, _: object) -> calls.Groups:
    key, *written, indices = call
    return *((overlap.span(t),) for t in written), (overlap.span(key), overlap.span(indices))


def _primary_append(
    call: Append,
) -> tuple[PagedKVCache, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The call as ``quant.append_kv`` takes it; checks the pool's shape and the key."""
    names = ("k_lora_cache", "k_rope_cache", "k_lora_scale_cache")
    key, lora, rope, scale, indices = call
    if isinstance(key, torch.Tensor) and key.ndim == 3 and key.shape[1] == 1:
        key = key[:, 0]
    checks.tensor("key", key, checks.FLOATS, ("n", HEAD_DIM_QK))
    cache = _flat_cache(names, lora, rope, scale)
    return cache, key[:, :KV_LORA_RANK], key[:, KV_LORA_RANK:], indices


def _check_append(call: Append) -> Append:
    try:
        cache, *tokens = _primary_append(call)
        expect_cache(cache)
        quant.check_append(cache, *tokens)
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, _FLAT_NAMES) from None
    return call


def _traced_append(call: Append) -> None:
    try:
        quant.append_kv(*_primary_append(call))
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, _FLAT_NAMES) from None


def _launch_append(call: Append, ready: bool | None) -> tuple[None, bool]:
    if ready is None:
        cache, c_kv, k_rope, slots = _primary_append(call)
        quant.launch_append(cache.arguments, c_kv, k_rope, slots)
        return None, True
    key, lora, rope, scale, indices = call
    n, row, page = key.shape[0], key.stride(0), _FLAT_PAGES[-1]
    quant.launch_append(
        (
            (lora if lora.dtype is torch.uint8 else lora.view(torch.uint8)).view(
                -1, page, KV_LORA_RANK
            ),
            rope.view(-1, page, QK_ROPE_HEAD_DIM),
            scale.view(-1, page),
        ),
        key.as_strided((n, KV_LORA_RANK), (row, 1)),
        key.as_strided((n, QK_ROPE_HEAD_DIM), (row, 1), key.storage_offset() + KV_LORA_RANK),
        indices,
    )
    return None, True


_APPEND = calls.Op(
    "quantize_and_cache_k", _check_append, _launch_append, _traced_append, _append_parts,
    _append_places,
)  # fmt: skip


def dequantize_ckv_fused_indexed(
    k_lora: torch.Tensor,
    k_rope: torch.Tensor,
    k_scale: torch.Tensor,
    indices: torch.Tensor,
    *,
    out: Pair | None = None,
) -> Pair:
    """Reads tokens back by slot, RoPE multiplied by the scale again (``snapmla.fetch_dequant``).

    Args:
        k_lora: float8_e4m3fn or uint8 (slots, 1, 512), or (pages, page_size, 1, 512); so for the
            other two.
        k_rope: bfloat16 (slots, 1, 64).
        k_scale: float32 (slots, 1, 1); mind the order, lora, rope, scale.
        indices: int32 or int64 (n,), slots; one outside the pool gives zeros.
        out: a pair to write into, bfloat16, float16 or float32 (n, 1, 512) and (n, 1, 64); None
            allocates.

    Returns:
        (lora bfloat16 (n, 1, 512), rope bfloat16 (n, 1, 64)).

    Raises:
        TypeError, ValueError: naming the argument.

    Source: SnapMLA paper, section 3.3.1 (fused fetch-dequant).
    """
    try:
        cache = _flat_cache(("k_lora", "k_rope", "k_scale"), k_lora, k_rope, k_scale)
        checks.tensor("indices", indices, tuple(quant.INDEX_NAMES), ("n",), cache.device)
        flat = None
        if out is not None:
            first, second = pair_of("out", out)
            n = indices.shape[0]
            checks.tensor("out[0]", first, checks.FLOATS, (n, 1, KV_LORA_RANK), cache.device)
            checks.tensor("out[1]", second, checks.FLOATS, (n, 1, QK_ROPE_HEAD_DIM), cache.device)
            flat = (first[:, 0], second[:, 0])
        lora, rope = fetch.fetch_dequant(cache, indices, out=flat)
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, _FETCH_NAMES) from None
    return (lora.unsqueeze(1), rope.unsqueeze(1)) if out is None else out

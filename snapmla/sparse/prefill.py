"""``sparse_prefill``: attention of each query token to the rows of BF16 KV, or to the tokens of an
FP8 cache, that it names; the latter is prefill_fp8.py's."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import torch

from dsl_kernels.formats.dims import KV_LORA_RANK, TOKEN_TILE
from snapmla import checks
from snapmla.cache.paged import PagedKVCache
from snapmla.cache.quant import QuantizedQuery
from snapmla.call import memo as calls
from snapmla.call import op, tracing
from snapmla.runtime import launch, variants
from snapmla.runtime.launch import sm_count
from snapmla.sparse.plan import SparsePlan
from snapmla.sparse.prefill_fp8 import FP8Results, prefill_from_fp8
from snapmla.sparse.rows_kernel import kernel_of, row_tile_of

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor, Tensor]
FourResults = tuple[Tensor, Tensor, Tensor, Tensor]
D_QK = (576, 512)
MAX_HEADS = 128
MAX_STRIDE = 1 << 32  # bytes between rows of kv: the gather's stride has 32 bits
MAX_TOKENS = 2**30  # of queries: two work tiles each are counted in 32 bits
MAX_TOPK = 2**31 - 2**16  # the kernel's int32, with room for a tile
INDEXER_STEP = TOKEN_TILE  # ``indexer_topk`` is a multiple: the kernel notes sums between tiles
_BF16, _FLOAT32 = (torch.bfloat16,), (torch.float32,)


@overload
def sparse_prefill(
    q: Tensor, kv: Tensor, indices: Tensor, softmax_scale: float, d_v: int = ...,
    attn_sink: Tensor | None = ..., topk_length: Tensor | None = ..., out: Tensor | None = ..., *,
    max_logits: Tensor | None = ..., lse: Tensor | None = ..., indexer_topk: Literal[0] = ...,
    lse_indexer: None = ...,
) -> Results: ...  # fmt: skip


@overload
def sparse_prefill(
    q: Tensor, kv: Tensor, indices: Tensor, softmax_scale: float, d_v: int = ...,
    attn_sink: Tensor | None = ..., topk_length: Tensor | None = ..., out: Tensor | None = ..., *,
    max_logits: Tensor | None = ..., lse: Tensor | None = ..., indexer_topk: int,
    lse_indexer: Tensor | None = ...,
) -> Results | FourResults: ...  # fmt: skip


@overload
def sparse_prefill(
    q: QuantizedQuery, kv: PagedKVCache, indices: Tensor, softmax_scale: float, d_v: int = ...,
    attn_sink: Tensor | None = ..., topk_length: Tensor | None = ..., out: Tensor | None = ..., *,
    lse: Tensor | None = ..., plan: SparsePlan | None = ...,
) -> FP8Results: ...  # fmt: skip


def sparse_prefill(
    q: Tensor | QuantizedQuery,
    kv: Tensor | PagedKVCache,
    indices: Tensor,
    softmax_scale: float,
    d_v: int = KV_LORA_RANK,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
    *,
    max_logits: Tensor | None = None,
    lse: Tensor | None = None,
    indexer_topk: int = 0,
    lse_indexer: Tensor | None = None,
    plan: SparsePlan | None = None,
) -> Results | FourResults | FP8Results:
    """softmax(softmax_scale * q kv^T) kv[..., :512] of each query token over rows that it names.

    Over BF16 rows: one launch, no plan, no workspace, nothing read by the host, and with ``out``,
    ``max_logits`` and ``lse`` given no allocation: it may be captured in a CUDA graph.  Nothing is
    split, so that a query's result depends on the query and its rows alone: bits are the same in
    any call.

    Over an FP8 cache: sparse decode of each query token, unsplit too, by a ``plan`` of
    ``plan_sparse_prefill``.  1.2 times as fast as over BF16 rows with 64 or 128 heads, as fast with
    16 (docs/lab-book.md), and no rows need be fetched.

    Entries that are no row (negative, or s_kv and more) and those behind ``topk_length`` count
    for nothing, and what lies there is never read.  A row that is named twice counts twice.

    Args:
        q: bfloat16 (s_q, h, 576) or (s_q, h, 512), 1 to 128 heads; heads and tokens may be strided,
            16-byte aligned, as rows of kv and ``out``.  A ``QuantizedQuery`` of (s_q, h) rows
            where kv is a cache.
        kv: bfloat16 (s_kv, 1, 576) or (s_kv, 1, 512), as many channels as q; the first 512 are V.
            Or a ``PagedKVCache`` of format ``fp8``.
        indices: int32 (s_q, 1, topk), topk of 1 or more, rows of ``kv`` in any order, or slots of
            the cache; rows of indices may be strided.
        softmax_scale: factor of the logits, positive, at most 2**16 (over an FP8 cache as of
            ``decode``).  A row with a logit of 2**31 or more, times log2 e, is NaN in ``out``,
            ``max_logits`` and ``lse``.
        d_v: 512.
        attn_sink: float32 (h,), a logit of each head that takes its share and is no value, so
            that ``out`` is multiplied by 1 / (1 + exp(sink - lse)); infinities are legal.  Neither
            ``lse`` nor ``max_logits`` has it.
        topk_length: int32 (s_q,): how many of a token's entries count, 0 to topk; less or more
            counts as these.
        out: bfloat16 (s_q, h, 512) to be written.  None allocates, as for the next two.
        max_logits: float32 (s_q, h), any strides.
        lse: float32 (s_q, h), any strides.
        indexer_topk: a multiple of 64: how many entries of each list, the first ones, the indexer
            chose; their LSE is a fourth result, for the backward pass of the indexer.  0: none.
        lse_indexer: float32 (s_q, h), any strides, to be written; with ``indexer_topk`` only.
        plan: of a call over a cache, from ``plan_sparse_prefill``; None makes one, in a launch.

    Returns:
        (out, max_logits, lse): ``max_logits`` is the largest of the scaled logits, ``lse`` the
        natural logarithm of the sum of their exponentials.  Rows that see nothing have out 0,
        max_logits -inf and lse +inf.  With ``indexer_topk`` also ``lse_indexer``, the LSE of a
        list's first ``indexer_topk`` entries, or of those that count if fewer do; +inf where no
        row is among them.  The others have the bits of a call without it.  Over an FP8 cache (out,
        None, lse): its kernel keeps no largest logits; given, both are contiguous.

    Raises:
        TypeError, ValueError: naming the argument; also where a gradient is wanted, or where
            something else than torch.compile records a call with ``indexer_topk``.

    Example:
        q, kv = torch.randn(2, 16, 576).bfloat16(), torch.randn(100, 1, 576).bfloat16()
        indices = torch.randint(100, (2, 1, 64), dtype=torch.int32)
        out, max_logits, lse = snapmla.sparse_prefill(q, kv, indices, 192**-0.5)

    Source: the contract is FlashMLA's ``flash_mla_sparse_fwd``; ``indexer_topk`` is its branch
    nv_dev's.
    """
    if isinstance(kv, PagedKVCache):
        checks.choice("d_v", d_v, (KV_LORA_RANK,))
        for name, value in (("max_logits", max_logits), ("lse_indexer", lse_indexer)):
            if value is not None:
                checks.value_error(name, "None over an FP8 cache", "a tensor")
        if indexer_topk:
            checks.value_error("indexer_topk", "0 over an FP8 cache", indexer_topk)
        return prefill_from_fp8(
            q, kv, indices, softmax_scale, attn_sink, topk_length, out, lse, plan
        )  # fmt: skip
    if plan is not None:
        hint = "a launch over BF16 rows finds its work itself"
        checks.value_error("plan", "None where kv is a tensor", type(plan).__name__, hint)
    own: Any = q  # a tensor, as the checks will say
    call = Call(
        own, kv, indices, softmax_scale, d_v, attn_sink, topk_length, out, max_logits, lse,
        indexer_topk, lse_indexer,
    )  # fmt: skip
    return calls.run(PREFILL.op, PREFILL.op, call)


class Call(NamedTuple):
    """A call of ``sparse_prefill`` over BF16 rows, checked or not."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    softmax_scale: float
    d_v: int
    attn_sink: Tensor | None
    topk_length: Tensor | None
    out: Tensor | None = None
    max_logits: Tensor | None = None
    lse: Tensor | None = None
    indexer_topk: int = 0
    lse_indexer: Tensor | None = None


class Ready(NamedTuple):
    """Kernel, arguments and a switch of a launch; shapes, strides and options decide them."""

    kernel: variants.Kernel
    ctas: int
    scale: float
    no_lengths: Tensor
    no_sink: Tensor
    odd: bool  # some tensor's strides over extents of 1 are none that TMA takes
    place: int = 0


def _check_shapes(call: Call, known: op.Extents) -> None:
    """Checks kinds, dtypes and shapes of what is read, and options."""
    q, kv, indices = call.q, call.kv, call.indices
    checks.not_nested("q", q)
    if isinstance(q, torch.Tensor) and (q.ndim != 3 or q.shape[-1] not in D_QK):
        wanted = f"shape (s_q, h, {' or '.join(map(str, D_QK))})"
        checks.value_error("q", wanted, tuple(q.shape), "a row of q is as wide as one of kv")
    checks.tensor("q", q, _BF16, ("s_q", "h", "d"))
    s_q, heads, d_qk = q.shape
    device = q.device
    if not 1 <= heads <= MAX_HEADS:
        checks.value_error("q", f"1 to {MAX_HEADS} heads", heads)
    if s_q > MAX_TOKENS:
        checks.value_error("q", f"at most {MAX_TOKENS} tokens", s_q)
    if isinstance(kv, Tensor) and kv.dtype in (checks.FP8, torch.uint8, torch.int8):
        hint = "of a cache's bytes snapmla.fetch_dequant makes rows; or give a PagedKVCache"
        checks.type_error("kv", "dtype bfloat16", checks.dtype_name(kv.dtype), hint)
    checks.tensor("kv", kv, _BF16, ("s_kv", 1, d_qk), device)
    checks.tensor("indices", indices, (torch.int32,), (s_q, 1, "topk"), device)
    if not 1 <= indices.shape[2] <= MAX_TOPK:
        checks.value_error("indices", f"1 to {MAX_TOPK} entries of a token", indices.shape[2])
    checks.softmax_scale(call.softmax_scale, checks.MAX_ROWS_SCALE)
    checks.choice("d_v", call.d_v, (KV_LORA_RANK,))
    if call.attn_sink is not None:
        checks.tensor("attn_sink", call.attn_sink, _FLOAT32, (heads,), device)
        checks.contiguous("attn_sink", call.attn_sink)
    if call.topk_length is not None:
        checks.vector("topk_length", call.topk_length, (s_q,), device)
    _check_indexer(call)
    known.update(s_q=s_q, h=heads, d_v=KV_LORA_RANK, device=device)


def _check_indexer(call: Call) -> None:
    """``indexer_topk``, and that nothing is given that goes with it alone."""
    count = checks.integer("indexer_topk", call.indexer_topk, 0, MAX_TOPK)
    if count % INDEXER_STEP:
        checks.value_error("indexer_topk", f"a multiple of {INDEXER_STEP}", count)
    if not count and call.lse_indexer is not None:
        checks.value_error("lse_indexer", "None without indexer_topk", "a tensor")


def _no_gradients(call: Call) -> None:
    """Raises ValueError where autograd would want gradients."""
    if torch.is_grad_enabled():
        for name in ("q", "kv", "attn_sink"):
            value = getattr(call, name)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                hint = "there is no backward pass: call it under torch.no_grad()"
                checks.value_error(name, "no gradients to be wanted", "requires_grad=True", hint)


def _check_memory(call: Call) -> None:
    """Checks gradients, strides and alignment, of tensors with memory."""
    _no_gradients(call)
    for name in ("q", "kv"):
        value = getattr(call, name)
        if value.numel():
            checks.aligned_rows(name, value)
    if any(n > 1 and not s for n, s in zip(call.q.shape, call.q.stride())):
        hint = "queries are read by TMA, which wants rows that are there"
        checks.value_error("q", "no expanded dimension", f"strides {call.q.stride()}", hint)
    if call.kv.shape[0] > 1 and 2 * call.kv.stride(0) >= MAX_STRIDE:
        wanted = f"rows less than {MAX_STRIDE} bytes apart"
        checks.value_error("kv", wanted, f"{2 * call.kv.stride(0)} bytes")
    if call.indices.shape[2] > 1 and call.indices.stride(2) != 1:
        checks.value_error("indices", "innermost stride 1", f"strides {call.indices.stride()}")
    if call.out is not None and call.out.numel():
        checks.aligned_rows("out", call.out)


def _check_begins(call: Call) -> None:
    """Checks where rows begin."""
    for name in ("q", "kv", "out"):
        value = getattr(call, name)
        if value is not None:
            checks.aligned(name, value)


def _prepared(call: Call) -> Ready:
    s_q, heads, d_qk = call.q.shape
    device = call.q.device
    row_tile = row_tile_of(heads)
    tiles = s_q * -(-heads // row_tile)
    with torch.inference_mode(False):
        no_lengths = torch.empty(0, dtype=torch.int32, device=device)
        no_sink = torch.empty(0, dtype=torch.float32, device=device)
    figures = "indexer" if call.indexer_topk else "whole"
    return Ready(
        kernel_of(device, row_tile, d_qk, figures), min(sm_count(device), tiles),
        float(call.softmax_scale), no_lengths, no_sink,
        any(launch.regular(t) is not t for t in (call.q, call.kv, call.out) if t is not None),
    )  # fmt: skip


def _launch(call: Call, ready: Ready | None) -> tuple[Results | FourResults, Ready | None]:
    q = call.q
    s_q, heads, _ = q.shape
    out, max_logits, lse = call.out, call.max_logits, call.lse
    allocate = launch.allocator(q.device)
    if out is None:
        out = allocate((s_q, heads, KV_LORA_RANK), (heads * KV_LORA_RANK, KV_LORA_RANK, 1), q.dtype)
    if max_logits is None:
        max_logits = allocate((s_q, heads), (heads, 1), torch.float32)
    if lse is None:
        lse = allocate((s_q, heads), (heads, 1), torch.float32)
    made: Results | FourResults = out, max_logits, lse
    first: tuple[Any, ...] = ()  # what a call with ``indexer_topk`` has beside
    if call.indexer_topk:
        own = call.lse_indexer
        if own is None:
            own = allocate((s_q, heads), (heads, 1), torch.float32)
        made, first = (*made, own), (call.indexer_topk // INDEXER_STEP,)
    if not s_q:
        return made, None
    if not call.kv.shape[0]:  # nobody sees anything, and there may be no memory at all
        out.zero_()
        max_logits.fill_(-math.inf)
        for sums in made[2:]:
            sums.fill_(math.inf)
        return made, None
    if ready is None:
        ready = _prepared(call)
    kv, results = call.kv, made
    if ready.odd:
        q, kv, out = map(launch.regular, (q, kv, out))
        results = out, *made[1:]
    ready.kernel(
        q, kv, call.indices,
        ready.no_lengths if call.topk_length is None else call.topk_length,
        ready.no_sink if call.attn_sink is None else call.attn_sink,
        *results, ready.scale, *first, ready.ctas,
    )  # fmt: skip
    return made, ready


class _Prefill(op.Declared):
    """``sparse_prefill`` but for ``indexer_topk``, of which no operator knows."""

    def traced(self, call: Call) -> Any:
        if call.indexer_topk:
            if tracing.by_dynamo():
                return tracing.between_graphs(sparse_prefill, **call._asdict())
            hint = "no operator has it: call it outside of what records"
            checks.value_error(
                "indexer_topk", "0 where a call is recorded", call.indexer_topk, hint
            )
        _no_gradients(call)
        return super().traced(call)


PREFILL = _Prefill(
    "sparse_prefill",
    Call,
    ("out", "max_logits", "lse", "lse_indexer"),
    (
        _check_shapes,
        op.TensorArg("out", _BF16, "s_q h d_v"),
        *(op.TensorArg(name, _FLOAT32, "s_q h") for name in ("max_logits", "lse", "lse_indexer")),
    ),
    _launch,
    memory=_check_memory,
    moved=_check_begins,
    unrecorded=("indexer_topk", "lse_indexer"),
)

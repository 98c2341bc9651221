"""``index_logits``: how well each cached token fits each query token, by the index cache."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from dsl_kernels.formats.index_cache import HEADS, INDEX_DIM, PAGE, PAGE_BYTES, UNIT_ROWS
from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.call import memo as calls
from snapmla.call import op
from snapmla.checks.tensors import ALIGN
from snapmla.runtime import variants
from snapmla.runtime.launch import nothing, sm_count

_FLOAT32 = (torch.float32,)
MADE = f"torch.zeros(pages, {PAGE}, {PAGE_BYTES // PAGE}, dtype=torch.uint8): docs/formats.md"
LAYOUT = f"a page of {PAGE} tokens is {PAGE * INDEX_DIM} bytes of keys, then {PAGE} fp32 scales"


def index_logits(
    q: torch.Tensor,
    w: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    max_tokens: int | None = None,
    unit_rows: int | None = None,
) -> torch.Tensor:
    """Scores of cached tokens for query tokens, of decode, drafts and prompts alike.

    ``out[r, t] = scale[t] * sum_h w[r, h] * max(q[r, h] . k[t], 0)`` for the tokens that row r
    sees: of n query tokens of a sequence of L tokens (with the n) number j sees the first
    L - n + 1 + j.  Products and sums are float32; a NaN stays one.  The bits of a score follow from
    its query token and its cached token alone: not from the batch, the number of query tokens, the
    device's SMs, or whether queries are ragged.  SM90 and SM100 differ, as their tensor cores do.

    One launch, straight from the pages; no plan, no copy of the cache, no synchronisation, nothing
    read by the host, and with ``out`` given no allocation: it may be captured in a CUDA graph.

    Columns of a row from its length on are not written: with ``out`` allocated here they are
    whatever memory held.  Nothing that is stored behind a row's last token reaches a score.

    Args:
        q: float8_e4m3fn (b, s_q, h, 128), contiguous, 1 <= s_q, h 64 or 32; ragged queries are
            packed, (total_q, h, 128).  Queries have no scale: it belongs into ``w``.
        w: float32 (b, s_q, h) or (total_q, h), contiguous: weight of each head times its query's
            scale and whatever else scales logits.
        cache: uint8 (pages, 64, 132), (pages, 64, 1, 132) or (pages, 8448), as engines shape it: in
            a page lie the keys of 64 tokens, 128 e4m3 each, then their float32 scales, of any
            value.  Pages may lie any multiple of 16 bytes apart.
        block_table: int32 (b, width): pages of each sequence; entries that its length does not
            reach may be anything.
        cache_seqlens: int32 (b,): tokens of each sequence, the call's own included; 0 is legal.
            More than 64 * width, or than ``out`` has columns, counts as that many.
        cu_seqlens_q: int32 (b + 1,), beside ragged queries: where each sequence's begin, and their
            total.
        out: float32 (rows, columns), rows b * s_q or total_q; rows may be strided.  None allocates
            ``max_tokens`` columns.
        max_tokens: columns of an ``out`` that is allocated here; None: 64 * width.
        unit_rows: query tokens for which a page is read once, 1, 2, 4 or (h = 32) 8; None chooses
            by shapes.  It changes time, not bits.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: the lightning indexer of DeepSeek-V3.2; DeepGEMM's ``fp8_paged_mqa_logits`` and
    ``fp8_mqa_logits`` compute the same.
    """
    call = Call(q, w, cache, block_table, cache_seqlens, cu_seqlens_q, out, max_tokens, unit_rows)
    return calls.run(LOGITS.op, LOGITS.op, call)


class Call(NamedTuple):
    """A call of ``index_logits``."""

    q: torch.Tensor
    w: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    out: torch.Tensor | None = None
    max_tokens: int | None = None
    unit_rows: int | None = None


def check_scoring(call: Call, known: op.Extents) -> None:
    """Checks what is scored, and options; notes the device and how many query tokens there are."""
    rows = check_queries(call.q, call.w)
    device = call.q.device
    known.update(rows=rows, device=device)
    check_cache(call.cache, device)
    ragged = call.q.ndim == 3
    checks.lengths(call.cache_seqlens, "b" if ragged else call.q.shape[0], device)
    batch = call.cache_seqlens.shape[0]
    checks.block_table(call.block_table, batch, device)
    if ragged:
        checks.vector("cu_seqlens_q", call.cu_seqlens_q, (batch + 1,), device)
    elif call.cu_seqlens_q is not None:
        hint = "ragged queries are packed: (total_q, h, 128)"
        checks.value_error("cu_seqlens_q", "None beside queries (b, s_q, h, 128)", "a tensor", hint)
    if call.unit_rows is not None:
        checks.choice("unit_rows", call.unit_rows, unit_choices(call.q.shape[-2]))
    if call.max_tokens is None:
        return
    if call.out is not None:
        checks.value_error("max_tokens", "None beside out, which has columns", call.max_tokens)
    checks.integer("max_tokens", call.max_tokens, 1, 2**31 - PAGE)


def _check_out(call: Call, _: op.Extents) -> None:
    """Checks that scores of a row lie side by side."""
    if call.out is not None and call.out.shape[1] > 1 and call.out.stride(1) != 1:
        checks.value_error("out", "innermost stride 1", f"strides {call.out.stride()}")


def check_queries(q: torch.Tensor, w: torch.Tensor) -> int:
    """Checks queries and weights, and returns how many query tokens there are."""
    outer: tuple[str, ...] = checks.query_tokens("q", q)
    checks.tensor("q", q, (checks.FP8,), (*outer, "h", INDEX_DIM))
    checks.choice("h, the heads of q", q.shape[-2], HEADS)
    if q.ndim == 4 and q.shape[1] < 1:
        checks.value_error("q", "s_q of 1 or more", q.shape[1])
    checks.tensor("w", w, _FLOAT32, tuple(q.shape[:-1]), q.device)
    for name, value in (("q", q), ("w", w)):
        checks.contiguous(name, value)
        checks.aligned(name, value)
    rows = q.numel() // (q.shape[-2] * INDEX_DIM)
    return rows


def check_cache(
    cache: torch.Tensor, device: torch.device | None = None, name: str = "cache"
) -> None:
    """Checks an index cache: bytes of a page side by side, pages multiples of 16 bytes apart."""
    if isinstance(cache, torch.Tensor) and cache.ndim == 2:
        shape: tuple[int | str, ...] = ("pages", PAGE_BYTES)
    elif isinstance(cache, torch.Tensor) and cache.ndim == 4:
        shape = ("pages", PAGE, 1, PAGE_BYTES // PAGE)
    else:
        shape = ("pages", PAGE, PAGE_BYTES // PAGE)
    if not isinstance(cache, torch.Tensor):
        checks.type_error(name, "a torch.Tensor", type(cache).__name__, MADE)
    checks.tensor(name, cache, (torch.uint8,), shape, device, MADE)
    if cache.shape[0] < 1:
        checks.value_error(name, "1 page or more", 0, MADE)
    if cache.numel() and not cache[0].is_contiguous():
        checks.value_error(name, "bytes of a page side by side", cache.stride(), LAYOUT)
    if cache.shape[0] > 1 and (cache.stride(0) % ALIGN or cache.stride(0) < PAGE_BYTES):
        wanted = f"pages a multiple of {ALIGN} bytes apart, {PAGE_BYTES} or more"
        checks.value_error(name, wanted, f"{cache.stride(0)} bytes", MADE)
    checks.aligned(name, cache)


def pages(cache: torch.Tensor) -> torch.Tensor:
    """A checked index cache as kernels take it, (pages, 8448)."""
    stride = (cache.stride(0) if cache.shape[0] > 1 else PAGE_BYTES, 1)
    return cache.as_strided((cache.shape[0], PAGE_BYTES), stride)


def unit_choices(heads: int) -> tuple[int, ...]:
    """Values of ``unit_rows`` that are built for so many heads."""
    return tuple(rows for rows in UNIT_ROWS if heads * rows <= 256)


def unit_of(call: Call) -> int:
    """Query tokens of a unit: as few as hold a sequence's, or all that there can be."""
    if call.unit_rows is not None:
        return call.unit_rows
    choices = unit_choices(call.q.shape[-2])
    each = call.q.shape[1]
    if call.q.ndim == 3:
        each = -(-call.q.shape[0] // max(1, call.cache_seqlens.shape[0]))
    return next((rows for rows in choices if rows >= each), choices[-1])


@functools.lru_cache(maxsize=64)
def _kernel(device: torch.device, heads: int, unit_rows: int) -> variants.Kernel:
    spec = VariantSpec(
        op="index_logits", arch=variants.arch_of(device), heads=heads, unit_rows=unit_rows
    )
    return variants.kernel(spec, device.type)


variants.on_forget(_kernel.cache_clear)


def empty_out(call: Call) -> torch.Tensor:
    """``out`` of a call that gives none; rows begin at multiples of 256 bytes."""
    rows = call.q.shape[0] * (call.q.shape[1] if call.q.ndim == 4 else 1)
    columns = PAGE * call.block_table.shape[1] if call.max_tokens is None else call.max_tokens
    stride = -(-columns // PAGE) * PAGE
    return call.q.new_empty((rows, stride), dtype=torch.float32)[:, :columns]


def launch_logits(call: Call) -> torch.Tensor:
    """The launch of a checked call."""
    out = empty_out(call) if call.out is None else call.out
    q, cu = call.q, call.cu_seqlens_q
    s_q = q.shape[1] if q.ndim == 4 else 0
    rows = q.view(torch.uint8).view(-1, *q.shape[-2:])
    if not out.numel() or not len(call.cache_seqlens):
        return out
    if cu is None:
        cu = nothing(q.device)
    kernel = _kernel(q.device, q.shape[-2], unit_of(call))
    kernel(
        rows, call.w.view(-1, q.shape[-2]), pages(call.cache), call.block_table,
        call.cache_seqlens, cu, out, s_q, sm_count(q.device),
    )  # fmt: skip
    return out


def _launch(call: Call, _: object) -> tuple[torch.Tensor, bool]:
    return launch_logits(call), True


LOGITS = op.Declared(
    "index_logits",
    Call,
    ("out",),
    (check_scoring, op.TensorArg("out", _FLOAT32, "rows columns"), _check_out),
    _launch,
    make=lambda call: (empty_out(call),),
    unrecorded=("max_tokens",),
    wire={"q": op.BYTES, "unit_rows": op.OR_ZERO},
    out_only=True,
)

"""``fetch_dequant``: reads tokens of the cache back, by sequence, by slot or as packed chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache.paged import PagedKVCache, expect_cache
from snapmla.cache.quant import FLOAT_NAMES, INDEX_NAMES, named, variant_kernel
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.checks import overlap
from snapmla.runtime import launch, variants
from snapmla.runtime.launch import nothing

MAX_FETCHED = 65535  # sequences of a block table with cache_seqlens: the kernel's grid.y
MAX_TOTAL = 2**31 - 1  # rows of a packed result: the kernel's int32
Fetched = tuple[torch.Tensor, torch.Tensor]


class Tokens(NamedTuple):
    """Tokens that are wanted: arguments of ``fetch_dequant``, checked or not."""

    where: torch.Tensor
    cache_seqlens: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    seq_starts: torch.Tensor | None = None
    total: Any = None  # an int, or a tracer's

    @property
    def mode(self) -> str:
        """The kernel's: ``pages``, ``indices`` or ``ragged``."""
        if self.cu_seqlens is not None:
            return "ragged"
        return "pages" if self.where.ndim == 2 else "indices"


def fetch_dequant(
    cache: PagedKVCache,
    where: torch.Tensor,
    cache_seqlens: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    total: int | None = None,
    out: torch.Tensor | Fetched | None = None,
    dtype: torch.dtype | None = None,
) -> Fetched:
    """Reads tokens back: c_kv = content * scale, k_rope = rope * scale (SnapMLA's fetch-dequant).

    From a cache of 16 bits rows are copied as they are; to another dtype they are rounded to
    nearest, by variants that are compiled when they are first asked for.  From one of
    ``fp8_ds_mla`` a group of channels whose scale is 0 is zeros, whatever its bytes are, and k_rope
    is copied, as of other formats of bytes; built by default for bfloat16 and int32 indices.

    Three ways to say which.  ``where`` and ``cache_seqlens``: the first tokens of each sequence,
    padded to one length.  ``where`` and ``cu_seqlens``: a chunk of each sequence, packed.  Flat
    indices alone: any tokens.  Lengths stay on the device; nothing is waited for.

    Args:
        cache: the pages to read.
        where: int32 block table (b, width), or int32 or int64 flat token indices (n,)
            (``page * page_size + offset``); an index outside the pool gives zeros.
        cache_seqlens: int32 (b,), tokens of each sequence of a block table.
        cu_seqlens: packed chunks, int32 (b + 1,), instead of ``cache_seqlens``: rows
            [cu_seqlens[r], cu_seqlens[r + 1]) of the result are sequence r's; none is fine.  The
            host never reads it.  Where it does not ascend within 0..total it is undefined which
            tokens, or zeros, the rows hold, and which of them are written.
        seq_starts: beside ``cu_seqlens``, int32 (b,): row cu_seqlens[r] + t is cached token
            seq_starts[r] + t of sequence r.  None: all 0.  A token outside the block table's width
            and one whose page id is outside the pool give zeros, so table entries of all tokens
            asked for must be right: there is no other bound.
        total: room for packed chunks if ``out`` is None: rows of the result.
        out: where to write, bfloat16, float16 or float32: a pair (c_kv, k_rope), or one joint
            (..., 576) tensor; rows may be strided, 16-byte aligned.  With ``cache_seqlens`` its
            second extent bounds the tokens fetched per sequence, and rows past a sequence's length
            are left as they are; with ``cu_seqlens`` its first is the room, and rows from
            cu_seqlens[b] on are left as they are.  None allocates: zeros for width * page_size
            tokens per sequence or for ``total`` rows, or n rows.
        dtype: of the result if ``out`` is None: bfloat16, float16 or float32; None: bfloat16, or
            that of a cache of 16 bits.

    Returns:
        (c_kv, k_rope): (b, tokens, 512) and (b, tokens, 64) with ``cache_seqlens``, (total, 512)
        and (total, 64) with ``cu_seqlens``, (n, 512) and (n, 64) for indices.  Of several KV heads
        these, and ``out``, have num_kv_heads before the channels: (n, num_kv_heads, 512).  The
        channels are those of the cache's format, whose RoPE may be none.

    Raises:
        TypeError, ValueError: naming the argument.

    Example:
        cache = snapmla.PagedKVCache.allocate(2, page_size=64, device="cpu")
        where = torch.tensor([64, 65], dtype=torch.int32)  # the first tokens of page 1
        c_kv, k_rope = snapmla.fetch_dequant(cache, where)

    Source: SnapMLA paper, section 3.3.1 (fused fetch-dequant); packed chunks are what chunked
    prefill in vLLM gathers (``gather_and_maybe_dequant_cache``).
    """
    tokens = Tokens(where, cache_seqlens, cu_seqlens, seq_starts, total)
    return calls.run(_FETCH, _FETCH, (cache, tokens, out, dtype))


# of a fetch: cache, tokens, out, dtype
Fetch = tuple[PagedKVCache, Tokens, "torch.Tensor | Fetched | None", "torch.dtype | None"]


class Ready(NamedTuple):
    """Kernel of a launch, and extents of the result before its channels."""

    kernel: variants.Kernel
    rows: tuple[Any, ...]


def _given(out: torch.Tensor | Fetched | None) -> tuple[Any, ...]:
    """The tensors of ``out``, checked or not."""
    if isinstance(out, (tuple, list)):
        return tuple(out)
    return () if out is None else (out,)


def _parts(call: Fetch) -> calls.Parts:
    cache, tokens, out, dtype = call
    where, lengths, begin, starts, total = tokens
    tensors = tuple([t for t in (where, lengths, begin, starts, *_given(out)) if t is not None])
    options = (
        cache.format, cache.num_kv_heads, cache.page_size, dtype, total.__class__, total,
        lengths is None, begin is None, starts is None, out.__class__,
    )  # fmt: skip
    at = [t.data_ptr() for t in tensors]
    return tensors, options, (*at, cache.place, *[ask() for ask in cache.asks])


def _places(call: Fetch, _: object) -> calls.Groups | None:
    cache, tokens, out, dtype = call
    read = [t for t in tokens[:4] if t is not None]
    if not (tracing.plain(cache) and cache.stays and launch.all_on(cache.device, *read)):
        return None
    results: tuple[torch.Tensor, ...] = ()
    if out is not None:
        results = _outputs(out, (), tokens.mode, dtype, cache)
        for part in results:
            _check_aligned(part)
    if isinstance(out, torch.Tensor):  # slices of its rows, which lie side by side
        results = (out,)
    read_spans = *cache.spans, *map(overlap.span, read)
    return *((overlap.span(part),) for part in results), read_spans


def _checked(call: Fetch) -> Fetch:
    cache, tokens, out, dtype = call
    expect_cache(cache)
    check_tokens(tokens, cache.device)
    shape = rows(tokens, cache.page_size, cache.num_kv_heads, given=out is not None)
    if out is None:
        _check_dtype(_dtype_of(cache, dtype))
        return call
    _check_outputs(out, shape, cache)
    c_kv, k_rope = _outputs(out, shape, tokens.mode, dtype, cache)
    for part in (c_kv, k_rope):
        _check_aligned(part)
        checks.distinct("out", part)
    read = {**named("cache", cache), **dict(zip(Tokens._fields[:4], tokens))}
    first, second = ("out", "out") if isinstance(out, torch.Tensor) else ("out[0]", "out[1]")
    checks.apart(first, c_kv, read)
    checks.apart(second, k_rope, {**read, first: c_kv})
    return call


def _dtype_of(cache: PagedKVCache, dtype: torch.dtype | None) -> torch.dtype:
    """Dtype of an allocated result: ``dtype``, else the cache's of 16-bit rows, else BF16."""
    if dtype is None:
        return cache.dtype if FORMATS[cache.format].rows else torch.bfloat16
    return dtype


def _launch(call: Fetch, ready: Ready | None) -> tuple[Fetched, Ready | None]:
    cache, tokens, out, dtype = call
    heads, where, mode, index = cache.num_kv_heads, tokens.where, tokens.mode, torch.int32
    shape = ready.rows if ready is not None else rows(
        tokens, cache.page_size, heads, given=out is not None
    )  # fmt: skip
    c_kv, k_rope = _outputs(out, shape, mode, _dtype_of(cache, dtype), cache)
    if c_kv.numel() == 0 or (mode == "ragged" and not len(where)):
        return (c_kv, k_rope), None
    selector: tuple[Any, ...] = (where,)
    if mode == "pages":
        selector = (where, tokens.cache_seqlens)
    elif mode == "ragged":
        starts = nothing(cache.device) if tokens.seq_starts is None else tokens.seq_starts
        selector = (where, tokens.cu_seqlens, starts)
    else:
        index = where.dtype
    if ready is None:
        kernel = variant_kernel(
            cache.device, "fetch_dequant", in_dtype=FLOAT_NAMES[c_kv.dtype], mode=mode,
            index_dtype=INDEX_NAMES[index], cache_dtype=cache.format,
        )  # fmt: skip
        ready = Ready(kernel, shape)
    parts: tuple[torch.Tensor, ...] = (c_kv, k_rope)
    if FORMATS[cache.format].rope is None:
        parts = (c_kv,)
    if FORMATS[cache.format].rows and heads == 1:
        parts = (c_kv.unsqueeze(-2), k_rope.unsqueeze(-2))
    ready.kernel(*cache.arguments, *selector, *parts)
    return (c_kv, k_rope), ready


def fetch_now(
    cache: PagedKVCache, tokens: Tokens, out: torch.Tensor | Fetched | None, dtype: torch.dtype
) -> Fetched:
    """``fetch_dequant`` on tensors with memory, whoever traces."""
    made, _ = _launch(_checked((cache, tokens, out, dtype)), None)
    return made


def check_tokens(tokens: Tokens, device: torch.device) -> None:
    """Checks all of ``tokens`` but ``total``."""
    where = tokens.where
    checks.not_nested("where", where)
    if not isinstance(where, torch.Tensor) or where.ndim not in (1, 2):
        got = tuple(where.shape) if isinstance(where, torch.Tensor) else type(where).__name__
        checks.value_error("where", "a block table (b, width) or indices (n,)", got)
    if where.ndim == 1:
        checks.tensor("indices", where, tuple(INDEX_NAMES), ("n",), device)
        checks.contiguous("indices", where)
        _absent(tokens, ("cache_seqlens", "cu_seqlens", "seq_starts", "total"), "flat indices")
        return
    b = where.shape[0]
    checks.block_table(where, b, device)
    if tokens.cu_seqlens is not None:
        _absent(tokens, ("cache_seqlens",), "cu_seqlens")
        checks.vector("cu_seqlens", tokens.cu_seqlens, (b + 1,), device)
        if tokens.seq_starts is not None:
            checks.vector("seq_starts", tokens.seq_starts, (b,), device)
        return
    _absent(tokens, ("seq_starts", "total"), "cache_seqlens")
    if b > MAX_FETCHED:
        wanted = f"at most {MAX_FETCHED} sequences"
        checks.value_error("where", wanted, b, "fetch them in several calls")
    if tokens.cache_seqlens is None:
        hint = "one length for each sequence of the batch, or cu_seqlens for packed chunks"
        checks.value_error("cache_seqlens", "int32 (b,) beside a block table", None, hint)
    checks.lengths(tokens.cache_seqlens, b, device)


def _absent(tokens: Tokens, names: Sequence[str], beside: str) -> None:
    """Checks that arguments of another way to name tokens are None."""
    for name in names:
        value = getattr(tokens, name)
        if value is not None:
            got = value if isinstance(value, int) else f"a {type(value).__name__}"
            checks.value_error(name, f"None beside {beside}", got)


def rows(tokens: Tokens, page_size: int, heads: int, *, given: bool) -> tuple[Any, ...]:
    """Extents of the result before its channels, of checked tokens; checks ``total``.

    Args:
        heads: KV heads; one has no extent.
        given: whether the caller gives the result's tensors, which then decide: ``"total"``,
            ``"tokens"``.
    """
    own = () if heads == 1 else (heads,)
    where, total = tokens.where, tokens.total
    if tokens.mode == "pages":
        return where.shape[0], "tokens" if given else where.shape[1] * page_size, *own
    if tokens.mode == "indices":
        return (where.shape[0], *own)
    if given == (total is not None):
        wanted, got = "one of total and out beside cu_seqlens", "both" if given else "neither"
        hint = "out to write into, total for rows to allocate; lengths stay on the device"
        checks.value_error("total", wanted, got, hint)
    if given:
        return ("total", *own)
    if not isinstance(total, torch.SymInt):
        checks.integer("total", total, 0, MAX_TOTAL)
    return (total, *own)


def _traced(call: Fetch) -> Fetched:
    """``fetch_dequant`` as an operator, for tracers."""
    cache, tokens, out, dtype = call
    expect_cache(cache)
    named_, memory = FORMATS[cache.format].named, cache.memory_now()
    own = (memory[0], cache.format) if named_ else memory
    common = (*own, tokens.where, tokens.cache_seqlens)
    chunks = {"cu_seqlens": tokens.cu_seqlens, "seq_starts": tokens.seq_starts}
    ops = torch.ops.snapmla
    if out is None:
        dtype = _dtype_of(cache, dtype)
        allocating = ops.fetch_bytes if named_ else ops.fetch_dequant
        return allocating(*common, dtype, **chunks, total=tokens.total)
    if tokens.total is not None:
        # the operator takes no total beside out
        rows(tokens, cache.page_size, cache.num_kv_heads, given=True)
    if isinstance(out, torch.Tensor):
        out = _split(out, cache)
    (ops.fetch_bytes_out if named_ else ops.fetch_dequant_out)(*common, *out, **chunks)
    return out


_FETCH = calls.Op("fetch_dequant", _checked, _launch, _traced, _parts, _places)
variants.on_forget(_FETCH.memo.forget)  # kernels


def _check_dtype(dtype: torch.dtype) -> None:
    """Checks the dtype of a result that is allocated."""
    if dtype not in FLOAT_NAMES:
        names = " or ".join(checks.dtype_name(d) for d in FLOAT_NAMES)
        checks.type_error("dtype", names, dtype)


def _check_aligned(part: torch.Tensor) -> None:
    """Checks rows of a result, if they have channels."""
    if part.shape[-1]:
        checks.aligned_rows("out", part)


def _split(out: torch.Tensor, cache: PagedKVCache) -> Fetched:
    """Content and RoPE of joint rows."""
    width = FORMATS[cache.format].content.count
    return out[..., :width], out[..., width:]


def _check_outputs(out: Any, shape: tuple[Any, ...], cache: PagedKVCache) -> None:
    """Checks kind and shape of the tensors to write."""
    record, device = FORMATS[cache.format], cache.device
    said = checks.fetched_of(record)
    if isinstance(out, torch.Tensor):
        checks.tensor("out", out, checks.FLOATS, (*shape, record.channels), device, said)
    elif isinstance(out, (tuple, list)) and len(out) == 2:
        c_kv, k_rope = out
        for i, part in enumerate(out):
            if not isinstance(part, torch.Tensor):
                checks.type_error(f"out[{i}]", "a torch.Tensor", checks.class_name(part), said)
        checks.tensor("out[0]", c_kv, checks.FLOATS, (*shape, record.content.count), device, said)
        rope_shape = (*c_kv.shape[:-1], record.rope_channels)
        checks.tensor("out[1]", k_rope, (c_kv.dtype,), rope_shape, device, said)
    else:
        wanted = f"a (..., {record.channels}) tensor or a pair of tensors"
        checks.type_error("out", wanted, type(out).__name__, said)


def _outputs(
    out: torch.Tensor | Fetched | None,
    shape: tuple[Any, ...],
    mode: str,
    dtype: torch.dtype | None,
    cache: PagedKVCache,
) -> Fetched:
    """The two tensors to write: checked ones that are given, or allocated."""
    if out is None:
        make = torch.empty if mode == "indices" else torch.zeros
        record = FORMATS[cache.format]
        return (
            make((*shape, record.content.count), dtype=dtype, device=cache.device),
            make((*shape, record.rope_channels), dtype=dtype, device=cache.device),
        )
    if isinstance(out, torch.Tensor):
        return _split(out, cache)
    c_kv, k_rope = out
    return c_kv, k_rope

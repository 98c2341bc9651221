"""``fetch_index_k``: index keys back from the paged index cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.index_cache import INDEX_DIM, PAGE
from snapmla import checks
from snapmla.cache.fetch import Tokens, check_tokens, rows
from snapmla.cache.quant import FLOAT_NAMES, INDEX_NAMES, variant_kernel
from snapmla.call import memo as calls
from snapmla.checks import overlap
from snapmla.indexer.index_logits import check_cache, pages
from snapmla.runtime import variants
from snapmla.runtime.launch import nothing

Stored = tuple[torch.Tensor, torch.Tensor]
DTYPES = (checks.FP8, *FLOAT_NAMES)
_FLOAT32 = (torch.float32,)


def fetch_index_k(
    cache: torch.Tensor,
    where: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    total: int | None = None,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Reads index keys back, as they are stored or multiplied out.

    Two ways to say which.  ``where`` and ``cu_seqlens``: a chunk of each sequence, packed, such as
    the prefixes that a prompt's queries see.  Flat slots alone: any tokens.  One launch; lengths
    stay on the device, nothing is waited for.  ``index_logits`` reads pages and needs no copy.

    Args:
        cache: uint8 (pages, 64, 132), (pages, 64, 1, 132) or (pages, 8448), as of
            ``index_logits``.
        where: int32 block table (b, width), or int32 or int64 slots (n,), ``page * 64 + offset``;
            a slot outside the pool gives zeros.
        cu_seqlens: int32 (b + 1,), beside a block table: rows [cu_seqlens[r], cu_seqlens[r + 1]) of
            the result are sequence r's; the host never reads it.  Where it does not ascend within
            0..total it is undefined which keys, or zeros, the rows hold, and which are written.
        seq_starts: beside ``cu_seqlens``, int32 (b,): row cu_seqlens[r] + t is token
            seq_starts[r] + t of sequence r.  None: all 0.  A token outside the block table and one
            whose page id is outside the pool give zeros.
        total: room for packed chunks if ``out`` is None: rows of the result.
        out: where to write: a pair (float8_e4m3fn (n, 128), float32 (n,)), or bfloat16, float16 or
            float32 (n, 128), multiplied out; rows of keys may be strided, 16-byte aligned.  Rows
            from cu_seqlens[b] on are left as they are.  None allocates: n rows, or zeros for
            ``total`` rows.
        dtype: of keys if ``out`` is None: float8_e4m3fn (None is that), bfloat16, float16, float32.

    Returns:
        (keys, scales) as they are stored, float8_e4m3fn (n, 128) and float32 (n,); or one tensor
        (n, 128) of a 16- or 32-bit dtype, keys times their scales.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: the lightning indexer of DeepSeek-V3.2; vLLM's ``cp_gather_indexer_k_quant_cache`` reads
    the same bytes.
    """
    tokens = Tokens(where, None, cu_seqlens, seq_starts, total)
    return calls.run(_FETCH, _FETCH, Fetch(cache, tokens, out, dtype))


class Fetch(NamedTuple):
    """A call of ``fetch_index_k``."""

    cache: torch.Tensor
    tokens: Tokens
    out: Any
    dtype: torch.dtype | None

    @property
    def read(self) -> dict[str, torch.Tensor]:
        """Tensors that are given and read, by name."""
        named = {"cache": self.cache, **dict(zip(Tokens._fields[:4], self.tokens))}
        return {name: t for name, t in named.items() if t is not None}

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """Tensors that are given and written."""
        if self.out is None:
            return ()
        return tuple(self.out) if isinstance(self.out, (tuple, list)) else (self.out,)


def _parts(call: Fetch) -> calls.Parts:
    tensors = (*call.read.values(), *call.written)
    total = call.tokens.total
    options = tuple(call.read), call.out.__class__, call.dtype, total.__class__, total
    return tensors, options, tuple([t.data_ptr() for t in tensors])


def _places(call: Fetch, _: object) -> calls.Groups:
    for part in call.written[:1]:
        checks.aligned_rows("out", part)
    read = [overlap.span(t) for t in call.read.values()]
    return *[[overlap.span(t)] for t in call.written], read


def check_where(call: Fetch) -> tuple[Any, ...]:
    """Checks cache and tokens; rows of the result."""
    check_cache(call.cache)
    tokens, device = call.tokens, call.cache.device
    table = isinstance(tokens.where, torch.Tensor) and tokens.where.ndim == 2
    if table and tokens.cu_seqlens is None:
        hint = "packed chunks of each sequence; any tokens at all by their slots alone"
        checks.value_error("cu_seqlens", "int32 (b + 1,) beside a block table", None, hint)
    check_tokens(tokens, device)
    return rows(tokens, PAGE, 1, given=call.out is not None)


def _checked(call: Fetch) -> Fetch:
    (n,) = check_where(call)
    device = call.cache.device
    if call.out is None:
        if call.dtype is not None and call.dtype not in DTYPES:
            wanted = " or ".join(checks.dtype_name(d) for d in DTYPES)
            checks.type_error("dtype", wanted, call.dtype)
        return call
    names: tuple[str, ...] = ("out",)
    if isinstance(call.out, torch.Tensor):
        checks.tensor("out", call.out, checks.FLOATS, (n, INDEX_DIM), device)
    elif isinstance(call.out, (tuple, list)) and len(call.out) == 2:
        names = ("out[0]", "out[1]")
        checks.tensor(names[0], call.out[0], (checks.FP8,), (n, INDEX_DIM), device)
        checks.tensor(names[1], call.out[1], _FLOAT32, (call.out[0].shape[0],), device)
        checks.contiguous(names[1], call.out[1])
    else:
        wanted = "a (n, 128) tensor or a pair (keys, scales)"
        checks.type_error("out", wanted, type(call.out).__name__)
    if call.dtype is not None and call.dtype != call.written[0].dtype:
        checks.value_error("dtype", "None beside out, which has one", call.dtype)
    checks.aligned_rows(names[0], call.written[0])
    checks.distinct(names[0], call.written[0])
    before: dict[str, torch.Tensor | None] = {**call.read}
    for name, part in zip(names, call.written):
        checks.apart(name, part, before)
        before[name] = part
    return call


def outputs(call: Fetch, shape: tuple[Any, ...]) -> Stored:
    """(keys, scales) to write: those given, or allocated; of keys multiplied out no scale."""
    if isinstance(call.out, torch.Tensor):
        return call.out, call.out.new_empty(0, dtype=torch.float32)
    if call.out is not None:
        return call.out[0], call.out[1]
    dtype = checks.FP8 if call.dtype is None else call.dtype
    make = torch.zeros if call.tokens.cu_seqlens is not None else torch.empty
    device, stored = call.cache.device, dtype == checks.FP8
    own = torch.uint8 if stored else dtype
    keys = make((*shape, INDEX_DIM), dtype=own, device=device).view(dtype)
    return keys, make(shape if stored else (0,), dtype=torch.float32, device=device)


def _result(keys: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | Stored:
    return (keys, scales) if keys.dtype == checks.FP8 else keys


def _launch(
    call: Fetch, ready: variants.Kernel | None
) -> tuple[torch.Tensor | Stored, variants.Kernel | None]:
    tokens = call.tokens
    keys, scales = outputs(call, rows(tokens, PAGE, 1, given=call.out is not None))
    if not keys.numel() or (tokens.mode == "ragged" and not len(tokens.where)):
        return _result(keys, scales), None
    stored = keys.dtype == checks.FP8
    selector: tuple[torch.Tensor, ...] = (tokens.where,)
    if tokens.cu_seqlens is not None:
        none = nothing(call.cache.device)
        starts = none if tokens.seq_starts is None else tokens.seq_starts
        selector = (tokens.where, tokens.cu_seqlens, starts)
    if ready is None:
        ready = variant_kernel(
            call.cache.device, "fetch_index_k", mode=tokens.mode,
            key_dtype="fp8" if stored else FLOAT_NAMES[keys.dtype],
            index_dtype="i32" if tokens.mode == "ragged" else INDEX_NAMES[tokens.where.dtype],
        )  # fmt: skip
    ready(pages(call.cache), *selector, keys.view(torch.uint8) if stored else keys, scales)
    return _result(keys, scales), ready


def _traced(call: Fetch) -> torch.Tensor | Stored:
    """The call as an operator, for tracers."""
    if call.out is None:
        _checked(call)
    keys, scales = outputs(call, rows(call.tokens, PAGE, 1, given=call.out is not None))
    stored = keys.dtype == checks.FP8
    where, _, begin, starts, _ = call.tokens
    torch.ops.snapmla.fetch_index_k_out(
        call.cache, where, begin, starts, keys.view(torch.uint8) if stored else keys, scales
    )
    return _result(keys, scales)


def now(call: Fetch) -> None:
    """Checks and launches, whoever traces: what the operator does."""
    _launch(_checked(call), None)


_FETCH = calls.Op("fetch_index_k", _checked, _launch, _traced, _parts, _places)
variants.on_forget(_FETCH.memo.forget)  # kernels

"""DeepGEMM's names for index logits, over this package's kernels.

The arguments are those of DeepGEMM 2.5, positions, names and defaults; results have its shapes,
and rows that begin at multiples of 1024 bytes.  What a row's columns hold outside of what it sees
is whatever memory held, as there, unless ``clean_logits`` asks for -inf.  ``index_logits`` is the
call to prefer: it takes prompts straight from the pages, drafts without the two small launches that
DeepGEMM's lengths cost here, and allocates nothing if ``out`` is given.

Refused, in a sentence: FP4, bfloat16 logits, keys of 32 or 64 channels, pages of 32 tokens, ragged
drafts by ``indices``, compressed columns (``max_seqlen_k``).  Results have the bits of
``index_logits``, not DeepGEMM's: sums over heads have another order.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from dsl_kernels.formats.index_cache import INDEX_DIM, PAGE, PAGE_BYTES, SCALES_AT
from snapmla import checks
from snapmla.indexer.index_logits import check_queries, index_logits, unit_choices
from snapmla.runtime import launch

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]

Tensor = torch.Tensor
_INT32, _FLOAT32 = (torch.int32,), (torch.float32,)
ROW = 256  # elements: rows of logits begin at multiples of 1024 bytes


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """Makes the table that DeepGEMM's scheduler is given: zeros, which nobody reads here.

    Args:
        context_lens: int32 (b, next_n), or (b,) as in older versions.
        block_kv: tokens of a page, 64.
        num_sms: of the device.
        indices: None, where DeepGEMM takes int32 (b,) on SM100.

    Returns:
        int32 (num_sms + 1, 2).

    Raises:
        TypeError, ValueError: naming the argument.

    Source: DeepGEMM.
    """
    _check_lens(context_lens)
    checks.choice("block_kv", block_kv, (PAGE,), "pages of an index cache have 64 tokens")
    checks.integer("num_sms", num_sms, 1)
    _no_indices(indices)
    return context_lens.new_zeros((num_sms + 1, 2))


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """Scores of cached tokens for one or several query tokens of each sequence.

    Args:
        q: float8_e4m3fn (b, next_n, h, 128), contiguous, next_n of 1 or more, h 64 or 32.
        kv_cache: uint8 (pages, 64, 1, 132), pages any multiple of 16 bytes apart.
        weights: float32 (b * next_n, h), contiguous.
        context_lens: int32 (b, next_n).  The last column says how many tokens a sequence has; all
            its query tokens are given scores of all of them, as DeepGEMM does on SM90: how far a
            query token sees is top-k's affair.  Or (b,), as in older versions: query token j then
            sees the first context_lens[i] - next_n + 1 + j.
        block_table: int32 (b, width).
        schedule_meta: int32 (num_sms + 1, 2), or None; not looked at.
        max_context_len: columns.
        clean_logits: whether columns that a query token does not see are -inf; with (b, next_n)
            lengths for next_n 1 only.
        indices: None, where DeepGEMM takes int32 (b,) on SM100.

    Returns:
        float32 (b * next_n, max_context_len).

    Raises:
        TypeError, ValueError: naming the argument.

    Source: DeepGEMM.
    """
    _no_indices(indices)
    _check_lens(context_lens)
    checks.tensor("q", q, (checks.FP8,), ("b", "next_n", "h", INDEX_DIM))
    b, n, heads, _ = q.shape
    checks.tensor("kv_cache", kv_cache, (torch.uint8,), ("pages", PAGE, 1, PAGE_BYTES // PAGE))
    checks.tensor("weights", weights, _FLOAT32, (b * n, heads), q.device)
    checks.contiguous("weights", weights)
    shape = (b,) if context_lens.ndim == 1 else (b, n)
    checks.tensor("context_lens", context_lens, _INT32, shape, q.device)
    checks.block_table(block_table, b, q.device)
    checks.integer("max_context_len", max_context_len, 1, 2**31 - PAGE - n)
    checks.flag("clean_logits", clean_logits)
    lens, beyond = context_lens, 0
    if context_lens.ndim == 2:
        lens, beyond = context_lens[:, -1].contiguous(), n - 1
    if beyond:
        if clean_logits:
            hint = "give lengths (b,), or let top-k leave out what a query token does not see"
            checks.value_error("clean_logits", "False beside lengths (b, next_n)", True, hint)
        # so many more tokens that the first query token sees the last one; pages for them
        lens = torch.where(lens > 0, lens + beyond, lens)
        block_table = torch.nn.functional.pad(block_table, (0, -(-beyond // PAGE)))
    columns = max_context_len + beyond
    logits = q.new_empty((b * n, _up(columns)), dtype=torch.float32)
    if clean_logits:
        logits.fill_(-torch.inf)
    w = weights.view(b, n, heads)
    index_logits(q, w, kv_cache, block_table, lens, out=logits[:, :columns])
    return logits[:, :max_context_len]


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Scores of keys that lie side by side for the query tokens of prompts.

    Keys are copied into pages first, and each query token is given scores of all keys before its
    end, also of those before its start: ``index_logits`` over the index cache reads pages as they
    are, and of each sequence its own.

    Args:
        q: float8_e4m3fn (m, h, 128), contiguous, h 64 or 32.
        kv: keys float8_e4m3fn (n, 128) and their scales, float32 (n,), contiguous.
        weights: float32 (m, h).
        cu_seq_len_k_start, cu_seq_len_k_end: int32 (m,): query token r sees keys [start, end).
        clean_logits: whether what a query token does not see is -inf; costs a pass over the logits.
        max_seqlen_k: 0.

    Returns:
        float32 (m, n), row r right in columns [start, end).

    Raises:
        TypeError, ValueError: naming the argument.

    Source: DeepGEMM.
    """
    keys, scales = _pair("kv", kv, "keys and their scales")
    weights = weights.contiguous() if isinstance(weights, Tensor) else weights
    checks.tensor("q", q, (checks.FP8,), ("m", "h", INDEX_DIM))
    checks.tensor("weights", weights, _FLOAT32, tuple(q.shape[:2]), q.device)
    m, device = check_queries(q, weights), q.device
    checks.tensor("kv[0]", keys, (checks.FP8,), ("n", INDEX_DIM), device)
    n = keys.shape[0]
    checks.tensor("kv[1]", scales, _FLOAT32, (n,), device)
    for name, part in (("kv[0]", keys), ("kv[1]", scales)):
        checks.contiguous(name, part)
    starts, ends = cu_seq_len_k_start, cu_seq_len_k_end
    checks.vector("cu_seq_len_k_start", starts, (m,), device)
    checks.vector("cu_seq_len_k_end", ends, (m,), device)
    checks.flag("clean_logits", clean_logits)
    hint = "columns are those of the keys: read [start, end) of a row"
    checks.choice("max_seqlen_k", max_seqlen_k, (0,), hint)
    group = unit_choices(q.shape[1])[-1]  # query tokens that read a page together
    logits = q.new_empty((m, _up(n + group)), dtype=torch.float32)
    if m and n:
        groups = -(-m // group)
        # every query token of a group sees as many keys as the one that sees most
        most = torch.nn.functional.pad(ends, (0, groups * group - m)).view(groups, group).amax(1)
        begins = torch.arange(groups + 1, dtype=torch.int32, device=device) * group
        width = -(-(n + group - 1) // PAGE)
        table = torch.arange(width, dtype=torch.int32, device=device).expand(groups, -1)
        index_logits(
            q, weights, _pages(keys, scales), table, (most.clamp(max=n) + group - 1).int(),
            cu_seqlens_q=begins.clamp_(max=m), out=logits[:, : n + group - 1],
        )  # fmt: skip
    logits = logits[:, :n]
    if clean_logits:
        column = torch.arange(n, device=device)
        hidden = (column < starts[:, None]) | (column >= ends[:, None])
        logits.masked_fill_(hidden, -torch.inf)
    return logits


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """``fp8_paged_mqa_logits`` by DeepGEMM's newer name.

    Args:
        q: a pair: float8_e4m3fn (b, next_n, h, 128), and None in the place of FP4's scales.
        kv_cache: uint8 (pages, 64, 1, 132).
        weights: float32 (b * next_n, h).
        context_lens: int32 (b, next_n) or (b,), as there.
        block_table: int32 (b, width).
        schedule_meta: int32 (num_sms + 1, 2), or None; not looked at.
        max_context_len: columns.
        clean_logits: as there.
        logits_dtype: float32.
        indices: None, where DeepGEMM takes int32 (b,) on SM100.

    Returns:
        float32 (b * next_n, max_context_len).

    Raises:
        TypeError, ValueError: naming the argument.

    Source: DeepGEMM.
    """
    return fp8_paged_mqa_logits(
        _fp8(q, logits_dtype), kv_cache, weights, context_lens, block_table, schedule_meta,
        max_context_len, clean_logits, indices,
    )  # fmt: skip


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``fp8_mqa_logits`` by DeepGEMM's newer name.

    Args:
        q: a pair: float8_e4m3fn (m, h, 128), and None in the place of FP4's scales.
        kv: float8_e4m3fn (n, 128) and float32 (n,).
        weights: float32 (m, h).
        cu_seq_len_k_start, cu_seq_len_k_end: int32 (m,).
        clean_logits, max_seqlen_k: as there.
        logits_dtype: float32.

    Returns:
        float32 (m, n).

    Raises:
        TypeError, ValueError: naming the argument.

    Source: DeepGEMM.
    """
    own = _fp8(q, logits_dtype)
    bounds = cu_seq_len_k_start, cu_seq_len_k_end
    return fp8_mqa_logits(own, kv, weights, *bounds, clean_logits, max_seqlen_k)


# ---------------------------------------------------------------------------- what they share


def _up(columns: int) -> int:
    return -(-columns // ROW) * ROW


def _pages(keys: Tensor, scales: Tensor) -> Tensor:
    """Keys side by side, (n, 128), as pages (pages, 8448); what lies behind the last is not set."""
    n = keys.shape[0]
    full, rest = divmod(n, PAGE)
    pages = keys.new_empty((full + (rest > 0), PAGE_BYTES), dtype=torch.uint8)
    flat = (keys.view(torch.uint8).view(-1), launch.regular(scales).view(torch.uint8))
    for begin, bytes_ in zip((0, SCALES_AT), flat):
        size = bytes_.shape[0] // n  # of a token
        own = bytes_[: full * PAGE * size].view(full, PAGE * size)
        pages[:full, begin : begin + PAGE * size].copy_(own)
        if rest:
            pages[full, begin : begin + rest * size].copy_(bytes_[full * PAGE * size :])
    return pages


def _pair(name: str, value: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        checks.type_error(name, f"a pair: {what}", type(value).__name__)
    return value[0], value[1]


def _fp8(q: Any, logits_dtype: Any) -> Tensor:
    """The queries of DeepGEMM's pair."""
    own, scales = _pair("q", q, "queries, and their FP4 scales or None")
    if scales is not None:
        _refuse("q", "None in the place of FP4 scales", "FP4 is not built: quantise to float8")
    if logits_dtype != torch.float32:
        wanted = "float32"
        checks.type_error("logits_dtype", wanted, logits_dtype, "top-k takes float32 scores")
    return own


def _no_indices(indices: Any) -> None:
    if indices is not None:
        hint = "ragged drafts are index_logits(cu_seqlens_q=)"
        _refuse("indices", "None", hint)


def _refuse(name: str, wanted: str, hint: str) -> NoReturn:
    checks.value_error(name, wanted, "a tensor", hint)


def _check_lens(value: Any) -> None:
    two = isinstance(value, Tensor) and value.ndim == 2
    checks.tensor("context_lens", value, _INT32, ("b", "next_n") if two else ("b",))

"""vLLM's names for the indexer's ops, over this package's kernels.

Signatures are those of ``vllm._custom_ops`` (and of ``torch.ops._C.persistent_topk``).  Results are
exact and deterministic, in ascending order of position; vLLM's are in any order, and its ties by
arrival.  Whole rows are written, with ``-1`` behind what was selected, so that buffers need not be
filled first.  Indices are positions, as there; ``select_topk`` with a block table, or
``index_topk``, gives cache slots at once and saves the conversion.
"""

from __future__ import annotations

from typing import Any

import torch

from dsl_kernels.formats.index_cache import INDEX_DIM
from snapmla import checks
from snapmla.indexer.append_index_k import append_index_k
from snapmla.indexer.fetch_index_k import fetch_index_k
from snapmla.indexer.select_topk import select_topk
from snapmla.runtime import launch

__all__ = [
    "cp_gather_indexer_k_quant_cache",
    "indexer_k_quant_and_cache",
    "persistent_topk",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
]

Tensor = torch.Tensor
_INT32, _FLOAT32 = (torch.int32,), (torch.float32,)


def top_k_per_row_decode(
    logits: Tensor,
    next_n: int,
    seq_lens: Tensor,
    raw_topk_indices: Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """The highest scores of each query token of decode, in place.

    One launch; of drafts with lengths (b,) a small one or two before it.

    Args:
        logits: float32 (num_rows or more, columns), rows any number of elements apart.
        next_n: query tokens of each sequence.
        seq_lens: int32 (b,), tokens of each sequence, of which row j of next_n sees
            seq_lens[i] - next_n + 1 + j; or (b, next_n), what each row sees.
        raw_topk_indices: int32 (num_rows or more, topk_tokens or more): written in its first rows
            and columns.
        num_rows: rows, b * next_n.
        stride0, stride1: strides of ``logits``.
        topk_tokens: how many are wanted, 1 to 2048.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: vLLM.
    """
    checks.integer("next_n", next_n, 1)
    rows = _rows(logits, num_rows, stride0, stride1)
    if num_rows % next_n:
        checks.value_error("next_n", f"a divisor of the {num_rows} rows", next_n)
    two = isinstance(seq_lens, Tensor) and seq_lens.ndim == 2
    b = num_rows // next_n
    checks.tensor("seq_lens", seq_lens, _INT32, (b, next_n) if two else (b,), logits.device)
    if two:
        lengths = seq_lens.reshape(-1)
    elif next_n == 1:
        lengths = seq_lens.contiguous()
    else:
        behind = torch.arange(1 - next_n, 1, dtype=torch.int32, device=logits.device)
        lengths = (seq_lens[:, None] + behind).view(-1)
    _select(rows, lengths, raw_topk_indices, topk_tokens)


def top_k_per_row_prefill(
    logits: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    raw_topk_indices: Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """The highest scores of each query token of a prompt, columns ks to ke of its row, in place.

    Args:
        logits: float32 (num_rows or more, columns), rows any number of elements apart.
        cu_seqlen_ks, cu_seqlen_ke: int32 (num_rows,) or more.
        raw_topk_indices: int32 (num_rows or more, topk_tokens or more); positions count from ks.
        num_rows: rows.
        stride0, stride1: strides of ``logits``.
        topk_tokens: how many are wanted, 1 to 2048.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: vLLM.
    """
    rows = _rows(logits, num_rows, stride0, stride1)
    bounds = []
    for name, value in (("cu_seqlen_ks", cu_seqlen_ks), ("cu_seqlen_ke", cu_seqlen_ke)):
        checks.tensor(name, value, _INT32, ("num_rows",), logits.device)
        if value.shape[0] < num_rows:
            checks.value_error(name, f"{num_rows} entries or more", value.shape[0])
        bounds.append(value[:num_rows].contiguous())
    starts, ends = bounds
    _select(rows, ends - starts, raw_topk_indices, topk_tokens, starts)


def persistent_topk(
    logits: Tensor, lengths: Tensor, output: Tensor, workspace: Tensor | None, k: int,
    max_seq_len: int,
) -> None:  # fmt: skip
    """The highest scores of each row, in place.

    Args:
        logits: float32 (rows, columns), rows any number of elements apart.
        lengths: int32 (rows,) or (b, next_n), scores of each row.
        output: int32 (rows, k or more).
        workspace: uint8 (bytes,), or None; not looked at.
        k: how many are wanted, 1 to 2048.
        max_seq_len: not looked at.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: vLLM.
    """
    two = isinstance(lengths, Tensor) and lengths.ndim == 2
    checks.tensor("lengths", lengths, _INT32, ("b", "next_n") if two else ("rows",))
    _select(logits, lengths.reshape(-1), output, k)


def indexer_k_quant_and_cache(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, quant_block_size: int, kv_cache_dtype: str
) -> None:
    """Quantises index keys and scatters them into the index cache, in place.

    Args:
        k: bfloat16, float16 or float32 (n, 128), normalised, RoPE applied.
        kv_cache: uint8 (pages, 64, 132).
        slot_mapping: int64 or int32 (n,) or more, of which the first n count; negative slots are
            skipped.
        quant_block_size: channels that share a scale, 128.
        kv_cache_dtype: vLLM's ``scale_fmt``: "ue8m0" rounds scales up to powers of two, anything
            else does not.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: vLLM.
    """
    checks.choice("quant_block_size", quant_block_size, (INDEX_DIM,), "a key has one scale")
    if isinstance(slot_mapping, Tensor) and isinstance(k, Tensor) and slot_mapping.ndim == 1:
        slot_mapping = slot_mapping[: k.shape[0]]
    scale = "ue8m0" if kv_cache_dtype == "ue8m0" else "free"
    try:
        append_index_k(kv_cache, k, slot_mapping, scale=scale)
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, {"cache": "kv_cache"}) from None


def cp_gather_indexer_k_quant_cache(
    kv_cache: Tensor, dst_k: Tensor, dst_scale: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> None:
    """Copies the first tokens' index keys of each sequence out of the pages, packed, in place.

    ``index_logits`` reads the pages: our prefill needs no such copy.

    Args:
        kv_cache: uint8 (pages, 64, 132).
        dst_k: float8_e4m3fn or uint8 (n, 128), written; rows behind the last are left as they are.
        dst_scale: uint8 (n, 4) or float32 (n,) or (n, 1), contiguous, written likewise.
        block_table: int32 (b, width).
        cu_seq_lens: int32 (b + 1,): where each sequence's rows begin, and their end.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: vLLM.
    """
    checks.tensor("dst_k", dst_k, (checks.FP8, torch.uint8), ("n", INDEX_DIM))
    n = dst_k.shape[0]
    as_bytes = isinstance(dst_scale, Tensor) and dst_scale.dtype == torch.uint8
    flat = isinstance(dst_scale, Tensor) and dst_scale.ndim == 1
    shape = (n, 4) if as_bytes else (n,) if flat else (n, 1)
    checks.tensor("dst_scale", dst_scale, (torch.uint8, torch.float32), shape, dst_k.device)
    checks.contiguous("dst_scale", dst_scale)
    checks.tensor("block_table", block_table, _INT32, ("b", "width"), dst_k.device)
    out = dst_k.view(checks.FP8), launch.regular(dst_scale).view(torch.float32).view(n)
    try:
        fetch_index_k(kv_cache, block_table, cu_seqlens=cu_seq_lens, out=out)
    except (TypeError, ValueError) as error:
        names = {"cache": "kv_cache", "cu_seqlens": "cu_seq_lens", "out[0]": "dst_k"}
        raise checks.renamed(error, {**names, "out[1]": "dst_scale"}) from None


# ---------------------------------------------------------------------------- what they share


def _rows(logits: Any, num_rows: Any, stride0: Any, stride1: Any) -> Tensor:
    """The rows that count, of logits whose strides are what the caller says."""
    checks.tensor("logits", logits, _FLOAT32, ("rows", "columns"))
    checks.integer("num_rows", num_rows, 0, logits.shape[0])
    names = ("stride0", "stride1")
    for name, told, is_, n in zip(names, (stride0, stride1), logits.stride(), logits.shape):
        if told != is_ and n > 1:
            checks.value_error(name, f"{is_}, that of logits", told, "another view is another call")
    return logits[:num_rows]


def _select(
    logits: Tensor, lengths: Tensor, out: Any, k: int, starts: Tensor | None = None
) -> None:
    """Top-k into the first rows and columns of ``out``."""
    checks.tensor("raw_topk_indices", out, _INT32, ("rows", "topk_tokens"), logits.device)
    checks.integer("topk_tokens", k, 1)
    rows = logits.shape[0]
    if out.shape[0] < rows or out.shape[1] < k:
        wanted = f"({rows}, {k}) or more"
        checks.value_error("raw_topk_indices", wanted, tuple(out.shape))
    select_topk(logits, lengths, k, row_starts=starts, out=out[:rows, :k])

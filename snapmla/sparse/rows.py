"""Sparse decode over a BF16 cache, by the kernels of ``sparse_prefill``; not public yet.

Few query tokens would leave most SMs idle (2 tokens of 16 heads are 2 work tiles of 32 tiles each,
some 45 us of one gather's latency), so lists are split into pieces and merged; many are one launch
without.  Which it is follows from shapes alone, and so does all of a ``RowsPlan``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from dsl_kernels.dims import KV_LORA_RANK, TOKEN_TILE
from dsl_kernels.spec import VariantSpec
from snapmla import checks, runtime
from snapmla.cache import PagedKVCache, expect_cache
from snapmla.decode_plan.choices import choices
from snapmla.plan import sm_count
from snapmla.sparse.plan import MAX_TOPK
from snapmla.sparse.prefill import row_tile_of, sparse_prefill

Tensor = torch.Tensor
MAX_PIECES = 32  # of a list; merge reads up to 16 at once


@dataclass(frozen=True, eq=False)
class RowsPlan:
    """Memory of split lists, and how wide their pieces are; a plan serves all layers and steps of
    its shape on one stream.

    Attributes:
        batch, s_q, num_heads, topk: of the calls.
        pieces, width: of each list; ``width`` entries, a multiple of 64, are a piece.
        o_accum: float32 (b * s_q * pieces, h, 512); empty where nothing is split.
        lse_accum: float32 (b * s_q * pieces, h).
        split_begin: int32 (b * s_q + 1,). units: int32 (b * s_q, 2), or (0, 2) with one token a
            sequence.
    """

    batch: int
    s_q: int
    num_heads: int
    topk: int
    pieces: int
    width: int
    o_accum: Tensor
    lse_accum: Tensor
    split_begin: Tensor
    units: Tensor


def pieces_of(tokens: int, num_heads: int, topk: int, sms: int) -> tuple[int, int]:
    """(pieces, width) that fill ``sms`` with work tiles, each of at least one tile."""
    blocks = tokens * -(-num_heads // row_tile_of(num_heads))
    tiles = -(-topk // TOKEN_TILE)
    most = min(max(sms // max(blocks, 1), 1), MAX_PIECES, tiles)
    width = -(-tiles // most)
    return -(-tiles // width), width * TOKEN_TILE


def plan_rows(
    num_heads: int,
    s_q: int,
    *,
    topk: int,
    batch: int,
    device: torch.device | str | int = "cuda",
    num_splits: int | None = None,
) -> RowsPlan:
    """A plan of ``sparse_decode_rows``.

    Args:
        num_heads: 1 to 128.
        s_q: query tokens of every sequence.
        topk: width of ``indices``.
        batch: sequences.
        device: of the tensors.
        num_splits: pieces of a list, at most; None fills the device.  Results of one width have
            the same bits in any batch.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    num_heads, s_q = checks.num_heads(num_heads), checks.s_q(s_q)
    topk = checks.integer("topk", topk, 1, MAX_TOPK)
    tokens, where = checks.integer("batch", batch, 0) * s_q, checks.device("device", device)
    pieces, width = pieces_of(tokens, num_heads, topk, sm_count(where))
    if num_splits is not None:
        tiles = -(-topk // TOKEN_TILE)
        width = -(-tiles // checks.integer("num_splits", num_splits, 1, MAX_PIECES)) * TOKEN_TILE
        pieces = -(-topk // width)
    slots = tokens * pieces if pieces > 1 else 0
    begins = torch.arange(tokens + 1, dtype=torch.int32, device=where)
    rows = torch.stack((begins[:-1], begins[1:]), 1) * num_heads
    return RowsPlan(
        batch, s_q, num_heads, topk, pieces, width,
        torch.empty(slots, num_heads, KV_LORA_RANK, device=where),
        torch.empty(slots, num_heads, device=where),
        begins * pieces, rows[: 0 if s_q == 1 else tokens].contiguous(),
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _kernel(device: torch.device, row_tile: int) -> runtime.Kernel:
    arch = runtime.arch_of(device)
    spec = VariantSpec(
        op="sparse_prefill", arch=arch, row_tile=row_tile, d_qk=576, lists="split"
    )  # fmt: skip
    return runtime.kernel(spec, device.type)


runtime.on_forget(_kernel.cache_clear)


def sparse_decode_rows(
    q: Tensor,
    cache: PagedKVCache,
    indices: Tensor,
    *,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    plan: RowsPlan | None = None,
    lse_base: str = "e",
    empty_lse: str = "-inf",
) -> tuple[Tensor, Tensor]:
    """Attention of each query token to the tokens of a BF16 cache that it names.

    Args:
        q: bfloat16 (b, s_q, h, 576), contiguous, 1 to 128 heads.
        cache: a ``PagedKVCache`` of bfloat16 with one KV head, whose pages follow one another.
        indices: int32 (b, s_q, topk), slots of the cache (page * page_size + offset); negative
            ones, and those behind the cache, are none.
        softmax_scale, topk_length, attn_sink, lse_base, empty_lse: as of ``decode`` with
            ``indices``.
        plan: of ``plan_rows``; None makes one.

    Returns:
        (out, lse): bfloat16 (b, s_q, h, 512), float32 (b, h, s_q).

    Raises:
        TypeError, ValueError: naming the argument.
        VariantError: there is no kernel for the device.

    Source: our own; FlashMLA's ``flash_mla_sparse_fwd`` is what others call here.
    """
    rows = _flat_rows(cache)
    checks.tensor("q", q, (torch.bfloat16,), ("b", "s_q", "h", 576), rows.device)
    checks.contiguous("q", q)
    b, s_q, heads, _ = q.shape
    checks.tensor("indices", indices, (torch.int32,), (b, s_q, "topk"), q.device)
    checks.contiguous("indices", indices)
    scale = checks.softmax_scale(softmax_scale)
    if topk_length is not None:
        checks.vector("topk_length", topk_length, (b,), q.device)
        if s_q > 1:
            topk_length = topk_length.repeat_interleave(s_q)
    if attn_sink is not None:
        checks.tensor("attn_sink", attn_sink, (torch.float32,), (heads,), q.device)
        checks.contiguous("attn_sink", attn_sink)
    _, factor, empty = choices(False, lse_base, empty_lse)
    asked = (b, s_q, heads, indices.shape[-1])
    if plan is None:
        plan = plan_rows(heads, s_q, topk=asked[-1], batch=b, device=q.device)
    elif (plan.batch, plan.s_q, plan.num_heads, plan.topk) != asked:
        made = (plan.batch, plan.s_q, plan.num_heads, plan.topk)
        checks.value_error("plan", f"one made for (b, s_q, h, topk) = {asked}", made)
    tokens, lists = q.flatten(0, 1), indices.view(b * s_q, 1, -1)
    if plan.pieces == 1 or not rows.shape[0]:
        out, _, sums = sparse_prefill(
            tokens, rows, lists, scale, attn_sink=attn_sink, topk_length=topk_length
        )
        sums = torch.where(sums == math.inf, empty, sums * (factor / math.log(2)))
        return out.view(b, s_q, heads, -1), sums.view(b, s_q, heads).transpose(1, 2).contiguous()
    out = q.new_empty((b, s_q, heads, KV_LORA_RANK))
    lse = q.new_empty((b, heads, s_q), dtype=torch.float32)
    if b:
        _launch(
            (tokens, rows, lists, topk_length, attn_sink), (out, lse), plan, (scale, factor, empty)
        )
    return out, lse


def _launch(
    read: tuple[Any, ...], results: tuple[Tensor, Tensor], plan: RowsPlan, numbers: Any
) -> None:
    """The kernel over pieces, and the merge behind it."""
    tokens, rows, lists, lengths, sink = read
    s_q, heads, _ = tokens.shape
    row_tile, device = row_tile_of(heads), tokens.device
    work = s_q * plan.pieces * -(-heads // row_tile)
    none = torch.empty(0, device=device)
    _kernel(device, row_tile)(
        tokens, rows, lists, none.int() if lengths is None else lengths,
        none if sink is None else sink, plan.split_begin, plan.units, *results, plan.o_accum,
        plan.lse_accum, *numbers, plan.width, min(sm_count(device), work),
    )  # fmt: skip


def _flat_rows(cache: PagedKVCache) -> Tensor:
    """(tokens, 1, 576) of the cache's pages; checks that there is such a view."""
    expect_cache(cache)
    if cache.format != "bf16" or cache.num_kv_heads != 1:
        got = f"{cache.format} with {cache.num_kv_heads} KV heads"
        checks.value_error("cache", "a cache of bfloat16 with one KV head", got)
    kv = cache.kv
    assert kv is not None  # of all caches of rows
    pages, size = kv.shape[:2]
    if pages > 1 and kv.stride(0) != size * kv.stride(1):
        wanted = f"pages that follow one another, {size * kv.stride(1)} elements apart"
        checks.value_error("cache", wanted, f"strides {kv.stride()}")
    return kv.as_strided((pages * size, 1, 576), (kv.stride(1), 576, 1))

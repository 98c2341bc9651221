"""``sparse_prefill`` straight from the FP8 cache: sparse decode by a plan that splits nothing.

Each query token is a sequence of one token.  Of a prompt of thousands every SM has many, so that no
list need be cut; then the decode kernel is one whose CTAs stay and take list after list, with
nothing to merge and no partial rows.  A form of its own, which finds its work without a plan, would
save 44 bytes a query token and a launch a step: 180 KB beside 537 MB of results, and some 10 us
beside 3.5 ms (4096 tokens, 128 heads).
"""

from __future__ import annotations

from typing import Any

import torch

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, TOKEN_TILE
from dsl_kernels.formats.format import Format
from dsl_kernels.formats.registered import DEFAULT, FORMATS
from snapmla import checks
from snapmla.cache.paged import PagedKVCache, expect_cache
from snapmla.cache.quant import QuantizedQuery
from snapmla.sparse.decode import sparse_decode
from snapmla.sparse.plan import MAX_TOPK, SparsePlan, plan_sparse_decode
from snapmla.sparse.rows_plan import MAKE_PLAN

Tensor = torch.Tensor
FP8Results = tuple[Tensor, None, Tensor]


def plan_sparse_prefill(
    num_heads: int,
    s_q: int | None = None,
    *,
    topk: int,
    topk_length: Tensor | None = None,
    device: torch.device | str | int | None = None,
    row_tile: int | None = None,
    check_stale: bool | None = None,
    accuracy: str = "standard",
) -> SparsePlan:
    """Plans ``sparse_prefill`` over an FP8 cache; share the plan between the layers of a step.

    It is a plan of ``plan_sparse_decode`` that splits no list; results have the bits of ``decode``
    with ``indices`` by any such plan.  It has 44 bytes a query token, and no partial rows.

    Args:
        num_heads: 1 to 128.
        s_q: query tokens; None where ``topk_length`` says it.
        topk: width of ``indices``.
        topk_length: int32 (s_q,), as of the call; None: all entries count.  One that changes wants
            ``plan.update_(topk_length)``.
        device: where the step runs, where no ``topk_length`` says it.
        row_tile, check_stale, accuracy: as in ``plan_sparse_decode``.

    Returns:
        The plan.

    Raises:
        TypeError, ValueError: naming the argument.
        VariantError: the planning kernel is not there.

    Example:
        plan = snapmla.plan_sparse_prefill(16, 4, topk=64, device="cpu")

    Source: our own.
    """
    topk = checks.integer("topk", topk, 1, MAX_TOPK)
    if s_q is None and topk_length is None:
        checks.type_error("s_q", "an int", "None", "it is topk_length that says it otherwise")
    if s_q is not None and topk_length is not None and len(topk_length) != s_q:
        checks.value_error("s_q", f"{len(topk_length)}, as topk_length", s_q)
    return plan_sparse_decode(
        num_heads, 1, topk=topk, topk_length=topk_length, batch=s_q, device=device,
        row_tile=row_tile, fixed_split_tokens=-(-topk // TOKEN_TILE) * TOKEN_TILE,
        check_stale=check_stale, accuracy=accuracy,
    )  # fmt: skip


def prefill_from_fp8(
    q: Any,
    cache: PagedKVCache,
    indices: Any,
    softmax_scale: float,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    plan: SparsePlan | None,
) -> FP8Results:
    """Computes ``sparse_prefill``'s results over an FP8 cache; arguments and errors as there."""
    expect_cache(cache)
    record = FORMATS[cache.format]
    if not record.one_scale:
        checks.value_error(
            "kv", f"a cache of format {DEFAULT!r}", f"one of {cache.format!r}",
            _hint(record),
        )  # fmt: skip
    if not isinstance(q, QuantizedQuery):
        hint = "an FP8 cache wants quantize_q's query"
        checks.type_error("q", "a snapmla.QuantizedQuery", type(q).__name__, hint)
    if not q.ragged:
        checks.value_error("q", "a query of (s_q, h) rows", q.rows_shape)
    s_q, heads = q.rows_shape
    checks.tensor("indices", indices, (torch.int32,), (s_q, 1, "topk"), q.device)
    if topk_length is not None:
        checks.vector("topk_length", topk_length, (s_q,), q.device)
    if out is not None:
        checks.tensor("out", out, (torch.bfloat16,), (s_q, heads, KV_LORA_RANK), q.device)
        checks.contiguous("out", out)
    if lse is not None:
        checks.tensor("lse", lse, (torch.float32,), (s_q, heads), q.device)
        checks.contiguous("lse", lse)
    if plan is None:
        plan = plan_sparse_prefill(
            heads, s_q, topk=indices.shape[-1], topk_length=topk_length, device=q.device
        )
    elif isinstance(plan, SparsePlan) and plan.topk != indices.shape[-1]:
        wanted = f"one made for topk {indices.shape[-1]}, the width of indices"
        checks.value_error("plan", wanted, plan.topk, MAKE_PLAN.replace("_decode", "_prefill"))
    one = QuantizedQuery(*(x.unsqueeze(1) for x in (q.nope, q.rope, q.scale)))
    made, sums = sparse_decode(
        one, cache, indices, softmax_scale=softmax_scale, topk_length=topk_length,
        attn_sink=attn_sink, plan=plan, empty_lse="+inf",
        out=None if out is None else out.unsqueeze(1),
        lse=None if lse is None else lse.unsqueeze(2),
    )  # fmt: skip
    return (
        made.squeeze(1) if out is None else out, None, sums.squeeze(2) if lse is None else lse
    )  # fmt: skip


def _hint(record: Format) -> str:
    """Advice for a cache of another format."""
    if record.rows:
        if record.lists_of_rows:
            return f"give its rows as kv, (tokens, 1, {record.channels})"
        return "the kernels read BF16 rows or the FP8 cache"
    if record.channels == HEAD_DIM_QK:
        return "its rows are faster by way of BF16: fetch_dequant, then those as kv"
    return "snapmla.decode(indices=) reads its tokens, each query token as a sequence of its own"

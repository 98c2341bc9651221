"""The front door of decode: ``decode``, dense or, with ``indices``, sparse."""

from __future__ import annotations

import torch

from snapmla import checks
from snapmla.cache.paged import PagedKVCache
from snapmla.cache.quant import QuantizedQuery
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.dense import DecodePlan
from snapmla.dense import decode as dense
from snapmla.dense.call_checks import expect_query_of, planned
from snapmla.dense.decode import Call
from snapmla.dense.witness import Witness
from snapmla.sparse.decode import sparse_decode
from snapmla.sparse.rows_plan import SparseRowsPlan


def decode(
    q: QuantizedQuery | torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    cache: PagedKVCache,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    *,
    softmax_scale: float,
    plan: DecodePlan | SparseRowsPlan | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lse_base: str = "e",
    empty_lse: str = "-inf",
    out_dtype: torch.dtype | None = None,
    pipeline: str | None = None,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    row_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * Q K^T) V over each sequence's cached tokens, where V is the latent.

    With ``plan``, ``out`` and ``lse`` given, a call is two launches by one exported function (one
    launch if the plan's shapes rule out splits): no synchronisation, no allocation, no copy to the
    device.  Several KV heads, and pages of more than 128 tokens, cost a few small launches and
    allocations more.  Where calls are recorded or watched (``torch.compile``, ``make_fx``,
    FakeTensors, dispatch modes) it is one node, ``torch.ops.snapmla.decode``, or ``dense_decode``
    over 16 bits and bytes; without a plan, ``torch.compile`` runs it between two graphs.  Inside
    ``torch.func`` transforms (vmap, grad) it is refused.  Results never require grad: this is
    inference.

    Args:
        q: from ``quantize_q``; (b, s_q, h, ...), or ragged (total_q, h, ...), which needs a plan.
            With a 16-bit cache bfloat16 or float16, as the cache, (b, s_q, h, 576) or ragged,
            contiguous; with several KV heads query heads j * g to (j + 1) * g - 1 read KV head j,
            where g = h / num_kv_heads.  Over formats of bytes bfloat16 of as many channels as K
            has: 576 of ``fp8_ds_mla``, else 512.  With ``indices`` over ``fp8_ds_mla``, ``fp8_v4``
            and BF16 also (q_nope, q_rope), both bfloat16: content, (b, s_q, h, 512) or 448 of
            ``fp8_v4``, and RoPE, (b, s_q, h, 64), whose rows each lie any multiple of 16 bytes
            apart, evenly over tokens and heads.
        cache: pages that ``block_table`` points into.
        block_table: int32 (b, width); row i lists the pages of sequence i.  Entries past a
            sequence's end may be anything.
        cache_seqlens: int32 (b,), tokens per sequence, the new ones included; 0 is fine.
        softmax_scale: factor of the logits, positive, at most 2**57, with ``indices`` over a BF16
            cache 2**16 (there a row with a logit of 2**31 or more, times log2 e, is NaN in ``out``
            and ``lse``).  There is no default: DeepSeek's models want ``192**-0.5 * mscale**2``,
            FlashMLA's default is ``576**-0.5``.
        plan: from ``plan_decode`` for these ``cache_seqlens``; None plans here (and allocates).
        causal: query token s of s_q sees the first ``length - (s_q - 1 - s)`` tokens; False: all,
            with a plan made so.  Of no effect with a plan that has ``row_seqlens``.
        out: bfloat16 or float32 (b, s_q, h, 512) or (total_q, h, 512), contiguous, memory of its
            own; None allocates.  With a 16-bit cache of its dtype.
        lse: float32 (b, h, s_q) or (h, total_q), contiguous, memory of its own; None allocates.
        lse_base: ``e`` for the natural logarithm of the sum of exponentials, ``2`` for base 2.
        empty_lse: LSE of a row that sees no token, ``-inf`` or ``+inf``; its output is 0.
        out_dtype: dtype of an allocated ``out``; None: bfloat16, or that of a 16-bit cache.
        pipeline: decode pipeline of a plan made here; must agree with a given plan.
        indices: sparse attention, over a cache of format ``fp8``, ``fp8_ds_mla``, ``fp8_v4``,
            ``fp8_v41_planar``, ``fp8_v41_rows`` or ``fp8_nope``, or a BF16 cache with one KV head
            whose pages follow one another: int32 (b, s_q, topk), or with ragged queries, which BF16
            does not take, (total_q, topk): what each query token attends to, as page * page_size +
            offset, in any order.  What is negative or behind the pool is no token, anywhere in the
            row, and never read; a token that is named twice counts twice.  ``block_table`` and
            ``cache_seqlens`` are then not looked at, there is no causal rule, and ``plan`` comes
            from ``plan_sparse_decode``.
        topk_length: int32 (b,): how many entries of each row of a sequence count, the first ones;
            what is behind them is not read.  None: those that the plan was made for, or all.
        attn_sink: float32 (h,), with ``indices``: a logit a head that weighs in ``out`` and has no
            value, of natural units: out is multiplied by 1 / (1 + exp(sink - lse)).  ``lse`` is
            without it.
        cu_seqlens_q: a witness of a plan for ragged queries: int32 (b + 1,), this step's own
            offsets.  A query token whose request, place in it or length the plan knows otherwise
            gets NaN in ``out`` and ``lse``, never another request's values; so does a token before
            ``cu_seqlens_q[b]`` that the plan does not know.
        row_seqlens: a witness of a plan with ``row_seqlens`` (with ``indices``: with
            ``row_lengths``), int32 (b, s_q) or (total_q,): it is read in place of the plan's copy,
            and tokens that see more than their tiles in the plan get NaN.  Without a plan it is
            planned by.

    Returns:
        (out, lse).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        VariantError: no compiled kernel fits and none can be compiled.

    Example:
        cache = snapmla.PagedKVCache.allocate(2, page_size=64, device="cpu")
        table, lengths = torch.tensor([[1]]).int(), torch.tensor([3]).int()
        kv, slots = torch.randn(3, 576).bfloat16(), torch.arange(64, 67)  # the start of page 1
        snapmla.append_kv(cache, kv[:, :512], kv[:, 512:], slots)
        q = torch.randn(1, 1, 16, 576).bfloat16()
        query = snapmla.quantize_q(q[..., :512], q[..., 512:])
        plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=1)
        out, lse = snapmla.decode(query, cache, table, lengths, softmax_scale=192**-0.5, plan=plan)

    Source: SnapMLA paper, Eq. 6 (logits in the scaled domain) and Algorithm 1 (``dual_wg``);
    FlashMLA-ETAP (the transposed form of ``etap``); rounding as docs/numerics.md says.
    """
    if indices is not None:
        return sparse_decode(
            q, cache, indices, softmax_scale=softmax_scale, topk_length=topk_length,
            attn_sink=attn_sink, plan=plan, out=out, lse=lse, lse_base=lse_base,
            empty_lse=empty_lse, out_dtype=out_dtype, pipeline=pipeline,
            witness=Witness.of(cu_seqlens_q, row_seqlens),
        )  # fmt: skip
    if topk_length is not None or attn_sink is not None:
        _refuse_without_indices(topk_length)
    call: Call = (
        q, cache, block_table, cache_seqlens, plan, out, lse,
        (softmax_scale, causal, lse_base, empty_lse), out_dtype, pipeline,
        None if cu_seqlens_q is row_seqlens is None else Witness(cu_seqlens_q, row_seqlens),
    )  # fmt: skip
    return calls.run(_DECODE, plan if pipeline is None else None, call)


def _refuse_without_indices(topk_length: object) -> None:
    name = "attn_sink" if topk_length is None else "topk_length"
    checks.value_error(name, "None without indices", "a value", "dense decode has neither")


def _traced(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """``decode`` as an operator, for tracers; arguments checked."""
    q, cache, block_table, cache_seqlens, plan, out, lse, options, out_dtype, pipeline, own = call
    expect_query_of(q, cache)
    if plan is None:
        if tracing.by_dynamo():
            return tracing.between_graphs(
                decode, q, cache, block_table, cache_seqlens, plan=plan, out=out, lse=lse,
                softmax_scale=options[0], causal=options[1], lse_base=options[2],
                empty_lse=options[3], out_dtype=out_dtype, pipeline=pipeline,
                **({} if own is None else own.named),
            )  # fmt: skip
        plan = planned(q, cache, block_table, cache_seqlens, pipeline, options[1], own)
    return dense.traced((*call[:4], plan, *call[5:]))


_DECODE = calls.Op(
    "decode", dense.with_plan, dense.launch_checked, _traced, dense.parts, dense.places
)

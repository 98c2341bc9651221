"""``decode``: MLA attention of a few query tokens per sequence over the paged FP8 cache."""

from __future__ import annotations

import functools
import math

import torch

from dsl_kernels.spec import KV_LORA_RANK, VariantSpec, decode_spec
from snapmla import checks, runtime
from snapmla.cache import PagedKVCache
from snapmla.plan import DecodePlan, plan_decode
from snapmla.quant import QuantizedQuery, _expect_cache, _expect_query

_LSE_FACTOR = {"e": math.log(2.0), "2": 1.0}
_EMPTY_LSE = {"-inf": -math.inf, "+inf": math.inf}
_OUT = {torch.bfloat16: "bf16", torch.float32: "f32"}


@functools.lru_cache(maxsize=256)
def _kernels(
    device: torch.device, pipeline: str, row_tile: int, page_size: int, out: str
) -> tuple[runtime.Kernel, runtime.Kernel]:
    """(decode, merge) for one device and combination of axes."""
    arch = runtime.arch_of(device)
    merge_spec = VariantSpec(op="merge", arch=arch, out_dtype=out)
    spec = decode_spec(pipeline, row_tile, page_size, out, arch)
    return runtime.kernel(spec, device.type), runtime.kernel(merge_spec, device.type)


runtime.on_forget(_kernels.cache_clear)


def decode(
    q: QuantizedQuery,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    softmax_scale: float,
    plan: DecodePlan | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lse_base: str = "e",
    empty_lse: str = "-inf",
    out_dtype: torch.dtype | None = None,
    pipeline: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * Q K^T) V over each sequence's cached tokens, where V is the latent.

    With ``plan``, ``out`` and ``lse`` given, a call is two launches: no synchronisation, no
    allocation, no copy to the device.

    Args:
        q: from ``quantize_q``; (b, s_q, h, ...).
        cache: pages that ``block_table`` points into.
        block_table: int32 (b, width); row i lists the pages of sequence i.  Entries past a
            sequence's end may be anything.
        cache_seqlens: int32 (b,), tokens per sequence, the s_q new ones included; 0 is fine.
        softmax_scale: factor of the logits.  There is no default: DeepSeek's models want
            ``192**-0.5 * mscale**2``, FlashMLA's default is ``576**-0.5``.
        plan: from ``plan_decode`` for these ``cache_seqlens``; None plans here (and allocates).
        causal: query token s of s_q sees the first ``length - (s_q - 1 - s)`` tokens; False: all.
        out: bfloat16 or float32 (b, s_q, h, 512), contiguous; None allocates.
        lse: float32 (b, h, s_q), contiguous; None allocates.
        lse_base: ``e`` for the natural logarithm of the sum of exponentials, ``2`` for base 2.
        empty_lse: LSE of a row that sees no token, ``-inf`` or ``+inf``; its output is 0.
        out_dtype: dtype of an allocated ``out``, bfloat16 if None.
        pipeline: decode pipeline of a plan made here; must agree with a given plan.

    Returns:
        (out, lse).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        VariantError: no compiled kernel fits and none can be compiled.
    """
    _expect_query("q", q)
    _expect_cache(cache)
    b, s_q, heads, _ = q.nope.shape
    device = q.nope.device
    if cache.content.device != device:
        checks.value_error("cache", f"tensors on {device}, where q is", cache.content.device)
    checks.block_table(block_table, b, device)
    checks.lengths(cache_seqlens, b, device)
    scale = checks.softmax_scale(softmax_scale)
    if lse_base not in _LSE_FACTOR:
        checks.choice("lse_base", lse_base, _LSE_FACTOR)
    if empty_lse not in _EMPTY_LSE:
        checks.choice("empty_lse", empty_lse, _EMPTY_LSE)
    out, lse = _outputs(out, lse, (b, s_q, heads, KV_LORA_RANK), out_dtype, device)
    if b == 0:
        return out, lse
    page_size = cache.content.shape[1]
    if plan is None:
        plan = plan_decode(
            cache_seqlens,
            heads,
            s_q,
            page_size=page_size,
            max_pages=block_table.shape[1],
            pipeline=pipeline,
        )
    else:
        _check_plan(plan, b, s_q, heads, page_size, block_table, pipeline, device)
    decode_kernel, merge_kernel = _kernels(
        device, plan.pipeline, plan.row_tile, page_size, _OUT[out.dtype]
    )
    factor, empty = _LSE_FACTOR[lse_base], _EMPTY_LSE[empty_lse]
    decode_kernel(
        q.nope_u8, q.rope, q.row_scale, cache.content_u8, cache.rope, cache.scale, block_table,
        cache_seqlens, plan.work_items, plan.part_begin, out, lse, plan.o_accum, plan.lse_accum,
        scale, int(causal), factor, empty,
    )  # fmt: skip
    if plan.may_split:
        merge_kernel(plan.o_accum, plan.lse_accum, plan.split_begin, out, lse, factor, empty)
    return out, lse


def _outputs(
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    out_dtype: torch.dtype | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks or allocates the results."""
    if out_dtype is not None and out_dtype not in _OUT:
        wanted = " or ".join(checks.dtype_name(d) for d in _OUT)
        checks.type_error("out_dtype", wanted, out_dtype)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype or torch.bfloat16, device=device)
    else:
        dtypes = tuple(_OUT) if out_dtype is None else (out_dtype,)
        checks.output("out", out, dtypes, shape, device)
    b, s_q, heads, _ = shape
    if lse is None:
        lse = torch.empty((b, heads, s_q), dtype=torch.float32, device=device)
    else:
        checks.output("lse", lse, (torch.float32,), (b, heads, s_q), device, align=4)
    return out, lse


def _check_plan(
    plan: DecodePlan,
    b: int,
    s_q: int,
    heads: int,
    page_size: int,
    block_table: torch.Tensor,
    pipeline: str | None,
    device: torch.device,
) -> None:
    """Checks that ``plan`` was made for this call's shapes."""
    if not isinstance(plan, DecodePlan):
        checks.type_error("plan", "a snapmla.DecodePlan or None", type(plan).__name__)
    if plan.work_items.device != device:
        checks.value_error("plan", f"a plan on {device}, where q is", plan.work_items.device)
    got = (plan.batch, plan.s_q, plan.num_heads, plan.page_size)
    if got != (b, s_q, heads, page_size):
        names = "(b, s_q, num_heads, page_size)"
        checks.value_error("plan", f"one made for {names} = {(b, s_q, heads, page_size)}", got)
    if block_table.shape[1] != plan.max_pages:  # kernels clamp lengths by the table's own width
        hint = "slice the table, or plan with max_pages = its width"
        wanted = f"a width of {plan.max_pages}, the plan's max_pages"
        checks.value_error("block_table", wanted, block_table.shape[1], hint)
    if pipeline is not None and pipeline != plan.pipeline:
        checks.value_error("pipeline", f"{plan.pipeline!r}, as planned, or None", repr(pipeline))

"""Errors of arguments: the name, what was expected, what came, what to change."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, NoReturn

import torch

APART = "memory apart from"  # and another argument's name: what ``apart`` expects
MAX_GOT = 200  # characters of a value that a message shows
# What to change, by argument, where the check itself has no better idea.
ADVICE: dict[str, str] = {
    "q": "512 channels absorbed into the latent space, then 64 of RoPE",
    "q.nope": "make it with snapmla.quantize_q(q_nope, q_rope)",
    "q.rope": "make it with snapmla.quantize_q(q_nope, q_rope)",
    "q.scale": "make it with snapmla.quantize_q(q_nope, q_rope)",
    "cache": "make it with PagedKVCache.allocate, or from_tensors over existing memory",
    "content": "PagedKVCache.allocate shows shapes and strides; docs/formats.md draws them",
    "rope": "PagedKVCache.allocate shows shapes and strides; docs/formats.md draws them",
    "scale": "PagedKVCache.allocate shows shapes and strides; docs/formats.md draws them",
    "block": "a page of P tokens is 644 * P bytes; wrap wider pages by PagedKVCache.from_tensors",
    "rows": "512 content bytes, then 64 bfloat16 RoPE channels; docs/formats.md draws them",
    "block_table": "one row of page ids for each sequence of the batch",
    "cache_seqlens": "one length for each sequence of the batch, new tokens included",
    "where": "a 2-D block table with cache_seqlens or cu_seqlens, or 1-D indices alone",
    "indices": "flat token indices, page * page_size + offset",
    "c_kv": "the latent alone: joint[:, :512], with k_rope=joint[:, 512:]",
    "k_rope": "one row for each row of c_kv, in the same dtype",
    "slot_mapping": "one slot for each row of c_kv; -1 skips a row",
    "positions": "one row of cos_sin_cache for each token",
    "cos_sin_cache": "torch.cat([cos, sin], -1) of the 32 angles of each position",
    "is_neox": "False pairs channels 2 i and 2 i + 1, as DeepSeek's models do",
    "norm_weight": "kv_a_layernorm's weight in c_kv's dtype; leave it out for normalised c_kv",
    "norm_eps": "rms_norm_eps of the model, such as 1e-6",
    "q_nope": "queries absorbed into the latent space: joint[..., :512]",
    "q_rope": "one row for each row of q_nope, in the same dtype: joint[..., 512:]",
    "out": "leave it out to have it allocated",
    "out[0]": "leave out= away to have it allocated",
    "out[1]": "leave out= away to have it allocated",
    "out.nope": "leave out= away, or keep one QuantizedQuery for each shape",
    "out.scale": "leave out= away, or keep one QuantizedQuery for each shape and granularity",
    "lse": "heads come before query tokens; leave it out to have it allocated",
    "out_a": (
        "rows as decode gives them, of prefill 256 or 128 channels, or packed without the batch"
    ),
    "out_b": "both parts have the same rows in the same dtype",
    "lse_a": "heads come before tokens: .mT of an LSE in which they do not",
    "lse_b": "heads come before tokens: .mT of an LSE in which they do not",
    "outs": "a list of n tensors, or one that stacks them in its first dimension",
    "lses": "as outs: a list beside a list, a tensor beside a tensor; heads come before tokens",
    "o_accum": "allocate it like plan.o_accum: torch.empty_like(plan.o_accum)",
    "lse_accum": "allocate it like plan.lse_accum: torch.empty_like(plan.lse_accum)",
    "plan": "make one for this step's shapes with snapmla.plan_decode",
    "pipeline": "leave it out to let the dispatcher choose",
    "row_tile": "leave it out to let the dispatcher choose",
    "accuracy": "leave it out for FP8 products, as fast as it gets",
    "num_parts": "leave it out to fill the device",
    "fixed_split_tokens": "leave it out to cut for balance",
    "fixed_overhead": "leave it out for the measured default",
    "max_pages": "the width of the block table",
    "num_heads": "query heads of this rank; without any no call is needed",
    "s_q": "query tokens of each sequence; without any no call is needed",
    "cu_seqlens_q": "where each sequence's query tokens begin, and the end of the last",
    "total_q": "the first extent of q",
    "cu_seqlens": "where each sequence's rows begin in the packed result, and the end of the last",
    "seq_starts": "the first cached token wanted of each sequence, beside cu_seqlens",
    "total": "rows of the packed result, beside cu_seqlens",
    "row_seqlens": "for each query token how many of its sequence's cached tokens it sees",
    "topk_length": "how many entries of each row of a sequence count",
    "row_lengths": "for each query token how many entries of its row count",
    "row_blocks": "leave it out to go by how many SMs would idle",
    "check_stale": "leave it out to go by SNAPMLA_CHECK_PLAN",
    "num_pages": "pages of the pool",
    "num_kv_heads": "query heads j * g to (j + 1) * g - 1 share KV head j",
    "capacity": "plans that are not pinned; pinned ones do not count",
    "pin": "True keeps the plan for a graph until release",
    "softmax_scale": "DeepSeek models want 192**-0.5 * mscale**2; FlashMLA's default is 576**-0.5",
    "dtype": "convert the result afterwards",
    "out_dtype": "convert out afterwards",
    "granularity": "token_head is SnapMLA's, token is for one scale per query token",
    "lse_base": "e is the natural logarithm",
    "empty_lse": "-inf merges like an empty sum; FlashMLA writes +inf",
    "layout": "split is the default",
    "format": "tensors of other formats tell it by their dtype",
    "scale_fmt": "None writes fp32 scales, 'ue8m0' powers of two",
    "pages": "page numbers of source, where they are fewer than all",
    "out_pages": "page numbers of out, one for each page of source",
    "SNAPMLA_SOFTGPU_ARCH": "sm_90a is the default",
    "batch": "sequences",
    "seqlen": "tokens of a sequence",
    "card": "leave it out to ask about this machine",
    "device": "device='cpu' runs the software GPU",
    "causal": "True: query token s of s_q sees the first length - (s_q - 1 - s) tokens",
    "limit": "sequences and parts to list",
    "head_dim_v": "kernels are built for kv_lora_rank 512",
    "kv_lora_rank": "kernels are built for kv_lora_rank 512",
    "k_cache_lora": "pool.view(-1, page_size, 1, 512)",
    "k_cache_rope": "pool.view(-1, page_size, 1, 64)",
    "q_scale": "make it with quantize_ckv_per_token_head",
    "key": "latent and RoPE in one row of 576: (n, 1, 576)",
    "tile_scheduler_metadata": "make it with get_mla_metadata",
    "num_splits": "make it with get_mla_metadata; slice [:b + 1] of a longer one",
    "max_batch": "sequences of the largest batch",
}


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def class_name(value: Any) -> str:
    """A value's class, with its module where Python has one of that name too: numpy's ``bool``."""
    cls = type(value)
    alike = getattr(builtins, cls.__name__, cls) is not cls
    return f"{cls.__module__}.{cls.__name__}" if alike else cls.__name__


def value_error(name: str, expected: str, got: object, hint: str = "") -> NoReturn:
    """Raises the package's standard ValueError."""
    raise ValueError(_text(name, expected, got, hint))


def type_error(name: str, expected: str, got: object, hint: str = "") -> NoReturn:
    """Raises the package's standard TypeError."""
    raise TypeError(_text(name, expected, got, _of_a_tracer(got) or hint))


def _of_a_tracer(got: object) -> str:
    """Advice if a stand-in of torch's older tracers is in an argument's place, else empty."""
    if got == torch.fx.Proxy.__name__:
        return "torch.fx.symbolic_trace cannot record it: use make_fx or torch.compile"
    if got == torch.Tensor.__name__ and torch.jit.is_tracing():
        return "torch.jit.trace cannot record it: use make_fx or torch.compile"
    return ""


def _text(name: str, expected: str, got: object, hint: str) -> str:
    advice = hint or ADVICE.get(name) or ADVICE.get(name.partition("[")[0], "")
    got = str(got)
    got = got if len(got) <= MAX_GOT else f"{got[:MAX_GOT]}..."
    return f"{name}: expected {expected}, got {got}{f' ({advice})' if advice else ''}"


def explain(
    error: Exception, check: Callable[..., object], *arguments: Any, **options: Any
) -> None:
    """Raises what ``check`` finds wrong with a call that raised ``error``; returns if nothing.

    ``check`` launches nothing: a call is never made twice, whatever failed.
    """
    try:
        check(*arguments, **options)
    except (TypeError, ValueError) as wrong:
        refused = isinstance(error, (TypeError, ValueError))  # the same, in other words
        raise wrong from (None if refused else error)


def renamed(error: Exception, names: dict[str, str], *, advise: bool = False) -> Exception:
    """The same error with its argument called as a wrapper's caller knows it.

    Args:
        error: one of this module's, whose text starts with ``argument:``.
        names: inner argument name -> outer one; others stay.
        advise: whether advice that goes by the inner name becomes that of the outer one.
    """
    given = str(error)
    inner, colon, rest = given.partition(":")
    for name, outer in names.items():
        rest = rest.replace(f"{APART} {name},", f"{APART} {outer},")
    outer = names.get(inner, inner)
    own, theirs = ADVICE.get(outer, ""), f"({ADVICE.get(inner, '')})"
    if advise and own and rest.endswith(theirs):
        rest = f"{rest.removesuffix(theirs)}({own})"
    text = f"{outer}{colon}{rest}"
    return error if text == given else type(error)(text)

"""``append_index_k``, ``fetch_index_k``, ``index_logits``, ``index_topk``: over an index cache;
``dsa_prologue``: over that and a KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache import layouts
from snapmla.cache.fetch import Tokens
from snapmla.cache.paged import PagedKVCache
from snapmla.call.op import codes
from snapmla.indexer import fetch_index_k, index_topk
from snapmla.indexer.append_index_k import APPEND
from snapmla.indexer.dsa_prologue import Call as PrologueCall
from snapmla.indexer.dsa_prologue import Prologue
from snapmla.indexer.dsa_prologue import now as prologue_now
from snapmla.indexer.index_logits import LOGITS
from snapmla.torch_ops.operator import Operator


def _fetch_index_k_out(
    cache: Tensor,
    where: Tensor,
    cu_seqlens: Tensor | None,
    seq_starts: Tensor | None,
    keys: Tensor,
    scales: Tensor,
) -> None:
    out: Any = (keys.view(checks.FP8), scales) if keys.dtype == torch.uint8 else keys
    fetch_index_k.now(
        fetch_index_k.Fetch(cache, Tokens(where, None, cu_seqlens, seq_starts), out, None)
    )


def _dsa_prologue(
    content: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    cache_dtype: str,
    scale_fmt: str | None,
    *rest: Any,
) -> None:
    checks.choice("cache_dtype", cache_dtype, FORMATS)
    if FORMATS[cache_dtype].named:
        cache = PagedKVCache.from_tensors(content, format=cache_dtype, scale_fmt=scale_fmt)
    elif FORMATS[cache_dtype].rows:
        cache = PagedKVCache.from_tensors(content)
    else:
        cache = PagedKVCache.from_tensors(*layouts.views_of(content, rope, scale))
    *given, out_q, out_weights, out_rope = rest
    out = Prologue(codes("q", out_q), out_weights, out_rope)
    call: Any = (cache, *given, out)
    prologue_now(PrologueCall(*call))


OPERATORS = (
    *(Operator(*each) for each in APPEND.operators),
    Operator(
        "dsa_prologue(Tensor(a!) content, Tensor(b!)? rope, Tensor(c!)? scale, str cache_dtype, "
        "str? scale_fmt, Tensor c_kv, Tensor k_rope, Tensor slot_mapping, "
        "Tensor(d!) index_cache, Tensor index_k, Tensor index_slot_mapping, Tensor index_q, "
        "Tensor index_weights, Tensor? q_rope, Tensor positions, Tensor cos_sin_cache, "
        "Tensor norm_weight, Tensor index_norm_weight, Tensor index_norm_bias, float norm_eps, "
        "float index_norm_eps, float weight_scale, bool is_neox, bool index_is_neox, "
        "str index_scale, bool hadamard, Tensor(e!) out_q, Tensor(f!) out_weights, "
        "Tensor(g!)? out_rope) -> ()",
        _dsa_prologue,
    ),
    *(Operator(*each) for each in LOGITS.operators),
    *(Operator(*each) for each in index_topk.STEP.operators),
    Operator(
        "fetch_index_k_out(Tensor cache, Tensor where, Tensor? cu_seqlens, Tensor? seq_starts, "
        "Tensor(a!) keys, Tensor(b!) scales) -> ()",
        _fetch_index_k_out,
    ),
)

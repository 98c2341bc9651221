"""``quantize_q`` and ``rope_quantize_q``, and into memory of the caller; queries as pytrees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla import checks
from snapmla.cache import quant
from snapmla.cache import rope as rotary
from snapmla.cache.quant import QuantizedQuery
from snapmla.torch_ops import pytrees
from snapmla.torch_ops.operator import Operator

_ROTATED_QUERY = (
    "Tensor q_nope, Tensor q_rope, Tensor positions, Tensor cos_sin_cache, bool is_neox, "
    "str granularity"
)


def _quantize_q(q_nope: Tensor, q_rope: Tensor, granularity: str) -> tuple[Tensor, Tensor, Tensor]:
    q = quant.quantize_now(q_nope, q_rope, granularity, None)
    return q.nope_u8, q.rope, q.scale


def _quantize_q_out(
    q_nope: Tensor, q_rope: Tensor, granularity: str, nope: Tensor, rope: Tensor, scale: Tensor
) -> None:
    out = QuantizedQuery(nope.view(checks.FP8), rope, scale)
    quant.quantize_now(q_nope, q_rope, granularity, out)


def _rope_quantize_q(*query: Any) -> tuple[Tensor, Tensor, Tensor]:
    given: Any = (*query, None)
    q = rotary.quantize_now(*given)
    return q.nope_u8, q.rope, q.scale


def _rope_quantize_q_out(*arguments: Any) -> None:
    *query, nope, rope, scale = arguments
    given: Any = (*query, QuantizedQuery(nope.view(checks.FP8), rope, scale))
    rotary.quantize_now(*given)


def _fake_quantize_q(
    q_nope: Tensor, q_rope: Tensor, granularity: str
) -> tuple[Tensor, Tensor, Tensor]:
    checks.choice("granularity", granularity, quant.GRANULARITIES)
    tokens = checks.query_tokens("q_nope", q_nope)
    checks.tensor("q_nope", q_nope, checks.FLOATS, (*tokens, "num_heads", KV_LORA_RANK))
    rope_shape: checks.Shape = (*tokens, "num_heads", QK_ROPE_HEAD_DIM)
    checks.tensor("q_rope", q_rope, (q_nope.dtype,), rope_shape)
    rows = q_nope.shape[:-1]
    scales = rows if granularity == "token_head" else rows[:-1]
    return (
        q_nope.new_empty(q_nope.shape, dtype=torch.uint8),
        q_nope.new_empty(q_rope.shape, dtype=torch.bfloat16),
        q_nope.new_empty(scales, dtype=torch.float32),
    )


def _fake_rope_quantize_q(*query: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_quantize_q(query[0], query[1], query[-1])


OPERATORS = (
    Operator(
        "quantize_q(Tensor q_nope, Tensor q_rope, str granularity) -> (Tensor, Tensor, Tensor)",
        _quantize_q,
        _fake_quantize_q,
    ),
    Operator(
        "quantize_q_out(Tensor q_nope, Tensor q_rope, str granularity, Tensor(a!) nope, "
        "Tensor(b!) rope, Tensor(c!) scale) -> ()",
        _quantize_q_out,
    ),
    Operator(
        f"rope_quantize_q({_ROTATED_QUERY}) -> (Tensor, Tensor, Tensor)",
        _rope_quantize_q,
        _fake_rope_quantize_q,
    ),
    Operator(
        f"rope_quantize_q_out({_ROTATED_QUERY}, Tensor(a!) nope, Tensor(b!) rope, "
        "Tensor(c!) scale) -> ()",
        _rope_quantize_q_out,
    ),
)

_PARTS = ("nope", "rope", "scale")
pytrees.register(
    QuantizedQuery,
    lambda _: _PARTS,
    lambda leaves, _: pytrees.put_together(QuantizedQuery, dict(zip(_PARTS, leaves))),
)

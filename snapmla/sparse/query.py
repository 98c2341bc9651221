"""Queries of 16 bits as sparse decode takes them: one tensor, or content and RoPE in one each.

Kernels copy content and RoPE by a tensor map each, which has its own memory and row stride, so that
nobody need concatenate what two kernels wrote.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.dims import QK_ROPE_HEAD_DIM
from dsl_kernels.formats.format import Format
from snapmla import checks

Tensor = torch.Tensor


class QueryPair(NamedTuple):
    """A query in two tensors.

    Attributes:
        nope: bfloat16 (b, s_q, h, channels of content) or (total_q, h, ...).
        rope: bfloat16 (b, s_q, h, 64) or (total_q, h, 64).
    """

    nope: Tensor
    rope: Tensor

    @property
    def device(self) -> torch.device:
        """Device of both tensors."""
        return self.rope.device

    @property
    def named(self) -> dict[str, Tensor]:
        """The tensors as messages call them."""
        return {"q_nope": self.nope, "q_rope": self.rope}


def as_given(q: Any) -> Any:
    """A pair of tensors as ``QueryPair``, anything else as it is.

    Raises:
        TypeError: a tuple or a list of something else.
    """
    if not isinstance(q, (tuple, list)) or isinstance(q, QueryPair):
        return q
    if len(q) != 2 or not all(isinstance(part, Tensor) for part in q):
        kinds = ", ".join(checks.class_name(part) for part in q)
        checks.type_error("q", "one tensor, or (q_nope, q_rope), both", f"({kinds})")
    return QueryPair(*q)


def check_pair(q: QueryPair, record: Format) -> None:
    """Checks both tensors of a query over a cache.

    Raises:
        TypeError, ValueError: naming the tensor; a cache whose RoPE is not apart.
    """
    nope, rope = q
    if record.rope is None:
        wanted = f"one tensor of {record.channels} channels over {record.about}"
        checks.value_error("q", wanted, "(q_nope, q_rope)", "torch.cat makes one of two")
    tokens = checks.query_tokens("q_nope", nope)
    content = record.channels - QK_ROPE_HEAD_DIM
    dtypes = (torch.bfloat16,)
    checks.tensor("q_nope", nope, dtypes, (*tokens, "num_heads", content))
    outer = tuple(nope.shape[:-1])
    checks.query_rows(outer)
    checks.tensor("q_rope", rope, dtypes, (*outer, QK_ROPE_HEAD_DIM), nope.device)
    for name, part in q.named.items():
        checks.aligned_rows(name, part)
        if row_stride(part) is None:
            hint = "tokens and heads are rows for kernels: call .contiguous() once"
            wanted = "rows evenly spaced over tokens and heads"
            checks.value_error(name, wanted, f"strides {part.stride()}", hint)


def row_stride(rows: Tensor) -> int | None:
    """Elements from one row to the next of a tensor (..., channels); None where rows are not evenly
    spaced, or share memory."""
    step, count, width = 0, 1, rows.shape[-1]
    for extent, stride in zip(rows.shape[-2::-1], rows.stride()[-2::-1]):
        if extent == 1:
            continue
        if count > 1 and stride != step * count:
            return None
        step = stride if count == 1 else step
        count *= extent
    if count <= 1:
        return int(width)
    return step if step >= width else None


def arguments(q: Tensor | QueryPair, ragged: bool) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """(tensors as kernels take them, row strides) of a checked query: one tensor twice, or two."""
    if isinstance(q, Tensor):
        q = q.unsqueeze(0) if ragged else q
        return (q, q), (q.shape[-1], q.shape[-1])
    strides = tuple(row_stride(part) or part.shape[-1] for part in q)
    nope, rope = (part.unsqueeze(0) if ragged else part for part in q)
    return (nope, rope), (strides[0], strides[1])

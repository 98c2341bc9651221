"""``select_topk``: the k highest scores of each row."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from snapmla.dsa import select
from snapmla.torch_ops.operator import Operator

_ARGUMENTS = (
    "Tensor logits, Tensor lengths, int k, Tensor? block_table, int page_size, "
    "Tensor? row_starts, int next_n"
)


def _select_topk(*arguments: Any) -> tuple[Tensor, Tensor]:
    return select.select_now(select.Select(*arguments))


def _select_topk_out(*arguments: Any) -> None:
    select.select_now(select.Select(*arguments))


def _fake_select_topk(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = select.Select(*arguments)
    shape, vector = select.check_shapes(call)
    return call.lengths.new_empty(shape), call.lengths.new_empty(vector)


OPERATORS = (
    Operator(f"select_topk({_ARGUMENTS}) -> (Tensor, Tensor)", _select_topk, _fake_select_topk),
    Operator(
        f"select_topk_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) counts) -> ()",
        _select_topk_out,
    ),
)

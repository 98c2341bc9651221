"""``merge_states``: results of disjoint sets of tokens become one."""

from __future__ import annotations

from torch import Tensor

from snapmla.dense import merge
from snapmla.torch_ops.operator import Operator

_ARGUMENTS = "Tensor[] outs, Tensor[] lses, bool stacked, float lse_factor"


def _call(
    outs: list[Tensor],
    lses: list[Tensor],
    stacked: bool,
    lse_factor: float,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> merge.Merge:
    form = "stack" if stacked else "list"
    return merge.Merge(tuple(outs), tuple(lses), form, lse_factor, out, lse)


def _merge_states(
    outs: list[Tensor], lses: list[Tensor], stacked: bool, lse_factor: float
) -> tuple[Tensor, Tensor]:
    return merge.merge_now(_call(outs, lses, stacked, lse_factor))


def _merge_states_out(
    outs: list[Tensor],
    lses: list[Tensor],
    stacked: bool,
    lse_factor: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    merge.merge_now(_call(outs, lses, stacked, lse_factor, out, lse))


def _fake_merge_states(
    outs: list[Tensor], lses: list[Tensor], stacked: bool, lse_factor: float
) -> tuple[Tensor, Tensor]:
    shape, lse_shape = merge.check_parts(merge.named(outs, lses, stacked), stacked)
    return outs[0].new_empty(shape), lses[0].new_empty(lse_shape)


OPERATORS = (
    Operator(
        f"merge_states({_ARGUMENTS}) -> (Tensor, Tensor)",
        _merge_states,
        _fake_merge_states,
    ),
    Operator(
        f"merge_states_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) lse) -> ()",
        _merge_states_out,
    ),
)

"""``Witness``: what a call itself says of its query tokens, beside a plan that may be stale.

A plan is the only holder of the map from query rows to requests.  If offsets move and nobody calls
``update_``, a work item names rows of another request.  A call that gives its own offsets lets the
kernel compare each item with them: results of an item that does not agree are NaN
(``dsl_kernels/load/work_list.py``, ``WorkList.compared``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from snapmla import checks

if TYPE_CHECKING:
    from snapmla.dense.plan import DecodePlan


class Witness(NamedTuple):
    """Tensors that a call gave; None: it gave none.

    Attributes:
        cu_seqlens_q: int32 (b + 1,), with ragged queries.
        row_seqlens: int32 (b, s_q) or (total_q,), with plans that have ``row_limits``.
    """

    cu_seqlens_q: torch.Tensor | None
    row_seqlens: torch.Tensor | None

    @staticmethod
    def of(cu_seqlens_q: torch.Tensor | None, row_seqlens: torch.Tensor | None) -> Witness | None:
        """The tensors as a witness; None if none was given."""
        if cu_seqlens_q is None and row_seqlens is None:
            return None
        return Witness(cu_seqlens_q, row_seqlens)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that were given."""
        return tuple([tensor for tensor in self if tensor is not None])

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The same by name."""
        return {name: t for name, t in self._asdict().items() if t is not None}


def check_witness(plan: DecodePlan, witness: Witness | None, rows_name: str) -> None:
    """Checks that a plan can be compared with a witness.

    Args:
        rows_name: what the plan's maker calls ``row_seqlens``.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if witness is None:
        return
    offsets, limits = witness
    if offsets is not None:
        if plan.s_q is not None:
            wanted = f"None: the plan is for s_q = {plan.s_q}"
            hint = "offsets are compared with those of a plan for ragged queries"
            checks.value_error("cu_seqlens_q", wanted, "a tensor", hint)
        checks.vector("cu_seqlens_q", offsets, (plan.batch + 1,), plan.device)
    if limits is not None:
        if plan.total_q and not plan.row_limits.shape[0]:
            hint = f"they are compared with those of a plan that was made with {rows_name}"
            checks.value_error(
                "row_seqlens", f"None: the plan has no {rows_name}", "a tensor", hint
            )
        checks.vector("row_seqlens", limits, plan._shape_of_rows()[:-1], plan.device)
        if plan.s_q is None and plan.num_kv_heads > 1 and offsets is None:
            hint = "with several KV heads limits are dealt out by it"
            checks.value_error("cu_seqlens_q", "a tensor beside row_seqlens", None, hint)


def compared(tables: tuple[Any, ...], witness: Witness) -> tuple[Any, ...]:
    """``tables`` (those up to ``row_limits``, then ``cu_seqlens_q``) as a call with a witness has
    them."""
    *others, limits, offsets = tables
    own_offsets, own_limits = witness
    return (
        *others,
        limits if own_limits is None else own_limits.view(-1),
        offsets if own_offsets is None else own_offsets,
    )
